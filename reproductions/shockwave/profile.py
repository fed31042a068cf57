"""What the jobs of the Shockwave study do when nobody disturbs them: epochs, batch sizes, and how long each takes.

A job of the study (Zheng et al., NSDI 2023) has a number of epochs and a rule by which its batch size changes:
static, accordion (small in critical epochs, else the largest) or gns (doubles after a measured number of epochs).
Sources: the published code, uw-mad-dash/shockwave 8a44f4a, scheduler/utils.py (rules and thresholds) and
scheduler/scheduler.py (sizes of data sets), MIT. Run times come from one of three places, see `profiles`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foretrace import reading
from foretrace.errors import ForetraceError
from foretrace.fleet.workload import SECOND, Float64, Int64, Workload

RECORDED = "tacc_32gpus_results.json"
STUDY_GPUS = 32  # of the cluster that the results were recorded on
PARTS = 100  # epochs of a job that is not of the study: its policy plans by epochs
KINDS = ("recorded", "steps", "duration")
_TYPE = re.compile(r"\s*(\S+) \(batch size (\d+)\)\s*")
#: Samples of a data set as the study counts them.
SAMPLES = {"ResNet-18": 50_000, "ResNet-50": 100_000, "Transformer": 10_000, "LM": 59_675, "Recommendation": 117_907}
LARGEST = {"ResNet-18": 256, "ResNet-50": 128, "LM": 80, "Recommendation": 8192}  # batch accordion switches to
#: gns: (model, first batch, GPUs) -> epochs from which on the batch is twice what it was.
DOUBLES: Mapping[tuple[str, int, int], tuple[int, ...]] = {
    ("ResNet-18", 16, 1): (31, 41, 51, 71), ("ResNet-18", 16, 2): (21, 31, 91, 111),
    ("ResNet-18", 16, 4): (11, 21, 81, 91), ("ResNet-18", 32, 1): (21, 31, 51),
    ("ResNet-18", 32, 2): (11, 21, 41), ("ResNet-18", 32, 4): (21, 31, 61),
    ("ResNet-18", 64, 1): (11, 31), ("ResNet-18", 64, 2): (21, 41), ("ResNet-18", 64, 4): (11, 61),
    ("ResNet-18", 128, 1): (11,), ("ResNet-18", 128, 2): (41,), ("ResNet-18", 128, 4): (11,),
    ("ResNet-50", 32, 2): (101, 111), ("ResNet-50", 32, 4): (131, 221), ("ResNet-50", 64, 1): (101,),
    ("ResNet-50", 64, 2): (81,), ("ResNet-50", 64, 4): (191,),
    ("LM", 5, 1): (31, 41, 61, 71), ("LM", 5, 2): (31, 51, 61, 71), ("LM", 5, 4): (11, 31, 71, 91),
    ("LM", 10, 1): (11, 21, 41), ("LM", 10, 2): (11, 31, 41), ("LM", 10, 4): (11, 31, 61),
    ("LM", 20, 1): (11, 41), ("LM", 20, 2): (31, 41), ("LM", 20, 4): (11, 61),
    ("LM", 40, 1): (11,), ("LM", 40, 2): (11,), ("LM", 40, 4): (61,),
    ("Recommendation", 512, 1): (21, 41, 71, 91), ("Recommendation", 1024, 1): (21, 51, 91),
    ("Recommendation", 2048, 1): (21, 41), ("Recommendation", 4096, 1): (41,),
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One job alone on its GPUs, in p phases of one batch size each.

    ends: (p,) float64 epochs done at the end of each phase, the last being all that is run; batch: (p,) int64;
    steps: (p,) float64 training steps per epoch; epoch_s: (p,) float64 seconds per epoch.
    """

    ends: Float64
    batch: Any
    steps: Float64
    epoch_s: Float64

    @property
    def starts(self) -> Float64:
        """(p,) epochs done at the start of each phase."""
        return np.concatenate([[0.0], self.ends[:-1]])

    @property
    def work_s(self) -> float:
        """Seconds from first to last epoch, undisturbed."""
        return float(((self.ends - self.starts) * self.epoch_s).sum())

    def taking(self, seconds: float) -> Job:
        """The same at another speed, so that all of it takes so long."""
        return Job(self.ends, self.batch, self.steps, self.epoch_s * (seconds / self.work_s))

    def stopping(self, epochs: float) -> Job:
        """The same, but its last phase ends after so many epochs (not before it began)."""
        last = max(epochs, float(self.starts[-1]) + 1e-6)
        return Job(np.append(self.ends[:-1], last), self.batch, self.steps, self.epoch_s)


