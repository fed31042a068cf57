"""From the nodes of an execution trace, whatever its file form, to an `OperatorGraph`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import msgspec

from foretrace.cost.calls import Family, family_of
from foretrace.errors import ForetraceError
from foretrace.graph import work
from foretrace.graph.taskgraph import Phase
from foretrace.model.draft import OperatorGraphDraft
from foretrace.model.operator_graph import OperatorGraph
from foretrace.model.texts import DTYPES, LARGEST, TensorType, tensor_dims

Argument = tuple[Any, Any, str]  # value, shape, type

_ALLOCATES = re.compile(r"^aten::(empty|new_empty|empty_like|empty_strided|new_empty_strided)")
_SILENT = re.compile(r"^aten::_(foreach|fused)_\w*_$")  # they work in place and return nothing
_OPERATOR = re.compile(r"^(?!autograd::|torch::|detach)\w+::\w+|^nccl:|^gloo:|^record_param_comms$|^triton_")
_COMMUNICATION = re.compile(r"^(c10d::|nccl:|gloo:|record_param_comms)")
_TENSOR = re.compile(r"^Tensor\((.*)\)$")
_LIST = re.compile(r"^(?:GenericList|Tuple)\[(.*)\]$")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChakraNode:
    """One node of a trace."""

    id: int  # nodes start in the order of their ids
    name: str
    parent: int
    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]
    thread: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """A tensor argument: which one it is, where it lies, and what it is."""

    key: tuple[int, int]  # (tensor, storage), as the observer counts
    value: TensorType
    nbytes: int  # of elements in the storage up to its end


def build(
    entries: Sequence[ChakraNode], name: str, *, version: str, where: str, step: int | None = None
) -> OperatorGraph:
    """Return the operators of one step. Raises ForetraceError where there are none."""
    tree = _Tree(entries)
    steps = tree.steps()
    notes = []
    chosen: Sequence[int] = range(len(entries))
    if steps:
        at = len(steps) - 1 if step is None else step
        if not 0 <= at < len(steps):
            raise ForetraceError(f"{where} has {len(steps)} training steps, counted from 0, and no step {step}.")
        chosen = steps[at]
        if len(steps) > 1:
            notes.append(f"step {at} of {len(steps)} training steps.")
    elif step:
        raise ForetraceError(f"{where} has no optimizer, so its steps cannot be distinguished; leave out the step.")
    reader = _Reader(tree, where)
    wanted = set(chosen)
    for row in tree.working():
        if row in wanted:
            reader.add(row)
    if not reader.draft.nodes:
        raise ForetraceError(f"{where} has no operator in that step; observe a whole training step.")
    return reader.draft.finish(name, source=f"chakra {version}", notes=notes + reader.notes(), unread_live=False)


class _Tree:
    """Who called whom, and in which phase."""

    def __init__(self, entries: Sequence[ChakraNode]) -> None:
        self.entries = entries
        row_of = {entry.id: row for row, entry in enumerate(entries)}
        # A caller starts before what it calls, so its id is smaller; anything else is a mistake of the file.
        self.parent = [row if (row := row_of.get(each.parent, -1)) < at else -1 for at, each in enumerate(entries)]
        self.children: list[list[int]] = [[] for _ in entries]
        for row, parent in enumerate(self.parent):
            if parent >= 0:
                self.children[parent].append(row)
        backward = _backward_threads(entries)
        self.phase: list[Phase] = []
        self.label: list[str] = []  # innermost annotation
        for row, entry in enumerate(entries):
            above = self.parent[row]
            phase = self.phase[above] if above >= 0 else Phase.FORWARD
            label = self.label[above] if above >= 0 else ""
            if entry.name.startswith(("Optimizer.step", "Optimizer.zero_grad")):
                phase = Phase.OPTIMIZER
            elif entry.name.startswith("enumerate(DataLoader)"):
                phase = Phase.DATA
            elif (entry.name.startswith("autograd::engine::evaluate_function") and phase != Phase.OPTIMIZER) or (
                phase == Phase.FORWARD and entry.thread in backward
            ):
                phase = Phase.BACKWARD
            elif phase == Phase.FORWARD and family_of(entry.name) == Family.OPTIMIZER:
                phase = Phase.OPTIMIZER
            elif phase == Phase.BACKWARD and entry.name in ("CheckpointFunctionBackward", "CheckpointFunction"):
                phase = Phase.RECOMPUTE
            elif entry.name.startswith("## ") and entry.name.endswith(" ##"):
                label = entry.name.strip("# ")
            self.phase.append(phase)
            self.label.append(label)
        known: dict[tuple[str, str, str], tuple[float, float]] = {}
        self._own = [_own_work(entry, known) for entry in entries]
        self._passes = [True] * len(entries)
        self._judge()

    def _judge(self) -> None:
        """Find which calls hand their work to those that they call: half of it must be found below."""
        below = [[0.0, 0.0] for _ in self.entries]
        for row in range(len(self.entries) - 1, -1, -1):
            nbytes, products = self._own[row]
            part, own = (1, products) if products > 0 else (0, nbytes)
            name = self.entries[row].name
            if not _OPERATOR.match(name):
                passes = True
            elif _COMMUNICATION.match(name) or not name.startswith("aten::"):
                passes = not self.entries[row].outputs and not self.entries[row].inputs
            elif family_of(name) == Family.NONE and not _ALLOCATES.match(name):
                # A `reshape` or `to` that copies has a copy below it; else it is a view.
                passes = below[row][0] > 0
            else:
                passes = own > 0 and 2 * below[row][part] >= own
            self._passes[row] = passes
            done = below[row] if passes else [nbytes, products]
            if (above := self.parent[row]) >= 0:
                below[above][0] += done[0]
                below[above][1] += done[1]

    def working(self) -> Iterator[int]:
        """Yield calls that do their work themselves, in the order of their callers."""
        pending = [row for row, parent in reversed(list(enumerate(self.parent))) if parent < 0]
        while pending:
            row = pending.pop()
            if self._passes[row]:
                pending += reversed(self.children[row])
            else:
                yield row

    def steps(self) -> list[range]:
        """Return rows of each training step, up to the end of `Optimizer.step`; what follows the last is no step."""
        found: list[range] = []
        begin = 0
        for row, entry in enumerate(self.entries):
            if not entry.name.startswith("Optimizer.step"):
                continue
            end = row + 1
            while end < len(self.entries) and self._inside(end, row):
                end += 1
            backward = any(self.phase[each] == Phase.BACKWARD for each in range(begin, row))
            if found and found[-1].stop >= begin and not backward:
                begin = found.pop().start  # a second optimizer of the same step
            found.append(range(begin, end))
            begin = end
        return found

    def _inside(self, row: int, above: int) -> bool:
        while row > above:
            row = self.parent[row]
        return row == above


def _backward_threads(entries: Sequence[ChakraNode]) -> set[int]:
    """Return threads of the backward pass: all but the first one that run a backward operator."""
    first = next((each.thread for each in entries if _OPERATOR.match(each.name)), 0)
    return {each.thread for each in entries if each.thread != first and "backward" in each.name.lower()}


class _Reader:
    """Puts calls into a draft, following every tensor by its identity."""

    def __init__(self, tree: _Tree, where: str) -> None:
        self.draft, self._tree, self._where = OperatorGraphDraft(), tree, where
        self._tensor: dict[tuple[int, int], int] = {}  # -> latest tensor of that identity
        self._storage: dict[int, int] = {}  # the observer's storage -> ours, of now
        self._blank: set[int] = set()  # our storages that were allocated and not written
        self._foreign = Counter[str]()

    def notes(self) -> list[str]:
        """Return what is not of ATen."""
        if not self._foreign:
            return []
        named = ", ".join(f"{op[:60]} ({count})" for op, count in self._foreign.most_common(4))
        return [f"operators outside ATen are known by their bytes only: {named}."]

    def add(self, row: int) -> None:
        """Add one call: a node, or memory that is allocated."""
        entry = _without_out(self._tree.entries[row])
        inputs, outputs = (list(self._tensors(each, entry)) for each in (entry.inputs, entry.outputs))
        if _ALLOCATES.match(entry.name):
            for held in outputs:
                fresh = self.draft.storage(held.nbytes)
                self._storage[held.key[1]] = fresh
                self._blank.add(fresh)
                self._tensor[held.key] = self.draft.tensor(held.value, storage=fresh)
            return
        if not outputs and _SILENT.match(entry.name):
            outputs = [
                held
                for position, each in enumerate(entry.inputs)
                if position == 0 or ("_fused_" in entry.name and position > 1)
                for held in self._tensors([each], entry)
            ]
        given = [self._read(held) for held in inputs]
        mine = {held.key[1] for held in inputs}
        made = [self._make(held, mine) for held in outputs]
        if not given and not made:
            return
        written = {self.draft.tensors[i].storage for i in made}
        read = [i for i in dict.fromkeys(given) if self.draft.tensors[i].storage not in self._blank]
        if family_of(entry.name) != Family.NONE:
            self._blank -= written
        if not entry.name.startswith("aten::"):
            self._foreign[entry.name] += 1
        phase, layer = self._tree.phase[row], self._tree.label[row]
        self.draft.node(entry.name, read, made, text=_text(entry), phase=phase, layer=layer)

    def _read(self, held: _Held) -> int:
        """Return the tensor that an input is; one that nobody made existed before."""
        known = self._tensor.get(held.key)
        if known is not None and self.draft.value(known) == held.value:
            return known
        if held.key[1] not in self._storage:
            self._storage[held.key[1]] = self.draft.storage(held.nbytes)
        tensor = self.draft.tensor(held.value, storage=self._storage[held.key[1]])
        self._tensor[held.key] = tensor
        return tensor

    def _make(self, held: _Held, inputs: set[int]) -> int:
        """Return a new tensor on the storage of an input (a view, or in place), on one just allocated, or its own."""
        number = held.key[1]
        if number not in self._storage or (number not in inputs and self._storage[number] not in self._blank):
            self._storage[number] = self.draft.storage(held.nbytes)
        tensor = self.draft.tensor(held.value, storage=self._storage[number])
        self._tensor[held.key] = tensor
        return tensor

    def _tensors(self, arguments: Sequence[Argument], entry: ChakraNode) -> Iterator[_Held]:
        for value, shape, kind in arguments:
            yield from self._held(value, shape, kind, entry)

    def _held(self, value: Any, shape: Any, kind: str, entry: ChakraNode, depth: int = 0) -> Iterator[_Held]:
        if found := _TENSOR.match(kind):
            dtype = DTYPES.get(found[1].lower())
            if dtype is None or not isinstance(value, list) or len(value) < 5:
                return  # undefined, quantised or opaque
            numbers = [*value[:5], *(shape if isinstance(shape, list) else [None])]
            if not all(isinstance(each, int) and 0 <= each < LARGEST for each in numbers):
                raise ForetraceError(
                    f"{self._where}: node {entry.id} ({entry.name}) has a tensor {value!r:.60} of sizes {shape!r:.60}; "
                    "record the trace again."
                )
            number, storage, offset, elements, size = value[:5]
            if prod(shape) * 16 > LARGEST:
                raise ForetraceError(
                    f"{self._where}: node {entry.id} ({entry.name}) has a tensor of sizes {shape!r:.60}, more than any "
                    "memory holds; record the trace again."
                )
            held = TensorType(dims=tuple(shape), dtype=dtype)
            nbytes = (min(offset, elements) + min(elements, prod(shape))) * min(size, 16)
            yield _Held(key=(number, storage), value=held, nbytes=max(nbytes, 0))
        elif (inner := _LIST.match(kind)) and isinstance(value, list) and isinstance(shape, list) and depth < 4:
            for each, dims, one in zip(value, shape, _split(inner[1]), strict=False):
                yield from self._held(each, dims, one, entry, depth + 1)


def _without_out(entry: ChakraNode) -> ChakraNode:
    """Return it without the arguments that say where the result goes (`mm(a, b, out=c)`); Triton's come last."""
    if entry.name.startswith("triton_") and not entry.outputs:
        tensors = [at for at, each in enumerate(entry.inputs) if _TENSOR.match(each[2])]
        if not tensors:
            return entry
        last = tensors[-1]
        return replace(entry, inputs=entry.inputs[:last], outputs=entry.inputs[last : last + 1])
    if entry.name.endswith("_") or not entry.name.startswith("aten::") or family_of(entry.name) == Family.NONE:
        return entry
    results = [value[:2] for value, _, kind in entry.outputs if _TENSOR.match(kind) and isinstance(value, list)]
    kept = tuple(
        each
        for at, each in enumerate(entry.inputs)
        if not (at and _TENSOR.match(each[2]) and isinstance(each[0], list) and each[0][:2] in results)
    )
    return replace(entry, inputs=kept) if len(kept) < len(entry.inputs) else entry


