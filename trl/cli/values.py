"""What an option accepts, and how a text from the command line or a YAML value becomes one."""

import dataclasses
import json
import types
import typing
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

NONE_WORDS = frozenset({"none", "null"})
_BOOL_WORDS = {"true": True, "yes": True, "t": True, "y": True, "1": True, "on": True}
_BOOL_WORDS |= {"false": False, "no": False, "f": False, "n": False, "0": False, "off": False}
_SEQUENCES = (list, tuple, set, frozenset)


class Refused(ValueError):  # noqa: N818
    """A value that fits none of an option's types. The text says what was expected."""


@dataclasses.dataclass(frozen=True)
class ValueType:
    """The values an option takes: a union of scalars, choices, and at most one kind of list.

    Attributes:
        scalars: any of bool, int, float, str, dict, Enum classes and dataclasses; `object` takes a value as it is.
        item: type of a list's elements, None when no list is accepted.
        container: what a list becomes, e.g. `tuple`.
        optional: whether None is accepted.
        choices: literal values that are accepted.
    """

    scalars: tuple[type, ...] = ()
    item: "ValueType | None" = None
    container: type = list
    optional: bool = False
    choices: tuple[Any, ...] = ()

    @property
    def is_flag(self) -> bool:
        """Whether the option is a pure switch: `--x`, `--x false`, `--no_x`."""
        return self.scalars == (bool,) and self.item is None and not self.choices


def value_type(annotation: Any) -> ValueType:
    """The value type of a type annotation; parts that are not understood accept any text."""
    scalars: list[type] = []
    choices: tuple[Any, ...] = ()
    item, container, optional = None, list, False
    for member in _members(annotation):
        origin = typing.get_origin(member) or member
        if member is type(None):
            optional = True
        elif origin is typing.Literal:
            choices += typing.get_args(member)
        elif origin in _SEQUENCES:
            item, container = value_type((typing.get_args(member) or (Any,))[0]), origin
        else:
            scalars.append(_scalar_class(origin))
    return ValueType(tuple(dict.fromkeys(scalars)), item, container, optional, choices)


