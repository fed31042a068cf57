"""Workers of unlike speed as processes: a server role and its workers over gloo, each step as long as is stated.

A worker trains a real model on its samples and sleeps for what is left of a step. A commit arrives half of what it is
to take after the last step ended, and its answer the other half after the server gave it: choosing elements, packing,
sockets and the server's own work are part of that time, not beside it (clocks of processes on one machine are one). So
the machine's own speed does not matter, and what is measured is what the policy does with such workers.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from math import inf
from threading import Lock, Thread
from typing import Any

import msgspec
import torch.distributed as dist

from foretrace.errors import ForetraceError
from foretrace.experiment.messages import Worker as Process
from foretrace.experiment.processes import AskedCall, together
from foretrace.training.workers.policies import parse
from foretrace.training.workers.policy import Server, SyncAnswer, SyncWorker
from foretrace.zoo.partitioned import PartitionedJob

MOST_WORKERS, STEPS_S, PATIENCE_S = 16, (1e-3, 10.0), 600.0


class UnlikeSetup(msgspec.Struct, frozen=True, kw_only=True):
    """A training of workers of unlike speed, which a server keeps together by a policy.

    Raises ForetraceError for one that cannot be run.
    """

    policy: str  # as written
    step_s: tuple[float, ...]  # of each worker
    commit_s: float = 0.0  # from the end of a worker's last step until it has the answer
    commits: int  # in all, after which the run ends
    dies_s: dict[int, float] = {}  # when a worker's process is ended

    def __post_init__(self) -> None:
        workers = len(self.step_s)
        (least, most), steps = STEPS_S, self.step_s or (0.0,)
        if not 1 <= workers <= MOST_WORKERS or not least <= min(steps) <= max(steps) <= most:
            raise ForetraceError(
                f"Processes must be 1 to {MOST_WORKERS} workers with steps of {least:g} to {most:g} s, got {workers} "
                f"with {min(steps):g} to {max(steps):g} s; leave out `run=`, or give other times."
            )
        if self.commits < 1:
            raise ForetraceError(f"A run of processes must end after 1 commit or more, got {self.commits}.")
        parse(self.policy)
        if gone := [each for each in self.dies_s if not 0 <= each < workers]:
            raise ForetraceError(f"worker {gone[0]} cannot die: workers are 0 to {workers - 1}.")


class RanWorker(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker did: its steps, and the SHA-256 of the model as it knows it; of a server, by worker, all it saw."""

    steps: tuple[int, ...]
    state: str
    commits: tuple[int, ...] = ()
    sent_bytes: tuple[int, ...] = ()
    arrived_s: tuple[float, ...] = ()  # of every commit
    left: tuple[int, ...] = ()  # whose process had ended


def run(setup: UnlikeSetup) -> tuple[RanWorker, ...]:
    """Run a policy in processes until so many commits; what the server saw is last.

    Raises ForetraceError where a process ends that was not to.
    """
    workers = len(setup.step_s)
    with together(workers + 1) as processes:
        return tuple(
            processes.ask_each(
                [AskedCall(play, setup)] * (workers + 1), f"training by {setup.policy}",
                patience_s=PATIENCE_S, may_end=frozenset(setup.dies_s),
            )
        )  # fmt: skip


def play(setup: UnlikeSetup, process: Process) -> RanWorker:
    """Return what one of the processes does: the last one is the server."""
    rank = process.rank
    job = PartitionedJob(workers=len(setup.step_s))
    return _Server(setup, job).run() if rank == job.workers else _train(setup, job, rank)


class _Server:
    """A thread per worker takes its commits in; whoever lets others continue answers them."""

    def __init__(self, setup: UnlikeSetup, job: PartitionedJob) -> None:
        self.setup, self.workers = setup, job.workers
        self.server = Server(parse(setup.policy), job.replicas([0])[0].flat, weights=[1.0] * job.workers)
        self.changing = Lock()
        self.over, self.begun_s = False, 0.0
        self.arrived_s: list[float] = []
        self.left: list[int] = []

    def run(self) -> RanWorker:
        """Serve until the run's end and until every worker has said goodbye, or has ended."""
        dist.barrier()
        self.begun_s = time.monotonic()
        threads = [Thread(target=self._listen, args=(each,), daemon=True) for each in range(self.workers)]
        with self.changing:
            self._answer(self.server.begin(), self.begun_s)
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        server = self.server
        return RanWorker(
            commits=tuple(server.commits), steps=tuple(server.steps), sent_bytes=tuple(server.sent_bytes),
            arrived_s=tuple(self.arrived_s), left=tuple(self.left), state=sha256(server.model.tobytes()).hexdigest(),
        )  # fmt: skip

    def _listen(self, worker: int) -> None:
        while True:
            try:
                commit, ready_s = _received(worker)
            except RuntimeError:  # its process has ended
                with self.changing:
                    self.left.append(worker)
                    now_s = time.monotonic()
                    self._answer(self.server.leave(worker, now_s - self.begun_s), now_s)
                return
            if commit is None:
                return
            _until(ready_s + self.setup.commit_s / 2)
            now_s = time.monotonic()
            with self.changing:
                if self.over:
                    self._answer({worker: SyncAnswer(steps=0)}, now_s)
                    continue
                self.arrived_s.append(now_s - self.begun_s)
                answers = self.server.commit(commit, now_s - self.begun_s)
                if len(self.arrived_s) >= self.setup.commits:
                    self.over = True  # who waits is told so now, the others with their next commit
                    answers = {each: SyncAnswer(steps=0) for each in {*self.server.waiting(), *answers}}
                self._answer(answers, now_s)

    def _answer(self, answers: Mapping[int, SyncAnswer], now_s: float) -> None:
        for worker, answer in answers.items():
            with suppress(RuntimeError):  # its process has ended: its own thread says so
                dist.send_object_list([answer, now_s], worker)


def _train(setup: UnlikeSetup, job: PartitionedJob, rank: int) -> RanWorker:
    server, step_s, dies_s = job.workers, setup.step_s[rank], setup.dies_s.get(rank, inf)
    replica, other = job.replicas([rank, rank])
    worker = SyncWorker(rank, parse(setup.policy), replica)
    other.gradient()  # the first one in a process takes longer
    dist.barrier()
    begun_s = at_s = time.monotonic()  # at_s: as the worker is to have it; what took too long is caught up with
    steps = 0

    def sleep() -> None:
        nonlocal at_s
        at_s += step_s
        _until(at_s)
        if at_s - begun_s >= dies_s:
            os.kill(os.getpid(), signal.SIGKILL)

    while True:
        answer, answered_s = _received(server)
        if not answer.steps:
            break
        ready_s, at_s = at_s, _until(answered_s + (setup.commit_s / 2 if steps else 0.0))
        began_s = at_s
        commit = worker.run(answer, sleep)
        steps += commit.steps
        commit = replace(commit, compute_s=at_s - began_s, exchange_s=began_s - ready_s)
        dist.send_object_list([commit, at_s], server)
    dist.send_object_list([None, 0.0], server)
    return RanWorker(steps=(steps,), state=sha256(worker.shared.tobytes()).hexdigest())


def _until(when_s: float) -> float:
    """Sleep until a time of the clock; it, or the time that it is where it has passed."""
    now_s = time.monotonic()
    time.sleep(max(when_s - now_s, 0.0))
    return max(when_s, now_s)


def _received(source: int) -> list[Any]:
    """Return what the other process sent: a commit or an answer, and its time. Raises RuntimeError where it
    has ended.
    """
    found: list[Any] = [None, None]
    dist.recv_object_list(found, source)
    return found
