"""The collectives of one rank: what each one says about itself, or what the calls around it say.

From the most to the least telling: the kernel's own arguments (newer Kineto), the `record_param_comms` operator and the
`nccl:...` annotation around its launch, the operator, the kernel's name. A host back end's annotation is itself the
collective.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from foretrace.arrays import Array, Int64
from foretrace.graph.taskgraph import TaskGraph, TaskKind
from foretrace.graph.work import element_bytes, plain_type
from foretrace.trace.trace import Category, Collective, LaneKind, Trace

BEFORE, AFTER = -2, -1  # numbers of the time before and after the recorded steps

# Several names of one collective: operators, annotations, NCCL kernels, Kineto's arguments.
_KINDS = tuple(
    (re.compile(pattern), kind)
    for pattern, kind in (
        (r"reducescatter", "reduce_scatter"),
        (r"allreduce", "all_reduce"),
        (r"allgather", "all_gather"),
        (r"alltoall", "all_to_all"),
        (r"broadcast", "broadcast"),
        (r"barrier", "barrier"),
        (r"^reduce", "reduce"),
        (r"gather", "gather"),
        (r"scatter", "scatter"),
        (r"sendrecv", "send_recv"),
        (r"^i?send", "send"),
        (r"^i?recv", "recv"),
        (r"coalesced", "coalesced"),
    )
)
_PREFIX = re.compile(r"^(?:c10d::|nccl:|gloo:|mpi:|ucc:|nccl(?:Dev)?Kernel_|rccl\w*?_|_)+", re.I)
_PEERS = re.compile(r"(\d+)\s*(->|<-)\s*(\d+)")
_UNEVEN = ("all_to_all", "send_recv", "gather", "scatter", "coalesced")  # sizes may differ between the ranks


def kind_of(name: str) -> str:
    """Return the collective that a name means, in PyTorch's words: "all_reduce", "all_to_all", "send_recv" ..."""
    bare = _PREFIX.sub("", name.strip())
    flat = bare.lower().replace("_", "").replace("-", "")
    return next((kind for pattern, kind in _KINDS if pattern.search(flat)), bare.split("(")[0].strip("_ ") or "?")


@dataclass(frozen=True, slots=True, kw_only=True)
class What:
    """What is communicated and between whom; -1, "" and () where the recording does not tell.

    `group` is the process group as the recording names it; `channel` the stream or link, which stands for the group
    where that is unknown. `peers` are sender and receiver of a point-to-point transfer, as global ranks.
    """

    kind: str
    channel: str
    dtype: str = ""
    in_elements: int = -1
    out_elements: int = -1
    group: str = ""
    members: tuple[int, ...] = ()
    group_size: int = -1
    peers: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[Any, ...]:
        """What two calls must share to be candidates: the sender and receiver, the process group, or the channel."""
        if self.peers:
            return ("peers", self.group, *self.peers)
        if self.group or self.members:
            return ("group", self.group, self.members or self.group_size)
        return ("channel", self.channel)

    @property
    def signature(self) -> tuple[Any, ...]:
        """What the members of one collective have in common."""
        if self.peers:
            return ("transfer",)
        kind = "send_recv" if self.kind in ("send", "recv") else self.kind
        return (kind, self.dtype) if kind in _UNEVEN else (kind, self.dtype, self.in_elements, self.out_elements)

    @property
    def nbytes(self) -> int:
        """Bytes of the larger of both messages (input and result), −1 if unknown."""
        elements, each = max(self.in_elements, self.out_elements), element_bytes(self.dtype)
        return elements * each if elements >= 0 and each else -1

    @property
    def group_name(self) -> str:
        """As in "process group 0" or "stream 84"."""
        if self.peers:
            return f"the transfers from rank {self.peers[0]} to rank {self.peers[1]}"
        return f"process group {self.group}" if self.group else self.channel

    @property
    def text(self) -> str:
        """As in "all_reduce of 131584 float"."""
        elements = max(self.in_elements, self.out_elements)
        return f"{self.kind} of {elements} {self.dtype}".rstrip() if elements >= 0 else self.kind

    def expects_partner(self, ranks: tuple[int, ...]) -> bool:
        """Return whether the call says itself that another rank of the set takes part."""
        return sum(rank in ranks for rank in self.peers or self.members) > 1


