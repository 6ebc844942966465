import copy
import json
import warnings

import pytest
from datasets import Dataset, IterableDataset, load_from_disk
from fixtures.tokenizers import (
    BOS,
    CHAT_TEMPLATE,
    CLOSE,
    EOS,
    OPEN,
    UNK,
    bpe_tokenizer,
    word_tokenizer,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from trl.data.chat import AssistantMaskError
from trl.data.tokenize import prepare_sft_dataset, tokenize_sft_row, truncate
from trl.errors import ConfigError, DataError

MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "<open> assistant {% generation %}{{ m.content }} <close> {% endgeneration %}"
    "{% else %}<open> {{ m.role }} {{ m.content }} <close> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<open> assistant{% endif %}"
)
TOOLS_TEMPLATE = "{% if tools is not none %}w8 {% endif %}{{ messages[-1].content }}"
KWARGS_TEMPLATE = "{{ messages[0].content }} {{ word is defined and word or 'w30' }}"
NAME_TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{% if 'name' in message %} w9{% endif %} {% endfor %}"
)


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


TALK = [user("w10"), assistant("w20"), user("w11"), assistant("w21 w22")]
# role names are unknown words; the two assistant turns are tokens 6–7 and 14–16
TALK_IDS = [OPEN, UNK, 10, CLOSE, OPEN, UNK, 20, CLOSE, OPEN, UNK, 11, CLOSE, OPEN, UNK, 21, 22, CLOSE]
TALK_LABELS = [-100] * 6 + [20, CLOSE] + [-100] * 6 + [21, 22, CLOSE]


def eos_adding_tokenizer(**kwargs):
    """A tokenizer whose post-processor puts EOS behind every text."""
    tokenizer = word_tokenizer(**kwargs)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", EOS)]
    )
    return tokenizer


def state(tokenizer):
    return (
        tokenizer.pad_token,
        tokenizer.padding_side,
        tokenizer.truncation_side,
        tokenizer.chat_template,
        len(tokenizer),
        tokenizer.backend_tokenizer.to_str(),
    )


def both(ids):
    """A row of which every token is learnt."""
    return {"input_ids": ids, "labels": ids}


# One row


@pytest.mark.parametrize("text", ["w10 w11", "w10 w11 <eos>", "w10 w11 <eos> <eos>"])
@pytest.mark.parametrize("pad", ["own", "eos", "none"])
def test_a_text_ends_with_one_eos_that_is_learnt(text, pad):
    tokenizer = word_tokenizer(pad=pad)
    assert tokenize_sft_row({"text": text}, tokenizer) == both([10, 11, EOS])
    assert tokenize_sft_row({"text": text}, eos_adding_tokenizer(pad=pad)) == both([10, 11, EOS])


def test_an_eos_within_the_text_stays_and_an_empty_text_is_eos():
    assert tokenize_sft_row({"text": "w10 <eos> w11"}, word_tokenizer()) == both([10, EOS, 11, EOS])
    assert tokenize_sft_row({"text": ""}, word_tokenizer()) == both([EOS])


def test_a_tokenizer_without_eos_ends_no_text():
    tokenizer = word_tokenizer()
    tokenizer.eos_token = None
    assert tokenize_sft_row({"text": "w10"}, tokenizer) == both([10])


def test_another_text_column_can_be_named():
    assert tokenize_sft_row({"text": "w9", "story": "w10"}, word_tokenizer(), text_field="story") == both([10, EOS])


@pytest.mark.parametrize("completion", [" w20 w21", " w20 w21 <eos>"])
def test_of_a_prompt_and_completion_of_text_the_completion_is_learnt(completion):
    row = {"prompt": "w10 w11", "completion": completion}
    ids = [10, 11, 20, 21, EOS]
    wanted = {"input_ids": ids, "labels": [-100, -100, 20, 21, EOS]}
    for tokenizer in (word_tokenizer(), word_tokenizer(pad="eos"), eos_adding_tokenizer()):
        assert tokenize_sft_row(row, tokenizer) == wanted
        assert tokenize_sft_row(row, tokenizer, completion_only=True) == wanted
        assert tokenize_sft_row(row, tokenizer, completion_only=False) == both(ids)


