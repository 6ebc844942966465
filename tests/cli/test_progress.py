"""The progress line in a pipe and in a terminal, and the summary."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import TrainerControl, TrainerState, TrainingArguments

from trl.cli import summary
from trl.cli.progress import ProgressLine, duration, metric_words
from trl.cli.summary import save_reward_curve, summary_lines

HISTORY: list[dict[str, Any]] = [
    {"step": 1, "reward": 0.1, "loss": 0.5, "completions/mean_length": 12.0},
    {"step": 2, "reward": 0.4, "loss": 0.4, "completions/mean_length": 10.0},
    {"step": 2, "eval_reward": 0.9},
    {"step": 3, "reward": 0.7, "loss": 0.3, "completions/mean_length": 8.0},
    {"step": 3, "train_runtime": 75.0, "train_loss": 0.4},
]


def run(console: Console, history: list[dict[str, Any]], first: int = 0, main_process: bool = True) -> str:
    """What the callback writes during a run whose steps log `history`."""
    callback = ProgressLine(console)
    state = TrainerState(global_step=first, max_steps=first + 3, is_world_process_zero=main_process)
    args, control = TrainingArguments(output_dir="unused", use_cpu=True, report_to="none"), TrainerControl()
    callback.on_train_begin(args, state, control)
    for logs in history:
        if logs["step"] + first > state.global_step:
            state.global_step = logs["step"] + first
            callback.on_step_end(args, state, control)
        callback.on_log(args, state, control, logs=logs)
    callback.on_train_end(args, state, control)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_pipe_gets_one_plain_line_each_log() -> None:
    lines = run(Console(file=io.StringIO(), width=40), HISTORY).splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("step 1/3  reward 0.1  loss 0.5  ")
    assert lines[1].startswith("step 2/3  reward 0.25  loss 0.4  ")
    assert lines[2] == "evaluation at step 2  reward 0.9"
    assert lines[3].startswith("step 3/3  reward 0.4  loss 0.3  ")
    assert lines[3].endswith("0 s left")


def test_the_reward_is_the_mean_of_the_last_five() -> None:
    history = [{"step": step, "reward": float(step)} for step in range(1, 8)]
    assert "step 7/3  reward 5  " in run(Console(file=io.StringIO()), history)


def test_step_numbers_continue_after_a_resume() -> None:
    lines = run(Console(file=io.StringIO()), HISTORY, first=10).splitlines()
    assert lines[0].startswith("step 11/13  ")


def test_logged_step_time_is_shown() -> None:
    assert "  2.5 s a step  " in run(Console(file=io.StringIO()), [{"step": 1, "reward": 1.0, "step_time": 2.5}])


def test_only_the_main_process_writes() -> None:
    assert run(Console(file=io.StringIO()), HISTORY, main_process=False) == ""


def test_a_terminal_gets_one_live_line() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    written = run(console, HISTORY)
    assert "step 3/3  reward 0.4  loss 0.3" in written
    assert "evaluation at step 2  reward 0.9" in written


def test_kl_takes_the_place_of_the_loss() -> None:
    assert metric_words({"loss": 1.0, "kl": 0.02, "reward": 0.5}) == ["reward 0.5", "kl 0.02"]
    assert metric_words({"loss": 1.0}) == ["loss 1"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (0.834, "0.83 s"), (9.96, "10 s"), (42.4, "42 s"), (185, "3 min 05 s"), (7800, "2 h 10 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_summary_says_what_changed() -> None:
    lines = summary_lines(HISTORY, 3)
    assert lines[0] == "3 steps in 1 min 15 s"
    assert lines[1] == "reward 0.1 at the first log, 0.7 at the last"
    assert lines[-1] == "mean completion length 8 tokens (at first 12)"
    assert len(lines) == 3 + 8


def test_the_summary_of_a_run_without_logs() -> None:
    assert summary_lines([], 0) == ["0 steps"]


def test_the_curve_is_saved_or_its_absence_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    assert save_reward_curve(HISTORY, tmp_path) == f"reward curve in {tmp_path / 'reward_curve.png'}"
    assert (tmp_path / "reward_curve.png").is_file()
    assert save_reward_curve(HISTORY[:1], tmp_path) == ""
    monkeypatch.setattr(summary, "available", lambda module: False)
    assert "pip install 'trl[plot]'" in save_reward_curve(HISTORY, tmp_path)
