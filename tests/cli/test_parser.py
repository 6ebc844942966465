"""`TrlParser`: sources, conventions, errors."""

import os
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

import pytest

from trl.cli.arguments import DatasetMixtureConfig
from trl.cli.parser import TrlParser
from trl.errors import ConfigError


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Required:
    name: str
    size: int = 3


@dataclass
class Options:
    max_steps: int = -1
    rate: float = 0.1
    enabled: bool = True
    disabled: bool = False
    undecided: bool | None = None
    weights: list[float] | None = None
    report_to: str | list[str] | None = "none"
    kwargs: dict | str | None = None
    mode: Literal["group", "batch", "none"] | bool = "group"
    colour: Colour = Colour.RED
    pad: int | str | None = "auto"
    text: str | None = "x"
    strategy: str = "no"
    level: str = field(default="low", metadata={"choices": ["low", "high"]})
    clip: tuple[float, float] | None = None


def parse(*argv: str) -> Options:
    return TrlParser(Options).parse_args_and_config(list(argv))[0]


def parse_yaml(tmp_path: Any, text: str, *argv: str) -> Options:
    (tmp_path / "run.yaml").write_text(text)
    return parse("--config", str(tmp_path / "run.yaml"), *argv)


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--max_steps", "5"], "max_steps", 5),
        (["--max-steps", "5"], "max_steps", 5),
        (["--max-steps=5"], "max_steps", 5),
        (["--max_steps", "-1"], "max_steps", -1),
        (["--max_steps", "1e3"], "max_steps", 1000),
        (["--rate", "-1e-3"], "rate", -0.001),
        (["--disabled"], "disabled", True),
        (["--disabled", "false"], "disabled", False),
        (["--disabled", "yes"], "disabled", True),
        (["--no_enabled"], "enabled", False),
        (["--no-enabled"], "enabled", False),
        (["--undecided"], "undecided", True),
        (["--undecided", "none"], "undecided", None),
        (["--no_undecided"], "undecided", False),
        (["--weights", "0.5", "-1"], "weights", [0.5, -1.0]),
        (["--weights", "2"], "weights", [2.0]),
        (["--weights", "none"], "weights", None),
        (["--report_to", "none"], "report_to", "none"),
        (["--report_to", "a", "b"], "report_to", ["a", "b"]),
        (["--kwargs", '{"a": 1, "b": [2]}'], "kwargs", {"a": 1, "b": [2]}),
        (["--kwargs", "null"], "kwargs", None),
        (["--kwargs", "file.json"], "kwargs", "file.json"),
        (["--mode", "none"], "mode", "none"),
        (["--mode", "false"], "mode", False),
        (["--colour", "blue"], "colour", Colour.BLUE),
        (["--pad", "8"], "pad", 8),
        (["--pad", "auto"], "pad", "auto"),
        (["--pad", "none"], "pad", None),
        (["--text", "none"], "text", "none"),
        (["--level", "high"], "level", "high"),
        (["--clip", "-1", "1"], "clip", (-1.0, 1.0)),
    ],
)
def test_command_line_conventions(argv: list[str], name: str, value: Any) -> None:
    parsed = getattr(parse(*argv), name)
    assert parsed == value
    assert type(parsed) is type(value)


def test_what_is_not_given_keeps_its_default() -> None:
    assert parse() == Options()


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("max-steps: 7", "max_steps", 7),
        ("rate: 1e-6", "rate", 1e-6),
        ("rate: 2", "rate", 2.0),
        ("undecided: null", "undecided", None),
        ("weights: [1, 0.5]", "weights", [1.0, 0.5]),
        ("weights: 1", "weights", [1.0]),
        ("report_to: [a]", "report_to", ["a"]),
        ("kwargs: {lr_end: 1e-7, name: a}", "kwargs", {"lr_end": 1e-7, "name": "a"}),
        ("strategy: no", "strategy", "no"),
        ("text: 2024", "text", "2024"),
        ("colour: blue", "colour", Colour.BLUE),
    ],
)
def test_yaml_conventions(tmp_path: Any, line: str, name: str, value: Any) -> None:
    assert getattr(parse_yaml(tmp_path, line), name) == value


def test_command_line_beats_yaml_even_when_it_equals_the_default(tmp_path: Any) -> None:
    assert parse_yaml(tmp_path, "max_steps: 3").max_steps == 3
    assert parse_yaml(tmp_path, "max_steps: 3", "--max_steps", "-1").max_steps == -1
    assert parse_yaml(tmp_path, "disabled: true", "--no_disabled").disabled is False


def test_a_required_field_may_come_from_yaml(tmp_path: Any) -> None:
    (tmp_path / "run.yaml").write_text("name: a\n")
    parser = TrlParser((Required, Options))
    required, options = parser.parse_args_and_config(["--config", str(tmp_path / "run.yaml"), "--rate", "1"])
    assert required == Required("a", 3)
    assert options.rate == 1.0
    with pytest.raises(ConfigError, match="`--name` is required"):
        parser.parse_args_and_config([])