def test_labels_of_messages_start_after_the_generation_prompt():
    tokenizer = word_tokenizer(
        chat_template=CHAT_TEMPLATE.replace("<open> assistant{% endif", "<open> assistant {% endif")
    )
    row = {"prompt": [user("w20")], "completion": [assistant("w21")]}
    ids = [4, 6, 20, 5, 4, 6, 21, 5]
    assert tokenize_sft_row(row, tokenizer) == {"input_ids": ids, "labels": [-100] * 6 + [21, 5]}
    assert tokenize_sft_row(row, tokenizer, completion_only=False) == both(ids)


def test_a_token_that_merges_prompt_and_completion_is_learnt_with_one_warning():
    # 'ca' = c a, 'cabcd' = c ab cd: they share c alone
    with pytest.warns(UserWarning, match="not the beginning of prompt and completion") as caught:
        row = tokenize_sft_row({"prompt": "ca", "completion": "bcd"}, bpe_tokenizer())
    assert row == {"input_ids": [5, 7, 8, 1], "labels": [-100, 7, 8, 1]}
    assert len(caught) == 1


def test_a_message_of_the_assistant_that_ends_a_prompt_is_closed():
    row = {"prompt": TALK[:2], "completion": TALK[2:]}
    assert tokenize_sft_row(row, word_tokenizer())["labels"] == [-100] * 8 + TALK_IDS[8:]


def test_a_prompt_may_end_with_a_call_of_a_tool():
    template = "{% for m in messages %}<open> {{ m.content or 'w9' }} <close> {% endfor %}"
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "f"}}]}
    row = {"prompt": [user("w10"), call], "completion": [{"role": "tool", "content": "w11"}, assistant("w12")]}
    encoded = tokenize_sft_row(row, word_tokenizer(chat_template=template))
    assert encoded["labels"] == [-100] * 6 + [OPEN, 11, CLOSE, OPEN, 12, CLOSE]


def test_messages_are_learnt_as_a_whole():
    assert tokenize_sft_row({"messages": TALK}, word_tokenizer()) == both(TALK_IDS)
    assert tokenize_sft_row({"messages": TALK}, word_tokenizer(), completion_only=True) == both(TALK_IDS)


def test_sharegpt_turns_are_messages():
    turns = [{"from": "human", "value": "w10"}, {"from": "gpt", "value": "w20"}]
    for row in ({"conversations": turns}, {"conversations": [user("w10"), assistant("w20")]}):
        assert tokenize_sft_row(row, word_tokenizer()) == both([OPEN, UNK, 10, CLOSE, OPEN, UNK, 20, CLOSE])


def test_assistant_only_learns_what_the_template_marks():
    tokenizer = word_tokenizer(chat_template=MARKED)
    row = tokenize_sft_row({"messages": TALK}, tokenizer, assistant_only=True)
    assert row == {"input_ids": TALK_IDS, "labels": TALK_LABELS}


def test_assistant_only_and_completion_only_learn_what_both_allow():
    tokenizer = word_tokenizer(chat_template=MARKED)
    row = {"prompt": TALK[:2], "completion": TALK[2:]}
    assert tokenize_sft_row(row, tokenizer, assistant_only=True)["labels"] == [-100] * 14 + [21, 22, CLOSE]
    assert tokenize_sft_row(row, tokenizer, assistant_only=True, completion_only=False)["labels"] == TALK_LABELS


def test_assistant_only_without_markers_names_the_template():
    with pytest.raises(RuntimeError, match=r"no `\{% generation %\}`"):
        tokenize_sft_row({"messages": TALK}, word_tokenizer(), assistant_only=True)
    with pytest.raises(AssistantMaskError, match="no assistant message"):
        tokenize_sft_row({"messages": TALK[:1]}, word_tokenizer(chat_template=MARKED), assistant_only=True)


@pytest.mark.parametrize("row", [{"text": "w10"}, {"prompt": "w10", "completion": " w11"}])
def test_assistant_only_needs_messages(row):
    with pytest.raises(DataError, match="needs messages"):
        tokenize_sft_row(row, word_tokenizer(), assistant_only=True)


