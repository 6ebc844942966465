"""From logits to the next token: the processors that a `Sampling` asks for, and the draw.

The processors are transformers' own, in the order its `generate` applies them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from trl.errors import ConfigError
from trl.types import Sampling

Processor = Callable[[Any, Any], Any]

# Settings beside those of `Sampling`, by the name GenerationConfig gives them, in the order `generate` applies them:
# first those that look at the tokens so far, then those that reshape the distribution.
_HISTORY: dict[str, Callable[[Any, list[int]], Processor]] = {
    "sequence_bias": lambda value, eos: hf.SequenceBiasLogitsProcessor(value),
    "repetition_penalty": lambda value, eos: hf.RepetitionPenaltyLogitsProcessor(value),
    "no_repeat_ngram_size": lambda value, eos: hf.NoRepeatNGramLogitsProcessor(value),
    "bad_words_ids": lambda value, eos: hf.NoBadWordsLogitsProcessor(value, eos),
    "suppress_tokens": lambda value, eos: hf.SuppressTokensLogitsProcessor(value),
}
_SHAPE: dict[str, Callable[[Any], Processor]] = {
    "typical_p": lambda value: hf.TypicalLogitsWarper(mass=value),
    "epsilon_cutoff": lambda value: hf.EpsilonLogitsWarper(epsilon=value),
    "eta_cutoff": lambda value: hf.EtaLogitsWarper(epsilon=value),
}
_OVERRIDES = {f.name: f.name for f in fields(Sampling) if f.name not in ("n", "extra", "with_logps")} | {
    "max_new_tokens": "max_tokens"
}
_OTHER = ("do_sample", "min_new_tokens")


def resolve(sampling: Sampling) -> Sampling:
    """The sampling as the built-in generation takes it: `with_overrides`, and greedy for `do_sample=False`.

    Raises:
        ConfigError: for an entry nobody here understands.
    """
    known = {*_HISTORY, *_SHAPE, *_OVERRIDES, *_OTHER}
    if unknown := sorted(set(sampling.extra) - known):
        raise ConfigError(
            f"`generation_kwargs` holds {', '.join(f'`{u}`' for u in unknown)}, which the built-in generation does not "
            f"have. It has: {', '.join(sorted(known))}."
        )
    sampling = with_overrides(sampling)
    temperature = 0.0 if sampling.extra.get("do_sample") is False else sampling.temperature
    extra = {k: v for k, v in sampling.extra.items() if k != "do_sample"}
    return replace(sampling, temperature=temperature, extra=extra)


def with_overrides(sampling: Sampling) -> Sampling:
    """The sampling with those entries of `extra` that have a field of their own moved there; they win."""
    changes = {_OVERRIDES[k]: v for k, v in sampling.extra.items() if k in _OVERRIDES}
    return replace(sampling, **changes, extra={k: v for k, v in sampling.extra.items() if k not in _OVERRIDES})


@dataclass
class Sampler:
    """Draws next tokens.

    Args:
        sampling: resolved by `resolve`.
        eos_ids: ids that end a completion; `min_new_tokens` forbids them early on.
    """

    sampling: Sampling
    eos_ids: Sequence[int]

    def __post_init__(self) -> None:
        s, eos = self.sampling, list(self.eos_ids)
        history = dict(s.extra)
        if s.repetition_penalty != 1.0:
            history["repetition_penalty"] = float(s.repetition_penalty)
        self._history: list[Processor] = [make(history[k], eos) for k, make in _HISTORY.items() if history.get(k)]
        self._shape: list[Processor] = []
        if s.temperature not in (0.0, 1.0):
            self._shape.append(hf.TemperatureLogitsWarper(float(s.temperature)))
        if s.top_k:
            self._shape.append(hf.TopKLogitsWarper(s.top_k))
        if s.top_p < 1.0:
            self._shape.append(hf.TopPLogitsWarper(s.top_p))
        if s.min_p:
            self._shape.append(hf.MinPLogitsWarper(s.min_p))
        self._shape += [make(s.extra[k]) for k, make in _SHAPE.items() if s.extra.get(k)]

    @property
    def needs_history(self) -> bool:
        """Whether `process` looks at the tokens so far."""
        return bool(self._history)

    def process(self, logits: Tensor, step: int, history: Sequence[list[int]] | None = None) -> Tensor:
        """`[N, V]` logits of the distribution to draw from.

        Args:
            logits: `[N, V]`; may be overwritten.
            step: tokens generated so far.
            history: each row's prompt and tokens so far, when `needs_history`.
        """
        if history is not None:
            logits = self._with_history(logits, history)
        if step < self.sampling.extra.get("min_new_tokens", 0):
            logits[:, list(self.eos_ids)] = -torch.inf
        for processor in self._shape:
            logits = processor(None, logits)
        return logits

    def draw(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """`[N]` next tokens and `[N]` their log-probs under the distribution of the processed logits."""
        logps = logits.log_softmax(-1)
        tokens = logits.argmax(-1) if self.sampling.temperature == 0.0 else _draw(logps.exp())
        return tokens, logps.gather(1, tokens[:, None]).squeeze(1)

    def _with_history(self, logits: Tensor, history: Sequence[list[int]]) -> Tensor:
        """Rows of equal length go through the processors together: nobody sees padding."""
        by_length: dict[int, list[int]] = {}
        for row, tokens in enumerate(history):
            by_length.setdefault(len(tokens), []).append(row)
        for rows in by_length.values():
            ids = torch.tensor([history[r] for r in rows], device=logits.device)
            scores = logits[rows]
            for processor in self._history:
                scores = processor(ids, scores)
            logits[rows] = scores
        return logits


def _draw(probabilities: Tensor, block: int = 64) -> Tensor:
    """`[N]` indices drawn from `[N, V]` probabilities, by inverting the distribution function in double precision.

    First over blocks of the vocabulary, then within the block: single sums over a large vocabulary would drift, and
    double ones over all of it cost more than the model does.
    """
    rows, vocabulary = probabilities.shape
    padded = torch.nn.functional.pad(probabilities, (0, -vocabulary % block)).view(rows, -1, block)
    cdf = padded.sum(-1).double().cumsum(-1)
    u = torch.rand(rows, 1, dtype=torch.float64, device=cdf.device) * cdf[:, -1:]
    chosen = torch.searchsorted(cdf, u, right=True)
    before = torch.where(chosen > 0, cdf.gather(1, (chosen - 1).clamp(min=0)), 0.0)
    inner = padded.gather(1, chosen[:, :, None].expand(-1, 1, block)).squeeze(1).double().cumsum(-1)
    # The remainder may reach the block's end by rounding; it must not step over it onto what has no probability.
    rest = torch.minimum(u - before, torch.nextafter(inner[:, -1:], torch.zeros_like(u)))
    return (chosen * block + torch.searchsorted(inner, rest, right=True)).squeeze(1)
