"""Dropout and 16-bit weights must not move what is equal by definition."""

import pytest
import torch
from fixtures.models import random_model, table_model
from fixtures.runs import grpo_config, logs, make, prompts, run
from torch import nn


def odd(completion_ids, **kwargs):
    return [sum(i % 2 for i in ids) / len(ids) + 0.01 * i for i, ids in enumerate(completion_ids)]


def with_modules():
    """A model with dropout modules behind its MLPs."""
    model = random_model()
    for layer in model.model.layers:
        layer.mlp = nn.Sequential(layer.mlp, nn.Dropout(0.5))
    return model


MODELS = {
    "functional": lambda: random_model(attention_dropout=0.5),
    "functional, eager attention": lambda: random_model(attention_dropout=0.5, attn_implementation="eager"),
    "modules": with_modules,
}


@pytest.mark.parametrize("name", MODELS)
def test_disable_dropout_leaves_no_divergence_at_the_first_step(tmp_path, name):
    args = grpo_config(tmp_path, beta=0.1, disable_dropout=True, num_iterations=2, max_steps=2)
    trainer = run(MODELS[name](), odd, args, prompts("w10 w20"))
    assert logs(trainer, "kl") == pytest.approx([0.0, 0.0], abs=1e-6)  # the learning rate is 0
    assert logs(trainer, "clip_ratio/region_mean") == [0.0, 0.0]
    assert logs(trainer, "clip_ratio/high_max") == [0.0, 0.0]


@pytest.mark.parametrize("name", MODELS)
def test_without_it_dropout_is_there(tmp_path, name):
    """The counterpart, without which the test above could not fail."""
    args = grpo_config(tmp_path, beta=0.1, num_iterations=2)
    trainer = run(MODELS[name](), odd, args, prompts("w10 w20"))
    assert logs(trainer, "kl")[0] > 1e-3


def test_the_model_of_the_caller_keeps_its_dropout_otherwise(tmp_path):
    model = with_modules()
    run(model, odd, grpo_config(tmp_path), prompts("w10 w20"))
    assert model.model.layers[0].mlp[1].p == 0.5


def test_kl_of_a_bfloat16_model_is_zero_at_the_first_step(tmp_path):
    model = table_model({}, dtype=torch.bfloat16)
    trainer = run(model, odd, grpo_config(tmp_path, beta=0.1), prompts("w10"))
    assert trainer.ref_model.dtype == torch.bfloat16
    assert logs(trainer, "kl")[0] == pytest.approx(0.0, abs=1e-6)
    assert logs(trainer, "entropy")[0] == pytest.approx(4.158883, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("budget", [8, None])
def test_logps_of_a_uniform_model_do_not_depend_on_micro_batches(tmp_path, dtype, budget):
    args = grpo_config(tmp_path, max_tokens_per_micro_batch=budget, max_steps=1)
    trainer = make(table_model({}, dtype=dtype), odd, args, prompts("w10"))
    batch = trainer.collect([{"prompt": "w10"}] * 4)
    logps = trainer.frozen_logps(trainer.model, batch).logps
    assert logps.dtype == torch.float32
    torch.testing.assert_close(logps, torch.full_like(logps, -4.158883), atol=1e-5, rtol=0)


def test_mixed_precision_on_the_cpu_keeps_float32_weights_and_a_finite_loss(tmp_path):
    model = random_model()
    trainer = run(model, odd, grpo_config(tmp_path, bf16=True, learning_rate=1e-3), prompts("w10 w20"))
    assert model.dtype == torch.float32
    assert trainer.state.log_history[0]["grad_norm"] > 0
    full = run(random_model(), odd, grpo_config(tmp_path, learning_rate=1e-3), prompts("w10 w20"))
    assert logs(trainer, "entropy")[0] == pytest.approx(logs(full, "entropy")[0], rel=0.2)
