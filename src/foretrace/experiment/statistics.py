"""What blocks of two arms say about their ratio, and whether a prediction stands up to it.

Arms run in short blocks, one after the other, and are compared within a round (one block of every arm), so that what
changes slowly - clock frequency, neighbours on the machine, heat - cancels. The ratio is the median over rounds; its
80 % interval comes from resampling whole rounds, and from Student's t where they are few. The baseline runs as two
separate arms: their ratio, which would be 1 on a perfect machine, is the floor below which this one can show nothing,
and the changed arm is compared with their mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from math import sqrt

import msgspec
import numpy as np

from foretrace.arrays import Float64

LEVEL = 0.8  # of every interval here, as of the predictions
RESAMPLES = 2_000
FEW = 6  # rounds; of fewer, resampled medians stay between two of them: of five, 62 % of the intervals hold the truth
# Two copies of one training in one process differ by up to this, even where one
# pair happens to agree better; smaller effects are not claimed.
LEAST_FLOOR = 0.02
QUIET_SPREAD = 0.10  # interquartile range over median of the blocks: conclude on either clock
MOST_SPREAD = 0.25  # ... on CPU time; beyond it, nothing is concluded
LEAST_PRECISION = 0.02  # half the interval of the ratio may always be as wide as this ...
SHARE_OF_EFFECT = 1 / 3  # ... or as wide as this share of the effect


class Verdict(StrEnum):
    """What a verification came to."""

    COVERED = "covered"  # the predicted interval holds the measured ratio
    MISSED = "missed"
    NO_CHANGE = "no measurable change"  # effect below the floor, and the prediction does not contradict it
    INCONCLUSIVE = "inconclusive"  # too much else went on


class Arm(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of one arm, summed up. Times are seconds per step on the clock that the verification used."""

    median_s: float
    p10_s: float
    p90_s: float
    spread: float  # interquartile range over median
    mean_s: float  # without the lowest and highest fifth
    blocks_s: tuple[float, ...]  # mean step of every block, in the order in which they ran

    @classmethod
    def of(cls, blocks_s: Sequence[float]) -> Arm:
        """Sum up mean step times of blocks; at least one."""
        times = np.asarray(blocks_s, dtype=np.float64)
        p10, q1, median, q3, p90 = np.quantile(times, [0.1, 0.25, 0.5, 0.75, 0.9]).tolist()
        return cls(
            median_s=median,
            p10_s=p10,
            p90_s=p90,
            spread=(q3 - q1) / median if median else 0.0,
            mean_s=trimmed_mean(times, 0.2),
            blocks_s=tuple(times.tolist()),
        )


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """Treated over baseline step, with its 80 % interval."""

    value: float
    low: float
    high: float

    @property
    def effect(self) -> float:
        """Distance from no change."""
        return abs(self.value - 1.0)

    @property
    def half_width(self) -> float:
        """Half the length of the interval."""
        return (self.high - self.low) / 2

    def holds(self, value: float) -> bool:
        """Return whether a value lies in the interval."""
        return self.low <= value <= self.high


def trimmed_mean(values: Sequence[float] | Float64, share: float) -> float:
    """Return mean without the lowest and highest `share` of the values (rounded down)."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    cut = int(share * len(ordered))
    return float(ordered[cut : len(ordered) - cut].mean())


def paired_ratio(first: Sequence[float], second: Sequence[float], *, seed: int = 0, level: float = LEVEL) -> Ratio:
    """Return the median over rounds of second / first, with the bootstrap interval of that median (percentile method).

    Of FEW rounds the interval is that of their geometric mean by Student's t, and one round alone has none: its ends
    are its value. Both hold one time per round, in the same order. The same input and seed give the same interval.
    """
    ratios = np.asarray(second, dtype=np.float64) / np.asarray(first, dtype=np.float64)
    value, rounds = float(np.median(ratios)), len(ratios)
    if rounds < FEW:
        from foretrace.simulate.noise import t_quantile

        logs = np.log(ratios)  # so that no end is 0, however far two rounds lie apart
        half = t_quantile((1 + level) / 2, rounds - 1) * logs.std(ddof=1) / sqrt(rounds) if rounds > 1 else 0.0
        low, high = np.exp([logs.mean() - half, logs.mean() + half]).tolist()
    else:
        drawn = np.random.default_rng(seed).integers(0, rounds, size=(RESAMPLES, rounds))
        medians = np.median(ratios[drawn], axis=1)
        low, high = np.quantile(medians, [(1 - level) / 2, (1 + level) / 2]).tolist()
    return Ratio(value=value, low=min(low, value), high=max(high, value))


def floor(same: Ratio) -> float:
    """Return the smallest change of the step that can be told from none, given the baseline against itself."""
    return max(LEAST_FLOOR, abs(same.low - 1.0), abs(same.high - 1.0))


def too_uncertain(arms: Sequence[Arm], measured: Ratio, clock: str) -> str:
    """Return why nothing can be concluded from these blocks, one sentence; empty where something can."""
    spread = max(arm.spread for arm in arms)
    limit = MOST_SPREAD if clock == "cpu" else QUIET_SPREAD
    if spread > limit:
        return (
            f"the blocks of one arm spread by {100 * spread:.0f} % (interquartile range; limit {100 * limit:.0f} % "
            f"on the {_CLOCKS[clock]})"
        )
    allowed = max(LEAST_PRECISION, SHARE_OF_EFFECT * measured.effect)
    if measured.half_width > allowed:
        return f"the measured ratio is known to ± {100 * measured.half_width:.1f} % only (limit {100 * allowed:.1f} %)"
    return ""


def strays(recorded_s: Sequence[float], baseline: Sequence[Arm]) -> str:
    """Return why a prediction from these recorded steps cannot be held against arms with this baseline; empty if it
    can.

    Recording and baseline are the same training in the same process on the same clock. Where they differ by more than
    either of them varies, the prediction started from another step than the one that was measured.
    """
    recorded = Arm.of(recorded_s)
    own_s = float(np.mean([arm.median_s for arm in baseline]))
    apart = abs(recorded.median_s / own_s - 1.0)
    allowed = max(LEAST_FLOOR, recorded.spread, *(arm.spread for arm in baseline))
    if apart <= allowed:
        return ""
    return (
        f"the recorded step ({1e3 * recorded.median_s:.3g} ms) and the baseline of the arms ({1e3 * own_s:.3g} ms) "
        f"differ by {100 * apart:.0f} %, and neither varies by more than {100 * allowed:.0f} %"
    )


def verdict(predicted: Ratio, measured: Ratio, *, same: Ratio, uncertain: str = "") -> Verdict:
    """Return what it came to; `uncertain` is the reason not to conclude, if there is one."""
    if uncertain:
        return Verdict.INCONCLUSIVE
    least = floor(same)
    if measured.effect <= least and predicted.low <= 1.0 + least and predicted.high >= 1.0 - least:
        return Verdict.NO_CHANGE
    return Verdict.COVERED if predicted.holds(measured.value) else Verdict.MISSED


_CLOCKS = {"cpu": "CPU clock", "wall": "wall clock"}
