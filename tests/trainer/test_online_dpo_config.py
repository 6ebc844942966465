"""`OnlineDPOConfig`: every option with its default, the rules that are checked, and the path it is imported by."""

import dataclasses
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from trl.cli.train import build_config, parse
from trl.errors import ConfigError, NotSupportedError
from trl.trainer.online_dpo_config import OnlineDPOConfig

ROOT = Path(__file__).parents[2]
DEFAULTS = {
    "learning_rate": 5e-7,
    "logging_steps": 10,
    "remove_unused_columns": False,
    "reward_model_path": None,
    "max_new_tokens": 64,
    "max_length": 512,
    "temperature": 0.9,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "repetition_penalty": 1.0,
    "generation_kwargs": None,
    "cache_implementation": None,
    "missing_eos_penalty": None,
    "beta": 0.1,
    "loss_type": "sigmoid",
    "disable_dropout": True,
    "use_vllm": False,
    "vllm_mode": "colocate",
    "vllm_model_impl": "vllm",
    "vllm_structured_outputs_regex": None,
    "vllm_gpu_memory_utilization": 0.55,
    "vllm_server_base_url": None,
    "vllm_server_host": "0.0.0.0",
    "vllm_server_port": 8000,
    "vllm_server_timeout": 240.0,
    "vllm_group_port": 51216,
    "vllm_tensor_parallel_size": 1,
    "vllm_enable_sleep_mode": False,
    "ds3_gather_for_generation": True,
    "model_init_kwargs": None,
    "trust_remote_code": False,
    "reward_weights": None,
    "shuffle_dataset": True,
    "max_tokens_per_micro_batch": None,
    "log_completions": False,
}


def config(**changes):
    """A config of the CPU."""
    return OnlineDPOConfig(**({"use_cpu": True, "report_to": "none"} | changes))


def test_every_option_has_its_default_and_a_help_text():
    fields = {f.name: f for f in dataclasses.fields(OnlineDPOConfig)}
    assert {name: fields[name].default for name in DEFAULTS} == DEFAULTS
    assert {name: getattr(config(), name) for name in DEFAULTS} == DEFAULTS
    assert [name for name in DEFAULTS if not fields[name].metadata.get("help")] == []


def test_defaults_are_silent_and_checkpoint_activations():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        args = config()
    assert args.activation_checkpointing is True
    assert args.output_dir == "trainer_output"


# ---- the weight beta ----


@pytest.mark.parametrize(
    ("given", "kept", "by_epoch"),
    [
        (0.3, 0.3, [0.3]),
        (1, 1, [1]),
        ([0.3], 0.3, [0.3]),
        ([0.3, 0.2], [0.3, 0.2], [0.3, 0.2]),
        ((0.3, 0.2), [0.3, 0.2], [0.3, 0.2]),
        ((0.3,), 0.3, [0.3]),
    ],
)
def test_a_number_or_one_for_each_epoch(given, kept, by_epoch):
    args = config(beta=given)
    assert args.beta == kept
    assert args.betas == by_epoch


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], 0.1),
        (["--beta", "0.3"], 0.3),
        (["--beta", "0.3", "0.2"], [0.3, 0.2]),
        (["--beta", "1", "1e-1"], [1.0, 0.1]),
    ],
)
def test_beta_of_the_command_line(tmp_path, words, expected):
    common = ["--output_dir", str(tmp_path), "--use_cpu", "--report_to", "none"]
    assert build_config(parse("online-dpo", [*common, *words])).beta == expected


@pytest.mark.parametrize(("line", "expected"), [("beta: 0.3", 0.3), ("beta: [0.3, 0.2]", [0.3, 0.2])])
def test_beta_of_a_file(tmp_path, line, expected):
    (tmp_path / "run.yaml").write_text(f"{line}\noutput_dir: {tmp_path}\nuse_cpu: true\nreport_to: none\n")
    assert build_config(parse("online-dpo", ["--config", str(tmp_path / "run.yaml")])).beta == expected


@pytest.mark.parametrize("beta", [0, -0.1, [], [0.0], [0.1, 0.0], [0.1, -1.0], None, "0.1", ["0.1"], float("nan")])
def test_beta_must_be_above_zero_in_every_epoch(beta):
    with pytest.raises(ConfigError, match=r"`beta` must be above 0, in every epoch \(got"):
        config(beta=beta)


