"""The engine that a config asks for. The one reader of `use_vllm` and `vllm_mode`."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from transformers import PreTrainedModel

from trl.errors import ConfigError, NotSupportedError
from trl.generation.connect import ServerArguments, connect
from trl.generation.local import LocalEngine
from trl.types import Engine


class EngineArguments(ServerArguments, Protocol):
    """The options read here (`trl.trainer.arguments.VLLMArguments`)."""

    use_vllm: bool
    vllm_mode: str


def check_engine(args: EngineArguments) -> None:
    """Raises for an engine that cannot be had, before anything is loaded."""
    if not args.use_vllm:
        if args.vllm_structured_outputs_regex is not None:
            raise ConfigError("`vllm_structured_outputs_regex` constrains vLLM: set `use_vllm=True`, or leave it out.")
        return
    if args.vllm_mode not in ("server", "colocate"):
        raise ConfigError(f"`vllm_mode` must be 'server' or 'colocate' (got {args.vllm_mode!r}).")
    if args.vllm_mode == "colocate":
        raise NotSupportedError(
            "vLLM inside the trainer (`vllm_mode='colocate'`) is not supported yet: start a server by `trl vllm-serve` "
            "and set `vllm_mode='server'`, or leave `use_vllm` out."
        )


def build_engine(
    args: EngineArguments,
    model: PreTrainedModel,
    *,
    eos_ids: Sequence[int],
    pad_id: int,
    shared_prompts: bool,
    autocast: Callable[[], AbstractContextManager],
    device: torch.device,
    sends_weights: bool,
) -> Engine:
    """The engine of these arguments.

    Args:
        model: the policy, not wrapped.
        eos_ids, pad_id, shared_prompts, autocast: of the engine that is the model itself.
        device: of the trainer.
        sends_weights: whether this process moves weights to a server.
    """
    if args.use_vllm:
        return connect(args, device, sends_weights=sends_weights)
    return LocalEngine(model, eos_ids=eos_ids, pad_id=pad_id, shared_prompts=shared_prompts, autocast=autocast)
