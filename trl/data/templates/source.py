"""The source of a template: its block tags, its loops over messages, and code written into them.

Jinja's parser drops positions and white space, so the tags are found in the text itself. Text that is written in
keeps what the controls `-` and `+` of the neighbouring tags do.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

_STRING = r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\""
_TAG = re.compile(
    r"\{%[-+]?\s*raw\s*[-+]?%\}.*?\{%[-+]?\s*endraw\s*[-+]?%\}"
    r"|\{#.*?#\}"
    rf"|\{{\{{(?:{_STRING}|[^'\"])*?\}}\}}"
    rf"|\{{%(?P<left>[-+]?)\s*(?P<word>\w+)(?P<rest>(?:{_STRING}|[^'\"])*?)(?P<right>[-+]?)%\}}",
    re.DOTALL,
)
_TARGET = re.compile(r"\s*(\w+)\s+in\s+(range\b)?")
_BLOCK_SET = re.compile(r"\s*[\w.]+\s*(\|[^=]*)?")
_OPENERS = frozenset({"for", "if", "macro", "call", "filter", "generation", "with", "autoescape", "block"})
# what is printed inside of these is a value first: it reaches the output later, changed, or never
_CAPTURING = frozenset({"macro", "call", "filter", "set"})
# tags that open and close a block of their own and print nothing
_PLAIN = {"generation": "if true", "endgeneration": "endif"}


@dataclass(frozen=True)
class Tag:
    """A block tag `{% word rest %}` with its place in the template and its white-space controls."""

    word: str
    rest: str
    start: int
    end: int
    left: str
    right: str


@dataclass(frozen=True)
class Loop:
    """An outermost `for` whose output is the template's.

    Attributes:
        is_assistant: Jinja condition: the item is a message of the assistant.
        first, last: the tags before and after the body.
        end: where `endfor` ends.
        interrupted: `break` or `continue` leaves the body.
        nested: inside another block.
    """

    is_assistant: str
    first: Tag
    last: Tag
    end: Tag
    interrupted: bool
    nested: bool


@dataclass
class _Open:
    tag: Tag
    otherwise: Tag | None = None
    interrupted: bool = False


def block_tags(template: str) -> list[Tag]:
    """The block tags of a template in order; none of those in comments, strings and raw text."""
    return [
        Tag(match["word"], match["rest"], match.start(), match.end(), match["left"], match["right"])
        for match in _TAG.finditer(template)
        if match["word"]
    ]


def has_generation_markers(template: str | None) -> bool:
    """Whether a template marks what the assistant writes with `{% generation %}` … `{% endgeneration %}`."""
    return {"generation", "endgeneration"} <= {tag.word for tag in block_tags(template or "")}


def find_loops(template: str) -> list[Loop]:
    """The outermost `for` loops over single names that do not stand in macros or in other captured text."""
    loops: list[Loop] = []
    stack: list[_Open] = []
    for tag in block_tags(template):
        if tag.word in _OPENERS or (tag.word == "set" and _BLOCK_SET.fullmatch(tag.rest)):
            stack.append(_Open(tag))
        elif tag.word == "else" and stack and stack[-1].tag.word == "for":
            stack[-1].otherwise = tag
        elif tag.word in ("break", "continue"):
            for block in [block for block in stack if block.tag.word == "for"][-1:]:
                block.interrupted = True
        elif tag.word.startswith("end") and stack:
            block = stack.pop()
            target = _TARGET.match(block.tag.rest)
            words = {outer.tag.word for outer in stack}
            if block.tag.word == "for" and target and not words & {*_CAPTURING, "for"}:
                message = f"messages[{target[1]}]" if target[2] else target[1]
                condition = f"{message}.role == 'assistant'"
                last = block.otherwise or tag
                loops.append(Loop(condition, block.tag, last, tag, block.interrupted, bool(stack)))
    return loops


def capture_turns(template: str, loops: list[Loop], printed: Callable[[Loop], str], closing: bool = True) -> str:
    """The template with the body of each loop caught in the variable `trl_turn`, and `printed(loop)` after it.

    A body has a scope of its own in any case, so catching what it prints changes nothing in what it does.

    Args:
        template: source.
        loops: of this template, at least one.
        printed: code that prints what the loop is to print for one message; no white space around its tags.
        closing: whether the text after the loop is printed also where no generation prompt is asked for; loops that
            stand in another block keep it in any case.
    """
    edits: list[tuple[int, str]] = []
    for loop in loops:
        edits.append((loop.first.end, f"{{% set trl_turn {loop.first.right}%}}"))
        edits.append((loop.last.start, f"{{%{loop.last.left} endset %}}{printed(loop)}"))
    if not closing and not loops[-1].nested:
        # Jinja cuts a line break at the end of a template, and none before a tag with `+`
        template = template.removesuffix("\n")
        edits.append((loops[-1].end.end, f"{{% if add_generation_prompt {loops[-1].end.right}%}}"))
        edits.append((len(template), "{%+ endif %}"))
    return _insert(template, edits)


def mark_generation(template: str, opening: str, end: str) -> str:
    """The template with the text `opening` and `end` printed where it has `{% generation %}` and `{% endgeneration %}`.

    Two `if` tags with the text between them stand in for each tag, so that white space is cut as before.
    """
    texts = {"generation": opening, "endgeneration": end}

    def code(tag: Tag) -> str:
        word = _PLAIN[tag.word]
        return f"{{%{tag.left} {word} %}}{{{{ {_literal(texts[tag.word])} }}}}{{% {word} {tag.right}%}}"

    return _replace_generation(template, code)


def remove_generation(template: str) -> str:
    """The template without its generation markers."""
    return _replace_generation(template, lambda tag: f"{{%{tag.left} {_PLAIN[tag.word]} {tag.right}%}}")


def first_match(method: str, texts: set[str], variable: str) -> str:
    """Jinja expression: the longest of the texts for which `variable.method(text)` holds; the empty string if none."""
    choices = sorted(texts - {""}, key=lambda text: (-len(text), text))
    return " ".join([*(f"{_literal(text)} if {variable}.{method}({_literal(text)}) else" for text in choices), "''"])


def _literal(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n").replace("\r", "\\r")
    return f"'{escaped}'"


def _replace_generation(template: str, code: Callable[[Tag], str]) -> str:
    tags = [tag for tag in block_tags(template) if tag.word in _PLAIN]
    for tag in reversed(tags):
        template = template[: tag.start] + code(tag) + template[tag.end :]
    return template


def _insert(template: str, edits: list[tuple[int, str]]) -> str:
    """The template with texts put in at places; those for one place in the order given."""
    for place, text in sorted(edits, key=lambda edit: edit[0])[::-1]:
        template = template[:place] + text + template[place:]
    return template
