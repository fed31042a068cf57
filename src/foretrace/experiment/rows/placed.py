"""Run placements of rows on real processes: sums and gradients compared, bytes counted, batches timed in turns."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from foretrace.arrays import Float32
from foretrace.errors import ForetraceError
from foretrace.experiment.ledger import Row
from foretrace.experiment.links import netns
from foretrace.experiment.messages import ExchangedRows, ExchangeRows, Worker
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
    predicted_s: float | None  # None without a link, and of the placement that the link was calibrated with
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

    On a `link`, a batch is predicted to take what it takes without one, and the busiest device's bytes in and out, at
    the rate that the last placement reaches. Raises ForetraceError for tables that do not fit into each
    process whole, and where there can be no rig.
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
                times = _turns(workers, requests, rounds, tell)
    busiest = {name: float(each.exchanged(lookups, batches).mean(axis=0).max()) for name, each in arms.items()}
    reference = list(arms)[-1]
    wires = np.maximum(np.array(times[reference]) - np.median(alone[reference]), 1e-9) / max(busiest[reference], 1.0)
    found = []
    for name in arms:
        predicted_s, interval_s = None, None
        if link and name != reference:
            # Computing is hidden behind the messages of others, or takes up to twice as long beside them. A link that
            # carries both ways at once is as slow as the way that has more to carry.
            uneven = max(arms[name].one_way(lookups, batches[0]) / arms[reference].one_way(lookups, batches[0]), 1.0)
            wire = wires * busiest[name]
            predicted_s = float(np.median(wire) + np.median(alone[name]))
            interval_s = float(wire.min()), float(uneven * wire.max() + 2 * max(alone[name]))
        found.append(
            RanPlacement(
                name=name, predicted_bytes=busiest[name], predicted_s=predicted_s, interval_s=interval_s,
                counted_bytes=float(np.array([each.bytes for each in checks[name]]).mean(axis=1).max()),
                equal=all(each.equal for each in checks[name]),
                gradient_error=max(each.gradient_error for each in checks[name]),
                rounds_s=tuple(times[name]), again_s=tuple(times[name + _AGAIN]),
                step_s=Arm.of(means(times[name], times[name + _AGAIN])).median_s,
            )
        )  # fmt: skip
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
