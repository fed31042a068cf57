"""One self-contained page about a simulated fleet: the answer, who ran where, use and queue over time, policies.

Everything is inline as in the report of a run (`html`). However many jobs there are, the page stays small: few jobs
are drawn one by one, many as shares per row and stretch of time, and curves have a few hundred points.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from foretrace.files import write_text
from foretrace.fleet import metrics, overtime
from foretrace.fleet.cluster import ClusterTree
from foretrace.fleet.result import FleetResult
from foretrace.fleet.workload import SECOND, Int64, codes
from foretrace.plaintext import visible
from foretrace.report.fleet import (
    FleetRunView,
    about,
    causes_table,
    energy,
    figure_text,
    interval_text,
    level_text,
    slot_name,
    slots_table,
)
from foretrace.report.fleet_policies import FIGURES, FleetCompareView, against
from foretrace.report.html import asset, environment, own_version, script_json
from foretrace.report.page import context
from foretrace.report.units import count, digits, long_time, share

MOST_ROWS = 48  # of the picture of who ran where
MOST_PIECES = 4000  # drawn one by one; beyond it shares per bin
MOST_GROUPS = 8  # models or tenants with a colour of their own
BINS = 480
MOST_TENANTS = 200
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
    """The page as one HTML text. Deterministic: the same page gives the same bytes."""
    return visible(environment().get_template("fleet.html.j2").render(_context(page)))


def write(page: FleetPage, path: Path) -> None:
    """Render into `path`, through a temporary file beside it."""
    write_text(path, render(page))


def _context(page: FleetPage) -> dict[str, Any]:
    import markupsafe

    view = page.view
    gantt, packed = _gantt(page)
    data = {
        "gantt": gantt,
        "time": _time(view),
        "cdfs": _cdfs(page),
        "slots": [{"name": slot_name(each), "free": each.free, "together": each.together} for each in view.slots],
    }
    return {
        "version": own_version(),
        "css": markupsafe.Markup(asset("report.css") + asset("fleet.css")),
        "js": markupsafe.Markup("(() => {\n'use strict';\n" + "\n".join(map(asset, SCRIPTS)) + "\n})();"),
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
    """The answer without its long series, which the page holds once already."""
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
    """Where the time of the finished jobs goes: waiting, computing, communicating, lost."""
    result = page.result
    done = result.finished
    held, dead = float(result.held_ns[done].sum()), float(result.dead_ns[done].sum())
    comm = min(float(result.comm_ns[done].sum()), held - dead)
    waits = max(float((result.end_ns - result.workload.submit_ns)[done].sum()) - held, 0.0)
    jobs = max(int(done.sum()), 1)
    parts = {
        "waits": ("waiting for GPUs", waits),
        "compute": ("running", held - dead - comm),
        "comm": ("of it communication", comm),
        "dead": ("without progress", dead),
    }
    total = sum(value for _, value in parts.values()) or 1.0
    return [
        {
            "key": key, "word": word, "share": value / total, "percent": share(value / total),
            "text": long_time(value / jobs / SECOND),
        }
        for key, (word, value) in parts.items()
        if value or key in ("waits", "compute")
    ]  # fmt: skip


def _figures(view: FleetRunView) -> list[tuple[str, str, str]]:
    """Name, value and a remark of what stands in the answer beside the completion time."""
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
        rows.append(("energy", energy(view.kwh), "GPUs alone"))
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
    """Rows of the table."""
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
    """Its name, and value and text of every figure."""
    cells = [
        (each.jobs, count(each.jobs)),
        (each.gpu_share, share(each.gpu_share)),
        *((value or 0, long_time(value)) for value in (each.mean_jct_s, each.p99_jct_s, each.mean_queue_s)),
        (each.mean_rho or 0, "–" if each.mean_rho is None else digits(each.mean_rho)),
    ]
    return {"name": each.tenant or "(none)", "cells": cells}


# --- who ran where --------------------------------------------------------------------------------------------------


def _rows(cluster: ClusterTree) -> tuple[str, list[str], Int64]:
    """Word, names and first GPUs (rows + 1) of the rows: units of the innermost level that has few enough."""
    for level, word in enumerate(cluster.levels):
        if cluster.units(level) <= MOST_ROWS and (level + 1 < len(cluster.levels) or cluster.units(0) <= MOST_ROWS):
            names = [cluster.unit_name(level, unit) for unit in range(cluster.units(level))]
            return word, names, cluster.starts[level]
    level = max(len(cluster.levels) - 2, 0)  # many units below the whole cluster: several of them to a row
    cut = np.unique(np.linspace(0, cluster.units(level), MOST_ROWS + 1).astype(np.int64))
    ends = [(cluster.unit_name(level, a), cluster.unit_name(level, b - 1)) for a, b in pairwise(cut.tolist())]
    names = [f"{a} – {b}" if a != b else a for a, b in ends]
    return f"group of {cluster.levels[level]}s", names, cluster.starts[level][cut]


def _groups(page: FleetPage) -> tuple[str, list[str], Int64]:
    """By what jobs are coloured, the names of the groups (the last for all others), and each job's group."""
    load = page.result.workload
    choices = {"model": load.model, "tenant": load.tenant, "gpus": load.gpus.astype(str).astype(object)}
    by = next((key for key in ("model", "tenant") if len(set(choices[key].tolist())) > 1), "gpus")
    code, names = codes(choices[by].tolist())
    weight = np.bincount(code, page.result.gpu_ns, minlength=len(names))
    top = np.argsort(-weight, kind="stable")[:MOST_GROUPS]
    if by == "gpus":
        top = np.array(sorted(top.tolist(), key=lambda at: int(names[at])), np.int64)
    place = np.full(len(names), len(top), np.int64)
    place[top] = np.arange(len(top))
    words = [names[at] or "(none)" for at in top.tolist()]
    if by == "gpus":
        words = [f"{word} GPU{'s' if word != '1' else ''}" for word in words]
    return by, words + (["others"] if len(names) > len(top) else []), place[code]


