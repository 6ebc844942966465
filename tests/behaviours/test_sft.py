"""Supervised fine-tuning against plain torch: the same loss and gradient in every cut, packing and layout.

Run as a program (`python test_sft.py FOLDER`) this is one process of a run on several.
"""

import copy
import json
import math
import os
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from datasets import Dataset
from fixtures.models import family_model, random_model, table_model
from fixtures.runs import GradientGrabber, assert_same_gradients, logs
from fixtures.tokenizers import BOS_CHAT_TEMPLATE, bpe_tokenizer, word_tokenizer

from trl.errors import ConfigError
from trl.models.forward import token_logps
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
IGNORED = -100
LN2 = math.log(2)

TEXTS = [" ".join(f"w{10 + (7 * i + j * j) % 40}" for j in range(n)) for i, n in enumerate((3, 5, 4, 6, 2, 7, 3, 2))]
PROMPTED = {
    "prompt": [f"w{10 + i} w{20 + i}" for i in range(6)],
    "completion": [
        " " + " ".join(f"w{10 + (5 * i + 3 * j) % 50}" for j in range(n)) for i, n in enumerate((1, 9, 2, 8, 3, 7))
    ],
}
MARKED = (
    "{% for message in messages %}<open> {{ message['role'] }} "
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }} <close>{% endgeneration %} "
    "{% else %}{{ message['content'] }} <close> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<open> assistant{% endif %}"
)


def ids_of(text):
    return [int(word[1:]) for word in text.split()]


def text_rows():
    """Ids and labels of `TEXTS`: all tokens and EOS."""
    return [([*ids_of(text), 1], [*ids_of(text), 1]) for text in TEXTS]


def prompted_rows():
    pairs = [(ids_of(p), [*ids_of(c), 1]) for p, c in zip(*PROMPTED.values(), strict=True)]
    return [(prompt + completion, [IGNORED] * len(prompt) + completion) for prompt, completion in pairs]


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def sft_config(folder: Any, **changes: Any) -> SFTConfig:
    """Learning rate 0, one step over batches of 8 in order, gradients that are not clipped, nothing saved."""
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "learning_rate": 0.0,
        "per_device_train_batch_size": 8,
        "train_sampling_strategy": "sequential",
        "max_grad_norm": 1e9,
        "max_steps": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "seed": 0,
    }
    return SFTConfig(**(settings | changes))


def make(folder, data, model=None, tokenizer=None, grabber=None, eval_dataset=None, formatting_func=None, **changes):
    dataset = Dataset.from_list(data) if isinstance(data, list) else Dataset.from_dict(data)
    return SFTTrainer(
        random_model() if model is None else model,
        sft_config(folder, **changes),
        train_dataset=dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer or word_tokenizer(),
        callbacks=[grabber] if grabber else None,
        formatting_func=formatting_func,
    )


def step(folder, data, **options):
    """Losses, gradient norms and gradients of a run."""
    grabber = GradientGrabber()
    trainer = make(folder, data, grabber=grabber, **options)
    trainer.train()
    return logs(trainer, "loss"), logs(trainer, "grad_norm"), grabber.steps


def plain(rows, dft=False, model=None):
    """Loss, gradient norm and gradients by one forward pass per row of the model as transformers has it."""
    model = model or random_model()
    total, count = torch.zeros(()), 0
    for ids, labels in rows:
        logps = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        logps = logps[range(len(ids) - 1), ids[1:]]
        learnt = torch.tensor(labels[1:]) != IGNORED
        total = total - (logps * (logps.detach().exp() if dft else 1.0))[learnt].sum()
        count += int(learnt.sum())
    (total / count).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    norm = torch.stack([g.norm() for g in gradients.values()]).norm().item()
    return (total / count).item(), norm, gradients


def assert_is_plain(found, rows, dft=False, model=None):
    losses, norms, gradients = found
    loss, norm, expected = plain(rows, dft, model)
    assert losses == pytest.approx([loss], abs=1e-5)
    assert norms == pytest.approx([norm], rel=1e-5)
    assert_same_gradients(expected, gradients[0], 2e-5)


# ---- the loss is a mean over the tokens of the optimizer step ----


