"""Starts a vLLM engine inside the trainer's process, and leaves everything else in the process as it was."""

import gc
import logging
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trl._deps import require_vllm
from trl.errors import ConfigError
from trl.generation.vllm_patches import OwnClasses
from trl.weights.adapters import without_adapters

# What these warn of happens at every weight update, or is nothing that a user could change.
_CHATTY = ("vllm.model_executor.model_loader.reload", "vllm.v1.engine.input_processor")
# Engines of this process that have not ended.
_live: set[int] = set()
# Keys and values on a machine without a GPU, of whose memory vLLM would take a share.
_CPU_CACHE_BYTES = 1 << 30


@dataclass(frozen=True)
class ColocateSettings:
    """What an engine in this process is started with.

    Attributes:
        dtype: of its weights and computation, e.g. `bfloat16`.
        max_model_len: longest prompt plus completion; None is the model's own limit.
        max_num_seqs: completions written at a time.
        gpu_memory_utilization: share of the GPU's memory it may take.
        tensor_parallel_size: processes that share one engine.
        model_impl: `vllm`, `transformers` or `auto`.
        sleeps: whether it can free its memory.
        seed: of vLLM itself; draws of completions are seeded each time.
        trust_remote_code: the model's code comes from where the model does.
        launched: this process is one of several of a launcher.
    """

    dtype: str
    max_model_len: int | None
    max_num_seqs: int
    gpu_memory_utilization: float
    tensor_parallel_size: int
    model_impl: str
    sleeps: bool
    seed: int
    trust_remote_code: bool
    launched: bool


def start_llm(policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: ColocateSettings) -> Any:
    """A `vllm.LLM` of the policy's architecture, with weights that mean nothing yet.

    Config and tokenizer are those of the trainer, as they are in memory; the checkpoint is not read again.

    Raises:
        MissingDependencyError: there is no vLLM, or none in the supported range.
        ConfigError: vLLM cannot start so.
    """
    require_vllm("`vllm_mode='colocate'`")
    on_gpu = torch.cuda.is_available()
    options: dict[str, Any] = {
        "dtype": settings.dtype,
        "max_num_seqs": settings.max_num_seqs,
        "tensor_parallel_size": settings.tensor_parallel_size,
        # Without a GPU there is nothing to free; the engine goes through the motions all the same.
        "enable_sleep_mode": settings.sleeps and on_gpu,
        "model_impl": settings.model_impl,
        "seed": settings.seed,
        "trust_remote_code": settings.trust_remote_code,
        "load_format": "dummy",
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": -1,
    }
    if settings.max_model_len is not None:
        options["max_model_len"] = settings.max_model_len
    if settings.launched:
        options["distributed_executor_backend"] = "external_launcher"
    if on_gpu:
        options["gpu_memory_utilization"] = settings.gpu_memory_utilization
    else:
        # Compiling takes minutes there and gains next to nothing.
        options |= {"enforce_eager": True, "kv_cache_memory_bytes": _CPU_CACHE_BYTES}
    with _environment(on_gpu), _unchanged_randomness(), _model_folder(policy, tokenizer, settings) as folder:
        from vllm import LLM
        from vllm.v1.engine import core

        # It would end the default group of processes with the engine, and that may be the trainer's.
        core.cleanup_dist_env_and_memory = _do_nothing
        classes = OwnClasses(policy)
        try:
            llm = LLM(folder, tokenizer=folder, **options)
            llm.apply_model(classes.give_back)
        except BaseException as error:
            classes.give_back()
            _end_groups(alone=not settings.launched)
            if not isinstance(error, (ValueError, RuntimeError)):
                raise
            given = ", ".join(f"{name}={value!r}" for name, value in options.items())
            raise ConfigError(f"vLLM did not start inside the trainer, with {given}: {error}") from error
    # vLLM has the garbage collector leave alone what there is now, the trainer among it.
    gc.unfreeze()
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)
    _live.add(id(llm))
    return llm


@contextmanager
def _unchanged_randomness() -> Iterator[None]:
    """vLLM seeds every generator of the process when it starts; outside nothing of that shows."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@contextmanager
def _environment(on_gpu: bool) -> Iterator[None]:
    """The variables that vLLM reads while it starts; what the user has set stays."""
    wanted = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    defaults = {"VLLM_LOGGING_LEVEL": "WARNING"}
    if not on_gpu:
        # It would bind the process, the trainer included, to a part of the cores.
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    before = dict(os.environ)
    os.environ.update({**defaults, **before, **wanted})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _model_folder(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: ColocateSettings
) -> Iterator[str]:
    """A folder with the policy's config and tokenizer; where its code lies, if that is not transformers'."""
    if settings.trust_remote_code and policy.config._name_or_path:
        yield policy.config._name_or_path
        return
    with tempfile.TemporaryDirectory(prefix="trl-vllm-") as folder:
        config = deepcopy(policy.config)
        config.architectures = [type(without_adapters(policy)).__name__]
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        yield folder


def end_llm(llm: Any, alone: bool) -> None:
    """Ends an engine; with the last one of the process also the groups of processes that vLLM made.

    Args:
        alone: whether those hold this process only. Of several none knows when the others are done: leave them be.
    """
    llm.llm_engine.engine_core.shutdown()
    _live.discard(id(llm))
    _end_groups(alone)


def _end_groups(alone: bool) -> None:
    """Ends vLLM's groups where no engine is left; its own function for this would end the default group too."""
    parallel_state, envs = (sys.modules.get(f"vllm.{name}") for name in ("distributed.parallel_state", "envs"))
    if not alone or _live or parallel_state is None or envs is None:
        return
    parallel_state.destroy_model_parallel()
    if parallel_state._WORLD is not None:
        parallel_state._WORLD.destroy()
    parallel_state._WORLD = parallel_state._NODE_COUNT = None  # type: ignore[attr-defined]
    envs.disable_envs_cache()


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """In place of a function of vLLM's."""
