"""What JigSaw gains: time-sharing and partial backpropagation apart, over workers, exchanges, sharers and switches.

Every row compares the same jobs under `four_arms`; shares are of the iterations that GPUs do per time when each job
has GPUs of its own and back-propagates wholly. None is corrected for what partial backpropagation costs in iterations
until a model has learnt; `jigsaw_convergence` shows that for a small network that is really trained.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import msgspec
import numpy as np

from foretrace.fleet.workload import SECOND
from reproductions.jigsaw.schedule import Rules, need_bytes
from reproductions.jigsaw.sharing import Arms, four_arms, jigsaw_speeds
from reproductions.jigsaw.tasks import IterationJob, compute_bound, recorded_job

FORWARD_S, BACKWARD_S = 1.0, 2.0  # only their ratio matters
WORKERS = (2, 3, 4, 8)
EXCHANGES = (0.0, 0.1, 0.3, 1.0)
SHARERS = (1, 2, 3, 4)
SWITCHES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2)
LOADS = (3.0, 1.5, 1.0)  # workers per GPU: oversubscribed, twice as many GPUs, GPUs for all
MIX_JOBS, MIX_WORKERS, MIX_EXCHANGE, MIX_SLOTS = 24, (1, 2, 4, 8), (0.05, 0.5), 3
RECORDED_WORKERS = (2, 4)
TRAINED_WORKERS, TRAINED_BATCHES, TRAINED_SEEDS = (2, 4), (16, 128), 5
# How tasks are dispatched, by name. In the first, any GPU of a job takes the longest task, and jobs meet at barriers.
DISPATCH = {
    "longest-first": Rules(order="longest-first", rotation="same", bound=False),
    "first-ready": Rules(order="first-ready", rotation="opposed", bound=True),
}
WAYS = {
    "longest-first, any GPU of the job": DISPATCH["longest-first"],
    "longest-first, own GPU, same rotation": Rules(order="longest-first", rotation="same"),
    "longest-first, own GPU, opposed rotation": Rules(order="longest-first", rotation="opposed"),
    "first-ready, any GPU of the job": Rules(order="first-ready", rotation="same", bound=False),
    "first-ready, own GPU, same rotation": Rules(order="first-ready", rotation="same"),
    "first-ready, own GPU, opposed rotation": DISPATCH["first-ready"],
    "first-ready, own GPU, no rotation": Rules(order="first-ready", rotation="none"),
}

Progress = Callable[[int, int], None] | None


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """Mean over seeds with its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float


class BoundRow(msgspec.Struct, frozen=True, kw_only=True):
    """What partial backpropagation can gain at most on GPUs that are always busy, by number of workers."""

    workers: int
    gain: float  # (F + B) / (F + B (K + 1) / 2K) − 1


class PackingRow(msgspec.Struct, frozen=True, kw_only=True):
    """Equal jobs on the same GPUs. Gains are shares of whole backward passes on GPUs of one's own."""

    dispatch: str  # longest-first or first-ready
    workers: int
    exchange: float  # of a whole iteration, as a share of its compute
    sharers: int  # jobs on every GPU
    switch: float  # time a GPU spends turning to another job, as a share of a whole task
    partial_alone: float  # partial backpropagation without sharing
    time_sharing: float  # sharing without partial backpropagation
    together: float
    partial_share: float  # what partial backpropagation adds to sharing
    bound: float


class WayRow(msgspec.Struct, frozen=True, kw_only=True):
    """One way of dispatching and rotating, four workers, two or three jobs per GPU."""

    way: str
    exchange: float
    sharers: int
    together: float
    partial_share: float
    bound: float


class TrafficRow(msgspec.Struct, frozen=True, kw_only=True):
    """Partial backpropagation on own GPUs, where its exchange takes less time and where it takes as long."""

    workers: int
    exchange: float
    scaled: float  # time as bytes that were computed, (K + 1) / 2K
    whole: float  # every worker takes part in every all-reduce