@pytest.mark.parametrize(("batch", "accumulation"), [(2, 1), (1, 2)])
def test_a_token_mean_has_its_closed_form(tmp_path, batch, accumulation):
    """Two tokens of ln 2 and four of 3 ln 2: 14/6 ln 2 = 1.617343, where a mean of means has 2 ln 2 = 1.386294."""
    chain = {20: {30: 0.5, 7: 0.5}, 30: {1: 0.5, 7: 0.5}}
    chain |= {token: {following: 1 / 8, 7: 7 / 8} for token, following in ((21, 40), (40, 41), (41, 42), (42, 1))}
    data = {"prompt": ["w20", "w21"], "completion": [" w30", " w40 w41 w42"]}
    sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
    losses, _, _ = step(tmp_path, data, model=table_model(chain), **sizes)
    assert losses == pytest.approx([14 / 6 * LN2], abs=1e-5)
    assert losses == pytest.approx([1.617343], abs=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("batch", "accumulation"), [(6, 1), (3, 2), (2, 3), (1, 6)])
def test_every_split_is_the_plain_loss(tmp_path, batch, accumulation, attention):
    sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
    found = step(tmp_path, PROMPTED, model=random_model(attn_implementation=attention), **sizes)
    assert_is_plain(found, prompted_rows())


@pytest.mark.parametrize(("batch", "accumulation"), [(1, 4), (4, 1), (2, 2)])
def test_a_last_step_of_fewer_rows_divides_by_what_it_holds(tmp_path, batch, accumulation):
    sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
    losses, norms, gradients = step(tmp_path, PROMPTED, max_steps=-1, num_train_epochs=1, **sizes)
    windows = [prompted_rows()[:4], prompted_rows()[4:]]
    assert len(losses) == 2
    for i, window in enumerate(windows):
        assert_is_plain((losses[i : i + 1], norms[i : i + 1], gradients[i : i + 1]), window)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("budget", [1, 7, 12, 30, 1000])
def test_a_token_budget_changes_nothing(tmp_path, budget, attention):
    model = random_model(attn_implementation=attention)
    found = step(tmp_path, PROMPTED, model=model, max_tokens_per_micro_batch=budget)
    assert_is_plain(found, prompted_rows())


def test_dft_weighs_each_token_by_its_probability(tmp_path):
    """Tokens of probability 1/2 (two) and 1/8 (one): -(2 * 1/2 ln 1/2 + 1/8 ln 1/8) / 3 = (1 + 3/8) / 3 ln 2."""
    chain = {20: {21: 0.5, 7: 0.5}, 21: {22: 1 / 8, 7: 7 / 8}, 22: {1: 0.5, 7: 0.5}}
    losses, _, _ = step(tmp_path, {"text": ["w20 w21 w22"]}, model=table_model(chain), loss_type="dft")
    assert losses == pytest.approx([1.375 / 3 * LN2], abs=1e-6)


# ---- packed, without padding, padded ----

LAYOUTS = {
    "rows": {},
    "padding_free": {"padding_free": True},
    "bfd": {"packing": True, "max_length": 16},
    "bfd_split": {"packing": True, "max_length": 16, "packing_strategy": "bfd_split"},
    "accumulated": {"packing": True, "max_length": 16, "per_device_train_batch_size": 1, "accumulation": True},
}


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_rows_have_the_loss_and_gradient_of_plain_ones(tmp_path, layout, attention, loss_type):
    changes = dict(LAYOUTS[layout])
    if changes.pop("accumulation", False):
        changes["gradient_accumulation_steps"] = 8  # more than the packed rows: the whole epoch
    model = random_model(attn_implementation=attention)
    found = step(tmp_path, {"text": TEXTS}, model=model, loss_type=loss_type, **changes)
    assert_is_plain(found, text_rows(), dft=loss_type == "dft")


@pytest.mark.parametrize("family", ["gpt2", "lfm2", "mistral", "gemma3_text"])
def test_families_that_cannot_be_packed_or_attend_to_a_window_are_right_too(tmp_path, family):
    changes = {"packing": True, "max_length": 16, "disable_dropout": True}
    found = step(tmp_path, {"text": TEXTS}, model=family_model(family), **changes)
    assert_is_plain(found, text_rows(), model=family_model(family))


