"""Communication between the processes of a run around generation: who asks, and who needs whose results."""

from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor


@dataclass(frozen=True)
class Processes:
    """The processes of the run, seen from one of them."""

    accelerator: Accelerator

    @property
    def count(self) -> int:
        return self.accelerator.num_processes

    def gather(self, rows: Tensor) -> Tensor:
        """`[sum of N, ...]` the rows of all processes, in their order. The processes have equally many."""
        if self.count == 1:
            return rows
        return self.accelerator.gather(rows.to(self.accelerator.device)).to(rows.device)

    def own(self, gathered: Tensor) -> Tensor:
        """The part of a gathered tensor that this process brought."""
        share = len(gathered) // self.count
        start = self.accelerator.process_index * share
        return gathered[start : start + share]

    def total(self, values: Tensor) -> Tensor:
        """The sum over processes, elementwise."""
        return values if self.count == 1 else self.gather(values[None]).sum(0)

    def largest(self, value: int) -> int:
        """The largest of the processes' values."""
        return int(self.gather(torch.tensor([value])).max())

    def wait(self) -> None:
        """Returns when all processes are here."""
        if self.count > 1:
            self.accelerator.wait_for_everyone()

    def gather_ragged(self, values: Tensor) -> Tensor:
        """All values of all processes, which may have different numbers of them."""
        if self.count == 1:
            return values
        longest = self.largest(len(values))
        padded = values.new_full((longest,), torch.nan)
        padded[: len(values)] = values
        gathered = self.gather(padded)
        return gathered[~torch.isnan(gathered)]
