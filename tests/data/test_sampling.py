import pickle
from collections import Counter
from itertools import chain, pairwise

import datasets
import pytest
import torch
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

from trl.data.sampling import GroupSampler, RepeatSampler, SamplerEpochCallback, repeat_iterable_dataset
from trl.errors import DataError


def order(sampler, epoch=0):
    """The indices of one epoch."""
    sampler.set_epoch(epoch)
    return list(sampler)


def blocks(indices, size):
    """The indices cut into lists of `size`."""
    return [indices[start : start + size] for start in range(0, len(indices), size)]


def test_groups_blocks_and_repeats_in_the_order_of_the_data():
    sampler = GroupSampler(range(5), group_size=3, prompts_per_batch=2, repeats=2, shuffle=False)
    assert list(sampler) == [0, 0, 0, 1, 1, 1] * 2 + [2, 2, 2, 3, 3, 3] * 2
    assert len(sampler) == 24


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    ("size", "group", "prompts", "repeats"), [(5, 4, 2, 1), (7, 1, 3, 2), (4, 2, 4, 3), (9, 3, 1, 1)]
)
def test_length_is_exact(size, group, prompts, repeats, shuffle):
    sampler = GroupSampler(range(size), group, prompts, repeats, shuffle, seed=0)
    assert len(sampler) == len(order(sampler, 3)) == size // prompts * prompts * group * repeats


@pytest.mark.parametrize("repeats", [1, 2, 4])
def test_each_generation_batch_has_distinct_prompts_in_whole_groups(repeats):
    sampler = GroupSampler(range(5), group_size=4, prompts_per_batch=2, repeats=repeats, seed=0)
    for epoch in range(2):
        batches = blocks(order(sampler, epoch), 8)
        assert all(batch == [batch[0]] * 4 + [batch[4]] * 4 for batch in batches)
        assert batches == [batch for batch in batches[::repeats] for _ in range(repeats)]
        assert len({index for batch in batches for index in batch}) == 4  # so each prompt is in one block alone


@pytest.mark.parametrize(("size", "prompts"), [(5, 2), (7, 4), (11, 6), (8, 3)])
def test_prompts_left_out_are_others_in_the_next_epoch(size, prompts):
    for seed in range(5):
        sampler = GroupSampler(range(size), 1, prompts, seed=seed)
        left_out = [set(range(size)) - set(order(sampler, epoch)) for epoch in range(size)]
        assert all(a.isdisjoint(b) for a, b in pairwise(left_out))
        # in as many epochs as there are prompts, each is left out equally often
        assert Counter(index for indices in left_out for index in indices) == dict.fromkeys(range(size), size % prompts)


def test_order_is_a_function_of_seed_and_epoch():
    a, b, other = (GroupSampler(range(16), 2, 4, seed=seed) for seed in (7, 7, 8))
    assert order(a, 3) == order(a, 3) == order(b, 3)
    assert order(a, 0) == order(b, 0)
    assert order(a, 0) != order(a, 1)
    assert order(a, 0) != order(other, 0)
    assert order(a, 1) != order(other, 0)  # seed and epoch are not added up


def test_order_does_not_touch_or_follow_the_global_generators():
    sampler = GroupSampler(range(16), 1, 4, seed=0)
    torch.manual_seed(1)
    first, state = order(sampler), torch.get_rng_state()
    assert torch.equal(state, torch.manual_seed(1).get_state())
    torch.manual_seed(2)
    assert order(sampler) == first


def test_without_a_seed_one_is_drawn_and_kept():
    torch.manual_seed(0)
    a, b = GroupSampler(range(16), 1, 4), GroupSampler(range(16), 1, 4)
    assert order(a) == order(a)
    assert order(a) != order(b)
    torch.manual_seed(0)
    assert order(GroupSampler(range(16), 1, 4)) == order(a)


def test_unshuffled_epochs_are_all_the_same():
    sampler = GroupSampler(range(5), 1, 2, shuffle=False)
    assert order(sampler, 0) == order(sampler, 1) == [0, 1, 2, 3]


def test_fewer_prompts_than_one_block_are_an_error():
    with pytest.raises(DataError, match="needs at least 2 prompts, has 1"):
        GroupSampler(range(1), group_size=4, prompts_per_batch=2)
    with pytest.raises(ValueError, match="needs at least 1 prompts, has 0"):
        GroupSampler([], group_size=4, prompts_per_batch=1)


def test_repeat_sampler_is_the_same_sampler():
    repeat = RepeatSampler(range(7), mini_repeat_count=2, batch_size=3, repeat_count=2, seed=1)
    assert list(repeat) == list(GroupSampler(range(7), 2, 3, 2, seed=1))
    assert list(RepeatSampler(range(3), 2, shuffle=False)) == [0, 0, 1, 1, 2, 2]


