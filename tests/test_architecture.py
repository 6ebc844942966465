"""The rules of the house, read off the source: which floor may import which, and who alone may do what."""

import ast
import difflib
import importlib
import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import trl

PACKAGE = Path(trl.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 80
TRAINERS = sorted((PACKAGE / "trainer").glob("*_trainer.py"))
MAX_TRAINER_LINES = 250
MAX_REPEATED_LINES = 9

HUB = ("trl.types", "trl.errors", "trl._deps", "trl._version")
FLOORS = {
    "functional": 0,
    "data": 0,
    "data_utils": 0,
    "chat_template_utils": 0,
    "import_utils": 0,
    "models": 1,
    "rewards": 1,
    "weights": 2,
    "generation": 2,
    "rollout": 3,
    "trainer": 4,
    "experimental": 4,
    "cli": 5,
}
# Parts of floor 0 stand alone: none imports another.
ALONE = {
    "functional": ("functional",),
    "data": ("data",),
    "data_utils": ("data",),
    "chat_template_utils": ("data",),
    "import_utils": (),
}
FACADE = "trl"
"""`trl/__init__.py` names everything, and imports it on first use only."""

COLLECTIVE_MODULES = (
    "trl.generation.dispatch",
    "trl.rewards.scorer",
    "trl.trainer.metrics",
    "trl.models.shard",
    "trl.rollout.micro_batch",
)
COLLECTIVE_PACKAGES = ("trl.weights",)
ACCELERATOR_COLLECTIVES = ("gather", "gather_for_metrics", "reduce", "pad_across_processes", "wait_for_everyone")
PROCESS_COLLECTIVES = ("gather_object", "broadcast", "broadcast_object_list", "all_reduce", "all_gather", "barrier")

SERVER_PLUGIN = "trl.weights.vllm_plugin"
"""Loaded by a vLLM server, in its process: vLLM is there, and this package's floors are not."""

BACKEND_OPTIONS = ("use_vllm", "vllm_mode")
# Who beside `generation/build.py` reads which backend option, and why that is not a choice of backend.
BACKEND_READERS: dict[tuple[str, str], str] = {
    ("trl.trainer.grpo_config", "use_vllm"): "refuses a sampler correction that the loss cannot take",
    ("trl.cli.doctor", "use_vllm"): "whether there is a server to check",
    ("trl.cli.doctor", "vllm_mode"): "whether there is a server to check",
}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


TREES = {module_name(path): ast.parse(path.read_text(), str(path)) for path in MODULES}


def imports_of(tree: ast.AST) -> Iterator[tuple[str, ast.stmt]]:
    """Every imported module with its statement; `from trl import types` counts as `trl.types`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            if node.module == "trl":
                yield from ((f"trl.{alias.name}", node) for alias in node.names)
            else:
                yield str(node.module), node


def part_of(module: str) -> str:
    """`trl.data.chat` -> `data`."""
    return module.split(".")[1]


def is_ours(module: str) -> bool:
    return module.split(".")[0] == "trl"


def in_hub(module: str) -> bool:
    return module in HUB or module == "trl.__version__"


def name_of(node: ast.expr) -> str:
    """`torch.distributed.barrier` of an attribute chain; the empty string for anything else."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr):
            return f"{name_of(value)}.{attr}"
    return ""


@pytest.mark.parametrize("module", TREES)
def test_imports_point_down_or_sideways(module):
    if module == FACADE or in_hub(module):
        return
    for imported, node in imports_of(TREES[module]):
        if not is_ours(imported) or in_hub(imported) or imported == "trl":
            continue
        here, there = part_of(module), part_of(imported)
        assert FLOORS[there] <= FLOORS[here], f"{module}:{node.lineno} imports {imported}, which is a floor above"
        if here in ALONE:
            assert there in ALONE[here], f"{module}:{node.lineno} imports {imported}: {here} stands alone"


def test_every_part_has_a_floor():
    assert {part_of(m) for m in TREES if m != FACADE and not in_hub(m)} <= set(FLOORS)


@pytest.mark.parametrize("module", HUB)
def test_the_hub_imports_nothing_of_ours_but_errors(module):
    ours = {imported for imported, _ in imports_of(TREES[module]) if is_ours(imported)}
    assert ours <= {"trl.errors"}


@pytest.mark.parametrize("module", [m for m in TREES if m == "trl.types" or m.startswith("trl.functional")])
def test_types_and_functional_import_torch_and_the_standard_library(module):
    allowed = {*sys.stdlib_module_names, "torch"}
    own = "trl.functional" if module.startswith("trl.functional") else module
    for imported, node in imports_of(TREES[module]):
        top = imported.split(".")[0]
        assert top in allowed or imported.startswith(own), f"{module}:{node.lineno} imports {imported}"


def test_vllm_is_imported_inside_functions_of_the_vllm_modules_only():
    for module, tree in TREES.items():
        inside = {
            id(inner)
            for function in ast.walk(tree)
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
            for inner in ast.walk(function)
        }
        for imported, node in imports_of(tree):
            where = f"{module}:{node.lineno}"
            if imported.split(".")[0] == "vllm" and not module.startswith(SERVER_PLUGIN):
                assert module.startswith("trl.generation.vllm_"), f"{where} imports vllm"
                assert id(node) in inside, f"{where} imports vllm when the module is loaded"


def test_only_vllm_loads_its_plugin():
    plugin = {module for module in TREES if module.startswith(SERVER_PLUGIN)}
    for module in TREES.keys() - plugin:
        for imported, node in imports_of(TREES[module]):
            assert not imported.startswith(SERVER_PLUGIN), f"{module}:{node.lineno} imports {imported}"


def test_only_deps_compares_versions():
    for module, tree in TREES.items():
        if module == "trl._deps":
            continue
        for imported, node in imports_of(tree):
            version_tool = imported.startswith(("packaging", "importlib.metadata", "pkg_resources"))
            assert not version_tool, f"{module}:{node.lineno} imports {imported}"
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare):
                operands = [name_of(n) for side in (node.left, *node.comparators) for n in ast.walk(side)]
                assert not any(o.endswith(("__version__", "version_info")) for o in operands), f"{module}:{node.lineno}"


