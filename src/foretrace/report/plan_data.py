"""What `foretrace plan data` answers: how a training reads its graph, and what became of that."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from foretrace.plan.data.plan import DataCandidate, DataPlan, DataTrial
from foretrace.report.blocks import About, Block, Column, Line, listing, notes
from foretrace.report.units import count, digits, nbytes, seconds, share, span
from foretrace.report.views import Report
from foretrace.training.rows.graphs import NodeData

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
            (lambda each: span(each.low_s, each.high_s), Column("range", right=True)),
            ("memory_bytes", "memory", "bytes"), ("swaps", Column("swaps", "count", least=90)),
            ("swaps_bound", Column("at least", "count", least=90)), top=top, noun="loader", how="--top",
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
    words = ["foretrace", "plan", "data", plan.graph, "--memory", f"{-(-plan.limit_bytes // 10**6)}MB", "--run"]
    graph = plan.timeline.graph
    busy_s = {lane.label: int(graph.dur[graph.lane == at].sum()) / 1e9 for at, lane in enumerate(graph.lanes)}
    return _answer(
        plan.candidates, plan.limit_bytes, "is quickest", graph=plan.graph, task=plan.job.task, nodes=plan.sizes.nodes,
        edges=plan.sizes.edges, busy_s=busy_s, left_out=plan.left_out, ledger=ledger, row=row, trial=trial,
        notes=(*plan.choice.notes, _UNEQUAL), next=shlex.join(words) if trial is None else "foretrace ledger",
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
