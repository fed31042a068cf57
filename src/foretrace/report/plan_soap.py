"""What `foretrace plan soap` answers: how every operator is split, and what that gains."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from foretrace.graph.taskgraph import TaskKind
from foretrace.hardware.devices import named
from foretrace.plan.soap.operators import DIMENSIONS
from foretrace.plan.soap.plan import SoapPlan, SoapStrategy, SplitOperator
from foretrace.report import power
from foretrace.report.blocks import About, Block, Column, Line, table
from foretrace.report.power import EnergyView
from foretrace.report.units import count, digits, within
from foretrace.report.views import Report, taken

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
        machines = f"{self.devices // self.per_node} machines of {self.per_node} × {self.device}"
        yield About((self.source, machines, f"batch {count(self.batch)}"))
        names = list(self.strategies[0].baselines_s)
        yield table(
            ["gradients by", *(Column(each, "time") for each in names), Column("found", "time"),
             Column("range", "seconds"), Column("exchanged", "bytes"), Column("moved", "bytes"),
             Column("fullest device", "bytes", least=90)],
            [
                (each.synchronisation, *each.baselines_s.values(), each.step_s,
                 each.interval_s, each.exchanged_bytes, each.moved_bytes, max(each.memory_bytes))
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
        energy=power.energy(named(found.device), best.step_s, best.interval_s, busy_s, devices, grid),
        per_node=found.cluster.per_node, memory_limit_bytes=found.memory_limit, notes=(*NOTES, *found.notes),
    )  # fmt: skip


def _words(each: SplitOperator) -> str:
    parts = zip(_NAMES.values(), each.parts, strict=True)
    return ", ".join(f"{name} {degree}" for name, degree in parts if degree > 1) or "whole"
