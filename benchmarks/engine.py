"""How fast the engines are: replay, variants side by side, schedule, flows, sensitivity.

    python benchmarks/engine.py [--tasks 1000000] [--variants] [--json]

The graph is random: 64 lanes, two edges into every task (its predecessor on the lane and one other, or two others
where the lanes take their order as they run). Every figure is the best of several runs after one that compiles, in
seconds of CPU time of this process, and includes the preparation that the public function does. The ratios are per
task, against the plain-Python twin and against networkx's longest path on a smaller graph of the same kind. Flows are
chains of random transfers, each over 4 of the links, or over those of a ring, a star or a tree; an event is a flow that
joins or ends. `--variants` measures variants alone; they are measured once more with loops for AVX2 and no more.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrace.graph.assemble import assemble
from foretrace.graph.taskgraph import NO_RELEASE, EdgeKind, GraphInfo, Lane, TaskGraph, TaskKind
from foretrace.simulate.flows.flows import Flows, Interference, Transfer, simulate_flows
from foretrace.simulate.replay import replay, replay_variants
from foretrace.simulate.schedule import schedule
from foretrace.simulate.timeline import simulate
from foretrace.trace.trace import LaneKind
from tests.simulate import twins

LANES = 64
REACH = 200  # rows that an edge looks back at most
NAMES = 600
RUNS = 7
# Loops for a processor that has AVX2 and no more, on any that has it.
AVX2 = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma,+bmi,+bmi2,+lzcnt,+popcnt,-avx512f"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement; `target` is the least rate, or the longest time where there is no rate."""

    what: str
    seconds: float
    rate: float | None  # per CPU-second
    unit: str
    target: float | None

    @property
    def met(self) -> bool | None:
        """Whether the target is met, None without one."""
        if self.target is None:
            return None
        return self.seconds <= self.target if self.rate is None else self.rate >= self.target


