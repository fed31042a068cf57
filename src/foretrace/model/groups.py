"""The calls of an `OperatorGraph` summed up: by family, operator, phase and layer, and what they keep in memory."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from foretrace.cost.calls import Family
from foretrace.model.operator_graph import OperatorGraph, Role


@dataclass(frozen=True, kw_only=True)
class OperatorGroup:
    """Calls of one family, operator, phase or layer."""

    name: str
    calls: int
    flops: float
    read_bytes: float
    written_bytes: float
    intensity: float | None  # FLOPs per byte; null without bytes

    @property
    def moved_bytes(self) -> float:
        """Read and written."""
        return self.read_bytes + self.written_bytes


@dataclass(frozen=True, kw_only=True)
class OperatorBlock:
    """Nodes first .. first + length come `times` times, one copy after another."""

    first: int
    length: int
    times: int
    layer: str
    flops: float  # of one copy


@dataclass(frozen=True, kw_only=True)
class OperatorGroups:
    """The groups of one graph, most FLOPs first."""

    graph: OperatorGraph

    @cached_property
    def families(self) -> tuple[OperatorGroup, ...]:
        """By family of operators."""
        return self._by([Family(each).name.lower() for each in self.graph.calls.family.tolist()])

    @property
    def calls(self) -> tuple[OperatorGroup, ...]:
        """By operator."""
        return self._by([node.op for node in self.graph.nodes])

    @property
    def phases(self) -> tuple[OperatorGroup, ...]:
        """By phase of the step."""
        return self._by([node.phase.name.lower() for node in self.graph.nodes])

    @property
    def layers(self) -> tuple[OperatorGroup, ...]:
        """By layer; empty where nothing names layers."""
        layers = [node.layer for node in self.graph.nodes]
        return self._by(layers) if any(layers) else ()

    @property
    def blocks(self) -> tuple[OperatorBlock, ...]:
        """Runs of operators that repeat."""
        nodes = self.graph.nodes
        return tuple(
            OperatorBlock(
                first=each.first, length=each.length, times=each.times, layer=each.layer,
                flops=sum(node.flops for node in nodes[each.first : each.first + each.length]),
            )
            for each in self.graph.blocks
        )  # fmt: skip

    @property
    def intensity(self) -> float | None:
        """FLOPs per byte; None without bytes."""
        return self.graph.flops / self.graph.nbytes if self.graph.nbytes else None

    @property
    def unknown_bytes_share(self) -> float:
        """Share of the bytes that operators move of which nothing else is known."""
        other = sum(each.moved_bytes for each in self.families if each.name == "other")
        return other / self.graph.nbytes if self.graph.nbytes else 0.0

    def held_bytes(self, role: Role) -> float:
        """Return bytes of all storages with this role."""
        return float(sum(each.nbytes for each in self.graph.storages if each.role == role))

    def _by(self, names: Sequence[str]) -> tuple[OperatorGroup, ...]:
        calls = Counter(names)
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        for name, node in zip(names, self.graph.nodes, strict=True):
            row = sums[name]
            for i, value in enumerate((node.flops, node.read_bytes, node.written_bytes)):
                row[i] += value
        found = (
            OperatorGroup(
                name=name, calls=calls[name], flops=flops, read_bytes=read, written_bytes=written,
                intensity=flops / (read + written) if read + written else None,
            )
            for name, (flops, read, written) in sums.items()
        )  # fmt: skip
        return tuple(sorted(found, key=lambda each: (-each.flops, -each.read_bytes, each.name)))
