"""Whether an engine has the trainer's weights: both score the same tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trl.errors import ParityError
from trl.types import RolloutBatch

# Mean absolute difference of log-probs, in nats, above which the user is warned, and above which the weights cannot be
# the same. Measured: 1e-6 between float32 implementations, 0.01 to 0.1 where one of them computes in 16 bits; another
# model, or a tensor that never arrived, is off by whole nats.
_BOUNDS = {"float32": (1e-3, 0.1), "other": (0.1, 1.0)}


@dataclass(frozen=True)
class Parity:
    """How far apart the two are.

    Attributes:
        kl: mean of `exp(d) - 1 - d` with `d = trainer - engine`, an estimate of KL(engine || trainer) in nats.
        mean: mean absolute difference.
        max: largest absolute difference.
        tokens: number of tokens scored.
    """

    kl: float
    mean: float
    max: float
    tokens: int


def compare(engine_logps: Sequence[Sequence[float]], trainer_logps: Tensor) -> Parity:
    """The distance between the engine's log-probs, per sequence, and the trainer's, `[T]` of all sequences in a row."""
    engine = torch.tensor([p for row in engine_logps for p in row], dtype=torch.float64)
    difference = trainer_logps.double().cpu() - engine
    kl = torch.expm1(difference) - difference
    return Parity(float(kl.mean()), float(difference.abs().mean()), float(difference.abs().max()), len(engine))


def verdict(parity: Parity, dtypes: Sequence[str | None]) -> str | None:
    """A warning, or None where all is well.

    Args:
        dtypes: of the trainer's computation and the engine's weights.

    Raises:
        ParityError: the weights cannot be the same.
    """
    exact = all(d == "float32" for d in dtypes)
    warn, fail = _BOUNDS["float32" if exact else "other"]
    found = (
        f"the engine's and the trainer's log-probs of {parity.tokens} tokens differ by {parity.mean:.3g} nats on "
        f"average, {parity.max:.3g} at most"
    )
    if parity.mean > fail or not math.isfinite(parity.mean):
        raise ParityError(
            f"The engine does not have the trainer's weights: {found}. It serves another model, or a tensor never "
            "arrived: start the server with the model that is trained, and compare `trl doctor`."
        )
    if parity.mean > warn:
        return f"Parity is worse than it should be with these precisions: {found}."
    return None


def as_batch(sequences: Sequence[Sequence[int]], device: torch.device) -> RolloutBatch:
    """A batch that scores every token of each sequence but its first."""
    rest = torch.tensor([token for ids in sequences for token in ids[1:]], dtype=torch.long, device=device)
    return RolloutBatch(
        prompt_ids=torch.tensor([ids[0] for ids in sequences], dtype=torch.long, device=device),
        prompt_lengths=torch.ones(len(sequences), dtype=torch.long),
        prompt_of_seq=torch.arange(len(sequences)),
        completion_ids=rest,
        completion_lengths=torch.tensor([len(ids) - 1 for ids in sequences]),
        loss_mask=torch.ones_like(rest, dtype=torch.bool),
    )
