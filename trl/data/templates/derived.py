"""Training variants made from a template's own source.

The body of the loop over the messages is caught in a variable. For an assistant message it is printed again in three
parts: the header that the generation prompt also prints, the turn inside `{% generation %}`, and what follows the
turn's last token. Header and rest are texts that probing found, so the code that is written in only compares strings.
"""

import re
from dataclasses import dataclass

from trl.data.templates.conversations import MARKER, Conversation
from trl.data.templates.probing import Renderer, turn_end, turn_start
from trl.data.templates.source import Loop, capture_turns, find_loops, first_match, remove_generation
from trl.errors import ConfigError

# around each assistant message in a traced rendering; private characters that no text has
_OPEN, _CLOSE = "\ue0f0\ue0f1", "\ue0f1\ue0f0"
_OPEN_CODE, _CLOSE_CODE = (text.encode("unicode_escape").decode() for text in (_OPEN, _CLOSE))
_TURN = re.compile(f"{_OPEN}(.*?){_CLOSE}", re.DOTALL)
_PRINT_TRACED = (
    "{{% if {loop.is_assistant} %}}{{{{ '{opening}' }}}}{{{{ trl_turn }}}}{{{{ '{closing}' }}}}"
    "{{% else %}}{{{{ trl_turn }}}}{{% endif %}}"
)
_PRINT_MARKED = (
    "{{% if {loop.is_assistant} %}}{again}"
    "{{% set trl_head = {head} %}}"
    "{{% set trl_turn = trl_turn[trl_head|length:] %}}"
    "{{% set trl_rest = {rest} %}}"
    "{{% set trl_turn = trl_turn[:trl_turn|length - trl_rest|length] %}}"
    "{{{{ trl_head }}}}"
    "{{% if trl_turn %}}{{% generation %}}{{{{ trl_turn }}}}{{% endgeneration %}}{{% endif %}}"
    "{{{{ trl_rest }}}}"
    "{{% else %}}{{{{ trl_turn }}}}{{% endif %}}"
)
# The turn as the template prints it at the end of a conversation. The messages that the loop has yet to come to are
# the last ones of the list, also where the loop leaves out a system message at the start.
_TURN_AGAIN = (
    "{% set trl_turn = trl_last_turn(trl_messages[:trl_messages|length - loop.revindex0], false)"
    f".split('{_OPEN_CODE}')[-1].split('{_CLOSE_CODE}')[0] %}}"
)


@dataclass(frozen=True)
class Source:
    """A template's source, and what derivation knows of it.

    Attributes:
        renderer: of the template without generation markers.
        loops: those that print assistant messages.
        traced: of the template with private characters around each assistant message.
        heads: what the template prints of an assistant message before the turn.
        rests: what it prints after the turn's last token.
    """

    renderer: Renderer
    loops: list[Loop]
    traced: Renderer
    heads: set[str]
    rests: set[str]

    def marked(self) -> str:
        """The template with markers around the turns; it prints the text of the original."""
        return capture_turns(self.renderer.template, self.loops, self._print_marked)

    def prefix_preserving(self, closing: bool = True) -> str:
        """The template with markers, and with each turn as it is printed at the end of a conversation.

        Args:
            closing: whether what the template prints after the last message without a generation prompt is kept.
        """
        template = capture_turns(self.renderer.template, self.loops, self._print_again, closing)
        return (
            "{% macro trl_last_turn(messages, add_generation_prompt) +%}"
            + self.traced.template.removesuffix("\n")
            + "{%+ endmacro %}{% set trl_messages = messages +%}"
            + template
        )

    def rendered_as_last(self, conversation: Conversation) -> str | None:
        """The conversation with each assistant message as the template prints it at the end of a conversation.

        None where the template refuses it, also where that is for its first part only.
        """
        whole = self.traced.text(conversation.messages, **conversation.options)
        places = [index for index, m in enumerate(conversation.messages) if m["role"] == "assistant"]
        parts = _TURN.split(whole or "")
        if len(parts) != 2 * len(places) + 1:
            return None
        options = {**conversation.options, "add_generation_prompt": False}
        for number, index in enumerate(places):
            turns = _TURN.findall(self.traced.text(conversation.messages[: index + 1], **options) or "")
            if not turns:
                return None
            parts[2 * number + 1] = turns[-1]
        return "".join(parts)

    def _print_marked(self, loop: Loop, again: str = "") -> str:
        head = first_match("startswith", self.heads, "trl_turn")
        rest = first_match("endswith", self.rests, "trl_turn")
        return _PRINT_MARKED.format(loop=loop, again=again, head=head, rest=rest)

    def _print_again(self, loop: Loop) -> str:
        return self._print_marked(loop, _TURN_AGAIN)


def read_source(renderer: Renderer, conversations: list[Conversation]) -> Source:
    """What derivation needs to know of a template.

    Args:
        renderer: with or without generation markers.
        conversations: the template may refuse some of them.

    Raises:
        ConfigError: with the reason why no variant can be derived.
    """
    plain = renderer.using(remove_generation(renderer.template))
    found = find_loops(plain.template)
    loops = [loop for loop in found if not loop.interrupted and _prints_turns(plain, loop, conversations)]
    if not loops:
        cause = ", which no `break` or `continue` leaves," if any(loop.interrupted for loop in found) else ""
        raise ConfigError(f"no `for` loop outside of macros{cause} prints the assistant's messages one by one")
    traced = _traced(plain, loops)
    cuts = {
        cut
        for conversation in conversations
        if not conversation.options.keys() - {"tools"}  # a variable may have its say in where the prompt ends
        for index, message in enumerate(conversation.messages)
        if message["role"] == "assistant"
        for cut in _cut(plain, traced, conversation, index)
    }
    if not cuts:
        raise ConfigError("no assistant message starts with what the generation prompt prints")
    return Source(plain, loops, traced, {head for head, _ in cuts}, {rest for _, rest in cuts})


def _traced(renderer: Renderer, loops: list[Loop]) -> Renderer:
    def printed(loop: Loop) -> str:
        return _PRINT_TRACED.format(loop=loop, opening=_OPEN_CODE, closing=_CLOSE_CODE)

    return renderer.using(capture_turns(renderer.template, loops, printed))


def _prints_turns(renderer: Renderer, loop: Loop, conversations: list[Conversation]) -> bool:
    """Whether a loop prints the words of an assistant message, in any of the conversations."""
    traced = _traced(renderer, [loop])
    texts = (traced.text(conversation.messages, **conversation.options) for conversation in conversations)
    return any(MARKER.search(turn) for text in texts for turn in _TURN.findall(text or ""))


def _cut(renderer: Renderer, traced: Renderer, conversation: Conversation, index: int) -> list[tuple[str, str]]:
    """Header and rest of one assistant message; none where it cannot be told where its turn starts and ends."""
    *before, _ = messages = conversation.messages[: index + 1]
    found = list(_TURN.finditer(traced.text(messages, **conversation.options) or ""))
    if not found:
        return []
    text = found[-1].string
    first, last = (len(_without_trace(text[:place])) for place in found[-1].span())
    text = _without_trace(text)
    start = turn_start(renderer, text, before, conversation.options)
    if start is None or start > last or not MARKER.search(text, max(start, first), last):
        return []
    start = max(start, first)
    end = turn_end(renderer, text, start, last)
    return [(text[first:start], text[end:last])] if end is not None else []


def _without_trace(text: str) -> str:
    return text.replace(_OPEN, "").replace(_CLOSE, "")
