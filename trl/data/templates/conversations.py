"""The conversations that templates are probed with. Their words are markers: no template prints them by itself."""

import json
import re
from dataclasses import dataclass, field
from typing import Any

from trl.data.formats import Message

MARKER = re.compile(r"[A-Z]zq\w*")
"""The words of contents and of arguments."""

FUNCTION, ARGUMENT, VALUE, REASON = "fzq", "kzq", "Vzq", "Rzq"
SYSTEM: Message = {"role": "system", "content": "Szq"}
USER: Message = {"role": "user", "content": "Uzq1"}
USER_2: Message = {"role": "user", "content": "Uzq2"}
ANSWER: Message = {"role": "assistant", "content": "Azq1"}
ANSWER_2: Message = {"role": "assistant", "content": "Azq2"}
TOOL: Message = {"role": "tool", "name": FUNCTION, "content": "Tzq"}
# both of the names that templates read
REASONING: dict[str, Any] = {"reasoning_content": REASON, "thinking": REASON}
INLINE: Message = {"role": "assistant", "content": f"<think>\n{REASON}\n</think>\n\nAzq1"}

_ID = "abc123def"  # some templates want nine letters or digits
_PARAMETERS = {"type": "object", "properties": {ARGUMENT: {"type": "string"}}, "required": [ARGUMENT]}
_TOOLS = [
    {"type": "function", "function": {"name": FUNCTION, "description": "Finds.", "parameters": _PARAMETERS}},
]
_VARIABLES: list[dict[str, Any]] = [
    {"enable_thinking": False},
    {"enable_thinking": True},
    {"thinking": False},
    {"thinking": True},
    {"reasoning_effort": "low"},
]


@dataclass(frozen=True)
class Conversation:
    """Messages, and what is passed to the template beside them."""

    name: str
    messages: list[Message]
    options: dict[str, Any] = field(default_factory=dict)


def call(content: str = "", arguments: Any = None, ids: tuple[str, ...] = ("",), **more: Any) -> Message:
    """An assistant message with one call of the probe's function for each id; an empty one is left out.

    Args:
        content: text beside the calls.
        arguments: in place of the probe's dict.
        ids: of the calls.
        **more: further keys of the message.
    """
    function = {"name": FUNCTION, "arguments": {ARGUMENT: VALUE} if arguments is None else arguments}
    calls = [{"type": "function", **({"id": id_} if id_ else {}), "function": function} for id_ in ids]
    return {"role": "assistant", "content": content, "tool_calls": calls, **more}


ONE_TURN = Conversation("one turn", [USER, ANSWER])


def battery(added_token: str) -> list[Conversation]:
    """Conversations that a training variant has to render as the original does, those that the original takes.

    Args:
        added_token: one that the tokenizer knows, to stand in the text of a message.
    """
    tools = {"tools": _TOOLS}
    result = {**TOOL, "tool_call_id": _ID}
    calls = call(ids=(_ID,))
    as_json = json.dumps({ARGUMENT: VALUE})
    thinking = {**ANSWER, **REASONING}
    turns = [
        ONE_TURN,
        Conversation("system message", [SYSTEM, USER, ANSWER]),
        Conversation("two turns", [USER, ANSWER, USER_2, ANSWER_2]),
        Conversation("system message and two turns", [SYSTEM, USER, ANSWER, USER_2, ANSWER_2]),
        Conversation("three turns", [USER, ANSWER, USER_2, ANSWER_2, USER, ANSWER]),
        Conversation("white space", [USER, {**ANSWER, "content": " Azq1\n\nAzq2 \n"}, USER_2, ANSWER_2]),
        Conversation("added token", [USER, {**ANSWER, "content": f"Azq1{added_token} Azq2"}]),
        Conversation("empty answer", [USER, {**ANSWER, "content": ""}, USER_2, ANSWER_2]),
        Conversation("reasoning", [USER, thinking]),
        Conversation("reasoning in two turns", [SYSTEM, USER, thinking, USER_2, {**ANSWER_2, **REASONING}]),
        Conversation("reasoning in the text", [USER, INLINE, USER_2, INLINE]),
        Conversation("tools", [USER, ANSWER, USER_2, ANSWER_2], tools),
        Conversation("system message and tools", [SYSTEM, USER, ANSWER], tools),
        Conversation("tool call", [USER, calls, result, ANSWER], tools),
        Conversation("tool call without tools", [USER, calls, result, ANSWER]),
        Conversation("tool call without id", [USER, call(), TOOL, ANSWER], tools),
        Conversation("tool call in JSON", [USER, call("", as_json, (_ID,)), result, ANSWER], tools),
        Conversation("tool call with text", [USER, call("Azq1", ids=(_ID,)), result, ANSWER_2, USER_2, ANSWER], tools),
        Conversation("two tool calls", [USER, call(ids=(_ID, _ID)), result, result, ANSWER], tools),
        Conversation("reasoning and tool call", [USER, call(ids=(_ID,), **REASONING), result, thinking], tools),
        Conversation("two tool turns", [SYSTEM, USER, calls, result, calls, result, ANSWER, USER_2, calls], tools),
    ]
    prompts = [
        Conversation(f"{turn.name}, as a prompt", turn.messages[:-1], {**turn.options, "add_generation_prompt": True})
        for turn in turns
    ]
    variables = [
        Conversation(f"{turn.name}, {name} {value!r}", turn.messages, {**turn.options, name: value})
        for turn in [*turns[:4], prompts[0], prompts[2]]
        for options in _VARIABLES
        for name, value in options.items()
    ]
    return [*turns, *prompts, *variables]
