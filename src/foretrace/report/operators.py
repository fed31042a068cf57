"""What `foretrace operators` answers: what a model computes in a step, by family and by layer."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec

from foretrace.cost.calls import Family
from foretrace.report.blocks import Block, Column, Headline, Line, notes, shown, table
from foretrace.report.units import digits, share
from foretrace.report.views import Result

if TYPE_CHECKING:
    from foretrace.model.operator_graph import OperatorGraph

_SCALES = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0))


class OperatorGroupView(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of one family, operator, phase or layer."""

    name: str
    calls: int
    flops: float
    read_bytes: float
    written_bytes: float
    intensity: float | None  # FLOPs per byte; null without bytes


class OperatorBlockView(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes first .. first + length come `times` times, one copy after another."""

    first: int
    length: int
    times: int
    layer: str
    flops: float  # of one copy


class OperatorsView(Result, frozen=True, kw_only=True):
    """`foretrace operators`: a model's step as operators."""

    command: str = "operators"
    headline: str
    name: str
    source: str
    batch: int | None
    operators: int
    fused: bool
    flops: float
    bytes: float
    intensity: float | None
    parameters: int
    weight_bytes: float
    activation_bytes: float
    families: tuple[OperatorGroupView, ...]
    calls: tuple[OperatorGroupView, ...]
    phases: tuple[OperatorGroupView, ...]
    layers: tuple[OperatorGroupView, ...]
    blocks: tuple[OperatorBlockView, ...]
    unknown: dict[str, int]
    unknown_bytes_share: float
    notes: tuple[str, ...]
    next: str


def operators(graph: OperatorGraph, *, path: str = "", fused: bool = False) -> OperatorsView:
    """The answer for one graph; `path` is what the user gave."""
    from foretrace.model.operator_graph import Role

    families = [Family(each).name.lower() for each in graph.calls.family.tolist()]
    nbytes = graph.nbytes
    held = Counter[Role]()
    for each in graph.storages:
        held[each.role] += each.nbytes
    other = sum(
        node.read_bytes + node.written_bytes
        for node, family in zip(graph.nodes, families, strict=True)
        if family == "other"
    )
    groups = _groups(graph, lambda at: families[at])
    return OperatorsView(
        headline=_headline(graph, groups),
        name=graph.name,
        source=graph.source,
        batch=graph.batch or None,
        operators=len(graph),
        fused=fused,
        flops=graph.flops,
        bytes=nbytes,
        intensity=graph.flops / nbytes if nbytes else None,
        parameters=graph.parameters,
        weight_bytes=float(held[Role.WEIGHT]),
        activation_bytes=float(held[Role.ACTIVATION]),
        families=groups,
        calls=_groups(graph, lambda at: graph.nodes[at].op),
        phases=_groups(graph, lambda at: graph.nodes[at].phase.name.lower()),
        layers=_groups(graph, lambda at: graph.nodes[at].layer) if any(node.layer for node in graph.nodes) else (),
        blocks=tuple(
            OperatorBlockView(
                first=each.first,
                length=each.length,
                times=each.times,
                layer=each.layer,
                flops=sum(node.flops for node in graph.nodes[each.first : each.first + each.length]),
            )
            for each in graph.blocks
        ),
        unknown=graph.unknown(),
        unknown_bytes_share=other / nbytes if nbytes else 0.0,
        notes=graph.notes,
        next=f"foretrace operators {shlex.quote(path)} --fuse" if path and not fused else "foretrace estimate --help",
    )


def _groups(graph: OperatorGraph, key: Callable[[int], str]) -> tuple[OperatorGroupView, ...]:
    rows: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0, 0.0])
    for at, node in enumerate(graph.nodes):
        row = rows[key(at)]
        for i, value in enumerate((1, node.flops, node.read_bytes, node.written_bytes)):
            row[i] += value
    found = []
    for name, (calls, flops, read, written) in rows.items():
        moved = read + written
        found.append(
            OperatorGroupView(
                name=name, calls=int(calls), flops=flops, read_bytes=read, written_bytes=written,
                intensity=flops / moved if moved else None,
            )
        )  # fmt: skip
    return tuple(sorted(found, key=lambda each: (-each.flops, -each.read_bytes, each.name)))


def _headline(graph: OperatorGraph, families: tuple[OperatorGroupView, ...]) -> str:
    moved = graph.nbytes
    heavy = max(families, key=lambda each: each.flops)
    most = max(families, key=lambda each: each.read_bytes + each.written_bytes)
    of_flops = f"{heavy.name} has {share(heavy.flops / graph.flops)} of the FLOPs" if graph.flops else "no FLOPs"
    of_bytes = ""
    if moved:
        of_bytes = f", {most.name} {share((most.read_bytes + most.written_bytes) / moved)} of the bytes"
    samples = f" with {graph.batch} samples" if graph.batch else ""
    return (
        f"A step of {graph.name}{samples} computes {amount(graph.flops)}FLOP and moves {amount(moved)}B: "
        f"{of_flops}{of_bytes}."
    )


def amount(value: float) -> str:
    """Three digits and the letter of the scale, a space between: "7.79 T", to be followed by the unit."""
    for letter, size in _SCALES:
        if value >= size * 0.9995:
            return f"{digits(value / size)} {letter}"
    return f"{digits(value)} "


@shown.register
def _(view: OperatorsView, top: int, by: str = "family") -> Iterator[Block]:
    rows = {"family": view.families, "operator": view.calls, "phase": view.phases, "layer": view.layers}[by]
    yield Headline(view.headline)
    yield ""
    yield table(
        [
            by, Column("calls", "count"), Column("FLOP", right=True), Column("read B", right=True),
            Column("written B", right=True), Column("FLOP/B", "digits"),
        ],
        [
            (
                _short(row.name), row.calls,
                *(amount(number).strip() for number in (row.flops, row.read_bytes, row.written_bytes)), row.intensity,
            )
            for row in rows
        ],
        top=top, how="--top",
    )  # fmt: skip
    yield ""
    intensity = digits(view.intensity) if view.intensity is not None else "–"
    yield (
        f"{view.operators} {'kernels' if view.fused else 'operators'}, {amount(view.parameters).strip()} parameters, "
        f"activations {amount(view.activation_bytes)}B, {intensity} FLOP per byte; from {view.source}"
    )
    for block in sorted(view.blocks, key=lambda each: -each.length * (each.times - 1))[:3]:
        where = f" from {block.layer}" if block.layer else ""
        yield Line(f"{block.length} operators, {block.times} times, node {block.first} on{where}", label="block")
    if view.unknown:
        named = ", ".join(f"{op} ({count})" for op, count in list(view.unknown.items())[:4])
        yield f"known by their bytes only, {share(view.unknown_bytes_share)} of the bytes: {named}"
    yield from notes(view.notes, "note")


def _short(name: str) -> str:
    name = name or "–"
    return name if len(name) <= 44 else f"…{name[-43:]}"
