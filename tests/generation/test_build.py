"""Which engine a config gets, what is said before one is loaded, and how one is started inside the trainer."""

import gc
import json
import logging
import os
import random
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fixtures.fake_llm import FakeLLM, install
from fixtures.models import random_model, table_model
from fixtures.tokenizers import word_tokenizer

from trl.errors import ConfigError, MissingDependencyError, NotSupportedError
from trl.generation import build
from trl.generation.build import build_engine, check_engine, engine_size, is_colocated
from trl.generation.dispatch import Processes
from trl.generation.local import LocalEngine
from trl.generation.vllm_colocate import VLLMColocateEngine
from trl.generation.vllm_start import ColocateSettings, end_llm, start_llm
from trl.trainer.arguments import VLLMArguments
from trl.types import Prompt, Sampling
from trl.weights.source import PolicyWeights

SETTINGS = ColocateSettings(
    dtype="float32",
    max_model_len=48,
    max_num_seqs=16,
    gpu_memory_utilization=0.4,
    tensor_parallel_size=1,
    model_impl="vllm",
    sleeps=True,
    seed=7,
    trust_remote_code=False,
    launched=False,
)


def arguments(**changes):
    """The options of a colocated engine in a run of one process."""
    args = SimpleNamespace(**vars(VLLMArguments()), trust_remote_code=False, seed=3, world_size=1)
    vars(args).update({"use_vllm": True, **changes})
    return args


# ---- before anything is loaded ----


@pytest.fixture
def required(monkeypatch):
    """What vLLM was needed for."""
    purposes = []
    monkeypatch.setattr(build, "require_vllm", purposes.append)
    return purposes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"use_vllm": False, "vllm_structured_outputs_regex": "a*"},
            "`vllm_structured_outputs_regex` constrains vLLM: set `use_vllm=True`, or leave it out.",
        ),
        ({"vllm_mode": "remote"}, "`vllm_mode` must be 'server' or 'colocate' (got 'remote')."),
        (
            {"vllm_model_impl": "terratorch"},
            "`vllm_model_impl` must be one of vllm, transformers, auto (got 'terratorch').",
        ),
        (
            {"vllm_model_impl": "hf", "vllm_mode": "server"},
            "`vllm_model_impl` must be one of vllm, transformers, auto (got 'hf').",
        ),
        ({"vllm_gpu_memory_utilization": 0.0}, "`vllm_gpu_memory_utilization` is a share between 0 and 1 (got 0.0)."),
        ({"vllm_gpu_memory_utilization": 30}, "`vllm_gpu_memory_utilization` is a share between 0 and 1 (got 30)."),
        (
            {"vllm_gpu_memory_utilization": float("nan")},
            "`vllm_gpu_memory_utilization` is a share between 0 and 1 (got nan).",
        ),
        (
            {"vllm_tensor_parallel_size": 0},
            "`vllm_tensor_parallel_size` must divide the number of processes (got 0 and 1).",
        ),
        (
            {"vllm_tensor_parallel_size": 2},
            "`vllm_tensor_parallel_size` must divide the number of processes (got 2 and 1).",
        ),
        (
            {"vllm_tensor_parallel_size": 4, "world_size": 6},
            "`vllm_tensor_parallel_size` must divide the number of processes (got 4 and 6).",
        ),
    ],
)
def test_settings_that_cannot_work_are_named(required, changes, message):
    with pytest.raises(ConfigError) as caught:
        check_engine(arguments(**changes))
    assert str(caught.value) == message
    assert required == []


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"vllm_gpu_memory_utilization": 1.0, "vllm_model_impl": "auto"},
        {"vllm_tensor_parallel_size": 2, "world_size": 6, "vllm_enable_sleep_mode": True},
        {"vllm_structured_outputs_regex": "a*", "vllm_model_impl": "transformers"},
    ],
)
def test_a_colocated_engine_needs_vllm(required, changes):
    check_engine(arguments(**changes))
    assert required == ["`use_vllm=True` with `vllm_mode='colocate'`"]


@pytest.mark.parametrize(
    "changes",
    [
        {"use_vllm": False, "vllm_mode": "anything", "vllm_tensor_parallel_size": 0},
        {"vllm_mode": "server", "vllm_tensor_parallel_size": 3, "vllm_gpu_memory_utilization": 0.0},
    ],
)
def test_other_engines_need_none_of_that(required, changes):
    check_engine(arguments(**changes))
    assert required == []


