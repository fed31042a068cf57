"""Sentences and facts that several faces say in the same words."""

from __future__ import annotations

from collections.abc import Sequence

from foretrace.report.advise_views import AdviceRow
from foretrace.report.ranks_views import CollectivesView
from foretrace.report.units import between, count, digits, in_unit, seconds, share, unit_for
from foretrace.report.views import AssumptionView, ChangeView, PathPart, ShowView, WhatIfView

# Where a kind of task runs.
WHERE = {
    "cpu": "host",
    "call": "host",
    "operator": "host",
    "python": "host",
    "data": "loader",
    "kernel": "GPU",
    "memset": "GPU",
    "copy": "copy",
    "collective": "network",
}

MOST_MISMATCHES = 6  # sentences about calls that do not match
MATTERS = 0.01  # an assumption whose range moves the predicted step by less is named, not explained
LEAST_SHARE = 0.03  # parts of a critical path below this share of the step are left out of the words


def facts(show: ShowView) -> list[str]:
    """What was recorded, in a few words each: source, device, ranks, steps."""
    device = show.device or {"cpu": "CPU only", "cuda": "NVIDIA GPU", "rocm": "AMD GPU"}.get(show.platform, "")
    if show.ranks == 1:
        rank = f"rank {show.rank_numbers[0] if show.rank_numbers else 0} of {show.world_size}"
    else:
        rank = f"{show.ranks} of {show.world_size} ranks"
    if show.step_source == "whole trace":
        steps = "no steps marked"
    else:
        steps = "1 step" if show.steps == 1 else f"{count(show.steps)} steps"
    return [fact for fact in (show.source, device, rank, steps) if fact]


def step_spread(show: ShowView) -> str:
    """As in "median of 6 steps, p10 164 – p90 179 ms"; one step has no spread and says so."""
    if show.interval_s is not None:
        unit = unit_for(show.step_time_s.median)
        return f"not recorded: 80 % interval {between(*show.interval_s, unit)} {unit.name}"
    if show.steps <= 1:
        return "one step recorded, so no spread is known"
    step = show.step_time_s
    unit = unit_for(step.median)
    low, high = between(step.p10, step.p90, unit).split(" – ")
    return f"median of {count(show.steps)} steps, p10 {low} – p90 {high} {unit.name}"


def interval_text(view: WhatIfView) -> str:
    """As in "80 % interval 84.0 – 101 ms"."""
    unit = unit_for(view.before_s)
    return f"{100 * view.interval_level:.3g} % interval {between(*view.interval_s, unit)} {unit.name}"


def reading_notes(show: ShowView) -> list[str]:
    """What the numbers rest on, most important first; ends with what the recording's builder noted."""
    notes = [
        "The parts of a step exclude each other and sum to the median step: a moment counts as compute while "
        "any kernel runs, and as a wait only when none does."
        if show.platform != "cpu"
        else "The parts of a step exclude each other and sum to the median step."
    ]
    if show.step_source != "whole trace":
        notes.append(f"Steps are bounded by {show.step_source} events.")
    else:
        notes.append("The recording marks no steps, so the whole recording counts as one.")
    if show.attributed_gpu_share is not None:
        notes.append(f"{share(show.attributed_gpu_share)} of the GPU time is attributed to a layer, phase or operator.")
    notes += trust(show)
    if show.ranks < show.world_size:
        notes.append(
            f"{show.ranks} of {show.world_size} ranks were recorded here: time inside collectives includes "
            "waiting for the others."
        )
    return [*notes, *show.notes]


def advice(row: AdviceRow) -> str:
    """As in "prefetch-data saves 56.6 ms (35.9 – 60.7): one argument of the DataLoader"."""
    unit = unit_for(row.saved_s)
    span = f" ({between(*row.saved_range_s, unit)})" if row.saved_range_s else ""
    return f"{row.name} saves {in_unit(row.saved_s, unit)} {unit.name}{span}{f': {row.effort}' if row.effort else ''}"


def collectives(view: CollectivesView, *, one_step: bool) -> list[str]:
    """What waiting and transfers cost, and what the set of recordings lacks."""
    lines = [f"Transfers that take no time would save {seconds(max(view.saved_if_free_s, 0.0))} per step."]
    if view.saved_if_together_s > 0:
        step = "the step" if one_step else "the first step"
        lines.append(
            f"Ranks that enter the recording together would save {seconds(view.saved_if_together_s)} of {step}."
        )
    shown = [*view.missing, *view.unmatched]
    if len(shown) > MOST_MISMATCHES:
        shown = [*shown[:MOST_MISMATCHES], f"{count(len(shown) - MOST_MISMATCHES)} more mismatches: --json."]
    return lines + shown


