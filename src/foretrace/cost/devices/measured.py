"""`Measured`: what this very call took, where it was recorded or profiled. It answers for nothing else.

Times come from recordings (`from_graph`: mean of the call's kernels on a device, or of its operator on a processor),
and from a table (`from_table`).

A table is CSV with a header. Columns, in any order, others are not read:

    device      as the catalog calls it, or as a recording does ("h100", "NVIDIA H100 80GB HBM3")
    seconds     of one call; or ms, or us
    op, text    operator and its inputs as JSON `[dims, types, concrete]`, as `TaskGraph.shapes` has them; or
    family, precision, b, m, n, k    of `foretrace.cost.calls`; b is 1 where the column is absent

A call that the table names twice on a device takes the mean.
"""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite, nan
from pathlib import Path

import numpy as np

from foretrace import reading
from foretrace.cost.calls import Calls, Family, Precision
from foretrace.cost.model import CostModel, Prediction
from foretrace.errors import ForetraceError
from foretrace.graph.taskgraph import TaskGraph, TaskKind
from foretrace.hardware.devices import Device, find, named

Named = tuple[str, str]  # operator, inputs as JSON text
Sized = tuple[int, int, float, float, float, float]  # family, precision, b, m, n, k
_UNITS = {"seconds": 1.0, "ms": 1e-3, "us": 1e-6}
_SIZES = ("family", "precision", "m", "n", "k")


@dataclass(frozen=True, slots=True, kw_only=True)
class Time:
    """Seconds of a call, and how far single ones are from it: 80 % of them lie between low and high."""

    seconds: float
    low_s: float
    high_s: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Time:
        """Return the mean of what was measured; one value alone gets no range of its own, but 5 % on both sides."""
        found = np.array(list(values), dtype=np.float64)
        mean = float(found.mean())
        low, high = (float(v) for v in np.quantile(found, (0.1, 0.9))) if len(found) > 2 else (0.95 * mean, 1.05 * mean)
        return cls(seconds=mean, low_s=min(low, mean), high_s=max(high, mean), count=len(found))


@dataclass(frozen=True, kw_only=True)
class Measured(CostModel):
    """Times by device. A device without an entry, or a call that was not measured there, is not spoken of."""

    name: str = "measured"
    calls: Mapping[str, Mapping[Named, Time]] = field(default_factory=dict)  # Device.name -> call -> time
    sizes: Mapping[str, Mapping[Sized, Time]] = field(default_factory=dict)  # Device.name -> sizes -> time
    where: tuple[str, ...] = ()  # what the times are from, for the reader

    def predict(self, calls: Calls, device: Device) -> Prediction:
        by_name, by_size = self.calls.get(device.name, {}), self.sizes.get(device.name, {})
        found: list[Time | None] = [by_name.get(each) for each in zip(calls.op, calls.text, strict=True)]
        if by_size:
            columns = (calls.family, calls.precision, calls.b, calls.m, calls.n, calls.k)
            keys = zip(*(column.tolist() for column in columns), strict=True)
            found = [time or by_size.get(key) for time, key in zip(found, keys, strict=True)]
        table = np.array(
            [(t.seconds, t.low_s, t.high_s) if t else (np.nan,) * 3 for t in found], dtype=np.float64
        ).reshape(-1, 3)
        seconds = table[:, 0]
        with np.errstate(invalid="ignore", divide="ignore"):
            low, high = table[:, 1] / seconds, table[:, 2] / seconds
        return self._answer(seconds, low, high, f"measured on {device.short}: {', '.join(self.where) or 'nothing'}")

    @classmethod
    def from_graph(cls, graph: TaskGraph) -> Measured:
        """Return calls of a recording. Raises ForetraceError where it names no device of the catalog."""
        device = device_of(graph)
        times = {call: Time.of(values) for call, values in recorded_calls(graph).items()}
        source = Path(graph.info.source).name or "a recording"
        return cls(calls={device.name: times}, where=(f"{source}, {len(times)} calls",))

    @classmethod
    def from_table(cls, path: str | Path) -> Measured:
        """Return calls of a CSV table (gzip or plain), see the module. Raises ForetraceError with the line that is
        wrong.
        """
        source = Path(path)
        by_name: dict[str, dict[Named, list[float]]] = defaultdict(lambda: defaultdict(list))
        by_size: dict[str, dict[Sized, list[float]]] = defaultdict(lambda: defaultdict(list))
        lines = 0
        text = reading.read_text(source, mend="give a table of times")
        try:
            rows = csv.DictReader(io.StringIO(text, newline=""))
            header = set(rows.fieldnames or ())
            unit = _check(header, source)
            calls = {"op", "text"} <= header
            for row in rows:
                where = f"{source} line {rows.line_num}"
                device = _known(row["device"] or "", where).name
                seconds = _number(row, unit, where) * _UNITS[unit]
                if seconds <= 0:
                    raise ForetraceError(f"{where}: a call cannot take {row[unit]} {unit}; drop the line.")
                if calls and row["op"]:
                    by_name[device][row["op"], row["text"] or ""].append(seconds)
                else:
                    by_size[device][_sizes(row, where)].append(seconds)
                lines += 1
        except csv.Error as error:
            raise ForetraceError(f"{source} cannot be read as a table of times ({error}); copy it again.") from None
        if not lines:
            raise ForetraceError(f"{source} has a header and no times; give it at least one line.")
        return cls(
            calls={d: {key: Time.of(values) for key, values in each.items()} for d, each in by_name.items()},
            sizes={d: {key: Time.of(values) for key, values in each.items()} for d, each in by_size.items()},
            where=(f"{source.name}, {lines} times",),
        )