@dataclass(frozen=True, kw_only=True, eq=False)
class CollectiveCalls:
    """The collectives of one rank (c each) in order of their start; times in ns on the rank's own clock."""

    rank: int
    world_size: int  # 0 if the recording does not tell
    host: str  # what the recording says of its clock: ranks with equal text share it; "" if it does not tell
    steps: tuple[int, ...]  # numbers of the recorded steps, () where nothing numbers them
    row: Int64  # in the rank's graph
    start: Int64
    end: Int64
    step_number: Int64  # BEFORE or AFTER outside of the steps
    sequence: Int64  # number within its group, −1 if not recorded
    what: tuple[What, ...]

    def __len__(self) -> int:
        return len(self.row)

    @cached_property
    def groups(self) -> dict[tuple[Any, ...], Int64]:
        """Calls (indices, by start) of every key of `What`."""
        found: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for i, what in enumerate(self.what):
            found[what.key].append(i)
        return {key: np.array(rows, dtype=np.int64) for key, rows in found.items()}

    @cached_property
    def described(self) -> tuple[What, ...]:
        """The different descriptions."""
        return tuple(dict.fromkeys(self.what))


def with_collectives(graph: TaskGraph, trace: Trace) -> TaskGraph:
    """Return the graph with what the recording that it was built of says of its collectives, in `info.collectives`.

    That is JSON: `what`, the different descriptions; `call`, the index among them of every collective by start;
    `sequence`, its number in its group; `world_size`, 0 where the recording does not tell.
    """
    rows = _rows(graph)
    info = trace.ranks[0] if trace.ranks else None
    what, sequence = _by_trace(graph, rows, trace)
    numbers: dict[What, int] = {}
    call = [numbers.setdefault(each, len(numbers)) for each in what]
    said = {
        "world_size": info.world_size if info is not None and info.backend else 0,
        "what": [msgspec.to_builtins(each) for each in numbers],
        "call": call,
        "sequence": sequence.tolist(),
    }
    return replace(graph, info=replace(graph.info, collectives=said))


def collective_calls(graph: TaskGraph) -> CollectiveCalls:
    """Return the collectives of a rank's recorded graph.

    Where the graph does not hold what the recording said of them (`with_collectives`), only names, channels, times
    and steps are known.
    """
    rows = _rows(graph)
    said = graph.info.collectives
    if len(said.get("call", ())) == len(rows) and said:
        table = [msgspec.convert(each, What) for each in said["what"]]
        what = [table[i] for i in said["call"]]
        sequence = np.array(said["sequence"], dtype=np.int64)
        world = int(said["world_size"])
    else:
        what, sequence = [_by_graph(graph, row) for row in rows.tolist()], np.full(len(rows), -1, dtype=np.int64)
        world = graph.info.world_size if graph.info.world_size > 1 else 0
    return CollectiveCalls(
        rank=graph.lanes[0].rank if graph.lanes else 0,
        world_size=world,
        host=_host(graph),
        steps=graph.info.steps if graph.info.step_source == "ProfilerStep" else (),
        row=rows,
        start=graph.recorded[rows].astype(np.int64),
        end=(graph.recorded[rows] + graph.dur[rows]).astype(np.int64),
        step_number=_step_numbers(graph, rows),
        sequence=sequence,
        what=tuple(what),
    )


def _rows(graph: TaskGraph) -> Int64:
    """Return collectives by start."""
    rows = np.flatnonzero((graph.kind == TaskKind.COLLECTIVE) & ~graph.gone)
    return rows[np.argsort(graph.recorded[rows], kind="stable")]


def _host(graph: TaskGraph) -> str:
    machine = graph.info.recording.get("machine")
    return str(machine.get("clock") or "") if isinstance(machine, dict) else ""


def _step_numbers(graph: TaskGraph, rows: Int64) -> Int64:
    step = graph.step[rows]
    outside = np.where(graph.recorded[rows] < graph.info.window_ns[0], BEFORE, AFTER)
    if not graph.info.steps:
        return np.zeros(len(rows), dtype=np.int64)
    numbers = np.array(graph.info.steps, dtype=np.int64)
    return np.where((step >= 0) & (step < len(numbers)), numbers[np.clip(step, 0, len(numbers) - 1)], outside)


