"""Numbers as recordings write them, to int64 columns, exactly.

An epoch time near 1.7e15 microseconds does not survive a double (its neighbours there are 0.25 apart), so
times are read from their decimal text. The usual text (digits with at most one point) takes a vectorised path;
anything else (signs, exponents, strings) is read one by one with `decimal`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from decimal import ROUND_HALF_EVEN, Decimal, InvalidOperation
from typing import cast

import numpy as np
from msgspec import Raw

from foretrace.arrays import Int64, Mask, UInt8

MAX_NS = 4_000_000_000_000_000_000  # about the year 2096: leaves room to add a base and a duration in int64
_PLAIN = b"0123456789,."
_POINT = ord(".")
_TENS = 10 ** np.arange(19, dtype=np.int64)


def nanoseconds(tokens: Sequence[Raw] | Sequence[int]) -> tuple[Int64, Mask]:
    """Return microseconds, as decimal text or whole, to nanoseconds: values, and which are numbers within ±`MAX_NS`.

    More than three decimals are rounded half to even. Values of the other tokens are 0.
    """
    if tokens and isinstance(tokens[0], int):
        whole, known = integers(tokens)
        known &= np.abs(whole) <= MAX_NS // 1000
        whole[~known] = 0
        return whole * 1000, known
    text = b",".join(cast("Sequence[Raw]", tokens))
    found = None if text.translate(None, _PLAIN) else _plain(text, len(tokens))
    if found is None:
        found = np.array([_one(bytes(cast("Raw", t))) for t in tokens], dtype=np.int64).reshape(len(tokens))
    good: Mask = np.abs(found) <= MAX_NS
    found[~good] = 0
    return found, good


def _plain(text: bytes, count: int) -> Int64 | None:
    """Return unsigned decimals joined by commas; None if one of them is unusual."""
    if not text or text.startswith(b",") or text.endswith(b",") or b",," in text:
        return None
    points = text.count(b".")
    if not points:
        return _thousand(np.fromstring(text, dtype=np.int64, sep=","))
    marks: UInt8 = np.frombuffer(text, dtype=np.uint8)
    at = np.flatnonzero(marks < ord("0"))
    digits = np.diff(at, prepend=-1, append=len(text)) - 1
    if digits.min() < 1 or digits.max() > 18:
        return None
    if points == count and (digits[1::2] == 3).all() and (marks[at[::2]] == _POINT).all() and digits.max() <= 16:
        return np.fromstring(text.replace(b".", b""), dtype=np.int64, sep=",")  # as Kineto writes them today
    numbers = np.fromstring(text.replace(b".", b","), dtype=np.int64, sep=",")
    fraction = np.zeros(len(numbers), dtype=np.bool_)
    fraction[1:] = marks[at] == _POINT
    if np.count_nonzero(~fraction) != count:
        return None
    result = _thousand(numbers[~fraction])
    owner = np.cumsum(~fraction)[fraction] - 1
    result[owner] += _thousandths(numbers[fraction], digits[fraction])
    return result


def _thousand(whole: Int64) -> Int64:
    return np.where(whole <= MAX_NS // 1000, whole * 1000, np.int64(MAX_NS + 1000))


def _thousandths(value: Int64, digits: Int64) -> Int64:
    """Return decimals written with so many digits, as thousandths, rounded half to even."""
    short = value * _TENS[np.maximum(3 - digits, 0)]
    if digits.max() <= 3:
        return short
    unit = _TENS[np.maximum(digits - 3, 0)]
    quotient, rest = np.divmod(value, unit)
    up = (2 * rest > unit) | ((2 * rest == unit) & (quotient % 2 == 1))
    return np.where(digits <= 3, short, quotient + up)


def _one(text: bytes) -> int:
    """Return one token; a value beyond the range stands for "no number"."""
    try:
        value = Decimal(text.decode().strip().strip('"').strip())
        if not value.is_finite() or value.adjusted() > 16:
            return MAX_NS + 1
        found = int((value * 1000).to_integral_value(ROUND_HALF_EVEN))
    except (InvalidOperation, ValueError, OverflowError):
        return MAX_NS + 1
    return max(-MAX_NS - 1, min(found, MAX_NS + 1))


def integers(values: Sequence[object]) -> tuple[Int64, Mask]:
    """Return integers to int64, None as −1: values, and which of them are whole numbers of 64 bits.

    Strings are read as decimal or hexadecimal numbers (ROCm writes some arguments so).
    """
    good = np.ones(len(values), dtype=np.bool_)
    try:
        # Unlike numpy, array() takes nothing but integers: it neither cuts 2.5 to 2 nor makes room for long strings.
        return np.array(array("q", cast("Sequence[int]", values))), good
    except (TypeError, OverflowError):
        parsed = [_integer(v) for v in values]
    good[[p is None for p in parsed]] = False
    return np.array([p or 0 for p in parsed], dtype=np.int64), good


def _integer(value: object) -> int | None:
    if value is None:
        return -1
    try:
        if isinstance(value, str):
            number = int(value, 0)
        elif isinstance(value, int | float) and value == int(value):
            number = int(value)
        else:
            return None
    except (ValueError, OverflowError):
        return None
    return number if -(2**63) <= number < 2**63 else None
