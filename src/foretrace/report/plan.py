"""What `foretrace plan` answers: plans, and how good they are proven to be."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from foretrace.plan.placement.place import Placement
from foretrace.report.blocks import About, Block, Column, Headline, Kind, Line, shown, table
from foretrace.report.units import between, digits, in_unit, seconds, share, unit_for
from foretrace.report.views import Result


class PlacedDeviceView(msgspec.Struct, frozen=True, kw_only=True):
    """One device and what it runs."""

    kind: str  # accelerator or cpu
    nodes: tuple[int, ...]  # ids of the file, or positions among the operators
    load: float  # its time per sample, in the unit of the objective
    memory: float  # bytes
    layers: str  # first and last


class PlacementView(Result, frozen=True, kw_only=True):
    """`foretrace plan place`: which device runs what. Times are seconds of a model, and as given of a file."""

    command: str = "plan place"
    headline: str
    source: str
    objective: str  # throughput: the largest load of a device; latency: time of one sample
    contiguous: bool
    objective_value: float
    interval: tuple[float, float] | None  # with every operator as fast and as slow as it may be; null for given times
    proven: bool  # no placement of its kind is better, with these times
    bound: float  # that no placement of its kind is better than
    gap: float  # how much better one could be at most, as a share
    devices: tuple[PlacedDeviceView, ...]
    seconds: float  # that the search took
    method: str


def placed(found: Placement, source: str) -> PlacementView:
    """The answer about a placement."""
    problem = found.problem
    accelerators = sum(each.kind == "accelerator" for each in found.devices)
    goodness = "proven best" if found.proven else f"at most {share(found.gap)} from the best"
    what = "A batch leaves the pipeline every" if found.objective == "throughput" else "One batch takes"
    return PlacementView(
        headline=f"{what} {_time(found, found.objective_value)} on {accelerators} "
        f"accelerator{'s' if accelerators != 1 else ''}: {goodness}.",
        source=source,
        objective=found.objective,
        contiguous=found.contiguous,
        objective_value=found.objective_value,
        interval=found.interval,
        proven=found.proven,
        bound=found.bound,
        gap=found.gap,
        devices=tuple(
            PlacedDeviceView(
                kind=each.kind,
                nodes=tuple(problem.ids[row] for row in each.nodes),
                load=each.load,
                memory=each.memory,
                layers=f"{problem.labels[each.nodes[0]]} – {problem.labels[each.nodes[-1]]}",
            )
            for each in found.devices
        ),
        seconds=found.seconds,
        method=found.method,
    )


def _time(found: Placement, time: float) -> str:
    return digits(time) if found.problem.accelerator_range is None else seconds(time)


@shown.register
def _(view: PlacementView, top: int) -> Iterator[Block]:
    yield About((view.source, view.objective, view.method))
    yield ""
    yield Headline(view.headline)
    if view.interval is not None:
        unit = unit_for(view.objective_value)
        yield Line(
            f"{in_unit(view.objective_value, unit)} {unit.name}; {between(*view.interval, unit)} with every operator "
            "as fast and as slow as it may be"
        )
    yield ""
    kind: Kind = "digits" if view.interval is None else "time"
    columns = [
        Column("device"), Column("nodes", "count"), Column("load", kind), Column("memory", "text", right=True),
        Column("layers", "name"),
    ]  # fmt: skip
    yield table(
        columns,
        [
            (f"{each.kind} {at}", len(each.nodes), each.load, f"{digits(each.memory / 1e9)} GB", each.layers)
            for at, each in enumerate(view.devices)
        ],
    )
