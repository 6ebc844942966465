"""Attention over packed sequences, registered in transformers under the name `trl_packed`.

A packed forward pass lays all sequences end to end in one row, so that every layer but attention works on real tokens
only. Attention gets a `PackedLayout`, which says what each stretch of the row may look at. Without a layout the
function is PyTorch's scaled-dot-product attention, as transformers calls it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from trl.errors import NotSupportedError
from trl.models.decode import SharedPromptCache

PACKED_ATTENTION = "trl_packed"


@dataclass(frozen=True)
class Segment:
    """A stretch of the row: its queries attend to the prefix stretch and, causally, to the stretch itself."""

    start: int
    length: int
    prefix_start: int = 0
    prefix_length: int = 0


@dataclass
class _Bucket:
    """Segments of similar length, attended in one padded call.

    Attributes:
        queries: `[B, Lq]` indices into the row; padding points at index 0.
        keys: `[B, Lk]` indices of prefix and stretch.
        valid: `[B, Lq]` real queries.
        query_position, key_position: `[B, Lq]`, `[B, Lk]` position in the sequence; padded keys have a huge one.
    """

    queries: Tensor
    keys: Tensor
    valid: Tensor
    query_position: Tensor
    key_position: Tensor
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask(self, window: int | None) -> Tensor:
        """`[B, 1, Lq, Lk]` bool: what a query may look at, with an optional sliding window."""
        if window not in self.masks:
            distance = self.query_position[:, :, None] - self.key_position[:, None, :]
            allowed = distance >= 0
            if window is not None:
                allowed &= distance < window
            self.masks[window] = allowed[:, None]
        return self.masks[window]


@dataclass(frozen=True)
class _Ragged:
    """The segments as a variable-length kernel takes them.

    Attributes:
        keys: `[Tk]` indices into the row of every segment's prefix and stretch, one segment after the other; None
            where no segment has a prefix, so that they are the row as it is.
        query_ends, key_ends: `[segments + 1]` int32, cumulative lengths.
        longest_query, longest_key: in tokens.
    """

    keys: Tensor | None
    query_ends: Tensor
    key_ends: Tensor
    longest_query: int
    longest_key: int


class PackedLayout:
    """What each stretch of a packed row attends to. Made once per batch, used by every layer.

    Args:
        segments: they cover the row without overlap, in its order.
        device: where the index tensors go.
        max_waste: a bucket takes further segments while its padded area stays below this multiple of the useful one.
    """

    def __init__(self, segments: Sequence[Segment], device: torch.device, max_waste: float = 1.25):
        self._segments = [s for s in segments if s.length]
        self._device, self._max_waste = device, max_waste

    @cached_property
    def buckets(self) -> list[_Bucket]:
        """The segments in groups of similar size, for kernels that want rectangles."""
        order = sorted(self._segments, key=lambda s: (s.prefix_length > 0, s.length + s.prefix_length))
        groups: list[list[Segment]] = []
        queries = keys = useful = 0
        for s in order:
            size = s.length + s.prefix_length
            wider = (max(queries, s.length), max(keys, size), useful + s.length * size)
            if groups and (len(groups[-1]) + 1) * wider[0] * wider[1] <= self._max_waste * wider[2]:
                groups[-1].append(s)
                queries, keys, useful = wider
            else:
                groups.append([s])
                queries, keys, useful = s.length, size, s.length * size
        return [_make_bucket(group, self._device) for group in groups]

    @cached_property
    def inverse(self) -> Tensor:
        """`[row]` where the buckets' valid queries, one after the other, hold each place of the row."""
        rows = torch.cat([b.queries[b.valid] for b in self.buckets])
        inverse = torch.empty_like(rows)
        inverse[rows] = torch.arange(len(rows), device=self._device)
        return inverse

    @cached_property
    def ragged(self) -> _Ragged:
        """The segments for a variable-length kernel, whose queries are the row as it is."""
        lengths = torch.tensor([s.length for s in self._segments])
        pieces = [(s.prefix_start, s.prefix_length, s.start, s.length) for s in self._segments]
        starts = torch.tensor([start for a, _, c, _ in pieces for start in (a, c)])
        sizes = torch.tensor([size for _, b, _, d in pieces for size in (b, d)])
        offsets = torch.arange(int(sizes.sum())) - torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
        key_lengths = sizes.view(-1, 2).sum(1)
        shared = any(s.prefix_length for s in self._segments)
        return _Ragged(
            keys=(torch.repeat_interleave(starts, sizes) + offsets).to(self._device) if shared else None,
            query_ends=_ends(lengths).to(self._device),
            key_ends=_ends(key_lengths).to(self._device),
            longest_query=int(lengths.max()),
            longest_key=int(key_lengths.max()),
        )


