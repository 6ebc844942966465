"""How bytes reach a server's workers: over a broadcast group, or through memory that both can open."""

import base64
import os
import pickle
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlparse

import torch
from torch import Tensor

from trl.errors import ServerTimeoutError, WeightSyncError
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_probe import ServerFacts
from trl.weights.groups import BroadcastGroup, GlooGroup, NCCLGroup
from trl.weights.packing import bounded_chunks, broadcast_chunks, pack
from trl.weights.source import TensorInfo, as_bytes, dtype_name

BUFFER_BYTES = 1 << 30
NUM_BUFFERS = 2


class Transfer(Protocol):
    """One way to move weights to one server."""

    def join(self, deadline: float) -> None:
        """Makes the connection, once or again."""
        ...

    def send(self, infos: Sequence[TensorInfo], weights: Iterable[tuple[str, Tensor]], deadline: float) -> None:
        """Moves the tensors, between the start and the finish of an update."""
        ...

    def close(self) -> None: ...

    @property
    def joined(self) -> bool:
        """Whether an update can be sent without joining first."""
        ...


def make_transfer(client: VLLMClient, facts: ServerFacts, device: torch.device, port: int | None) -> Transfer:
    """The transfer that fits the server's backend and the trainer's device.

    Args:
        port: of the rendezvous that the trainer opens, or None for any free one.

    Raises:
        WeightSyncError: they do not fit.
    """
    if facts.backend is None:
        raise WeightSyncError(
            f"The server {client.base_url} has no weight transfer configured: start it with "
            """`--weight-transfer-config '{"backend": "nccl"}'`.""",
            phase="check",
            repaired=True,
        )
    on_gpu = device.type == "cuda"
    if facts.backend == "nccl" and on_gpu:
        return BroadcastTransfer(client, facts, port, lambda *a: NCCLGroup(a[0], a[1], a[2], device, a[3]))
    if facts.backend == "ipc" and on_gpu:
        return SharedMemoryTransfer(client, facts, CudaHandles(device))
    # A server on the CPU answers to the names of the GPU backends when its plugin is told to.
    if facts.backend in ("gloo", "nccl"):
        return BroadcastTransfer(client, facts, port, lambda *a: GlooGroup(a[0], a[1], 0, a[2], a[3]))
    if facts.backend in ("shm", "ipc"):
        return SharedMemoryTransfer(client, facts, SharedFile())
    raise WeightSyncError(
        f"The server {client.base_url} transfers weights by {facts.backend!r}, which is not known here: start it with "
        "nccl, ipc, gloo or shm.",
        phase="check",
        repaired=True,
    )


class BroadcastTransfer:
    """Broadcasts packed buffers to all workers of the server, which join the trainer's group as ranks 1, 2, ….

    Args:
        make_group: `(host, port, world size, timeout)` to the group, joining as rank 0.
        buffer_bytes: size at which a packed buffer is closed.
    """

    def __init__(
        self,
        client: VLLMClient,
        facts: ServerFacts,
        port: int | None,
        make_group: Callable[[str, int, int, float], BroadcastGroup],
        buffer_bytes: int = BUFFER_BYTES,
    ):
        self._client, self._facts, self._port, self._make_group = client, facts, port, make_group
        self._packed = {
            "packed": True,
            "packed_buffer_size_bytes": buffer_bytes,
            "packed_num_buffers": NUM_BUFFERS,
        }
        self._buffer_bytes = buffer_bytes
        self._group: BroadcastGroup | None = None

    def join(self, deadline: float) -> None:
        """Opens a rendezvous; the server's workers and this process meet there."""
        self.close()
        host, port = own_address(self._client.base_url), self._port or free_port()
        assert self._facts.world_size is not None
        size = self._facts.world_size + 1
        init_info: dict[str, Any] = {"master_address": host, "master_port": port, "rank_offset": 1, "world_size": size}
        if self._facts.packed_at_init:
            init_info.update(self._packed)
        _, self._group = together(
            lambda: self._client.init_weight_transfer(init_info, deadline),
            lambda: self._make_group(host, port, size, deadline),
            deadline,
        )

    def send(self, infos: Sequence[TensorInfo], weights: Iterable[tuple[str, Tensor]], deadline: float) -> None:
        """Announces all tensors in one call and broadcasts them meanwhile."""
        assert self._group is not None
        update_info = announcement(infos)
        if not self._facts.packed_at_init:
            update_info.update(self._packed)
        chunks = broadcast_chunks([i.num_bytes for i in infos], self._buffer_bytes)
        group, progress = self._group, _Progress(infos)

        def broadcast_all() -> None:
            for chunk, buffer in zip(chunks, pack(weights, chunks), strict=True):
                progress.at = chunk.start
                group.broadcast(buffer)

        try:
            together(lambda: self._client.update_weights(update_info, deadline), broadcast_all, deadline)
        except Exception as error:
            # A half-sent stream leaves both sides at different places: the next update joins anew.
            self.close()
            error.add_note(f"The tensor being sent was {progress}.")
            raise

    def close(self) -> None:
        """Leaves the group."""
        if self._group is not None:
            self._group.close()
            self._group = None

    @property
    def joined(self) -> bool:
        """Whether an update can be sent without joining first."""
        return self._group is not None


