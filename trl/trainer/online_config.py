"""What the configs of the online methods share: checks, and the plan of groups that the trainer works by."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from trl.errors import ConfigError, NotSupportedError
from trl.trainer.arguments import OnlineArguments
from trl.trainer.config import TrainerConfig
from trl.trainer.group_batches import GroupPlan

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
class OnlineConfig(OnlineArguments, TrainerConfig):  # type: ignore[misc]  # see `TrainerConfig`
    """Options that every online method has.

    Raises:
        ConfigError: settings that cannot work together.
        NotSupportedError: an option whose capability this version does not have.
    """

    length_option: ClassVar[str] = "max_completion_length"
    """The option that says how long completions may be."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, unused in _NOT_YET.items():
            if name in self.__dataclass_fields__ and (value := getattr(self, name)) != unused:
                raise NotSupportedError(f"`{name}={value!r}` is not supported yet: leave it out.")
        if (length := getattr(self, self.length_option)) is None or length < 1:
            raise ConfigError(f"`{self.length_option}` must be at least 1 (got {length}).")
        if self.temperature < 0:
            raise ConfigError(f"`temperature` must not be negative (got {self.temperature}).")
        parallelism = self.parallelism_config
        if parallelism is not None and (parallelism.cp_enabled or parallelism.sp_enabled):
            raise ConfigError(
                f"Context and sequence parallelism cut sequences that are not written yet (got {parallelism.cp_size} "
                f"and {parallelism.sp_size}): set `cp_size` and `sp_size` of `parallelism_config` to 1."
            )
        if self.auto_find_batch_size:
            raise ConfigError(
                "`auto_find_batch_size` would change the groups: set `per_device_train_batch_size` instead."
            )

    @property
    @abstractmethod
    def group_plan(self) -> GroupPlan:
        """How many completions are asked for at a time."""

    @property
    def longest_completion(self) -> int:
        """Most tokens of one completion."""
        return int(getattr(self, self.length_option))

    def frozen_bytes(self, policy_bytes: int) -> int:
        """What the weights of the models beside the policy take, as far as the options tell."""
        return policy_bytes if self.needs_reference else 0

    @property
    def eval_batch_size(self) -> int:
        """Completions of one evaluation batch."""
        return self.group_plan.eval_rows

    def check_evaluation(self) -> None:
        """Raises `ConfigError` unless evaluation batches hold whole groups, as those do that count prompts."""
