"""Reductions over ragged batches, and estimators of the KL divergence.

Shapes: N sequences, T tokens of all sequences; `seq_of_token` `[T]` says which sequence a token belongs to.
"""

from typing import Protocol

import torch
from torch import Tensor


class Normalizer(Protocol):
    """What sums are divided by; `trl.types.Normalizer` says what each number is."""

    @property
    def sequences(self) -> float: ...
    @property
    def tokens(self) -> float: ...
    @property
    def generation_tokens(self) -> float: ...
    @property
    def max_length(self) -> int: ...


def segment_sum(values: Tensor, seq_of_token: Tensor, num_sequences: int) -> Tensor:
    """`[N]` sum over each sequence's tokens. `values`: `[T]`."""
    return values.new_zeros(num_sequences).index_add(0, seq_of_token, values)


def segment_mean(values: Tensor, mask: Tensor, seq_of_token: Tensor, num_sequences: int) -> Tensor:
    """`[N]` mean over each sequence's tokens where `mask` holds; 0 for a sequence without any."""
    mask = mask.to(values.dtype)
    count = segment_sum(mask, seq_of_token, num_sequences).clamp(min=1)
    return segment_sum(values * mask, seq_of_token, num_sequences) / count


def of_sequence(values: Tensor, seq_of_token: Tensor, num_sequences: int) -> Tensor:
    """`[N]` the value that all tokens of a sequence share, without gradient; 0 for a sequence without tokens.

    The way back from `values[seq_of_token]`. `values`: `[T]`.
    """
    return values.new_zeros(num_sequences).index_copy(0, seq_of_token, values.detach())


def reduce_sequence_mean(terms: Tensor, mask: Tensor, seq_of_token: Tensor, norm: Normalizer) -> Tensor:
    """Mean over sequences of the mean over tokens (GRPO, arXiv:2402.03300, eq. 3)."""
    token_count = torch.bincount(seq_of_token, weights=mask.to(terms.dtype)).clamp(min=1).to(terms.dtype)
    return (terms * mask / token_count[seq_of_token]).sum() / norm.sequences


def reduce_step_token_mean(terms: Tensor, mask: Tensor, seq_of_token: Tensor, norm: Normalizer) -> Tensor:
    """Mean over the tokens of the optimizer step."""
    return (terms * mask).sum() / max(norm.tokens, 1)


def reduce_generation_token_mean(terms: Tensor, mask: Tensor, seq_of_token: Tensor, norm: Normalizer) -> Tensor:
    """Mean over the tokens of the generation batch (DAPO, arXiv:2503.14476, eq. 8)."""
    return (terms * mask).sum() / max(norm.generation_tokens, 1)


def reduce_fixed_length(terms: Tensor, mask: Tensor, seq_of_token: Tensor, norm: Normalizer) -> Tensor:
    """Sum over tokens divided by a constant length (Dr. GRPO, arXiv:2503.20783)."""
    return (terms * mask).sum() / (norm.sequences * norm.max_length)


def reduce_sequence_sum(terms: Tensor, mask: Tensor, seq_of_token: Tensor, norm: Normalizer) -> Tensor:
    """Mean over sequences of the sum over tokens (LUSPO)."""
    return (terms * mask).sum() / norm.sequences


def kl_k3(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """Per-token estimate of KL(policy || reference) from samples of the policy: `exp(d) - d - 1`, `d = ref - policy`.

    Unbiased and never negative (Schulman, "Approximating KL divergence", 2020, k3).
    """
    d = ref_logps - logps
    return torch.expm1(d) - d


def sequence_kl_k1(logps: Tensor, ref_logps: Tensor, mask: Tensor, seq_of_token: Tensor, num_sequences: int) -> Tensor:
    """`[N]` estimate of KL(policy || reference) of whole sequences: the sum of `policy - reference` over loss tokens.

    Unbiased, of either sign (Schulman, "Approximating KL divergence", 2020, k1); 0 for a sequence without loss tokens.

    Args:
        logps, ref_logps: `[T]`.
        mask: `[T]` loss tokens.
    """
    return segment_sum((logps - ref_logps) * mask, seq_of_token, num_sequences)
