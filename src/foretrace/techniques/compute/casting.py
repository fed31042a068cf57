"""What autocast adds to a step on a processor: casts by their sizes, autograd nodes that undo them, and its dispatch.

`prepared_casts` and `prepared_layers` are calls to be timed alone (`cost.bench`): PyTorch's own casts and layers on
tensors so small that only their overhead is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from foretrace.cost.operators.calibration import Calibration
from foretrace.cost.operators.operator import Operator
from foretrace.techniques.compute.reduced import SINGLE, Cast

_OVERHEAD_S = 2.5e-6  # where it was not timed: two operators through the dispatcher
_AT_ONCE = 16  # per timed call, so that what surrounds them hardly counts
_CODES = {"float": "6", "c10::BFloat16": "15", "c10::Half": "5"}  # c10::ScalarType, as recorded
_DTYPES = {"c10::BFloat16": "bfloat16", "c10::Half": "float16"}


def cast_operator(dims: tuple[int, ...], source: str, target: str) -> Operator:
    """One cast, as autocast makes it."""
    sizes: list[list[int]] = [list(dims), *([] for _ in range(6))]
    return Operator.of(
        "aten::_to_copy",
        sizes,
        [source, "Scalar", "", "", "", "Scalar", ""],
        ["", _CODES[target], "", "", "", "False", ""],
    )


def _overhead_operator(function: str, half: str, kind: str) -> Operator:
    return Operator.of(f"{__name__}:{function}", [[], []], ["", ""], [half, kind])


def overhead_operators(half: str) -> tuple[Operator, ...]:
    """What `Overhead.of` needs to be timed."""
    casts = (_overhead_operator("prepared_casts", half, kind) for kind in ("forward", "both"))
    layers = (_overhead_operator("prepared_layers", half, kind) for kind in ("plain", "autocast"))
    return (*casts, *layers)


class Overhead:
    """Host time of casts beside their data, and of autocast's dispatch. Seconds; `timed` says whether here."""

    def __init__(self, calibration: Calibration, half: str) -> None:
        measured = [calibration.time_s(each) for each in overhead_operators(half)]
        times = [time_s for time_s in (*measured, calibration.time_s(cast_operator((8,), SINGLE, half))) if time_s]
        self.timed = len(times) == len(measured) + 1
        if not self.timed:
            self.forward_s = self.backward_s = self.entry_s = _OVERHEAD_S
            return
        forward, both, plain, autocast, small = times
        self.forward_s = max(forward / _AT_ONCE - small, 0.0)  # a cast that autograd remembers, beyond the cast
        self.backward_s = max((both - forward) / _AT_ONCE - small, 0.0)  # its node in the backward pass, likewise
        self.entry_s = max(autocast - plain, 0.0) / _AT_ONCE  # a lower-precision operator whose weights are cast


def cast_times_s(calibration: Calibration, casts: Iterable[Cast], half: str) -> list[float | None]:
    """Seconds of each cast with its overhead; None where its size was not measured."""
    overhead = Overhead(calibration, half)
    found = []
    for cast in casts:
        time_s = calibration.time_s(cast_operator(cast.dims, cast.source, cast.target))
        extra_s = overhead.backward_s if cast.backward else overhead.forward_s
        found.append(None if time_s is None else time_s + extra_s)
    return found


def prepared_casts(operator: Operator) -> Callable[[], object]:
    """Casts of small tensors that need gradients; "both": and their way back through autograd."""
    import torch

    half, kind = operator.concrete
    dtype = getattr(torch, _DTYPES[half])
    tensors = [torch.ones(8, requires_grad=True) for _ in range(_AT_ONCE)]
    gradients = [torch.ones(8, dtype=dtype) for _ in tensors]

    def call() -> None:
        with torch.enable_grad():
            made = [each.to(dtype) for each in tensors]
            if kind == "both":
                torch.autograd.grad(made, tensors, gradients)

    return call


def prepared_layers(operator: Operator) -> Callable[[], object]:
    """Small 16-bit linear layers; "autocast": through autocast, which finds their weights in its cache."""
    import torch

    half, kind = operator.concrete
    dtype = getattr(torch, _DTYPES[half])
    x, weight, bias = torch.ones(4, 8, dtype=dtype), torch.ones(8, 8), torch.ones(8)
    if kind == "plain":
        weight, bias = weight.to(dtype), bias.to(dtype)
    weight.requires_grad_(True)
    bias.requires_grad_(True)
    context = torch.autocast("cpu", dtype, enabled=kind == "autocast")
    linear = torch.nn.functional.linear

    def call() -> None:
        with torch.enable_grad(), context:
            for _ in range(_AT_ONCE):
                linear(x, weight, bias)

    return call
