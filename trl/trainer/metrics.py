"""Numbers gathered between two log lines, over micro-batches and processes."""

import math
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from accelerate.utils import gather_object
from torch import Tensor

Kind = Literal["mean", "std", "min", "max"]
T = TypeVar("T")


class Metrics:
    """Accumulates means, deviations, minima and maxima; `flush` reduces them over processes and starts anew.

    NaN values are left out. A metric without any value comes out as None.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[Kind, str], list[Tensor]] = {}
        self._bounds: dict[tuple[Kind, str], list[Tensor]] = {}

    def std(self, name: str, values: Tensor) -> None:
        """Adds values to an unbiased standard deviation over everything since the last flush."""
        values = values.detach().flatten().double()
        given = ~torch.isnan(values)
        values = torch.where(given, values, 0.0)
        self._add("std", name, given.sum(), values.sum(), (values**2).sum())

    def mean(self, name: str, values: Tensor | float, weights: Tensor | float | None = None) -> None:
        """Adds values to a mean; each counts with its weight, 1 unless given."""
        values = torch.as_tensor(values).detach().flatten().double()
        weight = torch.ones_like(values) if weights is None else torch.as_tensor(weights).to(values).flatten()
        given = ~torch.isnan(values)
        self._add("mean", name, (torch.where(given, values, 0.0) * weight).sum(), (given * weight).sum())

    def ratio(self, name: str, total: Tensor | float, count: Tensor | float) -> None:
        """Adds a sum and how many it is the sum of."""
        self._add("mean", name, total, count)

    def bound(self, name: str, kind: Literal["min", "max"], values: Tensor) -> None:
        """Adds values to a minimum or maximum."""
        values = values.detach().flatten().double()
        nothing = _no_value(kind)
        values = torch.where(torch.isnan(values), nothing, values)
        extreme = torch.cat([values, values.new_tensor([nothing])]).aminmax()
        self._bounds.setdefault((kind, name), []).append(extreme.min if kind == "min" else extreme.max)

    def flush(self, gather: Callable[[Tensor], Tensor]) -> dict[str, float | None]:
        """All metrics by name, over all processes, whichever of them has values for it.

        Args:
            gather: stacks a `[1, K]` tensor of each process to `[W, K]`.
        """
        # A reward function may log on one process only: all have to reduce the same list of metrics.
        sums, bounds = sorted(set(from_all_processes([*self._sums]))), sorted(set(from_all_processes([*self._bounds])))
        out: dict[str, float | None] = {}
        if sums:
            own = torch.stack([sum(self._sums.get(key, []), torch.zeros(3, dtype=torch.float64)) for key in sums])
            total = gather(own.flatten()[None]).sum(0).view(-1, 3).tolist()
            out.update({name: _RESULTS[kind](*x) for (kind, name), x in zip(sums, total, strict=True)})
        if bounds:
            # Maxima as minima of the negative: one reduction for both. Infinity stands for "no value here".
            signs = torch.tensor([1.0 if kind == "min" else -1.0 for kind, _ in bounds], dtype=torch.float64)
            own = torch.stack([_lowest(signs[i], self._bounds.get(key, [])) for i, key in enumerate(bounds)])
            lowest = (gather(own[None]).amin(0) * signs).tolist()
            out.update({name: v if math.isfinite(v) else None for (_, name), v in zip(bounds, lowest, strict=True)})
        self._sums, self._bounds = {}, {}
        return out

    def _add(self, kind: Kind, name: str, *sums: Tensor | float) -> None:
        row = torch.zeros(3, dtype=torch.float64)
        for i, value in enumerate(sums):
            row[i] = torch.as_tensor(value).detach()
        self._sums.setdefault((kind, name), []).append(row)


def from_all_processes(items: list[T]) -> list[T]:
    """The items of all processes, in the order of the processes, which may have different numbers of them."""
    gathered: Any = gather_object(items)
    return list(gathered)


def _mean(total: float, count: float, _: float) -> float | None:
    return total / count if count else None


def _std(count: float, total: float, squares: float) -> float | None:
    """From count, sum and sum of squares; 0 for one value, None for none."""
    if count == 0:
        return None
    variance = (squares - total * total / count) / max(count - 1, 1)
    # What rounding leaves of equal values is no spread.
    return 0.0 if variance <= 1e-12 * squares else math.sqrt(variance)


_RESULTS: dict[str, Callable[[float, float, float], float | None]] = {"mean": _mean, "std": _std}


def _no_value(kind: str) -> float:
    return math.inf if kind == "min" else -math.inf


def _lowest(sign: Tensor, values: list[Tensor]) -> Tensor:
    """The least of the values times the sign; infinity for none."""
    return min([sign * value.cpu() for value in values], default=torch.tensor(math.inf, dtype=torch.float64))
