"""Entries of `traceEvents` as typed structs: one class per phase, one field per thing that becomes a column.

What has no field is skipped by the decoder, which is why flow arrows and unread phases cost next to nothing.
"""

from __future__ import annotations

from typing import Any, ClassVar, Union

import msgspec
from msgspec import Raw, Struct, field

from foretrace.trace.trace import Category

Number = int | float | str | None
_NO_TIME = 2**62  # beyond any time


class Args(Struct, gc=False, frozen=True):
    """The arguments of a complete event that become columns."""

    sequence: Number = field(name="Sequence number", default=-1)
    dims: Raw = field(name="Input Dims", default=Raw(b""))
    types: Raw = field(name="Input type", default=Raw(b""))
    concrete: Raw = field(name="Concrete Inputs", default=Raw(b""))
    correlation: Number = -1
    device: Number = None
    stream: Number = None
    bytes: Number = -1
    size: Number = -1  # roctracer's older word for `bytes`
    wait_stream: Number = field(name="wait_on_stream", default=-1)
    wait_correlation: Number = field(name="wait_on_cuda_event_record_corr_id", default=-1)
    collective: Raw = field(name="Collective name", default=Raw(b""))
    dtype: Raw = Raw(b"")
    in_elements: Raw = field(name="In msg nelems", default=Raw(b""))
    out_elements: Raw = field(name="Out msg nelems", default=Raw(b""))
    group_size: Raw = field(name="Group size", default=Raw(b""))
    group: Raw = field(name="Process Group Name", default=Raw(b""))
    group_ranks: Raw = field(name="Process Group Ranks", default=Raw(b""))
    group_sequence: Raw = field(name="Seq", default=Raw(b""))
    source: Raw = field(name="Src Rank", default=Raw(b""))
    destination: Raw = field(name="Dst Rank", default=Raw(b""))


class MemoryArgs(Struct, gc=False, frozen=True):
    """The arguments of a `[memory]` instant."""

    size: Number = field(name="Bytes", default=None)
    address: Number = field(name="Addr", default=-1)
    total: Number = field(name="Total Allocated", default=-1)
    device_type: Number = field(name="Device Type", default=None)
    device: Number = field(name="Device Id", default=None)


class MetadataArgs(Struct, gc=False, frozen=True):
    """The arguments of a metadata entry."""

    name: Number = None


class Entry(Struct, gc=False, frozen=True, tag_field="ph"):
    """One entry of `traceEvents`; its class is its phase."""


class Event(Entry, gc=False, frozen=True, tag="X"):
    """A complete event; times stay decimal text, because doubles cannot hold them."""

    cat: str | None = None
    name: str = ""
    pid: Number = None
    tid: Number = None
    ts: Raw = Raw(b"")
    dur: Raw = Raw(b"")
    args: Args | None = None


class Instant(Entry, gc=False, frozen=True, tag="i"):
    """A moment, for example of an allocation."""

    cat: ClassVar[int] = int(Category.MEMORY)
    dur: ClassVar[Raw] = Raw(b"0")
    name: str = ""
    pid: Number = None
    tid: Number = None
    ts: Raw = Raw(b"")
    args: MemoryArgs | None = None


class WholeEvent(Event, gc=False, frozen=True, tag="X"):
    """A complete event in whole microseconds, as older recordings have them: cheaper to read."""

    ts: int = _NO_TIME  # type: ignore[assignment]
    dur: int = _NO_TIME  # type: ignore[assignment]


class WholeInstant(Instant, gc=False, frozen=True, tag="i"):
    """A moment in whole microseconds."""

    dur: ClassVar[int] = 0  # type: ignore[assignment]
    ts: int = _NO_TIME  # type: ignore[assignment]


class Metadata(Entry, gc=False, frozen=True, tag="M"):
    """What a process or thread is called."""

    name: str = ""
    pid: Number = None
    tid: Number = None
    args: MetadataArgs | None = None


class Foreign(Struct, gc=False, frozen=True):
    """An entry of a phase that no recording has."""

    ph: str = ""


# Flow arrows only repeat what correlation ids and sequence numbers say.
_FLOW_PHASES = "stf"
# Begin and end, asynchronous events, counters, samples, objects, marks and whatever else the format knows.
_UNREAD_PHASES = "BEbneCPNODTpFRcvI(),"


def _bare(name: str, phases: str) -> tuple[type[Struct], ...]:
    """Return entries of which nothing but the phase is kept."""
    return tuple(msgspec.defstruct(name, [], bases=(Entry,), gc=False, frozen=True, tag=ph) for ph in phases)


FLOWS = _bare("Flow", _FLOW_PHASES)
UNREAD: dict[type[Struct], str] = dict(
    zip(_bare("Unread", _UNREAD_PHASES), _UNREAD_PHASES, strict=True)
)  # class -> phase

MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_REST = (Metadata, *FLOWS, *UNREAD)
_ENTRY: Any = Union[(Event, Instant, *_REST)]
_WHOLE_ENTRY: Any = Union[(WholeEvent, WholeInstant, *_REST)]
_ENTRY_DECODER: msgspec.json.Decoder[Entry] = msgspec.json.Decoder(_ENTRY)
_ARRAY_DECODER: msgspec.json.Decoder[list[Entry | Foreign]] = msgspec.json.Decoder(list[_ENTRY])
_WHOLE_DECODER: msgspec.json.Decoder[list[Entry | Foreign]] = msgspec.json.Decoder(list[_WHOLE_ENTRY])
_PHASE_DECODER = msgspec.json.Decoder(Foreign)
_PHASES = frozenset("XiM" + _FLOW_PHASES + _UNREAD_PHASES)


def decode_array(text: bytes | Raw) -> list[Entry | Foreign]:
    """Return entries of a JSON array; if all its times are whole, events are `WholeEvent` and `WholeInstant`.

    Raises:
        MALFORMED: the text is no array of entries, or holds a phase that the format does not have.

    """
    try:
        return _WHOLE_DECODER.decode(text)
    except msgspec.ValidationError:  # mostly at the first event
        return _ARRAY_DECODER.decode(text)


def decode_entry(text: bytes | Raw) -> Entry | Foreign:
    """Return one entry, also of a phase that the format does not have.

    Raises:
        MALFORMED: the text is no entry.

    """
    try:
        return _ENTRY_DECODER.decode(text)
    except msgspec.ValidationError:
        foreign = _PHASE_DECODER.decode(text)
        if foreign.ph in _PHASES:
            raise
        return foreign