def _channel(graph: TaskGraph, row: int) -> str:
    lane = graph.lanes[graph.lane[row]]
    return f"stream {lane.stream}" if lane.kind == LaneKind.GPU else lane.label or "link"


def _by_graph(graph: TaskGraph, row: int) -> What:
    name = graph.names[graph.name[row]]
    operator = graph.names[graph.op[row]] if graph.op[row] >= 0 else ""
    kind = kind_of(operator if operator.startswith("c10d::") else name)
    return What(kind=kind, channel=_channel(graph, row))


def _by_trace(graph: TaskGraph, rows: Int64, trace: Trace) -> tuple[list[What], Int64]:
    events = _events(graph, rows, trace)
    comms, notes = _around(events, trace)
    known: dict[tuple[Any, ...], What] = {}
    sequence = np.full(len(rows), -1, dtype=np.int64)
    what = []
    lanes, names, operators = graph.lane[rows].tolist(), graph.name[rows].tolist(), graph.op[rows].tolist()
    found = zip(rows.tolist(), events.tolist(), comms.tolist(), notes.tolist(), strict=True)
    for i, (row, event, comm, note) in enumerate(found):
        own = int(trace.collective[event]) if event >= 0 else -1
        call = int(trace.collective[comm]) if comm >= 0 else -1
        text = int(trace.name[note]) if note >= 0 else -1
        shape = int(trace.shape[note]) if note >= 0 else -1
        key = (lanes[i], names[i], operators[i], own, call, text, shape)
        if key not in known:
            known[key] = _described(graph, row, trace, own, call, note)
        what.append(known[key])
        for index in (own, call):
            if index >= 0 and sequence[i] < 0:
                sequence[i] = trace.collectives[index].sequence
    return what, sequence


def _described(graph: TaskGraph, row: int, trace: Trace, own: int, call: int, note: int) -> What:
    """Combine what kernel (`own`), operator (`call`) and annotation (`note`, a row) say of one call."""
    what = _by_graph(graph, row)
    if note >= 0:
        name = trace.names[trace.name[note]]
        what = replace(what, kind=kind_of(name), peers=_peers_of_name(name))
        shape = trace.shapes_of(note)
        if shape is not None and shape.types:
            elements = _elements(shape.dims)
            what = replace(what, dtype=plain_type(shape.types[0]), in_elements=elements, out_elements=elements)
    for index in (call, own):
        if index >= 0:
            what = _told(what, trace.collectives[index], graph.lanes[graph.lane[row]].rank)
    return what


def _told(what: What, said: Collective, rank: int) -> What:
    """Return `what` with everything that a communication event says about itself."""
    # A kernel that tells only its name says less than the annotation around it.
    telling = said.in_elements >= 0 or bool(said.group) or said.group_size > 0
    if not telling:
        return what
    kind = kind_of(said.name) if said.name else what.kind
    peers = what.peers
    if said.source >= 0 or said.destination >= 0:  # each side names the other one
        peers = (said.source if said.source >= 0 else rank, said.destination if said.destination >= 0 else rank)
    elif peers and said.group_ranks and max(peers) < len(said.group_ranks):
        peers = tuple(said.group_ranks[peer] for peer in peers)  # the annotation counts within the group
    return replace(
        what,
        kind=kind,
        dtype=plain_type(said.dtype) or what.dtype,
        in_elements=said.in_elements if said.in_elements >= 0 else what.in_elements,
        out_elements=said.out_elements if said.out_elements >= 0 else what.out_elements,
        group=said.group or what.group,
        members=tuple(sorted(said.group_ranks)) or what.members,
        group_size=said.group_size if said.group_size > 0 else what.group_size,
        peers=peers,
    )


def _peers_of_name(name: str) -> tuple[int, ...]:
    """Return sender and receiver in "nccl:send 0->1" or "nccl:recv 1<-0"."""
    match = _PEERS.search(name)
    if match is None:
        return ()
    a, b = int(match[1]), int(match[3])
    return (a, b) if match[2] == "->" else (b, a)


