"""The oracle cacher of Bagpipe (arXiv 2202.12429): which rows every trainer holds, fetches and passes on, until when.

The batches that come next are known, so nothing is guessed. A row stays with the trainers that read it next, if that is
within `look_ahead` batches; else it goes back to the table. Of those that touch a row in a batch one is its owner: it
gets the others' gradients, adds them up in the order of the ranks, updates the row once, and sends its *value* to those
that read it next. So a row that one trainer touched costs a message only where another one reads it next. Rows of the
next batch are exchanged at once, all others behind the computation.

`plan_ahead` is that as numpy columns; what it decides for a batch depends on `look_ahead` batches after it and no more.
`LookAheadRows` is the memory that obeys it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from foretrace.arrays import Float32, Int64, Mask
from foretrace.errors import ForetraceError
from foretrace.training.rows.lookups import Lookups
from foretrace.training.rows.rows import Rows, distinct

LAG = 2  # batches after which everything of a batch is exchanged: what is not of the next one has so much time
POISON = np.uint32(0x7FC0DEAD)  # a NaN that no arithmetic makes: what is left of a row that is no longer held


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainerTurn:
    """What one trainer does in one batch. Rows are int64 and sorted; lists have an entry per trainer."""

    ids: Int64  # of the batch, each once
    fetch: Int64  # of these, those that are asked of the table
    owned: Int64  # updated here
    gradients_to: tuple[Int64, ...]
    gradients_from: tuple[Int64, ...]
    values_to: tuple[Int64, ...]
    values_from: tuple[Int64, ...]
    write_back: Int64
    evict: Int64  # held in this batch, but not for a later one


@dataclass(frozen=True, eq=False, kw_only=True)
class LookAheadPlan:
    """Touched rows of the batches from `begin` to before `end`, sorted by batch and row: one entry per batch and row.

    Those of batch i are `starts[i - begin] : starts[i - begin + 1]`. Masks over trainers are (entries, trainers).
    """

    count: int  # rows of all tables
    trainers: int
    look_ahead: int
    begin: int
    end: int
    starts: Int64
    rows: Int64
    users: Mask  # who touches it
    owner: Int64
    hit: Mask  # touched within the last `look_ahead` batches, so held
    next_users: Mask  # who touches it next, if that is within `look_ahead` batches
    soon: Mask  # that is in the next batch

    def turn(self, batch: int, trainer: int, *, soon: bool | None = None) -> TrainerTurn:
        """Return what a trainer does in a batch, with all exchanges or those needed at once (`soon`) or later."""
        at = slice(*self.starts[batch - self.begin : batch - self.begin + 2])
        rows, users, owner, after = self.rows[at], self.users[at], self.owner[at], self.next_users[at]
        wanted = np.ones(len(rows), np.bool_) if soon is None else self.soon[at] == soon
        used, mine, others = users[:, trainer], owner == trainer, range(self.trainers)
        return TrainerTurn(
            ids=rows[used], fetch=rows[used & ~self.hit[at]], owned=rows[mine & wanted],
            gradients_to=tuple(rows[used & (owner == p) & wanted & (p != trainer)] for p in others),
            gradients_from=tuple(rows[mine & users[:, p] & wanted & (p != trainer)] for p in others),
            values_to=tuple(rows[mine & after[:, p] & wanted & (p != trainer)] for p in others),
            values_from=tuple(rows[(owner == p) & after[:, trainer] & wanted & (p != trainer)] for p in others),
            write_back=rows[mine & ~after.any(1) & wanted], evict=rows[used & ~after[:, trainer] & wanted],
        )  # fmt: skip

    @property
    def hit_rate(self) -> float:
        """Share of the rows of a batch, each counted once, that are held when it begins."""
        return float(self.hit.mean())

    @cached_property
    def held(self) -> Int64:
        """Rows that each trainer holds at most (trainers,), if what a batch leaves behind goes two batches later."""
        batches = self.end - self.begin
        batch = np.repeat(np.arange(batches), np.diff(self.starts))
        most = []
        for trainer in range(self.trainers):
            used, kept = self.users[:, trainer], self.next_users[:, trainer]
            comes = np.bincount(batch[(used & ~self.hit) | (kept & ~used)], minlength=batches)
            goes = np.bincount(np.minimum(batch[used & ~kept] + LAG, batches), minlength=batches + 1)[:batches]
            most.append(np.cumsum(comes - goes).max())
        return np.array(most, np.int64)


def numbered(lookups: Lookups, batch: int, trainer: int, trainers: int) -> tuple[Int64, Int64]:
    """Return ids (n,) and offsets of one trainer's part of a batch in one table that holds all: table after table.

    Bag `table * samples + sample` reads the ids from its offset to the next one's.
    """
    parts = lookups.read(batch, trainer, trainers)
    first = np.concatenate([[0], np.cumsum([table.rows for table in lookups.tables])])
    sizes = np.concatenate([[0], np.cumsum([len(ids) for ids, _ in parts])])
    ids = np.concatenate([own + first[i] for i, (own, _) in enumerate(parts)])
    offsets = np.concatenate([own[:-1] + sizes[i] for i, (_, own) in enumerate(parts)])
    return ids, offsets


def plan_ahead(
    lookups: Lookups, *, trainers: int, look_ahead: int, begin: int = 0, end: int | None = None
) -> LookAheadPlan:
    """Plan batches from `begin` to before `end`; nothing is held before or after them.

    Raises ForetraceError for a number of trainers, of batches or a look-ahead that cannot be.
    """
    end = lookups.batches if end is None else end
    if not 1 <= trainers <= lookups.samples:
        raise ForetraceError(f"`trainers={trainers}` must be from 1 to the {lookups.samples} samples of a batch.")
    if look_ahead < 1 or not 0 <= begin < end <= lookups.batches:
        raise ForetraceError(
            f"Look-ahead must be a batch or more, and batches from 0 to {lookups.batches}, got "
            f"`look_ahead={look_ahead}` and {begin} to {end}."
        )
    count = sum(table.rows for table in lookups.tables)
    keys = [
        (batch - begin) * count + distinct(numbered(lookups, batch, trainer, trainers)[0])
        for batch in range(begin, end)
        for trainer in range(trainers)
    ]
    entries = distinct(np.concatenate(keys))
    users = np.zeros((len(entries), trainers), np.bool_)
    for number, own in enumerate(keys):
        users[np.searchsorted(entries, own), number % trainers] = True
    batch, rows = np.divmod(entries, count)
    order = np.lexsort((batch, rows))  # touches of one row in a sequence
    same = rows[order[1:]] == rows[order[:-1]]
    apart = np.where(same, batch[order[1:]] - batch[order[:-1]], look_ahead + 1)
    hit, soon, next_users = np.zeros_like(rows, np.bool_), np.zeros_like(rows, np.bool_), np.zeros_like(users)
    hit[order[1:]] = apart <= look_ahead
    soon[order[:-1]] = apart == 1
    next_users[order[:-1]] = users[order[1:]] & (apart <= look_ahead)[:, None]
    return LookAheadPlan(
        count=count, trainers=trainers, look_ahead=look_ahead, begin=begin, end=end,
        starts=np.searchsorted(batch, np.arange(end - begin + 1)).astype(np.int64), rows=rows, users=users,
        owner=_owners(users, next_users, rows + batch + begin), hit=hit, next_users=next_users, soon=soon,
    )  # fmt: skip


def _owners(users: Mask, next_users: Mask, turn: Int64) -> Int64:
    """Return one of the users, one that reads the row next where there is such a one, each in its turn."""
    both = users & next_users
    may = np.where(both.any(1, keepdims=True), both, users)
    which = turn % may.sum(1)
    found: Int64 = np.argmax(np.cumsum(may, axis=1) > which[:, None], axis=1).astype(np.int64)
    return found


class LookAheadRows(Rows):
    """A cache that holds of `inner` what a plan says, for one trainer, and asks `inner` for all other rows.

        with LookAheadRows(inner, plan) as rows:
            for batch in range(plan.begin, plan.end):
                turn = plan.turn(batch, 0)
                rows.begin(turn)
                rows.put(turn.ids, updated(rows.get(turn.ids)))
                rows.end(turn)

    `capacity` is the number of rows that it may hold, by default as many as the plan needs. Where several trainers
    share a plan, the one who trains passes rows between them: `admit`, `poison` and `evict` are for that.
    Raises ForetraceError where it cannot hold a batch, or not what the plan wants it to.
    """

    def __init__(self, inner: Rows, plan: LookAheadPlan, trainer: int = 0, capacity: int = 0) -> None:
        if plan.count != inner.count:
            raise ForetraceError(f"The plan is for {plan.count} rows, the table has {inner.count}.")
        super().__init__(inner.count, inner.width)
        batch = int(np.add.reduceat(plan.users[:, trainer].astype(np.int64), plan.starts[:-1]).max())
        needs = int(plan.held[trainer])
        capacity = capacity or needs
        if capacity < batch:
            raise ForetraceError(f"A cache of {capacity} rows cannot hold one batch, which reads {batch}.")
        if capacity < needs:
            raise ForetraceError(
                f"A cache of {capacity} rows cannot look {plan.look_ahead} batches ahead, which takes {needs}; look "
                "less far ahead."
            )
        self.inner, self.plan, self.trainer = inner, plan, trainer
        self._values = np.empty((max(capacity, 1), self.width), np.float32)
        self._values.view(np.uint32)[:] = POISON
        self._free = np.arange(capacity)  # places; the first `_left` of them are free
        self._left = capacity
        self._places = np.full(inner.count, -1, np.int32)  # of every row, -1 where it is not held

    @property
    def held(self) -> int:
        """How many rows are held."""
        return len(self._free) - self._left

    def begin(self, turn: TrainerTurn, fetched: Float32 | None = None) -> None:
        """Hold the rows of a batch; those to fetch are given, or asked of `inner`."""
        self.admit(turn.fetch, self.inner.get(turn.fetch) if fetched is None else fetched)
        self.counters.hits += len(turn.ids) - len(turn.fetch)
        self.counters.misses += len(turn.fetch)

    def end(self, turn: TrainerTurn) -> None:
        """Write back what no batch within the window reads, and release it."""
        self.inner.put(turn.write_back, self.get(turn.write_back))
        self.evict(turn.evict)

    def admit(self, ids: Int64, values: Float32) -> None:
        """Write rows (n,), and hold those that are not held yet. Raises RuntimeError where there is no place."""
        new = ids[self._places[ids] < 0]
        if len(new) > self._left:
            raise RuntimeError(f"{len(new)} rows are to be held, and {self._left} places are free")
        self._left -= len(new)
        self._places[new] = self._free[self._left : self._left + len(new)]
        self._values[self._places[ids]] = values

    def poison(self, ids: Int64) -> None:
        """Make sure that held rows (n,) are not read before they are written again."""
        self._values.view(np.uint32)[self._places[ids]] = POISON

    def evict(self, ids: Int64) -> None:
        """Release held rows (n,), whose places are poisoned."""
        self.poison(ids)
        self._free[self._left : self._left + len(ids)] = self._places[ids]
        self._left += len(ids)
        self._places[ids] = -1

    def close(self) -> None:
        self.inner.close()

    def _get(self, ids: Int64) -> Float32:
        found, away = self._values[self._places[ids]], self._places[ids] < 0
        if away.any():
            found[away] = self.inner.get(ids[away])
        if (found.view(np.uint32) == POISON).any():
            raise RuntimeError("a row was read that is not held any more, or not updated yet")
        return found

    def _put(self, ids: Int64, values: Float32) -> None:
        away = self._places[ids] < 0
        self._values[self._places[ids[~away]]] = values[~away]
        if away.any():
            self.inner.put(ids[away], values[away])
