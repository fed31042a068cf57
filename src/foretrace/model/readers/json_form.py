"""The plain JSON form of an `OperatorGraph` (docs/operators.md): written whole, read whole or in part.

A file that `write` made reads back as the same graph. A file written by hand may leave out what follows from the rest:
storages and their lifetimes, text, FLOPs and bytes; or tensors altogether, as a list of calls with their sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from math import isfinite, prod
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import structs

from foretrace.errors import ForetraceError
from foretrace.files import write_bytes
from foretrace.graph.taskgraph import Phase
from foretrace.model.draft import OperatorGraphDraft
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
from foretrace.model.readers.calls import Called, from_calls
from foretrace.model.texts import LARGEST, TensorType, complaint, text_of

FORMAT = "foretrace operators"
VERSION = 1
_MOST_COPIES = 1_000_000  # of one call of a list

_Size = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
_PHASES = {phase.name.lower(): phase for phase in Phase}
_ROLES = {role.name.lower(): role for role in Role}
_Found = TypeVar("_Found")


class _Tensor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    dims: tuple[_Size, ...]
    dtype: str = "float32"
    storage: int = -1  # -> storages
    of: int = -1  # without storages: the tensor whose memory it shares
    role: str = ""
    name: str = ""


class _Storage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    nbytes: _Size
    role: str
    born: int
    dies: int
    name: str = ""


class _Node(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    op: str
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    text: str = ""
    phase: str = "forward"
    layer: str = ""
    flops: float | None = None
    read_bytes: float | None = None
    written_bytes: float | None = None


class _Call(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    op: str
    dims: tuple[tuple[_Size, ...], ...] = ()
    dtype: str = "float32"
    text: str = ""
    phase: str = "forward"
    layer: str = ""
    times: Annotated[int, msgspec.Meta(ge=1, le=_MOST_COPIES)] = 1


class _Block(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    first: _Size
    length: Annotated[int, msgspec.Meta(ge=1)]
    times: Annotated[int, msgspec.Meta(ge=2)]
    layer: str = ""


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    """What is looked at before the rest."""

    format: str = ""
    version: int = 0


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    format: str
    version: int
    name: str = ""
    batch: _Size = 0
    source: str = "json"
    notes: tuple[str, ...] = ()
    tensors: tuple[_Tensor, ...] = ()
    storages: tuple[_Storage, ...] | None = None
    nodes: tuple[_Node, ...] = ()
    calls: tuple[_Call, ...] = ()
    blocks: tuple[_Block, ...] = ()


def checked(path: Path) -> None:
    """Raise ForetraceError for a file whose name is not one of JSON."""
    if not path.name.endswith((".json", ".json.gz")):
        raise ForetraceError(
            f"`out={path}`: operators are written as JSON; name a file that ends in .json or .json.gz."
        )


def write(graph: OperatorGraph, path: Path) -> None:
    """Write a graph that `read` gives back as it is; gzip if the name ends in .gz. Raises ForetraceError."""
    write_bytes(path, dumps(graph), compress=path.suffix == ".gz")


def dumps(graph: OperatorGraph) -> bytes:
    """Return the JSON text of a graph, indented by one item a line."""
    form = _File(
        format=FORMAT,
        version=VERSION,
        name=graph.name,
        batch=graph.batch,
        source=graph.source,
        notes=graph.notes,
        tensors=tuple(_Tensor(**_fields(each)) for each in graph.tensors),
        storages=tuple(_Storage(**_fields(each, role=each.role.name.lower())) for each in graph.storages),
        nodes=tuple(_Node(**_fields(each, phase=each.phase.name.lower())) for each in graph.nodes),
        blocks=tuple(_Block(**_fields(each)) for each in graph.blocks),
    )
    # `format` and `version` come first, so that a reader knows the file by its beginning.
    return b'{\n"format": "%s",\n' % FORMAT.encode() + _lines(msgspec.to_builtins(form)) + b"\n}\n"


def _fields(each: Node | Tensor | Storage | RepeatedBlock, **other: Any) -> dict[str, Any]:
    return {field.name: getattr(each, field.name) for field in fields(each)} | other


def _lines(form: dict[str, object]) -> bytes:
    parts = []
    for key, value in form.items():
        if key == "format":
            continue
        if isinstance(value, list | tuple) and value:
            inner = b",\n  ".join(msgspec.json.encode(each) for each in value)
            parts.append(b'"%s": [\n  %s\n]' % (key.encode(), inner))
        else:
            parts.append(b'"%s": %s' % (key.encode(), msgspec.json.encode(value)))
    return b",\n".join(parts)


def loads(data: bytes, where: str = "the text") -> OperatorGraph:
    """Return the graph in a JSON text. Raises ForetraceError with `where`, the field and what to do."""
    try:
        head = msgspec.json.decode(data, type=_Head)
        if head.format != FORMAT:
            raise ForetraceError(f'{where} is not in the form of operators: write "format": "{FORMAT}" in it.')
        if head.version != VERSION:
            raise ForetraceError(
                f"{where} is in version {head.version} of the form of operators, and this foretrace reads version "
                f"{VERSION}; write it again with the foretrace that reads it."
            )
        form = msgspec.json.decode(data, type=_File)
    except msgspec.ValidationError as error:
        text = str(error).rstrip(".")
        raise ForetraceError(f"{where}: {text}; docs/operators.md shows every field.") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ForetraceError(f"{where} is no JSON text: {error}; correct it or write it again.") from None
    return _Reader(form, where).graph()


class _Reader:
    """Checks a decoded file and makes the graph of it."""

    def __init__(self, form: _File, where: str) -> None:
        self.form, self.where = form, where

    def graph(self) -> OperatorGraph:
        form = self.form
        if form.calls and (form.nodes or form.tensors or form.storages):
            self._fail("calls", "cannot be given with nodes", "give either the calls alone, or nodes and tensors")
        if not form.nodes and not form.calls:
            self._fail("nodes", "is empty", "give at least one node, or calls")
        if form.calls:
            return self._of_calls()
        for i, tensor in enumerate(form.tensors):
            self._known(f"tensors[{i}].dtype", tensor.dtype, DTYPE_BYTES, "known type")
            if DTYPE_BYTES[tensor.dtype] * prod(tensor.dims) > LARGEST:
                self._fail(f"tensors[{i}].dims", "hold more than 2**62 bytes", "give sizes of a real tensor")
        self._check_nodes()
        for i, block in enumerate(form.blocks):
            if block.first + block.length * block.times > len(form.nodes):
                self._fail(f"blocks[{i}]", "ends behind the last node", "keep blocks within the nodes")
        if form.storages is not None:
            return self._of_storages(form.storages)
        return self._draft().finish(
            form.name, batch=form.batch, source=form.source, blocks=self._blocks(), notes=form.notes
        )

    def _fail(self, field: str, what: str, mend: str) -> None:
        raise ForetraceError(f"{self.where}: {field} {what}; {mend}.")

    def _known(self, field: str, value: str, known: Mapping[str, _Found], what: str) -> _Found:
        if value not in known:
            self._fail(field, f"{value!r} is no {what}", f"use one of {', '.join(known)}")
        return known[value]

    def _text(self, field: str, text: str) -> None:
        if wrong := complaint(text):
            self._fail(f"{field}.text", wrong, 'write it as a recording does: "[[[8,3]],[\\"float\\"],[\\"\\"]]"')

    def _check_nodes(self) -> None:
        form = self.form
        made: dict[int, int] = {}
        for at, node in enumerate(form.nodes):
            for i in node.outputs:
                if i in made:
                    self._fail(f"nodes[{at}].outputs", f"has tensor {i}, which node {made[i]} makes", "make it once")
                made[i] = at
        for at, node in enumerate(form.nodes):
            field = f"nodes[{at}]"
            if not node.op:
                self._fail(f"{field}.op", "is empty", 'name the operator, such as "aten::addmm"')
            self._known(f"{field}.phase", node.phase, _PHASES, "phase")
            if node.text:
                self._text(field, node.text)
            for key in ("inputs", "outputs"):
                for i in getattr(node, key):
                    if not 0 <= i < len(form.tensors):
                        self._fail(
                            f"{field}.{key}", f"has tensor {i}, of {len(form.tensors)} tensors", "count them from 0"
                        )
            for i in node.inputs:
                if made.get(i, -1) >= at:
                    self._fail(f"{field}.inputs", f"has tensor {i}, which node {made[i]} makes", "put that node before")
            for key in ("flops", "read_bytes", "written_bytes"):
                number = getattr(node, key)
                if number is not None and not (isfinite(number) and number >= 0):
                    self._fail(f"{field}.{key}", f"is {number}", "give a number from 0 on, or leave it out")

    def _of_storages(self, stated: tuple[_Storage, ...]) -> OperatorGraph:
        """Return where memory is stated, it is taken as it stands."""
        form = self.form
        for i, each in enumerate(stated):
            field = f"storages[{i}]"
            self._known(f"{field}.role", each.role, _ROLES, "role")
            if not BEFORE <= each.born < len(form.nodes) or not each.born <= each.dies <= len(form.nodes):
                self._fail(
                    field,
                    f"lives from {each.born} to {each.dies}, of {len(form.nodes)} nodes",
                    "born is -1 or a node, dies a node not before that, or the number of nodes",
                )
        for i, tensor in enumerate(form.tensors):
            if not 0 <= tensor.storage < len(stated):
                self._fail(
                    f"tensors[{i}].storage", f"is {tensor.storage}, of {len(stated)} storages", "count them from 0"
                )
        derived = self._draft()
        return OperatorGraph(
            name=form.name,
            nodes=tuple(derived.nodes),
            tensors=tuple(Tensor(dims=t.dims, dtype=t.dtype, storage=t.storage) for t in form.tensors),
            storages=tuple(Storage(**structs.asdict(each) | {"role": _ROLES[each.role]}) for each in stated),
            batch=form.batch,
            source=form.source,
            blocks=self._blocks(),
            notes=form.notes,
        )

    def _draft(self) -> OperatorGraphDraft:
        """Return nodes with everything that follows from their tensors."""
        form, draft = self.form, OperatorGraphDraft()
        for i, tensor in enumerate(form.tensors):
            role = self._known(f"tensors[{i}].role", tensor.role, _ROLES, "role") if tensor.role else None
            if tensor.of >= i or tensor.of < -1:
                self._fail(f"tensors[{i}].of", f"is {tensor.of}", "name a tensor that stands before it")
            storage = draft.tensors[tensor.of].storage if tensor.of >= 0 else -1
            draft.tensor(TensorType(dims=tensor.dims, dtype=tensor.dtype), storage=storage, role=role, name=tensor.name)
        for node in form.nodes:
            full = None not in (node.flops, node.read_bytes, node.written_bytes)
            if full and form.storages is not None:  # nothing to find out
                draft.nodes.append(Node(**structs.asdict(node) | {"phase": _PHASES[node.phase]}))
            else:
                draft.node(**structs.asdict(node) | {"phase": _PHASES[node.phase]})
        return draft

    def _blocks(self) -> tuple[RepeatedBlock, ...]:
        return tuple(RepeatedBlock(**structs.asdict(each)) for each in self.form.blocks)

    def _of_calls(self) -> OperatorGraph:
        """Return a list of calls, with the sizes of their inputs."""
        form, rows = self.form, []
        if sum(call.times for call in form.calls) > _MOST_COPIES:
            self._fail("calls", f"are more than {_MOST_COPIES:,} with their times", "shorten the list")
        for i, call in enumerate(form.calls):
            field = f"calls[{i}]"
            self._known(f"{field}.dtype", call.dtype, DTYPE_BYTES, "known type")
            if not call.op:
                self._fail(f"{field}.op", "is empty", 'name the operator, such as "aten::addmm"')
            if not call.text and not call.dims:
                self._fail(field, "has no dims", "give the sizes of its input tensors")
            for dims in call.dims:
                if 16 * prod(dims) > LARGEST:
                    self._fail(f"{field}.dims", "hold more than 2**62 bytes", "give sizes of a real tensor")
            if call.text:
                self._text(field, call.text)
            text = call.text or text_of([list(dims) for dims in call.dims], [call.dtype] * len(call.dims))
            row = Called(
                op=call.op,
                text=text,
                phase=self._known(f"{field}.phase", call.phase, _PHASES, "phase"),
                layer=call.layer,
            )
            rows += [row] * call.times
        return from_calls(rows, form.name, source=form.source, batch=form.batch, notes=form.notes)
