"""Weights into a vLLM engine of this process: the phases of `weights.sync`, without a wire."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trl.errors import WeightSyncError
from trl.weights.source import PolicyWeights
from trl.weights.sync import SyncReport
from trl.weights.tied_heads import repack_tied_heads


class InProcessSync:
    """Keeps an engine's weights those of the policy.

    All tensors go in by one call, which takes them one after the other as they are cast: there is never a second copy
    of the model. vLLM distributes, fuses and packs them itself, as it does with a checkpoint.

    Args:
        llm: a `vllm.LLM` whose worker lives in this process, with nothing in flight.
        dtype: of its weights.
    """

    def __init__(self, llm: Any, dtype: torch.dtype):
        self._llm, self._dtype = llm, dtype
        self.version: int | None = None

    def update(self, weights: PolicyWeights, version: int) -> SyncReport:
        """Replaces all weights. On return the engine generates with them, and with nothing cached from before.

        Raises:
            WeightSyncError: with the phase. The engine's weights are of no version then.
        """
        stream = weights.in_dtype(self._dtype)
        report = SyncReport(num_bytes=sum(info.num_bytes for info in stream.metadata()))
        self.version = None
        with _phase("update", report):
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(stream)})
            self._llm.apply_model(repack_tied_heads)
        with _phase("caches", report):
            if self._llm.reset_prefix_cache() is False:
                raise RuntimeError("the prefix cache was not reset: a request is in flight")
        self.version = version
        return report


@contextmanager
def _phase(name: str, report: SyncReport) -> Iterator[None]:
    started = time.monotonic()
    try:
        yield
    except torch.OutOfMemoryError:
        raise  # the trainer explains it
    except (RuntimeError, ValueError, KeyError, AssertionError, AttributeError, TypeError) as error:
        # Whatever vLLM raises while it loads: the user has to learn that the weights are gone.
        raise WeightSyncError(
            f"The weights did not reach vLLM in this process (phase {name}): {type(error).__name__}: {error}. What it "
            "would generate with is undefined: start the run again from its last checkpoint.",
            phase=name,
            repaired=False,
        ) from error
    report.seconds[name] = time.monotonic() - started
