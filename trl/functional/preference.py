"""Losses of pairs of completions: the DPO family.

`pair_losses` is for data in which one completion is chosen over the other, `ranked_pair_losses` for pairs whose order
is only known by their preference, where some may tie.

Shapes: P pairs, N sequences, T tokens of all sequences.

In the formulas `r` is the log-ratio of a completion, the sum over its tokens of `policy - reference` log-probs; `s` is
its score (`F_DIVERGENCES`), which by default is `r`; `D = s_c - s_r`, the index c for the chosen and r for the rejected
completion; `eps` is the label smoothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from trl.functional.reduce import segment_mean, segment_sum

MAX_EXPONENT = 30.0
"""From here on an exponential goes on as its tangent: it stays finite, also squared, and keeps its gradient."""


@dataclass(frozen=True)
class Completions:
    """One completion of each pair.

    Attributes:
        log_ratios: `[P]` sum over tokens of `policy - reference` log-probs. Of equal models it is exactly 0 only when
            the tokens are subtracted before they are added up.
        lengths: `[P]` what the losses of averages, `sigmoid_norm` and `ipo`, divide the score by: the number of tokens.
            With ones they are losses of sums.
        ref_logps: `[P]` sum over tokens of the reference's log-probs; only `aot` needs it.
        nll: `[P]` the policy's negative log-prob, averaged over tokens; only `sft` needs it. The mean over the
            completion's own tokens weighs pairs alike; the sum over them divided by the mean length of chosen
            completions weighs tokens alike.
    """

    log_ratios: Tensor
    lengths: Tensor
    ref_logps: Tensor | None = None
    nll: Tensor | None = None

    def select(self, rows: Tensor) -> "Completions":
        """The given ones, in the given order. `rows`: indices."""
        ref_logps, nll = (None if values is None else values[rows] for values in (self.ref_logps, self.nll))
        return Completions(self.log_ratios[rows], self.lengths[rows], ref_logps, nll)


@dataclass(frozen=True)
class Pairs:
    """What a loss is computed from: P completions, and the P that they were chosen over."""

    chosen: Completions
    rejected: Completions

    @property
    def margins(self) -> Tensor:
        """`[P]` `r_c - r_r`."""
        return self.chosen.log_ratios - self.rejected.log_ratios

    @property
    def swapped(self) -> "Pairs":
        """The pairs with the other completion as the chosen one."""
        return Pairs(self.rejected, self.chosen)


@dataclass(frozen=True)
class PairOptions:
    """Constants of the losses.

    Attributes:
        beta: above 0; how strongly the policy is held to the reference.
        label_smoothing: probability that a label is wrong, from 0 to below 1/2, in `robust`, `exo_pair`, `aot` and
            `aot_unpaired`. `exo_pair` needs one above 0.
        f_divergence_type: a key of `F_DIVERGENCES`.
        f_alpha_divergence_coef: the alpha of `alpha_divergence`.
        discopop_tau: above 0; temperature of the gate of `discopop`.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    f_divergence_type: str = "reverse_kl"
    f_alpha_divergence_coef: float = 0.5
    discopop_tau: float = 0.05


# ---- scores ----


