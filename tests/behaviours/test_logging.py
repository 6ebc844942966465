"""Names of users never take the place of ours, and the table holds every completion of the step once."""

import pyarrow.parquet
import pytest
from fixtures.models import CHAIN_S, table_model
from fixtures.runs import Recorder, by_length, grpo_config, logs, make, prompts, run


def table(folder, name):
    return pyarrow.parquet.read_table(folder / "completions" / name).to_pylist()


def meddling(completions, log_extra, log_metric, **kwargs):
    count = len(completions)
    for name in ("step", "prompt", "completion", "advantage", "meddling", "mine"):
        log_extra(name, [f"{name} {i}" for i in range(count)])
    for name in ("reward", "loss", "learning_rate", "num_tokens", "epoch", "step", "mine"):
        log_metric(name, 99.0)
    return [0.25, 0.75] * (count // 2)


def test_core_columns_and_metrics_keep_their_values(tmp_path):
    args = grpo_config(tmp_path, log_completions=True)
    trainer = run(table_model(CHAIN_S), meddling, args, prompts("w10"))
    logged = trainer.state.log_history[0]
    assert logged["reward"] == 0.5
    assert logged["loss"] != 99
    assert (logged["step"], logged["epoch"], logged["learning_rate"]) == (1, 1.0, 0.0)
    assert logged["mine"] == 99
    for name in ("reward", "loss", "learning_rate", "num_tokens", "epoch", "step"):
        assert logged[f"logged/{name}"] == 99
    rows = table(tmp_path, "completions_00001.parquet")
    assert [row["prompt"] for row in rows] == ["w10"] * 4
    assert [row["meddling"] for row in rows] == [0.25, 0.75, 0.25, 0.75]
    assert [row["mine"] for row in rows] == [f"mine {i}" for i in range(4)]
    assert [row["logged/advantage"] for row in rows] == [f"advantage {i}" for i in range(4)]
    assert [row["logged/step"] for row in rows] == [f"step {i}" for i in range(4)]


def test_the_same_in_evaluation(tmp_path):
    trainer = make(
        table_model(CHAIN_S), meddling, grpo_config(tmp_path), prompts("w10"), eval_dataset=prompts("w10", "w10")
    )
    metrics = trainer.evaluate()
    assert metrics["eval_reward"] == 0.5
    assert metrics["eval_loss"] != 99
    assert metrics["eval_logged/loss"] == metrics["eval_logged/reward"] == metrics["eval_mine"] == 99


def test_two_functions_of_one_name_have_two_curves(tmp_path):
    first, second = (
        (lambda completions, **_: [1.0] * len(completions)),
        (lambda completions, **_: [3.0] * len(completions)),
    )
    with pytest.warns(UserWarning, match="same name"):
        trainer = run(table_model(CHAIN_S), [first, second], grpo_config(tmp_path), prompts("w10"))
    means = sorted(
        v for k, v in trainer.state.log_history[0].items() if k.startswith("rewards/") and k.endswith("mean")
    )
    assert means == [1.0, 3.0]


@pytest.mark.parametrize("steps_per_generation", [1, 2, 4])
def test_the_table_has_every_completion_of_an_accumulated_step_once(tmp_path, steps_per_generation):
    recorder = Recorder()
    args = grpo_config(
        tmp_path,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        steps_per_generation=steps_per_generation,
        log_completions=True,
    )
    trainer = run(table_model(CHAIN_S), recorder, args, prompts("w10", "w20 w10", "w21 w10", "w22 w10"))
    rows = table(tmp_path, "completions_00001.parquet")
    seen = [
        (p, c, float(r))
        for call, rewards in zip(recorder.calls, recorder.rewards, strict=True)
        for p, c, r in zip(call["prompts"], call["completions"], rewards, strict=True)
    ]
    assert len(rows) == 16
    assert sorted((row["prompt"], row["completion"], row["recorder"]) for row in rows) == sorted(seen)
    assert logs(trainer, "reward")[0] == pytest.approx(sum(row["recorder"] for row in rows) / 16)


def test_steps_between_two_logs_and_evaluations_keep_their_tables(tmp_path):
    args = grpo_config(
        tmp_path, max_steps=3, logging_steps=2, log_completions=True, eval_strategy="steps", eval_steps=2
    )
    run(table_model(CHAIN_S), by_length, args, prompts("w10"), eval_dataset={"easy": prompts("w20 w10")})
    folder = tmp_path / "completions"
    tables = {path.name for path in folder.iterdir()}
    # The last step is evaluated too.
    assert tables == {f"{p}completions_0000{step}.parquet" for p in ("", "eval_easy_") for step in (2, 3)}
    assert {row["prompt"] for row in table(tmp_path, "completions_00002.parquet")} == {"w10"}
    assert {row["prompt"] for row in table(tmp_path, "eval_easy_completions_00002.parquet")} == {"w20 w10"}
    assert [row["step"] for row in table(tmp_path, "completions_00003.parquet")] == [2] * 4


def test_columns_that_come_later_are_in_the_table(tmp_path):
    def sometimes(completions, log_extra, trainer_state, **kwargs):
        if trainer_state.global_step == 0:
            log_extra("late", ["x"] * len(completions))
        return [0.0] * len(completions)

    args = grpo_config(tmp_path, log_completions=True, gradient_accumulation_steps=2, steps_per_generation=1)
    run(table_model(CHAIN_S), sometimes, args, prompts("w10", "w20 w10"))
    assert {row["late"] for row in table(tmp_path, "completions_00001.parquet")} == {"x"}


def test_a_logged_column_of_another_length_is_refused(tmp_path):
    def short(completions, log_extra, **kwargs):
        log_extra("note", ["x"])
        return [0.0] * len(completions)

    trainer = make(table_model(CHAIN_S), short, grpo_config(tmp_path), prompts("w10"))
    with pytest.raises(ValueError, match="'note' has 1 values for 4 completions"):
        trainer.train()
