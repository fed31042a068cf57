"""A training step of a strategy in plain Python, as FlexFlow's full simulation has it: objects, dictionaries, one heap.

What `foretrace.plan.soap.engine` computes on columns, written for reading: every pair of parts is looked at, and who
holds which channel of a weight is a set per channel boundary.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise, product
from math import prod

from foretrace.plan.soap.operators import Input
from foretrace.plan.soap.problem import Codes, SoapProblem, Split

Box = tuple[tuple[int, int], ...]  # first element and the one behind the last, per dimension


@dataclass(slots=True)
class PlainTask:
    """One task; links and devices that it holds are named."""

    seconds: float
    holds: tuple[Hashable, ...]
    before: list[PlainTask] = field(default_factory=list)
    followers: list[PlainTask] = field(default_factory=list)
    number: int = 0
    ready: int = 0
    end: int = -1


def volume(box: Box) -> int:
    """Elements of a box, 0 where it is empty."""
    elements = 1
    for lo, hi in box:
        elements *= max(hi - lo, 0)
    return elements


def overlap(one: Box, other: Box) -> Box:
    """What is in both."""
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))


class PlainStep:
    """The tasks of one strategy, simulated when made."""

    def __init__(self, problem: SoapProblem, point: Codes) -> None:
        self.problem, self.cluster, self.count = problem, problem.cluster, problem.machine.devices
        self.splits = [problem.space.split(op, code) for op, code in enumerate(point)]
        self.tasks: list[PlainTask] = []
        self.held: dict[int, int] = defaultdict(int)
        self.moved = self.exchanged = 0
        self.messages: dict[tuple[int, int, int, int], int] = {}  # (reader, its part, source, its part): bytes
        self.boxes = [[*self._boxes(op, split.degrees)] for op, split in enumerate(self.splits)]
        self.devices = [[self._device(split, i) for i in range(len(boxes))]
                        for split, boxes in zip(self.splits, self.boxes, strict=True)]  # fmt: skip
        self._compute()
        for op in range(len(self.splits)):
            for each in problem.model.operators[op].inputs:
                self._read(op, each)
        self._exchange()
        self.makespan_ns = self._run()

    def _boxes(self, op: int, degrees: tuple[int, int, int, int]) -> Iterator[Box]:
        sizes = self.problem.model.operators[op].sizes
        for at in product(*map(range, degrees)):
            yield tuple((size * k // d, size * (k + 1) // d) for size, k, d in zip(sizes, at, degrees, strict=True))

    def _device(self, split: Split, part: int) -> int:
        count = self.count
        order = [start + i for start in range(split.stride) for i in range(0, count, split.stride)]
        return (split.first + order[part]) % count

    def _need(self, box: Box, each: Input) -> Box:
        sizes = self.problem.model.operators[each.source].sizes
        return tuple(
            (max(lo * need.stride + need.offset, 0), min((hi - 1) * need.stride + need.offset + need.extent, size))
            for (lo, hi), need, size in zip(box, each.needed, sizes, strict=True)
        )

    def _task(self, seconds: float, holds: tuple[Hashable, ...], *before: PlainTask) -> PlainTask:
        task = PlainTask(seconds, holds, list(before))
        self.tasks.append(task)
        return task

    def _compute(self) -> None:
        columns, space = self.problem.columns, self.problem.space
        self.passes: tuple[list[list[PlainTask]], list[list[PlainTask]]] = ([], [])
        for backward, tasks in enumerate(self.passes):
            times = columns.backward if backward else columns.forward
            for op, operator in enumerate(self.problem.model.operators):
                way = int(columns.ways[op]) + space.ways[op].index(self.splits[op].degrees)
                row = []
                for part, box in enumerate(self.boxes[op]):
                    device = self.devices[op][part]
                    before = [self.passes[0][op][part]] if backward else []
                    row.append(self._task(int(times[way]) / 1e9, (device,), *before))
                    if not backward:
                        self.held[device] += operator.saved_bytes * volume(box) // prod(operator.sizes)
                tasks.append(row)

    def _sent(self, src: int, dst: int, nbytes: int) -> PlainTask:
        cluster = self.cluster
        here, there = src // cluster.per_node, dst // cluster.per_node
        if here == there:
            return self._task(cluster.inside.latency_s + nbytes / cluster.inside.bytes_per_s, (("link", src, dst),))
        return self._task(
            cluster.between.latency_s + nbytes / cluster.between.bytes_per_s, (("out", here), ("in", there))
        )

    def _read(self, op: int, each: Input) -> None:
        forward, backward = self.passes
        src = each.source
        for part, box in enumerate(self.boxes[op]):
            need = self._need(box, each)
            for other, theirs in enumerate(self.boxes[src]):
                elements = volume(overlap(need, theirs))
                if not elements:
                    continue
                nbytes = elements * self.problem.model.operators[src].element_bytes
                dst, there = self.devices[op][part], self.devices[src][other]
                if dst == there:
                    forward[op][part].before.append(forward[src][other])
                    backward[src][other].before.append(backward[op][part])
                    continue
                for sender, receiver, first, then in (
                    (there, dst, forward[src][other], forward[op][part]),
                    (dst, there, backward[op][part], backward[src][other]),
                ):
                    message = self._sent(sender, receiver, nbytes)
                    message.before.append(first)
                    then.before.append(message)
                self.moved += 2 * nbytes
                self.held[dst] += nbytes
                key = (op, part, src, other)
                self.messages[key] = self.messages.get(key, 0) + nbytes

    def _exchange(self) -> None:
        operators = self.problem.model.operators
        for layer in dict.fromkeys(operator.layer for operator in operators if operator.weight_bytes):
            users = [op for op, operator in enumerate(operators) if operator.layer == layer]
            cuts = sorted({edge for op in users for box in self.boxes[op] for edge in box[3]})
            groups: dict[frozenset[int], list[tuple[int, int]]] = {}
            for lo, hi in pairwise(cuts):
                holders = frozenset(
                    self.devices[op][part]
                    for op in users
                    for part, box in enumerate(self.boxes[op])
                    if box[3][0] <= lo and hi <= box[3][1]
                )
                groups.setdefault(holders, []).append((lo, hi))
            for holders, ranges in groups.items():
                channels = sum(hi - lo for lo, hi in ranges)
                nbytes = operators[users[0]].weight_bytes * channels
                for device in holders:
                    self.held[device] += operators[users[0]].kept_bytes * channels
                if len(holders) > 1:
                    self.exchanged += 2 * (len(holders) - 1) * nbytes
                    gradients = [
                        (self.devices[op][part], self.passes[1][op][part])
                        for op in users
                        for part, box in enumerate(self.boxes[op])
                        if any(box[3][0] <= lo and hi <= box[3][1] for lo, hi in ranges)
                    ]
                    self._synchronise(sorted(holders), nbytes, gradients)

    def _synchronise(self, holders: list[int], nbytes: int, gradients: list[tuple[int, PlainTask]]) -> None:
        cluster, count = self.cluster, len(holders)
        if self.problem.synchronisation == "all-reduce":
            links: list[Hashable] = []
            latency, rate = cluster.inside.latency_s, cluster.inside.bytes_per_s
            for src, dst in zip(holders, [*holders[1:], holders[0]], strict=True):
                here, there = src // cluster.per_node, dst // cluster.per_node
                if here == there:
                    links.append(("link", src, dst))
                else:
                    links += [("out", here), ("in", there)]
                    between = cluster.between
                    latency, rate = max(latency, between.latency_s), min(rate, between.bytes_per_s)
            seconds = 2 * (count - 1) * (latency + nbytes / count / rate)
            self._task(seconds, tuple(links), *(task for _, task in gradients))
            return
        root, *others = holders
        gathered = []
        for device in others:
            message = self._sent(device, root, nbytes)
            message.before += [task for at, task in gradients if at == device]
            gathered.append(message)
        for device in others:
            self._sent(root, device, nbytes).before += [*gathered, *(task for at, task in gradients if at == root)]

    def _run(self) -> int:
        waits = {}
        for number, task in enumerate(self.tasks):
            task.number = number
            waits[number] = len(task.before)
            for before in task.before:
                before.followers.append(task)
        queue = [(0, number) for number, count in waits.items() if not count]
        free: dict[Hashable, int] = defaultdict(int)
        while queue:
            ready, number = heapq.heappop(queue)
            task = self.tasks[number]
            begin = max([ready, *(free[each] for each in task.holds)])
            task.end = begin + int(task.seconds * 1e9 + 0.5)
            for each in task.holds:
                free[each] = task.end
            for then in task.followers:
                then.ready = max(then.ready, task.end)
                waits[then.number] -= 1
                if not waits[then.number]:
                    heapq.heappush(queue, (then.ready, then.number))
        assert all(task.end >= 0 for task in self.tasks)
        return max(task.end for task in self.tasks)
