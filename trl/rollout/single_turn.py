"""One completion per row: encode the prompts, ask the engine, keep the rows' order."""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from math import gcd

from trl.errors import GenerationError
from trl.types import Completion, Engine, Prompt, Rollout, Sampling


def roll_out(prompt_ids: Sequence[list[int]], engine: Engine, sampling: Sampling) -> list[Rollout]:
    """One rollout per row, in the order of the rows.

    Rows with the same prompt are asked for together, as `n` completions of it, so that an engine computes the prompt
    once.

    Args:
        prompt_ids: each row's prompt.
        sampling: its `n` is ignored.
    """
    rows_of: dict[tuple[int, ...], list[int]] = {}
    for row, ids in enumerate(prompt_ids):
        rows_of.setdefault(tuple(ids), []).append(row)
    # One request size for all, so that a group cut between two processes does not need a call of its own.
    n = reduce(gcd, map(len, rows_of.values()), 0)
    requests = [rows[i : i + n] for rows in rows_of.values() for i in range(0, len(rows), n)]
    completions: dict[int, Completion] = {}
    prompts = [Prompt(list(prompt_ids[rows[0]])) for rows in requests]
    for index, group in engine.generate(prompts, replace(sampling, n=n)):
        completions.update(zip(requests[index], group, strict=True))
    if missing := [row for row in range(len(prompt_ids)) if row not in completions]:
        raise GenerationError(f"The engine returned no completion for {len(missing)} of {len(prompt_ids)} rows.")
    return [Rollout(list(ids), completions[row]) for row, ids in enumerate(prompt_ids)]
