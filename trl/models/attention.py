"""Attention over packed sequences, registered in transformers under the name `trl_packed`.

A packed forward pass lays all sequences end to end in one row, so that every layer but attention works on real tokens
only. Attention gets a `PackedLayout`, which says what each stretch of the row may look at. Without a layout the
function is PyTorch's scaled-dot-product attention, as transformers calls it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
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


class PackedLayout:
    """What each stretch of a packed row attends to. Built once per batch, used by every layer.

    Args:
        segments: they cover the row without overlap.
        device: where the index tensors go.
        max_waste: a bucket takes further segments while its padded area stays below this multiple of the useful one.
    """

    def __init__(self, segments: Sequence[Segment], device: torch.device, max_waste: float = 1.25):
        order = sorted(
            (s for s in segments if s.length), key=lambda s: (s.prefix_length > 0, s.length + s.prefix_length)
        )
        self.buckets: list[_Bucket] = []
        group: list[Segment] = []
        for segment in order:
            if group and _waste([*group, segment]) > max_waste:
                self.buckets.append(_make_bucket(group, device))
                group = []
            group.append(segment)
        if group:
            self.buckets.append(_make_bucket(group, device))
        rows = torch.cat([b.queries[b.valid] for b in self.buckets])
        self.inverse = torch.empty_like(rows)
        self.inverse[rows] = torch.arange(len(rows), device=device)


def _area(segment: Segment) -> int:
    return segment.length * (segment.length + segment.prefix_length)


def _waste(group: Sequence[Segment]) -> float:
    queries = max(s.length for s in group)
    keys = max(s.length + s.prefix_length for s in group)
    return len(group) * queries * keys / sum(map(_area, group))


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
    grouped = q.shape[1] != k.shape[1]
    pieces = []
    for bucket in packed_layout.buckets:
        out = scaled_dot_product_attention(
            q[bucket.queries].transpose(1, 2),
            k[bucket.keys].transpose(1, 2),
            v[bucket.keys].transpose(1, 2),
            attn_mask=bucket.mask(sliding_window),
            dropout_p=dropout,
            scale=scaling,
            enable_gqa=grouped,
        )
        pieces.append(out.transpose(1, 2)[bucket.valid])
    return torch.cat(pieces)[packed_layout.inverse].unsqueeze(0), None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)
