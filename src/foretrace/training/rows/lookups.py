"""`Lookups`: which rows of which embedding tables every batch of a training reads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from math import isfinite, nan
from pathlib import Path
from typing import Any

import numpy as np

from foretrace.arrays import Array, Float64, Int64
from foretrace.errors import ForetraceError, MissingExtraError, needing
from foretrace.names import numbers
from foretrace.reading import DAMAGED, Budget, parse_npz, read_bytes, read_text
from foretrace.training.rows.rows import within

_MEND = "give a file of ids, or zipf:EXPONENT"
# Rows of the tables of the Criteo Kaggle data set, as facebookresearch/dlrm counts them.
CRITEO = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
    2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip


MOST_IDS = 1 << 28  # that are drawn: 2 GB
_ZIPF = {
    "tables": 26, "rows": 100_000, "pooling": 1, "samples": 512, "batches": 64, "seed": 0, "locality": 0.0,
    "workers": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingTable:
    """What of one table is read: sample i reads the rows `ids[offsets[i] : offsets[i + 1]]`, which it adds up.

    `ids` are int64 from 0 to `rows` - 1; `offsets` int64 (samples of all batches + 1,), from 0 to len(ids).
    """

    name: str
    rows: int
    ids: Int64
    offsets: Int64

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ForetraceError(f"Table {self.name} must have a row, got {self.rows}.")
        within(self.ids, self.rows, f"Ids of table {self.name} must be")
        steps = np.diff(self.offsets)
        if not len(self.offsets) or self.offsets[0] != 0 or self.offsets[-1] != len(self.ids) or (steps < 0).any():
            raise ForetraceError(f"Offsets of table {self.name} must rise from 0 to its {len(self.ids)} ids.")

    @staticmethod
    def of(name: str, rows: int, ids: Int64, pooling: int) -> EmbeddingTable:
        """Return a table of which every sample reads `pooling` of the `ids`."""
        offsets = np.arange(0, len(ids) + 1, pooling, dtype=np.int64)
        return EmbeddingTable(name=name, rows=rows, ids=ids, offsets=offsets)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookups:
    """Batches of `samples` samples each over all tables; a last batch that is not full is left out."""

    tables: tuple[EmbeddingTable, ...]
    samples: int

    def __post_init__(self) -> None:
        lengths = {len(table.offsets) - 1 for table in self.tables}
        if len(lengths) != 1:
            raise ForetraceError(f"All tables must have the same number of samples, got {sorted(lengths)}.")
        if not 1 <= self.samples <= min(lengths):
            raise ForetraceError(f"A batch must have 1 to {min(lengths)} samples, got {self.samples}.")

    @property
    def batches(self) -> int:
        """Number of full batches."""
        return (len(self.tables[0].offsets) - 1) // self.samples

    def read(self, batch: int, worker: int = 0, workers: int = 1) -> list[tuple[Int64, Int64]]:
        """Return ids and offsets (samples of the worker + 1,) of every table, for one worker's part of a batch."""
        edges = np.linspace(0, self.samples, workers + 1).astype(np.int64) + batch * self.samples
        begin, end = int(edges[worker]), int(edges[worker + 1])
        found = []
        for table in self.tables:
            offsets = table.offsets[begin : end + 1]
            found.append((table.ids[offsets[0] : offsets[-1]], offsets - offsets[0]))
        return found


def zipf(
    *, exponent: float, tables: int, rows: int | Sequence[int], pooling: int, samples: int, batches: int,
    locality: float = 0.0, workers: int = 1, seed: int = 0,
) -> Lookups:  # fmt: skip
    """Draw ids: the k-th most frequent row has a probability proportional to k^-exponent; which one it is, is random.

    `rows` is the size of every table, or one per table. With `locality` each row belongs to one of `workers`, who split
    a batch as `Lookups.read` does, and this share of what a worker reads is redrawn among rows of its own that are as
    frequent.
    """
    if not (exponent >= 0 and 0 <= locality <= 1 and min(tables, pooling, samples, batches, workers) >= 1 <= seed + 1):
        raise ForetraceError(
            "Lookups need an exponent of at least 0, a locality from 0 to 1, a table, an id, a sample, a batch and a "
            f"worker, and a seed of at least 0, got {exponent}, {locality}, {tables}, {pooling}, {samples}, {batches}, "
            f"{workers}, {seed}."
        )
    sizes = [rows] * tables if isinstance(rows, int) else list(rows)
    if len(sizes) != tables or min(sizes) < 1:
        raise ForetraceError(
            f"Lookups of {tables} tables need as many sizes of at least 1, got {len(sizes)} from {min(sizes)} on."
        )
    if max(*sizes, tables * pooling * samples * batches) > MOST_IDS:
        raise ForetraceError(
            f"Lookups that are drawn may have {MOST_IDS:,} ids in all and rows in a table; give fewer of them, or a "
            "file."
        )
    random = np.random.default_rng(seed)
    edges = np.linspace(0, samples, workers + 1).astype(np.int64)
    worker = np.tile(np.repeat(np.arange(workers), pooling * np.diff(edges)), batches)
    found = []
    for i, size in enumerate(sizes):
        mass = np.cumsum(np.arange(1, size + 1, dtype=np.float64) ** -exponent)
        ranks = np.searchsorted(mass, random.random(len(worker)) * mass[-1], side="right")
        if locality:
            own = ranks // workers * workers + worker
            ranks = np.where((random.random(len(ranks)) < locality) & (own < size), own, ranks)
        ids = random.permutation(size)[np.minimum(ranks, size - 1)]
        found.append(EmbeddingTable.of(f"table{i}", size, ids, pooling))
    return Lookups(tables=tuple(found), samples=samples)


