"""`check`: does this graph stand up to being changed?

An exact self-replay proves nothing, because recorded slack reproduces every recording, wrong edges or not. These tests
found the builder's errors on real traces: structural replay, device time
zero, host time zero, the durations of one step on the structure of another, and delay that no edge explains.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from foretrace.arrays import Int64, Mask
from foretrace.errors import spelled
from foretrace.graph.kernels import longest_common
from foretrace.graph.taskgraph import NO_RELEASE, EdgeKind, TaskGraph, TaskKind
from foretrace.simulate.replay import replay as run
from foretrace.trace.trace import LaneKind

UNEXPLAINED_WARN, UNEXPLAINED_REFUSE = 0.02, 0.10
_STRUCTURAL, _STRUCTURAL_COMPETING, _COMPETING = 0.01, 0.025, 0.05
_HOST_ONLY = 0.01
_LONG_SYNC_NS = 50_000
_MOST_EDITS = 3_000


class CheckVerdict(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check of a graph."""

    name: str
    verdict: str  # a `CheckVerdict`
    value: float  # measured
    limit: float  # what it may be
    says: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """All findings of one graph."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return all(f.verdict != CheckVerdict.FAIL for f in self.findings)

    @property
    def gpu_whatifs(self) -> bool:
        """Whether what-ifs on device tasks may be asked: enough of the device's delay is explained."""
        return not any(f.name == "unexplained delay" and f.verdict == CheckVerdict.FAIL for f in self.findings)

    def of(self, name: str) -> Finding:
        """Return the finding of that name; KeyError if it was not made."""
        for finding in self.findings:
            if finding.name == name:
                return finding
        raise KeyError(name)


def check(graph: TaskGraph) -> CheckReport:
    """Run every check; a failed one says which what-ifs not to trust."""
    findings = [*_structure(graph), _self_replay(graph), _structural(graph)]
    several = len(graph.ranks) > 1
    if graph.on_device.any():
        findings += [_unexplained(graph)]
        findings += _alone() if several else [_device_zero(graph), _host_zero(graph)]
        findings += [_linked(graph)]
        findings += [_inferred(graph), _own_costs(graph)]
    if graph.n_steps >= 2:
        findings.append(_swap(graph))
    return CheckReport(findings=tuple(findings))


# -- invariants ------------------------------------------------------------------------------------------------


def _structure(graph: TaskGraph) -> list[Finding]:
    """Return acyclic, no dangling edge, durations not negative, lanes in order."""
    n, dst = len(graph), graph.dst
    backward = int(np.sum(graph.src >= dst))
    dangling = int(np.sum((graph.src < 0) | (graph.src >= n))) + int(graph.in_ptr[-1] != graph.edges)
    negative = int(np.sum(graph.dur < 0) + np.sum(graph.delay < 0))
    ordered = np.array([lane.ordered for lane in graph.lanes], dtype=np.bool_)
    rows = np.lexsort((np.arange(n), graph.lane))
    same = (graph.lane[rows[1:]] == graph.lane[rows[:-1]]) & ordered[graph.lane[rows[1:]]]
    chained = np.zeros(n, dtype=np.bool_)
    chained[dst[graph.lane[graph.src] == graph.lane[dst]]] = True
    unordered = int(np.sum(same & ~chained[rows[1:]]))
    faults = (
        ("acyclic", backward, "edges point backwards in topological order"),
        ("no dangling edge", dangling, "edges point outside the graph"),
        ("durations not negative", negative, "tasks have a negative duration or delay"),
        ("lanes ordered", unordered, "tasks have no edge from an earlier task of their lane"),
    )
    return [_finding(name, count, 0, f"{count} {what}") for name, count, what in faults]


def _finding(name: str, value: float, limit: float, says: str, warn: float | None = None) -> Finding:
    if value <= (limit if warn is None else warn):
        verdict = CheckVerdict.OK
    else:
        verdict = CheckVerdict.WARN if warn is not None and value <= limit else CheckVerdict.FAIL
    return Finding(name=name, verdict=verdict, value=float(value), limit=float(limit), says=says)


