"""Emulated compute: a training whose layers sleep for a stated time, with real gradients of a stated size.

Communication is then real and computation exactly as long as stated, whatever else runs on the machine: with as many
workers as cores real computation varies by a factor, and nothing could be learnt about the network from it.
"""

from __future__ import annotations

import ctypes
import math
import re
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foretrace.errors import ForetraceError
from foretrace.experiment.links.netns import MOST_WORKERS
from foretrace.training.batches import Resident
from foretrace.training.training import Training

MOST_LAYERS, MOST_BYTES, MOST_SECONDS = 1_000, 2**32, 10.0
_TEXT = re.compile(
    r"(?P<layers>\d+)x(?P<size>\d+(\.\d+)?)(?P<unit>kb|mb)/(?P<backward>\d+(\.\d+)?)ms"
    r"(/(?P<forward>\d+(\.\d+)?)ms(/(?P<computed>\d+(\.\d+)?)ms)?)?",
    re.IGNORECASE,
)
_UNITS = {"kb": 2**10, "mb": 2**20}
_PR_SET_TIMERSLACK = 29
_FACTOR = torch.ones(192, 192) / 192  # a product takes a fraction of a millisecond


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """`layers` layers; each has `nbytes` of float32 gradients and takes so long in the backward and forward pass."""

    layers: int
    nbytes: int
    backward_s: float
    forward_s: float = 0.0
    computed_s: float = 0.0  # of each pass on a core, by real products; the rest of it is slept

    def __str__(self) -> str:
        """Return it as it is written on the command line."""
        size = f"{self.nbytes / 2**20:.12g}mb" if self.nbytes >= 2**20 else f"{self.nbytes / 2**10:.12g}kb"
        forward = f"/{1e3 * self.forward_s:.9g}ms" if self.forward_s or self.computed_s else ""
        computed = f"/{1e3 * self.computed_s:.9g}ms" if self.computed_s else ""
        return f"{self.layers}x{size}/{1e3 * self.backward_s:.9g}ms{forward}{computed}"


def parse(text: str) -> Emulation:
    """Return an emulation from "12x1mb/20ms" (layers, gradient, backward), "12x1mb/20ms/5ms" (with a forward pass), or
    "12x1mb/20ms/5ms/2ms" (whose passes compute for 2 ms each and sleep for the rest).

    kb and mb are 2^10 and 2^20 bytes, as DDP counts its buckets. Raises ForetraceError.
    """
    found = _TEXT.fullmatch(text.strip())
    if not found:
        raise ForetraceError(
            f"{text!r} is no emulated training; write LAYERSxGRADIENT/BACKWARD, as in 12x1mb/20ms, or with a forward "
            "pass 12x1mb/20ms/5ms, of whose passes 2 ms are computed 12x1mb/20ms/5ms/2ms."
        )
    layers = int(found["layers"])
    nbytes = 4 * round(float(found["size"]) * _UNITS[found["unit"].lower()] / 4)
    backward_s, forward_s, computed_s = (float(found[key] or 0) / 1e3 for key in ("backward", "forward", "computed"))
    if not 1 <= layers <= MOST_LAYERS or not 4 <= nbytes <= MOST_BYTES or layers * nbytes > MOST_BYTES:
        raise ForetraceError(f"{text!r}: give 1 to {MOST_LAYERS} layers with gradients of up to 4096mb together.")
    if max(backward_s, forward_s) > MOST_SECONDS:
        raise ForetraceError(f"{text!r}: a layer may take up to {1e3 * MOST_SECONDS:g}ms.")
    if computed_s > min(backward_s, forward_s or computed_s):
        raise ForetraceError(f"{text!r}: {1e3 * computed_s:g}ms are more than a pass has; compute at most all of it.")
    return Emulation(layers=layers, nbytes=nbytes, backward_s=backward_s, forward_s=forward_s, computed_s=computed_s)


def training(emulation: Emulation, *, seed: int = 0) -> Training:
    """Return the emulated training: plain SGD, one batch that lies ready. Asks the kernel for exact sleeps."""
    _exact_sleeps()
    torch.manual_seed(seed)
    model = nn.Sequential(*(EmulatedLayer(emulation) for _ in range(emulation.layers)))
    return Training(
        name=f"emulated {emulation}",
        model=model,
        optimizers=(torch.optim.SGD(model.parameters(), lr=1e-3),),
        loader=Resident.taken_from([torch.ones(1)] * MOST_WORKERS, 1),  # techniques deal batches out to workers
        loss=_loss,
    )


class EmulatedLayer(nn.Module):
    """Passes its input on, takes its time, and has a weight with gradients."""

    def __init__(self, emulation: Emulation) -> None:
        super().__init__()
        rows, columns = _matrix(emulation.nbytes // 4)
        self.weight = nn.Parameter(torch.randn(rows, columns))
        self.times = emulation.forward_s, emulation.backward_s, emulation.computed_s

    def forward(self, x: Tensor) -> Tensor:
        passed: Tensor = _Emulated.apply(x, self.weight, self.times)  # type: ignore[no-untyped-call]
        return passed


class _Emulated(torch.autograd.Function):
    """Identity whose passes take a stated time, making the gradient included."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, times: tuple[float, float, float]) -> Tensor:
        forward_s, *ctx.times = times
        end = time.monotonic() + forward_s
        ctx.save_for_backward(weight)
        passed = x.clone()
        _compute(min(times[2], forward_s))
        _sleep_until(end)
        return passed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        backward_s, computed_s = ctx.times
        end = time.monotonic() + backward_s
        (weight,) = ctx.saved_tensors
        gradient = weight * 1e-3
        _compute(computed_s)
        _sleep_until(end)
        return gradients[0].clone(), gradient, None


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    out: Tensor = model(batch)
    return out.sum()


def _compute(seconds: float) -> None:
    """Multiply matrices for so many seconds of this thread's own CPU time."""
    end = time.thread_time() + seconds
    while seconds and time.thread_time() < end:
        torch.mm(_FACTOR, _FACTOR)


def _sleep_until(end: float) -> None:
    """Sleep until a moment of the monotonic clock; not at all if it is over."""
    if (left := end - time.monotonic()) > 0:
        time.sleep(left)


def _exact_sleeps() -> None:
    """Let the kernel end this thread's sleeps within a microsecond instead of 50; a no-op elsewhere than on Linux."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


def _matrix(elements: int) -> tuple[int, int]:
    """Return the squarest matrix of so many elements: low-rank compression needs two dimensions."""
    rows = next(each for each in range(math.isqrt(elements), 0, -1) if elements % each == 0)
    return rows, elements // rows
