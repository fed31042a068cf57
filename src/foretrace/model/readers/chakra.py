"""Chakra and PyTorch execution traces as an `OperatorGraph`.

PyTorch's ExecutionTraceObserver writes JSON with a `schema`; its older form has `inputs` as a list, the Chakra one as
`{values, shapes, types}`. MLCommons Chakra (arXiv:2305.14516) stores the same in protocol buffers. A tensor there is
`[tensor, storage, offset, elements, bytes per element, device]`: these identities are what other recordings lack, so
edges and memory are as they were.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from foretrace.errors import ForetraceError
from foretrace.model.operator_graph import OperatorGraph
from foretrace.model.readers import protobuf
from foretrace.model.readers.chakra_graph import ChakraNode, build

#: Versions of the JSON form that files of which were read.
VERSIONS = (
    "1.0.0",
    "1.0.1",
    "1.0.2-chakra.0.0.4",
    "1.0.3-chakra.0.0.4",
    "1.0.4-chakra.0.0.4",
    "1.1.0-chakra.0.0.4",
    "1.1.1-chakra.0.0.4",
)
_KNOWN = {each.partition("-")[0] for each in VERSIONS}
_PIECE = re.compile(r"\((\d+)\)$")  # of an operator that kernels cut into pieces, in linked traces


def from_chakra(data: bytes, name: str, *, where: str = "the trace", step: int | None = None) -> OperatorGraph:
    """Return the operators of one step of an execution trace, JSON or protocol buffers (not compressed).

    `step` counts the training steps of the trace from 0; without it, the last whole one. Raises ForetraceError with the
    version found and those known, or the node and field that cannot be read.
    """
    if data.lstrip()[:1] == b"{":
        version, entries = _json(data, where)
    else:
        version, entries = _protobuf(data, where)
    return build(sorted(entries, key=lambda each: each.id), name, version=version, where=where, step=step)


def _check_version(version: str, where: str) -> None:
    if version.partition("-")[0] not in _KNOWN:
        raise ForetraceError(
            f"{where} is an execution trace in schema {version!r}, and this foretrace reads {', '.join(VERSIONS)}; "
            "record it with another PyTorch, or ask for that schema."
        )


# --- JSON ----------------------------------------------------------------------------------------------------


def _json(data: bytes, where: str) -> tuple[str, list[ChakraNode]]:
    try:
        form = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        form = _lenient(data, where)
    if not isinstance(form, dict):
        raise ForetraceError(f"{where} is no execution trace: an object with schema and nodes is expected at its top.")
    if "workload_graph" in form:
        raise ForetraceError(
            f"{where} is a Chakra workload graph, which has no sizes of tensors; give the execution trace (schema, "
            "nodes) that it was made of, or its protocol buffer file."
        )
    version, nodes = form.get("schema"), form.get("nodes")
    if not isinstance(version, str):
        raise ForetraceError(
            f"{where} is an execution trace without a schema; this foretrace reads {', '.join(VERSIONS)}."
        )
    _check_version(version, where)
    if not isinstance(nodes, list):
        raise ForetraceError(f"{where}: nodes is no list; record the execution trace again.")
    return version, [_entry(node, i, where) for i, node in enumerate(nodes)]


def _lenient(data: bytes, where: str) -> Any:
    """Return observers write names with control characters, and NaN."""
    import json

    try:
        return json.loads(data.decode("utf-8", errors="replace"), strict=False)
    except (ValueError, RecursionError) as error:
        raise ForetraceError(
            f"{where} is no whole JSON text: {error}; stop the observer before the process ends, or copy it again."
        ) from None


def _entry(node: Any, index: int, where: str) -> ChakraNode:
    """Return one node of either JSON form."""
    try:
        attributes: dict[str, Any]
        if isinstance(node["inputs"], dict):
            inputs, outputs = node["inputs"], node["outputs"]
            attributes = {each["name"]: each.get("value") for each in node.get("attrs", ())}
            parent = node["ctrl_deps"]
        else:
            inputs = {key: node[f"input_{key}"] for key in ("shapes", "types")} | {"values": node["inputs"]}
            outputs = {key: node[f"output_{key}"] for key in ("shapes", "types")} | {"values": node["outputs"]}
            attributes, parent = node, node["parent"]
        if isinstance(parent, list):
            parent = parent[0] if parent else -1
        return ChakraNode(
            id=int(node["id"]),
            name=str(node["name"]),
            parent=int(parent),
            inputs=_arguments(inputs),
            outputs=_arguments(outputs),
            thread=int(attributes.get("tid") or 0),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ForetraceError(
            f"{where}: nodes[{index}] cannot be read ({type(error).__name__}: {error}); record the trace again."
        ) from None


def _arguments(part: dict[str, Any]) -> tuple[tuple[Any, Any, str], ...]:
    """Return (value, shape, type) of every argument."""
    values, shapes, types = part["values"], part["shapes"], part["types"]
    if not (isinstance(values, list) and isinstance(shapes, list) and isinstance(types, list)):
        raise TypeError("values, shapes and types are lists")
    return tuple((value, shape, str(kind)) for value, shape, kind in zip(values, shapes, types, strict=False))


# --- protocol buffers ----------------------------------------------------------------------------------------


def _protobuf(data: bytes, where: str) -> tuple[str, list[ChakraNode]]:
    """Return global metadata first, then one message per node."""
    try:
        parts = list(protobuf.messages(data))
        if not parts:
            raise ForetraceError("it is empty")
        metadata = dict(_attribute(value) for number, value in protobuf.fields(parts[0]) if number == 2)
        if not metadata:
            metadata = dict(_attribute(value) for number, value in protobuf.fields(parts[0]) if number == 1)
        version = str(metadata.get("schema", ""))
        entries = [entry for i, part in enumerate(parts[1:]) for entry in _node(part, i, where)]
    except ForetraceError as error:
        raise ForetraceError(f"{where} is no Chakra execution trace: {str(error).rstrip('.')}.") from None
    _check_version(version, where)
    return f"{version} (protobuf)", entries


def _attribute(value: protobuf.Wire) -> tuple[str, Any]:
    """Return name and value: 3 double, 7 to 13 integers, 27 bool, 29 string."""
    name = ""
    found: str | float | None = None
    if not isinstance(value, bytes):
        raise ForetraceError("an attribute is no message")
    for number, each in protobuf.fields(value):
        if number == 1:
            name = protobuf.text(each)
        elif number in (29, 31):
            found = protobuf.text(each)
        elif number in (3, 5):
            found = protobuf.double(each)
        elif number > 2:
            found = protobuf.signed(each)
    return name, found


def _node(data: bytes, index: int, where: str) -> Iterator[ChakraNode]:
    """Yield the operator in a message; nothing for kernels and for later pieces of an operator.

    Its fields: 1 id, 2 name, 3 kind, 4 caller, 5 data it needs, 8 inputs, 9 outputs, 10 the rest.
    """
    fields: dict[int, protobuf.Wire] = {}
    parents: list[int] = []
    rest: dict[str, Any] = {}
    for number, value in protobuf.fields(data):
        if number == 4:
            parents += protobuf.numbers(value)
        elif number == 10:
            rest |= [_attribute(value)]
        else:
            fields[number] = value
    name = protobuf.text(fields.get(2, b""))
    piece = _PIECE.search(name)
    if not rest.get("is_cpu_op", True) or (piece and int(piece[1]) > 0):
        return
    thread = rest.get("tid")
    inputs, outputs = (each if isinstance(each := fields.get(at), bytes) else b"" for at in (8, 9))
    yield ChakraNode(
        id=protobuf.signed(fields.get(1, 0)),
        name=_PIECE.sub("", name),
        parent=parents[0] if parents else -1,
        inputs=_literals(inputs, index, where),
        outputs=_literals(outputs, index, where),
        thread=thread if isinstance(thread, int) else 0,
    )


def _literals(data: bytes, index: int, where: str) -> tuple[tuple[Any, Any, str], ...]:
    """Return arguments in a message of three strings: 1 values, 2 shapes, 3 types, each a list as Python writes it."""
    found = {number: protobuf.text(value) for number, value in protobuf.fields(data)}
    part = {}
    for number, key in ((1, "values"), (2, "shapes"), (3, "types")):
        text = re.sub(r"(?<![\w'\"])(-?)(inf|nan)(?![\w'\"])", "None", found.get(number) or "[]")
        try:
            part[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            raise ForetraceError(f"{where}: node {index} has {key} that cannot be read: {text[:60]!r}") from None
    try:
        return _arguments(part)
    except TypeError as error:
        raise ForetraceError(f"{where}: node {index}: {error}") from None
