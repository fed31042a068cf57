"""Kineto and Chrome JSON, event by event, without ever holding the whole document.

A recording is `{"schemaVersion": 1, ..., "traceEvents": [{...}, ...], "traceName": ...}` or a bare array of
events. The array is cut near the end of the unpacked bytes, where one event seems to end and the next to begin.
That the place is no part of a string or of an argument is proven by decoding: a chunk must be an array of events.

Real files bend JSON: raw control characters, NaN, bytes that are not UTF-8, Windows paths with single
backslashes. Such a chunk is mended (same length, so that byte numbers stay right) and decoded again.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import msgspec
from msgspec import Raw

from foretrace.errors import TraceError
from foretrace.trace import foreign
from foretrace.trace.entries import MALFORMED, Entry, Foreign, decode_array, decode_entry
from foretrace.trace.stream import BLOCK, CutError, RecordingSource

Entries = list[Entry | Foreign]

MAX_EVENT = 8 << 20  # bytes of one event
MAX_METADATA = 64 << 20  # bytes of everything before the events, and of everything behind them
MAX_MENDED = 4 << 20  # bytes of text to mend; mending takes up to 50 times its memory
MAX_BROKEN = 100_000  # events to leave out of one file before it counts as no recording
MAX_CUTS = 4  # places to try in a chunk before looking closer

_BOUNDARY = re.compile(rb"\}\s*,\s*(?=\{)")
_EVENT_BOUNDARY = re.compile(rb'\}\s*,\s*(?=\{\s*(?:"(?:ph|name|cat|pid|tid|ts)"\s*:|\}))')
_ARRAY_END = re.compile(rb'\}\s*\](?=\s*(?:,\s*"|\}|\Z))')
_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')

_CONTROL = bytes(max(i, 0x20) for i in range(256))
_ESCAPE = re.compile(
    rb'\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    rb"|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})?"
)
_CONSTANT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?+|-?\b(?:NaN|nan|Infinity|inf)\b')
_BYTE = re.compile(r" \(byte [0-9]+\)|: invalid .* byte$")
_STRAY = re.compile("[\udc80-\udcff]")


class NotARecordingError(TraceError):
    """The file may be whole, but it is something else than a recording."""


_RAWS = msgspec.json.Decoder(list[Raw])
_FIELDS = msgspec.json.Decoder(dict[str, Raw])
_EVENTS = b'{"traceEvents":['
_Decoded = TypeVar("_Decoded")


class Recording:
    """One streamed document: iterate `events()` to the end, then all `metadata` is there.

    With `salvage`, whatever cannot be read is left out and counted in `lost`; without, it is a TraceError.

    Raises:
        NotARecordingError: at once, if the document has no events.

    """

    def __init__(self, source: RecordingSource, *, salvage: bool) -> None:
        self.name = source.name
        self.metadata: dict[str, Raw] = {}
        self.lost: dict[str, int] = {}
        self._blocks = source.blocks
        self._salvage = salvage
        self._cut = ""  # why the bytes ended early
        self._ended = False  # no more bytes
        self._closed = False  # the array of events has ended
        self._bare = False  # the document is an array of events
        self._count = 0  # events so far, whole or broken
        self._base = 0  # bytes of the document before `_text`
        self._text = b""
        self._open()

    def events(self) -> Iterator[Entries]:
        """Yield events in file order, chunk by chunk."""
        size = BLOCK // 2
        while not self._closed and self._more(size):
            batch = self._chunk()
            size = BLOCK // 2 if batch else max(len(self._text), BLOCK)
            if batch:
                yield batch
            elif len(self._text) > MAX_EVENT:
                self._lose(0, f"is longer than {MAX_EVENT >> 20} MiB, and what follows it is not read", b"")
                return
        if self._closed:
            self._more(MAX_METADATA)
        yield from self._finish()

    def value(self, key: str) -> Any:
        """Return a metadata value, None where it is missing or broken."""
        try:
            return msgspec.json.decode(self.metadata[key])
        except (KeyError, *MALFORMED):
            return None

    def _more(self, size: int) -> bool:
        """Add at least `size` unpacked bytes to the text; False when there are no more."""
        parts = [self._text]
        while size > 0 and not self._ended:
            try:
                block = next(self._blocks, b"")
            except CutError as error:
                self._cut = str(error)
                block = b""
            self._ended = not block
            parts.append(block)
            size -= len(block)
        self._text = b"".join(parts)
        return not self._ended

    def _advance(self, size: int) -> None:
        self._base += size
        self._text = self._text[size:]

    def _open(self) -> None:
        """Read up to the first event, keep the metadata that stands before it."""
        while True:
            more = self._more(max(len(self._text), 1))
            start = len(self._text) - len(self._text.removeprefix(b"\xef\xbb\xbf").lstrip())
            first = self._text[start : start + 1]
            if first == b"[":
                self._bare = True
                self._advance(start + 1)
                return
            if first == b"{":
                for match in itertools.islice(_EVENTS_KEY.finditer(self._text), 8):
                    fields = _head(self._text[start : match.start()])
                    if fields is not None:  # else the key stood inside a string or a nested value
                        self.metadata = fields
                        self._advance(match.end())
                        return
            elif first:
                said = foreign.by_content(self._text) or foreign.by_name(self.name)
                raise NotARecordingError(
                    f"{self.name} {said or 'is not JSON: name the JSON file that the PyTorch profiler exported'}."
                )
            if said := foreign.by_content(self._text[:16]):  # a profile of Python begins with a brace, too
                raise NotARecordingError(f"{self.name} {said}.")
            if not more or len(self._text) > MAX_METADATA:
                break
        events = _EVENTS_KEY.search(self._text)
        if events is None:
            raise self._refusal()
        what = f"has broken metadata before its events (byte {events.start():,})"
        if not self._salvage:
            raise TraceError(f"{self.name} {what}: copy it again, or read its events with `salvage=`.")
        self.lost[f"file {what}"] = 0
        self._advance(events.end())

    def _refusal(self) -> TraceError:
        text = self._text
        if re.search(rb'"schema"\s*:\s*"', text[:4096]) and re.search(rb'"nodes"\s*:\s*\[', text):
            return NotARecordingError(
                f"{self.name} is a PyTorch execution trace (operators without times), not a Kineto "
                "recording: name the file that torch.profiler's export_chrome_trace wrote."
            )
        if self._cut:
            return TraceError(f"{self.name} ends before its first event ({self._cut}): copy it again.")
        if not text.strip():
            return TraceError(f"{self.name} is empty: copy it again, or record again.")
        if not self._ended:
            return NotARecordingError(
                f"{self.name} has no traceEvents list in its first {MAX_METADATA >> 20} MiB: name a recording."
            )
        if said := foreign.by_content(text):
            return NotARecordingError(f"{self.name} {said}.")
        if _fields(text) is None:
            return TraceError(
                f"{self.name} ends in broken JSON (byte {len(text):,}) before any traceEvents list: copy it "
                "again, or name the JSON file that the PyTorch profiler exported."
            )
        return NotARecordingError(
            f"{self.name} is JSON but no Kineto recording, because it has no traceEvents list: "
            "name the file that torch.profiler's export_chrome_trace wrote."
        )

    def _chunk(self) -> Entries | None:
        """Return the events that end in the text read so far, which keeps the rest; None if no event ends in it."""
        for decode in (_decode, self._decode_each):
            cuts = _cuts(self._text)
            for end, start in cuts:
                events = decode(memoryview(self._text)[:end])
                if events is not None:
                    self._advance(start)
                    return self._counted(events)
            if (closed := _closed(self._text)) is not None:  # cuts behind the end of the array are none
                events, end = closed
                self._closed = True
                self._advance(end)
                return self._counted(events)
            if not cuts:
                break
            end = cuts[0][0]
            self._text = mend(self._text[:end]) + self._text[end:]
        pieces = _pieces(self._text)
        if len(pieces) == 1:
            return None
        events = self._pick(self._text[a:b] for a, b in pieces[:-1])
        self._advance(pieces[-1][0])
        return self._counted(events)

    def _counted(self, events: Entries) -> Entries:
        self._count += len(events)
        return events

    def _decode_each(self, text: bytes | memoryview) -> Entries | None:
        """Return events of the inside of an array, broken ones left out; None if it is no array."""
        events = _decode(text)
        if events is None and (raws := _tried(_RAWS.decode, b"".join((b"[", text, b"]")))) is not None:
            events = self._pick(raws)
        return events

    def _pick(self, texts: Iterable[bytes | Raw]) -> Entries:
        """Return events of texts that do not all decode, without the broken ones."""
        events: Entries = []
        for text in texts:
            try:
                events.append(decode_entry(text))
            except MALFORMED as error:
                self._lose(len(events), f"is broken: {_why(error)}", text)
        return events

    def _lose(self, before: int, what: str, text: bytes | Raw) -> None:
        """Count one broken event, the one after `before` others of this chunk; without salvage an error."""
        if not self._salvage:
            at = self._text.find(bytes(text))
            raise TraceError(
                f"{self.name}: event {self._count + before + 1:,} (byte {self._base + max(at, 0):,}) {what}; "
                "copy the file again, or read the rest with `salvage=`."
            )
        reason = f"event {what}"
        self.lost[reason] = self.lost.get(reason, 0) + 1
        if sum(self.lost.values()) > MAX_BROKEN:
            raise TraceError(
                f"{self.name} has more than {MAX_BROKEN:,} broken events, so it is no recording: copy it again."
            )

    def _finish(self) -> Iterator[Entries]:
        """Yield events and metadata of the last text, which should end with the document."""
        self._text = self._text.rstrip(b"\0 \t\r\n")
        whole = _document(self._text, self._bare)
        if whole is None:
            self._text = mend(self._text)
            whole = _document(self._text, self._bare) or self._document_each()
        if whole is not None:
            events, fields = whole
            self.metadata |= fields
            yield self._counted(events)
            if self._cut:
                self._end("is damaged behind its last event")
        elif self._closed:
            self._end("is broken behind its last event")
        else:
            yield from self._finish_broken()

    def _document_each(self) -> tuple[Entries, dict[str, Raw]] | None:
        """Read as `_document` does, with broken events left out."""
        fields: dict[str, Raw] | None = {}
        raws = _tried(_RAWS.decode, b"[" + self._text) if self._bare else None
        if not self._bare and (fields := _tried(_FIELDS.decode, _EVENTS + self._text)) is not None:
            raws = _tried(_RAWS.decode, fields.pop("traceEvents"))
        return None if raws is None or fields is None else (self._pick(raws), fields)

    def _finish_broken(self) -> Iterator[Entries]:
        """Yield whole events of a last text that does not end with a whole document."""
        *pieces, (start, end) = _pieces(self._text)
        events = self._pick(self._text[a:b] for a, b in pieces)
        last = self._text[start:end]
        what = ""
        if (whole := _document(last, self._bare)) is not None:  # the broken event stood further up
            rest, fields = whole
            self.metadata |= fields
        elif (closed := _closed(last)) is not None:
            rest, what = closed[0], "is broken behind its last event"
        elif (found := _decode(last.rstrip(b", \t\r\n"))) is not None:
            rest, what = found, "ends before its closing bracket"
        else:
            rest, what = [], "ends in the middle of an event"
        yield self._counted(events)
        yield self._counted(rest)
        if what or self._cut:
            self._end(what or "is damaged behind its last event")

    def _end(self, what: str) -> None:
        """Report that the document does not end as it should."""
        place = f"byte {self._base + len(self._text):,}" + (f"; {self._cut}" if self._cut else "")
        if self._salvage:
            self.lost[f"file {what} ({place})"] = 1
        elif self._count:
            raise TraceError(
                f"{self.name} {what} ({place}). Copy it again, or read its {self._count:,} whole events with "
                "`salvage=`."
            )
        else:
            raise TraceError(f"{self.name} {what} ({place}) and has no whole event: copy it again.")


def mend(text: bytes) -> bytes:
    """Make JSON of what some writers take for JSON; the length stays.

    Control characters become spaces, a backslash that escapes nothing a slash (as newer Kineto writes it),
    bytes that are not UTF-8 question marks; NaN and infinities become empty strings. Text of more than
    `MAX_MENDED` bytes is returned as it is.
    """
    if len(text) > MAX_MENDED:
        return text
    text = text.translate(_CONTROL)
    text = _ESCAPE.sub(lambda m: m[0] if len(m[0]) > 1 else b"/", text)
    text = _CONSTANT.sub(lambda m: m[0] if m[0].startswith(b'"') else b'""'.ljust(len(m[0])), text)
    return _STRAY.sub("?", text.decode(errors="surrogateescape")).encode()


def _decode(text: bytes | memoryview) -> Entries | None:
    """Return events of the inside of an array; None if it is not one."""
    return _tried(decode_array, b"".join((b"[", text, b"]")))


def _closed(text: bytes) -> tuple[Entries, int] | None:
    """Return events up to the end of the array, and the place of its bracket; None if it does not end in this text."""
    for match in itertools.islice(_ARRAY_END.finditer(text), 16):
        end = match.end() - 1
        events = _decode(text[:end])
        if events is not None:
            return events, end
    return None


def _document(text: bytes, bare: bool) -> tuple[Entries, dict[str, Raw]] | None:
    """Return events and metadata of a document from its first event on; None if it is not whole."""
    fields = {} if bare else _tried(_FIELDS.decode, _EVENTS + text)
    if fields is None:
        return None
    events = _tried(decode_array, b"[" + text if bare else fields.pop("traceEvents"))
    return None if events is None else (events, fields)


def _fields(text: bytes) -> dict[str, Raw] | None:
    return _tried(_FIELDS.decode, text) or _tried(lambda text: _FIELDS.decode(mend(text)), text)


def _tried(decode: Callable[[Any], _Decoded], text: bytes | Raw) -> _Decoded | None:
    """Return what a text holds, None where it is malformed."""
    try:
        return decode(text)
    except MALFORMED:
        return None


def _head(text: bytes) -> dict[str, Raw] | None:
    """Return metadata before the events: an object cut behind one of its commas."""
    return _fields(text.rstrip().removesuffix(b",") + b"}")


def _cuts(text: bytes) -> list[tuple[int, int]]:
    """Return the last places where an event may end and the next begin: (end, begin)."""
    found: list[tuple[int, int]] = []
    at = len(text)
    for _ in range(100_000):  # a name of nothing but braces must not cost more
        at = text.rfind(b"}", 0, at)
        if at < 0 or len(found) == MAX_CUTS:
            break
        if match := _BOUNDARY.match(text, at):
            found.append((at + 1, match.end()))
    return found


def _pieces(text: bytes) -> list[tuple[int, int]]:
    """Return spans that look like one event each; the last one reaches to the end."""
    matches = list(_EVENT_BOUNDARY.finditer(text))
    starts = [0, *(m.end() for m in matches)]
    return list(zip(starts, [*(m.start() + 1 for m in matches), len(text)], strict=True))


def _why(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return _BYTE.sub("", str(error).removeprefix("JSON is malformed: "))
