from collections import Counter

import pytest
from datasets import Dataset, DatasetDict, Features, IterableDataset, LargeList, List, Value, load_from_disk
from fixtures.tokenizers import word_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from trl.data.packing import best_fit_decreasing, pack_dataset
from trl.data.tokenize import prepare_sft_dataset
from trl.errors import ConfigError, DataError

IDS = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10], [11]]
LABELS = [[-100, 2, 3, 4, 5], [-100, 7], [-100, -100, 10], [11]]
# rows of 5, 2, 3 and 1 tokens in rows of 4: 5 is cut to 4 (or split into 4 and 1), then 3, then 2, and each 1 goes into
# the fullest row that has space for it
PACKED = {
    "bfd": {"input_ids": [[1, 2, 3, 4], [8, 9, 10, 11], [6, 7]], "seq_lengths": [[4], [3, 1], [2]]},
    "bfd_split": {"input_ids": [[1, 2, 3, 4], [8, 9, 10, 5], [6, 7, 11]], "seq_lengths": [[4], [3, 1], [2, 1]]},
    "wrapped": {"input_ids": [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11]]},
}
CHAT = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "<open> assistant {% generation %}{{ m.content }} <close> {% endgeneration %}"
    "{% else %}<open> {{ m.role }} {{ m.content }} <close> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<open> assistant{% endif %}"
)
lengths_lists = st.lists(st.integers(0, 12), min_size=1, max_size=30)


