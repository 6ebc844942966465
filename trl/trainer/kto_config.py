"""Configuration of `KTOTrainer`."""

import warnings
from dataclasses import dataclass

from trl.errors import ConfigError
from trl.functional.unpaired import UNPAIRED_LOSSES, UnpairedOptions
from trl.trainer.arguments import KTOArguments
from trl.trainer.offline_config import OfflineConfig


@dataclass
class KTOConfig(KTOArguments, OfflineConfig):  # type: ignore[misc]  # see `TrainerConfig`
    """Options of `KTOTrainer`: those of `trl.trainer.arguments.KTOArguments` and of `transformers.TrainingArguments`.

    Raises:
        ConfigError: settings that cannot work together.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choices({"loss_type": tuple(UNPAIRED_LOSSES)})
        if self.beta <= 0.0:
            raise ConfigError(f"`beta` must be above 0 (got {self.beta}).")
        if self.sync_ref_model and self.precompute_ref_log_probs:
            raise ConfigError("`sync_ref_model` moves the reference that `precompute_ref_log_probs` asks once.")
        if not self.needs_kl:
            return
        if min(self.per_device_train_batch_size, self.per_device_eval_batch_size) < 2:
            raise ConfigError(
                "`loss_type='kto'` puts each completion behind the prompt of another row of its batch: set "
                f"`per_device_train_batch_size` and `per_device_eval_batch_size` to 2 or more (got "
                f"{self.per_device_train_batch_size} and {self.per_device_eval_batch_size})."
            )
        if self.train_sampling_strategy != "sequential":
            raise ConfigError(
                "`loss_type='kto'` compares with the next row's completion: set `train_sampling_strategy` to "
                f"'sequential' (got {self.train_sampling_strategy!r}), and shuffle the dataset beforehand."
            )
        if self.precompute_ref_log_probs:
            warnings.warn(
                "`loss_type='kto'` asks the reference model about other pairs of prompt and completion at every step: "
                "`precompute_ref_log_probs` does not give its memory back.",
                stacklevel=3,
            )

    @property
    def needs_kl(self) -> bool:
        """Whether the loss needs an estimate of the divergence from the reference."""
        return UNPAIRED_LOSSES[self.loss_type].needs_kl

    @property
    def unpaired_options(self) -> UnpairedOptions:
        """The constants of the losses."""
        return UnpairedOptions(self.beta, self.desirable_weight, self.undesirable_weight)

    @property
    def needs_reference(self) -> bool:
        """The losses compare with a reference model, always."""
        return True
