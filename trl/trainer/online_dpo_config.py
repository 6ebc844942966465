"""Configuration of `OnlineDPOTrainer`."""

import warnings
from dataclasses import dataclass
from typing import ClassVar

from trl.errors import ConfigError
from trl.trainer.arguments import OnlineDPOArguments
from trl.trainer.group_batches import GroupPlan, plan_of_prompts
from trl.trainer.online_config import OnlineConfig


@dataclass
class OnlineDPOConfig(OnlineDPOArguments, OnlineConfig):  # type: ignore[misc]  # see `TrainerConfig`
    """Options of `OnlineDPOTrainer`: those of `trl.trainer.arguments.OnlineDPOArguments` and of
    `transformers.TrainingArguments`. Batch sizes count prompts; each gets two completions.

    Raises:
        ConfigError: settings that cannot work together.
        NotSupportedError: an option whose capability this version does not have.
    """

    length_option: ClassVar[str] = "max_new_tokens"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choices({"loss_type": ("sigmoid", "ipo")})
        if isinstance(self.beta, (list, tuple)):
            self.beta = self.beta[0] if len(self.beta) == 1 else list(self.beta)
        if not self.betas or not all(isinstance(beta, (int, float)) and beta > 0.0 for beta in self.betas):
            raise ConfigError(f"`beta` must be above 0, in every epoch (got {self.beta!r}).")
        if not isinstance(self.max_length, int):
            raise ConfigError(f"`max_length` is a number of tokens (got {self.max_length!r}).")
        if self.max_new_tokens >= self.max_length:
            warnings.warn(
                f"`max_new_tokens` ({self.max_new_tokens}) leaves no room for a prompt in `max_length` "
                f"({self.max_length}): prompts keep their length. Set `max_length` above prompt plus completion.",
                stacklevel=3,
            )

    @property
    def betas(self) -> list[float]:
        """`beta` of each epoch; the last one stays."""
        return self.beta if isinstance(self.beta, list) else [self.beta]

    @property
    def group_plan(self) -> GroupPlan:
        """Two completions of each prompt."""
        return plan_of_prompts(self, group_size=2)

    @property
    def needs_reference(self) -> bool:
        """The loss compares with a reference model, always."""
        return True
