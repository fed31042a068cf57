"""Shape, calibrate, record one worker, predict, and only then run the distributed arms, interleaved."""

from __future__ import annotations

import shlex
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import ceil, lcm
from pathlib import Path
from statistics import median
from typing import Any

from msgspec import structs

from foretrace import executor
from foretrace.cost.network.network import CollectiveKind
from foretrace.deadline import ending
from foretrace.errors import ForetraceError
from foretrace.experiment import cores
from foretrace.experiment.links import netns
from foretrace.experiment.links.arms import (
    buckets_of,
    forget,
    is_emulated,
    make,
    record,
    run_steps,
    training_of,
    try_exchanges,
)
from foretrace.experiment.links.calibrate import LinkCalibration, calibrate, title
from foretrace.experiment.links.hosts import StepTogether, step_together, together
from foretrace.experiment.links.job import LinkJob, LinkOutcome, MeasuredLink
from foretrace.experiment.links.judge import Ran, judge, summed
from foretrace.experiment.messages import Make, Record, Recorded, RunSteps, Setup, TimedSteps, TryExchanges
from foretrace.experiment.processes import PATIENCE_S, AskedCall, Workers, alone
from foretrace.experiment.statistics import paired_ratio
from foretrace.experiment.trial import in_turns, means, versions
from foretrace.graph import store
from foretrace.graph.edit import scale
from foretrace.graph.taskgraph import TaskGraph
from foretrace.hardware.cluster import parse_link
from foretrace.simulate.timeline import simulate
from foretrace.techniques.arguments import parse_all
from foretrace.techniques.compute.batching import with_facts
from foretrace.techniques.registry import technique
from foretrace.techniques.whatif import WhatIf, whatif

Tell = Callable[[str, float], None]
Find = Callable[[TaskGraph, Path], Sequence[tuple[str, ...]]]

LEAST_ROUNDS, MOST_ROUNDS = 6, 24
MOST_STEPS = 20  # of a block
_FIRST = 3  # steps of the first round: buckets are formed again after its first, so nothing of it counts
LEAST_BLOCK_S = 0.8  # an interruption of a few milliseconds is 1 % of that
_RECORDING_S = 240.0  # for the worker alone, at most
_GRAPH = "alone.graph"  # what is kept of the worker alone
_FOR_EVER = 10**9  # steps
_TOGETHER_S = 5.0  # of steps that all workers make at the same time, before anything is predicted
_LEAST_TOGETHER, _MOST_TOGETHER = 10, 40
_LEAST_PAUSE_S, _MOST_PAUSE_S = 5e-3, 0.3  # of half of them
_BASELINE, _AGAIN = "baseline", "again"

# What techniques send beside all-reduce, so that the link is calibrated for it.
KINDS: dict[str, tuple[CollectiveKind, ...]] = {
    "fully-sharded": (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER),
    "partial-backprop": (CollectiveKind.BROADCAST,),
    "local-steps": (CollectiveKind.BROADCAST,),
    "kfac": (CollectiveKind.BROADCAST,),
    "hierarchical-allreduce": (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER),
}
DENSE = ("fp16", "bf16", "powersgd")  # methods of gradient-compression that are summed by all-reduce


@dataclass(frozen=True, kw_only=True)
class _Planned:
    """An arm before it runs."""

    name: str
    used: tuple[str, ...]  # techniques with the measured table as their network
    shown: tuple[str, ...]  # with the link as the user wrote it
    predicted: WhatIf | None  # None for a worker alone
    step_s: float  # as predicted


@dataclass(frozen=True, kw_only=True)
class Rig:
    """Workers that are up on a link that was measured."""

    workers: Workers
    measured: LinkCalibration


@contextmanager
def rig_for(jobs: Sequence[LinkJob], tell: Tell | None = None) -> Iterator[Rig]:
    """Provide a rig for jobs of the same workers and link, its collectives measured; removed with the block.

    Raises ForetraceError where the machine cannot have one, or the link varies too much.
    """
    say: Tell = tell or (lambda what, share: None)
    job, link = jobs[0], parse_link(jobs[0].link)
    with ExitStack() as stack:
        folder = Path(job.keep or stack.enter_context(tempfile.TemporaryDirectory(prefix="foretrace-rig-")))
        folder.mkdir(parents=True, exist_ok=True)
        say("making the network", 0.0)
        net = stack.enter_context(netns.made(job.workers, link))
        workers = stack.enter_context(netns.running(net, threads=job.threads))
        say("calibrating the link", 0.05)
        measured = calibrate(
            workers, link, folder / "network.json", name=title(job.workers, job.link),
            kinds=tuple(dict.fromkeys(kind for each in jobs for kind in _kinds(each))),
            hosts=any(not is_emulated(each.work) for each in jobs),
        )  # fmt: skip
        yield Rig(workers=workers, measured=measured)


