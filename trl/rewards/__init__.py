"""Reward functions to pass as `reward_funcs`. Importing this package loads none of their dependencies."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trl.rewards.accuracy import accuracy_reward, reasoning_accuracy_reward
    from trl.rewards.format import think_format_reward
    from trl.rewards.shaping import (
        get_cosine_scaled_reward,
        get_repetition_penalty_reward,
        get_soft_overlong_punishment,
    )

# public name -> module that defines it
_MODULES = {
    "accuracy_reward": "trl.rewards.accuracy",
    "get_cosine_scaled_reward": "trl.rewards.shaping",
    "get_repetition_penalty_reward": "trl.rewards.shaping",
    "get_soft_overlong_punishment": "trl.rewards.shaping",
    "reasoning_accuracy_reward": "trl.rewards.accuracy",
    "think_format_reward": "trl.rewards.format",
}

__all__ = [
    "accuracy_reward",
    "get_cosine_scaled_reward",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
    "reasoning_accuracy_reward",
    "think_format_reward",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