def parse(text: str) -> Lookups:
    """Return lookups as a user writes them: `zipf:1.05 tables=26 rows=100000 pooling=1 samples=512 batches=64 seed=0`.

    `rows=criteo` are the sizes of the tables of that data set; `locality=0.6 workers=4` are as of `zipf`.
    Raises ForetraceError for another kind and for words that mean nothing.
    """
    kind, _, rest = text.partition(":")
    words = rest.split()
    try:
        exponent = float(words[0]) if kind == "zipf" else nan
    except (IndexError, ValueError):
        exponent = nan
    if not isfinite(exponent):
        raise ForetraceError(
            f"Lookups must be a .parquet or .npz file, reuse:FILE, recorded:MODEL or zipf:EXPONENT, got {text!r}."
        )
    criteo = "rows=criteo" in words
    given = numbers([each for each in words[1:] if each != "rows=criteo"], _ZIPF, "zipf")
    if criteo:
        given["rows"] = CRITEO[: max(given["tables"], 0)]
    return zipf(exponent=exponent, **given)


def read(source: str | Path, *, samples: int = 0, rows: Mapping[str, int] | None = None) -> Lookups:
    """Return lookups of a file, or of a text that `parse` knows.

    An NPZ file has int arrays `NAME.ids` (ids,) per table and, unless every sample reads one id, `NAME.offsets`
    (samples + 1,). A Parquet file has a column per table, of int or list<int>, and a row per sample.
    `samples` are those of a batch of a file: by default 512, or all where there are fewer. `rows` are sizes of its
    tables by name: by default the largest id + 1. A text says both itself.

    Raises ForetraceError for what is no such file, and for sizes that ids do not fit.
    """
    path = Path(source)
    if path.suffix not in _FILES:
        if samples or rows:
            raise ForetraceError(f"Lookups {str(source)!r} say their samples and rows; leave out those given beside.")
        return parse(str(source))
    data = read_bytes(path, mend=_MEND)
    try:
        found = _FILES[path.suffix](data)
    except MissingExtraError:
        raise
    except (*DAMAGED, ForetraceError) as error:
        raise ForetraceError(f"{path} cannot be read as ids of tables ({error or type(error)}); {_MEND}.") from None
    if unknown := (rows or {}).keys() - found.keys():
        raise ForetraceError(f"{path} has no table {min(unknown)}, whose rows are given; it has {', '.join(found)}.")
    tables = []
    for name, (ids, offsets) in found.items():
        size = (rows or {}).get(name, max(int(ids.max(initial=-1)) + 1, 1))
        tables.append(EmbeddingTable(name=name, rows=size, ids=ids, offsets=offsets))
    least = min((len(table.offsets) - 1 for table in tables), default=0)
    if not least:
        raise ForetraceError(f"{path} holds no samples; {_MEND}.")
    return Lookups(tables=tuple(tables), samples=samples or min(512, least))


_Columns = dict[str, tuple[Int64, Int64]]  # ids and offsets by name of the table


def _npz(data: bytes) -> _Columns:
    found, arrays = {}, parse_npz(data)
    for key in (each for each in arrays if each.endswith(".ids")):
        name = key.removesuffix(".ids")
        ids, offsets = _whole(key, arrays[key]), f"{name}.offsets"
        single = offsets not in arrays
        found[name] = ids, np.arange(len(ids) + 1) if single else _whole(offsets, arrays[offsets])
    return found


def _whole(name: str, values: Array) -> Int64:
    if values.ndim != 1 or not np.can_cast(values.dtype, np.int64):
        raise ValueError(f"{name} must be a list of int64, got {values.dtype} of shape {values.shape}")
    return values.astype(np.int64)


def _parquet(data: bytes) -> _Columns:
    with needing("reading ids"):
        import pyarrow as arrow
        from pyarrow import parquet
    try:
        file, budget, batches = parquet.ParquetFile(BytesIO(data)), Budget(len(data)), []
        for batch in file.iter_batches():
            budget.spend(batch.nbytes)
            batches.append(batch)
        table = arrow.Table.from_batches(batches, file.schema_arrow)
        return {name: _column(name, table[name].combine_chunks(), arrow) for name in table.column_names}
    except arrow.ArrowException as error:
        raise ValueError(error) from None