class MixRow(msgspec.Struct, frozen=True, kw_only=True):
    """Mixes of different jobs, means over seeds."""

    dispatch: str
    load: float  # workers per GPU
    gpus: float  # mean
    time_sharing: Interval
    partial_alone: Interval
    together: Interval
    partial_share: Interval
    bound: Interval
    slowest: Interval  # least relative speed of a job beside others, partial, of those that found room


class RecordedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded training step as two equal jobs on the same GPUs, first-ready."""

    recording: str
    workers: int
    network: str
    tasks_ms: tuple[float, ...]  # by depth
    full_ms: float
    exchange_ms: float  # not hidden, partial
    full_exchange_ms: float  # not hidden, whole
    partial_alone: float
    time_sharing: float
    together: float
    partial_share: float
    bound: float
    relative: float  # speed of each of two as a share of one alone with whole backward passes
    fixed_mb: float  # weights, gradients and optimizer state of one job
    activations_mb: tuple[float, ...]  # by depth
    two_kept_mb: float  # both jobs on a GPU, each keeping room for its deepest task
    two_returned_mb: float  # activations given back between tasks


class ConvergenceRow(msgspec.Struct, frozen=True, kw_only=True):
    """A small network really trained to the loss that plain training ends with; medians over seeds.

    Shares of the iterations that plain training needs; a seed that is not there within three times as many counts as
    three times. `smaller` is plain training with a batch smaller by as much as partial backward passes compute less.
    """

    workers: int
    batch: int  # per worker
    iterations: int  # of plain training
    seeds: int
    partial: float
    partial_low: float  # least of the seeds
    partial_high: float
    not_reached: int  # seeds
    smaller: float
    smaller_not_reached: int
    net: float  # compute that reaching the loss takes, partial over plain


class ClaimRow(msgspec.Struct, frozen=True, kw_only=True):
    """What was found before, what is found here, and whether they agree."""

    claim: str
    expected: str
    found: str
    verdict: str  # confirmed, refuted, or the condition


class JigsawStudy(msgspec.Struct, frozen=True, kw_only=True):
    """`make reproduce NAME=jigsaw`. Gains are shares: 0.2 is 20 % more iterations per GPU time."""

    schema_version: int = 1
    command: str = "reproduce jigsaw"
    headline: str
    date: str
    machine: str
    took_s: float
    seeds: int
    quick: bool
    bounds: tuple[BoundRow, ...]
    packing: tuple[PackingRow, ...]
    ways: tuple[WayRow, ...]
    traffic: tuple[TrafficRow, ...]
    mixes: tuple[MixRow, ...]
    recorded: tuple[RecordedRow, ...]
    convergence: tuple[ConvergenceRow, ...]  # empty without PyTorch
    claims: tuple[ClaimRow, ...]


def equal_jobs(count: int, workers: int, exchange: float, *, traffic: float | None = None) -> list[IterationJob]:
    """Jobs that differ in nothing, backward twice as long as forward."""
    return [
        IterationJob.of(
            name=f"job {i}",
            workers=workers,
            forward_s=FORWARD_S,
            backward_s=BACKWARD_S,
            communication_s=exchange * (FORWARD_S + BACKWARD_S),
            traffic=traffic,
        )
        for i in range(count)
    ]


def mixed_jobs(seed: int) -> list[IterationJob]:
    """24 jobs of 1, 2, 4 or 8 workers, forward 0.1 to 0.5 s, backward twice that, exchanges 5 to 50 % of both.

    A single worker exchanges nothing.
    """
    random = np.random.default_rng(seed)
    jobs = []
    for i in range(MIX_JOBS):
        workers = int(random.choice(MIX_WORKERS))
        forward, exchange = float(random.uniform(0.1, 0.5)), float(random.uniform(*MIX_EXCHANGE))
        jobs.append(
            IterationJob.of(
                name=f"job {i}",
                workers=workers,
                forward_s=forward,
                backward_s=2 * forward,
                communication_s=3 * forward * exchange if workers > 1 else 0.0,
            )
        )
    return jobs


def bootstrap(values: Sequence[float], *, draws: int = 2000) -> Interval:
    """The mean and where 95 % of the means of resampled values lie; the same values give the same interval."""
    found = np.asarray(values, np.float64)
    which = np.random.default_rng(0).integers(0, len(found), (draws, len(found)))
    low, high = np.quantile(found[which].mean(axis=1), (0.025, 0.975))
    return Interval(mean=float(found.mean()), low=float(low), high=float(high))


def run_study(
    *,
    seeds: int = 20,
    quick: bool = False,
    progress: Progress = None,
    recordings: Sequence[Path] = (),
    network: str = "10gbit/20us",
) -> JigsawStudy:
    """All tables. `seeds`: mixes that are drawn; `quick`: fewer cells and shorter runs; `recordings`: of training steps
    that show their gradients (`foretrace record`), each a row per number of workers. Raises NotApplicableError where a
    recording does not, TraceError where it cannot be read.
    """
    from foretrace.trace.observe.machine import machine
    from reproductions.jigsaw.section import claims_of, headline_of

    began = time.perf_counter()
    workers, exchanges = ((2, 4), (0.0, 0.3)) if quick else (WORKERS, EXCHANGES)
    sharers, switches = (SHARERS[:3], SWITCHES[:5:4]) if quick else (SHARERS, SWITCHES)
    cells = [(k, c, m, s) for k in workers for c in exchanges for m in sharers for s in switches if m > 1 or not s]
    iterations = 16 if quick else 64
    trained = [(k, b) for k in TRAINED_WORKERS for b in TRAINED_BATCHES] if find_spec("torch") else []
    trained = trained[:1] if quick else trained
    total = len(DISPATCH) * (len(cells) + len(LOADS)) + len(WAYS) + len(recordings) + len(trained)
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    played = []
    for dispatch in DISPATCH:
        for cell in cells:
            played.append(packing(dispatch, *cell, iterations))
            step()
    ways = []
    for way, rules in WAYS.items():
        ways += [_way(way, rules, c, m, iterations) for c in exchanges if c for m in (2, 3)]
        step()
    mixes = []
    for dispatch in DISPATCH:
        for load in LOADS:
            mixes.append(_mix(dispatch, load, seeds, 4 if quick else 24))
            step()
    recorded = []
    for path in recordings:
        recorded += _recorded(path, network)
        step()
    convergence = []
    for k, batch in trained:
        convergence.append(_convergence(k, batch, *((1, 30) if quick else (TRAINED_SEEDS, 150))))
        step()
    study = JigsawStudy(
        headline="",
        date=time.strftime("%Y-%m-%d"),
        machine=str(machine()["cpu"]),
        took_s=time.perf_counter() - began,
        seeds=seeds,
        quick=quick,
        bounds=tuple(BoundRow(workers=k, gain=compute_bound(equal_jobs(1, k, 0.0)) - 1) for k in (2, 3, 4, 8, 16, 64)),
        packing=tuple(played),
        ways=tuple(ways),
        traffic=tuple(_traffic(k, c) for k in workers for c in exchanges if c),
        mixes=tuple(mixes),
        recorded=tuple(recorded),
        convergence=tuple(convergence),
        claims=(),
    )
    return msgspec.structs.replace(study, claims=claims_of(study), headline=headline_of(study))


def packing(dispatch: str, workers: int, exchange: float, sharers: int, switch: float, iterations: int) -> PackingRow:
    """`sharers` equal jobs on the same GPUs; switch: what turning to another job costs, as a share of a whole task."""
    rules = _with(DISPATCH[dispatch], sharers, round(switch * (FORWARD_S + BACKWARD_S) * SECOND))
    arms = four_arms(equal_jobs(sharers, workers, exchange), workers, rules, iterations=iterations)
    return PackingRow(
        dispatch=dispatch, workers=workers, exchange=exchange, sharers=sharers, switch=switch, **_gains(arms)
    )


def _way(way: str, rules: Rules, exchange: float, sharers: int, iterations: int) -> WayRow:
    arms = four_arms(equal_jobs(sharers, 4, exchange), 4, _with(rules, sharers), iterations=iterations)
    gains = _gains(arms)
    kept = {key: gains[key] for key in ("together", "partial_share", "bound")}
    return WayRow(way=way, exchange=exchange, sharers=sharers, **kept)


def _traffic(workers: int, exchange: float) -> TrafficRow:
    scaled, whole = (
        four_arms(equal_jobs(1, workers, exchange, traffic=traffic), workers, Rules(), iterations=8).partial_alone
        for traffic in (None, 1.0)
    )
    return TrafficRow(workers=workers, exchange=exchange, scaled=scaled, whole=whole)


def _mix(dispatch: str, load: float, seeds: int, iterations: int) -> MixRow:
    found: dict[str, list[float]] = {}
    for seed in range(seeds):
        jobs = mixed_jobs(seed)
        gpus = max(*MIX_WORKERS, round(sum(each.workers for each in jobs) / load))
        arms = four_arms(jobs, gpus, _with(DISPATCH[dispatch], MIX_SLOTS), iterations=iterations)
        for key, value in (_gains(arms) | {"gpus": float(gpus), "slowest": arms.slowest}).items():
            found.setdefault(key, []).append(value)
    gpus_mean = float(np.mean(found.pop("gpus")))
    return MixRow(
        dispatch=dispatch, load=load, gpus=gpus_mean, **{key: bootstrap(values) for key, values in found.items()}
    )


def _recorded(path: Path, network: str) -> list[RecordedRow]:
    from foretrace.graph.builder import build
    from foretrace.simulate.overhead import unprofiled
    from foretrace.trace.read import read

    graph = unprofiled(build(read(path), None))
    rows = []
    for workers in RECORDED_WORKERS:
        job = recorded_job(graph, workers=workers, network=network, name=path.name.partition(".")[0])
        rules = DISPATCH["first-ready"]
        gains = _gains(four_arms([job, job], workers, rules, iterations=64))
        rows.append(
            RecordedRow(
                recording=job.name,
                workers=workers,
                network=network,
                tasks_ms=tuple(each / 1e6 for each in job.task_ns),
                full_ms=job.full_ns / 1e6,
                exchange_ms=job.communication_ns / 1e6,
                full_exchange_ms=job.full_communication_ns / 1e6,
                relative=float(jigsaw_speeds([job, job], rules).relative.mean()),
                fixed_mb=job.fixed_bytes / 1e6,
                activations_mb=tuple(each / 1e6 for each in job.activation_bytes),
                two_kept_mb=need_bytes([job, job], "kept") / 1e6,
                two_returned_mb=need_bytes([job, job], "returned") / 1e6,
                **gains,
            )
        )
    return rows


def _convergence(workers: int, batch: int, seeds: int, iterations: int) -> ConvergenceRow:
    from reproductions.jigsaw.convergence import LIMIT, converge

    found = [converge(workers, batch, seed, iterations=iterations) for seed in range(seeds)]
    partial = [each.partial / each.plain if each.partial else LIMIT for each in found]
    smaller = [each.smaller / each.plain if each.smaller else LIMIT for each in found]
    middle = float(np.median(partial))
    return ConvergenceRow(
        workers=workers,
        batch=batch,
        iterations=iterations,
        seeds=seeds,
        partial=middle,
        partial_low=min(partial),
        partial_high=max(partial),
        not_reached=sum(each.partial is None for each in found),
        smaller=float(np.median(smaller)),
        smaller_not_reached=sum(each.smaller is None for each in found),
        net=middle / compute_bound(equal_jobs(1, workers, 0.0)),
    )


def _with(rules: Rules, slots: int, switch_ns: int = 0) -> Rules:
    return replace(rules, slots=slots, switch_ns=switch_ns)


def _gains(arms: Arms) -> dict[str, float]:
    names = ("partial_alone", "time_sharing", "together", "partial_share", "bound")
    return {name: float(getattr(arms, name)) for name in names}
