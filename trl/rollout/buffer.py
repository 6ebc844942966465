"""The generation window: one generated batch feeds several micro-steps, once or several times over."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from trl.types import RolloutBatch


class RolloutBuffer:
    """Hands out the slices of a generated batch, one per micro-step, and has the next one made in time.

    Args:
        steps_per_generation: slices of a batch.
        num_iterations: how often the slices are handed out.
    """

    def __init__(self, steps_per_generation: int, num_iterations: int):
        self.steps_per_generation = steps_per_generation
        self.window = steps_per_generation * num_iterations
        self.position = 0
        self.slices: list[RolloutBatch] = []

    def reset(self, position: int = 0) -> None:
        """Starts at the given micro-step with nothing generated."""
        self.position = position
        self.slices = []

    @property
    def inside_window(self) -> bool:
        """Whether some slices of the current batch are still to be handed out."""
        return self.position % self.window != 0

    def state_dict(self) -> dict[str, Any]:
        """Position and slices as plain containers of tensors."""
        return {"position": self.position, "slices": [s.state_dict() for s in self.slices]}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Continues where `state_dict` was taken."""
        self.position = state["position"]
        self.slices = [RolloutBatch.from_state_dict(s, device) for s in state["slices"]]

    def next(self, rows: Any, collect: Callable[[Any], Sequence[RolloutBatch]]) -> RolloutBatch:
        """The slice of this micro-step. `collect(rows)` makes the slices of a new batch where one is due."""
        if not self.slices or not self.inside_window:
            self.slices = list(collect(rows))
        piece = self.slices[self.position % self.steps_per_generation]
        self.position += 1
        return piece
