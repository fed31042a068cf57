"""Whether compressing gradients pays: the question of the Utility study, asked of a recorded task graph.

Agarwal et al., On the Utility of Gradient Compression in Distributed Training Systems, MLSys 2022. Every figure is a
prediction of `data-parallel` and `gradient-compression` on the graph. Gains are differences between two predictions
under the same assumptions, so what both share (waiting, the network's model) does not widen their interval twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import hypot, isfinite, sqrt
from statistics import NormalDist
from typing import Any, ClassVar, TypeVar, cast

import numpy as np

from foretrace.cost.network.network import CollectiveKind
from foretrace.errors import ForetraceError, NotApplicableError
from foretrace.graph.taskgraph import TaskGraph
from foretrace.hardware.cluster import parse_link
from foretrace.names import resolve
from foretrace.simulate.timeline import Timeline, simulate
from foretrace.techniques.arguments import parse
from foretrace.techniques.base import Technique, parameter
from foretrace.techniques.distributed.coding import TIMED
from foretrace.techniques.distributed.compressed_exchange import Compressed, compressed, compressible
from foretrace.techniques.distributed.data_parallel import DataParallel
from foretrace.techniques.distributed.gradient_compression import GradientCompression

PAYS, DOES_NOT, CANNOT_TELL = "pays", "does not", "cannot tell"
WORTH = 0.01  # of a step: smaller gains are none
_SLOWEST, _FASTEST = 1e-3, 1e4  # Gbit/s
_KEPT = 64  # graphs
_MOST = 1e6  # ratios beyond it mean that no ratio is enough

DEFAULT = (
    GradientCompression(method="fp16"),
    GradientCompression(method="bf16"),
    GradientCompression(method="powersgd", rank=1),
    GradientCompression(method="powersgd", rank=4),
    GradientCompression(method="powersgd", rank=16),
    GradientCompression(method="topk", share=0.01),
    GradientCompression(method="topk", share=0.1),
    GradientCompression(method="randomk", share=0.01),
    GradientCompression(method="sign"),
    GradientCompression(method="dgc", share=0.001),
)

Progress = Callable[[float], None] | None


@dataclass(frozen=True, kw_only=True)
class Ideal(Technique):
    """Compression by a ratio that costs nothing, or messages that take no time at all (ratio=inf)."""

    name: ClassVar[str] = "ideal-compression"
    summary: ClassVar[str] = "messages so many times smaller, at no cost"
    source: ClassVar[str] = "Agarwal et al., MLSys 2022, section 5"
    not_applied: ClassVar[str] = "it does not exist."

    ratio: float = parameter(doc="how many times fewer bytes")

    def change(self, graph: TaskGraph) -> TaskGraph:
        plan = compressible(graph, self)
        buckets = [
            Compressed(parts=[(CollectiveKind.ALL_REDUCE, part.nbytes / self.ratio)] if isfinite(self.ratio) else [])
            for part in plan.parts
        ]
        return compressed(graph, plan, buckets, self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """What one method is predicted to do to the data-parallel step. Seconds and bytes per step and worker."""

    name: str  # as it is written behind --do
    ratio: float  # bytes of the gradients relative to what a worker sends
    sent_bytes: float
    encode_s: float
    decode_s: float
    measured: bool  # encoding and decoding were timed on the recorded machine, on these very buckets
    coding: str  # how they are known: timed, timed at other sizes, memory traffic, prior
    step_s: float
    interval_s: tuple[float, float]
    gain_s: float  # off the uncompressed step; below 0 the method loses
    gain_interval_s: tuple[float, float]
    verdict: str  # pays, does not, cannot tell
    pays_below_gbit_s: float | None  # by the central prediction, on slower links than this; null: none, or a file

    @property
    def short(self) -> str:
        """Without the name of the technique: "topk share=0.1"."""
        return self.name.split("method=", 1)[1]


@dataclass(frozen=True, kw_only=True)
class CompressionAdvice:
    """Whether compression pays on this recording, with this network and so many workers."""

    parallel: DataParallel
    level: float
    tolerance: float
    alone_s: float  # one worker
    step_s: float  # data-parallel, uncompressed
    interval_s: tuple[float, float]
    free_s: float  # if messages took no time
    gradient_bytes: int
    required: float | None  # ratio for near-linear scaling; None: latency alone is too long
    required_interval: tuple[float | None, float | None]  # with transfers at the fast and the slow end of their range
    gbit_s: float | None  # of the given link; None for a file
    methods: tuple[Method, ...]
    left_out: tuple[str, ...]  # methods that do not fit, with the reason

    @property
    def paying(self) -> tuple[Method, ...]:
        """Methods that pay, the best one first."""
        return tuple(sorted((m for m in self.methods if m.verdict == PAYS), key=lambda m: m.step_s))

    @property
    def verdict(self) -> str:
        """Of the best method."""
        open_ = any(each.verdict == CANNOT_TELL for each in self.methods)
        return PAYS if self.paying else CANNOT_TELL if open_ else DOES_NOT


def positive(**amounts: float) -> None:
    """Raise ForetraceError for amounts that are none."""
    for name, value in amounts.items():
        if not (isfinite(value) and value > 0):
            raise ForetraceError(f"`{name}={value}` makes no sense; give a number above 0.")


def methods_named(texts: Sequence[str]) -> tuple[GradientCompression, ...]:
    """Return methods as they are written: "powersgd rank=8". Raises ForetraceError."""
    return tuple(cast(GradientCompression, parse(f"gradient-compression method={each}")) for each in texts)


def data_parallel(
    workers: int, network: str, *, bucket_mb: float | None = None, gradient_mb: float = 0.0, backend: str = ""
) -> DataParallel:
    """Return the training whose messages are compressed. Raises ForetraceError."""
    backend = resolve(backend, ("gloo", "nccl")) or backend
    if backend not in ("", "gloo", "nccl"):
        raise ForetraceError(f"`backend={backend}` does not exist; choose gloo or nccl.")
    return DataParallel(workers=workers, network=network, bucket_mb=bucket_mb, gradient_mb=gradient_mb, backend=backend)


def advise(
    graph: TaskGraph,
    parallel: DataParallel,
    methods: Sequence[GradientCompression] = DEFAULT,
    *,
    tolerance: float = 0.05,
    level: float = 0.8,
    borders: bool = True,
    progress: Progress = None,
) -> CompressionAdvice:
    """Predict every method on a recording of one worker.

    Args:
        graph: of one worker, with the times of hooks in its calibration where they were measured.
        parallel: workers, network and buckets.
        methods: what to try; one that does not fit is left out.
        tolerance: how much longer than with free messages a step may take to count as near-linear.
        level: of the intervals.
        borders: look for the bandwidth from which down each pays, which is most of the work.
        progress: told the share done.

    Raises:
        NotApplicableError: data-parallel does not fit the recording, or none of the methods does.

    """
    if not 0 < tolerance < 10:
        raise ForetraceError(f"a tolerance of {tolerance} makes no sense; give a share such as 0.05.")
    asked = _Asked(graph=graph, parallel=parallel)
    exchanged = asked.exchanged(parallel)
    base = simulate(exchanged)
    rows: list[Method] = []
    refused: list[tuple[str, NotApplicableError]] = []
    for i, method in enumerate(methods):
        try:
            rows.append(_judged(asked, base, method, level, borders=borders))
        except NotApplicableError as reason:
            refused.append((str(method).split("method=", 1)[1], reason))
        if progress is not None:
            progress((i + 1) / len(methods))
    if refused and not rows:
        raise refused[0][1]
    spread = asked.spread(None, lambda other, _: (asked.step_s(other),), (base.step_time_s,))[0]
    noise = base.interval_s(level)
    plan = compressible(exchanged, Ideal(ratio=1.0))
    return CompressionAdvice(
        parallel=parallel,
        level=level,
        tolerance=tolerance,
        alone_s=simulate(graph).step_time_s,
        step_s=base.step_time_s,
        interval_s=(
            max(base.step_time_s - hypot(base.step_time_s - noise.low_s, spread[0]), 0.0),
            base.step_time_s + hypot(noise.high_s - base.step_time_s, spread[1]),
        ),
        free_s=simulate(Ideal(ratio=float("inf")).predict(exchanged)).step_time_s,
        gradient_bytes=sum(part.nbytes for part in plan.parts),
        required=required(graph, parallel, tolerance),
        required_interval=_required_interval(graph, parallel, tolerance),
        gbit_s=asked.gbit_s,
        methods=tuple(rows),
        left_out=tuple(f"{method}: {str(reason).partition(': ')[2]}" for method, reason in refused),
    )


def required(graph: TaskGraph, parallel: DataParallel, tolerance: float) -> float | None:
    """Return the smallest ratio at which free compression brings the step within `tolerance` of one with free messages.

    1 where there is nothing to win; None where the latency of messages alone takes longer.
    """
    exchanged = parallel.predict(graph)
    limit = (1 + tolerance) * simulate(Ideal(ratio=float("inf")).predict(exchanged)).step_time_s

    def enough(ratio: float) -> bool:
        return simulate(Ideal(ratio=ratio).predict(exchanged)).step_time_s <= limit

    if enough(1.0):
        return 1.0
    if not enough(_MOST):
        return None
    return _edge(lambda ratio: not enough(ratio), 1.0, _MOST, within=1.01)[1]


def _required_interval(graph: TaskGraph, parallel: DataParallel, tolerance: float) -> tuple[float | None, float | None]:
    prior = parallel.priors(graph)["transfer"]
    if parallel.transfer is not None:
        value = required(graph, parallel, tolerance)
        return value, value
    fast, slow = (replace(parallel, transfer=each) for each in (prior.low, prior.high))
    return required(graph, fast, tolerance), required(graph, slow, tolerance)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Asked:
    """The recording with the workers asked about; what data-parallel makes of it is kept."""

    graph: TaskGraph
    parallel: DataParallel
    kept: dict[DataParallel, TaskGraph] = field(default_factory=dict)
    steps: dict[DataParallel, float] = field(default_factory=dict)

    def exchanged(self, parallel: DataParallel) -> TaskGraph:
        """Return the graph with uncompressed messages."""
        if parallel not in self.kept:
            while len(self.kept) >= _KEPT:
                self.kept.pop(next(iter(self.kept)))
            self.kept[parallel] = parallel.predict(self.graph)
        return self.kept[parallel]

    def step_s(self, parallel: DataParallel, method: Technique | None = None) -> float:
        """Return the predicted step, uncompressed or compressed."""
        if method is not None:
            return simulate(method.predict(self.exchanged(parallel))).step_time_s
        if parallel not in self.steps:
            self.steps[parallel] = simulate(self.exchanged(parallel)).step_time_s
        return self.steps[parallel]

    @property
    def gbit_s(self) -> float | None:
        """Rate of the link; None where the network is a file."""
        try:
            return parse_link(self.parallel.network).gbit_s
        except ForetraceError:
            return None

    def at(self, gbit_s: float) -> DataParallel:
        """Return the same workers behind a link of another rate."""
        link = parse_link(self.parallel.network)
        return replace(self.parallel, network=f"{gbit_s:.9f}gbit/{link.latency_us:.6f}us")

    def spread(
        self,
        method: GradientCompression | None,
        figures: Callable[[DataParallel, GradientCompression | None], tuple[float, ...]],
        values: tuple[float, ...],
    ) -> list[tuple[float, float]]:
        """Return how far figures may lie below and above their values if assumptions are off: root of the sum of
        squares.
        """
        ends = [
            [figures(_with(self.parallel, each.flag, end), method) for end in (each.low, each.high)]
            for each in self.parallel.uncertain(self.graph)
        ]
        ends += [
            [figures(self.parallel, _with(method, each.flag, end)) for end in (each.low, each.high)]
            for each in (method.uncertain(self.exchanged(self.parallel)) if method is not None else ())
        ]
        found = []
        for i, value in enumerate(values):
            below = [max(value - min(low[i], high[i]), 0.0) for low, high in ends]
            above = [max(max(low[i], high[i]) - value, 0.0) for low, high in ends]
            found.append((hypot(*below), hypot(*above)))
        return found


Chosen = TypeVar("Chosen", bound=Technique | None)


def _with(technique: Chosen, flag: str, value: float) -> Chosen:
    """Return the technique with an assumption replaced."""
    return cast(Chosen, replace(cast(Any, technique), **{flag: value}))


def _judged(asked: _Asked, base: Timeline, method: GradientCompression, level: float, *, borders: bool) -> Method:
    """Return one method beside the uncompressed step."""
    exchanged = asked.exchanged(asked.parallel)
    after = simulate(method.predict(exchanged))
    gain = base.step_time_s - after.step_time_s
    apart = (base.step_times_ns - after.step_times_ns) / 1e9
    quantile = NormalDist().inv_cdf(0.5 + level / 2)
    noise = quantile * float(np.std(apart, ddof=1)) / sqrt(len(apart)) if len(apart) > 1 else 0.0

    def figures(parallel: DataParallel, method: GradientCompression | None) -> tuple[float, ...]:
        step_s = asked.step_s(parallel, method)
        return step_s, asked.step_s(parallel) - step_s

    (faster, slower), (less, more) = asked.spread(method, figures, (after.step_time_s, gain))
    # Durations that were estimated move both steps: by how much the gain, both tell at the same end of each source.
    moved = {each.source: (each.at_low_s, each.at_high_s) for each in after.shifts}
    ends = [
        [a - b for a, b in zip((each.at_low_s, each.at_high_s), moved[each.source], strict=True)]
        for each in base.shifts
        if each.source in moved
    ]
    less, more = (
        hypot(less, *(max(gain - min(each), 0) for each in ends)),
        hypot(more, *(max(max(each) - gain, 0) for each in ends)),
    )
    interval = gain - hypot(noise, less), gain + hypot(noise, more)
    step_noise = after.interval_s(level)
    encode_s, decode_s, coding = method.coding_s(exchanged)
    sent, ratio = method.sent(exchanged)
    return Method(
        name=str(method),
        ratio=ratio,
        sent_bytes=sent,
        encode_s=encode_s,
        decode_s=decode_s,
        measured=coding == TIMED,
        coding=coding,
        step_s=after.step_time_s,
        interval_s=(
            max(after.step_time_s - hypot(after.step_time_s - step_noise.low_s, faster), 0.0),
            after.step_time_s + hypot(step_noise.high_s - after.step_time_s, slower),
        ),
        gain_s=gain,
        gain_interval_s=interval,
        verdict=verdict(gain, interval, base.step_time_s),
        pays_below_gbit_s=_pays_below(asked, method) if borders and asked.gbit_s is not None else None,
    )


def verdict(gain_s: float, interval_s: tuple[float, float], step_s: float) -> str:
    """Return what can be said of a gain: below a hundredth of the step there is none."""
    least = WORTH * step_s
    if interval_s[0] > 0 and gain_s > least:
        return PAYS
    return DOES_NOT if interval_s[1] < least else CANNOT_TELL


def _pays_below(asked: _Asked, method: GradientCompression) -> float | None:
    """Return the fastest link (Gbit/s) at which a method takes a hundredth off the step; None if there is none."""

    def pays(rate: float) -> bool:
        there = asked.at(rate)
        before = asked.step_s(there)
        return before - asked.step_s(there, method) > WORTH * before

    grid = np.geomspace(_SLOWEST, _FASTEST, 8).tolist()
    found = next((i for i in range(len(grid) - 1, -1, -1) if pays(grid[i])), -1)
    if found < 0 or found == len(grid) - 1:
        return None if found < 0 else float(grid[-1])
    return _edge(pays, grid[found], grid[found + 1], within=1.05)[0]


def _edge(holds: Callable[[float], bool], low: float, high: float, *, within: float) -> tuple[float, float]:
    """Return where something stops to hold between low, where it does, and high: bisection until high ≤
    within · low.
    """
    while high > within * low:
        middle = sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low, high
