"""Configuration of `GRPOTrainer`."""

import warnings
from dataclasses import dataclass

from trl.errors import ConfigError, NotSupportedError
from trl.trainer.arguments import GRPOArguments
from trl.trainer.config import TrainerConfig
from trl.trainer.group_batches import resolve_batch_sizes

# Options whose capability this version does not have, with the value that means "not used".
_NOT_YET = {
    "cache_implementation": None,
    "use_transformers_continuous_batching": False,
    "transformers_continuous_batching_config": None,
    "use_transformers_paged": False,
    "max_tool_calling_iterations": None,
    "log_completions_hub_repo": None,
}


@dataclass
class GRPOConfig(GRPOArguments, TrainerConfig):  # type: ignore[misc]  # see `TrainerConfig`
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
        if self.vllm_importance_sampling_cap is not None:
            warnings.warn(
                "`vllm_importance_sampling_cap` is deprecated: use `vllm_importance_sampling_clip_max`.",
                FutureWarning,
                stacklevel=3,
            )
            self.vllm_importance_sampling_clip_max = self.vllm_importance_sampling_cap
        for name, unused in _NOT_YET.items():
            if (value := getattr(self, name)) != unused:
                raise NotSupportedError(f"`{name}={value!r}` is not supported yet: leave it out.")
        self._check_generation()
        resolve_batch_sizes(self, min_generations=2)
        self._check_loss()
        self._check_sampler_correction()

    def _check_generation(self) -> None:
        if not self.max_completion_length or self.max_completion_length < 1:
            raise ConfigError(f"`max_completion_length` must be at least 1 (got {self.max_completion_length}).")
        if self.temperature < 0:
            raise ConfigError(f"`temperature` must not be negative (got {self.temperature}).")
        parallelism = self.parallelism_config
        if parallelism is not None and (parallelism.cp_enabled or parallelism.sp_enabled):
            raise ConfigError(
                f"Context and sequence parallelism cut sequences that are not written yet (got {parallelism.cp_size} "
                f"and {parallelism.sp_size}): set `cp_size` and `sp_size` of `parallelism_config` to 1."
            )

    def _check_loss(self) -> None:
        choices = {
            "loss_type": ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"),
            "importance_sampling_level": ("token", "sequence"),
            "scale_rewards": ("group", "batch", "none"),
            "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
        }
        for name, allowed in choices.items():
            if (value := getattr(self, name)) not in allowed:
                raise ConfigError(f"`{name}` must be one of {', '.join(allowed)} (got {value!r}).")
        if not 0.0 < self.top_entropy_quantile <= 1.0:
            raise ConfigError(
                f"`top_entropy_quantile` is a share above 0 and up to 1 (got {self.top_entropy_quantile})."
            )
        if self.sync_ref_model and self.beta == 0.0:
            raise ConfigError("`sync_ref_model=True` needs a reference model: set `beta` above 0 (got 0).")
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
        low, high = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        mode = self.vllm_importance_sampling_mode
        modes = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
        if mode not in modes:
            raise ConfigError(f"`vllm_importance_sampling_mode` must be one of {', '.join(modes)} (got {mode!r}).")
        if low is not None and high is not None and low >= high:
            raise ConfigError(
                "`vllm_importance_sampling_clip_min` must be below `vllm_importance_sampling_clip_max` "
                f"(got {low} and {high})."
            )
        if mode.endswith("truncate") and low is None and high is None:
            raise ConfigError(f"`vllm_importance_sampling_mode={mode!r}` needs at least one of its two clip bounds.")
        corrected = self.use_vllm and self.vllm_importance_sampling_correction
        if corrected and self.loss_type == "vespo" and mode.startswith("sequence"):
            raise ConfigError(
                "`loss_type='vespo'` takes the sampler correction per token: set "
                "`vllm_importance_sampling_mode='token_truncate'` or 'token_mask'."
            )
