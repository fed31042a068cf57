"""A few 16-bit products timed on a GPU that the shipped predictors have not seen: which ones, their times, where kept.

    rows = products(device, 50)              # [50, 3]: m, n, k, in the order in which they are worth it
    keep(device, rows, seconds(rows))       # timed here, or read from a table that was filled in elsewhere
    calibrated()                            # the predictor that knows everything kept

Kept times are tables that `Measured.from_table` reads, one per GPU, beside the calibrations of processors.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from functools import lru_cache, partial
from math import inf
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from foretrace.cost.calls import Family, Precision
from foretrace.cost.devices.learned.gemm16 import Gemm16
from foretrace.cost.devices.measured import Measured
from foretrace.cost.operators import store
from foretrace.deadline import Deadline
from foretrace.errors import ForetraceError, needing
from foretrace.executor import Progress
from foretrace.files import write_bytes
from foretrace.hardware.devices import Device, named

if TYPE_CHECKING:
    import torch

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
COUNT = 50
_HEADER = ("device", "us", "family", "precision", "m", "n", "k")
_PREFIX = "products-"
_TIMED_S = 0.02  # of repetitions per product, in so many parts
_PARTS = 5
_MOST = 200  # repetitions in one part


@dataclass(frozen=True, kw_only=True)
class GpuCalibration:
    """Products of a GPU (m, n, k), those worth most first, their times, and the file that has them."""

    device: Device
    rows: Ints
    seconds: Floats | None  # None where they are still to be filled in
    stored: Path


def calibrate(
    gpu: str,
    *,
    operators: int | None = None,
    plan: Path | None = None,
    times: Path | None = None,
    budget_s: float = inf,
    progress: Progress = None,
) -> GpuCalibration:
    """Return the products that say most of a GPU: named in the file `plan`, read from `times`, or timed here and kept.

    `gpu` is a name of the catalog, or "here". Raises ForetraceError.
    """
    if plan is not None and times is not None:
        raise ForetraceError("`plan=` writes what is to be timed, `times=` reads what was; give one of them.")
    if gpu == "here" or (plan is None and times is None):
        device = here()
        if gpu != "here" and named(gpu) is not device:
            raise ForetraceError(f"the GPU of this machine is {device.short}, not {named(gpu).short}; use `plan=`.")
    else:
        device = named(gpu)
    rows = products(device, operators or COUNT)
    if plan is not None:
        write_bytes(plan, _table(device, rows, None))
        return GpuCalibration(device=device, rows=rows, seconds=None, stored=plan)
    if times is not None:
        rows, found = read_times(times, device)
    else:
        found = seconds(rows, budget_s=budget_s, progress=progress)
        rows = rows[: len(found)]
    return GpuCalibration(device=device, rows=rows, seconds=found, stored=keep(device, rows, found))


def products(device: Device, count: int = COUNT) -> Ints:
    """Return the products to measure, [count, 3]. Raises ForetraceError where measuring a few would say nothing new."""
    model = Gemm16.load()
    if device.short in model.known:
        raise ForetraceError(f"{device.name} was measured in full already; a few products more would not help.")
    if not 2 <= count <= len(model.pool):
        raise ForetraceError(f"{count} products cannot be chosen; ask for 2 to {len(model.pool)}.")
    return model.choose(device, count)


def read_times(path: Path, device: Device) -> tuple[Ints, Floats]:
    """Return products and seconds of a table that was filled in.

    Raises ForetraceError where it is no such table, or has fewer than two 16-bit products of this device.
    """
    times = Measured.from_table(path).sizes.get(device.name, {})
    rows = [
        (key[3:], time.seconds)
        for key, time in times.items()
        if key[0] == Family.GEMM and key[1] in (Precision.BF16, Precision.FP16) and key[2] == 1
    ]
    if len(rows) < 2:
        raise ForetraceError(f"{path} has {len(rows)} 16-bit products of {device.name}; give at least two.")
    return np.array([sizes for sizes, _ in rows], np.int64), np.array([seconds for _, seconds in rows])


def seconds(rows: Ints, device: str = "cuda", budget_s: float = inf, progress: Progress = None) -> Floats:
    """Return seconds of bfloat16 products [m x k] by [k x n] on this machine, each the median of several parts.

    Those at the end that would not be done within `budget_s` are left out; two are always timed.

    On a GPU repetitions are one captured graph, so that launching them does not count; data stays where the last
    repetition left it, as in the table that the predictor was fitted to.
    """
    import torch

    found: list[float] = []
    until = Deadline(budget_s)
    with torch.no_grad():
        for m, n, k in rows.tolist():
            if len(found) >= 2 and not until.allows("product"):
                break
            with until.part("product"):
                left, right = (torch.randn(size, dtype=torch.bfloat16, device=device) for size in ((m, k), (k, n)))
                out = torch.empty((m, n), dtype=torch.bfloat16, device=device)
                found.append(_once(left, right, out, device))
                del left, right, out
            if progress is not None:
                progress(len(found) / len(rows))
    return np.array(found)


def _once(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, device: str) -> float:
    import time

    import torch

    on_gpu = device.startswith("cuda")

    def repeat(times: int) -> None:
        for _ in range(times):
            torch.mm(left, right, out=out)

    def clock() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    repeat(2)
    begin = clock()
    repeat(2)
    times = int(min(max(_TIMED_S / _PARTS / max((clock() - begin) / 2, 1e-7), 1), _MOST))
    run = partial(repeat, times)
    if on_gpu:
        graph: Any = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            repeat(times)
        run = graph.replay
        run()
    parts = []
    for _ in range(_PARTS):
        begin = clock()
        run()
        parts.append((clock() - begin) / times)
    return median(parts)


def here() -> Device:
    """Return the GPU of this machine. Raises ForetraceError where PyTorch sees none, or one that the catalog lacks."""
    from foretrace.hardware.devices import find

    with needing("calibrate"):
        import torch
    if not torch.cuda.is_available():
        raise ForetraceError(
            "PyTorch sees no GPU here; write the products with `plan=FILE`, time them where the GPU is, and give the "
            "file to `times=`."
        )
    name = torch.cuda.get_device_name()
    device = find(name)
    if device is None:
        raise ForetraceError(f"the catalog has no {name!r}; foretrace devices lists what it has.")
    return device


def keep(device: Device, rows: Ints, times: Floats) -> Path:
    """Keep times of products for all predictions on this GPU; what was kept of it before is replaced."""
    Gemm16.load().few_shot(
        device, rows[:, 0], rows[:, 1], rows[:, 2], times
    )  # raises where they cannot be learned from
    path = _path(device)
    store.make_folder()
    write_bytes(path, _table(device, rows, times))
    return path


def calibrated() -> Gemm16:
    """Return the shipped predictor, with what was kept of GPUs that it does not know."""
    found = kept()
    return _with(found) if found else Gemm16.load()


def kept() -> tuple[tuple[str, int], ...]:
    """Return the files of kept times, and when each was written: predictions made with other ones are out of date."""
    try:
        return tuple(sorted((str(path), path.stat().st_mtime_ns) for path in store.folder().glob(f"{_PREFIX}*.csv")))
    except OSError as error:
        raise ForetraceError(f"cannot read {store.folder()} ({error.strerror or error}).") from None


@lru_cache(maxsize=4)
def _with(files: tuple[tuple[str, int], ...]) -> Gemm16:
    model = Gemm16.load()
    for path, _ in files:
        device = named(Path(path).stem.removeprefix(_PREFIX))
        if device.short not in model.known:
            rows, times = read_times(Path(path), device)
            model = model.few_shot(device, rows[:, 0], rows[:, 1], rows[:, 2], times)
    return model


def _path(device: Device) -> Path:
    return store.folder() / f"{_PREFIX}{device.short}.csv"


def _table(device: Device, rows: Ints, times: Floats | None) -> bytes:
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(_HEADER)
    for i, (m, n, k) in enumerate(rows.tolist()):
        lines.writerow([device.short, "" if times is None else repr(1e6 * float(times[i])), "GEMM", "BF16", m, n, k])
    return text.getvalue().encode()
