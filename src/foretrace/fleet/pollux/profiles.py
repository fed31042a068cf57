"""Measured profiles of training applications, as the Pollux simulator reads them (fleet-scheduling.md, section 7.2).

A folder of profiles has one folder per application with `placements.csv` (placement, local_bsz, step_time, sync_time),
`scalability.csv` (num_nodes, num_replicas, local_bsz, step_time, sync_time) and one `validation-BATCH.csv` per total
batch size (progress, iteration, grad_sqr, grad_var; one row per epoch). Each file may be packed as `.csv.gz`. Times
are seconds per step; a placement is written with one digit per node, GPUs on that node.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from foretrace.errors import ForetraceError, needing
from foretrace.fleet.formats.jobs import Bad, every_row, number
from foretrace.fleet.formats.source import load
from foretrace.fleet.workload import Float64

EPS = 1e-8  # the tolerance of the published code wherever it rounds a batch up
_MOST_NODES = 16  # the published simulator looks wider placements up as 16 nodes
# One published exception: yolov3 is profiled beyond the local batch that the published simulator lets it use.
_MAX_LOCAL = {"yolov3": 8}


@dataclass(frozen=True, slots=True, eq=False)
class Validation:
    """One training run to the end at a fixed total batch size; columns hold one value per epoch.

    progress: work done after the epoch, in units of steps at the smallest batch; iterations: steps done after it;
    grad_sqr, grad_var: squared norm and variance of the gradient during it.
    """

    progress: list[float]
    iterations: list[float]
    grad_sqr: list[float]
    grad_var: list[float]


@dataclass(frozen=True, slots=True, eq=False)
class Application:
    """All that was measured of one application.

    validation: by total batch size, ascending. placements: by placement digits, local batch sizes in ascending order
    with (step, sync) seconds of each. points: (k, 3) nodes, replicas, local batch and values: (k, 2) step and sync
    seconds of all configurations, for placements that were not measured. measured: (rows, 5) nodes, replicas, local
    batch, step_s, sync_s, one row per row of `placements.csv` and `scalability.csv`. min_local, max_local: samples per
    replica and pass. init_batch, max_batch: smallest (where efficiency is 1) and largest validated total batch size.
    ends: progress at which each epoch is over, the least over all validated batch sizes.
    """

    name: str
    validation: dict[int, Validation]
    placements: dict[int, tuple[list[float], list[tuple[float, float]]]]
    points: Float64
    values: Float64
    measured: Float64
    min_local: int
    max_local: int
    init_batch: int
    max_batch: int
    ends: list[float]
    _steps: dict[tuple[tuple[int, ...], int], tuple[float, float]] = field(default_factory=dict)
    _stats: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    _between: list[Any] = field(default_factory=list)

    @property
    def epochs(self) -> int:
        """Epochs to the end of training: those that every batch size was trained for."""
        return len(self.ends)

    def split(self, batch: int, replicas: int, *, always_accumulate: bool = False) -> tuple[int, int]:
        """Return (batch per replica and pass, accumulation steps) of a total batch on so many replicas.

        One replica with more than the smallest batch accumulates at least once, as one pass alone cannot estimate
        the gradient's noise; with `always_accumulate` one replica does so whatever the batch.
        """
        local = math.ceil(batch / replicas - EPS)
        steps = math.ceil(local / self.max_local - EPS) - 1
        if replicas == 1 and (always_accumulate or batch > self.init_batch):
            steps = max(1, steps)
        atomic = math.ceil(local / (steps + 1) - EPS)
        return self.bounded(atomic, steps, replicas), steps

    def bounded(self, atomic: int, steps: int, replicas: int) -> int:
        """Return the batch per replica and pass, cut so that the total stays within the largest batch."""
        return min(atomic, int(self.max_batch / (replicas * (steps + 1))))

    def step_seconds(self, placement: Sequence[int], local: int) -> tuple[float, float]:
        """Return (step, sync) seconds with these GPUs per node and this batch per replica.

        A measured placement (rotations count as equal) is interpolated between its local batches; any other linearly
        between all measured (nodes, replicas, local batch). Raises ForetraceError outside what was measured and
        MissingExtraError where the second case needs scipy and it is not installed.
        """
        key = (tuple(placement), local)
        found = self._steps.get(key)
        if found is None:
            found = self._steps[key] = self._look_up(key[0], local)
        return found

    def _look_up(self, placement: tuple[int, ...], local: int) -> tuple[float, float]:
        least = min(placement[i:] + placement[:i] for i in range(len(placement)))
        if max(least) > 9:
            raise ForetraceError(
                f"profiles write GPUs per node as one digit, so {self.name} has none for {max(least)} GPUs on a node; "
                "use a cluster with at most 9 GPUs per node."
            )
        rows = self.placements.get(int("".join(map(str, least))))
        step, sync = self._along(*rows, local) if rows else self._across(least, local)
        if math.isnan(step + sync):
            raise ForetraceError(
                f"profile {self.name}: no measurement covers {sum(least)} GPUs placed {'+'.join(map(str, least))} with "
                f"a local batch of {local}; use a smaller cluster or add rows to its placements.csv."
            )
        return step, sync

    @staticmethod
    def _along(sizes: list[float], times: list[tuple[float, float]], local: int) -> tuple[float, float]:
        """Interpolate between the two neighbours in local batch; nan outside them."""
        if not sizes[0] <= local <= sizes[-1]:
            return math.nan, math.nan
        if len(sizes) == 1:
            return times[0]
        # The pair below and including `local`, so that a measured batch is the upper end of its pair: with this
        # choice the last bits agree with the interpolation of the published code.
        high = min(max(bisect_left(sizes, local), 1), len(sizes) - 1)
        (step0, sync0), (step1, sync1) = times[high - 1], times[high]
        over, width = local - sizes[high - 1], sizes[high] - sizes[high - 1]
        return (step1 - step0) / width * over + step0, (sync1 - sync0) / width * over + sync0

    def _across(self, placement: tuple[int, ...], local: int) -> tuple[float, float]:
        if not self._between:
            with needing(f"placement {'+'.join(map(str, placement))}, of which profile {self.name} has no rows,"):
                from scipy.interpolate import LinearNDInterpolator
            self._between.append(LinearNDInterpolator(self.points, self.values))
        found = self._between[0]([min(len(placement), _MOST_NODES), sum(placement), local])[0]
        return float(found[0]), float(found[1])

    def neighbours(self, batch: int) -> tuple[int, int]:
        """Return the validated batch sizes at or below and at or above; raises ForetraceError outside their range."""
        if not self.init_batch <= batch <= self.max_batch:
            raise ForetraceError(
                f"profile {self.name} is validated for total batches of {self.init_batch} to {self.max_batch}, "
                f"not {batch}; change the batch size or add a validation-{batch}.csv."
            )
        return max(b for b in self.validation if b <= batch), min(b for b in self.validation if b >= batch)

    def grad_stats(self, batch: int, epoch: int) -> tuple[float, float]:
        """Return (squared norm, variance) of the gradient in an epoch (from 0), linear between validated batches."""
        key = (batch, epoch)
        if key not in self._stats:
            low, high = self.neighbours(batch)
            a, b = self.validation[low], self.validation[high]
            self._stats[key] = (
                linear(batch, low, high, a.grad_sqr[epoch], b.grad_sqr[epoch]),
                linear(batch, low, high, a.grad_var[epoch], b.grad_var[epoch]),
            )
        return self._stats[key]

    def gain(self, batch: int, epoch: int) -> float:
        """Return progress per step with this total batch, in steps with the smallest batch."""
        sqr, var = self.grad_stats(batch, epoch)
        return (var + sqr) / (var / (batch / self.init_batch) + sqr)


def linear(at: int, low: int, high: int, below: float, above: float) -> float:
    """Interpolate between the values at two batch sizes."""
    if low == high:
        return below
    return ((at - low) * above + (high - at) * below) / (high - low)


class Profiles:
    """A folder of profiles; applications are read when they are first asked for."""

    def __init__(self, folder: Path) -> None:
        """Raise ForetraceError where `folder` is no folder or holds no application."""
        self.folder = folder
        if not folder.is_dir():
            raise ForetraceError(f"{folder} is not a folder; name the one with a folder of profiles per application.")
        self.names = sorted(path.name for path in folder.iterdir() if path.is_dir())
        if not self.names:
            raise ForetraceError(f"{folder} holds no application; name the folder with one folder per application.")
        self._read: dict[str, Application] = {}

    def application(self, name: str) -> Application:
        """Raise ForetraceError for an unknown application or a file that cannot be read."""
        if name not in self._read:
            if name not in self.names:
                raise ForetraceError(
                    f"{self.folder} has no profile of application {name!r}; it has {', '.join(self.names)}."
                )
            files = (path for path in (self.folder / name).iterdir() if path.is_file())
            stamps = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files)
            self._read[name] = _read_once(self.folder.resolve() / name, tuple(stamps))
        return self._read[name]


@lru_cache(maxsize=64)
def _read_once(folder: Path, stamps: tuple[tuple[str, int, int], ...]) -> Application:
    """Read an application once per process while its files stay as they are: that takes longer than a simulation."""
    return read_application(folder)


def read_application(folder: Path) -> Application:
    """Return the profile in one folder; raises ForetraceError naming the file, row and column that cannot be used."""
    placed = _rows(_found(folder, "placements.csv"), ("placement", "local_bsz", "step_time", "sync_time"))
    scaled = _rows(
        _found(folder, "scalability.csv"), ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time")
    )
    if any(not 0 < row[0] < 2**53 or row[0] % 1 for row in placed):
        raise ForetraceError(f"{folder}/placements.csv: a placement must be 1 to 15 digits, one per node; correct it.")
    digits = [str(int(row[0])) for row in placed]
    shapes = np.array([[len(each), sum(map(int, each))] for each in digits], np.float64)
    measured = np.vstack([np.hstack([shapes, np.array(placed)[:, 1:]]), np.array(scaled)])
    if (measured[:, :4] <= 0).any() or (measured[:, 4] < 0).any() or (measured[:, 3] <= measured[:, 4]).any():
        raise ForetraceError(
            f"{folder}: a measured row has no nodes, replicas, batch or time, or its sync_time is not below its "
            "step_time; correct placements.csv or scalability.csv."
        )
    tables: dict[int, list[tuple[float, tuple[float, float]]]] = {}
    groups: dict[tuple[float, ...], list[Float64]] = {}
    for text, row, line in zip(digits, placed, measured, strict=False):
        tables.setdefault(int(text), []).append((row[1], (row[2], row[3])))
        groups.setdefault(tuple(line[:3]), []).append(line[3:])
    for key, rows in tables.items():
        if len({size for size, _ in rows}) < len(rows):
            raise ForetraceError(f"{folder}/placements.csv: placement {key} has a local_bsz twice; keep one row.")
    keys = sorted(groups)
    mean = [sum(groups[key]) / len(groups[key]) for key in keys]
    validation = _validations(folder)
    name = folder.name
    return Application(
        name=name,
        validation=validation,
        placements={
            key: ([size for size, _ in ordered], [times for _, times in ordered])
            for key, rows in tables.items()
            for ordered in [sorted(rows, key=lambda row: row[0])]
        },
        points=np.vstack([np.array(keys), measured[len(placed) :, :3]]),
        values=np.vstack([np.array(mean), measured[len(placed) :, 3:]]),
        measured=measured,
        min_local=int(min(row[1] for row in placed)),
        max_local=_MAX_LOCAL.get(name, int(max(row[1] for row in placed))),
        init_batch=min(validation),
        max_batch=max(validation),
        ends=[min(each) for each in zip(*(run.progress for run in validation.values()), strict=False)],
    )


def _validations(folder: Path) -> dict[int, Validation]:
    found: dict[int, Validation] = {}
    for path in sorted(folder.glob("validation-*.csv*")):
        size = path.name.removeprefix("validation-").removesuffix(".gz").removesuffix(".csv")
        if not size.isdecimal() or int(size) < 1:
            raise ForetraceError(f"{path}: its name must give a total batch size, e.g. validation-128.csv; rename.")
        rows = _rows(path, ("progress", "iteration", "grad_sqr", "grad_var"))
        run = Validation(*(list(column) for column in zip(*rows, strict=True)))
        if any(b <= a for a, b in zip([0.0, *run.progress], run.progress, strict=False)):
            raise ForetraceError(f"{path}: progress must grow from epoch to epoch; correct that column.")
        if any(sqr < 0 or var < 0 or sqr + var <= 0 for sqr, var in zip(run.grad_sqr, run.grad_var, strict=True)):
            raise ForetraceError(f"{path}: grad_sqr and grad_var must not be below zero nor both zero; correct them.")
        found[int(size)] = run
    if not found:
        raise ForetraceError(f"{folder} has no validation-BATCH.csv; add one per total batch size that was trained.")
    return dict(sorted(found.items()))


def _found(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise ForetraceError(f"{folder} has no {name}; copy the application's whole profile there.")


def _rows(path: Path, columns: tuple[str, ...]) -> list[tuple[float, ...]]:
    """Return these columns of a CSV file as finite numbers, row by row."""
    rows: list[tuple[float, ...]] = []
    for line, row in every_row(load(path), columns):
        try:
            rows.append(tuple(number(row[name], name) for name in columns))
        except Bad as why:
            raise ForetraceError(f"{path}, line {line}: {why}; correct it.") from None
    if not rows:
        raise ForetraceError(f"{path} has no rows; copy it again.")
    return rows