def _elements(dims: Any) -> int:
    """Return elements of the first tensor; of all tensors of a list."""
    first = dims[0] if dims else []
    if not isinstance(first, list):
        return -1
    if first and isinstance(first[0], list):
        return int(sum(np.prod(each, dtype=np.int64) for each in first))
    return int(np.prod(first, dtype=np.int64)) if first else -1


def _events(graph: TaskGraph, rows: Int64, trace: Trace) -> Int64:
    """Return the row of the trace of every collective task, −1 if it is not there."""
    kinds = trace.lane_kind()
    used = np.unique(trace.lane).tolist()
    key_of = {(trace.lanes[i].kind, trace.lanes[i].device, trace.lanes[i].stream): i for i in used}
    candidates = np.flatnonzero(np.isin(trace.category, (Category.KERNEL, Category.ANNOTATION)))
    device = kinds[trace.lane[candidates]] == LaneKind.GPU
    # Kernels by (stream, start); a host back end's annotations run on pool threads that share one link: by name.
    found = np.full(len(rows), -1, dtype=np.int64)
    lanes = [graph.lanes[lane] for lane in graph.lane[rows].tolist()]
    on_stream = np.array([lane.kind == LaneKind.GPU for lane in lanes], dtype=np.bool_)
    places = np.array([key_of.get((lane.kind, lane.device, lane.stream), -1) for lane in lanes], dtype=np.int64)
    start = graph.recorded[rows]
    for mine, ids, wanted in (
        (on_stream, trace.lane, places),
        (~on_stream, trace.name, graph.name[rows].astype(np.int64)),
    ):
        pool = candidates[device] if ids is trace.lane else candidates[~device]
        if not mine.any() or not len(pool):
            continue
        order = pool[np.lexsort((trace.start[pool], ids[pool]))]
        keys = _pairs(ids[order].astype(np.int64), trace.start[order])
        asked = _pairs(wanted[mine], start[mine])
        at = np.minimum(np.searchsorted(keys, asked), len(keys) - 1)
        found[mine] = np.where(keys[at] == asked, order[at], -1)
    return found


def _pairs(first: Int64, second: Int64) -> Array:
    """Return two columns as one that sorts by the first, then the second."""
    table = np.empty(len(first), dtype=[("first", np.int64), ("second", np.int64)])
    table["first"], table["second"] = first, second
    return table


def _around(events: Int64, trace: Trace) -> tuple[Int64, Int64]:
    """Return for every event the communication operator and the back end's annotation around its launch (rows, −1)."""
    nothing = np.full(len(events), -1, dtype=np.int64)
    kernel = (events >= 0) & (trace.category[events] == Category.KERNEL) if len(trace) else nothing >= 0
    if not kernel.any():
        return nothing, events  # a host back end's annotation describes itself
    noted = trace.named(lambda name: name.startswith(("nccl:", "rccl:", "gloo:", "mpi:", "ucc:")))
    notes = np.flatnonzero(noted & (trace.category == Category.ANNOTATION))
    comms = np.flatnonzero((trace.collective >= 0) & (trace.category == Category.OPERATOR))
    launches = np.flatnonzero((trace.category == Category.RUNTIME) & (trace.correlation >= 0))
    launches = launches[np.argsort(trace.correlation[launches], kind="stable")]
    launch, asked = nothing.copy(), trace.correlation[events]
    if len(launches):
        numbers = trace.correlation[launches]
        at = np.minimum(np.searchsorted(numbers, asked), len(numbers) - 1)
        launch = np.where(kernel & (numbers[at] == asked), launches[at], -1)
    return _enclosing(trace, comms, launch), np.where(kernel, _enclosing(trace, notes, launch), events)


def _enclosing(trace: Trace, rows: Int64, launch: Int64) -> Int64:
    """Return per launch the last of `rows` that began before it on its thread and ended after it, −1 if none."""
    found = np.full(len(launch), -1, dtype=np.int64)
    if not len(rows):
        return found
    begin = trace.start[launch]
    at = np.searchsorted(trace.start[rows], begin, side="right")
    for back in range(1, 9):
        row = rows[np.maximum(at - back, 0)]
        around = (trace.lane[row] == trace.lane[launch]) & (trace.start[row] + trace.dur[row] >= begin)
        found = np.where((found < 0) & (launch >= 0) & (at >= back) & around, row, found)
    return found
