"""Which prompts are used when, and what fields without a value do."""

from collections import Counter

import pytest
from datasets import Dataset
from fixtures.models import CHAIN_S, table_model
from fixtures.runs import Recorder, grpo_config, logs, make, prompts, run
from fixtures.tokenizers import word_tokenizer


def constant(completion_ids, **kwargs):
    return [0.0] * len(completion_ids)


def test_fewer_prompts_than_one_generation_batch_needs(tmp_path):
    args = grpo_config(tmp_path, per_device_train_batch_size=8, max_steps=-1, num_train_epochs=1)
    trainer = make(table_model(CHAIN_S), constant, args, prompts("w10"))
    with pytest.raises(ValueError, match="needs at least 2 prompts, has 1"):
        trainer.train()


@pytest.mark.parametrize("num_iterations", [1, 2])
@pytest.mark.parametrize("steps_per_generation", [1, 2])
def test_every_generation_has_distinct_prompts_and_epochs_drop_different_ones(
    tmp_path, num_iterations, steps_per_generation
):
    recorder = Recorder(constant)
    args = grpo_config(
        tmp_path,
        per_device_train_batch_size=8 // steps_per_generation,
        steps_per_generation=steps_per_generation,
        num_iterations=num_iterations,
        max_steps=-1,
        num_train_epochs=2,
    )
    trainer = run(table_model(CHAIN_S), recorder, args, prompts(*(f"w{i}" for i in range(10, 15))))
    assert trainer.state.global_step == 2 * 2 * num_iterations * steps_per_generation
    assert len(recorder.calls) == 4  # two generations an epoch
    assert all(sorted(Counter(call["prompts"]).values()) == [4, 4] for call in recorder.calls)
    dropped = []
    for epoch in (recorder.calls[:2], recorder.calls[2:]):
        used = [prompt for call in epoch for prompt in set(call["prompts"])]
        assert len(used) == len(set(used)) == 4
        dropped.append({f"w{i}" for i in range(10, 15)} - set(used))
    assert dropped[0] != dropped[1]


def test_the_same_epochs_come_when_the_same_trainer_trains_again(tmp_path):
    recorder = Recorder(constant)
    args = grpo_config(tmp_path, max_steps=-1, num_train_epochs=2)
    trainer = make(table_model(CHAIN_S), recorder, args, prompts(*(f"w{i}" for i in range(10, 15))))
    trainer.train()
    callbacks = len(trainer.callback_handler.callbacks)
    trainer.train()
    order = [call["prompts"][0] for call in recorder.calls]
    assert order[:10] == order[10:]
    assert len(trainer.callback_handler.callbacks) == callbacks


def test_prompts_keep_their_order_without_shuffling(tmp_path):
    recorder = Recorder(constant)
    args = grpo_config(tmp_path, shuffle_dataset=False, max_steps=3)
    run(table_model(CHAIN_S), recorder, args, prompts("w12", "w11", "w10"))
    assert [call["prompts"] for call in recorder.calls] == [["w12"] * 4, ["w11"] * 4, ["w10"] * 4]


def test_fields_filled_with_none_do_not_change_the_rendering(tmp_path):
    """Both conversations get the key `name` from the table format; the template prints w9 where it exists."""
    template = (
        "{% for message in messages %}{% if 'name' in message %}w9 {% endif %}{{ message['content'] }} {% endfor %}"
    )
    dataset = Dataset.from_dict(
        {
            "prompt": [
                [{"role": "user", "content": "w10", "name": "w8"}],
                [{"role": "user", "content": "w10"}],
            ]
        }
    )
    assert dataset[1]["prompt"][0]["name"] is None
    args = grpo_config(tmp_path, shuffle_dataset=False, max_steps=2)
    tokenizer = word_tokenizer(chat_template=template)
    trainer = make(table_model(CHAIN_S), constant, args, dataset, processing_class=tokenizer)
    assert trainer.encode([row["prompt"] for row in dataset]) == [[9, 10], [10]]
    trainer.train()
    assert trainer.state.global_step == 2


def test_an_empty_prompt_starts_from_bos(tmp_path):
    chain = {3: {11: 1.0}, **CHAIN_S}
    recorder = Recorder(constant)
    run(table_model(chain), recorder, grpo_config(tmp_path), prompts(""))
    assert {ids[0] for ids in recorder.completions} == {11}


def test_an_empty_prompt_without_bos_is_a_named_error(tmp_path):
    tokenizer = word_tokenizer()
    tokenizer.bos_token = None
    trainer = make(table_model(CHAIN_S), constant, grpo_config(tmp_path), prompts(""), processing_class=tokenizer)
    with pytest.raises(ValueError, match="no tokens, and the tokenizer has no BOS"):
        trainer.train()


def test_a_prompt_of_none_is_a_named_error(tmp_path):
    trainer = make(table_model(CHAIN_S), constant, grpo_config(tmp_path, max_steps=2), prompts("w10", None))
    with pytest.raises(ValueError, match="`prompt` is None"):
        trainer.train()


def test_none_and_nested_records_reach_reward_functions_untouched(tmp_path):
    recorder = Recorder(constant)
    dataset = prompts("w10", "w11", answer=["yes", None], record=[{"a": 1, "b": None}, {"a": None, "b": [2, None]}])
    run(table_model(CHAIN_S), recorder, grpo_config(tmp_path, per_device_train_batch_size=8), dataset)
    call = recorder.calls[0]
    for prompt, answer, record in zip(call["prompts"], call["answer"], call["record"], strict=True):
        expected = dataset[["w10", "w11"].index(prompt)]
        assert (answer, record) == (expected["answer"], expected["record"])


def test_a_column_that_only_some_rows_have_reaches_reward_functions_with_none(tmp_path):
    recorder = Recorder(constant)
    rows = [{"prompt": "w10"}, {"prompt": "w11", "answer": 3}]
    run(table_model(CHAIN_S), recorder, grpo_config(tmp_path, per_device_train_batch_size=8), rows)
    call = recorder.calls[0]
    assert [(p, a) for p, a in zip(call["prompts"], call["answer"], strict=True)] == [
        (p, 3 if p == "w11" else None) for p in call["prompts"]
    ]


def test_training_goes_over_every_prompt_once_an_epoch(tmp_path):
    recorder = Recorder(constant)
    args = grpo_config(tmp_path, max_steps=-1, num_train_epochs=1)
    trainer = run(table_model(CHAIN_S), recorder, args, prompts("w10", "w11", "w12"))
    assert sorted(call["prompts"][0] for call in recorder.calls) == ["w10", "w11", "w12"]
    assert logs(trainer, "epoch")[-1] == 1.0
