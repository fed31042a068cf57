"""SkewScout: how much workers must say to each other, from how models fare on each other's samples (ICML 2020).

Every so many steps models travel: each worker sends its own, tries another one's on its samples, and reports both
accuracies with its next commit. What accuracy is lost at the other's, and the bytes that were sent meanwhile, are one
objective, over which the policy's knob climbs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from foretrace.arrays import Float32
from foretrace.errors import ForetraceError
from foretrace.training.workers.policy import NUMBER, Commit, Server, SyncAnswer, SyncPolicy


@dataclass(frozen=True, kw_only=True)
class SkewScout:
    """Settings of the controller (section 7 of the paper and its appendix)."""

    knobs: tuple[float, ...]  # from the most traffic to the least
    every: int = 500  # steps of a worker from one travel to the next
    tolerated: float = 0.05  # accuracy that may be lost
    accuracy_weight: float = 50.0
    traffic_weight: float = 1.0
    begin: int = 0  # which knob is tried first

    def __post_init__(self) -> None:
        if len(set(self.knobs)) != len(self.knobs) or not self.knobs:
            raise ForetraceError("SkewScout needs one knob or more, all different, from the most traffic to the least.")
        if not 0 <= self.begin < len(self.knobs) or self.every < 1:
            raise ForetraceError(
                f"SkewScout must begin with knob 0 to {len(self.knobs) - 1} and let models travel after 1 step or more."
            )

    def controller(self, policy: SyncPolicy, workers: int) -> SkewController:
        """The controller of one run. Raises ForetraceError for a policy without a knob, or whose workers never wait."""
        if not policy.knob or policy.lag:
            raise ForetraceError(
                f"SkewScout needs a policy with a knob whose workers wait for each other, got {policy.name}; choose "
                "gaia, local-sgd or dgc."
            )
        return SkewController(self, policy, workers)

    def objective(self, lost: float, traffic: float) -> float:
        """What is minimised: accuracy lost beyond what is tolerated, and traffic over that of synchronous training."""
        return self.accuracy_weight * max(0.0, lost - self.tolerated) + self.traffic_weight * traffic


class SkewController:
    """Climbs one step of the knobs at a time, and knows what it has seen; what it sees again replaces that."""

    def __init__(self, settings: SkewScout, policy: SyncPolicy, workers: int) -> None:
        self.settings, self.workers = settings, workers
        self.at = settings.begin
        self.policy = policy.with_knob(settings.knobs[self.at])
        self.pace = self.policy.pace(workers)
        self.known: dict[int, float] = {}  # objective by knob
        self.history: list[tuple[float, float, float]] = []  # knob, accuracy lost, traffic over synchronous
        self.travels = 0
        self._steps, self._nbytes, self._elements = 0, 0, 0  # of all workers since the last decision
        self._models: dict[int, Float32] = {}
        self._scores: dict[int, tuple[float, float]] = {}
        self._asked = self._told = False

    def saw(self, commit: Commit) -> None:
        """Take in what a commit says of travels, and its bytes."""
        self._steps += commit.steps
        self._nbytes += commit.nbytes
        if commit.model is not None:
            self._models[commit.worker] = commit.model
        if commit.accuracies is not None:
            self._scores[commit.worker] = commit.accuracies

    def extended(self, answers: dict[int, SyncAnswer]) -> dict[int, SyncAnswer]:
        """The answers of a round with what travels: a request for models, another one's model, a new knob."""
        self._nbytes += sum(each.nbytes for each in answers.values())
        if not self._told:  # the first round: workers still have the policy's own knob
            self._told = True
            return self._turned(answers)
        if self._scores:
            lost = float(np.mean([home - away for home, away in self._scores.values()]))
            self._scores.clear()
            self._decide(lost)
            return self._turned(answers)
        if self._models:
            order = sorted(self._models)
            shift = 1 + self.travels % max(len(order) - 1, 1)
            self.travels += 1
            for place, worker in enumerate(order):
                if worker in answers and len(order) > 1:
                    visitor = self._models[order[(place + shift) % len(order)]]
                    answers[worker] = _with(answers[worker], visitor)
                    self._elements = len(visitor)
            self._nbytes += NUMBER * sum(len(each) for each in self._models.values())
            self._models.clear()
            self._asked = False
        elif not self._asked and self._steps >= self.settings.every * self.workers:
            self._asked = True
            answers = {worker: replace(each, send_model=True) for worker, each in answers.items()}
        return answers

    def _turned(self, answers: dict[int, SyncAnswer]) -> dict[int, SyncAnswer]:
        knob = self.settings.knobs[self.at]
        self.policy = self.policy.with_knob(knob)
        self.pace = self.policy.pace(self.workers)
        return {
            worker: replace(each, knob=knob, steps=self.pace.steps(worker, 0.0)) for worker, each in answers.items()
        }

    def _decide(self, lost: float) -> None:
        settings = self.settings
        whole = 2 * NUMBER * self._elements * self._steps  # synchronous: to the server and back after every step
        traffic = self._nbytes / whole
        self.known[self.at] = settings.objective(lost, traffic)
        self.history.append((settings.knobs[self.at], lost, traffic))
        self._steps = self._nbytes = 0
        self.at = climbed(self.at, self.known, len(settings.knobs), looser=lost <= settings.tolerated)


class ScoutedServer(Server):
    """A server whose policy's knob a controller turns; what travels on its account is counted."""

    def __init__(self, policy: SyncPolicy, model: Float32, *, weights: Sequence[float], scout: SkewScout) -> None:
        super().__init__(policy, model, weights=weights)
        self.scout = scout.controller(policy, len(weights))

    def commit(self, commit: Commit, now_s: float) -> dict[int, SyncAnswer]:
        self.scout.saw(commit)
        return super().commit(commit, now_s)

    def released(self, now_s: float) -> dict[int, SyncAnswer]:
        answers = super().released(now_s)
        if not answers:
            return answers
        extended = self.scout.extended(dict(answers))
        for worker, answer in extended.items():
            self.answered_bytes[worker] += answer.nbytes - answers[worker].nbytes
        self.policy, self.pace = self.scout.policy, self.scout.pace
        return extended


def climbed(at: int, known: dict[int, float], count: int, *, looser: bool) -> int:
    """The next knob: a neighbour that was never tried, the looser one first where accuracy allows, else the best."""
    near = [each for each in ((at + 1, at - 1) if looser else (at - 1, at + 1)) if 0 <= each < count]
    if near and near[0] not in known:
        return near[0]
    return min((at, *near), key=lambda each: known.get(each, float("inf")))


def _with(answer: SyncAnswer, visitor: Float32) -> SyncAnswer:
    return replace(answer, visitor=visitor, nbytes=answer.nbytes + NUMBER * len(visitor))
