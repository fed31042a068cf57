"""How fast many ranks are: replay of global graphs, reading of rank sets, and 1,024 ranks predicted from eight.

    python benchmarks/ranks.py [--data DIR] [--ranks 1024] [--steps 60] [--json]

DIR holds the recordings of eight ranks, by default the DLRM set of the shared data. Replay is timed on the global graph
of that set and on chunked ring all-reduces, in seconds of CPU, best of several runs; beside it, in the same run, a
plain-Python replayer of the published kind (`rings.kahn`), which must end at the same nanosecond. The large set is the
recorded step repeated until every rank has some 50,000 tasks, written as recordings and read back; its figures are wall
time, since several processes work, and the memory is that of all of them together.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from engine import best
from foretrace import executor, flow
from foretrace.graph import ranks as rank_reader
from foretrace.graph.join import join
from foretrace.graph.taskgraph import TaskGraph
from foretrace.simulate.replay import replay
from foretrace.simulate.schedule import schedule
from rank_sets import repeated
from rings import Plain, kahn, ring_graph
from tables import shared_traces

RINGS = ((8, 14, 8), (32, 10, 40), (64, 6, 88), (128, 16, 300))  # workers, tensors, computing tasks of a worker
TARGET_S, TARGET_BYTES = 60.0, 8e9
_TICK_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """One graph: tasks per CPU-second of the replay, the schedule engine and the plain replayer."""

    graph: str
    tasks: int
    edges: int
    replay: float
    schedule: float
    plain: float
    plain_decides: float  # deciding the order on links as it runs, as the schedule engine does

    @property
    def times(self) -> float:
        """Replay over the plain replayer."""
        return self.replay / self.plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Reading and building all ranks of the large set somewhere."""

    where: str
    seconds: float  # wall
    events: int
    tasks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """From files to the times of every rank."""

    ranks: int
    recorded_ranks: int
    tasks: int  # of a rank
    stages: dict[str, float]  # wall seconds
    seconds: float  # wall, of the whole process
    cpu_s: float  # of all its processes
    peak_bytes: int
    step_s: float
    interval_s: tuple[float, float]


def measure_replay(data: Path | None) -> list[Replay]:
    """All graphs; without `data` the rings alone."""
    rows = []
    if data is not None:
        graph = join(flow.rank_graphs(data))
        rows.append(_replayed(f"{data.name}, {len(graph.info.collectives['ranks'])} ranks", graph, graph))
    for workers, tensors, compute in RINGS:
        shape = (workers, tensors, compute)
        ordered, free = (ring_graph(*shape, ordered=each) for each in (True, False))
        rows.append(_replayed(f"ring of {workers}, {tensors} tensors", ordered, free))
    return rows


def _replayed(name: str, ordered: TaskGraph, free: TaskGraph) -> Replay:
    plain, deciding = Plain(ordered, decide=False), Plain(free, decide=True)
    if not np.array_equal(kahn(plain), replay(ordered)[1]):
        raise SystemExit(f"{name}: the plain replayer ends otherwise than the replay.")
    n = len(ordered)
    return Replay(
        graph=name,
        tasks=n,
        edges=ordered.edges,
        replay=n / best(partial(replay, ordered)),
        schedule=n / best(partial(schedule, free)),
        plain=n / best(partial(kahn, plain), 2),
        plain_decides=n / best(partial(kahn, deciding), 2),
    )


def measure_reading(folder: Path, events: int) -> list[Reading]:
    """A loop, the cores of this machine, and Ray where it is installed."""
    rows = [_read("one process", events, lambda: _with_pool(folder, pays=1 << 60))]
    if executor.cores() > 1:
        rows.append(_read(f"{executor.cores()} processes", events, lambda: _with_pool(folder, pays=0)))
    try:
        import ray
    except ImportError:
        return rows
    rows.append(_read("Ray, started for it", events, lambda: flow.rank_graphs(folder, on="ray")))
    ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        flow.rank_graphs(folder, on="ray")  # workers start and import
        rows.append(_read("Ray, running already", events, lambda: flow.rank_graphs(folder, on="ray")))
    finally:
        ray.shutdown()
    return rows


def _with_pool(folder: Path, pays: int) -> tuple[TaskGraph, ...]:
    before = rank_reader.POOL_PAYS_BYTES
    rank_reader.POOL_PAYS_BYTES = pays
    try:
        return flow.rank_graphs(folder)
    finally:
        rank_reader.POOL_PAYS_BYTES = before


