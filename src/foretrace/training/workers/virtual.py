"""Workers on a virtual clock: real gradients, or none where only times and bytes are asked for.

A turn of a worker is its steps and the way of its commit to the server. The server takes no time. What happens at the
same instant happens in the order of the workers, so the same seed gives the same bits.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf, isfinite

import numpy as np

from foretrace.arrays import Float32
from foretrace.errors import ForetraceError
from foretrace.training.workers.policy import (
    NUMBER,
    Commit,
    Server,
    SyncAnswer,
    SyncPolicy,
    SyncWorker,
    TrainedReplica,
    message_bytes,
)

Evaluate = Callable[[Float32, Float32], float]  # loss of weights and buffers


@dataclass(frozen=True, kw_only=True)
class WorkerTimes:
    """What workers take: seconds of a step of each, and of a commit until its answer is back."""

    step_s: tuple[float, ...]  # inf: it never commits
    commit_s: float = 0.0  # beside its bytes; half of it on the way there
    bytes_per_s: float = inf
    dies_s: Mapping[int, float] = field(default_factory=dict)  # when a worker ends, and the server sees it

    def __post_init__(self) -> None:
        if not self.step_s or min(self.step_s) <= 0:
            times = ", ".join(f"{each:g}" for each in self.step_s) or "none"
            raise ForetraceError(f"Seconds of a step must be above 0, got {times}; give a time for each worker.")
        if not 0 <= self.commit_s < inf or self.bytes_per_s <= 0:
            raise ForetraceError(
                f"A commit must take 0 seconds or more and carry bytes, got {self.commit_s:g} s at "
                f"{self.bytes_per_s:g} bytes per second; give a finite time."
            )

    def way_s(self, nbytes: int) -> float:
        """Return seconds of one way of a message."""
        return self.commit_s / 2 + nbytes / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Steps of a worker and their commit; times in seconds since the run began."""

    worker: int
    steps: int
    begin_s: float
    ready_s: float  # when the last step ended
    arrived_s: float  # at the server
    answered_bytes: int  # of the answer that it began with
    released_by: int  # the turn whose arrival let it begin; -1: it began with the run


@dataclass(frozen=True, kw_only=True)
class SyncRun:
    """What happened. Bytes and counts are by worker."""

    turns: tuple[Turn, ...]  # in the order of their arrival
    reached_s: float | None  # when the loss was what was wanted
    commits: tuple[int, ...]
    steps: tuple[int, ...]
    sent_bytes: tuple[int, ...]
    answered_bytes: tuple[int, ...]
    waited_s: tuple[float, ...]  # for others; its own exchanges are not waiting
    server: Server
    workers: tuple[SyncWorker, ...] = ()
    losses: tuple[tuple[float, float], ...] = ()  # seconds and loss of the shared model

    @property
    def ended_s(self) -> float:
        """When the last commit arrived."""
        return self.turns[-1].arrived_s if self.turns else 0.0


def train(
    policy: SyncPolicy, replicas: Sequence[TrainedReplica], times: WorkerTimes, *, weights: Sequence[float] = (),
    until_s: float = inf, commits: int = 0, steps: int = 0, evaluate: Evaluate | None = None, every_s: float = 0.0,
    target: float = -inf, serve: Callable[..., Server] = Server,
) -> SyncRun:  # fmt: skip
    """Train on the virtual clock until one of the ends: a time, so many commits or steps in all, a loss.

    `evaluate` gives the loss of the shared model, at most every `every_s`; `serve` makes the server. Raises
    ForetraceError where nobody could ever continue, and where there is no end.
    """
    server = serve(policy, replicas[0].flat, weights=weights or [1.0] * len(replicas))
    workers = tuple(SyncWorker(number, policy, each) for number, each in enumerate(replicas))
    losses: list[tuple[float, float]] = []
    next_s = 0.0

    def reached(now_s: float) -> bool:
        nonlocal next_s
        if evaluate is None or now_s < next_s:
            return False
        losses.append((now_s, evaluate(server.model, server.buffers)))
        next_s = now_s + every_s
        return losses[-1][1] <= target

    ends = until_s, commits, steps, isfinite(target)
    run = _play(server, [worker.run for worker in workers], times, ends, reached)
    return replace(run, workers=workers, losses=tuple(losses))


