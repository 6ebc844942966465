"""The records that pass between the parts of the package, and the two protocols behind which backends hide.

Shapes: N sequences, P distinct prompts, S prompt tokens of all distinct prompts, T completion tokens of all sequences.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

FinishReason = Literal["stop", "length", "abort"]


@dataclass(slots=True, frozen=True)
class Prompt:
    """What an engine continues."""

    token_ids: list[int]


@dataclass(slots=True, frozen=True)
class Sampling:
    """How an engine continues a prompt.

    Attributes:
        n: completions per prompt.
        max_tokens: most tokens of one completion.
        temperature: divides the logits; 0 decodes greedily.
        top_p, top_k, min_p: truncation of the distribution; 1.0, 0 and None keep everything.
        repetition_penalty: 1.0 is off.
        with_logps: whether log-probs are wanted; an engine that saves time without them leaves them out.
        extra: further settings by the name `transformers.GenerationConfig` gives them.
    """

    n: int = 1
    max_tokens: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    with_logps: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class Completion:
    """What an engine returns.

    Attributes:
        token_ids: the generated ids, including the end-of-sequence id where one was generated.
        logps: log-prob of each token under the distribution it was sampled from; empty where not asked for.
        finish_reason: `stop` for an end-of-sequence id, `length` for the token limit.
        policy_version: which weights wrote it.
    """

    token_ids: list[int]
    logps: list[float]
    finish_reason: FinishReason
    policy_version: int = 0


@dataclass(slots=True)
class Rollout:
    """One prompt with one completion."""

    prompt_ids: list[int]
    completion: Completion


class WeightStream(Protocol):
    """A re-iterable stream of named full tensors."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]: ...


@dataclass(frozen=True)
class Scorer:
    """A model behind an engine, which can tell the log-probs of given tokens.

    Attributes:
        name: for messages.
        dtype: of its weights, e.g. `bfloat16`, or None where that is not known.
        max_model_len: it scores fewer tokens than this.
        score: takes sequences of token ids; returns the log-prob of each token of each sequence but its first.
    """

    name: str
    dtype: str | None
    max_model_len: int
    score: Callable[[Sequence[Sequence[int]]], list[list[float]]]


