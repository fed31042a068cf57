"""What a machine's CPU reaches in a short probe: the peak that a recording made on it is held against.

Two rates, each the best of many repeats: matrix products of three sizes (float32 and bfloat16), and a copy between
arrays that no cache holds, as in STREAM (McCalpin 1995; bytes read plus bytes written, without write-allocate traffic).
One thread is timed by its CPU time, so that waiting for a core does not lower its peak; a busy neighbour still does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from foretrace.hardware.processor import operator_threads

_SIDES = (256, 512, 1024)  # of the square matrices: in which caches they are fastest depends on the machine
_COPY_BYTES = 128 * 2**20  # per array
_SECONDS = 0.8  # per rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Peak rates of a device: FLOP/s by precision (0: unknown) and bytes/s of its memory."""

    name: str
    source: str  # "catalog", "measured", "given"
    fp32: float = 0.0
    tf32: float = 0.0
    fp16: float = 0.0
    bf16: float = 0.0
    bytes_per_s: float = 0.0
    threads: int = 0  # of a CPU probe

    @property
    def ridge(self) -> float:
        """FLOPs per byte above which float32 work is bound by arithmetic; 0 if unknown."""
        return self.fp32 / self.bytes_per_s if self.bytes_per_s else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, as a recording stores them."""
        return asdict(self)


def cpu_peaks(threads: int) -> Peaks:
    """Measure this machine with PyTorch and that many threads, in a few seconds."""
    import torch

    clock = time.thread_time if threads == 1 else time.perf_counter
    rates = {}
    with operator_threads(threads):
        for field, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            found = []
            for side in _SIDES:
                a, b = (torch.randn(side, side, dtype=dtype) for _ in range(2))
                out = torch.empty_like(a)
                product = partial(torch.mm, a, b, out=out)
                found.append(2.0 * side**3 / _best(product, clock, _SECONDS / len(_SIDES)))
            rates[field] = max(found)
        source, target = (torch.ones(_COPY_BYTES // 4) for _ in range(2))
        rates["bytes_per_s"] = 2.0 * _COPY_BYTES / _best(partial(target.copy_, source), clock, _SECONDS)
    return Peaks(name=f"{threads} of {os.cpu_count()} CPU cores", source="measured", threads=threads, **rates)


def _best(call: Callable[[], object], clock: Callable[[], float], seconds: float) -> float:
    """Return the shortest duration of a call on `clock`, repeated for so many seconds."""
    call()
    best, begin = float("inf"), time.perf_counter()
    while time.perf_counter() - begin < seconds:
        start = clock()
        call()
        best = min(best, clock() - start)
    return best
