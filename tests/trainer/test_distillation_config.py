"""Options of distillation: their defaults, and which of them cannot work."""

import dataclasses

import pytest

from trl import DistillationConfig
from trl.errors import ConfigError, NotSupportedError
from trl.trainer.distillation_config import ServerDistillationConfig

DEFAULTS = {
    "learning_rate": 1e-6,
    "model_init_kwargs": None,
    "trust_remote_code": False,
    "teacher_model_name_or_path": None,
    "teacher_model_revision": None,
    "teacher_model_init_kwargs": None,
    "disable_dropout": False,
    "remove_unused_columns": False,
    "max_completion_length": 512,
    "ds3_gather_for_generation": True,
    "shuffle_dataset": True,
    "pad_to_multiple_of": "auto",
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "repetition_penalty": 1.0,
    "generation_kwargs": None,
    "chat_template_kwargs": None,
    "cache_implementation": None,
    "use_vllm": False,
    "vllm_mode": "colocate",
    "vllm_server_port": 8000,
    "vllm_gpu_memory_utilization": 0.3,
    "vllm_tensor_parallel_size": 1,
    "beta": 1.0,
    "max_tool_calling_iterations": None,
    "log_completions": False,
    "num_completions_to_print": None,
    "log_unique_prompts": False,
}
SERVER_DEFAULTS = DEFAULTS | {
    "vllm_server_port": 8001,
    "teacher_model_server_url": None,
    "loss_top_k": 1,
    "loss_add_tail": True,
    "reverse_kl_top_1_mode": "sampled",
}


def make(folder, **changes):
    return DistillationConfig(output_dir=str(folder), use_cpu=True, report_to="none", **changes)


def make_server(folder, **changes):
    settings = {"teacher_model_server_url": "http://localhost:8001", **changes}
    return ServerDistillationConfig(output_dir=str(folder), use_cpu=True, report_to="none", **settings)


@pytest.mark.parametrize(
    ("config", "expected"), [(DistillationConfig, DEFAULTS), (ServerDistillationConfig, SERVER_DEFAULTS)]
)
def test_defaults(config, expected):
    fields = {f.name: f.default for f in dataclasses.fields(config)}
    assert {name: fields[name] for name in expected} == expected


def test_a_config_without_any_option_works():
    assert DistillationConfig().beta == 1.0


# ---- the divergence ----


@pytest.mark.parametrize("beta", [0.0, 0, 0.1, 0.5, 1, 1.0])
def test_betas_from_zero_to_one_are_taken(tmp_path, beta):
    assert make(tmp_path, beta=beta).beta == beta


@pytest.mark.parametrize("beta", [-0.1, 1.0001, float("nan"), float("inf")])
def test_other_betas_are_refused(tmp_path, beta):
    with pytest.raises(ConfigError, match=rf"`beta` is between 0 .* and 1 .*got {beta}"):
        make(tmp_path, beta=beta)


# ---- batches ----


@pytest.mark.parametrize(
    ("batch", "accumulation", "eval_batch", "plan"), [(2, 3, 5, (6, 5, 6, 3)), (8, 1, 8, (8, 8, 8, 1))]
)
def test_batch_sizes_count_prompts_with_one_completion_each(tmp_path, batch, accumulation, eval_batch, plan):
    args = make(
        tmp_path,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        per_device_eval_batch_size=eval_batch,
    )
    found = args.group_plan
    assert (found.rows, found.eval_rows, found.prompts, found.steps_per_generation) == plan
    assert (found.group_size, found.eval_group_size, found.num_iterations) == (1, 1, 1)
    assert args.needs_reference is False
    args.check_evaluation()


# ---- options that cannot work ----


@pytest.mark.parametrize(
    ("option", "value"), [("max_completion_length", 0), ("max_completion_length", None), ("temperature", -0.5)]
)
def test_impossible_sampling_is_refused(tmp_path, option, value):
    with pytest.raises(ConfigError, match=rf"`{option}` .*got {value}"):
        make(tmp_path, **{option: value})


