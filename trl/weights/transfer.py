"""How bytes reach a server's workers: over a broadcast group, or through memory that both can open."""

import base64
import os
import pickle
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlparse

import torch
from torch import Tensor
from torch.distributed import TCPStore

from trl.errors import WeightSyncError
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_probe import ServerFacts
from trl.weights.background import together
from trl.weights.groups import BroadcastGroup, GlooGroup, NCCLGroup, open_store
from trl.weights.packing import as_announced, bounded_chunks, broadcast_chunks, pack
from trl.weights.source import TensorInfo, as_bytes, dtype_name

BUFFER_BYTES = 1 << 28
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
        # vLLM's workers meet at a store of the kind without libuv.
        return BroadcastTransfer(
            client, facts, port, lambda store, size, _: NCCLGroup(store, size, device), use_libuv=False
        )
    if facts.backend == "ipc" and on_gpu:
        return SharedMemoryTransfer(client, facts, CudaHandles(device))
    # A server on the CPU answers to the names of the GPU backends when its plugin is told to.
    if facts.backend in ("gloo", "nccl"):
        return BroadcastTransfer(
            client, facts, port, lambda store, size, timeout: GlooGroup("", 0, 0, size, timeout, store)
        )
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
        port: of the rendezvous, or None for any free one.
        make_group: `(store, world size, timeout)` to the group, joining as rank 0.
        buffer_bytes: size at which a packed buffer is closed.
        use_libuv: which kind of store the workers meet at.
    """

    def __init__(
        self,
        client: VLLMClient,
        facts: ServerFacts,
        port: int | None,
        make_group: Callable[[TCPStore, int, float], BroadcastGroup],
        buffer_bytes: int = BUFFER_BYTES,
        use_libuv: bool = True,
    ):
        self._client, self._facts, self._port, self._make_group = client, facts, port, make_group
        self._packed = {
            "packed": True,
            "packed_buffer_size_bytes": buffer_bytes,
            "packed_num_buffers": NUM_BUFFERS,
        }
        self._buffer_bytes, self._use_libuv = buffer_bytes, use_libuv
        self._group: BroadcastGroup | None = None

    def join(self, deadline: float) -> None:
        """Opens a rendezvous; the server's workers and this process meet there."""
        self.close()
        end = time.monotonic() + deadline
        host, port = own_address(self._client.base_url), self._port or free_port()
        assert self._facts.world_size is not None
        size = self._facts.world_size + 1
        store = open_store(port, size, deadline, use_libuv=self._use_libuv)
        left = max(0.1, end - time.monotonic())
        init_info: dict[str, Any] = {"master_address": host, "master_port": port, "rank_offset": 1, "world_size": size}
        if self._facts.packed_at_init:
            init_info.update(self._packed)
        _, self._group = together(
            lambda: self._client.init_weight_transfer(init_info, left),
            lambda: self._make_group(store, size, left),
            left,
        )

    def send(self, infos: Sequence[TensorInfo], weights: Iterable[tuple[str, Tensor]], deadline: float) -> None:
        """Announces all tensors in one call and broadcasts them meanwhile."""
        assert self._group is not None
        update_info = announcement(infos)
        if not self._facts.packed_at_init:
            update_info.update(self._packed)
        chunks = broadcast_chunks([i.num_bytes for i in infos], self._buffer_bytes)
        group, progress, given_up = self._group, _Progress(infos), threading.Event()

        def broadcast_all() -> None:
            for chunk, buffer in zip(chunks, pack(as_announced(infos, weights), chunks), strict=True):
                if given_up.is_set():
                    return
                progress.at = chunk.start
                group.broadcast(buffer)

        try:
            together(lambda: self._client.update_weights(update_info, deadline), broadcast_all, deadline, group.close)
        except BaseException as error:
            # A half-sent stream leaves both sides at different places: the next update joins anew.
            given_up.set()
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

    @property
    def joined(self) -> bool:
        """False: there is no connection to keep, and a server that was restarted has to be told again."""
        return False

    def join(self, deadline: float) -> None:
        """Tells the server how handles will come."""
        self._client.init_weight_transfer({"packed": True} if self._facts.ipc_packed_at_init else {}, deadline)

    def send(self, infos: Sequence[TensorInfo], weights: Iterable[tuple[str, Tensor]], deadline: float) -> None:
        """Fills the buffer chunk by chunk; the server has taken a chunk when its call returns."""
        end = time.monotonic() + deadline
        largest = max((i.num_bytes for i in infos), default=0)
        limit = max(largest, min(self._buffer_bytes, sum(i.num_bytes for i in infos)))
        buffer, handle = self._memory.allocate(limit)
        stream = as_announced(infos, weights)
        try:
            for chunk in bounded_chunks(infos, limit):
                sizes = self._fill(buffer, stream, chunk.stop - chunk.start)
                self._hand_over(infos[chunk], handle, sizes, max(0.1, end - time.monotonic()))
        except BaseException:
            # The server may still read what it was given: the next update writes elsewhere.
            self._memory.close()
            raise

    def _fill(self, buffer: Tensor, stream: Iterator[tuple[str, Tensor]], count: int) -> list[int]:
        """Bytes of each of the next `count` tensors, which lie in the buffer one after the other."""
        sizes: list[int] = []
        for _ in range(count):
            data, offset = as_bytes(next(stream)[1]), sum(sizes)
            buffer[offset : offset + len(data)].copy_(data)
            sizes.append(len(data))
        self._memory.ready()
        return sizes

    def _hand_over(self, infos: Sequence[TensorInfo], handle: Any, sizes: list[int], deadline: float) -> None:
        pickled = base64.b64encode(pickle.dumps(handle)).decode()
        update_info = {**announcement(infos), "ipc_handles_pickled": pickled, "tensor_sizes": sizes}
        if not self._facts.ipc_packed_at_init:
            update_info["packed"] = True
        self._client.update_weights(update_info, deadline)

    def close(self) -> None:
        """Frees the shared memory."""
        self._memory.close()


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
