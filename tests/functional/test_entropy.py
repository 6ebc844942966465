"""Choice of tokens by entropy, and the controller of the entropy bonus."""

import math

import pytest
import torch
from torch.testing import assert_close

from trl.functional.entropy import EntropyController, top_entropy_threshold


@pytest.mark.parametrize(
    ("share", "threshold"),
    # Five values 0 … 4: the quantile 1 - share, linear between neighbours.
    [(0.5, 2.0), (0.25, 3.0), (0.2, 3.2), (1.0, 0.0)],
)
def test_threshold_by_hand(share, threshold):
    entropies = torch.tensor([3.0, 0.0, 4.0, 1.0, 2.0])
    assert_close(top_entropy_threshold(entropies, share).item(), threshold)


@pytest.mark.parametrize("share", [0.01, 0.2, 0.77, 1.0])
def test_threshold_is_the_quantile(share):
    entropies = torch.rand(101, generator=torch.Generator().manual_seed(0))
    assert_close(top_entropy_threshold(entropies, share), torch.quantile(entropies, 1 - share))


def test_share_of_tokens_kept():
    entropies = torch.rand(1000, generator=torch.Generator().manual_seed(1))
    assert (entropies >= top_entropy_threshold(entropies, 0.2)).sum().item() == 200


def test_no_token_at_all():
    assert top_entropy_threshold(torch.empty(0), 0.2).item() == -math.inf


def controller(coef=0.1):
    return EntropyController(coef=coef, target=1.0, step=0.05, low=0.0, high=0.2)


def test_the_bonus_waits_for_the_first_measurement():
    assert controller().active_coef == 0.0


def test_below_the_target_the_weight_grows_and_applies():
    c = controller()
    c.update(0.5)
    assert c.active_coef == c.coef == pytest.approx(0.15)


def test_at_the_target_the_weight_still_applies():
    c = controller()
    c.update(1.0)
    assert c.active_coef == pytest.approx(0.15)


def test_above_the_target_the_weight_shrinks_and_rests():
    c = controller()
    c.update(1.5)
    assert c.coef == pytest.approx(0.05)
    assert c.active_coef == 0.0


def test_the_weight_stays_in_its_range():
    c = controller()
    for _ in range(10):
        c.update(0.0)
    assert c.coef == 0.2
    for _ in range(10):
        c.update(2.0)
    assert c.coef == 0.0


def test_the_state_continues():
    c, d = controller(), controller(coef=0.0)
    c.update(0.5)
    d.load_state_dict(c.state_dict())
    for entropy in (0.7, 1.2):
        c.update(entropy)
        d.update(entropy)
    assert (c.coef, c.active_coef) == (d.coef, d.active_coef) == (pytest.approx(0.15), 0.0)
