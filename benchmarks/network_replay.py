"""A network of an operator graph on a GPU: predicted kernels on a task graph, replayed.

Host lane and stream: every kernel is launched by a host call, starts after the kernel before it, and a result that the
host needs makes it wait. What isolated measurements add to every kernel (the host's part of a launch) is hidden as long
as the host is ahead. Power: a board may draw more than its limit for a while; products of a whole network run for long,
so what they take above the limit must have been saved by kernels before them within a window.

What is assumed of the host (eager PyTorch) is in `Host`; nothing here was fitted to a measured network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

import eager
from eager import Kernel, Lowered
from foretrace.cost.devices.learned.fp32 import VECTOR_OPS, BoardFeatures
from foretrace.graph.assemble import assemble
from foretrace.graph.taskgraph import NO_RELEASE, EdgeKind, GraphInfo, Lane, Phase, TaskGraph, TaskKind
from foretrace.simulate.timeline import simulate
from foretrace.trace.trace import LaneKind
from isolated import Isolated
from opgraph import Graph

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Assumptions on the host and on the stream, seconds."""

    forward_s: float = 15e-6  # of Python and dispatch per kernel: half of what isolated measurements show at least
    backward_s: float = 8e-6  # the same on autograd's thread, which is no Python
    view_s: float = 4e-6
    launch_s: float = 5e-6  # from the call to the first instruction on an idle device
    gap_s: float = 2e-6  # between kernels of one stream that wait for each other
    window_s: float = 0.02  # over which power is averaged: 25 runs of 0.7 ms, see `train_predictor.Setting.window_s`


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What a network takes on a board."""

    seconds: float
    forward_s: float
    backward_s: float
    kernels_s: float  # sum of kernels with all power one wants
    capped_s: float  # sum with the power limit
    isolated_s: float  # sum of what measuring each kernel alone would show: what adding kernels up says
    parts: dict[str, float]  # seconds by kind of kernel, as the summary table names them
    graph: TaskGraph


def kernel_times(model: Isolated, kernels: Sequence[Kernel], on: BoardFeatures) -> tuple[Floats, Floats]:
    """(seconds, joules above idle) of kernels, without the power limit."""
    seconds, joules = np.zeros(len(kernels)), np.zeros(len(kernels))
    products = np.array([each.k > 0 for each in kernels], dtype=bool)
    b, m, k, n = (
        np.array([float(getattr(each, name)) for each in kernels], dtype=np.float64) for name in ("b", "m", "k", "n")
    )
    if products.any():
        linear = np.array([float(each.op == "Linear") for each in kernels])[products]
        seconds[products], joules[products] = model.product_s(
            b[products], m[products], k[products], n[products], linear, on
        )
    rest = ~products
    if rest.any():
        op = np.array([VECTOR_OPS.index(each.op) for each in kernels if not each.k], dtype=np.int64)
        nbytes = np.array([each.nbytes for each in kernels if not each.k])
        seconds[rest], joules[rest] = model.vector_s(op, m[rest], n[rest], nbytes, on)
    return seconds, joules


def isolated(model: Isolated, kernels: Sequence[Kernel], seconds: Floats, joules: Floats, on: BoardFeatures) -> Floats:
    """What measuring each kernel alone would show."""
    linear = np.array([float(each.op == "Linear") for each in kernels])
    op = np.array([VECTOR_OPS.index(each.op) if not each.k else 0 for each in kernels], dtype=np.int64)
    products = np.array([each.k > 0 for each in kernels], dtype=bool)
    found = np.empty_like(seconds)
    found[products] = model.isolated_product_s(seconds[products], joules[products], linear[products], on)
    found[~products] = model.isolated_vector_s(seconds[~products], op[~products])
    return found


def under_power(seconds: Floats, joules: Floats, on: BoardFeatures, window_s: float) -> Floats:
    """Seconds of kernels in stream order under the board's limit.

    A kernel that draws less than the limit saves energy, up to the limit times the window; one that draws more spends
    what was saved and then slows down to the limit.
    """
    budget, most = on.budget_w, on.budget_w * window_s
    found = np.empty_like(seconds)
    saved = most
    for i, (time, energy) in enumerate(zip(seconds.tolist(), joules.tolist(), strict=True)):
        needed = energy - time * budget
        if needed > saved:
            found[i] = (energy - saved) / budget
            saved = 0.0
        else:
            found[i] = time
            saved = min(saved - needed, most)
    return found


def replay(graph: Graph, model: Isolated, on: BoardFeatures, host: Host | None = None) -> Replayed:
    """Predict one network on one board."""
    host = host or Host()
    lowered = eager.lower(graph)
    kernels = [kernel for each in lowered for kernel in each.kernels]
    seconds, joules = kernel_times(model, kernels, on)
    first = np.cumsum([0, *(len(each.kernels) for each in lowered)])
    passes = [_pass(graph.order, lowered, kernels, first, backward=back) for back in (False, True)]
    order = np.concatenate([rows for rows, _ in passes])
    capped = under_power(seconds[order], joules[order], on, host.window_s)
    task_graph = _task_graph(graph, lowered, kernels, passes, capped, host)
    timeline = simulate(task_graph)
    ends = timeline.end[task_graph.marks]
    forward, backward = (float(ends[i + 1] - ends[i]) / 1e9 for i in (0, 1))
    parts: dict[str, float] = {}
    for row, time in zip(order.tolist(), capped.tolist(), strict=True):
        parts[kernels[row].part] = parts.get(kernels[row].part, 0.0) + time
    return Replayed(
        seconds=forward + backward, forward_s=forward, backward_s=backward, kernels_s=float(seconds[order].sum()),
        capped_s=float(capped.sum()), isolated_s=float(isolated(model, kernels, seconds, joules, on)[order].sum()),
        parts=parts, graph=task_graph,
    )  # fmt: skip


def _pass(
    order: Sequence[int], lowered: Sequence[Lowered], kernels: Sequence[Kernel], first: Ints, *, backward: bool
) -> tuple[Ints, Ints]:
    """(rows of `kernels` in the order of this pass, views before each of them)."""
    rows: list[int] = []
    views: list[int] = []
    waiting = 0
    for node in reversed(order) if backward else order:
        waiting += 0 if backward else lowered[node].views
        for row in range(first[node], first[node + 1]):
            if kernels[row].backward == backward:
                rows.append(row)
                views.append(waiting)
                waiting = 0
    return np.array(rows, dtype=np.int64), np.array(views, dtype=np.int64)


def _task_graph(
    graph: Graph,
    lowered: Sequence[Lowered],
    kernels: Sequence[Kernel],
    passes: Sequence[tuple[Ints, Ints]],
    seconds: Floats,
    host: Host,
) -> TaskGraph:
    """Two steps, forward and backward, each from its begin to the end of its last kernel."""
    names = [*sorted({each.op for each in kernels}), "launch", "returns", "step"]
    name_of = {name: i for i, name in enumerate(names)}
    tasks: dict[str, list[float]] = {key: [] for key in ("kind", "lane", "name", "dur", "phase", "step", "recorded")}
    edges: list[tuple[int, int, int, float]] = []

    def task(kind: TaskKind, lane: int, name: str, dur_s: float, phase: Phase, step: int) -> int:
        row = len(tasks["kind"])
        values = (kind, lane, name_of[name], round(dur_s * 1e9), phase, step, row)
        for key, value in zip(tasks, values, strict=True):
            tasks[key].append(value)
        return row

    last_host = task(TaskKind.MARK, 0, "step", 0, Phase.NONE, -1)
    marks, last_kernel, at = [last_host], -1, 0
    for step, (rows, views) in enumerate(passes):
        phase = Phase.BACKWARD if step else Phase.FORWARD
        per_call = host.backward_s if step else host.forward_s
        for row, before in zip(rows.tolist(), views.tolist(), strict=True):
            kernel = kernels[row]
            call = task(TaskKind.CALL, 0, "launch", per_call + before * host.view_s, phase, step)
            edges.append((last_host, call, EdgeKind.PROGRAM, 0.0))
            run = task(TaskKind.KERNEL, 1, kernel.op, seconds[at], phase, step)
            at += 1
            edges.append((call, run, EdgeKind.LAUNCH, host.launch_s))
            if last_kernel >= 0:
                edges.append((last_kernel, run, EdgeKind.STREAM, host.gap_s))
            last_host, last_kernel = call, run
            if kernel.waits:
                last_host = task(TaskKind.RETURN, 0, "returns", 0, phase, step)
                edges.append((call, last_host, EdgeKind.PROGRAM, 0.0))
                edges.append((run, last_host, EdgeKind.SYNC, host.launch_s))
        mark = task(TaskKind.MARK, 0, "step", 0, Phase.NONE, step)
        edges.append((last_host, mark, EdgeKind.PROGRAM, 0.0))
        if last_kernel >= 0:
            edges.append((last_kernel, mark, EdgeKind.SYNC, 0.0))
        marks.append(mark)
        last_host = mark
    columns = {key: np.array(values) for key, values in tasks.items()}
    columns["release"] = np.full(len(columns["kind"]), NO_RELEASE)
    columns["release"][marks[0]] = 0
    lag = np.round(np.array([each[3] for each in edges]) * 1e9)
    return assemble(
        columns,
        {
            "src": np.array([each[0] for each in edges]), "dst": np.array([each[1] for each in edges]),
            "edge_kind": np.array([int(each[2]) for each in edges]), "lag": lag,
        },
        marks=np.array(marks),
        names=tuple(names),
        layers=(),
        lanes=(
            Lane(rank=0, kind=LaneKind.CPU, label="eager PyTorch (assumed)"),
            Lane(rank=0, kind=LaneKind.GPU, device=0, stream=7, label="stream"),
        ),
        info=GraphInfo(source=graph.name, platform="cuda", steps=(0, 1), step_source="forward and backward pass"),
    )  # fmt: skip