def test_sleep_of_a_server_is_ignored_aloud(required):
    with pytest.warns(UserWarning, match="is for `vllm_mode='colocate'`: it is ignored"):
        check_engine(arguments(vllm_mode="server", vllm_enable_sleep_mode=True))


def test_without_vllm_the_config_is_refused(monkeypatch):
    monkeypatch.setattr("trl._deps.available", lambda module: module != "vllm")
    with pytest.raises(MissingDependencyError, match="`use_vllm=True` with `vllm_mode='colocate'` needs the package"):
        check_engine(arguments())


@pytest.mark.parametrize(
    ("changes", "colocated"), [({}, True), ({"use_vllm": False}, False), ({"vllm_mode": "server"}, False)]
)
def test_who_shares_the_process(changes, colocated):
    assert is_colocated(arguments(**changes)) is colocated
    assert (engine_size(arguments(**changes), random_model(), 8) is not None) is colocated


@pytest.mark.parametrize(("sleeps", "level"), [(True, 2), (False, 0)])
@pytest.mark.parametrize(("given", "length"), [(48, 48), (None, 256)])
def test_what_an_engine_takes_of_the_gpu(sleeps, level, given, length):
    args = arguments(vllm_enable_sleep_mode=sleeps, vllm_max_model_length=given, vllm_gpu_memory_utilization=0.4)
    size = engine_size(args, random_model(), 8)
    assert (size.utilization, size.sleep_level, size.max_model_length, size.sequences) == (0.4, level, length, 8)
    assert engine_size(args, random_model(), 5000).sequences == 1024


def test_the_size_of_a_part_is_not_told():
    assert engine_size(arguments(vllm_tensor_parallel_size=2, world_size=2), random_model(), 8) is None


# ---- the engine ----


@pytest.fixture
def vllm(monkeypatch):
    yield install(monkeypatch)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def built(args, model=None, *, rank=0, count=1, sequences=8):
    accelerator = SimpleNamespace(
        num_processes=count, process_index=rank, device=torch.device("cpu"), is_main_process=rank == 0
    )
    return build_engine(
        args,
        model or random_model(),
        word_tokenizer(),
        Processes(accelerator),
        eos_ids=[1, 2],
        shared_prompts=False,
        autocast=nullcontext,
        dtype="float32",
        sequences=sequences,
    )


def test_without_vllm_the_model_writes_itself(vllm):
    assert isinstance(built(arguments(use_vllm=False)), LocalEngine)
    assert vllm == []


def test_a_colocated_engine_is_started_with_the_options(vllm):
    engine = built(arguments(vllm_max_model_length=48, vllm_model_impl="auto", vllm_structured_outputs_regex="w1.*"))
    assert isinstance(engine, VLLMColocateEngine)
    (llm,) = vllm
    assert engine.llm is llm
    assert llm.options["max_model_len"] == engine.max_model_len == 48
    assert llm.options["model_impl"] == "auto"
    assert llm.options["max_num_seqs"] == 8
    assert llm.options["seed"] == 3
    assert llm.calls == []
    engine.update_weights(PolicyWeights(random_model()), 1)
    list(engine.generate([Prompt([10])], Sampling(max_tokens=2)))
    ((_, params),) = llm.llm_engine.asked
    assert params.fields["structured_outputs"].regex == "w1.*"
    assert params.fields["stop_token_ids"] == [1, 2]


def test_it_sleeps_from_the_start_where_it_may(vllm):
    engine = built(arguments(vllm_enable_sleep_mode=True))
    assert engine.llm.calls == ["sleep"]


