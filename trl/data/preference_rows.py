"""Rows of preferences to token ids: pairs, single judged completions, and whole conversations for a reward model.

A model predicts from at least one token, so the part of the prompt is never empty: it is BOS where the row has no
prompt, and the first token of the row where the tokenizer has no BOS.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from trl.data.chat import EncodedCompletions, encode_completions, encode_conversation, encode_text, single_eos
from trl.data.formats import get_dataset_column_names, maybe_convert_to_chatml, maybe_extract_prompt
from trl.data.tokenize import (
    MERGED,
    Row,
    RowMapper,
    check_truncation,
    checked,
    map_rows,
    template_options,
    warn_if_merged,
)
from trl.errors import DataError

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

DatasetT = TypeVar("DatasetT", "datasets.Dataset", "datasets.IterableDataset")
TemplateKwargs = Mapping[str, Any] | None

PREFERENCE_IDS = ("prompt_ids", "chosen_ids", "rejected_ids")
UNPAIRED_IDS = ("prompt_ids", "completion_ids")
REWARD_IDS = ("chosen_ids", "rejected_ids")


def tokenize_preference_row(
    row: Row,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    chat_template_kwargs: TemplateKwargs = None,
    max_length: int | None = None,
    truncation_mode: str = "keep_start",
) -> dict[str, list[int]]:
    """`{"prompt_ids", "chosen_ids", "rejected_ids"}` of one row; the prompt joins with each of the two.

    Each completion is tokenized together with the prompt. `prompt_ids` are the tokens that both share with the prompt
    alone; texts end with exactly one EOS. `max_length` is that of prompt and completion: `keep_start` may leave a
    completion empty; `keep_end` takes from the prompt what the longer of the two needs, but leaves it one token.

    Args:
        row: `chosen` and `rejected`, texts or messages, with their `prompt`; without it, or with one of the other
            format, what they share is the prompt. Or the three columns of the result.
        tokenizer: with a chat template if there are messages.
        chat_template_kwargs: variables for the template; those of the row come first. The row's `tools` are read too.
        max_length: None leaves all.
        truncation_mode: the end that is kept, `keep_start` or `keep_end`.

    Raises:
        DataError: a column that is missing, None or of another type; nothing to predict from.
    """
    check_truncation(max_length, truncation_mode)
    return warn_if_merged(_encode_pair(row, tokenizer, chat_template_kwargs, max_length, truncation_mode))


def tokenize_unpaired_row(
    row: Row,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    chat_template_kwargs: TemplateKwargs = None,
    max_length: int | None = None,
    truncation_mode: str = "keep_start",
) -> dict[str, Any]:
    """`{"prompt_ids", "completion_ids", "label"}` of one row.

    Args:
        row: `prompt` and `completion`, texts or messages, and `label`, whether the completion is good. Or the three
            columns of the result.
        tokenizer, chat_template_kwargs, max_length, truncation_mode: as in `tokenize_preference_row`.

    Raises:
        DataError: a column that is missing, None or of another type.
    """
    check_truncation(max_length, truncation_mode)
    return warn_if_merged(_encode_unpaired(row, tokenizer, chat_template_kwargs, max_length, truncation_mode))


def tokenize_reward_row(
    row: Row, tokenizer: "PreTrainedTokenizerBase", *, chat_template_kwargs: TemplateKwargs = None
) -> dict[str, Any]:
    """`{"chosen_ids", "rejected_ids"}` of one row, each with the prompt, and `margin` where the row has one.

    Args:
        row: `chosen` and `rejected`, texts or messages; with a `prompt` of their format, or whole. Or the columns of
            the result. `margin` is a number.
        tokenizer, chat_template_kwargs: as in `tokenize_preference_row`.

    Raises:
        DataError: a column that is missing, None or of another type; a text without tokens.
    """
    encoded = _encode_reward(row, tokenizer, chat_template_kwargs)
    del encoded[MERGED]
    return encoded


def prepare_preference_dataset(
    dataset: DatasetT,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    chat_template_kwargs: TemplateKwargs = None,
    max_length: int | None = None,
    truncation_mode: str = "keep_start",
    num_proc: int | None = None,
    desc: str | None = None,
) -> DatasetT:
    """The dataset with the columns of `tokenize_preference_row`, in its order.

    Rows whose completions were cut away are left out, with one warning. Of a stream, the first row is read at once.

    Args:
        dataset: its other columns are removed.
        tokenizer, chat_template_kwargs, max_length, truncation_mode: as in `tokenize_preference_row`.
        num_proc: processes; a stream has none.
        desc: name of the progress bar.

    Raises:
        DataError: a row that cannot be read, with its number, or no row that is left.
    """
    check_truncation(max_length, truncation_mode)
    encode = partial(
        _encode_pair,
        tokenizer=tokenizer,
        chat_template_kwargs=chat_template_kwargs,
        max_length=max_length,
        truncation_mode=truncation_mode,
    )
    mapper = RowMapper((encode,), _has_completions, PREFERENCE_IDS)
    return map_rows(
        dataset, mapper, ids=PREFERENCE_IDS, left_out=_no_completion(max_length), num_proc=num_proc, desc=desc
    )


def prepare_unpaired_dataset(
    dataset: DatasetT,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    chat_template_kwargs: TemplateKwargs = None,
    max_length: int | None = None,
    truncation_mode: str = "keep_start",
    num_proc: int | None = None,
    desc: str | None = None,
) -> DatasetT:
    """The dataset with the columns of `tokenize_unpaired_row`, in its order.

    A row with `chosen` and `rejected` becomes two: in each batch of 1000 rows the chosen ones come first, then the
    rejected ones. Rows whose completion was cut away are left out, with one warning.

    Args:
        dataset, tokenizer, chat_template_kwargs, max_length, truncation_mode, num_proc, desc: as in
            `prepare_preference_dataset`.

    Raises:
        DataError: a row that cannot be read, with its number, or no row that is left.
    """
    check_truncation(max_length, truncation_mode)
    options: dict[str, Any] = {
        "tokenizer": tokenizer,
        "chat_template_kwargs": chat_template_kwargs,
        "max_length": max_length,
        "truncation_mode": truncation_mode,
    }
    encoders: tuple[Callable[[dict[str, Any]], dict[str, Any]], ...] = (partial(_encode_unpaired, **options),)
    if {"chosen", "rejected"} <= set(get_dataset_column_names(dataset)):
        encoders = tuple(partial(_encode_half, half=half, **options) for half in ("chosen", "rejected"))
    return map_rows(
        dataset,
        RowMapper(encoders, _has_completions, (*UNPAIRED_IDS, "label")),
        ids=UNPAIRED_IDS,
        others={"label": "bool"},
        left_out=_no_completion(max_length),
        num_proc=num_proc,
        desc=desc,
    )


def prepare_reward_dataset(
    dataset: DatasetT,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    chat_template_kwargs: TemplateKwargs = None,
    max_length: int | None = None,
    num_proc: int | None = None,
    desc: str | None = None,
) -> DatasetT:
    """The dataset with the columns of `tokenize_reward_row`, in its order.

    Nothing is cut: a row with more than `max_length` tokens in one of its two is left out, with one warning.

    Args:
        dataset, tokenizer, chat_template_kwargs, num_proc, desc: as in `prepare_preference_dataset`.
        max_length: None keeps all.

    Raises:
        DataError: a row that cannot be read, with its number, or no row that is left.
    """
    check_truncation(max_length, "keep_start")
    others: dict[str, str] = {"margin": "float32"} if "margin" in get_dataset_column_names(dataset) else {}
    encode = partial(_encode_reward, tokenizer=tokenizer, chat_template_kwargs=chat_template_kwargs)
    return map_rows(
        dataset,
        RowMapper((encode,), partial(_is_short, max_length=max_length), (*REWARD_IDS, *others)),
        ids=REWARD_IDS,
        others=others,
        left_out=f"have more than {max_length} tokens: raise `max_length`",
        num_proc=num_proc,
        desc=desc,
    )


def _has_completions(encoded: Row) -> bool:
    return all(ids for name, ids in encoded.items() if name in (*PREFERENCE_IDS, *UNPAIRED_IDS))


def _is_short(encoded: Row, max_length: int | None) -> bool:
    return max_length is None or all(len(encoded[name]) <= max_length for name in REWARD_IDS)


def _no_completion(max_length: int | None) -> str:
    within = f" within `max_length={max_length}`: raise it" if max_length else ""
    return "have no token of a completion" + within


def _encode_pair(
    row: Row,
    tokenizer: "PreTrainedTokenizerBase",
    chat_template_kwargs: TemplateKwargs,
    max_length: int | None,
    truncation_mode: str,
) -> dict[str, Any]:
    merged = False
    if set(PREFERENCE_IDS) <= set(row):
        prompt, *completions = (list(checked(row, name, list)) for name in PREFERENCE_IDS)
    else:
        row, explicit = _with_prompt(row)
        encoded = _encode(row, ("chosen", "rejected"), tokenizer, chat_template_kwargs)
        prompt, completions = _split(encoded, tokenizer)
        merged = explicit and encoded.merged  # a prompt that was extracted ends where the texts differ, in any token
    prompt, completions = _cut(prompt, completions, max_length, truncation_mode)
    return {**dict(zip(PREFERENCE_IDS, (prompt, *completions), strict=True)), MERGED: merged}


def _encode_unpaired(
    row: Row,
    tokenizer: "PreTrainedTokenizerBase",
    chat_template_kwargs: TemplateKwargs,
    max_length: int | None,
    truncation_mode: str,
) -> dict[str, Any]:
    label = checked(row, "label", (bool, int))
    if label not in (0, 1):
        raise DataError(f"`label` is {label!r}: it is True for a good completion, False for a bad one.")
    merged = False
    if set(UNPAIRED_IDS) <= set(row):
        prompt, *completions = (list(checked(row, name, list)) for name in UNPAIRED_IDS)
    else:
        row = maybe_convert_to_chatml(dict(row))
        encoded = _encode(row, ("completion",), tokenizer, chat_template_kwargs)
        prompt, completions = _split(encoded, tokenizer)
        merged = encoded.merged
    prompt, (completion,) = _cut(prompt, completions, max_length, truncation_mode)
    return {"prompt_ids": prompt, "completion_ids": completion, "label": bool(label), MERGED: merged}


def _encode_half(row: Row, half: str, **options: Any) -> dict[str, Any]:
    """One completion of a pair, as an unpaired row."""
    row, explicit = _with_prompt(row)
    encoded = _encode_unpaired({**row, "completion": row[half], "label": half == "chosen"}, **options)
    return {**encoded, MERGED: explicit and encoded[MERGED]}


def _encode_reward(
    row: Row, tokenizer: "PreTrainedTokenizerBase", chat_template_kwargs: TemplateKwargs
) -> dict[str, Any]:
    margin = {"margin": float(checked(row, "margin", (int, float)))} if "margin" in row else {}
    if set(REWARD_IDS) <= set(row):
        return {**{name: list(checked(row, name, list)) for name in REWARD_IDS}, **margin, MERGED: False}
    row = maybe_convert_to_chatml(dict(row))
    options = template_options(row, chat_template_kwargs)
    encoded: dict[str, list[int]] = {}
    kind, prompt = type(checked(row, "chosen", (str, list))), row.get("prompt")
    for column, name in zip(("chosen", "rejected"), REWARD_IDS):
        value = checked(row, column, kind)
        whole = prompt + value if isinstance(prompt, kind) else value
        if isinstance(whole, str):
            encoded[name] = single_eos(encode_text(whole, tokenizer), tokenizer)
        else:
            encoded[name] = encode_conversation(whole, tokenizer, column=column, **options)
        if not encoded[name]:
            raise DataError(f"`{column}` is {value!r}, which has no tokens: remove the row.")
    return {**encoded, **margin, MERGED: False}


def _with_prompt(row: Row) -> tuple[dict[str, Any], bool]:
    """The pair with a prompt of its format, and whether that is the row's own."""
    row = maybe_convert_to_chatml(dict(row))
    chosen = checked(row, "chosen", (str, list))
    checked(row, "rejected", type(chosen))
    with_prompt = maybe_extract_prompt(row)
    return with_prompt, with_prompt is row


