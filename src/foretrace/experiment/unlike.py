"""Workers of unlike speed as processes: a server role and its workers over gloo, each step as long as is stated.

A worker trains a real model on its samples and sleeps for what is left of a step; half of what a commit is to take
passes before it is sent, the other half once its answer is there. So the machine's own speed does not matter, and what
is measured is what the policy does with such workers.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from math import inf, isnan, nan
from threading import Condition, Thread
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from foretrace.arrays import Float32, Int64
from foretrace.errors import ForetraceError
from foretrace.experiment.messages import Worker as Process
from foretrace.experiment.processes import AskedCall, together
from foretrace.training.workers.policies import parse
from foretrace.training.workers.policy import Commit, Server, SyncAnswer, SyncWorker
from foretrace.zoo.partitioned import PartitionedJob

MOST_WORKERS, MOST_STEP_S, MOST_S = 16, 10.0, 300.0
_NONE = -1.0  # instead of the length of an array that is not sent
_HEAD, _ARRAYS, _INDICES = 8, 3, 1  # numbers before the arrays, of them lengths, and which array has whole numbers


class UnlikeSetup(msgspec.Struct, frozen=True, kw_only=True):
    """A training of workers of unlike speed, which a server keeps together by a policy."""

    policy: str  # as written
    step_s: tuple[float, ...]  # of each worker
    commit_s: float = 0.0  # that a commit takes until its answer is back, beside the bytes
    commits: int = 0  # in all, after which the run ends
    seconds: float = 0.0  # or when it ends
    job: str = "clusters"
    partition: str = "iid"
    seed: int = 0
    dies_s: dict[int, float] = {}  # when a worker's process is ended


class RanWorker(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker did: its steps, and the SHA-256 of the model as it knows it; of a server, by worker, all it saw."""

    steps: tuple[int, ...]
    state: str
    commits: tuple[int, ...] = ()
    sent_bytes: tuple[int, ...] = ()
    answered_bytes: tuple[int, ...] = ()
    arrived_s: tuple[float, ...] = ()  # of every commit
    workers: tuple[int, ...] = ()  # whose it was
    left: tuple[int, ...] = ()  # whose process had ended
    loss: float = 0.0  # of the shared model


def run(setup: UnlikeSetup) -> tuple[RanWorker, ...]:
    """Run a policy in processes until so many commits; what the server saw is last.

    Raises ForetraceError for workers that cannot be run, and where a process ends that was not to.
    """
    workers = len(setup.step_s)
    if not 1 <= workers <= MOST_WORKERS or not all(0 < each <= MOST_STEP_S for each in setup.step_s):
        raise ForetraceError(
            f"Processes are run for 1 to {MOST_WORKERS} workers with steps of up to {MOST_STEP_S:g} s."
        )
    if not (setup.commits or setup.seconds) or not 0 <= setup.seconds <= MOST_S:
        raise ForetraceError(f"A run of processes ends after so many commits, or 1 to {MOST_S:g} s.")
    parse(setup.policy)
    if gone := [each for each in setup.dies_s if not 0 <= each < workers]:
        raise ForetraceError(f"worker {gone[0]} cannot die: workers are 0 to {workers - 1}.")
    with together(workers + 1) as processes:
        return tuple(
            processes.ask_each(
                [AskedCall(play, setup)] * (workers + 1), f"training by {setup.policy}",
                patience_s=2 * MOST_S, may_end=frozenset(setup.dies_s),
            )
        )  # fmt: skip


def play(setup: UnlikeSetup, process: Process) -> RanWorker:
    """What one of the processes does: the last one is the server."""
    rank = process.rank
    job = PartitionedJob(kind=setup.job, workers=len(setup.step_s), partition=setup.partition, seed=setup.seed)
    return _serve(setup, job) if rank == job.workers else _train(setup, job, rank)


class _Server:
    """A thread per worker takes its commits in; whoever lets others continue answers them."""

    def __init__(self, setup: UnlikeSetup, job: PartitionedJob) -> None:
        self.setup, self.workers, self.judge = setup, job.workers, job.judge(training=True)
        self.server = Server(parse(setup.policy), job.replicas([0])[0].flat, weights=[1.0] * job.workers)
        self.changed = Condition()
        self.over, self.begun_s = False, 0.0
        self.arrived: list[tuple[float, int]] = []
        self.left: list[int] = []

    def run(self) -> None:
        """Serve until the run's end and until every worker has said goodbye, or has ended."""
        dist.barrier()
        self.begun_s = time.monotonic()
        threads = [Thread(target=self._listen, args=(each,), daemon=True) for each in range(self.workers)]
        with self.changed:
            self._answer(self.server.begin())
        for each in threads:
            each.start()
        if self.setup.seconds:
            with self.changed:
                self.changed.wait_for(lambda: self.over, self.setup.seconds)
                self._stop()
        for each in threads:
            each.join()

    def _listen(self, worker: int) -> None:
        while True:
            try:
                commit = _received_commit(worker)
            except RuntimeError:  # its process has ended
                with self.changed:
                    self.left.append(worker)
                    self._answer(self.server.leave(worker, time.monotonic() - self.begun_s))
                return
            now_s = time.monotonic() - self.begun_s
            if commit is None:
                return
            with self.changed:
                if self.over:
                    self._answer({worker: SyncAnswer(steps=0)})
                    continue
                self.arrived.append((now_s, worker))
                answers = self.server.commit(commit, now_s)
                if self.setup.commits and len(self.arrived) >= self.setup.commits:
                    self._stop(*answers)
                else:
                    self._answer(answers)

    def _stop(self, *also: int) -> None:
        """End the run: who waits is told so now, the others with their next commit."""
        if not self.over:
            self.over = True
            self._answer({each: SyncAnswer(steps=0) for each in {*self.server.waiting(), *also}})
            self.changed.notify_all()

    def _answer(self, answers: Mapping[int, SyncAnswer]) -> None:
        for worker, answer in answers.items():
            with suppress(RuntimeError):  # its process has ended: its own thread says so
                _send(
                    worker, (answer.steps, answer.nbytes, nan if answer.knob is None else answer.knob),
                    (answer.values, answer.indices),
                )  # fmt: skip


