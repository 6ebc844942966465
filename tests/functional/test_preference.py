"""Losses of pairs against numbers worked out by hand."""

import math

import pytest
import torch
from torch.testing import assert_close

from trl.functional.advantages import rank_pairs
from trl.functional.preference import PAIR_LOSSES, pair_losses

LN2 = math.log(2)
NAN = math.nan


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def expit(x):
    return 1 / (1 + math.exp(-x))


def slope(loss_type, margin, preference, beta):
    m = f64(margin).requires_grad_()
    pair_losses(loss_type, m, f64(preference), beta).sum().backward()
    return m.grad.item()


@pytest.mark.parametrize(
    ("margin", "preference", "expected"),
    [
        (0.0, 1.0, LN2),
        (0.0, -1.0, LN2),
        # beta m = 1 in favour of the better one, and of the worse: ln(1 + 1/e) and ln(1 + e).
        (10.0, 1.0, 0.313262),
        (-10.0, -1.0, 0.313262),
        (-10.0, 1.0, 1.313262),
        (10.0, -1.0, 1.313262),
        # A tie: half of each.
        (0.0, 0.0, LN2),
        (10.0, 0.0, 0.813262),
        (-10.0, 0.0, 0.813262),
    ],
)
def test_sigmoid(margin, preference, expected):
    got = pair_losses("sigmoid", f64(margin), f64(preference), 0.1)
    assert_close(got, f64(expected), rtol=0, atol=5e-7)


@pytest.mark.parametrize(
    ("margin", "preference", "expected"),
    [
        # 1 / (2 beta) = 5: (3 - 5)^2, (3 + 5)^2, (-3 + 5)^2.
        (3.0, 1.0, 4.0),
        (3.0, -1.0, 64.0),
        (-3.0, -1.0, 4.0),
        (5.0, 1.0, 0.0),
        # A tie: m^2.
        (3.0, 0.0, 9.0),
        (0.0, 0.0, 0.0),
    ],
)
def test_ipo(margin, preference, expected):
    assert_close(pair_losses("ipo", f64(margin), f64(preference), 0.1), f64(expected))


def test_the_table_holds_the_two_losses():
    assert set(PAIR_LOSSES) == {"sigmoid", "ipo"}


@pytest.mark.parametrize("margin", [-7.0, 0.0, 2.0, 30.0])
def test_gradients_in_closed_form(margin):
    beta = 0.3
    # d/dm -log sigmoid(beta m) = -beta sigmoid(-beta m).
    assert_close(slope("sigmoid", margin, 1.0, beta), -beta * expit(-beta * margin))
    assert_close(slope("sigmoid", margin, -1.0, beta), beta * expit(beta * margin))
    # The mean of both is beta / 2 (sigmoid(beta m) - sigmoid(-beta m)) = beta / 2 tanh(beta m / 2).
    assert_close(slope("sigmoid", margin, 0.0, beta), beta / 2 * math.tanh(beta * margin / 2))
    for preference in (1.0, -1.0, 0.0):
        assert_close(slope("ipo", margin, preference, beta), 2 * (margin - preference / 0.6))


@pytest.mark.parametrize("loss_type", PAIR_LOSSES)
def test_a_tie_pulls_towards_equal_log_ratios(loss_type):
    assert slope(loss_type, 0.0, 0.0, 0.1) == 0.0
    assert slope(loss_type, 2.0, 0.0, 0.1) > 0
    assert slope(loss_type, -2.0, 0.0, 0.1) < 0


@pytest.mark.parametrize("loss_type", PAIR_LOSSES)
def test_a_tie_has_the_mean_gradient_of_both_orders(loss_type):
    both = (slope(loss_type, 1.7, 1.0, 0.1) + slope(loss_type, 1.7, -1.0, 0.1)) / 2
    assert_close(slope(loss_type, 1.7, 0.0, 0.1), both)


@pytest.mark.parametrize("loss_type", PAIR_LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_swapping_the_completions_changes_nothing(loss_type, dtype):
    first, second = torch.randn(2, 50, dtype=dtype, generator=torch.Generator().manual_seed(0)) * 20
    scores = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [NAN, 0.0], [3.0, 2.0]]).repeat(10, 1)
    here = pair_losses(loss_type, first - second, rank_pairs(scores).double(), 0.1)
    there = pair_losses(loss_type, second - first, rank_pairs(scores.flip(1)), 0.1)
    assert here.dtype == dtype
    assert here.tolist() == there.tolist()


@pytest.mark.parametrize("loss_type", PAIR_LOSSES)
def test_a_pair_without_preference_costs_nothing(loss_type):
    margins = f64(3.0, 3.0, -4.0).requires_grad_()
    got = pair_losses(loss_type, margins, torch.tensor([NAN, 1.0, NAN]), 0.1)
    got.sum().backward()
    assert got[[0, 2]].tolist() == [0.0, 0.0]
    assert margins.grad[[0, 2]].tolist() == [0.0, 0.0]
    assert got[1] > 0
    assert margins.grad[1] < 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sigmoid_of_large_margins(dtype):
    margins = torch.tensor([1e5, -1e5, 1e5, -1e5, 1e5, -1e5], dtype=dtype, requires_grad=True)
    preference = torch.tensor([1.0, 1.0, -1.0, -1.0, 0.0, 0.0])
    got = pair_losses("sigmoid", margins, preference, 0.1)
    # beta m = +-1e4: nothing, all of it, and half of it.
    assert_close(got, torch.tensor([0.0, 1e4, 1e4, 0.0, 5e3, 5e3], dtype=dtype))
    got.sum().backward()
    assert_close(margins.grad, torch.tensor([0.0, -0.1, 0.1, 0.0, 0.05, -0.05], dtype=dtype))


def test_ipo_of_large_margins():
    # (1e5 - 5)^2 and (1e5 + 5)^2
    got = pair_losses("ipo", f64(1e5, -1e5), f64(1.0, 1.0), 0.1)
    assert_close(got, f64(1e10 - 1e6 + 25, 1e10 + 1e6 + 25))


@pytest.mark.parametrize("loss_type", PAIR_LOSSES)
def test_beta_counts(loss_type):
    # sigmoid: ln(1 + e^(-m beta)); ipo: (m - 1 / (2 beta))^2.
    expected = {"sigmoid": [math.log1p(math.exp(-1)), math.log1p(math.exp(-2))], "ipo": [(2 - 1) ** 2, (2 - 0.5) ** 2]}
    got = [pair_losses(loss_type, f64(2.0), f64(1.0), beta).item() for beta in (0.5, 1.0)]
    assert got == pytest.approx(expected[loss_type])
