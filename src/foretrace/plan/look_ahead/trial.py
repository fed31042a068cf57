"""Run both ways of a cache plan in turns on shaped links, after the prediction was made, and judge it by them.

In every round the links are first as fast as the machine: what a step then takes beyond its passes and its bytes is
what Python, NumPy and the kernel take. From that and the timed links the step is predicted; only then the arms run on
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from foretrace.experiment.ledger import Row
from foretrace.experiment.links import netns
from foretrace.experiment.messages import RowSetup
from foretrace.experiment.rows.run import TIMED, RowWeights, running
from foretrace.experiment.statistics import Ratio, paired_ratio
from foretrace.experiment.trial import figured, in_turns
from foretrace.plan.look_ahead import plan
from foretrace.training.rows.lookups import EmbeddingTable, Lookups
from foretrace.training.rows.optimizers import row_optimizer

PAIRS = 3
MOST_BATCHES = 24  # of a block beyond those that fill caches
HOST: plan.Range = (1.0, 0.5, 1.5)  # of the host's time, which was measured while all bytes went at once
FREE: plan.Range = (1.0, 0.9, 1.1)
MODEL_RANGE = 0.05  # of a step: what the links' model leaves out
_ARMS = {"uncached": False, "look-ahead": True}


@dataclass(frozen=True, kw_only=True)
class RunArm:
    """One way: predicted and measured seconds of a mean step, by round."""

    name: str
    predicted: plan.PredictedStep
    steps_s: tuple[float, ...]
    measured_s: float  # median over rounds
    residual: float  # predicted over measured, less 1


@dataclass(frozen=True, kw_only=True)
class CacheTrial:
    """What became of a plan, predicted once more from what the processor and the links alone take."""

    arms: tuple[RunArm, RunArm]  # uncached, look-ahead
    speedup: Ratio
    hit_rate: float
    mbit_s: float  # payload, each way
    weights: RowWeights  # which both arms ended with


def try_cache(
    question: plan.CacheQuestion, tell: Callable[[str, float], None] | None = None
) -> tuple[tuple[Row, ...], CacheTrial]:
    """Run both arms, PAIRS times each; a row of the ledger per arm, whose error is the residual, and what became of it.

    Raises ForetraceError where this machine cannot have shaped links.
    """
    say = tell or (lambda what, share: None)
    netns.require()
    compute_s = plan.COMPUTE_S[0] if question.compute_s is None else question.compute_s
    question = replace(question, compute_s=compute_s)
    block = min(question.lookups.batches, question.look_ahead + MOST_BATCHES)
    setup = RowSetup(
        trainers=question.trainers, width=question.width, layers=plan.LAYERS,
        look_ahead={"uncached": 0, "look-ahead": question.look_ahead}, optimizer=question.optimizer,
        compute_s=compute_s,
    )  # fmt: skip
    with running(repeated(question.lookups, block, 2 * PAIRS), setup, link=question.link) as run:
        net = run.net
        assert net is not None
        nothing: plan.Range = (0.0, 0.0, 0.0)
        known: plan.Range = (compute_s, compute_s, compute_s)
        say("timing the links", 0.1)
        with netns.unshaped(net):
            unlimited = _rate(run.time(), question)
        rate = _rate(run.time(), question)
        bare = plan.Conditions(bytes_per_s=unlimited, host_s={False: nothing, True: nothing}, compute_s=known)
        ideal = plan.plan_cache(question, bare, batches=block, alone=True)
        plans: list[plan.CachePlan] = []

        def step(arm: str, number: int) -> float:
            """Return seconds of the slowest trainer's mean step in a block, once caches are full."""
            found = run.train(arm, number * block, (number + 1) * block, seconds=10.0 * block)
            ends = np.array([each.ends_s for each in found]).max(0)
            return float(ends[-1] - ends[ideal.warm - 1]) / (block - ideal.warm)

        def predict(number: int, order: Sequence[str]) -> None:
            say("running both ways in turns", 0.2 + 0.8 * number / PAIRS)
            with netns.unshaped(net):
                free = {arm: step(arm, 2 * number) for arm in order}
            beyond = {
                False: free["uncached"] - ideal.uncached.step_s,
                True: free["look-ahead"] - ideal.chosen.step.step_s,
            }
            found = replace(
                bare, bytes_per_s=rate, burst_bytes=netns.burst_bytes(net.link),
                host_s={ahead: _times(max(seconds, 0.0), HOST) for ahead, seconds in beyond.items()},
                free_s=_times(free["look-ahead"], FREE),
            )  # fmt: skip
            plans.append(plan.plan_cache(question, found, batches=block, alone=True))

        rounds = in_turns(_ARMS, lambda arm, number: step(arm, 2 * number + 1), PAIRS, before=predict)
        hits, weights = run.hit_rate, run.weights()
    if weights["uncached"] != weights["look-ahead"]:
        raise RuntimeError(f"look-ahead changed the weights: {weights}")
    speedup = paired_ratio(rounds["look-ahead"], rounds["uncached"])
    arms, rows = list[RunArm](), list[Row]()
    for arm, ahead in _ARMS.items():
        step_of = _middle([each.chosen.step if ahead else each.uncached for each in plans])
        trial = figured((step_of.step_s, step_of.low_s, step_of.high_s), rounds[arm])
        arms.append(RunArm(name=arm, predicted=step_of, steps_s=tuple(rounds[arm]), measured_s=trial.after.median_s,
                           residual=trial.error))  # fmt: skip
        own = {"look_ahead": question.look_ahead, "trainers": question.trainers, "link": question.link,
               "width": question.width, "optimizer": question.optimizer, "compute_s": compute_s, "hit_rate": hits,
               "residual": trial.error, "speedup": speedup.value,
               "weights": weights["uncached"].table[:16]}  # fmt: skip
        rows.append(trial.row(f"plan-cache {arm}", model=question.source, parameters=own,
                              size=f"{question.trainers} trainers, {question.link}"))  # fmt: skip
    return tuple(rows), CacheTrial(
        arms=(arms[0], arms[1]), speedup=speedup, hit_rate=hits, mbit_s=8e-6 * rate[0],
        weights=weights["uncached"],
    )  # fmt: skip


