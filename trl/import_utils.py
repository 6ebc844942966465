"""What is there, and warnings, under their documented import path."""

from trl.errors import TRLExperimentalWarning

__all__ = ["TRLExperimentalWarning"]
