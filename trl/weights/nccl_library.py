"""The few NCCL calls a sender needs, through `ctypes`, from the library that torch has loaded.

torch has a binding of its own, which Python refuses from 3.10 on (`PY_SSIZE_T_CLEAN`), and its process groups cannot
meet vLLM's workers, which use NCCL directly.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

UNIQUE_ID_BYTES = 128
_UINT8, _FLOAT32, _SUM = 1, 7, 0


class UniqueId(ctypes.Structure):
    """`ncclUniqueId`."""

    _fields_ = [("internal", ctypes.c_byte * UNIQUE_ID_BYTES)]


class Communicator:
    """This process's end of an NCCL communicator.

    Making one blocks until all ranks have come.

    Args:
        unique_id: of `new_unique_id`, the same on all ranks.
        device: the GPU of this rank.
    """

    def __init__(self, world_size: int, unique_id: bytes, rank: int, device: torch.device):
        self._comm: ctypes.c_void_p | None = ctypes.c_void_p()
        # The caching allocator's first use makes the CUDA context that NCCL needs.
        self._one = torch.zeros(1, device=device)
        with torch.cuda.device(device):
            _call("ncclCommInitRank", ctypes.byref(self._comm), world_size, UniqueId.from_buffer_copy(unique_id), rank)

    def all_reduce_one(self, stream: torch.cuda.Stream) -> None:
        """One float summed over all ranks: the first collective, which sets up the connections."""
        address = ctypes.c_void_p(self._one.data_ptr())
        _call("ncclAllReduce", address, address, 1, _FLOAT32, _SUM, self._comm, _pointer(stream))

    def broadcast_bytes(self, buffer: torch.Tensor, root: int, stream: torch.cuda.Stream) -> None:
        """Enqueues the broadcast of a contiguous `uint8` tensor."""
        address = ctypes.c_void_p(buffer.data_ptr())
        _call("ncclBroadcast", address, address, buffer.numel(), _UINT8, root, self._comm, _pointer(stream))

    def abort(self) -> None:
        """Ends whatever is under way, and the communicator."""
        if self._comm is not None:
            comm, self._comm = self._comm, None
            _call("ncclCommAbort", comm)


def new_unique_id() -> bytes:
    """The name under which ranks meet."""
    unique_id = UniqueId()
    _call("ncclGetUniqueId", ctypes.byref(unique_id))
    return bytes(unique_id)


_ARGUMENTS: dict[str, Sequence[type]] = {
    "ncclGetUniqueId": [ctypes.POINTER(UniqueId)],
    "ncclCommInitRank": [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, UniqueId, ctypes.c_int],
    "ncclAllReduce": [*[ctypes.c_void_p] * 2, ctypes.c_size_t, *[ctypes.c_int] * 2, *[ctypes.c_void_p] * 2],
    "ncclBroadcast": [*[ctypes.c_void_p] * 2, ctypes.c_size_t, *[ctypes.c_int] * 2, *[ctypes.c_void_p] * 2],
    "ncclCommAbort": [ctypes.c_void_p],
}


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(_loaded_path() or "libnccl.so.2")
    for name, types in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, ctypes.c_int
    library.ncclGetErrorString.argtypes, library.ncclGetErrorString.restype = [ctypes.c_int], ctypes.c_char_p
    return library


def _loaded_path() -> str | None:
    """The file of the NCCL in this process, so that it is not loaded a second time from elsewhere."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    return next((line.split(maxsplit=5)[5] for line in lines if "libnccl.so" in line), None)


def _call(name: str, *arguments: object) -> None:
    library = _library()
    if code := getattr(library, name)(*arguments):
        raise RuntimeError(f"{name} failed: {library.ncclGetErrorString(code).decode()} (NCCL error {code})")


def _pointer(stream: torch.cuda.Stream) -> ctypes.c_void_p:
    return ctypes.c_void_p(stream.cuda_stream)
