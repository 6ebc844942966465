"""Progress of a run in one line: a live line in a terminal, one plain line each logging step elsewhere."""

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

_RECENT = 5


class ProgressLine(TrainerCallback):
    """Shows step, reward, loss or KL, time of a step and time left.

    The reward is the mean of the last five that were logged.

    Args:
        console: where to write; standard error if None, so that standard output stays free for results.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.rewards: deque[float] = deque(maxlen=_RECENT)
        self.metrics: dict[str, float] = {}
        self.first_step = 0
        self.started = 0.0
        self.bar: Progress | None = None
        self.task = TaskID(0)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.first_step, self.started = state.global_step, time.monotonic()
        if not state.is_world_process_zero or not self.console.is_terminal:
            return
        columns = (BarColumn(bar_width=20), TextColumn("{task.description}"))
        self.bar = Progress(*columns, console=self.console, refresh_per_second=2)
        self.task = self.bar.add_task("starting", total=state.max_steps, completed=state.global_step)
        self.bar.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=state.global_step, description=self._line(state))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        logs = logs or {}
        if not state.is_world_process_zero or "train_runtime" in logs:
            return
        numbers = {name: float(value) for name, value in logs.items() if isinstance(value, int | float)}
        evaluation = {name.removeprefix("eval_"): value for name, value in numbers.items() if name.startswith("eval_")}
        if evaluation:
            self._show(f"evaluation at step {state.global_step}", evaluation)
            return
        self.metrics |= numbers
        if "reward" in numbers:
            self.rewards.append(numbers["reward"])
        if self.bar is None:
            self.console.print(self._line(state), highlight=False, soft_wrap=True)
        else:
            self.bar.update(self.task, description=self._line(state))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def _show(self, title: str, metrics: Mapping[str, float]) -> None:
        self.console.print("  ".join([title, *metric_words(metrics)]), highlight=False, soft_wrap=True)

    def _line(self, state: TrainerState) -> str:
        metrics = dict(self.metrics)
        if self.rewards:
            metrics["reward"] = sum(self.rewards) / len(self.rewards)
        done = state.global_step - self.first_step
        seconds = (time.monotonic() - self.started) / done if done else None
        words = [f"step {state.global_step}/{state.max_steps}", *metric_words(metrics)]
        step_time = metrics.get("step_time", seconds)
        if step_time is not None:
            words.append(f"{duration(step_time)} a step")
        if seconds is not None:
            words.append(f"{duration(seconds * (state.max_steps - state.global_step))} left")
        return "  ".join(words)


def metric_words(metrics: Mapping[str, float]) -> list[str]:
    """Reward, then KL where a reference model gives one, else the loss: `["reward 0.512", "loss 0.0131"]`."""
    second = "kl" if "kl" in metrics else "loss"
    return [f"{name} {metrics[name]:.3g}" for name in ("reward", second) if name in metrics]


def duration(seconds: float) -> str:
    """Seconds as people say them: `0.83 s`, `42 s`, `3 min 05 s`, `2 h 10 min`."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