def test_more_completions_at_a_time_than_are_of_use_are_not_asked_for(vllm):
    built(arguments(), sequences=5000)
    assert vllm[0].options["max_num_seqs"] == 1024


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_parts_of_an_engine_have_one_seed_and_room_for_all(vllm, monkeypatch, rank):
    made = []
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.new_group", lambda ranks, backend: made.append(ranks) or tuple(ranks))
    engine = built(arguments(vllm_tensor_parallel_size=2, world_size=4), rank=rank, count=4)
    monkeypatch.undo()
    (llm,) = vllm
    assert llm.options["seed"] == 3 + rank // 2
    assert llm.options["max_num_seqs"] == 16
    assert llm.options["tensor_parallel_size"] == 2
    assert llm.options["distributed_executor_backend"] == "external_launcher"
    assert made == [[0, 1], [2, 3]]
    assert engine._group.handle == ((0, 1), (2, 3))[rank // 2]


def test_closing_leaves_the_group_that_was_made(vllm):
    engine = built(arguments())
    assert torch.distributed.is_initialized()
    engine.close()
    assert vllm[0].calls == ["shutdown"]
    assert not torch.distributed.is_initialized()


def test_closing_leaves_a_group_of_the_user_alone(vllm, tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    built(arguments()).close()
    assert torch.distributed.is_initialized()


def test_an_engine_that_nobody_holds_has_ended(vllm):
    engine = built(arguments())
    del engine
    gc.collect()
    assert vllm[0].calls == ["shutdown"]
    assert not torch.distributed.is_initialized()


def test_a_group_lasts_as_long_as_an_engine_that_uses_it(vllm):
    """A second trainer takes the place of the first, which goes when it has been made."""
    engine = built(arguments())
    engine = built(arguments())
    gc.collect()
    assert [llm.calls for llm in vllm] == [["shutdown"], []]
    assert torch.distributed.is_initialized()
    engine.close()
    assert not torch.distributed.is_initialized()


def test_an_engine_that_does_not_start_leaves_no_group(vllm, monkeypatch):
    def start(folder, **options):
        raise ValueError("no such layer")

    monkeypatch.setattr(sys.modules["vllm"], "LLM", start)
    with pytest.raises(ConfigError, match="no such layer"):
        built(arguments())
    assert not torch.distributed.is_initialized()


def test_an_engine_that_cannot_be_used_ends_what_was_started(vllm, monkeypatch):
    def refuse(*args, **options):
        raise ValueError("no such group")

    monkeypatch.setattr(build, "VLLMColocateEngine", refuse)
    with pytest.raises(ValueError, match="no such group"):
        built(arguments())
    assert vllm[0].calls[-1] == "shutdown"
    assert not torch.distributed.is_initialized()


def test_groups_of_vllm_are_left_first_and_by_the_last_engine(vllm, monkeypatch):
    left = []
    parallel = sys.modules["vllm.distributed.parallel_state"]
    parallel.destroy_model_parallel = lambda: left.append(torch.distributed.is_initialized())
    parallel._WORLD = SimpleNamespace(destroy=lambda: left.append("world"))
    one, other = built(arguments()), built(arguments())
    one.close()
    assert left == []
    other.close()
    assert left == [True, "world"]
    assert parallel._WORLD is None
    # Of several processes none may take the groups from the others.
    end_llm(one.llm, alone=False)
    assert left == [True, "world"]


def test_vllm_does_not_end_groups_that_are_not_its_own(vllm):
    engine = built(arguments())
    sys.modules["vllm.v1.engine.core"].cleanup_dist_env_and_memory(shutdown_ray=False)
    assert torch.distributed.is_initialized()
    engine.close()
    assert not torch.distributed.is_initialized()


def test_a_quantised_policy_is_refused(vllm):
    model = random_model()
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    with pytest.raises(NotSupportedError, match=r"quantised policy .* Use `vllm_mode='server'`"):
        built(arguments(), model)
    assert vllm == []
    assert not torch.distributed.is_initialized()


# ---- the start ----


def test_the_engine_is_told_what_to_be(vllm):
    llm = start_llm(random_model(), word_tokenizer(), SETTINGS)
    assert llm is vllm[0]
    on_cpu = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 30}
    assert llm.options == on_cpu | {
        "dtype": "float32",
        "max_model_len": 48,
        "max_num_seqs": 16,
        "tensor_parallel_size": 1,
        "enable_sleep_mode": False,
        "model_impl": "vllm",
        "seed": 7,
        "trust_remote_code": False,
        "load_format": "dummy",
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": -1,
    }


def test_on_a_gpu_it_gets_its_share_and_may_sleep(vllm, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    options = start_llm(random_model(), word_tokenizer(), SETTINGS).options
    assert options["gpu_memory_utilization"] == 0.4
    assert options["enable_sleep_mode"] is True
    assert not {"enforce_eager", "kv_cache_memory_bytes"} & set(options)


def test_the_limit_of_the_model_is_not_set_where_none_is_given(vllm):
    options = start_llm(random_model(), word_tokenizer(), replace(SETTINGS, max_model_len=None)).options
    assert "max_model_len" not in options
    assert "distributed_executor_backend" not in options


@pytest.fixture
def starting(vllm, monkeypatch):
    """Replaces the start of the engine; returns what sets it."""

    def replaced(start):
        monkeypatch.setattr(sys.modules["vllm"], "LLM", start)

    return replaced


def test_config_and_tokenizer_are_those_in_memory(starting):
    seen = {}

    def start(folder, tokenizer, **options):
        seen["folder"] = Path(folder)
        seen["config"] = json.loads((seen["folder"] / "config.json").read_text())
        seen["files"] = {path.name for path in seen["folder"].iterdir()}
        return FakeLLM(random_model())

    starting(start)
    model = table_model({}, eos_ids=[1, 2])
    model.config.rope_theta_of_mine = 12.5
    before = model.config.to_dict()
    start_llm(model, word_tokenizer(), SETTINGS)
    assert seen["config"]["architectures"] == ["LlamaForCausalLM"]
    assert seen["config"]["rope_theta_of_mine"] == 12.5
    assert seen["config"]["vocab_size"] == 64
    assert "tokenizer.json" in seen["files"]
    assert not any(name.endswith(".safetensors") for name in seen["files"])
    assert not seen["folder"].exists()
    assert model.config.to_dict() == before


def test_code_of_a_model_is_found_where_it_lies(starting):
    folders = []

    def start(folder, **options):
        folders.append(folder)
        return FakeLLM(random_model())

    starting(start)
    model = random_model()
    model.config._name_or_path = "/models/mine"
    trusting = replace(SETTINGS, trust_remote_code=True)
    start_llm(model, word_tokenizer(), trusting)
    start_llm(model, word_tokenizer(), SETTINGS)
    model.config._name_or_path = ""
    start_llm(model, word_tokenizer(), trusting)
    assert folders[0] == "/models/mine"
    assert all(folder != "/models/mine" and not Path(folder).exists() for folder in folders[1:])


@pytest.mark.parametrize("error", [ValueError("no such layer"), RuntimeError("no such layer")])
def test_an_engine_that_does_not_start_says_with_what(starting, error):
    def start(folder, **options):
        os.environ["VLLM_LEFT_BEHIND"] = folder
        torch.manual_seed(9)
        raise error

    starting(start)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    before = dict(os.environ)
    with pytest.raises(ConfigError) as caught:
        start_llm(random_model(), word_tokenizer(), SETTINGS)
    assert "vLLM did not start inside the trainer, with dtype='float32', max_num_seqs=16," in str(caught.value)
    assert str(caught.value).endswith(": no such layer")
    assert caught.value.__cause__ is error
    assert dict(os.environ) == before
    assert torch.equal(torch.rand(3), expected)


def test_a_start_leaves_every_generator_as_it_was(vllm):
    def draws():
        return random.random(), np.random.rand(), torch.rand(3).tolist()

    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    expected = draws()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    start_llm(random_model(), word_tokenizer(), SETTINGS)
    assert draws() == expected


@pytest.mark.parametrize(
    ("own", "inside"),
    [
        ({}, {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}),
        ({"VLLM_LOGGING_LEVEL": "DEBUG"}, {"VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}),
        ({"VLLM_CPU_OMP_THREADS_BIND": "0-1"}, {"VLLM_CPU_OMP_THREADS_BIND": "0-1"}),
        # The engine has to live in this process, whatever the user likes elsewhere.
        ({"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}),
        ({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}, {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}),
    ],
)
def test_variables_are_set_for_the_start_alone(starting, monkeypatch, own, inside):
    names = ("LOGGING_LEVEL", "CPU_OMP_THREADS_BIND", "ENABLE_V1_MULTIPROCESSING")
    for name in names:
        monkeypatch.delenv(f"VLLM_{name}", raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    seen = {}

    def start(folder, **options):
        seen.update(os.environ)
        os.environ["MASTER_PORT"] = "1"
        os.environ.pop("PATH")
        return FakeLLM(random_model())

    starting(start)
    before = dict(os.environ)
    start_llm(random_model(), word_tokenizer(), SETTINGS)
    assert {name: seen[name] for name in inside} == inside
    assert dict(os.environ) == before


def test_no_cores_are_left_to_vllm_on_a_gpu(starting, monkeypatch):
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    bound = []

    def start(folder, **options):
        bound.append("VLLM_CPU_OMP_THREADS_BIND" in os.environ)
        return FakeLLM(random_model())

    starting(start)
    start_llm(random_model(), word_tokenizer(), SETTINGS)
    assert bound == [False]


def test_other_loggers_go_on(vllm):
    start_llm(random_model(), word_tokenizer(), SETTINGS)
    assert logging.getLogger("vllm.v1.engine.input_processor").level == logging.ERROR
    assert logging.getLogger("vllm.v1.engine").level == logging.NOTSET
