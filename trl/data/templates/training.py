"""Training variants of chat templates: chosen, and checked against the original before anyone gets one."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trl.data.formats import Message, common_prefix_length
from trl.data.templates.conversations import MARKER, ONE_TURN, TOOL, USER_2, Conversation, battery
from trl.data.templates.derived import read_source
from trl.data.templates.probing import Renderer, preserves_prefixes, prints_tools, renderer_of, turn_end, turn_start
from trl.data.templates.source import has_generation_markers, mark_generation, remove_generation
from trl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

_BEGIN, _END = "\ue0f2\ue0f3", "\ue0f3\ue0f2"
# text in which a family's template shows, and the file of the variant that is bundled for it
_BUNDLED = {
    "<|im_start|>": "chatml.jinja",
    "<|start_header_id|>": "llama3.jinja",
    "<start_of_turn>": "gemma.jinja",
    "<|assistant|>": "phi3.jinja",
    "<|START_OF_TURN_TOKEN|>": "cohere.jinja",
    "[INST]": "mistral.jinja",
}
_HOW_TO_MARK = (
    "Write `{% generation %}` before the assistant's text and `{% endgeneration %}` after the token that ends its "
    "turn, inside the loop over the messages, and set `tokenizer.chat_template` to the result."
)


@dataclass(frozen=True)
class Candidate:
    """A variant to be checked.

    Attributes:
        renderer: of the variant.
        expected: what it has to print for a conversation; None where the original refuses it.
        closing: whether it prints what the original prints after the last message.
    """

    renderer: Renderer
    expected: Callable[[Conversation], str | None]
    closing: bool = True


def get_training_chat_template(processing_class: "PreTrainedTokenizerBase | ProcessorMixin") -> str | None:
    """The template to train with in place of a tokenizer's own, or None where its own serves.

    The own template serves if it has generation markers and, where it prints tool calls, a further message leaves
    the ids before it as they were. The variant has markers around all that the model writes in a turn, from the end of
    the generation prompt to the token that ends the turn; where a template has no such token, to the last word. It
    prints what the own template prints, with one exception: where that rewrites earlier turns when messages are
    added, most often to drop their reasoning, the variant prints each turn as it is at the end of a conversation.

    Neither tokenizer nor processor is changed.

    Args:
        processing_class: tokenizer or processor with a chat template. Of several named ones, `default` is meant.

    Raises:
        ConfigError: no variant could be made and checked. The text names what the template does, and how to add the
            markers by hand.
    """
    original = renderer_of(processing_class)
    keeps = preserves_prefixes(original)
    if has_generation_markers(original.template) and (keeps or not prints_tools(original)):
        return None
    conversations = battery(original.tokenizer.eos_token or "<|end|>")
    unusable = _unusable(original)
    complaints = [unusable] if unusable else []
    if not unusable:
        for choices in (_derived, _bundled):
            try:
                for candidate in choices(original, conversations, keeps):
                    complaint = _complaint(candidate, conversations)
                    if complaint is None:
                        return candidate.renderer.template
                    complaints.append(complaint)
            except ConfigError as error:
                complaints.append(str(error))
    reasons = "; ".join(dict.fromkeys(complaints))
    raise ConfigError(f"No training variant could be made of the chat template: {reasons}. {_HOW_TO_MARK}")


def _unusable(original: Renderer) -> str | None:
    """Why it cannot be told where the assistant's turns start; None where it can."""
    *before, answer = ONE_TURN.messages
    text = original.text(ONE_TURN.messages)
    if text is None:
        return "it refuses a user message followed by one of the assistant"
    start = turn_start(original, text, before, {})
    if start is None:
        return "the assistant's message does not start with what the generation prompt prints"
    header = text[start:].split(answer["content"])[0]
    if header.strip() and original.text(before, add_generation_prompt=True) == original.text(before):
        return f"it prints nothing for `add_generation_prompt`, but {header!r} before the assistant's text"
    return None


