"""Run placements of rows on real processes: sums and gradients compared, bytes counted, batches timed in turns."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from foretrace.arrays import Float32
from foretrace.errors import ForetraceError
from foretrace.experiment.ledger import Row, figure_row
from foretrace.experiment.links import netns
from foretrace.experiment.measure import versions
from foretrace.experiment.messages import ExchangedRows, ExchangeRows
from foretrace.experiment.processes import Workers, together
from foretrace.experiment.statistics import Ratio, paired_ratio
from foretrace.hardware.cluster import parse_link
from foretrace.training.rows.lookups import Lookups, read
from foretrace.training.rows.placement import FLOAT, RowPlacement

_MOST_BYTES = 1 << 30  # of whole tables, which every process makes
_SCALE = 0.1  # gradients of the sums are this times the sums
_ROUNDS = 5
_PAYLOAD = 0.94  # share of a link that is no header, and the range of it
_PAYLOADS = (0.85, 1.0)


@dataclass(frozen=True, kw_only=True)
class RanPlacement:
    """A placement that has run; bytes are those of the busiest device in the mean batch, seconds those of a batch."""

    name: str
    predicted_bytes: float
    counted_bytes: float
    equal: bool  # sums to those of whole tables, bit by bit
    gradient_error: float
    rounds_s: tuple[float, ...]
    again_s: tuple[float, ...]  # of a second copy of it
    predicted_s: float  # 0 without a link
    interval_s: tuple[float, float]

    @property
    def step_s(self) -> float:
        """Median over rounds."""
        return float(np.median(self.rounds_s))

    def row(self, size: str, devices: int) -> Row:
        """What the ledger keeps."""
        ratios = np.array(self.rounds_s) / self.predicted_s
        low, middle, high = np.quantile(ratios, [0.1, 0.5, 0.9]).tolist()
        range_ = tuple(each / self.predicted_s for each in self.interval_s)
        return figure_row(
            f"plan-rows {self.name}", parameters={"devices": devices, "placement": self.name}, model="embedding tables",
            size=size, seed=0, clock="wall", runs=len(ratios), predicted_s=self.predicted_s, measured_s=self.step_s,
            predicted=Ratio(value=1.0, low=range_[0], high=range_[1]),
            measured=Ratio(value=middle, low=low, high=high), same=paired_ratio(self.rounds_s, self.again_s),
            versions=versions(),
        )  # fmt: skip


def run(
    arms: Mapping[str, RowPlacement], source: str, samples: int, batches: Sequence[int], *, link: str = "",
    rounds: int = _ROUNDS, tell: Callable[[float], None] | None = None,
) -> tuple[RanPlacement, ...]:  # fmt: skip
    """Run placements in turns, each twice per round, on processes that are joined by this machine or by shaped links.

    On a `link`, a batch is predicted to take what it takes without one, and its bytes through the busiest end of a
    link. Raises ForetraceError for tables that do not fit into each process whole, and where there can be no rig.
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
            alone = {name: _slowest(_asked(workers, each)) for name, each in requests.items()}
        times: dict[str, list[float]] = {f"{name}{copy}": [] for name in arms for copy in ("", " again")}
        with ExitStack() as stack:
            if link:
                workers = stack.enter_context(
                    netns.running(stack.enter_context(netns.made(first.devices, parse_link(link))))
                )
            else:
                workers = stack.enter_context(together(first.devices))
            order = list(times)
            for number in range(rounds + 1):
                for each in order:
                    answers = _asked(workers, requests[each.removesuffix(" again")])
                    if number:  # the first round is not counted
                        times[each].append(_slowest(answers))
                order = order[1:] + order[:1]
                if tell is not None:
                    tell((number + 1) / (rounds + 1))
    return tuple(_ran(name, arms[name], lookups, batches, checks[name], alone[name], times, link) for name in arms)


def _ran(
    name: str, placement: RowPlacement, lookups: Lookups, batches: Sequence[int], checks: Sequence[ExchangedRows],
    alone_s: float, times: Mapping[str, Sequence[float]], link: str,
) -> RanPlacement:  # fmt: skip
    predicted_s, interval_s = 0.0, (0.0, 0.0)
    if link:
        wire = parse_link(link)
        nbytes = float(np.mean([placement.busiest_link(lookups, each) for each in batches]))
        delay_s = (3 + placement.training) * wire.latency_s
        predicted_s = alone_s + delay_s + nbytes / (_PAYLOAD * wire.bytes_per_s)
        # Computing takes from nothing (hidden behind others' messages) to twice as long as it took with all at once.
        slow, fast = (nbytes / (share * wire.bytes_per_s) for share in _PAYLOADS)
        interval_s = fast + delay_s, slow + 4 * delay_s + 2 * alone_s
    return RanPlacement(
        name=name,
        predicted_bytes=float(placement.exchanged(lookups, batches).mean(axis=0).max()),
        counted_bytes=float(np.array([each.bytes for each in checks]).mean(axis=1).max()),
        equal=all(each.equal for each in checks),
        gradient_error=max(each.gradient_error for each in checks),
        rounds_s=tuple(times[name]),
        again_s=tuple(times[f"{name} again"]),
        predicted_s=predicted_s,
        interval_s=interval_s,
    )


def _asked(workers: Workers, request: ExchangeRows, *, check: bool = False) -> list[ExchangedRows]:
    import msgspec

    request = msgspec.structs.replace(request, check=check)
    return workers.ask(request, "exchanging rows", ExchangedRows, seconds=60)


def _slowest(answers: Sequence[ExchangedRows]) -> float:
    return max(each.wall_s for each in answers)


def exchange(request: ExchangeRows, rank: int) -> ExchangedRows:
    """What a process does: its part of every batch, timed, or compared with whole tables."""
    import torch
    import torch.distributed as dist

    from foretrace.training.rows.sharded import ShardedTables

    placement = RowPlacement.load(Path(request.placement))
    lookups = read(request.lookups, samples=request.samples)
    whole = [_values(at, each.rows, placement.width) for at, each in enumerate(placement.tables)]
    tables = ShardedTables(placement, rank, whole)
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
    """Values of a whole table, the same in every process: (rows, width)."""
    return np.random.default_rng(table).standard_normal((rows, width), dtype=np.float32)
