"""Copies of activations between a device and its host, each direction on a lane of its own, beside the computation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from foretrace.graph.insert import EdgeList, extend, insert
from foretrace.graph.taskgraph import Change, EdgeKind, Lane, Phase, TaskGraph, TaskKind
from foretrace.techniques.memory.keeping import hook_tasks
from foretrace.techniques.memory.saved import Saved, Savings
from foretrace.trace.trace import LaneKind

_OUT, _BACK = "Memcpy DtoH (activations)", "Memcpy HtoD (activations)"


def insert_copies(
    graph: TaskGraph,
    savings: Savings,
    times: dict[Saved, tuple[float, float]],
    hook_s: float,
    prefetch: int,
    technique: str,
) -> TaskGraph:
    """The graph with a copy out after every saving kernel and one back before the kernel that asks.

    A copy back is ordered when the backward pass has come within `prefetch` tensors of its use, so that only so many
    lie on the device again; on both lanes copies keep their order. Hooks cost host time at the end of the forward pass.
    """
    pairs = [(each, *seconds) for each, seconds in times.items() if each.use >= 0]
    device = graph.lanes[int(graph.lane[pairs[0][0].row])]
    lanes = tuple(
        Lane(rank=device.rank, kind=LaneKind.GPU, device=device.device, stream=stream, label=label)
        for stream, label in ((-2, "activations to the host"), (-3, "activations from the host"))
    )
    n, first = len(graph), len(graph.lanes)
    tasks: dict[str, list[Any]] = {key: [] for key in ("kind", "lane", "name", "dur", "recorded", "nbytes", "flops")}
    for key in ("phase", "layer", "step", "op", "priority"):
        tasks[key] = []
    edges = EdgeList()

    def task(each: Saved, like: int, lane: int, seconds: float, phase: Phase) -> int:
        tasks["kind"].append(int(TaskKind.COPY))
        tasks["lane"].append(first + lane)
        tasks["name"].append(len(graph.names) + lane)
        tasks["dur"].append(round(1e9 * seconds))
        tasks["recorded"].append(int(graph.recorded[like]))
        tasks["nbytes"].append(each.nbytes)
        tasks["flops"].append(0.0)
        tasks["phase"].append(int(phase))
        for key in ("layer", "step", "op", "priority"):
            tasks[key].append(int(getattr(graph, key)[like]))
        return n + len(tasks["kind"]) - 1

    outs: dict[Saved, int] = {}
    for each, there, _ in pairs:  # in the order of saving
        row = task(each, each.row, 0, there, Phase.FORWARD)
        edges.add(each.row, row, EdgeKind.EVENT)
        if outs:
            edges.add(row - 1, row, EdgeKind.STREAM)
        outs[each] = row
    back = sorted(pairs, key=lambda pair: (pair[0].use, -pair[0].row))
    for i, (each, _, seconds) in enumerate(back):
        row = task(each, each.use, 1, seconds, Phase.BACKWARD)
        edges.add(outs[each], row, EdgeKind.EVENT)
        edges.add(row, each.use, EdgeKind.EVENT)
        if i:
            edges.add(row - 1, row, EdgeKind.STREAM)
        if i >= prefetch and back[i - prefetch][0].use < each.use:
            edges.add(back[i - prefetch][0].use, row, EdgeKind.EVENT)
    made, rows = extend(
        graph,
        {key: np.array(values) for key, values in tasks.items()},
        edges.columns(),
        names=(_OUT, _BACK),
        lanes=lanes,
        change=Change(technique=technique, what=f"inserted {len(tasks['kind'])} copies", tasks=len(tasks["kind"])),
    )
    hooks = [replace(each, after=int(rows[each.after])) for each in hook_tasks(savings, hook_s)]
    return insert(made, hooks, technique=technique)
