"""Activations wait in CPU memory between the forward and the backward pass.

What autograd keeps of a forward pass is copied out while the pass goes on, and fetched back a few tensors ahead of the
backward pass. On CUDA copies run on a stream of their own, from and to pinned memory. All device memory belongs to the
stream that computes, which waits for a copy before the memory it reads or writes changes hands: so no more than `stash`
tensors on their way out, or on their way back, are on the device at any time.

Copies are of bytes: gradients are the same to the bit.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from types import TracebackType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from trl.errors import ConfigError
from trl.models.shard import unwrap

MIN_BYTES = 1024
"""Smaller tensors stay: starting a copy costs more than they do."""
STASH = 5
"""Tensors on their way out or back; as many that the forward pass saved last are not moved at all."""

# What a weight may go through before an operation saves it. Autocast's casts are among it: its cache holds them anyway.
_OF_WEIGHTS = frozenset(
    f"{name}Backward0"
    for name in (
        "AsStrided", "Expand", "Permute", "ReshapeAlias", "Select", "Slice", "Split", "SplitWithSizes", "Squeeze", "T",
        "ToCopy", "Transpose", "UnsafeView", "Unsqueeze", "View",
    )
)  # fmt: skip

_active = ContextVar("_active", default=False)


class OffloadedActivations(AbstractContextManager["OffloadedActivations"]):
    """While active, activations of `model` are kept in CPU memory for the backward pass, which may run outside.

    These stay on the device: tensors below `min_bytes`, parameters, their views and casts, buffers, the last `stash`
    tensors of a forward pass, whatever is saved while a backward pass runs (it is needed at once), and everything
    between the entry into the LM head and the model's next forward pass: the head's input, logits and the loss, from
    which the backward pass starts. Views of one storage are copied once. Under gradient checkpointing the inputs of the
    checkpoints are what is offloaded.

    Can be entered again and again, but not inside itself. What is in CPU memory lives as long as the autograd graph.

    Args:
        model: whose activations they are, wrapped for training or not.
        head: the LM head; None where the model has none.
        min_bytes: the smallest tensor that is moved.
        stash: how many tensors are on their way at a time.
        pin_memory: copy to pinned memory; on CUDA only.
        streams: copy on a stream of its own; on CUDA only.

    Attributes:
        copies_out, copies_back: copies made so far.
    """

    def __init__(
        self,
        model: nn.Module,
        head: nn.Module | None = None,
        *,
        min_bytes: int = MIN_BYTES,
        stash: int = STASH,
        pin_memory: bool = True,
        streams: bool = True,
    ):
        for name, value in (("min_bytes", min_bytes), ("stash", stash)):
            if value < 0:
                raise ConfigError(f"`{name}` of activation offloading must not be negative (got {value}).")
        self._model, self._head = unwrap(model), head
        self._min_bytes, self._stash = min_bytes, stash
        # One for each device.
        self._copier = cache(lambda device: _Copier(device, pin_memory, streams))
        self._blocks: weakref.WeakValueDictionary[tuple[Any, ...], _Block] = weakref.WeakValueDictionary()
        self._leaving: deque[weakref.ref[_Block]] = deque()
        self._newest: weakref.ref[_Block] | None = None
        self._fixed: frozenset[int] = frozenset()
        self._in_head = self._on_cpu = False
        self._exit = ExitStack()
        self.copies_out = self.copies_back = 0

    @property
    def stored_bytes(self) -> int:
        """Bytes of activations in CPU memory now."""
        return sum(block.host.nbytes for block in self._blocks.values() if block.host is not None)

    def __enter__(self) -> "OffloadedActivations":
        """Starts offloading.

        Raises:
            ConfigError: activations are being offloaded already.
        """
        if _active.get():
            raise ConfigError("Activations are being offloaded already: enter one context at a time, around a step.")
        weights = [*self._model.parameters(), *self._model.buffers()]
        # A sharded parameter is no plain tensor, and neither is its view.
        self._fixed = frozenset(w.untyped_storage().data_ptr() for w in weights if _is_plain(w))
        self._on_cpu = all(w.device.type == "cpu" for w in weights)
        self._in_head = False
        with ExitStack() as stack:
            stack.callback(_active.reset, _active.set(True))
            stack.enter_context(self._model.register_forward_pre_hook(self._enter_model))
            if self._head is not None:
                stack.enter_context(self._head.register_forward_pre_hook(self._enter_head))
            stack.enter_context(saved_tensors_hooks(self._pack, self._unpack))
            self._exit = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stops offloading. After an error everything is dropped: there will be no backward pass."""
        self._exit.close()
        for ref in self._leaving:
            block = ref()
            if block is not None and block.resident is not None:
                block.host = None
        self._leaving.clear()
        self._newest = None
        if kind is not None:
            for block in list(self._blocks.values()):
                block.drop()

    def _enter_model(self, module: nn.Module, args: Any) -> None:
        self._in_head = False

    def _enter_head(self, module: nn.Module, args: Any) -> None:
        self._in_head = True

    def _pack(self, x: Tensor) -> "_Kept | _Saved":
        if self._moves(x):
            return _Saved.of(x, self._block_of(x))
        # An operation that saves its own result must not keep itself alive. Leaves may be given other data meanwhile.
        return _Kept(x if x.is_leaf else x.detach(), x._version)

    def _unpack(self, packed: "_Kept | _Saved") -> Tensor:
        if isinstance(packed, _Kept):
            _check_unchanged(packed.tensor, packed.version)
            return packed.tensor
        block = packed.block
        if block.resident is not None:
            _check_unchanged(block.resident, block.version)
            return packed.view_of(block.resident.untyped_storage(), block.start)
        block.expect(packed)
        for needed in (block, *block.before(self._stash)):
            self.copies_back += needed.fetch()
        return packed.view_of(block.take(packed).untyped_storage())

    def _moves(self, x: Tensor) -> bool:
        """Whether a tensor that autograd saves is moved to CPU memory."""
        return (
            not self._in_head
            and _is_plain(x)
            and x.numel() > 0
            and _bytes(x) >= self._min_bytes
            and (self._on_cpu or x.device.type != "cpu")
            # Inside a backward pass the number of its graph; torch has no public word for it.
            and torch._C._current_graph_task_id() == -1
            and x.untyped_storage().data_ptr() not in self._fixed
            and not _is_weight(x)
        )

    def _block_of(self, x: Tensor) -> "_Block":
        """The block that holds this tensor, as it is now; new ones are on their way to CPU memory."""
        storage = x.untyped_storage()
        start, size = int(x.storage_offset()) * x.itemsize, _bytes(x)
        if 2 * size >= storage.nbytes():
            start, size = 0, storage.nbytes()
        # The address inside the reference is not used again while the reference lives.
        key = (StorageWeakRef(storage), x._version, start, size)
        block = self._blocks.get(key)
        if block is None or block.dropped:
            block = self._new_block(x, storage, start, size)
            self._blocks[key] = block
        return block

    def _new_block(self, x: Tensor, storage: torch.UntypedStorage, start: int, size: int) -> "_Block":
        copier = self._copier(x.device)
        host, copied = copier.out(_view(storage, torch.uint8, start, (size,), (1,)))
        self.copies_out += 1
        block = _Block(x.detach(), x._version, start, host, copier, copied, self._newest)
        self._newest = weakref.ref(block)
        self._leaving.append(self._newest)
        while len(self._leaving) > self._stash:
            oldest = self._leaving.popleft()()
            if oldest is not None:
                oldest.leave()
        return block


