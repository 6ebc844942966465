"""What is recorded of completions: their lengths, and the table that is printed, stored and sent to trackers."""

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from trl.errors import RewardError
from trl.trainer.metrics import Metrics
from trl.types import Rollout

logger = logging.getLogger(__name__)

Messages = list[dict[str, Any]]


def record_lengths(metrics: Metrics, rollouts: Sequence[Rollout]) -> int:
    """Adds the statistics of the completions' lengths; returns the number of tokens, prompts included."""
    lengths = torch.tensor([float(len(r.completion.token_ids)) for r in rollouts])
    ended = torch.tensor([r.completion.finish_reason == "stop" for r in rollouts])
    for name, values in (("", lengths), ("terminated_", lengths[ended])):
        metrics.mean(f"completions/mean_{name}length", values)
        metrics.bound(f"completions/min_{name}length", "min", values)
        metrics.bound(f"completions/max_{name}length", "max", values)
    metrics.mean("completions/clipped_ratio", (~ended).float())
    return sum(len(r.prompt_ids) + len(r.completion.token_ids) for r in rollouts)


class CompletionTable:
    """The rows of the last generation batch.

    Args:
        max_rows: rows kept.
    """

    def __init__(self, max_rows: int):
        self._rows: deque[dict[str, Any]] = deque(maxlen=max_rows)

    def extend(self, step: int, columns: Mapping[str, Sequence[Any]], extra: Mapping[str, Sequence[Any]]) -> None:
        """Adds rows given by columns of equal length.

        Args:
            columns: prompt, completion, one column per reward, advantage.
            extra: what reward functions logged.
                A name the table has already becomes `logged/<name>`.

        Raises:
            RewardError: an extra column has another length.
        """
        count = len(columns["prompt"])
        for name, values in extra.items():
            if len(values) != count:
                raise RewardError(f"The logged column {name!r} has {len(values)} values for {count} completions.")
        taken = {"step", *columns}
        columns = {**columns, **{f"logged/{n}" if n in taken else n: v for n, v in extra.items()}}
        for i in range(count):
            self._rows.append({"step": step, **{name: values[i] for name, values in columns.items()}})

    def __len__(self) -> int:
        return len(self._rows)

    def take(self) -> list[dict[str, Any]]:
        """All rows, which the table then forgets."""
        rows = list(self._rows)
        self._rows.clear()
        return rows


def as_text(value: str | Messages) -> str:
    """A prompt or completion as one reads it."""
    if isinstance(value, str):
        return value
    if len(value) == 1:
        return str(value[0]["content"])
    return "\n".join(f"{message['role']}: {message['content']}" for message in value)


def publish(rows: Sequence[dict[str, Any]], args: Any, step: int, prefix: str = "") -> None:
    """Prints, stores and sends the rows as the arguments say (`trl.trainer.arguments.CompletionLogArguments`).

    Args:
        prefix: of the name of an evaluation's file, which would overwrite that of the training step.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    rows = [{name: row.get(name) for name in names} for row in rows]
    show(rows, step, args.num_completions_to_print)
    store(rows, Path(args.output_dir) / "completions", step, prefix)
    send(rows, args.report_to, step, unique_prompts=args.log_unique_prompts)


def store(rows: Sequence[dict[str, Any]], folder: Path, step: int, prefix: str = "") -> Path:
    """Writes the rows as `folder/<prefix>completions_<step>.parquet` and returns the path."""
    import pyarrow
    import pyarrow.parquet

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{prefix}completions_{step:05d}.parquet"
    readable = [{**row, "prompt": as_text(row["prompt"]), "completion": as_text(row["completion"])} for row in rows]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(readable), path)
    return path


def show(rows: Sequence[dict[str, Any]], step: int, limit: int | None) -> None:
    """Prints the rows as a table, the first `limit` of them."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"Step {step}", show_lines=True)
    names = [name for name in rows[0] if name != "step"]
    for name in names:
        table.add_column(name)
    for row in rows[:limit]:
        cells = [as_text(v) if n in ("prompt", "completion") else _cell(v) for n, v in row.items() if n != "step"]
        table.add_row(*map(Text, cells))
    Console().print(table)


def _cell(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def send(rows: Sequence[dict[str, Any]], report_to: Sequence[str], step: int, *, unique_prompts: bool) -> None:
    """Sends the rows as table `completions` to those trackers that have tables and run."""
    names = list(rows[0])
    seen: set[str] = set()
    cells = []
    for row in rows:
        text = as_text(row["prompt"])
        if not (unique_prompts and text in seen):
            cells.append([as_text(row[n]) if n in ("prompt", "completion") else row[n] for n in names])
        seen.add(text)
    if "wandb" in report_to:
        import wandb

        if wandb.run is not None:
            wandb.log({"completions": wandb.Table(columns=names, data=cells)})
    if "trackio" in report_to:
        import pandas
        import trackio

        trackio.log({"completions": trackio.Table(dataframe=pandas.DataFrame(cells, columns=names))}, step=step)
