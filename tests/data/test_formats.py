import pytest
from datasets import Dataset, DatasetDict, IterableDataset

from trl.data.formats import (
    common_prefix_length,
    extract_prompt,
    get_dataset_column_names,
    is_conversational,
    is_conversational_from_value,
    maybe_convert_to_chatml,
    maybe_extract_prompt,
    maybe_unpair_preference_dataset,
    prepare_multimodal_messages,
    remove_none_values,
    unpair_preference_dataset,
)
from trl.errors import DataError

USER = {"role": "user", "content": "q"}
GOOD = {"role": "assistant", "content": "yes"}
BAD = {"role": "assistant", "content": "no"}
PAIRS = {"prompt": ["p1", "p2"], "chosen": ["c1", "c2"], "rejected": ["r1", "r2"], "x": [1, 2]}
UNPAIRED = {
    "prompt": ["p1", "p2", "p1", "p2"],
    "x": [1, 2, 1, 2],
    "completion": ["c1", "c2", "r1", "r2"],
    "label": [True, True, False, False],
}


@pytest.mark.parametrize("column", ["prompt", "chosen", "rejected", "completion", "messages"])
def test_messages_in_any_column_make_a_row_conversational(column):
    assert is_conversational({column: [USER]})
    assert not is_conversational({column: "text"})
    assert not is_conversational({column: []})
    assert not is_conversational({column: ["text"]})
    assert not is_conversational({column: [{"from": "user", "value": "q"}]})


def test_other_columns_do_not_make_a_row_conversational():
    assert not is_conversational({"solution": [USER], "prompt": "q"})


def test_sharegpt_rows_are_recognised_by_from_and_value():
    assert is_conversational_from_value({"conversations": [{"from": "user", "value": "q"}]})
    assert not is_conversational_from_value({"conversations": [USER]})
    assert not is_conversational_from_value({"conversations": []})
    assert not is_conversational_from_value({"messages": [{"from": "user", "value": "q"}]})


def test_sharegpt_turns_become_messages():
    row = {"conversations": [{"from": "user", "value": "q"}, {"from": "assistant", "value": "a", "weight": 1}], "z": 1}
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": 1}]
    assert maybe_convert_to_chatml(row) == {"z": 1, "messages": messages}
    assert set(row) == {"conversations", "z"}


def test_sharegpt_speakers_get_the_roles_templates_know():
    row = {"prompt": [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
    assert [m["role"] for m in maybe_convert_to_chatml(row)["prompt"]] == ["system", "user", "assistant"]


@pytest.mark.parametrize("row", [{"messages": [USER]}, {"text": "q"}, {"conversations": []}, {"prompt": "q"}])
def test_rows_without_sharegpt_turns_stay_as_they_are(row):
    assert maybe_convert_to_chatml(row) == row


def test_none_fields_go_at_every_depth_and_list_items_stay():
    call = {"function": {"name": "f", "arguments": {"a": 1, "b": None}}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}, {**USER, "name": None}]
    assert remove_none_values(messages) == [
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
        USER,
    ]
    assert remove_none_values({"enum": [1, None], "falsy": [0, "", False, []]}) == {
        "enum": [1, None],
        "falsy": [0, "", False, []],
    }
    assert call["function"]["arguments"] == {"a": 1, "b": None}


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("The sky is blue", "The sky is green", "The sky is"),  # the blank opens the completions
        ("abc", "abd", "ab"),
        ("abc", "abc", "ab"),  # completions are never empty
        ("abc", "abcd", "ab"),
        ("a ", "b ", ""),
        ("", "x", ""),
        ([USER, GOOD], [USER, BAD], [USER]),
        ([USER], [USER], []),
    ],
)
def test_extract_prompt_splits_after_what_both_share(chosen, rejected, prompt):
    row = extract_prompt({"chosen": chosen, "rejected": rejected})
    assert row["prompt"] == prompt
    assert row["prompt"] + row["chosen"] == chosen
    assert row["prompt"] + row["rejected"] == rejected


def test_maybe_extract_prompt_keeps_a_prompt_of_the_same_format():
    text = {"prompt": "p", "chosen": "ab", "rejected": "ac"}
    assert maybe_extract_prompt(text) == text
    chat = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}
    assert maybe_extract_prompt(chat) == chat
    assert maybe_extract_prompt({"prompt": "p"}) == {"prompt": "p"}


def test_maybe_extract_prompt_replaces_a_missing_prompt_or_one_of_another_format():
    row = {"chosen": [USER, GOOD], "rejected": [USER, BAD], "margin": 2}
    wanted = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD], "margin": 2}
    assert maybe_extract_prompt(row) == wanted
    assert maybe_extract_prompt({**row, "prompt": None}) == wanted
    assert maybe_extract_prompt({**row, "prompt": "q"}) == wanted


