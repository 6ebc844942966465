"""Advantages and preferences from rewards.

Shapes: N sequences in groups of G that follow one another, F reward functions, P pairs. NaN marks a reward that was not
given.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

EPSILON = 1e-4


@dataclass(frozen=True)
class GroupAdvantages:
    """Result of `group_relative`.

    Attributes:
        advantages: `[N]`, 0 for a sequence that no function scored.
        rewards: `[N]` weighted sum of the rewards, NaN where no function scored.
        group_std: `[N]` standard deviation of the rewards in the sequence's group; 0 for groups without spread.
    """

    advantages: Tensor
    rewards: Tensor
    group_std: Tensor


def weighted_sum(rewards_NF: Tensor, weights: Tensor) -> Tensor:
    """`[N]` sum of the given rewards times their weights; NaN where no function gave one."""
    total = (torch.nan_to_num(rewards_NF) * weights).sum(1)
    return total.masked_fill(torch.isnan(rewards_NF).all(1), torch.nan)


def nan_mean_std(values: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Mean and unbiased standard deviation over `dim`, NaN entries left out, both with `dim` kept.

    The deviation of equal values, of one value and of none is exactly 0: rounding is no spread.
    """
    given = ~torch.isnan(values)
    count = given.sum(dim, keepdim=True)
    mean = torch.nansum(values, dim, keepdim=True) / count.clamp(min=1)
    squares = torch.where(given, (values - mean) ** 2, 0.0).sum(dim, keepdim=True)
    low = torch.where(given, values, torch.inf).amin(dim, keepdim=True)
    high = torch.where(given, values, -torch.inf).amax(dim, keepdim=True)
    spread = high > low
    std = torch.where(spread, (squares / (count - 1).clamp(min=1)).sqrt(), 0.0)
    return torch.where(spread, mean, torch.where(count > 0, high, 0.0)), std


def group_relative(
    rewards_NF: Tensor,
    weights: Tensor,
    group_size: int,
    *,
    scale: Literal["group", "batch", "none"] = "group",
    aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize",
) -> GroupAdvantages:
    """Advantages relative to the other completions of the same prompt (GRPO, arXiv:2402.03300, section 4.1.2).

    `sum_then_normalize`: `(r - mean of group) / (std + 1e-4)` with r the weighted sum and the deviation of the group,
    of the batch, or no division. `normalize_then_sum`: each reward is normalised in its group, summed with its weight,
    and the sum normalised over the batch (GDPO).

    Args:
        rewards_NF: `[N, F]`.
        weights: `[F]`.
        group_size: G, which divides N.
    """
    rewards_NF, weights = rewards_NF.double(), weights.double()
    rewards = weighted_sum(rewards_NF, weights)
    grouped = rewards.view(-1, group_size)
    group_mean, group_std = nan_mean_std(grouped, 1)
    if aggregation == "normalize_then_sum":
        parts = rewards_NF.view(-1, group_size, rewards_NF.shape[1])
        part_mean, part_std = nan_mean_std(parts, 1)
        normalized = ((parts - part_mean) / (part_std + EPSILON)).view_as(rewards_NF)
        summed = weighted_sum(normalized, weights)
        mean, std = nan_mean_std(summed, 0)
        advantages = (summed - mean) / (std + EPSILON)
    else:
        centered = (grouped - group_mean).view(-1)
        if scale == "group":
            advantages = centered / (group_std.expand_as(grouped).reshape(-1) + EPSILON)
        elif scale == "batch":
            advantages = centered / (nan_mean_std(rewards, 0)[1] + EPSILON)
        else:
            advantages = centered
    return GroupAdvantages(
        torch.nan_to_num(advantages, nan=0.0).float(),
        rewards.float(),
        group_std.expand_as(grouped).reshape(-1).float(),
    )


def leave_one_out(rewards: Tensor, group_size: int, *, normalize: bool = False) -> Tensor:
    """`[N]` rewards minus the mean of the others in their group (RLOO, arXiv:2402.14740, eq. 7 and 8).

    A reward of NaN gets 0 and is in nobody's baseline. A reward without others gets 0, and a group of equal rewards
    exactly 0: rounding is no spread.

    Args:
        rewards: `[N]`, NaN where none was given.
        group_size: G, which divides N.
        normalize: divide by the unbiased standard deviation of the advantages plus 1e-4; those of rewards without
            others do not count.
    """
    grouped = rewards.double().view(-1, group_size)
    count = (~torch.isnan(grouped)).sum(1, keepdim=True)
    # With the mean m of all n: r - (n m - r) / (n - 1) = (r - m) n / (n - 1), which is exactly 0 where r = m.
    centered = grouped - nan_mean_std(grouped, 1)[0]
    advantages = (centered * count / (count - 1)).masked_fill(count < 2, torch.nan).view(-1)
    if normalize:
        # Their mean is 0, because those of each group sum to 0: to subtract it would only bring in its rounding.
        advantages = advantages / (nan_mean_std(advantages, 0)[1] + EPSILON)
    return torch.nan_to_num(advantages, nan=0.0).float()


def rank_pairs(scores: Tensor) -> Tensor:
    """`[P]` which of two completions scores higher: +1 the first, -1 the second, 0 a tie, NaN where a score is missing.

    Scores tie only where they are equal to the last bit.

    Args:
        scores: `[P, 2]`, NaN where none was given.
    """
    first, second = scores.unbind(1)
    preference = (first > second).float() - (first < second).float()
    return preference.masked_fill(torch.isnan(scores).any(1), torch.nan)
