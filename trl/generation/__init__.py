"""Completions from somewhere."""
