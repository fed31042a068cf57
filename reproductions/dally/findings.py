"""Findings about Dally that another simulator made, each held against what this study found, computed from its rows.

What was found earlier is quoted; what stands beside it and the verdict are computed. A finding that the cells of a
study do not cover is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from foretrace.errors import ForetraceError
from reproductions.dally import cells
from reproductions.dally.study import DallyStudy, FindingRow, RepeatRow, TimerRow
from reproductions.dally.sums import TIE, gains, median, percent, where

Row = dict[str, Any]
Stat = tuple[float, float, float]  # median, best, worst
CONFIRMED, REFUTED = "confirmed", "refuted"
NOT_COMPARABLE = "not comparable"
POINT = 0.01
NOISE = 0.02  # medians over cells that are nearer to nought than this are called nought


def headline_of(study: DallyStudy) -> str:
    """The answer in a sentence."""
    said = []
    for claim in study.claims:
        if claim.figure in ("makespan_h", "jct_h", "comm_h"):
            met = ", ".join(each.partition(" (")[0] for each in claim.reached_against)
            said.append(
                f"{claim.claim} " + (f"is reached in some cells against {met}" if met else "is reached nowhere")
            )
    las = next((row for row in study.gains if (row.figure, row.baseline) == ("jct_h", "las-strict")), None)
    tail = (
        "" if las is None else f" Against LAS with strict placement its mean completion time is {percent(las.median)}."
    )
    return "; ".join(said) + "." + tail


def findings_of(study: DallyStudy, grid: Sequence[Row]) -> tuple[FindingRow, ...]:
    """All that the study's cells can speak to."""
    found = [
        *_completion(study, grid),
        *_makespan(grid),
        *_communication(grid),
        *_drivers(study),
        *_parts(study),
        *_noise(study),
        *_timers(study),
        *_leases(study),
        *_logged(study),
        FindingRow(
            finding="the published simulator loses GPUs because running jobs may bid",
            earlier="61 of 64 GPUs lost; a one-line change ends it",
            here="only waiting jobs bid here, and the engine's tests hold that every GPU is free or held by one job",
            verdict=f"{NOT_COMPARABLE}: the fault cannot be switched on",
        ),
        FindingRow(
            finding="waking up when a timer runs out changes little under leases",
            earlier="≤ 0.5 % in the mean of 20 runs",
            here="the engine always wakes up",
            verdict=f"{NOT_COMPARABLE}: it cannot be switched off",
        ),
    ]
    return tuple(found)


def _told(finding: str, earlier: str, here: str, holds: bool) -> FindingRow:
    return FindingRow(finding=finding, earlier=earlier, here=here, verdict=CONFIRMED if holds else REFUTED)


def _stat(grid: Sequence[Row], figure: str, baseline: str, policy: str = "dally-auto") -> Stat | None:
    """Median, best, worst."""
    values = [value for _, value in gains(grid, figure, baseline, policy)]
    return (median(values) or 0.0, min(values), max(values)) if values else None


def _words(stat: Stat) -> str:
    return f"median {percent(stat[0])}, best {percent(stat[1])}, worst {percent(stat[2])}"