def rows_of(lengths):
    """Rows of these lengths in which each token is another number, and its label the negative of it."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    ids = [list(range(start, start + length)) for start, length in zip(starts, lengths)]
    features = Features({"input_ids": List(Value("int32")), "labels": List(Value("int32"))})
    return Dataset.from_dict({"input_ids": ids, "labels": [[-i for i in row] for row in ids]}, features=features)


def flat(lists):
    return [item for row in lists for item in row]


def learnt(dataset):
    """How often each pair of token and label is in the dataset."""
    return Counter((i, label) for row in dataset for i, label in zip(row["input_ids"], row["labels"], strict=True))


@pytest.mark.parametrize("strategy", PACKED)
def test_the_worked_example(strategy):
    dataset = Dataset.from_dict({"input_ids": IDS})
    assert pack_dataset(dataset, 4, strategy)[:] == PACKED[strategy]
    assert dataset[:] == {"input_ids": IDS}


def test_best_fit_decreasing_is_the_default():
    assert pack_dataset(Dataset.from_dict({"input_ids": IDS}), 4)[:] == PACKED["bfd"]


@pytest.mark.parametrize("strategy", PACKED)
def test_all_columns_are_packed_in_step(strategy):
    words = [[f"w{i}" for i in row] for row in IDS]
    packed = pack_dataset(Dataset.from_dict({"labels": LABELS, "input_ids": IDS, "words": words}), 4, strategy)
    assert packed["input_ids"][:] == PACKED[strategy]["input_ids"]
    assert packed["words"][:] == [[f"w{i}" for i in row] for row in packed["input_ids"]]
    label_of = dict(zip(flat(IDS), flat(LABELS)))
    assert packed["labels"][:] == [[label_of[i] for i in row] for row in packed["input_ids"]]


def test_the_types_of_the_columns_stay():
    packed = pack_dataset(rows_of([3, 2]), 4)
    assert packed.features == Features({name: List(Value("int32")) for name in ("input_ids", "labels", "seq_lengths")})
    assert packed.format["type"] is None
    assert pack_dataset(rows_of([3, 2]).with_format("torch"), 4)[:] == packed[:]


@pytest.mark.parametrize("strategy", PACKED)
def test_empty_and_missing_lists_disappear(strategy):
    ids = [[], [1], None, [2]]
    packed = pack_dataset(Dataset.from_dict({"input_ids": ids, "labels": ids}), 2, strategy)
    assert packed["input_ids"][:] == packed["labels"][:] == [[1, 2]]
    nothing = Dataset.from_dict({"input_ids": [[], []]}, features=Features({"input_ids": List(Value("int32"))}))
    assert len(pack_dataset(nothing, 2, strategy)) == 0


@pytest.mark.parametrize(
    "kind", [List(Value("int64")), LargeList(Value("int64")), List(Value("int64"), length=2)], ids=str
)
def test_every_kind_of_list_can_be_packed(kind):
    dataset = Dataset.from_dict({"input_ids": [[1, 2], [3, 4], [5, 6]]}, features=Features({"input_ids": kind}))
    assert pack_dataset(dataset, 4)[:] == {"input_ids": [[1, 2, 3, 4], [5, 6]], "seq_lengths": [[2, 2], [2]]}
    assert pack_dataset(dataset, 3, "wrapped")[:] == {"input_ids": [[1, 2, 3], [4, 5, 6]]}


def test_rows_are_packed_within_a_batch():
    packed = pack_dataset(Dataset.from_dict({"input_ids": IDS}), 4, map_kwargs={"batch_size": 2})
    assert packed["input_ids"][:] == [[1, 2, 3, 4], [6, 7], [8, 9, 10, 11]]
    # 1,001 rows of 2 tokens in rows of 4: 500 full ones, and one of the second batch
    packed = pack_dataset(rows_of([2] * 1001), 4)
    assert [len(row) for row in packed["input_ids"]] == [4] * 500 + [2]


def test_selected_rows_alone_are_packed():
    dataset = Dataset.from_dict({"input_ids": IDS}).select([3, 1])
    assert pack_dataset(dataset, 4)[:] == {"input_ids": [[6, 7, 11]], "seq_lengths": [[2, 1]]}


@pytest.mark.parametrize("strategy", PACKED)
@pytest.mark.parametrize("known", [True, False])
def test_a_stream_is_packed_as_it_is_read(strategy, known):
    dataset = Dataset.from_dict({"input_ids": IDS})
    stream = dataset.to_iterable_dataset() if known else IterableDataset.from_generator(lambda: iter(dataset))
    packed = pack_dataset(stream, 4, strategy, {"batch_size": 3})
    assert list(packed) == list(pack_dataset(dataset, 4, strategy, {"batch_size": 3}))


def test_a_dict_of_datasets_is_packed_each_for_itself():
    packed = pack_dataset(DatasetDict({"train": rows_of([2, 2]), "test": rows_of([1])}), 4)
    assert packed["train"]["seq_lengths"][:] == [[2, 2]]
    assert packed["test"]["seq_lengths"][:] == [[1]]


def test_columns_that_are_no_lists_are_refused():
    dataset = Dataset.from_dict({"input_ids": IDS, "name": ["a", "b", "c", "d"]})
    with pytest.raises(TypeError, match=r"`name` \(string\) has no lists.*remove it"):
        pack_dataset(dataset, 4)
    assert pack_dataset(dataset.remove_columns("name"), 4)[:] == PACKED["bfd"]


def test_lists_of_other_lengths_are_refused():
    dataset = Dataset.from_dict({"input_ids": IDS, "tags": [[0] * 5, [0] * 2, [0] * 4, [0]]})
    with pytest.raises(DataError, match="Row 2: `tags` has 4 items, but `input_ids` has 3"):
        pack_dataset(dataset, 4)
    with pytest.raises(ValueError, match="Row 2: `tags`"):
        pack_dataset(dataset, 4, map_kwargs={"batch_size": 1})
    with pytest.raises(ValueError, match="Row 2: `tags`"):
        list(pack_dataset(dataset.to_iterable_dataset(), 4))


def test_other_strategies_and_lengths_are_refused():
    dataset = Dataset.from_dict({"input_ids": IDS})
    with pytest.raises(ConfigError, match="'ffd': use one of bfd, bfd_split, wrapped"):
        pack_dataset(dataset, 4, "ffd")
    with pytest.raises(ConfigError, match="`seq_length` is 0"):
        pack_dataset(dataset, 0)
    with pytest.raises(DataError, match="packed already"):
        pack_dataset(pack_dataset(dataset, 4), 4)


def test_the_same_call_gives_the_same_dataset_from_the_cache(tmp_path):
    rows_of([3, 1, 2]).save_to_disk(tmp_path / "data")

    def pack(*options):
        packed = pack_dataset(load_from_disk(tmp_path / "data"), *options)
        return packed._fingerprint, packed[:], len(list((tmp_path / "data").glob("cache-*")))

    first = pack(4)
    assert first[2] == 1
    assert pack(4) == first
    fingerprints = {first[0]} | {pack(*options)[0] for options in ((3,), (4, "bfd_split"), (4, "wrapped"))}
    assert len(fingerprints) == 4


def naive_best_fit_decreasing(lengths, capacity):
    bins = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fill = [sum(lengths[i] for i in members) for members in bins]
        fits = [number for number in range(len(bins)) if fill[number] + lengths[index] <= capacity]
        if fits:
            bins[max(fits, key=lambda number: fill[number])].append(index)
        else:
            bins.append([index])
    return bins


@settings(deadline=None, max_examples=50)
@given(lengths=st.lists(st.integers(1, 12), max_size=40), capacity=st.integers(12, 20))
def test_each_document_goes_into_the_fullest_bin_that_has_space(lengths, capacity):
    bins = best_fit_decreasing(lengths, capacity)
    assert bins == naive_best_fit_decreasing(lengths, capacity)
    assert sorted(flat(bins)) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in members) <= capacity for members in bins)


@settings(deadline=None, max_examples=50)
@given(lengths=lengths_lists, seq_length=st.integers(1, 14), strategy=st.sampled_from(["bfd_split", "wrapped"]))
def test_no_token_is_lost(lengths, seq_length, strategy):
    dataset = rows_of(lengths)
    packed = pack_dataset(dataset, seq_length, strategy)
    assert learnt(packed) == learnt(dataset)
    assert all(0 < len(row) <= seq_length for row in packed["input_ids"])
    if strategy == "wrapped":
        assert flat(packed["input_ids"]) == flat(dataset["input_ids"])
        assert all(len(row) == seq_length for row in packed["input_ids"][:-1])


@settings(deadline=None, max_examples=50)
@given(lengths=lengths_lists, seq_length=st.integers(1, 14))
def test_documents_stay_whole_up_to_the_length_of_a_row(lengths, seq_length):
    dataset = rows_of(lengths)
    packed = pack_dataset(dataset, seq_length)
    documents = []
    for row in packed:
        assert len(row["input_ids"]) == sum(row["seq_lengths"]) <= seq_length
        start = 0
        for length in row["seq_lengths"]:
            documents.append(row["input_ids"][start : start + length])
            start += length
    assert sorted(documents) == sorted(row[:seq_length] for row in dataset["input_ids"] if row)


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


SOURCES = {
    "completions": ([{"prompt": f"w{i} w9", "completion": f" w{i + 20}"} for i in range(10, 18)], {}),
    "conversations": (
        [{"prompt": [user(f"w{i}")], "completion": [assistant(f"w{i + 20}")]} for i in range(10, 18)],
        {},
    ),
    "turns": (
        [{"messages": [user(f"w{i}"), assistant(f"w{i + 20}")] * (i % 3 + 1)} for i in range(10, 18)],
        {"assistant_only": True},
    ),
    # labels of their own, and a list that is as long as the ids by chance
    "labels": (
        [{"input_ids": [i, 9, 8], "labels": [-100, i, -100], "tags": [1, 2, 3]} for i in range(10, 18)],
        {},
    ),
}


@pytest.mark.parametrize("strategy", PACKED)
@pytest.mark.parametrize("source", SOURCES)
def test_the_same_is_learnt_with_and_without_packing(source, strategy):
    rows, options = SOURCES[source]
    dataset = Dataset.from_list(rows)
    prepared = prepare_sft_dataset(dataset, word_tokenizer(chat_template=CHAT), **options)
    packed = pack_dataset(prepared, 32, strategy)
    assert len(packed) < len(prepared)
    assert learnt(packed) == learnt(prepared)
    assert 0 < sum(n for (_, label), n in learnt(packed).items() if label != -100) < learnt(packed).total()
    assert "tags" not in packed.column_names
    if source == "labels":
        assert dataset["tags"][:] == [[1, 2, 3]] * 8
        assert {pair for pair in learnt(packed) if pair[1] != -100} == {(9, i) for i in range(10, 18)}
