"""The engine that a config asks for. The one reader of `use_vllm` and `vllm_mode`."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from transformers import PreTrainedModel

from trl.errors import NotSupportedError
from trl.generation.local import LocalEngine
from trl.types import Engine


class EngineArguments(Protocol):
    """The options read here (`trl.trainer.arguments.VLLMArguments`)."""

    use_vllm: bool
    vllm_mode: str


def build_engine(
    args: EngineArguments,
    model: PreTrainedModel,
    *,
    eos_ids: Sequence[int],
    pad_id: int,
    shared_prompts: bool,
    autocast: Callable[[], AbstractContextManager],
) -> Engine:
    """The engine of these arguments.

    Raises:
        NotSupportedError: vLLM was asked for.
    """
    if args.use_vllm:
        raise NotSupportedError(
            "`use_vllm=True` is not supported yet: leave it out, and the model itself writes the completions."
        )
    return LocalEngine(model, eos_ids=eos_ids, pad_id=pad_id, shared_prompts=shared_prompts, autocast=autocast)