def accordion(model: str, batch: int, epochs: int) -> list[int]:
    """Batch size per epoch under accordion: critical epochs and the first 30 % keep the small one."""
    if model not in LARGEST:
        return [batch] * epochs
    critical: set[int] = set()
    if model == "ResNet-18":
        critical |= {*range(20 if batch == 256 else 10), *range(150, 160), *range(250, 260)}
    elif model == "ResNet-50":
        critical |= {epoch for epoch in range(epochs) if epoch % 30 < 10}
    elif model == "LM":
        critical |= set(range(10))
    else:
        head = {512: 30, 1024: 30, 2048: 40}.get(batch, 10)
        critical |= {*range(head), *range(60, 70), *range(80, 90)}
    return [batch if e in critical or e <= epochs * 0.3 else LARGEST[model] for e in range(epochs)]


def gns(model: str, batch: int, gpus: int, epochs: int) -> list[int]:
    """Batch size per epoch under gns: doubles at the epochs of DOUBLES, where the job is known there."""
    at = DOUBLES.get((model, batch, gpus), ())
    return [batch << sum(epoch >= each for each in at) for epoch in range(epochs)]


def plan(model: str, gpus: int, mode: str, steps: float) -> tuple[str, list[int]] | None:
    """Name of the model and batch size per whole epoch; None where the job type is not one of the study."""
    found = _TYPE.fullmatch(model)
    if found is None or found[1] not in SAMPLES or not steps > 0:
        return None
    name, batch = found[1], int(found[2])
    epochs = math.ceil(steps / math.ceil(SAMPLES[name] / batch))
    if mode == "accordion":
        return name, accordion(name, batch, epochs)
    return name, gns(name, batch, gpus, epochs) if mode == "gns" else [batch] * epochs


class Speeds:
    """Steps per second by (model, batch, GPUs), from what the log says of jobs at their first batch size.

    In the logs of the study duration = steps / speed, so each type's speed stands in its jobs. A batch size that no
    job of the log begins with is taken from the nearest one on as many GPUs, by the ratio that samples per second
    have on another number of GPUs; where that is not known either, samples per second stay the same.
    """

    def __init__(self, workload: Workload) -> None:
        seen: dict[tuple[str, int, int], list[float]] = {}
        for at in range(len(workload)):
            found = _TYPE.fullmatch(str(workload.model[at]))
            if found and workload.iterations[at] > 0 and workload.work_s[at] > 0:
                key = (found[1], int(found[2]), int(workload.gpus[at]))
                seen.setdefault(key, []).append(float(workload.iterations[at] / workload.work_s[at]))
        self.known = {key: float(np.median(each)) for key, each in seen.items()}
        self.guessed: set[tuple[str, int, int]] = set()

    def of(self, model: str, batch: int, gpus: int) -> float:
        """Steps per second; the model must be one of the log on that many GPUs."""
        key = (model, batch, gpus)
        if key in self.known:
            return self.known[key]
        self.guessed.add(key)
        near = min((b for m, b, g in self.known if m == model and g == gpus), key=lambda b: abs(math.log(b / batch)))
        rate = self.known[model, near, gpus] * near
        others = sorted({g for m, _, g in self.known if m == model} - {gpus})
        for other in others:
            here, there = self.known.get((model, near, other)), self.known.get((model, batch, other))
            if here and there:
                rate *= (there * batch) / (here * near)
                break
        return rate / batch


def _phases(workload: Workload, at: int, speeds: Speeds) -> tuple[Job, float]:
    """The job in whole epochs as the log and the rules have it, and the epochs after which its steps are done."""
    modes = workload.details.get("mode")
    mode = "static" if modes is None else str(modes[at])
    gpus, steps = int(workload.gpus[at]), float(workload.iterations[at])
    found = plan(str(workload.model[at]), gpus, mode, steps)
    if found is None:
        work = float(workload.work_s[at])
        if not work > 0:
            raise ForetraceError(
                f"job {workload.job[at]!r} has no run time; give it a duration or a model of the study."
            )
        count = steps if steps > 0 else work
        parts = float(PARTS)
        return Job(np.array([parts]), np.ones(1, np.int64), np.array([count / parts]), np.array([work / parts])), parts
    name, batches = found
    change = [0, *(e for e in range(1, len(batches)) if batches[e] != batches[e - 1])]
    batch = np.array([batches[e] for e in change], np.int64)
    ends = np.array([*change[1:], len(batches)], np.float64)
    epoch_s = np.array([SAMPLES[name] / b / speeds.of(name, int(b), gpus) for b in batch])
    return Job(ends, batch, np.ceil(SAMPLES[name] / batch), epoch_s), steps / math.ceil(SAMPLES[name] / batches[0])


