"""What every online method reads and writes: evaluation sets, streams, tables of completions."""

import math

import pyarrow.parquet
import pytest
from datasets import Dataset
from fixtures.models import random_model
from fixtures.online_methods import (
    COMMON_METRICS,
    METHODS,
    PROMPTS,
    Stream,
    quick_collections,
    recorded_rounds,
    same_weights,
    scripted_engine,
    timeless,
    variety,
    weights_of,
)
from fixtures.runs import logs, prompts

SOME = prompts("w10", "w11", "w12 w13", "w14")
ENGINES = {"local": lambda: None, "scripted": scripted_engine}

every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
every_engine = pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
_quick = pytest.fixture(scope="module", autouse=True)(quick_collections)


# ---- evaluation ----


@every_engine
@every_method
def test_evaluation_is_finite_and_leaves_training_alone(tmp_path, method, engine):
    model = random_model()
    args = method.make_config(tmp_path, learning_rate=1e-2, **method.frozen)
    trainer = method.make(args, PROMPTS, model, engine=engine(), eval_dataset=SOME)
    rounds, before = recorded_rounds(trainer), weights_of(model)
    metrics = trainer.evaluate()
    assert sum(map(len, rounds)) == 4 * method.group_size
    of_training = {"grad_norm", "learning_rate", "num_tokens", "step_time", "epoch", "step"}
    assert metrics.keys() >= {f"eval_{name}" for name in (COMMON_METRICS | method.metrics) - of_training}
    assert all(math.isfinite(value) for value in metrics.values() if value is not None)
    assert same_weights(before, weights_of(model))
    assert trainer.state.num_input_tokens_seen == 0
    assert not any(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("name", ["rloo", "online-dpo", "distillation"])  # GRPO's default divides by a batch's tokens
def test_evaluation_does_not_depend_on_the_batch_size(tmp_path, name):
    method = METHODS[name]
    one = method.group_size // method.batch_unit

    def evaluate(count):
        args = method.make_config(tmp_path, per_device_eval_batch_size=count * one)
        return timeless(method.make(args, PROMPTS, engine=scripted_engine(), eval_dataset=SOME).evaluate())

    together = evaluate(4)
    assert evaluate(2) == pytest.approx(together, abs=1e-5)
    assert evaluate(3) == pytest.approx(together, abs=1e-5)


@every_method
def test_an_evaluation_batch_may_have_any_number_of_prompts(tmp_path, method):
    one = method.group_size // method.batch_unit
    args = method.make_config(tmp_path, per_device_eval_batch_size=3 * one)
    trainer = method.make(args, PROMPTS, engine=scripted_engine(), eval_dataset=SOME)
    rounds = recorded_rounds(trainer)
    assert math.isfinite(trainer.evaluate()["eval_loss"])
    assert [len(round_) for round_ in rounds] == [3 * method.group_size, method.group_size]


@every_method
def test_a_dict_of_evaluation_sets_while_training(tmp_path, method):
    sets = {"short": prompts("w10", "w11"), "long": prompts("w10 w20 w30", "w11 w21 w31")}
    args = method.make_config(tmp_path, max_steps=2, eval_strategy="steps", eval_steps=1)
    trainer = method.make(args, PROMPTS, engine=scripted_engine(), eval_dataset=sets)
    rounds = recorded_rounds(trainer)
    trainer.train()
    for name in sets:
        assert len(logs(trainer, f"eval_{name}_loss")) == 2
        assert all(math.isfinite(value) for value in logs(trainer, f"eval_{name}_loss"))
    group = 2 * method.group_size
    assert [[len(prompt) for prompt, _ in round_] for round_ in rounds] == 2 * [[2] * 8, [1] * group, [3] * group]
    assert trainer.evaluate(sets["long"], metric_key_prefix="held_out").keys() >= {"held_out_loss"}


# ---- streams ----


@pytest.mark.parametrize("library", ["torch", "datasets"])
@every_engine
@every_method
def test_streams_are_read_in_their_order(tmp_path, method, engine, library):
    def stream(first, count):
        rows = Stream(first, count)
        return rows if library == "torch" else Dataset.from_list(list(rows)).to_iterable_dataset()

    args = method.make_config(tmp_path, max_steps=3, **method.sizes(4, 2))
    trainer = method.make(args, stream(20, 30), engine=engine(), eval_dataset=stream(60, 4))
    rounds = recorded_rounds(trainer)
    trainer.train()
    assert trainer.state.global_step == 3
    first = [prompt[0] for round_ in rounds for prompt, _ in round_]
    assert first == [20 + i // method.group_size for i in range(3 * 8)]
    rounds.clear()
    assert math.isfinite(trainer.evaluate()["eval_loss"])
    first = [prompt[0] for round_ in rounds for prompt, _ in round_]
    assert first == [60 + i // method.group_size for i in range(4 * method.group_size)]


# ---- the table of completions ----


@every_method
def test_the_table_of_completions_is_stored(tmp_path, method, capsys):
    args = method.make_config(tmp_path, max_steps=2, log_completions=True, num_completions_to_print=1)
    trainer = method.make(args, PROMPTS, engine=scripted_engine(), eval_dataset=prompts("w10", "w11"))
    rounds = recorded_rounds(trainer)
    trainer.train()
    trainer.evaluate()
    decode = trainer.processing_class.decode
    files = ["completions_00001.parquet", "completions_00002.parquet", "eval_completions_00002.parquet"]
    assert sorted(path.name for path in (tmp_path / "completions").iterdir()) == files
    for step, (file, round_) in enumerate(zip(files, rounds, strict=True)):
        table = pyarrow.parquet.read_table(tmp_path / "completions" / file)
        assert table.column_names == ["step", "prompt", "completion", *method.columns]
        rewards = variety([completion for _, completion in round_])
        for row, (prompt, completion), reward in zip(table.to_pylist(), round_, rewards, strict=True):
            assert (row["step"], row["prompt"]) == (step, decode(prompt))
            assert row["completion"] == decode(completion, skip_special_tokens=True)
            assert row.get("variety", reward) == pytest.approx(reward)
    assert "Step 2" in capsys.readouterr().out
