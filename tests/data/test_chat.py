import copy

import pytest
from fixtures.tokenizers import BOS, BOS_CHAT_TEMPLATE, CLOSE, EOS, EOS2, OPEN, UNK, bpe_tokenizer, word_tokenizer

from trl.data.chat import (
    apply_chat_template,
    decode_completions,
    encode_prompt,
    encode_text,
    maybe_apply_chat_template,
    single_bos,
)
from trl.errors import DataError

USER = {"role": "user", "content": "w10"}
GOOD = {"role": "assistant", "content": "w20"}
BAD = {"role": "assistant", "content": "w21"}
PROMPT = "<open> user w10 <close> <open> assistant"
PROMPT_IDS = [OPEN, UNK, 10, CLOSE, OPEN, UNK]  # role names are unknown words
TOOLS_TEMPLATE = "{% if tools is not none %}w8 {% endif %}{{ messages[-1].content }}"
NAME_TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{% if 'name' in message %} w9{% endif %} {% endfor %}"
)
KWARGS_TEMPLATE = "{{ messages[0].content }} {{ word is defined and word or 'w30' }}"


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"messages": [USER, GOOD]}, {"text": PROMPT + " w20 <close> "}),
        ({"messages": [USER]}, {"text": "<open> user w10 <close> "}),
        ({"prompt": [USER]}, {"prompt": PROMPT}),
        ({"prompt": [{"role": "tool", "content": "w10"}]}, {"prompt": PROMPT.replace("user", "tool")}),
        ({"prompt": [USER, GOOD]}, {"prompt": PROMPT + " w20"}),
        ({"prompt": [USER], "completion": [GOOD]}, {"prompt": PROMPT, "completion": " w20 <close> "}),
        (
            {"prompt": [USER], "completion": [GOOD], "label": False},
            {"prompt": PROMPT, "completion": " w20 <close> ", "label": False},
        ),
        (
            {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
            {"prompt": PROMPT, "chosen": " w20 <close> ", "rejected": " w21 <close> "},
        ),
        (
            {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
            {"chosen": PROMPT + " w20 <close> ", "rejected": PROMPT + " w21 <close> "},
        ),
    ],
)
def test_every_format_is_rendered(row, wanted):
    row = {**row, "solution": 3}
    before = copy.deepcopy(row)
    assert apply_chat_template(row, word_tokenizer()) == wanted
    assert maybe_apply_chat_template(row, word_tokenizer()) == wanted
    assert row == before


def test_prompt_is_cut_to_what_the_whole_conversation_shares():
    template = (
        "{% for m in messages %}<open> {{ m.content }} {% endfor %}{% if add_generation_prompt %}<open> w50{% endif %}"
    )
    row = apply_chat_template({"prompt": [USER], "completion": [GOOD]}, word_tokenizer(chat_template=template))
    assert row == {"prompt": "<open> w10 <open> w", "completion": "20 "}


@pytest.mark.parametrize("columns", [["messages", "prompt"], ["completion"], ["prompt", "chosen"], []])
def test_unknown_sets_of_columns_are_refused(columns):
    row = {column: [USER] for column in columns}
    with pytest.raises(KeyError, match="No format has the columns"):
        apply_chat_template(row, word_tokenizer())
    with pytest.raises(DataError, match="No format has the columns"):
        apply_chat_template(row, word_tokenizer())


def test_a_prompt_that_ends_with_another_role_is_refused():
    with pytest.raises(ValueError, match="'system'"):
        apply_chat_template({"prompt": [{"role": "system", "content": "w10"}]}, word_tokenizer())


def test_text_rows_are_unchanged_or_refused():
    row = {"prompt": "w10", "completion": "w11"}
    assert maybe_apply_chat_template(row, word_tokenizer()) is row
    with pytest.raises(DataError, match="list of messages"):
        apply_chat_template(row, word_tokenizer())


def test_kwargs_of_the_row_come_before_those_of_the_call():
    tokenizer = word_tokenizer(chat_template=KWARGS_TEMPLATE)

    def render(kwargs, **template_kwargs):
        return apply_chat_template({"messages": [USER], "chat_template_kwargs": kwargs}, tokenizer, **template_kwargs)

    assert render({"word": "w31"}, word="w32") == {"text": "w10 w31"}
    assert render({"word": None}, word="w32") == {"text": "w10 w32"}  # None is what a table fills in
    assert render(None) == {"text": "w10 w30"}