def _members(annotation: Any) -> list[Any]:
    """The members of a union, flattened; the annotation itself when it is none."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [member for part in typing.get_args(annotation) for member in _members(part)]
    return [annotation]


def _scalar_class(origin: Any) -> type:
    if isinstance(origin, type):
        if origin in _READERS or issubclass(origin, Enum) or dataclasses.is_dataclass(origin):
            return origin
        if issubclass(origin, Mapping):
            return dict
    return object


def convert(value: Any, kind: ValueType) -> Any:
    """`value` as the option's own type.

    Args:
        value: a text, a list of texts, or what YAML made of one.
        kind: what the option accepts.

    Raises:
        Refused: it fits none of the types.
    """
    if isinstance(value, _SEQUENCES):
        if kind.item is None:
            raise Refused(describe(kind))
        return kind.container(convert(element, kind.item) for element in value)
    if value is None or (isinstance(value, str) and value.lower() in NONE_WORDS and _takes_none_word(kind)):
        if kind.optional:
            return None
        raise Refused(describe(kind))
    if kind.item is not None and not kind.scalars and not kind.choices:
        return kind.container([convert(value, kind.item)])
    return _convert_scalar(value, kind)


def _takes_none_word(kind: ValueType) -> bool:
    """Whether the text `none` means None: not where it is itself a value, as in a pure string."""
    only_text = set(kind.scalars) <= {str} and (kind.item is None or set(kind.item.scalars) <= {str})
    return kind.optional and not only_text and "none" not in kind.choices


def _convert_scalar(value: Any, kind: ValueType) -> Any:
    for choice in kind.choices:
        if _same(value, choice):
            return choice
    for accepted in sorted(kind.scalars, key=_rank):
        try:
            return _reader(accepted)(value)
        except Refused:
            raise
        except ValueError:
            continue
    raise Refused(describe(kind))


def _same(value: Any, choice: Any) -> bool:
    if isinstance(value, str) and not isinstance(choice, str):
        return value.lower() == str(choice).lower()
    return type(value) is type(choice) and bool(value == choice)


def _read_int(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError
    if isinstance(value, str) and value.strip().lstrip("+-").isdigit():
        return int(value)
    number = float(value)
    if not number.is_integer():
        raise ValueError
    return int(number)


def _read_float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError
    return float(value)


def _read_bool(value: Any) -> bool:
    if isinstance(value, bool | int | str) and str(value).lower() in _BOOL_WORDS:
        return _BOOL_WORDS[str(value).lower()]
    raise ValueError


def _read_mapping(value: Any) -> dict[str, Any]:
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            return dict(json.loads(value))
        except json.JSONDecodeError as error:
            raise Refused(f"valid JSON ({error})") from error
    if isinstance(value, Mapping):
        return dict(value)
    raise ValueError


def _read_text(value: Any) -> str:
    if isinstance(value, bool):  # YAML reads a bare `no` as False, and `no` is a value of several options
        return "true" if value else "no"
    if isinstance(value, int | float | str):
        return str(value)
    raise ValueError


# in the order in which the types of a union are tried
_READERS: dict[type, Callable[[Any], Any]] = {
    int: _read_int,
    float: _read_float,
    bool: _read_bool,
    dict: _read_mapping,
    str: _read_text,
    object: lambda value: value,
}
_ORDER = {accepted: rank for rank, accepted in enumerate(_READERS)}


def _rank(accepted: type) -> int:
    """Classes of their own (enums, dataclasses) come before the types that take anything."""
    return _ORDER.get(accepted, _ORDER[dict])


def _reader(accepted: type) -> Callable[[Any], Any]:
    if accepted in _READERS:
        return _READERS[accepted]
    if issubclass(accepted, Enum):
        return lambda value: _read_enum(value, accepted)
    return lambda value: _read_record(value, accepted)


def _read_enum(value: Any, enum: type[Enum]) -> Enum:
    for member in enum:
        if value is member or str(value) in (str(member.value), member.name):
            return member
    raise ValueError


def _read_record(value: Any, record: type) -> Any:
    if isinstance(value, record):
        return value
    entries = _read_mapping(value)
    fields = {field.name: field for field in dataclasses.fields(record)}
    hints = typing.get_type_hints(record)
    for name in entries:
        if name not in fields:
            raise Refused(f"a mapping with keys among {', '.join(f'`{known}`' for known in fields)}, without `{name}`")
    return record(**{name: convert(entry, value_type(hints[name])) for name, entry in entries.items()})


_WORDS: dict[type, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a text",
    dict: "a mapping (JSON on the command line)",
    object: "a value",
}


def describe(kind: ValueType) -> str:
    """The accepted values in words, for an error: "an integer or none"."""
    words = []
    if kind.choices:
        words.append("one of " + ", ".join(f"`{choice}`" for choice in kind.choices))
    for accepted in kind.scalars:
        if accepted in _WORDS:
            words.append(_WORDS[accepted])
        elif issubclass(accepted, Enum):
            words.append("one of " + ", ".join(f"`{member.value}`" for member in accepted))
        else:
            words.append(_WORDS[dict])
    if kind.item is not None:
        words.append(f"a list, each element {describe(kind.item)}")
    if kind.optional:
        words.append("none")
    return " or ".join(words)


def placeholder(kind: ValueType) -> str:
    """The value's placeholder in the help text, e.g. `INT` or `{group,batch}`."""
    if kind.choices and not set(kind.scalars) - {bool}:
        return "{" + ",".join(str(choice) for choice in kind.choices) + "}"
    if kind.item is not None and not kind.scalars:
        return placeholder(kind.item)
    short = {int: "INT", float: "FLOAT", bool: "BOOL", dict: "JSON"}
    known = [short[accepted] for accepted in kind.scalars if accepted in short]
    return known[0] if known else "TEXT"