# ---- what is checked ----


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_type": "hinge"}, r"`loss_type` must be one of sigmoid, ipo \(got 'hinge'\)"),
        ({"loss_type": None}, r"`loss_type` must be one of sigmoid, ipo \(got None\)"),
        ({"max_new_tokens": 0}, r"`max_new_tokens` must be at least 1 \(got 0\)"),
        ({"max_new_tokens": None}, r"`max_new_tokens` must be at least 1 \(got None\)"),
        ({"max_length": None}, r"`max_length` is a number of tokens \(got None\)"),
        ({"temperature": -0.1}, r"`temperature` must not be negative \(got -0.1\)"),
        ({"auto_find_batch_size": True}, "`auto_find_batch_size`"),
    ],
)
def test_settings_that_cannot_work_are_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        config(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"cache_implementation": "static"},
        {"use_transformers_continuous_batching": True},
        {"log_completions_hub_repo": "me/completions"},
    ],
)
def test_options_of_later_versions_raise_when_set(changes):
    with pytest.raises(NotSupportedError, match=f"`{next(iter(changes))}"):
        config(**changes)


@pytest.mark.parametrize(("max_new_tokens", "max_length"), [(512, 512), (600, 512), (64, 64), (64, 10)])
def test_no_room_for_a_prompt_is_warned_about(max_new_tokens, max_length):
    sizes = rf"`max_new_tokens` \({max_new_tokens}\) leaves no room .* `max_length` \({max_length}\)"
    with pytest.warns(UserWarning, match=sizes):
        config(max_new_tokens=max_new_tokens, max_length=max_length)


def test_room_for_one_token_is_room():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config(max_new_tokens=63, max_length=64)


@pytest.mark.parametrize(
    ("batch", "accumulation", "rows", "prompts"), [(8, 1, 16, 8), (4, 2, 16, 8), (1, 4, 8, 4), (3, 1, 6, 3)]
)
def test_batch_sizes_count_prompts_of_two_completions(batch, accumulation, rows, prompts):
    """One generation round for each optimizer step."""
    args = config(per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation)
    plan = args.group_plan
    assert (plan.group_size, plan.rows, plan.prompts) == (2, rows, prompts)
    assert (plan.steps_per_generation, plan.window, plan.micro_step_rows) == (accumulation, accumulation, 2 * batch)


def test_the_saved_form_can_be_read_back(tmp_path):
    args = config(output_dir=str(tmp_path), beta=[0.2, 0.1], loss_type="ipo", bf16=False)
    torch.save(args, tmp_path / "training_args.bin")
    loaded = torch.load(tmp_path / "training_args.bin", weights_only=False)
    assert isinstance(loaded, OnlineDPOConfig)
    assert loaded.to_dict() == args.to_dict()
    assert json.loads(args.to_json_string())["beta"] == [0.2, 0.1]


# ---- the import path ----

IMPORT = "from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer; "


def python(code, **env):
    """What a fresh interpreter says on its two outputs."""
    kept = {k: v for k, v in os.environ.items() if k not in ("TRL_EXPERIMENTAL_SILENCE", "PYTHONWARNINGS")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=kept | env, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_the_experimental_import_says_so_once():
    out, said = python(IMPORT + "import trl.experimental.server_distillation; print(OnlineDPOTrainer.__name__)")
    assert out == "OnlineDPOTrainer\n"
    assert said.count("TRLExperimentalWarning") == 1
    # Of the line that imports, not of a line of ours.
    assert "<string>:1: TRLExperimentalWarning" in said
    assert "TRL_EXPERIMENTAL_SILENCE=1" in said


@pytest.mark.parametrize(
    ("code", "env"),
    [
        (IMPORT, {"TRL_EXPERIMENTAL_SILENCE": "1"}),
        ("import trl; from trl import GRPOTrainer; import trl.trainer.online_dpo_trainer", {}),
    ],
)
def test_nothing_is_said_where_silence_is_asked_for_or_nothing_experimental_imported(code, env):
    assert python("import warnings; warnings.simplefilter('error'); " + code, **env)[1] == ""


def test_the_names_are_those_of_the_trainer():
    code = (
        "from trl.trainer import online_dpo_config, online_dpo_trainer; "
        "print(online_dpo_config.OnlineDPOConfig is OnlineDPOConfig, "
        "online_dpo_trainer.OnlineDPOTrainer is OnlineDPOTrainer)"
    )
    assert python(IMPORT + code, TRL_EXPERIMENTAL_SILENCE="1")[0] == "True True\n"