def test_unpairing_stacks_chosen_over_rejected():
    assert unpair_preference_dataset(Dataset.from_dict(PAIRS)).to_dict() == UNPAIRED


def test_unpairing_works_batch_by_batch():
    rows = unpair_preference_dataset(Dataset.from_dict(PAIRS), batch_size=1)
    assert rows["completion"][:] == ["c1", "r1", "c2", "r2"]
    assert rows["label"][:] == [True, False, True, False]


def test_unpairing_is_done_for_streams_and_dicts_of_datasets():
    stream = Dataset.from_dict(PAIRS).to_iterable_dataset()
    rows = list(maybe_unpair_preference_dataset(stream, num_proc=None, desc="Unpairing"))
    assert {name: [row[name] for row in rows] for name in rows[0]} == UNPAIRED
    splits = maybe_unpair_preference_dataset(DatasetDict(train=Dataset.from_dict(PAIRS)))
    assert splits["train"].to_dict() == UNPAIRED


def test_sets_without_pairs_are_not_unpaired():
    dataset = Dataset.from_dict({"prompt": ["p"], "chosen": ["c"]})
    assert maybe_unpair_preference_dataset(dataset) is dataset


def test_column_names_of_all_kinds_of_sets():
    dataset = Dataset.from_dict({"a": [1], "b": [2]})

    def rows():
        yield {"a": 1, "b": 2}

    assert get_dataset_column_names(dataset) == ["a", "b"]
    assert get_dataset_column_names(DatasetDict(train=dataset)) == ["a", "b"]
    assert get_dataset_column_names(dataset.to_iterable_dataset()) == ["a", "b"]
    assert get_dataset_column_names(IterableDataset.from_generator(rows)) == ["a", "b"]  # declares no columns
    assert get_dataset_column_names([{"a": 1, "b": 2}]) == ["a", "b"]
    assert get_dataset_column_names([]) == []


@pytest.mark.parametrize(
    ("a", "b", "length"), [([1, 2, 3], [1, 2, 4], 2), ([], [1], 0), ([1, 2], [1, 2, 3], 2), ([7], [8], 0)]
)
def test_common_prefix_length(a, b, length):
    assert common_prefix_length(a, b) == common_prefix_length(b, a) == length


def text(value):
    return {"type": "text", "text": value}


def image(value):
    return {"type": "image", "image": value}


def test_images_come_before_the_text_of_the_first_user_message():
    messages = [{"role": "system", "content": "s"}, USER, GOOD, USER, {"role": "tool", "name": "f", "content": "t"}]
    contents = [m["content"] for m in prepare_multimodal_messages(messages, images=["I", "J"])]
    assert contents == [[text("s")], [image("I"), image("J"), text("q")], [text("yes")], [text("q")], [text("t")]]
    assert messages[1] == USER == {"role": "user", "content": "q"}


def test_empty_image_blocks_are_filled_in_order_and_filled_ones_kept():
    blocks = [image("X"), {"type": "image"}, text("q"), {"type": "image", "image": None, "text": None}]
    [message] = prepare_multimodal_messages([{"role": "user", "content": blocks}], images=["I", "J"])
    assert message["content"] == [image("X"), image("I"), text("q"), image("J")]
    assert blocks[1] == {"type": "image"}


def test_messages_without_content_are_left_alone():
    call = {"role": "assistant", "tool_calls": [{"type": "function"}]}
    assert prepare_multimodal_messages([call, {**call, "content": None}]) == [call, {**call, "content": None}]


@pytest.mark.parametrize(
    ("content", "images", "numbers"),
    [
        ([text("q")], ["I"], "0 empty image blocks for 1 images"),
        ([{"type": "image"}, text("q")], None, "1 empty image blocks for 0 images"),
        ([image("X"), text("q")], ["I"], "0 empty image blocks for 1 images"),
    ],
)
def test_as_many_images_as_places(content, images, numbers):
    with pytest.raises(ValueError, match=numbers):
        prepare_multimodal_messages([{"role": "user", "content": content}], images)


def test_a_place_in_blocks_and_one_before_a_string_are_both_counted():
    with pytest.raises(DataError, match="2 empty image blocks for 1 images"):
        prepare_multimodal_messages([{"role": "user", "content": [{"type": "image"}]}, USER], ["I"])


def test_an_unknown_role_is_named():
    with pytest.raises(DataError, match="'critic'"):
        prepare_multimodal_messages([{"role": "critic", "content": "x"}])
