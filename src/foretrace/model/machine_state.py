"""How fast a shared machine is just now, as probes of some milliseconds say it: small calls, products, and its memory.

Other users slow a machine in ways that do not go together: those of the same core slow everything, those of other cores
only what goes to memory, which small calls never touch. So there is a probe for each, and whatever is timed is timed
beside all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np

from foretrace.cost.calls import Float64
from foretrace.cost.operators.bench import clock_of
from foretrace.cost.operators.operator import Operator, call

if TYPE_CHECKING:
    import torch

PROBES = ("view", "product", "copy")
# Which probe tells of what: RESOURCES of `cost.operators.local`, in their order.
OF_RESOURCE = {"dispatch": 0, "matrix": 1, "vector": 1, "near": 1, "far": 2}
ALIKE = 0.15  # logarithm: two probes that differ by less met the machine in the same state
_VIEWS, _PRODUCTS = 300, 3
_CALM = 0.2  # share of the probes that are believed to have met the machine calm
_WIDTH = 256  # of a product, whose operands lie in a core's cache
_RING_BYTES, _PIECE_BYTES = 128 << 20, 4 << 20  # a piece comes again after 256 MiB: no cache that others use keeps it
# What the probes call, as a calibration would name it.
CALLS = (call("t", [64, 64]), call("mm", [_WIDTH, _WIDTH], [_WIDTH, _WIDTH]),
         call("copy_", [_PIECE_BYTES // 4], [_PIECE_BYTES // 4], "False"))  # fmt: skip
# Keys of the calm machine's probes.
USUAL = tuple(
    Operator.of(f"foretrace.model.on_processor:{each}", [[]], ["Scalar"]).key
    for each in ("calm", "calm product", "calm copy")
)


@cache
def _ready() -> tuple[Iterator[tuple[torch.Tensor, torch.Tensor]], torch.Tensor, torch.Tensor]:
    import torch

    source, target = (torch.zeros(_RING_BYTES // 4).split(_PIECE_BYTES // 4) for _ in range(2))
    return cycle(zip(source, target, strict=True)), torch.rand(_WIDTH, _WIDTH), torch.empty(_WIDTH, _WIDTH)


def views() -> float:
    """Return seconds per view of a small tensor just now, in under a millisecond; memory is not touched."""
    import torch

    small, clock = torch.ones(64, 64), clock_of()
    begin = clock()
    for _ in range(_VIEWS):
        small.t()
    return (clock() - begin) / _VIEWS


def probe() -> Float64:
    """Return seconds of each of PROBES just now: a view, a product in the core's cache, a copy of 4 MiB in memory."""
    import torch

    pieces, square, out = _ready()
    clock = clock_of()

    def least(times: int, run: Callable[[], object]) -> float:
        taken = []
        for _ in range(times):
            begin = clock()
            run()
            taken.append(clock() - begin)
        return min(taken)

    def copy() -> None:
        source, target = next(pieces)
        target.copy_(source)

    with torch.no_grad():
        return np.array([views(), least(_PRODUCTS, lambda: torch.mm(square, square, out=out)), least(2, copy)])


def calm(states: Sequence[Float64]) -> Float64:
    """Return the probes of a machine that nobody else uses, as far as these show it; NaN without any."""
    return np.quantile(np.array(states), _CALM, axis=0) if len(states) else np.full(len(PROBES), np.nan)


def alike(state: Float64, other: Float64) -> bool:
    """Return whether two probes met the machine in the same state."""
    return bool((np.abs(np.log(state / other)) < ALIKE).all())


def usual(known: Mapping[str, float]) -> Float64:
    """Return the probes of the calm machine as earlier calibrations saw them; infinite where none did."""
    return np.array([known.get(key, np.inf) for key in USUAL])
