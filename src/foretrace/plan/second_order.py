"""Which gradient-worker fraction distributed K-FAC should take, predicted from one recorded step.

Every fraction of the workers and every asked frequency of updates is one candidate: memory and bytes by arithmetic,
the step by `kfac` behind `data-parallel`. The first frequency is the one that is asked about; more seldom updates are
always quicker in a step, and what they cost in steps no recording tells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import hypot, inf

import msgspec

from foretrace.errors import ForetraceError
from foretrace.graph.taskgraph import TaskGraph
from foretrace.plaintext import whole_number
from foretrace.techniques.base import Technique
from foretrace.techniques.distributed.data_parallel import DataParallel
from foretrace.techniques.distributed.kfac import Kfac
from foretrace.techniques.distributed.recorded_layers import RecordedLayer
from foretrace.techniques.whatif import WhatIf, whatif
from foretrace.training.second_order.grid import SecondOrderShares, fractions, share_out

_ALIKE = 0.01  # of a step: of candidates that differ by less, the one with the least memory is taken


class SecondOrderCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """One way to share K-FAC out. Bytes are those of the worker that keeps or sends most; times are per step."""

    technique: str  # as it is written behind --do
    fraction: float
    gradient_workers: int
    factors_every: int  # steps
    inverses_every: int  # steps
    memory_bytes: int  # kept between steps
    peak_bytes: int  # with what comes and goes in a step, at most
    factors_bytes: int  # all-reduced each time
    inverses_bytes: int  # broadcast each time
    gradients_bytes: int  # broadcast in every step
    sent_bytes: float  # handed to collectives in a step on average
    added_s: float  # to the step without it
    added_interval_s: tuple[float, float]
    step_s: float
    interval_s: tuple[float, float]
    fits: bool


@dataclass(frozen=True, kw_only=True)
class SecondOrderPlan:
    """The best candidate within the memory, and all of them: memory-optimal first, by frequency as asked."""

    workers: int
    network: str
    memory_bytes: float  # that a worker may take for it
    before_s: float  # step without it
    before_interval_s: tuple[float, float]
    choice: SecondOrderCandidate
    candidates: tuple[SecondOrderCandidate, ...]
    layers: int
    measured: bool  # whether K-FAC's work was timed on the recorded machine

    @property
    def pays_below(self) -> tuple[float, float, float]:
        """K-FAC pays in time where it needs no more than this share of the steps: value, low, high."""
        low, high = (self.before_s / (self.before_s + added) for added in self.choice.added_interval_s[::-1])
        return self.before_s / self.choice.step_s, low, high


def frequency(text: str) -> tuple[int, int]:
    """Return steps between factors and between inverses, of "10/100". Raises ForetraceError."""
    found = [whole_number(each.strip()) for each in text.split("/")]
    if len(found) != 2 or not all(found):
        raise ForetraceError(f"every must be steps between factors and between inverses, got {text!r}; write 10/100.")
    return found[0] or 1, found[1] or 1


def plan_second_order(
    graph: TaskGraph,
    *,
    workers: int,
    network: str,
    memory_bytes: float = inf,
    every: Sequence[tuple[int, int]] = ((10, 100),),
    skip: str = "",
    level: float = 0.8,
    progress: Callable[[float], None] | None = None,
) -> SecondOrderPlan:
    """Predict every fraction at every frequency on a recording of one worker, and choose.

    Raises ForetraceError where no fraction fits the memory, NotApplicableError where the recording does not tell.
    """
    before = chain(workers, network)
    base = whatif(graph, before, level=level)
    first = replace(Kfac(skip=skip), factors_every=every[0][0], inverses_every=every[0][1])
    layers = first.layers(base.after.graph)
    peaks = [
        _held_and_peak(share_out([each.layer for each in layers], workers=workers, fraction=each), layers)[1]
        for each in fractions(workers)
    ]
    if min(peaks) > memory_bytes:
        raise ForetraceError(_too_small(fractions(workers), peaks, layers, memory_bytes))
    found: list[SecondOrderCandidate] = []
    points = [(fraction, often) for often in every for fraction in fractions(workers)]
    for i, (fraction, (factors, inverses)) in enumerate(points):
        technique = replace(first, fraction=fraction, factors_every=factors, inverses_every=inverses)
        shares = share_out([each.layer for each in layers], workers=workers, fraction=fraction)
        found.append(_candidate(graph, before, technique, shares, layers, base, memory_bytes))
        if progress is not None:
            progress((i + 1) / len(points))
    usable = [each for each in found[: len(fractions(workers))] if each.fits]
    quickest = min(each.step_s for each in usable)
    alike = [each for each in usable if each.step_s <= (1 + _ALIKE) * quickest]
    return SecondOrderPlan(
        workers=workers, network=network if workers > 1 else "", memory_bytes=memory_bytes, before_s=base.after_s,
        before_interval_s=base.interval_s, choice=min(alike, key=lambda each: each.memory_bytes),
        candidates=tuple(found), layers=len(layers), measured="gflops" not in first.priors(base.after.graph),
    )  # fmt: skip


def chain(workers: int, network: str) -> tuple[Technique, ...]:
    """Return what makes so many workers of one."""
    return (DataParallel(workers=workers, network=network),) if workers > 1 else ()


def _candidate(
    graph: TaskGraph, before: tuple[Technique, ...], technique: Kfac, shares: SecondOrderShares,
    layers: Sequence[RecordedLayer], base: WhatIf, memory_bytes: float,
) -> SecondOrderCandidate:  # fmt: skip
    after = whatif(graph, (*before, technique), level=base.level)
    added = after.after_s - base.after_s
    held_bytes, peak_bytes = _held_and_peak(shares, layers)
    traffic = [shares.traffic(rank) for rank in range(shares.workers)]
    # An assumption that both steps rest on moves what is added by the difference alone.
    shared = {each.assumption.name: each for each in base.assumptions}
    below, above = [], []
    for each in after.assumptions:
        same = shared.get(each.assumption.name)
        before_s = (same.at_low_s, same.at_high_s) if same else (base.after_s, base.after_s)
        moved_s = (each.at_low_s - before_s[0] - added, each.at_high_s - before_s[1] - added)
        below.append(max(-min(moved_s), 0.0))
        above.append(max(*moved_s, 0.0))
    inverses = max(each.inverses for each in traffic)
    return SecondOrderCandidate(
        technique=str(technique), fraction=technique.fraction, gradient_workers=shares.gradient_workers,
        factors_every=technique.factors_every, inverses_every=technique.inverses_every, memory_bytes=held_bytes,
        peak_bytes=peak_bytes, factors_bytes=traffic[0].factors, inverses_bytes=inverses,
        gradients_bytes=traffic[0].gradients, sent_bytes=traffic[0].factors / technique.factors_every
        + inverses / technique.inverses_every + traffic[0].gradients, added_s=added,
        added_interval_s=(added - hypot(*below), added + hypot(*above)), step_s=after.after_s,
        interval_s=after.interval_s, fits=peak_bytes <= memory_bytes,
    )  # fmt: skip


def _held_and_peak(shares: SecondOrderShares, layers: Sequence[RecordedLayer]) -> tuple[int, int]:
    """Return bytes that the worker with most of them keeps, and with what passes through it."""
    held = max(shares.held_bytes(rank) for rank in range(shares.workers))
    return held, held + shares.passing_bytes(max((each.read_bytes for each in layers), default=0))


def _too_small(
    fractions: Sequence[float], peaks: Sequence[int], layers: Sequence[RecordedLayer], memory_bytes: float
) -> str:
    least = min(peaks)
    fraction = fractions[peaks.index(least)]
    largest = max(layers, key=lambda each: each.layer.inverse_bytes).layer
    return (
        f"no gradient-worker fraction fits {memory_bytes / 1e6:.4g} MB: the least, {fraction:.4g}, "
        f"takes up to {least / 1e6:.4g} MB; leave layers out, first `skip={largest.name}` "
        f"({largest.inputs} x {largest.outputs})."
    )