def verify(job: LinkJob, tell: Tell | None = None, on: Rig | None = None, find: Find | None = None) -> LinkOutcome:
    """Run one session: all arms of a job, each predicted from one worker's recording before it runs.

    `on` is a rig that is up, of this job's workers and link; without one it is made, and nothing is left behind. `find`
    names further arms from the graph of the worker alone and the table of the link, before any arm ran.
    Raises ForetraceError where the machine cannot have a rig, NotApplicableError where a technique does not fit, and
    WorkerError for a bug of ours in a worker.
    """
    began = time.monotonic()
    say: Tell = tell or (lambda what, share: None)
    check(job if find is None else structs.replace(job, arms=(job.against,)))
    with ExitStack() as stack:
        folder = Path(job.keep or stack.enter_context(tempfile.TemporaryDirectory(prefix="foretrace-rig-")))
        folder.mkdir(parents=True, exist_ok=True)
        rig = on or stack.enter_context(rig_for([job], say))
        workers, measured, table = rig.workers, rig.measured, rig.measured.file
        computes = not is_emulated(job.work)
        say("recording one worker alone", 0.25)
        graph, recorded = _recorded(job, folder)
        recorded_s = simulate(graph).step_time_s
        graph = _exchanges(workers, job, graph)
        if computes:
            say("stepping together", 0.32)
            likely = job.arms or (job.against,)  # before `find` has named any
            waits_s = [_planned("", texts, job, table, graph, recorded_s).step_s - recorded_s for texts in likely]
            graph = _together(workers, job, graph, median(waits_s))
            store.save(graph, folder / _GRAPH)
        say("predicting", 0.35)
        alone_s = simulate(graph).step_time_s
        if find is not None:
            job = structs.replace(job, arms=(*job.arms, *find(graph, table)))
        arms = [_planned(f"arm {i}", texts, job, table, graph, alone_s) for i, texts in enumerate(job.arms)]
        baseline = _planned(_BASELINE, job.against, job, table, graph, alone_s)
        say("making the arms", 0.4)
        _make(workers, job, [baseline, *arms])
        turns = _turns(job, [baseline, replace(baseline, name=_AGAIN), *arms])
        needed = job.workers * job.threads if computes else 0  # layers that sleep leave the cores to others
        free = [cores.wait_for_cores(needed, min(cores.PATIENCE_S, job.seconds))]
        blocks = _run(workers, turns, lambda share: say("running the arms", 0.45 + 0.5 * share))
        buckets = [_buckets(workers, arm) for arm in arms]
        workers.ask(forget, None, "forgetting the arms")
        free.append(cores.free_cores(most=needed))
        before, again = summed(blocks[_BASELINE]), summed(blocks[_AGAIN])
        baseline_s, foretold_s = baseline.step_s, [arm.step_s for arm in arms]
        if computes and not job.against:
            # Machines drift: what was recorded minutes ago is predicted again for the speed of the worker alone in the
            # arms' own minutes. The arms that are predicted have no part in it.
            rounds = (*blocks[_BASELINE], *blocks[_AGAIN])
            graph = _at_speed(graph, median(each.wall_s for round_ in rounds for each in round_))
            arms = [_planned(f"arm {i}", texts, job, table, graph, alone_s) for i, texts in enumerate(job.arms)]
            baseline_s = median(means(before.blocks_s, again.blocks_s))
    ran = [
        Ran(
            techniques=arm.shown,
            used=parse_all(arm.used),
            predicted=arm.predicted,
            blocks=blocks[arm.name],
            buckets=own,
            foretold_s=before_s,
        )
        for arm, own, before_s in zip(arms, buckets, foretold_s, strict=True)
        if arm.predicted is not None
    ]
    same = paired_ratio(before.blocks_s, again.blocks_s, seed=job.seed)
    points = next(each for each in measured.table.series if each.kind == "all-reduce")
    return LinkOutcome(
        job=job,
        link=MeasuredLink(
            mbit_s=measured.mbit_s, spread=measured.spread, nbytes=points.nbytes, seconds=points.seconds,
            hosts=dict(measured.table.hosts),
        ),
        recorded_s=recorded_s,
        baseline_predicted_s=baseline_s,
        before=before,
        again=again,
        same=same,
        arms=tuple(judge(job, each, baseline_s, before, again, uncertain=cores.taken(needed, free)) for each in ran),
        rounds=len(blocks[_BASELINE]),
        steps_per_block=max(turns.steps[arm.name] for arm in arms),
        operators_timed=recorded.operators,
        samples=training_of(Setup(work=job.work, size=job.size)).batch_size,
        machine=dict(graph.info.recording.get("machine") or {}),
        versions=versions(),
        allocator=dict(cores.ALLOCATOR),
        notes=(*recorded.notes, *graph.info.notes),
        took_s=time.monotonic() - began,
    )  # fmt: skip


