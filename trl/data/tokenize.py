"""Rows to token ids for training on fixed data: supervised fine-tuning, and what the preference rows share with it.

Nothing is padded and no tokenizer is changed. `labels` are the ids where a token is learnt, and -100 elsewhere.
"""

import reprlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from trl._version import __version__
from trl.data.chat import (
    encode_completions,
    encode_conversation,
    encode_marked_conversation,
    encode_text,
    single_eos,
)
from trl.data.formats import Message, get_dataset_column_names, maybe_convert_to_chatml, remove_none_values
from trl.errors import ConfigError, DataError

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

Row = Mapping[str, Any]
DatasetT = TypeVar("DatasetT", "datasets.Dataset", "datasets.IterableDataset")

IGNORED = -100
"""The label of a token that is not learnt."""
MERGED = "merged"
"""In an encoded row: whether the tokens of its prompt are not the first tokens of prompt and completion."""
TRUNCATION_MODES = ("keep_start", "keep_end")

_STREAM_BATCH = 16  # rows that a stream reads ahead
_MERGED_ADVICE = (
    "as tokens, the prompt is not the beginning of prompt and completion, so the completion counts from the first "
    "token that differs. End prompts where a token ends (a blank belongs to the completion), or correct the template."
)


def tokenize_sft_row(
    row: Row,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    text_field: str = "text",
    completion_only: bool | None = None,
    assistant_only: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> dict[str, list[int]]:
    """`{"input_ids", "labels"}` of one row, of equal length, not truncated.

    A text, and a completion that is a text, end with exactly one EOS. Messages end as the template ends them.

    Args:
        row: one of
            `input_ids`, with `labels`, or `completion_mask` and `assistant_masks`, or nothing: taken as they are;
            `prompt` and `completion`, both texts or both messages;
            `messages`, or ShareGPT's `conversations`;
            a text in `text_field`.
            With messages, `tools` (a list of schemas, or JSON) and `chat_template_kwargs` are read too.
        tokenizer: with a chat template if there are messages.
        text_field: column of the text.
        completion_only: whether the prompt is not learnt. None is True; rows without a prompt are learnt as a whole.
        assistant_only: learn only what the chat template marks as written by the assistant.
        chat_template_kwargs: variables for the template; those of the row come first.

    Raises:
        AssistantMaskError: `assistant_only`, and the template marks nothing in the row.
        DataError: a column that is missing, None or of another type.
    """
    encoded = _encode_sft_row(
        row,
        tokenizer,
        text_field=text_field,
        completion_only=completion_only,
        assistant_only=assistant_only,
        chat_template_kwargs=chat_template_kwargs,
    )
    return warn_if_merged(encoded)


def prepare_sft_dataset(
    dataset: DatasetT,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    text_field: str = "text",
    completion_only: bool | None = None,
    assistant_only: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    formatting_func: Callable[[dict[str, Any]], str] | None = None,
    max_length: int | None = None,
    truncation_mode: str = "keep_start",
    num_proc: int | None = None,
    desc: str | None = None,
) -> DatasetT:
    """The dataset with the columns `input_ids` and `labels` of `tokenize_sft_row`, cut to `max_length`, in its order.

    Rows in which nothing is learnt are left out, with one warning. Of a stream, the first row is read at once.

    Args:
        dataset: its other columns are removed.
        tokenizer, text_field, completion_only, assistant_only, chat_template_kwargs: as in `tokenize_sft_row`.
        formatting_func: makes a text of a row; it is used instead of the row's columns.
        max_length: tokens of a row; None leaves all.
        truncation_mode: the end that is kept, `keep_start` or `keep_end`.
        num_proc: processes; a stream has none.
        desc: name of the progress bar.

    Raises:
        ConfigError: options that cannot be combined.
        DataError: a row that cannot be read, with its number, or no row that is left.
    """
    check_truncation(max_length, truncation_mode)
    if formatting_func is not None:
        for name, value in (("completion_only_loss", completion_only), ("assistant_only_loss", assistant_only)):
            if value:
                raise ConfigError(
                    f"`{name}=True` cannot be used with `formatting_func`, which makes one text of a row."
                )
    encode = partial(
        _encode_truncated,
        tokenizer=tokenizer,
        formatting_func=formatting_func,
        max_length=max_length,
        truncation_mode=truncation_mode,
        text_field=text_field,
        completion_only=completion_only,
        assistant_only=assistant_only,
        chat_template_kwargs=chat_template_kwargs,
    )
    return map_rows(
        dataset,
        RowMapper((encode,), _has_label, ("input_ids", "labels")),
        ids=("input_ids", "labels"),
        left_out="have no token to learn from" + (f" within `max_length={max_length}`: raise it" if max_length else ""),
        num_proc=num_proc,
        desc=desc,
    )


def truncate(row: Mapping[str, list[Any]], max_length: int | None, mode: str = "keep_start") -> dict[str, list[Any]]:
    """A copy of the row in which every list has its first, or last (`keep_end`), `max_length` items.

    Raises:
        ConfigError: another mode, or a length below 1.
    """
    check_truncation(max_length, mode)
    if max_length is None:
        return dict(row)
    kept = slice(max_length) if mode == "keep_start" else slice(-max_length, None)
    return {name: values[kept] for name, values in row.items()}


def check_truncation(max_length: int | None, mode: str) -> None:
    """Raises `ConfigError` for a length below 1, or a mode that is not known."""
    if mode not in TRUNCATION_MODES:
        raise ConfigError(f"`truncation_mode` is {mode!r}: use one of {', '.join(TRUNCATION_MODES)}.")
    if max_length is not None and max_length < 1:
        raise ConfigError(f"`max_length` is {max_length}: use at least 1, or None for whole rows.")


def _encode_truncated(
    row: dict[str, Any],
    formatting_func: Callable[[dict[str, Any]], str] | None,
    max_length: int | None,
    truncation_mode: str,
    **options: Any,
) -> dict[str, Any]:
    if formatting_func is not None:
        options["text_field"] = "formatting_func"
        row = {"formatting_func": formatting_func(row)}
    encoded = _encode_sft_row(row, **options)
    merged = encoded.pop(MERGED)
    return {**truncate(encoded, max_length, truncation_mode), MERGED: merged}


def _has_label(encoded: Row) -> bool:
    return any(label != IGNORED for label in encoded["labels"])


def _encode_sft_row(
    row: Row,
    tokenizer: "PreTrainedTokenizerBase",
    text_field: str,
    completion_only: bool | None,
    assistant_only: bool,
    chat_template_kwargs: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """`input_ids`, `labels` and `MERGED` of one row."""
    row = maybe_convert_to_chatml(dict(row))
    learn_prompt = completion_only is False
    if "input_ids" in row:
        return _take_tokens(row, learn_prompt, assistant_only)
    options = template_options(row, chat_template_kwargs)
    if {"prompt", "completion"} <= set(row):
        return _encode_completion(row, tokenizer, learn_prompt, assistant_only, options)
    for column in ("messages", "conversations"):
        if column in row:
            ids, mask = _encode_messages(row[column], column, tokenizer, assistant_only, options)
            return _labelled(ids, mask)
    if text_field not in row:
        raise DataError(
            f"There is no column `{text_field}`, nor `messages`, nor `prompt` and `completion` (there are "
            f"{', '.join(row) or 'none'}): set `dataset_text_field`, or rename a column."
        )
    text = checked(row, text_field, str)
    _refuse_assistant_only(assistant_only, text_field)
    ids = single_eos(encode_text(text, tokenizer), tokenizer)
    return _labelled(ids, [True] * len(ids))


def _take_tokens(row: Row, learn_prompt: bool, assistant_only: bool) -> dict[str, Any]:
    """A row that is tokenized already. Its own labels come before its masks."""
    ids = checked(row, "input_ids", list)
    names = [name for name in ("labels", "completion_mask", "assistant_masks") if name in row]
    for name in names:
        if len(checked(row, name, list)) != len(ids):
            raise DataError(f"`{name}` has {len(row[name])} items for {len(ids)} `input_ids`: give each token one.")
    if "labels" in names:
        return {"input_ids": list(ids), "labels": list(row["labels"]), MERGED: False}
    if assistant_only and "assistant_masks" not in names:
        raise DataError(
            "`assistant_only_loss` needs `assistant_masks` or `labels` beside `input_ids`: add one of them, or use "
            "`messages`."
        )
    masks = [row[name] for name in names if not (learn_prompt and name == "completion_mask")]
    return _labelled(ids, [all(marks) for marks in zip(*masks)] if masks else [True] * len(ids))


def _encode_completion(
    row: Row,
    tokenizer: "PreTrainedTokenizerBase",
    learn_prompt: bool,
    assistant_only: bool,
    options: dict[str, Any],
) -> dict[str, Any]:
    """A row with `prompt` and `completion`."""
    prompt = checked(row, "prompt", (str, list))
    completion = checked(row, "completion", type(prompt))
    encoded = encode_completions(prompt, {"completion": completion}, tokenizer, **options)
    (ids,) = encoded.wholes
    mask = [True] * len(ids)
    if assistant_only:
        if isinstance(prompt, str):
            _refuse_assistant_only(True, "prompt")
        mask = encode_marked_conversation(prompt + completion, tokenizer, column="completion", **options)[1]
    start = 0 if learn_prompt else encoded.start
    return {**_labelled(ids, [False] * start + mask[start:]), MERGED: encoded.merged}


def _encode_messages(
    messages: list[Message],
    column: str,
    tokenizer: "PreTrainedTokenizerBase",
    assistant_only: bool,
    options: dict[str, Any],
) -> tuple[list[int], list[bool]]:
    """The ids of a conversation, and of each whether it is learnt."""
    if assistant_only:
        return encode_marked_conversation(messages, tokenizer, column=column, **options)
    ids = encode_conversation(messages, tokenizer, column=column, **options)
    return ids, [True] * len(ids)


def _labelled(ids: Sequence[int], mask: Sequence[bool]) -> dict[str, Any]:
    labels = [token if learnt else IGNORED for token, learnt in zip(ids, mask, strict=True)]
    return {"input_ids": list(ids), "labels": labels, MERGED: False}


def _refuse_assistant_only(assistant_only: bool, column: str) -> None:
    if assistant_only:
        raise DataError(
            f"`assistant_only_loss` needs messages, but `{column}` is a text: turn it off, or use messages."
        )


def template_options(row: Row, chat_template_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """`tools` and `chat_template_kwargs` for the template; those of the row come first."""
    row_kwargs = remove_none_values(row.get("chat_template_kwargs") or {})
    return {"tools": row.get("tools"), "chat_template_kwargs": {**(chat_template_kwargs or {}), **row_kwargs}}


_TYPE_NAMES: dict[Any, str] = {
    str: "a text",
    list: "a list",
    (str, list): "a text or a list of messages",
    (bool, int): "true or false",
    (int, float): "a number",
}


def checked(row: Row, column: str, kind: Any) -> Any:
    """The value of a column; `DataError` if it is missing, None or of another type."""
    if column not in row:
        raise DataError(f"There is no column `{column}` (there are {', '.join(row) or 'none'}): add or rename one.")
    if not isinstance(row[column], kind):
        raise DataError(
            f"`{column}` is {reprlib.repr(row[column])}, not {_TYPE_NAMES[kind]}: correct or remove the row."
        )
    return row[column]


def warn_if_merged(encoded: dict[str, Any]) -> dict[str, Any]:
    """The encoded row without its note, about which a warning is given."""
    if encoded.pop(MERGED):
        warnings.warn(f"In this row, {_MERGED_ADVICE}", stacklevel=3)
    return encoded


@dataclass
class RowMapper:
    """A function of a batch of columns and the numbers of its rows, for `map`: the encoded rows as columns.

    Attributes:
        encoders: functions of a row. The rows of the first come before those of the second.
        keep: whether an encoded row is not left out.
        columns: of the encoded rows, without `MERGED`.
        version: part of the key under which a result is cached: another version of the package starts anew.
    """

    encoders: tuple[Callable[[dict[str, Any]], dict[str, Any]], ...]
    keep: Callable[[Row], bool]
    columns: tuple[str, ...]
    version: str = __version__

    def __call__(self, batch: Mapping[str, Sequence[Any]], numbers: Sequence[int]) -> dict[str, list[Any]]:
        columns = dict(batch)
        rows = [(number, {name: column[i] for name, column in columns.items()}) for i, number in enumerate(numbers)]
        encoded = []
        for encode in self.encoders:
            for number, row in rows:
                with _row_named(number):
                    encoded.append(encode(row))
        return self.collect(encoded)

    def collect(self, encoded: list[dict[str, Any]]) -> dict[str, list[Any]]:
        """The rows that are kept, as columns."""
        kept = [row for row in encoded if self.keep(row)]
        return {name: [row[name] for row in kept] for name in (*self.columns, MERGED)}


@dataclass
class _StreamMapper(RowMapper):
    """The mapper of a stream, whose rows cannot be counted: the first of each kind is warned about."""

    left_out: str = ""
    warned: set[str] = field(default_factory=set)

    def collect(self, encoded: list[dict[str, Any]]) -> dict[str, list[Any]]:
        columns = super().collect(encoded)
        if len(columns[MERGED]) < len(encoded):
            self._warn(f"Rows of the stream {self.left_out}. They are left out.")
        if any(columns.pop(MERGED)):
            self._warn(f"In rows of the stream, {_MERGED_ADVICE}")
        return columns

    def _warn(self, text: str) -> None:
        if text not in self.warned:
            self.warned.add(text)
            warnings.warn(text, stacklevel=2)


def map_rows(
    dataset: DatasetT,
    mapper: RowMapper,
    *,
    ids: Sequence[str],
    others: Mapping[str, str] | None = None,
    left_out: str,
    num_proc: int | None = None,
    desc: str | None = None,
) -> DatasetT:
    """The dataset of encoded rows, with the mapper's columns alone; what was left out or is doubtful is warned about.

    Args:
        dataset: a dataset, or an iterable one, whose first row is read at once.
        mapper: encodes.
        ids: columns of token ids.
        others: dtype of further columns.
        left_out: what is said of rows that the mapper does not keep, and what to do about them.
        num_proc: processes; not for an iterable dataset.
        desc: name of the progress bar.

    Raises:
        DataError: from the mapper, with the number of the row; no row is left; a dataset with a transform.
    """
    from datasets import Dataset, Features, IterableDataset, List, Value

    if not isinstance(dataset, Dataset | IterableDataset):
        raise TypeError(f"The dataset must be one of the datasets library (got {type(dataset).__name__}).")
    kinds = {**{name: List(Value("int32")) for name in ids}, **{k: Value(v) for k, v in (others or {}).items()}}
    columns = get_dataset_column_names(dataset)
    if isinstance(dataset, IterableDataset):
        batch_size = _STREAM_BATCH if len(mapper.encoders) == 1 else 1000
        stream = dataset.with_format(None).map(
            _StreamMapper(**vars(mapper), left_out=left_out),
            with_indices=True,
            batched=True,
            batch_size=batch_size,
            remove_columns=columns,
            features=Features(kinds),
        )
        if next(iter(stream), None) is None:
            empty = next(iter(dataset), None) is None
            raise DataError("The stream is empty." if empty else f"No row is left of the stream: its rows {left_out}.")
        return stream
    if dataset.format["type"] == "custom":
        raise DataError("The dataset has a transform (`with_transform`), which would be lost: apply it with `map`.")
    mapped = dataset.with_format(None).map(
        mapper,
        with_indices=True,
        batched=True,
        remove_columns=columns,
        features=Features({**kinds, MERGED: Value("bool")}),
        num_proc=num_proc,
        desc=desc,
    )
    _report(len(dataset) * len(mapper.encoders), mapped, left_out)
    return mapped.remove_columns(MERGED)


def _report(total: int, mapped: "datasets.Dataset", left_out: str) -> None:
    """Warn of rows that were left out and of prompts that are merged with their completions."""
    import pyarrow.compute as pc

    if len(mapped) == 0:
        raise DataError(f"No row is left of {total}: " + (f"they {left_out}." if total else "the dataset is empty."))
    if len(mapped) < total:
        warnings.warn(f"{total - len(mapped)} of {total} rows {left_out}. They are left out.", stacklevel=4)
    merged = pc.sum(mapped.data.column(MERGED)).as_py()
    if merged:
        warnings.warn(f"In {merged} of {len(mapped)} rows, {_MERGED_ADVICE}", stacklevel=4)


@contextmanager
def _row_named(number: int) -> Iterator[None]:
    """Puts the number of the row into whatever is raised."""
    try:
        yield
    except DataError as error:
        raise type(error)(f"Row {number}: {error}") from error
    except Exception as error:  # a template or a formatting function may raise anything
        error.add_note(f"This was row {number} of the dataset.")
        raise
