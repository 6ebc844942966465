"""The end of a run: what changed, how long it took, and where the result is."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl._deps import available
from trl.cli.curve import BLOCKS, draw_curve, finite, save_curve, terminal_characters
from trl.cli.progress import duration

if TYPE_CHECKING:
    from transformers import Trainer

CURVE_FILE = "reward_curve.png"


def print_summary(trainer: "Trainer") -> None:
    """Print the summary of a finished run and save its reward curve as PNG, on the main process only."""
    if not trainer.is_world_process_zero():
        return
    history, output_dir = trainer.state.log_history, str(trainer.args.output_dir)
    lines = summary_lines(history, trainer.state.global_step, terminal_characters(sys.stdout.encoding))
    lines += [save_reward_curve(history, output_dir), f"model in {output_dir}"]
    print("\n".join(line for line in lines if line))


def summary_lines(history: Sequence[Mapping[str, Any]], steps: int, characters: str = BLOCKS) -> list[str]:
    """Steps and time, reward from first to last with its curve, and mean completion length.

    Args:
        history: `trainer.state.log_history`.
        steps: optimizer steps done.
        characters: those of the curve, see `draw_curve`.
    """
    rewards = finite([entry.get("reward") for entry in history])
    seconds = finite([entry.get("train_runtime") for entry in history])
    lengths = finite([entry.get("completions/mean_length") for entry in history])
    lines = [f"{steps} steps" + (f" in {duration(seconds[-1])}" if seconds else "")]
    if rewards:
        lines.append(f"reward {rewards[0]:.3g} at the first log, {rewards[-1]:.3g} at the last")
    if len(rewards) > 1:
        lines += draw_curve(rewards, characters=characters)
    if lengths:
        lines.append(f"mean completion length {lengths[-1]:.4g} tokens (at first {lengths[0]:.4g})")
    return lines


def save_reward_curve(history: Sequence[Mapping[str, Any]], output_dir: str | Path) -> str:
    """Save the reward curve as PNG and return a line that says where, or why not; "" without two rewards."""
    points = [(entry["step"], entry["reward"]) for entry in history if "reward" in entry and "step" in entry]
    if len(points) < 2:
        return ""
    if not available("matplotlib"):
        return "no picture of the curve: matplotlib is not installed (`pip install 'trl[plot]'`)"
    steps, rewards = zip(*points)
    return f"reward curve in {save_curve(rewards, Path(output_dir) / CURVE_FILE, steps=steps)}"
