"""Callbacks that users attach or trainers attach for them."""

from typing import Any

from accelerate import Accelerator
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trl.models.reference import mix_in


class SyncRefModelCallback(TrainerCallback):
    """Pulls the reference model towards the policy every `ref_model_sync_steps` optimizer steps.

    Args:
        ref_model: the reference model.
        accelerator: unwraps the policy.
    """

    def __init__(self, ref_model: nn.Module, accelerator: Accelerator | None):
        self.ref_model = ref_model
        self.accelerator = accelerator

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Mixes the policy in where a step is due."""
        if state.global_step % args.ref_model_sync_steps == 0:  # type: ignore[attr-defined]
            policy = kwargs["model"]
            if self.accelerator is not None:
                policy = self.accelerator.unwrap_model(policy)
            mix_in(self.ref_model, policy, args.ref_model_mixup_alpha)  # type: ignore[attr-defined]
