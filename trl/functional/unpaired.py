"""Losses of single completions, each of which is desirable or not: KTO.

Shapes: N sequences. In the formulas `r` is the log-ratio of a completion, the sum over its tokens of
`policy - reference` log-probs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Judged:
    """What a loss is computed from.

    Attributes:
        log_ratios: `[N]`.
        desirable: `[N]` bool.
        kl: the mean log-ratio of completions behind prompts that are not theirs: a single number, the same for all
            sequences and processes. None for a loss that does not need it.
    """

    log_ratios: Tensor
    desirable: Tensor
    kl: Tensor | None = None


@dataclass(frozen=True)
class UnpairedOptions:
    """Constants of the losses.

    Attributes:
        beta: above 0; how strongly the policy is held to the reference.
        desirable_weight, undesirable_weight: what the losses of the two kinds are multiplied by.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0


def value_loss(judged: Judged, reference_point: Tensor | float, beta: float) -> Tensor:
    """`[N]` `1 - sigmoid(beta (r - z))` of a desirable completion, `1 - sigmoid(beta (z - r))` of another, `z` the
    reference point.
    """
    gain = beta * (judged.log_ratios - reference_point)
    # 1 - sigmoid(x) = sigmoid(-x), which keeps its digits where x is large.
    return torch.sigmoid(torch.where(judged.desirable, -gain, gain))


def kto(judged: Judged, o: UnpairedOptions) -> Tensor:
    """`[N]` the loss of gains and losses over the KL divergence to the reference (KTO, arXiv:2402.01306).

    The reference point is the KL estimate, of which a negative one counts as 0; it has no gradient.
    """
    assert judged.kl is not None
    return value_loss(judged, judged.kl.detach().clamp(min=0), o.beta)


def apo_zero_unpaired(judged: Judged, o: UnpairedOptions) -> Tensor:
    """`[N]` `1 - sigmoid(beta r)` of a desirable completion, `sigmoid(beta r)` of another (APO, arXiv:2408.06266)."""
    return value_loss(judged, 0.0, o.beta)


class UnpairedLoss(NamedTuple):
    """A row of `UNPAIRED_LOSSES`.

    Attributes:
        formula: the loss before its weights.
        needs_kl: whether it needs the KL estimate, and with it a forward pass over mismatched completions.
    """

    formula: Callable[[Judged, UnpairedOptions], Tensor]
    needs_kl: bool


UNPAIRED_LOSSES: dict[str, UnpairedLoss] = {
    "kto": UnpairedLoss(kto, needs_kl=True),
    "apo_zero_unpaired": UnpairedLoss(apo_zero_unpaired, needs_kl=False),
}


def unpaired_losses(loss_type: str, judged: Judged, options: UnpairedOptions) -> Tensor:
    """`[N]` the loss of each completion, times the weight of its kind.

    Args:
        loss_type: a key of `UNPAIRED_LOSSES`.
    """
    losses = UNPAIRED_LOSSES[loss_type].formula(judged, options)
    return torch.where(judged.desirable, options.desirable_weight * losses, options.undesirable_weight * losses)
