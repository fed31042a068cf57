"""Hypothesis strategies: random valid task graphs with everything that the data model allows."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from foretrace.graph.assemble import assemble
from foretrace.graph.taskgraph import NO_RELEASE, EdgeKind, GraphInfo, Lane, Phase, TaskGraph, TaskKind
from foretrace.trace.trace import LaneKind

HOST_KINDS = (TaskKind.CPU, TaskKind.CALL, TaskKind.RETURN, TaskKind.DATA, TaskKind.OPERATOR, TaskKind.PYTHON)
DEVICE_KINDS = (TaskKind.KERNEL, TaskKind.COPY, TaskKind.MEMSET, TaskKind.COLLECTIVE)
ZERO_LENGTH = (TaskKind.RETURN, TaskKind.MARK, TaskKind.JOIN)
NAMES = ("step", "gemm", "relu", "cudaLaunchKernel", "cudaStreamSynchronize", "aten::mm")
LAYERS = ("layer1", "layer2")


@st.composite
def task_graphs(
    draw: st.DrawFn,
    *,
    max_tasks: int = 16,
    lane_order: bool | None = True,
    gone: bool = True,
    gpu: bool = True,
    ranks: int = 1,
    loose: bool = True,
) -> TaskGraph:
    """A graph of one to four lanes and up to `max_tasks` tasks beside the marks.

    Lane 0 is an ordered thread that carries two to four marks, its first and last task among them. The others are
    streams (`gpu`) or threads, on `ranks` ranks in turn, ordered, unordered or (`lane_order` None) some of each. Times
    are small so that ties happen. `loose` lets tasks lack the edge to their predecessor on the lane, and roots lack a
    release time.
    """
    n_lanes = draw(st.integers(1, 4))
    orders = draw(st.lists(st.booleans(), min_size=n_lanes, max_size=n_lanes)) if lane_order is None else []
    lanes = tuple(
        Lane(
            rank=i % ranks,
            kind=LaneKind.GPU if gpu and i > 0 else LaneKind.CPU,
            device=0 if gpu and i > 0 else -1,
            stream=i,
            label=f"lane {i}",
            ordered=i == 0 or (orders[i] if lane_order is None else lane_order),
        )
        for i in range(n_lanes)
    )
    rows = draw(st.lists(_task(n_lanes, gpu), min_size=1, max_size=max_tasks))
    n_marks = draw(st.integers(2, 4))
    inner = draw(st.lists(st.integers(0, len(rows)), min_size=n_marks - 2, max_size=n_marks - 2))
    for place in sorted([0, *inner, len(rows)], reverse=True):
        rows.insert(place, (0, TaskKind.MARK, 0, 0, 0, -1, 0, 0))
    n = len(rows)
    lane, kind, name, layer, phase, dur, delay, priority = (np.array(column) for column in zip(*rows, strict=True))
    marks = np.flatnonzero(kind == TaskKind.MARK)
    zero = np.isin(kind, ZERO_LENGTH)
    removed = np.array(draw(st.lists(st.integers(0, 4), min_size=n, max_size=n))) == 0
    release = np.full(n, NO_RELEASE)
    edges: dict[tuple[int, int, int], tuple[int, bool]] = {}
    last: dict[int, int] = {}
    for v in range(n):
        before = last.get(int(lane[v]))
        if before is None:
            if lane[v] == 0 or not loose or draw(st.booleans()):
                release[v] = draw(st.integers(-5, 30))
        elif lane[v] == 0 or not loose or draw(st.integers(0, 5)):
            program = lanes[lane[v]].kind == LaneKind.CPU
            edges[before, v, EdgeKind.PROGRAM if program else EdgeKind.STREAM] = draw(_lag(not program)), False
        last[int(lane[v])] = v
    if n > 1:
        for a, b, edge_kind, lag, from_start in draw(st.lists(_edge(n), max_size=2 * n)):
            if a != b:
                edges.setdefault((min(a, b), max(a, b), edge_kind), (lag, from_start))
    lags = np.array([value for value, _ in edges.values()], dtype=np.int64)
    return assemble(
        {
            "kind": kind, "phase": phase, "lane": lane, "name": name, "layer": layer, "delay": delay,
            "dur": np.where(zero, 0, dur), "priority": priority, "release": release, "recorded": np.arange(n),
            "step": np.searchsorted(marks, np.arange(n), side="right") - 1, "gone": removed & gone,
        },
        {
            "src": np.array([key[0] for key in edges], dtype=np.int64),
            "dst": np.array([key[1] for key in edges], dtype=np.int64),
            "edge_kind": np.array([key[2] for key in edges], dtype=np.int64),
            "lag": lags,
            "typical": lags + np.arange(len(lags)) % 4,
            "from_start": np.array([flag for _, flag in edges.values()], dtype=np.bool_),
        },
        marks=marks, names=NAMES, layers=LAYERS, lanes=lanes,
        info=GraphInfo(platform="cuda" if gpu else "cpu", steps=tuple(range(len(marks) - 1))),
    )  # fmt: skip


@st.composite
def _task(draw: st.DrawFn, n_lanes: int, gpu: bool) -> tuple[int, int, int, int, int, int, int, int]:
    lane = draw(st.integers(0, n_lanes - 1))
    kind = draw(st.sampled_from(DEVICE_KINDS if gpu and lane > 0 else HOST_KINDS))
    return (
        lane,
        kind,
        draw(st.integers(0, len(NAMES) - 1)),
        draw(st.integers(-1, len(LAYERS) - 1)),
        draw(st.sampled_from(Phase)),
        draw(st.integers(0, 20)),
        draw(st.sampled_from((0, 0, 0, 1, 7))),
        draw(st.integers(-2, 2)),
    )


def _lag(may_be_negative: bool) -> st.SearchStrategy[int]:
    return st.integers(-4 if may_be_negative else 0, 4)


def _edge(n: int) -> st.SearchStrategy[tuple[int, int, int, int, bool]]:
    row = st.integers(0, n - 1)
    return st.tuples(row, row, st.sampled_from(EdgeKind), st.integers(-12, 12), st.booleans())