def _self_replay(graph: TaskGraph) -> Finding:
    """Check that recorded times are reproduced to the nanosecond; an edited graph has no recording to reproduce."""
    if graph.changes:
        return Finding(name="self-replay", verdict=CheckVerdict.SKIP, value=0, limit=0, says="the graph was edited")
    start, _ = run(graph)
    worst = int(np.max(np.abs(start - graph.recorded))) if len(graph) else 0
    return _finding("self-replay", worst, 0, f"replayed starts differ from recorded ones by up to {worst} ns")


# -- counterfactuals -------------------------------------------------------------------------------------------


def _steps(graph: TaskGraph, end: Int64) -> Int64:
    return np.diff(end[graph.marks])


def structural_error(graph: TaskGraph) -> tuple[float, float]:
    """Return (error of the window, worst step) of a replay with typical lags and no delays, relative to the replay."""
    _, end = run(graph)
    _, plain = run(graph, structural=True)
    recorded, typical = _steps(graph, end), _steps(graph, plain)
    if not recorded.sum():
        return 0.0, 0.0
    worst = np.abs(typical - recorded) / np.maximum(recorded, 1)
    return float(typical.sum() / recorded.sum() - 1), float(worst.max())


def _structural(graph: TaskGraph) -> Finding:
    total, worst = structural_error(graph)
    competing = graph.info.overlap_share > _COMPETING or LaneKind.LINK in graph.lane_kinds
    limit = _STRUCTURAL_COMPETING if competing else _STRUCTURAL
    says = (
        f"with typical lags and no delays the window changes by {100 * total:+.2f} %, the worst step by "
        f"{100 * worst:.2f} %"
    )
    if worst > limit:
        says += "; " + worst_tasks(graph)
    return _finding("structural replay", worst, limit, says)


def worst_tasks(graph: TaskGraph, count: int = 10) -> str:
    """Return the tasks with the longest delays, as one phrase."""
    rows = np.argsort(-graph.delay, kind="stable")[:count]
    parts = [f"{graph.names[graph.name[v]][:40]} {graph.delay[v] / 1e3:.0f} µs" for v in rows if graph.delay[v] > 0]
    return "longest delays: " + ", ".join(parts) if parts else "no delays"


def _unexplained(graph: TaskGraph) -> Finding:
    share = graph.info.unexplained_share
    says = f"device tasks started {100 * share:.1f} % of the device's span later than any known reason allows"
    if share > UNEXPLAINED_REFUSE:
        says += "; dependencies are missing, so what-ifs on the device are refused"
    return _finding("unexplained delay", share, UNEXPLAINED_REFUSE, says, UNEXPLAINED_WARN)


def _beside_host(graph: TaskGraph) -> Mask:
    """Return work of a device, and messages that a technique or an estimate put on a link beside one."""
    device = graph.on_device
    return device | (graph.kind == TaskKind.COLLECTIVE) if device.any() else device


def device_zero(graph: TaskGraph) -> tuple[int, int]:
    """Return (window with all device time zero, window of the host alone), ns; the first is never below the second."""
    device = _beside_host(graph)
    zero = np.int64(0)
    into_device = device[graph.dst]
    to_host = np.isin(graph.edge_kind, [EdgeKind.SYNC, EdgeKind.QUEUE]) & ~into_device
    lag = graph.lag.copy()
    shared = np.isin(graph.edge_kind, [EdgeKind.STREAM, EdgeKind.EVENT, EdgeKind.CONTENTION]) & into_device
    lag[shared] = 0
    lag[to_host] = np.maximum(lag[to_host], 0)
    release = np.where(device, NO_RELEASE, graph.release)
    no_device = graph.with_columns(
        dur=np.where(device, zero, graph.dur),
        delay=np.where(device, zero, graph.delay),
        release=release,
        lag=lag,
    )
    host_only = no_device.with_columns(lag=np.where(to_host, np.int64(NO_RELEASE), lag))
    windows = []
    for variant in (no_device, host_only):
        _, end = run(variant)
        windows.append(int(end[graph.marks[-1]] - end[graph.marks[0]]))
    return windows[0], windows[1]


