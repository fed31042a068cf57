"""Who held which GPUs when, few enough pieces to be drawn however many jobs there are.

Few stretches are given one by one, many as shares per row and bin of time.
"""

from __future__ import annotations

import base64
import zlib
from itertools import pairwise
from typing import Any

import numpy as np

from foretrace.fleet.cluster import ClusterTree
from foretrace.fleet.overtime import bins, holding, mean_held, own_part
from foretrace.fleet.result import FleetResult
from foretrace.fleet.workload import SECOND, Int64, codes

MOST_ROWS = 48
MOST_PIECES = 4000  # one by one; beyond it shares per bin
MOST_GROUPS = 8  # models or tenants with a colour of their own
BINS = 480


def _rows(cluster: ClusterTree) -> tuple[str, list[str], Int64]:
    """Return word, names and first GPUs (rows + 1) of the rows: units of the innermost level that has few enough."""
    for level, word in enumerate(cluster.levels):
        if cluster.units(level) <= MOST_ROWS and (level + 1 < len(cluster.levels) or cluster.units(0) <= MOST_ROWS):
            names = [cluster.unit_name(level, unit) for unit in range(cluster.units(level))]
            return word, names, cluster.starts[level]
    level = max(len(cluster.levels) - 2, 0)  # many units below the whole cluster: several of them to a row
    cut = np.unique(np.linspace(0, cluster.units(level), MOST_ROWS + 1).astype(np.int64))
    ends = [(cluster.unit_name(level, a), cluster.unit_name(level, b - 1)) for a, b in pairwise(cut.tolist())]
    names = [f"{a} – {b}" if a != b else a for a, b in ends]
    return f"group of {cluster.levels[level]}s", names, cluster.starts[level][cut]


def _groups(result: FleetResult) -> tuple[str, list[str], Int64]:
    """Return by what jobs are coloured, the names of the groups (the last for all others), and each job's group."""
    load = result.workload
    choices = {"model": load.model, "tenant": load.tenant, "gpus": load.gpus.astype(str).astype(object)}
    by = next((key for key in ("model", "tenant") if len(set(choices[key].tolist())) > 1), "gpus")
    code, names = codes(choices[by].tolist())
    weight = np.bincount(code, result.gpu_ns, minlength=len(names))
    top = np.argsort(-weight, kind="stable")[:MOST_GROUPS]
    if by == "gpus":
        top = np.array(sorted(top.tolist(), key=lambda at: int(names[at])), np.int64)
    place = np.full(len(names), len(top), np.int64)
    place[top] = np.arange(len(top))
    words = [names[at] or "(none)" for at in top.tolist()]
    if by == "gpus":
        words = [f"{word} GPU{'s' if word != '1' else ''}" for word in words]
    return by, words + (["others"] if len(names) > len(top) else []), place[code]


def occupancy(result: FleetResult, cluster: ClusterTree) -> tuple[dict[str, Any], str]:
    """Return what is drawn of who ran where, and the packed shares where there are too many stretches to draw."""
    by, groups, group = _groups(result)
    edges = bins(result, BINS)
    said = {"by": by, "groups": groups, "edges": [float(edges[0]) / SECOND, float(edges[-1]) / SECOND], "bins": BINS}
    each = result.segments
    if each is None or not len(each.devices):
        job, start, end, held, _ = holding(result)
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
        held = width * own_part(result)[job]
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
    """Return runs of neighbouring GPUs of one stretch inside one row: stretch, row, first lane in the row, how many."""
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
    """Return share of each row's GPUs by group and bin as bytes (group, row, bin), 255 for all, compressed, base64."""
    planes = np.zeros((groups, len(sizes), BINS), np.uint8)
    key = group * len(sizes) + row
    order = np.argsort(key, kind="stable")
    bounds = np.searchsorted(key[order], np.arange(groups * len(sizes) + 1))
    for at in range(groups * len(sizes)):
        mine = order[bounds[at] : bounds[at + 1]]
        if len(mine):
            weight = np.asarray(held, np.float64)[mine]
            mean = mean_held(start[mine], end[mine], weight, edges)
            planes[at // len(sizes), at % len(sizes)] = np.rint(255 * mean / sizes[at % len(sizes)]).clip(0, 255)
    return base64.b64encode(zlib.compress(planes.tobytes(), 9)).decode("ascii")
