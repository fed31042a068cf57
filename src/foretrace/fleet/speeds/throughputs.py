"""Measured training speeds by GPU type, number of GPUs, placement and partner: the tables of Gavel.

Format (stanford-futuredata/gavel, scheduler/*_throughputs.json, OSDI'20): JSON, plain or gzipped,
`{GPU type: {"('model', GPUs)": {"null": steps/s alone, "('other', GPUs)": [own steps/s, the other's]}}}`; every
GPU type may stand a second time with `_unconsolidated` behind its name: the same on as many machines as GPUs.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from foretrace import reading
from foretrace.errors import ForetraceError
from foretrace.fleet.speeds import Shape, Speed
from foretrace.fleet.workload import Float64, Int64, Workload, codes

Job = tuple[str, int]  # what is trained, on how many GPUs
SPREAD = "_unconsolidated"


@dataclass(frozen=True, slots=True, eq=False)
class ThroughputTable:
    """Steps per second of kinds of jobs; a model of speed for the simulator (`Speeds`) too.

    alone: by GPU type (with and without `_unconsolidated`), by job. shared: by GPU type, by (job, other job) in the
    order of the file: speeds of both while they share their GPUs. reference: the GPU type that `work_s` of a workload
    is meant for. Progress is relative to the reference type with all GPUs together in one innermost unit.
    """

    path: str
    alone: Mapping[str, Mapping[Job, float]]
    shared: Mapping[str, Mapping[tuple[Job, Job], tuple[float, float]]]
    reference: str = "v100"

    @property
    def name(self) -> str:
        """For headings: the file's name."""
        return Path(self.path).name

    @classmethod
    def read(cls, path: str | Path, *, reference: str = "v100") -> Self:
        """Read a file. Raises ForetraceError with the place of the first entry that is not as the format says."""
        mend = "name a throughput file of Gavel"
        raw = reading.parse_json(reading.read_text(Path(path), mend=mend), str(path), mend=mend)
        jobs: dict[str, Job] = {}  # the same few keys stand in a file thousands of times

        def key(written: str, where: str) -> Job:
            if written not in jobs:
                jobs[written] = _job(written, where)
            return jobs[written]

        alone: dict[str, dict[Job, float]] = {}
        shared: dict[str, dict[tuple[Job, Job], tuple[float, float]]] = {}
        for kind, rows in _mapping(raw, str(path)).items():
            alone[kind], shared[kind] = {}, {}
            for written, entries in _mapping(rows, f"{path}: {kind}").items():
                where = f"{path}: {kind}: {written}"
                own = key(written, where)
                for other, value in _mapping(entries, where).items():
                    if other == "null":
                        alone[kind][own] = _speed(value, where)
                    elif isinstance(value, list) and len(value) == 2:
                        both = _speed(value[0], where), _speed(value[1], where)
                        shared[kind][own, key(other, where)] = both
                    else:
                        raise ForetraceError(f"{where}: beside {other} stand not two speeds; correct that entry.")
                if own not in alone[kind]:
                    raise ForetraceError(f"{where}: its speed alone, under null, is missing; add it.")
        if not alone:
            raise ForetraceError(f"{path}: holds no GPU type; name a throughput file of Gavel.")
        return cls(str(path), alone, shared, reference)

    def rate(self, gpu_type: str, model: str, gpus: int, *, together: bool = True) -> float:
        """Return steps per second alone on `gpus` devices of a type, all in one machine or each in its own.

        Raises ForetraceError where the table does not have that.
        """
        kind = gpu_type if together or gpus == 1 else gpu_type + SPREAD
        try:
            return self.alone[kind][model, gpus]
        except KeyError:
            raise self._missing(kind, model, gpus) from None

    def pair_rates(self, gpu_type: str, first: Job, second: Job, *, together: bool = True) -> tuple[float, float]:
        """Return steps per second of two jobs that share the same devices; raises as `rate` does."""
        kind = gpu_type if together or first[1] == 1 else gpu_type + SPREAD
        both = self.shared.get(kind, {}).get((first, second))
        if both is None:
            swapped = self.shared.get(kind, {}).get((second, first))
            if swapped is None:
                raise ForetraceError(
                    f"{self.path}: has no speeds of {first} and {second} that share {kind}; measure them or"
                    " leave sharing out."
                )
            both = swapped[1], swapped[0]
        return both

    def kinds(self, workload: Workload) -> Int64:
        """Return (n,) kind of each job: those of one model and number of GPUs are equally fast."""
        return codes(zip(workload.model.tolist(), workload.gpus.tolist(), strict=True))[0]

    def run_times(self, workload: Workload) -> Float64:
        """Return (n,) seconds of each job whose `iterations` are known, together on the reference type; nan else."""
        jobs = zip(workload.model, workload.gpus.tolist(), strict=True)
        times: Float64 = workload.iterations / np.array([self.rate(self.reference, str(name), n) for name, n in jobs])
        return times

    def speed(self, workload: Workload, job: int, shape: Shape) -> Speed:
        """Return the speed in a placement of this shape: together if all GPUs are in one innermost unit.

        Raises ForetraceError for a job, GPU type or size that was not measured, and for shared GPUs, whose speed
        depends on who shares them (`pair_rates`).
        """
        model, asked = str(workload.model[job]), int(workload.gpus[job])
        if shape.sharers:
            raise ForetraceError(
                f"{self.path}: the speed of job {workload.job[job]!r} on a shared GPU depends on its partner; give it"
                " GPUs of its own."
            )
        kind = shape.gpu_type or self.reference
        here = self.rate(kind, model, shape.gpus, together=not shape.units or shape.units[0] == 1)
        reference = self.rate(self.reference, model, asked)
        if reference <= 0:
            raise ForetraceError(f"{self.path}: {model!r} does not run on {self.reference}; choose another reference.")
        return Speed(here / reference)

    def _missing(self, kind: str, model: str, gpus: int) -> ForetraceError:
        rows = self.alone.get(kind)
        if rows is None:
            return ForetraceError(f"{self.path}: has no GPU type {kind!r}; it has {', '.join(sorted(self.alone))}.")
        sizes = sorted(size for known, size in rows if known == model)
        if sizes:
            listed = ", ".join(map(str, sizes))
            return ForetraceError(f"{self.path}: {model!r} on {gpus} {kind} was not measured; its sizes are {listed}.")
        some = ", ".join(sorted({known for known, _ in rows})[:3])
        return ForetraceError(f"{self.path}: does not know {model!r} on {kind}; it knows {some}, ...")


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ForetraceError(f"{where}: is no table of speeds; name a throughput file of Gavel.")
    return value


def _speed(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ForetraceError(f"{where}: {str(value)[:40]!r} is no speed in steps per second; correct that entry.")
    return float(value)


def _job(written: str, where: str) -> Job:
    try:
        value = ast.literal_eval(written)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        value = None
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str) and type(value[1]) is int:
        return value[0], value[1]
    raise ForetraceError(f"{where}: {written[:40]!r} is not written as ('model', GPUs); correct that key.")
