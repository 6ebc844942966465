"""From a command line and a YAML file to the values of dataclasses; the command line wins over the file."""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, NoReturn

from trl.cli.options import REQUIRED, Option, OptionGroup, dataclass_options
from trl.cli.values import Refused, convert, describe, placeholder
from trl.errors import ConfigError

_NEGATIVE_NUMBER = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


@dataclass(frozen=True)
class Unknown:
    """A setting that no option group has.

    Attributes:
        name: with underscores and without dashes in front; for a stray word the word itself.
        place: the YAML file it stands in, "" for the command line.
        tokens: how it would be written on a command line.
    """

    name: str
    place: str
    tokens: tuple[str, ...]


@dataclass(frozen=True)
class Parsed:
    """What was set: the given values of each group, what was not understood, and the YAML file if there was one."""

    values: list[dict[str, Any]]
    unknown: list[Unknown]
    config_file: Path | None
    others: argparse.Namespace


class OptionParser(argparse.ArgumentParser):
    """A parser for groups of options. It returns only what was given, so that defaults stay where they are declared."""

    def __init__(self, groups: Iterable[OptionGroup], **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, argument_default=argparse.SUPPRESS, **kwargs)
        self.groups = tuple(groups)
        self.options: dict[str, Option] = {}
        self.add_argument("--config", metavar="FILE", help="YAML file with options; the command line wins.")
        for group in self.groups:
            section = self.add_argument_group(group.title)
            for option in group.options:
                self._add_option(section, option)

    def _add_option(self, section: Any, option: Option) -> None:
        if option.name == "config":
            raise ConfigError("`config` names the YAML file: a dataclass may not have a field of that name.")
        if option.name in self.options:
            raise ConfigError(f"two dataclasses have a field `{option.name}`: rename one of them.")
        self.options[option.name] = option
        details: dict[str, Any] = {"help": _help_text(option), "metavar": placeholder(option.kind)}
        if option.kind.item is not None:
            details["nargs"] = "+"
        elif bool in option.kind.scalars:
            details |= {"nargs": "?", "const": "true"}
        section.add_argument(f"--{option.name}", **details)

    def parse_values(self, argv: Sequence[str]) -> Parsed:
        """The values that `argv` and its `--config` file give, converted, without any default.

        The file's `env` mapping is put into the environment. Unknown settings of the file come before those of `argv`.

        Raises:
            ConfigError: a value that its option does not take, or a file that cannot be read.
        """
        namespace, rest = self.parse_known_args(self._normalise(argv))
        given = vars(namespace)
        config_file = Path(given.pop("config")) if "config" in given else None
        entries = read_config_file(config_file) if config_file else {}
        _set_environment(entries.pop("env", None) or {}, config_file)
        values = {
            name: self._convert(name, value, str(config_file)) for name, value in entries.items() if self._has(name)
        }
        command_line = [name for name in given if self._has(name)]
        values |= {name: self._convert(name, _unwrap(given.pop(name)), "") for name in command_line}
        unknown = [
            Unknown(name, str(config_file), (f"--{name}", *map(str, value if isinstance(value, list) else [value])))
            for name, value in entries.items()
            if not self._has(name)
        ]
        by_group = [
            {option.name: values[option.name] for option in group.options if option.name in values}
            for group in self.groups
        ]
        return Parsed(by_group, unknown + _leftovers(rest), config_file, namespace)

    def _has(self, name: str) -> bool:
        return name in self.options

    def _normalise(self, argv: Sequence[str]) -> list[str]:
        """`argv` with dashes in our option names made underscores, and `--no_x` made `--x=false`."""
        tokens: list[str] = []
        for token in argv:
            name, equals, value = token[2:].partition("=")
            name = name.replace("-", "_")
            switch = self.options.get(name.removeprefix("no_"))
            if token.startswith("--") and self._has(name):
                tokens.append(f"--{name}{equals}{value}")
            elif token.startswith("--no") and not equals and switch and switch.name != name and switch.kind.is_flag:
                tokens.append(f"--{switch.name}=false")
            elif tokens and _NEGATIVE_NUMBER.fullmatch(token) and self._takes_one_value(tokens[-1]):
                tokens[-1] += f"={token}"  # argparse would take -1e-3 for an option
            else:
                tokens.append(token)
        return tokens

    def _takes_one_value(self, token: str) -> bool:
        option = self.options.get(token.removeprefix("--"))
        return token.startswith("--") and option is not None and option.kind.item is None

    def _convert(self, name: str, value: Any, place: str) -> Any:
        kind = self.options[name].kind
        try:
            return convert(value, kind)
        except Refused as error:
            where = f" in {place}" if place else ""
            raise ConfigError(f"`{name}`{where} must be {error} (got {_shown(value)}).") from error

    def refuse(self, unknown: Unknown) -> NoReturn:
        """Raise the error for a setting that nobody takes, with the nearest name if one is near.

        Raises:
            ConfigError: always.
        """
        if not unknown.place and not unknown.tokens[0].startswith("-"):
            hint = f": did you mean `--config {unknown.name}`?" if unknown.name.endswith((".yaml", ".yml")) else "."
            raise ConfigError(f"unexpected argument `{unknown.name}`{hint}")
        lead, dashes, place = ("key", "", f" in {unknown.place}") if unknown.place else ("option", "--", "")
        near = difflib.get_close_matches(unknown.name, self.options, n=1)
        hint = f"did you mean `{dashes}{near[0]}`?" if near else f"`{self.prog} --help` lists the options."
        raise ConfigError(f"unknown {lead} `{dashes}{unknown.name}`{place}: {hint}")

    def require(self, group: OptionGroup, values: Mapping[str, Any]) -> None:
        """Raise unless every option of `group` that has no default is among `values`.

        Raises:
            ConfigError: one is missing.
        """
        for option in group.options:
            if option.default is REQUIRED and option.name not in values:
                raise ConfigError(f"`--{option.name}` is required: {describe(option.kind)}.")

    def error(self, message: str) -> NoReturn:
        """Raise what argparse found.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"{message.removeprefix('argument ')}.")


class TrlParser(OptionParser):
    """Parser of dataclasses, with a YAML file as a second source of values.

    A required field may come from the file. `--a_b` and `--a-b` are the same; a switch takes an optional value and has
    `--no_x`; a list takes several values; a mapping takes JSON; `none` is None for options that are not plain text.

    Args:
        dataclass_types: one dataclass or several; none may have a field `config`, and no two the same field.
        **kwargs: for `argparse.ArgumentParser`.
    """

    def __init__(self, dataclass_types: type | Iterable[type] | None = None, **kwargs: Any) -> None:
        types = (dataclass_types,) if isinstance(dataclass_types, type) else tuple(dataclass_types or ())
        for cls in types:
            if not is_dataclass(cls):
                raise ConfigError(f"`TrlParser` takes dataclasses (got {cls!r}).")
        self.dataclass_types = types
        super().__init__([OptionGroup(cls.__name__, dataclass_options(cls)) for cls in types], **kwargs)

    def parse_args_and_config(
        self,
        args: Sequence[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
    ) -> tuple[Any, ...]:
        """One instance a dataclass, then a namespace if arguments were added by hand, then leftovers if asked for.

        Args:
            args: the command line without the program's name; `sys.argv[1:]` if None.
            return_remaining_strings: also return, as the last element, a list of what no option took, as command-line
                words: first the file's, then the command line's.
            fail_with_unknown_args: refuse what no option takes, unless it is returned.

        Raises:
            ConfigError: an unknown setting, a value of the wrong kind, a required one that is missing.
        """
        parsed = self.parse_values(sys.argv[1:] if args is None else args)
        if parsed.unknown and fail_with_unknown_args and not return_remaining_strings:
            self.refuse(parsed.unknown[0])
        for group, values in zip(self.groups, parsed.values):
            self.require(group, values)
        results: list[Any] = [cls(**values) for cls, values in zip(self.dataclass_types, parsed.values)]
        if vars(parsed.others):
            results.append(parsed.others)
        if return_remaining_strings:
            results.append([token for unknown in parsed.unknown for token in unknown.tokens])
        return tuple(results)


def read_config_file(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file, its keys with underscores.

    Raises:
        ConfigError: the file is missing, is not YAML, or holds no mapping.
    """
    import yaml

    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_loader())
    except OSError as error:
        raise ConfigError(f"cannot read the config file `{path}`: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config file `{path}` is not valid YAML: {error}.") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"the config file `{path}` must hold a mapping of options (got a {type(content).__name__}).")
    return {str(key).replace("-", "_"): value for key, value in content.items()}


