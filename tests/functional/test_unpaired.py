"""Losses of single completions against numbers worked out by hand."""

import math

import pytest
import torch
from torch.testing import assert_close

from trl.functional.unpaired import UNPAIRED_LOSSES, Judged, UnpairedOptions, unpaired_losses

OPTIONS = UnpairedOptions(beta=0.5, desirable_weight=1.5, undesirable_weight=0.75)
DESIRABLE = torch.tensor([True, False, True, False])


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def expit(x):
    return 1 / (1 + math.exp(-x))


def bump(x):
    """The derivative of `expit`."""
    return expit(x) * expit(-x)


def judged(*log_ratios, kl=None, desirable=DESIRABLE):
    return Judged(f64(*log_ratios), desirable, None if kl is None else f64(kl).squeeze())


def test_the_table_says_who_needs_the_kl():
    assert {name: row.needs_kl for name, row in UNPAIRED_LOSSES.items()} == {"kto": True, "apo_zero_unpaired": False}


def test_kto():
    # beta (r - kl), kl = 1: 1/2, -2, -1, 3/2. Weights 3/2 and 3/4.
    got = unpaired_losses("kto", judged(2, -3, -1, 4, kl=1.0), OPTIONS)
    expected = [1.5 * (1 - expit(0.5)), 0.75 * (1 - expit(2)), 1.5 * (1 - expit(-1)), 0.75 * (1 - expit(-1.5))]
    assert_close(got, f64(*expected))
    assert_close(got, f64(0.566311, 0.089402, 1.096588, 0.613181), rtol=0, atol=6e-7)


def test_apo_zero_unpaired():
    # beta r: 1, -3/2, -1/2, 2.
    got = unpaired_losses("apo_zero_unpaired", judged(2, -3, -1, 4), OPTIONS)
    assert_close(got, f64(1.5 * (1 - expit(1)), 0.75 * expit(-1.5), 1.5 * (1 - expit(-0.5)), 0.75 * expit(2)))


def test_weights_are_1_by_default():
    # Where the policy is its reference, every loss is 1/2.
    for loss_type in UNPAIRED_LOSSES:
        assert unpaired_losses(loss_type, judged(0, 0, 0, 0, kl=0.0), UnpairedOptions()).tolist() == [0.5] * 4


def test_a_negative_kl_counts_as_0():
    for kl in (0.0, -3.0):
        got = unpaired_losses("kto", judged(2, -3, -1, 4, kl=kl), OPTIONS)
        assert torch.equal(got, unpaired_losses("apo_zero_unpaired", judged(2, -3, -1, 4), OPTIONS))


def test_gradients_in_closed_form():
    log_ratios, kl = f64(2, -3, -1, 4).requires_grad_(), torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    unpaired_losses("kto", Judged(log_ratios, DESIRABLE, kl), OPTIONS).sum().backward()
    # -w_d beta sigmoid' and +w_u beta sigmoid'.
    expected = [-0.75 * bump(0.5), 0.375 * bump(-2), -0.75 * bump(-1), 0.375 * bump(1.5)]
    assert_close(log_ratios.grad, f64(*expected))
    assert kl.grad is None


def test_a_completion_has_the_same_loss_in_any_company():
    whole = unpaired_losses("kto", judged(2, -3, -1, 4, kl=1.0), OPTIONS)
    pieces = [
        unpaired_losses("kto", judged(*values, kl=1.0, desirable=DESIRABLE[rows]), OPTIONS)
        for values, rows in (((2,), [0]), ((-1, -3, 4), [2, 1, 3]))
    ]
    assert torch.equal(torch.cat(pieces), whole[[0, 2, 1, 3]])


@pytest.mark.parametrize("loss_type", UNPAIRED_LOSSES)
def test_extreme_log_ratios(loss_type):
    log_ratios = torch.tensor([1e5, 1e5, -1e5, -1e5], requires_grad=True)
    losses = unpaired_losses(loss_type, Judged(log_ratios, DESIRABLE, torch.tensor(1.0)), OPTIONS)
    assert losses.tolist() == [0, 0.75, 1.5, 0]
    losses.sum().backward()
    assert log_ratios.grad.tolist() == [0, 0, 0, 0]


def test_small_losses_keep_their_digits():
    # 1 - sigmoid(30) is 9.4e-14: in float32 the difference itself would be 0.
    got = unpaired_losses("apo_zero_unpaired", Judged(torch.tensor([60.0]), torch.tensor([True])), UnpairedOptions(0.5))
    assert_close(got, torch.tensor([math.exp(-30)]), rtol=1e-5, atol=0)


def test_kto_needs_the_kl():
    with pytest.raises(AssertionError):
        unpaired_losses("kto", judged(2, -3, -1, 4), OPTIONS)
