"""What holds the memory of a training step: weights, gradients, optimizer state, activations, workspace.

From the allocator's events of a recording (`[memory]` instants) and the recorder's facts. An allocation is named by the
phase that made it and by how long it lived:

- gradients: made in the backward pass, as large as a trained parameter, alive when the optimizer begins;
- activation gradients: everything else that outlives its operator in the backward pass;
- activations: made in the forward pass and alive when the next backward pass begins (without a backward pass: whatever
  outlives its operator); also what activation checkpointing computes again;
- workspace: made and freed inside one outermost operator, or inside one optimizer step;
- optimizer state: made in an optimizer step and never freed;
- input: made by the data loader;
- other: forward temporaries between operators, and what no rule names.

Weights, buffers and optimizer state are older than the recording, so no event shows them: they come from the recorder's
facts. On CUDA the allocator also says how much was allocated in all, so that the rest is known, too ("other").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from foretrace.arrays import Int32, Int64, UInt8
from foretrace.graph.host import HostSpans, host_spans
from foretrace.graph.kernels import at as values_at
from foretrace.graph.steps import find_steps
from foretrace.graph.taskgraph import Phase
from foretrace.graph.work import element_bytes
from foretrace.trace.trace import Category, Trace

CATEGORIES = (
    "weights",
    "gradients",
    "optimizer state",
    "activations",
    "activation gradients",
    "workspace",
    "input",
    "other",
)
_WEIGHTS, _GRADIENTS, _STATE, _ACTIVATIONS, _FLOWING, _WORKSPACE, _INPUT, _OTHER = range(len(CATEGORIES))

# Tensors of a parameter's size per parameter, for recordings that do not hold the size of the state itself.
_STATES = {"SGD": 0, "Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "Adadelta": 2, "RMSprop": 1,
           "Adagrad": 1, "Rprop": 2}  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class AllocationColumns:
    """Allocations of one device; n events in time order, of which `made` and `freed` are indices.

    `made` is −1 for memory that is older than the recording, `freed` is n for what outlives it.
    """

    device: str
    time: Int64  # per event, ns
    made: Int64  # per block
    freed: Int64
    nbytes: Int64
    category: UInt8  # per block, index into CATEGORIES

    def held(self) -> Int64:
        """Return bytes by category after each event (n x 8), from the blocks alone."""
        n = len(self.time)
        change = np.zeros((n + 1, len(CATEGORIES)), dtype=np.int64)
        np.add.at(change, (self.made + 1, self.category), self.nbytes)
        inside = self.freed < n
        np.add.at(change, (self.freed[inside] + 1, self.category[inside]), -self.nbytes[inside])
        held: Int64 = np.cumsum(change, axis=0)[1:]
        return held


@dataclass(frozen=True, slots=True, kw_only=True)
class Static:
    """Bytes that are there before a recording begins, by the recorder's facts; None where they are not known."""

    weights: int | None = None  # parameters and buffers
    gradients: int | None = None  # all gradients of trained parameters
    state: int | None = None
    sizes: frozenset[int] = frozenset()  # bytes of each trained parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySplit:
    """Memory of one device by category at its peak and over the step that holds the peak."""

    device: str  # "cpu", "cuda:0"
    peak_bytes: int
    at_peak_bytes: dict[str, int]  # by category; sums to peak_bytes
    peak_phase: str
    peak_operator: str
    step: int  # position of the step with the peak
    over_time_bytes: dict[str, tuple[int, ...]]  # over that step: the fullest moment of equal pieces
    allocated_per_step_bytes: float
    allocations_per_step: float
    recorded_peak_bytes: int | None  # what the allocator itself gives as its peak
    notes: tuple[str, ...]