def _derived(original: Renderer, conversations: list[Conversation], keeps: bool) -> Iterator[Candidate]:
    """Variants of the template's own source, the one with the fewest changes first."""
    source = read_source(original, conversations)
    plain = source.renderer
    if keeps:
        yield Candidate(plain.using(source.marked()), _rendered_by(plain))
    yield Candidate(plain.using(source.prefix_preserving()), source.rendered_as_last)
    if not keeps:
        yield Candidate(plain.using(source.prefix_preserving(closing=False)), source.rendered_as_last, closing=False)


def _bundled(original: Renderer, conversations: list[Conversation], keeps: bool) -> Iterator[Candidate]:
    """Variants written by hand for the family whose header the template prints."""
    text = original.text(ONE_TURN.messages) or ""
    plain = original.using(remove_generation(original.template))
    for header, name in _BUNDLED.items():
        if keeps and header in text:
            template = (Path(__file__).parent / name).read_text(encoding="utf-8")
            yield Candidate(original.using(template), _rendered_by(plain))


def _rendered_by(renderer: Renderer) -> Callable[[Conversation], str | None]:
    return lambda conversation: renderer.text(conversation.messages, **conversation.options)


def _complaint(candidate: Candidate, conversations: list[Conversation]) -> str | None:
    """What is wrong with a variant; None if nothing is."""
    closings = set()
    for conversation in conversations:
        expected = candidate.expected(conversation)
        if expected is None:
            continue
        text = candidate.renderer.text(conversation.messages, **conversation.options)
        prompt = conversation.options.get("add_generation_prompt")
        if text is None or not expected.startswith(text) or (prompt and text != expected):
            return f"a variant renders the conversation {conversation.name!r} in another way"
        if not prompt:
            closings.add(expected[len(text) :])
    closing = "".join(closings)
    if len(closings) != 1 or MARKER.search(closing) or (candidate.closing and closing):
        return "a variant leaves out the end of a conversation"
    if not preserves_prefixes(candidate.renderer):
        return "a further message changes the tokens of those before it"
    return _complaint_about_marks(candidate.renderer, conversations)


def _complaint_about_marks(renderer: Renderer, conversations: list[Conversation]) -> str | None:
    """Where the markers are not around what the model writes; None if they are in all conversations."""
    bare = renderer.using(remove_generation(renderer.template))
    marked = renderer.using(mark_generation(renderer.template, _BEGIN, _END))
    for conversation in conversations:
        if conversation.options.keys() - {"tools"}:
            continue  # a prompt, or a variable that has its say in where the generation prompt ends
        turns = _turns(bare, conversation)
        if turns is None:
            if conversation is ONE_TURN:
                return "it cannot be told where the assistant's turn ends"
            continue
        text = marked.text(conversation.messages, **conversation.options) or ""
        found = [part.split(_END)[0] for part in text.split(_BEGIN)[1:]]
        if found != [turn for turn in turns if turn]:
            return f"the markers are not around the assistant's turns in the conversation {conversation.name!r}"
    return None


def _turns(renderer: Renderer, conversation: Conversation) -> list[str] | None:
    """What the model writes in each assistant message; None where that cannot be told from outside.

    A turn starts where the generation prompt ends. The text of its message ends where that of a next message starts,
    and the turn ends with the last added token in it.
    """
    turns = []
    for index, message in enumerate(conversation.messages):
        if message["role"] == "assistant":
            turn = _turn(renderer, conversation.messages[: index + 1], conversation)
            if turn is None:
                return None
            turns.append(turn)
    return turns


def _turn(renderer: Renderer, messages: list[Message], conversation: Conversation) -> str | None:
    *before, message = messages
    text = renderer.text(messages, **conversation.options)
    nexts = [TOOL, USER_2] if "tool_calls" in message else [USER_2]
    longer = [renderer.text([*messages, further], **conversation.options) for further in nexts]
    # a template may refuse a tool's result, or leave it out
    printed = [other for other, further in zip(longer, nexts, strict=True) if other and further["content"] in other]
    if text is None or not printed:
        return None
    start = turn_start(renderer, text, before, conversation.options)
    if start is None:
        return None
    end = turn_end(renderer, text, start, common_prefix_length(text, printed[0]))
    return None if end is None else text[start:end]
