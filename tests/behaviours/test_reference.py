"""Reference models: a model in memory has one too, it stays as it was, and moves only when asked."""

import pytest
import torch
from fixtures.models import random_model
from fixtures.online_methods import METHODS
from fixtures.runs import Recorder, grpo_config, logs, make, prompts, run
from transformers import TrainerCallback


def variety(completion_ids, **kwargs):
    return [len(set(ids)) + ids[0] % 3 / 4 for ids in completion_ids]


def weights(model):
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def test_a_model_in_memory_gets_a_frozen_copy_as_reference(tmp_path):
    model = random_model()
    start = weights(model)
    args = grpo_config(tmp_path, beta=0.1, learning_rate=1e-2, max_steps=2, lr_scheduler_type="constant")
    trainer = run(model, variety, args, prompts("w10 w20"))
    kl = logs(trainer, "kl")
    assert kl[0] == pytest.approx(0.0, abs=1e-6)
    assert kl[1] > 1e-4
    assert trainer.ref_model is not model
    assert not trainer.ref_model.training
    assert not any(p.requires_grad for p in trainer.ref_model.parameters())
    for name, value in weights(trainer.ref_model).items():
        assert torch.equal(value, start[name])
    assert any(not torch.equal(value, start[name]) for name, value in weights(model).items())


def test_without_beta_there_is_none(tmp_path):
    trainer = run(random_model(), variety, grpo_config(tmp_path), prompts("w10 w20"))
    assert trainer.ref_model is None
    assert logs(trainer, "kl") == []


def test_the_kl_term_has_its_weight(tmp_path):
    """With equal rewards the loss is beta times the logged divergence."""
    args = grpo_config(
        tmp_path, beta=0.3, learning_rate=1e-2, max_steps=3, use_bias_correction_kl=False, lr_scheduler_type="constant"
    )
    recorder = Recorder(_by_step)
    trainer = run(random_model(), recorder, args, prompts("w10 w20"))
    assert logs(trainer, "kl")[2] > 0
    assert logs(trainer, "loss")[2] == pytest.approx(0.3 * logs(trainer, "kl")[2], rel=1e-4)


def _by_step(completion_ids, trainer_state, **kwargs):
    """Rewards in the first step only: the policy has moved then."""
    return [float(ids[0]) if trainer_state.global_step < 2 else 0.0 for ids in completion_ids]


class Weights(TrainerCallback):
    """The weights of the policy after each step."""

    def __init__(self):
        self.after = []

    def on_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.after.append(weights(model))


def test_sync_pulls_the_reference_towards_the_policy(tmp_path):
    model, record = random_model(), Weights()
    start = weights(model)
    args = grpo_config(
        tmp_path,
        beta=0.1,
        learning_rate=1e-2,
        max_steps=5,
        sync_ref_model=True,
        ref_model_sync_steps=2,
        ref_model_mixup_alpha=0.25,
    )
    trainer = run(model, variety, args, prompts("w10 w20"), callbacks=[record])
    for name, value in weights(trainer.ref_model).items():
        first = 0.75 * start[name] + 0.25 * record.after[1][name]
        torch.testing.assert_close(value, 0.75 * first + 0.25 * record.after[3][name])


def test_sync_needs_a_reference(tmp_path):
    with pytest.raises(ValueError, match="`sync_ref_model=True` needs a reference model"):
        grpo_config(tmp_path, sync_ref_model=True)


def test_the_reference_of_a_model_given_by_name_is_the_model_at_the_start(tmp_path):
    random_model().save_pretrained(tmp_path / "model")
    args = grpo_config(tmp_path, beta=0.1, learning_rate=1e-2)
    trainer = make(str(tmp_path / "model"), variety, args, prompts("w10 w20"))
    for name, value in weights(trainer.ref_model).items():
        assert torch.equal(value, weights(random_model())[name])
    trainer.train()
    assert logs(trainer, "kl")[0] == pytest.approx(0.0, abs=1e-6)


# ---- RLOO: a reference model is there by default ----


def test_rloo_a_model_in_memory_gets_a_frozen_copy_as_reference(tmp_path):
    model = random_model()
    start = weights(model)
    args = METHODS["rloo"].make_config(tmp_path, learning_rate=1e-2, max_steps=2, lr_scheduler_type="constant")
    trainer = METHODS["rloo"].train(args, prompts("w10 w20", "w11"), model)
    kl = logs(trainer, "kl")
    assert kl[0] == pytest.approx(0.0, abs=1e-6)
    assert kl[1] > 1e-4
    assert trainer.ref_model is not model
    assert not trainer.ref_model.training
    assert not any(p.requires_grad for p in trainer.ref_model.parameters())
    for name, value in weights(trainer.ref_model).items():
        assert torch.equal(value, start[name])
    assert any(not torch.equal(value, start[name]) for name, value in weights(model).items())


def test_rloo_the_divergence_draws_the_policy_back(tmp_path):
    """Equal rewards teach nothing but the way back to the reference."""
    args = METHODS["rloo"].make_config(tmp_path, beta=0.5, learning_rate=1e-2, max_steps=3, max_grad_norm=0.0)
    trainer = METHODS["rloo"].train(args, prompts("w10 w20", "w11"), reward_funcs=_by_step)
    assert logs(trainer, "frac_reward_zero_std")[2] == 1.0
    assert logs(trainer, "kl")[2] > 1e-4
    assert logs(trainer, "grad_norm")[2] > 0
    free = METHODS["rloo"].make_config(tmp_path, beta=0.0, learning_rate=1e-2, max_steps=3, max_grad_norm=0.0)
    trainer = METHODS["rloo"].train(free, prompts("w10 w20", "w11"), reward_funcs=_by_step)
    assert logs(trainer, "grad_norm")[2] == 0.0


def test_rloo_sync_pulls_the_reference_towards_the_policy(tmp_path):
    model, record = random_model(), Weights()
    start = weights(model)
    changes = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.25}
    args = METHODS["rloo"].make_config(tmp_path, learning_rate=1e-2, max_steps=5, **changes)
    trainer = METHODS["rloo"].train(args, prompts("w10 w20", "w11"), model, callbacks=[record])
    for name, value in weights(trainer.ref_model).items():
        first = 0.75 * start[name] + 0.25 * record.after[1][name]
        torch.testing.assert_close(value, 0.75 * first + 0.25 * record.after[3][name])
