"""Distillation from a teacher behind `vllm serve`."""

from trl.trainer.distillation_config import ServerDistillationConfig
from trl.trainer.server_distillation_trainer import ServerDistillationTrainer

__all__ = ["ServerDistillationConfig", "ServerDistillationTrainer"]
