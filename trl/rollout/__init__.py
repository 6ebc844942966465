"""From rows to a training batch."""