@pytest.mark.parametrize("tools", [None, [], "[]", ""])
def test_an_empty_tool_list_is_no_tools(tools):
    tokenizer = word_tokenizer(chat_template=TOOLS_TEMPLATE)
    assert apply_chat_template({"messages": [USER]}, tokenizer, tools=tools) == {"text": "w10"}
    assert apply_chat_template({"messages": [USER], "tools": tools}, tokenizer) == {"text": "w10"}
    assert encode_prompt([USER], tokenizer, tools=tools) == [10]


@pytest.mark.parametrize("tools", [[{"name": "f"}], '[{"name": "f"}]'])
def test_tools_reach_the_template(tools):
    tokenizer = word_tokenizer(chat_template=TOOLS_TEMPLATE)
    assert apply_chat_template({"messages": [USER]}, tokenizer, tools=tools) == {"text": "w8 w10"}
    assert apply_chat_template({"messages": [USER], "tools": tools}, tokenizer) == {"text": "w8 w10"}
    assert encode_prompt([USER], tokenizer, tools=tools) == [8, 10]


def test_tools_that_are_not_json_are_refused():
    with pytest.raises(DataError, match="not JSON"):
        encode_prompt([USER], word_tokenizer(), tools="f(x)")
    with pytest.raises(DataError, match="one dict"):
        encode_prompt([USER], word_tokenizer(), tools='{"name": "f"}')


def test_none_fields_do_not_reach_the_template():
    tokenizer = word_tokenizer(chat_template=NAME_TEMPLATE)
    named, filled = {**USER, "name": "f"}, {**USER, "name": None}
    assert encode_prompt([named], tokenizer) == [10, 9]
    assert encode_prompt([filled], tokenizer) == [10]
    assert apply_chat_template({"messages": [filled]}, tokenizer) == {"text": "w10 "}
    assert filled == {**USER, "name": None}


def test_none_fields_of_content_blocks_do_not_reach_the_template():
    tokenizer = word_tokenizer(
        chat_template="{{ messages[0].content[0].keys() | list | length == 2 and 'w7' or 'w8' }}"
    )
    assert encode_prompt(
        [{"role": "user", "content": [{"type": "text", "text": "w10", "image": None}]}], tokenizer
    ) == [7]


def test_conversational_prompts_get_the_generation_prompt():
    assert encode_prompt([USER], word_tokenizer()) == PROMPT_IDS
    assert encode_prompt([{"role": "system", "content": "w10"}], word_tokenizer()) == PROMPT_IDS


def test_a_last_assistant_message_is_left_open():
    assert encode_prompt([USER, GOOD], word_tokenizer()) == [*PROMPT_IDS, 20]


def test_template_kwargs_reach_the_template():
    tokenizer = word_tokenizer(chat_template=KWARGS_TEMPLATE)
    assert encode_prompt([USER], tokenizer, chat_template_kwargs={"word": "w31"}) == [10, 31]
    assert encode_prompt([USER], tokenizer, chat_template_kwargs={"word": None}) == [10, 30]
    assert encode_prompt([USER], tokenizer) == [10, 30]


def test_rendered_text_and_encoded_prompt_agree():
    tokenizer = word_tokenizer()
    for prompt in ([USER], [USER, GOOD], [USER, GOOD, USER]):
        text = apply_chat_template({"prompt": prompt}, tokenizer)["prompt"]
        assert encode_text(text, tokenizer) == encode_prompt(prompt, tokenizer)


@pytest.mark.parametrize("prompt", ["w10", "<bos> w10", "<bos> <bos> w10"])
def test_one_bos_before_a_plain_prompt(prompt):
    assert encode_prompt(prompt, word_tokenizer(add_bos=True)) == [BOS, 10]


def test_the_tokenizer_decides_whether_a_plain_prompt_has_a_bos():
    assert encode_prompt("w10 w11", word_tokenizer()) == [10, 11]


def test_one_bos_before_a_conversational_prompt():
    tokenizer = word_tokenizer(add_bos=True, chat_template=BOS_CHAT_TEMPLATE)
    assert encode_prompt([USER], tokenizer) == [BOS, *PROMPT_IDS]
    assert encode_prompt([USER, GOOD], tokenizer) == [BOS, *PROMPT_IDS, 20]
    text = apply_chat_template({"prompt": [USER]}, tokenizer)["prompt"]
    assert encode_text(text, tokenizer) == [BOS, *PROMPT_IDS]