def _serve(setup: UnlikeSetup, job: PartitionedJob) -> RanWorker:
    own = _Server(setup, job)
    own.run()
    server = own.server
    return RanWorker(
        commits=tuple(server.commits), steps=tuple(server.steps), sent_bytes=tuple(server.sent_bytes),
        answered_bytes=tuple(server.answered_bytes), arrived_s=tuple(each for each, _ in own.arrived),
        workers=tuple(each for _, each in own.arrived), left=tuple(own.left),
        loss=own.judge.loss(server.model, server.buffers), state=sha256(server.model.tobytes()).hexdigest(),
    )  # fmt: skip


def _train(setup: UnlikeSetup, job: PartitionedJob, rank: int) -> RanWorker:
    server, step_s, dies_s = job.workers, setup.step_s[rank], setup.dies_s.get(rank, inf)
    replica, other = job.replicas([rank, rank])
    worker = SyncWorker(rank, parse(setup.policy), replica)
    other.gradient()  # the first one in a process takes longer
    dist.barrier()
    begun_s = ended_s = sent_s = time.monotonic()
    exchange_s = 0.0

    def sleep() -> None:
        nonlocal ended_s
        ended_s += step_s  # where a step took too long, the next ones catch up
        time.sleep(max(ended_s - time.monotonic(), 0.0))
        if ended_s - begun_s >= dies_s:
            os.kill(os.getpid(), signal.SIGKILL)

    steps = 0
    while (answer := _received_answer(server)).steps:
        if steps:
            time.sleep(setup.commit_s / 2)
            exchange_s += time.monotonic() - sent_s
        ready_s = ended_s = time.monotonic()
        commit = worker.run(answer, sleep)
        sent_s = ended_s = time.monotonic()
        steps += commit.steps
        commit = replace(commit, compute_s=sent_s - ready_s, exchange_s=exchange_s)
        time.sleep(setup.commit_s / 2)
        exchange_s = 0.0
        _send(
            server, (commit.steps, commit.nbytes, commit.loss, commit.compute_s, commit.exchange_s),
            (commit.values, commit.indices, commit.buffers),
        )  # fmt: skip
    _send(server, (0,), ())
    return RanWorker(steps=(steps,), state=sha256(worker.shared.tobytes()).hexdigest())


def _send(to: int, words: Sequence[float], arrays: Sequence[Float32 | Int64 | None]) -> None:
    """Send numbers, then the arrays that there are, each of its own length."""
    head = torch.full((_HEAD,), _NONE, dtype=torch.float64)
    head[: len(words)] = torch.tensor(words, dtype=torch.float64)
    for place, each in enumerate(arrays, start=_HEAD - _ARRAYS):
        head[place] = _NONE if each is None else len(each)
    dist.send(head, to)
    for each in arrays:
        if each is not None and len(each):
            dist.send(torch.from_numpy(each), to)


def _received(source: int) -> tuple[list[float], list[Any]]:
    """Numbers and arrays of a message. Raises RuntimeError where the other process has ended."""
    head = torch.empty(_HEAD, dtype=torch.float64)
    dist.recv(head, source)
    arrays: list[Any] = []
    for place, length in enumerate(head[_HEAD - _ARRAYS :].tolist()):
        if length == _NONE:
            arrays.append(None)
            continue
        values = torch.empty(int(length), dtype=torch.int64 if place == _INDICES else torch.float32)
        if length:
            dist.recv(values, source)
        arrays.append(values.numpy())
    return head[: _HEAD - _ARRAYS].tolist(), arrays


def _received_answer(server: int) -> SyncAnswer:
    (steps, nbytes, knob, *_), (values, indices, _) = _received(server)
    if not steps:
        return SyncAnswer(steps=0)
    return SyncAnswer(
        steps=int(steps), nbytes=int(nbytes), knob=None if isnan(knob) else knob, values=values, indices=indices
    )


def _received_commit(worker: int) -> Commit | None:
    """The next commit of a worker; None: it has done."""
    (steps, nbytes, loss, compute_s, exchange_s), (values, indices, buffers) = _received(worker)
    if not steps:
        return None
    return Commit(
        worker=worker, steps=int(steps), nbytes=int(nbytes), loss=loss, compute_s=compute_s, exchange_s=exchange_s,
        values=values, indices=indices, buffers=buffers,
    )  # fmt: skip
