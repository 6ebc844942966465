"""Evaluation: numbers that do not depend on the batch, and group sizes checked apart from training's."""

import math

import pytest
from fixtures.models import CHAIN_S, table_model
from fixtures.runs import Recorder, by_length, grpo_config, logs, make, prompts, run


def score(completion_ids, score, **kwargs):
    return score


DATASET = prompts("w10", "w11", "w12", score=[0.0, 0.0, 9.0])


@pytest.mark.parametrize("rows", [2, 4, 6])
def test_rewards_do_not_depend_on_the_evaluation_batch(tmp_path, rows):
    args = grpo_config(tmp_path, num_generations_eval=2, per_device_eval_batch_size=rows)
    trainer = make(table_model(CHAIN_S), score, args, DATASET, eval_dataset=DATASET)
    metrics = trainer.evaluate()
    assert metrics["eval_reward"] == pytest.approx(3.0)
    assert metrics["eval_reward_std"] == 0.0
    assert metrics["eval_frac_reward_zero_std"] == 1.0
    assert metrics["eval_rewards/score/mean"] == pytest.approx(3.0)
    assert metrics["eval_rewards/score/std"] == pytest.approx(math.sqrt(108 / 5))  # of 0 0 0 0 9 9, over n - 1


def test_the_loss_weighs_batches_by_their_sequences(tmp_path):
    """Batches of four and of two rows whose losses are known from the recorded completions."""
    recorder = Recorder(lambda completion_ids, **_: [float(i % 2) for i in range(len(completion_ids))])
    args = grpo_config(tmp_path, num_generations_eval=2, loss_type="luspo", importance_sampling_level="sequence")
    dataset = prompts("w10", "w10", "w10")
    trainer = make(table_model(CHAIN_S), recorder, args, dataset, eval_dataset=dataset)
    metrics = trainer.evaluate()
    assert [len(call["completion_ids"]) for call in recorder.calls] == [4, 2]
    advantage = 0.5 / (math.sqrt(0.5) + 1e-4)
    terms = [-n * (advantage if i % 2 else -advantage) for i, n in enumerate(recorder.lengths)]
    assert metrics["eval_loss"] == pytest.approx(sum(terms) / 6, abs=1e-5)


TABLE = [
    # train batch, groups, eval batch, eval groups, error
    ((4, 4, 2, 2), None),
    ((4, 4, 3, 1), None),
    ((4, 3, 4, None), r"got 3 and 4"),
    ((4, 1, 4, None), r"needs at least 2 .*got 1"),
    ((4, 4, 3, 2), r"got 2 and 3"),
    ((4, 4, 4, 0), r"needs at least 1 .*got 0"),
]


@pytest.mark.parametrize(("sizes", "error"), TABLE)
def test_group_sizes_are_checked_apart(tmp_path, sizes, error):
    train, groups, rows, eval_groups = sizes
    changes = {
        "per_device_train_batch_size": train,
        "num_generations": groups,
        "per_device_eval_batch_size": rows,
        "num_generations_eval": eval_groups,
        "eval_strategy": "steps",
        "eval_steps": 1,
    }
    if error:
        with pytest.raises(ValueError, match=error):
            grpo_config(tmp_path, **changes)
        return
    trainer = run(table_model(CHAIN_S), by_length, grpo_config(tmp_path, **changes), DATASET, eval_dataset=DATASET)
    evaluation = next(entry for entry in trainer.state.log_history if "eval_loss" in entry)
    assert all(math.isfinite(value) for value in evaluation.values())
    assert evaluation["eval_reward"] == pytest.approx(evaluation["eval_completions/mean_length"])
    if eval_groups == 1:
        assert evaluation["eval_reward_std"] == 0


def test_groups_that_do_not_fit_are_named_when_evaluation_is_called_by_hand(tmp_path):
    args = grpo_config(tmp_path, num_generations_eval=2, per_device_eval_batch_size=3)
    trainer = make(table_model(CHAIN_S), by_length, args, DATASET, eval_dataset=DATASET)
    with pytest.raises(ValueError, match=r"got 2 and 3"):
        trainer.evaluate()


def test_evaluation_does_not_disturb_training(tmp_path):
    """The same completions are trained on, whether an evaluation comes in the middle of a window or not."""

    def losses(eval_strategy):
        args = grpo_config(
            tmp_path, steps_per_generation=2, max_steps=4, learning_rate=1e-2, eval_strategy=eval_strategy, eval_steps=1
        )
        recorder = Recorder()
        trainer = run(table_model(CHAIN_S), recorder, args, prompts("w10", "w10"), eval_dataset=prompts("w10"))
        return logs(trainer, "loss"), recorder.calls

    quiet, calls = losses("no")
    disturbed, more_calls = losses("steps")
    assert disturbed[:2] == quiet[:2]  # later generations draw other numbers
    assert len(more_calls) == len(calls) + 4


def test_metrics_of_training_and_evaluation_do_not_mix(tmp_path):
    args = grpo_config(tmp_path, max_steps=2, eval_strategy="steps", eval_steps=1, logging_steps=2)
    trainer = run(
        table_model(CHAIN_S), score, args, prompts("w10", score=[1.0]), eval_dataset=prompts("w10", score=[5.0])
    )
    assert logs(trainer, "reward") == [1.0]
    assert logs(trainer, "eval_reward") == [5.0, 5.0]