def _ends(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()


def _make_bucket(group: Sequence[Segment], device: torch.device) -> _Bucket:
    length = torch.tensor([s.length for s in group])[:, None]
    start = torch.tensor([s.start for s in group])[:, None]
    prefix = torch.tensor([s.prefix_length for s in group])[:, None]
    prefix_start = torch.tensor([s.prefix_start for s in group])[:, None]
    q = torch.arange(int(length.max()))[None]
    k = torch.arange(int((length + prefix).max()))[None]
    valid = q < length
    keys = torch.where(k < prefix, prefix_start + k, start + k - prefix)
    real = k < prefix + length
    return _Bucket(
        queries=torch.where(valid, start + q, 0).to(device),
        keys=torch.where(real, keys, 0).to(device),
        valid=valid.to(device),
        # A padded query looks at everything: a row of the softmax without any key would be NaN.
        query_position=torch.where(valid, prefix + q, 1 << 40).to(device),
        key_position=torch.where(real, k, 1 << 30).to(device),
    )


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_layout: PackedLayout | None = None,
    shared_cache: SharedPromptCache | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention output `[1, row, heads, dim]`; signature as transformers' attention interface prescribes.

    Raises:
        NotSupportedError: with a layout, for a model whose attention has soft-capping or sinks.
    """
    query, key, value = _in_autocast_dtype(query, key, value)
    if shared_cache is not None and packed_layout is None:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return shared_cache.attend(cast(int, module.layer_idx), query, key, value, scale, sliding_window), None
    if packed_layout is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    if softcap is not None or s_aux is not None or kwargs.get("position_bias") is not None:
        raise NotSupportedError("Packed attention has no soft-capping, attention sinks or position bias.")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if shared_cache is not None:
        shared_cache.store_prompts(cast(int, module.layer_idx), k, v)
    # The kernel for ragged batches is Flash Attention's: 16 bits, on CUDA, without dropout.
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and dropout == 0.0:
        return _ragged_attention(q, k, v, packed_layout.ragged, scaling, sliding_window).unsqueeze(0), None
    return _bucketed_attention(q, k, v, packed_layout, scaling, dropout, sliding_window).unsqueeze(0), None


def _in_autocast_dtype(*tensors: Tensor) -> list[Tensor]:
    """The tensors as mixed precision computes with them: rotary embeddings leave queries and keys in float32."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    return [x.to(torch.get_autocast_dtype(device)) for x in tensors]


def _ragged_attention(
    q: Tensor, k: Tensor, v: Tensor, ragged: _Ragged, scaling: float | None, window: int | None
) -> Tensor:
    """`[row, heads, dim]` in one call. A segment's last query sees all of its keys, the one before one less."""
    repeats = q.shape[1] // k.shape[1]
    if repeats > 1:
        k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
    k, v = (x.contiguous() if ragged.keys is None else x[ragged.keys] for x in (k, v))
    out = varlen_attn(
        q.contiguous(),
        k,
        v,
        ragged.query_ends,
        ragged.key_ends,
        ragged.longest_query,
        ragged.longest_key,
        scale=scaling,
        window_size=(-1, 0) if window is None else (window - 1, 0),
    )
    return cast(Tensor, out)


def _bucketed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: PackedLayout,
    scaling: float | None,
    dropout: float,
    window: int | None,
) -> Tensor:
    """`[row, heads, dim]` in one padded call a bucket."""
    repeats = q.shape[1] // k.shape[1]
    if repeats > 1 and q.is_cuda:
        # With a mask, CUDA has no fast kernel for fewer key than query heads.
        k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
    pieces = []
    for bucket in layout.buckets:
        out = scaled_dot_product_attention(
            q[bucket.queries].transpose(1, 2),
            k[bucket.keys].transpose(1, 2),
            v[bucket.keys].transpose(1, 2),
            attn_mask=bucket.mask(window),
            dropout_p=dropout,
            scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        pieces.append(out.transpose(1, 2)[bucket.valid])
    return torch.cat(pieces)[layout.inverse]


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)
