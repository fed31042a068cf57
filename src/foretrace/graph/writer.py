"""`GraphWriter`: a task graph written task by task, each behind the one before it on its lane."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from foretrace.graph.assemble import TASK_DEFAULTS, assemble
from foretrace.graph.taskgraph import EdgeKind, GraphInfo, Lane, TaskGraph, TaskKind
from foretrace.trace.tables import Interner
from foretrace.trace.trace import LaneKind


class GraphWriter:
    """Tasks and edges in any order in which a program may run them; `gap_ns` lies between two tasks of a stream."""

    def __init__(self, lanes: Iterable[Lane], info: GraphInfo, *, gap_ns: int = 0) -> None:
        self.lanes, self.info, self.gap_ns = list(lanes), info, gap_ns
        self.names, self.layers = Interner(), Interner()
        self.last: dict[int, int] = {}  # task on each lane
        self.marks: list[int] = []
        self._tasks: list[dict[str, float]] = []
        self._edges: list[tuple[int, int, int, int, bool]] = []

    def __len__(self) -> int:
        return len(self._tasks)

    def lane(self, lane: Lane) -> int:
        """Add a lane; returns its number."""
        self.lanes.append(lane)
        return len(self.lanes) - 1

    def task(
        self, kind: TaskKind, lane: int, name: str, dur: int, *, op: str = "", layer: str = "", **columns: float
    ) -> int:
        """Add a task of the step that the last mark began; returns its row."""
        row = len(self._tasks)
        named = {"name": self.names[name], "op": self.names[op] if op else -1,
                 "layer": self.layers[layer] if layer else -1}  # fmt: skip
        self._tasks.append({"kind": kind, "lane": lane, "dur": dur, "step": len(self.marks) - 1} | named | columns)
        if lane in self.last:
            thread = self.lanes[lane].kind == LaneKind.CPU
            order = EdgeKind.PROGRAM if thread else EdgeKind.STREAM
            self.edge(self.last[lane], row, order, 0 if thread else self.gap_ns)
        self.last[lane] = row
        return row

    def edge(self, src: int, dst: int, kind: EdgeKind, lag: int = 0, *, from_start: bool = False) -> None:
        """Let one task wait for another; `lag` in ns."""
        self._edges.append((src, dst, kind, lag, from_start))

    def mark(self, lane: int, name: str = "step", after: Iterable[int] = (), **columns: float) -> None:
        """Begin a step, and end the one before, when these tasks have ended."""
        self.marks.append(self.task(TaskKind.MARK, lane, name, 0, op="", layer="", **columns))
        for task in after:
            self.edge(task, self.marks[-1], EdgeKind.SYNC)

    def graph(self) -> TaskGraph:
        """Return the graph of all that was written."""
        keys = {key for task in self._tasks for key in task}
        columns = {key: np.array([task.get(key, TASK_DEFAULTS.get(key)) for task in self._tasks]) for key in keys}
        src, dst, kind, lag, from_start = (np.array(column) for column in zip(*self._edges, strict=True))
        return assemble(
            columns, {"src": src, "dst": dst, "edge_kind": kind, "lag": lag, "from_start": from_start},
            marks=np.array(self.marks), names=tuple(self.names), layers=tuple(self.layers), lanes=tuple(self.lanes),
            info=self.info,
        )  # fmt: skip


class StepWriter(GraphWriter):
    """One step that is planned: tasks that need no other begin with it, and it ends with those that no other needs."""

    def __init__(self, source: str, *, ranks: int = 1, platform: str = "cuda") -> None:
        clock = Lane(rank=0, kind=LaneKind.CPU, label="steps")
        super().__init__((clock,), GraphInfo(source=source, platform=platform, world_size=ranks, steps=(0,)))
        self._lanes: dict[str, int] = {}
        self.mark(0, release=0)

    def on(self, kind: LaneKind, label: str, rank: int = 0) -> int:
        """Return the lane of this name; the first time it is made, of a GPU as one more stream."""
        if label not in self._lanes:
            lane = Lane(rank=rank, kind=kind, label=label)
            if kind == LaneKind.GPU:
                lane = replace(lane, device=rank, stream=sum(each.device == rank for each in self.lanes))
            self._lanes[label] = self.lane(lane)
        return self._lanes[label]

    def behind(self, needs: Iterable[int], kind: TaskKind, lane: int, name: str, dur: int, **columns: Any) -> int:
        """Add a task that waits for others, too; returns its row."""
        row = self.task(kind, lane, name, dur, **columns)
        for each in needs:
            self.edge(each, row, EdgeKind.DATA)
        return row

    def ended(self) -> TaskGraph:
        """Return the graph of the step."""
        begin, tasks = self.marks[0], set(range(len(self))) - set(self.marks)
        needed, waiting = ({each[end] for each in self._edges} for end in (0, 1))
        for task in sorted(tasks - waiting):
            self.edge(begin, task, EdgeKind.DATA)
        self.mark(0, after=sorted(tasks - needed), step=-1)
        return self.graph()
