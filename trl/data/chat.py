"""Chat templates: rows to text, prompts to token ids, token ids back to completions. No tokenizer is ever changed."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from trl.data.formats import Message, common_prefix_length, is_conversational, is_messages, remove_none_values
from trl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

Prompt = str | list[Message]
Tools = Sequence[dict[str, Any] | Callable[..., Any]] | str

# the columns that are read, and what may come together
_COLUMNS = frozenset({"messages", "prompt", "completion", "chosen", "rejected", "label"})
_COLUMN_SETS = (
    {"messages"},
    {"prompt"},
    {"prompt", "completion"},
    {"prompt", "completion", "label"},
    {"prompt", "chosen", "rejected"},
    {"chosen", "rejected"},
)
_GENERATE = {"add_generation_prompt": True}
_CONTINUE = {"continue_final_message": True}
_ENDINGS = {"user": _GENERATE, "tool": _GENERATE, "assistant": _CONTINUE}
_MARKER = re.compile(r"\{%[-+]?\s*generation\b")  # where a template marks what the assistant writes


class ColumnError(DataError, KeyError):
    """A row whose columns are not those of any format."""

    __str__ = Exception.__str__  # a KeyError would print the repr of its text


class AssistantMaskError(DataError, RuntimeError):
    """A conversation in which the chat template marks no token as the assistant's."""


def apply_chat_template(
    example: Mapping[str, Any],
    processing_class: "PreTrainedTokenizerBase | ProcessorMixin",
    tools: Tools | None = None,
    **template_kwargs: Any,
) -> dict[str, Any]:
    """The messages of a row as text: `messages` becomes `text`, the other columns keep their names; `label` is kept.

    A prompt that ends with a user or tool message gets the generation prompt, one that ends with an assistant message
    is left open. With completions, the prompt is the part that its text shares with prompt + completion, and the
    completion is the rest, so that the two join to what the template makes of the whole conversation.

    Args:
        example: columns messages | prompt | prompt, completion[, label] | [prompt,] chosen, rejected. Other columns
            are left out of the result, except that `chat_template_kwargs` is read, as is `tools` where none are given.
        processing_class: tokenizer or processor with a chat template.
        tools: JSON schemas, functions, or a JSON string of schemas; an empty list is no tools.
        **template_kwargs: variables for the template; those of the row come first.

    Raises:
        DataError: a prompt that ends with another role, or a column that does not hold messages.
        KeyError: any other set of columns.
    """
    columns = _COLUMNS & set(example)
    if columns not in _COLUMN_SETS:
        choices = "; ".join(", ".join(sorted(choice)) for choice in _COLUMN_SETS)
        raise ColumnError(
            f"No format has the columns {', '.join(sorted(columns)) or '(none)'}. Choose from: {choices}."
        )
    row_kwargs = remove_none_values(example.get("chat_template_kwargs") or {})
    options = {**template_kwargs, **row_kwargs, "tools": _clean_tools(tools or example.get("tools"))}
    rows = {column: _clean_messages(example[column], column) for column in columns - {"label"}}

    def render(messages: list[Message], **ending: bool) -> str:
        return cast(str, processing_class.apply_chat_template(messages, tokenize=False, **{**ending, **options}))

    if "messages" in rows:
        return {"text": render(rows["messages"])}
    if "prompt" not in rows:
        return {column: render(rows[column]) for column in ("chosen", "rejected")}
    prompt = rows.pop("prompt")
    text = render(prompt, **_ending(prompt))
    whole = {column: render(prompt + messages) for column, messages in rows.items()}
    text = text[: min(common_prefix_length(text, value) for value in whole.values())] if whole else text
    label = {"label": example["label"]} if "label" in columns else {}
    return {"prompt": text, **{column: value[len(text) :] for column, value in whole.items()}, **label}


def maybe_apply_chat_template(
    example: Mapping[str, Any],
    processing_class: "PreTrainedTokenizerBase | ProcessorMixin",
    tools: Tools | None = None,
    **template_kwargs: Any,
) -> Mapping[str, Any]:
    """What `apply_chat_template` makes of a row with messages; a row of text unchanged."""
    if not is_conversational(example):
        return example
    return apply_chat_template(example, processing_class, tools, **template_kwargs)