def _column(name: str, column: Any, arrow: Any) -> tuple[Int64, Int64]:
    listed = arrow.types.is_list(column.type) or arrow.types.is_large_list(column.type)
    ids = column.flatten() if listed else column
    if column.null_count or ids.null_count or not arrow.types.is_integer(ids.type):
        raise ValueError(f"column {name} must have integers or lists of them, and no nulls, got {column.type}")
    lengths = column.value_lengths().to_numpy() if listed else np.ones(len(column), np.int64)
    return ids.cast(arrow.int64()).to_numpy(), np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


_FILES = {".npz": _npz, ".parquet": _parquet}

_BIN = re.compile(r"^\(\d+(?:, \d+\]|\+): (\d+\.\d+)$", re.MULTILINE)
_MEAN = re.compile(r"^Avg col size:\s*(\d+\.?\d*)\s*$", re.MULTILINE)
_STATISTICS = "give a file of reuse statistics as facebookresearch/dlrm_datasets publishes them"
MOST_BINS = 32


@dataclass(frozen=True, eq=False, kw_only=True)
class ReuseHistogram:
    """Bin k holds rows that are read more than 2^(k-1) times (bin 0: once) and up to 2^k; the last one has no end."""

    name: str
    mean: float  # times that a row is read
    rows: Float64  # share of rows by bin
    lookups: Float64  # share of look-ups by bin


def read_reuse(path: Path) -> tuple[ReuseHistogram, ...]:
    """Return the data sets of a file as facebookresearch/dlrm_datasets publishes them (`locality_stats_2021.txt`).

    Raises ForetraceError for what is no such file.
    """
    text = read_text(path, mend=_STATISTICS)
    found = list[ReuseHistogram]()
    for part in re.split(r"\n\s*\n", text.strip()):
        mean, bins = _MEAN.search(part), [float(each) for each in _BIN.findall(part)]
        half = len(bins) // 2
        if mean is None or len(bins) % 2 or not 2 <= half <= MOST_BINS or not sum(bins[half:]):
            raise ForetraceError(f"{path}: data set {len(found)} has no two histograms and a mean; {_STATISTICS}.")
        found.append(
            ReuseHistogram(name=part.splitlines()[0].strip(), mean=float(mean[1]), rows=np.array(bins[:half]),
                           lookups=np.array(bins[half:]) / sum(bins[half:]))
        )  # fmt: skip
    return tuple(found)


def parse_reuse(text: str) -> Lookups:
    """Parse `FILE set=0 samples=512 batches=64 pooling=26 seed=0`: one table. Raises ForetraceError."""
    words = text.split()
    given = numbers(words[1:], {"set": 0, "samples": 512, "batches": 64, "pooling": 26, "seed": 0}, "reuse")
    sets = read_reuse(Path(words[0] if words else ""))
    which = given.pop("set")
    if not 0 <= which < len(sets):
        raise ForetraceError(f"{words[0]} has data sets 0 to {len(sets) - 1}, got `set={which}`.")
    return reused(sets[which], **given)


def reused(histogram: ReuseHistogram, *, samples: int, batches: int, pooling: int, seed: int = 0) -> Lookups:
    """Return look-ups of one table, in a random order, whose shares by bin are the histogram's to one row.

    A bin whose share is less than one of its rows goes to the bin below it. Raises ForetraceError for sizes below 1.
    """
    total = samples * batches * pooling
    if min(samples, batches, pooling) < 1 or seed < 0 or total > MOST_IDS:
        raise ForetraceError(
            f"Look-ups need a sample, a batch and an id, {MOST_IDS:,} ids in all at most, and a seed of at least 0, "
            f"got {samples}, {batches}, {pooling}, {seed}."
        )
    edges = np.round(np.cumsum(histogram.lookups) * total).astype(int)
    left, counts = 0, list[int]()
    for k in range(len(edges) - 1, -1, -1):
        low, high = (0 if k == 0 else 1 << (k - 1)), (1 << k if k < len(edges) - 1 else total)
        here = int(edges[k] - (edges[k - 1] if k else 0)) + left
        if here < low + 1:
            left = here
            continue
        left = 0
        share = histogram.rows[k]
        mean = histogram.lookups[k] * histogram.mean / share if share else 1.5 * low
        rows = min(max(round(here / max(mean, 1.0)), -(-here // high)), here // (low + 1))
        counts += [here // rows + (i < here % rows) for i in range(rows)]
    random = np.random.default_rng(seed)
    ids = random.permutation(np.repeat(random.permutation(len(counts)), counts))
    return Lookups(tables=(EmbeddingTable.of("reuse", len(counts), ids.astype(np.int64), pooling),), samples=samples)