@pytest.mark.parametrize("tools", [[{"name": "f", "x": None}], json.dumps([{"name": "f"}])])
def test_tools_reach_the_template(tools):
    tokenizer = word_tokenizer(chat_template=TOOLS_TEMPLATE)
    assert tokenize_sft_row({"messages": [user("w10")], "tools": tools}, tokenizer) == both([8, 10])
    assert tokenize_sft_row({"messages": [user("w10")], "tools": []}, tokenizer) == both([10])


def test_template_kwargs_of_the_row_come_before_those_of_the_call():
    tokenizer = word_tokenizer(chat_template=KWARGS_TEMPLATE)

    def ids(**kwargs):
        row = {"messages": [user("w10")], **kwargs}
        return tokenize_sft_row(row, tokenizer, chat_template_kwargs={"word": "w32"})["input_ids"]

    assert ids() == ids(chat_template_kwargs=None) == ids(chat_template_kwargs={"word": None}) == [10, 32]
    assert ids(chat_template_kwargs={"word": "w31"}) == [10, 31]


def test_one_bos_at_the_start_in_every_shape():
    tokenizer = word_tokenizer(add_bos=True, chat_template="<bos> " + MARKED)
    rows = [
        {"text": "w10"},
        {"text": "<bos> w10"},
        {"prompt": "w10", "completion": " w11"},
        {"prompt": "<bos> w10", "completion": " w11"},
        {"prompt": "", "completion": "w11"},
        {"messages": TALK},
        {"prompt": TALK[:1], "completion": TALK[1:2]},
    ]
    for row in rows:
        ids = tokenize_sft_row(row, tokenizer)["input_ids"]
        assert ids[0] == BOS
        assert ids.count(BOS) == 1
    marked = tokenize_sft_row({"messages": TALK}, tokenizer, assistant_only=True)
    assert marked == {"input_ids": [BOS, *TALK_IDS], "labels": [-100, *TALK_LABELS]}
    prompted = tokenize_sft_row({"prompt": "w10", "completion": " w11"}, tokenizer)
    assert prompted == {"input_ids": [BOS, 10, 11, EOS], "labels": [-100, -100, 11, EOS]}


def test_a_bos_that_the_template_doubles_is_cut_from_the_mask_too():
    tokenizer = word_tokenizer(chat_template="<bos> <bos> " + MARKED)
    marked = tokenize_sft_row({"messages": TALK}, tokenizer, assistant_only=True)
    assert marked == {"input_ids": [BOS, *TALK_IDS], "labels": [-100, *TALK_LABELS]}


def test_tokenized_rows_are_taken_as_they_are():
    ids, tokenizer = [10, 11, 12], word_tokenizer()
    assert tokenize_sft_row({"input_ids": ids}, tokenizer) == both(ids)
    labels = [-100, -100, 40]
    given = {"input_ids": ids, "labels": labels, "completion_mask": [1, 1, 1], "text": "w9"}
    assert tokenize_sft_row(given, tokenizer, completion_only=True) == {"input_ids": ids, "labels": labels}
    masked = {"input_ids": ids, "completion_mask": [0, 1, 1]}
    assert tokenize_sft_row(masked, tokenizer)["labels"] == [-100, 11, 12]
    assert tokenize_sft_row(masked, tokenizer, completion_only=False)["labels"] == ids
    assert tokenize_sft_row({**masked, "assistant_masks": [1, 0, 1]}, tokenizer)["labels"] == [-100, -100, 12]
    only = tokenize_sft_row({"input_ids": ids, "assistant_masks": [1, 0, 1]}, tokenizer, assistant_only=True)
    assert only["labels"] == [10, -100, 12]
    with pytest.raises(DataError, match="needs `assistant_masks`"):
        tokenize_sft_row({"input_ids": ids}, tokenizer, assistant_only=True)


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"text": None}, "`text` is None, not a text"),
        ({"text": 3}, "`text` is 3"),
        ({"story": "w10"}, r"no column `text`.*there are story"),
        ({"prompt": None, "completion": " w11"}, "`prompt` is None"),
        ({"prompt": "w10", "completion": None}, "`completion` is None"),
        ({"prompt": "w10", "completion": [assistant("w11")]}, "`completion` is .*, not a text"),
        ({"prompt": [user("w10")], "completion": []}, r"`completion` is \[\]"),
        ({"prompt": [user("w10")], "completion": ["w11"]}, "Message 0 of `completion` is 'w11'"),
        ({"messages": None}, "`messages` is None"),
        ({"messages": []}, r"`messages` is \[\]"),
        ({"messages": [{"role": "user", "content": None}]}, "no content"),
        ({"conversations": None}, "`conversations` is None"),
        ({"input_ids": None}, "`input_ids` is None"),
        ({"input_ids": [10], "labels": None}, "`labels` is None"),
        ({"input_ids": [10], "completion_mask": [1, 1]}, "`completion_mask` has 2 items for 1"),
    ],
)
def test_what_cannot_be_read_is_named(row, named):
    with pytest.raises(DataError, match=named):
        tokenize_sft_row(row, word_tokenizer())