class Engine(Protocol):
    """Completions from somewhere.

    Attributes:
        own_weights: whether it samples from weights of its own, so that its log-probs may differ from the trainer's.
        scorers: the models behind it, where they are others than the policy.
    """

    own_weights: bool

    @property
    def scorers(self) -> Sequence[Scorer]: ...

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[tuple[int, list[Completion]]]:
        """Yields `(prompt index, its n completions)` as they finish, in any order."""
        ...

    def update_weights(self, weights: WeightStream, version: int) -> None:
        """From here on it generates with these weights, awake."""
        ...

    def sleep(self) -> bool:
        """Frees memory until the next `update_weights`, where it can; returns whether it did, its weights included."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Normalizer:
    """What the sums of one rank are divided by, so that micro-batches and ranks add up to the whole batch's loss.

    Attributes:
        sequences: sequences of one optimizer step, per rank.
        tokens: loss tokens of one optimizer step, per rank: those of all ranks over the world size.
        generation_tokens: the same, averaged over the optimizer steps of the generation batch.
        max_length: `max_completion_length`.
    """

    sequences: float
    tokens: float
    generation_tokens: float
    max_length: int

    def scaled(self, factor: float) -> "Normalizer":
        """The normalizer with every count times the factor."""
        return replace(
            self,
            sequences=self.sequences * factor,
            tokens=self.tokens * factor,
            generation_tokens=self.generation_tokens * factor,
        )


def _per(axis: Literal["sequence", "token"], **options: Any) -> Any:
    return field(metadata={"per": axis}, **options)


@dataclass(slots=True)
class RolloutBatch:
    """A batch of sequences, flat: no padding, no left or right.

    Distinct prompts are stored once; `prompt_of_seq` ties sequences to them. Lengths, `prompt_of_seq`, `ended` and
    `unit_of_seq` live on the CPU, where layouts are planned; everything per token lives on the device.

    Attributes:
        prompt_ids: `[S]` tokens of the distinct prompts, one after the other.
        prompt_lengths: `[P]`.
        prompt_of_seq: `[N]` which prompt a sequence continues.
        completion_ids: `[T]` tokens of all completions, one after the other.
        completion_lengths: `[N]`.
        loss_mask: `[T]` bool: whether a token takes part in the loss.
        ended: `[N]` bool: whether the completion ended by itself, rather than at the limit of its length.
        unit_of_seq: `[N]` sequences with the same number share a term of the loss, such as the two of a pair, and stay
            in one micro-batch; None where each stands alone.
        scores: `[N]` what rewards made of the completion.
        advantages: `[N]`.
        old_logps: `[T]` the trainer's log-probs at roll-out time; None when they equal the ones being trained.
        ref_logps: `[T]` the reference model's.
        sampling_logps: `[T]` the engine's; None where it was not asked for them.
        correction: `[T]` sampler correction (`functional.importance`).
        in_top_entropy: `[T]` bool: among the tokens of highest entropy, where only those are trained on.
        teacher_ids: `[T, K]` tokens at each position whose probabilities a teacher told.
        teacher_logps: `[T, K]` the teacher's log-probs of them; NaN for a place that holds none.
        norm: what the loss divides by.
    """

    prompt_ids: Tensor
    prompt_lengths: Tensor
    prompt_of_seq: Tensor = _per("sequence")
    completion_ids: Tensor = _per("token")
    completion_lengths: Tensor = _per("sequence")
    loss_mask: Tensor = _per("token")
    ended: Tensor | None = _per("sequence", default=None)
    unit_of_seq: Tensor | None = _per("sequence", default=None)
    scores: Tensor | None = _per("sequence", default=None)
    advantages: Tensor | None = _per("sequence", default=None)
    old_logps: Tensor | None = _per("token", default=None)
    ref_logps: Tensor | None = _per("token", default=None)
    sampling_logps: Tensor | None = _per("token", default=None)
    correction: Tensor | None = _per("token", default=None)
    in_top_entropy: Tensor | None = _per("token", default=None)
    teacher_ids: Tensor | None = _per("token", default=None)
    teacher_logps: Tensor | None = _per("token", default=None)
    norm: "Normalizer | None" = None

    @property
    def num_sequences(self) -> int:
        return len(self.completion_lengths)

    @property
    def num_tokens(self) -> int:
        return len(self.completion_ids)

    @property
    def device(self) -> torch.device:
        return self.completion_ids.device

    @property
    def units(self) -> Tensor:
        """`[N]` which sequences belong together: `unit_of_seq`, or a number of its own for each."""
        return torch.arange(self.num_sequences) if self.unit_of_seq is None else self.unit_of_seq

    @property
    def seq_of_token(self) -> Tensor:
        """`[T]` the sequence each completion token belongs to."""
        index = torch.repeat_interleave(torch.arange(self.num_sequences), self.completion_lengths)
        return index.to(self.device)

    def tokens_of(self, sequences: Tensor) -> Tensor:
        """Where in `[T]` the tokens of the given sequences are, in the given order of sequences."""
        starts = _starts(self.completion_lengths)[sequences]
        return _ranges(starts, self.completion_lengths[sequences]).to(self.device)

    def select(self, sequences: Tensor) -> "RolloutBatch":
        """The batch of the given sequences, in the given order. Prompts that none of them continues are left out.

        Args:
            sequences: `[K]` indices, on the CPU.
        """
        tokens = self.tokens_of(sequences)
        used, prompt_of_seq = torch.unique(self.prompt_of_seq[sequences], return_inverse=True)
        prompt_tokens = _ranges(_starts(self.prompt_lengths)[used], self.prompt_lengths[used])
        changes: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if value is not None and f.metadata.get("per") == "token":
                changes[f.name] = value[tokens]
            elif value is not None and f.metadata.get("per") == "sequence":
                changes[f.name] = value[sequences.to(value.device)]
        changes.update(
            prompt_ids=self.prompt_ids[prompt_tokens.to(self.device)],
            prompt_lengths=self.prompt_lengths[used],
            prompt_of_seq=prompt_of_seq,
        )
        return replace(self, **changes)

    def state_dict(self) -> dict[str, Any]:
        """The fields as plain containers of tensors."""
        state = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**state, "norm": None if self.norm is None else asdict(self.norm)}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any], device: torch.device) -> "RolloutBatch":
        """The batch whose `state_dict` this is."""
        placed = {
            f.name: state[f.name].to(device)
            for f in fields(cls)
            if isinstance(state[f.name], Tensor) and f.name not in _ON_CPU
        }
        norm = None if state["norm"] is None else Normalizer(**state["norm"])
        return cls(**{**state, **placed, "norm": norm})

    def split(self, pieces: Iterable[Tensor]) -> list["RolloutBatch"]:
        """One batch per index tensor."""
        return [self.select(piece) for piece in pieces]


_ON_CPU = ("prompt_lengths", "prompt_of_seq", "completion_lengths", "ended", "unit_of_seq")


def _starts(lengths: Tensor) -> Tensor:
    """`[K]` where each piece begins when pieces of these lengths follow one another."""
    return torch.cumsum(lengths, 0) - lengths


def _ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """`[sum(lengths)]` the indices `start, start + 1, …` of every piece."""
    offsets = torch.arange(int(lengths.sum())) - torch.repeat_interleave(_starts(lengths), lengths)
    return torch.repeat_interleave(starts, lengths) + offsets
