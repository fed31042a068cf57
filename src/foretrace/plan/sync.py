"""`plan_sync`: what policies do with workers of given speed, from their step times; and the same in processes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from statistics import median

import msgspec
import numpy as np

from foretrace.errors import ForetraceError
from foretrace.experiment.ledger import Row
from foretrace.experiment.trial import figured
from foretrace.graph.taskgraph import TaskGraph, TaskKind
from foretrace.graph.writer import StepWriter
from foretrace.simulate.breakdown import PARTS
from foretrace.simulate.timeline import simulate
from foretrace.trace.trace import LaneKind
from foretrace.training.workers.policies import POLICIES, parse
from foretrace.training.workers.virtual import SyncRun, Turn, WorkerTimes, foresee

MODEL_RANGE = 0.1  # of a run's seconds: what processes take beside steps and commits; few runs have shown it
ROUNDS, MOST_RUN_S = 2, 60.0  # of processes
OVERHEAD_S, PROBE_S, PROBED = 0.02, 0.02, 8  # a longer commit hides all that it takes; step and commits of the trial
PERIOD_STEPS, FEWEST = 20, 8  # of the slowest worker in a period; commits of a worker in a run
MOST_WORKERS, LATER = 1_024, 8  # commits after which a run may end later, to end between two that are far apart
_TIMES = re.compile(r"\d+(\.\d+)?(,\d+(\.\d+)?)*(ms|s)")


@dataclass(frozen=True, kw_only=True)
class SyncQuestion:
    """Workers, what a commit takes, and the policies to compare."""

    source: str
    step_s: tuple[float, ...]
    commit_s: float = 0.0  # of a commit until its answer is back, beside its bytes
    bytes_per_s: float = inf
    elements: int = 0  # weights of the model
    share: float = 1.0  # of the elements, that a policy sends which sends some
    policies: tuple[str, ...] = tuple(POLICIES)
    commits: int = 0  # in all, after which a run ends; 0: by steps
    steps: int = 1_000  # in all

    def __post_init__(self) -> None:
        if not 1 <= len(self.step_s) <= MOST_WORKERS:
            raise ForetraceError(f"Workers must be 1 to {MOST_WORKERS}, got {len(self.step_s)}; give a time for each.")
        if not 0 < self.share <= 1:
            raise ForetraceError(f"share must be above 0 and at most 1, got {self.share:g}; 0.01 is one in a hundred.")

    @property
    def times(self) -> WorkerTimes:
        """What workers take."""
        return WorkerTimes(step_s=self.step_s, commit_s=self.commit_s, bytes_per_s=self.bytes_per_s)


class PlannedPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What one policy does with these workers; counts are by worker."""

    policy: str
    seconds: float
    interval_s: tuple[float, float]  # of them: what processes take beside steps and commits as stated
    over_synchronous: float  # steps per second over those of synchronous training
    waited: float  # share of the workers' time
    sent_bytes: float  # by a worker for each of its steps, mean
    lead: int  # commits of the first over the last worker's, at the end
    commits: tuple[int, ...]
    steps: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class SyncPlan:
    """The answer."""

    question: SyncQuestion
    policies: tuple[PlannedPolicy, ...]
    notes: tuple[str, ...]

    @property
    def ranked(self) -> list[PlannedPolicy]:
        """Those with most steps in a second first."""
        return sorted(self.policies, key=lambda each: -each.over_synchronous)


def step_times(text: str) -> tuple[float, ...]:
    """Return seconds of each worker's step from "100,100,300ms". Raises ForetraceError for another text."""
    if not _TIMES.fullmatch(text):
        raise ForetraceError(
            f"Step times must be numbers with one unit, got {text!r}; write 100,100,300ms or 0.1,0.3s."
        )
    unit = 1e-3 if text.endswith("ms") else 1.0
    return tuple(unit * float(each) for each in text.removesuffix("s").removesuffix("m").split(","))


def fitted(policy: str, step_s: Sequence[float]) -> str:
    """Return a policy with a period that fits the workers, where it has one and none is stated."""
    if parse(policy).name != "adsp" or "period_s" in policy:
        return policy
    return f"{policy} period_s={min(PERIOD_STEPS * (max(step_s) or 1.0), 1e9):g}"


