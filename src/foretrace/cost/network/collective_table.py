"""`CollectiveTable`: measured times of collectives by size and number of workers, and the file that keeps them.

Sizes mean what `foretrace.cost.network.network` says. `cost/network/collective_files.py` reads tables of other
programs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from foretrace.cost.network.network import CollectiveKind
from foretrace.errors import ForetraceError
from foretrace.files import write_bytes

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSeries:
    """Times of one collective among so many workers, sizes ascending. `per_node` of them share a machine."""

    kind: CollectiveKind
    workers: int
    per_node: int
    nbytes: tuple[float, ...]
    seconds: tuple[float, ...]
    spread: tuple[float, ...] = ()  # of the repetitions, relative to the time; empty where it is not known
    system: str = ""  # which of several machines in one file

    @property
    def nodes(self) -> int:
        """Machines that take part."""
        return -(-self.workers // self.per_node)

    @property
    def title(self) -> str:
        """As in "all-reduce of 16 workers, 8 per machine"."""
        where = f", {self.per_node} per machine" if self.per_node < self.workers else ""
        return f"{self.kind} of {self.workers} workers{where}"


class CollectiveTable(msgspec.Struct, frozen=True, kw_only=True, rename={"series": "collectives"}):
    """Series that belong together, and where they were measured; its JSON is the file."""

    format: int  # of the file
    series: tuple[CollectiveSeries, ...]
    name: str = ""
    backend: str = ""  # "gloo", "nccl"; "" where the file does not say
    device: str = ""
    machine: Mapping[str, Any] = {}
    measured: str = ""  # date, UTC
    repetitions: int = 0
    missing: Mapping[str, str] = {}  # kind -> why it was not measured
    hosts: Mapping[str, tuple[float, float, float]] = {}  # value, low, high by parameter of techniques

    def of(self, kind: CollectiveKind) -> tuple[CollectiveSeries, ...]:
        """Return the series of one collective."""
        return tuple(each for each in self.series if each.kind == kind)

    def one(self, *, workers: int = 0, per_node: int = 0, kind: str = "", system: str = "") -> CollectiveSeries:
        """Return the one series that is meant. Raises ForetraceError that lists what there is."""
        found = [
            each
            for each in self.series
            if workers in (0, each.workers)
            and per_node in (0, each.per_node)
            and kind.replace("_", "-") in ("", each.kind)
            and system in ("", each.system)
        ]
        if len(found) == 1:
            return found[0]
        titles = [f"{each.title}{f' on {each.system}' if each.system else ''}" for each in found or self.series]
        which = "holds several series" if found else "holds nothing of that"
        raise ForetraceError(
            f"{self.name} {which}; choose by `workers=`, `per_node=`, `kind=` or `system=` from: {'; '.join(titles)}."
        )

    def systems(self) -> tuple[str, ...]:
        """Return machines that the series name, in order."""
        return tuple(dict.fromkeys(each.system for each in self.series))

    def times(self) -> Iterator[tuple[CollectiveSeries, float, float, float]]:
        """Yield series, size, seconds and spread (0 where it is not known) of every time."""
        for each in self.series:
            spreads = each.spread or (0.0,) * len(each.nbytes)
            yield from zip(repeat(each), each.nbytes, each.seconds, spreads)

    def noisiest(self) -> tuple[CollectiveSeries, float, float] | None:
        """Return the series, size and spread of the time that repeated worst; None where no spread is known."""
        found = [(each, size, spread) for each, size, _, spread in self.times() if each.spread]
        return max(found, key=lambda item: item[2], default=None)

    def save(self, path: Path) -> None:
        """Write the table as JSON. Raises ForetraceError where the folder is missing or may not be written."""
        write_bytes(path, msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


def decode(data: bytes, where: str) -> CollectiveTable:
    """Return a table from the bytes of a file that `save` wrote. Raises ForetraceError with the place that is wrong."""
    try:
        file = msgspec.json.decode(data, type=CollectiveTable)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ForetraceError(
            f"{where} is no table of collectives ({error}); make one with foretrace calibrate network."
        ) from None
    if file.format != FORMAT:
        raise ForetraceError(f"{where} is a table of format {file.format}, this foretrace reads format {FORMAT}.")
    for what, (value, low, high) in file.hosts.items():
        if not (isfinite(high) and 0 < low <= value <= high):
            raise ForetraceError(
                f"{where}: {what} must be above 0 and in its range, got {value:g} ({low:g} to {high:g}); measure again."
            )
    series = []
    for each in file.series:
        if len(each.nbytes) != len(each.seconds) or len(each.spread) not in (0, len(each.nbytes)):
            raise ForetraceError(f"{where}: {each.kind} of {each.workers} workers has not one time per size.")
        spreads = each.spread or [0.0] * len(each.nbytes)
        found = series_of(
            where,
            kind=each.kind,
            workers=each.workers,
            per_node=each.per_node,
            points=zip(each.nbytes, each.seconds, spreads, strict=True),
            system=each.system,
        )
        series.append(found)
    return msgspec.structs.replace(file, name=file.name or where, series=table_of(where, series).series)


def series_of(
    where: str,
    *,
    kind: CollectiveKind,
    workers: int,
    per_node: int,
    points: Iterable[tuple[float, float, float]],
    system: str = "",
) -> CollectiveSeries:
    """Return a series from (bytes, seconds, spread) in any order; a size that occurs twice counts with its median.

    How far rows of one size lie from that median is spread, too. Raises ForetraceError on numbers that no measurement
    gives.
    """
    if workers < 2 or per_node < 1 or per_node > workers:
        raise ForetraceError(
            f"{where}: {kind} among {workers} workers, {per_node} per machine, is no collective; two workers are the "
            "least, and a machine holds one at least and all at most."
        )
    at: dict[float, list[tuple[float, float]]] = {}
    for nbytes, seconds, spread in points:
        if not (isfinite(nbytes) and isfinite(seconds) and isfinite(spread) and spread >= 0):
            raise ForetraceError(f"{where}: {kind} of {nbytes:g} bytes in {seconds:g} s holds no finite number.")
        if nbytes <= 0 or seconds <= 0:
            raise ForetraceError(
                f"{where}: {kind} of {nbytes:g} bytes in {seconds:g} s cannot be; sizes and times are above 0."
            )
        at.setdefault(float(nbytes), []).append((float(seconds), float(spread)))
    if not at:
        raise ForetraceError(f"{where}: {kind} of {workers} workers has no sizes; a table needs one row at least.")
    sizes = sorted(at)
    times = {size: median(seconds for seconds, _ in pairs) for size, pairs in at.items()}
    spreads = {
        size: max(max(spread, seconds / times[size] - 1, times[size] / seconds - 1) for seconds, spread in pairs)
        for size, pairs in at.items()
    }
    return CollectiveSeries(
        kind=kind,
        workers=workers,
        per_node=per_node,
        nbytes=tuple(sizes),
        seconds=tuple(times[size] for size in sizes),
        spread=tuple(spreads[size] for size in sizes) if any(spreads.values()) else (),
        system=system,
    )


def table_of(where: str, series: Sequence[CollectiveSeries], *, name: str = "", **about: Any) -> CollectiveTable:
    """Return a table of these series, in a settled order. Raises ForetraceError where there is none or one
    comes twice.
    """
    if not series:
        raise ForetraceError(f"{where} holds no measured collective.")
    keys = [(each.system, each.kind, each.workers, each.per_node) for each in series]
    if twice := next((each for each, key in zip(series, keys, strict=True) if keys.count(key) > 1), None):
        raise ForetraceError(f"{where} holds {twice.title} twice; keep one of them.")
    ordered = sorted(series, key=lambda each: (each.system, each.kind, each.nodes, each.workers))
    return CollectiveTable(format=FORMAT, name=name or where, series=tuple(ordered), **about)
