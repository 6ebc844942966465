"""Rewards for the form of a completion, and the one place that finds the text of a completion."""

from collections.abc import Mapping, Sequence
from typing import Any

# what trainers hand to a reward function for one row: the messages of the turn, or a text
CompletionLike = str | Sequence[Mapping[str, Any]]


def completion_text(completion: CompletionLike) -> str:
    """The text of a completion: the content of its first message, or the completion itself when it is a text.

    Content blocks are joined in order and blocks without text are skipped. A message without content (tool calls only)
    gives "".
    """
    if isinstance(completion, str):
        return completion
    content = completion[0].get("content")
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(block["text"] for block in content if block.get("type") == "text")


def think_format_reward(completions: Sequence[CompletionLike], **kwargs: Any) -> list[float]:
    """1.0 for every completion that thinks once and finishes thinking, else 0.0.

    A completion qualifies when it starts with `<think>`, holds no second `<think>`, and holds `</think>`. What stands
    between and after the tags is free and may span lines.

    Args:
        completions: conversational completions, one list of messages a row; plain texts work too.
        **kwargs: everything else a trainer passes; ignored.

    Returns:
        One reward a completion.
    """
    return [float(_thinks_once(completion_text(completion))) for completion in completions]


def _thinks_once(text: str) -> bool:
    return text.startswith("<think>") and text.count("<think>") == 1 and "</think>" in text
