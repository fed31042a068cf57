"""The Dally study summed up: from the figures of every run in every cell to the rows of its tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from foretrace.fleet.comparison import Contrast, MeanInterval, judge
from foretrace.fleet.workload import Float64
from reproductions.dally import cells
from reproductions.dally.study import (
    BestRow,
    ClaimRow,
    DriverRow,
    FactorRow,
    GainRow,
    LeaseRow,
    LoggedRow,
    Mean,
    RepeatRow,
    SpreadRow,
    TimerRow,
    WaitRow,
)

Row = dict[str, Any]
DALLY = "dally-auto"
BASELINES = tuple(name for name in cells.NAMED if name != DALLY)
VARIANTS = (
    "dally-manual",
    "dally-inf",
    "dally-0",
    "rr-auto",
    "las-auto",
)  # no policy of others, no claim is about them
PUBLISHED = {"makespan_h": -0.69, "jct_h": -0.83, "comm_h": -0.98, "above_h": -0.98, "comm_share": -0.98}
TITLES = {
    "makespan_h": "makespan",
    "jct_h": "mean completion time",
    "comm_h": "communication time, all",
    "above_h": "communication time above machines",
    "comm_share": "communication as share of running time",
}
TIE = 0.005
LEVELS = {1: "rack", 2: "between racks"}


def where(row: Row) -> str:
    """A cell in words."""
    size = f", none above {row['largest']} GPUs" if row["largest"] else ""
    scale = row["scale"] if row["scale"] != "0.1" else "×0.1"
    what = f"{row['cluster']}, {row['load']}, congestion ×{row['congestion']}"
    return f"{what}, {row['network']} GB/s, compute {scale}{size}"


def percent(value: float | None) -> str:
    """A gain in words."""
    if value is None:
        return "–"
    whole = f"{100 * value:+.0f}"
    return "0 %" if whole in ("+0", "-0") else f"{whole} %".replace("-", "−")


def gain(row: Row, figure: str, baseline: str, policy: str = DALLY) -> float | None:
    """Of a policy over a baseline in a cell, negative if it is less; None where one was capped or nothing is there."""
    mine, other = row["runs"].get(policy), row["runs"].get(baseline)
    if mine is None or other is None or not other[figure] > 0:
        return None
    return float(mine[figure] / other[figure] - 1)


def gains(rows: Iterable[Row], figure: str, baseline: str, policy: str = DALLY) -> list[tuple[Row, float]]:
    """The cells in which there is a gain, with it."""
    found = ((row, gain(row, figure, baseline, policy)) for row in rows)
    return [(row, value) for row, value in found if value is not None]


def median(values: Iterable[float]) -> float | None:
    """None where there is none."""
    given = list(values)
    return float(np.median(given)) if given else None


def gains_of(grid: Sequence[Row]) -> tuple[GainRow, ...]:
    """Every figure against every baseline."""
    found = []
    for figure, published in PUBLISHED.items():
        for baseline in BASELINES:
            have = gains(grid, figure, baseline)
            if not have:
                continue
            values = np.array([value for _, value in have])
            found.append(
                GainRow(
                    figure=figure,
                    baseline=baseline,
                    published=published,
                    cells=len(have),
                    left_out=len(grid) - len(have),
                    ties=int((np.abs(values) < TIE).sum()),
                    median=float(np.median(values)),
                    best=float(values.min()),
                    worst=float(values.max()),
                    reached=int((values <= published).sum()),
                    best_cell=where(have[int(values.argmin())][0]),
                )
            )
    return tuple(found)


def claims_of(grid: Sequence[Row]) -> tuple[ClaimRow, ...]:
    """The three claims, communication in three ways. Variants of Dally itself are no baselines of a claim."""
    found = []
    for figure, published in PUBLISHED.items():
        reached, missed, only = list[str](), list[str](), list[str]()
        for baseline in (each for each in BASELINES if each not in VARIANTS):
            have = gains(grid, figure, baseline)
            if not have:
                continue
            best = percent(min(value for _, value in have))
            there = [row for row, value in have if value <= published]
            if there:
                reached.append(f"{baseline} ({best}, {len(there)} of {len(have)} cells)")
                only.append(in_common(there, grid))
            else:
                missed.append(f"{baseline} ({best})")
        found.append(
            ClaimRow(
                claim=f"{TITLES[figure]} {percent(published)}",
                figure=figure,
                published=published,
                reached_against=tuple(reached),
                reached_only_where=tuple(only),
                not_reached=tuple(missed),
                verdict=(
                    "not reached" if not reached else "reached against some, in some cells" if missed
                    else "reached against all, in some cells"
                ),
            )
        )  # fmt: skip
    return tuple(found)


def in_common(some: Sequence[Row], every: Sequence[Row]) -> str:
    """Which values of which dimensions the cells are confined to; "" where to none."""
    said = []
    for dimension in ("load", "largest", "cluster", "congestion", "network", "scale"):
        seen, there = ({row[dimension] for row in rows} for rows in (some, every))
        if seen and seen != there:
            order = [value for value in dict.fromkeys(row[dimension] for row in every) if value in seen]
            said.append(f"{NAMES[dimension]} {' or '.join(_value(dimension, value) for value in order)}")
    return "; ".join(said)


NAMES = {
    "load": "arrivals", "largest": "jobs", "cluster": "cluster", "congestion": "congestion", "network": "network",
    "scale": "compute",
}  # fmt: skip


def _value(dimension: str, value: Any) -> str:
    if dimension == "largest":
        return f"of at most {value} GPUs" if value else "of any size"
    return f"×{value}" if dimension == "congestion" or value == "0.1" else str(value)


def drivers_of(grid: Sequence[Row], slow: Sequence[Row] = ()) -> tuple[DriverRow, ...]:
    """Medians for each value of each dimension, among cells that the grid has, uncapped, with all of its values."""
    found = [_driver("all", "", grid)]
    for dimension, name in NAMES.items():
        values = list(dict.fromkeys(row[dimension] for row in grid))
        matched = _matched(grid, dimension, len(values))
        if len(values) > 1 and matched:
            found += [
                _driver(name, _value(dimension, value), [row for row in matched if row[dimension] == value])
                for value in values
            ]
    if slow:
        found.append(_driver("compute", "published, congested, leases of a day", slow))
    return tuple(found)


def _matched(grid: Sequence[Row], dimension: str, values: int) -> list[Row]:
    """Cells that differ in this dimension alone from others with every other value, none of them capped."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in grid:
        if gain(row, "jct_h", "fifo-hol") is not None:
            groups.setdefault(tuple(row[each] for each in NAMES if each != dimension), []).append(row)
    return [row for group in groups.values() if len(group) == values for row in group]


