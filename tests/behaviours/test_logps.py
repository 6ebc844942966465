"""Log-probs, ratios, temperature and entropy in a run, against exactly known probabilities."""

import math

import pytest
import torch
from fixtures.engines import ScriptedEngine
from fixtures.models import random_model, table_model
from fixtures.runs import Recorder, grpo_config, logs, make, prompts, run

CHAIN = {10: {11: 0.75, 12: 0.25}, 11: {1: 1.0}, 12: {1: 1.0}}
AT_TEMPERATURE = {1.0: (0.75, 0.562335), 0.5: (0.9, 0.325083)}
"""Temperature -> probability of 11, entropy of the first token."""


def temper(p, temperature):
    return p ** (1 / temperature) / (p ** (1 / temperature) + (1 - p) ** (1 / temperature))


@pytest.mark.parametrize("temperature", AT_TEMPERATURE)
def test_temperature_enters_sampling_and_entropy(tmp_path, temperature):
    share, entropy = AT_TEMPERATURE[temperature]
    recorder = Recorder(lambda completion_ids, **_: [float(ids[0]) for ids in completion_ids])
    args = grpo_config(tmp_path, per_device_train_batch_size=256, num_generations=256, temperature=temperature)
    trainer = run(table_model(CHAIN), recorder, args, prompts("w10"))
    drawn = [ids[0] for ids in recorder.completions]
    deviation = math.sqrt(share * (1 - share) / len(drawn))
    assert drawn.count(11) / len(drawn) == pytest.approx(share, abs=4 * deviation)
    assert logs(trainer, "entropy")[0] * 2 == pytest.approx(entropy, abs=1e-5)


def other_engine(temperature, shift=0.0):
    """An engine with weights of its own that reports log p at the temperature, plus a shift."""
    p = temper(0.75, temperature)
    logp = {11: math.log(p) + shift, 12: math.log(1 - p) + shift, 1: 0.0}
    return ScriptedEngine([[11, 1], [12, 1]], logps=lambda prompt, ids: [logp[i] for i in ids], own_weights=True)


@pytest.mark.parametrize("temperature", AT_TEMPERATURE)
def test_a_sampler_at_the_same_temperature_has_ratio_one(tmp_path, temperature):
    args = grpo_config(tmp_path, temperature=temperature, beta=0.1)
    trainer = make(table_model(CHAIN), Recorder(_first_id), args, prompts("w10"))
    trainer.engine = other_engine(temperature)
    trainer.train()
    for name in ("min", "mean", "max"):
        assert logs(trainer, f"sampling/importance_sampling_ratio/{name}")[0] == pytest.approx(1.0, abs=1e-5)
    assert logs(trainer, "sampling/sampling_logp_difference/max")[0] == pytest.approx(0.0, abs=1e-5)
    assert logs(trainer, "clip_ratio/region_mean") == [0.0]
    assert logs(trainer, "kl")[0] == pytest.approx(0.0, abs=1e-9)


def _first_id(completion_ids, **kwargs):
    return [float(ids[0]) for ids in completion_ids]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_kl_against_an_identical_reference_is_zero_at_any_temperature(tmp_path, temperature):
    args = grpo_config(tmp_path, temperature=temperature, beta=0.1)
    trainer = run(random_model(), Recorder(_first_id), args, prompts("w10 w20"))
    assert logs(trainer, "kl")[0] == pytest.approx(0.0, abs=1e-6)


def test_a_temperature_in_generation_kwargs_holds_for_the_loss_too(tmp_path):
    args = grpo_config(tmp_path, generation_kwargs={"temperature": 0.5, "max_new_tokens": 3})
    trainer = run(table_model(CHAIN), Recorder(_first_id), args, prompts("w10"))
    assert logs(trainer, "entropy")[0] * 2 == pytest.approx(0.325083, abs=1e-5)


def test_recomputed_logps_are_those_sampled(tmp_path):
    args = grpo_config(tmp_path, temperature=0.7)
    trainer = make(random_model(), Recorder(_first_id), args, prompts("w10 w20"))
    batch = trainer.collect([trainer.train_dataset[0]] * 4)
    again = trainer.frozen_logps(trainer.model, batch).logps
    torch.testing.assert_close(again, batch.sampling_logps, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("mode", "bounds", "ratio"),
    [
        ("token_truncate", {"max": 3.0}, [math.exp(0.2)] * 2),
        ("sequence_truncate", {"max": 3.0}, [math.exp(0.2)] * 2),
        ("token_truncate", {"max": 1.1}, [1.1, 1.0]),
        ("token_mask", {"max": 1.1}, [0.0, 1.0]),
        ("sequence_mask", {"max": 1.1}, [0.0, 0.0]),
        ("sequence_mask", {"max": 3.0, "min": 1.3}, [0.0, 0.0]),
    ],
)
def test_the_sampler_correction_weighs_the_loss(tmp_path, mode, bounds, ratio):
    """The sampler's first token is 0.2 nats less likely than the trainer says, the second equally likely."""
    ratio = [math.exp(0.2), 1.0] if mode == "token_truncate" and bounds["max"] == 3.0 else ratio
    args = grpo_config(
        tmp_path,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_max=bounds["max"],
        vllm_importance_sampling_clip_min=bounds.get("min"),
        loss_type="dapo",
    )
    trainer = make(table_model(CHAIN), Recorder(lambda **_: [3.0, 1.0, 1.0, 1.0]), args, prompts("w10"))
    logp = {11: math.log(0.75) - 0.2, 12: math.log(0.25), 1: 0.0}
    trainer.engine = ScriptedEngine(
        [[11, 1], [12, 1], [12, 1], [12, 1]], logps=lambda p, ids: [logp[i] for i in ids], own_weights=True
    )
    trainer.train()
    a = [1.5 / 1.0001, *[-0.5 / 1.0001] * 3]  # mean 1.5, sample deviation 1
    rest = 1.0 if bounds.get("min", 0.0) <= 1.0 else 0.0
    expected = -(a[0] * sum(ratio) + sum(x * 2 * rest for x in a[1:])) / 8
    assert logs(trainer, "loss")[0] == pytest.approx(expected, abs=1e-5)
    assert logs(trainer, "sampling/importance_sampling_ratio/max")[0] == pytest.approx(max(*ratio, rest), abs=1e-5)
    assert logs(trainer, "sampling/sampling_logp_difference/mean")[0] == pytest.approx(0.2 / 8, abs=1e-5)


def test_without_correction_the_sampler_is_not_looked_at(tmp_path):
    args = grpo_config(tmp_path, vllm_importance_sampling_correction=False)
    trainer = make(table_model(CHAIN), Recorder(_first_id), args, prompts("w10"))
    trainer.engine = other_engine(1.0, shift=-1.0)
    trainer.train()
    assert [sampling.with_logps for _, sampling in trainer.engine.calls] == [False]
    assert logs(trainer, "sampling/importance_sampling_ratio/mean") == []
    assert logs(trainer, "loss")[0] == pytest.approx(0.0, abs=1e-6)  # two of each: equal lengths, advantages sum to 0
    assert logs(trainer, "grad_norm")[0] > 0
