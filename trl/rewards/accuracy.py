"""Rewards for mathematical correctness, graded with math-verify."""

import logging
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from trl import _deps
from trl.rewards.format import CompletionLike, completion_text

LogExtra = Callable[[str, list[Any]], None]

PARSE_SECONDS = 10
VERIFY_SECONDS = 5
UNPARSEABLE = "[unparseable]"
SKIPPED = "[skipped]"
INCOMPLETE_REASONING = "[incomplete reasoning]"


class Grade(NamedTuple):
    """The reward of one completion, None without a usable gold answer, and the texts that were compared."""

    reward: float | None
    gold: str
    answer: str


def accuracy_reward(
    completions: Sequence[CompletionLike],
    solution: Sequence[str | None],
    log_extra: LogExtra | None = None,
    **kwargs: Any,
) -> list[float | None]:
    r"""1.0 where the final answer of a completion equals its solution, 0.0 where it does not, None without a solution.

    The solution is parsed as LaTeX or as a plain expression. The answer must be LaTeX: `\boxed{…}` is tried first, then
    a phrase such as "the answer is $…$". Units are ignored. In the main thread parsing is cut off after 10 s and
    comparing after 5 s, either of which counts as a failure; in other threads there is no limit.

    Args:
        completions: conversational completions, one list of messages a row; plain texts work too.
        solution: the dataset column with the gold answers. A row whose solution holds no answer is not scored.
        log_extra: given by the trainer; receives the columns `solution`, `gold_parsed` and `answer_parsed`.
        **kwargs: everything else a trainer passes; ignored.

    Returns:
        One reward a completion.

    Raises:
        MissingDependencyError: math-verify is not installed.
    """
    grades = grade_answers([completion_text(c) for c in completions], solution, "`accuracy_reward`")
    return _log(grades, solution, log_extra)


def reasoning_accuracy_reward(
    completions: Sequence[CompletionLike],
    solution: Sequence[str | None],
    reasoning_delimiters: Sequence[str] | None = None,
    log_extra: LogExtra | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """As `accuracy_reward`, for the text after the reasoning alone; 0.0 where the reasoning does not end.

    Args:
        completions: conversational completions, one list of messages a row; plain texts work too.
        solution: the dataset column with the gold answers.
        reasoning_delimiters: texts that end the reasoning, `["</think>"]` unless given. The first of them that occurs
            in a completion is used, and what follows its last occurrence is graded. A completion without any is
            incomplete: its reward is 0.0, also where the solution cannot be parsed.
        log_extra: given by the trainer; receives the columns `solution`, `gold_parsed` and `answer_parsed`.
        **kwargs: everything else a trainer passes; ignored.

    Returns:
        One reward a completion.

    Raises:
        MissingDependencyError: math-verify is not installed.
    """
    delimiters = ["</think>"] if reasoning_delimiters is None else reasoning_delimiters
    answers = [_after_reasoning(completion_text(c), delimiters) for c in completions]
    return _log(grade_answers(answers, solution, "`reasoning_accuracy_reward`"), solution, log_extra)


def grade_answers(answers: Sequence[str | None], solutions: Sequence[str | None], purpose: str) -> list[Grade]:
    """Grades of answers against solutions, one each; an answer of None is incomplete and graded 0.0.

    Args:
        answers: texts that should hold a final answer.
        solutions: texts that hold the gold answer; None or a text without an answer makes the grade None.
        purpose: what asks, for the message when math-verify is missing, e.g. "`accuracy_reward`".

    Raises:
        MissingDependencyError: math-verify is not installed.
    """
    _deps.require("math_verify", purpose)
    _silence_time_limit_advice()
    texts = [
        None if solution is None else str(solution) for solution in solutions
    ]  # a column of numbers serves as well
    golds = {text: _parse_gold(text) for text in dict.fromkeys(texts)}  # a group shares its solution: parse it once
    return [_grade(answer, golds[text]) for answer, text in zip(answers, texts, strict=True)]


def _grade(answer: str | None, gold: list[Any]) -> Grade:
    from math_verify import verify

    if answer is None:
        return Grade(0.0, _shown(gold), INCOMPLETE_REASONING)
    if not gold:
        return Grade(None, UNPARSEABLE, SKIPPED)
    parsed = _parse_answer(answer)
    correct = verify(gold, parsed, timeout_seconds=_limit(VERIFY_SECONDS))
    return Grade(float(correct), _shown(gold), _shown(parsed))


def _parse_gold(text: str | None) -> list[Any]:
    from math_verify import parse

    return [] if text is None else parse(text, parsing_timeout=_limit(PARSE_SECONDS))


def _parse_answer(text: str) -> list[Any]:
    from math_verify import parse

    limit = _limit(PARSE_SECONDS)
    return parse(text, extraction_config=[_answer_config()], extraction_mode="first_match", parsing_timeout=limit)


@cache
def _answer_config() -> Any:
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig

    return LatexExtractionConfig(
        try_extract_without_anchor=False,
        boxed_match_priority=0,
        normalization_config=NormalizationConfig(units=True),
    )


def _after_reasoning(text: str, delimiters: Sequence[str]) -> str | None:
    used = next((delimiter for delimiter in delimiters if delimiter in text), None)
    return None if used is None else text.rpartition(used)[2]


def _shown(parsed: list[Any]) -> str:
    # the extracted text, not the expression: printing an expression evaluates it, which for 10^{10^{10}} never ends
    return next((part for part in parsed if isinstance(part, str)), UNPARSEABLE)


def _limit(seconds: int) -> int | None:
    # math-verify enforces limits by a signal, which only the main thread can receive
    return seconds if threading.current_thread() is threading.main_thread() else None


def _log(grades: list[Grade], solutions: Sequence[str | None], log_extra: LogExtra | None) -> list[float | None]:
    if log_extra is not None:
        log_extra("solution", list(solutions))
        log_extra("gold_parsed", [grade.gold for grade in grades])
        log_extra("answer_parsed", [grade.answer for grade in grades])
    return [grade.reward for grade in grades]


@cache
def _silence_time_limit_advice() -> None:
    # math-verify advises to set time limits when it runs without; outside the main thread that cannot be followed
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).addFilter(_is_no_time_limit_advice)


def _is_no_time_limit_advice(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Timeout is disabled")