def _read(where: str, events: int, run: Callable[[], tuple[TaskGraph, ...]]) -> Reading:
    begin = time.perf_counter()
    graphs = run()
    seconds = time.perf_counter() - begin
    return Reading(where=where, seconds=seconds, events=events, tasks=sum(len(graph) for graph in graphs))


def predict(folder: Path, ranks: int) -> dict[str, Any]:
    """The prediction itself, stage by stage, in this process and those it starts."""
    begin = time.perf_counter()
    graphs = flow.rank_graphs(folder)
    read_s = time.perf_counter() - begin
    begin = time.perf_counter()
    found = flow.scale(graphs, ranks)
    return {
        "recorded_ranks": len(graphs),
        "tasks": int(np.mean([len(graph) for graph in graphs])),
        "stages": {"read and build": read_s, "join, fold and sample": time.perf_counter() - begin},
        "step_s": found.predicted_s,
        "interval_s": (found.low_s, found.high_s),
    }


def measure_prediction(folder: Path, ranks: int) -> Prediction:
    """`predict` in a process of its own, with the memory of everything that it starts."""
    command = [sys.executable, __file__, "--predict", str(folder), "--ranks", str(ranks)]
    begin = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out, subprocess.Popen(command, stdout=out) as process:
        peak, cpu = 0, dict[int, float]()
        while process.poll() is None:
            held = _family(process.pid)
            peak = max(peak, sum(resident for resident, _ in held.values()))
            cpu |= {pid: spent for pid, (_, spent) in held.items()}
            time.sleep(_TICK_S)
        seconds = time.perf_counter() - begin
        if process.returncode:
            raise SystemExit("the prediction failed.")
        out.seek(0)
        said: dict[str, Any] = json.load(out)
    said["interval_s"] = tuple(said["interval_s"])
    return Prediction(ranks=ranks, seconds=seconds, cpu_s=sum(cpu.values()), peak_bytes=peak, **said)


def _family(pid: int) -> dict[int, tuple[int, float]]:
    """Resident bytes and CPU seconds so far, by process, of one and all that descend from it.

    What they share counts once for each.
    """
    page, tick = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
    parents: dict[int, list[int]] = {}
    used: dict[int, tuple[int, float]] = {}
    for each in Path("/proc").iterdir():
        if each.name.isdecimal():
            try:
                fields = (each / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
            parents.setdefault(int(fields[1]), []).append(int(each.name))
            used[int(each.name)] = int(fields[21]) * page, (int(fields[11]) + int(fields[12])) / tick
    found, left = {}, [pid]
    while left:
        one = left.pop()
        left += parents.get(one, [])
        if one in used:
            found[one] = used[one]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Everything; the last two need recordings."""

    replay: list[Replay]
    reading: list[Reading]
    prediction: Prediction | None


def eight_ranks() -> Path | None:
    """The recorded set that the shared data has, None without it."""
    traces = shared_traces()
    return traces / "param" / "dlrm_kineto_8rank" if traces else None


def measure(data: Path | None, *, ranks: int = 1024, steps: int = 60) -> Measured:
    """All measurements."""
    rows = measure_replay(data)
    if data is None:
        return Measured(replay=rows, reading=[], prediction=None)
    with tempfile.TemporaryDirectory() as folder:
        events = repeated(data, Path(folder) / "ranks", steps)
        prediction = measure_prediction(Path(folder) / "ranks", ranks)
        return Measured(replay=rows, reading=measure_reading(Path(folder) / "ranks", events), prediction=prediction)


def main() -> None:
    """Print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=eight_ranks(), help="recordings of eight ranks of one step")
    parser.add_argument("--ranks", type=int, default=1024, help="ranks to predict")
    parser.add_argument("--steps", type=int, default=60, help="steps of the large set")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--predict", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.predict:
        json.dump(predict(arguments.predict, arguments.ranks), sys.stdout)
        return
    found = measure(arguments.data, ranks=arguments.ranks, steps=arguments.steps)
    if arguments.json:
        json.dump(asdict(found), sys.stdout, indent=1)
        return
    for row in found.replay:
        print(
            f"{row.graph:36} {row.tasks:>9,} tasks {row.edges:>9,} edges  replay {row.replay:>13,.0f}/s  schedule "
            f"{row.schedule:>11,.0f}/s  plain {row.plain:>9,.0f} and {row.plain_decides:>9,.0f}/s"
        )
    for each in found.reading:
        print(f"{each.where:36} {each.seconds:>6.2f} s {each.events / each.seconds:>12,.0f} events/s")
    if found.prediction:
        print(json.dumps(asdict(found.prediction), indent=1))


if __name__ == "__main__":
    main()