def repeated(lookups: Lookups, batches: int, times: int) -> Lookups:
    """Return the first batches of a trace, over and over."""
    tables = []
    for table in lookups.tables:
        offsets = table.offsets[: batches * lookups.samples + 1]
        ids = table.ids[: offsets[-1]]
        again = np.concatenate([offsets[:-1] + len(ids) * each for each in range(times)] + [[len(ids) * times]])
        tables.append(EmbeddingTable(name=table.name, rows=table.rows, ids=np.tile(ids, times), offsets=again))
    return Lookups(tables=tuple(tables), samples=lookups.samples)


def _rate(times: Sequence[Sequence[Sequence[float]]], question: plan.CacheQuestion) -> plan.Range:
    """Return bytes per second of a link from reads of two sizes, and how far trainers are apart."""
    small, large = TIMED
    more = plan.NUMBER * (large - small) * (question.width + row_optimizer(question.optimizer).state)
    middle = [median(more / max(seconds - median(few), 1e-9) for seconds in many) for few, many in times]
    value = 1 / float(np.mean([1 / each for each in middle]))
    return value, min(value, *middle), max(value, *middle)


def _times(seconds: float, shares: plan.Range) -> plan.Range:
    value, low, high = (seconds * each for each in shares)
    return value, low, high


def _middle(steps: Sequence[plan.PredictedStep]) -> plan.PredictedStep:
    """Return the median over rounds, with the range of all and of what the model leaves out."""
    return plan.PredictedStep(
        step_s=median(each.step_s for each in steps), low_s=min(each.low_s for each in steps) * (1 - MODEL_RANGE),
        high_s=max(each.high_s for each in steps) * (1 + MODEL_RANGE),
    )  # fmt: skip
