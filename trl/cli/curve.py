"""A curve of values: as lines of characters for the terminal, and as a picture."""

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from trl._deps import require

BLOCKS = " ▁▂▃▄▅▆▇█"
PLAIN = " .:#"
_LABEL = 8


def finite(values: Sequence[float | None]) -> list[float]:
    """`values` without None, NaN and infinities."""
    return [float(value) for value in values if value is not None and math.isfinite(value)]


def resample(values: Sequence[float], width: int) -> list[float]:
    """At most `width` values: means of stretches of equal length (equal to within one value)."""
    if len(values) <= width:
        return list(values)
    edges = [position * len(values) // width for position in range(width + 1)]
    return [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]


def draw_curve(
    values: Sequence[float | None],
    *,
    width: int = 60,
    height: int = 8,
    characters: str = BLOCKS,
    low: float | None = None,
    high: float | None = None,
) -> list[str]:
    """Lines of text that show `values` as columns over the lowest of the scale, with the scale on the left.

    Args:
        values: in order; None, NaN and infinities are left out.
        width: most columns; more values are averaged.
        height: lines.
        characters: from empty to full; `PLAIN` where the terminal has ASCII only.
        low, high: the scale reaches at least this far, so that noise does not fill it. It always covers the columns,
            which alone decide where these are None.

    Returns:
        `height` lines, none where there is no finite value.
    """
    columns = resample(finite(values), width)
    if not columns:
        return []
    covered = [*columns, *(limit for limit in (low, high) if limit is not None)]
    bottom, top = min(covered), max(covered)
    steps = (len(characters) - 1) * height
    levels = [_level(value, bottom, top, steps) for value in columns]
    labels = {0: f"{top:.3g}", height - 1: f"{bottom:.3g}"} if top > bottom else {height - 1: f"{bottom:.3g}"}
    return [
        f"{labels.get(row, ''):>{_LABEL}} |" + _row(levels, height - 1 - row, characters).rstrip()
        for row in range(height)
    ]


def _level(value: float, low: float, high: float, steps: int) -> int:
    """How many of `steps` a column is high: at least 1, so that the lowest value shows too."""
    share = (value - low) / (high - low) if high > low else 0.0
    return 1 + round(share * (steps - 1))


def _row(levels: Sequence[int], row_from_below: int, characters: str) -> str:
    full = len(characters) - 1
    return "".join(characters[min(max(level - row_from_below * full, 0), full)] for level in levels)


def terminal_characters(encoding: str | None) -> str:
    """The finest characters that a text stream of this encoding can hold."""
    try:
        BLOCKS.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return PLAIN
    return BLOCKS


def save_curve(
    values: Sequence[float | None], path: str | Path, *, steps: Sequence[float] | None = None, label: str = "reward"
) -> Path:
    """Write a PNG of `values` over `steps` and return its path.

    Args:
        values: in order; None, NaN and infinities leave a gap.
        path: the file; its folder is made.
        steps: horizontal positions, as many as values; 1, 2, 3 … if None.
        label: of the vertical axis.

    Raises:
        MissingDependencyError: without matplotlib.
    """
    require("matplotlib", "the picture of a curve")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    heights = [math.nan if value is None or not math.isfinite(value) else value for value in values]
    axes.plot(range(1, len(heights) + 1) if steps is None else steps, heights, marker="." if len(heights) < 40 else "")
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(str(target))
    return target
