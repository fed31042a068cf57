"""The recording of tensor programs: which tasks, how they are measured, and how the file is read."""

from __future__ import annotations

import gc
import gzip
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrace.errors import ForetraceError
from foretrace.files import write_bytes
from reproductions.cdmpp.compile import Bound, Compiled
from reproductions.cdmpp.drawing import draw
from reproductions.cdmpp.emit import module_text
from reproductions.cdmpp.program import TensorProgram
from reproductions.cdmpp.schedules import Schedule, apply, schedule_from_data
from reproductions.cdmpp.tasks import Task, task
from tables import load, machine, today

RECORDING = Path(__file__).parent / "programs.json.gz"
DOMAINS = (("float32", "native"), ("float32", "baseline"), ("float64", "native"))
"""Number type and instruction set; the first is the source of every transfer."""
DOMAIN_NAMES = ("float32, native", "float32, baseline", "float64, native")

_MOST_LINES = 1200  # of LLVM IR; longer programs take seconds to compile
_CHUNK = 48  # programs that are timed in turns
_ROUNDS = 8
_SAMPLE_S = 1.5e-3  # processor time of one sample
_TOLERANCE = {"float32": 3e-4, "float64": 1e-9}

_SIZES: dict[str, tuple[str, tuple[tuple[int, ...], ...]]] = {
    "matmul": (
        "mnkt",
        ((64, 64, 64, 0), (128, 128, 64, 1), (96, 256, 128, 0), (32, 512, 256, 2), (256, 192, 32, 0),
         (16, 1024, 128, 1)),
    ),
    "dense-relu": ("mnk", ((64, 128, 96), (32, 256, 256), (128, 64, 192), (8, 768, 384))),
    "dense-gelu": ("mnk", ((96, 96, 64), (16, 512, 128), (48, 384, 192), (256, 32, 64))),
    "batched-matmul": (
        "bmnk", ((4, 64, 64, 32), (8, 32, 32, 64), (12, 64, 48, 16), (2, 128, 96, 64), (16, 16, 64, 48))
    ),
    "gemv": ("mk", ((512, 512), (256, 2048), (2048, 128), (1024, 1024), (192, 384))),
    "conv2d": (
        "cfhrs", ((16, 32, 14, 3, 1), (32, 16, 28, 1, 1), (3, 32, 32, 3, 2), (8, 24, 24, 5, 1), (64, 64, 8, 3, 1))
    ),
    "conv2d-last": (
        "cfhrs", ((16, 32, 16, 3, 1), (32, 64, 8, 3, 1), (64, 32, 14, 1, 1), (4, 32, 32, 3, 2), (24, 16, 12, 5, 1))
    ),
    "depthwise": ("chrs", ((32, 28, 3, 1), (64, 16, 3, 2), (16, 56, 5, 1), (96, 14, 3, 1), (48, 32, 3, 1))),
    "max-pool": ("chrs", ((32, 32, 2, 2), (64, 16, 3, 1), (24, 56, 3, 2), (128, 16, 2, 2), (48, 24, 3, 2))),
    "row-sum": ("mn", ((64, 1024), (512, 256), (32, 4096), (1024, 64), (128, 768))),
    "column-sum": ("mn", ((256, 512), (1024, 128), (64, 2048), (512, 768), (96, 384))),
    "softmax": ("mn", ((64, 256), (256, 64), (32, 1024), (128, 384), (16, 2048))),
    "layer-norm": ("mn", ((64, 512), (256, 128), (32, 1024), (128, 256), (16, 768))),
    "rms-norm": ("mn", ((96, 512), (512, 64), (24, 2048), (128, 384), (48, 1024))),
    "pointwise-relu": ("mn", ((128, 512), (512, 96), (64, 2048), (256, 256), (32, 1536))),
    "pointwise-silu": ("mn", ((64, 512), (256, 128), (32, 2048), (128, 384), (512, 64))),
    "transpose": ("bmn", ((1, 256, 256), (4, 128, 64), (8, 96, 64), (2, 512, 128), (16, 32, 128))),
}  # fmt: skip
TASKS: tuple[Task, ...] = tuple(
    task(kind, **{name: size for name, size in zip(names, sizes, strict=True) if size})
    for kind, (names, each) in _SIZES.items()
    for sizes in each
)


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Programs and what they took: `seconds` [programs x domains], the less of both times.

    `again` are the programs that were timed twice, `first` and `second` what was found then.
    """

    about: dict[str, Any]
    tasks: tuple[Task, ...]
    task_of: NDArray[np.int64]
    schedules: tuple[Schedule, ...]
    once: NDArray[np.float64]
    seconds: NDArray[np.float64]
    again: NDArray[np.int64]
    first: NDArray[np.float64]
    second: NDArray[np.float64]

    def programs(self, domain: int) -> list[TensorProgram]:
        dtype = DOMAINS[domain][0]
        return self._made if dtype == "float32" else [each.with_dtype(dtype) for each in self._made]

    @cached_property
    def _made(self) -> list[TensorProgram]:
        return [apply(self.tasks[t], s) for t, s in zip(self.task_of, self.schedules, strict=True)]


def read(path: Path = RECORDING) -> Recording:
    try:
        data = json.loads(gzip.decompress(path.read_bytes()))
    except FileNotFoundError:
        raise ForetraceError(f"{path} is not there; make it with make reproduce NAME=cdmpp ARGS=measure.") from None
    once = np.array([each[2] for each in data["programs"]]) * 1e-9
    again = np.array([each[0] for each in data["again"]], int)
    second = np.array([each[1] for each in data["again"]]).reshape(-1, len(DOMAINS)) * 1e-9
    seconds = once.copy()
    seconds[again] = np.minimum(once[again], second)
    return Recording(
        about=data["about"],
        tasks=tuple(Task(kind=kind, sizes=tuple(sizes.items())) for kind, sizes in data["tasks"]),
        task_of=np.array([each[0] for each in data["programs"]]),
        schedules=tuple(schedule_from_data(each[1]) for each in data["programs"]),
        once=once,
        seconds=seconds,
        again=again,
        first=once[again],
        second=second,
    )


def measure(minutes: float, per_task: int, say: Callable[[str], None], path: Path = RECORDING) -> None:
    """Draw, compile, check and time programs, round by round over all tasks, until there are `per_task` of each or the
    time is up.
    """
    begin = time.monotonic()
    rng = np.random.default_rng(20_261_122)
    truth = {(t, dtype): _truth(each, dtype) for t, each in enumerate(TASKS) for dtype in ("float32", "float64")}
    found: list[tuple[int, Schedule, NDArray[np.float64]]] = []
    repeated: list[tuple[int, NDArray[np.float64]]] = []
    spent = 0.0
    if path.exists() and (before := read(path)).about["machine"] == machine() and before.tasks == TASKS:
        found = list(zip(before.task_of.tolist(), before.schedules, before.once, strict=True))
        repeated = list(zip(before.again.tolist(), before.second, strict=True))
        spent = before.about["minutes"]
    jobs = _missing(_draw(per_task, rng), [each[:2] for each in found], per_task)

    def save() -> None:
        minutes_taken = round(spent + (time.monotonic() - begin) / 60, 1)
        write_bytes(path, _file(found, repeated, minutes_taken), compress=True)

    while jobs and time.monotonic() - begin < 60 * minutes * 0.9:
        chunk, jobs = jobs[:_CHUNK], jobs[_CHUNK:]
        found += [(*job, seconds) for job, seconds in zip(chunk, _timed(chunk, truth), strict=True)]
        save()
        say(f"{len(found)} programs, {len(jobs)} left, {time.monotonic() - begin:.0f} s")
    waiting = np.setdiff1d(np.arange(len(found)), [i for i, _ in repeated])
    while len(waiting) and time.monotonic() - begin < 60 * minutes * 0.95:
        part = np.sort(rng.choice(waiting, min(_CHUNK, len(waiting)), replace=False))
        waiting = np.setdiff1d(waiting, part)
        timed = _timed([found[i][:2] for i in part], truth)
        repeated += list(zip(part.tolist(), timed, strict=True))
        save()
        say(f"{len(repeated)} programs a second time, {len(waiting)} left, {time.monotonic() - begin:.0f} s")
    save()


def _missing(
    drawn: list[tuple[int, Schedule]], known: list[tuple[int, Schedule]], per_task: int
) -> list[tuple[int, Schedule]]:
    """What is still to be measured, so that no task has more than `per_task`."""
    have, left = set(known), {t: per_task - sum(each[0] == t for each in known) for t in range(len(TASKS))}
    found = []
    for job in drawn:
        if job not in have and left[job[0]] > 0:
            left[job[0]] -= 1
            found.append(job)
    return found


def _file(
    found: list[tuple[int, Schedule, NDArray[np.float64]]],
    repeated: list[tuple[int, NDArray[np.float64]]],
    minutes: float,
) -> bytes:
    data = {
        "about": {
            "date": today(), "machine": machine(), "load": load(), "minutes": minutes,
            "protocol": f"one thread, processor time, least of {_ROUNDS} rounds in turns over {_CHUNK} programs, "
            f"samples of {1e3 * _SAMPLE_S:g} ms, data left where the run before left it, every result checked "
            "against numpy",
            "domains": list(DOMAIN_NAMES), "unit": "ns",
        },
        "tasks": [[each.kind, dict(each.sizes)] for each in TASKS],
        "programs": [[t, s.as_data(), np.rint(1e9 * ns).astype(int).tolist()] for t, s, ns in found],
        "again": [[i, np.rint(1e9 * ns).astype(int).tolist()] for i, ns in repeated],
    }  # fmt: skip
    return json.dumps(data, separators=(",", ":")).encode()


def _draw(per_task: int, rng: np.random.Generator) -> list[tuple[int, Schedule]]:
    """Different schedules of every task, the first of all tasks before the second of any."""
    found: list[tuple[int, Schedule]] = []
    seen: set[tuple[int, Schedule]] = set()
    for _ in range(per_task):
        for t, each in enumerate(TASKS):
            for _ in range(40):
                schedule = draw(each, rng)
                if (t, schedule) not in seen and module_text(apply(each, schedule)).count("\n") <= _MOST_LINES:
                    seen.add((t, schedule))
                    found.append((t, schedule))
                    break
    return found


def _truth(each: Task, dtype: str) -> tuple[dict[str, NDArray[Any]], NDArray[Any]]:
    inputs = each.inputs(dtype)
    return inputs, each.reference({name: array.astype("float64") for name, array in inputs.items()})


def _timed(chunk: list[tuple[int, Schedule]], truth: dict[Any, Any]) -> NDArray[np.float64]:
    """Seconds [programs x domains]."""
    bound: list[tuple[int, int, Bound, int]] = []
    for i, (t, schedule) in enumerate(chunk):
        for d, (dtype, setting) in enumerate(DOMAINS):
            program = apply(TASKS[t], schedule, dtype)
            inputs, right = truth[t, dtype]
            ready = Compiled(program, setting).bind(inputs)
            ready.run()
            error = float(np.abs(ready.output - right).max() / np.abs(right).max())
            if not error < _TOLERANCE[dtype]:
                raise AssertionError(f"{program.task} computes something else ({error:.2g}): {schedule.as_data()}")
            bound.append((i, d, ready, max(1, round(_SAMPLE_S / max(ready.seconds(1), 1e-7)))))
    best = np.full((len(chunk), len(DOMAINS)), np.inf)
    gc.disable()
    try:
        for _ in range(_ROUNDS):
            for i, d, ready, repetitions in bound:
                best[i, d] = min(best[i, d], ready.seconds(repetitions))
    finally:
        gc.enable()
    return best
