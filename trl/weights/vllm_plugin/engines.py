"""The two weight-transfer engines that run inside a vLLM worker on the CPU.

The only module of the package that imports vLLM as it is loaded: it lives in the server's process. One class serves
all supported versions: up to 0.24 the worker reloads the layers itself and hands `load_weights` over, later the engine
does both.
"""

import base64
import math
import pickle
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm import envs
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferInitInfo, NCCLWeightTransferUpdateInfo

from trl.weights.groups import GlooGroup
from trl.weights.packing import broadcast_chunks
from trl.weights.tied_heads import repack_tied_heads

JOIN_TIMEOUT_S = 300.0


class _CpuEngine(WeightTransferEngine):
    """What both engines share: the layer-wise reload, and repacking what the reload forgets."""

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        repack_tied_heads(self.model)

    def receive_weights(self, update_info: Any, load_weights: Any = None) -> None:
        self._receive(update_info, load_weights or self.model.load_weights)

    def _receive(self, update_info: Any, load_weights: Any) -> None:
        raise NotImplementedError

    def shutdown(self) -> None:
        """Nothing to end."""

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """The trainer has a client of its own; vLLM up to 0.27 wants the method to exist."""
        raise NotImplementedError


class GlooEngine(_CpuEngine):
    """The wire of `nccl`, with gloo as the collective library."""

    init_info_cls = NCCLWeightTransferInitInfo
    update_info_cls = NCCLWeightTransferUpdateInfo
    _group: GlooGroup | None = None

    def init_transfer_engine(self, init_info: Any) -> None:
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._init_info = init_info
        self._group = GlooGroup(
            init_info.master_address, init_info.master_port, rank, init_info.world_size, JOIN_TIMEOUT_S
        )

    def _receive(self, update_info: Any, load_weights: Any) -> None:
        if self._group is None:
            raise RuntimeError("weight transfer not initialized")
        # The layout comes with each update up to 0.27, with the joining from 0.28 on.
        layout = update_info if "packed" in vars(update_info) else self._init_info
        metas = _announced(update_info)
        sizes = [math.prod(shape) * dtype.itemsize for _, dtype, shape in metas]
        limit = layout.packed_buffer_size_bytes if layout.packed else 0
        for chunk in broadcast_chunks(sizes, limit):
            buffer = torch.empty(sum(sizes[chunk]), dtype=torch.uint8)
            self._group.broadcast(buffer)
            load_weights(_unpack(buffer, metas[chunk], sizes[chunk]))


class SharedFileEngine(_CpuEngine):
    """The wire of `ipc`, with a file in memory where CUDA has handles: `{"cpu": (path, offset, bytes)}`."""

    _packed = False

    def parse_init_info(self, init_info: dict[str, Any]) -> Any:
        return SimpleNamespace(**init_info)

    def parse_update_info(self, update_info: dict[str, Any]) -> Any:
        fields = dict(update_info)
        pickled = fields.pop("ipc_handles_pickled", None)
        if pickled is not None:
            if not envs.VLLM_ALLOW_INSECURE_SERIALIZATION:
                raise ValueError(
                    "Refusing to deserialize `ipc_handles_pickled` without VLLM_ALLOW_INSECURE_SERIALIZATION=1"
                )
            fields["ipc_handles"] = pickle.loads(base64.b64decode(pickled))
        return SimpleNamespace(**{"update_kind": "dense", "tensor_sizes": None, **fields})

    def init_transfer_engine(self, init_info: Any) -> None:
        self._packed = vars(init_info).get("packed", False)

    def _receive(self, update_info: Any, load_weights: Any) -> None:
        metas = _announced(update_info)
        if vars(update_info).get("packed", self._packed):
            buffer = _mapped(update_info.ipc_handles, sum(update_info.tensor_sizes))
            load_weights(_unpack(buffer, metas, update_info.tensor_sizes))
            return
        for meta, handle in zip(metas, update_info.ipc_handles, strict=True):
            size = handle["cpu"][2]
            load_weights(_unpack(_mapped(handle, size), [meta], [size]))


def _announced(update_info: Any) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Name, dtype and shape of each tensor to come."""
    announced = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
    return [(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in announced]


def _mapped(handle: dict[str, tuple[str, int, int]], num_bytes: int) -> Tensor:
    path, offset, _ = handle["cpu"]
    whole = torch.from_file(path, shared=True, size=offset + num_bytes, dtype=torch.uint8)
    # The trainer writes over its buffer as soon as this call has been answered.
    return whole[offset:].clone()


def _unpack(
    buffer: Tensor, metas: list[tuple[str, torch.dtype, tuple[int, ...]]], sizes: Any
) -> list[tuple[str, Tensor]]:
    """`(name, tensor)` of each part; a part that is not aligned for its type is copied."""
    parts = []
    for (name, dtype, shape), part in zip(metas, buffer.split(list(sizes)), strict=True):
        aligned = part if part.storage_offset() % dtype.itemsize == 0 else part.clone()
        parts.append((name, aligned.view(dtype).view(shape)))
    return parts
