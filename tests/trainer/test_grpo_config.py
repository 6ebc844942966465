"""`GRPOConfig`: every option with its default, the rules that are checked, and what a checkpoint keeps of it."""

import dataclasses
import json
import warnings

import pytest
import torch
from accelerate import ParallelismConfig
from transformers import TrainingArguments

from trl import GRPOConfig
from trl.errors import ConfigError, NotSupportedError
from trl.trainer.config import TrainerConfig

DEFAULTS = {
    "learning_rate": 1e-6,
    "logging_steps": 10,
    "lr_scheduler_kwargs": None,
    "model_init_kwargs": None,
    "trust_remote_code": False,
    "router_aux_loss_coef": None,
    "disable_dropout": False,
    "cast_lm_head_to_fp32": False,
    "remove_unused_columns": False,
    "num_generations": 8,
    "num_generations_eval": None,
    "max_completion_length": 512,
    "ds3_gather_for_generation": True,
    "shuffle_dataset": True,
    "pad_to_multiple_of": "auto",
    "generation_batch_size": None,
    "steps_per_generation": None,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "generation_kwargs": None,
    "chat_template_kwargs": None,
    "repetition_penalty": 1.0,
    "cache_implementation": None,
    "use_vllm": False,
    "vllm_mode": "colocate",
    "vllm_model_impl": "vllm",
    "vllm_enable_sleep_mode": False,
    "vllm_structured_outputs_regex": None,
    "vllm_server_base_url": None,
    "vllm_server_host": "0.0.0.0",
    "vllm_server_port": 8000,
    "vllm_server_timeout": 240.0,
    "vllm_group_port": 51216,
    "vllm_gpu_memory_utilization": 0.3,
    "vllm_max_model_length": None,
    "vllm_tensor_parallel_size": 1,
    "beta": 0.0,
    "num_iterations": 1,
    "epsilon": 0.2,
    "delta": None,
    "epsilon_high": None,
    "sapo_temperature_neg": 1.05,
    "sapo_temperature_pos": 1.0,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
    "importance_sampling_level": "token",
    "reward_weights": None,
    "multi_objective_aggregation": "sum_then_normalize",
    "scale_rewards": "group",
    "loss_type": "dapo",
    "mask_truncated_completions": False,
    "sync_ref_model": False,
    "ref_model_mixup_alpha": 0.6,
    "ref_model_sync_steps": 512,
    "top_entropy_quantile": 1.0,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
    "entropy_coef_min": 0.0,
    "entropy_coef_max": 1.0,
    "entropy_coef_delta": 0.005,
    "entropy_target": 0.2,
    "max_tool_calling_iterations": None,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None,
    "off_policy_mask_threshold": None,
    "use_bias_correction_kl": True,
    "log_completions": False,
    "log_multimodal": True,
    "num_completions_to_print": None,
    "log_unique_prompts": False,
    "log_completions_hub_repo": None,
    "use_transformers_continuous_batching": False,
    "transformers_continuous_batching_config": None,
    "use_transformers_paged": False,
    "vllm_importance_sampling_cap": None,
}
# Filled in by `__post_init__` from the batch of 8.
FILLED = {"num_generations_eval": 8, "generation_batch_size": 8, "steps_per_generation": 1}


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that looks like one to the config, with or without bfloat16."""

    def pretend(bf16):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: bf16)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Old GPU")
        # The rest of the set-up would look for the GPU.
        monkeypatch.setattr(TrainingArguments, "__post_init__", lambda self: None)

    return pretend


def config(**changes):
    """A config of the CPU."""
    return GRPOConfig(**({"use_cpu": True, "report_to": "none"} | changes))


def test_no_argument_works_without_a_gpu(no_gpu):
    args = GRPOConfig()
    assert args.bf16 is False
    assert args.fp16 is False
    assert args.output_dir == "trainer_output"
    assert args.device.type == "cpu"


def test_every_option_has_its_default(no_gpu):
    declared = {f.name: f.default for f in dataclasses.fields(GRPOConfig)}
    assert {name: declared[name] for name in DEFAULTS} == DEFAULTS
    args = GRPOConfig()
    assert {name: getattr(args, name) for name in DEFAULTS} == DEFAULTS | FILLED


def test_gradient_checkpointing_is_on_unless_switched_off(no_gpu):
    assert GRPOConfig().activation_checkpointing is True
    assert GRPOConfig(gradient_checkpointing=False).activation_checkpointing is False
    assert GRPOConfig(activation_checkpointing=False).activation_checkpointing is False


def test_every_option_has_a_help_text():
    bare = [f.name for f in dataclasses.fields(GRPOConfig) if f.name in DEFAULTS and not f.metadata.get("help")]
    assert bare == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"auto_find_batch_size": True}, "`auto_find_batch_size`"),
        ({"parallelism_config": ParallelismConfig(cp_size=2)}, r"[Cc]ontext and sequence parallelism.*got 2 and 1"),
        ({"generation_batch_size": 16, "steps_per_generation": 2}, "say the same thing"),
        ({"generation_batch_size": 12}, r"multiple of the 8 .*got 12\): set it to 16"),
        ({"num_generations": 3}, r"got 3 and 8\)"),
        ({"num_generations": 1}, r"at least 2 completions per prompt \(got 1\)"),
        ({"num_generations": None}, "got None"),
        (
            {"eval_strategy": "steps", "num_generations_eval": 3, "eval_steps": 1},
            r"`num_generations_eval` must divide .*got 3 and 8",
        ),
        (
            {"vllm_importance_sampling_clip_min": 3.0},
            r"must be below `vllm_importance_sampling_clip_max` \(got 3.0 and 3.0\)",
        ),
        (
            {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": None},
            "at least one of its two clip bounds",
        ),
        ({"vllm_importance_sampling_mode": "token"}, "must be one of token_truncate"),
        ({"loss_type": "ppo"}, r"`loss_type` must be one of grpo.*got 'ppo'"),
        ({"scale_rewards": "all"}, r"`scale_rewards` must be one of group.*got 'all'"),
        ({"importance_sampling_level": "word"}, "token, sequence"),
        ({"multi_objective_aggregation": "sum"}, "sum_then_normalize"),
        ({"top_entropy_quantile": 0.0}, r"share above 0 and up to 1 \(got 0.0\)"),
        ({"sync_ref_model": True}, "set `beta` above 0"),
        ({"max_completion_length": 0}, r"at least 1 \(got 0\)"),
        ({"max_completion_length": None}, r"at least 1 \(got None\)"),
        ({"temperature": -1.0}, r"not be negative \(got -1.0\)"),
        (
            {"use_vllm": True, "vllm_mode": "server", "loss_type": "vespo"},
            "`loss_type='vespo'` takes the sampler correction per token",
        ),
    ],
)
def test_settings_that_cannot_work_are_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        config(**changes)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (8, 1)),
        ({"gradient_accumulation_steps": 4}, (32, 4)),
        ({"generation_batch_size": 24}, (24, 3)),
        ({"steps_per_generation": 5}, (40, 5)),
        ({"steps_per_generation": 2, "gradient_accumulation_steps": 4}, (16, 2)),
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 4}, (8, 2)),
    ],
)
def test_batch_sizes_follow_from_each_other(changes, expected):
    args = config(**changes)
    assert (args.generation_batch_size, args.steps_per_generation) == expected


def test_evaluation_groups_are_checked_only_where_there_is_evaluation():
    assert config(num_generations_eval=3).num_generations_eval == 3
    assert config().num_generations_eval == 8


@pytest.mark.parametrize(
    "changes",
    [
        {"cache_implementation": "static"},
        {"use_transformers_continuous_batching": True},
        {"transformers_continuous_batching_config": {"max_memory_percent": 0.5}},
        {"use_transformers_paged": True},
        {"max_tool_calling_iterations": 3},
        {"log_completions_hub_repo": "me/completions"},
    ],
)
def test_options_of_later_versions_raise_when_set(changes):
    with pytest.raises(NotSupportedError, match=f"`{next(iter(changes))}"):
        config(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_type": "luspo"}, "luspo"),
        ({"loss_type": "vespo", "importance_sampling_level": "sequence"}, "vespo"),
        *(({"loss_type": t, "importance_sampling_level": "sequence"}, t) for t in ("bnpo", "dr_grpo", "dapo", "cispo")),
        ({"loss_type": "cispo", "delta": 2.0}, "`delta` has no effect"),
    ],
)
def test_settings_that_hardly_make_sense_warn(changes, message):
    with pytest.warns(UserWarning, match=message):
        config(**changes)


def test_sensible_settings_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config(loss_type="grpo", importance_sampling_level="sequence")
        config(loss_type="luspo", importance_sampling_level="sequence")
        config(loss_type="vespo")


@pytest.mark.parametrize(("given", "word"), [(True, "group"), (False, "none"), ("batch", "batch")])
def test_scale_rewards_as_a_word(given, word):
    assert config(scale_rewards=given).scale_rewards == word


def test_the_old_name_of_the_clip_bound():
    with pytest.warns(FutureWarning, match="vllm_importance_sampling_clip_max"):
        args = config(vllm_importance_sampling_cap=2.0)
    assert args.vllm_importance_sampling_clip_max == 2.0


@pytest.mark.parametrize(
    ("has_bf16", "given", "expected"),
    [
        (True, {}, (True, False)),
        (True, {"fp16": True}, (False, True)),
        (True, {"bf16": False}, (False, False)),
        (False, {}, (False, False)),
        (False, {"fp16": True}, (False, True)),
        (True, {"use_cpu": True}, (False, False)),
    ],
)
def test_precision_follows_the_hardware(gpu, has_bf16, given, expected):
    gpu(has_bf16)
    args = TrainerConfig(**given)
    assert (args.bf16, args.fp16) == expected


def test_bf16_on_a_gpu_without_it_names_the_other(gpu):
    gpu(False)
    with pytest.raises(ConfigError, match=r"Old GPU has no bfloat16.*fp16=True"):
        TrainerConfig(bf16=True)


def test_bf16_on_the_cpu_and_fp16_without_gpu(no_gpu):
    assert GRPOConfig(bf16=True).bf16 is True
    with pytest.raises(ConfigError, match="`fp16=True` needs a GPU"):
        GRPOConfig(fp16=True)


@pytest.mark.parametrize(
    "name",
    ["model_init_kwargs", "generation_kwargs", "chat_template_kwargs", "lr_scheduler_kwargs"],
)
def test_dictionaries_may_be_json(name):
    args = config(**{name: '{"a": 1, "b": {"c": null}}'})
    assert getattr(args, name) == {"a": 1, "b": {"c": None}}


def test_the_saved_form_can_be_read_back(tmp_path):
    args = config(output_dir=str(tmp_path), model_init_kwargs={"dtype": "float32"}, loss_type="grpo", bf16=False)
    torch.save(args, tmp_path / "training_args.bin")
    loaded = torch.load(tmp_path / "training_args.bin", weights_only=False)
    assert isinstance(loaded, GRPOConfig)
    assert loaded.to_dict() == args.to_dict()
    as_json = json.loads(args.to_json_string())
    assert as_json["loss_type"] == "grpo"
    assert as_json["model_init_kwargs"] == {"dtype": "float32"}
    assert "GRPOConfig" in repr(args)
