"""Options of SFT: defaults, and what does not go together."""

import warnings

import pytest

from trl.errors import ConfigError, NotSupportedError
from trl.trainer.sft_config import SFTConfig

DEFAULTS = {
    "learning_rate": 2e-5,
    "logging_steps": 10,
    "lr_scheduler_kwargs": None,
    "model_init_kwargs": None,
    "trust_remote_code": False,
    "router_aux_loss_coef": None,
    "chat_template_path": None,
    "dataset_text_field": "text",
    "dataset_kwargs": None,
    "dataset_num_proc": None,
    "eos_token": None,
    "max_length": 1024,
    "truncation_mode": "keep_start",
    "shuffle_dataset": False,
    "packing": False,
    "packing_strategy": "bfd",
    "padding_free": False,
    "pad_to_multiple_of": "auto",
    "completion_only_loss": None,
    "assistant_only_loss": False,
    "loss_type": "nll",
    "activation_offloading": False,
    "pad_token": None,
}


def config(tmp_path, **changes):
    return SFTConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none", **changes)


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults(tmp_path, name):
    value = getattr(config(tmp_path), name)
    assert value == DEFAULTS[name]
    assert type(value) is type(DEFAULTS[name])


def test_defaults_that_are_worked_out(tmp_path):
    args = config(tmp_path)
    assert args.bf16 is False  # on a CPU
    assert args.activation_checkpointing is True
    assert SFTConfig.__dataclass_fields__["eval_packing"].default is None


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("given", [None, False, True])
def test_evaluation_is_packed_as_training_unless_told_otherwise(tmp_path, packing, given):
    args = config(tmp_path, packing=packing, eval_packing=given)
    assert args.eval_packing is (packing if given is None else given)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"packing": True, "max_length": None}, ConfigError, "`packing`.*`max_length`.*None"),
        ({"eval_packing": True, "max_length": None}, ConfigError, "`packing`.*`max_length`.*None"),
        ({"packing_strategy": "ffd"}, ConfigError, "`packing_strategy` must be one of .*'ffd'"),
        ({"loss_type": "dpo"}, ConfigError, "`loss_type` must be one of .*'dpo'"),
        ({"truncation_mode": "middle"}, ConfigError, "`truncation_mode` must be one of .*'middle'"),
        ({"max_length": 1}, ConfigError, "`max_length` must be at least 2 .got 1"),
        ({"dataset_kwargs": "[1]"}, ConfigError, "`dataset_kwargs` must be a mapping"),
        ({"auto_find_batch_size": True}, ConfigError, "`auto_find_batch_size`"),
        ({"label_smoothing_factor": 0.1}, NotSupportedError, "`label_smoothing_factor` .*0.1"),
        ({"include_num_input_tokens_seen": "all"}, ConfigError, "`include_num_input_tokens_seen`.*`num_tokens`"),
        ({"include_num_input_tokens_seen": True}, ConfigError, "`include_num_input_tokens_seen`"),
    ],
)
def test_what_is_refused(tmp_path, changes, error, text):
    with pytest.raises(error, match=text):
        config(tmp_path, **changes)


@pytest.mark.parametrize(
    "changes", [{"loss_type": "chunked_nll"}, {"truncation_mode": "keep_end"}, {"pad_token": "<pad>"}]
)
def test_old_options_still_work_and_are_warned_about(tmp_path, changes):
    with pytest.warns(FutureWarning, match=f"`{next(iter(changes))}"):
        args = config(tmp_path, **changes)
    assert args.loss_type == "nll"


@pytest.mark.parametrize(
    ("kwargs", "skips"),
    [
        (None, False),
        ({}, False),
        ({"skip_prepare_dataset": True}, True),
        ('{"skip_prepare_dataset": true}', True),
        ({"skip_prepare_dataset": False}, False),
    ],
)
def test_preparation_is_skipped_where_it_is_asked_for(tmp_path, kwargs, skips):
    assert config(tmp_path, dataset_kwargs=kwargs).skips_preparation is skips


def test_assistant_and_completion_may_both_be_asked_for(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        args = config(tmp_path, assistant_only_loss=True, completion_only_loss=True)
    assert (args.assistant_only_loss, args.completion_only_loss) == (True, True)