def trust(show: ShowView) -> list[str]:
    """What makes answers about this recording less certain."""
    from foretrace.simulate.check import UNEXPLAINED_REFUSE, UNEXPLAINED_WARN  # loads compiled code

    delays = show.unexplained_gpu_share or 0.0
    if delays < UNEXPLAINED_WARN:
        return []
    sentence = f"{share(delays)} of the GPU's span are delays that no recorded dependency explains"
    if delays >= UNEXPLAINED_REFUSE:
        return [f"{sentence}: too many to say what a change of the GPU's work would do."]
    return [f"{sentence}: less certain than usual what a change of the GPU's work would do."]


def change_text(made: ChangeView, several: bool) -> str:
    """What one edit did, with the technique's name where several were applied."""
    return f"{made.technique}: {made.what}" if several and made.technique else made.what


def assumption_text(a: AssumptionView) -> str:
    """As in "ratio 2.50× (plausible 2.00 – 3.10×: step 97.2 – 88.1 ms), from the catalog; replace it with …"."""
    why = a.why.rstrip(".")
    replaced = f"; replace it with {assumption_flag(a)}" if a.flag else ""
    return f"{a.name} {assumption_value(a)} {assumption_range(a)}: {why}{replaced}"


def assumptions_that_matter(view: WhatIfView) -> tuple[AssumptionView, ...]:
    """The first assumptions: those that move the step by a hundredth or more, and always the first one."""
    moved = [max(abs(a.step_at_low_s - view.after_s), abs(a.step_at_high_s - view.after_s)) for a in view.assumptions]
    return tuple(a for i, a in enumerate(view.assumptions) if i == 0 or moved[i] >= MATTERS * view.after_s)


def other_assumptions(view: WhatIfView, rest: Sequence[AssumptionView]) -> str:
    """As in "conv 3.47×, norm 0.600×: each moves the step by less than 1 %"."""
    several = len({a.technique for a in view.assumptions}) > 1
    named = ", ".join(
        f"{a.technique + ' ' if several and a.technique else ''}{a.name} {assumption_value(a)}" for a in rest
    )
    return f"{named}: {'each moves' if len(rest) > 1 else 'moves'} the step by less than {100 * MATTERS:g} %"


def assumption_value(a: AssumptionView) -> str:
    """The value with its unit."""
    return digits(a.value) + _suffix(a.unit)


def assumption_range(a: AssumptionView) -> str:
    """As in "(plausible 2.00 – 3.10×: step 97.2 – 88.1 ms)"."""
    unit = unit_for(max(a.step_at_low_s, a.step_at_high_s))
    steps = between(a.step_at_low_s, a.step_at_high_s, unit)
    low, high = steps.split(" – ")
    effect = f"step stays {low}" if low == high else f"step {steps}"
    return f"(plausible {digits(a.low)} – {digits(a.high)}{_suffix(a.unit)}: {effect} {unit.name})"


def assumption_flag(a: AssumptionView) -> str:
    """What to write on the command line to replace it: "mixed-precision ratio=…"."""
    return f"{a.technique} {a.flag}=…"


def _suffix(unit: str) -> str:
    return unit if unit in ("", "×", "x") else f" {unit}"


def path_text(parts: Sequence[PathPart]) -> str:
    """As in "data loading 58.0 → backward kernels 61.2 ms", the parts that matter only."""
    total = sum(part.time_s for part in parts)
    kept = [part for part in parts if part.time_s >= LEAST_SHARE * total and part.time_s > 0]
    unit = unit_for(total)
    return " → ".join(f"{part.name} {in_unit(part.time_s, unit)}" for part in kept) + (f" {unit.name}" if kept else "")


def path_change(view: WhatIfView) -> str:
    """The critical path after the change, and before it if it moved."""
    after = path_text(view.critical_path_after)
    if not view.critical_path_moved:
        return f"{after} (where it was)"
    return f"{after} (before: {path_text(view.critical_path_before)})"


def interval_source(view: WhatIfView) -> str:
    """Where the interval of a prediction comes from."""
    return f"{interval_text(view)}: {view.interval_source}."


def error_text(error: float) -> str:
    """As in "−0.12 %", "0 %" where it is below the third digit."""
    text = share(error)
    return "+" + text if error > 0 and text != "0 %" else text
