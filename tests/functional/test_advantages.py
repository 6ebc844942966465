"""Advantages against numbers worked out by hand."""

import math

import pytest
import torch
from torch.testing import assert_close

from trl.functional.advantages import group_relative, leave_one_out, nan_mean_std, rank_pairs, weighted_sum

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


@pytest.mark.parametrize(
    ("values", "size", "expected"),
    [
        # Groups of two: the other's reward. 1 - 3, 3 - 1 | 0 - 4, 4 - 0.
        ([1.0, 3.0, 0.0, 4.0], 2, [-2.0, 2.0, -4.0, 4.0]),
        # 1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2.
        ([1.0, 2.0, 6.0], 3, [-3.0, -1.5, 4.5]),
        # 0 - (1 + 2 + 6) / 3, 1 - (0 + 2 + 6) / 3, 2 - (0 + 1 + 6) / 3, 6 - (0 + 1 + 2) / 3.
        ([0.0, 1.0, 2.0, 6.0], 4, [-3.0, -5 / 3, -1 / 3, 5.0]),
        # The baseline of 0 is 1 and that of 1 is 0.
        ([NAN, 0.0, 1.0, NAN], 4, [0.0, -1.0, 1.0, 0.0]),
        # 1 - (2 + 6) / 2 and so on, with one out.
        ([1.0, NAN, 2.0, 6.0], 4, [-3.0, 0.0, -1.5, 4.5]),
        # A lone reward has no baseline.
        ([NAN, 7.0, 1.0, 3.0], 2, [0.0, 0.0, -2.0, 2.0]),
        ([5.0, -2.0], 1, [0.0, 0.0]),
    ],
)
def test_leave_one_out(values, size, expected):
    got = leave_one_out(torch.tensor(values), size)
    assert got.dtype == torch.float32
    assert_close(got, torch.tensor(expected))


def test_leave_one_out_against_its_definition():
    values = torch.tensor([0.1, -0.7, 2.3, 0.4, 1.9], dtype=torch.float64)
    expected = [values[i] - torch.cat([values[:i], values[i + 1 :]]).mean() for i in range(5)]
    assert_close(leave_one_out(values, 5), torch.stack(expected).float())


def test_leave_one_out_does_not_mind_what_is_added_to_a_group():
    values = torch.tensor([1.0, 2.0, 6.0, 0.0, 4.0, NAN])
    shift = torch.tensor([8.0, 8.0, 8.0, -2.0, -2.0, -2.0])
    assert_close(leave_one_out(values + shift, 3), leave_one_out(values, 3))


def test_leave_one_out_normalized():
    # Advantages -2, 2, -4, 4 of mean 0; squares 4 + 4 + 16 + 16 = 40 over 3.
    got = leave_one_out(torch.tensor([1.0, 3.0, 0.0, 4.0]), 2, normalize=True)
    assert_close(got, torch.tensor([-2.0, 2.0, -4.0, 4.0]) / (math.sqrt(40 / 3) + 1e-4))


def test_normalization_leaves_unscored_and_lone_sequences_out():
    # The lone 7 has no advantage that could count: -2 and 2 are left, squares 8 over 1.
    got = leave_one_out(torch.tensor([NAN, 7.0, 1.0, 3.0]), 2, normalize=True)
    assert_close(got, torch.tensor([0.0, 0.0, -2.0, 2.0]) / (math.sqrt(8) + 1e-4))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(
    ("values", "size"),
    [
        ([0.1] * 4, 4),
        ([0.1 + 0.2] * 3, 3),
        ([0.1 + 0.2] * 14, 7),
        ([1e8] * 7, 7),
        ([1e8 + 0.1] * 3, 3),
        ([NAN] * 4, 4),
        ([0.3], 1),
        ([NAN, 0.3], 2),
        ([0.1, 0.1, 0.1, 0.3, 0.3, 0.3], 3),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_leave_one_out_without_spread_is_exactly_zero(values, size, normalize, dtype):
    got = leave_one_out(torch.tensor(values, dtype=dtype), size, normalize=normalize)
    assert (got == 0).all()


@pytest.mark.parametrize("normalize", [False, True])
def test_a_group_without_spread_stays_exactly_zero_beside_others(normalize):
    # In binary, the advantages of .1, .2, .7 and of .1, .3, .4 do not sum to exactly 0.
    values = torch.tensor([0.1, 0.2, 0.7, 0.3, 0.3, 0.3, 0.1, 0.3, 0.4], dtype=torch.float64)
    got = leave_one_out(values, 3, normalize=normalize)
    assert (got[3:6] == 0).all()
    assert (got[[0, 2, 6, 8]] != 0).all()


def test_leave_one_out_keeps_a_small_spread_on_large_rewards():
    assert_close(leave_one_out(torch.tensor([1e6, 1e6 + 1]), 2), torch.tensor([-1.0, 1.0]))


def test_rank_pairs():
    scores = torch.tensor(
        [[2.0, 1.0], [-3.0, 0.5], [0.1, 0.1], [NAN, 1.0], [1.0, NAN], [NAN, NAN], [math.inf, math.inf]]
    )
    expected = torch.tensor([1.0, -1.0, 0.0, NAN, NAN, NAN, 0.0])
    assert_close(rank_pairs(scores), expected, equal_nan=True)
    assert_close(rank_pairs(scores.flip(1)), -expected, equal_nan=True)


def test_scores_are_ranked_in_the_precision_they_come_in():
    close = [1.0, 1.0 + 2**-40]
    assert rank_pairs(torch.tensor([close], dtype=torch.float64)).tolist() == [-1.0]
    assert rank_pairs(torch.tensor([close], dtype=torch.float32)).tolist() == [0.0]
