"""How a task is computed: a `LoopSchedule` of explicit decisions, and the program that it makes of the task.

Stages stand in groups. Stages of one group share outer loops over common spatial axes (fusion); inside, every stage
splits what is left of its axes into loops (tiling), in any order. A reduction starts at the position of its outermost
reduction loop, may be gathered in a local buffer that is written out at the end, or in one partial result per vector
lane (`rfactor`). `drawing.draw` makes a random schedule that is legal, `apply` the program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from foretrace.cost.programs.program import (
    MAX_LANES,
    Access,
    Buffer,
    Loop,
    LoopKind,
    LoopNest,
    Purpose,
    Statement,
    TensorProgram,
)
from foretrace.cost.programs.tasks import Definition, Fill, Index, Task

MAX_LOCAL = 8192
"""Elements of one local buffer."""


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """The loops of one stage: of every axis its factors from the outermost in, and which loop stands where.

    A loop is (axis, number of its factor). With `rfactor` the last loop, of a reduced axis, becomes the lanes of
    partial results; with `vectorised` the last loop runs as vector lanes.
    """

    splits: tuple[tuple[str, tuple[int, ...]], ...]
    order: tuple[tuple[str, int], ...]
    unrolled: tuple[tuple[str, int], ...] = ()
    vectorised: bool = False
    local: bool = False
    rfactor: bool = False


@dataclass(frozen=True, kw_only=True)
class Group:
    """Stages under common loops: (axis, what of it is left inside).

    With `shrink` results that nobody outside reads are kept for one iteration only.
    """

    shared: tuple[tuple[str, int], ...]
    plans: tuple[StagePlan, ...]
    parallel: bool = False
    shrink: bool = False


@dataclass(frozen=True, kw_only=True)
class LoopSchedule:
    """One decision for each stage of a task, in order."""

    groups: tuple[Group, ...]


def apply(task: Task, schedule: LoopSchedule, dtype: str = "float32") -> TensorProgram:
    """Return the program that computes `task` in this way."""
    definition = task.define()
    buffers = {each.name: each for each in definition.buffers}
    nests: list[LoopNest] = []
    first = 0
    for number, group in enumerate(schedule.groups):
        stages = definition.stages[first : first + len(group.plans)]
        builder = _Group(number, group, definition, stages, range(first, first + len(stages)))
        nests += builder.nests()
        buffers.update(builder.buffers)
        first += len(stages)
    return TensorProgram(task=task.name, dtype=dtype, buffers=tuple(buffers.values()), nests=tuple(nests))


def shareable(definition: Definition, stages: Sequence[Fill]) -> tuple[str, ...]:
    """Return spatial axes that all of these stages have and over which they can be fused."""
    common = [axis for axis, _ in stages[0].spatial]
    sizes = dict(stages[0].spatial)
    made = {stage.buffer: stage for stage in stages}
    return tuple(
        axis
        for axis in common
        if all(dict(stage.spatial).get(axis) == sizes[axis] for stage in stages)
        and all(
            read.index[dimension] == ((axis, 1),)
            for stage in stages
            for read in stage.reads
            if read.buffer in made
            for dimension, (other, _) in enumerate(made[read.buffer].spatial)
            if other == axis
        )
    )


class _Group:
    """The nests of one group."""

    def __init__(
        self,
        number: int,
        group: Group,
        definition: Definition,
        stages: Sequence[Fill],
        ids: Sequence[int],
    ) -> None:
        self.number, self.group, self.stages, self.ids = number, group, stages, ids
        self.shared = dict(group.shared)
        self.buffers = {each.name: each for each in definition.buffers}
        extents = dict(stages[0].spatial)
        self.inside = any(extents[axis] > tile for axis, tile in group.shared)
        self.shrunk: set[str] = set()
        if group.shrink and self.inside:
            self.shrink(definition)

    def shrink(self, definition: Definition) -> None:
        outside = [stage for stage in definition.stages if stage not in self.stages]
        for stage in self.stages:
            whole = self.buffers[stage.buffer]
            if whole.role is Purpose.TEMPORARY and all(r.buffer != whole.name for s in outside for r in s.reads):
                shape = tuple(self.shared.get(axis, extent) for axis, extent in stage.spatial)
                if prod(shape) <= MAX_LOCAL:
                    self.buffers[whole.name] = Buffer(name=whole.name, shape=shape, role=Purpose.LOCAL)
                    self.shrunk.add(whole.name)

    def nests(self) -> list[LoopNest]:
        body: list[LoopNest] = []
        for number, stage, plan in zip(self.ids, self.stages, self.group.plans, strict=True):
            body += _Stage(self, number, stage, plan).nests()
        extents = dict(self.stages[0].spatial)
        for axis, tile in reversed(self.group.shared):
            if extents[axis] > tile:
                loop = Loop(
                    variable=self.variable(axis), extent=extents[axis] // tile, kind=LoopKind.SERIAL, body=tuple(body)
                )
                body = [loop]
        if not self.group.parallel:
            return body
        (root,) = body
        assert isinstance(root, Loop)  # a spatial one
        return [replace(root, kind=LoopKind.PARALLEL)]

    def variable(self, axis: str) -> str:
        return f"g{self.number}.{axis}"


class _Stage:
    """The nests of one stage inside its group."""

    def __init__(self, group: _Group, number: int, stage: Fill, plan: StagePlan) -> None:
        self.group, self.number, self.stage, self.plan = group, number, stage, plan
        self.spatial = {axis for axis, _ in stage.spatial}
        self.left = {axis: group.shared.get(axis, extent) for axis, extent in (*stage.spatial, *stage.reduced)}
        self.splits = dict(plan.splits)
        self.order = [each for each in plan.order if self.extent(each) > 1]
        self.lanes = self.order[-1] if plan.rfactor and self.order else None

    def extent(self, loop: tuple[str, int]) -> int:
        return self.splits[loop[0]][loop[1]]

    def variable(self, loop: tuple[str, int], mark: str = "") -> str:
        return f"s{self.number}{mark}.{loop[0]}.{loop[1]}"

    def steps(self, axis: str, mark: str = "") -> list[tuple[str, int]]:
        """Return variables that make up an axis, each with what one step of it adds."""
        factors = self.splits[axis]
        found = [
            (self.variable((axis, i), mark), prod(factors[i + 1 :])) for i in range(len(factors)) if factors[i] > 1
        ]
        if axis in self.group.shared and self.left[axis] < dict(self.stage.spatial)[axis]:
            found.append((self.group.variable(axis), self.left[axis]))
        return found

    def access(self, name: str, index: Index) -> Access:
        buffer = self.group.buffers[name]
        strides: dict[str, int] = {}
        for dimension, terms in enumerate(index):
            for axis, coefficient in terms:
                for variable, step in self.steps(axis):
                    if name in self.group.shrunk and variable == self.group.variable(axis):
                        continue
                    move = buffer.strides[dimension] * coefficient * step
                    strides[variable] = strides.get(variable, 0) + move
        return Access(buffer=name, strides=tuple(strides.items()))

    def nests(self) -> list[LoopNest]:
        stage, plan = self.stage, self.plan
        target = self.access(stage.buffer, tuple(((axis, 1),) for axis, _ in stage.spatial))
        reads = tuple(self.access(each.buffer, each.index) for each in stage.reads)
        if not stage.combine:
            leaf = Statement(name=stage.buffer, target=target, reads=reads, value=stage.value)
            return self.wrap(self.order, leaf)
        position = next((i for i, each in enumerate(self.order) if each[0] not in self.spatial), len(self.order))
        inner = [each for each in self.order[position:] if each[0] in self.spatial]
        kept = [*inner, self.lanes] if self.lanes else inner
        gathered = target
        if plan.local or self.lanes:
            shape = tuple(self.extent(each) for each in kept) or (1,)
            local = Buffer(name=f"{stage.buffer}.local", shape=shape, role=Purpose.LOCAL)
            self.group.buffers[local.name] = local
            strides = tuple((self.variable(each), step) for each, step in zip(kept, local.strides, strict=False))
            gathered = Access(buffer=local.name, strides=strides)
        start = Statement(
            name=f"{stage.buffer}.start", target=self.marked(gathered, kept, "~"), reads=(),
            value=("const", stage.start),
        )  # fmt: skip
        body = self.wrap(kept, start, "~")
        main = Statement(name=stage.buffer, target=gathered, reads=reads, value=stage.value, combine=stage.combine)
        body += self.wrap(self.order[position:], main)
        if self.lanes:
            body += self.finish(target, gathered, inner)
        elif plan.local:
            out = Statement(
                name=f"{stage.buffer}.out", target=self.marked(target, inner, "^"),
                reads=(self.marked(gathered, inner, "^"),), value=("read", 0),
            )  # fmt: skip
            body += self.wrap(inner, out, "^")
        for each in reversed(self.order[:position]):
            body = [self.loop(each, body, "", last=False)]
        return body

    def finish(self, target: Access, gathered: Access, inner: list[tuple[str, int]]) -> list[LoopNest]:
        """Return the loops that combine the partial results of the lanes."""
        assert self.lanes is not None
        stage, lanes = self.stage, self.lanes
        start = Statement(name=f"{stage.buffer}.begin", target=self.marked(target, inner, "^"), reads=(),
                          value=("const", stage.start))  # fmt: skip
        join = Statement(
            name=f"{stage.buffer}.join", target=self.marked(target, inner, "^"),
            reads=(self.marked(gathered, [*inner, lanes], "^"),), value=("read", 0), combine=stage.combine,
        )  # fmt: skip
        over = Loop(variable=self.variable(lanes, "^"), extent=self.extent(lanes), kind=LoopKind.UNROLLED, body=(join,))
        body: list[LoopNest] = [start, over]
        for each in reversed(inner):
            body = [self.loop(each, body, "^", last=False)]
        return body

    def marked(self, access: Access, inner: list[tuple[str, int]], mark: str) -> Access:
        """Return the access with the variables of another nest over the same loops."""
        new = {self.variable(each): self.variable(each, mark) for each in inner}
        return Access(
            buffer=access.buffer, offset=access.offset, strides=tuple((new.get(v, v), s) for v, s in access.strides)
        )

    def wrap(self, loops: Sequence[tuple[str, int]], leaf: Statement, mark: str = "") -> list[LoopNest]:
        body: list[LoopNest] = [leaf]
        for i, each in reversed(list(enumerate(loops))):
            body = [self.loop(each, body, mark, last=i == len(loops) - 1)]
        return body

    def loop(self, each: tuple[str, int], body: list[LoopNest], mark: str, *, last: bool) -> Loop:
        kind = LoopKind.UNROLLED if each in self.plan.unrolled else LoopKind.SERIAL
        if last and each == self.order[-1] and (self.plan.vectorised or each == self.lanes):
            kind = LoopKind.VECTORISED
        return Loop(variable=self.variable(each, mark), extent=self.extent(each), kind=kind, body=tuple(body))


def divisors(n: int, most: int | None = None) -> list[int]:
    return [d for d in range(1, min(n, most or n) + 1) if n % d == 0]


def lane_counts(n: int) -> list[int]:
    """Return numbers of vector lanes that an extent can be split into."""
    return [d for d in (4, 8, 16, 32, MAX_LANES) if n % d == 0]


def fitting(splits: Mapping[str, tuple[int, ...]], loops: Sequence[tuple[str, int]]) -> int:
    """Return iterations of these loops together."""
    return prod(splits[axis][level] for axis, level in loops)
