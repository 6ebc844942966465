"""Distillation under its older path."""

from trl.trainer.distillation_config import DistillationConfig
from trl.trainer.distillation_trainer import DistillationTrainer

__all__ = ["DistillationConfig", "DistillationTrainer"]
