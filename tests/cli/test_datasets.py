"""Where datasets come from, mixtures, and the sentence for each thing that can be missing."""

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict, IterableDataset

from trl.cli.arguments import DatasetConfig, DatasetMixtureConfig, ScriptArguments
from trl.cli.datasets import check_columns, get_dataset, load_training_data, mixture_sizes
from trl.errors import ConfigError, DataError

ROWS = [{"prompt": str(number), "solution": number} for number in range(6)]


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets.config

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def write_rows(path: str, rows: list[dict[str, Any]] = ROWS) -> str:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("\n".join(json.dumps(row) for row in rows))
    return path


def load(name: str | None, evaluate: bool = False, **options: Any) -> Any:
    return load_training_data(ScriptArguments(dataset_name=name, **options), evaluate=evaluate)


@pytest.mark.parametrize("suffix", ["json", "jsonl", "csv", "parquet"])
def test_a_file(suffix: str) -> None:
    if suffix == "csv":
        Dataset.from_list(ROWS).to_csv("rows.csv")
    elif suffix == "parquet":
        Dataset.from_list(ROWS).to_parquet("rows.parquet")
    else:
        write_rows(f"rows.{suffix}")
    train, test = load(f"rows.{suffix}")
    assert train["solution"] == [0, 1, 2, 3, 4, 5]
    assert test is None


def test_a_file_has_no_second_split() -> None:
    write_rows("rows.jsonl")
    with pytest.raises(DataError, match=r"the file `rows\.jsonl` has no split `test`: set `eval_strategy` to `no`"):
        load("rows.jsonl", evaluate=True)


def test_a_folder_with_a_file_for_each_split() -> None:
    write_rows("data/train.jsonl")
    write_rows("data/test.jsonl", ROWS[:2])
    train, test = load("data", evaluate=True)
    assert (len(train), len(test)) == (6, 2)


def test_what_save_to_disk_wrote() -> None:
    whole = Dataset.from_list(ROWS)
    DatasetDict({"train": whole, "held_out": whole.select([0])}).save_to_disk("saved")
    train, test = load("./saved", evaluate=True, dataset_test_split="held_out")
    assert (len(train), len(test)) == (6, 1)
    with pytest.raises(DataError, match="no split `test`: set `dataset_test_split` to one of `train`, `held_out`"):
        load("saved", evaluate=True)
    whole.save_to_disk("single")
    assert len(load("single")[0]) == 6
    assert isinstance(load("single", dataset_streaming=True)[0], IterableDataset)


def test_a_function_gets_the_name_of_the_split() -> None:
    Path("cli_test_task.py").write_text(
        "def rows(split):\n    return [{'prompt': split}]\n\ndef bad(split):\n    return 3\n"
    )
    train, test = load("cli_test_task.rows", evaluate=True, dataset_test_split="held_out")
    assert train[0] == {"prompt": "train"}
    assert test[0] == {"prompt": "held_out"}
    with pytest.raises(DataError, match="must return a dataset or a list of rows"):
        load("cli_test_task.bad")
    with pytest.raises(DataError, match="the module `cli_test_task` has no function `rosw`"):
        load("cli_test_task.rosw")


def test_streaming() -> None:
    write_rows("rows.jsonl")
    train, _ = load("rows.jsonl", dataset_streaming=True)
    assert next(iter(train)) == ROWS[0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gone.jsonl", "the dataset `gone.jsonl` does not exist"),
        ("./gone", "the dataset `./gone` does not exist"),
        ("no_such_module.rows", "`no_such_module.rows` is no file, and as a path to a function it does not import"),
        ("nobody/nothing", "`nobody/nothing` cannot be loaded: it is not in the local cache, and HF_HUB_OFFLINE"),
        (None, "no dataset: set `dataset_name`"),
    ],
)
def test_what_is_missing_is_named(name: str | None, message: str) -> None:
    with pytest.raises((DataError, ConfigError), match=message):
        load(name)


