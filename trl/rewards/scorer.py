"""Rewards of N completions: calls F functions, coroutines and reward models, and checks what they return."""

import asyncio
import concurrent.futures
import functools
import inspect
import math
import threading
import warnings
import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from trl.data.formats import remove_none_values
from trl.errors import ConfigError, RewardError
from trl.rewards.format import CompletionLike

RewardFunction = Callable[..., Any]
RewardSource = str | nn.Module | RewardFunction
_Pending = concurrent.futures.Future[tuple[Any, BaseException | None]]

# what every reward function is offered besides the columns of the dataset
_OFFERED = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
# a fixed number of rows keeps the forward passes equal on all ranks, which sharded reward models rely on
_ROWS_PER_FORWARD = 32
_TOKENIZER_KWARGS = {"trust_remote_code", "revision", "token", "cache_dir"}
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_CLOSE_SECONDS = 5.0
_FLOAT32_MAX = torch.finfo(torch.float32).max


class RewardScorer:
    """Scores completions with one or several reward functions or reward models.

    Attributes:
        names: a unique name for each reward: the function's `__name__`, the class of a callable object, what a partial
            wraps, or the last part of a model id. A repeated name gets a number (`judge`, `judge_2`).
        weights: weights of the rewards, float32 `[F]`.
    """

    def __init__(
        self,
        reward_funcs: RewardSource | Sequence[RewardSource],
        *,
        reward_weights: Sequence[float] | None = None,
        reward_processing_classes: PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase | None] | None = None,
        model_init_kwargs: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        """Load what has to be loaded; nothing is scored yet.

        Args:
            reward_funcs: one or a list of: a function or `async` function (also callable objects and partials), the id
                or path of a sequence classification model, or a module.
            reward_weights: one weight for each reward; all 1 unless given.
            reward_processing_classes: one tokenizer or None for each reward. A reward model without one gets the
                tokenizer of its own id.
            model_init_kwargs: passed on to `from_pretrained` of reward models given by id.
            trust_remote_code: whether reward models and their tokenizers may run code of their own.
            device: where reward models, `weights` and the rewards live.

        Raises:
            ConfigError: no reward at all, or lists whose lengths differ from the number of rewards.
        """
        sources = [] if reward_funcs is None else _as_list(reward_funcs)
        if not sources:
            raise ConfigError("`reward_funcs` is empty: give at least one reward function or reward model.")
        weights = [1.0] * len(sources) if reward_weights is None else list(reward_weights)
        tokenizers = [None] * len(sources) if reward_processing_classes is None else _as_list(reward_processing_classes)
        for option, entries in (("reward_weights", weights), ("reward_processing_classes", tokenizers)):
            if len(entries) != len(sources):
                raise ConfigError(
                    f"`{option}` must have one entry for each of the {len(sources)} rewards (got {len(entries)})."
                )
        self.weights = torch.tensor(weights, dtype=torch.float32)
        init_kwargs = {"trust_remote_code": trust_remote_code, **(model_init_kwargs or {})}
        self._rewards = [_build(s, t, init_kwargs) for s, t in zip(sources, tokenizers, strict=True)]
        self.names = _unique([reward.name for reward in self._rewards])
        self._loop: _LoopThread | None = None
        self._checked: frozenset[str] | None = None
        self.to(device)

    @property
    def modules(self) -> list[nn.Module]:
        """The reward models, in the order of `names`."""
        return [reward.module for reward in self._rewards if isinstance(reward, _ModelReward)]

    def replace_modules(self, prepare: Callable[[nn.Module], nn.Module]) -> None:
        """Put `prepare(module)` in the place of every reward model, e.g. to wrap them for a sharded launch."""
        for reward in self._rewards:
            if isinstance(reward, _ModelReward):
                reward.module = prepare(reward.module)

    def to(self, device: torch.device | str) -> "RewardScorer":
        """This scorer, with reward models and weights moved. A model loaded with a `device_map` stays where it is."""
        self.device = torch.device(device)
        self.weights = self.weights.to(self.device)
        for reward in self._rewards:
            if isinstance(reward, _ModelReward) and not reward.placed:
                reward.module.to(self.device)
        return self

    def check(self, column_names: Iterable[str]) -> None:
        """Raise `RewardError` unless every function can be called with these dataset columns; warn of hidden ones."""
        columns = frozenset(column_names)
        if columns == self._checked:
            return
        for name, reward in zip(self.names, self._rewards, strict=True):
            missing = sorted(reward.required - columns - set(_OFFERED))
            if missing:
                raise RewardError(
                    f"reward function `{name}` needs {_columns(missing)}, which the dataset lacks (it has "
                    f"{_columns(sorted(columns))}): rename a column, or give the parameter a default."
                )
        hidden = sorted(columns & set(_OFFERED))
        if hidden:
            warnings.warn(
                f"rewards do not see the dataset's {_columns(hidden)}: rename it, the name is taken.", stacklevel=2
            )
        self._checked = columns

    def score(
        self,
        prompts: Sequence[CompletionLike],
        completions: Sequence[CompletionLike],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
        *,
        trainer_state: Any = None,
        log_extra: Callable[[str, list[Any]], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
    ) -> torch.Tensor:
        """Rewards `[N, F]`, float32, on the scorer's device. NaN where a function returned None or NaN: not scorable.

        Async functions run concurrently with each other, and beside the synchronous functions and the models. An
        exception of a function reaches the caller as it is, with a note that names the function.

        Args:
            prompts: N prompts, texts or lists of messages.
            completions: N completions, texts or lists of messages.
            completion_ids: N lists of token ids.
            columns: further columns of the dataset, N values each, passed untouched.
            trainer_state: passed on to the functions.
            log_extra: passed on; `log_extra(column, values)` adds a column to the logged table.
            log_metric: passed on; `log_metric(name, value)` logs a number.

        Raises:
            RewardError: a function misses a column, or returns something else than N finite numbers or None.
        """
        self.check(columns)
        rows = {**columns, "prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        for name, values in rows.items():
            if len(values) != len(completions):
                raise RewardError(f"column `{name}` has {len(values)} values for {len(completions)} completions.")
        arguments = {
            **rows,
            "trainer_state": trainer_state,
            "log_extra": log_extra or (lambda column, values: None),
            "log_metric": log_metric or (lambda name, value: None),
        }
        rewards_NF = torch.empty(len(completions), len(self._rewards), dtype=torch.float32)
        for index, values in enumerate(self._call_all(arguments)):
            rewards_NF[:, index] = _checked_column(values, self.names[index], len(completions))
        return rewards_NF.to(self.device)

    def close(self) -> None:
        """End the thread of the async functions, if one runs. The scorer stays usable: a later call starts another."""
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    def _call_all(self, arguments: Mapping[str, Any]) -> list[Any]:
        """What each reward returns, unchecked. The async ones start first, so that their waiting costs nothing."""
        results: list[Any] = [None] * len(self._rewards)
        pending: dict[int, _Pending] = {}
        try:
            for index, reward in enumerate(self._rewards):
                if isinstance(reward, _FunctionReward) and reward.is_async:
                    pending[index] = self._submit(functools.partial(reward, arguments))
            for index in [index for index in range(len(results)) if index not in pending]:
                with _Naming(self.names[index]):
                    results[index] = self._rewards[index](arguments)
                if inspect.isawaitable(results[index]):  # a plain function around an async one
                    pending[index] = self._submit(functools.partial(_itself, results[index]))
            for index, future in pending.items():
                with _Naming(self.names[index]):
                    results[index], fatal = future.result()
                    if fatal is not None:
                        raise fatal
        finally:
            for future in pending.values():
                future.cancel()
        return results

    def _submit(self, call: Callable[[], Awaitable[Any]]) -> _Pending:
        if self._loop is None:
            self._loop = _LoopThread()
            # a scorer that is dropped without close() must not leave its thread behind; at exit daemons just end
            weakref.finalize(self, self._loop.stop).atexit = False
        return self._loop.submit(call)


class _FunctionReward:
    """A reward function that is passed the arguments it accepts."""

    def __init__(self, function: RewardFunction) -> None:
        inner, self._bound = function, frozenset[str]()
        while isinstance(inner, functools.partial):
            self._bound |= inner.keywords.keys()
            inner = inner.func
        self.name = inner.__name__ if isinstance(inner, _Named) else type(inner).__name__
        self.is_async = inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)
        self._function = function
        self._accepted, self.required = _parameters(function)

    def __call__(self, arguments: Mapping[str, Any]) -> Any:
        # a keyword that the user bound in a partial is kept: it is the more specific wish
        names = (arguments.keys() if self._accepted is None else self._accepted & arguments.keys()) - self._bound
        return self._function(**{name: arguments[name] for name in names})


class _ModelReward:
    """A sequence classification model; the reward is its first logit."""

    required: frozenset[str] = frozenset()

    def __init__(self, module: nn.Module, tokenizer: PreTrainedTokenizerBase, name: str, placed: bool) -> None:
        self.module = module.eval()
        self.name = name
        self.placed = placed
        self._tokenizer = tokenizer
        self._pad_id = _align_padding(module, tokenizer, name)

    def __call__(self, arguments: Mapping[str, Any]) -> torch.Tensor:
        """Rewards `[N]` on the CPU. Rows go in by length, so that short ones are not padded to the longest of all."""
        texts = [self._text(p, c) for p, c in zip(arguments["prompts"], arguments["completions"], strict=True)]
        # an empty text still needs a position to read the reward from
        ids = [self._tokenizer(text, add_special_tokens=False)["input_ids"] or [self._pad_id] for text in texts]
        order = sorted(range(len(ids)), key=lambda row: len(ids[row]))
        rewards_N = torch.empty(len(ids), dtype=torch.float32)
        for start in range(0, len(ids), _ROWS_PER_FORWARD):
            rows = order[start : start + _ROWS_PER_FORWARD]
            rewards_N[rows] = self._forward([ids[row] for row in rows])
        return rewards_N

    def _text(self, prompt: CompletionLike, completion: CompletionLike) -> str:
        if isinstance(prompt, str) and isinstance(completion, str):
            return prompt + completion
        if self._tokenizer.chat_template is None:
            raise ConfigError(
                f"the tokenizer of reward model `{self.name}` has no chat template, but the prompts are conversations: "
                "give a tokenizer with one in `reward_processing_classes`, or use text prompts."
            )
        messages = remove_none_values([*prompt, *completion])
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False))

    @torch.inference_mode()
    def _forward(self, ids: list[list[int]]) -> torch.Tensor:
        first = next(self.module.parameters(), None)
        device = torch.device("cpu") if first is None else first.device
        input_ids = pad_sequence([torch.tensor(row) for row in ids], batch_first=True, padding_value=self._pad_id)
        lengths = torch.tensor([len(row) for row in ids])
        attention_mask = (torch.arange(input_ids.shape[1]) < lengths[:, None]).long()
        logits = self.module(input_ids=input_ids.to(device), attention_mask=attention_mask.to(device)).logits
        return logits[:, 0].float().cpu()


