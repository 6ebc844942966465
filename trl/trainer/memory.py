"""The memory plan of a run: checked before training, and the answer to memory that runs out."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from trl.errors import TRLError
from trl.generation.build import engine_size
from trl.models.load import compute_dtype
from trl.models.planner import (
    MemoryPlan,
    ModelSize,
    Phase,
    TrainingSize,
    check,
    explain_out_of_memory,
    plan,
)

logger = logging.getLogger(__name__)


def plan_of(
    args: Any, policy: PreTrainedModel, prompt_tokens: int, *, frozen_bytes: int, total_bytes: int
) -> MemoryPlan | None:
    """The plan of an online method with this config; None for a model whose config has not the sizes it needs.

    Args:
        prompt_tokens: of the longest prompt.
        frozen_bytes: weights of the reference model, or of a teacher.
        total_bytes: of the GPU.
    """
    try:
        size = ModelSize.of(policy, getattr(torch, compute_dtype(args, policy)))
        engine = engine_size(args, policy, max(args.group_plan.rows, args.group_plan.eval_rows))
    except (AttributeError, TypeError) as error:
        logger.info("No memory plan for %s: %s", type(policy).__name__, error)
        return None
    training = TrainingSize.of(args, policy, prompt_tokens=prompt_tokens, frozen_bytes=frozen_bytes)
    return plan(size, training, engine, total_bytes)


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
        except RuntimeError as error:
            # vLLM's own allocator has no type for it.
            ran_out = isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()
            if self._plan is None or not ran_out or isinstance(error, TRLError):
                raise
            allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
            raise explain_out_of_memory(error, self._plan, name, allocated=allocated, reserved=reserved) from error