def test_only_a_run_of_bos_at_the_start_is_cut():
    tokenizer = word_tokenizer()
    assert single_bos([BOS, BOS, 10, BOS, BOS], tokenizer) == [BOS, 10, BOS, BOS]
    assert single_bos([BOS, BOS], tokenizer) == [BOS]
    assert single_bos([10, 10], tokenizer) == [10, 10]
    assert single_bos([], tokenizer) == []
    assert single_bos([2, 2, 3], bpe_tokenizer()) == [2, 2, 3]  # no BOS token at all


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("prompt", ["", "  "])
def test_an_empty_prompt_starts_from_bos(prompt, add_bos):
    assert encode_prompt(prompt, word_tokenizer(add_bos=add_bos)) == [BOS]


def test_an_empty_prompt_without_a_bos_token_is_refused():
    with pytest.raises(DataError, match="The prompt '' has no tokens"):
        encode_prompt("", bpe_tokenizer())


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        (None, "`prompt` is None"),
        (3, "`prompt` is 3"),
        ([], r"`prompt` is \[\]"),
        (["w10"], "Message 0 of `prompt` is 'w10'"),
        ([USER, {"content": "w10"}], "Message 1 of `prompt`"),
        ([{"role": "user", "content": None}], "role but no content"),
        ([USER, {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}], "cannot be continued"),
    ],
)
def test_what_is_no_prompt_is_named(prompt, named):
    with pytest.raises(DataError, match=named):
        encode_prompt(prompt, word_tokenizer())


def test_messages_need_a_chat_template():
    with pytest.raises(DataError, match="no chat template"):
        encode_prompt([USER], word_tokenizer(chat_template=None))


@pytest.mark.parametrize("pad", ["own", "eos", "none"])
def test_pad_token_plays_no_part_and_the_tokenizer_is_unchanged(pad):
    tokenizer = word_tokenizer(pad=pad)
    before = (
        tokenizer.pad_token,
        tokenizer.padding_side,
        tokenizer.chat_template,
        len(tokenizer),
        tokenizer.backend_tokenizer.to_str(),
    )
    assert encode_prompt([USER], tokenizer) == PROMPT_IDS
    assert encode_prompt("w10 <eos>", tokenizer) == [10, EOS]
    assert decode_completions([[11, 12, EOS]], ["w10"], tokenizer) == ["w11 w12"]
    after = (
        tokenizer.pad_token,
        tokenizer.padding_side,
        tokenizer.chat_template,
        len(tokenizer),
        tokenizer.backend_tokenizer.to_str(),
    )
    assert after == before


def test_completions_have_the_format_of_their_prompts():
    ids = [[11, 12, EOS], [11, EOS2], [11], []]
    completions = decode_completions(ids, ["w10", [USER], [USER, GOOD], [USER]], word_tokenizer())
    assert completions == [
        "w11 w12",
        [{"role": "assistant", "content": "w11"}],
        [{"role": "assistant", "content": "w11"}],  # the new text alone
        [{"role": "assistant", "content": ""}],
    ]
    assert decode_completions([], [], word_tokenizer()) == []


def test_each_completion_needs_its_prompt():
    with pytest.raises(ValueError, match="shorter"):
        decode_completions([[11], [12]], ["w10"], word_tokenizer())


def test_fixture_bpe_merges_depend_on_neighbours():
    tokenizer = bpe_tokenizer()
    assert len(tokenizer) == 9
    assert encode_prompt("abcdac", tokenizer) == [7, 8, 3, 5]
    assert decode_completions([[7, 8, 1]], ["a"], tokenizer) == ["abcd"]


def test_fixture_words_are_called_by_their_id():
    tokenizer = word_tokenizer()
    assert tokenizer.convert_tokens_to_ids(["<pad>", "<eos>", "<eos2>", "<bos>", "<open>", "<close>", "<unk>"]) == list(
        range(7)
    )
    assert [tokenizer.convert_tokens_to_ids(f"w{i}") for i in range(7, 64)] == list(range(7, 64))
    assert len(tokenizer) == 64
