"""From rollouts to the flat batch."""

from collections.abc import Sequence

import torch

from trl.types import Rollout, RolloutBatch


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
