import pytest
from datasets import Dataset, IterableDataset
from fixtures.tokenizers import BOS, BOS_CHAT_TEMPLATE, CLOSE, EOS, OPEN, UNK, bpe_tokenizer, word_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from trl.data.preference_rows import (
    prepare_preference_dataset,
    prepare_reward_dataset,
    prepare_unpaired_dataset,
    tokenize_preference_row,
    tokenize_reward_row,
    tokenize_unpaired_row,
)
from trl.errors import ConfigError, DataError

USER = {"role": "user", "content": "w10"}
GOOD = {"role": "assistant", "content": "w20"}
BAD = {"role": "assistant", "content": "w21 w22"}
PROMPT_IDS = [OPEN, UNK, 10, CLOSE, OPEN, UNK]  # role names are unknown words
TEXT = {"prompt": "w10 w11", "chosen": " w20 w21", "rejected": " w22"}
TEXT_IDS = {"prompt_ids": [10, 11], "chosen_ids": [20, 21, EOS], "rejected_ids": [22, EOS]}
TALK = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}
TALK_IDS = {"prompt_ids": PROMPT_IDS, "chosen_ids": [20, CLOSE], "rejected_ids": [21, 22, CLOSE]}
NO_MERGE = "ignore:In this row, as tokens, the prompt is not the beginning"


def pair(prompt, chosen, rejected):
    return {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}


def single(prompt, completion, label):
    return {"prompt_ids": prompt, "completion_ids": completion, "label": label}


def stream_of(dataset):
    return IterableDataset.from_generator(lambda: iter(dataset.to_list()))


def as_is(dataset):
    return dataset


