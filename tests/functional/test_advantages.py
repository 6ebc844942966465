"""Advantages against numbers worked out by hand."""

import math

import pytest
import torch
from torch.testing import assert_close

from trl.functional.advantages import group_relative, nan_mean_std, weighted_sum

NAN = math.nan
ONE = torch.ones(1)


def rewards(*values):
    return torch.tensor(values)[:, None]


def test_weighted_sum_skips_rewards_that_were_not_given():
    table = torch.tensor([[1.0, 2.0], [NAN, 2.0], [1.0, NAN], [NAN, NAN]])
    expected = torch.tensor([1 * 0.5 + 2 * 3.0, 2 * 3.0, 0.5, NAN])
    assert_close(weighted_sum(table, torch.tensor([0.5, 3.0])), expected, equal_nan=True)


def test_mean_and_unbiased_deviation_leave_nan_out():
    mean, std = nan_mean_std(torch.tensor([[1.0, 3.0, NAN], [5.0, NAN, NAN], [NAN, NAN, NAN]]), 1)
    assert_close(mean.flatten(), torch.tensor([2.0, 5.0, 0.0]))
    assert_close(std.flatten(), torch.tensor([math.sqrt(2), 0.0, 0.0]))


# Two groups of two: rewards 1, 3 and 0, 4. Means 2 and 2; deviations sqrt 2 and sqrt 8; of all four: sqrt(10/3).
@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        (
            "group",
            [
                -1 / (math.sqrt(2) + 1e-4),
                1 / (math.sqrt(2) + 1e-4),
                -2 / (math.sqrt(8) + 1e-4),
                2 / (math.sqrt(8) + 1e-4),
            ],
        ),
        ("batch", [x / (math.sqrt(10 / 3) + 1e-4) for x in (-1, 1, -2, 2)]),
        ("none", [-1.0, 1.0, -2.0, 2.0]),
    ],
)
def test_three_scales(scale, expected):
    result = group_relative(rewards(1.0, 3.0, 0.0, 4.0), ONE, 2, scale=scale)
    assert_close(result.advantages, torch.tensor(expected))
    assert_close(result.rewards, torch.tensor([1.0, 3.0, 0.0, 4.0]))
    assert_close(result.group_std, torch.tensor([2.0, 2.0, 8.0, 8.0]).sqrt())


def test_weights_enter_the_sum():
    table = torch.tensor([[1.0, 10.0], [0.0, 30.0]])
    result = group_relative(table, torch.tensor([2.0, 0.1]), 2, scale="none")
    # 2 + 1 = 3 and 0 + 3 = 3.
    assert_close(result.rewards, torch.tensor([3.0, 3.0]))
    assert_close(result.advantages, torch.zeros(2))


def test_normalize_then_sum():
    # First reward 0, 2 | 0, 0 (z = -+1/(sqrt 2 + e), 0); second 0, 1 | 1, 0 (z = -+.5/(sqrt .5 + e)), weights 1 and 3.
    table = torch.tensor([[0.0, 0.0], [2.0, 1.0], [0.0, 1.0], [0.0, 0.0]])
    result = group_relative(table, torch.tensor([1.0, 3.0]), 2, aggregation="normalize_then_sum")
    first, second = 1 / (math.sqrt(2) + 1e-4), 3 * 0.5 / (math.sqrt(0.5) + 1e-4)
    sums = [-first - second, first + second, second, -second]
    std = math.sqrt(sum(s**2 for s in sums) / 3)
    assert_close(result.advantages, torch.tensor([s / (std + 1e-4) for s in sums]))
    assert_close(result.rewards, torch.tensor([0.0, 5.0, 3.0, 0.0]))


def test_normalize_then_sum_skips_a_reward_that_was_not_given():
    table = torch.tensor([[0.0, NAN], [2.0, NAN], [NAN, NAN], [NAN, NAN]])
    result = group_relative(table, torch.tensor([1.0, 1.0]), 2, aggregation="normalize_then_sum")
    z = 1 / (math.sqrt(2) + 1e-4)
    std = math.sqrt(2 * z**2)
    assert_close(result.advantages, torch.tensor([-z / (std + 1e-4), z / (std + 1e-4), 0.0, 0.0]))


def test_an_unscored_completion_stays_out_of_the_baseline():
    result = group_relative(rewards(NAN, 0.0, 1.0, NAN), ONE, 4)
    a = 0.5 / (math.sqrt(0.5) + 1e-4)
    assert a == pytest.approx(0.70701, abs=5e-6)
    assert_close(result.advantages, torch.tensor([0.0, -a, a, 0.0]))
    assert_close(result.group_std, torch.full((4,), math.sqrt(0.5)))
    assert_close(result.rewards, torch.tensor([NAN, 0.0, 1.0, NAN]), equal_nan=True)


def test_unscored_completions_stay_out_of_the_batch_deviation():
    result = group_relative(rewards(0.0, 2.0, NAN, NAN), ONE, 2, scale="batch")
    a = 1 / (math.sqrt(2) + 1e-4)
    assert_close(result.advantages, torch.tensor([-a, a, 0.0, 0.0]))


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize(
    ("values", "size"),
    [
        ([0.1] * 4, 4),
        ([0.1 + 0.2] * 3, 3),
        ([1e8] * 7, 7),
        ([0.1] * 3, 3),
        ([0.1 + 0.2] * 7, 7),
        ([NAN] * 4, 4),
        ([0.3], 1),
        ([NAN, 0.3], 2),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_groups_without_spread_give_exactly_zero(values, size, scale, aggregation, dtype):
    table = torch.tensor(values, dtype=dtype)[:, None]
    result = group_relative(table, ONE, size, scale=scale, aggregation=aggregation)
    assert (result.advantages == 0).all()
    assert (result.group_std == 0).all()


def test_one_group_without_spread_beside_another():
    result = group_relative(rewards(0.1, 0.1, 0.1, 0.0, 1.0, 2.0), ONE, 3)
    assert (result.advantages[:3] == 0).all()
    assert_close(result.advantages[3:], torch.tensor([-1 / 1.0001, 0.0, 1 / 1.0001]))


def test_small_spread_on_large_rewards_is_kept():
    result = group_relative(rewards(1e6, 1e6 + 1), ONE, 2, scale="none")
    assert_close(result.advantages, torch.tensor([-0.5, 0.5]))