def test_a_split_that_is_missing_and_a_file_that_is_broken() -> None:
    write_rows("data/train.jsonl")
    with pytest.raises(DataError, match=r'Unknown split "dev".*\(set `dataset_train_split`\)'):
        load("data", dataset_train_split="dev")
    Path("broken.jsonl").write_text("{nope")
    with pytest.raises(DataError, match=r"the dataset `broken\.jsonl` cannot be loaded: .*JSON"):
        load("broken.jsonl")


@pytest.mark.parametrize(
    ("lengths", "fractions", "sizes"),
    [
        ([100, 30], [1, 1], [30, 30]),
        ([100, 30], [3, 1], [90, 30]),
        ([100, 30], [0.75, 0.25], [90, 30]),
        ([10, 10, 10], [0.1, 0.2, 0.7], [1, 2, 10]),
        ([7], [0.3], [7]),
    ],
)
def test_mixture_sizes(lengths: list[int], fractions: list[float], sizes: list[int]) -> None:
    assert mixture_sizes(lengths, fractions) == sizes


def parts(*fractions: float | None) -> list[DatasetConfig]:
    for index in range(len(fractions)):
        write_rows(f"part{index}.jsonl", [{"prompt": f"{index}-{row}", "extra": row} for row in range(8)])
    return [
        DatasetConfig(path=f"part{index}.jsonl", columns=["prompt"], fraction=fraction)
        for index, fraction in enumerate(fractions)
    ]


def test_a_mixture_joins_its_parts_and_uses_no_row_twice() -> None:
    joined = get_dataset(DatasetMixtureConfig(datasets=parts(None, None)))["train"]
    assert joined.column_names == ["prompt"]
    assert len(joined) == 16
    shares = get_dataset(DatasetMixtureConfig(datasets=parts(3.0, 1.0)))["train"]["prompt"]
    assert sum(prompt.startswith("0-") for prompt in shares) == 8
    assert sum(prompt.startswith("1-") for prompt in shares) == 2
    assert len(set(shares)) == len(shares)


def test_a_mixture_has_priority_and_may_hold_out_rows() -> None:
    mixture = DatasetMixtureConfig(datasets=parts(None, None), test_split_size=0.25)
    train, test = load_training_data(ScriptArguments(dataset_name="ignored"), mixture, evaluate=True)
    assert test is not None
    assert isinstance(train, Dataset)
    assert isinstance(test, Dataset)
    assert (len(train), len(test)) == (12, 4)
    assert not set(train["prompt"]) & set(test["prompt"])
    whole = DatasetMixtureConfig(datasets=parts(None))
    with pytest.raises(ConfigError, match="set `test_split_size`"):
        load_training_data(ScriptArguments(), whole, evaluate=True)


@pytest.mark.parametrize(
    ("fractions", "options", "message"),
    [
        ((), {}, "`datasets` is empty"),
        ((1.0, None), {}, "for all datasets or for none"),
        ((1.0, 0.0), {}, "must be above 0"),
        ((1.0, 1.0), {"streaming": True}, "set `streaming` to false"),
        ((None,), {"streaming": True, "test_split_size": 0.5}, "set `streaming` to false"),
    ],
)
def test_mixtures_that_cannot_be(fractions: tuple[float | None, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        get_dataset(DatasetMixtureConfig(datasets=parts(*fractions), **options))


def test_columns_are_checked_in_streams_too() -> None:
    for dataset in (Dataset.from_list(ROWS), IterableDataset.from_generator(lambda: iter(ROWS))):
        check_columns(dataset, ["prompt"], "it")
        with pytest.raises(DataError, match="it has no column `text` \\(it has `prompt`, `solution`\\)"):
            check_columns(dataset, ["text"], "it")
    with pytest.raises(DataError, match="it is empty"):
        check_columns(Dataset.from_dict({"prompt": []}), ["prompt"], "it")
