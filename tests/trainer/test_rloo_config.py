"""`RLOOConfig`: every option with its default, the rules that are checked, and how a pair of numbers is given."""

import dataclasses
import json

import pytest
import torch

from trl import RLOOConfig
from trl.cli.train import build_config, parse
from trl.errors import ConfigError, NotSupportedError

DEFAULTS = {
    "learning_rate": 1e-6,
    "logging_steps": 10,
    "model_init_kwargs": None,
    "trust_remote_code": False,
    "router_aux_loss_coef": None,
    "disable_dropout": False,
    "remove_unused_columns": False,
    "num_generations": 2,
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
    "beta": 0.05,
    "num_iterations": 1,
    "epsilon": 0.2,
    "epsilon_high": None,
    "reward_weights": None,
    "normalize_advantages": False,
    "reward_clip_range": None,
    "mask_truncated_completions": False,
    "sync_ref_model": False,
    "ref_model_mixup_alpha": 0.6,
    "ref_model_sync_steps": 512,
    "log_completions": False,
    "log_multimodal": True,
    "num_completions_to_print": None,
    "log_unique_prompts": False,
    "use_transformers_continuous_batching": False,
    "transformers_continuous_batching_config": None,
    "use_transformers_paged": False,
}
# Filled in by `__post_init__` from the batch of 8.
FILLED = {"num_generations_eval": 2, "generation_batch_size": 8, "steps_per_generation": 1}
# Of GRPO alone: a completion is one action here, and rewards are not scaled.
NOT_RLOO = (
    "loss_type",
    "importance_sampling_level",
    "scale_rewards",
    "multi_objective_aggregation",
    "delta",
    "sapo_temperature_pos",
    "vespo_k_pos",
    "use_bias_correction_kl",
    "off_policy_mask_threshold",
    "top_entropy_quantile",
    "entropy_coef",
    "use_adaptive_entropy",
    "max_tool_calling_iterations",
)


def config(**changes):
    """A config of the CPU."""
    return RLOOConfig(**({"use_cpu": True, "report_to": "none"} | changes))


def test_every_option_has_its_default(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    declared = {f.name: f.default for f in dataclasses.fields(RLOOConfig)}
    assert {name: declared[name] for name in DEFAULTS} == DEFAULTS
    args = RLOOConfig()
    assert {name: getattr(args, name) for name in DEFAULTS} == DEFAULTS | FILLED
    assert args.bf16 is False
    assert args.activation_checkpointing is True


def test_options_of_other_losses_are_not_taken():
    names = {f.name for f in dataclasses.fields(RLOOConfig)}
    assert not names & set(NOT_RLOO)
    with pytest.raises(TypeError, match="loss_type"):
        config(loss_type="grpo")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_generations": 1}, r"`num_generations` needs at least 2 completions per prompt \(got 1\)"),
        ({"num_generations": None}, r"at least 2 completions per prompt \(got None\)"),
        ({"num_generations": 3}, r"`num_generations` must divide the generation batch \(got 3 and 8\)"),
        ({"generation_batch_size": 12}, r"multiple of the 8 .*got 12\): set it to 16"),
        ({"generation_batch_size": 16, "steps_per_generation": 2}, "say the same thing"),
        (
            {"eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 3},
            r"`num_generations_eval` must divide .*got 3 and 8",
        ),
        ({"reward_clip_range": (0.7, 0.2)}, r"`reward_clip_range` is two numbers, the lowest .*got \(0.7, 0.2\)"),
        ({"reward_clip_range": (0.2, 0.2)}, r"got \(0.2, 0.2\)"),
        ({"reward_clip_range": (0.5,)}, r"`reward_clip_range` is two numbers.*got \(0.5,\)"),
        ({"reward_clip_range": [0.0, 0.5, 1.0]}, r"got \(0.0, 0.5, 1.0\)"),
        ({"reward_clip_range": ()}, r"got \(\)"),
        ({"sync_ref_model": True, "beta": 0.0}, r"`sync_ref_model=True` needs a reference model: set `beta` above 0"),
        # One ratio a sequence: a correction of single tokens has no place.
        (
            {"vllm_importance_sampling_mode": "token_truncate"},
            "must be one of sequence_truncate, sequence_mask .*got 'token_truncate'",
        ),
        ({"vllm_importance_sampling_mode": "token_mask"}, "got 'token_mask'"),
        ({"vllm_importance_sampling_clip_min": 3.0}, r"must be below .*got 3.0 and 3.0"),
        (
            {"vllm_importance_sampling_mode": "sequence_truncate", "vllm_importance_sampling_clip_max": None},
            "at least one of its two clip bounds",
        ),
        ({"max_completion_length": 0}, r"at least 1 \(got 0\)"),
        ({"temperature": -1.0}, r"not be negative \(got -1.0\)"),
        ({"auto_find_batch_size": True}, "`auto_find_batch_size`"),
    ],
)
def test_settings_that_cannot_work_are_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        config(**changes)


