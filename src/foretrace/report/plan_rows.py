"""What `foretrace plan rows`, `plan cache` and `plan data` answer: where rows are kept, and how they are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from foretrace.experiment.rows.placed import RanPlacement
from foretrace.plan.data.plan import DataCandidate, DataPlan, DataTrial
from foretrace.plan.look_ahead.plan import CachePlan, LookedAhead, PredictedStep
from foretrace.plan.look_ahead.trial import CacheTrial
from foretrace.plan.rows.plan import RowPlan
from foretrace.report.blocks import About, Block, Column, Line, listing, notes, table
from foretrace.report.names import command
from foretrace.report.units import between, count, digits, nbytes, seconds, share, span, things, unit_for
from foretrace.report.views import Report, taken
from foretrace.simulate.timeline import Timeline
from foretrace.training.rows.graphs import NodeData


class PlacedTableView(msgspec.Struct, frozen=True, kw_only=True):
    """One table and how it is kept."""

    name: str
    mode: str  # pooled: one device adds up; columns: each its columns; rows: rows are fetched, each from its owner
    rows: int
    rows_replicated: int  # that every device has a copy of


class RowPlanView(Report, frozen=True, kw_only=True):
    """`foretrace plan rows`: where rows of embedding tables are kept. Bytes are those of a batch, in and out."""

    command: str = "plan rows"
    source: str
    devices: int
    inference: bool
    tables: tuple[PlacedTableView, ...]
    busiest_bytes: float  # of the busiest device, mean of the held-out batches
    busiest_interval: tuple[float, float]  # 80 %
    expected_bytes: float  # from the profiled batches
    bound_bytes: float  # no placement exchanges less, by the profile
    # Busiest device there over here; null where it does not fit, or here nothing is exchanged and there something.
    baselines: dict[str, float | None]
    memory_bytes: tuple[int, ...]  # of the tables, per device
    profiled: int  # batches
    held_out: int
    seconds: float  # that the search took
    exchange_s: float | None  # a held-out batch on links of --between, each way as fast; null without
    run: tuple[RanPlacement, ...]  # empty unless asked for
    ok: bool  # whether the sums of a run are those of whole tables
    ledger: str
    row: str  # the last of this run

    def shown(self, top: int) -> Iterator[Block]:
        what = "inference" if self.inference else "training"
        judged = f"{self.held_out} of {self.profiled + self.held_out} batches held out"
        yield About((self.source, things(self.devices, "device"), what, judged))
        columns = [
            Column("table", "name"), Column("rows", "count"), Column("mode"), Column("on every device", "count"),
        ]  # fmt: skip
        rows = [(each.name, each.rows, each.mode, each.rows_replicated) for each in self.tables]
        yield table(columns, sorted(rows, key=lambda row: -row[1]), top=top, noun="table", how="--top")
        unfit = "does not fit" if self.busiest_bytes else "does not fit, or exchanges something"
        known = [f"{name} {unfit if each is None else f'{digits(each)}×'}" for name, each in self.baselines.items()]
        yield Line(" · ".join(known), label="others")
        if self.exchange_s is not None:
            yield Line(f"{seconds(self.exchange_s)} at the rate of the links alone", label="exchange")
        if self.run:
            measured = ("predicted_bytes", "predicted", "bytes"), ("counted_bytes", "counted", "bytes")
            timed = [("predicted_s", "predicted", "time")] if self.run[0].predicted_s is not None else []
            yield listing(self.run, ("name", "placement"), *measured, *timed, ("step_s", "batch", "time"))
            off = max(each.gradient_error for each in self.run)
            yield Line(
                f"sums {'equal' if self.ok else 'DIFFER FROM'} those of whole tables bit by bit"
                + ("" if self.inference else f"; gradients differ by {off:.1e} of the largest at most"),
                label="checked",
            )
        fullest = max(self.memory_bytes)
        yield Line(
            f"by the profile {nbytes(self.expected_bytes)}, and no placement less than {nbytes(self.bound_bytes)}; the "
            f"fullest device keeps {nbytes(fullest)}"
        )


def planned_rows(
    found: RowPlan, source: str, ran: Sequence[RanPlacement] = (), ledger: str = "", row: str = "", *,
    moved: Timeline | None = None,
) -> RowPlanView:  # fmt: skip
    """Return the answer about a placement of rows, with what became of it and where its rows went."""
    placement, (ours, low, high) = found.placement, found.busiest
    modes = [each.mode for each in placement.tables]
    modes_said = ", ".join(
        f"{count(modes.count(each))} {each}" for each in ("pooled", "columns", "rows") if each in modes
    )
    copied = sum(each.rows_replicated for each in placement.tables)
    return taken(
        RowPlanView, found, placement,
        headline=f"The busiest of {things(placement.devices, 'device')} exchanges {nbytes(ours)} per batch "
        f"({nbytes(low)} – {nbytes(high)}), tables: {modes_said}"
        + (f", {things(copied, 'row')} on every device." if copied else "."),
        notes=() if not placement.training else (
            "No row is copied in training: to sum the gradients of copies costs as much as to fetch the row.",
        ),
        source=source, inference=not placement.training, busiest_bytes=ours, busiest_interval=(low, high),
        baselines={name: _times(each[0], ours) if each else None for name, each in found.baselines.items()},
        memory_bytes=tuple(placement.memory().tolist()), profiled=found.batches[0], held_out=found.batches[1],
        exchange_s=moved.window_ns / 1e9 if moved else None, run=tuple(ran), ok=all(each.equal for each in ran),
        ledger=ledger, row=row,
    )  # fmt: skip


def _times(theirs: float, ours: float) -> float | None:
    """Return one amount over another; two of nothing are equal, None for something over nothing."""
    return theirs / ours if ours else None if theirs else 1.0


class PlanCacheView(Report, frozen=True, kw_only=True):
    """`foretrace plan cache`: what looking ahead gains."""

    command: str = "plan cache"
    trace: str
    batches: int
    warm: int  # batches before those that count
    samples: int
    trainers: int
    link: str
    optimizer: str
    width: int  # numbers in a row
    uncached: PredictedStep
    uncached_bytes: float
    chosen: LookedAhead
    others: tuple[LookedAhead, ...]
    trial: CacheTrial | None  # both ways, run in turns on shaped links
    ledger: str
    row: str

    def shown(self, top: int) -> Iterator[Block]:
        yield About((
            f"{self.trace} · {things(self.batches, 'batch')} of {self.samples} · {things(self.trainers, 'trainer')}",
            f"rows of {self.width} · {self.link} each way · {self.optimizer}",
        ))  # fmt: skip
        unit = unit_for(self.uncached.high_s)
        every = sorted((self.chosen, *self.others), key=lambda each: each.look_ahead)
        yield listing(
            every, (lambda each: str(each.look_ahead), "batches ahead"),
            ("step.step_s", "step", "time"),
            (lambda each: between(each.step.low_s, each.step.high_s, unit), Column(f"range, {unit.name}", right=True)),
            ("hit_rate", "rows held", "share"), ("bound_s", Column("bound", "time", extra=True)),
            ("now_bytes", Column("at once", "bytes", extra=True)),
            ("all_bytes", Column("all bytes", "bytes", extra=True)),
            ("held_bytes", Column("memory", "bytes", extra=True)), top=top, noun="look-ahead",
        )  # fmt: skip
        yield Line(f"{_cached_step(self.uncached)}, {nbytes(self.uncached_bytes)} each way", label="uncached")
        if self.trial is not None:
            yield listing(
                self.trial.arms, ("name", "run in turns"), ("measured_s", "measured", "seconds"),
                ("predicted.step_s", "predicted", "seconds"),
                (lambda arm: f"{100 * arm.residual:+.1f} %", Column("residual", right=True)),
            )  # fmt: skip
            yield Line(
                f"{digits(self.trial.speedup.value)}× ({digits(self.trial.speedup.low)} – "
                f"{digits(self.trial.speedup.high)}) faster, {share(self.trial.hit_rate)} of rows held; tables and "
                "dense weights of both are the same to the bit",
                label="measured",
            )
            yield f"row {self.row[:8]} added to {self.ledger}" if self.ledger else "no row was written"


def planned_cache(plan: CachePlan, trial: CacheTrial | None = None, ledger: str = "", row: str = "") -> PlanCacheView:
    """Return the answer about a plan, with what became of it and where its rows went."""
    question, best = plan.question, plan.chosen
    sentence = (
        f"Looking {things(best.look_ahead, 'batch')} ahead makes a step {digits(best.speedup.value)}× "
        f"({digits(best.speedup.low)} – {digits(best.speedup.high)}) faster: {_cached_step(plan.uncached)} → "
        f"{_cached_step(best.step)}."
    )
    again = command(
        "plan", "cache", question.source, trainers=question.trainers, link=question.link, width=question.width,
        look_ahead=best.look_ahead, run=True,
    )  # fmt: skip
    return taken(
        PlanCacheView, plan, question, headline=sentence, trace=question.source, samples=question.lookups.samples,
        trial=trial, ledger=ledger, row=row,
        next="foretrace ledger" if trial else again,
    )  # fmt: skip


def _cached_step(step: PredictedStep) -> str:
    unit = unit_for(step.high_s)
    return f"{digits(step.step_s / unit.seconds)} {unit.name} ({between(step.low_s, step.high_s, unit)})"


_UNEQUAL = "candidates read the same edges but in other orders: quality is compared by --run alone"

_ALONE = "sampling alone: neither rows of features nor the steps of a training are in these times"


class DataPlanView(Report, frozen=True, kw_only=True):
    """`foretrace plan data`: loader, buffer and order of a training, by predicted seconds of an epoch."""

    command: str = "plan data"
    graph: str
    task: str
    nodes: int
    edges: int  # that are trained
    memory_limit_bytes: int
    choice: DataCandidate
    predicted_epoch_s: float
    interval_s: tuple[float, float]
    busy_s: dict[str, float]  # of an epoch of the choice, by lane: training, disk
    memory_bytes: int
    swaps: int | None
    swaps_bound: int | None
    runners_up: tuple[DataCandidate, ...]
    left_out: dict[str, str]
    trial: DataTrial | None  # null without --run
    ledger: str
    row: str

    def shown(self, top: int) -> Iterator[Block]:
        yield About((self.graph, f"{count(self.nodes)} nodes", f"{count(self.edges)} edges", self.task))
        yield listing(
            (self.choice, *self.runners_up), ("name", Column("loader", "name")), ("epoch_s", "epoch", "time"),
            ("low_s high_s", "range", "seconds"), ("memory_bytes", "memory", "bytes"),
            ("swaps", Column("swaps", "count", extra=True)), ("swaps_bound", Column("at least", "count", extra=True)),
            top=top, noun="loader", how="--top",
        )  # fmt: skip
        if (trial := self.trial) is not None:
            yield Line(
                f"an epoch takes {digits(trial.measured.value)} ({digits(trial.measured.low)} – "
                f"{digits(trial.measured.high)}) of the predicted time, {digits(trial.over_memory.value)}× that in "
                f"memory; at most {nbytes(trial.peak_bytes)} resident, {nbytes(self.memory_limit_bytes)} enforced",
                label="measured",
            )
            yield Line(f"{digits(trial.quality)}, in memory {digits(trial.in_memory_quality)}", label="quality")
            yield Line(f"{trial.verdict}, error {share(abs(trial.error))}", label="verdict")
            yield f"row {self.row[:8]} added to {self.ledger}" if self.ledger else "no row was written"
        yield from notes((f"{name}: {why}" for name, why in self.left_out.items()), "left out")


def planned_data(plan: DataPlan, trial: DataTrial | None = None, ledger: str = "", row: str = "") -> DataPlanView:
    """Return the answer about a plan, with what became of it and where its row went."""
    again = command("plan", "data", plan.graph, memory=f"{-(-plan.limit_bytes // 10**6)}MB", run=True)
    graph = plan.timeline.graph
    busy_s = {lane.label: int(graph.dur[graph.lane == at].sum()) / 1e9 for at, lane in enumerate(graph.lanes)}
    return _answer(
        plan.candidates, plan.limit_bytes, "is quickest", graph=plan.graph, task=plan.job.task, nodes=plan.sizes.nodes,
        edges=plan.sizes.edges, busy_s=busy_s, left_out=plan.left_out, ledger=ledger, row=row, trial=trial,
        notes=(*plan.choice.notes, _UNEQUAL), next=again if trial is None else "foretrace ledger",
    )  # fmt: skip


def planned_samplers(graph: str, data: NodeData, limit_bytes: int, found: Sequence[DataCandidate]) -> DataPlanView:
    """Return the answer about samplers of neighbours alone, the best first, with what the quickest cache changes."""
    cached = next((each for each in found if each.notes), found[0])
    return _answer(
        found, limit_bytes, "samples quickest", graph=graph, task="sampling", nodes=data.adjacency.nodes, busy_s={},
        edges=len(data.adjacency.edges()), left_out={}, trial=None, ledger="", row="",
        notes=(*(f"{cached.loader}: {each}" for each in cached.notes), _ALONE),
    )  # fmt: skip


def _answer(found: Sequence[DataCandidate], limit: int, is_best: str, **given: Any) -> DataPlanView:
    choice, *others = found
    swaps = "" if choice.swaps is None else f", {choice.swaps} swaps of at least {choice.swaps_bound}"
    return DataPlanView(
        headline=f"{choice.name} {is_best} within {nbytes(limit)}: {seconds(choice.epoch_s)} "
        f"({span(choice.low_s, choice.high_s)}) an epoch, {nbytes(choice.memory_bytes)}{swaps}.",
        memory_limit_bytes=limit, choice=choice, predicted_epoch_s=choice.epoch_s,
        interval_s=(choice.low_s, choice.high_s), memory_bytes=choice.memory_bytes, swaps=choice.swaps,
        swaps_bound=choice.swaps_bound, runners_up=tuple(others), **given,
    )  # fmt: skip
