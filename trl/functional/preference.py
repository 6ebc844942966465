"""Losses of pairs of completions: the DPO family.

Shapes: P pairs. The log-ratio of a completion is the sum over its tokens of `policy - reference` log-probs; a margin is
the log-ratio of the pair's first completion minus that of its second.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


@dataclass(frozen=True)
class Pairs:
    """What a loss is computed from.

    Attributes:
        margins: `[P]`.
        preference: `[P]` +1 where the first completion is the better one, -1 where the second is, 0 for a tie.
    """

    margins: Tensor
    preference: Tensor


@dataclass(frozen=True)
class PairOptions:
    """Constants of the losses.

    Attributes:
        beta: how strongly the policy is held to the reference.
    """

    beta: float = 0.1


def sigmoid(pairs: Pairs, o: PairOptions) -> Tensor:
    """`[P]` `-log sigmoid(beta m)`, m the margin of the better over the worse completion (DPO, arXiv:2305.18290,
    eq. 7).

    A tie costs half the loss of either order. Its gradient is 0 at equal log-ratios and pulls others back there.
    """
    first_is_better = (pairs.preference + 1) / 2
    logits = o.beta * pairs.margins
    return -first_is_better * logsigmoid(logits) - (1 - first_is_better) * logsigmoid(-logits)


def ipo(pairs: Pairs, o: PairOptions) -> Tensor:
    """`[P]` `(m - 1 / (2 beta))^2`, m the margin of the better over the worse completion (IPO, arXiv:2310.12036,
    eq. 17).

    A tie costs `m^2`: half the loss of either order, up to a constant.
    """
    return (pairs.margins - pairs.preference / (2 * o.beta)) ** 2


PairLoss = Callable[[Pairs, PairOptions], Tensor]

PAIR_LOSSES: dict[str, PairLoss] = {
    "sigmoid": sigmoid,
    "ipo": ipo,
}


def pair_losses(loss_type: str, margins: Tensor, preference: Tensor, beta: float) -> Tensor:
    """`[P]` the loss of each pair; exactly 0, without gradient, where the preference is NaN.

    The losses say what a tie costs. To swap the two completions of a pair changes nothing.

    Args:
        loss_type: a key of `PAIR_LOSSES`.
        margins: `[P]` log-ratio of the first completion minus that of the second.
        preference: `[P]` as of `trl.functional.advantages.rank_pairs`.
        beta: more than 0.
    """
    known = ~torch.isnan(preference)
    pairs = Pairs(margins, torch.where(known, preference, 0.0).to(margins.dtype))
    return PAIR_LOSSES[loss_type](pairs, PairOptions(beta)).masked_fill(~known, 0.0)