def check(job: LinkJob) -> None:
    """Raise ForetraceError for what can be seen to be wrong before anything is made."""
    ending("seconds", job.seconds, 30)
    netns.check_workers(job.workers)
    netns.check_link(parse_link(job.link))
    if not job.arms:
        raise ForetraceError('no technique to verify; give one, as in "data-parallel bucket_mb=4".')
    if not is_emulated(job.work) and job.workers > executor.cores():
        raise ForetraceError(
            f"{job.workers} workers compute on {executor.cores()} cores: their steps would tell of the scheduler, not "
            "of the network; use `emulate=`, or at most as many workers as cores."
        )
    for texts in (*job.arms, job.against):
        for each in parse_all(completed(texts, job.workers, job.link)):
            if not each.can_apply():
                raise each.refuse(each.not_applied or "it can be predicted but not applied.")
    training_of(Setup(work=job.work, size=job.size))


def completed(texts: Sequence[str], workers: int, network: str) -> tuple[str, ...]:
    """Return techniques with the rig's workers and network filled in where they take them and the user left them out.

    Raises ForetraceError for techniques that state another number of workers or a network of their own.
    """
    return tuple(_completed(text, workers, network) for text in texts)


def _completed(text: str, workers: int, network: str) -> str:
    words = shlex.split(text)
    if not words:
        return text
    takes = {each.name for each in technique(words[0]).parameters()}
    given = dict(word.partition("=")[::2] for word in words[1:])
    if "network" in given:
        raise ForetraceError(f"{text!r}: the rig's link is the network; leave network= out and give `link=`.")
    if given.get("workers", str(workers)) != str(workers):
        raise ForetraceError(f"{text!r}: the rig has {workers} workers; leave workers= out.")
    added = {"workers": str(workers), "network": network}
    words += [f"{key}={value}" for key, value in added.items() if key in takes and key not in given]
    return shlex.join(words)


def _kinds(job: LinkJob) -> tuple[CollectiveKind, ...]:
    """Return what the link is calibrated for."""
    words = [shlex.split(text) for texts in (*job.arms, job.against) for text in texts]
    found = [CollectiveKind.ALL_REDUCE, *(kind for name, *_ in words for kind in KINDS.get(name, ()))]
    texts = [text for each in words for text in each]
    if any(text.startswith("updates=") or ("method=" in text and not text.endswith(DENSE)) for text in texts):
        found.append(CollectiveKind.ALL_GATHER)
    if any(True for _ in training_of(Setup(work=job.work, size=job.size)).model.buffers()):
        found.append(CollectiveKind.BROADCAST)  # of buffers such as running means
    return tuple(dict.fromkeys(found))


def _recorded(job: LinkJob, folder: Path) -> tuple[TaskGraph, Recorded]:
    """Return the graph of one worker alone, and how its recording went."""
    file = folder / _GRAPH
    request = Record(
        setup=Setup(work=job.work, size=job.size, seed=job.seed),
        arms=tuple(completed(texts, job.workers, job.link) for texts in (*job.arms, job.against)),
        threads=job.threads,
        graph=str(file),
    )
    # Real computation is recorded beside other workers that compute: they share memory and caches on this machine,
    # which is no matter of the network. Layers that sleep share nothing.
    beside = 0 if is_emulated(job.work) else job.workers - 1
    with alone(1 + beside, threads=job.threads) as workers:
        calls: list[AskedCall[Any]] = [AskedCall(record, request)]
        if beside:
            workers.ask(make, Make(name=_BASELINE, setup=request.setup), "making the training")
            endless = RunSteps(name=_BASELINE, discarded=0, steps=_FOR_EVER, together=False)
            calls += [AskedCall(run_steps, endless)] * beside
        (answer,) = workers.ask_each(calls, "recording one worker", patience_s=_RECORDING_S + PATIENCE_S, first=True)
    return store.load(file), answer


def _exchanges(workers: Workers, job: LinkJob, graph: TaskGraph) -> TaskGraph:
    """Return the graph with what workers send and do around exchanges of parameters, tried by all at the same time."""
    setup = Setup(work=job.work, size=job.size, seed=job.seed)
    for texts in (*job.arms, job.against):
        for each in parse_all(completed(texts, job.workers, job.link)):
            if each.tries:
                seconds = 10 * each.tries * simulate(graph).step_time_s
                request = TryExchanges(setup=setup, technique=str(each))
                tried = workers.ask(try_exchanges, request, "trying exchanges", seconds=seconds)
                graph = each.with_tried(graph, tried)
    return graph