def _driver(dimension: str, value: str, rows: Sequence[Row]) -> DriverRow:
    def middle(figure: str, baseline: str) -> float | None:
        return median(value for _, value in gains(rows, figure, baseline))

    talk = [value for _, value in gains(rows, "comm_h", "gandiva-like")]
    return DriverRow(
        dimension=dimension,
        value=value,
        cells=len(gains(rows, "jct_h", "fifo-hol")),
        makespan_hol=middle("makespan_h", "fifo-hol"),
        jct_hol=middle("jct_h", "fifo-hol"),
        jct_skip=middle("jct_h", "fifo-skip"),
        jct_las=middle("jct_h", "las-strict"),
        comm_gandiva=median(talk),
        comm_gandiva_best=min(talk, default=None),
    )


def factors_of(grid: Sequence[Row]) -> tuple[FactorRow, ...]:
    """Order × placement in the cells where all of them were played to the end."""
    names = [*cells.factorial(3600.0)]
    whole = [row for row in grid if all(row["runs"].get(cells.SAME.get(name, name)) for name in names)]
    found = []
    for name in names if whole else ():
        lease, order, place = name.split("/")
        policy = cells.SAME.get(name, name)
        middle = {
            figure: median(value for _, value in gains(whole, figure, "fifo-skip", policy))
            for figure in ("jct_h", "makespan_h", "comm_h", "above_h")
        }
        found.append(
            FactorRow(
                leases=lease == "lease",
                order=order,
                place=place,
                cells=len(whole),
                jct=middle["jct_h"] or 0.0,
                makespan=middle["makespan_h"] or 0.0,
                comm=middle["comm_h"] or 0.0,
                above=middle["above_h"],
            )
        )
    return tuple(found)


