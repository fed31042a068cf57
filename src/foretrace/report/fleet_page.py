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
from foretrace.report import fleet
from foretrace.report.fleet_policies import FIGURES, FleetCompareView, against
from foretrace.report.page import context, filled, script_json
from foretrace.report.units import long_time, share

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

    view: fleet.FleetRunView
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
        "slots": [{"name": fleet.slot_name(each), "free": each.free, "together": each.together} for each in view.slots],
    }
    return {
        "view": view,
        "facts": fleet.about(view).parts,
        "parts": _parts(page),
        "gantt": gantt,
        "causes": context(fleet.causes_table(view.causes)) if view.causes else None,
        "columns": FIGURES,
        "comparison": page.comparison,
        "words": fleet,
        "against": against,
        "tenants": view.tenants[:MOST_TENANTS],
        "slots": context(fleet.slots_table(view.slots, scattered=True)) if view.slots else None,
        "notes": view.notes,
        "views": script_json({"run": _brief(view), "compare": page.comparison}),
        "data": script_json(data),
        "packed": markupsafe.Markup(packed),
    }  # fmt: skip


def _brief(view: fleet.FleetRunView) -> dict[str, Any]:
    """Return the answer without its long series, which the page holds once already."""
    import msgspec

    whole: dict[str, Any] = msgspec.to_builtins(view)
    for key in ("over_time", "jct_cdf", "slots", "tenants"):
        del whole[key]
    return whole


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


def _time(view: fleet.FleetRunView) -> dict[str, Any]:
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
