"""Sampler correction and off-policy mask against numbers worked out by hand."""

import math

import pytest
import torch
from torch.testing import assert_close

from trl.functional.importance import off_policy_keep, sampler_correction

# Sequences of 2, 3 and 1 tokens; the fourth token is masked, the last one has no log-prob of the sampler.
SEQ = torch.tensor([0, 0, 1, 1, 1, 2])
MASK = torch.tensor([True, True, True, False, True, True])
RATIOS = [2.0, 2.0, 4.0, 7.0, 0.05, math.nan]
OLD = torch.tensor([-1.0, -2.0, -0.5, -0.1, -3.0, -1.0])
SAMPLING = OLD - torch.tensor(RATIOS).log()


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        # Products of the sequences: 4, 0.2, 1; masked tokens and NaN count as ratio 1.
        ("token_truncate", [2.0, 2.0, 3.0, 1.0, 0.1, 1.0]),
        ("token_mask", [2.0, 2.0, 0.0, 1.0, 0.0, 1.0]),
        ("sequence_truncate", [3.0, 3.0, 0.2, 0.2, 0.2, 1.0]),
        ("sequence_mask", [0.0, 0.0, 0.2, 0.2, 0.2, 1.0]),
    ],
)
def test_four_modes(mode, expected):
    got = sampler_correction(OLD, SAMPLING, MASK, SEQ, 3, mode=mode, clip_min=0.1, clip_max=3.0)
    assert_close(got, torch.tensor(expected))


def test_open_bounds_change_nothing():
    for action in ("truncate", "mask"):
        got = sampler_correction(OLD, SAMPLING, MASK, SEQ, 3, mode=f"token_{action}", clip_min=None, clip_max=None)
        assert_close(got, torch.tensor([2.0, 2.0, 4.0, 1.0, 0.05, 1.0]))


def test_the_bounds_themselves_are_inside():
    zero, ln2 = torch.zeros(2), torch.tensor([math.log(2), -math.log(2)], dtype=torch.float64)
    ratio = ln2.exp()
    got = sampler_correction(
        ln2, zero, torch.ones(2), torch.tensor([0, 1]), 2,
        mode="token_mask", clip_min=ratio[1].item(), clip_max=ratio[0].item(),
    )  # fmt: skip
    assert_close(got, ratio)


def test_the_correction_has_no_gradient():
    old = OLD.clone().requires_grad_()
    got = sampler_correction(old, SAMPLING, MASK, SEQ, 3, mode="token_mask", clip_min=None, clip_max=3.0)
    assert not got.requires_grad


def test_equal_distributions_need_no_correction():
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
        got = sampler_correction(OLD, OLD, MASK, SEQ, 3, mode=mode, clip_min=0.5, clip_max=2.0)
        assert (got == 1).all()


def test_off_policy_sequences_of_negative_advantage_are_dropped():
    # behaviour - policy, means over loss tokens: (.2 + .6) / 2, (.5 + .1) / 2 with the masked 9 left out, 5.
    gap = torch.tensor([0.2, 0.6, 0.5, 9.0, 0.1, 5.0])
    logps = torch.full((6,), -2.0)

    def keep(advantages, threshold):
        return off_policy_keep(logps, logps + gap, torch.tensor(advantages), MASK, SEQ, threshold).tolist()

    assert keep([-1.0, -1.0, -1.0], 0.35) == [False, True, False]
    assert keep([-1.0, -1.0, 0.0], 0.29) == [False, False, True]
    assert keep([1.0, 1.0, 1.0], 0.0) == [True, True, True]


def test_missing_log_probs_count_as_on_policy():
    logps = torch.tensor([-1.0, -1.0])
    behavior = torch.tensor([math.nan, 0.0])
    seq = torch.tensor([0, 0])
    # Mean of 0 and 1.
    assert off_policy_keep(logps, behavior, torch.tensor([-1.0]), torch.ones(2), seq, 0.51).tolist() == [True]
    assert off_policy_keep(logps, behavior, torch.tensor([-1.0]), torch.ones(2), seq, 0.49).tolist() == [False]