def _gantt(page: FleetPage) -> tuple[dict[str, Any], str]:
    """What is drawn of who ran where, and the packed shares where there are too many stretches to draw."""
    result, cluster = page.result, page.cluster
    by, groups, group = _groups(page)
    edges = overtime.bins(result, BINS)
    said = {"by": by, "groups": groups, "edges": [float(edges[0]) / SECOND, float(edges[-1]) / SECOND], "bins": BINS}
    each = result.segments
    if each is None or not len(each.devices):
        job, start, end, held, _ = overtime.holding(result)
        said |= {"word": "cluster", "rows": [{"name": "all GPUs", "gpus": result.gpus}], "exact": False}
        return said, _packed(
            group[job], np.zeros(len(job), np.int64), start, end, held, [result.gpus], len(groups), edges
        )
    word, names, first = _rows(cluster)
    segment, row, lane, width = _pieces(each.devices, each.offset, first)
    said |= {
        "word": word,
        "rows": [{"name": name, "gpus": int(size)} for name, size in zip(names, np.diff(first), strict=True)],
        "exact": len(segment) <= MOST_PIECES,
    }
    start, end, job = each.start_ns[segment], each.end_ns[segment], each.job[segment]
    if not said["exact"]:
        held = width * result.workload.share[job]
        return said, _packed(group[job], row, start, end, held, np.diff(first).tolist(), len(groups), edges)
    columns = (row, lane, width, (start / SECOND).round(3), (end / SECOND).round(3), group[job], job)
    said["pieces"] = [column.tolist() for column in columns]
    load, queue = result.workload, result.queue_s
    said["jobs"] = {
        int(at): [
            str(load.job[at]), " · ".join(filter(None, (str(load.model[at]), str(load.tenant[at])))),
            int(load.gpus[at]), None if np.isnan(queue[at]) else round(float(queue[at]), 1),
        ]
        for at in np.unique(job).tolist()
    }  # fmt: skip
    return said, ""


def _pieces(devices: Int64, offset: Int64, first: Int64) -> tuple[Int64, Int64, Int64, Int64]:
    """Runs of neighbouring GPUs of one stretch inside one row: stretch, row, first lane in the row, how many."""
    segment = np.repeat(np.arange(len(offset) - 1), np.diff(offset))
    order = np.lexsort((devices, segment))
    devices, segment = devices[order], segment[order]
    row = np.searchsorted(first, devices, side="right") - 1
    new = np.ones(len(devices), bool)
    new[1:] = (np.diff(segment) != 0) | (np.diff(row) != 0) | (np.diff(devices) != 1)
    at = np.flatnonzero(new)
    return segment[at], row[at], devices[at] - first[row[at]], np.diff(np.append(at, len(devices)))


def _packed(
    group: Int64, row: Int64, start: Int64, end: Int64, held: Any, sizes: list[int], groups: int, edges: Any
) -> str:
    """Share of each row's GPUs by group and bin as bytes (group, row, bin), 255 for all, compressed, base64."""
    planes = np.zeros((groups, len(sizes), BINS), np.uint8)
    key = group * len(sizes) + row
    order = np.argsort(key, kind="stable")
    bounds = np.searchsorted(key[order], np.arange(groups * len(sizes) + 1))
    for at in range(groups * len(sizes)):
        mine = order[bounds[at] : bounds[at + 1]]
        if len(mine):
            weight = np.asarray(held, np.float64)[mine]
            mean = overtime.mean_held(start[mine], end[mine], weight, edges)
            planes[at // len(sizes), at % len(sizes)] = np.rint(255 * mean / sizes[at % len(sizes)]).clip(0, 255)
    return base64.b64encode(zlib.compress(planes.tobytes(), 9)).decode("ascii")
