"""Packing: rows of a dataset put together to rows of at most `seq_length` tokens."""

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from trl._version import __version__
from trl.errors import ConfigError, DataError

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

DatasetT = TypeVar("DatasetT", "datasets.Dataset", "datasets.DatasetDict", "datasets.IterableDataset")

SEQ_LENGTHS = "seq_lengths"
"""Column with the lengths of the documents in a packed row."""


class ColumnTypeError(DataError, TypeError):
    """A column that does not hold a list for each row."""


def pack_dataset(
    dataset: DatasetT, seq_length: int, strategy: str = "bfd", map_kwargs: Mapping[str, Any] | None = None
) -> DatasetT:
    """The rows packed to rows of at most `seq_length` tokens, without a format. Empty rows disappear.

    Every column is packed, all in step: each must hold a list for each row, as long as the row's other lists. Columns
    that are not to be packed have to be removed before; which ones these are is never guessed from lengths.

    | strategy | rows longer than `seq_length` | put together | column `seq_lengths` |
    |---|---|---|---|
    | `bfd` | are cut, the rest is lost | best-fit decreasing | lengths of the documents in the row |
    | `bfd_split` | are split | best-fit decreasing | the same, of the pieces |
    | `wrapped` | are split wherever a packed row ends | in their order | none |

    Best-fit decreasing takes the longest document first and puts it into the fullest row into which it fits. Documents
    of equal length, and rows that are equally full, keep their order. Rows are packed within a batch of `map`, 1000
    rows unless `map_kwargs` has another `batch_size`.

    Args:
        dataset: a dataset, a dict of datasets, or an iterable one.
        seq_length: tokens of a packed row.
        strategy: see above.
        map_kwargs: passed to `dataset.map`.

    Raises:
        ConfigError: another strategy, or a length below 1.
        DataError: columns that cannot be packed, or are packed already.
    """
    if strategy not in _STRATEGIES:
        raise ConfigError(f"The packing strategy is {strategy!r}: use one of {', '.join(_STRATEGIES)}.")
    if seq_length < 1:
        raise ConfigError(f"`seq_length` is {seq_length}: a packed row has at least 1 token.")
    packed = dataset.with_format("arrow").map(
        _Packer(seq_length, strategy), batched=True, with_indices=True, **(map_kwargs or {})
    )
    return packed.with_format(None)


@dataclass
class _Packer:
    """A function of one batch, an arrow table, and the numbers of its rows, for `map`.

    Attributes:
        version: part of the key under which a result is cached: another version of the package starts anew.
    """

    seq_length: int
    strategy: str
    version: str = __version__

    def __call__(self, table: "pa.Table", numbers: Sequence[int]) -> "pa.Table":
        import pyarrow as pa

        columns = {name: _list_array(name, table.column(name)) for name in table.column_names}
        plan = _STRATEGIES[self.strategy](_shared_lengths(columns, numbers), self.seq_length)
        packed = {name: _pack_column(column, plan) for name, column in columns.items()}
        if plan.counts is not None:
            lengths = pa.array(plan.lengths, pa.int32())
            packed[SEQ_LENGTHS] = pa.ListArray.from_arrays(_offsets(plan.counts), lengths)
        return pa.table(packed)


class _Plan(NamedTuple):
    """What comes where in the packed rows. D documents, or pieces of them; R packed rows.

    Attributes:
        rows: `[D]` row from which each document comes, in the order of the packed rows.
        skipped: `[D]` tokens of that row before the document.
        lengths: `[D]` tokens of each document, at least one.
        row_lengths: `[R]` tokens of each packed row.
        counts: `[R]` documents in each packed row; None where documents go on in the next row.
    """

    rows: np.ndarray
    skipped: np.ndarray
    lengths: np.ndarray
    row_lengths: np.ndarray
    counts: np.ndarray | None


def _bfd(lengths: np.ndarray, seq_length: int) -> _Plan:
    rows = np.flatnonzero(lengths)
    return _fit(rows, np.zeros_like(rows), np.minimum(lengths[rows], seq_length), seq_length)


