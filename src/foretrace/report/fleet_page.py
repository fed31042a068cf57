"""One self-contained page about a simulated fleet: the answer, who ran where, use and queue over time, policies.

Everything is inline as in the report of a run (`html`). However many jobs there are, the page stays small: few jobs
are drawn one by one, many as shares per row and stretch of time, and curves have a few hundred points.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from foretrace.fleet import metrics, overtime
from foretrace.fleet.cluster import ClusterTree
from foretrace.fleet.occupancy import occupancy
from foretrace.fleet.result import FleetResult
from foretrace.fleet.workload import SECOND
from foretrace.report.fleet import (
    FleetRunView,
    about,
    causes_table,
    energy,
    energy_text,
    figure_text,
    interval_text,
    level_text,
    slot_name,
    slots_table,
)
from foretrace.report.fleet_policies import FIGURES, FleetCompareView, against
from foretrace.report.html import filled, script_json
from foretrace.report.page import context
from foretrace.report.units import count, digits, long_time, share

MOST_TENANTS = 200
PARTS = {
    "waits": "waiting for GPUs",
    "compute": "running",
    "comm": "of it communication",
    "dead": "without progress",
}
SCRIPTS = ("format.js", "data.js", "common.js", "gestures.js", "fleet.js")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPage:
    """What the page shows: one run in full, and further policies on the same workload beside it."""

    view: FleetRunView
    result: FleetResult
    cluster: ClusterTree
    others: Mapping[str, FleetResult] = field(default_factory=dict)
    comparison: FleetCompareView | None = None


def render(page: FleetPage) -> str:
    """Return the page as one HTML text."""
    return filled("fleet.html.j2", ["report.css", "fleet.css"], SCRIPTS, **_context(page))


def _context(page: FleetPage) -> dict[str, Any]:
    import markupsafe

    view = page.view
    gantt, packed = occupancy(page.result, page.cluster)
    data = {
        "gantt": gantt,
        "time": _time(view),
        "cdfs": _cdfs(page),
        "slots": [{"name": slot_name(each), "free": each.free, "together": each.together} for each in view.slots],
    }
    return {
        "view": view,
        "facts": about(view).parts,
        "big": _split(long_time(view.mean_jct_s)),
        "under": _under(view),
        "parts": _parts(page),
        "gantt": gantt,
        "causes": context(causes_table(view.causes)) if view.causes else None,
        "policies": _policies(page.comparison),
        "columns": [title for title, _, _ in FIGURES],
        "comparison": page.comparison,
        "repeated": _repeated(page.comparison),
        "tenants": [_tenant(each) for each in view.tenants[:MOST_TENANTS]],
        "more_tenants": max(len(view.tenants) - MOST_TENANTS, 0),
        "slots": context(slots_table(view.slots, scattered=True)) if view.slots else None,
        "figures": _figures(view),
        "notes": view.notes,
        "views": script_json({"run": _brief(view), "compare": page.comparison}),
        "data": script_json(data),
        "packed": markupsafe.Markup(packed),
    }  # fmt: skip


def _brief(view: FleetRunView) -> dict[str, Any]:
    """Return the answer without its long series, which the page holds once already."""
    import msgspec

    whole: dict[str, Any] = msgspec.to_builtins(view)
    for key in ("over_time", "jct_cdf", "slots", "tenants"):
        del whole[key]
    return whole


def _split(text: str) -> dict[str, str]:
    number, _, unit = text.partition(" ")
    return {"number": number, "unit": unit}


def _under(view: FleetRunView) -> str:
    mean = f"mean completion of {count(view.finished)} jobs"
    found = view.intervals.get("mean_jct_s")
    between = interval_text(found.low, found.high) if found else ""
    if not between:
        return f"{mean}; one run, so no interval is known"
    return f"{mean}; {count(view.repetitions)} repeated runs: {between} ({level_text(view.interval_level)} interval)"


def _parts(page: FleetPage) -> list[dict[str, Any]]:
    """Return where the time of the finished jobs goes: waiting, computing, communicating, lost."""
    parts = metrics.time_of_finished(page.result)
    jobs, total = max(int(page.result.finished.sum()), 1), sum(parts.values()) or 1.0
    return [
        {
            "key": key, "word": PARTS[key], "share": value / total, "percent": share(value / total),
            "text": long_time(value / jobs / SECOND),
        }
        for key, value in parts.items()
        if value or key in ("waits", "compute")
    ]  # fmt: skip


def _figures(view: FleetRunView) -> list[tuple[str, str, str]]:
    """Return name, value and a remark of what stands in the answer beside the completion time."""
    rows = [
        ("median", long_time(view.p50_jct_s), "of completion"),
        ("p90", long_time(view.p90_jct_s), "of completion"),
        ("p99", long_time(view.p99_jct_s), "of completion"),
        ("mean wait", long_time(view.mean_queue_s), ""),
        ("makespan", long_time(view.makespan_s), ""),
        ("GPUs in use", figure_text(view.utilisation, "share"), ""),
    ]
    if view.mean_rho is not None:
        rows.append(("fairness ρ", digits(view.mean_rho), f"p99 {digits(view.p99_rho or 0)}; ≤ 1 is a fair share"))
    if view.lost.gpu_h:
        rows.append(("lost", f"{digits(view.lost.gpu_h)} GPU-h", f"{count(view.lost.preemptions)} preemptions"))
    if view.usd_all is not None:
        rows.append(("cost", f"${view.usd_all:,.0f}", f"${view.usd_used or 0:,.0f} of it while held"))
    if view.kwh is not None:
        rows.append(("energy", energy(view.kwh), energy_text(view)))
    return rows


def _time(view: FleetRunView) -> dict[str, Any]:
    series = view.over_time
    why = {each.cause: each.why for each in view.causes}
    by_cause = [
        {"key": key, "why": why.get(key, key), "values": values} for key, values in series.waiting_by_cause.items()
    ]
    order = {each.cause: i for i, each in enumerate(view.causes)}
    return {
        "edges": series.edges_s,
        "used": series.utilisation,
        "waiting": series.waiting_jobs,
        "waiting_gpus": series.waiting_gpus,
        "causes": sorted(by_cause, key=lambda each: order.get(str(each["key"]), len(order))),
    }


def _cdfs(page: FleetPage) -> list[dict[str, Any]]:
    found = []
    for name, result in ((page.result.policy, page.result), *page.others.items()):
        seconds, part = metrics.cdf(result.jct_s)
        if len(seconds):
            found.append({"name": name, "x": overtime.short(seconds), "y": overtime.short(part)})
    return found


def _policies(found: FleetCompareView | None) -> list[dict[str, Any]]:
    """Return rows of the table."""
    rows = []
    for row in found.policies if found else ():
        cells = []
        for _, name, kind in FIGURES:
            each = row.figures[name]
            between = interval_text(each.low, each.high, kind) if each.low != each.high else ""
            cells.append({"text": figure_text(each.mean, kind), "between": between, "verdict": each.verdict})
        rows.append({"name": row.policy, "cells": cells, "against": against(row.figures["mean_jct_s"])})
    return rows


def _repeated(found: FleetCompareView | None) -> str:
    if found is None:
        return ""
    if found.repetitions == 1:
        return "One run of each policy, so nothing tells a difference from noise."
    level = level_text(found.interval_level)
    return f"Means and {level} intervals of {count(found.repetitions)} runs of each policy: {found.repeated_how}."


def _tenant(each: metrics.Tenant) -> dict[str, Any]:
    """Return its name, and value and text of every figure."""
    cells = [
        (each.jobs, count(each.jobs)),
        (each.gpu_share, share(each.gpu_share)),
        *((value or 0, long_time(value)) for value in (each.mean_jct_s, each.p99_jct_s, each.mean_queue_s)),
        (each.mean_rho or 0, "–" if each.mean_rho is None else digits(each.mean_rho)),
    ]
    return {"name": each.tenant or "(none)", "cells": cells}
