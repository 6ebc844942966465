"""The datasets that options name: hub ids, local folders and files, functions, mixtures."""

import importlib
import logging
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl.cli.arguments import DatasetConfig, DatasetMixtureConfig, ScriptArguments
from trl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from typing import TypeAlias

    from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict

    AnyDataset: TypeAlias = Dataset | IterableDataset

_BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
_DOTTED_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_MIXTURE_SEED = 0


def load_training_data(
    script_args: ScriptArguments, mixture: DatasetMixtureConfig | None = None, evaluate: bool = False
) -> "tuple[AnyDataset, AnyDataset | None]":
    """The training dataset, and the evaluation dataset if `evaluate`.

    Args:
        script_args: names the dataset and its splits.
        mixture: several datasets; has priority if it names any.
        evaluate: whether the test split is read. It must exist then.

    Raises:
        ConfigError: neither names a dataset.
        DataError: a dataset or a split does not exist or cannot be read.
    """
    if mixture is not None and mixture.datasets:
        splits = get_dataset(mixture)
        if evaluate and "test" not in splits:
            raise ConfigError("evaluation needs a test split: set `test_split_size`, or `eval_strategy` to `no`.")
        return splits["train"], splits["test"] if evaluate else None
    if script_args.dataset_name is None:
        raise ConfigError("no dataset: set `dataset_name`, or `datasets` for a mixture.")
    train = _load_split(script_args, script_args.dataset_train_split, "dataset_train_split")
    if not evaluate:
        return train, None
    return train, _load_split(script_args, script_args.dataset_test_split, "dataset_test_split")


def get_dataset(mixture_config: DatasetMixtureConfig) -> "DatasetDict | IterableDatasetDict":
    """The datasets of a mixture joined as the split `train`, with a split `test` if `test_split_size` is set.

    Fractions are shares of the mixture. All datasets have one or none has, they are normalised to sum to 1, and the
    mixture is as large as it can be with every row used at most once; which rows are kept is drawn with a fixed seed.

    Raises:
        ConfigError: no datasets, a fraction that cannot be followed, or a test split of a stream.
        DataError: a dataset cannot be loaded.
    """
    from datasets import DatasetDict, IterableDatasetDict, concatenate_datasets

    _check_mixture(mixture_config)
    parts = [_load_part(part, mixture_config.streaming) for part in mixture_config.datasets]
    fractions = [part.fraction for part in mixture_config.datasets if part.fraction is not None]
    if fractions:
        sizes = mixture_sizes([len(part) for part in parts], fractions)
        parts = [part.shuffle(seed=_MIXTURE_SEED).select(range(size)) for part, size in zip(parts, sizes)]
    joined = concatenate_datasets(parts)
    if mixture_config.streaming:
        return IterableDatasetDict({"train": joined})
    if mixture_config.test_split_size is None:
        return DatasetDict({"train": joined})
    size = mixture_config.test_split_size
    return joined.train_test_split(test_size=size if size < 1 else int(size), seed=_MIXTURE_SEED)


def mixture_sizes(lengths: Sequence[int], fractions: Sequence[float]) -> list[int]:
    """Rows taken of each dataset: as many as `lengths` allow with the proportions of `fractions`.

    Lengths 100 and 30 with fractions 1 and 1 give 30 and 30; with 3 and 1, 90 and 30.
    """
    total = min(length / fraction for length, fraction in zip(lengths, fractions))
    return [min(length, math.floor(total * fraction + 1e-9)) for length, fraction in zip(lengths, fractions)]


def _check_mixture(mixture: DatasetMixtureConfig) -> None:
    fractions = [part.fraction for part in mixture.datasets]
    given = [fraction for fraction in fractions if fraction is not None]
    if not mixture.datasets:
        raise ConfigError("no dataset: `datasets` is empty.")
    if given and len(given) < len(fractions):
        raise ConfigError(f"`fraction` must be set for all datasets or for none (got {fractions}).")
    if any(fraction <= 0 for fraction in given):
        raise ConfigError(f"`fraction` must be above 0 (got {fractions}).")
    if given and mixture.streaming:
        raise ConfigError("`fraction` needs the datasets' lengths: set `streaming` to false, or remove the fractions.")
    if mixture.streaming and mixture.test_split_size is not None:
        raise ConfigError("`test_split_size` needs the mixture's length: set `streaming` to false.")


def _load_part(part: DatasetConfig, streaming: bool) -> Any:
    details = {"name": part.name, "data_dir": part.data_dir, "data_files": part.data_files}
    explicit = {name: value for name, value in details.items() if value is not None}
    dataset = _open(part.path, part.split, "split", streaming, explicit)
    if part.columns is None:
        return dataset
    check_columns(dataset, part.columns, f"the dataset `{part.path}`")
    return dataset.select_columns(part.columns)


def _load_split(script_args: ScriptArguments, split: str, setting: str) -> "AnyDataset":
    details = {} if script_args.dataset_config is None else {"name": script_args.dataset_config}
    return _open(str(script_args.dataset_name), split, setting, script_args.dataset_streaming, details)


