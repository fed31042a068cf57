"""Just enough of the protocol buffer wire format to read messages: varints, fixed numbers and bytes by field number."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from foretrace.errors import ForetraceError

Wire = int | bytes


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at a place, and where it ends. Raises ForetraceError where the data end in it."""
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at
        shift += 7
    raise ForetraceError(f"the protocol buffer is cut at byte {at:,}; copy the file again.")


def fields(data: bytes) -> Iterator[tuple[int, Wire]]:
    """Yield (field number, number or bytes) of a message. Raises ForetraceError where it is no message."""
    at = 0
    while at < len(data):
        tag, at = varint(data, at)
        number, kind = tag >> 3, tag & 7
        if not number:
            raise ForetraceError(f"byte {at:,} begins no field of a protocol buffer; give the file as it was written.")
        if kind == 0:
            value, at = varint(data, at)
            yield number, value
        elif kind in (1, 2, 5):
            size = 8 if kind == 1 else 4
            if kind == 2:
                size, at = varint(data, at)
            if at + size > len(data):
                raise ForetraceError(f"the protocol buffer is cut at byte {len(data):,}; copy the file again.")
            yield number, data[at : at + size]
            at += size
        else:
            raise ForetraceError(f"byte {at:,} begins no field of a protocol buffer; give the file as it was written.")


def messages(data: bytes) -> Iterator[bytes]:
    """Yield messages that follow one another, each behind its length."""
    at = 0
    while at < len(data):
        size, at = varint(data, at)
        if at + size > len(data):
            raise ForetraceError(f"the protocol buffer is cut at byte {len(data):,}; copy the file again.")
        yield data[at : at + size]
        at += size


def signed(value: Wire) -> int:
    """Return a varint as the int64 that it stands for."""
    number = value if isinstance(value, int) else int.from_bytes(value, "little")
    return number - 2**64 if number >= 2**63 else number


def text(value: Wire) -> str:
    """Return a string field."""
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else str(value)


def numbers(value: Wire) -> list[int]:
    """Return a repeated integer field: packed, or one of them."""
    if isinstance(value, int):
        return [value]
    found, at = [], 0
    while at < len(value):
        one, at = varint(value, at)
        found.append(one)
    return found


def double(value: Wire) -> float:
    """Return a fixed number of eight or four bytes."""
    if isinstance(value, int):
        return float(value)
    if len(value) not in (4, 8):
        raise ForetraceError(f"the protocol buffer has a number of {len(value)} bytes, not 4 or 8; copy it again.")
    return float(struct.unpack("<d" if len(value) == 8 else "<f", value)[0])
