"""`RowPlacement`: which device keeps which rows of embedding tables, and the bytes that batches then exchange.

Every device reads its own part of a batch. In mode `pooled` the device that keeps the table adds up the rows of every
sample and sends the sums; in `columns` several do so, each for its share of the columns; in `rows` each row has an
owner, which sends it once to every device that reads it in a batch, and that device adds up. `row-wise` (every owner of
rows sends partial sums) and `data-parallel` (a copy on every device, gradients summed by a ring) are for comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO
from math import gcd
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from foretrace.arrays import Float64, Int64
from foretrace.errors import ForetraceError
from foretrace.files import write_bytes
from foretrace.training.rows.lookups import Lookups

Mode = Literal["pooled", "columns", "rows", "row-wise", "data-parallel"]
EVERYWHERE = -1  # in place of an owner
WORD = 8  # bytes of an id, and of a length or count
FLOAT = 4
_PARTS = ("shares", "ids", "owners", "rest")  # of a `PlacedTable`


def _none() -> Int64:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedTable:
    """Where the rows of one table are.

    `shares` (devices,) are the columns on every device of a table in `pooled` or `columns`. `ids` (n,) rise; `owners`
    (n,) are their devices, EVERYWHERE for rows that each device has a copy of. All other rows are spread over as many
    equal parts as `rest` has owners.
    """

    name: str
    rows: int
    mode: Mode
    shares: Int64 = field(default_factory=_none)
    ids: Int64 = field(default_factory=_none)
    owners: Int64 = field(default_factory=_none)
    rest: Int64 = field(default_factory=_none)

    def owners_of(self, ids: Int64) -> Int64:
        """Return the device of every row (n,), EVERYWHERE where all have it."""
        at = np.searchsorted(self.ids, ids)
        owners = np.empty(len(ids), np.int64)
        known = at < len(self.ids)
        known[known] = self.ids[at[known]] == ids[known]
        owners[known] = self.owners[at[known]]
        if not known.all():
            owners[~known] = self.rest[part_of_row(ids[~known] - at[~known], self.rows - len(self.ids), len(self.rest))]
        return owners

    def kept(self, devices: int) -> Int64:
        """Return rows on every device (devices,) of a table that is divided by rows."""
        sizes = part_sizes(self.rows - len(self.ids), len(self.rest))
        owners, sizes = np.concatenate([self.owners, self.rest]), np.concatenate([np.ones_like(self.owners), sizes])
        own = np.bincount(owners[owners >= 0], sizes[owners >= 0], minlength=devices).astype(np.int64)
        return own + int(sizes[owners < 0].sum())

    @property
    def exchanges(self) -> bool:
        """Whether rows of a table in `rows` are fetched at all: not where every device has them all."""
        return bool((self.owners >= 0).any() or (self.rest >= 0).any())

    @property
    def rows_replicated(self) -> int:
        """Rows that every device has."""
        rest = part_sizes(self.rows - len(self.ids), len(self.rest))
        return int((self.owners < 0).sum() + rest[self.rest < 0].sum())


def part_of_row(at: Int64, rows: int, parts: int) -> Int64:
    """Return the part that each of `rows` rows is in, by a stride through all of them: neighbours are apart."""
    stride = next(each for each in (1_000_003, 999_983, 1) if gcd(each, rows) == 1)
    return at * stride % rows * parts // rows


def part_sizes(rows: int, parts: int) -> Int64:
    """Return rows in each part: (parts,)."""
    return np.diff(-(-np.arange(parts + 1, dtype=np.int64) * rows // max(parts, 1)))


def column_shares(width: int, devices: int) -> Int64:
    """Return columns on every device where these are divided evenly: (devices,)."""
    return np.diff(np.arange(devices + 1, dtype=np.int64) * width // devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlacement:
    """Tables of `width` float32 columns on devices, for training (gradients go back as rows come) or inference."""

    devices: int
    width: int
    training: bool
    tables: tuple[PlacedTable, ...]

    @property
    def row_bytes(self) -> int:
        """Of one row that is asked for: its id, its numbers, and in training its gradient."""
        return WORD + FLOAT * self.width * (1 + self.training)

    def memory(self) -> Int64:
        """Return bytes of the tables on every device: (devices,)."""
        found = np.zeros(self.devices, np.int64)
        for table in self.tables:
            match table.mode:
                case "pooled" | "columns":
                    found += table.rows * table.shares
                case "data-parallel":
                    found += table.rows * self.width
                case _:
                    found += table.kept(self.devices) * self.width
        return found * FLOAT

    def exchanged(self, lookups: Lookups, batches: Sequence[int]) -> Float64:
        """Return bytes that every device sends and receives in each batch: (batches, devices).

        Ids, lengths and counts are included. Of a table in `rows`, an id that a device reads several times in a batch
        is asked for once. Raises ForetraceError where the tables are others.
        """
        self.check(lookups)
        whole = sum(FLOAT * self.width * table.rows for table in self.tables if table.mode == "data-parallel")
        ring = self.training * 4 * (self.devices - 1) / self.devices * whole  # reduce-scatter, all-gather; in and out
        found = []
        for batch in batches:
            moved = sum(self.exchanges(lookups, batch).values())
            found.append(np.sum(moved, axis=0) + np.sum(moved, axis=1) + ring)
        return np.array(found, np.float64)

    def check(self, lookups: Lookups) -> None:
        """Raise ForetraceError for lookups of other tables."""
        if [(each.name, each.rows) for each in lookups.tables] != [(each.name, each.rows) for each in self.tables]:
            raise ForetraceError("The placement is of other tables than the lookups; plan these first.")

    def exchanges(self, lookups: Lookups, batch: int) -> dict[str, Float64]:
        """Return bytes by sender and receiver (devices, devices): ids with lengths and counts, rows and sums, and in
        training gradients, one exchange after the other.
        """
        asked, sent = np.zeros((2, self.devices, self.devices))
        for reader in range(self.devices):
            read = lookups.read(batch, reader, self.devices)
            for table, (ids, offsets) in zip(self.tables, read, strict=True):
                samples = len(offsets) - 1
                match table.mode:
                    case "pooled" | "columns":
                        asked[reader] += np.where(table.shares > 0, WORD * (samples + len(ids)), 0)
                        sent[reader] += FLOAT * table.shares * samples
                    case "row-wise":
                        own = np.bincount(table.owners_of(ids), minlength=self.devices)
                        asked[reader] += WORD * (samples + own)
                        sent[reader] += FLOAT * self.width * samples
                    case "rows":
                        owners = table.owners_of(np.unique(ids))
                        own = np.bincount(owners[owners >= 0], minlength=self.devices)
                        asked[reader] += WORD * (table.exchanges + own)
                        sent[reader] += FLOAT * self.width * own
        np.fill_diagonal(asked, 0)
        np.fill_diagonal(sent, 0)
        return {"ids": asked, "rows and sums": sent.T} | ({"gradients": sent} if self.training else {})

    def save(self, path: Path) -> None:
        """Write it as an NPZ file. Raises ForetraceError where that cannot be."""
        arrays: dict[str, Any] = {"placement": np.array([self.devices, self.width, self.training])}
        for each in self.tables:
            arrays[f"{each.name}.table"] = np.array([each.rows, get_args(Mode).index(each.mode)])
            arrays |= {f"{each.name}.{part}": getattr(each, part) for part in _PARTS}
        file = BytesIO()
        np.savez_compressed(file, **arrays)
        write_bytes(path, file.getvalue())

    @staticmethod
    def load(path: Path) -> RowPlacement:
        """Load it as `save` wrote it."""
        with np.load(path, allow_pickle=False) as arrays:
            devices, width, training = arrays["placement"].tolist()
            tables = []
            for key in (each for each in arrays.files if each.endswith(".table")):
                name = key.removesuffix(".table")
                rows, mode = arrays[key].tolist()
                own = {part: arrays[f"{name}.{part}"] for part in _PARTS}
                tables.append(PlacedTable(name=name, rows=rows, mode=get_args(Mode)[mode], **own))
        return RowPlacement(devices=devices, width=width, training=bool(training), tables=tuple(tables))