def _encode(
    row: Row, columns: tuple[str, ...], tokenizer: "PreTrainedTokenizerBase", chat_template_kwargs: TemplateKwargs
) -> EncodedCompletions:
    prompt = checked(row, "prompt", (str, list))
    completions = {column: checked(row, column, type(prompt)) for column in columns}
    return encode_completions(prompt, completions, tokenizer, **template_options(row, chat_template_kwargs))


def _split(encoded: EncodedCompletions, tokenizer: "PreTrainedTokenizerBase") -> tuple[list[int], list[list[int]]]:
    """Prompt and completions; the prompt has at least one token."""
    wholes, start = encoded.wholes, encoded.start
    if start == 0:
        start = 1
        if tokenizer.bos_token_id is not None:
            wholes = [[tokenizer.bos_token_id, *whole] for whole in wholes]
        elif len({tuple(whole[:1]) for whole in wholes}) > 1 or not wholes[0]:
            raise DataError(
                "The prompt has no tokens, and the tokenizer has no BOS token to predict from: write a prompt, or "
                "remove the row."
            )
    return wholes[0][:start], [whole[start:] for whole in wholes]


def _cut(
    prompt: list[int], completions: list[list[int]], max_length: int | None, mode: str
) -> tuple[list[int], list[list[int]]]:
    """Prompt and completions of at most `max_length` tokens together; the prompt stays one, with at least one token."""
    if max_length is None:
        return prompt, completions
    if mode == "keep_start":
        prompt = prompt[:max_length]
        return prompt, [ids[: max_length - len(prompt)] for ids in completions]
    prompt = prompt[-max(1, max_length - max(len(ids) for ids in completions)) :]
    room = max_length - len(prompt)
    return prompt, [ids[max(0, len(ids) - room) :] for ids in completions]
