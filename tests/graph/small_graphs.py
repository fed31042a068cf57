"""Graphs for the tests of edits: a random training-like recording, and a plain replay to judge edits by."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt

from foretrace.graph.assemble import assemble
from foretrace.graph.taskgraph import EdgeKind, GraphInfo, Lane, Phase, TaskGraph, TaskKind
from foretrace.trace.trace import LaneKind
from tests.simulate import twins

CPU, STREAM_A, STREAM_B = 0, 1, 2
LANES = (
    Lane(rank=0, kind=LaneKind.CPU, label="thread 1"),
    Lane(rank=0, kind=LaneKind.GPU, device=0, stream=7, label="stream 7"),
    Lane(rank=0, kind=LaneKind.GPU, device=0, stream=20, label="stream 20"),
)
NAMES = ("python", "cudaLaunchKernel", "gemm", "relu", "cudaStreamSynchronize", "return", "step")


def start_end(graph: TaskGraph) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Start and end of every task, by the readable definition of the replay."""
    start, end = twins.replay(graph)
    return np.array(start), np.array(end)


def total(graph: TaskGraph) -> int:
    """Time from the first mark to the last."""
    _, end = start_end(graph)
    return int(end[graph.marks[-1]] - end[graph.marks[0]])


def columns(graph: TaskGraph) -> dict[str, bytes]:
    """Everything in a graph that an edit could spoil."""
    keys = [key for key in graph.__dataclass_fields__ if isinstance(getattr(graph, key), np.ndarray)]
    return {key: getattr(graph, key).tobytes() for key in keys}


class Recording:
    """Writes a graph the way a recording goes: one thread that works, launches and waits."""

    def __init__(self) -> None:
        self.tasks: dict[str, list[Any]] = {k: [] for k in ("kind", "lane", "name", "dur", "phase", "step", "recorded")}
        self.edges: dict[str, list[Any]] = {k: [] for k in ("src", "dst", "edge_kind", "lag", "from_start")}
        self.last: dict[int, int] = {}
        self.marks: list[int] = []
        self.launches: dict[int, int] = {}

    def task(
        self, kind: TaskKind, lane: int, name: str, dur: int, *, phase: Phase = Phase.FORWARD, gap: int = 0
    ) -> int:
        row = len(self.tasks["kind"])
        values = (int(kind), lane, NAMES.index(name), dur, int(phase), len(self.marks) - 1, row)
        for key, value in zip(self.tasks, values, strict=True):
            self.tasks[key].append(value)
        if lane in self.last:
            self.edge(self.last[lane], row, EdgeKind.PROGRAM if lane == CPU else EdgeKind.STREAM, gap)
        self.last[lane] = row
        return row

    def edge(self, src: int, dst: int, kind: EdgeKind, lag: int = 0, from_start: bool = False) -> None:
        for key, value in zip(self.edges, (src, dst, int(kind), lag, from_start), strict=True):
            self.edges[key].append(value)

    def work(self, dur: int) -> int:
        return self.task(TaskKind.CPU, CPU, "python", dur)

    def launch(self, stream: int, name: str, dur: int, phase: Phase = Phase.FORWARD) -> int:
        call = self.task(TaskKind.CALL, CPU, "cudaLaunchKernel", 3)
        kernel = self.task(TaskKind.KERNEL, stream, name, dur, phase=phase, gap=1)
        self.edge(call, kernel, EdgeKind.LAUNCH, 5, True)
        self.launches[kernel] = call
        return kernel

    def synchronise(self) -> int:
        self.task(TaskKind.CALL, CPU, "cudaStreamSynchronize", 2)
        back = self.task(TaskKind.RETURN, CPU, "return", 0)
        for lane in (STREAM_A, STREAM_B):
            if lane in self.last:
                self.edge(self.last[lane], back, EdgeKind.SYNC, 2)
        return back

    def event(self, source: int, kernel: int) -> None:
        self.edge(source, kernel, EdgeKind.EVENT, 1)

    def mark(self) -> int:
        self.marks.append(0)
        self.marks[-1] = self.task(TaskKind.MARK, CPU, "step", 0, phase=Phase.NONE)
        return self.marks[-1]

    def graph(self) -> TaskGraph:
        return assemble(
            {**{key: np.array(values) for key, values in self.tasks.items()}, "release": self._release()},
            {key: np.array(values) for key, values in self.edges.items()},
            marks=np.array(self.marks),
            names=NAMES,
            layers=(),
            lanes=LANES,
            info=GraphInfo(platform="cuda", steps=tuple(range(len(self.marks) - 1))),
        )

    def _release(self) -> npt.NDArray[np.int64]:
        release = np.full(len(self.tasks["kind"]), np.iinfo(np.int64).min // 4)
        release[0] = 0
        return release


@st.composite
def recordings(draw: st.DrawFn) -> TaskGraph:
    """A random recording of one to three steps with two streams, events and synchronisation."""
    recording = Recording()
    recording.mark()
    for _ in range(draw(st.integers(1, 3))):
        kernels: list[int] = []
        for what in draw(st.lists(st.sampled_from("wkkkKes"), min_size=1, max_size=12)):
            dur = draw(st.integers(0, 40))
            if what == "w":
                recording.work(dur)
            elif what == "s":
                recording.synchronise()
            else:
                stream = STREAM_B if what == "K" else STREAM_A
                kernels.append(recording.launch(stream, draw(st.sampled_from(("gemm", "relu"))), dur))
                if what == "e" and len(kernels) > 1:
                    recording.event(kernels[-2], kernels[-1])
        if draw(st.booleans()):
            recording.synchronise()
        recording.mark()
    return recording.graph()
