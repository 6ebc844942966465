"""Loading and running a model."""
