"""What `foretrace operators` answers: what a model computes in a step, by family and by layer."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import msgspec

from foretrace.model.groups import OperatorBlock, OperatorGroup, OperatorGroups
from foretrace.model.operator_graph import OperatorGraph, Role
from foretrace.report.blocks import Block, Line, listing
from foretrace.report.units import digits, nbytes, scaled, share
from foretrace.report.views import Report, taken


class OperatorsView(Report, frozen=True, kw_only=True):
    """`foretrace operators`: a model's step as operators."""

    command: str = "operators"
    name: str
    source: str
    batch: int | None
    operators: int
    fused: bool
    flops: float
    nbytes: float = msgspec.field(name="bytes")
    intensity: float | None
    parameters: int
    weight_bytes: float
    activation_bytes: float
    families: tuple[OperatorGroup, ...]
    calls: tuple[OperatorGroup, ...]
    phases: tuple[OperatorGroup, ...]
    layers: tuple[OperatorGroup, ...]
    blocks: tuple[OperatorBlock, ...]
    unknown: dict[str, int]
    unknown_bytes_share: float

    def shown(self, top: int, by: str = "family") -> Iterator[Block]:
        rows = {"family": self.families, "operator": self.calls, "phase": self.phases, "layer": self.layers}[by]
        yield listing(
            rows, (lambda row: _short(row.name), by), ("calls", "calls", "count"), ("flops", "FLOP", "FLOP"),
            ("read_bytes", "read", "bytes"), ("written_bytes", "written", "bytes"), ("intensity", "FLOP/B", "digits"),
            top=top, how="--top",
        )  # fmt: skip
        intensity = digits(self.intensity) if self.intensity is not None else "–"
        yield (
            f"{self.operators} {'kernels' if self.fused else 'operators'}, {scaled(self.parameters)} parameters, "
            f"activations {nbytes(self.activation_bytes)}, {intensity} FLOP per byte; from {self.source}"
        )
        for block in sorted(self.blocks, key=lambda each: -each.length * (each.times - 1))[:3]:
            where = f" from {block.layer}" if block.layer else ""
            yield Line(f"{block.length} operators, {block.times} times, node {block.first} on{where}", label="block")
        if self.unknown:
            named = ", ".join(f"{op} ({count})" for op, count in list(self.unknown.items())[:4])
            yield f"known by their bytes only, {share(self.unknown_bytes_share)} of the bytes: {named}"


def operators(graph: OperatorGraph, *, path: str = "", fused: bool = False) -> OperatorsView:
    """Return the answer for one graph; `path` is what the user gave."""
    groups = OperatorGroups(graph=graph)
    return taken(
        OperatorsView,
        groups,
        graph,
        headline=_headline(graph, groups.families),
        batch=graph.batch or None,
        operators=len(graph),
        fused=fused,
        weight_bytes=groups.held_bytes(Role.WEIGHT),
        activation_bytes=groups.held_bytes(Role.ACTIVATION),
        unknown=graph.unknown(),
        next=f"foretrace operators {shlex.quote(path)} --fuse" if path and not fused else "foretrace estimate --help",
    )


def _headline(graph: OperatorGraph, families: tuple[OperatorGroup, ...]) -> str:
    moved = graph.nbytes
    heavy = max(families, key=lambda each: each.flops)
    most = max(families, key=lambda each: each.moved_bytes)
    of_flops = f"{heavy.name} has {share(heavy.flops / graph.flops)} of the FLOPs" if graph.flops else "no FLOPs"
    of_bytes = f", {most.name} {share(most.moved_bytes / moved)} of the bytes" if moved else ""
    samples = f" with {graph.batch} samples" if graph.batch else ""
    return (
        f"A step of {graph.name}{samples} computes {scaled(graph.flops, 'FLOP')} and moves {nbytes(moved)}: "
        f"{of_flops}{of_bytes}."
    )


def _short(name: str) -> str:
    name = name or "–"
    return name if len(name) <= 44 else f"…{name[-43:]}"
