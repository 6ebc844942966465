"""Online DPO."""

from trl.trainer.online_dpo_config import OnlineDPOConfig
from trl.trainer.online_dpo_trainer import OnlineDPOTrainer

__all__ = ["OnlineDPOConfig", "OnlineDPOTrainer"]