def test_messages_need_a_chat_template():
    with pytest.raises(DataError, match="`messages` is a list of messages, but the tokenizer has no chat template"):
        tokenize_sft_row({"messages": TALK}, word_tokenizer(chat_template=None))


def test_neither_row_nor_tokenizer_is_changed():
    tokenizer = word_tokenizer(pad="eos", add_bos=True, chat_template="<bos> " + MARKED)
    rows = [{"text": "w10"}, {"messages": TALK}, {"prompt": TALK[:1], "completion": TALK[1:2]}]
    before = copy.deepcopy((state(tokenizer), rows))
    for row in rows:
        tokenize_sft_row(row, tokenizer, assistant_only="text" not in row)
    assert (state(tokenizer), rows) == before


# Truncation


def test_truncation_keeps_the_start_or_the_end():
    row = {"input_ids": [10, 11, 12], "labels": [-100, 11, 12]}
    assert truncate(row, 2) == {"input_ids": [10, 11], "labels": [-100, 11]}
    assert truncate(row, 2, "keep_end") == {"input_ids": [11, 12], "labels": [11, 12]}
    for mode in ("keep_start", "keep_end"):
        assert truncate(row, 3, mode) == truncate(row, 4, mode) == truncate(row, None, mode) == row


def test_truncation_refuses_other_modes_and_lengths():
    with pytest.raises(ConfigError, match="`truncation_mode` is 'middle'"):
        truncate({"input_ids": [10]}, 1, "middle")
    with pytest.raises(ConfigError, match="`max_length` is 0"):
        prepare_sft_dataset(Dataset.from_dict({"text": ["w10"]}), word_tokenizer(), max_length=0)


def test_the_mask_of_the_assistant_is_that_of_the_whole_conversation():
    dataset = Dataset.from_list([{"messages": TALK}])
    tokenizer = word_tokenizer(chat_template=MARKED)
    cut = prepare_sft_dataset(dataset, tokenizer, assistant_only=True, max_length=15)
    assert cut[:] == {"input_ids": [TALK_IDS[:15]], "labels": [TALK_LABELS[:15]]}  # the second turn has its w21 left


# A dataset


def texts(*values):
    return Dataset.from_dict({"text": list(values), "tags": [[1, 2]] * len(values)})


def stream_of(dataset):
    return IterableDataset.from_generator(lambda: iter(dataset.to_list()))


@pytest.mark.parametrize("num_proc", [None, 2])
def test_a_dataset_keeps_its_order_and_loses_its_other_columns(num_proc):
    dataset = texts("w10", "w11 w12", "w13")
    prepared = prepare_sft_dataset(dataset, word_tokenizer(), num_proc=num_proc)
    ids = [[10, EOS], [11, 12, EOS], [13, EOS]]
    assert prepared.column_names == ["input_ids", "labels"]
    assert prepared[:] == {"input_ids": ids, "labels": ids}
    assert dataset.column_names == ["text", "tags"]


@pytest.mark.parametrize("known", [True, False])
def test_a_stream_is_prepared_as_it_is_read(known):
    dataset = texts(*(f"w{i}" for i in range(10, 60)))
    stream = dataset.to_iterable_dataset() if known else stream_of(dataset)
    prepared = prepare_sft_dataset(stream, word_tokenizer())
    assert list(prepared) == list(prepare_sft_dataset(dataset, word_tokenizer()))
    assert prepared.column_names == ["input_ids", "labels"]


