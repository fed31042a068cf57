"""Plan the rows of embedding tables on one part of the batches, and judge the plan on the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from foretrace.arrays import Float64
from foretrace.errors import ForetraceError
from foretrace.experiment.ledger import Row
from foretrace.experiment.rows.placed import RanPlacement, run
from foretrace.experiment.statistics import LEVEL, RESAMPLES
from foretrace.graph.taskgraph import EdgeKind, GraphInfo, Lane, TaskKind
from foretrace.graph.writer import GraphWriter
from foretrace.hardware.cluster import parse_link
from foretrace.plan.rows.baselines import baselines
from foretrace.plan.rows.bound import bound
from foretrace.plan.rows.costs import RowCosts
from foretrace.plan.rows.place import choose
from foretrace.plan.rows.profile import profile
from foretrace.simulate.timeline import Timeline, simulate
from foretrace.trace.trace import LaneKind
from foretrace.training.rows.lookups import Lookups
from foretrace.training.rows.placement import RowPlacement

_COMPARED = ("table-wise", "rows by number", "column-wise")  # the last calibrates the link
_RUN = 4  # batches


@dataclass(frozen=True, kw_only=True, eq=False)
class Judged:
    """Bytes in and out of the busiest device per batch: of the mean of held-out batches, with its 80 % interval."""

    bytes: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, eq=False)
class RowPlan:
    """A placement of rows, what it costs, and what others would."""

    placement: RowPlacement
    others: dict[str, RowPlacement]  # that fit
    busiest: Judged
    expected_bytes: float  # from the profile
    bound_bytes: float  # that no placement is below, by the same profile
    baselines: dict[str, Judged | None]  # None for one that does not fit
    batches: tuple[int, int]  # profiled, held out
    seconds: float


def plan_rows(
    lookups: Lookups, *, devices: int, memory: float = inf, width: int = 64, training: bool = True, seed: int = 0
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
        placement=placement,
        others={name: each for name, each in others.items() if each is not None},
        busiest=judge(placement.exchanged(lookups, held), seed),
        expected_bytes=expected,
        bound_bytes=min(lower, expected),
        baselines={
            name: None if each is None else judge(each.exchanged(lookups, held), seed) for name, each in others.items()
        },
        batches=(split, len(held)),
        seconds=time.perf_counter() - began,
    )


def judge(exchanged: Float64, seed: int) -> Judged:
    """Return the busiest device of the mean batch, of bytes (batches, devices); the interval resamples batches."""
    drawn = np.random.default_rng(seed).integers(len(exchanged), size=(RESAMPLES, len(exchanged)))
    low, high = np.quantile(exchanged[drawn].mean(axis=1).max(axis=1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2]).tolist()
    found = float(exchanged.mean(axis=0).max())
    return Judged(bytes=found, low=min(low, found), high=max(high, found))


def exchange(plan: RowPlan, lookups: Lookups, link: str) -> Timeline:
    """Return the first held-out batch on a link of each device, whose busier direction decides: all-to-alls, one by
    one.
    """
    placement, rate = plan.placement, parse_link(link).bytes_per_s
    lanes = [Lane(rank=r, kind=LaneKind.LINK, label=f"link of device {r}") for r in range(placement.devices)]
    writer = GraphWriter(
        [*lanes, Lane(rank=0, kind=LaneKind.CPU, label="batches")],
        GraphInfo(source="a batch", platform="cpu", world_size=placement.devices, steps=(0,)),
    )
    writer.mark(len(lanes), "batch", release=0, step=0)
    asked, sent = placement.pairs(lookups, plan.batches[0])
    ends = writer.marks[:]
    for name, moved in {"ids": asked, "rows and sums": sent, "gradients": placement.training * sent}.items():
        seconds = np.maximum(moved.sum(axis=0), moved.sum(axis=1)) / rate
        parts = [writer.task(TaskKind.COPY, r, name, round(1e9 * each), step=0) for r, each in enumerate(seconds)]
        for part in parts:
            for end in ends:
                writer.edge(end, part, EdgeKind.DATA)
        ends = parts
    writer.mark(len(lanes), "batch", ends, step=-1)
    return simulate(writer.graph())


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
