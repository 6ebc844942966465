"""The tokenizer that a dataset is prepared with."""

import copy
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from trl.data.templates.source import has_generation_markers
from trl.data.templates.training import get_training_chat_template
from trl.errors import ConfigError


def tokenizer_for_training(
    tokenizer: PreTrainedTokenizerBase, args: Any, *, assistant_only: bool = False
) -> PreTrainedTokenizerBase:
    """A copy of the tokenizer with the end-of-sequence token and chat template of the options; the tokenizer itself
    where they change nothing.

    Args:
        args: with `eos_token` and `chat_template_path`.
        assistant_only: the template must tell what the assistant says; one that does not is changed so that it does.

    Raises:
        ConfigError: a token or a template that cannot be had.
    """
    if args.eos_token is None and args.chat_template_path is None and not assistant_only:
        return tokenizer
    changed = copy.deepcopy(tokenizer)
    if args.eos_token is not None:
        if args.eos_token not in tokenizer.get_vocab():
            raise ConfigError(f"`eos_token={args.eos_token!r}` is not in the vocabulary: choose a token that is.")
        changed.eos_token = args.eos_token
    if args.chat_template_path is not None:
        changed.chat_template = _template_at(args.chat_template_path)
    if assistant_only and changed.chat_template and not has_generation_markers(changed.get_chat_template()):
        changed.chat_template = get_training_chat_template(changed) or changed.chat_template
    return changed


def _template_at(path: str) -> str:
    if path.endswith((".jinja", ".j2")):
        try:
            return Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"`chat_template_path={path!r}` cannot be read: {error}") from error
    try:
        source = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"`chat_template_path={path!r}` is no tokenizer and no .jinja file: {error}") from error
    if not source.chat_template:
        raise ConfigError(f"The tokenizer `{path}` has no chat template: choose another `chat_template_path`.")
    return str(source.chat_template)
