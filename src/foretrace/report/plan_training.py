"""Distributed training that is planned, as answers: `foretrace plan sync`, `plan second-order` and `plan soap`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from math import isfinite

from foretrace.graph.taskgraph import TaskKind
from foretrace.hardware.devices import named
from foretrace.plan.second_order import SecondOrderCandidate, SecondOrderPlan
from foretrace.plan.soap.operators import DIMENSIONS
from foretrace.plan.soap.plan import SoapPlan, SoapStrategy, SplitOperator
from foretrace.plan.sync import PlannedPolicy, SyncPlan, TriedPolicy
from foretrace.report import shared
from foretrace.report.blocks import About, Block, Column, Line, listing, table
from foretrace.report.names import command
from foretrace.report.shared import EnergyView
from foretrace.report.units import count, digits, nbytes, ranged, seconds, share, span, things, within
from foretrace.report.views import Report, taken


class PlanSyncView(Report, frozen=True, kw_only=True):
    """`foretrace plan sync`: what policies do with workers of given speed."""

    command: str = "plan sync"
    source: str
    step_s: tuple[float, ...]
    commit_s: float
    policies: tuple[PlannedPolicy, ...]
    tried: tuple[TriedPolicy, ...]
    ledger: str
    row: str

    def shown(self, top: int) -> Iterator[Block]:
        yield About((f"{self.source} · {things(len(self.step_s), 'worker')}", f"a commit takes {self.commit_s:g} s"))
        yield listing(
            self.policies,
            ("policy", "policy"),
            ("over_synchronous", "steps per second", "ratio"),
            ("waited", "waiting", "share"),
            ("seconds", "run", "time"),
            ("interval_s", Column("range", "seconds", extra=True)),
            (lambda each: each.sent_bytes or None, Column("sent per step", "bytes", extra=True, unknown="not asked")),
            (lambda each: " ".join(map(str, each.commits[:8])), Column("commits", right=True, extra=True)),
            top=top, noun="policy",
        )  # fmt: skip
        if self.tried:
            yield listing(
                self.tried,
                ("policy", "run in processes"),
                ("commit_s", "commit", "seconds"),
                ("foreseen_s", "foreseen", "seconds"),
                ("measured_s", "measured", "seconds"),
                ("error", "error", "signed"),
                (lambda each: " ".join(map(str, each.foreseen_commits[:8])), Column("commits", right=True)),
                (lambda each: " ".join(map(str, each.commits[:8])), Column("counted", right=True)),
            )
            same = [each.policy for each in self.tried if each.same_model]
            yield Line(", ".join(same) or "of none", label="model as foreseen, to the bit")
            yield f"row {self.row[:8]} added to {self.ledger}" if self.ledger else "no row was written"


def planned_sync(plan: SyncPlan, tried: Sequence[TriedPolicy] = (), ledger: str = "", row: str = "") -> PlanSyncView:
    """Return the answer, with what became of it in processes and where its rows went."""
    best, question = plan.ranked[0], plan.question
    base = next((each for each in plan.policies if each.policy == "synchronous"), None)
    wait = f", in which workers wait {share(base.waited)} of the time" if base else ""
    sentence = (
        f"{best.policy} does {digits(best.over_synchronous)} times the steps per second of synchronous training{wait}."
    )
    again = command("plan", "sync", question.source, policy=best.policy, run=True)
    return taken(
        PlanSyncView, question, plan, headline=sentence, ledger=ledger, row=row,
        policies=tuple(plan.ranked), tried=tuple(tried), next="foretrace ledger" if tried else again,
    )  # fmt: skip


_FEWER = "how many steps K-FAC saves no recording tells: train both for a while, each with tuned rates"
_COUNTED = "K-FAC's work was counted, not timed; on the machine of the recording, --measure times it"


class SecondOrderView(Report, frozen=True, kw_only=True):
    """`foretrace plan second-order`: the gradient-worker fraction of distributed K-FAC."""

    command: str = "plan second-order"
    source: str
    workers: int
    network: str
    layers: int
    memory_limit_bytes: int | None  # null: any
    before_s: float  # step without it
    before_interval_s: tuple[float, float]
    pays_below: float  # share of the steps that K-FAC may need at most to pay in time
    pays_below_interval: tuple[float, float]
    measured: bool  # whether K-FAC's work was timed on the machine of the recording
    choice: SecondOrderCandidate
    candidates: tuple[SecondOrderCandidate, ...]  # memory-optimal first, by frequency as asked

    def shown(self, top: int) -> Iterator[Block]:
        link = (self.network,) if self.network else ()
        yield About((self.source, things(self.workers, "worker"), *link, things(self.layers, "layer")))
        yield listing(
            self.candidates, ("gradient_workers", "gradient workers", "count"), ("fraction", "of them", "digits"),
            (lambda each: "*" * (each.technique == self.choice.technique), ""),
            (lambda each: f"{each.factors_every}/{each.inverses_every}", Column("every", right=True)),
            ("memory_bytes", "memory", "bytes"), ("peak_bytes", Column("at most", "bytes", extra=True)),
            ("sent_bytes", "sent", "bytes"), ("added_s", "added", "time"),
            ("added_interval_s", Column("range", "seconds", extra=True)),
            ("step_s", "step", "time"), ("interval_s", "range", "seconds"),
            (lambda each: "" if each.fits else "too large", ""), top=top, noun="candidate", how="--top",
        )  # fmt: skip
        yield Line(f"in {ranged(self.pays_below, *self.pays_below_interval)} of the steps or fewer", label="it pays")
        yield Line(
            "memory of a worker, kept and at most; sent: bytes of a worker in a step; every: steps between "
            "factors and between inverses",
            label="columns",
        )


def planned_second_order(plan: SecondOrderPlan, source: str) -> SecondOrderView:
    """Return the answer about a plan."""
    each, (value, low, high) = plan.choice, plan.pays_below
    within = f" within {nbytes(plan.memory_bytes)}" if isfinite(plan.memory_bytes) else ""
    who = f"{each.gradient_workers} of {plan.workers} workers" if plan.workers > 1 else "one worker"
    sentence = (
        f"K-FAC with {who} per layer is quickest{within}: {seconds(each.step_s)} ({span(*each.interval_s)}) a step, "
        f"{seconds(each.added_s)} ({span(*each.added_interval_s)}) more than without; "
        f"{nbytes(each.memory_bytes)} per worker."
    )
    parallel = [f"data-parallel workers={plan.workers} network={plan.network}"] if plan.workers > 1 else []
    return taken(
        SecondOrderView, plan, headline=sentence, source=source,
        memory_limit_bytes=int(plan.memory_bytes) if isfinite(plan.memory_bytes) else None, pays_below=value,
        pays_below_interval=(low, high), notes=(_FEWER,) if plan.measured else (_FEWER, _COUNTED),
        next=command("whatif", source, do=[*parallel, each.technique]),
    )  # fmt: skip


_NAMES = dict(zip(DIMENSIONS, ("samples", "height", "width", "channels"), strict=True))
NOTES = (
    "parts are priced as the same calls at their size, halves of a batch norm keep statistics of their own, and what a "
    "search of random changes finds is no optimum",
)


class SoapView(Report, frozen=True, kw_only=True):
    """`foretrace plan soap`: operators split by samples, attributes and parameters, their parts on any devices."""

    command: str = "plan soap"
    source: str
    device: str
    devices: int
    per_node: int
    batch: int
    memory_limit_bytes: float
    strategies: tuple[SoapStrategy, ...]  # fastest first
    energy: EnergyView | None  # of a step by the first strategy, on all devices; null where there is no power model
    seconds: float  # CPU time of the search

    def shown(self, top: int) -> Iterator[Block]:
        machines = f"{things(self.devices // self.per_node, 'machine')} of {self.per_node} × {self.device}"
        yield About((self.source, machines, f"batch {count(self.batch)}"))
        names = list(self.strategies[0].baselines_s)
        yield table(
            ["gradients by", *(Column(each, "time") for each in names), Column("found", "time"),
             Column("range", "seconds"), Column("exchanged", "bytes"), Column("moved", "bytes"),
             Column("fullest device", "bytes", extra=True)],
            [
                (each.synchronisation, *each.baselines_s.values(), each.step_s,
                 each.interval_s, each.exchanged_bytes, each.moved_bytes, max(each.memory_bytes))
                for each in self.strategies
            ],
        )  # fmt: skip
        yield from shared.energy_lines(self.energy, per=f"per step with {self.strategies[0].synchronisation}")
        runs = [
            (first.name, len(list(others)) + 1, _words(first), ", ".join(map(str, first.devices)))
            for first, others in (
                (next(same), same) for _, same in groupby(self.strategies[0].operators, lambda e: (e.parts, e.devices))
            )
        ]
        yield Line(f"operators in their order, with {self.strategies[0].synchronisation}:")
        yield table(["from", Column("operators", "count"), "parts", Column("on devices", wide=True)], runs[:top])
        if len(runs) > top:
            yield Line(f"... and {count(len(runs) - top)} more runs of operators; --json has all")


def planned_soap(found: SoapPlan, source: str, grid: float | None = None) -> SoapView:
    """Return the answer about strategies; `grid`: grams of CO2 per kWh."""
    best, devices, graph = found.strategies[0], found.cluster.workers, found.simulated.graph
    busy_s = float(graph.dur[graph.kind == TaskKind.KERNEL].sum()) / devices / 1e9
    faster = "; data parallelism does not fit"
    if best.gain is not None and best.gain_interval is not None:
        least, most = map(digits, best.gain_interval)
        faster = f": {digits(best.gain)}× as fast as data parallelism ({least} – {most})"
        if best.gain <= 1.0005:
            faster = ", as data parallelism does: nothing faster was found"
    headline = f"A step takes {within(best.step_s, best.interval_s)} with gradients by {best.synchronisation}{faster}."
    return taken(
        SoapView, found, headline=headline, source=source, devices=devices,
        energy=shared.energy(named(found.device), best.step_s, best.interval_s, busy_s, devices, grid),
        per_node=found.cluster.per_node, memory_limit_bytes=found.memory_limit, notes=(*NOTES, *found.notes),
    )  # fmt: skip


def _words(each: SplitOperator) -> str:
    parts = zip(_NAMES.values(), each.parts, strict=True)
    return ", ".join(f"{name} {degree}" for name, degree in parts if degree > 1) or "whole"
