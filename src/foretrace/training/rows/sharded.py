"""`ShardedTables`: the part of embedding tables that a `RowPlacement` gives one process, and the exchange of a batch.

Four all-to-alls: lengths and counts, ids, rows and sums, and in training gradients. Rows of a sample are added up in
the order of its ids wherever that is done, so sums are those of whole tables bit by bit. Gradients of a row that
several processes read are summed in each process first, so they differ from those of whole tables by rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import embedding_bag

from foretrace.arrays import Float32, Int64
from foretrace.errors import ForetraceError
from foretrace.training.rows.lookups import Lookups
from foretrace.training.rows.placement import EVERYWHERE, PlacedTable, RowPlacement

Parts = list[list[Int64]]  # by process and table


class ShardedTables:
    """The part of one process of tables whose whole values (rows, width) are given; all processes call alike.

    Raises ForetraceError for modes that are only there to compare with.
    """

    def __init__(self, placement: RowPlacement, rank: int, whole: Sequence[Float32]) -> None:
        if other := {each.mode for each in placement.tables} - {"pooled", "columns", "rows"}:
            raise ForetraceError(f"Tables in mode {min(other)} are not run; choose pooled, columns or rows.")
        self.placement, self.rank, self.peers = placement, rank, range(placement.devices)
        self.bytes = 0  # sent to and received from other processes
        self.ids: list[Int64] = []  # rows that are here, rising, by table
        self.weights: list[Tensor] = []
        for table, values in zip(placement.tables, whole, strict=True):
            ids = np.arange(table.rows)
            if table.mode == "rows":
                owners = table.owners_of(ids)
                ids = ids[(owners == rank) | (owners == EVERYWHERE)]
            kept = values[ids if self._asks(table, rank, rank) else ids[:0]]
            if table.mode != "rows" and table.shares[rank]:
                kept = np.split(kept, np.cumsum(table.shares)[:-1], axis=1)[rank]
            self.ids.append(ids)
            self.weights.append(torch.from_numpy(kept.copy()))

    def forward(self, lookups: Lookups, batch: int) -> list[Tensor]:
        """Return sums (samples of this process, width) of every table."""
        tables = self.placement.tables
        own = lookups.read(batch, self.rank, len(self.peers))
        samples = [len(lookups.read(batch, peer, len(self.peers))[0][1]) - 1 for peer in self.peers]
        self._bags = []  # by table: which of the rows that come, owner after owner, each id reads; and offsets
        heads: Parts = [[] for _ in self.peers]  # lengths of samples, or the number of rows
        asked: Parts = [[] for _ in self.peers]
        for table, (ids, offsets) in zip(tables, own, strict=True):
            rows, reads = np.unique(ids, return_inverse=True)
            owners = table.owners_of(rows) if table.mode == "rows" else np.zeros(len(rows), np.int64)
            owners = np.where(owners == EVERYWHERE, self.rank, owners)
            place = np.argsort(np.argsort(owners, kind="stable"))
            self._bags.append((torch.from_numpy(place[reads]), torch.from_numpy(offsets)))
            for peer in self.peers:
                found = rows[owners == peer] if table.mode == "rows" else ids
                head = np.array([len(found)]) if table.mode == "rows" else np.diff(offsets)
                asks = self._asks(table, self.rank, peer)
                heads[peer].append(head if asks else head[:0])
                asked[peer].append(found if asks else found[:0])
        sizes = [
            [self._asks(each, peer, self.rank) * (1 if each.mode == "rows" else samples[peer]) for each in tables]
            for peer in self.peers
        ]
        self._heads = self._exchanged(heads, sizes)
        self._wanted = self._exchanged(asked, [[int(each.sum()) for each in heads] for heads in self._heads])
        self._asked, self._samples = asked, samples
        came = self._exchanged([self._answers(peer) for peer in self.peers], self._shapes())
        return [self._summed(at, [each[at] for each in came]) for at in range(len(tables))]

    def backward(self, gradients: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Return rows here (positions in `ids`) and their gradients by table, of the last `forward`."""
        outgoing: list[list[Tensor]] = [[] for _ in self.peers]
        for at, (table, gradient) in enumerate(zip(self.placement.tables, gradients, strict=True)):
            if table.mode == "rows":
                reads, offsets = self._bags[at]
                counts = [len(each[at]) for each in self._asked]
                rows = torch.zeros(sum(counts), gradient.shape[1])
                rows.index_add_(0, reads, gradient.repeat_interleave(offsets.diff(), dim=0))
                parts = rows.split(counts)
            else:
                parts = gradient.split(table.shares.tolist(), dim=1)
            for to, part in zip(outgoing, parts, strict=True):
                to.append(part)
        came = self._exchanged(outgoing, [[each.numel() for each in self._answers(peer)] for peer in self.peers])
        found = []
        for at, (table, weight) in enumerate(zip(self.placement.tables, self.weights, strict=True)):
            total = torch.zeros_like(weight)
            seen = [torch.from_numpy(np.searchsorted(self.ids[at], self._wanted[peer][at])) for peer in self.peers]
            for peer in self.peers:  # as samples are in the batch
                part = came[peer][at].reshape(-1, weight.shape[1])
                if table.mode != "rows" and len(part):
                    part = part.repeat_interleave(torch.from_numpy(self._heads[peer][at]), dim=0)
                total.index_add_(0, seen[peer], part)
            touched = torch.unique(torch.cat(seen))
            found.append((touched, total[touched]))
        return found

    def compared(
        self, lookups: Lookups, batch: int, whole: Sequence[Tensor], sums: Sequence[Tensor],
        gradients: Sequence[tuple[Tensor, Tensor]], scale: float,
    ) -> tuple[bool, float]:  # fmt: skip
        """Return whether sums equal those of whole tables bit by bit, and how far gradients are off.

        `gradients` are those of a loss whose gradient is `scale` times the sums; their largest difference is told over
        their largest value.
        """
        equal, error = True, 0.0
        own = lookups.read(batch, self.rank, len(self.peers))
        for values, found, (ids, offsets) in zip(whole, sums, own, strict=True):
            equal &= torch.equal(found, bag(values, torch.from_numpy(ids), torch.from_numpy(offsets)))
        for at, (rows, found) in enumerate(gradients):
            every, starts = (torch.from_numpy(each) for each in lookups.read(batch)[at])
            by_id = (scale * bag(whole[at], every, starts)).repeat_interleave(starts.diff(), dim=0)
            expected = torch.zeros_like(whole[at]).index_add_(0, every, by_id)[torch.from_numpy(self.ids[at])]
            if (table := self.placement.tables[at]).mode != "rows":
                expected = expected.split(table.shares.tolist(), dim=1)[self.rank]
            if len(self.weights[at]) and expected.numel():
                full = torch.zeros_like(expected).index_add_(0, rows, found)
                error = max(error, float((full - expected).abs().max() / expected.abs().max().clamp(min=1e-30)))
        return equal, error

    def _asks(self, table: PlacedTable, reader: int, owner: int) -> bool:
        """Return whether a reader asks this owner anything of a table."""
        if table.mode == "rows":
            return reader == owner or table.exchanges
        return bool(table.shares[owner] > 0)

    def _answers(self, peer: int) -> list[Tensor]:
        """Return rows or sums of every table for one reader."""
        found = []
        for at, (table, weight) in enumerate(zip(self.placement.tables, self.weights, strict=True)):
            head, wanted = self._heads[peer][at], np.searchsorted(self.ids[at], self._wanted[peer][at])
            if table.mode == "rows":
                found.append(weight[wanted])
            elif len(head):
                found.append(bag(weight, torch.from_numpy(wanted), torch.from_numpy(np.cumsum([0, *head]))))
            else:
                found.append(weight[:0])
        return found

    def _shapes(self) -> list[list[int]]:
        """Return how many floats come from every owner, by table."""
        mine, width = self._samples[self.rank], self.placement.width
        return [
            [
                width * len(self._asked[peer][at]) if table.mode == "rows" else mine * int(table.shares[peer])
                for at, table in enumerate(self.placement.tables)
            ]
            for peer in self.peers
        ]  # fmt: skip

    def _summed(self, at: int, came: list[Tensor]) -> Tensor:
        """Return the sums of a table from what its owners sent."""
        mode, samples = self.placement.tables[at].mode, self._samples[self.rank]
        if mode == "rows":
            return bag(torch.cat(came).reshape(-1, self.placement.width), *self._bags[at])
        return torch.cat([each.reshape(samples, -1) for each in came if len(each)], dim=1)

    def _exchanged(self, parts: list[list[Any]], sizes: list[list[int]]) -> list[list[Any]]:
        """Return all to all: what every process sent this one, by process and table, each of so many numbers."""
        tensors = [torch.cat([torch.as_tensor(each).ravel() for each in to]) for to in parts]
        given, taken = [len(each) for each in tensors], [sum(each) for each in sizes]
        found = torch.empty(sum(taken), dtype=tensors[0].dtype)
        if len(self.peers) > 1:
            dist.all_to_all_single(found, torch.cat(tensors), taken, given)
        else:
            found = tensors[0]
        others = sum(given) + sum(taken) - given[self.rank] - taken[self.rank]
        self.bytes += others * found.element_size()
        split = [list(each.split(lengths)) for each, lengths in zip(found.split(taken), sizes, strict=True)]
        return split if found.is_floating_point() else [[each.numpy() for each in table] for table in split]


def bag(weight: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
    """Return sums of rows by sample: (samples, width)."""
    if not len(ids):
        return torch.zeros(len(offsets) - 1, weight.shape[1])
    return embedding_bag(ids, weight, offsets, mode="sum", include_last_offset=True)
