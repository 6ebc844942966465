"""Reward functions in a run: refused when they break their contract, concurrent when they are async."""

import asyncio

import pytest
import torch
from fixtures.models import CHAIN_S, table_model
from fixtures.runs import Recorder, by_length, grpo_config, logs, make, prompts, run


def judge(values):
    def judge(completions, **kwargs):
        return values

    return judge


def async_judge(values):
    async def judge(completions, **kwargs):
        await asyncio.sleep(0)
        return values

    return judge


@pytest.mark.parametrize("kind", [judge, async_judge])
@pytest.mark.parametrize(
    ("values", "got"), [([1.0], "1 value"), ([1.0, 2.0, 3.0], "3 values"), (None, "0 values"), (1.0, "float")]
)
def test_a_wrong_number_of_values_stops_the_run_before_any_update(tmp_path, kind, values, got):
    model = table_model(CHAIN_S)
    before = {n: p.clone() for n, p in model.named_parameters()}
    trainer = make(model, kind(values), grpo_config(tmp_path, learning_rate=1.0), prompts("w10"))
    with pytest.raises(ValueError, match=f"`judge` returned .*{got}.* for 4 completions"):
        trainer.train()
    assert trainer.state.global_step == 0
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def asleep(name, value, seconds):
    async def reward(completions, **kwargs):
        await asyncio.sleep(seconds)
        return [value] * len(completions)

    reward.__name__ = name
    return reward


def test_async_rewards_run_side_by_side_and_are_summed_with_their_weights(tmp_path):
    arrived = []

    async def together(completions, **kwargs):
        """Ends only when both are under way: one after the other would never end."""
        arrived.append(len(arrived))
        while len(arrived) < 2:
            await asyncio.sleep(0.001)
        return [2.0] * len(completions)

    async def as_well(completions, **kwargs):
        return [v + 1 for v in await together(completions)]

    args = grpo_config(tmp_path, reward_weights=[1.0, 10.0, 0.5])
    trainer = run(table_model(CHAIN_S), [together, as_well, by_length], args, prompts("w10"))
    expected = 2.0 + 10 * 3.0 + 0.5 * logs(trainer, "completions/mean_length")[0]
    assert logs(trainer, "reward")[0] == pytest.approx(expected)
    assert logs(trainer, "rewards/together/mean") == [2.0]


def test_an_exception_of_an_async_reward_reaches_the_caller_and_training_works_again(tmp_path):
    fail = [True]

    async def fragile(completions, **kwargs):
        if fail:
            raise KeyError("boom")
        return [0.0] * len(completions)

    trainer = make(table_model(CHAIN_S), fragile, grpo_config(tmp_path), prompts("w10"))
    with pytest.raises(KeyError, match="boom"):
        trainer.train()
    fail.clear()
    trainer.train()
    assert trainer.state.global_step == 1


def test_async_rewards_work_below_a_running_event_loop(tmp_path):
    async def main():
        return run(table_model(CHAIN_S), asleep("nap", 1.5, 0.01), grpo_config(tmp_path), prompts("w10"))

    assert logs(asyncio.run(main()), "reward") == [1.5]


def test_columns_reach_reward_functions_aligned_with_their_completions(tmp_path):
    recorder = Recorder()
    args = grpo_config(tmp_path, per_device_train_batch_size=8)
    dataset = prompts("w10", "w11", answer=["ten", "eleven"])
    run(table_model(CHAIN_S), recorder, args, dataset)
    call = recorder.calls[0]
    assert sorted(set(zip(call["prompts"], call["answer"], strict=True))) == [("w10", "ten"), ("w11", "eleven")]
    assert call["prompts"][::4] == call["prompts"][3::4]
    assert call["trainer_state"].max_steps == 1
    assert callable(call["log_extra"])
    assert callable(call["log_metric"])