def foresee(
    policy: SyncPolicy, times: WorkerTimes, *, elements: int = 0, share: float = 1.0, until_s: float = inf,
    commits: int = 0, steps: int = 0,
) -> SyncRun:  # fmt: skip
    """Return the same without gradients: what a run of this policy takes and sends.

    `elements` are the model's; a sparse policy sends a `share` of them, chosen by each worker on its own. What a policy
    learns from losses it does not learn here. Errors as of `train`.
    """
    workers = len(times.step_s)
    server = _Foreseen(policy, elements, workers, share)
    sent = message_bytes(elements, ceil(share * elements)) if policy.sparse else NUMBER * elements
    nothing = np.zeros(0, np.float32)

    def turn(worker: int) -> Callable[[SyncAnswer], Commit]:
        return lambda answer: Commit(worker=worker, steps=answer.steps, nbytes=sent, values=nothing)

    return _play(server, [turn(each) for each in range(workers)], times, (until_s, commits, steps, False))


class _Foreseen(Server):
    """A server without a model."""

    def __init__(self, policy: SyncPolicy, elements: int, workers: int, share: float) -> None:
        super().__init__(policy, np.zeros(0, np.float32), weights=[1.0] * workers)
        changed = 1 - (1 - share) ** workers if policy.sparse else 1.0
        self._nbytes = message_bytes(elements, ceil(changed * elements)) if policy.sparse else NUMBER * elements

    def _fold(self) -> None:
        self._new.clear()

    def _answer(self, worker: int, now_s: float) -> SyncAnswer:
        return SyncAnswer(steps=self.pace.steps(worker, now_s), nbytes=self._nbytes)


def _play(
    server: Server, run: Sequence[Callable[[SyncAnswer], Commit]], times: WorkerTimes,
    ends: tuple[float, int, int, bool], reached: Callable[[float], bool] = lambda now_s: False,
) -> SyncRun:  # fmt: skip
    until_s, commits, steps, wanted = ends
    if len(times.step_s) != len(run):
        raise ForetraceError(f"Give seconds of a step for each of {len(run)} workers, got {len(times.step_s)}.")
    if not (isfinite(until_s) or commits or steps or wanted):
        raise ForetraceError("A run must have an end: a time, a number of commits or of steps, or a loss.")
    events: list[tuple[float, int, Turn, Commit]] = []  # commits on their way
    turns: list[Turn] = []
    arrived = [0.0] * len(run)
    waited = [0.0] * len(run)
    exchange = [0.0] * len(run)
    dies = sorted((when, worker) for worker, when in times.dies_s.items())

    def answered(answers: Mapping[int, SyncAnswer], now_s: float, by: int) -> None:
        for worker, answer in answers.items():
            down_s = times.way_s(answer.nbytes) if by >= 0 else 0.0
            if by >= 0:
                waited[worker] += now_s - arrived[worker]
                exchange[worker] += down_s
            begin_s = now_s + down_s
            ready_s = begin_s + answer.steps * times.step_s[worker]
            if not isfinite(ready_s) or ready_s > times.dies_s.get(worker, inf):
                continue
            took_s = exchange[worker]
            commit = replace(run[worker](answer), compute_s=ready_s - begin_s, exchange_s=took_s)
            up_s = times.way_s(commit.nbytes)
            exchange[worker] = up_s
            turn = Turn(worker=worker, steps=answer.steps, begin_s=begin_s, ready_s=ready_s, arrived_s=ready_s + up_s,
                        answered_bytes=answer.nbytes, released_by=by)  # fmt: skip
            heapq.heappush(events, (turn.arrived_s, worker, turn, commit))

    answered(server.begin(), 0.0, -1)
    reached_s = 0.0 if reached(0.0) else None
    while events or dies:
        if dies and (not events or dies[0][0] < events[0][0]):
            when, worker = dies.pop(0)
            if when > until_s:
                break
            answered(server.leave(worker, when), when, len(turns) - 1)
            continue
        now_s, worker, turn, commit = heapq.heappop(events)
        if now_s > until_s:
            break
        turns.append(turn)
        arrived[worker] = now_s
        answers = server.commit(commit, now_s)
        if reached_s is None and reached(now_s):
            reached_s = now_s
        if reached_s is not None or (commits and len(turns) >= commits) or (steps and sum(server.steps) >= steps):
            break
        answered(answers, now_s, len(turns) - 1)
    else:
        # Else all workers have gone, or are busy beyond the end.
        stuck = sorted(server.live - set(server.waiting()))
        if stuck and (server.waiting() or not isfinite(until_s)):
            raise ForetraceError(
                f"worker {stuck[0]} never commits, and worker {server.waiting()[0]} waits for it; leave it out, or "
                "choose a policy that never waits, as adsp."
                if server.waiting() else f"worker {stuck[0]} never commits, and no other is left; leave it out."
            )  # fmt: skip
    return SyncRun(
        turns=tuple(turns), reached_s=reached_s, commits=tuple(server.commits),
        steps=tuple(server.steps), sent_bytes=tuple(server.sent_bytes), answered_bytes=tuple(server.answered_bytes),
        waited_s=tuple(waited), server=server,
    )  # fmt: skip
