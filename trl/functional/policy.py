"""Policy-gradient losses: four surrogates times their reductions make the eight loss types.

Everything is flat: shape `[T]` over the tokens of all sequences, per-sequence tensors `[N]`. `clipped_surrogate` and
`sequence_ratio` also serve losses of whole sequences.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trl.functional.reduce import (
    Normalizer,
    kl_k3,
    of_sequence,
    reduce_fixed_length,
    reduce_generation_token_mean,
    reduce_sequence_mean,
    reduce_sequence_sum,
    reduce_step_token_mean,
    segment_mean,
    segment_sum,
)

MAX_LOG_RATIO = 80.0
"""Bound on the log-ratio of a sequence: the exponential of more than 88 is infinite in float32."""


@dataclass(frozen=True)
class PolicyOptions:
    """Constants of the surrogates; names as in `trl.trainer.arguments.PolicyLossArguments`."""

    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    sapo_temperature_neg: float = 1.05
    sapo_temperature_pos: float = 1.0
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0

    @property
    def high(self) -> float:
        """The upper clip."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high


@dataclass(frozen=True)
class PolicyTokens:
    """What a surrogate is computed from.

    Attributes:
        logps: `[T]` log-probs being trained.
        ratio: `[T]` policy ratio, per token or the sequence's repeated.
        log_ratio: `[T]` `logps - old_logps` of each token.
        advantages: `[T]` the sequence's advantage at each of its tokens.
        mask: `[T]` loss tokens.
        seq_of_token: `[T]`.
        num_sequences: N.
        correction: `[T]` sampler correction, or None.
    """

    logps: Tensor
    ratio: Tensor
    log_ratio: Tensor
    advantages: Tensor
    mask: Tensor
    seq_of_token: Tensor
    num_sequences: int
    correction: Tensor | None = None


def policy_ratio(log_ratio: Tensor, mask: Tensor, seq_of_token: Tensor, num_sequences: int, level: str) -> Tensor:
    """`[T]` importance ratio: `exp(log_ratio)` per token, or for `level="sequence"` the exponential of the sequence's
    mean log-ratio, repeated at each of its tokens (GSPO, arXiv:2507.18071, eq. 7).
    """
    if level == "sequence":
        log_ratio = segment_mean(log_ratio, mask, seq_of_token, num_sequences)[seq_of_token]
    return log_ratio.exp()


def sequence_ratio(log_ratio: Tensor, mask: Tensor, seq_of_token: Tensor, num_sequences: int) -> Tensor:
    """`[N]` importance ratio of whole sequences: the exponential of the sum of `log_ratio` over loss tokens; 1 for a
    sequence without any. RLOO takes a completion as one action (arXiv:2402.14740).

    Args:
        log_ratio: `[T]`.
        mask: `[T]` loss tokens.
    """
    total = segment_sum(log_ratio * mask, seq_of_token, num_sequences)
    # An infinite ratio would make NaN of the gradient 0 that the clip gives it, and of an advantage 0.
    return total.clamp(max=MAX_LOG_RATIO).exp()


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, epsilon: float, high: float, delta: float | None = None
) -> Tensor:
    """`-min(min(w, delta) A, clip(w, 1 - epsilon, 1 + high) A)`: PPO's clip (arXiv:1707.06347, eq. 7), with an optional
    upper bound on the unclipped ratio (two-sided clip, arXiv:2505.07291).

    Elementwise: per token or per sequence.

    Args:
        ratio, advantages: of one shape, which is that of the result.
        epsilon, high: how far the ratio may fall below and rise above 1.
        delta: the bound on the unclipped ratio; None is no bound.
    """
    bounded = ratio.clamp(1 - epsilon, 1 + high)
    free = ratio if delta is None else ratio.clamp(max=delta)
    return -torch.min(free * advantages, bounded * advantages)


def clipped(t: PolicyTokens, o: PolicyOptions) -> Tensor:
    """`[T]` the clipped surrogate."""
    return clipped_surrogate(t.ratio, t.advantages, o.epsilon, o.high, o.delta)


