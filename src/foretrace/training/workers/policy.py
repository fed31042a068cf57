"""`SyncPolicy`: what a worker sends when, what it waits for, and how a server combines what workers send.

A worker trains by itself for some steps, adds up its updates and sends them: a commit. The server keeps the shared
model, adds the mean of what came, and answers those whom the policy lets continue. The same `SyncWorker` and `Server`
run on a virtual clock (`virtual.py`), in processes, and without gradients, where only times and bytes are asked for;
so no policy knows what carries it. Nothing here needs PyTorch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from typing import ClassVar, Protocol, Self

import numpy as np

from foretrace.arrays import Float32, Int64
from foretrace.errors import ForetraceError

NUMBER = 4  # bytes of a value, and of an index
_NOTHING = np.zeros(0, np.float32)


def message_bytes(elements: int, kept: int) -> int:
    """Return bytes of so many of the elements: values with indices, or all values where that is less."""
    return NUMBER * min(2 * kept, elements)


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """What a worker sends: the sum of its updates since it sent them last, or some elements of it."""

    worker: int
    steps: int
    nbytes: int
    values: Float32
    indices: Int64 | None = None  # of the values; None: all elements, in order
    buffers: Float32 = field(default_factory=lambda: _NOTHING)  # statistics of batch norm
    loss: float = inf  # mean of the steps' mini-batches
    compute_s: float = 0.0  # of these steps
    exchange_s: float = 0.0  # of the exchange before
    model: Float32 | None = None  # of this worker with its buffers, where it was asked for
    accuracies: tuple[float, float] | None = None  # on own samples: of its own model, and of a visiting one


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncAnswer:
    """What the server answers: the shared model, or those elements that have changed."""

    steps: int  # to train before the next commit
    nbytes: int = 0
    values: Float32 = field(default_factory=lambda: _NOTHING)
    indices: Int64 | None = None  # None: all elements, in order
    knob: float | None = None  # the policy's from now on; None: as it was
    send_model: bool = False  # with the next commit
    visitor: Float32 | None = None  # another worker's model, to be tried on own samples


class Pace(ABC):
    """How many steps workers train before they commit: the part of a policy that learns while training runs."""

    @abstractmethod
    def steps(self, worker: int, now_s: float) -> int:
        """Return steps from now to the next commit of a worker, 1 at least."""

    def saw(self, commit: Commit, now_s: float) -> None:  # noqa: B027  (most paces learn nothing)
        """Learn from a commit."""


class Every(Pace):
    """Always the same number of steps."""

    def __init__(self, count: int) -> None:
        self.count = count

    def steps(self, worker: int, now_s: float) -> int:
        return self.count


@dataclass(frozen=True, kw_only=True)
class SyncPolicy(ABC):
    """Frozen settings of a policy. Raises ForetraceError for a knob out of its range."""

    name: ClassVar[str]
    knob: ClassVar[str] = ""  # the field that trades traffic for accuracy; "" where there is none
    lag: ClassVar[float] = 0  # commits by which a worker may be ahead of the slowest; 0: all wait for each other
    local: ClassVar[bool] = True  # own updates act on the own model at once, before they are sent
    sparse: ClassVar[bool] = False  # only some elements are sent
    momentum: ClassVar[float] = 0.0  # of updates, on every worker

    def pace(self, workers: int) -> Pace:
        """Return when workers commit: after every step, unless a policy says otherwise."""
        return Every(1)

    def chosen(self, pending: Float32, model: Float32, step: int) -> Int64:
        """Return which elements of a sparse policy's sum of updates are sent after a step."""
        raise NotImplementedError(f"{self.name} sends all elements")

    def with_knob(self, value: float) -> Self:
        """Return the same policy with another knob."""
        kind = type(getattr(self, self.knob))
        return replace(self, **{self.knob: kind(value)})

    def need(self, name: str, low: float, high: float) -> None:
        """Raise ForetraceError unless a field is within its range, ends included."""
        value = getattr(self, name)
        if not low <= value <= high:
            raise ForetraceError(
                f"{name} of {self.name} must be {low:g} to {high:g}, got {value:g}; choose one in that range."
            )


class TrainedReplica(Protocol):
    """A worker's copy of the model: `flat` and `buffers` are its own memory, changed in place."""

    flat: Float32

    @property
    def buffers(self) -> Float32:
        """Statistics of batch norm."""

    def gradient(self) -> tuple[float, Float32]:
        """Return loss and gradient (elements) of the next mini-batch at `flat`."""

    def update(self, gradient: Float32) -> Float32:
        """Return what the gradient changes, at this worker's rate: a new array."""

    def accuracy(self, state: Float32 | None = None) -> float:
        """Return the accuracy on some own samples of the own model, or of another one's weights and buffers."""