def _bfd_split(lengths: np.ndarray, seq_length: int) -> _Plan:
    pieces = -(-lengths // seq_length)
    rows = np.repeat(np.arange(len(lengths)), pieces)
    skipped = _ranges(np.zeros_like(pieces), pieces) * seq_length
    return _fit(rows, skipped, np.minimum(lengths[rows] - skipped, seq_length), seq_length)


def _wrapped(lengths: np.ndarray, seq_length: int) -> _Plan:
    full, rest = divmod(int(lengths.sum()), seq_length)
    row_lengths = np.array([seq_length] * full + [rest] * (rest > 0), dtype=np.int64)
    rows = np.flatnonzero(lengths)
    return _Plan(rows, np.zeros_like(rows), lengths[rows], row_lengths, None)


_STRATEGIES: dict[str, Callable[[np.ndarray, int], _Plan]] = {"bfd": _bfd, "bfd_split": _bfd_split, "wrapped": _wrapped}


def _fit(rows: np.ndarray, skipped: np.ndarray, lengths: np.ndarray, seq_length: int) -> _Plan:
    """The plan of best-fit decreasing for documents of at most `seq_length` tokens."""
    bins = best_fit_decreasing(lengths.tolist(), seq_length)
    order = np.array([index for members in bins for index in members], dtype=np.int64)
    counts = np.array([len(members) for members in bins], dtype=np.int64)
    row_lengths = np.array([lengths[members].sum() for members in bins], dtype=np.int64)
    return _Plan(rows[order], skipped[order], lengths[order], row_lengths, counts)


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of indices into `lengths`, none with more than `capacity` in sum, in the order in which they were opened.

    The longest comes first, each into the fullest bin into which it fits, else into a new one. Bins with space are
    kept sorted, so D documents need O(D log D) comparisons.

    Args:
        lengths: each from 1 to `capacity`.
        capacity: of a bin.
    """
    bins: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # space that is left and number of each bin that is not full, sorted
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = bisect_left(spaces, (lengths[index], -1))
        if place == len(spaces):
            space, number = capacity, len(bins)
            bins.append([])
        else:
            space, number = spaces.pop(place)
        bins[number].append(index)
        if space > lengths[index]:
            insort(spaces, (space - lengths[index], number))
    return bins


def _pack_column(column: "pa.ListArray", plan: _Plan) -> "pa.ListArray":
    import pyarrow as pa

    starts = column.offsets.to_numpy()[plan.rows] + plan.skipped
    return pa.ListArray.from_arrays(_offsets(plan.row_lengths), column.values.take(_ranges(starts, plan.lengths)))


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """`[sum of lengths]`: for each start, as many integers from there as the length says."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(lengths.sum())


def _offsets(lengths: np.ndarray) -> "pa.Array":
    """Where lists of these lengths begin and end in their values, as arrow wants it."""
    import pyarrow as pa

    return pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())


def _list_array(name: str, column: "pa.ChunkedArray") -> "pa.ListArray":
    """A column as one array of lists with offsets; `ColumnTypeError` if it holds something else."""
    import pyarrow as pa

    kind = column.type
    if name == SEQ_LENGTHS:
        raise DataError(f"The dataset has a column `{SEQ_LENGTHS}`, so it is packed already: pack it once.")
    if pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        column = column.cast(pa.list_(kind.value_type))
    elif not pa.types.is_list(kind):
        raise ColumnTypeError(f"The column `{name}` ({kind}) has no lists, so it cannot be packed: remove it before.")
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def _shared_lengths(columns: Mapping[str, "pa.ListArray"], numbers: Sequence[int]) -> np.ndarray:
    """Length of each row, which its lists share; a missing list has length 0."""
    lengths = {name: column.value_lengths().fill_null(0).to_numpy() for name, column in columns.items()}
    (first, shared), *others = lengths.items()
    for name, other in others:
        if (wrong := np.flatnonzero(other != shared)).size:
            row = wrong[0]
            raise DataError(
                f"Row {numbers[row]}: `{name}` has {other[row]} items, but `{first}` has {shared[row]}. Columns are "
                "packed in step: remove the one that does not belong to the tokens."
            )
    return shared.astype(np.int64)
