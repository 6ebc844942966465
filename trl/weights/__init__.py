"""Moving parameters to an engine."""
