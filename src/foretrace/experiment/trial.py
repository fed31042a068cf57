"""A trial: arms run in turns, the prediction made before is held against their rounds, and a row says what came of it.

    rounds = in_turns(["plan", "again"], lambda name, number: run_plan(), 5, warm_up=1)  # seconds by arm and round
    trial = figured((value_s, low_s, high_s), rounds["plan"], rounds["again"])
    ledger.keep(trial.row("plan-rows plan", model=..., size=..., parameters=...))

What runs an arm - this process, others that are asked - is the business of the function that is given.
"""

from __future__ import annotations

import platform
import uuid
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from math import inf
from typing import Any, TypeVar

import msgspec

from foretrace.cost.operators.machine import allocator_settings, fingerprint
from foretrace.deadline import Clock, Deadline
from foretrace.experiment import statistics
from foretrace.experiment.ledger import Row
from foretrace.experiment.statistics import LEAST_FLOOR, MOST_SPREAD, Arm, Ratio, Verdict, floor, paired_ratio

K = TypeVar("K")
T = TypeVar("T")


def in_turns(
    arms: Iterable[K], run: Callable[[K, int], T], rounds: int, *, warm_up: int = 0, least: int = 1, most: int = 0,
    seconds: float = inf, good: Callable[[], int] | None = None, tell: Callable[[float], None] | None = None,
    before: Callable[[int, Sequence[K]], object] | None = None, clock: Clock | None = None,
) -> dict[K, list[T]]:  # fmt: skip
    """Return what every arm gives, by round; who begins changes from round to round.

    Args:
        arms: their names.
        run: runs one, in the round of that number.
        rounds: that count.
        warm_up: rounds before them, with numbers below 0, of which nothing is kept.
        least: rounds that are run however long they take.
        most: rounds at most, where `good` says that some have to be run again; by default `rounds`.
        seconds: a round that would not end within is not begun, once there are `least`.
        good: how many of the rounds so far are fit for use; by default all.
        tell: hears of the share that is done.
        before: called before every round with its number and the order of its arms.
        clock: of `seconds`.

    """
    order, until, number = list(arms), Deadline(seconds, clock), -warm_up
    found: dict[K, list[T]] = {name: [] for name in order}
    while True:
        if before is not None:
            before(number, order)
        with until.part("round"):
            for name in order:
                made = run(name, number)
                if number >= 0:
                    found[name].append(made)
        order, number = order[1:] + order[:1], number + 1
        done = max(number, 0) if good is None else good()
        if tell is not None:
            tell(min(done / rounds, 1.0))
        if done >= rounds or number >= (most or rounds) or (number >= least and not until.allows("round")):
            return found


class TriedPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """A prediction beside what was measured, as ratios to a baseline, and the verdict.

    Made by `changed` for arms of which one is the baseline, and by `figured` for seconds that were predicted: there the
    predicted seconds are the baseline.
    """

    predicted: Ratio
    measured: Ratio  # 80 % interval of the rounds' median
    same: Ratio  # one thing against itself: what cannot be told from no difference
    before_s: float
    after: Arm
    clock: str  # "cpu": the process's own time; "wall"
    seed: int
    uncertain: str  # why nothing was concluded, one sentence
    verdict: Verdict
    covered: bool  # whether the predicted interval holds what was measured, or noise is larger than the difference

    @property
    def error(self) -> float:
        """Predicted over measured, less 1: +0.05 predicts a step 5 % too long."""
        return self.predicted.value / self.measured.value - 1.0

    def row(
        self, techniques: str, *, model: str, size: str, parameters: dict[str, Any], threads: int = 1,
        batches: str = "ready", device: str = "cpu", samples: tuple[int, int] | None = None, **own: Any,
    ) -> Row:  # fmt: skip
        """Return what the ledger keeps, with a new id and the present time.

        Args:
            techniques: as on a command line; of a figure its name, whose first word names it in summaries.
            model: what ran.
            size: and how.
            parameters: by technique, or of the figure.
            threads: of a process.
            batches: "ready" or "loader".
            device: where it ran.
            samples: of a step of the baseline and of the changed one; by default how many rounds there were.
            own: further columns; machine, allocator and versions, given together, are by default this process's.

        """
        if (name := techniques.split(maxsplit=1)[0]) not in parameters:
            parameters = {name: parameters}
        rounds = len(self.after.blocks_s)
        before, after = samples or (rounds, rounds)
        if "machine" not in own:
            own |= {"machine": fingerprint(), "allocator": allocator_settings(), **versions()}
        return Row(
            id=str(uuid.uuid4()), time=datetime.now(tz=UTC).isoformat(timespec="seconds"), techniques=techniques,
            model=model, size=size, threads=threads, batches=batches, device=device, clock=self.clock, seed=self.seed,
            before_s=self.before_s, after_s=self.after.median_s, samples_before=before, samples_after=after,
            predicted=self.predicted.value, predicted_low=self.predicted.low, predicted_high=self.predicted.high,
            measured=self.measured.value, measured_low=self.measured.low, measured_high=self.measured.high,
            same=self.same.value, same_low=self.same.low, same_high=self.same.high, error=self.error,
            covered=self.covered, verdict=self.verdict, parameters=parameters,
            **{"arms": {}, "assumptions": (), "residual": (), "notes": ()} | own,
        )  # fmt: skip


