"""The command `trl`: one table of commands, and what becomes of errors."""

import difflib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from trl._version import __version__
from trl.cli import doctor, env, train, vllm_serve
from trl.cli.errors import report_error
from trl.errors import ConfigError, TRLError


@dataclass(frozen=True)
class Command:
    """A line of help, and a function of the remaining words that returns the exit code."""

    summary: str
    run: Callable[[Sequence[str]], int]


COMMANDS = {
    **{name: Command(method.summary, partial(train.run, name)) for name, method in train.METHODS.items()},
    "doctor": Command("Check model, data, settings and servers before a run.", doctor.run),
    "vllm-serve": Command("Start a vLLM server for training (deprecated: prints the command).", vllm_serve.run),
    "env": Command("Print versions and devices, for a bug report.", env.run),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 2 with one sentence on standard error for a mistake of the user.

    With TRL_TRACEBACK=1 in the environment the error is raised instead.

    Args:
        argv: the words after `trl`; those of the process if None.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(words)
    except TRLError as error:
        report_error(error)
        return 2


def _dispatch(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0
    if words[0] == "--version":
        print(f"trl {__version__}")
        return 0
    if words[0] not in COMMANDS:
        near = difflib.get_close_matches(words[0], COMMANDS, n=1)
        hint = f"did you mean `trl {near[0]}`?" if near else "`trl --help` lists the commands."
        raise ConfigError(f"unknown command `{words[0]}`: {hint}")
    return COMMANDS[words[0]].run(words[1:])


def help_text() -> str:
    """What `trl --help` prints."""
    lines = ["usage: trl COMMAND [OPTIONS]", "       trl --version", "", "commands:"]
    width = max(map(len, COMMANDS)) + 2
    lines += [f"  {name:<{width}}{command.summary}" for name, command in COMMANDS.items()]
    return "\n".join([*lines, "", "`trl COMMAND --help` lists a command's options."])


if __name__ == "__main__":
    sys.exit(main())
