"""One way in: operators from a file, whatever it is, decided by its content."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from foretrace import reading
from foretrace.errors import ForetraceError
from foretrace.model.operator_graph import OperatorGraph
from foretrace.trace import foreign
from foretrace.trace.readers import KINETO, Reader, keys_of, plugged

_HEAD = 1 << 16  # bytes that tell what a file is
KNOWN = (
    "a recording, a saved graph, the JSON form of docs/operators.md, an execution trace of PyTorch or Chakra, "
    "or an ONNX model"
)


def _json_form(data: bytes, name: str, *, where: str) -> OperatorGraph:
    from foretrace.model.readers.json_form import loads

    return loads(data, where)


def _chakra(data: bytes, name: str, *, where: str, step: int | None = None) -> OperatorGraph:
    from foretrace.model.readers.chakra import from_chakra

    return from_chakra(data, name, where=where, step=step)


def _onnx(data: bytes, name: str, *, where: str, dims: Mapping[str, int] | None = None) -> OperatorGraph:
    from foretrace.model.readers.onnx import from_onnx

    return from_onnx(data, name, where=where, dims=dims)


def _is_graph(_: str, head: bytes) -> bool:
    from foretrace.graph.store import MAGIC

    return head.startswith(MAGIC)


def _is_json_form(_: str, head: bytes) -> bool:
    keys = keys_of(head)
    if b"format" in keys or (b"calls" in keys and b"traceEvents" not in keys):
        return True
    return bool(keys & {b"nodes", b"tensors"}) and not keys & _CHAKRA_KEYS and not KINETO.knows("", head)


def _is_onnx(name: str, head: bytes) -> bool:
    """Return whether a ModelProto begins with its version."""
    return not _is_text(head) and (name.removesuffix(".gz").endswith(".onnx") or head.startswith(b"\x08"))


def _is_chakra(name: str, head: bytes) -> bool:
    if _is_text(head):
        return bool(keys_of(head) & _CHAKRA_KEYS)
    begins = re.match(rb"[\x02-\x7f].?[\x0a\x12]", head, re.DOTALL) is not None
    return name.removesuffix(".gz").endswith(".et") or (begins and not foreign.by_name(name))


def _is_text(head: bytes) -> bool:
    return head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"[")


_CHAKRA_KEYS = {b"schema", b"workload_graph"}
GRAPH = Reader(name="graph", knows=_is_graph)
JSON = Reader(name="json", knows=_is_json_form, operators=_json_form, takes=frozenset({"where"}))
ONNX = Reader(name="onnx", knows=_is_onnx, operators=_onnx, takes=frozenset({"where", "dims"}))
CHAKRA = Reader(name="chakra", knows=_is_chakra, operators=_chakra, takes=frozenset({"where", "step"}))


def load_operators(
    path: str | Path,
    *,
    name: str = "",
    dims: Mapping[str, int] | None = None,
    step: int | None = None,
    rank: int | None = None,
    batch: int = 0,
    salvage: bool = False,
    progress: Callable[[float], None] | None = None,
) -> OperatorGraph:
    """Return the operators in a file or folder.

    `dims` are sizes of open dimensions (ONNX), `step` the training step and `rank` the rank (recordings and execution
    traces); `batch` is the samples per step, where the file does not tell them. Raises ForetraceError (TraceError,
    GraphError, MissingExtraError) for what cannot be read, and for arguments that do not go with the kind of file.
    """
    path = Path(path)
    reader = reader_of(path)
    if dims and "dims" not in reader.takes:
        raise ForetraceError(f"{path} is no ONNX model, so it has no open dimensions; leave out `dim=`.")
    if step is not None and reader.operators is not None and "step" not in reader.takes:
        raise ForetraceError(f"{path} has one step only; leave out the step.")
    called = name or _name(path)
    if reader.operators is None:
        found = _recorded(path, reader, called, step=step, rank=rank, salvage=salvage, progress=progress)
    elif rank is not None:
        raise ForetraceError(f"{path} is of one rank; leave out the rank.")
    else:
        asked = {"where": str(path), "step": step, "dims": dims}
        data = reading.read_bytes(path, mend="copy it again")
        made = reader.operators(data, called, **{key: asked[key] for key in reader.takes})
        if not isinstance(made, OperatorGraph):
            raise ForetraceError(f"the reader {reader.name} must return an OperatorGraph, got {type(made).__name__}.")
        found = made
    if batch and found.batch and found.batch != batch:
        how = "export it with an open dimension for `dim=`" if "dims" in reader.takes else "leave out the batch"
        raise ForetraceError(f"{path} has {found.batch} samples per step, not {batch}, and stays so; {how}.")
    if batch:
        found = replace(found, batch=batch)
    return replace(found, name=called) if name or not found.name else found


def reader_of(path: Path) -> Reader:
    """Return the reader of a file, by its first bytes and its name. Raises ForetraceError where there is none."""
    if path.is_dir():
        return KINETO
    head, name = first_bytes(path), path.name
    if GRAPH.knows(name, head):
        return GRAPH
    if head.startswith(b"PK\x03\x04") or ".tar" in path.suffixes or path.suffix == ".tgz":
        return KINETO
    for reader in plugged():
        if reader.knows(str(path), head):
            return reader
    if said := foreign.by_content(head[:16]):
        raise ForetraceError(f"{path} {said}.")
    for reader in (JSON, KINETO, ONNX, CHAKRA):
        if reader.knows(name, head):
            return reader
    if _is_text(head):
        said = foreign.by_content(head)
        raise ForetraceError(f"{path} {said}." if said else f"{path} is JSON, but not {KNOWN}; give one of those.")
    said = foreign.by_name(path) or foreign.by_content(head)
    raise ForetraceError(f"{path} {said}." if said else f"{path} is not {KNOWN}; give one of those.")


def first_bytes(path: Path) -> bytes:
    """Return what a file begins with, unpacked. Raises ForetraceError where it cannot be read or is empty."""
    try:
        with reading.opened(path) as file:
            head = file.read(_HEAD)
    except (OSError, ValueError) as error:
        if said := reading.address(path):
            raise ForetraceError(f"{said}.") from None
        raise ForetraceError(
            f"cannot read {path} ({getattr(error, 'strerror', None) or error}); give a file that exists."
        ) from None
    if not head:
        raise ForetraceError(f"{path} is empty; give {KNOWN}.")
    if head.startswith(b"\x1f\x8b"):
        try:
            head = zlib.decompressobj(wbits=31).decompress(head, _HEAD)
        except zlib.error as error:
            raise ForetraceError(f"{path} is a damaged gzip file ({error}); copy it again.") from None
    return head


def _name(path: Path) -> str:
    name = path.name.removesuffix(".gz")
    return name.rpartition(".")[0] or name


def _recorded(
    path: Path,
    reader: Reader,
    name: str,
    *,
    step: int | None,
    rank: int | None,
    salvage: bool,
    progress: Callable[[float], None] | None,
) -> OperatorGraph:
    from foretrace.model.readers.calls import from_recording

    if reader == GRAPH:
        from foretrace.graph.store import load

        graph = load(path)
    else:
        from foretrace.graph.builder import build
        from foretrace.trace.read import read

        ranks = None if rank is None else [rank]
        graph = build(read(path, ranks=ranks, salvage=salvage, progress=progress), rank)
    return from_recording(graph, name, step=step)
