"""The policy's weights as a stream for an engine."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trl.models.shard import unwrap
from trl.weights.adapters import Adapters

# What wrappers put into parameter names; an engine knows checkpoint names.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "_orig_mod.", "module.")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What an engine is told about a tensor before it comes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


class PolicyWeights:
    """A re-iterable stream of `(name, full tensor)` under checkpoint names, each tensor once.

    The model keeps its own precision and its adapters: a tensor is merged and rounded once, on the way.

    Args:
        model: the policy, wrapped for training or not.
        dtype: of the engine's weights; None sends the model's own.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None = None):
        self._model = unwrap(model)
        self._dtype = dtype
        self._adapters = Adapters(self._model)

    def in_dtype(self, dtype: torch.dtype | None) -> "PolicyWeights":
        """The same stream in another dtype."""
        return PolicyWeights(self._model, dtype)

    def metadata(self) -> list[TensorInfo]:
        """What `__iter__` yields, in its order, without touching the data."""
        return [TensorInfo(name, self._sent_dtype(p), tuple(p.shape)) for name, _, p in self._parameters()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, own_name, parameter in self._parameters():
            with torch.no_grad():
                merged = self._adapters.merged(own_name, parameter.detach())
            yield name, merged.to(self._sent_dtype(parameter))

    def _parameters(self) -> Iterator[tuple[str, str, Tensor]]:
        """Checkpoint name, the model's own name, and the tensor: parameters, and buffers that checkpoints hold."""
        kept = self._model.state_dict(keep_vars=True).keys()
        buffers = [(name, buffer) for name, buffer in self._model.named_buffers() if name in kept]
        for own_name, parameter in [*self._model.named_parameters(), *buffers]:
            name = own_name
            for wrapper in _WRAPPERS:
                name = name.replace(wrapper, "") if wrapper != "module." else name.removeprefix(wrapper)
            if (checkpoint_name := self._adapters.checkpoint_name(name)) is not None:
                yield checkpoint_name, own_name, parameter

    def _sent_dtype(self, parameter: Tensor) -> torch.dtype:
        # Buffers that checkpoints hold, a router's bias for one, are kept in the precision they have.
        if self._dtype is not None and isinstance(parameter, nn.Parameter) and parameter.is_floating_point():
            return self._dtype
        return parameter.dtype


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for `torch.bfloat16`: the name on the wire."""
    return str(dtype).removeprefix("torch.")


def as_bytes(tensor: Tensor) -> Tensor:
    """The tensor's bytes, flat, `uint8`."""
    return tensor.contiguous().view(-1).view(torch.uint8)
