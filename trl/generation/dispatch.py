"""Communication between the processes of a run around generation: who asks, and who needs whose results."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor

from trl.errors import GenerationError

T = TypeVar("T")


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


_users_of_group_of_one = 0


def join_alone() -> bool:
    """Makes this process a group of one, where it is in no group; returns whether `leave_alone` is to be called.

    vLLM would do so itself, over a port that it picks first and binds later: two runs that start together may pick the
    same. This needs none.
    """
    global _users_of_group_of_one
    if torch.distributed.is_initialized() and not _users_of_group_of_one:
        return False
    if not _users_of_group_of_one:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    _users_of_group_of_one += 1
    return True


def leave_alone() -> None:
    """Ends what `join_alone` made, once every one of its users has left."""
    global _users_of_group_of_one
    if not _users_of_group_of_one:
        return
    _users_of_group_of_one -= 1
    if not _users_of_group_of_one and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@dataclass(frozen=True)
class EngineGroup:
    """The processes that share one engine by tensor parallelism: neighbours in the order of the processes.

    Attributes:
        size: how many they are.
        handle: torch's process group, or None for a process alone.
    """

    size: int = 1
    handle: Any = None

    @classmethod
    def of(cls, processes: Processes, size: int) -> "EngineGroup":
        """The group of this process. All processes call it at the same time, and `size` divides their number."""
        if size == 1:
            return cls()
        # Every process takes part in making every group.
        groups = [
            torch.distributed.new_group(list(range(i, i + size)), backend="gloo")
            for i in range(0, processes.count, size)
        ]
        return cls(size, groups[processes.accelerator.process_index // size])

    def share(self, items: Sequence[T], seed: int) -> tuple[list[T], int, int]:
        """The items of all processes of the group in order, where this one's begin, and the first one's seed.

        Raises:
            GenerationError: another process called `fail` instead.
        """
        if self.size == 1:
            return list(items), 0, seed
        told = self._tell((list(items), seed))
        if failures := [theirs for theirs in told if isinstance(theirs, str)]:
            raise GenerationError(f"Another process that shares the engine failed: {failures[0]}")
        own = torch.distributed.get_rank(self.handle)
        every = [item for theirs, _ in told for item in theirs]
        return every, sum(len(theirs) for theirs, _ in told[:own]), told[0][1]

    def fail(self, error: Exception) -> None:
        """In place of `share`, for a process that has nothing to bring: the others do not wait for it in vain."""
        if self.size > 1:
            self._tell(str(error))

    def _tell(self, own: Any) -> list[Any]:
        told: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(told, own, group=self.handle)
        return told