def trained_bpe():
    """A byte-level BPE trained on a few words, whose tokens open with the blank before a word."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the cat sat on the mat", "the catalogue of the other cats"] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


# Pairs


@pytest.mark.parametrize("pad", ["own", "eos", "none"])
@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        (TEXT, TEXT_IDS),
        ({**TEXT, "chosen": " w20 w21 <eos>"}, TEXT_IDS),
        ({"chosen": "w10 w11 w20 w21", "rejected": "w10 w11 w22"}, TEXT_IDS),
        ({**TEXT, "prompt": None, "chosen": "w10 w11 w20 w21", "rejected": "w10 w11 w22"}, TEXT_IDS),
        (TALK, TALK_IDS),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, TALK_IDS),
        ({"prompt": "w10", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, TALK_IDS),  # a prompt told twice
        (TALK_IDS, TALK_IDS),
    ],
)
def test_pairs_of_every_shape(row, wanted, pad):
    row = {**row, "score": 3}
    assert tokenize_preference_row(row, word_tokenizer(pad=pad)) == wanted


def test_sharegpt_turns_are_messages():
    row = {
        "prompt": [{"from": "human", "value": "w10"}],
        "chosen": [{"from": "gpt", "value": "w20"}],
        "rejected": [{"from": "gpt", "value": "w21 w22"}],
    }
    assert tokenize_preference_row(row, word_tokenizer()) == TALK_IDS


def test_one_bos_at_the_start():
    tokenizer = word_tokenizer(add_bos=True, chat_template=BOS_CHAT_TEMPLATE)
    for row, ids in ((TEXT, TEXT_IDS), (TALK, TALK_IDS)):
        assert tokenize_preference_row(row, tokenizer) == {**ids, "prompt_ids": [BOS, *ids["prompt_ids"]]}


def test_tools_and_template_kwargs_reach_the_template():
    template = (
        "{% if tools is not none %}w8 {% endif %}{{ word is defined and word or 'w30' }} "
        "{% for m in messages %}{{ m.content }} {% endfor %}"
    )
    tokenizer = word_tokenizer(chat_template=template)
    row = {**TALK, "tools": [{"name": "f"}]}
    assert tokenize_preference_row(row, tokenizer) == pair([8, 30, 10], [20], [21, 22])
    row = {**TALK, "chat_template_kwargs": {"word": "w31"}}
    assert tokenize_preference_row(row, tokenizer, chat_template_kwargs={"word": "w32"})["prompt_ids"] == [31, 10]
    assert tokenize_reward_row({**row, "tools": [{"name": "f"}]}, tokenizer)["chosen_ids"] == [8, 31, 10, 20]


def test_the_prompt_is_what_both_completions_leave_of_it():
    # ca = c a, cabcd = c ab cd, cad = c a d: the first completion takes the a with it, so the second does too
    with pytest.warns(UserWarning, match="the prompt is not the beginning") as caught:
        row = tokenize_preference_row({"prompt": "ca", "chosen": "bcd", "rejected": "d"}, bpe_tokenizer())
    assert row == pair([5], [7, 8, 1], [3, 6, 1])
    assert len(caught) == 1


def test_a_prompt_that_is_extracted_may_end_within_a_token():
    row = {"chosen": "w10 w20", "rejected": "w10 w21"}  # as characters they share 'w10 w2'
    assert tokenize_preference_row(row, word_tokenizer()) == pair([10], [20, EOS], [21, EOS])


@pytest.mark.parametrize("shape", [{"prompt": ""}, {}])
def test_a_row_without_prompt_starts_from_bos(shape):
    row = {"chosen": "w20", "rejected": "x", **shape}
    assert tokenize_preference_row(row, word_tokenizer()) == pair([BOS], [20, EOS], [UNK, EOS])
    assert tokenize_preference_row(row, word_tokenizer(add_bos=True)) == pair([BOS], [20, EOS], [UNK, EOS])


def test_without_bos_the_first_token_moves_to_the_prompt():
    tokenizer = bpe_tokenizer()
    row = {"prompt": "", "chosen": "abc", "rejected": "abd"}
    assert tokenize_preference_row(row, tokenizer) == pair([7], [5, 1], [6, 1])
    with pytest.raises(DataError, match="no tokens, and the tokenizer has no BOS"):
        tokenize_preference_row({"prompt": "", "chosen": "c", "rejected": "d"}, tokenizer)
    assert tokenize_unpaired_row({"prompt": "", "completion": "abc", "label": True}, tokenizer) == single(
        [7], [5, 1], True
    )


@pytest.mark.parametrize(
    ("mode", "max_length", "wanted"),
    [
        # prompt 2, chosen 3, rejected 2 tokens
        ("keep_start", 5, TEXT_IDS),
        ("keep_start", 4, pair([10, 11], [20, 21], [22, EOS])),
        ("keep_start", 3, pair([10, 11], [20], [22])),
        ("keep_start", 2, pair([10, 11], [], [])),
        ("keep_start", 1, pair([10], [], [])),
        ("keep_end", 5, TEXT_IDS),
        ("keep_end", 4, pair([11], [20, 21, EOS], [22, EOS])),  # one prompt for both: the longer one decides
        ("keep_end", 3, pair([11], [21, EOS], [22, EOS])),
        ("keep_end", 2, pair([11], [EOS], [EOS])),
        ("keep_end", 1, pair([11], [], [])),
    ],
)
def test_prompt_and_completion_are_cut_together(mode, max_length, wanted):
    options = {"max_length": max_length, "truncation_mode": mode}
    assert tokenize_preference_row(TEXT, word_tokenizer(), **options) == wanted
    assert tokenize_preference_row(TEXT_IDS, word_tokenizer(), **options) == wanted


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({**TEXT, "chosen": None}, "`chosen` is None"),
        ({**TEXT, "rejected": None}, "`rejected` is None"),
        ({**TEXT, "rejected": [BAD]}, "`rejected` is .*, not a text"),
        ({"prompt": "w10", "chosen": " w20"}, "no column `rejected`"),
        ({**TALK, "chosen": []}, r"`chosen` is \[\]"),
        ({**TALK, "rejected": ["w20"]}, "Message 0 of `rejected`"),
        ({**TALK_IDS, "chosen_ids": None}, "`chosen_ids` is None"),
    ],
)
def test_what_is_no_pair_is_named(row, named):
    with pytest.raises(DataError, match=named):
        tokenize_preference_row(row, word_tokenizer())
    with pytest.raises(DataError, match=f"Row 0: .*{named}"):
        prepare_preference_dataset(IterableDataset.from_generator(lambda: iter([row])), word_tokenizer())


@pytest.mark.parametrize("make", [as_is, stream_of])
def test_a_dataset_of_pairs(make):
    rows = [TEXT, {**TEXT, "chosen": " w30", "rejected": " w31"}]
    dataset = make(Dataset.from_list([{**row, "score": 1} for row in rows]))
    prepared = prepare_preference_dataset(dataset, word_tokenizer())
    assert list(prepared) == [TEXT_IDS, pair([10, 11], [30, EOS], [31, EOS])]
    assert prepared.column_names == list(TEXT_IDS)


def test_pairs_without_a_completion_are_left_out():
    dataset = Dataset.from_list([TEXT, {**TEXT, "prompt": "w10"}])
    with pytest.warns(UserWarning, match="1 of 2 rows have no token of a completion within `max_length=2`") as caught:
        prepared = prepare_preference_dataset(dataset, word_tokenizer(), max_length=2)
    assert prepared[:] == {"prompt_ids": [[10]], "chosen_ids": [[20]], "rejected_ids": [[22]]}
    assert len(caught) == 1
    with pytest.raises(DataError, match="No row is left of 2"):
        prepare_preference_dataset(dataset, word_tokenizer(), max_length=1)


def test_merged_prompts_of_a_dataset_are_counted():
    dataset = Dataset.from_list([{"prompt": "ca", "chosen": "bcd", "rejected": "d"}] * 2)
    with pytest.warns(UserWarning, match="In 2 of 2 rows") as caught:
        prepare_preference_dataset(dataset, bpe_tokenizer())
    assert len(caught) == 1


# Single completions


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"prompt": "w10 w11", "completion": " w20", "label": True}, single([10, 11], [20, EOS], True)),
        ({"prompt": "w10", "completion": " w20 <eos>", "label": 0}, single([10], [20, EOS], False)),
        ({"prompt": "", "completion": "w20", "label": True}, single([BOS], [20, EOS], True)),
        ({"prompt": [USER], "completion": [GOOD], "label": False}, single(PROMPT_IDS, [20, CLOSE], False)),
        (single([10], [20], True), single([10], [20], True)),
    ],
)
def test_single_completions_of_every_shape(row, wanted):
    assert tokenize_unpaired_row(row, word_tokenizer()) == wanted


def test_the_prompt_of_a_single_completion_loses_its_merged_token():
    with pytest.warns(UserWarning, match="the prompt is not the beginning"):
        row = tokenize_unpaired_row({"prompt": "ca", "completion": "bcd", "label": True}, bpe_tokenizer())
    assert row == single([5], [7, 8, 1], True)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"label": None}, "`label` is None, not true or false"),
        ({"label": -1}, "`label` is -1: it is True"),
        ({"prompt": None}, "`prompt` is None"),
        ({"completion": None}, "`completion` is None"),
        ({"completion": [GOOD]}, "`completion` is .*, not a text"),
    ],
)
def test_what_is_no_judged_completion_is_named(change, named):
    row = {"prompt": "w10", "completion": " w20", "label": True, **change}
    with pytest.raises(DataError, match=named):
        tokenize_unpaired_row(row, word_tokenizer())


@pytest.mark.parametrize("make", [as_is, stream_of])
@pytest.mark.parametrize("implicit", [False, True])
def test_pairs_become_single_completions(make, implicit):
    rows = [{"prompt": f"w{i}", "chosen": f" w{i + 20}", "rejected": f" w{i + 30}"} for i in (10, 11)]
    if implicit:
        rows = [{name: row["prompt"] + row[name] for name in ("chosen", "rejected")} for row in rows]
    prepared = prepare_unpaired_dataset(make(Dataset.from_list(rows)), word_tokenizer())
    assert list(prepared) == [
        single([10], [30, EOS], True),
        single([11], [31, EOS], True),
        single([10], [40, EOS], False),
        single([11], [41, EOS], False),
    ]


@pytest.mark.parametrize("make", [as_is, stream_of])
def test_a_dataset_of_single_completions(make):
    rows = [{"prompt": "w10", "completion": " w20", "label": True}, {"prompt": "w11 w12", "completion": " w21"}]
    dataset = make(Dataset.from_list([{"label": False, "score": 1, **row} for row in rows]))
    prepared = prepare_unpaired_dataset(dataset, word_tokenizer())
    assert list(prepared) == [single([10], [20, EOS], True), single([11, 12], [21, EOS], False)]
    assert prepared.column_names == ["prompt_ids", "completion_ids", "label"]


def test_single_completions_that_are_cut_away_are_left_out():
    dataset = Dataset.from_list([TEXT, {**TEXT, "prompt": "w10"}])
    with pytest.warns(UserWarning, match="2 of 4 rows have no token of a completion within `max_length=2`"):
        prepared = prepare_unpaired_dataset(dataset, word_tokenizer(), max_length=2)
    assert list(prepared) == [single([10], [20], True), single([10], [22], False)]


# Whole conversations


@pytest.mark.parametrize("pad", ["own", "eos", "none"])
@pytest.mark.parametrize(
    ("row", "chosen", "rejected"),
    [
        (TEXT, [10, 11, 20, 21, EOS], [10, 11, 22, EOS]),
        ({"chosen": "w20 <eos>", "rejected": "w21"}, [20, EOS], [21, EOS]),
        (TALK, [*PROMPT_IDS, 20, CLOSE], [*PROMPT_IDS, 21, 22, CLOSE]),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, [*PROMPT_IDS, 20, CLOSE], [*PROMPT_IDS, 21, 22, CLOSE]),
        (
            {"prompt": "w10", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
            [*PROMPT_IDS, 20, CLOSE],
            [*PROMPT_IDS, 21, 22, CLOSE],
        ),
        ({"chosen_ids": [20], "rejected_ids": [21]}, [20], [21]),
    ],
)
def test_a_reward_model_sees_prompt_and_completion(row, chosen, rejected, pad):
    tokenizer = word_tokenizer(pad=pad)
    assert tokenize_reward_row(row, tokenizer) == {"chosen_ids": chosen, "rejected_ids": rejected}
    scored = tokenize_reward_row({**row, "margin": 2}, tokenizer)
    assert scored == {"chosen_ids": chosen, "rejected_ids": rejected, "margin": 2.0}


def test_a_reward_model_sees_one_bos():
    tokenizer = word_tokenizer(add_bos=True, chat_template=BOS_CHAT_TEMPLATE)
    for row in (TEXT, TALK):
        chosen = tokenize_reward_row(row, tokenizer)["chosen_ids"]
        assert chosen[0] == BOS
        assert chosen.count(BOS) == 1


@pytest.mark.parametrize("make", [as_is, stream_of])
@pytest.mark.parametrize("margin", [{}, {"margin": 0.5}])
def test_rows_that_are_too_long_for_the_reward_model_are_left_out(make, margin):
    rows = [TEXT, {"prompt": "w10", "chosen": " w20", "rejected": " w21"}]
    dataset = make(Dataset.from_list([{**row, **margin, "score": 1} for row in rows]))
    options = {"tokenizer": word_tokenizer(), "max_length": 4}
    with pytest.warns(UserWarning, match="ows (of the stream )?have more than 4 tokens: raise `max_length`") as caught:
        prepared = list(prepare_reward_dataset(dataset, **options))
    assert prepared == [{"chosen_ids": [10, 20, EOS], "rejected_ids": [10, 21, EOS], **margin}]
    assert len(caught) == 1
    assert len(list(prepare_reward_dataset(dataset, word_tokenizer(), max_length=5))) == 2


def test_no_row_short_enough_is_an_error():
    with pytest.raises(DataError, match="No row is left of 1: they have more than 3 tokens"):
        prepare_reward_dataset(Dataset.from_list([TEXT]), word_tokenizer(), max_length=3)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"margin": None}, "`margin` is None"),
        ({"chosen": None}, "`chosen` is None"),
        ({"rejected": [BAD]}, "not a text"),
    ],
)
def test_what_a_reward_model_cannot_learn_from_is_named(change, named):
    with pytest.raises(DataError, match=named):
        tokenize_reward_row({**TEXT, **change}, word_tokenizer())


# All of them

PREPARE = [prepare_preference_dataset, prepare_unpaired_dataset, prepare_reward_dataset]


@pytest.mark.parametrize("prepare", PREPARE)
def test_processes_the_cache_and_the_tokenizer_change_nothing(prepare, tmp_path):
    rows = [{"prompt": f"w{i}", "chosen": f" w{i + 20}", "rejected": f" w{i + 30}"} for i in range(10, 14)]
    Dataset.from_list(rows).to_json(tmp_path / "rows.jsonl")
    dataset = Dataset.from_json(str(tmp_path / "rows.jsonl"), cache_dir=str(tmp_path / "cache"))
    tokenizer = word_tokenizer(pad="eos")
    before = tokenizer.backend_tokenizer.to_str(), tokenizer.pad_token, tokenizer.chat_template
    first, second = prepare(dataset, tokenizer), prepare(dataset, tokenizer)
    assert first._fingerprint == second._fingerprint
    assert first.cache_files == second.cache_files
    parallel = prepare(dataset, tokenizer, num_proc=2)
    # each process has a batch of its own, and pairs are taken apart within a batch
    assert sorted(map(str, parallel)) == sorted(map(str, first))
    assert prepare(dataset, tokenizer, max_length=10)._fingerprint != first._fingerprint
    assert (tokenizer.backend_tokenizer.to_str(), tokenizer.pad_token, tokenizer.chat_template) == before


@pytest.mark.parametrize("prepare", PREPARE)
def test_a_length_below_one_is_refused(prepare):
    with pytest.raises(ConfigError, match="`max_length` is 0"):
        prepare(Dataset.from_list([TEXT]), word_tokenizer(), max_length=0)


BPE = trained_bpe()
texts = st.text("the cat on", max_size=12)


@settings(deadline=None, max_examples=50)
@given(prompt=texts, chosen=texts, rejected=texts, max_length=st.integers(1, 20))
@pytest.mark.filterwarnings(NO_MERGE)
def test_prompt_and_completions_join_to_the_texts(prompt, chosen, rejected, max_length):
    row = {"prompt": "on " + prompt, "chosen": chosen, "rejected": rejected}  # 'on' before a blank never merges
    ids = tokenize_preference_row(row, BPE)
    wholes = {name: BPE(row["prompt"] + row[name] + "<eos>")["input_ids"] for name in ("chosen", "rejected")}
    assert ids["prompt_ids"]
    assert row["prompt"].startswith(BPE.decode(ids["prompt_ids"]))
    for name, whole in wholes.items():
        assert ids["prompt_ids"] + ids[f"{name}_ids"] == whole
    for mode in ("keep_start", "keep_end"):
        cut = tokenize_preference_row(row, BPE, max_length=max_length, truncation_mode=mode)
        assert cut["prompt_ids"]
        for name, whole in wholes.items():
            kept = cut["prompt_ids"] + cut[f"{name}_ids"]
            assert len(kept) <= max_length
            if mode == "keep_start":
                assert kept == whole[:max_length]
            elif max_length > 1:
                assert kept[1:] == whole[len(whole) - len(kept) + 1 :]
