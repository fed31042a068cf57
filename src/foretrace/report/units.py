"""Numbers as people read them: three significant digits, in the unit that gives 1-999."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MINUS = "\N{MINUS SIGN}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeUnit:
    """A unit of time and its length in seconds."""

    name: str
    seconds: float


UNITS = (
    TimeUnit(name="ns", seconds=1e-9),
    TimeUnit(name="µs", seconds=1e-6),
    TimeUnit(name="ms", seconds=1e-3),
    TimeUnit(name="s", seconds=1.0),
)


def unit_for(value_s: float) -> TimeUnit:
    """Return the unit in which `value_s` reads 1 to 999; seconds above, nanoseconds below, milliseconds for 0."""
    size = abs(value_s)
    if not math.isfinite(size) or size == 0:
        return UNITS[2] if size == 0 else UNITS[3]
    for unit in UNITS:
        if float(f"{size / unit.seconds:.3g}") < 1000:  # 999.6 µs is 1.00 ms, not 1000 µs
            return unit
    return UNITS[-1]


def digits(value: float) -> str:
    """Return three significant digits without exponent, two decimals below 0.1: 174, 58.1, 9.10, 0.619, 0.02, 0."""
    if not math.isfinite(value):
        return "–"
    size = abs(value)
    if size < 0.005:
        return "0"
    if size >= 999.5:
        text = f"{float(f'{size:.3g}'):,.0f}"
    else:
        decimals = 0 if size >= 99.95 else 1 if size >= 9.995 else 2 if size >= 0.9995 or size < 0.0995 else 3
        text = f"{size:.{decimals}f}"
    return MINUS + text if value < 0 else text


def in_unit(value_s: float, unit: TimeUnit) -> str:
    """Return `value_s` in a given unit, without its name."""
    return digits(value_s / unit.seconds)


def seconds(value_s: float) -> str:
    """Return a time with its own unit: "58.1 ms"."""
    if value_s == 0:
        return "0"
    unit = unit_for(value_s)
    return f"{in_unit(value_s, unit)} {unit.name}"


def change(value_s: float) -> str:
    """Return a difference with its sign: "−5.81 ms" is time saved, "+2.10 ms" time lost."""
    text = seconds(value_s)
    return "+" + text if value_s > 0 and text != "0" else text


def column(values_s: Sequence[float], *, signed: bool = False, pads: tuple[str, str] = (" ", " ")) -> list[str]:
    """Return times that stand below each other: one unit for all, that of the largest, and decimal points in one line.

    What is too short to be read in that unit has its own, so that nothing but 0 reads as 0.

    signed: differences, as `change` writes them. pads: what takes the room of a missing digit and of a missing point.
    The cells are to be set flush right.
    """
    unit = unit_for(max((abs(value) for value in values_s if math.isfinite(value)), default=0.0))
    units = [unit if abs(value) >= 0.005 * unit.seconds else unit_for(value) for value in values_s]
    numbers = [in_unit(value, own) for value, own in zip(values_s, units, strict=True)]
    fractions = [number.partition(".")[2] for number in numbers]
    names = [own.name if number != "0" else "" for own, number in zip(units, numbers, strict=True)]
    most, widest = (max(map(len, texts), default=0) for texts in (fractions, names))
    cells = []
    for value, number, fraction, name in zip(values_s, numbers, fractions, names, strict=True):
        room = pads[0] * (most - len(fraction)) + (pads[1] if most and not fraction else "")
        sign = "+" if signed and value > 0 and name else ""
        unit_text = f" {name}" if widest else ""
        cells.append(f"{sign}{number}{room}{unit_text}{pads[0] * (widest - len(name))}")
    return cells


def of(part_s: float, whole_s: float, *, every: bool = True) -> str:
    """Return text such as "58.1 of every 174 ms": a part and its whole in the unit of the whole."""
    unit = unit_for(whole_s)
    return f"{in_unit(part_s, unit)} of {'every ' if every else ''}{in_unit(whole_s, unit)} {unit.name}"


def between(low_s: float, high_s: float, unit: TimeUnit) -> str:
    """Return text such as "84.0 – 101" in a given unit."""
    return f"{in_unit(low_s, unit)} – {in_unit(high_s, unit)}"


def span(low_s: float, high_s: float) -> str:
    """Return text such as "950 µs – 1.20 ms": each in its own unit."""
    return f"{seconds(low_s)} – {seconds(high_s)}"


def share(value: float) -> str:
    """Return text such as "33.4 %"; NaN is "–", and what two decimals would show as 0 is "<0.01 %"."""
    text = "<0.01" if 0 < value < 0.00005 else digits(100 * value)
    return text if text == "–" else f"{text} %"


def share_at_most(value: float) -> str:
    """Return text such as "at most 0.620 %"; a share too small for two decimals is "less than 0.01 %", never 0."""
    return "less than 0.01 %" if 0 < value < 0.00005 else f"at most {share(value)}"


def level(value: float) -> str:
    """Return how often an interval is to hold: "95 %"."""
    return f"{100 * value:.3g} %"


def count(value: float) -> str:
    """Return a number of things: "1,840"; a mean per step keeps what it needs: "0.17", "12.5"."""
    return f"{value:,.0f}" if value == round(value) else digits(value)


def things(number: float, noun: str) -> str:
    """Return text such as "1 step", "1,840 steps", "2 batches"."""
    several = "es" if noun.endswith("ch") else "s"
    return f"{count(number)} {noun}{'' if number == 1 else several}"


_DECIMAL = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


def scaled(value: float, unit: str = "") -> str:
    """Return text such as "4.87 TFLOP/s", "312 MB", "96 B": with decimal prefixes, as vendors count."""
    prefix, size = next((each for each in _DECIMAL if abs(value) >= 0.9995 * each[1]), ("", 1.0))
    return f"{digits(value / size) if prefix else count(value)} {prefix}{unit}".rstrip()


def nbytes(value: float) -> str:
    """Return text such as "312 MB"."""
    return scaled(value, "B")


def binary(value: float) -> str:
    """Return text such as "64 MiB": a number of bytes in the binary unit that reads 1 to 1,023."""
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{count(value)} {unit}"
        value /= 1024
    return f"{digits(value)} GiB"


def signed(part: float) -> str:
    """Return a share with its sign: "−0.12 %", "+2.10 %", "0 %"."""
    text = f"{digits(100 * part)} %"
    return f"+{text}" if part > 0 and text != "0 %" else text


def within(value_s: float, interval_s: tuple[float, float]) -> str:
    """Return text such as "58.1 ms (51.0 – 66.2)": a time and where it lies."""
    unit = unit_for(value_s)
    return f"{in_unit(value_s, unit)} {unit.name} ({between(*interval_s, unit)})"


def ranged(value: float, low: float, high: float, text: Callable[[float], str] = digits) -> str:
    """Return text such as "1.42 (1.30 – 1.55)": a figure and where it lies, each as `text` writes it."""
    return f"{text(value)} ({text(low)} – {text(high)})"


def speed(before_s: float, after_s: float) -> str:
    """Return text such as "1.89× faster"; below 2 % the change of the time, "0.43 % faster", or "no change"."""
    if before_s <= 0 or after_s <= 0:
        return "no change" if before_s == after_s else "–"
    ratio, word = (before_s / after_s, "faster") if before_s >= after_s else (after_s / before_s, "slower")
    if ratio < 1.02:
        part = digits(100 * abs(after_s - before_s) / before_s)
        return "no change" if part == "0" else f"{part} % {word}"
    return f"{digits(ratio)}× {word}"


_LONG = (("d", 86400.0, 259_200.0), ("h", 3600.0, 7200.0), ("min", 60.0, 120.0))  # name, seconds, used from


def long_time(value_s: float | None) -> str:
    """Return a time up to years: "58.1 s", "45.0 min", "12.4 h", "9.20 d"; "–" where it is not known."""
    if value_s is None or not math.isfinite(value_s):
        return "–"
    for name, size, first in _LONG:
        if abs(value_s) >= first:
            return f"{digits(value_s / size)} {name}"
    return seconds(value_s)


def long_range(low_s: float, high_s: float) -> str:
    """Return text such as "12.1 – 12.9 h", in the unit of the larger."""
    unit, size = next(((name, size) for name, size, first in _LONG if abs(high_s) >= first), ("s", 1.0))
    return f"{digits(low_s / size)} – {digits(high_s / size)} {unit}"
