"""Configuration of `SFTTrainer`."""

import warnings
from dataclasses import dataclass

from trl.errors import ConfigError
from trl.trainer.arguments import SFTArguments
from trl.trainer.offline_config import OfflineConfig


@dataclass
class SFTConfig(SFTArguments, OfflineConfig):  # type: ignore[misc]  # see `TrainerConfig`
    """Options of `SFTTrainer`: those of `trl.trainer.arguments.SFTArguments` and of `transformers.TrainingArguments`.

    Raises:
        ConfigError: settings that cannot work together.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choices(
            {"packing_strategy": ("bfd", "bfd_split", "wrapped"), "loss_type": ("nll", "dft", "chunked_nll")}
        )
        if self.loss_type == "chunked_nll":
            warnings.warn("`loss_type='chunked_nll'` is what 'nll' is: use that.", FutureWarning, stacklevel=3)
            self.loss_type = "nll"
        if self.eval_packing is None:
            self.eval_packing = self.packing
        if (self.packing or self.eval_packing) and self.max_length is None:
            raise ConfigError("`packing` fills rows of `max_length` tokens (got None): set it.")

    @property
    def skips_preparation(self) -> bool:
        """Whether the rows are tokens already."""
        assert not isinstance(self.dataset_kwargs, str)  # the parent made a dict of it
        return bool((self.dataset_kwargs or {}).get("skip_prepare_dataset"))
