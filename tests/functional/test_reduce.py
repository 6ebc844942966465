"""Reductions and the KL estimate against numbers worked out by hand."""

import math

import pytest
import torch
from torch.testing import assert_close

from trl.functional.reduce import (
    kl_k3,
    of_sequence,
    reduce_fixed_length,
    reduce_generation_token_mean,
    reduce_sequence_mean,
    reduce_sequence_sum,
    reduce_step_token_mean,
    segment_mean,
    segment_sum,
    sequence_kl_k1,
)
from trl.types import Normalizer

# Sequences of 2, 3 and 1 tokens; one token of the second and all of the third take no part.
SEQ = torch.tensor([0, 0, 1, 1, 1, 2])
MASK = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0, 0.0])
TERMS = torch.tensor([1.0, 3.0, 2.0, 100.0, 6.0, 100.0])
NORM = Normalizer(sequences=3, tokens=4, generation_tokens=5, max_length=10)


def test_segment_sum():
    assert_close(segment_sum(TERMS, SEQ, 3), torch.tensor([4.0, 108.0, 100.0]))


def test_segment_sum_of_a_sequence_without_tokens_is_zero():
    assert_close(segment_sum(TERMS, SEQ, 4)[3].item(), 0.0)


def test_segment_mean_leaves_masked_tokens_out():
    assert_close(segment_mean(TERMS, MASK, SEQ, 3), torch.tensor([2.0, 4.0, 0.0]))


@pytest.mark.parametrize(
    ("reduce", "expected"),
    [
        (reduce_sequence_mean, ((1 + 3) / 2 + (2 + 6) / 2 + 0) / 3),
        (reduce_step_token_mean, (1 + 3 + 2 + 6) / 4),
        (reduce_generation_token_mean, (1 + 3 + 2 + 6) / 5),
        (reduce_fixed_length, (1 + 3 + 2 + 6) / (3 * 10)),
        (reduce_sequence_sum, (1 + 3 + 2 + 6) / 3),
    ],
)
class TestReductions:
    def test_by_hand(self, reduce, expected):
        assert_close(reduce(TERMS, MASK, SEQ, NORM).item(), expected)

    def test_micro_batches_add_up_to_the_whole(self, reduce, expected):
        first, rest = slice(0, 2), slice(2, 6)
        parts = reduce(TERMS[first], MASK[first], SEQ[first], NORM) + reduce(
            TERMS[rest], MASK[rest], SEQ[rest] - 1, NORM
        )
        assert_close(parts.item(), expected)

    def test_a_batch_of_masked_tokens_is_exactly_zero(self, reduce, expected):
        empty = Normalizer(sequences=3, tokens=0, generation_tokens=0, max_length=10)
        assert reduce(TERMS, torch.zeros(6), SEQ, empty).item() == 0.0

    def test_no_gradient_reaches_masked_tokens(self, reduce, expected):
        terms = TERMS.clone().requires_grad_()
        reduce(terms, MASK, SEQ, NORM).backward()
        assert ((terms.grad != 0) == (MASK != 0)).all()


def test_kl_by_hand():
    # d = ref - policy: e^d - d - 1.
    logps = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64)
    ref = logps + torch.tensor([0.0, math.log(2), -math.log(2)], dtype=torch.float64)
    expected = torch.tensor([0.0, 1 - math.log(2), math.log(2) - 0.5], dtype=torch.float64)
    assert_close(kl_k3(logps, ref), expected)


def test_kl_of_equals_is_exactly_zero_and_never_negative():
    logps = torch.linspace(-20, 0, 101)
    assert (kl_k3(logps, logps) == 0).all()
    assert (kl_k3(logps, logps + torch.linspace(-1e-3, 1e-3, 101)) >= 0).all()


def test_kl_is_unbiased_over_the_policy():
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.2, 0.6]).double()
    expected = (p * (p / q).log()).sum()
    assert_close((p * kl_k3(p.log(), q.log())).sum(), expected)


def test_gradient_of_the_kl():
    logps = torch.tensor([-1.0, -0.2, -3.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-1.5, -0.1, -3.0], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: kl_k3(x, ref), (logps,))


def test_of_sequence_undoes_the_repetition_at_tokens():
    values = torch.tensor([2.0, -1.0, 0.5])
    assert of_sequence(values[SEQ], SEQ, 3).tolist() == values.tolist()
    # The order of tokens does not matter, and a sequence without tokens has 0.
    seq = torch.tensor([3, 0, 3, 1])
    assert of_sequence(torch.tensor([4.0, 2.0, 4.0, -1.0]), seq, 4).tolist() == [2.0, -1.0, 0.0, 4.0]


def test_of_sequence_carries_no_gradient():
    assert not of_sequence(TERMS.clone().requires_grad_(), SEQ, 3).requires_grad


# Policy minus reference: .5, -.25 | 1, 9 (masked), -3 | 2 (masked).
K1_GAP = torch.tensor([0.5, -0.25, 1.0, 9.0, -3.0, 2.0])


@pytest.mark.parametrize("mask", [MASK, MASK.bool()])
def test_kl_of_sequences_by_hand(mask):
    ref = torch.tensor([-1.0, -2.0, -0.5, -1.5, -1.0, -0.75])
    # .5 - .25 and 1 - 3; the third sequence has no loss token, the fourth no token.
    assert sequence_kl_k1(ref + K1_GAP, ref, mask, SEQ, 4).tolist() == [0.25, -2.0, 0.0, 0.0]


def test_kl_of_sequences_is_unbiased_over_the_policy():
    # Sequences of two tokens, each drawn from p: KL of the pair is twice KL(p || q).
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.2, 0.6]).double()
    drawn = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    seq = torch.arange(9).repeat_interleave(2)
    tokens = drawn.flatten()
    kl = sequence_kl_k1(p.log()[tokens], q.log()[tokens], torch.ones(18).double(), seq, 9)
    assert_close((p[drawn].prod(1) * kl).sum(), 2 * (p * (p / q).log()).sum())
