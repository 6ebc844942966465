"""The packed layout of a weight transfer: many tensors in one buffer, with borders both sides know from the sizes."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from trl.weights.source import TensorInfo, as_bytes


def broadcast_chunks(sizes: Sequence[int], limit: int) -> list[slice]:
    """Chunks of a broadcast: a chunk closes with the tensor that makes it exceed the limit.

    Args:
        sizes: bytes of each tensor, in order.
        limit: bytes; a chunk may be larger by its last tensor.
    """
    chunks, start, total = [], 0, 0
    for i, size in enumerate(sizes):
        total += size
        if total > limit:
            chunks.append(slice(start, i + 1))
            start, total = i + 1, 0
    if start < len(sizes):
        chunks.append(slice(start, len(sizes)))
    return chunks


def bounded_chunks(infos: Sequence[TensorInfo], limit: int) -> list[slice]:
    """Chunks for one shared buffer: none exceeds the limit.

    Raises:
        ValueError: a single tensor does.
    """
    chunks, start, total = [], 0, 0
    for i, info in enumerate(infos):
        if info.num_bytes > limit:
            raise ValueError(f"{info.name} has {info.num_bytes} bytes, the buffer {limit}.")
        if total + info.num_bytes > limit:
            chunks.append(slice(start, i))
            start, total = i, 0
        total += info.num_bytes
    if start < len(infos):
        chunks.append(slice(start, len(infos)))
    return chunks


def as_announced(infos: Sequence[TensorInfo], weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The weights as they come, each compared with what the receiver was told: borders depend on it.

    Raises:
        ValueError: they are others.
    """
    for info, (name, tensor) in zip(infos, weights, strict=True):
        if (name, tensor.dtype, tuple(tensor.shape)) != (info.name, info.dtype, info.shape):
            raise ValueError(
                f"{info.name} was announced as {info.dtype} {list(info.shape)}, and {name} came as {tensor.dtype} "
                f"{list(tensor.shape)}."
            )
        yield name, tensor


def pack(weights: Iterable[tuple[str, Tensor]], chunks: Sequence[slice]) -> Iterator[Tensor]:
    """One flat `uint8` buffer per chunk, made as it is asked for: at no time is there a second copy of the model."""
    stream = iter(weights)
    for chunk in chunks:
        yield torch.cat([as_bytes(next(stream)[1]) for _ in range(chunk.start, chunk.stop)])