def recorded_step_times(graph: TaskGraph) -> tuple[float, ...]:
    """Return seconds of each rank's own step: without the communication that it waits in, median over steps.

    Raises ForetraceError for a recording of one rank.
    """
    if len(graph.ranks) < 2:
        raise ForetraceError("a recording must be of several workers, got one rank; write step times: 100,100,300ms.")
    line, waits = simulate(graph), PARTS.index("exposed_communication")
    steps = (line.breakdown(rank=rank).steps_ns for rank in graph.ranks)
    return tuple(float(np.median(each.sum(axis=1) - each[:, waits])) / 1e9 for each in steps)


def plan_sync(question: SyncQuestion) -> SyncPlan:
    """Foresee every policy. Raises ForetraceError for workers or a policy that cannot be."""
    ends = {"commits": question.commits} if question.commits else {"steps": question.steps}

    def played(policy: str) -> SyncRun:
        play = partial(foresee, parse(policy), question.times, elements=question.elements, share=question.share)
        run = play(**ends)
        if question.commits or min(run.commits) >= FEWEST:
            return run
        # What is under way at the end is not counted, which is much of a run of few commits.
        return play(commits=2 * FEWEST * len(question.step_s))

    pace, found = _pace(played("synchronous")), []
    for policy in question.policies:
        run = played(policy)
        steps = sum(run.steps)
        found.append(
            PlannedPolicy(
                policy=policy, seconds=run.ended_s, interval_s=_around(run.ended_s)[1:], commits=run.commits,
                waited=sum(run.waited_s) / (run.ended_s * len(question.step_s)), sent_bytes=sum(run.sent_bytes) / steps,
                over_synchronous=_pace(run) / pace, lead=max(run.commits) - min(run.commits), steps=run.steps,
            )
        )  # fmt: skip
    return SyncPlan(question=question, policies=tuple(found), notes=tuple(_notes(question)))


def _pace(run: SyncRun) -> float:
    """Return steps per second of all workers, of each between its first commit and its last: a run ends at no whole
    number of rounds for all.
    """
    turns: dict[int, list[Turn]] = {}
    for turn in run.turns:
        turns.setdefault(turn.worker, []).append(turn)
    pace = 0.0
    for first, *others in turns.values():
        if others:
            pace += sum(turn.steps for turn in others) / (others[-1].arrived_s - first.arrived_s)
        else:
            pace += first.steps / run.ended_s
    return pace


def _notes(question: SyncQuestion) -> list[str]:
    notes = ["More steps in a second are not always a loss that falls sooner: stale and local updates may need more."]
    kinds = [parse(each) for each in question.policies]
    if any(each.name in ("adsp", "adacomm") for each in kinds):
        notes.append("What adsp and adacomm learn from losses is not foreseen: adsp commits once a period throughout.")
    if question.share == 1 and any(each.sparse for each in kinds):
        notes.append(
            "How much gaia and dgc send is not in step times: all of the weights are assumed, unless a share is stated."
        )
    if not _TIMES.fullmatch(question.source):
        notes.append("Step times are medians of the recorded steps without exposed communication; ranges leave out how "
                     "steps differ.")  # fmt: skip
    return notes


def lower(run: SyncRun, times: WorkerTimes) -> TaskGraph:
    """Return the turns of a run as a task graph: a lane for each worker and one for its link, ended where the run
    ended.
    """
    writer = StepWriter("workers", ranks=len(times.step_s))
    for each in range(len(times.step_s)):
        writer.on(LaneKind.GPU, f"worker {each}", each)
    sent: list[int] = []
    for turn in run.turns:
        worker = writer.on(LaneKind.GPU, f"worker {turn.worker}")
        link = writer.on(LaneKind.LINK, f"link of {turn.worker}", turn.worker)
        begin, ready, got = round(turn.begin_s * 1e9), round(turn.ready_s * 1e9), list[int]()
        if turn.released_by >= 0:
            answer_ns = begin - round(run.turns[turn.released_by].arrived_s * 1e9)
            got = [writer.behind([sent[turn.released_by]], TaskKind.COPY, link, "answer", answer_ns)]
        train = writer.behind(got, TaskKind.KERNEL, worker, "steps", ready - begin)
        sent.append(writer.behind([train], TaskKind.COPY, link, "commit", round(turn.arrived_s * 1e9) - ready))
    return writer.ended()


class TriedPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """A policy in processes, beside the virtual clock with the same gradients; seconds until the last commit."""

    policy: str
    commit_s: float  # of a commit, as foreseen: as stated, or what one takes in processes where that is longer
    foreseen_s: float
    measured_s: float  # median over rounds
    rounds_s: tuple[float, ...]
    error: float  # foreseen over measured, less 1
    foreseen_commits: tuple[int, ...]
    commits: tuple[int, ...]  # counted, by worker
    same_model: bool  # as on the virtual clock, to the bit


def try_policies(question: SyncQuestion, tell: Callable[[str, float], None] | None = None) -> tuple[TriedPolicy, ...]:
    """Run every policy in processes with a small real model and steps of the stated length, after foreseeing it.

    A run ends with a commit that is followed by the longest pause on the virtual clock, so that it is no tie. Where a
    stated commit may be shorter than choosing, packing, sockets and the server take, that is measured first. Where no
    number of commits is asked for, slow workers make fewer. Raises ForetraceError where processes cannot be run, and
    for a run that is too long to be waited for.
    """
    from hashlib import sha256

    import torch

    from foretrace.experiment.unlike import UnlikeSetup, run
    from foretrace.training.workers.virtual import train
    from foretrace.zoo.partitioned import PartitionedJob

    workers, commit_s = len(question.step_s), question.commit_s
    job, found = PartitionedJob(workers=workers), []
    least, most = question.commits or 2 * workers, question.commits or 12 * workers
    times = WorkerTimes(step_s=question.step_s, commit_s=commit_s)
    setups = []
    for policy in question.policies:
        wanted = len(foresee(parse(policy), times, commits=most, until_s=MOST_RUN_S).turns)
        setups.append(UnlikeSetup(policy=policy, step_s=question.step_s, commit_s=commit_s, commits=max(wanted, 1)))
        if wanted < least:
            raise ForetraceError(
                f"a run of {policy} must make {least} commits within {MOST_RUN_S:g} s, got {wanted}; give fewer "
                "`commits=`, or shorter steps."
            )
    if commit_s < OVERHEAD_S:
        trial = UnlikeSetup(policy="synchronous", step_s=(PROBE_S,) * workers, commits=PROBED * workers)
        commit_s = max(commit_s, run(trial)[-1].arrived_s[-1] / PROBED - PROBE_S)
        times = replace(times, commit_s=commit_s)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the processes: the bits of a sum depend on it
    for number, setup in enumerate(setups):
        policy, wanted = setup.policy, setup.commits
        if tell is not None:
            tell(f"running {policy}", number / len(setups))
        longer = train(parse(policy), job.replicas(), times, commits=wanted + LATER).turns
        pauses = [after.arrived_s - before.arrived_s
                  for before, after in zip(longer[wanted - 1 :], longer[wanted:], strict=False)]  # fmt: skip
        commits = wanted + int(np.argmax(pauses))
        foreseen = train(parse(policy), job.replicas(), times, commits=commits)
        servers = [run(msgspec.structs.replace(setup, commits=commits))[-1] for _ in range(ROUNDS)]
        rounds_s = tuple(each.arrived_s[-1] for each in servers)
        found.append(
            TriedPolicy(
                policy=policy, commit_s=commit_s, foreseen_s=foreseen.ended_s, measured_s=median(rounds_s),
                rounds_s=rounds_s, error=foreseen.ended_s / median(rounds_s) - 1, foreseen_commits=foreseen.commits,
                commits=servers[-1].commits,
                same_model=servers[-1].state == sha256(foreseen.server.model.tobytes()).hexdigest(),
            )
        )  # fmt: skip
    torch.set_num_threads(threads)
    return tuple(found)


def rows_of(question: SyncQuestion, tried: Sequence[TriedPolicy]) -> tuple[Row, ...]:
    """Return a row of the ledger per policy: seconds until so many commits."""
    workers = ":".join(f"{each / min(question.step_s):g}" for each in question.step_s)
    return tuple(
        figured(_around(each.foreseen_s), each.rounds_s).row(
            f"plan-sync {each.policy}", model="clusters", size=f"{len(question.step_s)} workers, {question.source}",
            parameters={
                "policy": each.policy, "workers": workers, "commit_s": each.commit_s,
                "foreseen_commits": list(each.foreseen_commits), "commits": list(each.commits),
                "same_model": each.same_model,
            },
        )
        for each in tried
    )  # fmt: skip


def _around(seconds: float) -> tuple[float, float, float]:
    """Return seconds with the range of what processes take beside."""
    return seconds, (1 - MODEL_RANGE) * seconds, (1 + MODEL_RANGE) * seconds