@pytest.mark.parametrize(
    ("option", "value"),
    [("cache_implementation", "static"), ("max_tool_calling_iterations", 3), ("log_completions_hub_repo", "a/b")],
)
def test_what_this_version_does_not_have_says_so(tmp_path, option, value):
    with pytest.raises(NotSupportedError, match=option):
        make(tmp_path, **{option: value})


# ---- options given as text, as the command line does ----


@pytest.mark.parametrize("option", ["teacher_model_init_kwargs", "model_init_kwargs", "generation_kwargs"])
def test_a_json_string_is_read(tmp_path, option):
    assert getattr(make(tmp_path, **{option: '{"a": [1, "x"]}'}), option) == {"a": [1, "x"]}
    assert getattr(make(tmp_path, **{option: {"a": 1}}), option) == {"a": 1}


@pytest.mark.parametrize("text", ['{"dtype":', "dtype=bfloat16", '["bfloat16"]'])
def test_text_that_is_no_json_object_is_refused_by_the_options_name(tmp_path, text):
    with pytest.raises(ConfigError, match="teacher_model_init_kwargs"):
        make(tmp_path, teacher_model_init_kwargs=text)


# ---- a teacher behind a server ----


def test_a_server_needs_an_address(tmp_path):
    with pytest.raises(ConfigError, match="`teacher_model_server_url` is missing: set it to the URL"):
        make_server(tmp_path, teacher_model_server_url=None)


@pytest.mark.parametrize("url", ["localhost:8001", "", "ftp://localhost"])
def test_an_address_that_is_no_url_is_refused(tmp_path, url):
    with pytest.raises(ConfigError, match="teacher_model_server_url"):
        make_server(tmp_path, teacher_model_server_url=url)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("teacher_model_name_or_path", "some/teacher"),
        ("teacher_model_revision", "main"),
        ("teacher_model_init_kwargs", {"dtype": "bfloat16"}),
        ("teacher_model_init_kwargs", '{"dtype": "bfloat16"}'),
    ],
)
def test_a_teacher_in_the_process_is_refused_beside_a_server(tmp_path, option, value):
    with pytest.raises(ConfigError, match=rf"`{option}=.*is for a teacher in this process: leave it out"):
        make_server(tmp_path, **{option: value})


@pytest.mark.parametrize("top_k", [0, -1])
@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_at_least_one_token_is_compared(tmp_path, top_k, beta):
    with pytest.raises(ConfigError, match=rf"`loss_top_k` must be at least 1 \(got {top_k}\)"):
        make_server(tmp_path, loss_top_k=top_k, beta=beta)


@pytest.mark.parametrize("beta", [0.001, 0.5, 1.0])
def test_several_tokens_are_for_forward_kl_alone(tmp_path, beta):
    with pytest.raises(ConfigError, match=r"set `loss_top_k` to 1 \(got 2\), or `beta` to 0") as raised:
        make_server(tmp_path, loss_top_k=2, beta=beta)
    assert str(beta) in str(raised.value)
    assert make_server(tmp_path, loss_top_k=1, beta=beta).loss_top_k == 1


@pytest.mark.parametrize("top_k", [1, 2, 100])
def test_forward_kl_takes_any_number_of_tokens(tmp_path, top_k):
    assert make_server(tmp_path, loss_top_k=top_k, beta=0.0).loss_top_k == top_k


@pytest.mark.parametrize("mode", ["argmax", "", None])
def test_a_server_can_only_tell_of_the_sampled_token(tmp_path, mode):
    with pytest.raises(ConfigError, match="`reverse_kl_top_1_mode` can only be 'sampled'"):
        make_server(tmp_path, reverse_kl_top_1_mode=mode)


def test_the_checks_of_distillation_hold_here_too(tmp_path):
    with pytest.raises(ConfigError, match="`beta` is between"):
        make_server(tmp_path, beta=1.5)


def test_a_server_config_without_any_option_says_what_is_missing():
    with pytest.raises(ConfigError, match="teacher_model_server_url"):
        ServerDistillationConfig()
