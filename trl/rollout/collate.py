"""From rollouts, and from examples of fixed data, to the flat batch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from trl.types import Rollout, RolloutBatch

SHARED_TOKENS = 32
"""A shorter prompt costs less to repeat than to share: its completions would be attended to in two stretches."""


@dataclass(slots=True)
class Example:
    """A prompt, which is only read, and what is learnt behind it.

    Attributes:
        prompt_ids: at least one token.
        completion_ids: as many as `learnt`.
        learnt: of each token of the completion; None for all.
        unit: number of what shares a term of the loss with it; None where it stands alone.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    learnt: list[bool] | None = None
    unit: int | None = None


def collate_examples(examples: Iterable[Example], device: torch.device) -> RolloutBatch:
    """The flat batch of these examples, in their order; equal prompts that are long enough are stored once."""
    rows = list(examples)
    place: dict[tuple[int, ...] | int, int] = {}
    prompts: list[list[int]] = []
    prompt_of_seq = []
    for index, row in enumerate(rows):
        key = tuple(row.prompt_ids) if len(row.prompt_ids) >= SHARED_TOKENS else index
        if key not in place:
            place[key] = len(prompts)
            prompts.append(row.prompt_ids)
        prompt_of_seq.append(place[key])
    learnt = [flag for r in rows for flag in (r.learnt or [True] * len(r.completion_ids))]
    units = [row.unit for row in rows if row.unit is not None]
    return RolloutBatch(
        prompt_ids=torch.tensor([token for ids in prompts for token in ids], dtype=torch.long).to(device),
        prompt_lengths=torch.tensor([len(ids) for ids in prompts]),
        prompt_of_seq=torch.tensor(prompt_of_seq),
        completion_ids=torch.tensor([t for r in rows for t in r.completion_ids], dtype=torch.long).to(device),
        completion_lengths=torch.tensor([len(r.completion_ids) for r in rows]),
        loss_mask=torch.tensor(learnt, dtype=torch.bool).to(device),
        unit_of_seq=torch.tensor(units) if units else None,
    )


def collate(rollouts: Sequence[Rollout], device: torch.device) -> RolloutBatch:
    """The flat batch of these rollouts, in their order, all tokens in the loss; equal prompts are stored once."""
    place: dict[tuple[int, ...], int] = {}
    prompt_of_seq = [place.setdefault(tuple(r.prompt_ids), len(place)) for r in rollouts]
    completions = [r.completion for r in rollouts]
    lengths = torch.tensor([len(c.token_ids) for c in completions])
    logps = [p for c in completions for p in c.logps]
    has_logps = len(logps) == int(lengths.sum())
    return RolloutBatch(
        prompt_ids=torch.tensor([token for ids in place for token in ids], dtype=torch.long, device=device),
        prompt_lengths=torch.tensor([len(ids) for ids in place]),
        prompt_of_seq=torch.tensor(prompt_of_seq),
        completion_ids=torch.tensor([t for c in completions for t in c.token_ids], dtype=torch.long, device=device),
        completion_lengths=lengths,
        loss_mask=torch.ones(int(lengths.sum()), dtype=torch.bool, device=device),
        ended=torch.tensor([c.finish_reason == "stop" for c in completions]),
        sampling_logps=torch.tensor(logps, dtype=torch.float32, device=device) if has_logps else None,
    )
