"""Steps to a target with tuned settings, seconds of a step, and K-FAC's step as a recording of SGD predicts it.

Steps to a target are the same on a loaded machine, seconds are not: they are measured apart, all methods in turns, so
that a minute without other work is enough for them. All is kept in files.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from foretrace.cost.operators import bench
from foretrace.experiment.statistics import Ratio
from foretrace.graph.builder import build
from foretrace.simulate.overhead import unprofiled
from foretrace.techniques.arguments import parse
from foretrace.techniques.compute.batch_size import BatchSize
from foretrace.techniques.measuring import calibrated
from foretrace.techniques.whatif import whatif
from foretrace.trace.read import read
from foretrace.training.recording import record_training
from foretrace.training.training import Training
from reproductions.kaisa.tasks import LearningTask
from reproductions.kept import SECONDS, Cell, measured
from tables import load, machine

EVERY = 5  # steps between two looks at the score
BLOCK, ROUNDS = 20, 5  # steps of a block, which hold whole periods of all frequencies; blocks of each method
TUNED = (0, 1)  # seeds
OFTEN = {
    "kfac": "factors_every=5 inverses_every=20",
    "kfac 2/10": "factors_every=2 inverses_every=10",
    "kfac 1/10": "factors_every=1 inverses_every=10",
}
SETTINGS: dict[str, tuple[dict[str, float], ...]] = {
    "sgd": tuple({"lr": lr} for lr in (0.04, 0.08, 0.02, 0.12, 0.01, 0.2)),
    "adam": tuple({"lr": lr} for lr in (0.008, 0.004, 0.016, 0.002, 0.03, 0.001)),
    "kfac": tuple({"lr": lr, "damping": damping, "clip": 0.03} for lr in (0.3, 0.6, 0.1) for damping in (0.1, 0.01)),
}


def make(task: LearningTask, batch: int, method: str, setting: dict[str, float], seed: int) -> Training:
    """A training by a method."""
    rate = setting["lr"]
    if method == "adam":
        return task.training(batch, seed, lambda parameters: torch.optim.Adam(parameters, lr=rate))
    plain = task.training(batch, seed, lambda parameters: torch.optim.SGD(parameters, lr=rate, momentum=0.9))
    if method == "sgd":
        return plain
    return parse(f"kfac {OFTEN[method]} damping={setting['damping']} clip={setting['clip']}").apply(plain)


def train(task: LearningTask, batch: int, method: str, setting: dict[str, float], seed: int, limit: int) -> Cell:
    """Train until the score is at the target, `limit` steps at most: steps, None where it is not reached."""
    training = make(task, batch, method, setting, seed)
    steps = training.steps()
    at, number = None, 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # what diverges cannot be decomposed
        while number < limit and at is None:
            for _ in range(EVERY):
                next(steps)
            number += EVERY
            score = task.score(training.model)
            if not score < inf:
                break
            at = number if score <= task.target else None
    return {"steps": at, "machine": machine()}


def time_steps(task: LearningTask, batch: int, methods: Sequence[str]) -> Cell:
    """CPU seconds of a step by each method, one per round: blocks in turns, after one that is thrown away."""
    setting = {"lr": 0.01, "damping": 0.1, "clip": 0.03}
    running = {each: make(task, batch, each, setting, 0).steps() for each in methods}
    found: dict[str, list[float]] = {each: [] for each in running}
    for _ in range(1 + ROUNDS):
        for method, steps in running.items():
            begin = time.thread_time()
            for _ in range(BLOCK):
                next(steps)
            found[method].append((time.thread_time() - begin) / BLOCK)
    return {"step_s": {each: blocks[1:] for each, blocks in found.items()}, "machine": machine(), "load": load()}


def predict(task: LearningTask, recorded: int, batches: Sequence[int], method: str) -> Cell:
    """K-FAC's step over SGD's at each batch, from one recording of SGD's, with its work timed alone."""
    technique = parse(f"kfac {OFTEN[method]}")
    with TemporaryDirectory() as folder:
        graph = unprofiled(build(read(record_training(make(task, recorded, "sgd", {"lr": 0.01}, 0), folder)), None))
    ratios = []
    for batch in batches:
        other = [BatchSize(to=batch)] if batch != recorded else []
        graph = calibrated(graph, [*other, technique], bench.measure).graph
        found = whatif(whatif(graph, other).saved(), [technique])  # what moves both steps alike moves no ratio
        ratios.append((found.after_s / found.before_s, *found.ratio_interval))
    return {"ratios": ratios, "machine": machine(), "load": load()}


class Runs:
    """Runs to a target, and beside them seconds of steps and predictions, kept in two files of a folder."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.runs, self.times, self.limit = folder / "runs.jsonl", folder / "times.jsonl", limit
        self.cells: dict[Path, list[Cell]] = {self.runs: [], self.times: []}  # that were asked for

    def run(
        self, task: LearningTask, batch: int, method: str, setting: dict[str, float], seed: int, limit: int = 0
    ) -> Cell:
        """A training, from the file or made now."""
        limit = limit or self._limit(task)
        key = {"task": task.name, "batch": batch, "method": method, "setting": setting, "seed": seed}
        return self._kept(
            self.runs, {**key, "limit": limit}, lambda: train(task, batch, method, setting, seed, limit)
        )  # fmt: skip

    def tuned(self, task: LearningTask, batch: int, methods: Sequence[str], seeds: int) -> dict[str, list[Cell]]:
        """Runs of each method's best setting with so many seeds that it was not chosen on.

        A setting is given up as soon as it can no longer be the one with the fewest steps.
        """
        best: dict[str, dict[str, float]] = {}
        limit = self._limit(task)
        for method in methods:
            least = 4 * limit + 1  # steps of both seeds
            for setting in SETTINGS[method.split()[0]]:
                taken = 0
                for seed in TUNED:
                    if taken < least:
                        found = self.run(task, batch, method, setting, seed, min(limit, least - taken))
                        taken += found["steps"] or 2 * limit
                if taken < least:
                    best[method], least = setting, taken
        evaluated: dict[str, list[Cell]] = {method: [] for method in methods}
        for seed in range(len(TUNED), len(TUNED) + seeds):
            for method in methods:
                evaluated[method].append(self.run(task, batch, method, best[method], seed))
        return evaluated

    def timed(self, task: LearningTask, batch: int, methods: Sequence[str]) -> dict[str, list[float]]:
        """CPU seconds of a step by each method, by round."""
        key = {"task": task.name, "batch": batch, "timed": list(methods)}
        return dict(self._kept(self.times, key, lambda: time_steps(task, batch, methods))["step_s"])

    def predicted(self, task: LearningTask, recorded: int, batches: Sequence[int], method: str = "kfac") -> list[Ratio]:
        """K-FAC's step over SGD's at each batch."""
        key = {"task": task.name, "recorded": recorded, "batches": list(batches), "predicted": OFTEN[method]}
        found = self._kept(self.times, key, lambda: predict(task, recorded, batches, method))
        return [Ratio(value=value, low=low, high=high) for value, low, high in found["ratios"]]

    @property
    def cpu_s(self) -> float:
        """Of all that was asked for, whenever it was measured."""
        return float(sum(each[SECONDS] for cells in self.cells.values() for each in cells))

    def _limit(self, task: LearningTask) -> int:
        return min(self.limit, task.limit)

    def _kept(self, path: Path, key: Cell, find: Callable[[], Cell]) -> Cell:
        (cell,) = measured(path, [key], lambda _: find())
        self.cells[path].append(cell)
        return cell
