"""A chat template, and the tokens it needs, taken over from another tokenizer."""

from itertools import count
from typing import TYPE_CHECKING, TypeVar

from transformers import AutoTokenizer

from trl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ModelT = TypeVar("ModelT", bound="PreTrainedModel")
TokenizerT = TypeVar("TokenizerT", bound="PreTrainedTokenizerBase")


def clone_chat_template(
    model: ModelT, tokenizer: TokenizerT, source_tokenizer_path: str, resize_to_multiple_of: int | None = 64
) -> tuple[ModelT, TokenizerT, list[int]]:
    """Model and tokenizer, both changed, with another tokenizer's chat template, and the ids that are new to them.

    The tokenizer gets the template, the added tokens it lacks and the EOS token of the other one. The embeddings are
    resized to the number of tokens, rounded up; placeholder tokens fill the gap, so that every row of the embeddings
    has a token. The model's configs get the id of the EOS token. The other tokenizer stays as it is.

    Args:
        model: its embeddings are resized in place.
        tokenizer: of the model.
        source_tokenizer_path: folder or repository of a tokenizer with a chat template.
        resize_to_multiple_of: what the number of rows is to be a multiple of; None for no rounding and no placeholders.

    Returns:
        The model, the tokenizer and the new ids in ascending order, those of placeholders among them.

    Raises:
        ConfigError: the other tokenizer has no chat template; `resize_to_multiple_of` is less than 1.
    """
    if resize_to_multiple_of is not None and resize_to_multiple_of < 1:
        raise ConfigError(f"`resize_to_multiple_of` is {resize_to_multiple_of}: use a number from 1, or None.")
    source = AutoTokenizer.from_pretrained(source_tokenizer_path)
    if source.chat_template is None:
        raise ConfigError(
            f"`source_tokenizer_path` is {source_tokenizer_path!r}, a tokenizer without a chat template: name one "
            "that has a template, such as that of an instruct model."
        )
    known = set(tokenizer.get_vocab().values())
    tokenizer.chat_template = source.chat_template
    _add_missing_tokens(tokenizer, source)
    model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=resize_to_multiple_of)
    _fill_with_placeholders(tokenizer, model.config.get_text_config().vocab_size)
    for config in (model.config, model.config.get_text_config(), model.generation_config):
        if config is not None:
            config.eos_token_id = tokenizer.eos_token_id
    return model, tokenizer, sorted(set(tokenizer.get_vocab().values()) - known)


def _add_missing_tokens(tokenizer: "PreTrainedTokenizerBase", source: "PreTrainedTokenizerBase") -> None:
    """Gives a tokenizer the added tokens and the EOS token of another one.

    A token that is an ordinary word of the vocabulary keeps its id and is no longer cut.
    """
    known = tokenizer.get_added_vocab()
    added = source.added_tokens_decoder
    tokenizer.add_tokens([added[index] for index in sorted(added) if added[index].content not in known])
    if source.eos_token is not None:
        tokenizer.add_special_tokens({"eos_token": source.eos_token})


def _fill_with_placeholders(tokenizer: "PreTrainedTokenizerBase", size: int) -> None:
    """Adds tokens that nothing prints until the tokenizer has `size` of them."""
    vocabulary = tokenizer.get_vocab()
    names = (name for number in count() if (name := f"<extra_id_{number}>") not in vocabulary)
    tokenizer.add_tokens([next(names) for _ in range(size - len(tokenizer))])
