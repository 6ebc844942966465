"""Slices cut into micro-batches: nothing is lost, the budget holds, and what belongs together stays together."""

import random

import pytest
import torch
from fixtures.batches import make_batch, random_batch, sequences_of

from trl.rollout.micro_batch import group_order, pieces, split


def pairs_of(batch):
    """The batch with its sequences in pairs, neighbours first."""
    batch.unit_of_seq = torch.arange(batch.num_sequences) // 2
    return batch


def lists(parts):
    return [part.tolist() for part in parts]


def everything(batch):
    return torch.arange(batch.num_sequences)


def all_active(batch):
    return torch.ones(batch.num_sequences, dtype=torch.bool)


def tokens_of_forward(batch):
    """What a packed forward pass takes: every distinct prompt once, and the completions."""
    return int(batch.prompt_lengths.sum()) + batch.num_tokens


def alone(count):
    """The largest of the processes' counts, where there is one process."""
    return count


# ---- the order of groups ----


def test_groups_are_shuffled_whole():
    batch = random_batch([1] * 5, [2] * 20, [i // 4 for i in range(20)])
    order = group_order(batch, torch.Generator().manual_seed(0)).tolist()
    blocks = [order[i : i + 4] for i in range(0, 20, 4)]
    assert [b[0] % 4 for b in blocks] == [0] * 5
    assert all(b == list(range(b[0], b[0] + 4)) for b in blocks)
    assert sorted(order) == list(range(20))
    assert order != list(range(20))


def test_the_order_is_that_of_the_generator():
    batch = random_batch([1] * 8, [2] * 16, [i // 2 for i in range(16)])
    one, same, other = (group_order(batch, torch.Generator().manual_seed(s)).tolist() for s in (0, 0, 1))
    assert one == same
    assert one != other


def test_pairs_of_a_prompt_that_occurs_twice_stay_neighbours():
    """Prompts a b a c, two completions each: whatever the order, a chunk of even size holds whole pairs."""
    batch = pairs_of(random_batch([2, 2, 2], [1] * 8, [0, 0, 1, 1, 0, 0, 2, 2]))
    for seed in range(10):
        ordered = batch.select(group_order(batch, torch.Generator().manual_seed(seed)))
        units = ordered.units.view(-1, 2)
        assert (units[:, 0] == units[:, 1]).all()
        assert sorted(units[:, 0].tolist()) == [0, 1, 2, 3]


def test_no_sequence_has_an_empty_order():
    assert group_order(random_batch([1], [1], [0]).select(torch.tensor([], dtype=torch.long))).tolist() == []


# ---- the cut ----


def test_without_a_budget_there_is_one_piece():
    batch = random_batch([5], [100, 1, 50], [0, 0, 0])
    assert lists(pieces(batch, everything(batch), None)) == [[0, 1, 2]]
    assert lists(pieces(batch, torch.tensor([2, 0]), None)) == [[2, 0]]


@pytest.mark.parametrize("budget", [None, 1, 100])
def test_nothing_chosen_is_no_piece(budget):
    assert pieces(random_batch([1], [1], [0]), torch.tensor([], dtype=torch.long), budget) == []


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        # Prompt 0 (3 tokens) with completions of 2, 4, 1; prompt 1 (2 tokens) with 1 and 2. The group of prompt 1 is
        # the shorter one; inside a group the shortest goes first.
        (17, [[3, 4, 2, 0, 1]]),  # 2 + 1 + 2 + 3 + 1 + 2 + 4 = 15
        (15, [[3, 4, 2, 0, 1]]),
        (14, [[3, 4, 2, 0], [1]]),  # 11, then 3 + 4
        (11, [[3, 4, 2, 0], [1]]),
        (10, [[3, 4, 2], [0, 1]]),  # 2 + 1 + 2 + 3 + 1 = 9, then 3 + 2 + 4 = 9
        (8, [[3, 4], [2, 0], [1]]),  # 5, then 3 + 1 + 2 = 6, then 3 + 4 = 7
        (5, [[3, 4], [2], [0], [1]]),  # 5; then 4, 5, and 7 in spite of the budget
        (4, [[3], [4], [2], [0], [1]]),
        (1, [[3], [4], [2], [0], [1]]),
    ],
)
def test_a_prompt_counts_once_per_piece(budget, expected):
    batch = random_batch([3, 2], [2, 4, 1, 1, 2], [0, 0, 0, 1, 1])
    assert lists(pieces(batch, everything(batch), budget)) == expected


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        # Pairs of 3 + 1 + 4 = 8 and 3 + 2 + 2 = 7 of one prompt, together 12; of a shorter one 2 + 4 + 2 = 8.
        (20, [[4, 5, 0, 1, 2, 3]]),  # 8 + 12
        (19, [[4, 5, 0, 1], [2, 3]]),
        (15, [[4, 5], [0, 1, 2, 3]]),
        (11, [[4, 5], [0, 1], [2, 3]]),
        (1, [[4, 5], [0, 1], [2, 3]]),
    ],
)
def test_pairs_are_never_cut(budget, expected):
    batch = pairs_of(random_batch([3, 2], [1, 4, 2, 2, 4, 2], [0, 0, 0, 0, 1, 1]))
    assert [sorted(p) for p in lists(pieces(batch, everything(batch), budget))] == [sorted(p) for p in expected]


