"""`TaskGraph`: what depends on what, as columns of tasks and CSR columns of edges.

Tasks are stored in topological order, so one pass over the rows replays the graph::

    start[v] = max(release[v], max over edges (u, v) of anchor(u) + lag) + delay[v]
    end[v]   = start[v] + dur[v]            anchor(u) = start[u] if from_start else end[u]

Times are int64 nanoseconds. An edge carries two lags: `lag` is what the recording shows and never exceeds
`typical`, the constant of its kind; what a task waited beyond its typical lags is not hidden in an edge but kept
apart in `delay`, so that an edit can drop it and the structural replay (typical lags, no delays) can test the
edges. A blocking call is two tasks: its own cost (CALL) and a zero-length RETURN that waits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import wraps
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from foretrace.arrays import Array, Float64, Int32, Int64, Mask, UInt8
from foretrace.trace.trace import LaneKind

_Answer = TypeVar("_Answer")


NO_RELEASE = np.iinfo(np.int64).min // 4  # "may start any time": far below every time, yet safe to add lags to


class TaskKind(IntEnum):
    """What a task does."""

    CPU = 0  # host work between calls (GPU recordings)
    OPERATOR = 1  # self time of a CPU operator (CPU-only recordings)
    PYTHON = 2  # host work outside operators (CPU-only recordings)
    CALL = 3  # own cost of a runtime call: launch, copy, synchronise, allocate
    RETURN = 4  # zero-length: a blocking call returns here, after what it waits for
    DATA = 5  # the data loader hands over a batch
    KERNEL = 6
    COPY = 7
    MEMSET = 8
    COLLECTIVE = 9  # in a graph of several ranks: the transfer alone, from the last arrival on
    MARK = 10  # zero-length: boundary of a step on its thread
    JOIN = 11  # zero-length: fork or join of a helper thread's burst
    ARRIVAL = 12  # zero-length: a rank enters a collective; COLLECTIVE edges lead from it to the transfer on every rank

    @property
    def on_device(self) -> bool:
        """Whether tasks of this kind run on a device lane of a GPU recording."""
        return self in (TaskKind.KERNEL, TaskKind.COPY, TaskKind.MEMSET, TaskKind.COLLECTIVE)


class EdgeKind(IntEnum):
    """Why one task waits for another."""

    PROGRAM = 0  # previous -> next on a CPU thread
    LAUNCH = 1  # call -> device task
    STREAM = 2  # previous -> next on a stream
    EVENT = 3  # event recorded on one stream, waited for on another
    SYNC = 4  # device task -> RETURN of a call that waits for it
    THREAD = 5  # fork and join between CPU threads
    QUEUE = 6  # a full launch queue: device task -> RETURN of the launch
    DATA = 7  # batch ready -> its consumer
    COLLECTIVE = 8  # arrival of a rank -> end of the collective
    CONTENTION = 9  # a kernel held up by another stream's kernel; removable


class Phase(IntEnum):
    """Part of the training step that a task belongs to."""

    NONE = 0
    DATA = 1
    FORWARD = 2
    BACKWARD = 3
    OPTIMIZER = 4
    RECOMPUTE = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Runs one task at a time: a thread, a stream, a link.

    `ordered` lanes keep the recorded order through their edges. On an unordered lane the schedule engine ignores
    edges of kind PROGRAM and STREAM between tasks of that lane and picks by (ready time, priority, row).

    `slots` is how many tasks an unordered lane runs at a time: gloo keeps two collectives in flight, NCCL one per
    communicator. A collective holds its slot from its ARRIVAL to the end of its transfer.
    """

    rank: int
    kind: LaneKind
    device: int = -1
    stream: int = -1
    label: str = ""
    ordered: bool = True
    slots: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What one edit did."""

    technique: str = ""  # "" for a bare primitive, and until `Technique.predict` signs what its `change` did
    what: str  # one sentence, e.g. "removed 161 kernels and their 161 launches"
    tasks: int  # how many tasks were touched


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumption:
    """A number that a prediction rests on and the recording does not give.

    `low` and `high` bound what is plausible for `value`; `flag` is the parameter that replaces it, "" if none.
    """

    technique: str
    name: str
    value: float
    low: float
    high: float
    unit: str
    why: str
    flag: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeClass:
    """How well one class of inferred edges agrees with the recording."""

    name: str
    kind: EdgeKind
    count: int
    refuted: int
    policy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """How many times its duration a task takes at the low and at the high end of what `source` leaves open.

    `source` is who said what the duration is: a cost model, or an assumption of a technique. What one source says is
    wrong in one direction everywhere; sources are independent of each other. A task may rest on several: `beside` is
    the place of the next one in the table, −1 for none. `recorded` is False where nothing of the duration was
    recorded, so that the noise of recordings has no part in it.
    """

    source: str
    low: float
    high: float
    why: str = ""
    beside: int = -1
    recorded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """How far an assumption made before this graph was saved may move its step, which took `of_s` then, seconds.

    `work_s` is how much less and more work it decides about in a step, hidden or not: no later change lets it move the
    step by more.
    """

    source: str
    faster_s: float
    slower_s: float
    of_s: float
    why: str = ""
    work_s: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class NotOfStep:
    """Work in a one-step recording that belongs to other steps or to the process's start, and was left out."""

    reason: str
    tasks: int
    time_s: float
    share: float  # of the device's time for its work, of the recorded step else


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphInfo:
    """What the builder knows beside the arrays; JSON-able, stored in the graph's file."""

    source: str = ""
    platform: str = "cpu"  # "cuda", "rocm" or "cpu"
    devices: tuple[str, ...] = ()
    world_size: int = 1
    steps: tuple[int, ...] = ()  # number of each recorded step, as the recording calls it
    step_source: str = "whole trace"  # "ProfilerStep", "Optimizer.step", "whole trace"
    step_clock: str = "cpu"  # lanes on which a step is measured: "cpu" marks, or "gpu" where the host runs ahead
    window_ns: tuple[int, int] = (0, 0)  # first and last step boundary in recorded time
    linked_share: float = 1.0  # share of device time whose launch was recorded
    attributed_share: float = 1.0  # share of device time with a layer, a phase or an operator
    attribution: dict[str, float] = field(default_factory=dict)  # how, by share of device time
    unexplained_share: float = 0.0  # delay without a reason, share of the device span (backlog excluded)
    contention_share: float = 0.0  # delay behind another stream's kernel, share of the device span
    overlap_share: float = 0.0  # share of busy device time with two or more streams at work
    typical_ns: dict[str, int] = field(default_factory=dict)  # "launch gpu0:7" -> nanoseconds
    edge_classes: tuple[EdgeClass, ...] = ()
    recording: dict[str, Any] = field(default_factory=dict)  # the recorder's metadata of the first rank
    doubts: tuple[Doubt, ...] = ()  # what the column `doubt` points to; none where all durations were recorded
    carried: tuple[Carried, ...] = ()  # ranges of assumptions that no task of this graph stands for
    not_of_step: tuple[NotOfStep, ...] = ()  # what was left out of the only recorded step
    overhead: dict[str, float] = field(default_factory=dict)  # profiler overhead: measured and removed, see docs
    calibration: dict[str, Any] = field(default_factory=dict)  # times of operators on this machine, see cost/
    collectives: dict[str, Any] = field(default_factory=dict)  # what each one says about itself, see collectives.py
    notes: tuple[str, ...] = ()


