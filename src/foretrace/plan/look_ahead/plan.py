"""`plan_cache`: the step of a training over an embedding server, uncached and with look-ahead, each with its range."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.experiment.statistics import Ratio
from foretrace.hardware.cluster import parse_link
from foretrace.plan.look_ahead.steps import NUMBER, RowStep, RowTraffic, bound_s, cached_s, traffic, uncached_s
from foretrace.training.rows.lookahead import LookAheadPlan, plan_ahead
from foretrace.training.rows.lookups import Lookups
from foretrace.training.rows.optimizers import row_optimizer
from foretrace.training.rows.trainer import FETCHED_AHEAD

Range = tuple[float, float, float]  # value, low, high

# What is not known before anything is measured.
PAYLOAD: Range = (0.955, 0.90, 0.97)  # of a shaped link's rate (Ethernet and TCP headers; measured 0.94 to 0.955)
HOST_S_PER_BYTE: Range = (10e-9, 0.0, 30e-9)  # of Python, NumPy and the kernel that nothing overlaps
COMPUTE_S: Range = (0.040, 0.020, 0.080)
MOST_COMPUTE_S = 60.0
LAYERS = (32,)  # hidden, of the dense networks
OTHERS = (4, 16, 64)  # batches that are looked ahead in comparison


@dataclass(frozen=True, kw_only=True)
class CacheQuestion:
    """A training over rows: `trainers` on links to the server and each other."""

    source: str
    lookups: Lookups
    trainers: int
    link: str
    look_ahead: int
    optimizer: str = "sgd"
    compute_s: float | None = None  # of a batch; None where it is not known
    width: int = 32  # numbers in a row

    def __post_init__(self) -> None:
        row_optimizer(self.optimizer)
        if self.width < 1:
            raise ForetraceError(f"`width=` must be 1 or more, got {self.width}.")
        if self.compute_s is not None and not 0 <= self.compute_s < MOST_COMPUTE_S:
            raise ForetraceError(
                f"The passes of a batch must take 0 to {MOST_COMPUTE_S:g} s, got {self.compute_s:g}; change "
                "`compute_ms=`."
            )

    @property
    def dense(self) -> int:
        """Weights of the dense networks (DLRM's, with LAYERS)."""
        vectors, hidden = len(self.lookups.tables) + 1, LAYERS[0]
        bottom = 13 * hidden + hidden + hidden * self.width + self.width
        return bottom + (self.width + vectors * (vectors - 1) // 2) * hidden + hidden + hidden + 1


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What a step depends on beside its bytes; what was not measured has a wide range."""

    bytes_per_s: Range
    host_s: dict[bool, Range]  # by whether it looks ahead
    compute_s: Range
    free_s: Range = (0.0, 0.0, 0.0)  # of a step that looks ahead over links without a limit: it cannot be shorter
    latency_s: float = 0.0
    burst_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class PredictedStep:
    """Seconds of a mean step with its range."""

    step_s: float
    low_s: float
    high_s: float


@dataclass(frozen=True, kw_only=True)
class LookedAhead:
    """What one look-ahead comes to. Bytes are of a trainer's busier direction and a mean batch."""

    look_ahead: int
    step: PredictedStep
    speedup: Ratio  # uncached over this step
    hit_rate: float  # of the different rows of a batch
    now_bytes: float  # that the next batch waits for
    later_bytes: float  # behind the computation
    fetched_bytes: float  # of these, ahead of their batch
    all_bytes: float
    bound_s: float  # max(compute + now / rate, all / rate)
    held_rows: int  # of a trainer, at most
    held_bytes: int


@dataclass(frozen=True, kw_only=True)
class CachePlan:
    """The answer; batches from `warm` on count, before them caches fill."""

    question: CacheQuestion
    batches: int
    warm: int
    uncached: PredictedStep
    uncached_bytes: float
    chosen: LookedAhead
    others: tuple[LookedAhead, ...]
    notes: tuple[str, ...]


def plan_cache(
    question: CacheQuestion, conditions: Conditions | None = None, *, batches: int = 0, alone: bool = False
) -> CachePlan:
    """Predict the first `batches` of a trace, by default all; `alone` without other look-aheads.

    Raises ForetraceError for a trace, trainers or a look-ahead that cannot be.
    """
    batches = batches or question.lookups.batches
    if batches < 4:
        raise ForetraceError(f"A trace must have 4 batches or more, got {batches}; lower its samples of a batch.")
    warm = min(question.look_ahead, batches // 2)
    state = row_optimizer(question.optimizer).state
    step = RowStep(width=question.width, state=state, dense=question.dense, compute_s=0.0, bytes_per_s=1.0)
    found = {}
    for look_ahead in sorted({question.look_ahead, *(() if alone else OTHERS)}):
        plan = plan_ahead(question.lookups, trainers=question.trainers, look_ahead=look_ahead, end=batches)
        found[look_ahead] = plan, _after(traffic(plan, step, cached=True), 0)
    plan = found[question.look_ahead][0]
    plain = traffic(plan, step, cached=False)
    moved = float(_after(plain, warm).all.max(1).mean())
    if conditions is None:
        conditions = _unmeasured(question, moved)
    corners = list(_corners(step, conditions))
    without = [float(uncached_s(plain, own)[warm:].mean()) for own, _ in corners]
    looked = tuple(
        _looked(each, own, without, [own for _, own in corners], conditions, warm, step) for each, own in found.values()
    )
    chosen = next(each for each in looked if each.look_ahead == question.look_ahead)
    return CachePlan(
        question=question, batches=batches, warm=warm, uncached=_ranged(without),
        uncached_bytes=moved, chosen=chosen, others=tuple(each for each in looked if each is not chosen),
        notes=tuple(_notes(question, warm)),
    )  # fmt: skip


def _looked(
    plan: LookAheadPlan, moved: RowTraffic, without: list[float], corners: list[RowStep], conditions: Conditions,
    warm: int, step: RowStep,
) -> LookedAhead:  # fmt: skip
    ahead = min(plan.look_ahead, FETCHED_AHEAD)
    steps = [max(float(cached_s(moved, own, ahead=ahead)[warm:].mean()), own.least_s) for own in corners]
    ratios = [before / after for before, after in zip(without, steps, strict=True)]
    late = _after(moved, warm)
    middle = replace(step, bytes_per_s=conditions.bytes_per_s[0], compute_s=conditions.compute_s[0])
    hits = plan.hit[plan.starts[warm] :]
    return LookedAhead(
        look_ahead=plan.look_ahead, step=_ranged(steps),
        speedup=Ratio(value=ratios[0], low=min(ratios), high=max(ratios)), hit_rate=float(hits.mean()),
        now_bytes=float(late.now.max(1).mean()),
        later_bytes=float(np.maximum(late.later_out + late.back_out, late.later_in).max(1).mean()),
        fetched_bytes=float(late.fetch_in.max(1).mean()), all_bytes=float(late.all.max(1).mean()),
        bound_s=bound_s(late, middle), held_rows=int(plan.held.max()),
        held_bytes=int(plan.held.max()) * NUMBER * (step.width + step.state),
    )  # fmt: skip


def _corners(step: RowStep, conditions: Conditions) -> Iterator[tuple[RowStep, RowStep]]:
    """Yield the uncached and the looking-ahead step with the values of all that is uncertain, then with all
    extremes.
    """
    rates, computes = conditions.bytes_per_s, conditions.compute_s
    for rate, compute, host in [(0, 0, 0), *product((1, 2), repeat=3)]:
        base = replace(
            step, bytes_per_s=rates[rate], compute_s=computes[compute], latency_s=conditions.latency_s,
            burst_bytes=conditions.burst_bytes,
        )  # fmt: skip
        yield (
            replace(base, host_s=conditions.host_s[False][host]),
            replace(base, host_s=conditions.host_s[True][host], least_s=conditions.free_s[host]),
        )


def _unmeasured(question: CacheQuestion, moved: float) -> Conditions:
    """Return what is known of a link's rate alone; `moved` bytes of an uncached step."""
    rate = parse_link(question.link).bytes_per_s
    value, low, high = (2 * moved * each for each in HOST_S_PER_BYTE)
    compute: Range = COMPUTE_S if question.compute_s is None else (question.compute_s,) * 3
    return Conditions(
        bytes_per_s=(rate * PAYLOAD[0], rate * PAYLOAD[1], rate * PAYLOAD[2]),
        host_s={False: (value, low, high), True: (value / 2, low, high)},
        compute_s=compute, latency_s=parse_link(question.link).latency_s,
    )  # fmt: skip


def _ranged(steps: list[float]) -> PredictedStep:
    return PredictedStep(step_s=steps[0], low_s=min(steps), high_s=max(steps))


def _after(moved: RowTraffic, batch: int) -> RowTraffic:
    """Return the traffic of the batches from one on."""
    return RowTraffic(**{name: getattr(moved, name)[batch:] for name in moved.__dataclass_fields__})


def _notes(question: CacheQuestion, warm: int) -> Iterator[str]:
    if question.compute_s is None:
        yield (
            f"How long the passes of a batch take was not given: {1e3 * COMPUTE_S[0]:g} ms ({1e3 * COMPUTE_S[1]:g} – "
            f"{1e3 * COMPUTE_S[2]:g}) is assumed; say how long, and ranges are narrower."
        )
    if warm < question.look_ahead:
        yield (
            f"The trace is short for a look-ahead of {question.look_ahead}: only batches from {warm} on count, and "
            "their caches are not yet full."
        )
