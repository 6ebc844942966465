"""`DPOConfig`: its defaults, and the rules that are checked."""

import warnings

import pytest

from trl.errors import ConfigError
from trl.functional.preference import PAIR_LOSSES, PairOptions
from trl.trainer.dpo_config import DPOConfig

DEFAULTS = {
    "learning_rate": 1e-6,
    "logging_steps": 10,
    "gradient_checkpointing": True,
    "model_init_kwargs": None,
    "trust_remote_code": False,
    "router_aux_loss_coef": None,
    "disable_dropout": True,
    "dataset_num_proc": None,
    "max_length": 1024,
    "truncation_mode": "keep_start",
    "padding_free": False,
    "pad_to_multiple_of": "auto",
    "pad_token": None,
    "precompute_ref_log_probs": False,
    "precompute_ref_batch_size": None,
    "loss_type": ["sigmoid"],
    "loss_weights": None,
    "ld_alpha": None,
    "f_divergence_type": "reverse_kl",
    "f_alpha_divergence_coef": 0.5,
    "label_smoothing": 0.0,
    "beta": 0.1,
    "use_weighting": False,
    "discopop_tau": 0.05,
    "activation_offloading": False,
    "sync_ref_model": False,
    "ref_model_mixup_alpha": 0.6,
    "ref_model_sync_steps": 512,
    "max_tokens_per_micro_batch": None,
}


def config(**changes):
    """A config of the CPU."""
    return DPOConfig(output_dir="out", use_cpu=True, bf16=False, report_to="none", **changes)


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults(name):
    expected = DEFAULTS[name]
    if name == "gradient_checkpointing":
        args = config()
        assert args.gradient_checkpointing or args.activation_checkpointing
        return
    assert getattr(config(), name) == expected


def test_two_configs_share_no_list():
    assert config().loss_type is not config().loss_type


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_every_loss_by_its_name_or_in_a_list(name):
    changes = {"label_smoothing": 1e-3} if name == "exo_pair" else {}
    assert config(loss_type=name, **changes).loss_type == [name]
    assert config(loss_type=[name], loss_weights=[0.5], **changes).loss_type == [name]


def test_the_options_of_the_losses_are_those_of_the_config():
    args = config(
        beta=0.3,
        label_smoothing=0.2,
        f_divergence_type="alpha_divergence",
        f_alpha_divergence_coef=0.7,
        discopop_tau=0.1,
    )
    assert args.pair_options == PairOptions(0.3, 0.2, "alpha_divergence", 0.7, 0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_type": "dpo"}, r"`loss_type` must be of sigmoid, .*sft \(got 'dpo'\)"),
        ({"loss_type": ["sigmoid", "kto_pair"]}, "got 'kto_pair'"),
        ({"loss_type": []}, "one loss, or several different ones"),
        ({"loss_type": ["sft", "sft"]}, "one loss, or several different ones"),
        ({"loss_weights": [1.0, 2.0]}, r"`loss_weights` has a weight for each of `loss_type` \(got 2 and 1\)"),
        ({"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0]}, r"got 1 and 2"),
        ({"f_divergence_type": "kl"}, r"`f_divergence_type` must be one of reverse_kl, .* \(got 'kl'\)"),
        ({"beta": 0.0}, r"`beta` must be above 0 \(got 0.0\)"),
        ({"beta": -0.1}, r"`beta` must be above 0 \(got -0.1\)"),
        ({"label_smoothing": 0.5}, r"`label_smoothing` is a probability below 1/2 \(got 0.5\)"),
        ({"label_smoothing": -0.1}, r"`label_smoothing` is a probability below 1/2 \(got -0.1\)"),
        ({"loss_type": "exo_pair"}, "`loss_type='exo_pair'` needs `label_smoothing` above 0"),
        ({"discopop_tau": 0.0}, r"`discopop_tau` must be above 0 \(got 0.0\)"),
        ({"ld_alpha": 1.5}, r"`ld_alpha` is a weight from 0 to 1 \(got 1.5\)"),
        ({"ld_alpha": -0.5}, r"`ld_alpha` is a weight from 0 to 1 \(got -0.5\)"),
        ({"truncation_mode": "middle"}, "`truncation_mode` must be one of keep_start, keep_end"),
        ({"max_length": 1}, "`max_length` must be at least 2"),
        ({"sync_ref_model": True, "precompute_ref_log_probs": True}, "`sync_ref_model` moves the reference"),
        ({"sync_ref_model": True, "loss_type": "sft"}, "`sync_ref_model=True` needs a reference model"),
    ],
)
def test_settings_that_cannot_be(changes, message):
    with pytest.raises(ConfigError, match=message):
        config(**changes)


@pytest.mark.parametrize("name", [n for n, loss in PAIR_LOSSES.items() if loss.reverse_kl_only])
def test_losses_of_log_ratios_know_one_divergence(name):
    with pytest.raises(ConfigError, match=rf"`loss_type='{name}'` knows no other divergence than 'reverse_kl'"):
        config(loss_type=["sigmoid", name], f_divergence_type="js_divergence")


@pytest.mark.parametrize("name", ["aot", "aot_unpaired"])
@pytest.mark.parametrize("changes", [{"use_weighting": True}, {"max_tokens_per_micro_batch": 100}])
def test_losses_of_sorted_batches_cannot_be_cut(name, changes):
    with pytest.raises(ConfigError, match=f"`loss_type='{name}'` compares the pairs of a batch with one another"):
        config(loss_type=[name], **changes)


def test_options_that_do_nothing_say_so():
    with pytest.warns(UserWarning, match="`padding_free` is what is done anyway"):
        config(padding_free=True)
    with pytest.warns(FutureWarning, match="`truncation_mode='keep_end'` is deprecated"):
        config(truncation_mode="keep_end")
    with pytest.warns(FutureWarning, match="`pad_token` is deprecated"):
        config(pad_token="<pad>")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config()


@pytest.mark.parametrize(("losses", "needed"), [(["sft"], False), (["sigmoid", "sft"], True), (["sigmoid"], True)])
def test_who_only_imitates_needs_no_reference(losses, needed):
    assert config(loss_type=losses).needs_reference is needed