def changed(
    predicted: Ratio, before: Arm, again: Arm, after: Arm, *, clock: str = "wall", seed: int = 0, uncertain: str = ""
) -> TriedPrediction:
    """Hold a predicted ratio against an arm and two copies of the baseline, which ran in the same rounds.

    The baseline of a round is the mean of its copies: what is peculiar to one of them counts half. `uncertain` is a
    reason not to conclude that the rounds themselves do not show.
    """
    measured = paired_ratio(means(before.blocks_s, again.blocks_s), after.blocks_s, seed=seed)
    same = paired_ratio(before.blocks_s, again.blocks_s, seed=seed)
    uncertain = uncertain or statistics.too_uncertain([before, again, after], measured, clock)
    return TriedPrediction(
        predicted=predicted, measured=measured, same=same, before_s=before.median_s, after=after, clock=clock,
        seed=seed, uncertain=uncertain, verdict=statistics.verdict(predicted, measured, same=same, uncertain=uncertain),
        covered=predicted.holds(measured.value),
    )  # fmt: skip


def figured(
    predicted_s: tuple[float, float, float], rounds_s: Sequence[float], again_s: Sequence[float] = (), *,
    each_s: Sequence[float] = (), clock: str = "wall", seed: int = 0,
) -> TriedPrediction:  # fmt: skip
    """Hold predicted seconds (value, low, high) against rounds of the same thing.

    `again_s` are rounds of a second copy, and a round is their mean; without one, each round is held against the one
    before it. `each_s` are the predictions where every round had one of its own. Nothing is concluded where the rounds
    spread by more than MOST_SPREAD, or a value outside of the range cannot be told from one inside it.
    """
    value, low, high = predicted_s
    predicted = Ratio(value=1.0, low=low / value, high=high / value)
    first, second = (rounds_s, again_s) if again_s else (rounds_s[:-1], rounds_s[1:])
    after = Arm.of(means(rounds_s, again_s) if again_s else rounds_s)
    measured = paired_ratio(each_s or [value] * len(rounds_s), after.blocks_s, seed=seed)
    same = paired_ratio(first, second, seed=seed) if first else Ratio(value=1.0, low=1.0, high=1.0)
    held, noise = predicted.holds(measured.value) or measured.effect <= LEAST_FLOOR, floor(same)
    overlap = measured.low <= predicted.high and measured.high >= predicted.low
    uncertain = ""
    if after.spread > MOST_SPREAD:
        uncertain = (
            f"the rounds spread by {100 * after.spread:.0f} % (interquartile range; limit {100 * MOST_SPREAD:.0f} %)"
        )
    elif not held and (measured.effect <= noise or overlap):
        uncertain = (
            f"the prediction is off by {100 * measured.effect:.0f} %, rounds of the same thing differ by "
            f"{100 * noise:.0f} %, and what was measured is known to ± {100 * measured.half_width:.0f} % only"
        )
    covered = held or measured.effect <= noise
    concluded = Verdict.COVERED if covered else Verdict.MISSED
    return TriedPrediction(
        predicted=predicted, measured=measured, same=same, before_s=value, after=after, clock=clock, seed=seed,
        uncertain=uncertain, verdict=Verdict.INCONCLUSIVE if uncertain else concluded, covered=covered,
    )  # fmt: skip


def means(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Return the means of two copies, by round."""
    return [(a + b) / 2 for a, b in zip(first, second, strict=True)]


def versions() -> dict[str, str]:
    """Return the versions of Python, PyTorch and foretrace."""
    from importlib.metadata import version

    import torch

    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "foretrace": version("foretrace"),
    }
