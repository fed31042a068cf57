"""Readers by format: ours, and those of other packages.

A package adds one by the entry point group `foretrace.readers`, whose values are `Reader`s::

    [project.entry-points."foretrace.readers"]
    my-profiler = "my_package:READER"
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

import msgspec

from foretrace.errors import ForetraceError
from foretrace.shipped import entry_points
from foretrace.trace.kineto import Recording
from foretrace.trace.stream import RecordingSource, peek

GROUP = "foretrace.readers"
_BATCH = 4096  # entries encoded together
_ENCODER = msgspec.json.Encoder(decimal_format="number")
_KINETO_KEYS = {b"traceEvents", b"schemaVersion", b"deviceProperties"}


@dataclass(frozen=True, kw_only=True)
class Reader:
    """How files of one format are recognised and read: `open` for a recording, or `operators` for a model.

    knows: whether a file is of this format, from its name and its first bytes (decompressed; at least 512 of them
        where the file has so many).
    open: a recording, event by event, from a `RecordingSource` and whether damage is to be skipped; see `translated`.
    operators: an `OperatorGraph` from the decompressed bytes and a name, and those of `takes` that were asked for.
        Raises ForetraceError with the place in the file and what to do.
    takes: keywords of `operators`: "where" (the path, for errors), "step" (number of a training step), "dims" (sizes
        of open dimensions by name).
    """

    name: str
    knows: Callable[[str, bytes], bool]
    open: Callable[[RecordingSource, bool], Recording] | None = None
    operators: Callable[..., object] | None = None
    takes: frozenset[str] = frozenset()


def translated(
    events: Callable[[Iterator[bytes]], Iterable[Mapping[str, object]]],
) -> Callable[[RecordingSource, bool], Recording]:
    """Return an `open` that reads the events of another format as if the PyTorch profiler had written them.

    `events` is given the decompressed blocks of a file and yields entries of the Chrome Trace Event Format with the
    categories and arguments of the PyTorch profiler: `ph`, `name`, `cat`, `pid`, `tid`, `ts` and `dur` (microseconds),
    `args`. A mapping without `ph` holds facts about the whole file, such as `distributedInfo`. It raises TraceError
    with the place in the file and what to do.
    """
    return lambda source, salvage: Recording(replace(source, blocks=_kineto(events(source.blocks))), salvage=salvage)


def _kineto(entries: Iterable[Mapping[str, object]]) -> Iterator[bytes]:
    """Yield the document that the PyTorch profiler would have written."""
    facts: dict[str, object] = {}
    events = iter(entries)
    yield b'{"traceEvents":['
    comma = b""
    while batch := list(itertools.islice(events, _BATCH)):
        for each in batch:
            if "ph" not in each:
                facts |= each
        if found := [each for each in batch if "ph" in each]:
            yield comma + _ENCODER.encode(found)[1:-1]
            comma = b","
    yield b"]" + b"".join(b"," + _ENCODER.encode(key) + b":" + _ENCODER.encode(facts[key]) for key in facts) + b"}"


def keys_of(head: bytes) -> set[bytes]:
    """Return keys in the first bytes of a JSON object, of any depth; none where they are no JSON object."""
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    return set(re.findall(rb'"(\w+)"\s*:', text)) if text.startswith(b"{") else set()


def _is_kineto(_: str, head: bytes) -> bool:
    return head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[") or bool(keys_of(head) & _KINETO_KEYS)


KINETO = Reader(name="recording", knows=_is_kineto, open=lambda source, salvage: Recording(source, salvage=salvage))


@cache
def plugged() -> tuple[Reader, ...]:
    """Return the readers of other packages. Raises ForetraceError for a broken entry point."""
    found = []
    for entry in entry_points(group=GROUP):
        try:
            loaded = entry.load()
        except Exception as error:
            raise ForetraceError(f"the reader {entry.name} ({entry.value}) cannot be loaded: {error}.") from error
        if not isinstance(loaded, Reader) or (loaded.open is None) == (loaded.operators is None):
            raise ForetraceError(
                f"the entry point {entry.name} ({entry.value}) must be a foretrace.trace.readers.Reader with either "
                "`open` or `operators`; correct or uninstall it."
            )
        found.append(loaded)
    return tuple(found)


def opened(source: RecordingSource, *, salvage: bool) -> Recording:
    """Return the recording in a source, by the first reader of another package that knows it, else as the profiler's.

    Raises NotARecordingError where it is none.
    """
    if others := [each for each in plugged() if each.open is not None]:
        head, source = peek(source)
        for reader in others:
            if reader.open is not None and reader.knows(source.name, head):
                return reader.open(source, salvage)
    return Recording(source, salvage=salvage)
