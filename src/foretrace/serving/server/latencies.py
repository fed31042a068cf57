"""`LatencyProfile`: what single instances of a model take, by threads and batch; measured here or recorded elsewhere.

A profile is a CSV file with a row per point: `model, threads, batch, latency_ms`, and where it was measured here also
`samples_ms` (every measured latency, separated by spaces) and `origin` (machine, versions and content of the model).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, isfinite
from pathlib import Path

import numpy as np

from foretrace.arrays import Float64
from foretrace.errors import ForetraceError
from foretrace.files import write_text
from foretrace.reading import read_text
from foretrace.serving.server.split import CoreSplit, ModelInstance

COLUMNS = ("model", "threads", "batch", "latency_ms")
_MORE = ("samples_ms", "origin")
_MOST = 1 << 20  # threads of a machine, samples of a batch


@dataclass(frozen=True, kw_only=True)
class LatencyProfile:
    """Latencies of instances of one model that run alone. Points that were measured have several, recorded ones one."""

    model: str
    samples_s: Mapping[ModelInstance, Float64] = field(default_factory=dict)  # sorted
    origin: str = ""  # where it was measured, and of what; "": recorded elsewhere
    refused: tuple[ModelInstance, ...] = ()  # points that others disturbed too much; a search leaves them out

    def latency_s(self, quantile: float = 0.5) -> dict[ModelInstance, float]:
        """Return a quantile of the latency at every point. Raises ForetraceError where samples are too few for it."""
        found = {point: float(np.quantile(samples, quantile)) for point, samples in self.samples_s.items()}
        fewest = min((len(each) for each in self.samples_s.values()), default=1)
        if quantile > 0.5 and fewest < (needed := samples_for(quantile)):
            raise ForetraceError(
                f"`tail={quantile:g}` needs {needed} latencies of every point, and the profile of {self.model} has "
                f"{fewest} of one; measure it with this tail, or leave it out."
            )
        return found

    def alone_s(self, split: CoreSplit, quantile: float = 0.5) -> float:
        """Return that quantile of the latency of a batch if instances do not disturb each other.

        It is within x with this probability if each of n instances is with the n-th root of it: exact for equal
        instances, and an upper bound for others. Raises KeyError for an instance that was not measured.
        """
        level = quantile ** (1 / len(split))
        return max(float(np.quantile(self.samples_s[each], level)) for each in set(split.instances))

    def save(self, path: Path) -> None:
        """Write the profile, whole or not at all; those of other models in the file stay."""
        others = [each for each in read(path) if each.model != self.model] if path.exists() else []
        out = io.StringIO()
        table = csv.writer(out, lineterminator="\n")
        table.writerow((*COLUMNS, *_MORE))
        for profile in (*others, self):
            for point, samples in sorted(profile.samples_s.items()):
                listed = " ".join(f"{1e3 * each:.6g}" for each in samples.tolist()) if len(samples) > 1 else ""
                median_ms = 1e3 * float(np.median(samples))
                table.writerow((profile.model, *point, f"{median_ms:.17g}", listed, profile.origin))
        write_text(path, out.getvalue())


def samples_for(quantile: float) -> int:
    """Return latencies of which one at least is expected beyond the quantile."""
    return ceil(round(1 / (1 - quantile), 6))


def read(path: Path) -> tuple[LatencyProfile, ...]:
    """Return the profiles in a file, one per model. Raises ForetraceError with the line that is no point of one."""
    mend = f"give a CSV file with the columns {', '.join(COLUMNS)}"
    rows = csv.DictReader(io.StringIO(read_text(path, mend=mend)), restval="")
    if missing := [name for name in COLUMNS if name not in (rows.fieldnames or ())]:
        raise ForetraceError(f"{path} is no latency profile: it has no column {missing[0]}; {mend}.")
    found: dict[str, dict[ModelInstance, Float64]] = {}
    origins: dict[str, str] = {}
    try:
        for row in rows:
            where = f"{path}, line {rows.line_num}"
            point, samples = _point(row, where)
            points = found.setdefault(row["model"], {})
            if point in points:
                raise ForetraceError(f"{where}: {point.threads} threads, batch {point.batch} comes twice; keep one.")
            points[point] = samples
            if origins.setdefault(row["model"], row.get("origin") or "") != (row.get("origin") or ""):
                raise ForetraceError(f"{where}: points of {row['model']} come from two places; keep those of one.")
    except csv.Error as error:
        raise ForetraceError(f"{path}, line {rows.line_num} is no CSV ({error}); {mend}.") from None
    return tuple(LatencyProfile(model=name, samples_s=points, origin=origins[name]) for name, points in found.items())


def _point(row: Mapping[str, str], where: str) -> tuple[ModelInstance, Float64]:
    """Return the point of a row, its latencies sorted."""
    try:
        point = ModelInstance(int(row["threads"]), int(row["batch"]))
        listed = (row.get("samples_ms") or "").split() or [row["latency_ms"]]
        samples = np.sort(np.array([float(each) for each in listed])) / 1e3
    except ValueError:
        raise ForetraceError(f"{where} is no point: threads, batch and latency_ms must be numbers.") from None
    if not (1 <= min(point) <= max(point) <= _MOST) or not (samples[0] > 0 and isfinite(samples[-1])):
        raise ForetraceError(f"{where} is no point: threads, batch and latency_ms must be finite and above 0.")
    return point, samples