def _loader() -> type:
    """A safe YAML loader that reads `1e-6` as the number it is; YAML 1.1 asks for `1.0e-6`."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
    )
    return Loader


def _set_environment(variables: Any, place: Path | None) -> None:
    if not isinstance(variables, dict):
        raise ConfigError(f"`env` in {place} must be a mapping of environment variables (got {_shown(variables)}).")
    for name, value in variables.items():
        os.environ[str(name)] = str(value)


def _leftovers(tokens: Sequence[str]) -> list[Unknown]:
    """The unknown options of a command line, each with the words that follow it."""
    found: list[Unknown] = []
    for token in tokens:
        if token.startswith("-") or not found:
            name = token.lstrip("-").partition("=")[0]
            found.append(Unknown(name.replace("-", "_") if token.startswith("-") else token, "", (token,)))
        else:
            last = found[-1]
            found[-1] = Unknown(last.name, "", (*last.tokens, token))
    return found


def _unwrap(value: Any) -> Any:
    """A list of one word as the word: whether it becomes a list again is up to the option's type."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _shown(value: Any) -> str:
    return f"`{' '.join(map(str, value)) if isinstance(value, list) else value}`"


def _help_text(option: Option) -> str:
    """Help with the default behind it, escaped for argparse."""
    default = "" if option.default is REQUIRED else f" (default: {option.default})"
    required = " (required)" if option.default is REQUIRED else ""
    return f"{option.help}{default}{required}".strip().replace("%", "%%")
