"""Speeds from a table that a user writes: measured steps per second by placement."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from foretrace import reading
from foretrace.errors import ForetraceError
from foretrace.fleet.formats.jobs import every_row
from foretrace.fleet.formats.source import Source
from foretrace.fleet.speeds import Shape, Speed, alone
from foretrace.fleet.workload import Float64, Int64, Workload, codes
from foretrace.plaintext import whole_number

_COLUMNS = ("model", "gpus", "nodes", "level", "gpu_type", "steps_per_s")


Placement = tuple[str, int, str]  # model, nodes (innermost units) or `Shape.level`, kind of GPU ("" any)


@dataclass(frozen=True, kw_only=True, eq=False)
class TableSpeeds:
    """Measured steps per second: `rates` by placement and number of GPUs. `by`: what tells placements apart.

    A job's progress is its rate over that of the tightest placement in the table with the GPUs it requests, on
    `reference_type` (may be left out where the table has one kind). It may exceed 1: some jobs run faster spread out.
    A row without a gpu_type holds for every kind that has no row of its own. With `interpolate`, numbers of GPUs that
    lie between two measured ones with all else equal take the line between them; nothing is taken beyond the table.
    What communication takes is not in such a table, so it is given as 0.
    """

    rates: Mapping[Placement, Mapping[int, float]]
    by: str = "nodes"
    reference_type: str | None = None
    interpolate: bool = False
    source: str = "table"
    name: str = "table"

    def __post_init__(self) -> None:
        if self.by not in ("nodes", "level"):
            raise ForetraceError(f"by={self.by} must be nodes or level.")
        types = sorted({gpu_type for _, _, gpu_type in self.rates})
        if self.reference_type is None:
            if len(types) > 1:
                kinds = ", ".join(repr(each) for each in types)
                raise ForetraceError(
                    f"{self.source} has several kinds of GPUs ({kinds}); say which one is reference_type."
                )
            object.__setattr__(self, "reference_type", types[0] if types else "")
        elif self.reference_type not in types and "" not in types:
            raise ForetraceError(f"{self.source} has no row for reference_type={self.reference_type}; add one.")

    @classmethod
    def read(cls, path: Path | str, *, levels: Sequence[str] = (), **parameters: Any) -> TableSpeeds:
        """Read CSV with a header, or JSON (a list of objects): model, gpus, nodes or level, gpu_type, steps_per_s.

        A level is a number (0 one GPU, 1 inside one node, 2 above, ...) or, with `levels` (innermost first), a name.
        Raises ForetraceError naming the line of the file (of JSON: the entry, the first being 1).
        """
        where = Path(path)
        if where.suffix.lower() == ".json":
            given = list(_json_rows(reading.read_text(where), where))
        else:
            given = list(_csv_rows(Source(str(where), reading.read_text(where)), where))
        if not given:
            raise ForetraceError(f"{where} holds no rows; write {','.join(_COLUMNS)} with nodes or level.")
        ways = {by for _, row in given for by in ("nodes", "level") if row.get(by) not in (None, "")}
        if len(ways) != 1:
            raise ForetraceError(
                f"{where} must say of every row either nodes or level; it has "
                f"{' and '.join(sorted(ways)) or 'neither'}."
            )
        by = ways.pop()
        rates: dict[Placement, dict[int, float]] = {}
        lines: dict[tuple[Placement, int], int] = {}
        for line, row in given:
            placement, gpus, rate = _measured(row, by, levels, f"{where}, line {line}")
            first = lines.setdefault((placement, gpus), line)
            if first != line:
                raise ForetraceError(f"{where}, line {line}: the same placement stands in line {first}; keep one.")
            rates.setdefault(placement, {})[gpus] = rate
        return cls(rates=rates, by=by, source=str(where), **parameters)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the numbers rest on, one sentence each."""
        kind = f" on {self.reference_type}" if self.reference_type else ""
        found = [f"{self.source}: a job's run time is that of the tightest placement in the table{kind}."]
        if self.interpolate:
            found.append("numbers of GPUs between two measured ones take the line between them.")
        return tuple(found)

    def kinds(self, workload: Workload) -> Int64:
        """Return (n,) equal for jobs of one model and number of GPUs. Raises ForetraceError for an unknown one."""
        keys = list(zip(workload.model.tolist(), workload.gpus.tolist(), strict=True))
        for model, gpus in dict.fromkeys(keys):
            self._reference(str(model), int(gpus))
        return codes(keys)[0]

    def speed(self, workload: Workload, job: int, shape: Shape) -> Speed:
        """Return steps per second here over those of the job's reference placement."""
        alone(self.name, shape)
        model = str(workload.model[job])
        where = shape.units[0] if self.by == "nodes" else shape.level
        rate = self._rate(model, shape.gpus, where, shape.gpu_type)
        if rate is None:
            kind = f" of {shape.gpu_type}" if shape.gpu_type else ""
            place = f"{where} nodes" if self.by == "nodes" else f"level {where}"
            near = " or interpolate between two numbers of GPUs" if not self.interpolate else ""
            raise ForetraceError(
                f"{self.source} has no row for {model!r} on {shape.gpus} GPUs{kind} ({place}); add one{near}."
            )
        return Speed(rate / self._reference(model, int(workload.gpus[job])))

    def run_times(self, workload: Workload) -> Float64:
        """Return (n,) seconds from `iterations` at the tightest placement of the table; nan where they are unknown."""
        pairs = zip(workload.model.tolist(), workload.gpus.tolist(), strict=True)
        rates = {each: self._reference(str(each[0]), int(each[1])) for each in dict.fromkeys(pairs)}
        jobs = zip(workload.model.tolist(), workload.gpus.tolist(), strict=True)
        times: Float64 = workload.iterations / np.array([rates[each] for each in jobs])
        return times

    def _reference(self, model: str, gpus: int) -> float:
        """Return the rate at the tightest placement of the table."""
        for where in sorted({place for name, place, _ in self.rates if name == model}):
            rate = self._rate(model, gpus, where, self.reference_type or "")
            if rate is not None:
                return rate
        kind = f" of {self.reference_type}" if self.reference_type else ""
        raise ForetraceError(f"{self.source} has no row for {model!r} on {gpus} GPUs{kind}; add one.")

    def _rate(self, model: str, gpus: int, where: int, gpu_type: str) -> float | None:
        for kind in dict.fromkeys((gpu_type, "")):
            known = self.rates.get((model, where, kind), {})
            if gpus in known:
                return known[gpus]
            below, above = [n for n in known if n < gpus], [n for n in known if n > gpus]
            if self.interpolate and below and above:
                low, high = max(below), min(above)
                return known[low] + (known[high] - known[low]) * (gpus - low) / (high - low)
        return None