def _alone() -> list[Finding]:
    """Check one rank alone: of several ranks that wait for each other, neither answer is known."""
    says = spelled("known for one rank only; look at one with `rank=`")
    return [
        Finding(name=name, verdict=CheckVerdict.SKIP, value=0, limit=0, says=says)
        for name in ("device = 0", "host = 0")
    ]


def _device_zero(graph: TaskGraph) -> Finding:
    with_edges, host = device_zero(graph)
    _, end = run(graph)
    window = max(int(end[graph.marks[-1]] - end[graph.marks[0]]), 1)
    off = (with_edges - host) / max(host, 1)
    # Launch latencies and the tails of synchronous copies remain: they are not device time.
    returns = int(np.sum(graph.kind == TaskKind.RETURN))
    latency = max([v for k, v in graph.info.typical_ns.items() if k.startswith("launch")], default=0)
    allowed = max(_HOST_ONLY, returns * 2.0 * latency / max(host, 1), 100_000 / window)
    says = f"without device time the window is {with_edges / 1e6:.2f} ms, the host alone needs {host / 1e6:.2f} ms"
    if with_edges < host:
        return Finding(name="device = 0", verdict=CheckVerdict.FAIL, value=off, limit=allowed, says=says)
    return _finding("device = 0", off, allowed, says)


def host_zero(graph: TaskGraph) -> tuple[int, int, int]:
    """Return (span of the device with host time zero, busy time and gaps of its busiest stream, of all streams), ns."""
    device = _beside_host(graph)
    kinds = graph.lane_kinds
    host = kinds[graph.lane] == LaneKind.CPU
    fast = graph.with_columns(
        dur=np.where(host, np.int64(0), graph.dur),
        delay=np.zeros_like(graph.delay),
        release=np.where(device | host, np.int64(NO_RELEASE), graph.release),
    )
    # Free of releases the first task of every lane starts at the same instant.
    fast = replace(fast, release=np.where(fast.release == NO_RELEASE, np.int64(0), fast.release))
    start, end = run(fast)
    span = int(end[device].max() - start[device].min())
    stream = (graph.edge_kind == EdgeKind.STREAM) & ~graph.from_start
    chains = np.zeros(len(graph.lanes), dtype=np.int64)
    np.add.at(chains, graph.lane[device], graph.dur[device])
    np.add.at(chains, graph.lane[graph.dst[stream]], graph.lag[stream])
    chains = chains[np.isin(kinds, (LaneKind.GPU, LaneKind.LINK))]
    return span, int(chains.max()), int(chains.sum())


def _host_zero(graph: TaskGraph) -> Finding:
    span, busiest, everything = host_zero(graph)
    says = f"without host time the device needs {span / 1e6:.2f} ms; its busiest stream {busiest / 1e6:.2f} ms"
    below = (busiest - span) / max(busiest, 1)
    one_stream = int(np.sum(graph.lane_kinds == LaneKind.GPU)) == 1
    above = (span - busiest) / max(busiest, 1) if one_stream else 0.0
    returns = int(np.sum(graph.kind == TaskKind.RETURN))
    latency = max([v for k, v in graph.info.typical_ns.items() if k.startswith("launch")], default=0)
    allowed = max(_HOST_ONLY, (returns + 1) * 3.0 * latency / max(busiest, 1))
    return _finding("host = 0", max(below, above), allowed, says + f", all streams {everything / 1e6:.2f} ms")


