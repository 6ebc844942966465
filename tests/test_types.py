"""The flat batch: choosing sequences, and its state."""

import pytest
import torch
from fixtures.batches import make_batch, sequences_of
from torch.testing import assert_close

from trl.types import Normalizer, RolloutBatch

PROMPTS = [[10, 11], [20], [30, 31, 32]]
COMPLETIONS = [[100], [200, 201, 202], [300, 301], [400, 401]]
PROMPT_OF_SEQ = [2, 0, 2, 1]


@pytest.fixture
def batch() -> RolloutBatch:
    made = make_batch(PROMPTS, COMPLETIONS, PROMPT_OF_SEQ)
    made.advantages = torch.tensor([1.0, 2.0, 3.0, 4.0])
    made.old_logps = -torch.arange(8.0)
    made.loss_mask = torch.tensor([1, 1, 0, 1, 0, 1, 1, 1]).bool()
    made.norm = Normalizer(sequences=4, tokens=6, generation_tokens=12, max_length=5)
    return made


def test_sizes(batch):
    assert (batch.num_sequences, batch.num_tokens) == (4, 8)
    assert batch.seq_of_token.tolist() == [0, 1, 1, 1, 2, 2, 3, 3]


def test_tokens_of_follows_the_order_asked_for(batch):
    assert batch.tokens_of(torch.tensor([2, 0])).tolist() == [4, 5, 0]


def test_select_keeps_what_belongs_together(batch):
    chosen = batch.select(torch.tensor([3, 0, 2]))
    assert sequences_of(chosen) == [([20], [400, 401]), ([30, 31, 32], [100]), ([30, 31, 32], [300, 301])]
    assert chosen.advantages.tolist() == [4.0, 1.0, 3.0]
    assert chosen.old_logps.tolist() == [-6.0, -7.0, -0.0, -4.0, -5.0]
    assert chosen.loss_mask.tolist() == [True, True, True, False, True]
    assert chosen.norm == batch.norm
    assert chosen.ref_logps is None


def test_select_drops_prompts_that_nobody_continues(batch):
    chosen = batch.select(torch.tensor([1]))
    assert chosen.prompt_ids.tolist() == [10, 11]
    assert chosen.prompt_lengths.tolist() == [2]
    assert chosen.prompt_of_seq.tolist() == [0]


def test_selecting_everything_changes_nothing(batch):
    same = batch.select(torch.arange(4))
    for name, value in batch.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert_close(same.state_dict()[name], value, rtol=0, atol=0)
    # A second choice from a choice is the choice of both.
    twice = batch.select(torch.tensor([3, 1, 0])).select(torch.tensor([2, 0]))
    assert sequences_of(twice) == sequences_of(batch.select(torch.tensor([0, 3])))


def test_a_sequence_may_be_chosen_twice(batch):
    assert sequences_of(batch.select(torch.tensor([1, 1]))) == [([10, 11], [200, 201, 202])] * 2


def test_select_nothing(batch):
    empty = batch.select(torch.tensor([], dtype=torch.long))
    assert (empty.num_sequences, empty.num_tokens, len(empty.prompt_ids)) == (0, 0, 0)


def test_select_leaves_the_batch_alone(batch):
    before = sequences_of(batch)
    batch.select(torch.tensor([0])).completion_ids.zero_()
    assert sequences_of(batch) == before


def test_split_covers_the_batch(batch):
    parts = batch.split([torch.tensor([1, 3]), torch.tensor([0, 2])])
    assert [p.num_tokens for p in parts] == [5, 3]
    assert sorted(map(str, sequences_of(parts[0]) + sequences_of(parts[1]))) == sorted(map(str, sequences_of(batch)))


def test_state_comes_back(batch, tmp_path):
    torch.save(batch.state_dict(), tmp_path / "batch.pt")
    state = torch.load(tmp_path / "batch.pt", weights_only=True)
    loaded = RolloutBatch.from_state_dict(state, torch.device("cpu"))
    assert loaded.norm == batch.norm
    assert sequences_of(loaded) == sequences_of(batch)
    for name, value in batch.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert_close(loaded.state_dict()[name], value, rtol=0, atol=0)
    assert loaded.ref_logps is None


def test_state_without_a_normalizer(batch):
    batch.norm = None
    assert RolloutBatch.from_state_dict(batch.state_dict(), torch.device("cpu")).norm is None


def test_lengths_stay_on_the_cpu(batch):
    loaded = RolloutBatch.from_state_dict(batch.state_dict(), torch.device("meta"))
    placed = {n: v.device.type for n, v in loaded.state_dict().items() if isinstance(v, torch.Tensor)}
    on_cpu = {"prompt_lengths", "prompt_of_seq", "completion_lengths"}
    assert placed == {name: "cpu" if name in on_cpu else "meta" for name in placed}