def test_units_need_neither_be_neighbours_nor_share_a_prompt():
    batch = random_batch([1, 1], [1, 2, 3, 4], [0, 1, 1, 0])
    batch.unit_of_seq = torch.tensor([7, 5, 5, 7])
    assert sorted(map(sorted, lists(pieces(batch, everything(batch), 6)))) == [[0, 3], [1, 2]]
    batch.unit_of_seq = torch.tensor([7, 5, 7, 5])  # each with both prompts: 2 + 1 + 3 = 6 and 2 + 2 + 4 = 8
    assert sorted(map(sorted, lists(pieces(batch, everything(batch), 11)))) == [[0, 2], [1, 3]]
    assert len(pieces(batch, everything(batch), 12)) == 1


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("unit_size", [1, 2])
def test_random_cuts_keep_everything_once_and_the_budget(seed, unit_size):
    draw = random.Random(seed)
    prompts = draw.randint(1, 6)
    groups = [draw.randrange(prompts) for _ in range(8)]
    prompt_of_seq = [p for p in groups for _ in range(2)]
    lengths = [draw.randint(1, 12) for _ in prompt_of_seq]
    batch = random_batch([draw.randint(1, 9) for _ in range(prompts)], lengths, prompt_of_seq, seed=seed)
    batch.unit_of_seq = torch.arange(16) // unit_size
    units = sorted(draw.sample(range(16 // unit_size), 5))
    chosen = torch.tensor([i for i in range(16) if i // unit_size in units])
    for budget in range(1, 120, 7):
        parts = lists(pieces(batch, chosen, budget))
        assert sorted(i for part in parts for i in part) == chosen.tolist()
        for part in parts:
            members = batch.units[part].tolist()
            assert all(members.count(u) == unit_size for u in members)
            assert tokens_of_forward(batch.select(torch.tensor(part))) <= budget or len(part) == unit_size


# ---- micro-batches ----


def test_the_micro_batches_hold_the_sequences_themselves():
    batch = random_batch([3, 2], [2, 4, 1, 1, 2], [0, 0, 0, 1, 1])
    found = [s for piece in split(batch, all_active(batch), 10, alone) for s in sequences_of(piece)]
    assert sorted(found) == sorted(sequences_of(batch))


@pytest.mark.parametrize("budget", [None, 1, 6, 100])
def test_inactive_sequences_are_left_out(budget):
    batch = make_batch([[1], [2]], [[11], [12, 12], [13], [14]], [0, 0, 1, 1])
    active = torch.tensor([False, True, False, True])
    found = [s for piece in split(batch, active, budget, alone) for s in sequences_of(piece)]
    assert sorted(found) == [([1], [12, 12]), ([2], [14])]


@pytest.mark.parametrize("budget", [None, 1, 6, 100])
def test_the_only_active_pair_comes_alone(budget):
    batch = pairs_of(make_batch([[1], [2], [3]], [[11], [12], [13], [14], [15], [16]], [0, 0, 1, 1, 2, 2]))
    (piece,) = split(batch, batch.units == 1, budget, alone)
    assert sequences_of(piece) == [([2], [13]), ([2], [14])]
    assert piece.units.tolist() == [1, 1]
    assert piece.loss_mask.all()


@pytest.mark.parametrize("budget", [None, 1, 100])
def test_without_an_active_sequence_one_micro_batch_counts_for_nothing(budget):
    batch = pairs_of(random_batch([2, 2], [3, 4, 1, 5], [0, 0, 1, 1]))
    (piece,) = split(batch, torch.zeros(4, dtype=torch.bool), budget, alone)
    # The shortest completion is the third one; its pair comes with it.
    assert sequences_of(piece) == sequences_of(batch)[2:]
    assert not piece.loss_mask.any()
    assert batch.loss_mask.all()


@pytest.mark.parametrize("unit_size", [1, 2])
@pytest.mark.parametrize(("budget", "own"), [(8, 4), (100, 1)])
def test_processes_have_equally_many_micro_batches(unit_size, budget, own):
    """One with fewer pieces adds the shortest unit, with nothing in the loss."""
    # Pairs of 2 + 3 + 3, 2 + 1 + 5, 2 + 3 + 2 and 2 + 4 + 2 tokens.
    batch = pairs_of(random_batch([2] * 4, [3, 3, 1, 5, 3, 2, 4, 2], [0, 0, 1, 1, 2, 2, 3, 3]))
    if unit_size == 1:
        batch.unit_of_seq = None
    told = []

    def largest(count):
        told.append(count)
        return count + 3

    found = split(batch, all_active(batch), budget, largest)
    assert told == [own]
    assert len(found) == own + 3
    counting, rest = found[:own], found[own:]
    assert sorted(s for piece in counting for s in sequences_of(piece)) == sorted(sequences_of(batch))
    for piece in rest:
        assert sequences_of(piece) == sequences_of(batch)[2 : 2 + unit_size]
        assert not piece.loss_mask.any()
    assert batch.loss_mask.all()


def test_without_a_budget_the_processes_need_not_agree():
    batch = random_batch([1], [1, 2], [0, 0])

    def never(count):
        raise AssertionError

    assert len(split(batch, all_active(batch), None, never)) == 1
