"""The loss of a reward model against numbers worked out by hand."""

import math

import pytest
import torch
from torch.testing import assert_close

from trl.functional.reward_model import reward_model_losses

CHOSEN = torch.tensor([2.0, -1.0], dtype=torch.float64)
REJECTED = torch.tensor([0.5, 1.0], dtype=torch.float64)


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def expit(x):
    return 1 / (1 + math.exp(-x))


def nls(x):
    """`-log sigmoid(x)`."""
    return math.log1p(math.exp(-x))


def test_the_loss_is_of_the_difference():
    # 2 - 1/2 and -1 - 1: ln(1 + e^-1.5) and ln(1 + e^2).
    got = reward_model_losses(CHOSEN, REJECTED)
    assert_close(got, f64(0.201413, 2.126928), rtol=0, atol=6e-7)
    assert_close(reward_model_losses(CHOSEN + 7, REJECTED + 7), got)


def test_a_margin_is_asked_for_on_top():
    # 3/2 - 1 and -2 + 1/2.
    got = reward_model_losses(CHOSEN, REJECTED, f64(1, -0.5))
    assert_close(got, f64(nls(0.5), nls(-1.5)))


def test_rewards_are_centered():
    # (2 + 1/2)^2 / 10 and (-1 + 1)^2 / 10.
    got = reward_model_losses(CHOSEN, REJECTED, center_coefficient=0.1)
    assert_close(got, f64(nls(1.5) + 0.625, nls(-2)))


def test_margin_and_centering_together():
    got = reward_model_losses(CHOSEN, REJECTED, f64(1, -0.5), 0.1)
    assert_close(got, f64(nls(0.5) + 0.625, nls(-1.5)))


def test_gradients_in_closed_form():
    chosen, rejected = CHOSEN.clone().requires_grad_(), REJECTED.clone().requires_grad_()
    reward_model_losses(chosen, rejected, f64(1, -0.5), 0.1).sum().backward()
    # -+ sigmoid(-(x_c - x_r - m)) + 2 c (x_c + x_r), with sums 5/2 and 0.
    assert_close(chosen.grad, f64(-expit(-0.5) + 0.5, -expit(1.5)))
    assert_close(rejected.grad, f64(expit(-0.5) + 0.5, expit(1.5)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_rewards(dtype):
    chosen = torch.tensor([1e5, -1e5], dtype=dtype, requires_grad=True)
    rejected = torch.zeros(2, dtype=dtype)
    losses = reward_model_losses(chosen, rejected)
    assert losses.tolist() == [0, 1e5]
    losses.sum().backward()
    assert chosen.grad.tolist() == [0, -1]
