"""From a roll-out batch to per-token log-probs. The one place that lays sequences out for a model.

Packed where the model's attention can: every distinct prompt once, all completions behind, no padding. Otherwise whole
sequences, right-padded. Both layouts compute the same numbers.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from trl.errors import NotSupportedError
from trl.functional.divergence import Head, divergences
from trl.functional.logps import LogitTransform, chosen_with_statistics
from trl.models.attention import PACKED_ATTENTION, PackedLayout, Segment
from trl.models.decode import SharedPromptCache
from trl.models.shard import unwrap
from trl.types import RolloutBatch


@dataclass(frozen=True)
class TokenLogps:
    """Result of `token_logps`, in the batch's token order.

    Attributes:
        logps: `[T]` log-prob of each completion token, or `[T, K]` of the tokens asked for.
        entropies: `[T]` entropy of the distribution it comes from, in nats.
        aux_loss: a mixture-of-experts model's balance loss, or None.
        statistics: `[T]` by name, those asked for, without gradient.
    """

    logps: Tensor
    entropies: Tensor
    aux_loss: Tensor | None = None
    statistics: dict[str, Tensor] = field(default_factory=dict)


def token_logps(
    model: nn.Module,
    batch: RolloutBatch,
    *,
    targets: Tensor | None = None,
    statistics: Sequence[str] = (),
    temperature: float = 1.0,
    packed: bool = True,
    fp32_head: bool = False,
    with_aux_loss: bool = False,
) -> TokenLogps:
    """Log-prob and entropy of every completion token under `model`, differentiable.

    Args:
        model: a causal language model, wrapped for training or not.
        targets: `[T, K]` tokens whose log-probs are wanted in the completion token's place; the result's are `[T, K]`.
        statistics: names out of `functional.logps.STATISTICS`.
        temperature: divides the logits, as it did in sampling.
        packed: lay sequences end to end; only for models that pass `supports_packing`.
        fp32_head: compute the LM head's product in float32.
        with_aux_loss: ask a mixture-of-experts model for its balance loss.
    """
    hidden, aux_loss = _predicting_states(model, batch, packed, with_aux_loss)
    head = _head(unwrap(model), hidden, temperature, fp32_head)
    chosen = chosen_with_statistics(
        head.hidden,
        head.weight,
        batch.completion_ids if targets is None else targets,
        statistics=statistics,
        bias=head.bias,
        transform=head.transform,
        compute_dtype=head.compute_dtype,
    )
    return TokenLogps(chosen.logps, chosen.entropies, aux_loss, chosen.statistics)


def token_divergences(
    model: nn.Module,
    teacher: nn.Module,
    batch: RolloutBatch,
    beta: float,
    *,
    temperature: float = 1.0,
    packed: bool = True,
    teacher_packed: bool = True,
    fp32_head: bool = False,
) -> tuple[Tensor, Tensor]:
    """Divergence of `model` from `teacher` at every completion token, and the entropy of `model` there, both `[T]`.

    The divergence is differentiable in `model` alone (`functional.divergence`).

    Args:
        model, teacher: causal language models with the same tokens.
        beta: 0 is forward KL, 1 reverse KL, between them the generalised Jensen-Shannon divergence.
        temperature: divides the logits of both.
        packed, teacher_packed: lay sequences end to end; only for models that pass `supports_packing`.
        fp32_head: compute the LM heads' products in float32.
    """
    with torch.no_grad():
        told = _head(unwrap(teacher), _predicting_states(teacher, batch, teacher_packed)[0], temperature, fp32_head)
    own = _head(unwrap(model), _predicting_states(model, batch, packed)[0], temperature, fp32_head)
    return divergences(own, told, beta)


def _predicting_states(
    model: nn.Module, batch: RolloutBatch, packed: bool, with_aux_loss: bool = False
) -> tuple[Tensor, Tensor | None]:
    """`[T, H]` hidden states that predict the completion tokens; and the balance loss, where asked for."""
    inputs, positions = (_packed_inputs if packed else _padded_inputs)(batch)
    if with_aux_loss:
        inputs["output_router_logits"] = True
    with _captured_hidden_states(unwrap(model)) as captured:
        output = model(**inputs, use_cache=False)
    return captured[0].flatten(0, -2)[positions], output.aux_loss if with_aux_loss else None


def prompt_logits(model: nn.Module, prompts: Sequence[Sequence[int]], cache: SharedPromptCache) -> Tensor:
    """`[P, V]` logits after each prompt, computed in one packed row; the cache takes the keys and values."""
    lengths = [len(p) for p in prompts]
    starts = list(accumulate(lengths, initial=0))[:-1]
    flat = torch.tensor([token for p in prompts for token in p], device=cache.device)
    positions = torch.tensor([i for n in lengths for i in range(n)], device=cache.device)
    layout = PackedLayout([Segment(s, n) for s, n in zip(starts, lengths, strict=True)], cache.device)
    last = torch.tensor([s + n - 1 for s, n in zip(starts, lengths, strict=True)], device=cache.device)
    return _next_token_logits(model, flat, positions, last, packed_layout=layout, shared_cache=cache)


def step_logits(model: nn.Module, token_ids: Tensor, cache: SharedPromptCache) -> Tensor:
    """`[N, V]` logits after each row took one more token, `token_ids` `[N]`."""
    logits = _next_token_logits(model, token_ids, cache.positions(), slice(None), shared_cache=cache)
    cache.length += 1
    return logits


def _next_token_logits(
    model: nn.Module, token_ids: Tensor, position_ids: Tensor, wanted: Tensor | slice, **attention: Any
) -> Tensor:
    """Logits at the wanted places of one row, in float32."""
    with _captured_hidden_states(unwrap(model)) as captured:
        model(
            input_ids=token_ids[None],
            position_ids=position_ids[None],
            attention_mask=_any_mask(len(token_ids), token_ids.device),
            use_cache=False,
            **attention,
        )
    head = unwrap(model).get_output_embeddings()
    raw = nn.functional.linear(captured[0][0, wanted].to(head.weight.dtype), head.weight, head.bias)
    return logit_transform(unwrap(model)).forward(raw.float())


def _any_mask(length: int, device: torch.device) -> Tensor:
    """A mask of four dimensions, which a model takes as it is: the layout or cache decides in its place.

    It has an entry per token of the row, because mixture-of-experts models count tokens with it.
    """
    return torch.ones(1, 1, 1, length, dtype=torch.bool, device=device)


# Config entry that scales the logits -> the power with which it does.
_SCALES = {"logit_scale": 1, "lm_head_multiplier": 1, "output_multiplier": 1, "logits_scaling": -1}
# Families in which the entry means something else.
_SCALES_OF_FAMILY = {"hyperclovax": {"logits_scaling": 1}, "mpt": {}}
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


def logit_transform(model: PreTrainedModel, temperature: float = 1.0) -> LogitTransform:
    """What the model's family does with its LM head's product before the softmax."""
    text_config = model.config.get_text_config()
    config = vars(text_config)
    scale = 1.0
    for entry, power in _SCALES_OF_FAMILY.get(text_config.model_type, _SCALES).items():
        if config.get(entry) is not None:
            scale *= float(config[entry]) ** power
    softcap = next((config[entry] for entry in _SOFTCAPS if config.get(entry) is not None), None)
    return LogitTransform(scale, softcap, temperature)


def supports_packing(model: PreTrainedModel) -> bool:
    """Whether packed sequences of this model keep to themselves: tried on a few tokens, not looked up.

    Two sequences share a row; the second must come out as it does alone, whatever the first one is. Models that mix
    tokens elsewhere than in attention (convolutions, state spaces) fail this and are padded instead. So are models
    whose attention is limited to a window or chunk that packed attention is not told of: a few tokens fit into any.
    """
    if model.config._attn_implementation != PACKED_ATTENTION:
        return False
    vocabulary = model.config.get_text_config().vocab_size
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            pack = _probe_batch([[3, 1, 4, 1, 5], [2, 7, 1]], vocabulary, device)
            other = _probe_batch([[9, 2, 6, 5, 3], [2, 7, 1]], vocabulary, device)
            packed, changed = (token_logps(model, b).logps[-2:].float() for b in (pack, other))
            alone = token_logps(model, pack, packed=False).logps[-2:].float()
            if _has_limited_attention(model) and not _tells_its_window(model, pack):
                return False
    except NotSupportedError:
        return False
    finally:
        model.train(training)
    precise = next(model.parameters()).dtype == torch.float32
    tolerance = 1e-4 if precise else 3e-2

    def close(a: Tensor, b: Tensor) -> bool:
        return torch.allclose(a, b, rtol=tolerance, atol=tolerance)

    return close(packed, changed) and close(packed, alone)


def _has_limited_attention(model: PreTrainedModel) -> bool:
    """Whether some layers attend to the nearest tokens only, says the config."""
    config = vars(model.config.get_text_config())
    if config.get("attention_chunk_size") is not None:
        return True
    layers = config.get("layer_types") or ["sliding_attention"]
    return config.get("sliding_window") is not None and "sliding_attention" in layers


def _tells_its_window(model: PreTrainedModel, batch: RolloutBatch) -> bool:
    """Whether the attention layers hand a sliding window over, rather than leave it to a mask."""
    inputs, _ = _packed_inputs(batch)
    with _captured_hidden_states(unwrap(model)):
        model(**inputs, use_cache=False)
    return any(window is not None for bucket in inputs["packed_layout"].buckets for window in bucket.masks)


def _probe_batch(sequences: list[list[int]], vocabulary: int, device: torch.device) -> RolloutBatch:
    """A batch whose sequences have a one-token prompt and the rest as completion."""
    ids = [[token % vocabulary for token in sequence] for sequence in sequences]
    completions = torch.tensor([token for sequence in ids for token in sequence[1:]], device=device)
    return RolloutBatch(
        prompt_ids=torch.tensor([sequence[0] for sequence in ids], device=device),
        prompt_lengths=torch.ones(len(ids), dtype=torch.long),
        prompt_of_seq=torch.arange(len(ids)),
        completion_ids=completions,
        completion_lengths=torch.tensor([len(sequence) - 1 for sequence in ids]),
        loss_mask=torch.ones_like(completions, dtype=torch.bool),
    )


@dataclass(frozen=True)
class _Row:
    """Where everything stands in a packed row: each distinct prompt with its completions behind it.

    A completion's last token predicts nothing and is left out; what is left is its inner part.

    Attributes:
        prompt_starts: `[P]`.
        prompt_places: `[S]` of the prompt tokens.
        starts: `[N]` of the inner parts.
        inner: `[N]` lengths of the inner parts.
    """

    prompt_starts: Tensor
    prompt_places: Tensor
    starts: Tensor
    inner: Tensor

    @classmethod
    def of(cls, batch: RolloutBatch) -> "_Row":
        prompt_of_seq, prompt_lengths = batch.prompt_of_seq, batch.prompt_lengths
        inner = (batch.completion_lengths - 1).clamp(min=0)
        blocks = prompt_lengths.index_add(0, prompt_of_seq, inner)
        prompt_starts = _before(blocks)
        order = torch.argsort(prompt_of_seq, stable=True)
        # Before a completion stand all prompts up to its own, and all inner parts of the row before its own.
        starts = torch.empty_like(inner)
        starts[order] = prompt_lengths.cumsum(0)[prompt_of_seq[order]] + _before(inner[order])
        places = torch.repeat_interleave(prompt_starts - _before(prompt_lengths), prompt_lengths)
        return cls(prompt_starts, places + torch.arange(len(places)), starts, inner)

    def segments(self, batch: RolloutBatch) -> list[Segment]:
        """What each stretch attends to. A prompt with one completion is one stretch with it."""
        starts, lengths = self.prompt_starts.tolist(), batch.prompt_lengths.tolist()
        members: list[list[int]] = [[] for _ in lengths]
        for i, prompt in enumerate(batch.prompt_of_seq.tolist()):
            members[prompt].append(i)
        places, inner = self.starts.tolist(), self.inner.tolist()
        segments = []
        for start, length, sequences in zip(starts, lengths, members, strict=True):
            if len(sequences) == 1:
                segments.append(Segment(start, length + inner[sequences[0]]))
                continue
            segments.append(Segment(start, length))
            segments += [Segment(places[i], inner[i], start, length) for i in sequences]
        return segments


def _before(lengths: Tensor) -> Tensor:
    """`[K]` the sum of the lengths before each."""
    return lengths.cumsum(0) - lengths


def _packed_inputs(batch: RolloutBatch) -> tuple[dict[str, Any], Tensor]:
    """Model inputs of one row, and `[T]` where in it each completion token is predicted."""
    device, prompt_lengths, lengths = batch.device, batch.prompt_lengths, batch.completion_lengths
    row = _Row.of(batch)
    seq_of_token = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    offset = torch.arange(len(seq_of_token)) - _before(lengths)[seq_of_token]
    prompt_of_token = batch.prompt_of_seq[seq_of_token]
    before_first = (row.prompt_starts + prompt_lengths - 1)[prompt_of_token]
    place = row.starts[seq_of_token] + offset
    predicted_at = torch.where(offset == 0, before_first, place - 1)

    kept = torch.nonzero(offset < lengths[seq_of_token] - 1).flatten()
    places = torch.cat([row.prompt_places, place[kept]])
    prompt_positions = torch.arange(len(row.prompt_places)) - torch.repeat_interleave(
        _before(prompt_lengths), prompt_lengths
    )
    position_ids = torch.empty_like(places)
    position_ids[places] = torch.cat([prompt_positions, (prompt_lengths[prompt_of_token] + offset)[kept]])
    input_ids = torch.empty(len(places), dtype=torch.long, device=device)
    input_ids[places.to(device)] = torch.cat([batch.prompt_ids, batch.completion_ids[kept.to(device)]])
    inputs = {
        "input_ids": input_ids[None],
        "position_ids": position_ids[None].to(device),
        "attention_mask": _any_mask(len(input_ids), device),
        "packed_layout": PackedLayout(row.segments(batch), device),
    }
    return inputs, predicted_at.to(device)


def _padded_inputs(batch: RolloutBatch) -> tuple[dict[str, Any], Tensor]:
    """Model inputs of one right-padded row per sequence, and `[T]` where (flat) each completion token is predicted."""
    prompts = batch.prompt_ids.split(batch.prompt_lengths.tolist())
    completions = batch.completion_ids.split(batch.completion_lengths.tolist())
    rows = [torch.cat([prompts[p], c[:-1]]) for p, c in zip(batch.prompt_of_seq.tolist(), completions, strict=True)]
    lengths = torch.tensor([len(row) for row in rows])
    input_ids = pad_sequence(rows, batch_first=True)
    width = input_ids.shape[1]
    mask = (torch.arange(width) < lengths[:, None]).long().to(batch.device)
    seq_of_token = torch.repeat_interleave(torch.arange(len(rows)), batch.completion_lengths)
    offset = (
        torch.arange(len(seq_of_token))
        - (torch.cumsum(batch.completion_lengths, 0) - batch.completion_lengths)[seq_of_token]
    )
    first = batch.prompt_lengths[batch.prompt_of_seq] - 1
    predicted_at = seq_of_token * width + first[seq_of_token] + offset
    return {"input_ids": input_ids, "attention_mask": mask}, predicted_at.to(batch.device)


@contextmanager
def _captured_hidden_states(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """While active, the LM head hands its input over instead of computing logits."""
    head = model.get_output_embeddings()
    captured: list[Tensor] = []

    def capture(hidden: Tensor) -> Tensor:
        captured.append(hidden)
        return hidden[..., :1]

    head.forward = capture
    try:
        yield captured
    finally:
        del head.forward


def _head(model: PreTrainedModel, hidden: Tensor, temperature: float, fp32_head: bool) -> Head:
    """What the model's next-token distributions are computed from."""
    head = model.get_output_embeddings()
    device = hidden.device.type
    if fp32_head:
        dtype = torch.float32
    elif torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    else:
        dtype = torch.promote_types(hidden.dtype, head.weight.dtype)
    return Head(hidden, head.weight, head.bias, logit_transform(model, temperature), dtype)