def test_packing_keeps_prompts_out_of_the_loss(tmp_path):
    found = step(tmp_path, PROMPTED, packing=True, max_length=16)
    assert_is_plain(found, prompted_rows())


def test_long_texts_are_cut_by_bfd_and_split_by_bfd_split(tmp_path):
    """At 4 tokens a row. A piece starts anew: its first token is not learnt."""
    cut = [(ids[:4], ids[:4]) for ids, _ in text_rows()]
    split = [(ids[i : i + 4], ids[i : i + 4]) for ids, _ in text_rows() for i in range(0, len(ids), 4)]
    one_batch = {"packing": True, "max_length": 4, "per_device_train_batch_size": 16}
    assert_is_plain(step(tmp_path, {"text": TEXTS}, packing_strategy="bfd", **one_batch), cut)
    assert_is_plain(step(tmp_path, {"text": TEXTS}, packing_strategy="bfd_split", **one_batch), split)


def test_wrapped_rows_are_one_text_each(tmp_path):
    joined = [token for ids, _ in text_rows() for token in ids]
    rows = [(joined[i : i + 16], joined[i : i + 16]) for i in range(0, len(joined), 16)]
    assert_is_plain(step(tmp_path, {"text": TEXTS}, packing=True, packing_strategy="wrapped", max_length=16), rows)


def test_positions_begin_anew_with_every_text_and_neighbours_do_not_see_each_other(tmp_path):
    trainer = make(tmp_path, {"text": TEXTS}, packing=True, max_length=16)
    seen = []
    trainer.model.model.register_forward_pre_hook(lambda _, args, kw: seen.append(kw["position_ids"]), with_kwargs=True)
    trainer.train()
    (positions,) = seen
    assert positions.shape[0] == 1
    runs = "".join(map(str, positions[0].tolist())).split("0")[1:]
    # A text of n tokens and EOS is read up to its last word: positions 0 .. n - 1.
    assert sorted(len(run) + 1 for run in runs) == sorted(len(ids) - 1 for ids, _ in text_rows())
    assert all(run == "".join(map(str, range(1, len(run) + 1))) for run in runs)

    def logps(first):
        rows = [{"input_ids": [*first, 20, 21, 22, 1], "seq_lengths": [len(first), 4]}]
        return token_logps(trainer.model, trainer.collate(rows)).logps.detach()

    one, other = logps([10, 11, 12]), logps([40, 11, 12])
    assert (one[:2] - other[:2]).abs().max() > 1e-2
    torch.testing.assert_close(one[2:], other[2:], atol=1e-6, rtol=0)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_long_prompt_of_several_rows_is_read_once(tmp_path, attention):
    prompt = " ".join(f"w{10 + i % 30}" for i in range(40))
    data = {"prompt": [prompt] * 3 + ["w10"], "completion": [" w50 w51", " w52", " w50 w53 w54", " w50"]}
    rows = [(ids_of(p), [*ids_of(c), 1]) for p, c in zip(*data.values(), strict=True)]
    trainer = make(tmp_path, data, model=random_model(attn_implementation=attention))
    assert trainer.collate(list(trainer.train_dataset)).prompt_lengths.tolist() == [40, 1]
    found = step(tmp_path, data, model=random_model(attn_implementation=attention))
    assert_is_plain(found, [(p + c, [IGNORED] * len(p) + c) for p, c in rows])


# ---- what is learnt ----


def prepared(folder, data, **options):
    """`[(ids, labels), ...]` of the trainer's rows."""
    dataset = make(folder, data, **options).train_dataset
    return [(row["input_ids"], row["labels"]) for row in dataset]


def test_labels_of_a_conversation_start_after_the_generation_prompt(tmp_path):
    data = [{"prompt": [user("w20")], "completion": [assistant("w21")]}]
    expected = [([4, 6, 20, 5, 4, 6, 21, 5], [IGNORED] * 6 + [21, 5])]
    assert prepared(tmp_path, data) == expected


