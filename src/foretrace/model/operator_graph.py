"""`OperatorGraph`: what a model computes in one step: operators in program order, tensors, and where tensors lie.

    nodes ──inputs, outputs──► tensors ──storage──► storages

A tensor is one value: an operator that works in place has its result as a new tensor on the old storage, and so does a
view. A storage is a piece of memory with a role, and lives from the node that allocates it to the node after which it
is free; `memory.py` adds that up. Nodes stand in an order in which they can run one after another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from math import prod

import numpy as np
import numpy.typing as npt

from foretrace.cost.calls import Call, Calls, Family, describe, family_of
from foretrace.graph.taskgraph import Phase

EXPONENTIALS = frozenset(["aten::exp", "aten::exp_"])  # these make denormal numbers
SOFTMAXES = frozenset(["aten::_softmax", "aten::_safe_softmax"])  # so do these of masked scores
BEFORE = -1  # `Storage.born` of what exists when the step begins

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "tf32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "complex64": 8, "complex128": 16, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


class Role(IntEnum):
    """What a storage is for."""

    INPUT = 0  # the batch
    WEIGHT = 1
    BUFFER = 2  # state that is not trained: running statistics, tables of positions, caches
    ACTIVATION = 3  # made in the forward pass and kept for the backward pass
    GRADIENT = 4  # of a weight
    OPTIMIZER = 5  # its state: momentum, variance, master weights
    TEMPORARY = 6  # everything else: used and gone, gradients of activations included
    WORKSPACE = 7  # scratch memory of a kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """A piece of memory. Free after node `dies`; `dies` = number of nodes: it outlives the step."""

    nbytes: int
    role: Role
    born: int  # index of the node that allocates it, BEFORE if it exists already
    dies: int
    name: str = ""  # "layers.3.mlp.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One value."""

    dims: tuple[int, ...]
    dtype: str  # as PyTorch calls it, "float32"
    storage: int  # -> storages

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.dims) * DTYPE_BYTES.get(self.dtype, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One call of an operator."""

    op: str  # "aten::addmm"
    inputs: tuple[int, ...]  # -> tensors
    outputs: tuple[int, ...]  # -> tensors
    text: str = ""  # its inputs as a recording has them, JSON `[dims, types, concrete]`; "" if unknown
    phase: Phase = Phase.NONE
    layer: str = ""  # module path, "" if none
    flops: float = 0.0
    read_bytes: float = 0.0
    written_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedBlock:
    """A run of nodes that repeats: nodes first .. first + length come `times` times, one after another."""

    first: int
    length: int
    times: int
    layer: str = ""  # of the first one


@dataclass(frozen=True, kw_only=True)
class OperatorGraph:
    """A model's step. `notes` are sentences on what could not be known."""

    name: str
    nodes: tuple[Node, ...]
    tensors: tuple[Tensor, ...]
    storages: tuple[Storage, ...]
    batch: int = 0  # samples per step, 0 if unknown
    source: str = ""  # "capture", "recording", "chakra 1.1.1", "onnx opset 18", "json"
    blocks: tuple[RepeatedBlock, ...] = ()
    notes: tuple[str, ...] = ()
    recipe: Mapping[str, str] = field(default_factory=dict)  # of a captured training: its optimizer, weights, layout
    # By node, where the batch or a mask says it: share of denormal numbers that it reads, or an exponential makes.
    denormal: Mapping[int, float] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.nodes)

    @cached_property
    def calls(self) -> Calls:
        """The nodes as calls to be costed (n rows). Equal calls are described once."""
        known: dict[tuple[str, str, tuple[tuple[int, ...], ...]], Call] = {}
        rows = []
        for node in self.nodes:
            outputs = tuple(self.tensors[i].dims for i in node.outputs)
            key = (node.op, node.text, outputs)
            if key not in known:
                plain = Call(family=family_of(node.op), op=node.op)
                known[key] = describe(node.op, node.text, outputs) if node.text else plain
            call = known[key]
            same = (call.flops, call.read_bytes, call.written_bytes)
            if same != (node.flops, node.read_bytes, node.written_bytes):
                call = replace(call, flops=node.flops, read_bytes=node.read_bytes, written_bytes=node.written_bytes)
            rows.append(call)
        return Calls.from_rows(rows)

    @property
    def flops(self) -> float:
        """Floating-point operations of the step."""
        return sum(node.flops for node in self.nodes)

    @property
    def nbytes(self) -> float:
        """Bytes that its operators read and write, each tensor of a call once."""
        return sum(node.read_bytes + node.written_bytes for node in self.nodes)

    @property
    def parameters(self) -> int:
        """Trained numbers: elements of all weights, each storage once."""
        elements: dict[int, int] = {}
        for tensor in self.tensors:
            if self.storages[tensor.storage].role == Role.WEIGHT:
                size = DTYPE_BYTES.get(tensor.dtype, 4)
                elements[tensor.storage] = self.storages[tensor.storage].nbytes // size
        return sum(elements.values())

    @cached_property
    def producer(self) -> npt.NDArray[np.int64]:
        """Node that makes each tensor, −1 for those that exist before the step."""
        found = np.full(len(self.tensors), -1, dtype=np.int64)
        for i, node in enumerate(self.nodes):
            found[list(node.outputs)] = i
        return found

    @cached_property
    def edges(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(from, to, tensor): node `to` reads what node `from` made (m rows each)."""
        rows = [
            (int(self.producer[i]), at, i)
            for at, node in enumerate(self.nodes)
            for i in dict.fromkeys(node.inputs)
            if self.producer[i] >= 0
        ]
        table = np.array(rows, dtype=np.int64).reshape(-1, 3)
        return table[:, 0], table[:, 1], table[:, 2]

    def unknown(self) -> dict[str, int]:
        """Return operators that nothing is known of but their bytes, and how often each is called."""
        found: dict[str, int] = {}
        for node, family in zip(self.nodes, self.calls.family.tolist(), strict=True):
            if family == Family.OTHER:
                found[node.op] = found.get(node.op, 0) + 1
        return found
