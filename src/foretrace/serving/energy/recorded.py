"""Trainings whose power Zeus recorded at every batch size and power limit (You et al., NSDI 2023).

Time to the target is seconds per epoch times the mean number of epochs, of the runs that reached it; energy is that
times the average power. The files are `summary_power_GPU.csv` and `summary_train.csv` or `.csv.gz` of Zeus' traces.
"""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import isfinite, log
from pathlib import Path

from foretrace.errors import ForetraceError
from foretrace.names import keyed, question
from foretrace.reading import read_text
from foretrace.serving.energy.tune import EnergyUse, Knob, Setting, TunedEnvironment

PREFIX = "zeus:"
_POWER = "summary_power_"
# The default batch size (table 1 of the paper) and the target of its traces by data set.
_USUAL = {
    "cifar100": (1024, 0.6), "imagenet": (256, 0.65), "librispeech": (192, 40.0), "movielens-1m": (1024, 0.41),
    "squad": (32, 84.0), "sentiment140": (128, 0.84),
}  # fmt: skip


def read(words: Sequence[str]) -> TunedEnvironment:
    """Read it from "zeus:PATH", "workload=NAME", "gpu=NAME", "target=X"; PATH is a folder of traces or its summary of
    one GPU.

    Raises ForetraceError for what the traces do not have.
    """
    first, *more = words
    given = keyed(more, ("workload", "gpu", "target"), "zeus:")
    path = Path(first.removeprefix(PREFIX))
    power = _power_file(path, given.get("gpu", ""))
    rows = list(_rows(power, "dataset", "batch_size", "optimizer", "power_limit", "time_per_epoch", "average_power"))
    workload = _one("workload", given.get("workload", ""), sorted({row["dataset"] for row in rows}))
    batch, target = _USUAL.get(workload, (0, 0.0))
    if "target" in given or not target:
        target = _number(given.get("target", ""), "`target=` of a recorded training")
    epochs = _epochs(power.parent, workload, target)
    points: dict[Setting, EnergyUse] = {}
    for row in rows:
        if row["dataset"] != workload or (reached := epochs.get((row["batch_size"], row["optimizer"]))) is None:
            continue
        watts, per_epoch, size, limit = (
            _number(row[name], f"{name} in {power}")
            for name in ("average_power", "time_per_epoch", "batch_size", "power_limit")
        )
        if all(isfinite(each) and each > 0 for each in (watts, per_epoch, size, limit)):
            time_s = per_epoch * reached
            points[size, limit] = EnergyUse(time_s * watts, time_s)
    if not points:
        raise ForetraceError(f"no run of {workload} in {power.parent} reached `target={target:g}`; give another one.")
    sizes, limits = (tuple(sorted(set(each))) for each in zip(*points, strict=True))
    gpu = power.name.removeprefix(_POWER).removesuffix(".csv")
    usual = min(sizes, key=lambda size: abs(log(size / batch))) if batch else sizes[-1]
    highest = max(limit for size, limit in points if size == usual)
    knobs = (
        Knob(name="batch", unit="", levels=sizes, default=usual),
        Knob(name="gpu-power-limit", unit="W", levels=limits, default=highest),
    )
    return TunedEnvironment(name=f"{workload} on {gpu} to {target:g}", knobs=knobs, points=points)


def _power_file(path: Path, gpu: str) -> Path:
    if path.is_file():
        return path
    files = {each.name.removeprefix(_POWER).removesuffix(".csv"): each for each in sorted(path.glob(f"{_POWER}*.csv"))}
    if not files:
        raise ForetraceError(f"{path} has no {_POWER}GPU.csv; give a folder of Zeus' traces.")
    return files[_one("gpu", gpu, list(files))]


def _one(name: str, given: str, known: list[str]) -> str:
    """Return the one that is meant: by its name, the begin of it, or because there is no other."""
    found = [each for each in known if each == given] or [each for each in known if each.startswith(given)]
    if len(found) == 1:
        return found[0]
    if not given:
        raise ForetraceError(f"The target must say its {name}, {name}={'|'.join(known)}.")
    raise ForetraceError(f"{name}={given} was not recorded; {question(given, known)}")


def _epochs(folder: Path, workload: str, target: float) -> dict[tuple[str, str], float]:
    """Return the mean number of epochs to the target by (batch size, optimizer); only of runs that reached it."""
    files = (folder / "summary_train.csv.gz", folder / "summary_train.csv")
    path = next((each for each in files if each.exists()), None)
    if path is None:
        raise ForetraceError(f"{folder} has no summary_train.csv; give a folder of Zeus' traces.")
    found, targets = defaultdict[tuple[str, str], list[float]](list), set()
    for row in _rows(path, "dataset", "batch_size", "optimizer", "target_metric", "target_epoch"):
        if row["dataset"] == workload:
            targets.add(metric := _number(row["target_metric"], f"target_metric in {path}"))
            reached = _number(row["target_epoch"] or "nan", f"target_epoch in {path}")
            if metric == target and isfinite(reached):
                found[row["batch_size"], row["optimizer"]].append(reached)
    if target not in targets:
        raise ForetraceError(
            f"target={target:g} of {workload} was not recorded; choose one of "
            f"{', '.join(f'{each:g}' for each in sorted(targets))}."
        )
    return {key: sum(each) / len(each) for key, each in found.items()}


def _rows(path: Path, *columns: str) -> Iterator[dict[str, str]]:
    table = csv.DictReader(io.StringIO(read_text(path, mend="give a folder of Zeus' traces")), restval="")
    if missing := [name for name in columns if name not in (table.fieldnames or ())]:
        raise ForetraceError(f"{path} is no summary of Zeus: it has no column {missing[0]}; give its traces.")
    try:
        yield from table
    except csv.Error as error:
        raise ForetraceError(f"{path}, line {table.line_num} is no CSV ({error}); copy the traces again.") from None


def _number(text: str, what: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ForetraceError(f"{what} must be a number, got {text!r}; mend it.") from None
