"""The command in a process of its own: help without heavy imports, exit code 2 and one sentence for mistakes."""

import json
from pathlib import Path
from typing import Any

import pytest

from trl._version import __version__
from trl.cli import threads
from trl.cli.main import main
from trl.errors import ConfigError

REWARD = "def length(completions, **kwargs):\n    return [float(len(text)) for text in completions]\n"


@pytest.mark.parametrize("words", [[], ["--help"], ["grpo", "--help"], ["env", "--help"], ["--version"]])
def test_help_loads_neither_torch_nor_transformers(run_python: Any, words: list[str]) -> None:
    code = (
        "import sys; from trl.cli.main import main; "
        f"code = main({words!r}); heavy = {{'torch', 'transformers', 'datasets'}} & set(sys.modules); "
        "print(code, sorted(heavy), file=sys.stderr)"
    )
    result = run_python(code)
    assert result.stderr.strip() == "0 []"
    assert result.stdout


def test_what_help_lists(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    overview = capsys.readouterr().out
    assert "grpo" in overview
    assert "env" in overview
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"trl {__version__}\n"
    assert main(["grpo", "--help"]) == 0
    options = capsys.readouterr().out
    assert "--num_generations INT" in options
    assert "--weight_decay FLOAT" in options
    assert "--reward_funcs" in options


def test_env_answers(run_trl: Any) -> None:
    result = run_trl("env", HOME="/nonexistent")
    assert result.returncode == 0
    assert result.stderr == ""
    names = [line.split(":")[0] for line in result.stdout.splitlines()]
    assert names[:5] == ["- Platform", "- Python", "- TRL", "- PyTorch", "- Accelerators"]
    assert "- vLLM" in names


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    """Options of a run that lacks nothing but a model."""
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"prompt": str(row)}) for row in range(4)))
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": "a"}))
    (tmp_path / "my_reward.py").write_text(REWARD)
    return {
        "model_name_or_path": str(tmp_path / "no_model"),
        "dataset_name": "rows.jsonl",
        "reward_funcs": "my_reward.length",
        "per_device_train_batch_size": 8,
        "num_generations": 4,
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_generation": 4}, "unknown option `--num_generation`: did you mean `--num_generations`?"),
        ({"max_steps": "ten"}, "`max_steps` must be an integer (got `ten`)."),
        ({"dataset_name": "gone.jsonl"}, "the dataset `gone.jsonl` does not exist"),
        ({"dataset_name": "nobody/nothing"}, "the dataset `nobody/nothing` cannot be loaded: it is not in the local"),
        ({"dataset_name": "texts.jsonl"}, "the training dataset of `trl grpo` has no column `prompt` (it has `text`)"),
        ({"num_generations": 3}, "num_generations"),
        ({"reward_funcs": "my_rewards.length"}, "my_rewards"),
        ({"reward_funcs": "my_reward.lenght"}, "lenght"),
        ({"reward_funcs": None}, "no reward: set `reward_funcs`"),
        ({"model_name_or_path": None}, "no model: set `model_name_or_path`"),
        ({"dataset_name": None}, "no dataset: set `dataset_name`"),
        ({"num_processes": 2}, "run `accelerate launch --num_processes … -m trl.cli grpo …`"),
        ({"lr_scheduler_type": "wavy"}, "wavy"),
    ],
)
def test_a_mistake_ends_with_code_2_and_one_sentence(
    run_trl: Any, options: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    given = {name: value for name, value in (options | changes).items() if value is not None}
    result = run_trl("grpo", *(word for name, value in given.items() for word in (f"--{name}", str(value))))
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert message in result.stderr
    assert result.stderr.startswith("trl: ")
    assert result.stderr.count("\n") == 1


def test_a_misspelt_option_is_found_before_anything_heavy_is_loaded(run_python: Any) -> None:
    code = (
        "import sys; from trl.cli.main import main; "
        "code = main(['grpo', '--learning_rte', '1']); "
        "print(code, sorted({'torch', 'transformers', 'datasets'} & set(sys.modules)))"
    )
    result = run_python(code)
    assert result.stdout.strip() == "2 []"
    assert result.stderr == "trl: unknown option `--learning_rte`: did you mean `--learning_rate`?\n"


def test_an_unknown_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["gropo"]) == 2
    assert capsys.readouterr().err == "trl: unknown command `gropo`: did you mean `trl grpo`?\n"
    monkeypatch.setenv("TRL_TRACEBACK", "1")
    with pytest.raises(ConfigError, match="gropo"):
        main(["gropo"])


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "0"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_openmp_threads_sleep_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: str | None
) -> None:
    environment = dict(given)
    monkeypatch.setattr(threads.os, "environ", environment)
    threads.calm_openmp()
    assert environment.get("GOMP_SPINCOUNT") == expected
