"""The documentation says what is so: names exist, links lead somewhere, examples run, tables are complete."""

import ast
import dataclasses
import importlib
import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fixtures.scripts import load_script

from trl.cli.train import METHODS
from trl.trainer.arguments import BaseArguments

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md")), *sorted(ROOT.glob("examples/*/*.md"))]
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
NAME = r"`([\w./]+)`"
METHODS_OF_PAGE = {
    "sft.md": ["sft"],
    "dpo.md": ["dpo"],
    "kto.md": ["kto"],
    "grpo.md": ["grpo"],
    "rloo.md": ["rloo"],
    "online_dpo.md": ["online-dpo"],
    "distillation.md": ["distillation", "server-distillation"],
}


@pytest.fixture(autouse=True)
def _no_warning_of_what_is_experimental(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


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


@pytest.fixture
def run_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """Runs an example as in the root of the repository; returns its names."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)

    def run(text: str) -> dict[str, Any]:
        names: dict[str, Any] = {"__name__": "__docs__"}
        exec(compile(text, "<docs>", "exec"), names)
        return names

    return run


@pytest.mark.parametrize("text", [param for param in params("python", "runnable") if ".train()" not in param.values[0]])
def test_runnable_python_runs(text: str, run_example: Callable[[str], dict[str, Any]]) -> None:
    assert len(run_example(text)) > 2  # it did something


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
    from trl.cli.train import build_parser

    found = [words for _, *words in commands("trl ") if words[0] != "vllm-serve"]
    assert {*METHODS, "doctor"} == {command for command, *_ in found}
    for command, *words in found:
        method = words.pop(0) if command == "doctor" else command
        if "--config" in words:
            config = words.index("--config")
            assert (ROOT / words[config + 1]).is_file()
            words = words[:config] + words[config + 2 :]
        else:
            assert {"--model_name_or_path", "--dataset_name"} <= {*words}
        assert build_parser(method).parse_values(words).unknown == []


def test_the_command_that_vllm_serve_prints_is_the_one_of_the_page() -> None:
    from trl.cli.vllm_serve import serve_command

    ((_, _, *words),) = [found for found in commands("trl ") if found[1] == "vllm-serve"]
    page = (DOCS / "cli.md").read_text(encoding="utf-8")
    assert f"\nVLLM_SERVER_DEV_MODE=1 {shlex.join(serve_command(words, '0.33.0'))}\n" in page


def test_servers_are_started_with_everything_that_training_needs() -> None:
    found = commands("vllm serve")
    trained = [words for words in found if "--weight-transfer-config" in words]
    assert len(trained) > 3
    for _, _, _, *words in found:
        assert words[words.index("--host") + 1] == "127.0.0.1"
        assert words[words.index("--max-logprobs") + 1] == "-1"
    for words in trained:
        assert json.loads(words[words.index("--weight-transfer-config") + 1])["backend"] in ("nccl", "ipc")
        assert words[words.index("--logprobs-mode") + 1] == "processed_logprobs"


def test_a_teacher_is_started_without_what_only_training_needs() -> None:
    text = (DOCS / "distillation.md").read_text(encoding="utf-8").replace("\\\n", " ")
    teacher, student = re.findall(r"^\S.* vllm serve .*$", text, re.MULTILINE)
    for word in ("VLLM_SERVER_DEV_MODE=1", "--weight-transfer-config", "--logprobs-mode"):
        assert word in student
        assert word not in teacher


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


# ---- the pages of the methods ----

PARTS = re.findall(
    r"`((?:data|functional|models|trainer)/\w+\.py)`, `([\w.]+)`",
    "".join((DOCS / name).read_text(encoding="utf-8") for name in METHODS_OF_PAGE),
)


def text_of(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def imported(path: str) -> Any:
    """What stands at `module:name`."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def modules_of(method: str) -> set[str]:
    """The modules of the package that the classes of a method's trainer and config are in."""
    classes = [imported(path) for path in (METHODS[method].trainer, METHODS[method].config)]
    names = {parent.__module__ for one in classes for parent in one.__mro__}
    return {name for name in names if name.startswith("trl.trainer.")}


def path_of(module: str) -> Path:
    return ROOT / (module.replace(".", "/") + ".py")


def test_every_method_has_a_page() -> None:
    assert sorted(method for methods in METHODS_OF_PAGE.values() for method in methods) == sorted(METHODS)


@pytest.mark.parametrize("page", METHODS_OF_PAGE)
def test_pages_of_methods_link_to_the_choice_between_them(page: str) -> None:
    assert "(index.md#which-method-when)" in text_of(page)


@pytest.mark.parametrize(("file", "name"), sorted(set(PARTS)))
def test_functions_behind_the_formulas_exist(file: str, name: str) -> None:
    value = importlib.import_module("trl." + file.removesuffix(".py").replace("/", "."))
    for part in name.split("."):
        value = getattr(value, part)
    assert callable(value)


def test_functions_behind_the_formulas_are_read() -> None:
    assert {"group_relative", "leave_one_out", "rank_pairs", "support_divergence"} <= {name for _, name in PARTS}


def test_the_classes_that_methods_are_made_from_are_as_told() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)\.py` \| .+ \| (.+) \|$", text, re.MULTILINE)
    assert len(rows) == 7
    for name, module, left in rows:
        hooks = [getattr(imported(f"trl.trainer.{module}:{name}"), hook) for hook in re.findall(r"`(\w+)`", left)]
        assert any(getattr(hook, "__isabstractmethod__", False) for hook in hooks)


def test_the_table_of_losses_is_the_one_of_the_code() -> None:
    from trl.functional.policy import POLICY_LOSSES

    rows = re.findall(
        r"^\| `(\w+)` \| [^|]+ \| `(\w+)` \| [^|]+ \| `(reduce_\w+)` \|$", text_of("grpo.md"), re.MULTILINE
    )
    in_code = [(name, term.__name__, reduction.__name__) for name, (term, reduction) in POLICY_LOSSES.items()]
    assert sorted(rows) == sorted(in_code)


def test_the_losses_of_pairs_are_those_of_the_code() -> None:
    from trl.functional.preference import PAIR_LOSSES

    rows = re.findall(
        r"^\| loss of a pair, `(\w+)` \|.+`functional/preference.py`, `(\w+)` \|$", text_of("online_dpo.md"), re.M
    )
    assert rows == [(name, PAIR_LOSSES[name].formula.__name__) for name in ("sigmoid", "ipo")]
    rows = re.findall(r"^\| `(\w+)` \|.+`functional/preference.py`, `(\w+)` \|$", text_of("dpo.md"), re.M)
    formulas = [(name, loss.formula.__name__) for name, loss in PAIR_LOSSES.items()]
    assert [row for row in rows if row[0] in PAIR_LOSSES] == formulas


# Written by transformers, or without the trainer's `Metrics`.
LOGGED_OTHERWISE = {"loss", "grad_norm", "learning_rate", "epoch", "num_tokens"}


# These inherit the balance loss and do not add it.
WITHOUT_BALANCE_LOSS = {"online_dpo.md": {"aux_loss"}, "distillation.md": {"aux_loss"}}


def recorded_names(page: str) -> set[str]:
    """Patterns of the names that a page's trainers record metrics under, `*` for what is filled in at run time."""
    modules = {module for method in METHODS_OF_PAGE[page] for module in modules_of(method)}
    names = set()
    if "trl.trainer.online" in modules:
        modules |= {"trl.trainer.completions", "trl.trainer.engine_weights"}
    for module in modules:
        for node in ast.walk(ast.parse(path_of(module).read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
                continue
            if node.func.attr in ("mean", "std", "bound", "ratio"):
                parts = node.args[0].values if isinstance(node.args[0], ast.JoinedStr) else [node.args[0]]
                names.add("".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in parts))
    names -= WITHOUT_BALANCE_LOSS.get(page, set())
    return {name for name in names if any(map(str.isalpha, name))}  # others are means of tensors


def explained_metrics(page: str) -> set[str]:
    """The names in the first column of the page's table of metrics."""
    section = text_of(page).partition("\n## Metrics\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]+`) \|", section, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


@pytest.mark.parametrize("page", METHODS_OF_PAGE)
def test_the_metrics_explained_are_those_recorded(page: str) -> None:
    recorded, explained = recorded_names(page) | LOGGED_OTHERWISE, explained_metrics(page)
    assert len(recorded) > 8
    assert [name for name in recorded if not any(fnmatchcase(row, name) for row in explained)] == []
    assert [row for row in explained if not any(fnmatchcase(row, name) for name in recorded)] == []


EXAMPLES = [(page, text) for page, words, text in blocks("python") if words == "runnable" and ".train()" in text]


def test_every_method_has_an_example_that_runs() -> None:
    assert {page for page, _ in EXAMPLES} == {*METHODS_OF_PAGE}


@pytest.mark.parametrize(("page", "text"), EXAMPLES, ids=[page for page, _ in EXAMPLES])
def test_examples_train_and_log_what_the_page_explains(
    page: str, text: str, run_example: Callable[[str], dict[str, Any]]
) -> None:
    logged = run_example(text)["trainer"].state.log_history[0]
    keys = {re.sub(r"^rewards/\w+/(mean|std)$", r"rewards/{name}/\1", key) for key in logged}
    assert keys - {"step"} <= explained_metrics(page)
    assert "loss" in keys


# ---- options ----


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    return load_script(DOCS / "generate_options.py")


def test_tables_of_options_are_up_to_date(generator: ModuleType) -> None:
    for name, tables in generator.PAGES.items():
        assert text_of(name) == generator.filled(text_of(name), tables), f"docs/{name}: run `make docs`"


def option_rows(page: str, table: Any, end: str) -> list[str]:
    return re.findall(r"^\| `(\w+)` \|", text_of(page).partition(table.begin)[2].partition(end)[0], re.MULTILINE)


@pytest.mark.parametrize("page", METHODS_OF_PAGE)
def test_every_option_has_one_row(generator: ModuleType, page: str) -> None:
    rows = {table.arguments: option_rows(page, table, generator.END) for table in generator.PAGES[page]}
    assert list(rows) == [METHODS[method].options for method in METHODS_OF_PAGE[page]]
    for table in generator.PAGES[page]:
        assert len(rows[table.arguments]) == len(set(rows[table.arguments]))
        together = {*rows[table.arguments], *rows.get(table.beyond, [])}
        assert together == {field.name for field in dataclasses.fields(table.arguments)}


def read_names(method: str) -> set[str]:
    """Names that are read as attributes where a method runs: in the package, but for what other methods alone run.

    The declarations of options, and a command with its own, are left out.
    """
    others = {module for name in METHODS for module in modules_of(name)} - modules_of(method)
    without = {path_of(module) for module in others} | {ROOT / "trl" / "cli" / "vllm_serve.py"}
    files = [file for file in (ROOT / "trl").rglob("*.py") if file not in without and file.name != "arguments.py"]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    config = imported(METHODS[method].config)
    online = issubclass(config, imported("trl.trainer.online_config:OnlineConfig"))
    return names | ({config.length_option} if online else set())


@pytest.mark.parametrize("method", METHODS)
def test_options_without_effect_are_those_that_nothing_reads(generator: ModuleType, method: str) -> None:
    from transformers import TrainingArguments

    arguments = METHODS[method].options
    inherited = {field.name for field in dataclasses.fields(TrainingArguments)}
    ours = {field.name for field in dataclasses.fields(arguments)} - inherited
    notes = {name: generator.note_of(arguments, name) for name in ours}
    helps = {field.name: field.metadata["help"] for field in dataclasses.fields(arguments) if field.name in ours}
    ours = {name for name in ours if not helps[name].startswith("Without effect")}
    unread = ours - read_names(method)
    called_unread = {name for name, note in notes.items() if note == generator.UNREAD}
    assert called_unread <= unread
    refused = {name for name, note in notes.items() if note == generator.REFUSED} | {*NOT_OF_THE_METHOD.get(method, ())}
    assert unread <= called_unread | refused
    assert {field.name for field in dataclasses.fields(BaseArguments)} <= inherited


REFUSED_VALUES = {
    "cache_implementation": "static",
    "transformers_continuous_batching_config": {"max_batch_tokens": 1},
    "max_tool_calling_iterations": 1,
    "log_completions_hub_repo": "me/completions",
}
NEEDED = {"server-distillation": {"teacher_model_server_url": "http://127.0.0.1:8000"}}
NOT_OF_THE_METHOD = {
    "server-distillation": {
        "teacher_model_name_or_path": "teacher",
        "teacher_model_revision": "main",
        "teacher_model_init_kwargs": {"dtype": "bfloat16"},
    }
}


@pytest.mark.parametrize("method", METHODS)
def test_options_called_refused_are_refused(generator: ModuleType, method: str, tmp_path: Path) -> None:
    from trl.errors import NotSupportedError

    config = imported(METHODS[method].config)
    names = [field.name for field in dataclasses.fields(METHODS[method].options)]
    refused = [name for name in names if generator.note_of(METHODS[method].options, name) == generator.REFUSED]
    assert len(refused) >= 5 or "trl.trainer.online" not in modules_of(method)
    for name in refused:
        with pytest.raises(NotSupportedError, match=f"`{name}="):
            config(output_dir=str(tmp_path), **NEEDED.get(method, {}), **{name: REFUSED_VALUES.get(name, True)})


@pytest.mark.parametrize("method", NOT_OF_THE_METHOD)
def test_options_of_a_config_that_another_one_refuses_are_named(method: str, tmp_path: Path) -> None:
    from trl.errors import ConfigError

    page = next(page for page, methods in METHODS_OF_PAGE.items() if method in methods)
    for name, value in NOT_OF_THE_METHOD[method].items():
        with pytest.raises(ConfigError, match=f"`{name}="):
            imported(METHODS[method].config)(output_dir=str(tmp_path), **NEEDED[method], **{name: value})
        assert f"`{name}`" in text_of(page).partition("\n## Options of ")[2]


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