TASK_COLUMNS: dict[str, type] = {
    "kind": np.uint8,  # TaskKind
    "phase": np.uint8,  # Phase
    "lane": np.int32,  # -> lanes
    "name": np.int32,  # -> names
    "layer": np.int32,  # -> layers, −1 if unknown
    "step": np.int32,  # index into info.steps, −1 outside
    "dur": np.int64,  # ns
    "delay": np.int64,  # ns waited beyond every typical lag; removable
    "release": np.int64,  # ns; not before this time, NO_RELEASE if free
    "recorded": np.int64,  # recorded start, ns; the prediction for inserted tasks is unrelated to it
    "nbytes": np.int64,  # bytes moved, −1 if unknown
    "flops": np.float64,  # floating-point operations, 0 if unknown
    "priority": np.int32,  # smaller runs first on unordered lanes
    "op": np.int32,  # -> names: the operator that a task belongs to, −1 if unknown
    "shape": np.int32,  # -> shapes: inputs of that operator, −1 if unknown
    "probes": np.int32,  # starts and ends of recorded events inside a host task: where profiling costs time
    "doubt": np.int32,  # -> info.doubts: how far `dur` may be off, −1 where it was recorded
    "gone": np.bool_,  # removed by an edit: takes no time, keeps order (see edit.remove)
}

EDGE_COLUMNS: dict[str, type] = {
    "src": np.int32,  # predecessor; the successor is the row that in_ptr assigns
    "edge_kind": np.uint8,  # EdgeKind
    "lag": np.int64,  # ns, may be negative
    "typical": np.int64,  # ns
    "from_start": np.bool_,  # leaves from the start of src instead of its end
    "inferred": np.bool_,  # not stated by the recording
}


