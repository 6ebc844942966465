"""Rewards that shape length and repetition. Each factory returns a picklable callable with a `__name__`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from trl.errors import ConfigError
from trl.rewards.accuracy import grade_answers
from trl.rewards.format import CompletionLike, completion_text


def get_cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> "CosineScaledReward":
    """A reward for correctness that prefers short right completions and long wrong ones, along half a cosine.

    A right completion falls from `max_value_correct` at length 0 to `min_value_correct` at `max_len` tokens; a wrong
    one rises from `min_value_wrong` to `max_value_wrong`. Beyond `max_len` the value stays. A row whose solution cannot
    be parsed is not scored (None).

    Args:
        max_len: number of completion tokens at which the value stops changing.
        min_value_wrong: reward of a wrong completion of length 0.
        max_value_wrong: reward of a wrong completion of `max_len` tokens or more.
        min_value_correct: reward of a right completion of `max_len` tokens or more.
        max_value_correct: reward of a right completion of length 0.

    Returns:
        `cosine_scaled_reward(completions, solution, completion_ids)`; it needs math-verify when called.

    Raises:
        ConfigError: `max_len` is not positive.
    """
    if max_len <= 0:
        raise ConfigError(f"`max_len` must be positive (got {max_len}): give a number of completion tokens.")
    return CosineScaledReward(max_len, min_value_wrong, max_value_wrong, min_value_correct, max_value_correct)


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> "RepetitionPenaltyReward":
    """A penalty for repeated n-grams of tokens: (1 − distinct / all) · `max_penalty`.

    Args:
        ngram_size: tokens in an n-gram. A completion with fewer tokens gets 0.
        max_penalty: the limit for a completion that repeats one n-gram without end; zero or negative.

    Returns:
        `repetition_penalty_reward(completion_ids)`.

    Raises:
        ConfigError: `max_penalty` is positive, or `ngram_size` is less than 1.
    """
    if max_penalty > 0:
        raise ConfigError(f"`max_penalty` must not be positive (got {max_penalty}): a penalty lowers the reward.")
    if ngram_size < 1:
        raise ConfigError(f"`ngram_size` must be at least 1 (got {ngram_size}).")
    return RepetitionPenaltyReward(ngram_size, max_penalty)


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> "SoftOverlongPunishment":
    """A penalty for long completions: 0, then linear over `soft_punish_cache` tokens, then −1 (DAPO, section 3.4).

    Args:
        max_completion_len: tokens up to which a completion is accepted; longer ones get −1.
        soft_punish_cache: width in tokens of the linear part, which ends at `max_completion_len` with −1.

    Returns:
        `soft_overlong_punishment_reward(completion_ids)`.

    Raises:
        ConfigError: `soft_punish_cache` is negative or larger than `max_completion_len`.
    """
    if not 0 <= soft_punish_cache <= max_completion_len:
        raise ConfigError(
            "`soft_punish_cache` must lie between 0 and `max_completion_len` "
            f"(got {soft_punish_cache} and {max_completion_len})."
        )
    return SoftOverlongPunishment(max_completion_len, soft_punish_cache)


@dataclass(frozen=True)
class CosineScaledReward:
    """What `get_cosine_scaled_reward` returns."""

    max_len: int
    min_value_wrong: float
    max_value_wrong: float
    min_value_correct: float
    max_value_correct: float

    __name__: ClassVar[str] = "cosine_scaled_reward"

    def __call__(
        self,
        completions: Sequence[CompletionLike],
        solution: Sequence[str | None],
        completion_ids: Sequence[Sequence[int]],
        **kwargs: Any,
    ) -> list[float | None]:
        """One reward a completion, None where the solution cannot be parsed."""
        texts = [completion_text(completion) for completion in completions]
        grades = grade_answers(texts, solution, "`get_cosine_scaled_reward`")
        return [self._scaled(grade.reward, len(ids)) for grade, ids in zip(grades, completion_ids, strict=True)]

    def _scaled(self, correct: float | None, length: int) -> float | None:
        if correct is None:
            return None
        at_max_len, at_zero = (
            (self.min_value_correct, self.max_value_correct)
            if correct
            else (self.max_value_wrong, self.min_value_wrong)
        )
        progress = min(length / self.max_len, 1.0)
        return at_max_len + 0.5 * (at_zero - at_max_len) * (1.0 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class RepetitionPenaltyReward:
    """What `get_repetition_penalty_reward` returns."""

    ngram_size: int
    max_penalty: float

    __name__: ClassVar[str] = "repetition_penalty_reward"

    def __call__(self, completion_ids: Sequence[Sequence[int]], **kwargs: Any) -> list[float]:
        """One penalty a completion, between `max_penalty` and 0."""
        return [self._penalty(ids) for ids in completion_ids]

    def _penalty(self, ids: Sequence[int]) -> float:
        total = len(ids) - self.ngram_size + 1
        if total < 1:
            return 0.0
        distinct = {tuple(ids[start : start + self.ngram_size]) for start in range(total)}
        return (1.0 - len(distinct) / total) * self.max_penalty


@dataclass(frozen=True)
class SoftOverlongPunishment:
    """What `get_soft_overlong_punishment` returns."""

    max_completion_len: int
    soft_punish_cache: int

    __name__: ClassVar[str] = "soft_overlong_punishment_reward"

    def __call__(self, completion_ids: Sequence[Sequence[int]], **kwargs: Any) -> list[float]:
        """One penalty a completion, between −1 and 0."""
        return [self._penalty(len(ids)) for ids in completion_ids]

    def _penalty(self, length: int) -> float:
        free = self.max_completion_len - self.soft_punish_cache
        if length <= free:
            return 0.0
        if length <= self.max_completion_len:
            return (free - length) / self.soft_punish_cache
        return -1.0
