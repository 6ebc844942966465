"""The documentation says what is so: names exist, links lead somewhere, examples run, tables are complete."""

import ast
import dataclasses
import importlib
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from fixtures.scripts import load_script

from trl.trainer.arguments import BaseArguments, GRPOArguments

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md")), *sorted(ROOT.glob("examples/*/*.md"))]
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
NAME = r"`([\w./]+)`"


def blocks(language: str) -> Iterator[tuple[str, str, str]]:
    """Yields (page, words behind the language, text) of the fenced blocks of a language."""
    for page in PAGES:
        for found, words, text in FENCE.findall(page.read_text(encoding="utf-8")):
            if found == language:
                yield page.name, words.strip(), text


def params(language: str, marked: str = "") -> list:
    found = [(page, text) for page, words, text in blocks(language) if marked in words.split() or not marked]
    return [pytest.param(text, id=f"{page}-{i}") for i, (page, text) in enumerate(found)]


def slug(heading: str) -> str:
    """The anchor of a heading: lower case, punctuation dropped, blanks to dashes."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if target.startswith("https:"):
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in map(slug, headings), f"{page.name} links to {target}"


def test_every_page_is_in_the_index() -> None:
    linked = set(LINK.findall((DOCS / "index.md").read_text(encoding="utf-8")))
    assert {page.name for page in DOCS.glob("*.md")} - {"index.md"} <= linked


# ---- code ----


@pytest.mark.parametrize("text", params("python"))
def test_python_imports_what_exists(text: str) -> None:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            module = importlib.import_module(node.module)
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


@pytest.mark.parametrize("text", params("python", "runnable"))
def test_runnable_python_runs(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__docs__"}
    exec(compile(text, "<docs>", "exec"), names)
    assert len(names) > 2  # it did something


@pytest.mark.parametrize("text", params("yaml"))
def test_yaml_is_understood_by_the_command_line(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trl.cli.train import build_parser

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # set back afterwards: the file's `env` may change it
    file = tmp_path / "run.yaml"
    file.write_text(text, encoding="utf-8")
    parsed = build_parser("grpo").parse_values(["--config", str(file)])
    assert parsed.unknown == []
    assert any(parsed.values)


def commands(program: str) -> list[list[str]]:
    """The command lines of a program, without the variables that may stand before them."""
    lines = [line for _, _, text in blocks("sh") for line in text.replace("\\\n", " ").splitlines()]
    lines = [re.sub(r"^(\w+=\S* )+", "", line) for line in lines]
    return [shlex.split(line, comments=True) for line in lines if line.startswith(program)]


def test_trl_commands_have_options_that_exist() -> None:
    from trl.cli.main import COMMANDS
    from trl.cli.train import build_parser

    found = [words for _, *words in commands("trl ") if words[0] != "vllm-serve"]
    assert {"grpo", "doctor"} == {command for command, *_ in found}
    for command, *words in found:
        assert command in COMMANDS
        method = words.pop(0) if command == "doctor" else command
        config = words.index("--config")
        assert (ROOT / words[config + 1]).is_file()
        parsed = build_parser(method).parse_values(words[:config] + words[config + 2 :])
        assert parsed.unknown == []


def test_the_command_that_vllm_serve_prints_is_the_one_of_the_page() -> None:
    from trl.cli.vllm_serve import serve_command

    ((_, _, *words),) = [found for found in commands("trl ") if found[1] == "vllm-serve"]
    page = (DOCS / "cli.md").read_text(encoding="utf-8")
    assert f"\nVLLM_SERVER_DEV_MODE=1 {shlex.join(serve_command(words, '0.33.0'))}\n" in page


def test_servers_are_started_with_everything_that_training_needs() -> None:
    found = commands("vllm serve")
    assert len(found) > 3
    for _, _, _, *words in found:
        assert words[words.index("--host") + 1] == "127.0.0.1"
        assert json.loads(words[words.index("--weight-transfer-config") + 1])["backend"] in ("nccl", "ipc")
        assert words[words.index("--logprobs-mode") + 1] == "processed_logprobs"
        assert words[words.index("--max-logprobs") + 1] == "-1"


def test_every_command_is_explained() -> None:
    from trl.cli.main import COMMANDS

    page = (DOCS / "cli.md").read_text(encoding="utf-8")
    assert [command for command in COMMANDS if f"| `trl {command}` |" not in page] == []


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):.* ## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    mentioned = {words[1] for words in commands("make ")}
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    mentioned |= set(re.findall(r"`make ([a-z-]+)", text))
    assert {"quickstart", "test"} <= mentioned <= targets


# ---- one GRPO step ----


def steps() -> list[tuple[str, str]]:
    text = (DOCS / "one_grpo_step.md").read_text(encoding="utf-8")
    return re.findall(rf"^\| {NAME} \| {NAME} \| \S", text, re.MULTILINE)


def test_every_row_of_the_step_is_read() -> None:
    rows = (DOCS / "one_grpo_step.md").read_text(encoding="utf-8").count("\n| `")
    assert len(steps()) == rows > 30


@pytest.mark.parametrize(("file", "name"), steps())
def test_functions_of_the_step_exist(file: str, name: str) -> None:
    assert (ROOT / "trl" / file).is_file()
    value = importlib.import_module("trl." + file.removesuffix(".py").replace("/", "."))
    for part in name.split("."):
        value = getattr(value, part)
    assert callable(value) or isinstance(value, dict)


# ---- GRPO ----


def grpo_page() -> str:
    return (DOCS / "grpo.md").read_text(encoding="utf-8")


def test_the_table_of_losses_is_the_one_of_the_code() -> None:
    from trl.functional.policy import POLICY_LOSSES

    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| `(\w+)` \| [^|]+ \| `(reduce_\w+)` \|$", grpo_page(), re.MULTILINE)
    in_code = [(name, term.__name__, reduction.__name__) for name, (term, reduction) in POLICY_LOSSES.items()]
    assert sorted(rows) == sorted(in_code)


def recorded_names() -> Iterator[str]:
    """Yields names that trainers record metrics under, up to the first part that is filled in at run time."""
    for file in (ROOT / "trl" / "trainer").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                name = node.args[0]
                if node.func.attr in ("mean", "std", "bound", "ratio") and isinstance(name, ast.Constant):
                    yield str(name.value)
                elif node.func.attr in ("mean", "std", "bound", "ratio") and isinstance(name, ast.JoinedStr):
                    yield str(name.values[0].value) if isinstance(name.values[0], ast.Constant) else ""


def test_every_metric_is_explained() -> None:
    page = grpo_page().partition("## Metrics")[2].partition("## Options")[0]
    names = set(recorded_names())
    assert len(names) > 15
    assert [name for name in names if f"`{name}" not in page] == []


def test_every_metric_of_a_run_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    example = next(text for page, words, text in blocks("python") if page == "grpo.md" and "GRPOTrainer(" in text)
    names: dict = {"__name__": "__docs__"}
    exec(compile(example, "<docs>", "exec"), names)
    logged = {re.sub("^rewards/starts_with_c", "rewards/{name}", key) for key in names["trainer"].state.log_history[0]}
    assert "rewards/{name}/mean" in logged
    assert [key for key in logged - {"step"} if f"`{key}`" not in grpo_page()] == []


# ---- options ----


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    return load_script(DOCS / "generate_options.py")


def test_tables_of_options_are_up_to_date(generator: ModuleType) -> None:
    for name, arguments in generator.PAGES.items():
        page = (DOCS / name).read_text(encoding="utf-8")
        assert page == generator.filled(page, arguments), f"docs/{name}: run `make docs`"


def test_every_option_has_one_row() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", grpo_page().partition("## Options")[2], re.MULTILINE)
    assert sorted(rows) == sorted(field.name for field in dataclasses.fields(GRPOArguments))


def read_names() -> set[str]:
    """Names that the package reads as attributes, the declarations of options and a command with its own left out."""
    files = [file for file in (ROOT / "trl").rglob("*.py") if file.name not in ("arguments.py", "vllm_serve.py")]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    return {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def test_options_without_effect_are_those_that_nothing_reads(generator: ModuleType) -> None:
    from transformers import TrainingArguments

    inherited = {field.name for field in dataclasses.fields(TrainingArguments)}
    ours = {field.name for field in dataclasses.fields(GRPOArguments)} - inherited
    noted = {
        note: {name for name in generator.NOTES if generator.NOTES[name] == note} for note in generator.NOTES.values()
    }
    unread = ours - read_names()
    assert noted[generator.UNREAD] <= unread
    assert unread <= noted[generator.UNREAD] | noted[generator.REFUSED]
    assert {field.name for field in dataclasses.fields(BaseArguments)} <= inherited


REFUSED_VALUES = {
    "cache_implementation": "static",
    "transformers_continuous_batching_config": {"max_batch_tokens": 1},
    "max_tool_calling_iterations": 1,
    "log_completions_hub_repo": "me/completions",
}


def test_options_called_refused_are_refused(generator: ModuleType, tmp_path: Path) -> None:
    from trl import GRPOConfig
    from trl.errors import NotSupportedError

    refused = {name for name, note in generator.NOTES.items() if note == generator.REFUSED}
    for name in refused:
        with pytest.raises(NotSupportedError, match=f"`{name}="):
            GRPOConfig(output_dir=str(tmp_path), **{name: REFUSED_VALUES.get(name, True)})


# ---- dependencies ----


def names_of(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=!~;\[ ]", requirement)[0].lower() for requirement in requirements}


def explained_dependencies(title: str) -> set[str]:
    """The packages that the table of a section gives a reason for."""
    section = (DOCS / "dependencies.md").read_text(encoding="utf-8").partition(f"\n## {title}\n")[2].split("\n## ")[0]
    head, _, *rows = ([cell.strip() for cell in line.split("|")] for line in section.splitlines() if line[:1] == "|")
    package, reason = head.index("package"), head.index("why this one")
    return {row[package].strip("`").lower() for row in rows if row[reason]}


def test_every_dependency_has_a_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = dict(project["optional-dependencies"])
    always, dev = names_of(project["dependencies"]), names_of(extras.pop("dev"))
    optional = names_of([requirement for group in extras.values() for requirement in group])
    assert explained_dependencies("Always installed") == always
    assert explained_dependencies("Extras") == optional
    assert explained_dependencies("Development") == dev - optional
