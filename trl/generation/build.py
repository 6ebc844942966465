"""The engine that a config asks for. The one reader of `use_vllm` and `vllm_mode`."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Protocol

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trl._deps import require_vllm
from trl.errors import ConfigError, NotSupportedError
from trl.generation.connect import ServerArguments, connect, server_urls
from trl.generation.dispatch import EngineGroup, Processes, join_alone, leave_alone
from trl.generation.local import LocalEngine
from trl.generation.vllm_colocate import VLLMColocateEngine
from trl.generation.vllm_start import ColocateSettings, end_llm, start_llm
from trl.models.planner import EngineSize
from trl.types import Engine

_MODEL_IMPLS = ("vllm", "transformers", "auto")
# More completions at a time gain nothing, and each costs a row of logits.
_MAX_SEQUENCES = 1024


class EngineArguments(ServerArguments, Protocol):
    """The options read here (`trl.trainer.arguments.VLLMArguments` and `transformers.TrainingArguments`)."""

    use_vllm: bool
    vllm_model_impl: str
    vllm_enable_sleep_mode: bool
    vllm_gpu_memory_utilization: float
    vllm_max_model_length: int | None
    vllm_tensor_parallel_size: int
    trust_remote_code: bool
    seed: int

    @property
    def vllm_mode(self) -> str: ...

    @property
    def world_size(self) -> int: ...


def is_colocated(args: EngineArguments) -> bool:
    """Whether vLLM shares the trainer's process, and its GPU's memory."""
    return args.use_vllm and args.vllm_mode == "colocate"


def urls_of_servers(args: EngineArguments) -> list[str]:
    """Where the servers of these arguments are; none where completions come from elsewhere."""
    return server_urls(args) if args.use_vllm and args.vllm_mode == "server" else []


def engine_size(args: EngineArguments, model: PreTrainedModel, sequences: int) -> EngineSize | None:
    """What an engine in this process takes of the GPU; None where there is none, or only a part of one.

    Args:
        sequences: completions of one process at a time.
    """
    if not is_colocated(args) or args.vllm_tensor_parallel_size > 1:
        return None
    return EngineSize(
        utilization=args.vllm_gpu_memory_utilization,
        max_model_length=args.vllm_max_model_length or model.config.get_text_config().max_position_embeddings,
        sleep_level=2 if args.vllm_enable_sleep_mode else 0,
        sequences=min(sequences, _MAX_SEQUENCES),
    )


def check_engine(args: EngineArguments) -> None:
    """Raises for an engine that cannot be had, before anything is loaded."""
    if not args.use_vllm:
        if args.vllm_structured_outputs_regex is not None:
            raise ConfigError("`vllm_structured_outputs_regex` constrains vLLM: set `use_vllm=True`, or leave it out.")
        return
    if args.vllm_mode not in ("server", "colocate"):
        raise ConfigError(f"`vllm_mode` must be 'server' or 'colocate' (got {args.vllm_mode!r}).")
    if args.vllm_model_impl not in _MODEL_IMPLS:
        raise ConfigError(f"`vllm_model_impl` must be one of {', '.join(_MODEL_IMPLS)} (got {args.vllm_model_impl!r}).")
    if args.vllm_mode == "server":
        if args.vllm_enable_sleep_mode:
            warnings.warn("`vllm_enable_sleep_mode` is for `vllm_mode='colocate'`: it is ignored.", stacklevel=2)
        return
    if not 0.0 < args.vllm_gpu_memory_utilization <= 1.0:
        raise ConfigError(
            f"`vllm_gpu_memory_utilization` is a share between 0 and 1 (got {args.vllm_gpu_memory_utilization})."
        )
    size = args.vllm_tensor_parallel_size
    if size < 1 or args.world_size % size:
        raise ConfigError(
            f"`vllm_tensor_parallel_size` must divide the number of processes (got {size} and {args.world_size})."
        )
    require_vllm("`use_vllm=True` with `vllm_mode='colocate'`")


def build_engine(
    args: EngineArguments,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    processes: Processes,
    *,
    eos_ids: Sequence[int],
    shared_prompts: bool,
    autocast: Callable[[], AbstractContextManager],
    dtype: str,
    sequences: int,
) -> Engine:
    """The engine of these arguments.

    Args:
        model: the policy, not wrapped.
        eos_ids: every id that ends a completion.
        shared_prompts, autocast: of the engine that is the model itself.
        dtype: in which the policy computes.
        sequences: completions of one process at a time.
    """
    device = processes.accelerator.device
    if is_colocated(args):
        return _colocate(args, model, tokenizer, processes, eos_ids, dtype, sequences)
    if args.use_vllm:
        return connect(args, device, sends_weights=processes.accelerator.is_main_process)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(eos_ids)
    return LocalEngine(model, eos_ids=eos_ids, pad_id=pad_id, shared_prompts=shared_prompts, autocast=autocast)


def _colocate(
    args: EngineArguments,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    processes: Processes,
    eos_ids: Sequence[int],
    dtype: str,
    sequences: int,
) -> VLLMColocateEngine:
    if "quantization_config" in model.config.to_dict():
        raise NotSupportedError(
            "A quantised policy cannot share its process with vLLM: its weights are not those of the checkpoint that "
            "vLLM would load. Use `vllm_mode='server'`, or load the policy without quantisation."
        )
    size = args.vllm_tensor_parallel_size
    settings = ColocateSettings(
        dtype=dtype,
        max_model_len=args.vllm_max_model_length,
        max_num_seqs=min(sequences * size, _MAX_SEQUENCES),
        gpu_memory_utilization=args.vllm_gpu_memory_utilization,
        tensor_parallel_size=size,
        model_impl=args.vllm_model_impl,
        sleeps=args.vllm_enable_sleep_mode,
        # The parts of one engine must agree; engines that do not, draw differently.
        seed=args.seed + processes.accelerator.process_index // size,
        trust_remote_code=args.trust_remote_code,
        launched=processes.count > 1,
    )
    regex = args.vllm_structured_outputs_regex
    # What ends with the engine, the last first; also where it does not come to be.
    ending = ExitStack()
    if join_alone():
        ending.callback(leave_alone)
    try:
        llm = start_llm(model, tokenizer, settings)
        ending.callback(end_llm, llm, alone=processes.count == 1)
        return VLLMColocateEngine(
            llm,
            group=EngineGroup.of(processes, size),
            eos_ids=eos_ids,
            dtype=dtype,
            sleeps=settings.sleeps,
            structured_outputs=None if regex is None else {"regex": regex},
            on_close=[ending.close],
        )
    except BaseException:
        ending.close()
        raise
