"""Group statistics in a run: what was not scored stays out, and equal rewards teach nothing."""

import math

import pytest
import torch
from fixtures.models import CHAIN_S, table_model
from fixtures.online_methods import METHODS
from fixtures.runs import GradientGrabber, Recorder, grpo_config, logs, make, prompts, run
from fixtures.tokenizers import word_tokenizer


def fixed(*values):
    return Recorder(lambda completion_ids, **_: [values[i % len(values)] for i in range(len(completion_ids))])


def collected(trainer):
    """The advantages of one generation batch."""
    rows = [trainer.train_dataset[0]] * 4
    return trainer.collect(rows).advantages.tolist()


def test_an_unscored_completion_stays_out_of_the_baseline(tmp_path):
    args = grpo_config(tmp_path)
    trainer = make(table_model(CHAIN_S), fixed(None, 0.0, 1.0, None), args, prompts("w10"))
    with pytest.warns(UserWarning, match="scored 2 of 4"):
        advantages = collected(trainer)
    assert advantages == pytest.approx([0.0, -0.70701, 0.70701, 0.0], abs=1e-5)
    metrics = trainer.metrics["train"].flush(trainer.processes.gather)
    assert metrics["reward"] == 0.5
    assert metrics["reward_std"] == pytest.approx(0.70711, abs=1e-5)


def test_unscored_by_one_function_counts_with_the_others(tmp_path):
    first, second = fixed(1.0, 0.0, None, None), fixed(None, None, 3.0, 5.0)
    second.__name__ = "second"
    trainer = make(table_model(CHAIN_S), [first, second], grpo_config(tmp_path, scale_rewards="none"), prompts("w10"))
    assert collected(trainer) == pytest.approx([1 - 2.25, 0 - 2.25, 3 - 2.25, 5 - 2.25])


def test_a_group_that_nobody_scored_has_no_loss_and_no_gradient_and_warns_once(tmp_path):
    grabber = GradientGrabber()
    trainer = make(
        table_model(CHAIN_S), fixed(None), grpo_config(tmp_path, max_steps=2), prompts("w10"), callbacks=[grabber]
    )
    with pytest.warns(UserWarning, match="scored 4 of 4") as caught:
        trainer.train()
    assert len(caught) == 1
    assert logs(trainer, "loss") == [0.0, 0.0]
    assert logs(trainer, "reward") == [None, None]
    assert not any(g.any() for step in grabber.steps for g in step.values())


