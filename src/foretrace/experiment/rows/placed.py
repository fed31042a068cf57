"""Run placements of rows on real processes: sums and gradients compared, bytes counted, batches timed in turns."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from foretrace.arrays import Float32, Float64
from foretrace.errors import ForetraceError
from foretrace.experiment.ledger import Row
from foretrace.experiment.links import netns
from foretrace.experiment.messages import ExchangedRows, ExchangeRows, TimeMessages, Worker
from foretrace.experiment.processes import Workers, together
from foretrace.experiment.statistics import Arm
from foretrace.experiment.trial import figured, in_turns, means
from foretrace.hardware.cluster import parse_link
from foretrace.training.rows.lookups import read
from foretrace.training.rows.placement import FLOAT, RowPlacement

_MOST_BYTES = 1 << 30  # of whole tables, which every process makes
_SCALE = 0.1  # gradients of the sums are this times the sums
_ROUNDS = 5
_AGAIN = " again"
_ALONE = 3  # blocks without a link
_TIMED, _TIMED_BURSTS = 5, 4  # messages on a link: how often, and their least size in bursts


@dataclass(frozen=True, kw_only=True)
class RanPlacement:
    """A placement that has run; bytes are those of the busiest device in the mean batch, seconds those of a batch."""

    name: str
    predicted_bytes: float
    counted_bytes: float
    equal: bool  # sums to those of whole tables, bit by bit
    gradient_error: float  # largest difference over the largest gradient
    rounds_s: tuple[float, ...]
    again_s: tuple[float, ...]  # of a second copy of it
    step_s: float  # median over rounds
    predicted_s: float | None  # None without a link
    interval_s: tuple[float, float] | None

    def row(self, size: str, devices: int) -> Row | None:
        """Return what the ledger keeps; None where nothing was predicted."""
        if self.predicted_s is None or self.interval_s is None:
            return None
        return figured((self.predicted_s, *self.interval_s), self.rounds_s, self.again_s).row(
            f"plan-rows {self.name}", parameters={"devices": devices, "placement": self.name}, model="embedding tables",
            size=size,
        )  # fmt: skip


def run(
    arms: Mapping[str, RowPlacement], source: str, samples: int, batches: Sequence[int], *, link: str = "",
    rounds: int = _ROUNDS, tell: Callable[[float], None] | None = None,
) -> tuple[RanPlacement, ...]:  # fmt: skip
    """Run placements in turns, each twice per round, on processes that are joined by this machine or by shaped links.

    On a `link`, a batch is predicted to take what it takes without one, and what its messages take by all-to-alls that
    are timed there. Raises ForetraceError for tables that do not fit into each process whole, and where there can be no
    rig.
    """
    first = next(iter(arms.values()))
    if (whole := FLOAT * first.width * sum(each.rows for each in first.tables)) > _MOST_BYTES:
        raise ForetraceError(
            f"A run makes whole tables in every process to compare with, and {whole:,} bytes are too many; "
            f"give tables of {_MOST_BYTES:,} bytes or less."
        )
    lookups = read(source, samples=samples)
    batches = tuple(batches)
    with tempfile.TemporaryDirectory() as folder:
        requests = {}
        for at, (name, placement) in enumerate(arms.items()):
            placement.save(file := Path(folder) / f"{at}.npz")
            requests[name] = ExchangeRows(
                placement=str(file), lookups=source, samples=samples, batches=batches, check=False
            )
        with together(first.devices) as workers:
            checks = {name: _asked(workers, each, check=True) for name, each in requests.items()}
            alone = {name: [_slowest(_asked(workers, each)) for _ in range(_ALONE)] for name, each in requests.items()}
            times = {} if link else _turns(workers, requests, rounds, tell)
        if link:
            with netns.made(first.devices, parse_link(link)) as net, netns.running(net) as workers:
                most = [each.sum(axis=1).max() for arm in arms.values() for each in arm.exchanges(lookups, 0).values()]
                rate = _rate(workers, net, int(max(most)))
                times = _turns(workers, requests, rounds, tell)
    found = []
    for name, placement in arms.items():
        predicted_s, interval_s = None, None
        if link:
            # Computing is hidden behind the messages of others, or takes up to twice as long beside them.
            messages = [rate.seconds(placement.exchanges(lookups, batch).values()) for batch in batches]
            wire_s, low_s, high_s = np.mean(messages, axis=0)
            predicted_s = float(wire_s + np.median(alone[name]))
            interval_s = float(low_s), float(high_s + 2 * max(alone[name]))
        found.append(
            RanPlacement(
                name=name, predicted_bytes=float(placement.exchanged(lookups, batches).mean(axis=0).max()),
                predicted_s=predicted_s, interval_s=interval_s,
                counted_bytes=float(np.array([each.bytes for each in checks[name]]).mean(axis=1).max()),
                equal=all(each.equal for each in checks[name]),
                gradient_error=max(each.gradient_error for each in checks[name]),
                rounds_s=tuple(times[name]), again_s=tuple(times[name + _AGAIN]),
                step_s=Arm.of(means(times[name], times[name + _AGAIN])).median_s,
            )
        )  # fmt: skip
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class MessageRate:
    """What all-to-alls reach on shaped links, as timed there."""

    bytes_per_s: tuple[float, float, float]  # one way: median, slowest, quickest
    waits: float  # share of what goes the lesser way of a connection that waits for the other way
    waits_least: float  # the same in a batch: nothing among more than two devices, which exchange with others meanwhile
    burst_bytes: int  # that a way which was idle carries at once

    def seconds(self, exchanges: Iterable[Float64]) -> tuple[float, float, float]:
        """Return seconds that exchanges take one after the other, low and high ones.

        Each has bytes by sender and receiver (devices, devices).
        """
        value, most = 0.0, 0.0
        for moved in exchanges:
            at_once = np.minimum(self.burst_bytes / np.maximum(moved.sum(axis=1), 1), 1)[:, None]
            value += _busiest(moved * (1 - at_once), self.waits_least)
            most += _busiest(moved, self.waits)
        middle, slowest, quickest = self.bytes_per_s
        return value / middle, value / quickest, most / slowest


def _busiest(moved: Float64, waits: float) -> float:
    """Return bytes that have to pass the busiest device one after the other."""
    ways = np.maximum(moved.sum(axis=1), moved.sum(axis=0))
    return float((ways + waits * np.minimum(moved, moved.T).sum(axis=1)).max())


def _rate(workers: Workers, net: netns.Net, size: int) -> MessageRate:
    """Time messages of one way, and of all ways at once, of `size` bytes from each sender."""
    burst, count = netns.burst_bytes(net.link), len(workers)
    size = max(size, _TIMED_BURSTS * burst) // FLOAT * FLOAT
    given = np.zeros((2, count, count), np.int64)
    given[0, 0, 1] = size
    given[1] = (1 - np.eye(count, dtype=np.int64)) * (size // (count - 1))
    one, both = (
        np.max(workers.ask(time_messages, TimeMessages(bytes=each.tolist()), "timing the links", seconds=60), axis=0)
        for each in given
    )
    rates = size / one
    after = float(np.median(rates) * np.median(both)) - (size - burst)  # of both ways each has a burst
    waits = min(max(after / (size - burst), 0.0), 1.0)
    return MessageRate(
        bytes_per_s=(float(np.median(rates)), float(rates.min()), float(rates.max())), waits=waits,
        waits_least=waits if count == 2 else 0.0, burst_bytes=burst,
    )  # fmt: skip


def time_messages(given: TimeMessages, worker: Worker) -> tuple[float, ...]:
    """Return seconds of all-to-alls, all of the same messages."""
    import torch
    import torch.distributed as dist

    out = [each // FLOAT for each in given.bytes[worker.rank]]
    into = [each[worker.rank] // FLOAT for each in given.bytes]
    sent, came, found = torch.zeros(sum(out)), torch.zeros(sum(into)), []
    dist.all_to_all_single(came, sent, into, out)
    for _ in range(_TIMED):
        begin = time.perf_counter()
        dist.all_to_all_single(came, sent, into, out)
        found.append(time.perf_counter() - begin)
    return tuple(found)


def _turns(
    workers: Workers, requests: Mapping[str, ExchangeRows], rounds: int, tell: Callable[[float], None] | None
) -> dict[str, list[float]]:
    """Return seconds of a batch by round, of two copies of each."""
    asked = {f"{name}{copy}": request for name, request in requests.items() for copy in ("", _AGAIN)}
    return in_turns(asked, lambda name, _: _slowest(_asked(workers, asked[name])), rounds, warm_up=1, tell=tell)


def _asked(workers: Workers, request: ExchangeRows, *, check: bool = False) -> list[ExchangedRows]:
    request = msgspec.structs.replace(request, check=check)
    return workers.ask(exchange, request, "exchanging rows", seconds=60)


def _slowest(answers: Sequence[ExchangedRows]) -> float:
    return max(each.wall_s for each in answers)


def exchange(request: ExchangeRows, worker: Worker) -> ExchangedRows:
    """Return what a process does: its part of every batch, timed, or compared with whole tables."""
    import torch
    import torch.distributed as dist

    from foretrace.training.rows.sharded import ShardedTables

    placement = RowPlacement.load(Path(request.placement))
    lookups = read(request.lookups, samples=request.samples)
    whole = [_values(at, each.rows, placement.width) for at, each in enumerate(placement.tables)]
    tables = ShardedTables(placement, worker.rank, whole)
    counted, equal, error = [], True, 0.0
    dist.barrier()
    began = time.perf_counter()
    for batch in request.batches:
        tables.bytes = 0
        sums = tables.forward(lookups, batch)
        gradients = tables.backward([_SCALE * each for each in sums]) if placement.training else []
        counted.append(tables.bytes)
        if request.check:
            same, off = tables.compared(
                lookups, batch, [torch.from_numpy(each) for each in whole], sums, gradients, _SCALE
            )
            equal, error = equal and same, max(error, off)
    wall_s = (time.perf_counter() - began) / len(request.batches)
    return ExchangedRows(bytes=tuple(counted), wall_s=wall_s, equal=equal, gradient_error=error)


def _values(table: int, rows: int, width: int) -> Float32:
    """Return values of a whole table, the same in every process: (rows, width)."""
    return np.random.default_rng(table).standard_normal((rows, width), dtype=np.float32)