def get_act_offloading_ctx_manager(
    model: nn.Module,
    use_pin_memory: bool = True,
    use_streams: bool = True,
    min_offload_size: int = MIN_BYTES,
    max_fwd_stash_size: int = STASH,
) -> OffloadedActivations:
    """Context in which activations of this model wait in CPU memory for the backward pass.

    Args:
        model: of transformers, wrapped for training or not.
        use_pin_memory: copy to pinned memory, which is faster and is what lets copies and computation overlap.
        use_streams: copy on a CUDA stream of its own.
        min_offload_size: bytes of the smallest tensor that is moved.
        max_fwd_stash_size: how many tensors are on their way at a time; as many stay on the device.
    """
    return OffloadedActivations(
        model,
        unwrap(model).get_output_embeddings(),
        min_bytes=min_offload_size,
        stash=max_fwd_stash_size,
        pin_memory=use_pin_memory,
        streams=use_streams,
    )


@dataclass(frozen=True)
class _Kept:
    """A tensor that stayed, and its version when it was saved."""

    tensor: Tensor
    version: int


@dataclass(eq=False)
class _Saved:
    """A tensor that autograd saved: a view into a block.

    Attributes:
        offset: bytes from the start of the block.
    """

    block: "_Block"
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, x: Tensor, block: "_Block") -> "_Saved":
        """The view and its registration with the block."""
        offset = int(x.storage_offset()) * x.itemsize - block.start
        saved = cls(block, x.dtype, offset, x.shape, x.stride())
        block.add(saved)
        return saved

    def view_of(self, storage: torch.UntypedStorage, start: int = 0) -> Tensor:
        """The tensor, in a storage that has the block from byte `start` on."""
        return _view(storage, self.dtype, start + self.offset, self.shape, self.stride)