ALL_COLUMNS = frozenset((*TASK_COLUMNS, *EDGE_COLUMNS, "in_ptr", "marks"))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class TaskGraph:
    """Columns of tasks (n rows, topological order) and of edges (m rows, grouped by successor)."""

    kind: UInt8
    phase: UInt8
    lane: Int32
    name: Int32
    layer: Int32
    step: Int32
    dur: Int64
    delay: Int64
    release: Int64
    recorded: Int64
    nbytes: Int64
    flops: Float64
    priority: Int32
    op: Int32
    shape: Int32
    probes: Int32
    doubt: Int32
    gone: Mask
    in_ptr: Int64  # n + 1: edges into task v are in_ptr[v] : in_ptr[v + 1]
    src: Int32
    edge_kind: UInt8
    lag: Int64
    typical: Int64
    from_start: Mask
    inferred: Mask
    marks: Int32  # ordinals -> tasks whose *end* bounds the steps: step i is marks[i] .. marks[i + 1]
    names: tuple[str, ...]
    layers: tuple[str, ...]
    lanes: tuple[Lane, ...]
    info: GraphInfo
    shapes: tuple[str, ...] = ()  # JSON text as in `Trace.shapes`
    changes: tuple[Change, ...] = ()
    assumptions: tuple[Assumption, ...] = ()
    # What `foretrace.graph.sound` has passed, and the very arrays that it looked at: good for no others, and shared by
    # all graphs that are made from each other by replacing columns.
    passed: dict[str, tuple[Any, ...]] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def edges(self) -> int:
        """Number of edges."""
        return len(self.src)

    @property
    def n_steps(self) -> int:
        """Number of steps between the marks."""
        return max(len(self.marks) - 1, 0)

    @property
    def dst(self) -> Int32:
        """Successor of every edge (m rows)."""
        return np.repeat(np.arange(len(self), dtype=np.int32), np.diff(self.in_ptr))

    @property
    def on_device(self) -> Mask:
        """Tasks on GPU lanes (n rows)."""
        return np.equal(self.lane_kinds[self.lane], LaneKind.GPU)

    @property
    def lane_kinds(self) -> UInt8:
        """LaneKind per lane."""
        return np.array([lane.kind for lane in self.lanes], dtype=np.uint8)

    @property
    def rank(self) -> Int32:
        """Rank of every task (n rows)."""
        return np.array([lane.rank for lane in self.lanes], dtype=np.int32)[self.lane]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that the graph holds, ascending."""
        return tuple(sorted({lane.rank for lane in self.lanes if lane.rank >= 0}))

    @property
    def device_name(self) -> str:
        """Name of the device that most of the work ran on, "" if the recording does not say."""
        names = self.info.devices
        used = [lane.device for lane in self.lanes if lane.kind == LaneKind.GPU]
        at = max(set(used), key=used.count) if used else 0
        return names[at] if 0 <= at < len(names) else next(filter(None, names), "")

    def mask(self, rows: Any) -> Mask:
        """Return a mask (n) of these rows."""
        mask = np.zeros(len(self), dtype=np.bool_)
        mask[rows] = True
        return mask

    def with_columns(self, **columns: Array) -> TaskGraph:
        """Return a graph that shares everything but these columns; shapes and types must agree."""
        for key, column in columns.items():
            mine = getattr(self, key)
            if column.shape != mine.shape or column.dtype != mine.dtype:
                raise ValueError(f"column {key}: {column.dtype}{column.shape}, want {mine.dtype}{mine.shape}")
        return replace(self, **columns)  # type: ignore[arg-type]  # keys are array columns

    def with_edges(self, kept: Mask) -> TaskGraph:
        """Return a graph that has only these of its edges (m rows, bool)."""
        if kept.all():
            return self
        before = np.append(0, np.cumsum(kept))
        columns: dict[str, Any] = {key: getattr(self, key)[kept] for key in EDGE_COLUMNS}
        return replace(self, **columns, in_ptr=before[self.in_ptr])

    def noted(self, *changes: Change, assumptions: tuple[Assumption, ...] = ()) -> TaskGraph:
        """Return the same graph with these changes and assumptions appended to its record."""
        return replace(self, changes=self.changes + changes, assumptions=self.assumptions + assumptions)


def per_graph(question: Callable[[TaskGraph], _Answer]) -> Callable[[TaskGraph], _Answer]:
    """Return the same question, whose answer is kept as long as the graph lives; neither may be written to afterwards.

    The answer must not hold the graph, which would never end then. A graph that another was made from is another
    graph: what an edit changes is never answered from before.
    """
    known: WeakKeyDictionary[TaskGraph, _Answer] = WeakKeyDictionary()

    @wraps(question)
    def asked(graph: TaskGraph) -> _Answer:
        if graph not in known:
            known[graph] = question(graph)
        return known[graph]

    return asked
