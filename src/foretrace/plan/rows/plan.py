"""Plan the rows of embedding tables on one part of the batches, and judge the plan on the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from foretrace.arrays import Float64, Int64
from foretrace.errors import ForetraceError
from foretrace.experiment.ledger import Row
from foretrace.experiment.rows.placed import RanPlacement, run
from foretrace.experiment.statistics import LEVEL, RESAMPLES
from foretrace.graph.taskgraph import TaskKind
from foretrace.graph.writer import StepWriter
from foretrace.hardware.cluster import parse_link
from foretrace.plan.rows.bound import bound
from foretrace.plan.rows.costs import RowCosts, profile
from foretrace.plan.rows.place import choose, whole_tables
from foretrace.simulate.timeline import Timeline, simulate
from foretrace.trace.trace import LaneKind
from foretrace.training.rows.lookups import Lookups
from foretrace.training.rows.placement import EVERYWHERE, Mode, PlacedTable, RowPlacement, column_shares

_COMPARED = ("table-wise", "rows by number", "column-wise")
_RUN = 4  # batches
# In and out of the busiest device per batch: of the mean of held-out batches, low and high end of its 80 % interval.
Bytes = tuple[float, float, float]


@dataclass(frozen=True, kw_only=True, eq=False)
class RowPlan:
    """A placement of rows, what it costs, and what others would."""

    placement: RowPlacement
    others: dict[str, RowPlacement]  # that fit
    busiest: Bytes
    expected_bytes: float  # from the profile
    bound_bytes: float  # that no placement is below, by the same profile
    baselines: dict[str, Bytes | None]  # None for one that does not fit
    batches: tuple[int, int]  # profiled, held out
    seconds: float


def plan_rows(
    lookups: Lookups, *, devices: int, memory: float = inf, width: int = 64, training: bool = True
) -> RowPlan:
    """Place the rows of tables of `width` float32 columns on devices with `memory` bytes for them each.

    The first two thirds of the batches are profiled, the others judge. The bound needs SciPy (extra `plan`). Raises
    ForetraceError where the tables do not fit or there is only one batch.
    """
    began = time.perf_counter()
    if devices < 1 or width < 1:
        raise ForetraceError(f"`devices={devices}` and `width={width}` must be at least 1.")
    if lookups.batches < 2:
        raise ForetraceError("One batch cannot be both profiled and judged; give 2 or more, or fewer `samples=`.")
    split = max(2 * lookups.batches // 3, 1)
    held = range(split, lookups.batches)
    costs = RowCosts(profile(lookups, devices, range(split)), width, training=training)
    others = baselines(costs, inf)
    even = others["rows by number"]
    assert even is not None
    need = int(even.memory().max())
    if memory < need:
        raise ForetraceError(
            f"`memory={memory:.0f}` of {devices} device{'s' * (devices > 1)} does not hold the tables, which have "
            f"{int(costs.table_memory.sum()):,} bytes; give `memory={need}` or more."
        )
    if memory < inf:
        others = baselines(costs, memory)
    lower, choice = bound(costs, memory, choose(costs, memory))
    if choice is None:  # hardly any room is left: rows are dealt out evenly, whoever reads them
        placement, expected = even, float(even.exchanged(lookups, range(split)).mean(axis=0).max())
    else:
        placement, expected = costs.placement(choice), float(costs.loads(choice).max())
    return RowPlan(
        placement=placement, others={name: each for name, each in others.items() if each is not None},
        busiest=judge(placement.exchanged(lookups, held)), expected_bytes=expected, bound_bytes=min(lower, expected),
        baselines={name: judge(each.exchanged(lookups, held)) if each else None for name, each in others.items()},
        batches=(split, len(held)), seconds=time.perf_counter() - began,
    )  # fmt: skip


def judge(exchanged: Float64) -> Bytes:
    """Return the busiest device of the mean batch, of bytes (batches, devices); the interval resamples batches."""
    drawn = np.random.default_rng(0).integers(len(exchanged), size=(RESAMPLES, len(exchanged)))
    low, high = np.quantile(exchanged[drawn].mean(axis=1).max(axis=1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2]).tolist()
    found = float(exchanged.mean(axis=0).max())
    return found, min(low, found), max(high, found)


def exchange(plan: RowPlan, lookups: Lookups, link: str) -> Timeline:
    """Return the first held-out batch on links whose busier direction decides: all-to-alls, one by one."""
    placement, rate = plan.placement, parse_link(link).bytes_per_s
    writer, ends = StepWriter("a batch", ranks=placement.devices, platform="cpu"), list[int]()
    lanes = [writer.on(LaneKind.LINK, f"link of device {r}", r) for r in range(placement.devices)]
    for name, moved in placement.exchanges(lookups, plan.batches[0]).items():
        seconds = np.maximum(moved.sum(axis=0), moved.sum(axis=1)) / rate
        ends = [
            writer.behind(ends, TaskKind.COPY, lane, name, round(1e9 * each))
            for lane, each in zip(lanes, seconds, strict=True)
        ]
    return simulate(writer.ended())


def run_rows(
    plan: RowPlan, source: str, samples: int, *, link: str = "", tell: Callable[[float], None] | None = None
) -> tuple[RanPlacement, ...]:
    """Run the plan beside placements of `_COMPARED` that fit, on held-out batches; a `link` also predicts seconds.

    Raises ForetraceError as `experiment.rows.placed.run`.
    """
    if plan.placement.devices < 2:
        raise ForetraceError("One device exchanges nothing; give `devices=` of 2 or more to run.")
    arms = {"plan": plan.placement} | {name: plan.others[name] for name in _COMPARED if name in plan.others}
    batches = range(plan.batches[0], plan.batches[0] + min(plan.batches[1], _RUN))
    return run(arms, source, samples, batches, link=link, tell=tell)


def rows_of(ran: Sequence[RanPlacement], source: str, devices: int, link: str) -> list[Row]:
    """Return what the ledger keeps of a run: a row per placement whose seconds were predicted."""
    found = (each.row(f"{source}, {devices} workers, {link}", devices) for each in ran)
    return [row for row in found if row is not None]


def baselines(costs: RowCosts, memory: float) -> dict[str, RowPlacement | None]:
    """Return placements by name; None for one that `memory` bytes of a device are too few for.

    `table-wise` puts whole tables where they keep loads equal; `column-wise` and `row-wise` divide each over all
    devices, `row-wise` with partial sums; `rows by number` divides rows regardless of who reads them and exchanges
    rows; `data-parallel` copies all.
    """
    devices, tables = costs.profile.devices, costs.profile.tables
    spread, even = np.arange(devices), column_shares(costs.width, devices)

    def alike(mode: Mode, rest: Int64, shares: Sequence[Int64] = (even,) * len(tables)) -> RowPlacement:
        placed = tuple(
            PlacedTable(name=each.name, rows=each.rows, mode=mode, shares=share, rest=rest)
            for each, share in zip(tables, shares, strict=True)
        )
        return RowPlacement(devices=devices, width=costs.width, training=costs.training, tables=placed)

    owners = whole_tables(costs, costs.pooled, memory)
    whole = costs.width * np.eye(devices, dtype=np.int64)
    by_table = None if owners is None else alike("pooled", spread, list(whole[owners]))
    copies = alike("data-parallel" if costs.training else "rows", np.array([EVERYWHERE]))
    found = {
        "table-wise": by_table, "column-wise": alike("columns", spread), "row-wise": alike("row-wise", spread),
        "rows by number": alike("rows", spread), "data-parallel": copies,
    }  # fmt: skip
    return {name: each if each and each.memory().max() <= memory else None for name, each in found.items()}