def test_env_is_set_before_the_options_are_read(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_TEST_VARIABLE", "old")
    assert parse_yaml(tmp_path, "env: {TRL_TEST_VARIABLE: 1}\nmax_steps: 2").max_steps == 2
    assert os.environ["TRL_TEST_VARIABLE"] == "1"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max_step", "3"], "unknown option `--max_step`: did you mean `--max_steps`?"),
        (["--zzzzzz"], "unknown option `--zzzzzz`: `trl test --help` lists the options."),
        (["--max_steps", "many"], "`max_steps` must be an integer (got `many`)."),
        (["--max_steps", "1.5"], "`max_steps` must be an integer (got `1.5`)."),
        (["--undecided", "maybe"], "`undecided` must be true or false or none (got `maybe`)."),
        (["--mode", "all"], "`mode` must be one of `group`, `batch`, `none` or true or false (got `all`)."),
        (["--level", "middle"], "`level` must be one of `low`, `high` (got `middle`)."),
        (["--colour", "green"], "`colour` must be one of `red`, `blue` (got `green`)."),
        (["--weights", "1", "x"], "`weights` must be a number (got `1 x`)."),
        (["--max_steps"], "--max_steps: expected one argument."),
        (["run.yaml"], "unexpected argument `run.yaml`: did you mean `--config run.yaml`?"),
    ],
)
def test_command_line_errors(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        TrlParser(Options, prog="trl test").parse_args_and_config(argv)
    assert str(raised.value) == message


def test_broken_json_is_named() -> None:
    with pytest.raises(ConfigError, match=r"`kwargs` must be valid JSON .*\(got `\{a`\)"):
        parse("--kwargs", "{a")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_step: 3", "unknown key `max_step` in .*run.yaml: did you mean `max_steps`?"),
        ("max_steps: true", r"`max_steps` in .*run.yaml must be an integer \(got `True`\)"),
        ("max_steps: null", "must be an integer"),
        ("- 1", "must hold a mapping of options"),
        ("a: [", "is not valid YAML"),
        ("env: 3", "`env` in .*run.yaml must be a mapping"),
    ],
)
def test_yaml_errors(tmp_path: Any, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_yaml(tmp_path, text)


def test_a_missing_config_file_is_named(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the config file `.*gone.yaml`: No such file"):
        parse("--config", str(tmp_path / "gone.yaml"))


def test_leftovers_come_from_the_file_first(tmp_path: Any) -> None:
    (tmp_path / "run.yaml").write_text("num_processes: 2\nmax_steps: 4\n")
    argv = ["--gpu_ids", "0,1", "--config", str(tmp_path / "run.yaml"), "--rate", "1"]
    options, rest = TrlParser(Options).parse_args_and_config(argv, return_remaining_strings=True)
    assert (options.max_steps, options.rate) == (4, 1.0)
    assert rest == ["--num_processes", "2", "--gpu_ids", "0,1"]
    (alone,) = TrlParser(Options).parse_args_and_config(argv, fail_with_unknown_args=False)
    assert alone == options


def test_options_are_never_abbreviated() -> None:
    with pytest.raises(ConfigError, match="unknown option `--rat`"):
        parse("--rat", "1")


def test_a_field_named_config_or_two_of_one_name_are_refused() -> None:
    @dataclass
    class Bad:
        config: str = ""

    with pytest.raises(ConfigError, match="may not have a field of that name"):
        TrlParser(Bad)
    with pytest.raises(ConfigError, match="two dataclasses have a field `size`"):
        TrlParser((_Sized, _AlsoSized))


@dataclass
class _Sized:
    size: int = 1


@dataclass
class _AlsoSized:
    size: int = 2


def test_arguments_added_by_hand_come_as_a_namespace() -> None:
    parser = TrlParser(Options)
    parser.add_argument("--extra", type=int, default=1)
    options, namespace = parser.parse_args_and_config(["--extra", "4", "--max_steps", "2"])
    assert (options.max_steps, namespace.extra) == (2, 4)


def test_lists_of_records(tmp_path: Any) -> None:
    (tmp_path / "run.yaml").write_text("datasets:\n  - {path: a, fraction: 1, columns: prompt}\n  - path: b\n")
    (mixture,) = TrlParser(DatasetMixtureConfig).parse_args_and_config(["--config", str(tmp_path / "run.yaml")])
    assert [part.path for part in mixture.datasets] == ["a", "b"]
    assert mixture.datasets[0].fraction == 1.0
    assert mixture.datasets[0].columns == ["prompt"]
    (mixture,) = TrlParser(DatasetMixtureConfig).parse_args_and_config(["--datasets", '{"path": "c"}'])
    assert mixture.datasets[0].path == "c"
    with pytest.raises(ConfigError, match="without `pth`"):
        TrlParser(DatasetMixtureConfig).parse_args_and_config(["--datasets", '{"pth": "c"}'])


def test_importing_the_parser_loads_nothing_heavy(run_python: Any) -> None:
    result = run_python("import sys; import trl.cli.parser; print({'torch', 'transformers'} & set(sys.modules))")
    assert result.stdout.strip() == "set()"
