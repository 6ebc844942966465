"""What a chat template does, seen from outside: marker words are rendered, and one looks where they come out."""

import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from jinja2 import TemplateError

from trl.data.formats import Message, common_prefix_length
from trl.data.templates.conversations import (
    ANSWER,
    ANSWER_2,
    ARGUMENT,
    FUNCTION,
    INLINE,
    MARKER,
    REASON,
    REASONING,
    TOOL,
    USER,
    USER_2,
    VALUE,
    call,
)
from trl.data.templates.source import has_generation_markers, remove_generation
from trl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

# What a template raises on messages it does not take: `raise_exception`, an undefined variable, or Python's own error
# for an expression such as `none + 'text'`.
_REFUSALS = (TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError)


@dataclass(frozen=True)
class Renderer:
    """A template with the tokenizer that renders it.

    Attributes:
        tokenizer: its own template is not used.
        template: Jinja source.
        as_blocks: whether the template reads content as a list of blocks only, as some of vision models do.
    """

    tokenizer: "PreTrainedTokenizerBase"
    template: str
    as_blocks: bool = False

    def using(self, template: str) -> "Renderer":
        """The same tokenizer with another template."""
        return replace(self, template=template)

    def text(self, messages: list[Message], **options: Any) -> str | None:
        """The rendered messages, or None where the template refuses them."""
        try:
            return cast(str, self._apply(messages, tokenize=False, **options))
        except _REFUSALS:
            return None

    def ids(self, messages: list[Message]) -> list[int] | None:
        """Token ids of the rendered messages, or None where the template refuses them."""
        try:
            return cast(list[int], self._apply(messages, tokenize=True, return_dict=False))
        except _REFUSALS:
            return None

    def assistant_mask(self, messages: list[Message]) -> tuple[list[int], list[int]]:
        """Token ids and 0/1 mask `[T]` of what the template marks as the assistant's."""
        encoded = self._apply(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return encoded["input_ids"], encoded["assistant_masks"]

    def _apply(self, messages: list[Message], **options: Any) -> Any:
        if self.as_blocks:
            messages = [{**message, "content": _block(message["content"])} for message in messages]
        return self.tokenizer.apply_chat_template(messages, chat_template=self.template, **options)

    def starts_token(self, text: str, index: int) -> bool:
        """Whether a token covers the character at an index; none does in white space that a tokenizer skips."""
        if not self.tokenizer.is_fast:
            return True
        return self.tokenizer(text, add_special_tokens=False).char_to_token(index) is not None

    def added_tokens(self, text: str) -> list[tuple[int, int]]:
        """Start and end of the added tokens in a text."""
        return [match.span() for match in self._added.finditer(text)]

    @cached_property
    def _added(self) -> re.Pattern[str]:
        tokens = {*self.tokenizer.get_added_vocab(), *self.tokenizer.all_special_tokens}
        # runs of blanks are tokens of their own in some vocabularies; they end nothing
        words = sorted((token for token in tokens if token.strip("\n\t\r ▁")), key=lambda token: (-len(token), token))
        return re.compile("|".join(map(re.escape, words)) or r"(?!)")


def _block(content: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}]


def renderer_of(processing_class: "PreTrainedTokenizerBase | ProcessorMixin") -> Renderer:
    """The template of a tokenizer or processor, ready to be probed; of several named ones, `default`.

    Raises:
        ConfigError: no template, or none that is called `default`.
    """
    from transformers import ProcessorMixin

    template: Any = processing_class.chat_template
    tokenizer: Any = processing_class
    if isinstance(processing_class, ProcessorMixin):
        tokenizer = processing_class.tokenizer
        template = tokenizer.chat_template if template is None else template
    if isinstance(template, dict):
        if "default" not in template:
            names = ", ".join(template)
            raise ConfigError(f"The chat templates are called {names}, and none `default`: set `chat_template` to one.")
        template = template["default"]
    if template is None:
        raise ConfigError("The tokenizer has no chat template: set `tokenizer.chat_template`, or clone one.")
    renderer = Renderer(tokenizer, template)
    blocks = replace(renderer, as_blocks=True)
    word = USER["content"]
    return blocks if word in (blocks.text([USER]) or "") and word not in (renderer.text([USER]) or "") else renderer


def supports_tool_calling(processing_class: "PreTrainedTokenizerBase | ProcessorMixin") -> bool:
    """Whether a template prints tool calls and tool results: function, argument, its value and the result come out.

    Args:
        processing_class: tokenizer or processor with a chat template.
    """
    return prints_tools(renderer_of(processing_class))


