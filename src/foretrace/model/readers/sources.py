"""One way in: operators from a file, whatever it is, decided by its content."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import StrEnum
from pathlib import Path

from foretrace import reading
from foretrace.errors import ForetraceError
from foretrace.model.operator_graph import OperatorGraph
from foretrace.trace import foreign

_HEAD = 1 << 16  # bytes that tell what a file is
KNOWN = (
    "a recording, a saved graph, the JSON form of docs/operators.md, an execution trace of PyTorch or Chakra, "
    "or an ONNX model"
)


class SourceKind(StrEnum):
    """What a file is."""

    JSON = "json"
    CHAKRA = "chakra"
    ONNX = "onnx"
    RECORDING = "recording"
    GRAPH = "graph"


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
    """The operators in a file or folder.

    `dims` are sizes of open dimensions (ONNX), `step` the training step and `rank` the rank (recordings and execution
    traces); `batch` is the samples per step, where the file does not tell them. Raises ForetraceError (TraceError,
    GraphError, MissingExtraError) for what cannot be read, and for arguments that do not go with the kind of file.
    """
    from foretrace.model.readers.chakra import from_chakra
    from foretrace.model.readers.json_form import loads
    from foretrace.model.readers.onnx import from_onnx

    path = Path(path)
    kind = kind_of(path)
    if dims and kind != SourceKind.ONNX:
        raise ForetraceError(f"{path} is no ONNX model, so it has no open dimensions; leave out `dim=`.")
    if step is not None and kind in (SourceKind.ONNX, SourceKind.JSON):
        raise ForetraceError(f"{path} has one step only; leave out the step.")
    called = name or _name(path)
    if kind in (SourceKind.RECORDING, SourceKind.GRAPH):
        found = _recorded(path, kind, called, step=step, rank=rank, salvage=salvage, progress=progress)
    elif rank is not None:
        raise ForetraceError(f"{path} is of one rank; leave out the rank.")
    else:
        data = unpacked(path)
        if kind == SourceKind.JSON:
            found = loads(data, str(path))
        elif kind == SourceKind.CHAKRA:
            found = from_chakra(data, called, where=str(path), step=step)
        else:
            found = from_onnx(data, called, where=str(path), dims=dims)
    if batch and found.batch and found.batch != batch:
        how = "export it with an open dimension for `dim=`" if kind == SourceKind.ONNX else "leave out the batch"
        raise ForetraceError(f"{path} has {found.batch} samples per step, not {batch}, and stays so; {how}.")
    if batch:
        found = replace(found, batch=batch)
    return replace(found, name=called) if name or not found.name else found


def kind_of(path: Path) -> SourceKind:
    """What a file is, by its first bytes. Raises ForetraceError where it is none of those known."""
    from foretrace.graph.store import MAGIC

    if path.is_dir():
        return SourceKind.RECORDING
    head = _head(path)
    if head.startswith(MAGIC):
        return SourceKind.GRAPH
    if head.startswith(b"PK\x03\x04") or ".tar" in path.suffixes or path.suffix == ".tgz":
        return SourceKind.RECORDING
    if said := foreign.by_content(head[:16]):
        raise ForetraceError(f"{path} {said}.")
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if text.startswith(b"["):
        return SourceKind.RECORDING
    if text.startswith(b"{"):
        return _kind_of_object(path, text)
    inner = path.with_suffix("") if path.suffix == ".gz" else path
    if inner.suffix == ".onnx" or head.startswith(b"\x08"):  # ModelProto begins with its version
        return SourceKind.ONNX
    if (said := foreign.by_name(path)) and inner.suffix != ".et":
        raise ForetraceError(f"{path} {said}.")
    if inner.suffix == ".et" or re.match(rb"[\x02-\x7f].?[\x0a\x12]", head, re.DOTALL):
        return SourceKind.CHAKRA
    said = foreign.by_content(head)
    raise ForetraceError(f"{path} {said}." if said else f"{path} is not {KNOWN}; give one of those.")


def _kind_of_object(path: Path, text: bytes) -> SourceKind:
    """Of a JSON object, by the keys near its beginning."""
    keys = set(re.findall(rb'"(\w+)"\s*:', text))
    if b"format" in keys or (b"calls" in keys and b"traceEvents" not in keys):
        return SourceKind.JSON
    if b"traceEvents" in keys or b"schemaVersion" in keys or b"deviceProperties" in keys:
        return SourceKind.RECORDING
    if b"schema" in keys or b"workload_graph" in keys:
        return SourceKind.CHAKRA
    if b"nodes" in keys or b"tensors" in keys:
        return SourceKind.JSON
    said = foreign.by_content(text)
    raise ForetraceError(f"{path} {said}." if said else f"{path} is JSON, but not {KNOWN}; give one of those.")


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
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


def unpacked(path: Path) -> bytes:
    """All bytes of a file, unpacked if it is gzip. Raises ForetraceError."""
    return reading.read_bytes(path, mend="copy it again")


def _name(path: Path) -> str:
    name = path.name.removesuffix(".gz")
    return name.rpartition(".")[0] or name


def _recorded(
    path: Path,
    kind: SourceKind,
    name: str,
    *,
    step: int | None,
    rank: int | None,
    salvage: bool,
    progress: Callable[[float], None] | None,
) -> OperatorGraph:
    from foretrace.model.readers.recording import from_recording

    if kind == SourceKind.GRAPH:
        from foretrace.graph.store import load

        graph = load(path)
    else:
        from foretrace.graph.builder import build
        from foretrace.trace.read import read

        ranks = None if rank is None else [rank]
        graph = build(read(path, ranks=ranks, salvage=salvage, progress=progress), rank)
    return from_recording(graph, name, step=step)
