"""A run that is interrupted goes on as if it had not been; seeds decide what they are named after."""

import warnings
from pathlib import Path

import pytest
import torch
from fixtures.models import random_model, table_model
from fixtures.runs import Recorder, grpo_config, logs, make, prompts, run
from transformers import TrainerCallback

PROMPTS = [f"w{i} w{i + 1}" for i in range(10, 22)]
VARYING = ("step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss")


def variety(completion_ids, **kwargs):
    return [len(set(ids)) + ids[0] % 3 / 4 for ids in completion_ids]


def settings(steps_per_generation, num_iterations, **changes):
    return {
        "num_generations": 2,
        "learning_rate": 1e-2,
        "max_steps": 4,
        "steps_per_generation": steps_per_generation,
        "num_iterations": num_iterations,
        "save_strategy": "steps",
        **changes,
    }


def comparable(trainer):
    return [{k: v for k, v in entry.items() if k not in VARYING} for entry in trainer.state.log_history]


def assert_equal_runs(whole, resumed):
    for one, other in zip(comparable(whole), comparable(resumed), strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert other[key] == pytest.approx(value, abs=1e-5), key
    for (name, one), other in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0, msg=name)


@pytest.mark.parametrize(
    ("steps_per_generation", "num_iterations", "save_at"), [(1, 1, 2), (2, 1, 2), (2, 1, 1), (4, 1, 2), (1, 2, 1)]
)
@pytest.mark.parametrize("extras", [{}, {"beta": 0.1, "use_adaptive_entropy": True, "entropy_target": 5.0}])
def test_resuming_continues_the_same_trajectory(tmp_path, steps_per_generation, num_iterations, save_at, extras):
    args = settings(steps_per_generation, num_iterations, save_steps=save_at, **extras)
    first, second = Recorder(variety), Recorder(variety)
    whole = run(random_model(), first, grpo_config(tmp_path, **args), prompts(*PROMPTS))
    checkpoint = tmp_path / f"checkpoint-{save_at}"
    # The weights come from the checkpoint; the reference model is the model that one starts from.
    start = random_model(seed=0 if "beta" in extras else 5)
    resumed = make(start, second, grpo_config(tmp_path, **args), prompts(*PROMPTS))
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert_equal_runs(whole, resumed)
    before = -(-save_at // (steps_per_generation * num_iterations))
    assert len(first.calls) == before + len(second.calls)
    assert [c["completion_ids"] for c in first.calls[before:]] == [c["completion_ids"] for c in second.calls]
    assert max(logs(whole, "grad_norm")) > 0


def test_resuming_across_epochs_and_from_the_last_checkpoint(tmp_path):
    args = settings(2, 1, max_steps=-1, num_train_epochs=3, save_steps=3)
    dataset = prompts(*PROMPTS[:5])
    whole = run(random_model(), variety, grpo_config(tmp_path / "a", **args), dataset)
    steps = whole.state.global_step
    partial = make(random_model(), variety, grpo_config(tmp_path / "b", **args), dataset)
    partial.add_callback(_StopAt(steps - 1))
    partial.train()
    resumed = make(random_model(seed=5), variety, grpo_config(tmp_path / "b", **args), dataset)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == steps
    assert_equal_runs(whole, resumed)


class _StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


def test_a_reference_model_that_moves_is_resumed_where_it_was(tmp_path):
    args = settings(1, 1, save_steps=2, beta=0.1, sync_ref_model=True, ref_model_sync_steps=1)
    whole = run(random_model(), variety, grpo_config(tmp_path, **args), prompts(*PROMPTS))
    resumed = make(random_model(), variety, grpo_config(tmp_path, **args), prompts(*PROMPTS))
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_equal_runs(whole, resumed)
    assert logs(whole, "kl")[-1] > 0
    for one, other in zip(whole.ref_model.parameters(), resumed.ref_model.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)


def test_a_checkpoint_without_the_window_says_so(tmp_path):
    args = settings(2, 1, save_steps=1)
    run(random_model(), variety, grpo_config(tmp_path, **args), prompts(*PROMPTS))
    (tmp_path / "checkpoint-1" / "rollout_state_0.pt").unlink()
    resumed = make(random_model(), variety, grpo_config(tmp_path, **args), prompts(*PROMPTS))
    with pytest.warns(UserWarning, match="differs from an uninterrupted"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert resumed.state.global_step == 4


def test_training_anew_after_a_resumed_run_starts_at_the_beginning(tmp_path):
    args = settings(2, 1, save_steps=1)
    whole = run(random_model(), variety, grpo_config(tmp_path, **args), prompts(*PROMPTS))
    resumed = make(random_model(), recorder := Recorder(variety), grpo_config(tmp_path, **args), prompts(*PROMPTS))
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    seen = len(recorder.calls)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed.train()
    assert resumed.state.global_step == whole.state.global_step
    assert len(recorder.calls) == seen + 2


def test_checkpoints_hold_only_the_model_where_asked(tmp_path):
    args = settings(2, 1, save_steps=1, save_only_model=True)
    run(random_model(), variety, grpo_config(tmp_path, **args), prompts(*PROMPTS))
    assert not list(Path(tmp_path, "checkpoint-1").glob("rollout_state*"))


def test_data_seed_decides_the_order_and_seed_the_completions(tmp_path):
    def calls(seed, data_seed):
        recorder = Recorder(variety)
        args = grpo_config(tmp_path, max_steps=4, seed=seed, data_seed=data_seed)
        run(table_model({}), recorder, args, prompts(*(f"w{i}" for i in range(10, 26))))
        return [c["prompts"][0] for c in recorder.calls], recorder.completions

    order, completions = calls(0, 0)
    assert len(set(order)) == 4
    other_order, _ = calls(0, 1)
    same_order, other_completions = calls(1, 0)
    assert order == same_order
    assert order != other_order
    assert completions != other_completions