def _build(
    source: RewardSource, tokenizer: PreTrainedTokenizerBase | None, init_kwargs: Mapping[str, Any]
) -> _FunctionReward | _ModelReward:
    if not isinstance(source, str | nn.Module):
        if not callable(source):
            raise ConfigError(f"`reward_funcs` holds {source!r}: give a function, a model id, or a module.")
        return _FunctionReward(source)
    if isinstance(source, str):
        module = AutoModelForSequenceClassification.from_pretrained(source, **{**init_kwargs, "num_labels": 1})
        model_id, placed = source, any(init_kwargs.get(key) for key in ("device_map", "quantization_config"))
    else:
        module, inner = source, _pretrained(source)
        model_id = "" if inner is None else str(inner.config.name_or_path)
        placed = len({parameter.device for parameter in module.parameters()}) > 1
    name = model_id.rstrip("/").rpartition("/")[2] or type(module).__name__
    return _ModelReward(module, tokenizer or _load_tokenizer(model_id, name, init_kwargs), name, placed)


def _load_tokenizer(model_id: str, name: str, init_kwargs: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    if not model_id:
        raise ConfigError(
            f"reward model `{name}` does not say which tokenizer it needs: give it in `reward_processing_classes`."
        )
    shared = {key: init_kwargs[key] for key in _TOKENIZER_KWARGS & init_kwargs.keys()}
    return AutoTokenizer.from_pretrained(model_id, **shared)


def _align_padding(module: nn.Module, tokenizer: PreTrainedTokenizerBase, name: str) -> int:
    """The pad id that tokenizer and model now share: the reward is read at the last token that is not padding."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    pad_id = tokenizer.pad_token_id
    if not isinstance(pad_id, int):
        raise ConfigError(f"the tokenizer of reward model `{name}` has neither a pad nor an EOS token: set one.")
    inner = _pretrained(module)
    if inner is not None:
        inner.config.get_text_config().pad_token_id = pad_id
    return pad_id


def _pretrained(module: nn.Module) -> PreTrainedModel | None:
    """The outermost transformers model inside a module that may be a wrapper."""
    return next((inner for inner in module.modules() if isinstance(inner, PreTrainedModel)), None)


@runtime_checkable
class _Named(Protocol):
    __name__: str


def _parameters(function: RewardFunction) -> tuple[frozenset[str] | None, frozenset[str]]:
    """The keywords a function accepts (None: any), and those it cannot do without."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some compiled functions do not tell
        return None, frozenset()
    required = frozenset(p.name for p in parameters if p.default is p.empty and p.kind not in _VARIADIC)
    accepted = frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    return None if any(p.kind is p.VAR_KEYWORD for p in parameters) else accepted, required


def _checked_column(values: Any, name: str, count: int) -> torch.Tensor:
    """Rewards `[N]`, float32, NaN for None; `RewardError` unless `values` are `count` finite numbers or None."""
    if isinstance(values, torch.Tensor | np.ndarray):
        values = values.tolist()
    if not isinstance(values, list | tuple):
        received = "None (0 values)" if values is None else f"a {type(values).__name__} instead of a list"
    else:
        received = f"{len(values)} value{'' if len(values) == 1 else 's'}"
    if not isinstance(values, list | tuple) or len(values) != count:
        raise RewardError(
            f"reward function `{name}` returned {received} for {count} completions: "
            f"return a list of {count}, a number or None for each completion."
        )
    column = [_number(value) for value in values]
    if None in column:
        row = column.index(None)
        raise RewardError(
            f"reward function `{name}` returned {values[row]!r} for completion {row} of {count}: "
            "return a finite number, or None where a completion cannot be judged."
        )
    return torch.tensor(column, dtype=torch.float32)


def _number(value: Any) -> float | None:
    """A float that float32 can hold, NaN for None and NaN, or None for everything else."""
    if value is None:
        return math.nan
    if isinstance(value, torch.Tensor | np.ndarray | np.generic) and value.ndim == 0:
        value = value.item()
    if not isinstance(value, int | float) or abs(value) > _FLOAT32_MAX:
        return None
    return float(value)


def _unique(names: list[str]) -> list[str]:
    """The names with repeated ones numbered: two rewards never share one curve."""
    taken, unique = set(names), []
    for index, name in enumerate(names):
        if name in names[:index]:
            number = next(n for n in range(2, len(names) + 2) if f"{name}_{n}" not in taken)
            name = f"{name}_{number}"
            taken.add(name)
        unique.append(name)
    if unique != names:
        warnings.warn(
            f"several rewards have the same name; they are logged as {', '.join(unique)}. "
            "Give the functions names of their own (`__name__`) to tell them apart.",
            stacklevel=3,
        )
    return unique


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _columns(names: Sequence[str]) -> str:
    return f"column{'' if len(names) == 1 else 's'} {', '.join(f'`{name}`' for name in names) or '(none)'}"


class _Naming:
    """Adds the name of a reward function as a note to an exception that passes through."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if exc is not None:
            exc.add_note(f"raised by reward function `{self._name}`")


class _LoopThread:
    """An event loop on a daemon thread of its own, so that it works below a running loop and never delays an exit."""

    def __init__(self) -> None:
        ready: concurrent.futures.Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = concurrent.futures.Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(_serve(ready)), name="async-rewards", daemon=True)
        self._thread.start()
        self._loop, self._stopped = ready.result()

    def submit(self, call: Callable[[], Awaitable[Any]]) -> _Pending:
        """The future result of `call()`, which runs on the loop."""
        return asyncio.run_coroutine_threadsafe(_guarded(call), self._loop)

    def stop(self) -> None:
        """Ask the loop to cancel what runs and to end; does not wait."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stopped.set)

    def close(self) -> None:
        """Stop, and wait for the end, but not for long: a coroutine may block the thread."""
        self.stop()
        self._thread.join(timeout=_CLOSE_SECONDS)


async def _serve(ready: "concurrent.futures.Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]") -> None:
    stopped = asyncio.Event()
    ready.set_result((asyncio.get_running_loop(), stopped))
    await stopped.wait()


async def _guarded(call: Callable[[], Awaitable[Any]]) -> tuple[Any, BaseException | None]:
    """The result, or an exception that would end the loop and leave the caller waiting for ever."""
    try:
        return await call(), None
    except (SystemExit, KeyboardInterrupt) as exc:
        return None, exc


def _itself(value: Any) -> Any:
    return value
