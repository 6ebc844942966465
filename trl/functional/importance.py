"""Correction of the gap between the distribution that sampled and the one that is trained.

Shapes: N sequences, T tokens of all sequences.
"""

import torch
from torch import Tensor

from trl.functional.reduce import segment_mean, segment_sum


def sampler_correction(
    old_logps: Tensor,
    sampling_logps: Tensor,
    mask: Tensor,
    seq_of_token: Tensor,
    num_sequences: int,
    *,
    mode: str,
    clip_min: float | None,
    clip_max: float | None,
) -> Tensor:
    """`[T]` importance ratio of the trainer's over the sampler's probability, bounded, without gradient.

    Truncated importance sampling and its masked variant, per token or for the whole sequence (whose ratio is the
    product over its loss tokens).

    Args:
        old_logps, sampling_logps: `[T]`; a NaN difference counts as 0.
        mask: `[T]` loss tokens.
        mode: `token_truncate`, `token_mask`, `sequence_truncate` or `sequence_mask`. *truncate* clamps the ratio to
            the bounds, *mask* sets it to 0 outside of them.
        clip_min, clip_max: the bounds; None is no bound.
    """
    level, _, action = mode.partition("_")
    difference = torch.nan_to_num((old_logps - sampling_logps).detach()) * mask
    if level == "sequence":
        difference = segment_sum(difference, seq_of_token, num_sequences)[seq_of_token]
    ratio = difference.exp()
    low = 0.0 if clip_min is None else clip_min
    high = float("inf") if clip_max is None else clip_max
    if action == "truncate":
        return ratio.clamp(low, high)
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


def off_policy_keep(
    logps: Tensor,
    behavior_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    seq_of_token: Tensor,
    threshold: float,
) -> Tensor:
    """`[N]` bool: whether a sequence stays in the loss.

    Dropped are sequences of negative advantage whose mean `behavior - policy` log-prob exceeds the threshold: what
    the policy has moved away from teaches nothing more (DeepSeek-V3.2, off-policy sequence masking).

    Args:
        logps: `[T]` the policy's log-probs.
        behavior_logps: `[T]` the sampler's, or the policy's at roll-out time.
        advantages: `[N]`.
    """
    difference = torch.nan_to_num((behavior_logps - logps).detach())
    divergence = segment_mean(difference, mask, seq_of_token, len(advantages))
    return (advantages >= 0) | (divergence <= threshold)
