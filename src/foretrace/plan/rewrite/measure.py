"""Whether a rewritten model is the same function and how much faster it is: checks and interleaved runs."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, isnan
from typing import TYPE_CHECKING, Any

from foretrace.experiment.statistics import Arm, Ratio, paired_ratio
from foretrace.experiment.trial import in_turns
from foretrace.plan.rewrite.capture import Model
from foretrace.plan.rewrite.emit import Emitted, emit
from foretrace.plan.rewrite.terms import Graph

if TYPE_CHECKING:
    import torch

FLOAT64_TOLERANCE = 1e-9
FLOAT32_TOLERANCE = 1e-3
_ROUNDING = 4.0  # times the rounding of the original in float32 that are allowed in any case
_BLOCK_S = 0.15  # of runs that are timed together
_ROUNDS = 11


@dataclass(frozen=True, kw_only=True)
class Check:
    """Differences from the original on random inputs, as shares of how far its output moves between two of them."""

    # A network whose output hardly depends on its input would agree with anything in shares of the output itself.
    equal: bool  # both within their tolerances; float32 also where it is hardly worse than the original's
    float64: float
    float64_tolerance: float
    float32: float
    float32_tolerance: float
    float32_original: float  # of the original in float32: what rounding alone does
    response: float  # how far the output moves, as a share of its largest value
    inputs: int  # tried


def check(model: Model, after: Graph, rewritten: Emitted, *, seed: int = 0, inputs: int = 2) -> Check:
    """Hold the rewritten model against the original module, in float64 throughout and as it will run."""
    import copy

    import torch

    wide = copy.deepcopy(model.module).double().eval()
    twin = emit(model, after, double=True)
    generator = torch.Generator().manual_seed(seed)
    worst = {"float64": 0.0, "float32": 0.0, "original": 0.0}
    response = 0.0
    last: list[torch.Tensor] | None = None
    with torch.no_grad():
        for _ in range(max(inputs, 2)):
            args, kwargs = _random((model.args, model.kwargs), generator)
            args64, kwargs64 = _doubled((args, kwargs))
            exact = _floats(wide(*args64, **kwargs64))
            pairs = {
                "float64": _floats(twin(*args64, **kwargs64)),
                "float32": _floats(rewritten(*args, **kwargs)),
                "original": _floats(model.module(*args, **kwargs)),
            }
            if last is not None:
                moved = [float((a - b).abs().max()) for a, b in zip(exact, last, strict=True) if a.numel()]
                size = [max(float(a.abs().max()), 1e-300) for a in exact if a.numel()]
                response = max((m / s for m, s in zip(moved, size, strict=True)), default=0.0)
                for key, values in pairs.items():
                    off = [float((a - b.double()).abs().max()) for a, b in zip(exact, values, strict=True) if a.numel()]
                    shares = [o / max(m, 1e-12 * s) for o, m, s in zip(off, moved, size, strict=True)]
                    worst[key] = max([worst[key], *(inf if isnan(each) else each for each in shares)])
            last = exact
    rounding = max(FLOAT32_TOLERANCE, _ROUNDING * worst["original"])
    return Check(
        equal=worst["float64"] <= FLOAT64_TOLERANCE and worst["float32"] <= rounding,
        float64=worst["float64"],
        float64_tolerance=FLOAT64_TOLERANCE,
        float32=worst["float32"],
        float32_tolerance=FLOAT32_TOLERANCE,
        float32_original=worst["original"],
        response=response,
        inputs=max(inputs, 2),
    )


def _random(value: Any, generator: torch.Generator) -> Any:
    """Return floating-point tensors drawn again with mean and deviation of those given, integers in another order."""
    import torch
    from torch.utils import _pytree as pytree

    def drawn(each: Any) -> Any:
        if not isinstance(each, torch.Tensor) or not each.numel():
            return each
        if each.is_floating_point():
            noise = torch.randn(each.shape, generator=generator, dtype=each.dtype)
            return noise * (each.std() if each.numel() > 1 else 1.0) + each.mean()
        if each.dtype == torch.bool or each.ndim == 0:
            return each
        return each.flatten()[torch.randperm(each.numel(), generator=generator)].reshape(each.shape)

    return pytree.tree_map(drawn, value)


def _doubled(value: Any) -> Any:
    import torch
    from torch.utils import _pytree as pytree

    def wide(each: Any) -> Any:
        return each.double() if isinstance(each, torch.Tensor) and each.is_floating_point() else each

    return pytree.tree_map(wide, value)


def _floats(value: Any) -> list[torch.Tensor]:
    import torch
    from torch.utils import _pytree as pytree

    leaves = pytree.tree_leaves(value)
    return [each for each in leaves if isinstance(each, torch.Tensor) and each.is_floating_point()]


@dataclass(frozen=True, kw_only=True)
class MeasuredGain:
    """Runs of the original and of rewritten models in turns. Ratios are old time over new time: above 1 is faster."""

    arms: dict[str, Arm]
    gains: dict[str, Ratio]  # of every arm but the first, against the first
    clock: str  # "cpu" or "wall"
    threads: int

    @property
    def rounds(self) -> int:
        """Blocks of every arm."""
        return len(next(iter(self.arms.values())).blocks_s)


def gain(
    arms: dict[str, Callable[[], object]], *, rounds: int = _ROUNDS, block_s: float = _BLOCK_S,
    tell: Callable[[float], None] | None = None,
) -> MeasuredGain:  # fmt: skip
    """Time these in turns, the first being what the others are compared with: A B A B ..., one block each per round."""
    import torch

    threads = torch.get_num_threads()
    clock = time.thread_time if threads == 1 else time.perf_counter
    collecting = gc.isenabled()
    counts: dict[str, int] = {}
    with torch.no_grad():
        for name, run in arms.items():
            once = _block(run, 3, clock)
            counts[name] = max(1, min(round(block_s / max(min(once, _block(run, 2, clock)), 1e-6)), 500))
        gc.disable()
        try:
            blocks = in_turns(arms, lambda name, _: _block(arms[name], counts[name], clock), rounds, tell=tell)
        finally:
            if collecting:
                gc.enable()
    first = next(iter(arms))
    return MeasuredGain(
        arms={name: Arm.of(times) for name, times in blocks.items()},
        gains={name: paired_ratio(times, blocks[first]) for name, times in blocks.items() if name != first},
        clock="cpu" if threads == 1 else "wall",
        threads=threads,
    )


def _block(run: Callable[[], object], count: int, clock: Callable[[], float]) -> float:
    """Return mean seconds of so many runs."""
    begin = clock()
    for _ in range(count):
        run()
    return (clock() - begin) / count


def once(run: Callable[[], object], *, repeats: int = 9) -> float:
    """Return median seconds of a run, after two to warm up."""
    import torch

    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    with torch.no_grad():
        times: Sequence[float] = [_block(run, 1, clock) for _ in range(repeats + 2)][2:]
    return sorted(times)[len(times) // 2]