def test_a_merged_boundary_belongs_to_the_completion(tmp_path):
    """As one text, `ca` and `bcd` are c ab cd (5 7 8): `ab` reaches into the prompt, and eos is learnt."""
    with pytest.warns(UserWarning, match="1 of 1 rows"):
        rows = prepared(tmp_path, {"prompt": ["ca"], "completion": ["bcd"]}, tokenizer=bpe_tokenizer())
    assert rows == [([5, 7, 8, 1], [IGNORED, 7, 8, 1])]


TURNS = [{"messages": [user("w20"), assistant("w30 w31"), user("w21"), assistant("w32 w33 w34")]}]
# open user w20 close, open assistant [w30 w31 close], open user w21 close, open assistant [w32 w33 w34 close]
TURN_IDS = [4, 6, 20, 5, 4, 6, 30, 31, 5, 4, 6, 21, 5, 4, 6, 32, 33, 34, 5]
TURN_LABELS = [*[IGNORED] * 6, 30, 31, 5, *[IGNORED] * 6, 32, 33, 34, 5]


@pytest.mark.parametrize("template", ["marked", "plain"])
@pytest.mark.parametrize("max_length", [None, 17])
def test_the_assistant_alone_is_learnt_with_the_ends_of_its_turns(tmp_path, template, max_length):
    """A plain template gets markers; a cut through the second turn leaves what is before it."""
    tokenizer = word_tokenizer(chat_template=MARKED) if template == "marked" else word_tokenizer()
    before = tokenizer.chat_template
    options = {"tokenizer": tokenizer, "assistant_only_loss": True, "max_length": max_length}
    assert prepared(tmp_path, TURNS, **options) == [(TURN_IDS[:max_length], TURN_LABELS[:max_length])]
    assert tokenizer.chat_template == before
    found = step(tmp_path, TURNS, **options)
    assert_is_plain(found, [(TURN_IDS[:max_length], TURN_LABELS[:max_length])])


def test_assistant_and_completion_may_both_be_asked_for(tmp_path):
    data = [{"prompt": TURNS[0]["messages"][:3], "completion": TURNS[0]["messages"][3:]}]
    tokenizer = word_tokenizer(chat_template=MARKED)
    both = prepared(tmp_path, data, tokenizer=tokenizer, assistant_only_loss=True, completion_only_loss=True)
    assert both == [(TURN_IDS, [IGNORED] * 15 + TURN_LABELS[15:])]
    whole = prepared(tmp_path, data, tokenizer=tokenizer, assistant_only_loss=True, completion_only_loss=False)
    assert whole == [(TURN_IDS, TURN_LABELS)]


def test_a_template_that_tells_nothing_of_the_assistant_is_an_error(tmp_path):
    template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"  # no generation prompt
    with pytest.raises(ConfigError, match=r"training variant .*generation"):
        make(tmp_path, TURNS, tokenizer=word_tokenizer(chat_template=template), assistant_only_loss=True)