def _completion(study: DallyStudy, grid: Sequence[Row]) -> list[FindingRow]:
    stats = {name: _stat(grid, "jct_h", name) for name in cells.NAMED if name != "dally-auto"}
    found = []
    hol, gandiva, tiresias, las = (stats[name] for name in ("fifo-hol", "gandiva-like", "tiresias", "las-strict"))
    if hol:
        found.append(
            _told(
                "JCT −83 % is reached against FIFO that blocks",
                "median −70 %, best −96 %",
                _words(hol),
                hol[1] <= -0.83,
            )
        )
    if gandiva:
        found.append(
            _told(
                "and against Gandiva-like",
                "median −33 %, best −84 %",
                _words(gandiva),
                gandiva[1] <= -0.83,
            )
        )
    if tiresias and las:
        here = f"Tiresias: {_words(tiresias)}; LAS: {_words(las)}"
        found += [
            _told(
                "JCT −83 % is not reached against Tiresias and LAS with leases",
                "best −22 % (Tiresias), −8 % (LAS)",
                here,
                min(tiresias[1], las[1]) > -0.83,
            ),
            _told(
                "Dally is slower than Tiresias and LAS in the median",
                "+4 %, +9 %",
                here,
                tiresias[0] > 0 and las[0] > 0,
            ),
        ]
    las_auto, rr_auto = stats["las-auto"], stats["rr-auto"]
    if las_auto and rr_auto:
        found.append(
            _told(
                "order by network slowdown costs completion time: LAS or turns with the same timers are faster",
                "Dally +6 %, +6 %",
                f"LAS + auto: {_words(las_auto)}; turns + auto: {_words(rr_auto)}",
                las_auto[0] > 0 and rr_auto[0] > 0,
            )
        )
    wins = {row.policy: row.jct for row in study.best}
    if wins:
        first, dally = study.best[0], wins.get("dally-auto", 0)
        found.append(
            _told(
                "best mean JCT of all policies: mostly LAS with strict placement, Dally rarely",
                "LAS strict 258 of 480 cells, Dally 12",
                f"{first.policy} {first.jct} cells, LAS strict {wins['las-strict']}, Dally {dally}",
                first.policy == "las-strict" and dally < wins["las-strict"],
            )
        )
    return found


def _makespan(grid: Sequence[Row]) -> list[FindingRow]:
    def missed(stat: Stat) -> bool:
        return stat[1] > -0.69

    def exceeded(stat: Stat) -> bool:
        return stat[1] <= -0.69

    def nothing(stat: Stat) -> bool:
        return abs(stat[0]) < NOISE and missed(stat)

    rows = (
        ("makespan −69 % is not reached against FIFO that blocks", "fifo-hol", "median −20 %, best −59 %", missed),
        ("against FIFO that skips: median 0, not reached", "fifo-skip", "median 0, best −24 %", nothing),
        ("makespan −69 % is exceeded against greedy placement", "fifo-greedy", "median −5 %, best −91 %", exceeded),
        ("and against Gandiva-like", "gandiva-like", "median −4 %, best −76 %", exceeded),
    )
    return _held(grid, "makespan_h", rows)


def _held(
    grid: Sequence[Row],
    figure: str,
    rows: Sequence[tuple[str, str, str, Callable[[Stat], bool]]],
) -> list[FindingRow]:
    found = []
    for finding, baseline, earlier, holds in rows:
        stat = _stat(grid, figure, baseline)
        if stat:
            found.append(_told(finding, earlier, _words(stat), holds(stat)))
    return found


