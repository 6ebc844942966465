"""The order of prompts for online training: each in a group, each generation batch as often as it is used."""

import copy
from collections.abc import Iterable, Iterator, Sized
from itertools import islice
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from torch.utils.data import IterableDataset, Sampler
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trl.errors import DataError

T = TypeVar("T")


class GroupSampler(Sampler[int]):
    """Indices of prompts, each `group_size` times in a row, in blocks of `prompts_per_batch` prompts, each block
    `repeats` times in a row.

    With two prompts a block, groups of three and two repeats, the prompts a, b, c, d give
    `aaabbb aaabbb cccddd cccddd`. A last, incomplete block is left out. When shuffled, the prompts left out are
    others in the next epoch, and over many epochs each is left out equally often.

    The order is a function of seed and epoch alone, so it is the same on all ranks and after a restart. The epoch is
    set through `set_epoch`, as accelerate's data loaders and `transformers.Trainer` do; see `SamplerEpochCallback`.

    Args:
        data_source: anything with a length.
        group_size: completions of one prompt.
        prompts_per_batch: different prompts in one generation batch, over all ranks.
        repeats: how often the rows of one generation batch are read.
        shuffle: whether prompts come in a random order; else in that of the data.
        seed: of the order. None draws one from torch's generator, which is right for a single process only.

    Raises:
        DataError: fewer prompts than one block.
    """

    def __init__(
        self,
        data_source: Sized,
        group_size: int,
        prompts_per_batch: int,
        repeats: int = 1,
        shuffle: bool = True,
        seed: int | None = None,
    ) -> None:
        self.num_prompts = len(data_source)
        if self.num_prompts < prompts_per_batch:
            raise _too_few_prompts(prompts_per_batch, self.num_prompts)
        self.group_size = group_size
        self.prompts_per_batch = prompts_per_batch
        self.repeats = repeats
        self.shuffle = shuffle
        self.seed = int(torch.randint(2**31, ()).item()) if seed is None else seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration gives."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return _repeat_blocks(self._prompts(), self.group_size, self.prompts_per_batch, self.repeats)

    def __len__(self) -> int:
        blocks = self.num_prompts // self.prompts_per_batch
        return blocks * self.prompts_per_batch * self.group_size * self.repeats

    def _prompts(self) -> list[int]:
        """The prompts of this epoch in order: a multiple of the block size."""
        left_out = self.num_prompts % self.prompts_per_batch
        if not self.shuffle:
            return list(range(self.num_prompts - left_out))
        # A window moves over one fixed order and leaves out what is in it. It is less than half as long as the order,
        # so the windows of two epochs in a row never meet.
        fixed = np.random.default_rng((self.seed, 0)).permutation(self.num_prompts)
        kept = np.roll(fixed, -self.epoch * left_out)[left_out:]
        return np.random.default_rng((self.seed, 1, self.epoch)).permutation(kept).tolist()


class RepeatSampler(GroupSampler):
    """`GroupSampler` with other names for its arguments."""

    def __init__(
        self,
        data_source: Sized,
        mini_repeat_count: int,
        batch_size: int = 1,
        repeat_count: int = 1,
        shuffle: bool = True,
        seed: int | None = None,
    ) -> None:
        super().__init__(data_source, mini_repeat_count, batch_size, repeat_count, shuffle, seed)


class SamplerEpochCallback(TrainerCallback):
    """Sets the epoch of a sampler at the start of each epoch.

    The trainer's data loader does so too, but not in the epoch in which several processes resume: the wrapper that
    skips the batches already seen hides the sampler, which would replay the order of epoch 0.
    """

    def __init__(self, sampler: GroupSampler) -> None:
        self.sampler = sampler

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.sampler.set_epoch(int(state.epoch or 0))


@runtime_checkable
class _Epochs(Protocol):
    def set_epoch(self, epoch: int) -> None: ...


class RepeatedPrompts(IterableDataset):
    """The rows of a stream, as shallow copies, in the order of an unshuffled `GroupSampler`."""

    def __init__(self, dataset: Iterable[Any], group_size: int, prompts_per_batch: int, repeats: int) -> None:
        self.dataset = dataset
        self.group_size = group_size
        self.prompts_per_batch = prompts_per_batch
        self.repeats = repeats

    def set_epoch(self, epoch: int) -> None:
        """Forward the epoch to the stream, if it takes one."""
        if isinstance(self.dataset, _Epochs):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        rows = _repeat_blocks(self.dataset, self.group_size, self.prompts_per_batch, self.repeats)
        return map(copy.copy, rows)


def repeat_iterable_dataset(
    dataset: Iterable[Any], group_size: int, prompts_per_batch: int, repeats: int = 1
) -> RepeatedPrompts:
    """The stream in the order of an unshuffled `GroupSampler`; `set_epoch` is forwarded to it.

    All processes read the whole stream and take their slices of it, so a group may lie on several of them. This holds
    with `dispatch_batches=False` and no data loader workers.

    Args:
        dataset: an iterable dataset of torch or of the datasets library. An incomplete last block is left out.
        group_size: completions of one prompt.
        prompts_per_batch: different prompts in one generation batch, over all ranks.
        repeats: how often the rows of one generation batch are read.

    Raises:
        DataError: in the iteration, if the stream ends within its first block.
    """
    return RepeatedPrompts(dataset, group_size, prompts_per_batch, repeats)


def _repeat_blocks(items: Iterable[T], group_size: int, prompts_per_batch: int, repeats: int) -> Iterator[T]:
    """Each item `group_size` times, each full block of items `repeats` times. Only one block is held."""
    stream = iter(items)
    block = list(islice(stream, prompts_per_batch))
    if len(block) < prompts_per_batch:
        raise _too_few_prompts(prompts_per_batch, len(block))
    while len(block) == prompts_per_batch:
        for _ in range(repeats):
            for item in block:
                for _ in range(group_size):
                    yield item
        block = list(islice(stream, prompts_per_batch))


def _too_few_prompts(needed: int, found: int) -> DataError:
    return DataError(
        f"The dataset needs at least {needed} prompts, has {found}: one generation batch holds {needed} different "
        "prompts. Add prompts, or make the generation batch smaller."
    )
