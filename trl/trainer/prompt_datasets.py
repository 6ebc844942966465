"""Datasets of prompts: what can be trained on, and how streams are read."""

import warnings
from collections.abc import Iterator
from typing import Any

import torch

from trl.data.formats import get_dataset_column_names
from trl.errors import ConfigError, DataError, NotSupportedError

ROW_COLUMNS = ("prompt", "completion", "completion_ids")
"""Columns of a row that reach reward functions under other names, or not at all."""


def check_prompt_datasets(train_dataset: Any, eval_dataset: Any) -> None:
    """Raises where a dataset cannot be trained on, before a model is loaded.

    Raises:
        ConfigError: no training dataset.
        TypeError: something else than a dataset.
        DataError: no column `prompt`.
        NotSupportedError: images.
    """
    if train_dataset is None:
        raise ConfigError("`train_dataset` is missing: pass a dataset with a `prompt` column.")
    _check_columns("train_dataset", train_dataset)
    for part in _parts(eval_dataset):
        _check_columns("eval_dataset", part)


def extra_columns(train_dataset: Any, eval_dataset: Any) -> Iterator[list[str]]:
    """The columns that reach reward functions, of each dataset that says beforehand which it has."""
    import datasets

    for dataset in [train_dataset, *_parts(eval_dataset)]:
        if isinstance(dataset, (datasets.Dataset, datasets.IterableDataset)):
            yield [name for name in get_dataset_column_names(dataset) if name not in ROW_COLUMNS]


def is_stream(dataset: Any) -> bool:
    """Whether rows can only be read one after the other."""
    import datasets

    return isinstance(dataset, (torch.utils.data.IterableDataset, datasets.IterableDataset))


def settings_for_streams(args: Any) -> None:
    """Lets every process read the whole stream and take its own rows."""
    args.accelerator_config.dispatch_batches = False
    if args.dataloader_num_workers:
        warnings.warn(
            "A streaming dataset is read in the main process: `dataloader_num_workers` is 0 now.", stacklevel=5
        )
        args.dataloader_num_workers = 0


def _parts(eval_dataset: Any) -> list[Any]:
    if eval_dataset is None:
        return []
    return list(eval_dataset.values()) if isinstance(eval_dataset, dict) else [eval_dataset]


def _check_columns(name: str, dataset: Any) -> None:
    import datasets

    if not isinstance(dataset, (datasets.Dataset, datasets.IterableDataset, torch.utils.data.Dataset, list)):
        raise TypeError(f"`{name}` must be a dataset, or for evaluation a dict of them (got {type(dataset).__name__}).")
    if not isinstance(dataset, (datasets.Dataset, datasets.IterableDataset, list)):
        return  # its rows are known only when they are read
    columns = get_dataset_column_names(dataset)
    if "prompt" not in columns:
        raise DataError(f"`{name}` has no column `prompt` (it has {', '.join(columns)}): rename the one that is.")
    if {"image", "images"} & set(columns):
        raise NotSupportedError(f"`{name}` has images, which are not supported yet: drop the column.")