class NeverJudges(torch.nn.Module):
    """A reward model whose logits say nothing."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, input_ids, attention_mask):
        output = torch.full((len(input_ids), 1), math.nan)
        return type("Output", (), {"logits": output})()


def test_the_same_holds_for_reward_modules_alone(tmp_path):
    args = grpo_config(tmp_path)
    options = {"reward_processing_classes": [word_tokenizer()]}
    trainer = make(table_model(CHAIN_S), [NeverJudges()], args, prompts("w10"), **options)
    with pytest.warns(UserWarning, match="scored 4 of 4"):
        trainer.train()
    assert logs(trainer, "loss") == [0.0]
    assert logs(trainer, "rewards/NeverJudges/mean") == [None]


@pytest.mark.parametrize("reward", [0.1, 0.1 + 0.2, 1e8])
@pytest.mark.parametrize("group", [3, 4])
@pytest.mark.parametrize("scale", ["group", "batch"])
def test_equal_rewards_give_exactly_nothing(tmp_path, reward, group, scale):
    grabber = GradientGrabber()
    args = grpo_config(
        tmp_path, num_generations=group, per_device_train_batch_size=2 * group, scale_rewards=scale, max_grad_norm=0.0
    )
    trainer = run(table_model(CHAIN_S), fixed(reward), args, prompts("w10", "w10"), callbacks=[grabber])
    assert logs(trainer, "loss") == [0.0]
    assert logs(trainer, "reward_std") == [0.0]
    assert logs(trainer, "frac_reward_zero_std") == [1.0]
    assert len(grabber.steps[0]) > 0
    assert not any(g.any() for g in grabber.steps[0].values())


def test_normalize_then_sum_with_equal_rewards_gives_nothing_either(tmp_path):
    args = grpo_config(tmp_path, multi_objective_aggregation="normalize_then_sum")
    trainer = run(table_model(CHAIN_S), fixed(0.1 + 0.2), args, prompts("w10"))
    assert logs(trainer, "loss") == [0.0]


def test_evaluation_with_groups_of_one_is_finite(tmp_path):
    args = grpo_config(tmp_path, num_generations_eval=1, per_device_eval_batch_size=3)
    dataset = prompts("w10", "w10", "w10")
    trainer = make(table_model(CHAIN_S), fixed(0.3, 0.7, 0.5), args, dataset, eval_dataset=dataset)
    metrics = trainer.evaluate()
    assert metrics["eval_reward"] == pytest.approx(0.5)
    assert metrics["eval_reward_std"] == 0.0
    assert metrics["eval_loss"] == 0.0
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        ("group", [-0.70701, 0.70701]),
        ("batch", [-0.70701, 0.70701]),
        ("none", [-0.5, 0.5]),
        (True, [-0.70701, 0.70701]),
    ],
)
def test_scale_rewards(tmp_path, scale, expected):
    args = grpo_config(tmp_path, scale_rewards=scale, num_generations=2, per_device_train_batch_size=2)
    trainer = make(table_model(CHAIN_S), fixed(0.0, 1.0), args, prompts("w10"))
    advantages = trainer.collect([trainer.train_dataset[0]] * 2).advantages.tolist()
    assert advantages == pytest.approx(expected, abs=1e-5)


# ---- RLOO: each completion against the mean of the others ----


def rloo(folder, reward, *, group=4, **changes):
    """A trainer with two groups of one prompt, and what it copies of the gradients."""
    sizes = METHODS["rloo"].sizes(2 * group) | {"num_generations": group}
    args = METHODS["rloo"].make_config(folder, **(sizes | {"max_grad_norm": 0.0} | changes))
    grabber, model = GradientGrabber(), table_model(CHAIN_S)
    trainer = METHODS["rloo"].make(args, prompts("w10", "w10"), model, reward_funcs=reward, callbacks=[grabber])
    return trainer, grabber


@pytest.mark.parametrize("beta", [0.0, 0.05])  # at the start the policy is the reference
def test_rloo_an_unscored_completion_stays_out_of_the_baseline(tmp_path, beta):
    trainer, _ = rloo(tmp_path, fixed(None, 0.0, 1.0, None), beta=beta)
    with pytest.warns(UserWarning, match="scored 2 of 4"):
        advantages = collected(trainer)
    assert advantages == [0.0, -1.0, 1.0, 0.0]
    metrics = trainer.metrics["train"].flush(trainer.processes.gather)
    assert metrics["reward"] == 0.5
    assert metrics["reward_std"] == pytest.approx(0.70711, abs=1e-5)


def test_rloo_a_completion_without_scored_siblings_has_nothing_to_compare_with(tmp_path):
    trainer, _ = rloo(tmp_path, fixed(None, None, 7.0, None))
    with pytest.warns(UserWarning, match="scored 3 of 4"):
        assert collected(trainer) == [0.0, 0.0, 0.0, 0.0]


def test_rloo_a_group_that_nobody_scored_has_no_loss_and_no_gradient_and_warns_once(tmp_path):
    trainer, grabber = rloo(tmp_path, fixed(None), max_steps=2)
    with pytest.warns(UserWarning, match="scored 8 of 8") as caught:
        trainer.train()
    assert len(caught) == 1
    assert logs(trainer, "loss") == [0.0, 0.0]
    assert logs(trainer, "reward") == [None, None]
    assert len(grabber.steps) == 2
    assert not any(g.any() for step in grabber.steps for g in step.values())


def test_rloo_the_same_holds_for_reward_modules_alone(tmp_path):
    args = METHODS["rloo"].make_config(tmp_path)
    options = {"reward_funcs": [NeverJudges()], "reward_processing_classes": [word_tokenizer()]}
    trainer = METHODS["rloo"].make(args, prompts("w10", "w10"), table_model(CHAIN_S), **options)
    with pytest.warns(UserWarning, match="scored 8 of 8"):
        trainer.train()
    assert logs(trainer, "loss") == [0.0]
    assert logs(trainer, "rewards/NeverJudges/mean") == [None]


@pytest.mark.parametrize("reward", [0.1, 0.1 + 0.2, 1e8])
@pytest.mark.parametrize("group", [3, 4])
@pytest.mark.parametrize("changes", [{}, {"beta": 0.0}, {"normalize_advantages": True}], ids=str)
def test_rloo_equal_rewards_give_exactly_nothing(tmp_path, reward, group, changes):
    trainer, grabber = rloo(tmp_path, fixed(reward), group=group, **changes)
    trainer.train()
    assert logs(trainer, "loss") == [0.0]
    assert logs(trainer, "reward_std") == [0.0]
    assert logs(trainer, "frac_reward_zero_std") == [1.0]
    assert len(grabber.steps[0]) > 0
    assert not any(g.any() for g in grabber.steps[0].values())


def test_rloo_evaluation_with_groups_of_one_is_finite(tmp_path):
    args = METHODS["rloo"].make_config(tmp_path, num_generations_eval=1, per_device_eval_batch_size=3)
    dataset = prompts("w10", "w10", "w10")
    options = {"reward_funcs": fixed(0.3, 0.7, 0.5), "eval_dataset": dataset}
    metrics = METHODS["rloo"].make(args, dataset, table_model(CHAIN_S), **options).evaluate()
    assert metrics["eval_reward"] == pytest.approx(0.5)
    assert metrics["eval_reward_std"] == 0.0
    assert metrics["eval_loss"] == 0.0
    assert all(math.isfinite(value) for value in metrics.values())
