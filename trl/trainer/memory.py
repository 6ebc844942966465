"""The memory plan of a run: checked before training, and the answer to memory that runs out."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trl.models.planner import MemoryPlan, Phase, check, explain_out_of_memory

logger = logging.getLogger(__name__)


class MemoryGuard:
    """Knows what each phase was planned to need.

    Args:
        plan: None on machines without a GPU, where nothing is checked.

    Raises:
        ConfigError: the plan cannot work; with the settings that can.
    """

    def __init__(self, plan: MemoryPlan | None):
        self._plan = plan
        if plan is None:
            return
        logger.info("GPU memory, planned:\n%s", plan.table())
        if plan.engine is not None:
            check(plan)

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """While active, memory that runs out is explained by the plan.

        Raises:
            DeviceMemoryError: with the plan's table, and what to change.
        """
        try:
            yield
        except torch.OutOfMemoryError as error:
            if self._plan is None:
                raise
            allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
            raise explain_out_of_memory(error, self._plan, name, allocated=allocated, reserved=reserved) from error
