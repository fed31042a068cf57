"""What a technique changes without knowing what it will take: how far off that may be, by its share of the step.

Techniques look up what a change does to an operator (`cost.twins`). Where the call itself was not timed, similar ones
tell, or those of its name, each with a range. All that is told in this way is one assumption, `untimed`: a factor on
these tasks alone, whose range is theirs taken together (they may all be off in one direction). So it widens a
prediction by their share of the step, and by nothing where everything was timed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from foretrace.arrays import Float64
from foretrace.cost.operators.twins import Ratios
from foretrace.techniques.base import Prior

_LEAST_STRAY = 1.3  # calls of one name differ by at least so much in what a change does to them


def by_name(ratios: Ratios, names: Sequence[str], dur: Float64) -> Ratios:
    """Return `ratios` of tasks that run the operators `names` for `dur` ns each, gaps filled from other calls of the
    name.

    A gap gets the mean of its name's known ratios, weighted by time, and all that was met of them as its range. Where
    nothing of a name is known, it stays a gap.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for i, name in enumerate(names):
        groups[name].append(i)
    value, low, high = ratios.value.copy(), ratios.low.copy(), ratios.high.copy()
    for rows in groups.values():
        mine = np.array(rows)
        known = mine[~np.isnan(ratios.value[mine])]
        gaps = mine[np.isnan(ratios.value[mine])]
        if not len(known) or not len(gaps):
            continue
        weight = np.maximum(dur[known], 1.0)
        mean = float((ratios.value[known] * weight).sum() / weight.sum())
        value[gaps] = mean
        low[gaps] = min(float(ratios.low[known].min()), mean / _LEAST_STRAY)
        high[gaps] = max(float(ratios.high[known].max()), mean * _LEAST_STRAY)
    return Ratios(value=value, low=low, high=high, timed=ratios.timed)


def untimed(
    parts: Sequence[tuple[Float64 | float, Float64 | float, Float64 | float]], before_ns: float, all_ns: float
) -> dict[str, Prior]:
    """Return the assumption for new times that were not timed themselves; {} where there are none.

    `parts` are their central, low and high values in ns (NaN: nothing is said of it here); `before_ns` is what they
    took before, `all_ns` all tasks together.
    """
    value, low, high = (float(sum(np.nansum(each) for each in column)) for column in zip(*parts, strict=True))
    if value <= 0.0:
        return {}
    share = before_ns / all_ns if all_ns > 0 else 0.0
    return {
        "untimed": Prior(
            1.0,
            min(low / value, 1.0),
            max(high / value, 1.0),
            why=f"{100 * share:.2g} % of all work is changed and was not timed itself; similar calls, or others of its "
            "name, stand for it; foretrace calibrate run times it",
        )
    }
