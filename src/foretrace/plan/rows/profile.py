"""`AccessProfile`: how often each device will read each row, as far as some batches tell."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretrace.arrays import Float64, Int64
from foretrace.errors import ForetraceError
from foretrace.training.rows.lookups import EmbeddingTable, Lookups
from foretrace.training.rows.placement import part_sizes
from foretrace.training.rows.rows import distinct

PARTS = 256  # into which rows of a table that were read alike are divided, about: a multiple of the devices
MOST_ROWS = 1 << 40  # of a table: ids are multiplied by batches and devices
_MOST_PRIOR = 64.0  # reads that what is usual in the table may weigh as much as


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessProfile:
    """Expected reads of a batch. An item is a part of the rows of a table that each device read equally often.

    Items are in the order of `tables`, those of unread rows last: those of table t are `starts[t]` to `starts[t + 1]`.
    """

    tables: tuple[EmbeddingTable, ...]
    seen: tuple[Int64, ...]  # ids that were read, rising, by table
    item: tuple[Int64, ...]  # of each of these, counted from the table's first
    starts: Int64  # (tables + 1,)
    reads: Float64  # (items, devices) rows that a device is expected to read in a batch
    size: Int64  # (items,) rows
    samples: Float64  # (devices,) of a batch
    ids: Float64  # (tables, devices) ids in a batch, repeated ones included

    @property
    def devices(self) -> int:
        """Number of devices."""
        return len(self.samples)


def profile(lookups: Lookups, devices: int, batches: range) -> AccessProfile:
    """Count reads in consecutive batches, and expect what follows from them.

    A row that was read once was not read for good: `_expected` takes off what rows that are yet unread will get, and
    moves the readers of rare rows towards those of the table. Raises ForetraceError for tables beyond MOST_ROWS.
    """
    if large := [each.name for each in lookups.tables if each.rows > MOST_ROWS]:
        raise ForetraceError(f"Table {large[0]} has more than {MOST_ROWS:,} rows; number its rows from 0.")
    edges = np.linspace(0, lookups.samples, devices + 1).astype(np.int64)
    worker = np.repeat(np.arange(devices), np.diff(edges))
    slots = (np.arange(len(batches))[:, None] * devices + worker).ravel()
    begin, end = batches.start * lookups.samples, batches.stop * lookups.samples
    parts = -(-PARTS // devices) * devices
    seen, items, reads, sizes, ids = [], [], [], [], []
    for table in lookups.tables:
        offsets = table.offsets[begin : end + 1]
        slot = np.repeat(slots, np.diff(offsets))
        pairs = distinct(table.ids[offsets[0] : offsets[-1]] * (len(batches) * devices) + slot)
        row = pairs // (len(batches) * devices)
        first = np.diff(row, prepend=-1) > 0
        rows, at = row[first], np.cumsum(first) - 1
        counts = np.bincount(at * devices + pairs % devices, minlength=len(rows) * devices).reshape(-1, devices)
        left = table.rows - len(rows)
        unread_sizes = part_sizes(left, min(parts, left))
        expected, unread = _expected(counts.astype(np.float64), left)
        item = _alike(counts, parts)
        of_items = [np.bincount(item, column) for column in expected.T]
        seen.append(rows)
        items.append(item)
        reads.append(np.vstack([np.stack(of_items, 1), np.outer(unread_sizes / max(left, 1), unread)]) / len(batches))
        sizes.append(np.concatenate([np.bincount(item), unread_sizes]))
        ids.append(np.bincount(slot % devices, minlength=devices) / len(batches))
    return AccessProfile(
        tables=lookups.tables, seen=tuple(seen), item=tuple(items), starts=np.cumsum([0, *map(len, sizes)]),
        reads=np.concatenate(reads), size=np.concatenate(sizes), samples=np.diff(edges).astype(np.float64),
        ids=np.array(ids),
    )  # fmt: skip


def _alike(counts: Int64, parts: int) -> Int64:
    """Return the item of each row (rows,): rows of the same counts (rows, devices), in `parts` items at most."""
    kind = np.zeros(len(counts), np.int64)
    for column in counts.T:
        kind = np.unique(kind * (1 + int(column.max(initial=0))) + column, return_inverse=True)[1]
    sizes = np.bincount(kind)
    begins, many = np.cumsum(sizes) - sizes, np.minimum(sizes, parts)
    order = np.argsort(kind, kind="stable")
    item = np.empty_like(order)
    kind = kind[order]
    item[order] = (np.cumsum(many) - many)[kind] + (np.arange(len(order)) - begins[kind]) * many[kind] // sizes[kind]
    return item


def _expected(counts: Float64, left: int) -> tuple[Float64, Float64]:
    """Return reads (rows, devices) to expect in as many batches again, and reads (devices,) of the `left` unread rows.

    What is taken off every row, n1 / (n1 + 2 n2) with n1 rows read once and n2 twice, is the discount of Ney, Essen
    and Kneser (Computer Speech and Language 8, 1994). Readers of a row are taken as Dirichlet-multinomial around those
    of the table: two reads of one row agree on the device more often than two of the table, which shows how much.
    """
    totals = counts.sum(axis=1)
    if not len(counts):
        return counts, np.zeros(counts.shape[1])
    usual = counts.sum(axis=0) / totals.sum()
    once, twice = int((totals == 1).sum()), int((totals == 2).sum())
    discount = once / (once + 2 * twice) if once and left else 0.0
    several = totals > 1
    agree = (counts * (counts - 1)).sum(axis=1)[several] / (totals[several] - 1)
    more = agree.sum() / max(totals[several].sum(), 1.0) - (usual**2).sum()
    prior = min((1 - (usual**2).sum()) / more - 1, _MOST_PRIOR) if more > 0 else _MOST_PRIOR
    readers = (counts + prior * usual) / (totals + prior)[:, None]
    return (totals - discount)[:, None] * readers, discount * len(counts) * usual
