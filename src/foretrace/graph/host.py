"""The host side of a recording: nested spans of every CPU thread and what each inherits from those around it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from foretrace.arrays import Int32, Int64, Mask, UInt8
from foretrace.graph.calls import RuntimeCall, call_classes
from foretrace.graph.kernels import farthest, nearest, nest
from foretrace.graph.taskgraph import Phase
from foretrace.trace.trace import Category, LaneKind, Trace

# Operators that only make views or allocate: on a CPU they are part of the operator that calls them.
BOOKKEEPING = frozenset((
    "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::as_strided", "aten::view", "aten::_unsafe_view",
    "aten::t", "aten::transpose", "aten::permute", "aten::expand", "aten::resize_", "aten::detach",
    "aten::resolve_conj", "aten::resolve_neg", "aten::_reshape_alias", "aten::unsqueeze", "aten::squeeze",
    "aten::select", "aten::slice", "aten::narrow", "aten::alias", "aten::lift_fresh", "detach",
))  # fmt: skip

_BACKWARD = re.compile(r"autograd::engine|Backward\d*$|^## backward|backward##|Backward>")
_OPTIMIZER = re.compile(r"^Optimizer\.(step|zero_grad)#")
_DATA = re.compile(r"^(enumerate\(DataLoader\)#|rows\.get )")  # a loader, and rows of a batch wherever they are kept
_COMMUNICATION = re.compile(r"^(record_param_comms|c10d::|nccl:|rccl:)")


@dataclass(frozen=True, eq=False)
class HostSpans:
    """Host spans ordered by (lane, start, longest first), with what each inherits from the spans around it.

    Every array has one entry per span; `event` is the row in the trace. Index columns hold rows of this table, −1
    where there is none.
    """

    trace: Trace
    event: Int64
    lane: Int32
    start: Int64
    end: Int64
    name: Int32
    category: UInt8
    parent: Int64
    call: UInt8  # Call, CHEAP for everything that is no runtime call

    def named(self, predicate: Callable[[str], object]) -> Mask:
        """Return spans whose name satisfies the predicate, asked once per distinct name."""
        names = self.trace.names
        table = np.zeros(len(names), dtype=np.bool_)
        for index in np.unique(self.name):
            table[index] = bool(predicate(names[index]))
        return table[self.name]

    def rows(self, mask: Mask) -> Int64:
        """Return own row where the mask holds, −1 elsewhere: the seed of `nearest` and `farthest`."""
        return np.where(mask, np.arange(len(self.event)), -1)

    def lane_slice(self, lane: int) -> slice:
        """Return rows of one lane."""
        low, high = np.searchsorted(self.lane, [lane, lane + 1])
        return slice(int(low), int(high))

    @cached_property
    def is_operator(self) -> Mask:
        return np.equal(self.category, Category.OPERATOR)

    @cached_property
    def is_annotation(self) -> Mask:
        return np.equal(self.category, Category.ANNOTATION)

    @cached_property
    def is_data(self) -> Mask:
        return self.is_annotation & self.named(_DATA.search)

    @cached_property
    def is_optimizer(self) -> Mask:
        return self.is_annotation & self.named(_OPTIMIZER.search)

    @cached_property
    def is_autograd(self) -> Mask:
        return self.is_operator & self.named(_BACKWARD.search)

    @cached_property
    def is_communication(self) -> Mask:
        return (self.is_operator | self.is_annotation) & self.named(_COMMUNICATION.search)

    @cached_property
    def operator(self) -> Int64:
        """Innermost operator around each span, itself included."""
        return nearest(self.parent, self.rows(self.is_operator))

    @cached_property
    def top_operator(self) -> Int64:
        """Outermost operator around each span, itself included."""
        return farthest(self.parent, self.rows(self.is_operator))

    @cached_property
    def named_operator(self) -> Int64:
        """Innermost operator that is not bookkeeping; a bookkeeping operator at the top stands for itself."""
        bookkeeping = self.is_operator & self.named(BOOKKEEPING.__contains__)
        inner = nearest(self.parent, self.rows(self.is_operator & ~bookkeeping))
        return np.where(inner >= 0, inner, self.top_operator)

    @cached_property
    def data(self) -> Int64:
        """Innermost loader annotation around each span, itself included."""
        return nearest(self.parent, self.rows(self.is_data))

    @cached_property
    def annotation(self) -> Int64:
        """Innermost annotation that is neither a step nor the loader."""
        step = self.named(lambda name: name.startswith("ProfilerStep"))
        return nearest(self.parent, self.rows(self.is_annotation & ~step & ~self.is_data))

    @cached_property
    def communication(self) -> Int64:
        """Outermost communication operator (`record_param_comms`, `c10d::*`) around each span."""
        return farthest(self.parent, self.rows(self.is_communication))

    @cached_property
    def top_communication(self) -> Mask:
        """Communication operators that no other communication operator encloses."""
        return np.equal(self.communication, np.arange(len(self.event)))

    @cached_property
    def autograd(self) -> Int64:
        """Innermost autograd node around each span."""
        return nearest(self.parent, self.rows(self.is_autograd))

    @cached_property
    def sequence(self) -> Int64:
        """Autograd sequence number of the nearest operator that has one, −1 if none."""
        return nearest(self.parent, np.where(self.is_operator, self.trace.sequence[self.event], -1))

    @cached_property
    def phase(self) -> UInt8:
        """Phase of the training step; host spans outside every known range count as forward, or as backward on a
        thread of autograd's own.
        """
        inherited = nearest(
            self.parent,
            np.select(
                [self.is_data, self.is_optimizer, self.is_autograd],
                [int(Phase.DATA), int(Phase.OPTIMIZER), int(Phase.BACKWARD)],
                default=-1,
            ).astype(np.int64),
        )
        elsewhere = np.where(np.isin(self.lane, self._backward_lanes), int(Phase.BACKWARD), int(Phase.FORWARD))
        phase = np.where(inherited < 0, elsewhere, inherited)
        # Under an autograd node, an operator with a sequence number of its own that is no autograd node records a
        # graph again: activation checkpointing runs the forward a second time.
        own_sequence = np.where(self.is_operator, self.trace.sequence[self.event], -1)
        node = self.autograd
        recomputed = (
            (node >= 0)
            & self.is_operator
            & ~self.is_autograd
            & (own_sequence >= 0)
            & (own_sequence != np.where(node >= 0, self.trace.sequence[self.event[node]], -1))
        )
        again = nearest(self.parent, self.rows(recomputed)) >= 0
        return np.where(again & (phase == Phase.BACKWARD), int(Phase.RECOMPUTE), phase).astype(np.uint8)

    @cached_property
    def _backward_lanes(self) -> Int32:
        """Lanes of autograd's own threads: on them no operator outside its nodes notes itself for a backward pass.

        What runs there between nodes is theirs: gradients that the engine or older AccumulateGrad adds up, buckets that
        DistributedDataParallel copies back.
        """
        forward = self.is_operator & (self.autograd < 0) & (self.trace.sequence[self.event] >= 0)
        return np.setdiff1d(self.autograd_lanes, self.lane[forward])

    @cached_property
    def autograd_lanes(self) -> Int32:
        """Lanes on which autograd nodes run."""
        return np.unique(self.lane[self.is_autograd])


def host_spans(trace: Trace) -> HostSpans:
    """Nest operators, annotations, modules, Python functions and runtime calls of every CPU thread of one rank."""
    wanted = np.isin(
        trace.category,
        [Category.OPERATOR, Category.ANNOTATION, Category.MODULE, Category.PYTHON, Category.RUNTIME],
    )
    wanted &= trace.lane_kind()[trace.lane] == LaneKind.CPU
    rows = np.flatnonzero(wanted)
    # At equal times the wider notion encloses the narrower one.
    depth = np.array([2, 3, 9, 9, 9, 0, 9, 1, 1, 9, 9, 9, 9], dtype=np.uint8)
    rows = rows[np.lexsort((depth[trace.category[rows]], -trace.dur[rows], trace.start[rows], trace.lane[rows]))]
    lane, start = trace.lane[rows], trace.start[rows]
    end = start + trace.dur[rows]
    runtime = trace.category[rows] == Category.RUNTIME
    classes = call_classes(trace.names, trace.name[rows[runtime]])
    return HostSpans(
        trace=trace,
        event=rows,
        lane=lane,
        start=start,
        end=end,
        name=trace.name[rows],
        category=trace.category[rows],
        parent=nest(lane, start, end),
        call=np.where(runtime, classes[trace.name[rows]], np.uint8(RuntimeCall.CHEAP)),
    )