def _linked(graph: TaskGraph) -> Finding:
    share = graph.info.linked_share
    says = f"{100 * share:.1f} % of device time has its launch in the recording; the rest is work of earlier steps"
    return Finding(
        name="linked",
        verdict=CheckVerdict.OK if share > 0.95 else CheckVerdict.WARN,
        value=share,
        limit=0.95,
        says=says,
    )


def _inferred(graph: TaskGraph) -> Finding:
    classes = [c for c in graph.info.edge_classes if c.policy != "stated"]
    count, refuted = sum(c.count for c in classes), sum(c.refuted for c in classes)
    says = f"{count} event edges inferred, {refuted} contradicted by the recording and dropped"
    if classes:
        says += ": " + "; ".join(f"{c.name} {c.count} ({c.policy}, {c.refuted} refuted)" for c in classes)
    return _finding("inferred edges", refuted / max(count, 1), 1.0, says, 0.2)


def _own_costs(graph: TaskGraph) -> Finding:
    """Return a synchronising call that costs the host long by itself hides a wait."""
    returning = np.flatnonzero(graph.kind == TaskKind.RETURN)
    sync = np.isin(graph.edge_kind, [EdgeKind.SYNC])
    synced = np.unique(graph.dst[sync & np.isin(graph.dst, returning)])
    before = np.isin(graph.dst, synced) & (graph.edge_kind == EdgeKind.PROGRAM)
    calls = graph.src[before]
    names = np.array(["Synchronize" in n for n in graph.names], dtype=np.bool_)
    long = calls[names[graph.name[calls]] & (graph.dur[calls] > _LONG_SYNC_NS)]
    worst = int(graph.dur[long].max()) if len(long) else 0
    says = f"{len(long)} synchronising calls cost the host more than {_LONG_SYNC_NS // 1000} µs by themselves"
    return Finding(
        name="own cost of waits",
        verdict=CheckVerdict.WARN if len(long) else CheckVerdict.OK,
        value=worst / 1e3,
        limit=_LONG_SYNC_NS / 1e3,
        says=says,
    )


# -- step i on graph j -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """Durations of every step on the structure of every other one."""

    mean_error: float  # mean |predicted / measured - 1| over all pairs
    worst_error: float
    trivial_error: float  # the same for the guess "as long as step j"
    matched: float  # share of tasks with a counterpart
    window_error: float  # change of the window when the durations of all steps are permuted


def swap_steps(graph: TaskGraph, most: int = 8) -> Swap:
    """Predict step i with the structure of step j, for all pairs of the first `most` steps.

    Tasks are matched by kind and name in order, lane by lane; unmatched ones keep their own durations.
    """
    steps = min(graph.n_steps, most)
    graph = contention_as_delay(graph)
    _, end = run(graph)
    measured = _steps(graph, end)[:steps].astype(np.float64)
    pairs = {(i, j): _matched(graph, i, j) for i in range(steps) for j in range(i + 1, steps)}
    pairs.update({(j, i): (b, a) for (i, j), (a, b) in pairs.items()})
    errors, trivial, matched, total = [], [], 0, 0
    for (i, j), (source, target) in pairs.items():
        if measured[i]:
            predicted = _steps(graph, _replayed(graph, [(source, target)]))[j]
            errors.append(abs(predicted / measured[i] - 1))
            trivial.append(abs(measured[j] / measured[i] - 1))
            matched += len(target)
            total += int(np.sum(graph.step == j))
    around = [pairs[(i + 1) % steps, i] for i in range(steps)] if steps > 1 else []
    moved = _replayed(graph, around)
    window = int(end[graph.marks[steps]] - end[graph.marks[0]])
    change = int(moved[graph.marks[steps]] - moved[graph.marks[0]]) / max(window, 1) - 1
    return Swap(
        mean_error=float(np.mean(errors)) if errors else 0.0,
        worst_error=float(np.max(errors)) if errors else 0.0,
        trivial_error=float(np.mean(trivial)) if trivial else 0.0,
        matched=matched / max(total, 1),
        window_error=float(change),
    )


