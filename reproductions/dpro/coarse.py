"""A problem and a plan as a task graph: the coarsened step on one or many workers, for the common simulator.

The search evaluates plans by its own small loops; this is what they are held against, and the global graph of many
workers on which the final answer of a synthetic problem is checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from foretrace.errors import GraphError
from foretrace.graph.assemble import assemble
from foretrace.graph.taskgraph import NO_RELEASE, EdgeKind, GraphInfo, Lane, Phase, TaskGraph, TaskKind
from foretrace.plan.problem import CoarseStep, Plan, TransferCosts
from foretrace.trace.trace import LaneKind

_ALL_TO_ALL = 16  # members up to which every arrival leads to every transfer; beyond, through one join


def as_graph(
    problem: CoarseStep, plan: Plan, costs: TransferCosts, *, steps: int = 2, workers: int = 1, operators: int = 1
) -> TaskGraph:
    """The graph of `steps` steps of so many workers; every group of compute is cut into so many operators.

    Raises GraphError for what lanes cannot express: overtaking messages with several in flight, or on many workers.
    """
    if plan.ahead and (problem.slots > 1 or workers > 1):
        raise GraphError("messages that overtake each other are simulated for one worker and one message at a time.")
    return _Writer(problem, plan, costs, workers, operators).write(steps)


class _Writer:
    def __init__(self, problem: CoarseStep, plan: Plan, costs: TransferCosts, workers: int, operators: int) -> None:
        self.problem, self.plan, self.costs, self.operators = problem, plan, costs, operators
        self.workers = workers
        self.tasks: list[dict[str, Any]] = []
        self.edges: list[tuple[int, int, int, int, bool]] = []
        self.last = [-1] * workers  # of each compute lane
        self.sent: list[list[tuple[int, int]]] = [[] for _ in range(workers)]  # (task, wire) of each link, in order
        self.bucket = np.repeat(np.arange(len(plan.ends)), np.diff([-1, *plan.ends])).tolist()
        self.ready: list[list[int]] = [[]] * workers

    def task(self, rank: int, kind: TaskKind, dur: int, *, link: bool = False, **columns: Any) -> int:
        lane = 2 * rank + int(link)
        self.tasks.append({"kind": int(kind), "lane": lane, "dur": dur, **columns})
        return len(self.tasks) - 1

    def edge(self, src: int, dst: int, kind: EdgeKind, lag: int = 0, *, from_start: bool = False) -> None:
        self.edges.append((src, dst, int(kind), lag, from_start))

    def compute(self, rank: int, dur: int, kind: TaskKind = TaskKind.KERNEL, **columns: Any) -> int:
        """The next task of a worker's compute lane; returns the row of its first operator."""
        parts = self.operators if kind == TaskKind.KERNEL else 1
        first = -1
        for i in range(parts):
            row = self.task(rank, kind, dur * (i + 1) // parts - dur * i // parts, **columns)
            if self.last[rank] >= 0:
                self.edge(self.last[rank], row, EdgeKind.STREAM)
            self.last[rank] = row
            first = row if first < 0 else first
        return first

    def write(self, steps: int) -> TaskGraph:
        problem, plan = self.problem, self.plan
        order = np.argsort(problem.forward_place, kind="stable").tolist()
        marks: list[list[int]] = [[] for _ in range(self.workers)]
        messages: list[list[list[int]]] = [[] for _ in range(self.workers)]  # of the step before, by bucket
        for step in range(steps):
            arrived = []
            for rank in range(self.workers):
                columns: dict[str, Any] = {"step": step}
                self.compute(rank, 0, TaskKind.MARK, **columns)
                marks[rank].append(self.last[rank])
                self.compute(rank, problem.first_ns, phase=Phase.FORWARD, **columns)
                for i in order:
                    update = int(problem.update_ns[i]) if plan.ahead and step else 0
                    row = self.compute(rank, int(problem.forward_ns[i]) + update, phase=Phase.FORWARD, **columns)
                    for message in messages[rank][self.bucket[i]] if plan.ahead and step else ():
                        self.edge(message, row, EdgeKind.COLLECTIVE)
                ready = []
                for i, bucket in enumerate(self.bucket):
                    cut = int(problem.cut_ns[i - 1]) if i and bucket != self.bucket[i - 1] else 0
                    self.compute(rank, int(problem.backward_ns[i]) + cut, phase=Phase.BACKWARD, **columns)
                    if plan.ends[bucket] == i:
                        ready.append(self.last[rank])
                self.compute(rank, problem.last_ns, phase=Phase.BACKWARD, **columns)
                arrived.append(ready)
            sent = self.exchange(arrived, step)
            for rank in range(self.workers):
                messages[rank] = sent[rank]
                if not plan.ahead:
                    row = self.compute(rank, 0, TaskKind.JOIN, step=step)
                    for message in (each for bucket in sent[rank] for each in bucket):
                        self.edge(message, row, EdgeKind.COLLECTIVE)
                    self.compute(rank, int(problem.update_ns.sum()), phase=Phase.OPTIMIZER, step=step)
                self.compute(rank, problem.rest_ns, phase=Phase.OPTIMIZER, step=step)
        for rank in range(self.workers):
            self.compute(rank, 0, TaskKind.MARK, step=steps)
            marks[rank].append(self.last[rank])
        return self.assembled(marks[0], steps)

    def exchange(self, arrived: Sequence[Sequence[int]], step: int) -> list[list[list[int]]]:
        """The messages of a step, per rank and bucket."""
        times = self.costs.of_plan(self.plan).tolist()
        place = np.minimum.reduceat(self.problem.forward_place, list(self.plan.begins)).tolist()
        found: list[list[list[int]]] = [[[] for _ in times] for _ in range(self.workers)]
        for bucket, dur in enumerate(times):
            for _ in range(self.plan.chunks[bucket]):
                columns = {"step": step, "priority": place[bucket] if self.plan.ahead else 0}
                rows = [self.task(r, TaskKind.COLLECTIVE, dur, link=True, **columns) for r in range(self.workers)]
                self.joined([ready[bucket] for ready in arrived], rows, step)
                for rank, row in enumerate(rows):
                    found[rank][bucket].append(row)
                    if not self.plan.ahead:
                        self.queued(rank, row, dur)
        return found

    def joined(self, ready: Sequence[int], rows: Sequence[int], step: int) -> None:
        """Every transfer waits for the arrival of every worker."""
        if self.workers == 1:
            self.edge(ready[0], rows[0], EdgeKind.LAUNCH)
            return
        arrivals = []
        for rank, at in enumerate(ready):
            arrivals.append(self.task(rank, TaskKind.ARRIVAL, 0, link=True, step=step))
            self.edge(at, arrivals[-1], EdgeKind.LAUNCH)
        if self.workers > _ALL_TO_ALL:
            join = self.task(0, TaskKind.JOIN, 0, link=True, step=step)
            for each in arrivals:
                self.edge(each, join, EdgeKind.COLLECTIVE)
            arrivals = [join]
        for each in arrivals:
            for row in rows:
                self.edge(each, row, EdgeKind.COLLECTIVE)

    def queued(self, rank: int, row: int, dur: int) -> None:
        """A link keeps its order, its wire and its slots, as `techniques.exchange` has it."""
        sent = self.sent[rank]
        if sent:
            self.edge(sent[-1][0], row, EdgeKind.STREAM, sent[-1][1], from_start=True)
        if len(sent) >= self.problem.slots:
            self.edge(sent[-self.problem.slots][0], row, EdgeKind.STREAM)
        sent.append((row, max(dur - self.costs.latency_ns, 0)))

    def assembled(self, marks: Sequence[int], steps: int) -> TaskGraph:
        keys = ("kind", "lane", "dur", "step", "phase", "priority")
        columns = {key: np.array([task.get(key, 0) for task in self.tasks]) for key in keys}
        n = len(self.tasks)
        columns["name"] = np.where(columns["kind"] == TaskKind.COLLECTIVE, 1, 0)
        columns["recorded"] = np.arange(n)
        release = np.full(n, NO_RELEASE)
        release[0] = 0
        for rank in range(1, self.workers):
            release[next(row for row, task in enumerate(self.tasks) if task["lane"] == 2 * rank)] = 0
        columns["release"] = release
        src, dst, kind, lag, from_start = (np.array(column) for column in zip(*self.edges, strict=True))
        lanes = []
        for rank in range(self.workers):
            lanes.append(Lane(rank=rank, kind=LaneKind.GPU, device=0, stream=7, label="compute"))
            lanes.append(Lane(rank=rank, kind=LaneKind.LINK, label="exchange", ordered=not self.plan.ahead))
        return assemble(
            columns,
            {"src": src, "dst": dst, "edge_kind": kind, "lag": lag, "from_start": from_start},
            marks=np.array(marks),
            names=("compute", "all-reduce"),
            layers=(),
            lanes=tuple(lanes),
            info=GraphInfo(
                platform="cuda", steps=tuple(range(steps)), world_size=self.workers, source=self.problem.name,
                step_clock="gpu",
            ),
        )  # fmt: skip
