"""From a command line to a trainer's arguments, and what a run does with the trainer. The trainer is a stand-in."""

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from trl.cli import train
from trl.cli.main import main
from trl.errors import ConfigError

STAND_IN = """
import dataclasses
from types import SimpleNamespace

from trl.errors import ConfigError, RewardError
from trl.trainer.arguments import GRPOArguments


@dataclasses.dataclass
class Config(GRPOArguments):
    output_dir: str = "out"
    max_steps: int = -1
    eval_strategy: str = "no"
    disable_tqdm: bool = False
    push_to_hub: bool = False
    resume_from_checkpoint: str | None = None

    def __post_init__(self):
        if self.max_steps == 13:
            raise ValueError("13 is\\nunlucky")


class Trainer:
    made = None

    def __init__(self, **arguments):
        type(self).made = self
        self.arguments, self.args, self.calls = arguments, arguments["args"], []
        history = [{"step": 1, "reward": 0.25}, {"step": 2, "reward": 0.75}, {"step": 2, "train_runtime": 3.0}]
        self.state = SimpleNamespace(log_history=history, global_step=2)

    def remove_callback(self, callback):
        self.calls.append(f"remove {callback.__name__}")

    def add_callback(self, callback):
        self.calls.append(f"add {type(callback).__name__}")

    def is_world_process_zero(self):
        return True

    def train(self, resume_from_checkpoint):
        self.calls.append(f"train {resume_from_checkpoint}")
        if self.args.max_steps == 7:
            raise RewardError("the reward\\nbroke")

    def save_model(self, folder):
        self.calls.append(f"save {folder}")

    def push_to_hub(self, dataset_name):
        self.calls.append(f"push {dataset_name}")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a YAML file whose reward and dataset lie beside it; the working directory is another one."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    (tmp_path / "cli_stand_in.py").write_text(STAND_IN)
    method = dataclasses.replace(train.METHODS["grpo"], config="cli_stand_in:Config", trainer="cli_stand_in:Trainer")
    monkeypatch.setitem(train.METHODS, "grpo", method)
    (tmp_path / "cli_task.py").write_text(
        "def rows(split):\n    return [{'prompt': split}]\n\n"
        "def score(completions, **kwargs):\n    return [0.0] * len(completions)\n"
    )
    settings = {"model_name_or_path": "tiny", "dataset_name": "cli_task.rows", "reward_funcs": ["cli_task.score"]}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("GOMP_SPINCOUNT", "0")
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for name in ("cli_stand_in", "cli_task"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def build(folder: Path, *argv: str) -> Any:
    return train.build_trainer("grpo", ["--config", str(folder / "run.yaml"), *argv])


def test_a_trainer_from_a_yaml_file(folder: Path) -> None:
    trainer = build(folder, "--max_steps", "3")
    arguments = trainer.arguments
    assert arguments["model"] == "tiny"
    assert [function.__name__ for function in arguments["reward_funcs"]] == ["score"]
    assert arguments["train_dataset"]["prompt"] == ["train"]
    assert arguments["eval_dataset"] is None
    assert arguments["peft_config"] is None
    assert arguments["quantization_config"] is None
    assert trainer.args.max_steps == 3
    assert trainer.args.disable_tqdm is True
    assert trainer.args.model_init_kwargs == {"revision": "main", "dtype": "float32"}
    assert trainer.calls == ["remove ProgressCallback", "remove PrinterCallback", "add ProgressLine"]


def test_explicit_model_arguments_win(folder: Path) -> None:
    explicit = json.dumps({"dtype": "bfloat16", "extra": 1})
    trainer = build(folder, "--model_init_kwargs", explicit, "--attn_implementation", "sdpa", "--dtype", "auto")
    assert trainer.args.model_init_kwargs == {
        "revision": "main",
        "attn_implementation": "sdpa",
        "dtype": "bfloat16",
        "extra": 1,
    }


def test_evaluation_reads_the_test_split(folder: Path) -> None:
    trainer = build(folder, "--eval_strategy", "steps", "--dataset_test_split", "held_out")
    assert trainer.arguments["eval_dataset"]["prompt"] == ["held_out"]


def test_lora(folder: Path) -> None:
    pytest.importorskip("peft")
    config = build(folder, "--use_peft", "--lora_r", "4", "--lora_target_modules", "all-linear").arguments[
        "peft_config"
    ]
    assert (config.r, config.lora_alpha, config.target_modules) == (4, 32, "all-linear")


def test_a_reward_model_joins_the_functions(folder: Path) -> None:
    rewards = build(folder, "--reward_model_name_or_path", "judge").arguments["reward_funcs"]
    assert rewards[1:] == ["judge"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max_steps", "13"], "13 is\nunlucky"),
        (["--load_in_8bit", "--load_in_4bit"], "exclude each other"),
        (["--model_init_kwargs", "fast"], "`model_init_kwargs` must be a mapping"),
    ],
)
def test_settings_that_cannot_be_are_config_errors(folder: Path, argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(folder, *argv)


def run(folder: Path, *argv: str) -> tuple[int, list[str]]:
    code = main(["grpo", "--config", str(folder / "run.yaml"), "--output_dir", str(folder / "out"), *argv])
    return code, sys.modules["cli_stand_in"].Trainer.made.calls[3:]


def test_a_run_trains_saves_and_sums_up(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder) == (0, ["train None", f"save {folder / 'out'}"])
    printed = capsys.readouterr().out
    assert "2 steps in 3 s" in printed
    assert "reward 0.25 at the first log, 0.75 at the last" in printed
    assert f"model in {folder / 'out'}" in printed


@pytest.mark.parametrize(
    ("given", "checkpoint"), [("true", True), ("false", None), ("out/checkpoint-3", "out/checkpoint-3")]
)
def test_a_run_resumes(folder: Path, given: str, checkpoint: Any) -> None:
    assert run(folder, "--resume_from_checkpoint", given)[1][0] == f"train {checkpoint}"


def test_a_run_pushes_when_asked(folder: Path) -> None:
    assert run(folder, "--push_to_hub")[1][-1] == "push cli_task.rows"


def test_an_error_during_training_ends_with_code_1(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "--max_steps", "7") == (1, ["train None"])
    assert capsys.readouterr().err == "trl: the reward broke\n"


def test_env_of_the_yaml_file_rules_how_threads_wait(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")  # so that the variable is as before after the test
    with (folder / "run.yaml").open("a") as file:
        file.write("env: {OMP_WAIT_POLICY: active}\n")
    assert run(folder)[0] == 0
    assert os.environ["OMP_WAIT_POLICY"] == "active"
    assert "GOMP_SPINCOUNT" not in os.environ
