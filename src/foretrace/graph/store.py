"""One file per graph, memory-mapped when loaded.

Layout: 8 bytes magic, 8 bytes length of the header (little-endian), a JSON header (tables, info, and per column its
name, type, shape and offset), then the columns, each at a multiple of 64 bytes. A format number in the header says
which version wrote the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec
import numpy as np

from foretrace.arrays import UInt8
from foretrace.errors import GraphError
from foretrace.files import write_bytes
from foretrace.graph.sound import verify
from foretrace.graph.taskgraph import (
    EDGE_COLUMNS,
    TASK_COLUMNS,
    Assumption,
    Change,
    GraphInfo,
    Lane,
    TaskGraph,
)
from foretrace.reading import opened
from foretrace.trace import facts

FORMAT = 3
MAGIC = b"foretrg\n"
_ALIGN = 64
_LONGEST_HEADER = 1 << 30

_COLUMNS: dict[str, type] = {**TASK_COLUMNS, "in_ptr": np.int64, **EDGE_COLUMNS, "marks": np.int32}


class _Column(msgspec.Struct, frozen=True):
    name: str
    dtype: str
    length: int
    offset: int  # from the end of the header, a multiple of 64


class _Header(msgspec.Struct, frozen=True):
    format: int
    names: tuple[str, ...]
    layers: tuple[str, ...]
    lanes: tuple[Lane, ...]
    info: GraphInfo
    shapes: tuple[str, ...]
    changes: tuple[Change, ...]
    assumptions: tuple[Assumption, ...]
    columns: tuple[_Column, ...]


class _Calibration(TypedDict, total=False):
    machine: dict[str, Any]
    seconds: dict[str, Annotated[float, msgspec.Meta(ge=0, le=1e18)]]


_TABLES = tuple(name for name in _Header.__struct_fields__ if name not in ("format", "columns"))


def save(graph: TaskGraph, path: str | Path) -> Path:
    """Write a graph to one file; an existing file is replaced only when the new one is complete.

    Raises ForetraceError where the folder is missing or may not be written.
    """
    target = Path(path)
    arrays = [np.ascontiguousarray(getattr(graph, name)) for name in _COLUMNS]
    columns, offset = [], 0
    for name, array in zip(_COLUMNS, arrays, strict=True):
        columns.append(_Column(name=name, dtype=array.dtype.str, length=len(array), offset=offset))
        offset += -(-array.nbytes // _ALIGN) * _ALIGN
    header = msgspec.json.encode(
        _Header(format=FORMAT, columns=tuple(columns), **{name: getattr(graph, name) for name in _TABLES})
    )
    header += b" " * (-(len(MAGIC) + 8 + len(header)) % _ALIGN)
    body = [part for array in arrays for part in (array.tobytes(), b"\0" * (-array.nbytes % _ALIGN))]
    write_bytes(target, b"".join([MAGIC, len(header).to_bytes(8, "little"), header, *body]))
    return target


def load(path: str | Path) -> TaskGraph:
    """Open a graph that `save` wrote; its columns are read-only views of the file.

    Raises GraphError when the file is missing, is no graph, was cut, holds what no graph can hold (see
    `foretrace.graph.sound`), or comes from another format version.
    """
    source = Path(path)
    try:
        with opened(source) as file:
            start = file.read(len(MAGIC) + 8)
            size = int.from_bytes(start[len(MAGIC) :], "little")
            if not start.startswith(MAGIC) or len(start) < len(MAGIC) + 8 or size > _LONGEST_HEADER:
                raise GraphError(
                    f"{source} is not a foretrace graph; make one with `foretrace graph TRACE --out FILE`."
                )
            text = file.read(size)
    except OSError as error:
        raise GraphError(f"{source} cannot be read: {error.strerror}.") from None
    version = _format_of(text, source)
    if version != FORMAT:
        raise GraphError(
            f"{source} has graph format {version}, this foretrace reads format {FORMAT}; build the graph again."
        )
    try:
        header = msgspec.json.decode(text, type=_Header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise GraphError(f"{source} has a damaged header ({error}); build the graph again.") from None
    body = len(MAGIC) + 8 + size
    data: UInt8 = np.memmap(source, dtype=np.uint8, mode="r")
    arrays: dict[str, Any] = {}
    for column in header.columns:
        dtype = np.dtype(_COLUMNS.get(column.name, np.uint8))
        begin = body + column.offset
        end = begin + column.length * dtype.itemsize
        fits = column.length >= 0 and column.offset >= 0 and begin % _ALIGN == 0 and end <= len(data)
        if column.name not in _COLUMNS or column.dtype != dtype.str or not fits:
            raise GraphError(f"{source} was cut or damaged at column {column.name[:60]}; build the graph again.")
        arrays[column.name] = data[begin:end].view(dtype)
    if set(arrays) != set(_COLUMNS):
        raise GraphError(f"{source} lacks column {min(set(_COLUMNS) - set(arrays))}; build the graph again.")
    graph = TaskGraph(**arrays, **{name: getattr(header, name) for name in _TABLES})
    _, wrong = facts.sound(header.info.recording)
    if wrong:
        key, reason = next(iter(wrong.items()))
        raise GraphError(f"what {source} says of {key} is damaged: {reason}; make {source} again.")
    try:
        msgspec.convert(header.info.calibration, _Calibration, strict=True)
    except msgspec.ValidationError as error:
        raise GraphError(
            f"what {source} says of its operators' times is damaged: {error}; make {source} again."
        ) from None
    _check_shapes(header.shapes, source)
    try:
        return verify(graph)
    except GraphError as error:
        raise GraphError(f"{source} is damaged: {error.args[0].removesuffix('.')}; build the graph again.") from None


def _format_of(text: bytes, source: Path) -> Any:
    """Return the format number alone, so that a file of another version is named and not called damaged."""

    class OnlyFormat(msgspec.Struct):
        format: int

    try:
        return msgspec.json.decode(text, type=OnlyFormat).format
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise GraphError(f"{source} has a damaged header ({error}); build the graph again.") from None


def _check_shapes(shapes: Sequence[str], source: Path) -> None:
    """Raise GraphError where the text of an operator's inputs is none: see `foretrace.trace.trace.Shapes`."""
    for text in shapes:
        try:
            inputs = msgspec.json.decode(text, type=list[Any])
            sound = len(inputs) in (3, 4) and all(isinstance(each, list) for each in inputs[:3])
            sound = sound and (len(inputs) == 3 or isinstance(inputs[3], str))
            sound = sound and all(isinstance(each, list) for each in inputs[0])
            sound = sound and all(type(size) is int and size >= 0 for size in _flat(inputs[0]))
        except (msgspec.DecodeError, RecursionError):
            sound = False
        if not sound:
            raise GraphError(f"{source} is damaged: {text[:60]!r} are no inputs of an operator; make it again.")


def _flat(sizes: list[Any]) -> Iterator[Any]:
    for each in sizes:
        if isinstance(each, list):
            yield from _flat(each)
        else:
            yield each
