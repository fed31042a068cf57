"""Recorded lags, releases and delays: what every task waited for in the recording, and what has no reason."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretrace.arrays import Int64
from foretrace.graph.assemble import Columns, edges_with_dst
from foretrace.graph.device import DeviceTasks
from foretrace.graph.taskgraph import NO_RELEASE, EdgeKind

_CONTENTION_NEAR_NS = 4_000  # a kernel held up by another stream starts when that stream's kernel ends, give or take
_LAST_WAVE_NS, _LAST_WAVE_SHARE = 150_000, 0.25  # or in the last wave of that kernel's blocks
_JITTER_NS = 5_000  # shorter delays need no reason
_BACKLOG_LATENCIES = 3  # the first task of a lane that starts later than this waited for work before the recording


@dataclass(frozen=True, eq=False)
class Settled:
    """Times that make a replay reproduce the recording, in rows of the draft."""

    edges: Columns  # with `lag`, and with contention edges added
    release: Int64
    delay: Int64
    unexplained_ns: int  # delay of device tasks whose launch was recorded
    contention_ns: int  # delay that contention edges took over


def settle(start: Int64, dur: Int64, edges: Columns, device: DeviceTasks, first: int) -> Settled:
    """Return recorded lag of every edge, release and delay of every task.

    `start` and `dur` (ns) are the recorded times of all tasks; `edges` holds src, dst, typical and from_start; rows
    `first` and following are the tasks of `device`. A lag never exceeds its typical value: what is left is a delay.
    """
    n, end = len(start), start + dur
    anchor = np.where(edges["from_start"], start[edges["src"]], end[edges["src"]])
    edges = {**edges, "lag": np.minimum(edges["typical"], start[edges["dst"]] - anchor)}
    release = np.full(n, NO_RELEASE, dtype=np.int64)
    has_edge = np.zeros(n, dtype=np.bool_)
    has_edge[edges["dst"]] = True
    release[~has_edge] = start[~has_edge]
    base = release.copy()
    np.maximum.at(base, edges["dst"], anchor + edges["lag"])
    if len(device):
        # Work of earlier steps that the recording does not show holds up the first tasks of a lane (R6).
        latency = np.array([device.latency.get(lane, 0) for lane in range(len(device.trace.lanes))])[device.lane]
        late = (device.previous < 0) & (device.start > base[first : first + len(device)] + _BACKLOG_LATENCIES * latency)
        release[first + np.flatnonzero(late)] = device.start[late]
        base = np.maximum(base, release)
    delay = start - base
    edges, explained = _contention(edges, start, end, delay, device, first)
    # Backlog has no launch that could explain when it started.
    of_device = delay[first : first + len(device)]
    return Settled(
        edges=edges,
        release=release,
        delay=delay,
        unexplained_ns=int(of_device[device.call >= 0].sum()),
        contention_ns=explained,
    )


def _contention(
    edges: Columns, start: Int64, end: Int64, delay: Int64, device: DeviceTasks, first: int
) -> tuple[Columns, int]:
    """Return kernels without a reason to be late that start when another stream's kernel ends wait for it (R7).

    Returns the edges with removable ones added and the time explained (ns), which is taken out of `delay`.
    """
    if len(device.lanes) < 2:
        return edges, 0
    rows = np.flatnonzero((delay[first : first + len(device)] > _JITTER_NS) & (device.previous >= 0))
    by_end = np.argsort(device.end, kind="stable")
    ends = device.end[by_end]
    src, dst = [], []
    for row in rows.tolist():
        late, begin = int(delay[first + row]), int(device.start[row])
        low = np.searchsorted(ends, begin - min(late, _CONTENTION_NEAR_NS), side="left")
        high = np.searchsorted(ends, begin + _LAST_WAVE_NS, side="right")
        near = by_end[low:high]
        # It ran while this one was held up, and had ended or was in its last wave when this one started.
        held = (device.lane[near] != device.lane[row]) & (device.start[near] < begin - late // 2)
        into = device.end[near] - begin
        held &= into <= np.maximum(_CONTENTION_NEAR_NS * 2, _LAST_WAVE_SHARE * device.dur[near])
        other = near[held]
        if len(other):
            src.append(int(other[np.argmin(np.abs(device.end[other] - begin))]))
            dst.append(row)
    if not src:
        return edges, 0
    a, b = np.array(src) + first, np.array(dst) + first
    lag = start[b] - end[a]
    explained = int(delay[b].sum())
    delay[b] = 0
    added = edges_with_dst({"src": a, "dst": b, "edge_kind": EdgeKind.CONTENTION, "lag": lag, "inferred": True})
    return {key: np.concatenate([edges[key], added[key]]) for key in edges}, explained
