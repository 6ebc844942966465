"""Dataset formats: what a row is, and how one format becomes another. Rows are never changed in place."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from trl.errors import DataError

if TYPE_CHECKING:
    import datasets

Message = dict[str, Any]
DatasetT = TypeVar("DatasetT", "datasets.Dataset", "datasets.DatasetDict", "datasets.IterableDataset")

MESSAGE_COLUMNS = ("prompt", "chosen", "rejected", "completion", "messages")
_MULTIMODAL_ROLES = ("system", "user", "assistant", "tool")
# what the ShareGPT exports call the two speakers
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}


def is_messages(value: Any) -> bool:
    """Whether a value is a list of messages: its first item is a dict with a `role`."""
    return isinstance(value, list) and len(value) > 0 and isinstance(value[0], dict) and "role" in value[0]


def is_conversational(example: Mapping[str, Any]) -> bool:
    """Whether a row holds messages, rather than text, in one of its prompt, completion or messages columns."""
    return any(is_messages(example.get(column)) for column in MESSAGE_COLUMNS)


def is_conversational_from_value(example: Mapping[str, Any]) -> bool:
    """Whether a row is in the ShareGPT format: `conversations`, a list of dicts with `from` and `value`."""
    turns = example.get("conversations")
    return (
        isinstance(turns, list) and len(turns) > 0 and isinstance(turns[0], dict) and {"from", "value"} <= set(turns[0])
    )


def remove_none_values(value: Any) -> Any:
    """A copy of a nested record without the dict keys whose value is None.

    A table gives every record the same fields and fills the absent ones with None, which templates would then print.
    Items of lists keep their places.
    """
    if isinstance(value, dict):
        return {key: remove_none_values(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [remove_none_values(item) for item in value]
    return value


def maybe_convert_to_chatml(example: dict[str, Any]) -> dict[str, Any]:
    """The row with ShareGPT turns as messages; any other row unchanged.

    `from` becomes `role`, `value` becomes `content`, `conversations` becomes `messages`. The speakers `human` and
    `gpt`, which no chat template knows, become `user` and `assistant`.
    """
    columns = [column for column in (*MESSAGE_COLUMNS, "conversations") if _has_turns(example.get(column))]
    converted = {column: [_turn_to_message(turn) for turn in example[column]] for column in columns}
    if "conversations" in converted:
        converted["messages"] = converted.pop("conversations")
        example = {key: value for key, value in example.items() if key != "conversations"}
    return {**example, **converted}


def _has_turns(value: Any) -> bool:
    """Whether a value is a list of ShareGPT turns."""
    return isinstance(value, list) and len(value) > 0 and isinstance(value[0], dict) and "from" in value[0]


def _turn_to_message(turn: Message) -> Message:
    """One ShareGPT turn as a message; further keys are kept."""
    rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
    return {"role": _SHAREGPT_ROLES.get(turn["from"], turn["from"]), "content": turn.get("value"), **rest}


def common_prefix_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Number of leading items that are equal in both sequences."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def extract_prompt(example: Mapping[str, Any]) -> dict[str, Any]:
    """`{"prompt", "chosen", "rejected"}`: the part that chosen and rejected share, and what is left of each.

    Works on characters or on messages. Neither completion is ever empty unless it was: equal texts keep their last
    item apart. A blank just before the split opens the completions instead of ending the prompt.
    """
    chosen, rejected = example["chosen"], example["rejected"]
    split = max(0, min(common_prefix_length(chosen, rejected), len(chosen) - 1, len(rejected) - 1))
    if split > 0 and chosen[split - 1] == " ":
        split -= 1
    return {"prompt": chosen[:split], "chosen": chosen[split:], "rejected": rejected[split:]}


def maybe_extract_prompt(example: dict[str, Any]) -> dict[str, Any]:
    """The row with the prompt that its chosen and rejected share taken out of them.

    Unchanged when it is not a preference row, or has a prompt already, of the same format as its completions.
    """
    if "chosen" not in example or "rejected" not in example:
        return example
    if example.get("prompt") is not None:
        formats = {is_messages(example[column]) for column in ("prompt", "chosen")}
        if len(formats) == 1:
            return example
    return {**example, **extract_prompt(example)}


def unpair_preference_dataset(dataset: DatasetT, **map_kwargs: Any) -> DatasetT:
    """The preference rows as twice as many rows `completion`, `label`; all other columns are repeated.

    In each batch of the map the chosen ones (label True) come first, then the rejected ones (label False).

    Args:
        dataset: a dataset, a dict of datasets, or an iterable one, with the columns `chosen` and `rejected`.
        **map_kwargs: passed to `dataset.map`.
    """
    return dataset.map(_unpair, batched=True, remove_columns=["chosen", "rejected"], **map_kwargs)


def _unpair(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """One batch of columns with chosen and rejected stacked."""
    chosen, rejected = batch["chosen"], batch["rejected"]
    others = {name: column + column for name, column in batch.items() if name not in ("chosen", "rejected")}
    return {**others, "completion": chosen + rejected, "label": [True] * len(chosen) + [False] * len(rejected)}


def maybe_unpair_preference_dataset(
    dataset: DatasetT, num_proc: int | None = None, desc: str | None = None
) -> DatasetT:
    """The dataset unpaired by `unpair_preference_dataset` if it has `chosen` and `rejected`, else unchanged."""
    from datasets import IterableDataset

    if not {"chosen", "rejected"} <= set(get_dataset_column_names(dataset)):
        return dataset
    # a stream is mapped lazily: no processes, no progress bar
    map_kwargs = {} if isinstance(dataset, IterableDataset) else {"num_proc": num_proc, "desc": desc}
    return unpair_preference_dataset(dataset, **map_kwargs)


def get_dataset_column_names(dataset: Iterable[Any]) -> list[str]:
    """Names of the columns; of the first split of a dict of datasets, of the first row where a stream has none."""
    from datasets import Dataset, DatasetDict, IterableDataset

    if isinstance(dataset, DatasetDict):
        return get_dataset_column_names(next(iter(dataset.values())))
    if isinstance(dataset, Dataset | IterableDataset) and dataset.column_names is not None:
        return list(dataset.column_names)
    return list(next(iter(dataset), {}))


def prepare_multimodal_messages(messages: list[Message], images: Sequence[Any] | None = None) -> list[Message]:
    """The messages with every content as a list of blocks, and the images in their places.

    A string becomes a text block. The first user message that is a string gets a place for every image before its
    text. Images fill the image blocks that hold none, in order; blocks that hold one already are kept.

    Args:
        messages: `role` is system, user, assistant or tool; `content` a string, a list of blocks, or missing.
        images: one for each empty image block.

    Raises:
        DataError: another role, or not as many images as places.
    """
    images = list(images or [])
    prepared, pending = [], len(images)
    for message in messages:
        if message["role"] not in _MULTIMODAL_ROLES:
            raise DataError(f"A message has the role {message['role']!r}: use one of {', '.join(_MULTIMODAL_ROLES)}.")
        content = message.get("content")
        if isinstance(content, str):
            places = pending if message["role"] == "user" else 0
            pending -= places
            content = [*({"type": "image"} for _ in range(places)), {"type": "text", "text": content}]
        elif isinstance(content, list):
            content = remove_none_values(content)
        prepared.append({**message, "content": content} if "content" in message else dict(message))
    _fill_images(prepared, images)
    return prepared


def _fill_images(messages: list[Message], images: list[Any]) -> None:
    """Put the images into the image blocks that have nothing but their type."""
    blocks = [block for message in messages for block in message.get("content") or []]
    empty = [block for block in blocks if block == {"type": "image"}]
    if len(empty) != len(images):
        raise DataError(
            f"The messages have {len(empty)} empty image blocks for {len(images)} images: give each image one block "
            '`{"type": "image"}`, or write the content of a user message as a string to have them put before it.'
        )
    for block, image in zip(empty, images):
        block["image"] = image