def random_graph(n: int, *, ordered: bool, seed: int = 0) -> TaskGraph:
    """N tasks on 64 lanes with 2 n edges, marks at both ends and in the middle."""
    random = np.random.default_rng(seed)
    rows = np.arange(n)
    lane = random.integers(0, LANES, n)
    other = rows - 1 - random.integers(0, REACH, n)
    if ordered:
        by_lane = np.argsort(lane, kind="stable")
        first = np.full(n, -1)
        follows = lane[by_lane[1:]] == lane[by_lane[:-1]]
        first[by_lane[1:][follows]] = by_lane[:-1][follows]
    else:
        first = rows - 1 - random.integers(0, REACH, n)
    src, dst = np.concatenate([first, other]), np.concatenate([rows, rows])
    kind = np.repeat([EdgeKind.STREAM if ordered else EdgeKind.DATA, EdgeKind.EVENT], n)
    some = src >= 0
    src, dst, kind = src[some], dst[some], kind[some]
    cross = kind == EdgeKind.EVENT
    return assemble(
        {
            "kind": np.full(n, TaskKind.KERNEL),
            "lane": lane,
            "name": random.integers(0, NAMES, n),
            "dur": random.integers(0, 20_000, n),
            "delay": np.where(random.random(n) < 0.05, random.integers(0, 5_000, n), 0),
            "release": np.where((first < 0) & (other < 0), 0, NO_RELEASE),
            "recorded": rows,
            "step": np.where(rows < n // 2, 0, 1),
        },
        {
            "src": src,
            "dst": dst,
            "edge_kind": kind,
            "lag": np.where(cross, random.integers(0, 2_000, len(src)), 0),
            "from_start": cross & (random.random(len(src)) < 0.3),
        },
        marks=np.array([0, n // 2, n - 1]),
        names=tuple(f"kernel {i}" for i in range(NAMES)),
        layers=(),
        lanes=tuple(Lane(rank=0, kind=LaneKind.GPU, stream=i, ordered=ordered) for i in range(LANES)),
        info=GraphInfo(platform="cuda", steps=(0, 1)),
    )


def group_graph(n: int, *, ranks: int = 8) -> TaskGraph:
    """About `n` tasks: ranks that compute, enter a collective every fourth task and go on without waiting for it."""
    rounds = n // (5 * ranks)
    random = np.random.default_rng(2)
    number, rank = (each.ravel() for each in np.mgrid[:rounds, :ranks])
    first = 5 * (number * ranks + rank)  # rows of a rank in a round: three kernels, arrival, transfer
    kernel, arrival, transfer = first + 2, first + 3, first + 4
    follows = number > 0
    edges = [(first[follows], kernel[follows] - 5 * ranks, EdgeKind.STREAM), (first + 1, first, EdgeKind.STREAM)]
    edges += [(kernel, first + 1, EdgeKind.STREAM), (arrival, kernel, EdgeKind.EVENT)]
    members = first.reshape(rounds, ranks)
    edges.append((np.repeat(transfer, ranks), np.repeat(members + 3, ranks, axis=0).ravel(), EdgeKind.COLLECTIVE))
    total = 5 * ranks * rounds
    lane, kind, dur = (
        np.zeros(total, dtype=np.int64),
        np.full(total, TaskKind.KERNEL),
        random.integers(1, 20_000, total),
    )
    for row in (first, first + 1, kernel):
        lane[row] = 2 * rank
    lane[arrival] = lane[transfer] = 2 * rank + 1
    kind[arrival], kind[transfer], dur[arrival] = TaskKind.ARRIVAL, TaskKind.COLLECTIVE, 0
    return assemble(
        {
            "kind": kind, "lane": lane, "name": np.zeros(total), "dur": dur,
            "release": np.where(np.isin(np.arange(total), first[:ranks]), 0, NO_RELEASE),
            "recorded": np.arange(total) // (5 * ranks) * 2 + (kind == TaskKind.COLLECTIVE),
        },
        {
            "src": np.concatenate([src for _, src, _ in edges]),
            "dst": np.concatenate([dst for dst, _, _ in edges]),
            "edge_kind": np.concatenate([np.full(len(dst), edge_kind) for dst, _, edge_kind in edges]),
            "lag": np.zeros(sum(len(dst) for dst, _, _ in edges)),
        },
        marks=np.array([0, total - 1]),
        names=("task",),
        layers=(),
        lanes=tuple(
            Lane(rank=i // 2, kind=LaneKind.LINK if i % 2 else LaneKind.GPU, ordered=i % 2 == 0, slots=2)
            for i in range(2 * ranks)
        ),
        info=GraphInfo(platform="cuda", steps=(0,), world_size=ranks),
    )  # fmt: skip


def flow_chains(
    chains: int, length: int, links: int, route: Callable[[np.random.Generator, int], list[int]] | None = None
) -> tuple[TaskGraph, Flows, npt.NDArray[np.float64]]:
    """A graph of chains of transfers, all of them as flows, and the capacities of the links.

    route: links of a transfer of a chain; any four by default.
    """
    random = np.random.default_rng(3)
    n = chains * length
    rows = np.arange(n)
    graph = assemble(
        {
            "kind": np.full(n, TaskKind.COPY), "lane": rows % chains, "name": np.zeros(n), "dur": np.ones(n),
            "release": np.where(rows < chains, 0, NO_RELEASE), "recorded": rows,
        },
        {
            "src": rows[:-chains], "dst": rows[chains:], "edge_kind": np.full(n - chains, EdgeKind.STREAM),
            "lag": random.integers(0, 20_000, n - chains),
        },
        marks=np.array([0, n - 1]),
        names=("transfer",),
        layers=(),
        lanes=tuple(Lane(rank=0, kind=LaneKind.LINK, stream=i) for i in range(chains)),
        info=GraphInfo(platform="cuda", steps=(0,)),
    )  # fmt: skip
    nbytes = random.uniform(1e4, 1e6, n).tolist()
    if route is None:
        route = lambda random, _: random.choice(links, 4, replace=False).tolist()  # noqa: E731
    moves = [
        ([row], Transfer(nbytes=nbytes[row], route=dict.fromkeys(route(random, row % chains), 1))) for row in range(n)
    ]
    return graph, Flows.of(moves), random.uniform(5e9, 50e9, links)


def variants(rows: list[Row], n: int) -> tuple[TaskGraph, float]:
    """Add one replay of a graph, and many beside one another; the graph, and the seconds per task of the one."""
    random = np.random.default_rng(1)
    graph = random_graph(n, ordered=True)
    one = rated(rows, f"replay, {n:,} tasks", n, lambda: replay(graph), "tasks/s", 100e6)
    group = random.integers(-1, 100, n).astype(np.int32)

    def beside(what: str, k: int, run: Callable[[], Any], target: float | None = None) -> None:
        each = rated(rows, f"{what}, {n:,} tasks", n * k, run, "task-variants/s", target)
        ratio(rows, f"{k} replays / {what}", one, each, 5.0 if k == 32 else None)

    for k, target in ((8, None), (32, 500e6), (64, None)):
        beside(f"{k} variants", k, partial(replay_variants, graph, group, random.random((100, k))), target)
    scale, gone = np.ones((100, 32)), np.arange(100)[:, None] == np.arange(32)
    beside("32 variants with removed tasks", 32, lambda: replay_variants(graph, group, scale, gone))
    return graph, one


def tree(random: np.random.Generator, _: int) -> list[int]:
    """Two of 256 hosts in 16 racks: host up, rack up and down where they differ, host down."""
    a, b = random.choice(256, 2, replace=False).tolist()
    racks = [] if a // 16 == b // 16 else [512 + a // 16, 528 + b // 16]
    return [a, *racks, 256 + b]


# Least events/s, chains, transfers of each, links, and the links of a transfer: any four where none are given.
FLOWS: dict[str, tuple[float | None, int, int, int, Callable[[np.random.Generator, int], list[int]] | None]] = {
    "64 at once, 4 of 100 links each": (None, 64, 100, 100, None),
    "2,000 at once, 4 of 300 links each": (50e3, 2_000, 5, 300, None),
    "2,000 at once, tree of 256 hosts": (50e3, 2_000, 3, 544, tree),
    "2,000 at once, ring of 250 hosts": (
        300e3, 2_000, 5, 500, lambda _, chain: [chain % 250, 250 + (chain + 1) % 250]
    ),
    "2,000 at once, star of 8 servers": (
        100e3, 2_000, 5, 2_008, lambda random, chain: [chain, 2_000 + int(random.integers(8))]
    ),
}  # fmt: skip


def measure(n: int = 1_000_000) -> list[Row]:
    """All measurements; `n` is the number of tasks of the large graphs."""
    rows: list[Row] = []
    rate = partial(rated, rows)
    graph, compiled = variants(rows, n)
    avx2 = [sys.executable, __file__, "--variants", "--json", "--tasks", str(n)]
    found = subprocess.run(avx2, env=os.environ | AVX2, check=True, capture_output=True, text=True).stdout
    rows += [Row(**each | {"what": f"{each['what']}, AVX2"}) for each in json.loads(found, object_hook=without_verdict)]
    rate(f"schedule, ordered lanes, {n:,} tasks", n, lambda: schedule(graph), "tasks/s", None)
    free = random_graph(n, ordered=False)
    run_time = rate(f"schedule, unordered lanes, {n:,} tasks", n, lambda: schedule(free), "tasks/s", 4e6)

    groups = group_graph(n)
    what = f"schedule, collectives of 8 ranks, {len(groups):,} tasks"
    rate(what, len(groups), lambda: schedule(groups), "tasks/s", None)
    unshared = partial(simulate_flows, graph, Flows.of([]), np.ones(1), interference=Interference(factor=1.2))
    rate(f"flows, none of {n:,} tasks, kernels may be slowed", n, unshared, "tasks/s", None)
    for what, (target, chains, length, links, route) in FLOWS.items():
        job = partial(simulate_flows, *flow_chains(chains, length, links, route))
        rate(f"flows, {what}", 2 * chains * length, job, "events/s", target)

    timeline = simulate(random_graph(45_000, ordered=True))
    for what, answer in (
        ("sensitivity of every task, 45,000 tasks", timeline.sensitivity),
        (f"sensitivity of all {NAMES} names, 45,000 tasks", timeline.blame),
        ("critical path, 45,000 tasks", timeline.critical_path),
        ("breakdown, 45,000 tasks", timeline.breakdown),
    ):
        limit = {"sensitivity": 0.5, "breakdown": 0.05}.get(what.split(maxsplit=1)[0].rstrip(","))
        rows.append(Row(what=what, seconds=best(answer), rate=None, unit="", target=limit))

    small, small_free = random_graph(20_000, ordered=True), random_graph(20_000, ordered=False)
    ratio(rows, "replay, Python twin / compiled", best(lambda: twins.replay(small), 2) / len(small), compiled)
    twin = best(lambda: twins.schedule(small_free), 2) / len(small)
    ratio(rows, "schedule, Python twin / compiled", twin, run_time)
    longest = networkx_longest_path(small)
    if longest is not None:
        ratio(rows, "longest path, networkx / replay", longest / len(small), compiled)
    return rows


def rated(rows: list[Row], what: str, work: float, run: Callable[[], Any], unit: str, target: float | None) -> float:
    """Add how fast it is; the seconds of each part of the work."""
    seconds = best(run)
    rows.append(Row(what=what, seconds=seconds, rate=work / seconds, unit=unit, target=target))
    return seconds / work


def ratio(rows: list[Row], what: str, theirs: float, ours: float, target: float | None = None) -> None:
    """Add how many times longer a task takes elsewhere."""
    rows.append(Row(what=what, seconds=theirs, rate=theirs / ours, unit="times", target=target))


def without_verdict(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of `--json` as its fields alone."""
    return {name: value for name, value in row.items() if name != "met"}


def best(run: Callable[[], Any], runs: int = RUNS) -> float:
    """CPU seconds of the fastest of several runs; the first one, which compiles, does not count."""
    run()
    times = []
    for _ in range(runs):
        begin = time.process_time()
        run()
        times.append(time.process_time() - begin)
    return min(times)


def networkx_longest_path(graph: TaskGraph) -> float | None:
    """Seconds of networkx for the longest path of the same graph, None where it is not installed."""
    try:
        import networkx as nx
    except ImportError:
        return None
    weight: npt.NDArray[np.int64] = graph.lag + graph.dur[graph.src]
    other = nx.DiGraph()
    other.add_nodes_from(range(len(graph)))
    other.add_weighted_edges_from(zip(graph.src.tolist(), graph.dst.tolist(), weight.tolist(), strict=True))
    return best(lambda: nx.dag_longest_path_length(other), 2)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=1_000_000, help="tasks of the large graphs")
    parser.add_argument("--variants", action="store_true", help="variants alone, for the processor as it is")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    rows: list[Row] = []
    if arguments.variants:
        variants(rows, arguments.tasks)
    else:
        rows = measure(arguments.tasks)
    if arguments.json:
        json.dump([asdict(row) | {"met": row.met} for row in rows], sys.stdout, indent=1)
        return
    print(f"{'':56} {'time':>10} {'rate':>24}  target")
    for row in rows:
        rate = f"{row.rate:,.4g} {row.unit}" if row.rate is not None else ""
        target = "" if row.target is None else f"{row.target:g} {'met' if row.met else 'MISSED'}"
        print(f"{row.what:56} {row.seconds * 1e3:>7.3g} ms {rate:>24}  {target}")


if __name__ == "__main__":
    main()
