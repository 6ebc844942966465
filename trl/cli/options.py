"""Descriptions of options: name, type, default and help, read without importing what they configure."""

import ast
import dataclasses
import importlib.util
import typing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from trl.cli.values import ValueType, value_type
from trl.errors import MissingDependencyError


@dataclass(frozen=True)
class Expression:
    """A default that only running the code would tell: its source text."""

    text: str

    def __str__(self) -> str:
        return self.text


class _Required:
    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED = _Required()


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        name: with underscores, e.g. `num_generations`.
        kind: the values it takes.
        default: its default, an `Expression` where that is not a literal, or `REQUIRED`.
        help: one or two sentences.
    """

    name: str
    kind: ValueType
    default: Any
    help: str = ""


@dataclass(frozen=True)
class OptionGroup:
    """Options that are shown together and that fill one object."""

    title: str
    options: tuple[Option, ...]


def dataclass_options(cls: type) -> tuple[Option, ...]:
    """The options that the constructor of a dataclass takes, in the order of its fields.

    Args:
        cls: a dataclass; a field's metadata may hold `help` and `choices`.
    """
    hints = typing.get_type_hints(cls)
    return tuple(
        Option(
            field.name,
            _kind(hints[field.name], field.metadata.get("choices", ())),
            _field_default(field),
            field.metadata.get("help", ""),
        )
        for field in dataclasses.fields(cls)
        if field.init
    )


def _kind(annotation: Any, choices: Any) -> ValueType:
    kind = value_type(annotation)
    if not choices:
        return kind
    kept = tuple(accepted for accepted in kind.scalars if accepted is not str)
    return dataclasses.replace(kind, scalars=kept, choices=kind.choices + tuple(choices))


def _field_default(field: "dataclasses.Field[Any]") -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return REQUIRED


@cache
def training_options() -> tuple[Option, ...]:
    """The options of the installed `transformers.TrainingArguments`, read from its source text.

    Raises:
        MissingDependencyError: transformers is not installed, or keeps the class elsewhere.
    """
    spec = importlib.util.find_spec("transformers")  # the spec of a top-level package imports nothing
    if spec is None or spec.origin is None:
        raise MissingDependencyError("training needs the package `transformers`: run `pip install transformers`.")
    folder = Path(spec.origin).parent
    for candidate in (folder / "training_args.py", folder / "training_args" / "__init__.py"):
        if candidate.is_file():
            return tuple(class_options(candidate, "TrainingArguments", folder).values())
    raise MissingDependencyError(
        f"`transformers` in {folder} has no `training_args.py`: install `transformers>=5.16,<6`."
    )


def class_options(source: Path, name: str, package: Path) -> dict[str, Option]:
    """The options of one dataclass by name, bases first as in the dataclass itself, read by `ast`.

    Args:
        source: the file that defines the class, or imports it from its own package.
        name: the class.
        package: folder of the top-level package, in which imported bases are looked up.
    """
    tree = ast.parse(source.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return _options_of(node, source, package)
        if isinstance(node, ast.ImportFrom) and (found := _imported(node, name, source, package)):
            return class_options(*found, package)
    return {}


def _options_of(node: ast.ClassDef, source: Path, package: Path) -> dict[str, Option]:
    options: dict[str, Option] = {}
    for base in reversed(node.bases):
        if isinstance(base, ast.Name):
            options |= class_options(source, base.id, package)
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            option = _read_field(statement.target.id, statement)
            if option is not None:
                options[option.name] = option
    return options


def _imported(node: ast.ImportFrom, name: str, source: Path, package: Path) -> tuple[Path, str] | None:
    """The file and the original name of a class that `node` imports as `name` from within the package."""
    original = next((alias.name for alias in node.names if (alias.asname or alias.name) == name), None)
    parts = (node.module or "").split(".")
    if original is None or (node.level == 0 and parts[0] != package.name):
        return None
    folder = package.parent if node.level == 0 else source.parents[node.level - 1]
    target = folder.joinpath(*parts)
    for file in (target.with_suffix(".py"), target / "__init__.py"):
        if file.is_file():
            return file, original
    return None


def _read_field(name: str, statement: ast.AnnAssign) -> Option | None:
    annotation = _annotation(statement.annotation)
    if annotation is typing.ClassVar:
        return None
    value = statement.value
    if not (isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "field"):
        return Option(name, value_type(annotation), _literal(value))
    keywords = {keyword.arg: keyword.value for keyword in value.keywords}
    if "init" in keywords and _literal(keywords["init"]) is False:
        return None
    metadata = _metadata(keywords.get("metadata"))
    choices = metadata.get("choices", ())
    kind = _kind(annotation, () if isinstance(choices, Expression) else choices)
    return Option(name, kind, _call_default(keywords), _help(metadata))


def _call_default(keywords: dict[str | None, ast.expr]) -> Any:
    if "default_factory" in keywords:
        text = ast.unparse(keywords["default_factory"])
        empty: dict[str, Any] = {"list": [], "dict": {}}
        return empty.get(text, Expression(text))
    return _literal(keywords.get("default"))


def _metadata(node: ast.expr | None) -> dict[str, Any]:
    if not isinstance(node, ast.Dict):
        return {}
    pairs = zip(node.keys, node.values)
    return {str(key.value): _literal(value) for key, value in pairs if isinstance(key, ast.Constant)}


def _help(metadata: dict[str, Any]) -> str:
    text = metadata.get("help", "")
    return text.replace("%%", "%") if isinstance(text, str) else ""


def _literal(node: ast.expr | None) -> Any:
    if node is None:
        return REQUIRED
    try:
        return ast.literal_eval(node)
    except ValueError:
        return Expression(ast.unparse(node))


_TYPES: dict[str, Any] = {
    "bool": bool, "int": int, "float": float, "str": str, "None": type(None),
    "dict": dict, "Dict": dict, "Mapping": dict, "ClassVar": typing.ClassVar,
    "list": list, "List": list, "Sequence": list, "tuple": tuple, "Tuple": tuple,
}  # fmt: skip


def _annotation(node: ast.expr) -> Any:
    """A type for the annotation's source; names that are not built in become `Any`."""
    match node:
        case ast.Constant(value=None):
            return type(None)
        case ast.Constant(value=str(text)):
            return _annotation(ast.parse(text, mode="eval").body)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return _TYPES.get(name, Any)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return typing.Union[_annotation(left), _annotation(right)]  # noqa: UP007
        case ast.Subscript(value=ast.Name(id=name) | ast.Attribute(attr=name), slice=arguments):
            return _subscript(name, arguments.elts if isinstance(arguments, ast.Tuple) else [arguments])
    return Any


def _subscript(name: str, arguments: list[ast.expr]) -> Any:
    if name == "Literal":
        return typing.Literal[tuple(ast.literal_eval(argument) for argument in arguments)]
    if name in ("Optional", "Union"):
        members = [_annotation(argument) for argument in arguments]
        return typing.Union[tuple(members + [type(None)] * (name == "Optional"))]  # noqa: UP007
    base = _TYPES.get(name, Any)
    return base[_annotation(arguments[0])] if base in (list, tuple) else base
