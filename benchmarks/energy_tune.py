"""How many measurements find the setting with the least energy: Zeus' recorded trainings, every optimum known.

`python benchmarks/energy_tune.py TRACES` writes the tables of docs/accuracy/energy.md; `--select` chooses the settings
of the Bayesian optimisation by leaving out one workload (both GPUs) at a time, and says what the others chose.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from foretrace import executor
from foretrace.search.constrained import ConstrainedBayes
from foretrace.search.minimise import minimise
from foretrace.search.strategy import SearchStrategy
from foretrace.serving.energy import recorded
from foretrace.serving.energy.environment import EnergyProblem, Setting
from foretrace.serving.energy.recorded import RecordedTraining

WORKLOADS = ("cifar100", "imagenet", "librispeech", "movielens-1m", "squad", "sentiment140")
GPUS = ("v100", "a40")
SLO = 1.1
NEAR = 1.02


def trainings(traces: Path) -> dict[tuple[str, str], RecordedTraining]:
    """The twelve recorded trainings by (GPU, workload)."""
    pairs = itertools.product(GPUS, WORKLOADS)
    return {(gpu, name): recorded.read([f"zeus:{traces}", f"workload={name}", f"gpu={gpu}"]) for gpu, name in pairs}


def default(training: RecordedTraining) -> Setting:
    return tuple(knob.default for knob in training.knobs)


def evaluations(training: RecordedTraining, strategy: SearchStrategy, seed: int) -> int:
    """Settings that are measured until one is within 2 % of the optimum and keeps the limit."""
    limit_s = SLO * training.points[training.fastest].time_s
    optimum = training.optimum(limit_s)
    assert optimum is not None
    problem = EnergyProblem(training, limit_s, {})
    enough = np.log(NEAR * training.points[optimum].energy_j)
    problem.bound = float(np.log(training.points[optimum].energy_j))  # so that the search ends where it has arrived
    near = np.log(NEAR) / abs(problem.bound)
    found = minimise(problem, strategy=strategy, starts=[default(training)], seed=seed, gap=near)
    return next(call for call, cost in found.curve if cost <= enough)


def tpe(training: RecordedTraining, seed: int) -> int:
    """The same with optuna's TPE under the constraint; settings asked for again are not measured again."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    limit_s = SLO * training.points[training.fastest].time_s
    optimum = training.optimum(limit_s)
    assert optimum is not None
    sampler = optuna.samplers.TPESampler(
        seed=seed, n_startup_trials=3, multivariate=True, constraints_func=lambda trial: (trial.user_attrs["excess"],)
    )
    study = optuna.create_study(sampler=sampler)
    study.enqueue_trial({knob.name: knob.levels.index(knob.default) for knob in training.knobs})
    met: set[Setting] = set()
    while True:
        trial = study.ask()
        places = [trial.suggest_int(knob.name, 0, len(knob.levels) - 1) for knob in training.knobs]
        at = tuple(knob.levels[place] for knob, place in zip(training.knobs, places, strict=True))
        if at not in training.points:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            continue
        each = training.points[at]
        met.add(at)
        trial.set_user_attr("excess", float(np.log(each.time_s / limit_s)))
        study.tell(trial, float(np.log(each.energy_j)))
        if each.time_s <= limit_s and each.energy_j <= NEAR * training.points[optimum].energy_j:
            return len(met)
        if trial.number > 20 * len(training.points):
            return len(training.points)


def counts(strategy: SearchStrategy, them: Iterable[RecordedTraining], seeds: int) -> list[list[int]]:
    return [[evaluations(each, strategy, seed) for seed in range(seeds)] for each in them]


def grid() -> list[ConstrainedBayes]:
    """The settings that are compared."""
    return [
        ConstrainedBayes(length=length, joint=joint, clip=clip, noise=(1e-4, noise), gain=gain)
        for length in (0.4, 0.6, 0.9)
        for joint in ((0.0, 0.0), (0.0, 1.0), (1.0, 1.0))
        for clip in (1.0, float("inf"))
        for noise in (1e-2, 1e-1)
        for gain in (0.0, 0.02)
    ]


def select(them: dict[tuple[str, str], RecordedTraining], seeds: int) -> str:
    """Every workload's evaluations with the settings that the other workloads choose: least mean of logarithms."""
    jobs = [(strategy, tuple(them.values()), seeds) for strategy in grid()]
    found = np.array(list(executor.map(_counts, jobs)))  # settings x trainings x seeds
    score = np.log(found).mean(axis=2)
    keys = list(them)
    lines = ["| left out | chosen by the others | V100, median | A40, median |", "|---|---|---:|---:|"]
    for name in WORKLOADS:
        ours = [i for i, key in enumerate(keys) if key[1] == name]
        best = int(np.argmin(np.delete(score, ours, axis=1).mean(axis=1)))
        medians = np.median(found[best][ours], axis=1)
        lines.append(f"| {name} | {said(jobs[best][0])} | {medians[0]:g} | {medians[1]:g} |")
    order = np.argsort(score.mean(axis=1))
    lines.append(f"\nOf all: {said(jobs[order[0]][0])}. The {len(order)} settings, mean (geometric) evaluations:\n")
    lines += [
        f"- {np.exp(score[i].mean()):.2f}, worst median {np.median(found[i], axis=1).max():g}: {said(jobs[i][0])}"
        for i in order
    ]
    return "\n".join(lines)


def _counts(job: tuple[ConstrainedBayes, Sequence[RecordedTraining], int]) -> list[list[int]]:
    return counts(*job)


def said(strategy: ConstrainedBayes) -> str:
    part = {(0.0, 0.0): "additive", (1.0, 1.0): "of all coordinates"}.get(strategy.joint, "mixed")
    return (
        f"{part} kernel, length {strategy.length:g}, clipped at {strategy.clip:g}, noise up to {strategy.noise[1]:g}, "
        f"gains from {strategy.gain:g}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--select", action="store_true")
    given = parser.parse_args()
    them = trainings(given.traces)
    if given.select:
        print(select(them, given.seeds))


if __name__ == "__main__":
    main()