def _together(workers: Workers, job: LinkJob, graph: TaskGraph, wait_s: float) -> TaskGraph:
    """Return the graph at the speed of all workers that step at the same time, each by itself, with what they differ
    by.

    `wait_s` is how long they will wait for messages, about, after which caches are cold.
    """
    pause_s = min(max(wait_s, _LEAST_PAUSE_S), _MOST_PAUSE_S)
    step_s = simulate(graph).step_time_s
    steps = max(min(ceil(_TOGETHER_S / step_s), _MOST_TOGETHER), _LEAST_TOGETHER)
    request = StepTogether(setup=Setup(work=job.work, size=job.size, seed=job.seed), steps=steps, pause_s=pause_s)
    seconds = 10 * steps * (2 * step_s + pause_s)
    found_s, facts = together(workers.ask(step_together, request, "stepping together", seconds=seconds))
    return _at_speed(with_facts(graph, together=facts), found_s)


def _at_speed(graph: TaskGraph, step_s: float) -> TaskGraph:
    """Return the graph of a worker that computes as fast as lets its step take so long."""
    return scale(graph, ~graph.gone, step_s / simulate(graph).step_time_s)


def _planned(name: str, texts: Sequence[str], job: LinkJob, table: Path, graph: TaskGraph, alone_s: float) -> _Planned:
    used = completed(texts, job.workers, str(table))
    shown = tuple(str(each) for each in parse_all(completed(texts, job.workers, job.link)))
    predicted = whatif(graph, parse_all(used)) if used else None
    step_s = predicted.after_s if predicted else alone_s
    return _Planned(name=name, used=used, shown=shown, predicted=predicted, step_s=step_s)


def _make(workers: Workers, job: LinkJob, arms: Sequence[_Planned]) -> None:
    """Make every arm on every worker; the baseline twice, as two copies."""
    for arm in arms:
        setup = Setup(work=job.work, size=job.size, seed=job.seed, techniques=arm.used)
        for name in (arm.name, _AGAIN) if arm.name == _BASELINE else (arm.name,):
            workers.ask(make, Make(name=name, setup=setup), f"making {_said(arm)}")


@dataclass(frozen=True, kw_only=True)
class _Turns:
    """How the arms take turns: blocks of `steps` steps behind a discarded one."""

    order: tuple[_Planned, ...]
    steps: dict[str, int]
    rounds: int
    seconds: float  # a round that would not end within is not begun, once LEAST_ROUNDS are done


def _turns(job: LinkJob, arms: Sequence[_Planned]) -> _Turns:
    """Return blocks of LEAST_BLOCK_S, at least LEAST_ROUNDS of each arm, more where `seconds` allow for them.

    Where they do not suffice for the least, blocks become shorter, down to a single period of the arm's techniques.
    """
    periods = {arm.name: lcm(*(each.period for each in parse_all(arm.used))) for arm in arms}
    steps = {
        arm.name: _whole(min(ceil(LEAST_BLOCK_S / max(arm.step_s, 1e-4)), MOST_STEPS), periods[arm.name])
        for arm in arms
    }
    left = job.seconds - sum(_FIRST * arm.step_s for arm in arms)

    def round_s() -> float:
        return sum(arm.step_s * (1 + steps[arm.name]) for arm in arms)

    while any(steps[name] > each for name, each in periods.items()) and LEAST_ROUNDS * round_s() > left:
        steps = {name: max(count - periods[name], periods[name]) for name, count in steps.items()}
    rounds = min(max(int(left / round_s()), LEAST_ROUNDS), MOST_ROUNDS)
    return _Turns(order=tuple(arms), steps=steps, rounds=rounds, seconds=job.seconds)


def _whole(steps: int, period: int) -> int:
    """Return so many steps or a few more: whole periods."""
    return -(-steps // period) * period


def _run(workers: Workers, turns: _Turns, tell: Callable[[float], None]) -> dict[str, list[list[TimedSteps]]]:
    """Return blocks by arm, round and worker."""
    arms = {arm.name: arm for arm in turns.order}

    def block(name: str, number: int) -> list[TimedSteps]:
        arm = arms[name]
        steps, discarded = (turns.steps[arm.name], 1) if number >= 0 else (1, _FIRST - 1)
        request = RunSteps(name=arm.name, discarded=discarded, steps=steps, together=True)
        return workers.ask(run_steps, request, f"running {_said(arm)}", seconds=10 * (steps + 2) * arm.step_s)

    return in_turns(
        arms, block, turns.rounds, warm_up=1, least=LEAST_ROUNDS,
        seconds=turns.seconds, tell=tell,
    )  # fmt: skip


def _buckets(workers: Workers, arm: _Planned) -> tuple[int, ...]:
    first = workers.ask(buckets_of, arm.name, f"asking for the buckets of {_said(arm)}")[0]
    return first.rebuilt or first.first


def _said(arm: _Planned) -> str:
    return " + ".join(arm.shown) or "one worker alone"