def _open(name: str, split: str, setting: str, streaming: bool, details: dict[str, Any]) -> Any:
    """One split of the dataset `name`. `setting` is the option that chose the split, for errors."""
    path = Path(name).expanduser()
    if path.is_file() and path.suffix in _BUILDERS:
        return _open_file(path, split, setting, streaming)
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        return _open_saved(path, split, setting, streaming)
    if path.suffix in _BUILDERS or (not path.exists() and name.startswith((".", "/", "~"))):
        raise DataError(f"the dataset `{name}` does not exist: check `dataset_name`.")
    if not path.exists() and _DOTTED_PATH.fullmatch(name):
        return _call(name, split, streaming)
    return _load(name, split, setting, streaming, details)


def _open_file(path: Path, split: str, setting: str, streaming: bool) -> Any:
    if setting == "dataset_test_split":
        raise DataError(
            f"the file `{path}` has no split `{split}`: set `eval_strategy` to `no`, or put a file for each split "
            "into a folder and name the folder."
        )
    return _load(_BUILDERS[path.suffix], split, setting, streaming, {"data_files": {split: str(path)}}, str(path))


def _open_saved(path: Path, split: str, setting: str, streaming: bool) -> Any:
    """A folder that `save_to_disk` wrote: one dataset, which counts as the training split, or several splits."""
    from datasets import DatasetDict, load_from_disk

    with _one_sentence(str(path), setting):
        saved = load_from_disk(str(path))
    splits = saved if isinstance(saved, DatasetDict) else {"train": saved}
    if split not in splits:
        names = ", ".join(f"`{known}`" for known in splits)
        raise DataError(f"the dataset `{path}` has no split `{split}`: set `{setting}` to one of {names}.")
    return splits[split].to_iterable_dataset() if streaming else splits[split]


def _call(dotted_path: str, split: str, streaming: bool) -> Any:
    """The dataset that a function of the user returns for `split`: a dataset, or a list of rows."""
    from datasets import Dataset, IterableDataset

    dataset = _find_function(dotted_path)(split)
    if isinstance(dataset, list):
        dataset = Dataset.from_list(dataset)
    if not isinstance(dataset, Dataset | IterableDataset):
        raise DataError(
            f'`{dotted_path}("{split}")` must return a dataset or a list of rows (got a {type(dataset).__name__}).'
        )
    return dataset.to_iterable_dataset() if streaming and isinstance(dataset, Dataset) else dataset


def _find_function(dotted_path: str) -> Callable[[str], Any]:
    module_name, _, name = dotted_path.rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), name)
    except ImportError as error:
        raise DataError(
            f"the dataset `{dotted_path}` is no file, and as a path to a function it does not import ({error}): check "
            "`dataset_name`."
        ) from error
    except AttributeError as error:
        raise DataError(f"the module `{module_name}` has no function `{name}`: check `dataset_name`.") from error


def _load(
    source: str, split: str, setting: str, streaming: bool, details: dict[str, Any], name: str | None = None
) -> Any:
    from datasets import load_dataset

    with _one_sentence(name or source, setting):
        return load_dataset(source, split=split, streaming=streaming, **details)


@contextmanager
def _one_sentence(name: str, setting: str) -> Iterator[None]:
    """Turn what loading raises into one sentence, and keep progress bars out of logs and pipes."""
    import datasets

    level = datasets.logging.get_verbosity()
    bars = not datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(logging.CRITICAL)
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        yield
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"the dataset `{name}` cannot be loaded: {_reason(error, setting)}") from error
    finally:
        datasets.logging.set_verbosity(level)
        if bars:
            datasets.enable_progress_bars()


def _reason(error: Exception, setting: str) -> str:
    from datasets import config

    text = " ".join(str(error.__cause__ or error).split()).rstrip(".")
    if text.startswith("Unknown split"):
        return f"{text} (set `{setting}`)."
    if config.HF_HUB_OFFLINE and isinstance(error, ConnectionError):
        return "it is not in the local cache, and HF_HUB_OFFLINE forbids to fetch it."
    return f"{text}."


def check_columns(dataset: "AnyDataset", columns: Sequence[str], who: str) -> None:
    """Raise unless `dataset` has rows and all of `columns`.

    Raises:
        DataError: it is empty, or a column is missing.
    """
    from datasets import Dataset

    found = dataset.column_names
    if found is None:  # a stream whose columns only its rows tell
        found = list(next(iter(dataset), {}))
    missing = [column for column in columns if column not in found]
    if missing and found:
        names = ", ".join(f"`{column}`" for column in found)
        raise DataError(
            f"{who} has no column `{missing[0]}` (it has {names}): rename a column or choose another dataset."
        )
    if not found or (isinstance(dataset, Dataset) and len(dataset) == 0):
        raise DataError(f"{who} is empty.")