def attribute_reads(tree: ast.AST, names: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    """Attributes of these names that are read, also through `getattr` and `vars(...)[...]`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node.attr in names:
            yield node.attr, node.lineno
        if isinstance(node, ast.Call) and name_of(node.func) == "getattr":
            yield from ((a.value, node.lineno) for a in node.args if isinstance(a, ast.Constant) and a.value in names)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and node.slice.value in names:
            yield str(node.slice.value), node.lineno


def test_only_build_engine_reads_the_backend_options():
    found = {
        (module, name)
        for module, tree in TREES.items()
        if module != "trl.generation.build"
        for name, _ in attribute_reads(tree, BACKEND_OPTIONS)
    }
    # Equality: an exception that is no longer needed has to go.
    assert found == set(BACKEND_READERS)
    assert {name for name, _ in attribute_reads(TREES["trl.generation.build"], BACKEND_OPTIONS)}


def test_processes_talk_to_each_other_in_few_places():
    for module, tree in TREES.items():
        if module in COLLECTIVE_MODULES or module.startswith(COLLECTIVE_PACKAGES):
            continue
        for imported, node in imports_of(tree):
            assert not imported.startswith("torch.distributed"), f"{module}:{node.lineno} imports {imported}"
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                assert not is_collective(name_of(node.func)), f"{module}:{node.lineno} {name_of(node.func)}"


def is_collective(called: str) -> bool:
    owner, _, method = called.rpartition(".")
    if owner in ("dist", "torch.distributed", "accelerate.utils"):
        return True
    if owner.split(".")[-1] in ("accelerator", "_accelerator"):
        return method in ACCELERATOR_COLLECTIVES
    return method in PROCESS_COLLECTIVES and not owner


@pytest.mark.parametrize(
    ("called", "expected"),
    [
        ("torch.distributed.barrier", True),
        ("dist.all_reduce", True),
        ("self.accelerator.gather", True),
        ("accelerator.reduce", True),
        ("self.accelerator.backward", False),
        ("broadcast_object_list", True),
        ("tensor.gather", False),
        ("self.processes.gather", False),
        ("functools.reduce", False),
    ],
)
def test_what_counts_as_a_collective(called, expected):
    assert is_collective(called) is expected


def test_importing_the_package_loads_neither_torch_nor_transformers():
    code = "import sys, trl; print(sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = ast.literal_eval(
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout.decode()
    )
    assert "trl" in loaded
    assert not {"torch", "transformers", "datasets", "accelerate", "numpy", "vllm"} & set(loaded)


@pytest.mark.parametrize("name", trl.__all__)
def test_every_public_name_resolves(name):
    value = getattr(trl, name)
    assert name in dir(trl)
    if name != "__version__":
        assert value is getattr(importlib.import_module(value.__module__), name)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_trainer"):
        trl.no_such_trainer  # noqa: B018


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_no_file_and_no_function_is_too_long(path):
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(TREES[module_name(path)]):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{node.name} has {length} lines"


@pytest.mark.parametrize("path", TRAINERS, ids=module_name)
def test_a_method_fits_on_few_pages(path):
    """What several methods do is in their bases."""
    assert len(path.read_text().splitlines()) <= MAX_TRAINER_LINES


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(TRAINERS, 2)), ids=module_name)
def test_no_logic_stands_in_two_trainers(one, other):
    """No ten lines of logic follow one another in two trainers' files.

    Lines are compared without indentation and comments. What is no logic does not count: blank lines, docstrings and
    imports; the signature of `__init__`, whose parameters users pass by position or name; and in the call of
    `super().__init__` the arguments that hand a parameter on under its own name. What a method works out for that call
    does count.
    """
    run = longest_common_run(logic_of(one.read_text()), logic_of(other.read_text()))
    assert len(run) <= MAX_REPEATED_LINES, "\n".join(run)


def logic_of(source: str) -> list[str]:
    """The lines of the source that are logic, as `test_no_logic_stands_in_two_trainers` says."""
    tree = ast.parse(source)
    left_out = {line for node in ast.walk(tree) for line in _lines_without_logic(node)}
    kept = (line for number, line in enumerate(source.splitlines(), 1) if number not in left_out)
    return [line for line in (line.partition("  #")[0].strip() for line in kept) if line and not line.startswith("#")]


def _lines_without_logic(node: ast.AST) -> Iterator[int]:
    match node:
        case ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant(value=str())):
            yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)
        case ast.FunctionDef(name="__init__", body=[first, *_]):
            yield from range(node.lineno, first.lineno)
        case ast.Call(func=ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr="__init__")):
            arguments = [*node.args, *node.keywords]
            worked_out = {
                n for a in arguments if not _is_handed_on(a) for n in range(a.lineno, (a.end_lineno or 0) + 1)
            }
            yield from {a.lineno for a in arguments} - worked_out - {node.lineno}


def _is_handed_on(argument: ast.expr | ast.keyword) -> bool:
    """`x` and `x=x`, and no other expression."""
    match argument:
        case ast.Name():
            return True
        case ast.keyword(arg=name, value=ast.Name(id=value)):
            return name == value
    return False


def longest_common_run(one: list[str], other: list[str]) -> list[str]:
    """The longest run of lines that both have."""
    match = difflib.SequenceMatcher(None, one, other, autojunk=False).find_longest_match()
    return one[match.a : match.a + match.size]


def test_what_counts_as_logic():
    source = '''"""Module."""

import a
from b import (
    c,
)


class Trainer(Base):
    """Class."""

    args: Config

    def __init__(
        self,
        model,
        args=None,
    ):
        """Init."""
        refuse(args)  # a reason
        # another reason
        super().__init__(
            model,
            args=args,
            data=Data(
                args,
            ),
        )

    def loss(self, x):
        """Loss."""
        return x
'''
    expected = [
        "class Trainer(Base):",
        "args: Config",
        "refuse(args)",
        "super().__init__(",
        "data=Data(",
        "args,",
        "),",
        ")",
        "def loss(self, x):",
        "return x",
    ]
    assert logic_of(source) == expected
    assert longest_common_run(["a", "b", "c", "d"], ["b", "c", "x", "d"]) == ["b", "c"]