def split(trace: Trace, *, facts: Mapping[str, Any] | None = None, pieces: int = 48) -> MemorySplit | None:
    """Split the memory of one rank's recording; None if it holds no allocations, or not their addresses.

    `facts` are the recorder's; by default those in the trace. The device with most allocated bytes is shown, an
    accelerator before the CPU.
    """
    known = dict(trace.ranks[0].recording) if facts is None and trace.ranks else dict(facts or {})
    host = host_spans(trace)
    static = static_bytes(known)
    blocks = find_blocks(trace, host, static)
    if blocks is None:
        return None
    notes = []
    n = len(blocks.time)
    steps = find_steps(host, int(blocks.time[0]), int(blocks.time[-1]))
    held = blocks.held()
    base = np.zeros(len(CATEGORIES), dtype=np.int64)
    if static.weights is None:
        notes.append("weights and optimizer state are older than the recording and not in it: record with foretrace")
    else:
        base[_WEIGHTS] = static.weights
        base[_STATE] = max((static.state or 0) - int(held[-1, _STATE]), 0)
        if static.state is None:
            notes.append("the size of this optimizer's state is not known")
    gradient_peak = int(held[:, _GRADIENTS].max(initial=0))
    if static.gradients and 2 * gradient_peak < static.gradients and _has(host, Phase.BACKWARD):
        base[_GRADIENTS] = static.gradients - gradient_peak
        notes.append("gradients stay allocated between steps, so their size is that of the trained parameters")
    rows = _events(trace, blocks.device)
    total = trace.wait_correlation[rows]
    if blocks.device != "cpu" and total[0] >= 0:
        older = int(total[0] - max(int(trace.nbytes[rows[0]]), 0) - blocks.nbytes[blocks.made < 0].sum() - base.sum())
        if older > 0:
            base[_OTHER] += older
            if older > 0.05 * total.max():
                notes.append(f"{older / 1e6:,.0f} MB were allocated before the recording and are counted as other")
    else:
        notes.append("what was allocated before the recording and is no weight or state is not included")
    held += base
    inside = np.flatnonzero((blocks.time >= steps.bounds[0]) & (blocks.time <= steps.bounds[-1]))
    inside = inside if len(inside) else np.arange(n)
    top = int(inside[np.argmax(held[inside].sum(axis=1))])
    span = int(_around(host, trace.lane[rows[[top]]], blocks.time[[top]])[0])
    count = max(len(steps.bounds) - 1, 1)
    step = int(np.clip(np.searchsorted(steps.bounds, blocks.time[top], side="right") - 1, 0, count - 1))
    made = blocks.made[np.isin(blocks.made, inside)]
    operator = int(host.top_operator[span]) if span >= 0 else -1
    peak = known.get("memory", {}).get("peak_allocated_bytes") if blocks.device != "cpu" else None
    return MemorySplit(
        device=blocks.device,
        peak_bytes=int(held[top].sum()),
        at_peak_bytes=dict(zip(CATEGORIES, held[top].tolist(), strict=True)),
        peak_phase=Phase(int(host.phase[span])).name.lower() if span >= 0 else "",
        peak_operator=trace.names[host.name[operator]] if operator >= 0 else "",
        step=step,
        over_time_bytes=_sampled(blocks.time, held, int(steps.bounds[step]), int(steps.bounds[step + 1]), pieces),
        allocated_per_step_bytes=float(blocks.nbytes[np.isin(blocks.made, inside)].sum()) / count,
        allocations_per_step=len(made) / count,
        recorded_peak_bytes=peak,
        notes=tuple(f"{note}." for note in notes),
    )


def static_bytes(facts: Mapping[str, Any]) -> Static:
    """Return bytes of weights, gradients and optimizer state by the recorder's facts; unknown ones are None."""
    parameters = facts.get("parameters") or []
    if not parameters:
        return Static()
    nbytes = [each["numel"] * (element_bytes(each["dtype"]) or 4) for each in parameters]
    trained = [each["trained"] and each["optimizer"] >= 0 for each in parameters]
    state: int | None = 0
    for index, optimizer in enumerate(facts.get("optimizers") or []):
        own = sum(size for size, each in zip(nbytes, parameters, strict=True) if each["optimizer"] == index)
        found = optimizer.get("state_bytes")
        if found is None:
            found = _state_by_class(optimizer, own)
        state = None if found is None or state is None else state + found
    return Static(
        weights=sum(nbytes) + int(facts.get("buffer_bytes") or 0),
        gradients=sum(size for size, mine in zip(nbytes, trained, strict=True) if mine),
        state=state,
        sizes=frozenset(size for size, mine in zip(nbytes, trained, strict=True) if mine),
    )


def find_blocks(trace: Trace, host: HostSpans, static: Static) -> AllocationColumns | None:
    """Return pair allocations with releases and name them; None without allocations."""
    device = _device(trace)
    if device is None:
        return None
    rows = _events(trace, device)
    if not (trace.correlation[rows] > 0).any():  # before PyTorch 1.10 nothing links a release with its allocation
        return None
    n = len(rows)
    made: list[int] = []
    freed: list[int] = []
    nbytes: list[int] = []
    living: dict[int, int] = {}
    events = zip(trace.correlation[rows].tolist(), trace.nbytes[rows].tolist(), strict=True)
    for i, (address, size) in enumerate(events):
        if size < 0 and (block := living.pop(address, -1)) >= 0:
            freed[block] = i
            continue
        if size > 0:
            if (lost := living.get(address, -1)) >= 0:  # its release was not recorded
                freed[lost] = i
            living[address] = len(made)
        made.append(i if size > 0 else -1)
        freed.append(n if size > 0 else i)
        nbytes.append(abs(size))
    time = trace.start[rows]
    start, end = np.array(made, dtype=np.int64), np.array(freed, dtype=np.int64)
    sizes = np.array(nbytes, dtype=np.int64)
    category = _named(host, _around(host, trace.lane[rows], time), time, start, end, sizes, static)
    return AllocationColumns(device=device, time=time, made=start, freed=end, nbytes=sizes, category=category)


