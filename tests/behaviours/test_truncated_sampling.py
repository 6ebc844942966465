"""Truncated sampling beside a sampler correction: said at construction, never a silent bias."""

import warnings

import pytest
from datasets import Dataset
from fixtures.engines import ScriptedEngine
from fixtures.models import CHAIN_S, table_model
from fixtures.tokenizers import word_tokenizer

from trl import GRPOConfig, GRPOTrainer
from trl.trainer import online


def build(tmp_path, monkeypatch, own_weights, **settings):
    engine = ScriptedEngine([[11, 12, 1]], own_weights=own_weights)
    monkeypatch.setattr(online, "build_engine", lambda *args, **kwargs: engine)
    config = GRPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=6,
        report_to="none",
        use_cpu=True,
        **settings,
    )
    rows = Dataset.from_dict({"prompt": ["w10"] * 4})
    return GRPOTrainer(
        table_model(CHAIN_S),
        lambda completions, **kwargs: [0.0] * len(completions),
        config,
        rows,
        processing_class=word_tokenizer(),
    )


@pytest.mark.parametrize(
    "settings",
    [{"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.05}, {"repetition_penalty": 1.1}, {"generation_kwargs": {"top_k": 2}}],
)
def test_truncation_is_named_where_the_ratio_would_carry_it(tmp_path, monkeypatch, settings):
    (name,) = settings.get("generation_kwargs", settings)
    with pytest.warns(UserWarning, match=f"`{name}=.*importance ratio is off"):
        build(tmp_path, monkeypatch, own_weights=True, **settings)


@pytest.mark.parametrize(
    ("own_weights", "settings"),
    [
        (True, {}),
        (True, {"temperature": 0.6}),
        (True, {"top_k": 2, "vllm_importance_sampling_correction": False}),
        (False, {"top_k": 2}),
    ],
)
def test_nothing_is_said_where_nothing_is_off(tmp_path, monkeypatch, own_weights, settings):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build(tmp_path, monkeypatch, own_weights, **settings)