class SyncWorker:
    """One worker: trains, keeps what was not sent yet, and takes up what the server answers."""

    def __init__(self, number: int, policy: SyncPolicy, replica: TrainedReplica) -> None:
        self.number, self.policy, self.replica = number, policy, replica
        self.shared = replica.flat.copy()  # the server's model, as far as this worker knows it
        self.pending = np.zeros_like(replica.flat)  # updates that were not sent
        self.velocity = np.zeros_like(replica.flat) if policy.momentum else None
        self.done = 0  # steps

    def run(self, answer: SyncAnswer, after_step: Callable[[], None] = lambda: None) -> Commit:
        """Take up an answer and train until the next commit; `after_step` is called after every step."""
        replica, visits = self.replica, None
        if answer.visitor is not None:
            visits = replica.accuracy(), replica.accuracy(answer.visitor)
        self._take(answer)
        losses = 0.0
        for _ in range(answer.steps):
            loss, gradient = replica.gradient()
            update = replica.update(gradient)
            if self.velocity is not None:
                self.velocity *= np.float32(self.policy.momentum)
                self.velocity += update
                update = self.velocity
            self.pending += update
            if self.policy.local:
                replica.flat += update
            losses += loss
            self.done += 1
            after_step()
        commit = self._send(answer.steps, losses / answer.steps)
        if answer.send_model:
            model = np.concatenate([replica.flat, replica.buffers])
            commit = replace(commit, model=model, nbytes=commit.nbytes + NUMBER * len(model))
        return replace(commit, accuracies=visits) if visits else commit

    def _take(self, answer: SyncAnswer) -> None:
        if answer.knob is not None:
            self.policy = self.policy.with_knob(answer.knob)
        if answer.indices is None:
            if len(answer.values):
                self.shared[:] = answer.values
        else:
            self.shared[answer.indices] = answer.values
        self.replica.flat[:] = self.shared
        if self.policy.local:
            self.replica.flat += self.pending

    def _send(self, steps: int, loss: float) -> Commit:
        elements, beside = len(self.pending), self.replica.buffers.copy()
        indices = None
        if self.policy.sparse:
            indices = self.policy.chosen(self.pending, self.replica.flat, self.done)
            values = self.pending[indices]
            self.pending[indices] = 0
            if self.velocity is not None:
                self.velocity[indices] = 0
        else:
            values, self.pending = self.pending, np.zeros_like(self.pending)
        return Commit(
            worker=self.number, steps=steps, values=values, indices=indices, buffers=beside, loss=loss,
            nbytes=message_bytes(elements, len(values)) + NUMBER * len(beside),
        )  # fmt: skip


class Server:
    """The shared model and who waits for whom. Workers that left are waited for no longer; what they sent counts."""

    def __init__(self, policy: SyncPolicy, model: Float32, *, weights: Sequence[float]) -> None:
        """Take `weights` of the workers in a mean, in any unit: their samples, or all 1."""
        if not weights or not all(isfinite(each) and each > 0 for each in weights):
            raise ForetraceError("Workers must be one or more, each with samples; leave those without data out.")
        workers = len(weights)
        self.policy, self.model, self.weights = policy, model.copy(), tuple(map(float, weights))
        self.pace, self.live = policy.pace(workers), set(range(workers))
        self.commits, self.steps = [0] * workers, [0] * workers
        self.sent_bytes, self.answered_bytes = [0] * workers, [0] * workers
        self.buffers: Float32 = _NOTHING
        self._buffers: dict[int, Float32] = {}
        self._waiting: set[int] = set()
        self._new: list[Commit] = []  # that the model does not have yet
        self._changed = np.zeros((workers, len(model) if policy.sparse else 0), bool)  # since a worker's last answer

    def begin(self) -> dict[int, SyncAnswer]:
        """Return the first answers: everyone has the model already."""
        return {worker: SyncAnswer(steps=self.pace.steps(worker, 0.0)) for worker in sorted(self.live)}

    def commit(self, commit: Commit, now_s: float) -> dict[int, SyncAnswer]:
        """Take a commit in; answers to those who may continue now."""
        worker = commit.worker
        self.commits[worker] += 1
        self.steps[worker] += commit.steps
        self.sent_bytes[worker] += commit.nbytes
        self._new.append(commit)
        self._waiting.add(worker)
        if len(commit.buffers):
            self._buffers[worker] = commit.buffers
        self.pace.saw(commit, now_s)
        return self.released(now_s)

    def leave(self, worker: int, now_s: float) -> dict[int, SyncAnswer]:
        """Return answers to those who waited for this worker alone, which has gone."""
        self.live.discard(worker)
        self._waiting.discard(worker)
        return self.released(now_s)

    def waiting(self) -> tuple[int, ...]:
        """Return workers that wait for others."""
        return tuple(sorted(self._waiting))

    def released(self, now_s: float) -> dict[int, SyncAnswer]:
        """Return answers to those who wait for nobody any more."""
        slowest = min((self.commits[each] for each in self.live), default=0)
        free = [each for each in sorted(self._waiting) if self.commits[each] - slowest <= self.policy.lag]
        if not free:
            return {}
        self._fold()
        self._waiting.difference_update(free)
        answers = {each: self._answer(each, now_s) for each in free}
        for worker, answer in answers.items():
            self.answered_bytes[worker] += answer.nbytes
        return answers

    def _fold(self) -> None:
        """Add the mean of what came, in the order of the workers, whatever order it came in."""
        if not self._new:
            return
        whole = sum(self.weights[each] for each in self.live | {commit.worker for commit in self._new})
        total = np.zeros_like(self.model)
        for commit in sorted(self._new, key=lambda each: each.worker):
            part = commit.values * np.float32(self.weights[commit.worker] / whole)
            if commit.indices is None:
                total += part
            else:
                total[commit.indices] += part
                self._changed[:, commit.indices] = True
        self.model += total
        self._new.clear()
        if self._buffers:
            shares = sum(self.weights[each] for each in self._buffers)
            self.buffers = np.sum(
                [each * np.float32(self.weights[worker] / shares) for worker, each in sorted(self._buffers.items())], 0
            )

    def _answer(self, worker: int, now_s: float) -> SyncAnswer:
        steps, elements = self.pace.steps(worker, now_s), len(self.model)
        if not self.policy.sparse:
            return SyncAnswer(steps=steps, values=self.model.copy(), nbytes=NUMBER * elements)
        indices = np.flatnonzero(self._changed[worker])
        self._changed[worker] = False
        return SyncAnswer(
            steps=steps, values=self.model[indices], indices=indices, nbytes=message_bytes(elements, len(indices))
        )
