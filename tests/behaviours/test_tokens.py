"""Pad, EOS and BOS: ends are found without a mask made from the pad id, and prompts begin with one BOS."""

import copy

import pytest
from fixtures.models import CHAIN_S, table_model
from fixtures.runs import Recorder, by_length, grpo_config, logs, make, prompts, run
from fixtures.tokenizers import BOS, BOS_CHAT_TEMPLATE, EOS, word_tokenizer


@pytest.mark.parametrize("pad", ["eos", "none", "own"])
def test_the_real_end_is_found_whatever_the_pad_token(tmp_path, pad):
    tokenizer = word_tokenizer(pad=pad)
    before = copy.deepcopy(tokenizer.init_kwargs), tokenizer.pad_token, tokenizer.padding_side, tokenizer.chat_template
    recorder = Recorder()
    trainer = run(table_model(CHAIN_S), recorder, grpo_config(tmp_path), prompts("w10"), processing_class=tokenizer)
    assert set(map(tuple, recorder.completions)) <= {(11, 12, EOS), (11, 13, 14, 15, EOS)}
    assert logs(trainer, "completions/clipped_ratio") == [0.0]
    assert logs(trainer, "completions/mean_length")[0] == sum(recorder.lengths) / 4
    assert logs(trainer, "num_tokens") == [4 + sum(recorder.lengths)]
    after = tokenizer.init_kwargs, tokenizer.pad_token, tokenizer.padding_side, tokenizer.chat_template
    assert before == after


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("w10 w20", [BOS, 10, 20]),
        ("<bos> w10", [BOS, 10]),
        ("", [BOS]),
        ([{"role": "user", "content": "w10"}], [BOS, 4, 6, 10, 5, 4, 6]),
    ],
)
def test_one_bos_in_every_kind_of_prompt_and_the_same_ids_everywhere(tmp_path, prompt, ids):
    model = table_model(CHAIN_S)
    seen = []

    def note(module, args, kwargs):
        seen.append(kwargs["input_ids"][0].tolist())

    model.register_forward_pre_hook(note, with_kwargs=True)
    tokenizer = word_tokenizer(add_bos=True, chat_template=BOS_CHAT_TEMPLATE)
    args = grpo_config(tmp_path, max_completion_length=2)
    trainer = make(model, _odd_first, args, [{"prompt": prompt}], processing_class=tokenizer)
    batch = trainer.collect([{"prompt": prompt}] * 4)
    assert batch.prompt_ids.tolist() == ids
    seen.clear()
    trainer.train()
    # The prompt alone while generating; prompt and completions while training.
    assert seen[0] == ids
    assert seen[-1][: len(ids)] == ids
    assert all(row.count(BOS) <= 1 for row in seen)


def _odd_first(completion_ids, **kwargs):
    return [float(i % 2) for i in range(len(completion_ids))]


def test_a_completion_keeps_the_format_of_its_prompt(tmp_path):
    recorder = Recorder()
    run(table_model(CHAIN_S), recorder, grpo_config(tmp_path), prompts("w10"))
    assert recorder.calls[0]["completions"][0] in ("w11 w12", "w11 w13 w14 w15")
    chat = Recorder()
    chain = {**CHAIN_S, 6: {11: 1.0}}
    rows = [{"prompt": [{"role": "user", "content": "w10"}]}]
    run(table_model(chain), chat, grpo_config(tmp_path), rows)
    completion = chat.calls[0]["completions"][0]
    assert [m["role"] for m in completion] == ["assistant"]
    assert completion[0]["content"] in ("w11 w12", "w11 w13 w14 w15")


def test_a_tokenizer_and_a_model_without_any_eos_are_refused(tmp_path):
    tokenizer = word_tokenizer()
    tokenizer.eos_token = None
    model = table_model(CHAIN_S)
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    with pytest.raises(ValueError, match="end-of-sequence"):
        make(model, by_length, grpo_config(tmp_path), prompts("w10"), processing_class=tokenizer)