@pytest.mark.parametrize("pad", ["own", "eos", "none"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_end_is_learnt_once_whatever_the_pad_token(tmp_path, pad, attention):
    data = {"text": ["w10 w11 w12", "w20 <eos>", "w30"]}
    tokenizer = word_tokenizer(pad=pad)
    state = copy.deepcopy(tokenizer.init_kwargs), tokenizer.pad_token, tokenizer.eos_token
    rows = [([10, 11, 12, 1],) * 2, ([20, 1],) * 2, ([30, 1],) * 2]
    options = {"tokenizer": tokenizer, "model": random_model(attn_implementation=attention)}
    assert prepared(tmp_path, data, **options) == rows
    assert_is_plain(step(tmp_path, data, **options), rows)
    assert (tokenizer.init_kwargs, tokenizer.pad_token, tokenizer.eos_token) == state


@pytest.mark.parametrize(
    "row",
    [
        {"text": "w20 w21"},
        {"prompt": "w20", "completion": " w21"},
        {"messages": [user("w20"), assistant("w21")]},
        {"prompt": [user("w20")], "completion": [assistant("w21")]},
    ],
)
def test_every_row_begins_with_one_bos(tmp_path, row):
    tokenizer = word_tokenizer(add_bos=True, chat_template=BOS_CHAT_TEMPLATE)
    trainer = make(tmp_path, [row], tokenizer=tokenizer)
    seen = []
    trainer.model.model.register_forward_pre_hook(lambda _, args, kw: seen.append(kw["input_ids"]), with_kwargs=True)
    trainer.train()
    (ids,) = seen
    assert ids[0, 0] == 3
    assert (ids == 3).sum() == 1


def test_rows_that_differ_in_the_keys_of_their_messages_are_rendered_by_their_own(tmp_path):
    """A table fills the missing `name` with None, for which the template would print w9."""
    template = "{% for m in messages %}{% if 'name' in m %}w9 {% endif %}{{ m['content'] }} {% endfor %}"
    data = [{"messages": [{**user("w20"), "name": "x"}]}, {"messages": [user("w21")]}]
    rows = prepared(tmp_path, data, tokenizer=word_tokenizer(chat_template=template))
    assert [ids for ids, _ in rows] == [[9, 20], [21]]


# ---- steps in which little or nothing is learnt ----

SKIP = {"dataset_kwargs": {"skip_prepare_dataset": True}}


@pytest.mark.parametrize("budget", [None, 2])
def test_a_micro_step_without_a_learnt_token_adds_nothing(tmp_path, budget):
    rows = [([10, 11, 12], [IGNORED] * 3), ([20, 21, 22, 23], [IGNORED, 21, 22, IGNORED]), ([9], [9])]
    data = [{"input_ids": ids, "labels": labels} for ids, labels in rows]
    sizes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3, "max_tokens_per_micro_batch": budget}
    assert_is_plain(step(tmp_path, data, **SKIP, **sizes), rows)
    assert_is_plain(step(tmp_path, data, **SKIP), rows)


def test_a_step_without_a_learnt_token_moves_nothing(tmp_path):
    data = [{"input_ids": [], "labels": []}, {"input_ids": [10, 11], "labels": [IGNORED] * 2}]
    losses, norms, gradients = step(tmp_path, data, **SKIP)
    assert (losses, norms) == ([0.0], [0.0])
    assert not any(g.any() for g in gradients[0].values())


def test_one_token_rows_are_read_and_not_learnt(tmp_path):
    assert_is_plain(step(tmp_path, {"text": ["", "w10 w11", ""]}), [([10, 11, 1],) * 2])
    losses, norms, _ = step(tmp_path, {"text": ["", ""]})
    assert (losses, norms) == ([0.0], [0.0])


# ---- metrics and evaluation ----


def test_metrics_of_a_known_chain(tmp_path):
    """Learnt: 21 after 20 (0.6 beside 0.4), 22 after 21 (1/4 beside 3/4), and eos after 22, which is sure: two of
    three are the likeliest token, and the entropies are those of two-way choices and 0.
    """
    chain = {20: {21: 0.6, 7: 0.4}, 21: {22: 0.25, 7: 0.75}, 22: {1: 1.0}}
    sizes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    trainer = make(tmp_path, {"text": ["w20 w21 w22"] * 2}, model=table_model(chain), **sizes)
    trainer.train()
    (entry,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    of_20 = -(0.6 * math.log(0.6) + 0.4 * math.log(0.4))
    of_21 = 2 * LN2 - 0.75 * math.log(3)
    assert entry["entropy"] == pytest.approx((of_20 + of_21) / 3, abs=1e-5)
    assert entry["mean_token_accuracy"] == pytest.approx(2 / 3)
    assert entry["num_tokens"] == 8
    assert entry["loss"] == pytest.approx(-(math.log(0.6) + math.log(0.25)) / 3, abs=1e-5)


@pytest.mark.parametrize("changes", [{}, {"max_tokens_per_micro_batch": 9}, {"eval_packing": True, "max_length": 16}])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_evaluation_is_a_token_mean_whatever_the_batch(tmp_path, rows, changes):
    dataset = Dataset.from_dict({"text": TEXTS})
    trainer = make(tmp_path, PROMPTED, eval_dataset=dataset, per_device_eval_batch_size=rows, **changes)
    assert ("seq_lengths" in trainer.eval_dataset.column_names) == ("eval_packing" in changes)
    assert "seq_lengths" not in trainer.train_dataset.column_names
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] == pytest.approx(plain(text_rows())[0], abs=1e-5)
    whole = make(tmp_path, PROMPTED, eval_dataset=dataset, per_device_eval_batch_size=8).evaluate()
    for name in ("eval_entropy", "eval_mean_token_accuracy"):
        assert metrics[name] == pytest.approx(whole[name], abs=1e-5)


def test_evaluation_datasets_by_name_and_as_a_stream(tmp_path):
    stream = Dataset.from_dict({"text": TEXTS}).to_iterable_dataset()
    parts = {"all": stream, "first": Dataset.from_dict({"text": TEXTS[:1]})}
    trainer = make(tmp_path, PROMPTED, eval_dataset=parts, per_device_eval_batch_size=3)
    metrics = trainer.evaluate()
    assert metrics["eval_all_loss"] == pytest.approx(plain(text_rows())[0], abs=1e-5)
    assert metrics["eval_first_loss"] == pytest.approx(plain(text_rows()[:1])[0], abs=1e-5)


def test_dft_is_evaluated_as_it_is_trained(tmp_path):
    dataset = Dataset.from_dict({"text": TEXTS})
    trainer = make(tmp_path, PROMPTED, eval_dataset=dataset, per_device_eval_batch_size=3, loss_type="dft")
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain(text_rows(), dft=True)[0], abs=1e-5)


