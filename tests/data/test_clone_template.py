import copy
from typing import Any

import pytest
import torch
from fixtures.tokenizers import CHAT_TEMPLATE, EOS, EOS2, word_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from trl.chat_template_utils import clone_chat_template
from trl.errors import ConfigError


def make_model(rows: int = 64, *, tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=rows, eos_token_id=EOS, tie_word_embeddings=tied, **sizes))
    model.generation_config.eos_token_id = [EOS, EOS2]
    return model


@pytest.fixture
def source(tmp_path):
    """Folder of a tokenizer whose turns end with a token that the word tokenizer has not."""
    tokenizer = word_tokenizer(chat_template=CHAT_TEMPLATE.replace("<close>", "<|im_end|>"))
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "pad_token": "<|pad|>"})
    tokenizer.add_tokens(["<tool_call>"])
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


# 64 words and three added tokens, <|im_end|>, <|pad|> and <tool_call>
@pytest.mark.parametrize(
    ("rows", "multiple", "wanted_rows"),
    [(64, 64, 128), (64, None, 67), (64, 1, 67), (64, 8, 72), (68, 8, 72), (200, 64, 128), (64, 67, 67)],
)
def test_every_row_of_the_embeddings_gets_a_token(source, rows, multiple, wanted_rows):
    model, tokenizer = make_model(rows), word_tokenizer(chat_template=None)
    cloned_model, cloned, added = clone_chat_template(model, tokenizer, str(source), resize_to_multiple_of=multiple)
    assert (cloned_model is model, cloned is tokenizer) == (True, True)
    assert added == list(range(64, wanted_rows))
    assert len(tokenizer) == model.config.vocab_size == wanted_rows
    assert model.get_input_embeddings().weight.shape == model.get_output_embeddings().weight.shape == (wanted_rows, 8)
    tokens = tokenizer.convert_ids_to_tokens(added)
    assert sorted(tokens[:3]) == ["<tool_call>", "<|im_end|>", "<|pad|>"]
    assert tokens[3:] == [f"<extra_id_{index}>" for index in range(wanted_rows - 67)]


def test_template_and_eos_are_those_of_the_source(source):
    model, tokenizer, _ = clone_chat_template(make_model(), word_tokenizer(chat_template=None), str(source))
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.eos_token == "<|im_end|>"
    assert end == tokenizer.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id
    assert tokenizer.pad_token == "<pad>"
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "w10"}], return_dict=False)
    assert ids == [4, 6, 10, end]  # open, the role as an unknown word, the content, the end


@pytest.mark.parametrize("tied", [False, True])
def test_what_the_model_knew_is_kept(source, tied):
    model = make_model(tied=tied)
    before = [m.weight.detach().clone() for m in (model.get_input_embeddings(), model.get_output_embeddings())]
    clone_chat_template(model, word_tokenizer(chat_template=None), str(source))
    for module, weight in zip((model.get_input_embeddings(), model.get_output_embeddings()), before, strict=True):
        torch.testing.assert_close(module.weight[:64], weight, rtol=0, atol=0)
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) is tied
    assert model(input_ids=torch.tensor([[4, 127]])).logits.shape == (1, 2, 128)


def test_a_second_clone_adds_nothing(source):
    model, tokenizer, added = clone_chat_template(make_model(), word_tokenizer(chat_template=None), str(source))
    vocabulary = tokenizer.get_vocab()
    assert len(added) == 64
    assert clone_chat_template(model, tokenizer, str(source))[2] == []
    assert tokenizer.get_vocab() == vocabulary


def test_a_word_of_the_vocabulary_keeps_its_id_and_is_no_longer_cut(tmp_path):
    source = word_tokenizer(vocab_size=8)
    source.add_special_tokens({"eos_token": "w20"})
    source.save_pretrained(tmp_path)
    model, tokenizer, added = clone_chat_template(make_model(), word_tokenizer(chat_template=None), str(tmp_path))
    assert added == []
    assert (tokenizer.eos_token_id, model.config.eos_token_id, model.config.vocab_size) == (20, 20, 64)
    assert tokenizer("w10w20")["input_ids"] == [10, 20]


def test_placeholders_do_not_take_the_name_of_a_token(source):
    tokenizer = word_tokenizer(chat_template=None)
    tokenizer.add_tokens(["<extra_id_0>"])
    _, _, added = clone_chat_template(make_model(65), tokenizer, str(source), resize_to_multiple_of=70)
    # 64 words and <extra_id_0> were there; three tokens of the source and two placeholders make 70
    assert tokenizer.convert_ids_to_tokens(added)[3:] == ["<extra_id_1>", "<extra_id_2>"]
    assert added == [65, 66, 67, 68, 69]


def test_the_source_stays_as_it_is_and_a_model_may_have_no_generation_config(source):
    files = {path.name: path.read_bytes() for path in source.iterdir()}
    model = make_model()
    model.generation_config = None
    clone_chat_template(model, word_tokenizer(), str(source))
    assert {path.name: path.read_bytes() for path in source.iterdir()} == files
    assert model.generation_config is None


def test_a_source_without_template_and_an_impossible_multiple_are_refused(source, tmp_path_factory):
    plain = tmp_path_factory.mktemp("plain")
    word_tokenizer(chat_template=None).save_pretrained(plain)
    tokenizer = word_tokenizer()
    before = copy.deepcopy(tokenizer.get_vocab())
    with pytest.raises(ConfigError, match="without a chat template"):
        clone_chat_template(make_model(), tokenizer, str(plain))
    with pytest.raises(ValueError, match="`resize_to_multiple_of` is 0"):
        clone_chat_template(make_model(), tokenizer, str(source), resize_to_multiple_of=0)
    assert (tokenizer.get_vocab(), tokenizer.chat_template) == (before, CHAT_TEMPLATE)
