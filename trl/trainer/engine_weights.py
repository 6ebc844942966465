"""The policy's weights in an engine that has its own: brought up to date before it generates, and compared."""

import logging
import time
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from trl.generation.dispatch import Processes
from trl.generation.parity import as_batch, compare, verdict
from trl.trainer.metrics import Metrics
from trl.types import Engine, Rollout, RolloutBatch, Scorer
from trl.weights.source import PolicyWeights, dtype_name

logger = logging.getLogger(__name__)

# Enough tokens to tell one model from another, few enough to cost nothing.
_SEQUENCES, _TOKENS = 8, 256


class EngineWeights:
    """Keeps an engine's weights those of the policy.

    Args:
        engine: an engine without weights of its own needs nothing.
        model: the policy.
        processes: of the run; all of them call every method at the same time.
        metrics: receive `sampling/weight_sync_time`, `sampling/parity_kl` and `sampling/parity_max`.
        parity_steps: optimizer steps between two comparisons; 0 for none.
        score: log-probs `[T]` of a batch by the policy at temperature 1, without gradient.
        compute_dtype: in which the policy computes, e.g. `bfloat16`.
    """

    def __init__(
        self,
        engine: Engine,
        model: nn.Module,
        processes: Processes,
        metrics: Metrics,
        *,
        parity_steps: int,
        score: Callable[[RolloutBatch], Tensor],
        compute_dtype: str,
    ):
        self._engine, self._processes, self._metrics = engine, processes, metrics
        self._model, self._weights = model, PolicyWeights(model)
        self._parity_steps, self._score, self._compute_dtype = parity_steps, score, compute_dtype
        report_dtype_gap(engine.scorers, self._weights)
        self._sent_at: tuple[int, int] | None = None
        self._compared_at: int | None = None

    def bring_up_to_date(self, step: int) -> None:
        """Sends the weights, unless the policy has not moved since they were sent.

        Args:
            step: optimizer steps done, which is the version of the weights.
        """
        # The second number moves with changes in place, whoever makes them; `forget` is for those through `.data`.
        now = step, sum(parameter._version for parameter in self._model.parameters())
        if self._sent_at == now:
            return
        started = time.perf_counter()
        self._engine.update_weights(self._weights, step)
        self._processes.wait()
        self._sent_at = now
        if self._engine.own_weights:
            self._metrics.mean("sampling/weight_sync_time", time.perf_counter() - started)

    def rest(self) -> None:
        """Lets the engine free its memory; it gets the weights again before it generates."""
        if self._engine.sleep():
            self.forget()

    def forget(self) -> None:
        """Sends at the next opportunity: the weights may have changed without a step, by loading some."""
        self._sent_at = None

    def compare(self, rollouts: Sequence[Rollout], step: int) -> None:
        """Has engine and policy score the same tokens, where a comparison is due.

        Raises:
            ParityError: they cannot have the same weights.
        """
        scorers = self._engine.scorers
        if not scorers or not self._parity_steps:
            return
        if self._compared_at is not None and step - self._compared_at < self._parity_steps:
            return
        self._compared_at = step
        # vLLM needs room for one more token than it scores.
        room = min(_TOKENS, *(scorer.max_model_len - 1 for scorer in scorers))
        sequences = [[*r.prompt_ids, *r.completion.token_ids][:room] for r in rollouts[:_SEQUENCES]]
        sequences = [ids for ids in sequences if len(ids) > 1]
        # Also where there is nothing to score here: processes that share an engine ask it together.
        told = [scorer.score(sequences) for scorer in scorers]
        self.rest()
        if not sequences:
            return
        own = self._score(as_batch(sequences, _device(self._weights)))
        for scorer, logps in zip(scorers, told, strict=True):
            parity = compare(logps, own)
            self._metrics.mean("sampling/parity_kl", parity.kl)
            self._metrics.bound("sampling/parity_max", "max", torch.tensor([parity.max]))
            if warning := verdict(parity, [self._compute_dtype, scorer.dtype]):
                warnings.warn(f"{scorer.name}: {warning}", stacklevel=2)


def report_dtype_gap(scorers: Sequence[Scorer], weights: PolicyWeights) -> None:
    """Says once where an engine keeps the weights in another dtype than the trainer: they are rounded on the way."""
    own = {dtype_name(info.dtype) for info in weights.metadata()}
    for scorer in scorers:
        if scorer.dtype is not None and own != {scorer.dtype}:
            logger.warning(
                "The trainer's weights are %s, those of %s %s: they are rounded once on the way, and the importance "
                "ratio carries the difference.",
                " and ".join(sorted(own)),
                scorer.name,
                scorer.dtype,
            )


def _device(weights: PolicyWeights) -> torch.device:
    return next(tensor.device for _, tensor in weights)
