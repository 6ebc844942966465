"""What the configs of the trainers on fixed data share."""

import warnings
from dataclasses import dataclass

from trl.errors import ConfigError, NotSupportedError
from trl.trainer.arguments import OfflineArguments
from trl.trainer.config import TrainerConfig


@dataclass
class OfflineConfig(OfflineArguments, TrainerConfig):  # type: ignore[misc]  # see `TrainerConfig`
    """Options that every trainer on fixed data has.

    Raises:
        ConfigError: settings that cannot work together.
        NotSupportedError: label smoothing.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choices({"truncation_mode": ("keep_start", "keep_end")})
        if self.truncation_mode == "keep_end":
            warnings.warn("`truncation_mode='keep_end'` is deprecated.", FutureWarning, stacklevel=4)
        if self.pad_token is not None:
            warnings.warn("`pad_token` is deprecated: set it on the tokenizer.", FutureWarning, stacklevel=4)
        if self.max_length is not None and self.max_length < 2:
            raise ConfigError(f"`max_length` must be at least 2 (got {self.max_length}).")
        if self.label_smoothing_factor:
            raise NotSupportedError(
                f"`label_smoothing_factor` is not supported yet (got {self.label_smoothing_factor}): leave it out."
            )
        if self.include_num_input_tokens_seen != "no":
            raise ConfigError("`include_num_input_tokens_seen` is not needed: the logs have `num_tokens` anyway.")
        if self.auto_find_batch_size:
            raise ConfigError(
                "`auto_find_batch_size` is not needed: `max_tokens_per_micro_batch` bounds what a forward pass takes."
            )