def _communication(grid: Sequence[Row]) -> list[FindingRow]:
    small = [
        row for row in grid
        if row["largest"] == 8 and row["congestion"] == 100 and row["scale"] == "full" and row["load"] == "all-at-0"
    ]  # fmt: skip
    large = [row for row in grid if row["largest"] is None]
    found = []
    others = ("gandiva-like", "fifo-greedy", "tiresias")
    best = {name: gains(small, "comm_h", name) for name in others}
    if all(best.values()):
        parts = [f"{name} {percent(min(v for _, v in have))}" for name, have in best.items()]
        at = min(best["gandiva-like"], key=lambda pair: pair[1])[0]
        found.append(
            _told(
                "communication −98 %: reached where jobs fit in a machine, the batch is full, all come at 0 and the "
                "network is congested ×100",
                "−99 % against Gandiva, greedy, Tiresias",
                f"best: {', '.join(parts)} ({where(at)})",
                all(min(v for _, v in have) <= -0.98 for have in best.values()),
            )
        )
    wide = {name: gains(large, "comm_h", name) for name in others}
    if all(wide.values()):
        parts = [f"{name} {percent(min(v for _, v in have))}" for name, have in wide.items()]
        found.append(
            _told(
                "with jobs larger than a machine it is not reached",
                "best −88 %",
                f"best: {', '.join(parts)}",
                all(min(v for _, v in have) > -0.98 for have in wide.values()),
            )
        )
    rows = (
        ("against strict consolidation the median is nought", "fifo-skip", "median +1 %, best −26 %", _nought),
        ("and against LAS with strict placement", "las-strict", "median +2 %, best −22 %", _nought),
    )
    found += _held(grid, "comm_h", rows)
    ratios = _scale_ratios(grid)
    if ratios:
        low, middle, high = ratios[0], ratios[len(ratios) // 2], ratios[-1]
        found.append(
            _told(
                "the published compute scale makes the network matter 10 to 1000 times as much",
                "10 to 1000 ×, by model",
                f"communication per job (FIFO that skips) × {middle:.0f} in the median, {low:.0f} to {high:.0f}",
                low >= 10 and high <= 1000,
            )
        )
    return found


def _nought(stat: Stat) -> bool:
    return abs(stat[0]) < NOISE


def _scale_ratios(grid: Sequence[Row]) -> list[float]:
    """Communication of the same jobs and placements under the published scale over that under the full one."""
    known: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in grid:
        run = row["runs"].get("fifo-skip")
        if run and run["comm_h"] > 0:
            key = tuple(row[each] for each in ("load", "largest", "cluster", "congestion", "network"))
            known.setdefault(key, {})[row["scale"]] = run["comm_h"]
    return sorted(each["published"] / each["full"] for each in known.values() if {"published", "full"} <= set(each))


def _drivers(study: DallyStudy) -> list[FindingRow]:
    """How the gains move along a dimension: each is expected to grow (become more negative) in the order given."""
    expected = (
        ("mean JCT against FIFO that blocks: the more congested, the larger the gain", "congestion", "jct_hol",
         ("×1", "×10", "×100"), "−56 / −75 / −84 %"),
        ("communication against Gandiva-like: the same", "congestion", "comm_gandiva",
         ("×1", "×10", "×100"), "−15 / −34 / −46 %"),
        ("mean JCT against FIFO that blocks: larger on 64 GPUs than on 256", "cluster", "jct_hol",
         ("8x4x8", "2x4x8"), "−38 / −81 %"),
        ("communication against Gandiva-like: the same", "cluster", "comm_gandiva",
         ("8x4x8", "2x4x8"), "−10 / −49 %"),
        ("mean JCT against FIFO that blocks: larger at 100 jobs a day than at 100 a week", "arrivals", "jct_hol",
         ("100/week", "100/day"), "−16 / −66…−78 %"),
        ("mean JCT against FIFO that blocks: larger the steeper the network", "network", "jct_hol",
         ("300/50/50", "300/12.5/3.1"), "−62 / −81 %"),
        ("mean JCT against FIFO that blocks: larger with the published compute scale than with the full one",
         "compute", "jct_hol", ("full", "published"), "−54 / −84 %"),
    )  # fmt: skip
    at = {(row.dimension, row.value): row for row in study.drivers}
    found = []
    for finding, dimension, figure, values, earlier in expected:
        here = [getattr(at[dimension, value], figure) if (dimension, value) in at else None for value in values]
        known = [each for each in here if each is not None]
        if len(known) == len(values):
            grows = all(b < a - POINT for a, b in pairwise(known))
            found.append(_told(finding, earlier, " / ".join(map(percent, known)), grows))
    return found


def _parts(study: DallyStudy) -> list[FindingRow]:
    """Which part buys what, from order × placement."""
    at = {(row.leases, row.order, row.place): row for row in study.factors}
    if not at:
        return []

    def jct(*key: Any) -> float:
        return at[key].jct

    leases = jct(True, "fifo", "strict")
    turns = {order: jct(True, order, "strict") for order in ("las", "rr", "network")}
    tuned = jct(True, "network", "auto") - jct(True, "network", "strict")
    best_order = min(turns.values())
    most = max(abs(jct(True, o, "auto") - jct(True, o, "strict")) for o in ("las", "rr", "network"))
    strict, middle, greedy = (at[True, "network", place].comm for place in ("strict", "auto", "greedy"))
    return [
        _told(
            "leases with an order that looks at service or turns buy completion time, timers do not",
            "leases are the main driver; all of LAS, turns and Nw reach it",
            f"against the same without leases: order of submission {percent(leases)}, "
            + ", ".join(f"{order} {percent(value)}" for order, value in turns.items())
            + f"; tuned timers change it by {100 * tuned:+.0f} points with Nw, by {100 * most:.0f} at most".replace(
                "-", "−"
            ),
            best_order < 0 and abs(best_order) > most,
        ),
        _told(
            "leases alone, in order of submission, buy little of it",
            "not separated",
            f"{percent(leases)} against {percent(best_order)} with the best order",
            abs(leases) < 0.5 * abs(best_order),
        ),
        _told(
            "consolidation buys communication",
            "timers buy little over infinite patience",
            f"Nw order, against FIFO that skips: strict {percent(strict)}, tuned {percent(middle)}, "
            f"greedy {percent(greedy)}",
            greedy > strict + NOISE,
        ),
    ]


def _noise(study: DallyStudy) -> list[FindingRow]:
    jitter = [row for row in study.repeated if row.kind == "jitter" and row.repetitions > 1]
    if not jitter:
        return []
    name = jitter[0].cell
    rows: dict[str, RepeatRow] = {row.policy: row for row in jitter if row.cell == name}
    scatter = [row.makespan_scatter for row in rows.values()]
    hol, gandiva = rows["fifo-hol"], rows["gandiva-like"]
    parts = [
        ("JCT against FIFO that blocks", -0.85, hol.ratio_jct.mean - 1),
        ("JCT against Gandiva-like", -0.70, gandiva.ratio_jct.mean - 1),
        ("makespan against FIFO that blocks", -0.37, hol.ratio_makespan.mean - 1),
        ("makespan against Gandiva-like", -0.33, gandiva.ratio_makespan.mean - 1),
        ("communication against Gandiva-like", -0.72, gandiva.ratio_comm.mean - 1),
    ]
    return [
        _told(
            f"cell {name}: Dally against baselines, {hol.repetitions} jittered runs (confirmed: every sign)",
            ", ".join(f"{what} {percent(earlier)}" for what, earlier, _ in parts),
            ", ".join(percent(here) for *_, here in parts),
            all(here < 0 for *_, here in parts),
        ),
        _told(
            "a jitter of 60 s moves the makespan of some policy by 4 % or more",
            "4 to 6 %",
            f"standard deviation {100 * min(scatter):.1f} to {100 * max(scatter):.1f} %, by policy",
            max(scatter) >= 0.04,
        ),
    ]


def _timers(study: DallyStudy) -> list[FindingRow]:
    found = []
    waits = {row.waits: row for row in study.waits}
    never, lease = waits.get("never"), waits.get("1, 2")
    if never and lease and "auto" in waits:
        least = min(row.jct_h.mean for row in waits.values())
        said = ", ".join(f"({label}) {row.jct_h.mean:.1f}" for label, row in waits.items())
        found += [
            _told("stated timers: one lease of patience gets nearly all", "36.6 h against 35.0 h",
                  f"mean JCT in h: {said}", lease.jct_h.mean <= 1.1 * never.jct_h.mean),
            _told("stated timers: never is not worse than the best by more than noise", "35.0 h, the best",
                  f"{never.jct_h.mean:.1f} h, best {least:.1f} h", never.jct_h.mean <= 1.05 * least),
        ]  # fmt: skip
    long, short = ([row for row in study.timers if keep(row)] for keep in (_is_long, _is_short))
    if long:
        share = [row.at_floor for row in long]
        found.append(
            _told("with leases of an hour tuned timers stay on their floors", "98 to 100 % of the time",
                  f"{100 * min(share):.0f} to {100 * max(share):.0f} %", min(share) >= 0.95)
        )  # fmt: skip
    if short:
        racks = [row for row in short if row.level == "rack" and row.changes]
        if racks:
            peak = max(max(value for value in row.mean if value is not None) for row in racks)
            found.append(
                _told("with leases of 120 s they leave them", "rack 40 to 85 leases for 4 and 8 GPUs",
                      f"rack: up to {peak:.0f} leases in the mean of a quarter, "
                      f"{100 * min(row.at_floor for row in racks):.0f} % of the time on the floor at the least",
                      min(row.at_floor for row in racks) < 0.5)
            )  # fmt: skip
    if study.timers:
        cap = max(row.at_cap for row in study.timers)
        found.append(
            _told("the cap of a timer is never hit", "never", f"{100 * cap:.1f} % of the time at the most", cap == 0)
        )
    return found


def _is_long(row: TimerRow) -> bool:
    return row.lease_s == 3600


def _is_short(row: TimerRow) -> bool:
    return row.lease_s == 120


def _leases(study: DallyStudy) -> list[FindingRow]:
    at = {(row.scale, row.lease_s, row.restart, row.policy): row for row in study.leases}
    found = []
    safe, free = (at.get(("0.1", 3600.0, restart, "dally-auto")) for restart in ("60 s", "1 s × GPUs"))
    if safe and free and safe.jct_h and free.jct_h:
        change = safe.jct_h / free.jct_h - 1
        found.append(
            _told("a lease of 60 restarts or more is safe", "no loss to speak of",
                  f"a restart of 60 s changes JCT by {percent(change)} at leases of an hour", change <= 0.05)
        )  # fmt: skip
    lost = [row.lost_gpu_h for row in study.leases if row.lease_s == 120 and row.restart == "60 s" and row.lost_gpu_h]
    if lost:
        found.append(
            _told("leases of 120 s with restarts of 60 s waste GPUs", "18,000 to 39,000 GPU-h lost",
                  f"{min(lost):,.0f} to {max(lost):,.0f} GPU-h", min(lost) >= 10_000)
        )  # fmt: skip
    pairs = [(at.get((*key[:3], "dally-auto")), row) for key, row in at.items() if key[3] == "las-strict"]
    both = [
        (a.lost_gpu_h, b.lost_gpu_h) for a, b in pairs if a and a.lost_gpu_h is not None and b.lost_gpu_h is not None
    ]
    if both:
        less = sum(a < b for a, b in both)
        found.append(
            _told(
                "Dally loses less to restarts than LAS",
                "fewer switches",
                f"in {less} of {len(both)} pairs",
                less == len(both),
            )
        )
    found.append(_livelock())
    return found


def _livelock() -> FindingRow:
    """Try it: a lease that a restart uses up whole."""
    short = cells.cell("grid", lease_s=20.0, cap=1, policies="leased")
    try:
        cells.play_cell(short)
        refused = False
    except ForetraceError:
        refused = True
    return _told("a lease no longer than a restart must be refused, else a job never progresses", "livelock",
                 "refused" if refused else "played", refused)  # fmt: skip


def _logged(study: DallyStudy) -> list[FindingRow]:
    found = []
    for cluster, earlier in (
        ("8x4x8", "−83 % against FIFO that blocks, +8 to 18 % against Tiresias"),
        ("5x4x8", "−91 %, +8 to 18 %"),
    ):
        rows = {row.policy: row for row in study.logged if (row.cluster, row.gpus_from) == (cluster, 1)}
        dally, hol, tiresias = (rows.get(name) for name in ("dally-auto", "fifo-hol", "tiresias"))
        if not (dally and hol and tiresias and dally.jct_h and hol.jct_h and tiresias.jct_h):
            continue
        one, two = dally.jct_h / hol.jct_h - 1, dally.jct_h / tiresias.jct_h - 1
        found.append(
            _told(
                f"{dally.jobs:,} jobs of a log on {cluster}: JCT",
                earlier,
                f"{percent(one)}, {percent(two)}",
                one < 0 < two,
            )
        )
        if dally.makespan_h and hol.makespan_h:
            change = dally.makespan_h / hol.makespan_h - 1
            found.append(
                _told(
                    f"and its makespan is longer on {cluster}",
                    "321–361 h against 302–345 h",
                    percent(change),
                    change > TIE,
                )
            )
    return found