def bounded(exponential: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The exponential of x, above `MAX_EXPONENT` its tangent there. `exponential`: `torch.exp` or `torch.expm1`."""
    return exponential(x.clamp(max=MAX_EXPONENT)) + exp(MAX_EXPONENT) * relu(x - MAX_EXPONENT)


def alpha_score(log_ratios: Tensor, alpha: float) -> Tensor:
    """`(exp((alpha - 1) r) - 1) / (alpha - 1)`; its limit `r`, the reverse KL, at 1. At 0 it is the forward KL.

    f-DPO calls `1 - alpha` what is alpha here; at 1/2 both are the same.
    """
    power = alpha - 1
    return log_ratios if power == 0 else bounded(torch.expm1, power * log_ratios) / power


# name -> from log-ratios and alpha to scores
F_DIVERGENCES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "reverse_kl": lambda r, _: r,
    "forward_kl": lambda r, _: alpha_score(r, 0.0),
    "js_divergence": lambda r, _: log(2) + logsigmoid(r),
    "alpha_divergence": alpha_score,
}
"""The divergence that holds the policy to the reference, as the score it makes of a log-ratio: `f'(exp(r)) - f'(1)`
(f-DPO, arXiv:2309.16240, table 1). All have the value 0 and the slope 1 (1/2 of `js_divergence`) at 0."""


def scores(completions: Completions, o: PairOptions) -> Tensor:
    """`[P]` `s`: the completions' scores under the divergence of the options."""
    return F_DIVERGENCES[o.f_divergence_type](completions.log_ratios, o.f_alpha_divergence_coef)


def score_margins(pairs: Pairs, o: PairOptions) -> Tensor:
    """`[P]` `D = s_c - s_r`."""
    return scores(pairs.chosen, o) - scores(pairs.rejected, o)


def average_margins(pairs: Pairs, o: PairOptions) -> Tensor:
    """`[P]` `s_c / |c| - s_r / |r|`: scores are divided by the completions' lengths."""
    chosen, rejected = (scores(side, o) / side.lengths.clamp(min=1) for side in (pairs.chosen, pairs.rejected))
    return chosen - rejected


# ---- losses ----


def smoothed(logits: Tensor, eps: float) -> Tensor:
    """`-(1 - eps) log sigmoid(x) - eps log sigmoid(-x)`: cross-entropy with labels that are wrong with chance `eps`."""
    return -(1 - eps) * logsigmoid(logits) - eps * logsigmoid(-logits)


def sigmoid(pairs: Pairs, o: PairOptions) -> Tensor:
    """`[P]` `-log sigmoid(beta D)` (DPO, arXiv:2305.18290, eq. 7)."""
    return -logsigmoid(o.beta * score_margins(pairs, o))


def sigmoid_norm(pairs: Pairs, o: PairOptions) -> Tensor:
    """`[P]` `-log sigmoid(beta (s_c / |c| - s_r / |r|))`: DPO of averages over tokens (Tulu 3, arXiv:2411.15124)."""
    return -logsigmoid(o.beta * average_margins(pairs, o))


def hinge(pairs: Pairs, o: PairOptions) -> Tensor:
    """`[P]` `max(0, 1 - beta D)` (SLiC, arXiv:2305.10425; with a reference RSO, arXiv:2309.06657)."""
    return relu(1 - o.beta * score_margins(pairs, o))


def ipo(pairs: Pairs, o: PairOptions) -> Tensor:
    """`[P]` `(s_c / |c| - s_r / |r| - 1 / (2 beta))^2` (IPO, arXiv:2310.12036, eq. 17).

    The paper's margin is one of sums: this is it where the lengths are ones.
    """
    return (average_margins(pairs, o) - 1 / (2 * o.beta)) ** 2


def ipo_tie(pairs: Pairs, o: PairOptions) -> Tensor:
    """`[P]` `ipo` of a tie: the square of the margin, which is the mean of both orders less a constant."""
    return average_margins(pairs, o) ** 2


def exo_pair(pairs: Pairs, o: PairOptions) -> Tensor:
    """`[P]` `KL(p || q)` of `p = (sigmoid(beta D), sigmoid(-beta D))` to `q = (1 - eps, eps)` (EXO,
    arXiv:2402.00856).
    """
    assert o.label_smoothing > 0, "the KL divergence to a label that is certain is infinite"
    logits = o.beta * score_margins(pairs, o)
    first, second = logsigmoid(logits), logsigmoid(-logits)
    return first.exp() * (first - log(1 - o.label_smoothing)) + second.exp() * (second - log(o.label_smoothing))


def nca_pair(pairs: Pairs, o: PairOptions) -> Tensor:
    """`[P]` `-log sigmoid(beta r_c) - 1/2 log sigmoid(-beta r_c) - 1/2 log sigmoid(-beta r_r)` (NCA,
    arXiv:2402.05369).
    """
    chosen, rejected = o.beta * pairs.chosen.log_ratios, o.beta * pairs.rejected.log_ratios
    return -logsigmoid(chosen) - (logsigmoid(-chosen) + logsigmoid(-rejected)) / 2


def robust(pairs: Pairs, o: PairOptions) -> Tensor:
    """`[P]` `(-(1 - eps) log sigmoid(beta D) + eps log sigmoid(-beta D)) / (1 - 2 eps)` (robust DPO,
    arXiv:2403.00409).

    Over labels that are wrong with chance `eps` its mean is `sigmoid` of the right ones. Unbounded below for `eps > 0`.
    """
    logits, eps = o.beta * score_margins(pairs, o), o.label_smoothing
    return (-(1 - eps) * logsigmoid(logits) + eps * logsigmoid(-logits)) / (1 - 2 * eps)


def bco_pair(pairs: Pairs, o: PairOptions) -> Tensor:
    """`[P]` `-log sigmoid(beta r_c) - log sigmoid(-beta r_r)` (BCO, arXiv:2404.04656, without its reward shift)."""
    return -logsigmoid(o.beta * pairs.chosen.log_ratios) - logsigmoid(-o.beta * pairs.rejected.log_ratios)


def sppo_hard(pairs: Pairs, o: PairOptions) -> Tensor:
    """`[P]` `(r_c - 1 / (2 beta))^2 + (r_r + 1 / (2 beta))^2`: the chosen one wins for certain (SPPO,
    arXiv:2405.00675).
    """
    target = 1 / (2 * o.beta)
    return (pairs.chosen.log_ratios - target) ** 2 + (pairs.rejected.log_ratios + target) ** 2


def sppo_tie(pairs: Pairs, o: PairOptions) -> Tensor:
    """`[P]` `sppo_hard` of a tie: each wins with chance 1/2, which makes both targets 0."""
    return pairs.chosen.log_ratios**2 + pairs.rejected.log_ratios**2


def aot(pairs: Pairs, o: PairOptions) -> Tensor:
    """`[P]` smoothed `-log sigmoid(beta d)`, `d` the sorted policy margins less the sorted reference margins (AOT of
    paired data, arXiv:2406.05882).

    The margins, of log-probs, are sorted over the batch: the values belong to ranks rather than to pairs, only their
    mean has a meaning, and that of a batch differs from that of its pieces.
    """
    assert pairs.chosen.ref_logps is not None
    assert pairs.rejected.ref_logps is not None
    reference = pairs.chosen.ref_logps - pairs.rejected.ref_logps
    policy = pairs.margins + reference
    return smoothed(o.beta * (policy.sort().values - reference.sort().values), o.label_smoothing)


def aot_unpaired(pairs: Pairs, o: PairOptions) -> Tensor:
    """`[P]` smoothed `-log sigmoid(beta d)`, `d` the sorted `r_c` less the sorted `r_r` (AOT of unpaired data,
    arXiv:2406.05882). Of ranks rather than of pairs, like `aot`.
    """
    sorted_margins = pairs.chosen.log_ratios.sort().values - pairs.rejected.log_ratios.sort().values
    return smoothed(o.beta * sorted_margins, o.label_smoothing)


def apo_zero(pairs: Pairs, o: PairOptions) -> Tensor:
    """`[P]` `1 - sigmoid(beta r_c) + sigmoid(beta r_r)`: up with the chosen, down with the rejected (APO,
    arXiv:2408.06266).
    """
    return torch.sigmoid(-o.beta * pairs.chosen.log_ratios) + torch.sigmoid(o.beta * pairs.rejected.log_ratios)


def apo_down(pairs: Pairs, o: PairOptions) -> Tensor:
    """`[P]` `sigmoid(beta r_c) + 1 - sigmoid(beta (r_c - r_r))`: down with both, the rejected further (APO,
    arXiv:2408.06266).
    """
    return torch.sigmoid(o.beta * pairs.chosen.log_ratios) + torch.sigmoid(-o.beta * pairs.margins)


def discopop(pairs: Pairs, o: PairOptions) -> Tensor:
    """`[P]` `(1 - g) (-log sigmoid(x)) + g exp(-x)` with `x = beta D` and the gate `g = sigmoid(x / tau)` (DiscoPOP,
    arXiv:2406.08414).
    """
    x = o.beta * score_margins(pairs, o)
    gate = x / o.discopop_tau
    # In one exponent: where x is far below 0, g is 0 and exp(-x) infinite.
    exponential = bounded(torch.exp, logsigmoid(gate) - x)
    return -torch.sigmoid(-gate) * logsigmoid(x) + exponential


def sft(pairs: Pairs, _: PairOptions) -> Tensor:
    """`[P]` negative log-prob of the chosen completion, averaged over its tokens."""
    assert pairs.chosen.nll is not None
    return pairs.chosen.nll


Formula = Callable[[Pairs, PairOptions], Tensor]


def either_order(formula: Formula) -> Formula:
    """The mean of the loss of both orders."""
    return lambda pairs, o: (formula(pairs, o) + formula(pairs.swapped, o)) / 2


class PairLoss(NamedTuple):
    """A row of `PAIR_LOSSES`.

    Attributes:
        formula: the loss of pairs whose first completion is the better one.
        tie: the loss of pairs without a better one, with the mean gradient of both orders; None where there is none,
            because the loss is one of chosen completions or of sorted batches.
        reverse_kl_only: whether it is one of the log-ratios themselves, and knows no other divergence.
        whole_batch: whether it compares pairs with one another, so that a batch must not be cut.
    """

    formula: Formula
    tie: Formula | None
    reverse_kl_only: bool = False
    whole_batch: bool = False


PAIR_LOSSES: dict[str, PairLoss] = {
    "sigmoid": PairLoss(sigmoid, either_order(sigmoid)),
    "sigmoid_norm": PairLoss(sigmoid_norm, either_order(sigmoid_norm)),
    "hinge": PairLoss(hinge, either_order(hinge)),
    "ipo": PairLoss(ipo, ipo_tie),
    "exo_pair": PairLoss(exo_pair, either_order(exo_pair)),
    "nca_pair": PairLoss(nca_pair, either_order(nca_pair), reverse_kl_only=True),
    "robust": PairLoss(robust, either_order(robust)),
    "bco_pair": PairLoss(bco_pair, either_order(bco_pair), reverse_kl_only=True),
    "sppo_hard": PairLoss(sppo_hard, sppo_tie, reverse_kl_only=True),
    "aot": PairLoss(aot, None, reverse_kl_only=True, whole_batch=True),
    "aot_unpaired": PairLoss(aot_unpaired, None, reverse_kl_only=True, whole_batch=True),
    "apo_zero": PairLoss(apo_zero, either_order(apo_zero), reverse_kl_only=True),
    "apo_down": PairLoss(apo_down, either_order(apo_down), reverse_kl_only=True),
    "discopop": PairLoss(discopop, either_order(discopop)),
    "sft": PairLoss(sft, None),
}


def _row(loss_type: str, options: PairOptions) -> PairLoss:
    row, divergence = PAIR_LOSSES[loss_type], options.f_divergence_type
    assert divergence == "reverse_kl" or not row.reverse_kl_only, f"{loss_type!r} does not know {divergence!r}"
    return row


def pair_losses(loss_type: str, pairs: Pairs, options: PairOptions) -> Tensor:
    """`[P]` the loss of each pair.

    Args:
        loss_type: a key of `PAIR_LOSSES`.
    """
    return _row(loss_type, options).formula(pairs, options)


def ranked_pair_losses(loss_type: str, pairs: Pairs, preference: Tensor, options: PairOptions) -> Tensor:
    """`[P]` the loss of each pair; exactly 0, without gradient, where the preference is NaN.

    To swap the two completions of a pair, and its preference, changes nothing. A tie has the mean gradient of both
    orders, which in `sigmoid` and `ipo` pulls the log-ratios together where they differ.

    Args:
        loss_type: a key of `PAIR_LOSSES` whose row says what a tie costs.
        pairs: of which the first completion need not be the better one.
        preference: `[P]` +1 where the first completion is the better one, -1 where the second is, 0 for a tie, NaN
            where that is unknown, as of `trl.functional.advantages.rank_pairs`.
    """
    loss = _row(loss_type, options)
    assert loss.tie is not None, f"{loss_type!r} does not say what a tie costs"
    decided = torch.where(preference > 0, loss.formula(pairs, options), loss.formula(pairs.swapped, options))
    losses = torch.where(preference == 0, loss.tie(pairs, options), decided)
    return losses.masked_fill(torch.isnan(preference), 0.0)


def mixture(
    loss_types: Sequence[str], loss_weights: Sequence[float] | None, pairs: Pairs, options: PairOptions
) -> tuple[Tensor, dict[str, Tensor]]:
    """`[P]` the weighted sum of several losses, and each of them without its weight, `[P]` by name.

    A preference loss beside `sft` is the mixture of MPO (arXiv:2411.10442).

    Args:
        loss_types: different keys of `PAIR_LOSSES`, at least one.
        loss_weights: one each; None weighs all with 1.
    """
    weights = [1.0] * len(loss_types) if loss_weights is None else loss_weights
    assert len(set(loss_types)) == len(loss_types) == len(weights) > 0
    parts = {name: pair_losses(name, pairs, options) for name in loss_types}
    total = torch.stack([weight * part for weight, part in zip(weights, parts.values())]).sum(0)
    return total, parts


# ---- weights of tokens and of completions ----


def scale_tails(values: Tensor, mask: Tensor, seq_of_token: Tensor, shared: Tensor, ld_alpha: float) -> Tensor:
    """`[T]` the values, of which those beyond the length that a pair shares are multiplied by `ld_alpha`.

    The sums of log-probs over a completion then are LD-DPO's (arXiv:2409.06411): the shared length in full, and a part
    of what the longer completion says beyond it. `ld_alpha=1` changes nothing, 0 cuts both to the shorter one.

    Args:
        values: `[T]` log-probs, or their differences.
        mask: `[T]` loss tokens, which alone count as length.
        seq_of_token: `[T]`, in ascending order.
        shared: `[N]` for each sequence the length of the shorter one of its pair.
    """
    counted = mask.long()
    totals = segment_sum(counted, seq_of_token, len(shared))
    before_sequence = totals.cumsum(0) - totals
    position = counted.cumsum(0) - counted - before_sequence[seq_of_token]
    return torch.where(position < shared[seq_of_token], values, ld_alpha * values)


def wpo_weights(
    logps: Tensor, log_sum_sq_probs: Tensor, mask: Tensor, seq_of_token: Tensor, num_sequences: int
) -> Tensor:
    """`[N]` how much a completion is one that the policy itself would write, without gradient: `exp` of the mean over
    tokens of `log p - log sum_v p_v^2` (WPO, arXiv:2406.11827, with sampled alignment).

    The loss of a pair is multiplied by the weights of both its completions. 1 for a sequence without loss tokens.

    Args:
        logps: `[T]` the policy's log-probs.
        log_sum_sq_probs: `[T]` of its distributions there.
        mask: `[T]` loss tokens.
    """
    return segment_mean((logps - log_sum_sq_probs).detach(), mask, seq_of_token, num_sequences).exp()