def _named(
    host: HostSpans, span: Int64, time: Int64, made: Int64, freed: Int64, nbytes: Int64, static: Static
) -> UInt8:
    """Return the category of every block, from the host spans around the events (n) that made and freed it."""
    n = len(time)
    event_phase = values_at(host.phase, span, Phase.NONE)
    old, stays = made < 0, freed >= n
    at = np.maximum(made, 0)
    phase = np.where(old, Phase.NONE, event_phase[at])
    ends = np.where(stays, np.iinfo(np.int64).max, time[np.minimum(freed, n - 1)])
    begins = time[at]
    fits = np.isin(nbytes, list(static.sizes)) if static.sizes else np.ones(len(made), dtype=np.bool_)

    owner = span[at]
    operator = values_at(host.top_operator, owner, -1)
    within = (operator >= 0) & (values_at(host.end, operator, 0) >= ends)
    update = _starts(host, Phase.OPTIMIZER)
    backward = _starts(host, Phase.BACKWARD)
    reaches_update = _next(update, begins) <= ends
    reaches_backward = _next(backward, begins) <= ends
    forward, back = phase == Phase.FORWARD, np.isin(phase, [Phase.BACKWARD])
    result = np.full(len(made), _OTHER, dtype=np.uint8)
    result[forward & (reaches_backward if len(backward) else ~within)] = _ACTIVATIONS
    result[phase == Phase.RECOMPUTE] = _ACTIVATIONS
    result[back] = _FLOWING
    result[back & fits & (reaches_update if len(update) else stays)] = _GRADIENTS
    result[(forward | back | (phase == Phase.RECOMPUTE)) & within & ~stays] = _WORKSPACE
    result[(phase == Phase.OPTIMIZER) & ~stays] = _WORKSPACE
    result[(phase == Phase.OPTIMIZER) & stays] = _STATE
    result[phase == Phase.DATA] = _INPUT
    freed_by = event_phase[np.minimum(freed, n - 1)]
    result[old & fits & bool(static.sizes) & (freed_by == Phase.OPTIMIZER)] = _GRADIENTS
    return result


def _around(host: HostSpans, lane: Int32, time: Int64) -> Int64:
    """Return the innermost host span around each moment of a thread, −1 if none."""
    found = np.full(len(time), -1, dtype=np.int64)
    for each in np.unique(lane).tolist():
        part, mine = host.lane_slice(each), np.flatnonzero(lane == each)
        if part.stop == part.start:
            continue
        at = part.start + np.searchsorted(host.start[part], time[mine], side="right") - 1
        at = np.where(at >= part.start, at, -1)
        while (over := (at >= 0) & (host.end[at] < time[mine])).any():
            at = np.where(over, host.parent[at], at)
        found[mine] = at
    return found


def _starts(host: HostSpans, phase: Phase) -> Int64:
    """Return when outermost spans of a phase begin, in order."""
    mine = host.phase == phase
    outer = mine & ~np.where(host.parent >= 0, mine[host.parent], False)
    return np.sort(host.start[outer])


def _next(starts: Int64, after: Int64) -> Int64:
    """Return the first of `starts` after each moment, the end of time where there is none."""
    return np.append(starts, np.iinfo(np.int64).max)[np.searchsorted(starts, after, side="right")]


def _has(host: HostSpans, phase: Phase) -> bool:
    return bool((host.phase == phase).any())


def _sampled(time: Int64, held: Int64, begin: int, end: int, pieces: int) -> dict[str, tuple[int, ...]]:
    """Return bytes by category at the fullest moment of equal pieces of time."""
    edges = np.searchsorted(time, np.linspace(begin, end, pieces + 1))
    total = held.sum(axis=1)
    rows = []
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        first = max(low - 1, 0)  # what was held when the piece began
        rows.append(first + int(np.argmax(total[first : max(high, first + 1)])))
    return {name: tuple(held[rows, i].tolist()) for i, name in enumerate(CATEGORIES)}


def _device(trace: Trace) -> str | None:
    """Return the device of the memory events: the accelerator with most allocated bytes, else the CPU."""
    rows = trace.category == Category.MEMORY
    if not rows.any():
        return None
    weight = np.bincount(trace.name[rows], weights=np.maximum(trace.nbytes[rows], 0), minlength=len(trace.names))
    found = [(trace.names[i].removeprefix("[memory] "), float(weight[i])) for i in np.unique(trace.name[rows]).tolist()]
    found = [each for each in found if each[1] > 0]
    return max(found, key=lambda each: (each[0] != "cpu", each[1]))[0] if found else None


def _events(trace: Trace, device: str) -> Int64:
    name = trace.names.index(f"[memory] {device}")
    return np.flatnonzero((trace.category == Category.MEMORY) & (trace.name == name))


def _state_by_class(optimizer: Mapping[str, Any], nbytes: int) -> int | None:
    settings = optimizer.get("settings", {})
    tensors = _STATES.get(str(optimizer.get("class")))
    if tensors is None:
        return None
    tensors += bool(settings.get("momentum")) + bool(settings.get("amsgrad")) + bool(settings.get("centered"))
    return tensors * nbytes
