"""`SoapProblem`: the time of a training step for every way to split and place the operators of a model.

    problem = SoapProblem(model, cluster, "all-reduce", memory_bytes=16e9)
    found = best_strategy(problem, calls=4000, chains=4)
    found.cost / problem.cost(problem.data_parallel())

A point holds one whole number per operator: which of its ways to be split, the device of the first part, and how far
apart the devices of parts are (1: neighbours; devices of a node: one per node first).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import product
from math import inf, prod
from random import Random
from typing import Any, Literal, NamedTuple

import numpy as np

from foretrace.arrays import Int64
from foretrace.errors import ForetraceError
from foretrace.graph.taskgraph import EdgeKind, Phase, TaskGraph, TaskKind
from foretrace.graph.writer import StepWriter
from foretrace.hardware.cluster import Cluster
from foretrace.plan.soap import engine
from foretrace.plan.soap.operators import DIMENSIONS, Degrees, SoapModel, SoapOperator, SoapOperators
from foretrace.search.minimise import Found, minimise
from foretrace.search.space import Infeasible, Problem, Space
from foretrace.search.strategies import MCMC
from foretrace.search.strategy import SearchStrategy
from foretrace.trace.trace import LaneKind

Codes = tuple[int, ...]
Synchronisation = Literal["all-reduce", "gather"]
MOST_DEVICES = 64  # members of an exchange are bits
SYNCHRONISATIONS: dict[Synchronisation, int] = {"all-reduce": engine.ALLREDUCE, "gather": engine.GATHER}


class Split(NamedTuple):
    """One operator's configuration."""

    degrees: Degrees  # parts per dimension
    first: int  # device of the first part
    stride: int  # between devices of parts


class StepCounts(NamedTuple):
    """What one simulated step comes to."""

    milliseconds: float
    tasks: int
    moved_bytes: int  # activations and their gradients
    exchanged_bytes: int  # gradients of weights, and weights
    held_bytes: tuple[int, ...]  # of every device


def ways_of(operator: SoapOperator, devices: int) -> list[Degrees]:
    """Return powers of two per dimension that may be split, at most as many parts as devices."""
    powers = [1 << i for i in range(devices.bit_length())]
    choices = [
        [degree for degree in powers if degree <= size] if name in operator.splits else [1]
        for name, size in zip(DIMENSIONS, operator.sizes, strict=True)
    ]
    return [(a, b, c, d) for a, b, c, d in product(*choices) if a * b * c * d <= devices]