def best_of(grid: Sequence[Row]) -> tuple[BestRow, ...]:
    """Counts of cells; capped cells are not among them."""
    figures = ("jct_h", "makespan_h", "comm_h")
    count = {name: dict.fromkeys(figures, 0) for name in cells.NAMED}
    for row in grid:
        runs = {name: row["runs"].get(name) for name in cells.NAMED}
        if any(run is None for run in runs.values()):
            continue
        for figure in figures:
            values = {name: run[figure] for name, run in runs.items()}
            least = min(values.values())
            if max(values.values()) > 1.01 * least:
                for name, value in values.items():
                    count[name][figure] += value <= 1.001 * least
    return tuple(
        BestRow(policy=name, jct=each["jct_h"], makespan=each["makespan_h"], comm=each["comm_h"])
        for name, each in sorted(count.items(), key=lambda item: -item[1]["jct_h"])
    )


def repeated_of(rows: Sequence[Row]) -> tuple[RepeatRow, ...]:
    """Repetitions judged in pairs; a policy that was capped in one of them is left out."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["named"], row["part"]), []).append(row)
    found = []
    figures = ("jct_h", "makespan_h", "comm_h", "above_h")
    for (name, kind), group in groups.items():
        samples = {
            policy: {figure: [row["runs"][policy][figure] for row in group] for figure in figures}
            for policy in cells.NAMED
            if all(row["runs"][policy] is not None for row in group)
        }
        if DALLY not in samples:
            continue
        for policy, mine in samples.items():
            pair = judge({policy: mine, "dally": samples[DALLY]}, baseline=policy)
            ratio = {figure: pair.figures[figure].against_baseline["dally"] for figure in figures}
            mean = {figure: _mean(pair.figures[figure].estimates[policy]) for figure in figures}
            spans = np.asarray(mine["makespan_h"])
            found.append(
                RepeatRow(
                    cell=name,
                    kind=kind,
                    policy=policy,
                    repetitions=len(group),
                    jct_h=mean["jct_h"],
                    makespan_h=mean["makespan_h"],
                    comm_h=mean["comm_h"],
                    above_h=mean["above_h"],
                    makespan_scatter=float(spans.std(ddof=1) / spans.mean()) if len(spans) > 1 else 0.0,
                    ratio_jct=_ratio(ratio["jct_h"]),
                    ratio_makespan=_ratio(ratio["makespan_h"]),
                    ratio_comm=_ratio(ratio["comm_h"]),
                    verdicts=(ratio["jct_h"].verdict, ratio["makespan_h"].verdict, ratio["comm_h"].verdict),
                )
            )
    return tuple(found)


def _mean(given: MeanInterval) -> Mean:
    return Mean(mean=given.mean, low=given.low, high=given.high)


def _ratio(given: Contrast) -> Mean:
    return Mean(mean=given.ratio, low=given.low, high=given.high)


# ---------------------------------------------------------------- timers and leases


def steps_of(rows: Sequence[Row]) -> tuple[tuple[str, float, int, int, float, float], ...]:
    """Every change of a tuned timer, of short leases only: the others never leave their floors."""
    return tuple(
        (row["cluster"], row["lease_s"], int(gpus), int(level), hours, leases)
        for row in rows
        if row["lease_s"] <= 600
        for hours, gpus, level, leases in row.get("timers", ())
    )


def timers_of(rows: Sequence[Row]) -> tuple[TimerRow, ...]:
    """Timers by demand and level."""
    found = []
    for row in rows:
        steps = np.array(row.get("timers", []), np.float64).reshape(-1, 4)
        if not len(steps) or steps[-1, 0] <= steps[0, 0]:
            continue
        edges = np.linspace(steps[0, 0], steps[-1, 0], 5)
        for gpus, level in sorted({(int(g), int(at)) for _, g, at, _ in steps}):
            mine = steps[(steps[:, 1] == gpus) & (steps[:, 2] == level)]
            floor = (6.0, 12.0)[level - 1]
            cap = float(np.ceil(0.8 * row["history"]) if level == 1 else row["history"])
            quarters = [_within(mine, low, high) for low, high in pairwise(edges.tolist())]
            at_floor, at_cap = (_share(mine, float(edges[-1]), value) for value in (floor, cap))
            found.append(
                TimerRow(
                    cluster=row["cluster"],
                    lease_s=row["lease_s"],
                    history=row["history"],
                    gpus=gpus,
                    level=LEVELS[level],
                    changes=len(mine) - 1,
                    mean=tuple(each[0] for each in quarters),
                    sd=tuple(each[1] for each in quarters),
                    at_floor=at_floor,
                    at_cap=at_cap,
                )
            )
    return tuple(found)


def _within(steps: Float64, low: float, high: float) -> tuple[float | None, float | None]:
    """Mean and deviation over time of a step function between two moments; None before its first step."""
    edges = np.clip(np.append(steps[:, 0], max(high, steps[-1, 0])), low, high)
    weight = np.diff(edges)
    if weight.sum() <= 0:
        return None, None
    mean = float((weight * steps[:, 3]).sum() / weight.sum())
    return mean, float(np.sqrt((weight * (steps[:, 3] - mean) ** 2).sum() / weight.sum()))


def _share(steps: Float64, end: float, value: float) -> float:
    """Share of time, from the first step on, in which the timer had this value."""
    holds = steps[:, 3] == value
    weight = np.diff(np.append(steps[:, 0], max(end, steps[-1, 0])))
    return float((weight * holds).sum() / weight.sum()) if weight.sum() > 0 else float(holds[-1])


def waits_of(rows: Sequence[Row]) -> tuple[WaitRow, ...]:
    """Stated timers, means over their repetitions."""
    groups: dict[str, list[dict[str, float]]] = {}
    for row in rows:
        waits = row["waits"]
        label = waits if waits == "auto" else "never" if waits[0] is None else f"{waits[0]:g}, {waits[1]:g}"
        if row["runs"]["waits"] is not None:
            groups.setdefault(label, []).append(row["runs"]["waits"])
    figures = ("jct_h", "makespan_h", "comm_h")
    found = []
    for label, runs in groups.items():
        one = judge({label: {figure: [run[figure] for run in runs] for figure in figures}})
        mean = {figure: _mean(one.figures[figure].estimates[label]) for figure in figures}
        found.append(WaitRow(waits=label, repetitions=len(runs), **mean))
    return tuple(found)


def leases_of(rows: Sequence[Row]) -> tuple[LeaseRow, ...]:
    """Lengths of leases by policy."""
    found = []
    for row in rows:
        restart = f"{row['restart_s']:g} s" if row["restart_s"] else f"{row['restart_s_per_gpu']:g} s × GPUs"
        for policy, run in row["runs"].items():
            kept = run or dict.fromkeys(("jct_h", "makespan_h", "lost_gpu_h", "starts"))
            found.append(
                LeaseRow(
                    scale=row["scale"], lease_s=row["lease_s"], restart=restart, policy=policy,
                    jct_h=kept["jct_h"], makespan_h=kept["makespan_h"], lost_gpu_h=kept["lost_gpu_h"],
                    starts=kept["starts"],
                )
            )  # fmt: skip
    return tuple(found)


def spreads_of(rows: Sequence[Row]) -> tuple[SpreadRow, ...]:
    """Gains by spread of work."""
    found = []
    for spread in dict.fromkeys(row["spread"] for row in rows):
        mine = [row for row in rows if row["spread"] == spread]
        for baseline in cells.FEW[1:]:
            three = {}
            for figure in ("jct_h", "makespan_h", "comm_h"):
                values = [value for _, value in gains(mine, figure, baseline)]
                three[figure] = (float(np.median(values)), min(values), max(values)) if values else None
            found.append(
                SpreadRow(
                    spread=spread, baseline=baseline, draws=len(gains(mine, "jct_h", baseline)),
                    jct=three["jct_h"], makespan=three["makespan_h"], comm=three["comm_h"],
                )
            )  # fmt: skip
    return tuple(found)


def logged_of(rows: Sequence[Row]) -> tuple[LoggedRow, ...]:
    """Policies on a log."""
    found = []
    for row in rows:
        for policy, run in row["runs"].items():
            kept = run or dict.fromkeys(("jct_h", "makespan_h", "comm_h"))
            found.append(
                LoggedRow(
                    cluster=row["cluster"], congestion=row["congestion"], jobs=row["jobs"], gpus_from=row["gpus_from"],
                    lease_s=row["lease_s"],
                    policy=policy, jct_h=kept["jct_h"], makespan_h=kept["makespan_h"], comm_h=kept["comm_h"],
                )
            )  # fmt: skip
    return tuple(found)
