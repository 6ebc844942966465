"""Configuration of `RLOOTrainer`."""

from dataclasses import dataclass
from typing import ClassVar

from trl.errors import ConfigError
from trl.trainer.arguments import RLOOArguments
from trl.trainer.policy_gradient_config import PolicyGradientConfig


@dataclass
class RLOOConfig(RLOOArguments, PolicyGradientConfig):  # type: ignore[misc]  # see `TrainerConfig`
    """Options of `RLOOTrainer`: those of `trl.trainer.arguments.RLOOArguments` and of
    `transformers.TrainingArguments`.

    Raises:
        ConfigError: settings that cannot work together.
        NotSupportedError: an option whose capability this version does not have.
    """

    # The policy ratio is that of whole sequences, and so is the correction.
    correction_modes: ClassVar[tuple[str, ...]] = ("sequence_truncate", "sequence_mask")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reward_clip_range is None:
            return
        bounds = tuple(self.reward_clip_range)
        if len(bounds) != 2 or bounds[0] >= bounds[1]:
            raise ConfigError(f"`reward_clip_range` is two numbers, the lowest and the highest reward (got {bounds}).")
        self.reward_clip_range = bounds
