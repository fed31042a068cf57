"""What `foretrace plan soap` answers: how every operator is split, and what that gains."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import msgspec

from foretrace.graph.taskgraph import TaskKind
from foretrace.hardware.devices import named
from foretrace.plan.soap.operators import DIMENSIONS
from foretrace.plan.soap.plan import SoapPlan, SoapStrategy
from foretrace.report import power
from foretrace.report.blocks import About, Block, Column, Line, table
from foretrace.report.power import EnergyView
from foretrace.report.units import between, count, digits, in_unit, nbytes, unit_for
from foretrace.report.views import Report, taken

_NAMES = dict(zip(DIMENSIONS, ("samples", "height", "width", "channels"), strict=True))
NOTES = (
    "parts are priced as the same calls at their size, halves of a batch norm keep statistics of their own, and what a "
    "search of random changes finds is no optimum",
)


class SplitOperatorView(msgspec.Struct, frozen=True, kw_only=True):
    """One operator, with what follows it alone."""

    name: str
    parts: tuple[int, int, int, int]  # by samples, height (or time), width, channels
    devices: tuple[int, ...]  # of the parts


class SoapStrategyView(msgspec.Struct, frozen=True, kw_only=True):
    """The fastest strategy found for one way to exchange gradients."""

    synchronisation: str  # all-reduce: a ring; gather: to the first holder and back
    step_s: float
    interval_s: tuple[float, float]  # with every operator as fast and as slow as it may be
    baselines_s: dict[str, float | None]  # data parallel, expert, one device; null where it does not fit
    gain: float | None  # over data parallelism
    gain_interval: tuple[float, float] | None
    moved_bytes: int  # activations and their gradients
    exchanged_bytes: int  # gradients of weights, and weights
    memory_bytes: tuple[int, ...]  # of every device
    calls: int  # strategies that were simulated
    operators: tuple[SplitOperatorView, ...]


class SoapView(Report, frozen=True, kw_only=True):
    """`foretrace plan soap`: operators split by samples, attributes and parameters, their parts on any devices."""

    command: str = "plan soap"
    source: str
    device: str
    devices: int
    per_node: int
    batch: int
    memory_limit_bytes: float
    strategies: tuple[SoapStrategyView, ...]  # fastest first
    energy: EnergyView | None  # of a step by the first strategy, on all devices; null where there is no power model
    seconds: float  # CPU time of the search

    def shown(self, top: int) -> Iterator[Block]:
        machines = f"{self.devices // self.per_node} machines of {self.per_node} × {self.device}"
        yield About((self.source, machines, f"batch {count(self.batch)}"))
        names = list(self.strategies[0].baselines_s)
        yield table(
            ["gradients by", *(Column(each, "time") for each in names), Column("found", "time"),
             Column("range", right=True), Column("exchanged", right=True), Column("moved", right=True),
             Column("fullest device", right=True, least=90)],
            [
                (each.synchronisation, *each.baselines_s.values(), each.step_s,
                 between(*each.interval_s, unit_for(each.step_s)), nbytes(each.exchanged_bytes),
                 nbytes(each.moved_bytes), nbytes(max(each.memory_bytes)))
                for each in self.strategies
            ],
        )  # fmt: skip
        yield from power.shown(self.energy, per=f"per step with {self.strategies[0].synchronisation}")
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


def soap_view(found: SoapPlan, source: str, grid: float | None = None) -> SoapView:
    """Return the answer about strategies; `grid`: grams of CO2 per kWh."""
    best, devices = found.strategies[0], found.cluster.workers
    step, graph = best.counts.milliseconds / 1e3, best.simulated.graph
    busy_s = float(graph.dur[graph.kind == TaskKind.KERNEL].sum()) / devices / 1e9
    unit = unit_for(step)
    gain, faster = best.gain, "; data parallelism does not fit"
    if gain is not None:
        least, most = digits(gain[1]), digits(gain[2])
        faster = f": {digits(gain[0])}× as fast as data parallelism ({least} – {most})"
        if gain[0] <= 1.0005:
            faster = ", as data parallelism does: nothing faster was found"
    headline = (
        f"A step takes {in_unit(step, unit)} {unit.name} ({between(*best.interval_s, unit)}) with gradients by "
        f"{best.synchronisation}{faster}."
    )
    return taken(
        SoapView, found, headline=headline, source=source, devices=devices,
        energy=power.energy(named(found.device), step, best.interval_s, busy_s, devices, grid),
        per_node=found.cluster.per_node, memory_limit_bytes=found.memory_limit, notes=(*NOTES, *found.notes),
        strategies=tuple(map(_strategy, found.strategies)),
    )  # fmt: skip


def _strategy(found: SoapStrategy) -> SoapStrategyView:
    gain = found.gain
    return taken(
        SoapStrategyView, found.counts, found, step_s=found.counts.milliseconds / 1e3,
        baselines_s={name: time for name, (_, time) in found.baselines.items()},
        gain=None if gain is None else gain[0], gain_interval=None if gain is None else gain[1:],
        memory_bytes=found.counts.held_bytes, calls=found.found.calls,
        operators=tuple(
            SplitOperatorView(name=name, parts=split.degrees, devices=devices) for name, split, devices in found.splits
        ),
    )  # fmt: skip


def _words(each: SplitOperatorView) -> str:
    parts = zip(_NAMES.values(), each.parts, strict=True)
    return ", ".join(f"{name} {degree}" for name, degree in parts if degree > 1) or "whole"
