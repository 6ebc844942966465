"""Options read from source text are those of the real class."""

import dataclasses
import typing
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from trl.cli.options import REQUIRED, Expression, class_options, dataclass_options, training_options
from trl.cli.train import METHODS, build_parser
from trl.cli.values import ValueType, value_type


def test_names_and_literal_defaults_are_those_of_the_class() -> None:
    fields = {field.name: field for field in dataclasses.fields(TrainingArguments) if field.init}
    read = {option.name: option for option in training_options()}
    assert list(read) == list(fields)
    literal = [name for name in read if not isinstance(read[name].default, Expression)]
    assert len(literal) > 100
    for name in literal:
        field = fields[name]
        if field.default_factory is dataclasses.MISSING:
            assert read[name].default == field.default, name
        else:
            assert read[name].default == field.default_factory(), name


def test_types_are_those_of_the_class_where_they_are_built_in() -> None:
    hints = typing.get_type_hints(TrainingArguments)
    for option in training_options():
        real = value_type(hints[option.name])
        if set(real.scalars) <= {bool, int, float, str, dict} and not option.kind.choices:
            assert set(option.kind.scalars) == set(real.scalars), option.name
            assert option.kind.optional == real.optional, option.name
            assert (option.kind.item is None) == (real.item is None), option.name


def test_help_is_read_and_unescaped() -> None:
    read = {option.name: option for option in training_options()}
    assert read["learning_rate"].help == "The initial learning rate for the optimizer."
    assert all(option.help for option in read.values())
    assert not any("%%" in option.help for option in read.values())


SOURCE = """
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Optional
from package.base import Base as Parent

@dataclass
class Target(Parent):
    kind: ClassVar[str] = "x"
    a: "int" = 1
    b: Optional[list[float]] = None
    c: Literal["x", "y"] = field(default="x", metadata={"help": "one " "two", "choices": ["x", "y"]})
    d: dict[str, int] = field(default_factory=dict)
    e: float = field(default=1 << 4)
    f: str = field(init=False, default="")
    g: Unknown | str = "g"
    inherited: int = 5
"""


def test_forms_of_a_field(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "target.py").write_text(SOURCE)
    (package / "base.py").write_text("class Base:\n    inherited: int = 4\n    required: str\n")
    options = class_options(package / "target.py", "Target", package)
    assert list(options) == ["inherited", "required", "a", "b", "c", "d", "e", "g"]
    assert options["inherited"].default == 5
    assert options["required"].default is REQUIRED
    assert options["a"].kind == ValueType(scalars=(int,))
    assert options["b"].kind == ValueType(item=ValueType(scalars=(float,)), optional=True)
    assert options["c"].kind.choices[:2] == ("x", "y")
    assert options["c"].help == "one two"
    assert options["d"].default == {}
    assert options["d"].kind.scalars == (dict,)
    assert options["e"].default == Expression("1 << 4")
    assert set(options["g"].kind.scalars) == {object, str}


def test_a_method_takes_the_same_options_as_its_config() -> None:
    from trl.trainer.grpo_config import GRPOConfig

    parser = build_parser("grpo")
    script: set[str] = set()
    for group in parser.groups[:3]:
        script |= {option.name for option in group.options}
    assert set(parser.options) - script == {field.name for field in dataclasses.fields(GRPOConfig) if field.init}
    defaults: dict[str, Any] = {option.name: option.default for option in dataclass_options(GRPOConfig)}
    for option in parser.groups[3].options:
        assert option.default == defaults[option.name], option.name


def test_every_option_of_ours_has_a_help_text() -> None:
    for name in METHODS:
        assert [option.name for option in build_parser(name).options.values() if not option.help] == []
