"""An `OperatorGraph` in the making, for sources that do not say how long memory lives and what it is for.

What exists before the step is what is read before it is made. What a piece of memory is for follows from the phases
that touch it: written by the optimizer and read by the forward pass, it is a weight; made in the forward pass and read
in the backward pass, an activation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from foretrace.cost.calls import Call, Family, describe, family_of
from foretrace.graph import work
from foretrace.graph.taskgraph import Phase
from foretrace.model.operator_graph import (
    BEFORE,
    DTYPE_BYTES,
    Node,
    OperatorGraph,
    RepeatedBlock,
    Role,
    Storage,
    Tensor,
)
from foretrace.model.texts import TensorType, tensor_dims, text_of_values

_BACKWARD = (Phase.BACKWARD, Phase.RECOMPUTE)
_WITH_WEIGHTS = (Family.GEMM, Family.CONV, Family.NORM, Family.LOOKUP, Family.RECURRENT)


@dataclass
class _Memory:
    """A storage, and who touches it: index of the node, its phase, whether it writes."""

    nbytes: int
    role: Role | None
    name: str
    touched: list[tuple[int, Phase, bool]] = field(default_factory=list)
    as_weight: bool = False
    read: bool = False

    def born(self) -> int:
        """Return the node that makes it, BEFORE if it is read first."""
        if not self.touched:
            return BEFORE
        at, _, writes = self.touched[0]
        return at if writes else BEFORE


class OperatorGraphDraft:
    """Tensors, storages and nodes in program order; `finish` makes the graph."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.nodes: list[Node] = []
        self._memories: list[_Memory] = []
        self._priced: dict[tuple[object, ...], Call] = {}  # equal calls are described once

    def storage(self, nbytes: int, role: Role | None = None, name: str = "") -> int:
        """Return a piece of memory; what it is for is found out unless `role` says so."""
        self._memories.append(_Memory(nbytes=nbytes, role=role, name=name))
        return len(self._memories) - 1

    def tensor(self, value: TensorType, *, storage: int = -1, role: Role | None = None, name: str = "") -> int:
        """Return a tensor on that storage, or on one of its own."""
        tensor = Tensor(dims=value.dims, dtype=value.dtype, storage=max(storage, 0))
        if storage < 0:
            tensor = Tensor(dims=value.dims, dtype=value.dtype, storage=self.storage(tensor.nbytes, role, name))
        else:
            memory = self._memories[storage]
            memory.nbytes = max(memory.nbytes, tensor.nbytes)
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def value(self, tensor: int) -> TensorType:
        """Return sizes and type of a tensor."""
        return TensorType(dims=self.tensors[tensor].dims, dtype=self.tensors[tensor].dtype)

    def node(
        self,
        op: str,
        inputs: Sequence[int],
        outputs: Sequence[int],
        *,
        text: str = "",
        phase: Phase = Phase.FORWARD,
        layer: str = "",
        flops: float | None = None,
        read_bytes: float | None = None,
        written_bytes: float | None = None,
    ) -> int:
        """Return one call. Text and work that are not given follow from its tensors."""
        text = text or text_of_values(self.value(i) for i in inputs)
        own = float(sum(self.tensors[i].nbytes for i in outputs))
        key = (op, text, tuple(self.tensors[i].dims for i in outputs), own)
        if key not in self._priced:
            self._priced[key] = _described(op, text, [self.tensors[i].dims for i in outputs], own)
        call = self._priced[key]
        at = len(self.nodes)
        for position, tensor in enumerate(inputs):
            memory = self._memories[self.tensors[tensor].storage]
            memory.touched.append((at, phase, False))
            memory.read = True
            floats = DTYPE_BYTES.get(self.tensors[tensor].dtype, 4) > 1 and "int" not in self.tensors[tensor].dtype
            weight = position == 0 if call.family == Family.LOOKUP else position > 0
            forward = phase in (Phase.FORWARD, Phase.NONE)
            if forward and floats and (weight or op == "aten::addmm") and call.family in _WITH_WEIGHTS:
                memory.as_weight = True
        for tensor in outputs:
            if call.family != Family.NONE or not self._memories[self.tensors[tensor].storage].touched:
                self._memories[self.tensors[tensor].storage].touched.append((at, phase, True))
        self.nodes.append(
            Node(
                op=op, inputs=tuple(inputs), outputs=tuple(outputs), text=text, phase=phase, layer=layer,
                flops=call.flops if flops is None else flops,
                read_bytes=call.read_bytes if read_bytes is None else read_bytes,
                written_bytes=call.written_bytes if written_bytes is None else written_bytes,
            )
        )  # fmt: skip
        return at

    def finish(
        self,
        name: str,
        *,
        batch: int = 0,
        source: str = "",
        blocks: tuple[RepeatedBlock, ...] = (),
        notes: Sequence[str] = (),
        unread_live: bool = True,
    ) -> OperatorGraph:
        """Return the graph. With `unread_live`, what no node reads is a result and outlives the step."""
        return OperatorGraph(
            name=name,
            nodes=tuple(self.nodes),
            tensors=tuple(self.tensors),
            storages=tuple(self._settled(memory, unread_live) for memory in self._memories),
            batch=batch,
            source=source,
            blocks=blocks,
            notes=tuple(notes),
        )

    def _settled(self, memory: _Memory, unread_live: bool) -> Storage:
        born, total = memory.born(), len(self.nodes)
        role = memory.role if memory.role is not None else _role(memory, born)
        lasting = born == BEFORE or (unread_live and not memory.read) or not memory.touched
        dies = total if lasting else memory.touched[-1][0]
        return Storage(nbytes=memory.nbytes, role=role, born=born, dies=dies, name=memory.name)


def _described(op: str, text: str, outputs: Sequence[tuple[int, ...]], written_bytes: float) -> Call:
    """Return what a call does whose results have these sizes and bytes together."""
    call = describe(op, text, outputs)
    flops = call.flops if call.family != Family.OTHER else 0.0
    if call.family == Family.CONV and not flops and outputs:  # strides unknown, but the size of the result says it all
        weights = tensor_dims(text)[:2]
        if len(weights) == 2:
            flops = work.operator_work(op, text, {(weights[0], weights[1]): outputs[0]})[1]
    if call.family in (Family.NONE, Family.LOOKUP):
        written_bytes = call.written_bytes
    return replace(call, flops=flops, written_bytes=written_bytes)


def _role(memory: _Memory, born: int) -> Role:
    """Return what a storage is for, from who touches it."""
    phases = {phase for _, phase, _ in memory.touched}
    written = {phase for _, phase, writes in memory.touched if writes}
    if born == BEFORE:
        if Phase.OPTIMIZER in written:
            if written & set(_BACKWARD):
                return Role.GRADIENT  # cleared and added to in place
            return Role.OPTIMIZER if phases == {Phase.OPTIMIZER} else Role.WEIGHT
        if phases == {Phase.OPTIMIZER} or (written and not written - set(_BACKWARD)):
            return Role.GRADIENT  # read by the optimizer alone; or kept between steps, as the buckets of DDP are
        if written:
            return Role.BUFFER
        return Role.WEIGHT if memory.as_weight else Role.INPUT
    first = memory.touched[0][1]
    if first in _BACKWARD and Phase.OPTIMIZER in phases:
        return Role.GRADIENT
    if first in (Phase.FORWARD, Phase.NONE) and any(phase in _BACKWARD for phase in phases):
        return Role.ACTIVATION
    return Role.TEMPORARY


def is_view(op: str) -> bool:
    """Return whether an operator only looks at memory in another way, or allocates it."""
    return family_of(op) == Family.NONE
