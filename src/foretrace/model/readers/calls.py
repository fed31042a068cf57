"""An `OperatorGraph` from calls that say the sizes of their inputs, but not which result is which input; recorded ones.

Results follow from the operator; an input is taken for the latest result of that size and type that lies in the same
pass, else for something that existed before. So FLOPs and bytes are exact, while edges and lifetimes are a guess, and
the notes of the graph say so. Of a recorded step a call counts once, where its work is done: `linear` hands its work to
`addmm`. On a GPU, kernels belong to the operator that launched them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import msgspec
import numpy as np

from foretrace.cost.calls import Call, Family, describe, family_of
from foretrace.errors import GraphError
from foretrace.graph.taskgraph import Phase, TaskGraph, TaskKind
from foretrace.model.draft import OperatorGraphDraft
from foretrace.model.operator_graph import OperatorGraph, Role
from foretrace.model.texts import TensorType, inputs_of
from foretrace.simulate.utilisation import samples_per_step
from foretrace.trace.trace import decode_shapes

GUESSED = "the source names no tensors: which result is read by which operator is guessed from sizes."
_Key = tuple[int, str]  # elements, type
_COMPARISONS = frozenset(["eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "logical_not", "logical_and"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """One call as a recording has it."""

    op: str
    text: str
    phase: Phase = Phase.FORWARD
    layer: str = ""
    nbytes: float = 0.0  # that it moves, where the text does not tell
    flops: float | None = None  # where the source knows more than the text


def from_calls(
    rows: Sequence[Called], name: str, *, source: str, batch: int = 0, notes: Sequence[str] = ()
) -> OperatorGraph:
    """Return the graph of these calls in their order."""
    linker = _Linker()
    for row in rows:
        linker.add(row)
    return linker.draft.finish(name, batch=batch, source=source, notes=(*notes, GUESSED), unread_live=False)


class _Linker:
    """Guesses which tensor an input is."""

    def __init__(self) -> None:
        self.draft = OperatorGraphDraft()
        self._made: dict[_Key, list[int]] = {}  # results, latest last
        self._existing: dict[_Key, list[int]] = {}  # what was there before the step
        self._weights: dict[tuple[str, int, str], list[int]] = {}  # by layer, too

    def add(self, row: Called) -> None:
        """Add one more call."""
        call = describe(row.op, row.text)
        base = row.op.removeprefix("aten::")
        inputs: list[int] = []
        for position, value in enumerate(inputs_of(row.text)):
            key = (prod(value.dims), value.dtype)
            if row.phase in (Phase.FORWARD, Phase.NONE) and _holds_weight(base, call.family, position):
                inputs.append(self._weight(row, position, value))
                continue
            known = self._weights.get((row.layer, *key)) if row.layer and row.phase != Phase.FORWARD else None
            lists = (self._existing, self._made) if row.phase == Phase.OPTIMIZER else (self._made, self._existing)
            for each in lists if row.phase != Phase.FORWARD else (self._made,):
                known = known or each.get(key)
            fresh = next((each for each in reversed(known or ()) if each not in inputs), None)
            if fresh is None:
                fresh = self._new(value, Role.OPTIMIZER if row.phase == Phase.OPTIMIZER else None)
            inputs.append(fresh)
        outputs = []
        for i, value in enumerate(outputs_of(row.op, row.text, call)):
            in_place = row.op.endswith("_") and inputs and i == 0
            storage = self.draft.tensors[inputs[0]].storage if in_place else -1
            tensor = self.draft.tensor(value, storage=storage)
            self._made.setdefault((prod(value.dims), value.dtype), []).append(tensor)
            outputs.append(tensor)
        half = row.nbytes / 2 if row.nbytes > 0 and not inputs else None
        self.draft.node(
            row.op, inputs, outputs, text=row.text, phase=row.phase, layer=row.layer,
            flops=row.flops, read_bytes=half, written_bytes=half,
        )  # fmt: skip

    def _new(self, value: TensorType, role: Role | None = None) -> int:
        tensor = self.draft.tensor(value, role=role)
        self._existing.setdefault((prod(value.dims), value.dtype), []).append(tensor)
        return tensor

    def _weight(self, row: Called, position: int, value: TensorType) -> int:
        statistics = "batch_norm" in row.op and position > 2
        tensor = self._new(value, Role.BUFFER if statistics else Role.WEIGHT)
        self._weights.setdefault((row.layer, prod(value.dims), value.dtype), []).append(tensor)
        return tensor


def _holds_weight(base: str, family: Family, position: int) -> bool:
    """Return whether an argument of a forward call is a weight in all but odd models."""
    if base == "addmm":
        return position != 1
    if base == "linear" or family in (Family.CONV, Family.NORM):
        return position > 0
    return base in ("embedding", "index_select", "embedding_bag", "_embedding_bag") and position == 0


def outputs_of(op: str, text: str, call: Call | None = None) -> list[TensorType]:
    """Return sizes and types of what a call returns, as far as they follow from its inputs."""
    call = call or describe(op, text)
    tensors = inputs_of(text)
    if not tensors or call.family == Family.NONE:
        return []
    base = op.removeprefix("aten::").rstrip("_")
    first = tensors[0]
    largest = max(tensors, key=lambda each: prod(each.dims))
    if op.endswith("_"):
        return [first]
    if call.family == Family.GEMM:
        lead = (int(call.b),) if call.b > 1 else ()
        return [TensorType(dims=(*lead, int(call.m), int(call.n)), dtype=first.dtype)]
    if call.family == Family.CONV:
        if "backward" in base:
            return [each for each in tensors[1:3] if len(each.dims) > 1]
        if len(tensors) > 1 and len(first.dims) > 2:
            images, channels = first.dims[0], tensors[1].dims[0]
            window = max(prod(tensors[1].dims[1:]), 1)
            pixels = call.flops / 2 / window / max(images * channels, 1)
            known = pixels >= 1 and pixels == int(pixels)
            dims = (images, channels, int(pixels)) if known else (images, channels, *first.dims[2:])
            return [TensorType(dims=dims, dtype=first.dtype)]
        return [first]
    if call.family == Family.ATTENTION:
        return list(tensors[1:4]) if "backward" in base else [first]
    if base in ("embedding", "index_select") and len(tensors) > 1:
        width = first.dims[1:] if base == "embedding" else (first.dims[-1],)
        return [TensorType(dims=(*tensors[1].dims, *width), dtype=first.dtype)]
    if call.family == Family.LOOKUP and base == "embedding_dense_backward":
        return [first]
    if base in ("cat", "stack"):
        return [TensorType(dims=(sum(prod(each.dims) for each in tensors),), dtype=first.dtype)]
    if call.family == Family.REDUCTION:
        return [TensorType(dims=_reduced(first.dims, text), dtype=first.dtype)]
    if call.family == Family.OPTIMIZER:
        return []
    dtype = "bool" if base in _COMPARISONS else largest.dtype
    return [TensorType(dims=largest.dims, dtype=dtype)]


def _reduced(dims: tuple[int, ...], text: str) -> tuple[int, ...]:
    """Return sizes after a sum over the axes among the arguments; all of them where none are given."""
    try:
        concrete = decode_shapes(text).concrete
        axes = [int(part) for part in concrete[1].strip("[]").split(",") if part.strip()] if len(concrete) > 1 else []
    except (ValueError, TypeError, msgspec.DecodeError, RecursionError):
        axes = []
    gone = {axis % len(dims) for axis in axes if dims and -len(dims) <= axis < len(dims)}
    return tuple(size for i, size in enumerate(dims) if i not in gone) if gone else ()


_WITH_WORK = (TaskKind.OPERATOR, TaskKind.KERNEL, TaskKind.COPY, TaskKind.COLLECTIVE)


def from_recording(graph: TaskGraph, name: str = "", *, step: int | None = None) -> OperatorGraph:
    """Return the operators of one step of a recording.

    `step` is its number as the recording counts; without it, the last one. Raises GraphError where there is no such
    step, or no operator with its inputs.
    """
    at = _step(graph, step)
    inside = graph.step == at if graph.n_steps else np.ones(len(graph), dtype=np.bool_)
    if len(set(graph.rank.tolist())) > 1:
        inside &= graph.rank == graph.rank.min()
    kinds = np.isin(graph.kind, _WITH_WORK) & inside & ~graph.gone
    rows, without = [], Counter[str]()
    order = np.flatnonzero(kinds)
    for task in order[np.argsort(graph.recorded[order], kind="stable")].tolist():
        kind, nbytes, flops = TaskKind(graph.kind[task]), int(graph.nbytes[task]), float(graph.flops[task])
        op = graph.names[graph.op[task]] if graph.op[task] >= 0 else ""
        text = graph.shapes[graph.shape[task]] if graph.shape[task] >= 0 else ""
        if kind == TaskKind.COLLECTIVE:
            op, text = op or graph.names[graph.name[task]], text if op else ""
        elif kind == TaskKind.OPERATOR and not text:
            if op and family_of(op) not in (Family.NONE, Family.OTHER) and graph.dur[task] > 0:
                without[op] += 1
            continue
        elif not op or not text:
            without[op or graph.names[graph.name[task]]] += 1
            continue
        elif family_of(op) == Family.NONE or (nbytes <= 0 and flops <= 0):
            continue
        layer = graph.layers[graph.layer[task]] if graph.layer[task] >= 0 else ""
        phase = Phase(graph.phase[task])
        rows.append(Called(op=op, text=text, phase=phase, layer=layer, nbytes=float(max(nbytes, 0)), flops=flops))
    if not rows:
        raise GraphError(
            f"{name or graph.info.source or 'the recording'} has no operator with the sizes of its inputs in that "
            "step; record with record_shapes=True."
        )
    notes = list(graph.info.notes)
    if without:
        most = ", ".join(f"{op[:60]} ({count})" for op, count in without.most_common(3))
        notes.append(f"{sum(without.values())} calls have no recorded inputs and are left out: {most}.")
    source = f"recording of {graph.info.devices[0] if graph.info.devices else graph.info.platform}"
    samples = int(samples_per_step(graph.info.recording) or 0)
    return from_calls(rows, name or graph.info.source, source=source, batch=samples, notes=notes)


def _step(graph: TaskGraph, step: int | None) -> int:
    """Return the index of the step."""
    if step is None:
        return graph.n_steps - 1
    numbers = list(graph.info.steps)
    if step not in numbers:
        shown = ", ".join(map(str, numbers)) or "none"
        raise GraphError(f"the recording has no step {step}; its steps are {shown}.")
    return numbers.index(step)
