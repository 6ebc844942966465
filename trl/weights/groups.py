"""The groups over which a trainer broadcasts weights to the workers of a server. Torch alone, no vLLM.

The trainer is rank 0. Joining blocks until all workers have joined, so it runs while the server is told to join.
"""

import contextlib
import ctypes
import pickle
import sys
import time
import types
from collections.abc import Iterator
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from trl.weights.background import start_in_library

_PORT_PAUSE_S = 0.1
_CLOSE_S = 0.2


class BroadcastGroup(Protocol):
    """What the sender needs of a group."""

    def broadcast(self, tensor: Tensor) -> None:
        """Sends a tensor to all other ranks. Returns when it may be reused."""
        ...

    def close(self) -> None: ...


def open_store(port: int, world_size: int, timeout: float, *, use_libuv: bool = True) -> dist.TCPStore:
    """The store at which a group meets, opened here before anybody is told to come.

    A port that is still taken is waited for: an earlier group gives it back when its stuck broadcast ends.

    Raises:
        RuntimeError: the port is still taken after `timeout` seconds.
    """
    end = time.monotonic() + timeout
    while True:
        try:
            return dist.TCPStore(
                "127.0.0.1",
                port,
                world_size,
                is_master=True,
                timeout=timedelta(seconds=timeout),
                wait_for_workers=False,
                use_libuv=use_libuv,
            )
        except RuntimeError as error:
            if "EADDRINUSE" not in str(error) or time.monotonic() > end:
                raise
        time.sleep(_PORT_PAUSE_S)


class GlooGroup:
    """A group over TCP between processes on CPUs: the stand-in for NCCL on both sides.

    Args:
        host, port: of the store.
        timeout: seconds for joining and for each broadcast.
        store: the store, where this process has opened it.
    """

    def __init__(
        self, host: str, port: int, rank: int, world_size: int, timeout: float, store: dist.TCPStore | None = None
    ):
        limit = timedelta(seconds=timeout)
        if store is None:
            store = dist.TCPStore(host, port, world_size, is_master=False, timeout=limit, wait_for_workers=False)
        # Without the store there would be nobody for the others to meet, so it lives as long as the group.
        group = dist.ProcessGroupGloo(dist.PrefixStore("weights", store), rank, world_size, limit)
        self._parts: list[object] = [group, store]
        self._group: dist.ProcessGroupGloo | None = group
        # All ranks are there once this returns.
        group.allreduce([torch.zeros(1)]).wait()  # type: ignore[attr-defined]

    def broadcast(self, tensor: Tensor) -> None:
        """Sends from rank 0, receives on the others.

        Raises:
            RuntimeError: the group was closed, a peer is gone, or the time is up.
        """
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        # No local name for the group: the traceback of a failure would keep it, and its port, alive.
        self._open().broadcast([tensor], options).wait()  # type: ignore[attr-defined]

    def _open(self) -> dist.ProcessGroupGloo:
        if self._group is None:
            raise RuntimeError("the group was closed")
        return self._group

    def close(self) -> None:
        """Leaves the group, at once: where a broadcast is stuck, its connections end when its time is up."""
        parts, self._parts, self._group = self._parts, [], None
        # Freeing a group waits for what it is doing, so it is not done here. A group at rest is free in no time, and a
        # process that ends should not meet it half freed.
        start_in_library(parts.clear, "trl-weights-close").join(_CLOSE_S)


class NCCLGroup:
    """An NCCL group with the workers of a vLLM server.

    Workers find rank 0 by a key of a TCP store and expect there a pickled id, then one all-reduce (vLLM's
    `StatelessProcessGroup` and `PyNcclCommunicator`).

    Args:
        store: which this process has opened.
        device: the GPU that sends.
    """

    def __init__(self, store: dist.TCPStore, world_size: int, device: torch.device):
        from trl.weights.nccl_library import Communicator, new_unique_id

        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._store: dist.TCPStore | None = store
        unique_id = new_unique_id()
        store.set("broadcast_from/0/0", _pickled_unique_id(unique_id))  # type: ignore[arg-type]
        self._communicator = Communicator(world_size, unique_id, 0, device)
        self._communicator.all_reduce_one(self._stream)
        self._stream.synchronize()

    def broadcast(self, tensor: Tensor) -> None:
        """Sends from this process. Returns when the GPU has sent."""
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            self._communicator.broadcast_bytes(tensor, 0, self._stream)
            self._stream.synchronize()

    def close(self) -> None:
        """Ends the communicator, a stuck broadcast with it, and gives the port back."""
        self._communicator.abort()
        self._store = None


_UNIQUE_ID_MODULE = "vllm.distributed.device_communicators.pynccl_wrapper"


def _pickled_unique_id(raw: bytes) -> bytes:
    """The id as a pickle of the class vLLM's workers expect, made without vLLM."""

    class ncclUniqueId(ctypes.Structure):  # noqa: N801 - the name is part of the pickle
        _fields_ = [("internal", ctypes.c_byte * 128)]

    ncclUniqueId.__module__, ncclUniqueId.__qualname__ = _UNIQUE_ID_MODULE, "ncclUniqueId"
    stand_in = types.ModuleType(_UNIQUE_ID_MODULE)
    stand_in.ncclUniqueId = ncclUniqueId  # type: ignore[attr-defined]
    with _modules_shadowed(_UNIQUE_ID_MODULE, stand_in):
        return pickle.dumps(ncclUniqueId.from_buffer_copy(raw))


@contextlib.contextmanager
def _modules_shadowed(name: str, module: types.ModuleType) -> Iterator[None]:
    """While active, `name` and its missing parents can be imported; afterwards everything is as before."""
    parts = name.split(".")
    names = [".".join(parts[: i + 1]) for i in range(len(parts))]
    before = {n: sys.modules.get(n) for n in names}
    for parent in names[:-1]:
        sys.modules.setdefault(parent, types.ModuleType(parent))
    sys.modules[name] = module
    try:
        yield
    finally:
        for n, old in before.items():
            if old is None:
                sys.modules.pop(n, None)
            else:
                sys.modules[n] = old
