"""The first sentence: what holds the step back, or what a change would do. One claim with its numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from foretrace.report.names import short_name
from foretrace.report.units import between, change, in_unit, of, seconds, share, speed, unit_for
from foretrace.report.views import BreakdownView, part_word
from foretrace.simulate.breakdown import Recurring, bottleneck
from foretrace.simulate.timeline import BlameRow
from foretrace.techniques.compute.rates import operator_words

NOISE_SHARE = 0.001  # breakdown parts below this share of the step are not worth a word
_APART = 0.05  # mean and median step that differ by more are named apart
_WAITS = {
    "data_loading": "{who} waits for data{when}: {spent} are DataLoader work that nothing overlaps.",
    "launch_bound": "The GPU waits for the host{when}: {spent} pass before the next kernel is launched.",
    "exposed_communication": "Communication is not hidden{when}: {spent} are collectives beside no compute{alone}.",
    "exposed_copy": "Copies are not hidden{when}: {spent} are memory copies that no compute overlaps.",
    "synchronisation": "Synchronisation empties the GPU{when}: in {spent} a blocking call waits while nothing runs.",
    "idle": "{who} idles{when}: {spent} pass without work, and the recording does not say why.",
}
_ON_CPU = {
    "launch_bound": "Python holds the step back{when}: {spent} pass between operators.",
    "synchronisation": "Threads wait for each other{when}: {spent} are synchronisation.",
}


def show(
    breakdown: BreakdownView,
    rows: Sequence[BlameRow],
    *,
    platform: str,
    ranks: int,
    every: bool,
    recurring: Recurring | None = None,
    mean: BreakdownView | None = None,
) -> str:
    """Return what holds the step back. `rows` are blame rows by name; `every` is false for a single step.

    With a `recurring` wait the sentence is about the `mean` step, and says in how many steps the wait is.
    """
    part, when = bottleneck(breakdown.parts()), ""
    if recurring is not None and mean is not None:
        breakdown, part = mean, recurring.part
        when = f"in {recurring.steps} of {recurring.of} steps"
    total = sum(breakdown.parts().values())
    if total <= 0:
        return "The recording holds no step that takes time."
    spent = of(getattr(breakdown, part), total, every=every)
    if when:
        spent = f"on average {spent}"
        when = f" {when}"
    if part == "compute":
        return _compute(
            breakdown, rows, mean_s=sum((mean or breakdown).parts().values()), platform=platform, every=every
        )
    sentence = _ON_CPU.get(part, _WAITS[part]) if platform == "cpu" else _WAITS[part]
    alone = "" if ranks > 1 else "; one rank alone cannot tell waiting from transfer"
    who = "The CPU" if platform == "cpu" else "The GPU"
    return sentence.format(who=who, when=when, spent=spent, alone=alone)


def apart(step_s: float, mean_s: float) -> bool:
    """Return whether the mean step has to be named beside the median one."""
    return abs(mean_s - step_s) > _APART * step_s


def _on_average(part_s: float, step_s: float, mean_s: float, *, every: bool) -> str:
    """Return a part of the mean step beside the step; beside the mean step where the two differ: one step was long."""
    if apart(step_s, mean_s):
        return f"on average {of(part_s, mean_s, every=every)}"
    return of(part_s, step_s, every=every)


def _compute(
    breakdown: BreakdownView, rows: Sequence[BlameRow], *, mean_s: float, platform: str, every: bool
) -> str:  # fmt: skip
    parts = breakdown.parts()
    total = sum(parts.values())
    spent = of(parts["compute"], total, every=every)
    unit = unit_for(total)
    if platform == "cpu":
        classes: dict[str, float] = defaultdict(float)
        for row in rows:
            if row.kind == "operator":
                classes[operator_words(row.name)] += row.time_s
        ranked = sorted(classes.items(), key=lambda item: (-item[1], item[0]))
        if not ranked:
            return f"The CPU computes all the time: {spent} are operators."
        (first, time), rest = ranked[0], ranked[1:2]
        tail = "".join(f", {name} {in_unit(t, unit)}" for name, t in rest if t >= 0.05 * total)
        return f"The CPU is the limit: {first} take {_on_average(time, total, mean_s, every=every)}{tail}."
    kernels = [row for row in rows if row.kind == "kernel"]
    tail = ""
    if kernels:
        top = max(kernels, key=lambda row: row.time_s)
        tail = f"; {short_name(top.name, 40)} alone takes {in_unit(top.time_s, unit)}"
    wait = max((name for name in parts if name != "compute"), key=lambda name: parts[name])
    if not tail and parts[wait] >= 0.05 * total:
        tail = f"; {in_unit(parts[wait], unit)} are {part_word(wait, platform)}"
    return (
        f"The GPU computes nearly all the time: {spent} are kernels{tail}."
        if parts["compute"] >= 0.9 * total
        else f"Compute takes most of the step: {spent} are kernels{tail}."
    )


def simulate(step_s: float, measured_s: float, structural_error: float) -> str:
    """Return how well the replay stands for the recording."""
    error = (step_s - measured_s) / measured_s if measured_s else 0.0
    structural = f"with typical instead of recorded waits it is {share(abs(structural_error))} off."
    if abs(error) < 5e-6:
        return f"The replay takes exactly the recorded {seconds(measured_s)} per step; {structural}"
    return (
        f"The replay takes {seconds(step_s)} per step where {seconds(measured_s)} were recorded "
        f"({share(abs(error))} {'more' if error > 0 else 'less'}); {structural}"
    )


def blame(rows: Sequence[BlameRow], step_s: float, mean_s: float, *, every: bool) -> str:
    """Return the first of the ranking: who saves most if 10 % faster, and what is saved without it.

    `rows` are about the mean step of `mean_s`, `step_s` is the median one.
    """
    named = [row for row in rows if row.saved_if_10pct_faster_s > 0]
    if not named:
        return "Nothing in this recording would make the step faster if it were 10 % faster itself."
    top = named[0]
    who = f"What has {short_name(top.name)[1:-1]}" if top.name.startswith("(no ") else short_name(top.name)
    return (
        f"{who} holds the step back most: without it, "
        f"{_on_average(top.saved_if_removed_s, step_s, mean_s, every=every)} would be saved, "
        f"{seconds(top.saved_if_10pct_faster_s)} if it were 10 % faster."
    )


def whatif(
    before_s: float, after_s: float, interval_s: tuple[float, float], ratio: tuple[float, float] | None = None
) -> str:
    """Return text such as "1.89× faster: 174 → 92.0 ms per step (84.0 – 101)."; says where that is within the noise.

    `ratio` is the interval of after / before where the step before is uncertain, too.
    """
    unit = unit_for(before_s)
    numbers = f"{in_unit(before_s, unit)} → {in_unit(after_s, unit)} {unit.name} per step"
    answer = speed(before_s, after_s)
    answer = answer[0].upper() + answer[1:]
    low, high = (end / before_s for end in interval_s) if ratio is None and before_s else ratio or interval_s
    if answer != "No change" and low <= 1 <= high:
        answer += ", within the noise"
    return f"{answer}: {numbers} ({between(*interval_s, unit)})."


def compare(before_s: float, after_s: float, parts: BreakdownView, *, platform: str) -> str:
    """Return which side is faster and which part of the step explains most of it."""
    unit = unit_for(max(before_s, after_s))
    numbers = f"{in_unit(before_s, unit)} → {in_unit(after_s, unit)} {unit.name} per step"
    answer = speed(before_s, after_s)
    if answer == "no change":
        return f"Both take the same time: {numbers}."
    difference = after_s - before_s
    name, most = max(parts.parts().items(), key=lambda item: item[1] * (1 if difference > 0 else -1))
    tail = "" if abs(most) < NOISE_SHARE * before_s else f", most of it {part_word(name, platform)} ({change(most)})"
    return f"The second is {answer}: {numbers}{tail}."
