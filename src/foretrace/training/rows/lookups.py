"""`Lookups`: which rows of which embedding tables every batch of a training reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foretrace.arrays import Int64
from foretrace.errors import ForetraceError
from foretrace.names import keyed


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
        if len(self.ids) and not 0 <= self.ids.min() <= self.ids.max() < self.rows:
            wrong = int(self.ids.min() if self.ids.min() < 0 else self.ids.max())
            raise ForetraceError(f"Ids of table {self.name} must be from 0 to {self.rows - 1}, got {wrong}.")
        steps = np.diff(self.offsets)
        if not len(self.offsets) or self.offsets[0] != 0 or self.offsets[-1] != len(self.ids) or (steps < 0).any():
            raise ForetraceError(f"Offsets of table {self.name} must rise from 0 to its {len(self.ids)} ids.")

    @property
    def pooling(self) -> float:
        """Mean number of ids of a sample."""
        return len(self.ids) / max(len(self.offsets) - 1, 1)


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
        """Ids and offsets (samples of the worker + 1,) of every table, for one worker's part of a batch."""
        edges = np.linspace(0, self.samples, workers + 1).astype(np.int64) + batch * self.samples
        begin, end = int(edges[worker]), int(edges[worker + 1])
        found = []
        for table in self.tables:
            offsets = table.offsets[begin : end + 1]
            found.append((table.ids[offsets[0] : offsets[-1]], offsets - offsets[0]))
        return found


def zipf(
    *, exponent: float, tables: int, rows: int | Sequence[int], pooling: int, samples: int, batches: int, seed: int = 0
) -> Lookups:
    """Draw ids: the k-th most frequent row has a probability proportional to k^-exponent; which one it is, is random.

    `rows` is the size of every table, or one per table.
    """
    if exponent < 0 or min(tables, pooling, samples, batches) < 1:
        raise ForetraceError(
            "Lookups need an exponent of at least 0, and a table, an id, a sample and a batch, got "
            f"{exponent}, {tables}, {pooling}, {samples}, {batches}."
        )
    random = np.random.default_rng(seed)
    sizes = [rows] * tables if isinstance(rows, int) else list(rows)
    offsets = np.arange(batches * samples + 1, dtype=np.int64) * pooling
    found = []
    for i, size in enumerate(sizes):
        mass = np.cumsum(np.arange(1, size + 1, dtype=np.float64) ** -exponent)
        ranks = np.searchsorted(mass, random.random(int(offsets[-1])) * mass[-1], side="right")
        ids = random.permutation(size)[np.minimum(ranks, size - 1)]
        found.append(EmbeddingTable(name=f"table{i}", rows=size, ids=ids, offsets=offsets))
    return Lookups(tables=tuple(found), samples=samples)


def parse(text: str) -> Lookups:
    """Lookups as a user writes them: `zipf:1.05 tables=26 rows=100000 pooling=1 samples=512 batches=64 seed=0`.

    Raises ForetraceError for another kind and for words that mean nothing.
    """
    kind, _, rest = text.partition(":")
    words = rest.split()
    if kind != "zipf" or not words:
        raise ForetraceError(f"Lookups must be a file or zipf:EXPONENT, got {text!r}.")
    defaults = {"tables": 26, "rows": 100_000, "pooling": 1, "samples": 512, "batches": 64, "seed": 0}
    given = keyed(words[1:], defaults, "zipf")
    try:
        numbers = defaults | {key: int(value) for key, value in given.items()}
        return zipf(exponent=float(words[0]), **numbers)
    except ValueError as error:
        raise ForetraceError(f"Lookups {text!r} must have numbers ({error}).") from None