def cispo(t: PolicyTokens, o: PolicyOptions) -> Tensor:
    """`[T]` `-sg(min(w, eps_high)) A log p`: the ratio is capped and carries no gradient (MiniMax-M1,
    arXiv:2506.13585, eq. 4).
    """
    return -t.ratio.detach().clamp(max=o.high) * t.advantages * t.logps


def sapo(t: PolicyTokens, o: PolicyOptions) -> Tensor:
    """`[T]` `-A sigmoid(tau (w - 1)) 4 / tau`: a soft gate in place of the clip (SAPO, arXiv:2511.20347)."""
    positive = t.advantages > 0
    tau = torch.where(positive, o.sapo_temperature_pos, o.sapo_temperature_neg)
    return -t.advantages * torch.sigmoid(tau * (t.ratio - 1)) * 4 / tau


def vespo_weight(t: PolicyTokens, o: PolicyOptions) -> Tensor:
    """`[N]` `phi = exp(lambda + k log W - lambda W)`, W the sequence's bounded ratio times its sampler correction;
    no gradient (VESPO).
    """
    floor, ceiling = torch.tensor(1e-8).log().item(), 20.0
    log_w = segment_sum(t.log_ratio.detach().clamp(-20, 20) * t.mask, t.seq_of_token, t.num_sequences)
    if t.correction is not None:
        bounded = t.correction.log().clamp(floor, ceiling)
        log_w = log_w + segment_sum(bounded * t.mask, t.seq_of_token, t.num_sequences)
    log_w = log_w.clamp(floor, ceiling)
    advantages = of_sequence(t.advantages, t.seq_of_token, t.num_sequences)
    k = torch.where(advantages >= 0, o.vespo_k_pos, o.vespo_k_neg)
    rate = torch.where(advantages >= 0, o.vespo_lambda_pos, o.vespo_lambda_neg)
    return torch.nan_to_num((rate + k * log_w - rate * log_w.exp()).exp(), nan=0.0, posinf=0.0, neginf=0.0)


def vespo(t: PolicyTokens, o: PolicyOptions) -> Tensor:
    """`[T]` `-phi A log p`, with phi from `vespo_weight`."""
    return -vespo_weight(t, o)[t.seq_of_token] * t.advantages * t.logps


Surrogate = Callable[[PolicyTokens, PolicyOptions], Tensor]
Reduction = Callable[[Tensor, Tensor, Tensor, Normalizer], Tensor]

POLICY_LOSSES: dict[str, tuple[Surrogate, Reduction]] = {
    "grpo": (clipped, reduce_sequence_mean),
    "bnpo": (clipped, reduce_step_token_mean),
    "dr_grpo": (clipped, reduce_fixed_length),
    "dapo": (clipped, reduce_generation_token_mean),
    "luspo": (clipped, reduce_sequence_sum),
    "cispo": (cispo, reduce_generation_token_mean),
    "sapo": (sapo, reduce_sequence_mean),
    "vespo": (vespo, reduce_generation_token_mean),
}


def policy_terms(
    loss_type: str,
    tokens: PolicyTokens,
    options: PolicyOptions,
    *,
    keep: Tensor | None = None,
    ref_logps: Tensor | None = None,
    beta: float = 0.0,
    bias_corrected_kl: bool = True,
) -> Tensor:
    """`[T]` the terms of the loss before reduction.

    The surrogate times the kept tokens times the sampler correction (which `vespo` holds in its own weight), plus
    `beta` times the KL estimate, which neither of them touches.

    Args:
        keep: `[T]` tokens whose surrogate counts; None keeps all.
        ref_logps: `[T]`, needed where `beta` is not 0.
        bias_corrected_kl: multiply the KL estimate by the policy ratio, which makes its gradient unbiased off-policy.
    """
    surrogate, _ = POLICY_LOSSES[loss_type]
    terms = surrogate(tokens, options)
    if keep is not None:
        terms = terms * keep
    if tokens.correction is not None and surrogate is not vespo:
        terms = terms * tokens.correction
    if beta != 0.0:
        assert ref_logps is not None
        kl = kl_k3(tokens.logps, ref_logps)
        terms = terms + beta * (kl * tokens.ratio if bias_corrected_kl else kl)
    return terms
