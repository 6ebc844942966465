"""Which sequences go through the model together."""

from collections.abc import Callable

import torch
from torch import Tensor

from trl.types import RolloutBatch


def group_order(batch: RolloutBatch, generator: torch.Generator | None = None) -> Tensor:
    """`[N]` order of the sequences with groups shuffled but whole, so that a slice shares its prompts."""
    prompts = int(batch.prompt_of_seq.max()) + 1 if batch.num_sequences else 0
    rank_of_prompt = torch.randperm(prompts, generator=generator)
    return torch.argsort(rank_of_prompt[batch.prompt_of_seq], stable=True)


def split(
    batch: RolloutBatch,
    active: Tensor,
    max_tokens: int | None,
    largest_count: Callable[[int], int],
) -> list[RolloutBatch]:
    """The micro-batches of a slice: its active sequences, cut so that none exceeds the token budget.

    Sequences of one unit (`RolloutBatch.unit_of_seq`) stay together. A unit longer than the budget gets a micro-batch
    of its own. Inactive sequences, whose every term of the loss is zero, cost no forward pass. All processes get the
    same number of micro-batches, at least one: who has fewer repeats a unit that counts for nothing, because a zero
    gradient is not the same as none.

    Args:
        active: `[N]` bool, on the CPU.
        max_tokens: most tokens of one micro-batch, its distinct prompts included; None is one micro-batch.
        largest_count: takes this process's number of micro-batches, returns the largest of all processes.
    """
    parts = pieces(batch, torch.nonzero(active).flatten(), max_tokens)
    count = 1 if max_tokens is None else max(1, largest_count(len(parts)))
    return batch.split(parts) + [_counting_for_nothing(batch) for _ in range(count - len(parts))]


def pieces(batch: RolloutBatch, chosen: Tensor, max_tokens: int | None) -> list[Tensor]:
    """The chosen sequences cut by the token budget, as index tensors; none for no sequence."""
    if not len(chosen):
        return []
    return [chosen] if max_tokens is None else _by_budget(batch, chosen, max_tokens)


def _by_budget(batch: RolloutBatch, chosen: Tensor, max_tokens: int) -> list[Tensor]:
    """Greedy cut in order of length; neighbours in length waste least where padding is needed."""
    prompt_lengths = batch.prompt_lengths.tolist()
    prompt_of_seq = batch.prompt_of_seq.tolist()
    lengths = batch.completion_lengths.tolist()
    units = batch.units.tolist()
    longest_of_prompt: dict[int, int] = {}
    members: dict[int, list[int]] = {}
    for i in chosen.tolist():
        prompt = prompt_of_seq[i]
        longest_of_prompt[prompt] = max(longest_of_prompt.get(prompt, 0), prompt_lengths[prompt] + lengths[i])
        members.setdefault(units[i], []).append(i)

    def cost(unit: list[int], known: set[int]) -> int:
        new = {prompt_of_seq[i] for i in unit} - known
        return sum(lengths[i] for i in unit) + sum(prompt_lengths[prompt] for prompt in new)

    # Groups stay together: their shared prompt is the larger saving.
    order = sorted(
        members.values(),
        key=lambda unit: (longest_of_prompt[prompt_of_seq[unit[0]]], prompt_of_seq[unit[0]], lengths[unit[0]]),
    )
    parts: list[list[int]] = []
    room, prompts = 0, set[int]()
    for unit in order:
        if not parts or cost(unit, prompts) > room:
            parts.append([])
            room, prompts = max_tokens, set()
        room -= cost(unit, prompts)
        parts[-1] += unit
        prompts.update(prompt_of_seq[i] for i in unit)
    return [torch.tensor(piece) for piece in parts]


def _counting_for_nothing(batch: RolloutBatch) -> RolloutBatch:
    """The unit of the shortest sequence with an empty loss mask: a forward and backward pass of zero gradient."""
    units = batch.units
    piece = batch.select(torch.nonzero(units == units[torch.argmin(batch.completion_lengths)]).flatten())
    piece.loss_mask = torch.zeros_like(piece.loss_mask)
    return piece