class SplitSpace(Space[Codes]):
    """Configurations of all operators."""

    def __init__(self, model: SoapOperators, devices: int) -> None:
        self.devices = devices
        self.strides = [stride for stride in range(1, devices + 1) if devices % stride == 0 and stride < devices] or [1]
        self.ways = [ways_of(operator, devices) for operator in model.operators]
        self.counts = [len(ways) * devices * len(self.strides) for ways in self.ways]
        self.size = prod(map(float, self.counts))
        self._index = [{way: i for i, way in enumerate(ways)} for ways in self.ways]
        layers: dict[str, list[int]] = {}
        for i, operator in enumerate(model.operators):
            layers.setdefault(operator.layer, []).append(i)
        self._layer = [layers[operator.layer] for operator in model.operators]
        near: list[list[int]] = [[] for _ in model.operators]
        for i, operator in enumerate(model.operators):
            for each in operator.inputs:
                near[i].append(each.source)
                near[each.source].append(i)
        self._near = near

    def split(self, op: int, code: int) -> Split:
        """Return what a number of a point means."""
        rest, stride = divmod(code, len(self.strides))
        way, first = divmod(rest, self.devices)
        return Split(self.ways[op][way], first, self.strides[stride])

    def code(self, op: int, split: Split) -> int:
        """Return the number of a configuration; raises ForetraceError where the operator cannot be split so."""
        way = self._index[op].get(split.degrees)
        if way is None or split.stride not in self.strides or not 0 <= split.first < self.devices:
            raise ForetraceError(f"operator {op} cannot be split as {split}; the ways are {self.ways[op]}.")
        return (way * self.devices + split.first) * len(self.strides) + self.strides.index(split.stride)

    def places(self, split: Split) -> tuple[int, ...]:
        """Return the devices of the parts of an operator."""
        n, ats = self.devices, range(0, prod(split.degrees) * split.stride, split.stride)
        return tuple((split.first + at % n + at // n) % n for at in ats)

    def random(self, rng: Random) -> Codes:
        return tuple(map(rng.randrange, self.counts))

    def neighbour(self, point: Codes, rng: Random) -> Codes:
        """Return a new configuration for an operator (for half), for its whole layer, or that of one next to it."""
        op = rng.randrange(len(point))
        changed, kind = list(point), rng.random()
        if kind < 0.75 or not self._near[op]:
            code = rng.randrange(self.counts[op])
        else:
            other = rng.choice(self._near[op])
            split = self.split(other, point[other])
            if split.degrees not in self._index[op]:
                return point
            code = self.code(op, split)
        split = self.split(op, code)
        for each in self._layer[op] if kind >= 0.5 else (op,):
            if split.degrees in self._index[each]:
                changed[each] = self.code(each, split)
        return tuple(changed)


class SoapProblem(Problem[Codes]):
    """Milliseconds of one training step on a cluster; infinite where a device's memory does not hold its share."""

    def __init__(
        self, model: SoapModel, cluster: Cluster, synchronisation: Synchronisation, *, memory_bytes: float = inf
    ) -> None:
        if synchronisation not in SYNCHRONISATIONS:
            raise ForetraceError(f"`synchronisation={synchronisation}` must be all-reduce or gather.")
        devices, inside, between = cluster.workers, cluster.inside, cluster.between
        if not 1 <= devices <= MOST_DEVICES or cluster.machines:
            raise ForetraceError(
                f"operators can be split over 1 to {MOST_DEVICES} devices in machines alike, got {devices} in "
                f"{cluster.name}; give that many."
            )
        self.model, self.cluster, self.synchronisation, self.limit = model, cluster, synchronisation, memory_bytes
        self.space: SplitSpace = SplitSpace(model, devices)
        self.machine = engine.ClusterFigures(
            devices, cluster.per_node, float(inside.bytes_per_s), float(between.bytes_per_s), inside.latency_s,
            between.latency_s,
        )  # fmt: skip
        self._make_room()

    @cached_property
    def columns(self) -> engine.Columns:
        """The model as the compiled simulation reads it."""
        operators, ways = self.model.operators, self.space.ways
        layers = {each.layer: each for each in operators}
        number = {name: i for i, name in enumerate(layers)}
        inputs = [each for operator in operators for each in operator.inputs]

        def whole(values: Sequence[object]) -> Int64:
            return np.array(values, dtype=np.int64)

        times = [self.model.times(op, each) for op, each in enumerate(ways)]
        forward, backward = (np.rint(1e9 * np.concatenate(each)).astype(np.int64) for each in zip(*times, strict=True))
        return engine.Columns(
            sizes=whole([each.sizes for each in operators]),
            element=whole([each.element_bytes for each in operators]),
            saved=whole([each.saved_bytes for each in operators]),
            layer=whole([number[each.layer] for each in operators]),
            width=whole([each.sizes[3] for each in layers.values()]),
            weights=whole([each.weight_bytes for each in layers.values()]),
            kept=whole([each.kept_bytes for each in layers.values()]),
            begin=np.cumsum([0, *(len(each.inputs) for each in operators)]).astype(np.int64),
            source=whole([each.source for each in inputs]),
            needed=whole([each.needed for each in inputs]).reshape(-1, 4, 3),
            degrees=whole([way for each in ways for way in each]),
            forward=forward,
            backward=backward,
            ways=np.cumsum([0, *map(len, ways)])[:-1].astype(np.int64),
            strides=whole(self.space.strides),
        )

    def _make_room(self) -> None:
        """Make what a simulation writes: tasks, bytes of each device, counts."""
        self._tasks, devices = engine.room(1 << 12, 1 << 14), self.machine.devices
        self._held, self._counts = np.zeros(devices, np.int64), np.zeros(4, np.int64)

    def __getstate__(self) -> dict[str, object]:  # what prices parts stays here
        plain = SoapOperators(self.model.name)
        plain.operators = self.model.operators
        held = {name: value for name, value in vars(self).items() if name not in ("_tasks", "_held", "_counts")}
        return held | {"model": plain, "columns": self.columns}

    def __setstate__(self, held: dict[str, Any]) -> None:
        vars(self).update(held)  # with arrays of its own: Ray's cannot be written to, so loops would be compiled again
        self.columns = engine.Columns(*(each.copy() for each in held["columns"]))
        self._make_room()

    def simulated(self, point: Codes) -> tuple[int, engine.Tasks]:
        """Return nanoseconds of a step, and its tasks, which the next simulation overwrites."""
        codes, sync = np.array(point, dtype=np.int64), SYNCHRONISATIONS[self.synchronisation]
        model, cluster = tuple(self.columns), tuple(self.machine)
        while True:
            tasks = self._tasks
            found = engine.simulate_strategy(codes, model, cluster, sync, tuple(tasks), self._held, self._counts)
            if found >> (63 - engine.ID_BITS):
                raise ForetraceError(f"a step must end within half an hour, got {found / 1e9:.0f} s; give less work.")
            if found:
                return found, tasks
            count, followers = (max(int(need), size) for need, size in
                                zip(self._counts[:2], (len(tasks.takes), len(tasks.target)), strict=True))  # fmt: skip
            if count >= 1 << engine.ID_BITS:
                raise ForetraceError(f"a step must have fewer than {1 << engine.ID_BITS:,} tasks, got {count:,}.")
            self._tasks = engine.room(2 * count, 2 * followers)

    def counted(self, point: Codes) -> StepCounts:
        """Return what a step comes to, whether it fits or not."""
        found, _ = self.simulated(point)
        tasks, _, moved, exchanged = map(int, self._counts)
        return StepCounts(found / 1e6, tasks, moved, exchanged, tuple(map(int, self._held)))

    def cost(self, point: Codes) -> float:
        """Return milliseconds of one point."""
        found, _ = self.simulated(point)
        if self._held.max() > self.limit:
            return Infeasible("a device holds more than its memory")
        return found / 1e6

    def costs(self, points: Sequence[Codes]) -> Sequence[float]:
        return [self.cost(point) for point in points]

    def expand(self, point: Codes) -> TaskGraph:
        """Return the tasks of a strategy, in the order of the compiled loop, between the marks of one step.

        Every device, every link within a node and either direction of a node's network interface is a lane. A task
        lies on the first one that it holds, and waits, through an edge of contention, for the last one that held any
        other: a message holds two interfaces, an all-reduce all links of its ring.
        """
        _, tasks = self.simulated(point)
        operators, cluster = self.model.operators, self.cluster
        parts = sum(int(np.prod(self.space.split(op, code).degrees)) for op, code in enumerate(point))
        count = self.counted(point).tasks
        followers = [_followers(tasks, task) for task in range(count)]
        layers = list(dict.fromkeys(each.layer for each in operators))
        inputs = [each for each in operators for _ in each.inputs]
        writer = StepWriter(self.model.name, ranks=cluster.workers)
        last: dict[int, int] = {}  # row on each resource
        rows: dict[int, int] = {}
        for task in np.argsort(tasks.waits[:count]).tolist():
            owner, phase = int(tasks.owner[task]), Phase.FORWARD if task < parts else Phase.BACKWARD
            if owner < len(operators):
                kind, layer, name = TaskKind.KERNEL, operators[owner].layer, operators[owner].name
            elif owner < len(operators) + len(inputs):
                reader = inputs[owner - len(operators)]
                kind, layer, name = TaskKind.COPY, reader.layer, f"input of {reader.name}"
                phase = Phase.FORWARD if (task - 2 * parts) % 2 == 0 else Phase.BACKWARD
            else:
                layer = layers[owner - len(operators) - len(inputs)]
                kind, name = TaskKind.COLLECTIVE, f"gradients of {layer}"
            held = _resources(tasks, task, cluster)
            lane = writer.on(*_lane(held[0], cluster))
            waited = {last[each] for each in held if each in last} - {writer.last.get(lane)}
            rows[task] = writer.task(kind, lane, name, int(tasks.takes[task]), layer=layer, phase=phase)
            last |= dict.fromkeys(held, rows[task])
            for before in waited:
                writer.edge(before, rows[task], EdgeKind.CONTENTION)
        for task, after in enumerate(followers):
            for then in after:
                writer.edge(rows[task], rows[then], EdgeKind.DATA)
        return writer.ended()

    # --- baselines ---------------------------------------------------------------------------------------------------

    def _samples(self, op: int, parts: int, first: int = 0, stride: int = 1) -> int:
        while (parts, 1, 1, 1) not in self.space.ways[op]:
            parts //= 2
        return self.space.code(op, Split((parts, 1, 1, 1), first, stride))

    @property
    def _most(self) -> int:
        return 1 << (self.machine.devices.bit_length() - 1)

    def data_parallel(self) -> Codes:
        """Return every operator split by samples over all devices (the largest power of two of them)."""
        return tuple(self._samples(op, self._most) for op in range(len(self.model.operators)))

    def alone(self) -> Codes:
        return tuple(self._samples(op, 1) for op in range(len(self.model.operators)))

    def expert(self) -> Codes:
        """Return what people do by hand (Krizhevsky, 2014; Wu et al., 2016).

        Convolutional models: samples, but products of flat inputs split by channels. Recurrent models: nodes are data
        parallel, and each layer has a device of its node, in turns.
        """
        operators, per_node = self.model.operators, self.cluster.per_node
        recurrent = any(each.recurrent for each in operators)
        weighted = dict.fromkeys(each.layer for each in operators if each.weight_bytes)
        layers = {name: i for i, name in enumerate(weighted)}
        parts = 1 << (self.cluster.nodes.bit_length() - 1)
        stride = per_node if per_node in self.space.strides else 1
        point, place = [], 0
        for op, each in enumerate(operators):
            place = layers.get(each.layer, place)  # what has no weights stays where it was made
            if recurrent:
                point.append(self._samples(op, parts, place % per_node, stride))
            elif each.weight_bytes and each.sizes[1:3] == (1, 1) and "c" in each.splits:
                channels = min(self._most, 1 << (each.sizes[3].bit_length() - 1))
                point.append(self.space.code(op, Split((1, 1, 1, channels), 0, 1)))
            else:
                point.append(self._samples(op, self._most))
        return tuple(point)


def best_strategy(
    problem: SoapProblem, *, calls: int, chains: int = 4, seed: int = 0, strategy: SearchStrategy | None = None,
    on: str | None = None, more: Sequence[Codes] = (),
) -> Found[Codes]:  # fmt: skip
    """Return the fastest strategy found from the baselines and `more` starts; by default by FlexFlow's search."""
    strategy = strategy or MCMC(beta=0.05, reset=min(1000, max(1, calls // chains // 100)))
    starts = (problem.data_parallel(), problem.expert(), *more)
    found = minimise(problem, strategy=strategy, starts=starts, calls=calls, chains=chains, seed=seed, on=on)
    if found.ended == "stopped":  # one of several searches: a plan of some of them would be another one
        raise KeyboardInterrupt
    return found


class LeastMemory(SoapProblem):
    """The same strategies by the bytes of the fullest device."""

    def cost(self, point: Codes) -> float:
        self.simulated(point)
        return float(self._held.max())


def _followers(tasks: engine.Tasks, task: int) -> list[int]:
    found, at = dict[int, None](), int(tasks.head[task])
    while at >= 0:
        found[int(tasks.target[at])] = None
        at = int(tasks.following[at])
    return list(found)


def _resources(tasks: engine.Tasks, task: int, cluster: Cluster) -> list[int]:
    """Return what a task holds, as the compiled loop numbers devices, links and interfaces."""
    ring, n, per_node = int(tasks.ring[task]), cluster.workers, cluster.per_node
    if not ring:
        return list(dict.fromkeys((int(tasks.first[task]), int(tasks.second[task]))))
    members, base = [device for device in range(n) if ring >> device & 1], n * (1 + n)
    found = list[int]()
    for one, other in zip(members, members[1:] + members[:1], strict=True):
        here, there = one // per_node, other // per_node
        found += [n * (1 + one) + other] if here == there else [base + here, base + n + there]
    return found


def _lane(resource: int, cluster: Cluster) -> tuple[LaneKind, str, int]:
    """Return kind, name and rank of the lane of what a task holds."""
    n = cluster.workers
    if resource < n:
        return LaneKind.GPU, f"device {resource}", resource
    if resource < n * (1 + n):
        one, other = divmod(resource - n, n)
        return LaneKind.LINK, f"{one} to {other}", one
    node = resource - n * (1 + n)
    way, node = ("into", node - n) if node >= n else ("out of", node)
    return LaneKind.LINK, f"network {way} node {node}", node * cluster.per_node
