"""Collectives of host backends (gloo): work on pool threads that the main thread issues and later waits for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretrace.arrays import Int64, Mask
from foretrace.graph.host import HostSpans
from foretrace.graph.kernels import innermost_at
from foretrace.trace.trace import Category

_LEAST_WAIT_NS = 50_000  # a shorter silence of the main thread is not taken for a wait
IN_FLIGHT = 2  # gloo runs two collectives at a time


@dataclass(frozen=True, eq=False)
class Links:
    """Collectives in order of start; one entry each."""

    span: Int64  # row in Host of the collective on its pool thread
    start: Int64
    end: Int64
    issued: Int64  # start of the operator on the main thread that issued it, −1 if it was not recorded
    held: Mask  # the main thread waited from `held_from` until the end of this collective
    held_from: Int64


def host_collectives(host: HostSpans, main: int) -> Links:
    """Find gloo's collectives, who issued each one, and where the main thread stood still until one was over."""
    rows = np.flatnonzero(host.is_annotation & host.named(lambda name: name.startswith("gloo:")))
    rows = rows[host.lane[rows] != main]
    rows = rows[np.argsort(host.start[rows], kind="stable")]
    start, end = host.start[rows], host.end[rows]
    issuers = np.flatnonzero(host.is_operator & host.named(lambda name: name.startswith("c10d::")))
    issuers = issuers[(host.lane[issuers] == main) & (host.top_communication[issuers])]
    issuers = issuers[np.argsort(host.start[issuers], kind="stable")]
    issued = np.full(len(rows), -1, dtype=np.int64)
    free = 0
    for i, begin in enumerate(start.tolist()):
        # Started in the order in which they were issued.
        if free < len(issuers) and host.start[issuers[free]] <= begin:
            issued[i] = host.start[issuers[free]]
            free += 1
    held, held_from = _holds(host, main, start, end)
    return Links(span=rows, start=start, end=end, issued=issued, held=held, held_from=held_from)


def _holds(host: HostSpans, main: int, start: Int64, end: Int64) -> tuple[Mask, Int64]:
    held = np.zeros(len(end), dtype=np.bool_)
    since = np.zeros(len(end), dtype=np.int64)
    if not len(end) or main < 0:
        return held, since
    part = host.lane_slice(main)
    order = np.argsort(end, kind="stable")
    inside = innermost_at(host.start[part], host.end[part], end[order])
    inside = np.where(inside >= 0, inside + part.start, -1)
    active = np.flatnonzero(np.isin(host.category[part], [Category.OPERATOR, Category.RUNTIME])) + part.start
    edges = np.unique(np.concatenate([host.start[active], host.end[active]]))
    place = np.searchsorted(edges, end[order], side="left")
    for i, at, span in zip(order.tolist(), place.tolist(), inside.tolist(), strict=True):
        quiet_from = int(edges[at - 1]) if at > 0 else int(host.start[part.start])
        quiet_to = int(edges[at]) if at < len(edges) else int(host.end[part].max())
        operator = host.operator[span] if span >= 0 else -1
        waiting = operator < 0 or host.is_communication[operator] or host.communication[span] >= 0
        later = np.any((end > end[i]) & (end <= quiet_to))
        since[i] = max(quiet_from, 0)
        held[i] = waiting and not later and end[i] - max(quiet_from, int(start[i])) >= _LEAST_WAIT_NS
    return held, since