def test_columns_of_tensors_are_read_too():
    dataset = Dataset.from_dict({"input_ids": [[10, 11]], "labels": [[-100, 11]]})
    assert prepare_sft_dataset(dataset.with_format("torch"), word_tokenizer())[:] == dataset[:]


def test_a_dataset_with_a_transform_is_refused():
    with pytest.raises(DataError, match="with_transform"):
        prepare_sft_dataset(texts("w10").with_transform(lambda batch: batch), word_tokenizer())
    with pytest.raises(TypeError, match="got list"):
        prepare_sft_dataset([{"text": "w10"}], word_tokenizer())


@pytest.mark.parametrize("make", [lambda dataset: dataset, stream_of])
@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([{"text": "w10"}, {"text": None}], "Row 1: `text` is None"),
        ([{"prompt": "w10", "completion": " w11"}, {"prompt": "w10", "completion": None}], "Row 1: `completion`"),
        ([{"messages": [user("w10")]}, {"messages": []}], "Row 1: `messages`"),
    ],
)
def test_a_row_that_cannot_be_read_is_named(make, rows, named):
    with pytest.raises(DataError, match=named):
        prepare_sft_dataset(make(Dataset.from_list(rows)), word_tokenizer())


def test_the_row_is_also_named_from_another_process():
    with pytest.raises(DataError, match="Row 3: `text` is None"):
        prepare_sft_dataset(texts("w10", "w11", "w12", None), word_tokenizer(), num_proc=2)


def test_the_row_at_which_a_template_fails_is_named():
    tokenizer = word_tokenizer(chat_template="{{ raise_exception('no roles') }}")
    with pytest.raises(Exception, match="no roles") as caught:
        prepare_sft_dataset(Dataset.from_list([{"messages": TALK}]), tokenizer)
    assert caught.value.__notes__ == ["This was row 0 of the dataset."]


@pytest.mark.parametrize("make", [lambda dataset: dataset, stream_of])
def test_a_template_without_markers_is_noticed_at_once(make):
    dataset = make(Dataset.from_list([{"messages": TALK}]))
    with pytest.raises(AssistantMaskError, match="Row 0: The chat template has no"):
        prepare_sft_dataset(dataset, word_tokenizer(), assistant_only=True)


def test_fields_that_the_table_fills_in_do_not_reach_the_template():
    named = {**user("w10"), "name": "f"}
    dataset = Dataset.from_list([{"messages": [named]}, {"messages": [user("w10")]}])
    assert dataset[1]["messages"][0]["name"] is None
    prepared = prepare_sft_dataset(dataset, word_tokenizer(chat_template=NAME_TEMPLATE))
    assert prepared["input_ids"][:] == [[10, 9], [10]]


PAIRS = Dataset.from_list(
    [
        {"prompt": "w10 w11 w12", "completion": " w20"},
        {"prompt": "w10", "completion": " w21 w22"},
        {"prompt": "w10 w11", "completion": " w23"},
    ]
)


def test_rows_with_nothing_to_learn_are_left_out_and_counted():
    with pytest.warns(UserWarning, match=r"1 of 3 rows have no token to learn from within `max_length=3`") as caught:
        prepared = prepare_sft_dataset(PAIRS, word_tokenizer(), max_length=3)
    assert len(caught) == 1
    assert prepared["input_ids"][:] == [[10, 21, 22], [10, 11, 23]]
    assert prepared["labels"][:] == [[-100, 21, 22], [-100, -100, 23]]
    ended = prepare_sft_dataset(PAIRS, word_tokenizer(), max_length=2, truncation_mode="keep_end")
    assert ended["labels"][:] == [[20, EOS], [22, EOS], [23, EOS]]


@pytest.mark.filterwarnings("ignore:Rows of the stream")
@pytest.mark.parametrize("make", [lambda dataset: dataset, stream_of])
def test_an_error_when_no_row_is_left(make):
    with pytest.raises(DataError, match=r"No row is left of .*within `max_length=1`: raise it"):
        prepare_sft_dataset(make(PAIRS), word_tokenizer(), max_length=1)
    with pytest.raises(DataError, match="is empty"):
        prepare_sft_dataset(make(PAIRS.select([])), word_tokenizer())


