"""The Dally study as a section of a page, between marks, with the plot of its timers beside the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path

from foretrace.files import write_bytes, write_text
from reproductions.dally.study import DallyStudy, LeaseRow, LoggedRow, Mean
from reproductions.dally.sums import TITLES, percent

MARKS = "<!-- dally: written by make reproduce NAME=dally -->", "<!-- end of dally -->"
PLOT = "timers.svg"
COLOURS = ("#0b57d0", "#b3261e", "#146c2e", "#8430ce", "#b06000", "#5f6368")


def write(study: DallyStudy, path: Path) -> None:
    """The section in the place of its former self, at the end of the page where there is none, else a new page."""
    text = path.read_text(encoding="utf-8") if path.exists() else "# Dally\n"
    plot = timers_svg(study)
    part = section(study, plot=PLOT if plot else None)
    if MARKS[0] in text:
        before, _, rest = text.partition(MARKS[0])
        text = before + part + rest.partition(MARKS[1])[2]
    else:
        text = text.rstrip("\n") + "\n\n" + part + "\n"
    write_text(path, text)
    if plot:
        write_bytes(path.parent / PLOT, plot.encode())


def section(study: DallyStudy, *, plot: str | None = None) -> str:
    """The tables in Markdown, between their marks."""
    quick = ", in its quick form" if study.quick else ""
    log = f", with jobs of {study.trace}" if study.trace else ", without a log"
    lines = [
        MARKS[0],
        "## Figures",
        "",
        f"*{study.date}, {study.machine}; {study.cells:,} cells, {study.runs:,} runs, {study.seeds} seeds{log}{quick}. "
        f"{study.capped:,} runs needed more events than allowed (or stand behind one in its cell) and are in no "
        "figure. Nothing here depends on the machine.*",
        "",
        study.headline,
        "",
        "Gains are shares of the baseline's figure: −83 % is 83 % less. What everything rests on:",
        "",
        *(f"- {each}" for each in study.assumptions),
        "",
        *_claims(study),
        *_gains(study),
        *_findings(study),
        *_drivers(study),
        *_factors(study),
        *_repeated(study),
        *_timers(study, plot),
        *_leases(study),
        *_spreads(study),
        *_logged(study),
        MARKS[1],
    ]
    return "\n".join(lines)


def _claims(study: DallyStudy) -> list[str]:
    rows = [
        (
            row.claim,
            f"**{row.verdict}**",
            "<br>".join(
                met + (f": {only}" if only else "")
                for met, only in zip(row.reached_against, row.reached_only_where, strict=True)
            )
            or "nobody",
            ", ".join(row.not_reached) or "–",
        )
        for row in study.claims
    ]
    return [
        "### Published claims",
        "",
        "Dally with tuned timers, over all cells of the grid, one run each. Behind the colon: what all cells that "
        "reach it have in common.",
        "",
        *_rows(("claim", "", "reached against (best)", "not reached against (best)"), rows),
    ]


def _gains(study: DallyStudy) -> list[str]:
    at = {(row.figure, row.baseline): row for row in study.gains}
    figures = ("makespan_h", "jct_h", "comm_h", "above_h", "comm_share")
    rows = []
    for baseline in dict.fromkeys(row.baseline for row in study.gains):
        cells = []
        for figure in figures:
            row = at.get((figure, baseline))
            cells.append(f"{percent(row.median)} / {percent(row.best)} / {percent(row.worst)}" if row else "–")
        one = at["jct_h", baseline]
        rows.append((baseline, f"{one.cells} ({one.left_out})", *cells))
    best = [(row.policy, str(row.jct), str(row.makespan), str(row.comm)) for row in study.best]
    return [
        "### Dally against every policy",
        "",
        "Median / best / worst. In brackets cells left out as capped. `fifo-hol` blocks at the head of the line, "
        "`fifo-skip` does not, both place strictly; `tiresias` is LAS with leases and lets ResNet and BERT "
        "spread, `tiresias-queues` has bands and preempts at any event; `dally-inf` and `dally-0` never and at once "
        "spread; `rr-auto` and `las-auto` have Dally's placement with another order.",
        "",
        *_rows(("baseline", "cells", *(TITLES[figure] for figure in figures)), rows),
        "Cells in which a policy is the best or within 0.1 % of it, of those where policies differ by over 1 %:",
        "",
        *_rows(("policy", "mean completion time", "makespan", "communication"), best),
    ]


def _findings(study: DallyStudy) -> list[str]:
    return [
        "### Held against earlier findings",
        "",
        "Found earlier with another simulator on the published jobs; verdicts are on the statement, not its figures.",
        "",
        *_rows(
            ("finding", "earlier", "here", "verdict"),
            [(row.finding, row.earlier, row.here, f"**{row.verdict}**") for row in study.findings],
        ),
    ]


def _drivers(study: DallyStudy) -> list[str]:
    rows = [
        (
            f"{row.dimension} {row.value}".strip(),
            str(row.cells),
            *(
                percent(each)
                for each in (
                    row.makespan_hol, row.jct_hol, row.jct_skip, row.jct_las, row.comm_gandiva, row.comm_gandiva_best,
                )
            ),
        )
        for row in study.drivers
    ]  # fmt: skip
    head = (
        "cells with", "n", "makespan, fifo-hol", "JCT, fifo-hol", "JCT, fifo-skip", "JCT, las-strict",
        "communication, gandiva-like", "the same, best cell",
    )  # fmt: skip
    words = (
        "Median gains of Dally among the cells of each kind. The kinds of a dimension are compared on cells that "
        "differ in nothing else and were played to the end for all of them."
    )
    return ["### What drives it", "", words, "", *_rows(head, rows)]


def _factors(study: DallyStudy) -> list[str]:
    if not study.factors:
        return []
    rows = [
        (
            "yes" if row.leases else "no",
            row.order,
            row.place,
            *(percent(each) for each in (row.jct, row.makespan, row.comm, row.above)),
        )
        for row in study.factors
    ]
    return [
        "### Order × placement",
        "",
        f"Medians over {study.factors[0].cells} cells against order of submission, strict placement, no leases. "
        "Infinite timers are *strict*; *manual* is 1 and 2 leases; without leases nobody who waits has had any "
        "service, so every order is that of submission.",
        "",
        *_rows(("leases", "order", "placement", "JCT", "makespan", "communication", "above machines"), rows),
    ]


def _repeated(study: DallyStudy) -> list[str]:
    lines = []
    for name, kind in dict.fromkeys((row.cell, row.kind) for row in study.repeated):
        rows = [
            (
                row.policy,
                *(_mean(each) for each in (row.jct_h, row.makespan_h, row.comm_h, row.above_h)),
                f"{100 * row.makespan_scatter:.1f} %",
                *(
                    _ratio(ratio, verdict)
                    for ratio, verdict in zip(
                        (row.ratio_jct, row.ratio_makespan, row.ratio_comm), row.verdicts, strict=True
                    )
                ),
            )
            for row in study.repeated
            if (row.cell, row.kind) == (name, kind)
        ]
        count = next(row.repetitions for row in study.repeated if (row.cell, row.kind) == (name, kind))
        how = "submissions jittered by up to 60 s" if kind == "jitter" else "jobs drawn anew"
        lines += [
            f"**{name}; {count} repetitions, {how}**",
            "",
            *_rows(
                (
                    "policy", "JCT, h", "makespan, h", "communication, h per job", "above machines", "makespan scatter",
                    "Dally's JCT", "makespan", "communication",
                ),
                rows,
            ),
        ]  # fmt: skip
    words = (
        "Means with 95 % bootstrap intervals; the last three columns are Dally with tuned timers against that policy, "
        "in pairs, with the verdict on Dally. What is measured of one draw of jobs need not hold for another: "
        "compare the two kinds of repetition."
    )
    return ["### Repetitions", "", words, "", *lines] if lines else []


def _timers(study: DallyStudy, plot: str | None) -> list[str]:
    lines = ["### Timers", ""]
    if study.waits:
        lines += [
            "Stated timers (before a rack, before several racks) in leases of 600 s, in 2x4x8, ×10, compute ×0.1:",
            "",
            *_rows(
                ("timers", "n", "JCT, h", "makespan, h", "communication, h per job"),
                [
                    (row.waits, str(row.repetitions), _mean(row.jct_h), _mean(row.makespan_h), _mean(row.comm_h))
                    for row in study.waits
                ],
            ),
        ]
    if study.timers:
        rows = [
            (
                row.cluster,
                f"{row.lease_s:g}",
                str(row.history),
                str(row.gpus),
                row.level,
                str(row.changes),
                " → ".join(
                    "–" if mean is None or sd is None else f"{mean:.1f}±{sd:.1f}"
                    for mean, sd in zip(row.mean, row.sd, strict=True)
                ),
                f"{100 * row.at_floor:.0f} %",
                f"{100 * row.at_cap:.0f} %",
            )
            for row in study.timers
            if row.changes or row.at_floor < 1
        ]
        lines += [
            "Tuned timers, in leases: mean ± deviation by quarter of the time in which they were asked. A job larger "
            "than a unit never waits for it. Floors are 6 and 12 leases, caps 0.8 of the history and the history; "
            "timers that never left their floor are not shown.",
            "",
            *_rows(
                ("cluster", "lease, s", "history", "GPUs", "timer", "changes", "quarters", "at floor", "at cap"), rows
            ),
        ]
    if plot:
        lines += [f"![Tuned rack timers over time, by demand]({plot})", ""]
    return lines if len(lines) > 2 else []


def _leases(study: DallyStudy) -> list[str]:
    policies = list(dict.fromkeys(row.policy for row in study.leases))
    groups: dict[tuple[str, str, float], dict[str, LeaseRow]] = {}
    for row in study.leases:
        groups.setdefault((row.scale, row.restart, row.lease_s), {})[row.policy] = row
    rows = [
        (
            scale,
            restart,
            f"{lease:,.0f}",
            *(
                "capped"
                if (row := of[name]).jct_h is None
                else f"{row.jct_h:.1f} / {row.makespan_h:.0f} / {row.lost_gpu_h:,.0f}"
                for name in policies
            ),
        )
        for (scale, restart, lease), of in groups.items()
    ]
    return [
        "### Leases",
        "",
        "Mean JCT in h / makespan in h / GPU-h lost to restarts. 2x4x8, 100 jobs a day; ×10 with compute ×0.1, ×1 "
        "with the published scale.",
        "",
        *_rows(("compute", "restart", "lease, s", *policies), rows),
    ]


def _spreads(study: DallyStudy) -> list[str]:
    def three(values: tuple[float, float, float] | None) -> str:
        return "capped" if values is None else f"{percent(values[0])} ({percent(values[1])} to {percent(values[2])})"

    rows = [
        (f"{row.spread:g}", row.baseline, str(row.draws), three(row.jct), three(row.makespan), three(row.comm))
        for row in study.spreads
    ]
    return [
        "### The spread of work, which is not known",
        "",
        "Gains of Dally by the standard deviation of log work, 2x4x8, ×10, compute ×0.1: median (range) over draws.",
        "",
        *_rows(("spread", "against", "draws", "JCT", "makespan", "communication"), rows),
    ]


def _logged(study: DallyStudy) -> list[str]:
    if not study.logged:
        return []
    policies = list(dict.fromkeys(row.policy for row in study.logged))
    groups: dict[tuple[str, int, int, int, float], dict[str, LoggedRow]] = {}
    for row in study.logged:
        groups.setdefault((row.cluster, row.congestion, row.jobs, row.gpus_from, row.lease_s), {})[row.policy] = row
    rows = []
    for name in policies:
        cells = []
        for of in groups.values():
            row = of[name]
            shown = row.jct_h is not None and row.makespan_h is not None
            cells.append(f"{row.jct_h:.2f} / {row.makespan_h:.0f} / {row.comm_h:.3f}" if shown else "capped")
        rows.append((name, *cells))
    head = [
        f"{cluster}, ×{congestion}, {jobs:,} jobs{f' of ≥ {least} GPUs' if least > 1 else ''}, leases of {lease:g} s"
        for cluster, congestion, jobs, least, lease in groups
    ]
    return [
        f"### Jobs of a log ({study.trace})",
        "",
        "Consecutive jobs from its middle, models at random, full compute. Mean JCT in h / makespan "
        "in h / communication in h per job.",
        "",
        *_rows(("policy", *head), rows),
    ]


# ---------------------------------------------------------------- the plot


def timers_svg(study: DallyStudy) -> str | None:
    """Tuned timers before a rack, in leases over days, a panel per cluster and lease; None where none moved."""
    panels: dict[tuple[str, float], dict[int, list[tuple[float, float]]]] = {}
    for cluster, lease, gpus, level, hours, leases in study.timer_steps:
        if level == 1:
            panels.setdefault((cluster, lease), {}).setdefault(gpus, []).append((hours / 24, leases))
    moved = {key: lines for key, lines in panels.items() if any(len(points) > 1 for points in lines.values())}
    if not moved:
        return None
    width, tall = 760, 200
    parts = [
        _panel(f"{cluster}, lease {lease:g} s", lines, 60 + at * (tall + 60), width, tall)
        for at, ((cluster, lease), lines) in enumerate(moved.items())
    ]
    height = 40 + len(moved) * (tall + 60)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="#ffffff"/><text x="60" y="20">Tuned timer before a '
        f"rack, in leases, by GPUs asked for ({study.date})</text>{''.join(parts)}</svg>\n"
    )


def _panel(title: str, lines: dict[int, list[tuple[float, float]]], top: int, width: int, tall: int) -> str:
    days = max(points[-1][0] for points in lines.values()) or 1.0
    most = max(value for points in lines.values() for _, value in points)
    left, right = 60, width - 110

    def place(day: float, value: float) -> str:
        return f"{left + day / days * (right - left):.1f},{top + tall * (1 - value / most):.1f}"

    drawn = []
    for at, (gpus, points) in enumerate(sorted(lines.items())):
        colour = COLOURS[at % len(COLOURS)]
        steps = [place(*points[0])]
        for (_, before), (day, value) in pairwise(_thin([*points, (days, points[-1][1])])):
            steps += [place(day, before), place(day, value)]
        drawn.append(
            f'<polyline points="{" ".join(steps)}" fill="none" stroke="{colour}"/>'
            f'<text x="{right + 10}" y="{top + 14 + 16 * at}" fill="{colour}">{gpus}</text>'
        )
    axes = (
        f'<path d="M{left} {top}V{top + tall}H{right}" fill="none" stroke="#5f6368"/>'
        f'<text x="{left - 6}" y="{top + 10}" text-anchor="end">{most:g}</text>'
        f'<text x="{left - 6}" y="{top + tall}" text-anchor="end">0</text>'
        f'<text x="{right}" y="{top + tall + 18}" text-anchor="end">{days:.0f} days</text>'
    )
    return f'<text x="{left}" y="{top - 10}">{escape(title)}</text>{axes}{"".join(drawn)}'


def _thin(points: Sequence[tuple[float, float]], most: int = 120) -> list[tuple[float, float]]:
    """At most so many steps, evenly among them, so that the file stays small."""
    stride = -(-len(points) // most)
    return [*points[:-1:stride], points[-1]]


# ---------------------------------------------------------------- words


def _mean(given: Mean) -> str:
    digits = 3 if given.mean < 1 else 2 if given.mean < 10 else 1
    if given.low is None or given.high is None:
        return f"{given.mean:.{digits}f}"
    return f"{given.mean:.{digits}f} [{given.low:.{digits}f}, {given.high:.{digits}f}]"


def _ratio(given: Mean, verdict: str) -> str:
    if verdict == "same":
        return "–"
    if given.mean != given.mean:  # nan
        return verdict
    if given.low is None or given.high is None:
        return percent(given.mean - 1)
    return f"{percent(given.mean - 1)} [{percent(given.low - 1)}, {percent(given.high - 1)}] {verdict}"


def _rows(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [
        f"| {' | '.join(head)} |",
        f"|{'|'.join('---' for _ in head)}|",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
    ]