def is_chat_template_prefix_preserving(processing_class: "PreTrainedTokenizerBase | ProcessorMixin") -> bool:
    """Whether a further message leaves the token ids of an assistant message, and of what is before it, as they were.

    The ids of a user message and a tool call have to begin those of the same with the tool's result, with and without
    reasoning in the call. A template that takes no tool messages is asked about a second user message. And no later
    message may make reasoning disappear.

    Args:
        processing_class: tokenizer or processor with a chat template.
    """
    return preserves_prefixes(renderer_of(processing_class))


def is_chat_template_stop_token_trained(processing_class: "PreTrainedTokenizerBase | ProcessorMixin") -> bool:
    """Whether the last token that a template marks as the assistant's is an added token, such as `<|im_end|>`.

    Otherwise a model that learns from marked tokens alone does not learn to end its turn. False without markers.

    Args:
        processing_class: tokenizer or processor with a chat template and generation markers.
    """
    renderer = renderer_of(processing_class)
    if not has_generation_markers(renderer.template):
        return False
    ids, mask = renderer.assistant_mask([USER, ANSWER])
    marked = [token for token, inside in zip(ids, mask, strict=True) if inside]
    return bool(marked) and marked[-1] in renderer.tokenizer.get_added_vocab().values()


def prints_tools(renderer: Renderer) -> bool:
    """`supports_tool_calling` of a renderer."""
    text = renderer.text([USER, call(), TOOL]) or ""
    return all(word in text for word in (FUNCTION, ARGUMENT, VALUE, TOOL["content"]))


def preserves_prefixes(renderer: Renderer) -> bool:
    """`is_chat_template_prefix_preserving` of a renderer."""
    renderer = renderer.using(remove_generation(renderer.template))
    pairs = [([USER, call()], TOOL), ([USER, call(**REASONING)], TOOL)]
    if renderer.ids([USER, call(), TOOL]) is None:
        pairs = [([USER, ANSWER], USER_2)]
    for messages, further in pairs:
        before, after = renderer.ids(messages), renderer.ids([*messages, further])
        if before is not None and after is not None and after[: len(before)] != before:
            return False
    return not _drops_reasoning(renderer)


def _drops_reasoning(renderer: Renderer) -> bool:
    """Whether reasoning that is printed in the last turn is not printed once others follow."""
    continued = [
        ([USER, {**ANSWER, **REASONING}], [USER_2, ANSWER_2]),
        ([USER, INLINE], [USER_2, ANSWER_2]),
        ([USER, call(**REASONING)], [TOOL, ANSWER_2]),
    ]
    for messages, further in continued:
        last, earlier = renderer.text(messages), renderer.text(messages + further)
        if last is not None and earlier is not None and REASON in last and REASON not in earlier:
            return True
    return False


def turn_start(renderer: Renderer, text: str, before: list[Message], options: dict[str, Any]) -> int | None:
    """Index in a text where the model's part of the message after `before` starts: behind the generation prompt.

    Where the generation prompt opens more than the message has (a `<think>`), what both share counts. None where the
    text shares nothing of it, or has something else for the messages before, so that nothing can be compared.

    Args:
        renderer: of the text.
        text: rendering of `before` and an assistant message.
        before: messages.
        options: passed to the template beside the messages.
    """
    prompt = renderer.text(before, add_generation_prompt=True, **options)
    bare = renderer.text(before, **options)
    if prompt is None or bare is None:
        return None
    shared = common_prefix_length(prompt, text)
    if shared < len(prompt):
        shared = _outside_tokens(renderer, text, _outside_tokens(renderer, prompt, shared))
    messages_end = _outside_tokens(renderer, prompt, common_prefix_length(prompt, bare))
    if shared < messages_end or shared == messages_end < len(prompt):
        return None
    while shared < len(text) and text[shared].isspace() and not renderer.starts_token(text, shared):
        shared += 1
    return shared


def turn_end(renderer: Renderer, text: str, start: int, limit: int) -> int | None:
    """Index in a text where the turn that starts at `start` ends: behind its last added token, else its last word.

    None where the limit comes before the turn.

    Args:
        renderer: of the text.
        text: rendering of a conversation.
        start: from `turn_start`.
        limit: where the text of the message ends.
    """
    if limit < start:
        return None
    anchor = max([start, *(match.end() for match in MARKER.finditer(text, start, limit))])
    ends = [end for begin, end in renderer.added_tokens(text) if begin >= anchor and end <= limit]
    return ends[-1] if ends else max(anchor, len(text[:limit].rstrip()))


def _outside_tokens(renderer: Renderer, text: str, index: int) -> int:
    """The index, or the start of the added token that it is inside of."""
    return next((start for start, end in renderer.added_tokens(text) if start < index < end), index)