def contention_as_delay(graph: TaskGraph) -> TaskGraph:
    """Return time lost to other streams' kernels as delays of the tasks that lost it, instead of edges."""
    contended = graph.edge_kind == EdgeKind.CONTENTION
    if not contended.any():
        return graph
    start, end = run(graph)
    anchor = np.where(graph.from_start, start[graph.src], end[graph.src]) + graph.lag
    base = graph.release.copy()
    np.maximum.at(base, graph.dst[~contended], anchor[~contended])
    lag = np.where(contended, np.int64(NO_RELEASE), graph.lag)
    return graph.with_columns(lag=lag, delay=start - base)


def _matched(graph: TaskGraph, i: int, j: int) -> tuple[Int64, Int64]:
    """Return rows of step i and the rows of step j that do the same work, lane by lane."""
    left, right = [], []
    rows = [np.flatnonzero(graph.step == s) for s in (i, j)]
    # Work between two calls is known by the calls: its name is merely the operator in its middle.
    between = np.isin(graph.kind, [TaskKind.CPU, TaskKind.PYTHON])
    key = np.where(between, np.int64(-1), graph.name.astype(np.int64)) * 16 + graph.kind
    for lane in np.unique(graph.lane[rows[0]]).tolist():
        a, b = (r[graph.lane[r] == lane] for r in rows)
        found = longest_common(key[a], key[b], _MOST_EDITS)
        left.append(a[found[:, 0]])
        right.append(b[found[:, 1]])
    empty = np.empty(0, np.int64)
    return np.concatenate([empty, *left]), np.concatenate([empty, *right])


def _replayed(graph: TaskGraph, moves: list[tuple[Int64, Int64]]) -> Int64:
    """Return ends when the second rows of each move take the durations, delays and recorded lags of the first."""
    dur, delay, lag = graph.dur.copy(), graph.delay.copy(), graph.lag.copy()
    degree = np.diff(graph.in_ptr)
    for source, target in moves:
        dur[target], delay[target] = graph.dur[source], graph.delay[source]
        alike = degree[source] == degree[target]
        a, b = (_edges_into(graph, rows[alike]) for rows in (source, target))
        same = (graph.edge_kind[a] == graph.edge_kind[b]) & (graph.from_start[a] == graph.from_start[b])
        lag[b[same]] = graph.lag[a[same]]
    _, end = run(graph.with_columns(dur=dur, delay=delay, lag=lag))
    return end


def _edges_into(graph: TaskGraph, rows: Int64) -> Int64:
    """Return edges into each of the rows, one after the other."""
    count = graph.in_ptr[rows + 1] - graph.in_ptr[rows]
    first = np.repeat(graph.in_ptr[rows] - np.cumsum(count) + count, count)
    return first + np.arange(len(first))


def _swap(graph: TaskGraph) -> Finding:
    swap = swap_steps(graph)
    says = (
        f"durations of one step on the structure of another miss by {100 * swap.mean_error:.2f} % "
        f"(worst {100 * swap.worst_error:.2f} %; guessing the other step's time misses by "
        f"{100 * swap.trivial_error:.2f} %); {100 * swap.matched:.1f} % of the tasks match"
    )
    limit = max(0.5 * swap.trivial_error, 0.005)
    if swap.mean_error > limit and abs(swap.window_error) < _STRUCTURAL:
        # Where the host runs ahead, the distance between the two is a state, not a duration.
        window = f"{100 * swap.window_error:+.2f} %"
        says += f"; single steps depend on how far the host is ahead, the window changes by {window}"
        return Finding(
            name="step swap", verdict=CheckVerdict.OK, value=abs(swap.window_error), limit=_STRUCTURAL, says=says
        )
    return _finding("step swap", swap.mean_error, 1.0, says, limit)
