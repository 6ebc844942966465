"""Numbers gathered between two log lines, over micro-batches and processes."""

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["mean", "min", "max"]


class Metrics:
    """Accumulates means, minima and maxima; `flush` reduces them over processes and starts anew.

    NaN values are left out. A metric without any value comes out as None.
    """

    def __init__(self) -> None:
        self._means: dict[str, list[Tensor]] = {}
        self._moments: dict[str, list[Tensor]] = {}
        self._bounds: dict[str, tuple[Kind, list[Tensor]]] = {}

    def std(self, name: str, values: Tensor) -> None:
        """Adds values to an unbiased standard deviation over everything since the last flush."""
        values = values.detach().flatten().double()
        values = values[~torch.isnan(values)]
        moments = [torch.tensor(float(len(values)), dtype=torch.float64), values.sum(), (values**2).sum()]
        self._moments.setdefault(name, []).append(torch.stack([m.cpu() for m in moments]))

    def mean(self, name: str, values: Tensor | float, weights: Tensor | float | None = None) -> None:
        """Adds values to a mean; each counts with its weight, 1 unless given."""
        values = torch.as_tensor(values).detach().flatten().double()
        weight = torch.ones_like(values) if weights is None else torch.as_tensor(weights).to(values).flatten()
        given = ~torch.isnan(values)
        total = torch.where(given, values, 0.0) * weight
        self._means.setdefault(name, []).append(torch.stack([total.sum(), (given * weight).sum()]).cpu())

    def ratio(self, name: str, total: Tensor | float, count: Tensor | float) -> None:
        """Adds a sum and how many it is the sum of."""
        pair = torch.stack([torch.as_tensor(x, dtype=torch.float64).detach().cpu() for x in (total, count)])
        self._means.setdefault(name, []).append(pair)

    def bound(self, name: str, kind: Kind, values: Tensor) -> None:
        """Adds values to a minimum or maximum."""
        values = values.detach().flatten().double()
        values = values[~torch.isnan(values)]
        if len(values):
            extreme = values.min() if kind == "min" else values.max()
            self._bounds.setdefault(name, (kind, []))[1].append(extreme.cpu())
        else:
            self._bounds.setdefault(name, (kind, []))

    def flush(self, gather: Callable[[Tensor], Tensor]) -> dict[str, float | None]:
        """All metrics by name, over all processes. `gather` stacks a `[1, K]` tensor of each process to `[W, K]`."""
        means, bounds = sorted(self._means), sorted(self._bounds)
        out: dict[str, float | None] = {}
        if means:
            sums = torch.stack([torch.stack(self._means[n]).sum(0) for n in means])
            gathered = gather(sums.flatten()[None]).sum(0).view(-1, 2).tolist()
            out.update({n: (s / c if c else None) for n, (s, c) in zip(means, gathered, strict=True)})
        if moments := sorted(self._moments):
            own = torch.stack([torch.stack(self._moments[n]).sum(0) for n in moments])
            gathered = gather(own.flatten()[None]).sum(0).view(-1, 3).tolist()
            out.update({n: _std(*m) for n, m in zip(moments, gathered, strict=True)})
        if bounds:
            # Maxima as minima of the negative: one reduction for both. Infinity stands for "no value here".
            signs = torch.tensor([1.0 if self._bounds[n][0] == "min" else -1.0 for n in bounds], dtype=torch.float64)
            own = torch.stack([_extreme(*self._bounds[n]) for n in bounds])
            lowest = gather((signs * own)[None]).amin(0) * signs
            out.update(
                {n: (v if abs(v) != float("inf") else None) for n, v in zip(bounds, lowest.tolist(), strict=True)}
            )
        self._means, self._moments, self._bounds = {}, {}, {}
        return out


def _std(count: float, total: float, squares: float) -> float | None:
    """From count, sum and sum of squares; 0 for one value, None for none."""
    if count == 0:
        return None
    variance = (squares - total * total / count) / max(count - 1, 1)
    # What rounding leaves of equal values is no spread.
    return 0.0 if variance <= 1e-12 * squares else math.sqrt(variance)


def _extreme(kind: Kind, values: list[Tensor]) -> Tensor:
    if not values:
        return torch.tensor(float("inf") if kind == "min" else -float("inf"), dtype=torch.float64)
    stacked = torch.stack(values)
    return stacked.min() if kind == "min" else stacked.max()
