"""What the configs of GRPO and RLOO share."""

import warnings
from dataclasses import dataclass
from typing import ClassVar

from trl.errors import ConfigError
from trl.trainer.arguments import PolicyGradientArguments
from trl.trainer.group_batches import GroupPlan, check_eval_batch, group_plan, resolve_batch_sizes
from trl.trainer.online_config import OnlineConfig


@dataclass
class PolicyGradientConfig(PolicyGradientArguments, OnlineConfig):  # type: ignore[misc]  # see `TrainerConfig`
    """Options of the methods that reinforce groups of completions."""

    correction_modes: ClassVar[tuple[str, ...]] = (
        "token_truncate",
        "token_mask",
        "sequence_truncate",
        "sequence_mask",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vllm_importance_sampling_cap is not None:
            warnings.warn(
                "`vllm_importance_sampling_cap` is deprecated: use `vllm_importance_sampling_clip_max`.",
                FutureWarning,
                stacklevel=4,
            )
            self.vllm_importance_sampling_clip_max = self.vllm_importance_sampling_cap
        resolve_batch_sizes(self, min_generations=2)
        if self.sync_ref_model and self.beta == 0.0:
            raise ConfigError("`sync_ref_model=True` needs a reference model: set `beta` above 0 (got 0).")
        self._check_sampler_correction()

    @property
    def group_plan(self) -> GroupPlan:
        """How many completions are asked for at a time."""
        return group_plan(self)

    @property
    def needs_reference(self) -> bool:
        """Whether the loss looks at a reference model."""
        return self.beta != 0.0

    @property
    def upper_clip(self) -> float:
        """How far the ratio may rise above 1."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    def check_evaluation(self) -> None:
        """Raises `ConfigError` unless evaluation batches hold whole groups."""
        check_eval_batch(self, self.group_plan.eval_group_size)

    def _check_sampler_correction(self) -> None:
        low, high = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        mode = self.vllm_importance_sampling_mode
        self._check_choices({"vllm_importance_sampling_mode": self.correction_modes})
        if low is not None and high is not None and low >= high:
            raise ConfigError(
                "`vllm_importance_sampling_clip_min` must be below `vllm_importance_sampling_clip_max` "
                f"(got {low} and {high})."
            )
        if mode.endswith("truncate") and low is None and high is None:
            raise ConfigError(f"`vllm_importance_sampling_mode={mode!r}` needs at least one of its two clip bounds.")