class SharedMemoryTransfer:
    """Hands the server views of memory it can open: nothing travels.

    Args:
        memory: what is shared and how it is named.
        buffer_bytes: size of the shared buffer.
    """

    def __init__(
        self, client: VLLMClient, facts: ServerFacts, memory: "SharedMemory", buffer_bytes: int = BUFFER_BYTES
    ):
        self._client, self._facts, self._memory = client, facts, memory
        self._buffer_bytes = buffer_bytes
        self.joined = False

    def join(self, deadline: float) -> None:
        """Tells the server how handles will come."""
        self._client.init_weight_transfer({"packed": True} if self._facts.ipc_packed_at_init else {}, deadline)
        self.joined = True

    def send(self, infos: Sequence[TensorInfo], weights: Iterable[tuple[str, Tensor]], deadline: float) -> None:
        """Fills the buffer chunk by chunk; the server has taken a chunk when its call returns."""
        largest = max((i.num_bytes for i in infos), default=0)
        limit = max(largest, min(self._buffer_bytes, sum(i.num_bytes for i in infos)))
        buffer, handle = self._memory.allocate(limit)
        stream = iter(weights)
        for chunk in bounded_chunks(infos, limit):
            sizes, offset = [], 0
            for _ in range(chunk.start, chunk.stop):
                data = as_bytes(next(stream)[1])
                buffer[offset : offset + len(data)].copy_(data)
                sizes.append(len(data))
                offset += len(data)
            self._memory.ready()
            pickled = base64.b64encode(pickle.dumps(handle)).decode()
            update_info = {**announcement(infos[chunk]), "ipc_handles_pickled": pickled, "tensor_sizes": sizes}
            if not self._facts.ipc_packed_at_init:
                update_info["packed"] = True
            self._client.update_weights(update_info, deadline)

    def close(self) -> None:
        """Frees the shared memory."""
        self._memory.close()
        self.joined = False


class SharedMemory(Protocol):
    """Memory that another process can open."""

    def allocate(self, num_bytes: int) -> tuple[Tensor, Any]:
        """A `uint8` buffer of at least this size, kept between calls, and the handle by which the other finds it."""
        ...

    def ready(self) -> None:
        """Returns when what was written can be read by the other."""
        ...

    def close(self) -> None: ...


class CudaHandles:
    """GPU memory, opened by CUDA IPC on the same GPU."""

    def __init__(self, device: torch.device):
        self._device = device
        self._buffer: Tensor | None = None

    def allocate(self, num_bytes: int) -> tuple[Tensor, Any]:
        """The handle: rebuild arguments by the GPU's UUID."""
        from torch.multiprocessing.reductions import reduce_tensor

        if self._buffer is None or len(self._buffer) < num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        uuid = str(torch.cuda.get_device_properties(self._device).uuid)
        return self._buffer, {uuid: reduce_tensor(self._buffer)[1]}

    def ready(self) -> None:
        """Waits for the copies."""
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Frees the buffer once the server has let go of it."""
        self._buffer = None
        torch.cuda.ipc_collect()


class SharedFile:
    """A file in memory: the stand-in for CUDA IPC between processes on the CPU."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._buffer: Tensor | None = None

    def allocate(self, num_bytes: int) -> tuple[Tensor, Any]:
        """The handle: path, offset and size under the key `cpu`."""
        if self._buffer is None or len(self._buffer) < num_bytes:
            self.close()
            folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
            with tempfile.NamedTemporaryFile(prefix="trl-weights-", dir=folder, delete=False) as file:
                file.truncate(num_bytes)
            self._path = Path(file.name)
            self._buffer = torch.from_file(file.name, shared=True, size=num_bytes, dtype=torch.uint8)
        return self._buffer, {"cpu": (str(self._path), 0, len(self._buffer))}

    def ready(self) -> None:
        """Written is visible."""

    def close(self) -> None:
        """Removes the file."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        self._path = self._buffer = None


def announcement(infos: Sequence[TensorInfo]) -> dict[str, Any]:
    """Names, dtypes and shapes as `/update_weights` takes them."""
    return {
        "names": [i.name for i in infos],
        "dtype_names": [dtype_name(i.dtype) for i in infos],
        "shapes": [list(i.shape) for i in infos],
    }


def together(call: Callable[[], Any], work: Callable[[], Any], deadline: float) -> tuple[Any, Any]:
    """Results of both, which need each other to end.

    Both run in daemon threads, so that neither a peer that is gone nor a stuck collective holds the process.

    Raises:
        ServerTimeoutError: not both are done within `deadline` seconds.
        Exception: whatever one of them raised first.
    """
    results: dict[int, Any] = {}
    failures: list[BaseException] = []
    changed = threading.Semaphore(0)

    def run(place: int, function: Callable[[], Any]) -> None:
        try:
            results[place] = function()
        except BaseException as error:
            failures.append(error)
        changed.release()

    for place, function in enumerate((call, work)):
        threading.Thread(target=run, args=(place, function), daemon=True, name="trl-weights").start()
    end = time.monotonic() + deadline
    while len(results) < 2:
        if not changed.acquire(timeout=max(0.0, end - time.monotonic())):
            raise ServerTimeoutError(f"No end within {deadline:g} s.")
        if failures:
            raise failures[0]
    return results[0], results[1]


class _Progress:
    def __init__(self, infos: Sequence[TensorInfo]):
        self._infos, self.at = infos, 0

    def __str__(self) -> str:
        return self._infos[self.at].name if self._infos else "none"


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as s:
        s.bind(("", 0))
        return s.getsockname()[1]


def own_address(server_url: str) -> str:
    """The address under which the server reaches this machine; `VLLM_HOST_IP` of the environment wins."""
    if given := os.environ.get("VLLM_HOST_IP"):
        return given
    parsed = urlparse(server_url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        # No packet is sent: the system only chooses the interface.
        s.connect((parsed.hostname or "127.0.0.1", parsed.port or 80))
        return s.getsockname()[0]