# ---- precision, memory, dropout ----


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gradient_checkpointing_changes_nothing(tmp_path, attention):
    model = random_model(attn_implementation=attention)
    found = step(tmp_path, {"text": TEXTS}, model=model, gradient_checkpointing=True, packing=True, max_length=16)
    assert_is_plain(found, text_rows())


@pytest.mark.parametrize("changes", [{}, {"packing": True, "max_length": 16}])
def test_a_uniform_model_in_bfloat16_has_the_exact_loss(tmp_path, changes):
    """ln 64 = 4.158883; a softmax in bfloat16 has 4.1562 or 4.1875."""
    model = table_model({}, dtype=torch.bfloat16)
    losses, _, _ = step(tmp_path, {"text": TEXTS}, model=model, **changes)
    assert losses == pytest.approx([math.log(64)], abs=1e-5)


def test_mixed_precision_stays_near_float32(tmp_path):
    """bfloat16 has 8 bits: logits of about 10 are off by some 0.04, and the mean over 32 tokens by less."""
    losses, norms, gradients = step(tmp_path, {"text": TEXTS}, bf16=True)
    loss, norm, expected = plain(text_rows())
    assert losses == pytest.approx([loss], abs=0.1)
    assert norms == pytest.approx([norm], rel=0.1)
    assert losses[0] != loss
    for name, gradient in gradients[0].items():
        assert gradient.dtype == torch.float32
        cosine = nn.functional.cosine_similarity(gradient.flatten(), expected[name].flatten(), dim=0)
        assert cosine > 0.97, name


def test_dropout_thins_training_and_not_evaluation(tmp_path):
    def run(**changes):
        dataset = Dataset.from_dict({"text": TEXTS})
        model = random_model(attention_dropout=0.5)
        trainer = make(tmp_path, {"text": TEXTS}, model=model, eval_dataset=dataset, **changes)
        trainer.train()
        return logs(trainer, "loss")[0], trainer.evaluate()["eval_loss"]

    loss = plain(text_rows())[0]
    (one, evaluated), (other, _), (off, _) = run(), run(seed=1), run(disable_dropout=True)
    assert evaluated == pytest.approx(loss, abs=1e-5)
    assert off == pytest.approx(loss, abs=1e-5)
    assert abs(one - loss) > 1e-2
    assert abs(one - other) > 1e-2


# ---- a run that is interrupted ----