def recorded_calls(graph: TaskGraph) -> dict[Named, list[float]]:
    """Return seconds of every call of each operator with the same inputs, over all its kernels; of calls with known
    inputs.

    Kernels of one call are neighbours on a stream; calls of one operator that follow each other directly are split
    by the kernel that begins each of them.
    """
    device = bool(graph.on_device.any())
    kind = (TaskKind.KERNEL, TaskKind.MEMSET) if device else (TaskKind.OPERATOR,)
    rows = np.flatnonzero(np.isin(graph.kind, kind) & (graph.op >= 0) & (graph.shape >= 0) & ~graph.gone)
    if not len(rows):
        return {}
    rows = rows[np.lexsort((rows, graph.recorded[rows], graph.lane[rows]))]
    columns = [column[rows] for column in (graph.lane, graph.op, graph.shape)]
    new = np.ones(len(rows), dtype=np.bool_)
    new[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    found: dict[Named, list[float]] = defaultdict(list)
    for run in np.split(rows, np.flatnonzero(new)[1:]):
        key = graph.names[graph.op[run[0]]], graph.shapes[graph.shape[run[0]]]
        names = graph.name[run]
        calls = max(int((names == names[0]).sum()), 1) if device else len(run)
        if len(run) % calls:  # kernels of one call may share a name: then the run is one call
            calls = 1
        found[key] += [float(part.sum()) / 1e9 for part in np.split(graph.dur[run], calls)]
    return {key: values for key, values in found.items() if sum(values) > 0}


def device_of(graph: TaskGraph) -> Device:
    """Return the device that a recording names. Raises ForetraceError where that is no one device of the catalog."""
    names = [name for name in dict.fromkeys(graph.info.devices) if name]
    device = find(names[0]) if len(names) == 1 else None
    if device is None:
        said = f"names {', '.join(names)}, which is no one device of the catalog" if names else "names no device"
        raise ForetraceError(f"the recording {said}; say on which device it was made.")
    return device


def _check(header: set[str], source: Path) -> str:
    """Return the unit of the times. Raises ForetraceError where columns are missing."""
    units = [unit for unit in _UNITS if unit in header]
    if "device" not in header or len(units) != 1:
        raise ForetraceError(f"{source} needs a column device and one of {', '.join(_UNITS)}; see docs/utilisation.md.")
    if not ({"op", "text"} <= header or set(_SIZES) <= header):
        raise ForetraceError(f"{source} names no calls; it needs columns op and text, or {', '.join(_SIZES)}.")
    return units[0]


def _known(name: str, where: str) -> Device:
    try:
        return named(name)
    except ForetraceError as error:
        device = find(name)
        if device is None:
            raise ForetraceError(f"{where}: {error}") from None
        return device


def _sizes(row: Mapping[str, str], where: str) -> Sized:
    family = _member(Family, row.get("family") or "", where)
    precision = _member(Precision, row.get("precision") or "", where)
    b, m, n, k = (_number(row, name, where) if row.get(name) else 1.0 for name in ("b", "m", "n", "k"))
    return family, precision, b, m, n, k


def _member(kind: type[Family] | type[Precision], text: str, where: str) -> int:
    try:
        return int(kind[text.strip().upper()])
    except KeyError:
        names = ", ".join(each.name for each in kind)
        raise ForetraceError(f"{where}: {text!r} is no {kind.__name__.lower()}; choose {names}.") from None


def _number(row: Mapping[str, str], name: str, where: str) -> float:
    try:
        value = float(row[name] or "")
    except (ValueError, KeyError):
        value = nan
    if not isfinite(value):
        raise ForetraceError(f"{where}: {name} is {row.get(name)!r}, which is no number.")
    return value