def ranks(world, source, sampler=None):
    """The prepared data loader of each of `world` processes, 8 rows in all of them together."""
    return [
        prepare_data_loader(
            DataLoader(source, batch_size=8 // world, sampler=sampler and sampler(), collate_fn=list),
            num_processes=world,
            process_index=rank,
            dispatch_batches=False,
        )
        for rank in range(world)
    ]


def read(loaders, epoch):
    """The rows of each global batch, the ranks' parts joined."""
    for loader in loaders:
        loader.set_epoch(epoch)
    return [list(chain(*parts)) for parts in zip(*loaders, strict=True)]


def make_sampler():
    return GroupSampler(range(5), group_size=4, prompts_per_batch=2, repeats=2, seed=3)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_ranks_read_slices_of_one_order(world, epoch):
    batches = read(ranks(world, range(5), make_sampler), epoch)
    assert batches == blocks(order(make_sampler(), epoch), 8)


@pytest.mark.parametrize("world", [1, 2])
def test_the_callback_sets_the_epoch_where_a_resumed_loader_does_not(world):
    samplers = [make_sampler() for _ in range(world)]
    waiting = iter(samplers)
    loaders = [skip_first_batches(loader, 1) for loader in ranks(world, range(5), lambda: next(waiting))]
    for sampler in samplers:
        state = TrainerState(epoch=1.25)
        SamplerEpochCallback(sampler).on_epoch_begin(TrainingArguments, state, TrainerControl())
    assert read(loaders, 1) == blocks(order(make_sampler(), 1), 8)[1:]


class Recorder(Trainer):
    """A trainer that reads its rows through a `GroupSampler` and keeps them."""

    def __init__(self, folder, **arguments):
        args = TrainingArguments(
            folder, per_device_train_batch_size=4, num_train_epochs=3, save_steps=3, seed=0, use_cpu=True,
            report_to=[], disable_tqdm=True, logging_strategy="no", dataloader_pin_memory=False,
            remove_unused_columns=False, **arguments,
        )  # fmt: skip
        rows = [{"x": float(index)} for index in range(5)]
        super().__init__(torch.nn.Linear(1, 1), args, train_dataset=rows, data_collator=self.collate)
        self.seen = []

    def collate(self, rows):
        return {"input": torch.tensor([[row["x"]] for row in rows])}

    def _get_train_sampler(self, dataset=None):
        sampler = GroupSampler(self.train_dataset, group_size=2, prompts_per_batch=2, seed=self.args.data_seed)
        self.add_callback(SamplerEpochCallback(sampler))
        return sampler

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.seen.append(inputs["input"].flatten().int().tolist())
        return model(**inputs).mean()


def test_trainer_reads_each_epoch_in_its_own_order_and_resumes_in_it(tmp_path):
    sampler = GroupSampler(range(5), group_size=2, prompts_per_batch=2, seed=5)
    wanted = [batch for epoch in range(3) for batch in blocks(order(sampler, epoch), 4)]
    whole = Recorder(tmp_path, data_seed=5)
    whole.train()
    assert whole.seen == wanted
    resumed = Recorder(tmp_path, data_seed=5)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))  # in the middle of the second epoch
    assert resumed.seen == wanted[3:]


class Stream(IterableDataset):
    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return iter([{"x": index} for index in range(self.size)])


class EpochStream(Stream):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([{"x": 10 * self.epoch + index} for index in range(self.size)])


def column(rows):
    return [row["x"] for row in rows]


def streams(size):
    rows = datasets.Dataset.from_dict({"x": list(range(size))})
    return [Stream(size), rows.to_iterable_dataset(num_shards=min(size, 2))]


@pytest.mark.parametrize("size", [4, 5, 7, 8])
def test_streams_are_read_in_the_order_of_the_sampler(size):
    sampler = GroupSampler(range(size), group_size=3, prompts_per_batch=4, repeats=2, shuffle=False)
    for stream in streams(size):
        repeated = repeat_iterable_dataset(stream, group_size=3, prompts_per_batch=4, repeats=2)
        assert isinstance(repeated, IterableDataset)
        assert column(repeated) == list(sampler)
        assert column(repeated) == list(sampler)  # can be read again


def test_streams_that_are_too_short_are_an_error():
    for stream in streams(1):
        with pytest.raises(DataError, match="needs at least 2 prompts, has 1"):
            list(repeat_iterable_dataset(stream, group_size=4, prompts_per_batch=2))


def test_rows_of_a_stream_are_separate_records():
    first, second = repeat_iterable_dataset(Stream(1), group_size=2, prompts_per_batch=1)
    first["reward"] = 1.0
    assert second == {"x": 0}


def test_repeated_streams_can_be_pickled():
    for stream in streams(4):
        repeated = repeat_iterable_dataset(stream, group_size=2, prompts_per_batch=2, repeats=2)
        assert column(pickle.loads(pickle.dumps(repeated))) == column(repeated)


def test_the_epoch_is_forwarded_to_the_stream():
    repeated = repeat_iterable_dataset(EpochStream(2), group_size=1, prompts_per_batch=2)
    repeated.set_epoch(3)
    assert column(repeated) == [30, 31]
    repeat_iterable_dataset(Stream(2), group_size=1, prompts_per_batch=2).set_epoch(3)  # takes no epoch: nothing to do


def test_the_epoch_reshuffles_a_shuffled_stream():
    stream = datasets.Dataset.from_dict({"x": list(range(32))}).to_iterable_dataset().shuffle(seed=0)
    repeated = repeat_iterable_dataset(stream, group_size=1, prompts_per_batch=32)
    first = column(repeated)
    repeated.set_epoch(1)
    second = column(repeated)
    assert first != second
    assert sorted(first) == sorted(second) == list(range(32))


@pytest.mark.parametrize("world", [1, 2, 8])
def test_ranks_read_slices_of_one_stream(world):
    # two shards: split by shards, two ranks would read different prompts for one group
    for stream in streams(5):
        repeated = repeat_iterable_dataset(stream, group_size=4, prompts_per_batch=2, repeats=2)
        batches = [column(batch) for batch in read(ranks(world, repeated), 0)]
        assert batches == [[0] * 4 + [1] * 4] * 2 + [[2] * 4 + [3] * 4] * 2


def test_the_epoch_reaches_a_stream_through_the_loader():
    for world in (1, 2):
        repeated = repeat_iterable_dataset(EpochStream(2), group_size=4, prompts_per_batch=2)
        assert [column(batch) for batch in read(ranks(world, repeated), 2)] == [[20] * 4 + [21] * 4]
