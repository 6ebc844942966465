"""The groups over which a trainer broadcasts weights to the workers of a server. Torch alone, no vLLM.

The trainer is rank 0. Joining blocks until all workers have joined, so it runs while the server is told to join.
"""

import contextlib
import ctypes
import pickle
import sys
import types
from collections.abc import Iterator
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class BroadcastGroup(Protocol):
    """What the sender needs of a group."""

    def broadcast(self, tensor: Tensor) -> None:
        """Sends a tensor to all other ranks. Returns when it may be reused."""
        ...

    def close(self) -> None: ...


class GlooGroup:
    """A group over TCP between processes on CPUs: the stand-in for NCCL on both sides.

    Args:
        host, port: of the store, which rank 0 opens.
        timeout: seconds for joining and for each broadcast.
    """

    def __init__(self, host: str, port: int, rank: int, world_size: int, timeout: float):
        limit = timedelta(seconds=timeout)
        self._store = dist.TCPStore(host, port, world_size, is_master=rank == 0, timeout=limit, wait_for_workers=False)
        self._group = dist.ProcessGroupGloo(dist.PrefixStore("weights", self._store), rank, world_size, limit)
        # All ranks are there once this returns.
        self._group.allreduce([torch.zeros(1)]).wait()  # type: ignore[attr-defined]

    def broadcast(self, tensor: Tensor) -> None:
        """Sends from rank 0, receives on the others."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        self._group.broadcast([tensor], options).wait()  # type: ignore[attr-defined]

    def close(self) -> None:
        """Leaves the group."""
        self._group.shutdown()


class NCCLGroup:
    """An NCCL group with the workers of a vLLM server, through torch's own binding.

    Workers find rank 0 by a key of a TCP store and expect there a pickled id, then one all-reduce (vLLM's
    `StatelessProcessGroup` and `PyNcclCommunicator`).

    Args:
        host, port: of the store, which this process opens.
        device: the GPU that sends.
        timeout: seconds for joining.
    """

    def __init__(self, host: str, port: int, world_size: int, device: torch.device, timeout: float):
        from torch.cuda import nccl

        self._nccl = nccl
        self._device = device
        self._stream = torch.cuda.Stream(device)
        unique_id = nccl.unique_id()
        self._store = dist.TCPStore(
            host, port, world_size, is_master=True, timeout=timedelta(seconds=timeout), use_libuv=False
        )
        self._store.set("broadcast_from/0/0", _pickled_unique_id(unique_id))  # type: ignore[arg-type]
        with torch.cuda.device(device):
            self._comm = nccl.init_rank(world_size, unique_id, 0)
            ready = torch.zeros(1, device=device)
            self._run(lambda: nccl.all_reduce([ready], streams=[self._stream], comms=[self._comm]))

    def broadcast(self, tensor: Tensor) -> None:
        """Sends from this process. Returns when the GPU has sent."""
        # Counts are 32 bits wide in torch's binding; what is sent are bytes, whatever they are called.
        wide = tensor.view(torch.int64) if tensor.numel() % 8 == 0 and tensor.data_ptr() % 8 == 0 else tensor
        self._run(lambda: self._nccl.broadcast([wide], streams=[self._stream], comms=[self._comm]))

    def _run(self, call: object) -> None:
        assert callable(call)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        call()
        self._stream.synchronize()

    def close(self) -> None:
        """Forgets the communicator; the workers keep theirs until they join another."""
        self._comm = None


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