def encode_text(text: str, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Token ids of a plain text, with the special tokens the tokenizer adds, and BOS once where it has one."""
    return single_bos(tokenizer(text)["input_ids"], tokenizer)


def single_bos(ids: list[int], tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """The ids with a run of BOS at their start cut down to one. BOS is not added."""
    run = next((i for i, token in enumerate(ids) if token != tokenizer.bos_token_id), len(ids))
    return ids[max(run - 1, 0) :]


def single_eos(ids: Sequence[int], tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """The ids with exactly one EOS at their end; as they are if the tokenizer has no EOS."""
    eos = tokenizer.eos_token_id
    if eos is None:
        return list(ids)
    end = len(ids)
    while end > 0 and ids[end - 1] == eos:
        end -= 1
    return [*ids[:end], eos]


def encode_prompt(
    prompt: Prompt,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    tools: Tools | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids a completion starts from; never empty, and BOS at most once.

    Messages go through the chat template, with the generation prompt, or left open where an assistant message is the
    last. The template alone decides about BOS then; for a string the tokenizer does. An empty string is BOS.

    Args:
        prompt: a string, or a list of messages.
        tokenizer: with a chat template if the prompt is a list.
        tools: JSON schemas, functions, or a JSON string of schemas; an empty list is no tools.
        chat_template_kwargs: variables for the template; None values are left out.

    Raises:
        DataError: neither a string nor a list of messages; nothing to start from; no chat template.
    """
    if isinstance(prompt, str):
        ids = encode_text(prompt, tokenizer)
    else:
        ids = _encode_messages(_clean_messages(prompt, "prompt"), tokenizer, tools, chat_template_kwargs or {})
    if ids:
        return ids
    if tokenizer.bos_token_id is None:
        raise DataError(
            f"The prompt {prompt!r} has no tokens, and the tokenizer has no BOS token to start from: "
            "remove the row, or write a prompt."
        )
    return [tokenizer.bos_token_id]


def _encode_messages(
    messages: list[Message],
    tokenizer: "PreTrainedTokenizerBase",
    tools: Tools | None,
    chat_template_kwargs: Mapping[str, Any],
) -> list[int]:
    """Token ids of the rendered messages; the text gets no special tokens but those of the template."""
    ending = _ENDINGS.get(messages[-1]["role"], _GENERATE)
    if ending is _CONTINUE and "content" not in messages[-1]:
        raise DataError(
            f"The prompt ends with an assistant message without content, which cannot be continued: {messages[-1]!r}. "
            "Add the tool's answer, or remove the message."
        )
    options = {**ending, **_template_options("prompt", tokenizer, tools, chat_template_kwargs)}
    ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    return single_bos(cast(list[int], ids), tokenizer)


def encode_conversation(
    messages: list[Message],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    column: str = "messages",
    tools: Tools | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a whole conversation, without a generation prompt; BOS at most once, where the template puts it.

    Args:
        messages: at least one.
        tokenizer: with a chat template.
        column: what errors call the messages.
        tools: JSON schemas, functions, or a JSON string of schemas; an empty list is no tools.
        chat_template_kwargs: variables for the template; None values are left out.

    Raises:
        DataError: not a list of messages, or no chat template.
    """
    options = _template_options(column, tokenizer, tools, chat_template_kwargs or {})
    messages = _clean_messages(messages, column)
    ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    return single_bos(cast(list[int], ids), tokenizer)


def encode_marked_conversation(
    messages: list[Message],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    column: str = "messages",
    tools: Tools | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[list[int], list[bool]]:
    """The ids of `encode_conversation`, and of each whether the template marks it as written by the assistant.

    The marks are `{% generation %}` and `{% endgeneration %}` in the chat template.

    Raises:
        AssistantMaskError: no token is marked.
        DataError: not a list of messages, or no chat template.
    """
    options = _template_options(column, tokenizer, tools, chat_template_kwargs or {})
    messages = _clean_messages(messages, column)
    encoded = cast(
        Mapping[str, list[int]],
        tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **options
        ),
    )
    ids = single_bos(encoded["input_ids"], tokenizer)
    mask = [bool(mark) for mark in encoded["assistant_masks"][len(encoded["input_ids"]) - len(ids) :]]
    if not any(mask):
        template = tokenizer.get_chat_template(options.get("chat_template"), options["tools"])
        raise AssistantMaskError(_why_nothing_is_marked(column, template))
    return ids, mask


class EncodedCompletions(NamedTuple):
    """Completions of one prompt as tokens.

    Attributes:
        wholes: ids of prompt and completion, one list for each completion.
        start: number of tokens at which all completions start.
        merged: whether the prompt's own tokens reach beyond that.
    """

    wholes: list[list[int]]
    start: int
    merged: bool


def encode_completions(
    prompt: Prompt,
    completions: Mapping[str, Any],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    tools: Tools | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> EncodedCompletions:
    """Prompt and completion as one, for each of the completions, and where the completions start.

    They start behind the tokens that all wholes share with the prompt alone, which for messages has the generation
    prompt unless the assistant's message is the last. So a token that is part of both belongs to the completion. A
    text ends with exactly one EOS; messages end as the template ends them.

    Args:
        prompt: a text, or messages; an empty list for completions that are whole conversations.
        completions: at least one, by column, of the type of the prompt.
        tokenizer: with a chat template if there are messages.
        tools, chat_template_kwargs: as in `encode_prompt`.

    Raises:
        DataError: what is no message; no chat template.
    """
    if isinstance(prompt, str):
        alone = encode_text(prompt, tokenizer)
        wholes = [single_eos(encode_text(prompt + text, tokenizer), tokenizer) for text in completions.values()]
        # an EOS that the tokenizer puts behind every text is not part of the prompt
        appended = [tokenizer.eos_token_id]
    else:
        options: dict[str, Any] = {"tools": tools, "chat_template_kwargs": chat_template_kwargs}
        alone = _encode_prompt_messages(prompt, tokenizer, options) if prompt else []
        wholes = [
            encode_conversation(prompt + _clean_messages(messages, column), tokenizer, column=column, **options)
            for column, messages in completions.items()
        ]
        appended = []
    start = min(common_prefix_length(alone, whole) for whole in wholes)
    return EncodedCompletions(wholes, start, merged=alone[start:] not in ([], appended))


def _encode_prompt_messages(
    prompt: list[Message], tokenizer: "PreTrainedTokenizerBase", options: dict[str, Any]
) -> list[int]:
    last = prompt[-1]
    if isinstance(last, dict) and last.get("role") == "assistant":
        # before further messages it is rendered as one that has ended, so it is not left open
        return encode_conversation(prompt, tokenizer, column="prompt", **options)
    return encode_prompt(prompt, tokenizer, **options)


def _why_nothing_is_marked(column: str, template: str) -> str:
    if _MARKER.search(template):
        return (
            f"The chat template marks no token of `{column}` as the assistant's: there is no assistant message, or "
            "`{% generation %}` in the template does not enclose its content. Remove the row, or correct the template."
        )
    return (
        "The chat template has no `{% generation %}` and `{% endgeneration %}` around what the assistant writes, so "
        f"which tokens of `{column}` are the assistant's is unknown: use a template that has them, or turn "
        "`assistant_only_loss` off."
    )


def _template_options(
    column: str,
    tokenizer: "PreTrainedTokenizerBase",
    tools: Tools | None,
    chat_template_kwargs: Mapping[str, Any],
) -> dict[str, Any]:
    """Variables for the template; `DataError` where the tokenizer has none."""
    if tokenizer.chat_template is None:
        raise DataError(
            f"`{column}` is a list of messages, but the tokenizer has no chat template: "
            "set `tokenizer.chat_template`, or use strings."
        )
    return {**remove_none_values(dict(chat_template_kwargs)), "tools": _clean_tools(tools)}


def decode_completions(
    completion_ids: Sequence[Sequence[int]], prompts: Sequence[Prompt], tokenizer: "PreTrainedTokenizerBase"
) -> list[str | list[Message]]:
    """Completions in the format of their prompts: text, or a list of one assistant message. No special tokens.

    Where the prompt's last assistant message is continued, the content is the new text alone.

    Args:
        completion_ids: N sequences of token ids.
        prompts: the N prompts they complete.
        tokenizer: decodes.
    """
    texts = [cast(str, tokenizer.decode(list(ids), skip_special_tokens=True)) for ids in completion_ids]
    return [
        [{"role": "assistant", "content": text}] if is_messages(prompt) else text
        for text, prompt in zip(texts, prompts, strict=True)
    ]


def _ending(prompt: list[Message]) -> dict[str, bool]:
    """How a prompt is closed, by the role of its last message."""
    role = prompt[-1]["role"]
    if role not in _ENDINGS:
        raise DataError(f"The prompt ends with a message of role {role!r}: end it with user, tool or assistant.")
    return _ENDINGS[role]


def _clean_messages(value: Any, column: str) -> list[Message]:
    """The messages without the fields a table format filled in; `DataError` if the value is no list of messages."""
    if not isinstance(value, list) or not value:
        raise DataError(
            f"`{column}` is {value!r}: use a string, or a list of messages "
            '`{"role": …, "content": …}` with at least one message.'
        )
    for index, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"Message {index} of `{column}` is {message!r}: a message is a dict with a `role`.")
    messages = remove_none_values(value)
    for index, message in enumerate(messages):
        if len(message) == 1:
            raise DataError(f"Message {index} of `{column}` is {value[index]!r}: it has a role but no content.")
    return messages


def _clean_tools(tools: Tools | None) -> list[Any] | None:
    """Schemas and functions as a list; None for no tools, because some templates print a header for an empty list."""
    if tools and isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise DataError(f"`tools` is a string, but not JSON: {error}. Write a JSON list of schemas.") from error
    if isinstance(tools, dict):
        raise DataError(f"`tools` is one dict: {tools!r}. Write a list of schemas.")
    return remove_none_values(list(tools)) if tools else None
