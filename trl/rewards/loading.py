"""Reward functions from a command line or a YAML file, where a function can only be named."""

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from trl import rewards
from trl.errors import ConfigError

_NAMED: dict[str, Callable[[], Callable[..., Any]]] = {
    "accuracy_reward": lambda: rewards.accuracy_reward,
    "reasoning_accuracy_reward": lambda: rewards.reasoning_accuracy_reward,
    "think_format_reward": lambda: rewards.think_format_reward,
    "get_soft_overlong_punishment": lambda: rewards.get_soft_overlong_punishment(
        max_completion_len=1280, soft_punish_cache=256
    ),
}


def load_reward_function(spec: str) -> Callable[..., Any]:
    """The reward function that `spec` names.

    Args:
        spec: one of `accuracy_reward`, `reasoning_accuracy_reward`, `think_format_reward`,
            `get_soft_overlong_punishment` (with a maximum of 1280 tokens and a soft part of 256), or the dotted path of
            a function of yours, `module.function`. Modules are looked up in the working directory first.

    Raises:
        ConfigError: the name is unknown, the module does not import, or it has no such function.
    """
    if spec in _NAMED:
        return _NAMED[spec]()
    module_name, _, attribute = spec.rpartition(".")
    if not module_name or not all(part.isidentifier() for part in spec.split(".")):
        raise ConfigError(
            f"unknown reward function {spec!r}{_suggestion(spec, list(_NAMED))}: give one of "
            f"{', '.join(_NAMED)}, or a dotted path `module.function`."
        )
    function = _attribute(_import(module_name, spec), attribute, spec)
    if inspect.isclass(function) or not callable(function):
        raise ConfigError(
            f"reward function {spec!r} is not callable with completions: it is {_described(function)}. Name a function."
        )
    return function


def _import(module_name: str, spec: str) -> ModuleType:
    directory = os.getcwd()
    if directory not in sys.path:
        sys.path.insert(
            0, directory
        )  # stays, as for `python -m`: the function may import its neighbours when it is called
        importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except Exception as exc:  # the module is the user's, and its body may raise anything
        raise ConfigError(
            f"reward function {spec!r}: the module `{module_name}` does not import ({type(exc).__name__}: {exc}). "
            f"Modules are looked up in the working directory ({directory}) and among the installed packages."
        ) from exc


def _attribute(module: ModuleType, attribute: str, spec: str) -> Any:
    try:
        return getattr(module, attribute)
    except AttributeError as exc:
        raise ConfigError(
            f"reward function {spec!r}: the module `{module.__name__}` has no `{attribute}`"
            f"{_suggestion(attribute, dir(module))}."
        ) from exc


def _suggestion(word: str, words: list[str]) -> str:
    near = difflib.get_close_matches(word, words)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def _described(value: Any) -> str:
    return f"the class {value.__name__}" if inspect.isclass(value) else f"a value of type {type(value).__name__}"