def test_a_stream_warns_once_of_rows_that_are_left_out():
    with pytest.warns(UserWarning, match="Rows of the stream have no token to learn from") as caught:
        rows = list(prepare_sft_dataset(stream_of(PAIRS), word_tokenizer(), max_length=3))
    assert [row["labels"] for row in rows] == [[-100, 21, 22], [-100, -100, 23]]
    assert len(caught) == 1


def test_merged_prompts_are_counted_in_one_warning():
    dataset = Dataset.from_list([{"prompt": "ca", "completion": "bcd"}] * 3 + [{"prompt": "a", "completion": "a"}])
    with pytest.warns(UserWarning, match="In 3 of 4 rows, as tokens, the prompt is not the beginning") as caught:
        prepared = prepare_sft_dataset(dataset, bpe_tokenizer())
    assert len(caught) == 1
    assert prepared["labels"][:] == [[-100, 7, 8, 1]] * 3 + [[-100, 3, 1]]
    with pytest.warns(UserWarning, match="In rows of the stream, as tokens") as caught:
        assert list(prepare_sft_dataset(stream_of(dataset), bpe_tokenizer())) == list(prepared)
    assert len(caught) == 1


def test_a_formatting_function_makes_the_text():
    dataset = Dataset.from_dict({"question": ["w10", "w11"], "answer": ["w20", "w21"], "text": ["w9", "w9"]})

    def join(row):
        return f"{row['question']} {row['answer']}"

    prepared = prepare_sft_dataset(dataset, word_tokenizer(), formatting_func=join)
    assert prepared["input_ids"][:] == [[10, 20, EOS], [11, 21, EOS]]


@pytest.mark.parametrize("option", ["completion_only", "assistant_only"])
def test_a_formatting_function_refuses_what_needs_parts(option):
    with pytest.raises(ConfigError, match=f"`{option}_loss=True` cannot be used with `formatting_func`"):
        prepare_sft_dataset(texts("w10"), word_tokenizer(), formatting_func=str, **{option: True})


def test_a_formatting_function_that_makes_no_text_is_named():
    with pytest.raises(DataError, match=r"Row 0: `formatting_func` is \['w10'\], not a text"):
        prepare_sft_dataset(texts("w10"), word_tokenizer(), formatting_func=lambda row: [row["text"]])


def test_the_same_call_gives_the_same_dataset_from_the_cache(tmp_path):
    texts("w10", "w11 w12").save_to_disk(tmp_path / "data")
    tokenizer = word_tokenizer()

    def prepare(**options):
        prepared = prepare_sft_dataset(load_from_disk(tmp_path / "data"), tokenizer, **options)
        written = {file.name for file in (tmp_path / "data").glob("cache-*")}
        return prepared._fingerprint, prepared[:], written

    first = prepare()
    tokenizer(["w10", "w11 w12"], padding=True, truncation=True, max_length=1)  # other work in between
    assert prepare() == first
    assert len(first[2]) == 1
    other = prepare(max_length=1)
    assert other[0] != first[0]
    assert len(other[2]) == 2
    assert prepare_sft_dataset(
        load_from_disk(tmp_path / "data"), word_tokenizer(chat_template=MARKED)
    )._fingerprint not in (first[0], other[0])


@settings(deadline=None, max_examples=50)
@given(prompt=st.text("abcd", max_size=6), completion=st.text("abcd", max_size=6), max_length=st.integers(1, 9))
def test_every_character_of_the_completion_is_learnt(prompt, completion, max_length):
    tokenizer = bpe_tokenizer()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        row = tokenize_sft_row({"prompt": prompt, "completion": completion}, tokenizer)
    learnt = [label for label in row["labels"] if label != -100]
    assert tokenizer.decode(row["input_ids"]) == prompt + completion + "<eos>"
    assert tokenizer.decode(learnt).endswith(completion + "<eos>")
    # at most the first learnt token, of two characters, reaches into the prompt
    assert len(tokenizer.decode(learnt)) <= len(completion + "<eos>") + 1
    for mode in ("keep_start", "keep_end"):
        cut = truncate(row, max_length, mode)
        assert len(cut["input_ids"]) == len(cut["labels"]) == min(max_length, len(row["labels"]))
        assert all(label in (-100, token) for token, label in zip(cut["input_ids"], cut["labels"]))