def profiles(workload: Workload, *, kind: str, path: str, without: str) -> tuple[list[Job], dict[str, Any]]:
    """Every job alone, and where its run time comes from (facts by name).

    kind `recorded`: from the fairness field of recorded results (`exclusive`), leaving out those of policy `without`;
    `steps`: from the log alone, its steps at its speeds under the rules of batch sizes; `duration`: as the log states;
    "": recorded where results for this log are there, else duration. Recorded times are of whole epochs; a job stops
    at its number of steps, inside its last epoch. path: the results, "" for those beside the log.
    Raises ForetraceError for an unknown kind, or results that are named but cannot be used.
    """
    if kind and kind not in KINDS:
        raise ForetraceError(f"option profile={kind} is unknown; write one of {', '.join(KINDS)}.")
    speeds = Speeds(workload)
    found = [_phases(workload, at, speeds) for at in range(len(workload))]
    facts: dict[str, Any] = {"speeds guessed": sorted(f"{m} {b} x{g}" for m, b, g in speeds.guessed)}
    if kind == "steps":
        facts["profile"] = "steps of the log at the speeds of the log, batch sizes by the published rules"
        return [job.stopping(epochs) for job, epochs in found], facts
    seconds, why = (None, "as asked") if kind == "duration" else _recorded(workload, path, without, bool(path or kind))
    if seconds is None:
        known = workload.work_s > 0
        facts["profile"] = f"duration column of the log ({why})"
        cut = [job.stopping(epochs) for job, epochs in found]
        return [job.taking(float(workload.work_s[i])) if known[i] else job for i, job in enumerate(cut)], facts
    facts["profile"] = why
    return [job.taking(float(seconds[i])).stopping(epochs) for i, (job, epochs) in enumerate(found)], facts


def _recorded(workload: Workload, path: str, without: str, must: bool) -> tuple[Float64 | None, str]:
    """Exclusive seconds (n,) and a sentence; None and the reason where there are no results and none were demanded."""
    log = Path(workload.origin.path)
    file = Path(path) if path else log.parent / RECORDED
    if not path and not workload.origin.path:
        found: str | dict[str, Any] = "the log has no file beside which results could lie"
    else:
        found = read_results(file)
    if isinstance(found, dict):
        usable = {
            key: entry for key, entry in found.items()
            if key.split("|")[1] != without and len(entry["jct_list"]) == len(workload)
            and (not workload.origin.path or entry.get("trace") == log.name.removesuffix(".gz"))
        }  # fmt: skip
        if usable:
            seconds = exclusive(workload, usable.values())
            others = ", ".join(sorted({key.split("|")[1] for key in usable}))
            return seconds, f"fairness field of {len(usable)} recorded results of {others} in {file.name}"
        found = f"{file.name} has no results of other policies for this log"
    if must:
        raise ForetraceError(f"{found}; name the recorded results by the option profiles.")
    return None, found


def read_results(file: Path) -> dict[str, Any] | str:
    """Recorded results by `run|policy|kind`; a sentence where there is no file. Raises ForetraceError if damaged."""
    if not file.is_file():
        return f"there is no file {file}"
    try:
        said = reading.parse_json(reading.read_text(file), str(file))
        wrong = [k for k, v in said.items() if k.count("|") != 2 or len(v["jct_list"]) != len(v["ftf_themis"])]
    except (AttributeError, KeyError, TypeError):
        wrong, said = ["its contents"], {}
    if wrong:
        raise ForetraceError(
            f"{file}: {wrong[0]} cannot be read as results; it should map run|policy|kind to jct_list and ftf_themis."
        )
    return dict(said)


def rows_of(workload: Workload) -> Int64:
    """(n,) rows of the log that the jobs stand in, where they are called by it; else their own order."""
    n = len(workload)
    if sorted(workload.job.tolist()) == sorted(map(str, range(n))):
        return workload.job.astype(np.int64)
    return np.arange(n, dtype=np.int64)


def exclusive(workload: Workload, entries: Any) -> Float64:
    """(n,) seconds each job takes alone: fairness = JCT / (alone x max(1, mean active jobs / 32)), median of entries.

    Active jobs are counted at the starts of rounds of 120 s while the job is there (fleet-lessons.md 5.1).
    """
    submit, rows = workload.submit_ns / SECOND, rows_of(workload)
    found = []
    for entry in entries:
        took, fairness = (np.asarray(entry[key], float)[rows] for key in ("jct_list", "ftf_themis"))
        end = submit + took
        ticks = np.arange(0.0, end.max() + 120.0, 120.0)
        active = np.searchsorted(np.sort(submit), ticks, side="right") - np.searchsorted(
            np.sort(end), ticks, side="right"
        )
        total = np.concatenate([[0], np.cumsum(active)])
        low, high = np.searchsorted(ticks, submit), np.searchsorted(ticks, end)
        mean = (total[high] - total[low]) / np.maximum(high - low, 1)
        found.append(took / fairness / np.maximum(1.0, mean / STUDY_GPUS))
    return np.asarray(np.median(np.array(found), axis=0))