def _split(text: str) -> list[str]:
    """Return the types in a list of types, which may hold lists themselves."""
    parts, depth, begin = [], 0, 0
    for i, letter in enumerate(text):
        depth += (letter in "[(") - (letter in "])")
        if letter == "," and not depth:
            parts.append(text[begin:i].strip())
            begin = i + 1
    return [*parts, text[begin:].strip()]


def _text(entry: ChakraNode) -> str:
    """Return inputs as a recording has them."""
    dims: list[Any] = []
    types, concrete = [], []
    for value, shape, kind in entry.inputs:
        found, inner = _TENSOR.match(kind), _LIST.match(kind)
        if found:
            dims.append(shape if isinstance(shape, list) and all(isinstance(each, int) for each in shape) else [])
            types.append("long int" if found[1] == "long" else found[1])
            concrete.append("")
        elif inner and "Tensor(" in inner[1]:
            dims.append([each for each in shape if isinstance(each, list)] if isinstance(shape, list) else [])
            types.append("TensorList")
            concrete.append("")
        else:
            dims.append([])
            types.append("" if kind == "None" else "ScalarList" if inner else "Scalar")
            concrete.append(str(value) if isinstance(value, int | float | list | bool) and kind != "None" else "")
    return msgspec.json.encode([dims, types, concrete]).decode()


def _own_work(entry: ChakraNode, known: dict[tuple[str, str, str], tuple[float, float]]) -> tuple[float, float]:
    """Return bytes, and FLOPs of products. `known` keeps them for equal calls."""
    if not entry.name.startswith("aten::") or not entry.inputs or family_of(entry.name) == Family.NONE:
        return 0.0, 0.0
    text = _text(entry)
    outputs = [shape for _, shape, kind in entry.outputs if _TENSOR.match(kind) and isinstance(shape, list)]
    key = (entry.name, text, str(outputs[:1]))
    if key not in known:
        weights = tensor_dims(text)[:2]
        sizes = {}
        if len(weights) == 2 and outputs and all(isinstance(each, int) for each in outputs[0]):
            sizes = {(weights[0], weights[1]): tuple(outputs[0])}
        nbytes, flops = work.operator_work(entry.name, text, sizes) if weights else (0, 0.0)
        known[key] = float(max(nbytes, 0)), flops if work.is_product(entry.name) else 0.0
    return known[key]