def _csv_rows(source: Source, where: Path) -> Iterable[tuple[int, Mapping[str, Any]]]:
    """Yield (line, columns by name)."""
    if source.first:
        _known(source.header, f"{where}, line 1")
        yield from every_row(source)


def _json_rows(text: str, where: Path) -> Iterable[tuple[int, Mapping[str, Any]]]:
    said: Any = reading.parse_json(text, str(where))
    if not isinstance(said, list):
        raise ForetraceError(f'{where} must be a list of objects: [{{"model": "bert", "gpus": 4, ...}}].')
    for number, row in enumerate(said, 1):
        if not isinstance(row, dict):
            raise ForetraceError(f"{where}, line {number}: an entry must be an object with model, gpus, steps_per_s.")
        _known(list(row), f"{where}, line {number}")
        yield number, row


def _known(keys: Sequence[str], where: str) -> None:
    for key in keys:
        if key not in _COLUMNS:
            raise ForetraceError(f"{where}: unknown column {key!r}; there are {', '.join(_COLUMNS)}.")
    for key in ("model", "gpus", "steps_per_s"):
        if key not in keys:
            raise ForetraceError(f"{where}: the column {key} is missing; add it.")


def _measured(row: Mapping[str, Any], by: str, levels: Sequence[str], where: str) -> tuple[Placement, int, float]:
    """Return placement, number of GPUs and steps per second of a row."""

    def whole(key: str, least: int) -> int:
        said = row.get(key, "")
        number = said if type(said) is int else whole_number(said) if isinstance(said, str) else None
        if number is None or not least <= number < 2**31:
            raise ForetraceError(f"{where}: {key} {said!r} is no whole number of {least} or more.")
        return number

    model = str(row["model"]).strip()
    if not model:
        raise ForetraceError(f"{where}: no model; name it as the workload does.")
    gpus = whole("gpus", 1)
    said = str(row.get(by, "")).strip()
    if by == "level" and said in levels:
        place = list(levels).index(said) + 1
    elif by == "level" and said and not said.isdecimal():
        known = ", ".join(levels) or "none were given"
        raise ForetraceError(f"{where}: there is no level {said!r} ({known}); write a number or one of these names.")
    else:
        place = whole(by, 0 if by == "level" else 1)
    if by == "nodes" and place > gpus:
        raise ForetraceError(f"{where}: {gpus} GPUs cannot lie on {place} nodes.")
    try:
        rate = float(row["steps_per_s"])
    except (TypeError, ValueError):
        rate = 0.0
    if not 0 < rate < inf:
        raise ForetraceError(f"{where}: steps_per_s {row['steps_per_s']!r} is no number above 0.")
    place = 0 if by == "level" and gpus == 1 else place  # inside a node, as one would write, is the GPU itself
    return (model, place, str(row.get("gpu_type") or "").strip()), gpus, rate
