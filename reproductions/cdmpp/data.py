"""The recording of tensor programs: which tasks, how they are measured, and how the file is read."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from foretrace.cost.programs.compile import SETTINGS, CompiledProgram
from foretrace.cost.programs.predictor import row
from foretrace.cost.programs.program import TensorProgram
from foretrace.cost.programs.rank import ROUNDS, SAMPLE_S, times
from foretrace.cost.programs.schedules import LoopSchedule, apply
from foretrace.cost.programs.tasks import Task, task
from foretrace.errors import ForetraceError
from foretrace.files import write_bytes
from foretrace.hardware.processor import caches_here
from foretrace.reading import parse_json, read_bytes
from reproductions.cdmpp.truth import reference
from tables import load, machine, today

RECORDING = Path(__file__).parent / "programs.json.gz"
QUIET = Path(__file__).parent / "quiet.json.gz"
DOMAINS = (("float32", "native"), ("float32", "baseline"), ("float64", "native"))
"""Number type and instruction set; the first is the source of every transfer."""
DOMAIN_NAMES = ("float32, native", "float32, baseline", "float64, native")

_CHUNK = 48  # programs that are timed in turns
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


Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Programs and what they took: `seconds` [programs x domains], the less of both times.

    `again` are the programs that were timed twice, `first` and `second` what was found then.
    """

    about: dict[str, Any]
    tasks: tuple[Task, ...]
    task_of: NDArray[np.int64]
    schedules: tuple[LoopSchedule, ...]
    once: Floats
    seconds: Floats
    again: NDArray[np.int64]
    first: Floats
    second: Floats

    def programs(self, domain: int) -> list[TensorProgram]:
        dtype = DOMAINS[domain][0]
        return self._made if dtype == "float32" else [replace(each, dtype=dtype) for each in self._made]

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
        schedules=tuple(msgspec.convert(each[1], LoopSchedule) for each in data["programs"]),
        once=once,
        seconds=seconds,
        again=again,
        first=once[again],
        second=second,
    )


# --- measured again, quietly ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Quiet:
    """The recorded programs on another machine: `seconds` [programs x settings], and by how much the two least passes
    of each differ.
    """

    about: dict[str, Any]
    seconds: Floats
    gap: Floats
    rows: Floats  # [settings x programs x what is known without running them]


def quiet(path: Path = QUIET) -> Quiet:
    """What `measure` wrote. Raises ForetraceError."""
    data = parse_json(read_bytes(path), str(path))
    return Quiet(
        about=data["about"], seconds=np.array(data["ns"]) * 1e-9, gap=np.array(data["gap"]), rows=np.array(data["rows"])
    )


def measure(passes: int, slices_s: float, say: Callable[[str], None], path: Path = QUIET) -> None:
    """Time all recorded programs: twice, then those again whose two least passes differ by more than 2 %."""
    recording = read()
    begin = time.monotonic()
    truth = {t: _truth(each, "float32") for t, each in enumerate(recording.tasks)}
    compiled: dict[tuple[int, int], CompiledProgram] = {}
    for i, program in enumerate(recording.programs(0)):
        inputs, right = truth[int(recording.task_of[i])]
        for d, setting in enumerate(SETTINGS):
            one = compiled[i, d] = CompiledProgram(program, setting)
            error = float(np.abs(one.run(inputs) - right).max() / np.abs(right).max())
            if not error < _TOLERANCE["float32"]:
                raise AssertionError(f"{program.task} computes something else ({error:.2g}).")
    found: dict[tuple[int, int], list[float]] = {key: [] for key in compiled}
    rng = np.random.default_rng(0)
    for number in range(passes):
        waiting = [key for key, seconds in found.items() if number < 2 or _gap(seconds) > 0.02]
        rng.shuffle(waiting)
        for first in range(0, len(waiting), _CHUNK):
            part = [(i, d) for i, d in waiting[first : first + _CHUNK]]
            bound = [compiled[key].bind(truth[int(recording.task_of[key[0]])][0]) for key in part]
            for key, seconds in zip(part, times(bound), strict=True):
                found[key].append(float(seconds))
        say(f"pass {number + 1}: {len(waiting)} programs, {time.monotonic() - begin:.0f} s")
        if number + 1 < passes:
            time.sleep(slices_s)
    shape = (len(recording.task_of), len(SETTINGS))
    gaps = np.array([_gap(each) for each in found.values()]).reshape(shape)
    about = {
        "date": today(), "machine": machine(), "load": load(), "passes": passes,
        "protocol": f"one thread, wall clock, least of {ROUNDS} samples of {1e3 * SAMPLE_S:g} ms in turns over "
        f"{_CHUNK} programs, minutes apart again where the two least passes differ by more than 2 %",
    }  # fmt: skip
    say("what is known of programs without running them ...")
    caches = caches_here()
    rows = [[row(compiled[i, d], caches) for i in range(shape[0])] for d in range(shape[1])]
    write_quiet(path, about, np.array([min(each) for each in found.values()]).reshape(shape), gaps, np.array(rows))


def write_quiet(
    path: Path,
    about: dict[str, Any],
    seconds: Floats,
    gaps: Floats,
    rows: Floats,
) -> None:
    """Keep labels."""
    data = {
        "about": about,
        "ns": np.round(1e9 * seconds, 1).tolist(),
        "gap": np.round(gaps, 5).tolist(),
        "rows": np.round(rows, 1).tolist(),
    }
    write_bytes(path, json.dumps(data, separators=(",", ":")).encode(), compress=True)


def _gap(seconds: list[float]) -> float:
    least = sorted(seconds)[:2]
    return least[1] / least[0] - 1


def _truth(each: Task, dtype: str) -> tuple[dict[str, NDArray[Any]], NDArray[Any]]:
    inputs = each.inputs(dtype)
    return inputs, reference(each, {name: array.astype("float64") for name, array in inputs.items()})