@dataclass(eq=False, repr=False)
class _Block:
    """A stretch of one storage: on the device until it has left, in CPU memory, on the device again.

    Attributes:
        resident: the tensor it was first saved as, which keeps the storage, until the copy is complete.
        version: of that tensor when it was saved.
        start: of the stretch, in bytes of the storage.
        host: the bytes in CPU memory; None where the tensor stays.
        copied: when they are there.
        previous: the block that was made before it, which a backward pass needs after it.
        dropped: nothing is left of it.
    """

    resident: Tensor | None
    version: int
    start: int
    host: Tensor | None
    copier: "_Copier"
    copied: torch.cuda.Event | None
    previous: "weakref.ref[_Block] | None"
    dropped: bool = False
    _changed: bool = False
    _back: Tensor | None = None
    _arrival: Callable[[], object] | None = None
    _readers: "weakref.WeakSet[_Saved]" = field(default_factory=weakref.WeakSet)
    _waiting: "weakref.WeakSet[_Saved]" = field(default_factory=weakref.WeakSet)

    def add(self, reader: _Saved) -> None:
        """Takes note of a tensor that lies in it."""
        self._readers.add(reader)
        self._waiting.add(reader)

    def expect(self, reader: _Saved) -> None:
        """Takes note of a reader that is about to come; one that was there already begins another backward pass."""
        if reader not in self._waiting:
            self._waiting = weakref.WeakSet(self._readers)

    def before(self, count: int) -> "Iterator[_Block]":
        """Up to `count` blocks that were made before this one, the last first."""
        block = self
        for _ in range(count):
            previous = block.previous() if block.previous is not None else None
            if previous is None:
                return
            yield previous
            block = previous

    def leave(self) -> None:
        """Gives the device's memory up, once the copy is complete."""
        if self.resident is None:
            return
        self.copier.wait(self.copied)
        self._changed = self.resident._version != self.version
        self.resident = self.copied = None

    def fetch(self) -> bool:
        """Starts the copy back; False where it is not needed."""
        if self.resident is not None or self._back is not None or self.host is None or not self._waiting:
            return False
        self._back, arrived = self.copier.back(self.host)
        if arrived is not None:
            # Memory that nobody came to take must not be used again before the copy into it is complete.
            arrival = weakref.finalize(self, self.copier.wait, arrived)
            arrival.atexit = False
            self._arrival = arrival
        return True

    def take(self, reader: _Saved) -> Tensor:
        """The bytes on the device, which are given up when every reader of a backward pass has had them.

        Raises:
            RuntimeError: the tensor was changed in place after it was saved, or dropped after an error.
        """
        if self._changed:
            raise RuntimeError(_CHANGED)
        if self._back is None:
            raise RuntimeError("The activations of this backward pass were dropped: an error ended their forward pass.")
        self._wait()
        back = self._back
        self._waiting.discard(reader)
        if not self._waiting:
            self._back = None
        return back

    def drop(self) -> None:
        """Frees all memory."""
        self._wait()
        self.resident = self.host = self._back = None
        self.dropped = True

    def _wait(self) -> None:
        if self._arrival is not None:
            self._arrival()
            self._arrival = None


class _Copier:
    """Copies between one device and CPU memory. Without a stream of its own they are in the order of the computation.

    Both methods return the copy and the event of its completion.
    """

    def __init__(self, device: torch.device, pin_memory: bool, streams: bool):
        on_cuda = device.type == "cuda"
        self._device, self._pin = device, pin_memory and on_cuda
        self._stream = torch.cuda.Stream(device) if streams and on_cuda else None

    def out(self, source: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """To CPU memory."""
        host = torch.empty(source.shape, dtype=source.dtype, pin_memory=self._pin)
        return host, self._copy(host, source)

    def back(self, host: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """To the device."""
        back = torch.empty(host.shape, dtype=host.dtype, device=self._device)
        return back, self._copy(back, host)

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Lets what is computed from now on wait for a copy."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def _copy(self, target: Tensor, source: Tensor) -> torch.cuda.Event | None:
        if self._stream is None:
            target.copy_(source, non_blocking=self._pin)
            return None
        # What is read has been computed by then, and what is written is no longer in use.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=self._pin)
        return self._stream.record_event()


_CHANGED = (
    "A tensor that the backward pass needs was changed by an in-place operation after it was saved: compute a new "
    "tensor instead."
)


def _check_unchanged(x: Tensor, version: int) -> None:
    """Raises what autograd raises for tensors that no hook has taken.

    Raises:
        RuntimeError: the tensor was changed in place.
    """
    if x._version != version:
        raise RuntimeError(_CHANGED)


def _is_plain(x: Tensor) -> bool:
    """Whether the tensor is what its storage holds: dense, without a subclass or bits that say how to read it."""
    return type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided and not x.is_conj() and not x.is_neg()


def _is_weight(x: Tensor) -> bool:
    """Whether the tensor is a parameter, seen through views and casts."""
    if isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter):
        return True
    node: Node | None = x.grad_fn
    while node is not None and node.name() in _OF_WEIGHTS:
        node = node.next_functions[0][0]
    if node is None or not node.name().endswith("AccumulateGrad"):
        return False
    return isinstance(cast(Any, node).variable, nn.Parameter)


def _bytes(x: Tensor) -> int:
    """From the tensor's first byte in its storage to its last."""
    return (1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))) * x.itemsize


def _view(
    storage: torch.UntypedStorage, dtype: torch.dtype, start: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> Tensor:
    """A tensor over a storage, from byte `start` on."""
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, start // dtype.itemsize, shape, stride)