@pytest.mark.parametrize("changes", [{}, {"packing": True, "max_length": 16}])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, changes):
    settings = {
        "learning_rate": 1e-2,
        "max_steps": 6,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "train_sampling_strategy": "random",
        "save_strategy": "steps",
        "save_steps": 3,
        **changes,
    }
    whole = make(tmp_path, {"text": TEXTS}, model=random_model(attention_dropout=0.2), **settings)
    whole.train()
    resumed = make(tmp_path, {"text": TEXTS}, model=random_model(seed=5, attention_dropout=0.2), **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert len(set(logs(whole, "loss"))) == 6
    tokens = logs(whole, "num_tokens")
    assert tokens == sorted(set(tokens)), "they are counted from the beginning"
    for name in ("loss", "grad_norm", "num_tokens", "entropy", "mean_token_accuracy"):
        assert logs(resumed, name) == pytest.approx(logs(whole, name), abs=1e-5), name
    for (name, one), other in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0, msg=name)


# ---- two processes ----

CASES: dict[str, dict[str, Any]] = {
    "prompted": {},
    "accumulated": {"per_device_train_batch_size": 2 // WORLD, "gradient_accumulation_steps": 2},
    "short_last_step": {"max_steps": -1, "num_train_epochs": 1},
    "budget": {"max_tokens_per_micro_batch": 8},
    "checkpointing": {"gradient_checkpointing": True, "loss_type": "dft"},
    "packing": {"packing": True, "max_length": 16},
    "stream": {},
}


def work(folder: Path) -> None:
    """The cases on this process; four rows a step over all processes, and an evaluation of five rows."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".*barrier.*device.*")
    results = {}
    for case, changes in CASES.items():
        sizes = {"per_device_train_batch_size": 4 // WORLD, "per_device_eval_batch_size": 4 // WORLD}
        grabber = GradientGrabber()
        dataset: Any = Dataset.from_dict(PROMPTED)
        trainer = SFTTrainer(
            random_model(),
            sft_config(folder / case, **(sizes | changes)),
            train_dataset=dataset.to_iterable_dataset() if case == "stream" else dataset,
            eval_dataset=Dataset.from_dict({"text": TEXTS[:5]}),
            processing_class=word_tokenizer(),
            callbacks=[grabber],
        )
        trainer.train()
        results[case] = {
            "logs": {name: logs(trainer, name) for name in ("loss", "grad_norm", "entropy", "num_tokens")},
            "gradients": [{n: g.tolist() for n, g in s.items() if "norm" in n} for s in grabber.steps],
            "evaluation": {k: v for k, v in trainer.evaluate().items() if k in ("eval_loss", "eval_entropy")},
        }
    (folder / f"{WORLD}_{RANK}.json").write_text(json.dumps(results))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """World size -> results of each rank."""
    found = {}
    for world in (1, 2):
        folder = tmp_path_factory.mktemp(f"world{world}")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        processes = []
        for rank in range(world):
            env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
            if world > 1:
                launcher = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port}
                env |= {name: str(value) for name, value in launcher.items()} | {"MASTER_ADDR": "127.0.0.1"}
            command = [sys.executable, __file__, str(folder)]
            processes.append(
                subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            )
        outputs = [process.communicate(timeout=300)[0] for process in processes]
        assert [p.returncode for p in processes] == [0] * world, "\n".join(outputs)
        found[world] = [json.loads((folder / f"{world}_{rank}.json").read_text()) for rank in range(world)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_processes_are_one(results, case):
    (one,), two = results[1], results[2]
    assert one[case]["logs"]["grad_norm"][0] > 0
    for found in two:
        for name, values in one[case]["logs"].items():
            assert found[case]["logs"][name] == pytest.approx(values, abs=1e-5, rel=1e-5), name
        for expected, gradients in zip(one[case]["gradients"], found[case]["gradients"], strict=True):
            for name, gradient in expected.items():
                assert gradients[name] == pytest.approx(gradient, abs=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_processes_evaluate_as_one(results, case):
    for found in results[2]:
        assert found[case]["evaluation"] == pytest.approx(results[1][0][case]["evaluation"], abs=1e-5)


@pytest.mark.slow
def test_one_process_is_plain(results):
    logged = results[1][0]["prompted"]["logs"]
    loss, norm, _ = plain(prompted_rows()[:4])
    assert logged["loss"] == pytest.approx([loss], abs=1e-5)
    assert logged["grad_norm"] == pytest.approx([norm], rel=1e-5)


if __name__ == "__main__":
    work(Path(sys.argv[1]))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
