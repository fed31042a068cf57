"""`LatencyProfile`: what single instances of a model take, by threads and batch; measured here or recorded elsewhere.

A profile is a CSV file with a row per point: `model, threads, batch, latency_ms`, and where it was measured here also
`samples_ms` (every measured latency, separated by spaces) and `origin` (machine, versions and content of the model).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from foretrace.arrays import Float64
from foretrace.errors import ForetraceError
from foretrace.files import write_text
from foretrace.reading import read_text
from foretrace.serving.server.split import CoreSplit, ModelInstance

_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]


class _Row(msgspec.Struct):
    model: str
    threads: _Count
    batch: _Count
    latency_ms: float
    samples_ms: str = ""
    origin: str = ""


@dataclass(frozen=True, kw_only=True)
class LatencyProfile:
    """Latencies of instances of one model that run alone. Points that were measured have several, recorded ones one."""

    model: str
    samples_s: Mapping[ModelInstance, Float64] = field(default_factory=dict)  # sorted
    origin: str = ""  # where it was measured, and of what; "": recorded elsewhere
    refused: tuple[ModelInstance, ...] = ()  # points that others disturbed too much; a search leaves them out

    def latency_s(self, quantile: float = 0.5) -> dict[ModelInstance, float]:
        """Return a quantile of the latency at every point. Raises ForetraceError where samples are too few for it."""
        fewest = min(map(len, self.samples_s.values()), default=1)
        if quantile > 0.5 and fewest < (needed := samples_for(quantile)):
            raise ForetraceError(
                f"`tail={quantile:g}` needs {needed} latencies of every point, and the profile of {self.model} has "
                f"{fewest} of one; measure it with this tail, or leave it out."
            )
        return {point: float(np.quantile(samples, quantile)) for point, samples in self.samples_s.items()}

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
        table.writerow(_Row.__struct_fields__)
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
    mend = f"give a CSV file with the columns {', '.join(_Row.__struct_fields__[:4])}"
    rows = csv.DictReader(io.StringIO(read_text(path, mend=mend)), restval="", restkey="more", skipinitialspace=True)
    found, origins = dict[str, dict[ModelInstance, Float64]](), dict[str, str]()
    try:
        for given in rows:
            row = msgspec.convert(given, _Row, strict=False)
            point = ModelInstance(row.threads, row.batch)
            samples_ms = [float(each) for each in row.samples_ms.split()] or [row.latency_ms]
            samples = np.sort(np.array(samples_ms)) / 1e3
            if not 0 < samples[0] <= samples[-1] < np.inf:
                raise ValueError("latencies must be finite and above 0")
            if point in found.setdefault(row.model, {}) or origins.setdefault(row.model, row.origin) != row.origin:
                raise ValueError("a point comes twice, or points of one model from two places")
            found[row.model][point] = samples
    except (csv.Error, msgspec.ValidationError, ValueError) as error:
        raise ForetraceError(f"{path}, line {rows.line_num} is no point of a profile ({error}); {mend}.") from None
    if not found:
        raise ForetraceError(f"{path} is no latency profile: it holds no point; {mend}.")
    return tuple(LatencyProfile(model=name, samples_s=points, origin=origins[name]) for name, points in found.items())