def test_a_reference_model_that_follows_is_fine_beside_the_default_beta():
    assert config(sync_ref_model=True).needs_reference
    assert not config(beta=0.0).needs_reference


def test_options_of_later_versions_raise_when_set():
    with pytest.raises(NotSupportedError, match="`use_transformers_continuous_batching=True`"):
        config(use_transformers_continuous_batching=True)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (8, 1)),
        ({"gradient_accumulation_steps": 4}, (32, 4)),
        ({"generation_batch_size": 24}, (24, 3)),
        ({"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}, (2, 2)),
    ],
)
def test_batch_sizes_follow_from_each_other(changes, expected):
    args = config(**changes)
    assert (args.generation_batch_size, args.steps_per_generation) == expected


# ---- the range of rewards, as it is given ----


def test_a_pair_from_the_command_line(tmp_path):
    argv = ["--reward_clip_range", "0.2", "0.7", "--output_dir", str(tmp_path), "--use_cpu", "--report_to", "none"]
    request = parse("rloo", argv)
    assert request.settings["reward_clip_range"] == (0.2, 0.7)
    assert build_config(request).reward_clip_range == (0.2, 0.7)
    negative = parse("rloo", ["--reward-clip-range", "-1", "1e1"])
    assert negative.settings["reward_clip_range"] == (-1.0, 10.0)
    assert parse("rloo", ["--reward_clip_range", "none"]).settings["reward_clip_range"] is None


@pytest.mark.parametrize("line", ["reward_clip_range: [0, 0.7]", "reward_clip_range:\n- 0\n- 0.7"])
def test_a_pair_from_a_file(tmp_path, line):
    (tmp_path / "run.yaml").write_text(line)
    request = parse("rloo", ["--config", str(tmp_path / "run.yaml")])
    assert request.settings["reward_clip_range"] == (0.0, 0.7)


def test_a_pair_that_is_none_is_a_config_error_on_the_command_line_too(tmp_path):
    argv = ["--output_dir", str(tmp_path), "--use_cpu", "--report_to", "none", "--reward_clip_range"]
    with pytest.raises(ConfigError, match=r"got \(0.7, 0.2\)"):
        build_config(parse("rloo", [*argv, "0.7", "0.2"]))
    with pytest.raises(ConfigError, match="`reward_clip_range` must be a number"):
        parse("rloo", [*argv, "low", "high"])


def test_the_saved_form_can_be_read_back(tmp_path):
    args = config(output_dir=str(tmp_path), reward_clip_range=(0.2, 0.7), bf16=False)
    torch.save(args, tmp_path / "training_args.bin")
    loaded = torch.load(tmp_path / "training_args.bin", weights_only=False)
    assert isinstance(loaded, RLOOConfig)
    assert loaded.to_dict() == args.to_dict()
    as_json = json.loads(args.to_json_string())
    assert as_json["reward_clip_range"] == [0.2, 0.7]
    # A pair that went through JSON comes back as a list.
    assert config(reward_clip_range=as_json["reward_clip_range"]).reward_clip_range == (0.2, 0.7)
