"""Configuration of `GRPOTrainer`."""

import warnings
from dataclasses import dataclass
from typing import get_args

from trl.errors import ConfigError
from trl.trainer.arguments import GRPOArguments, LossType
from trl.trainer.policy_gradient_config import PolicyGradientConfig


@dataclass
class GRPOConfig(GRPOArguments, PolicyGradientConfig):  # type: ignore[misc]  # see `TrainerConfig`
    """Options of `GRPOTrainer`: those of `trl.trainer.arguments.GRPOArguments` and of
    `transformers.TrainingArguments`.

    Raises:
        ConfigError: settings that cannot work together.
        NotSupportedError: an option whose capability this version does not have.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.scale_rewards, bool):
            self.scale_rewards = "group" if self.scale_rewards else "none"
        self._check_loss()

    def _check_loss(self) -> None:
        self._check_choices(
            {
                "loss_type": get_args(LossType),
                "importance_sampling_level": ("token", "sequence"),
                "scale_rewards": ("group", "batch", "none"),
                "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
            }
        )
        if not 0.0 < self.top_entropy_quantile <= 1.0:
            raise ConfigError(
                f"`top_entropy_quantile` is a share above 0 and up to 1 (got {self.top_entropy_quantile})."
            )
        if self.delta is not None and self.loss_type in ("cispo", "sapo", "vespo"):
            warnings.warn(f"`delta` has no effect with `loss_type={self.loss_type!r}`.", stacklevel=4)
        level = self.importance_sampling_level
        if self.loss_type == "luspo" and level != "sequence":
            warnings.warn("`loss_type='luspo'` is meant for `importance_sampling_level='sequence'`.", stacklevel=4)
        if self.loss_type == "vespo" and level != "token":
            warnings.warn("`loss_type='vespo'` has its own sequence weight: use the token level.", stacklevel=4)
        if level == "sequence" and self.loss_type in ("bnpo", "dr_grpo", "dapo", "cispo"):
            warnings.warn(
                f"The sequence level with `loss_type={self.loss_type!r}` weighs long sequences more: GSPO uses 'grpo'.",
                stacklevel=4,
            )

    def _check_sampler_correction(self) -> None:
        super()._check_sampler_correction()
        mode = self.vllm_importance_sampling_mode
        corrected = self.use_vllm and self.vllm_importance_sampling_correction
        if corrected and self.loss_type == "vespo" and mode.startswith("sequence"):
            raise ConfigError(
                "`loss_type='vespo'` takes the sampler correction per token: set "
                "`vllm_importance_sampling_mode='token_truncate'` or 'token_mask'."
            )
