"""Borders of packed buffers, and what is in them."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl.weights.packing import as_announced, bounded_chunks, broadcast_chunks, pack
from trl.weights.source import TensorInfo, as_bytes

sizes_and_limits = st.tuples(st.lists(st.integers(0, 50), max_size=12), st.integers(0, 120))


def infos_of(sizes: list[int]) -> list[TensorInfo]:
    return [TensorInfo(f"t{i}", torch.uint8, (size,)) for i, size in enumerate(sizes)]


def lengths(chunks: list[slice]) -> list[int]:
    return [c.stop - c.start for c in chunks]


@pytest.mark.parametrize(
    ("sizes", "limit", "expected"),
    [
        ([4, 4, 4], 8, [3]),  # 8 does not exceed 8: the third tensor closes the chunk
        ([4, 4, 4, 4], 8, [3, 1]),
        ([20, 1], 8, [1, 1]),  # one tensor alone may exceed the limit
        ([1, 20, 1], 8, [2, 1]),
        ([4, 4], 100, [2]),
        ([4, 4], 0, [1, 1]),  # a limit of nothing: each tensor by itself
        ([], 8, []),
    ],
)
def test_a_broadcast_chunk_closes_with_the_tensor_that_exceeds_the_limit(sizes, limit, expected):
    assert lengths(broadcast_chunks(sizes, limit)) == expected


@pytest.mark.parametrize(
    ("sizes", "limit", "expected"), [([4, 4, 4], 8, [2, 1]), ([8, 1], 8, [1, 1]), ([1, 2, 3], 6, [3]), ([], 8, [])]
)
def test_a_bounded_chunk_never_exceeds_the_limit(sizes, limit, expected):
    assert lengths(bounded_chunks(infos_of(sizes), limit)) == expected


def test_a_tensor_larger_than_the_buffer_is_named():
    with pytest.raises(ValueError, match="t1 has 9 bytes, the buffer 8"):
        bounded_chunks(infos_of([1, 9]), 8)


@given(sizes_and_limits)
@settings(deadline=None)
def test_broadcast_chunks_cover_everything_once_in_order(case):
    sizes, limit = case
    chunks = broadcast_chunks(sizes, limit)
    assert [i for c in chunks for i in range(c.start, c.stop)] == list(range(len(sizes)))
    for i, chunk in enumerate(chunks):
        assert sum(sizes[chunk][:-1]) <= limit
        if i < len(chunks) - 1:
            assert sum(sizes[chunk]) > limit


@given(sizes_and_limits)
@settings(deadline=None)
def test_bounded_chunks_cover_everything_once_in_order(case):
    sizes, extra = case
    limit = max(sizes, default=0) + extra
    chunks = bounded_chunks(infos_of(sizes), limit)
    assert [i for c in chunks for i in range(c.start, c.stop)] == list(range(len(sizes)))
    for chunk, following in itertools.pairwise(chunks):
        assert sum(sizes[chunk]) <= limit < sum(sizes[chunk]) + sizes[following.start]


@given(st.lists(st.sampled_from(["float32", "bfloat16", "float16", "int64"]), max_size=8), st.integers(0, 60))
@settings(deadline=None, max_examples=50)
def test_a_packed_buffer_holds_the_tensors_bytes_one_after_the_other(dtypes, limit):
    torch.manual_seed(0)
    tensors = [(f"t{i}", (100 * torch.randn(i + 1)).to(getattr(torch, d))) for i, d in enumerate(dtypes)]
    chunks = broadcast_chunks([t.numel() * t.element_size() for _, t in tensors], limit)
    buffers = list(pack(tensors, chunks))
    assert all(b.dtype == torch.uint8 for b in buffers)
    whole = torch.cat([*buffers, torch.empty(0, dtype=torch.uint8)])
    for _, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        assert torch.equal(whole[:size].clone().view(tensor.dtype), tensor)
        whole = whole[size:]
    assert len(whole) == 0


def test_bytes_of_any_layout():
    tensor = torch.arange(6, dtype=torch.int16).view(2, 3).T
    assert as_bytes(tensor).tolist() == [0, 0, 3, 0, 1, 0, 4, 0, 2, 0, 5, 0]
    assert as_bytes(torch.tensor(1, dtype=torch.int16)).tolist() == [1, 0]
    assert as_bytes(torch.empty(0, 3)).tolist() == []


@pytest.mark.parametrize(
    "came",
    [[("b", torch.zeros(2))], [("a", torch.zeros(3))], [("a", torch.zeros(2, dtype=torch.float16))], []],
)
def test_what_comes_has_to_be_what_was_announced(came):
    info = TensorInfo("a", torch.float32, (2,))
    assert [n for n, _ in as_announced([info], [("a", torch.zeros(2))])] == ["a"]
    with pytest.raises(ValueError, match=r"a was announced as|shorter"):
        list(as_announced([info], came))
