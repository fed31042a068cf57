"""Readers of the planners: problems of others, and the state of a search."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from foretrace.errors import ForetraceError
from tests.fuzz.reader import Figure, Reader

LATENCIES = "model,threads,batch,latency_ms,samples_ms,origin\n" + "".join(
    f"m,{threads},{batch},{2.0 * batch / threads},{batch / threads} {2 * batch / threads} {9 * batch / threads},here\n"
    for threads in (1, 2) for batch in (1, 2, 4)
)  # fmt: skip
_NODES = [
    {"id": at, "name": f"n{at}", "cpuLatency": 3.0, "fpgaLatency": 1.0 + at, "size": 5e8, "supportedOnFpga": 1,
     "isBackwardNode": int(at > 2), "colorClass": min(at, 5 - at)}
    for at in range(6)
]  # fmt: skip
_EDGES = [{"sourceId": at, "destId": at + 1, "cost": 0.25, "size": 1e6} for at in range(5)]
PROBLEM = {"maxSizePerFPGA": 2e9, "maxFPGAs": 2, "maxCPUs": 1, "nodes": _NODES, "edges": _EDGES}
ARRIVALS = "TIMESTAMP,tokens\n2023-11-16 18:15:46.68,3\n2023-11-16 18:15:47.18,4\n2023-11-16T18:15:50Z,5\n"
SERVE_PLAN = {"batch": 8, "chosen": {"split": "2x1:3+1x2:2"}, "model": "m"}
STATE = {"strategy": "MCMC(beta=50)", "seed": 3, "costs": [[1.5, "too large", 2.0], [0.5]], "best": [17, 18]}


def _play_problem(path: Path, way: int) -> Iterator[Figure]:
    from foretrace.plan.placement.place import place
    from foretrace.plan.placement.problem import load

    problem = load(path)
    if len(problem) > 200 or problem.accelerators + problem.cpus > 64:
        raise ForetraceError("a problem of this size is not placed here.")
    found = place(problem, objective="latency" if way & 1 else "throughput", seconds=0)
    yield "objective", found.objective_value
    yield "gap", found.gap
    yield "loads", [each.load for each in found.devices]


def _play_latencies(path: Path, way: int) -> Iterator[Figure]:
    from foretrace.serving.server.latencies import read
    from foretrace.serving.server.split import split_table

    for profile in read(path):
        latency_s = profile.latency_s(0.6 if way & 1 else 0.5)
        threads = min(max(each.threads for each in latency_s), 8)
        for split in split_table(latency_s, threads=threads, batch=5).splits(5):
            yield "latency", profile.alone_s(split)
        profile.save(path)


def _play_state(path: Path, way: int) -> Iterator[Figure]:
    from foretrace.search.minimise import SearchState

    yield "chains", len(SearchState.load(path).costs)


def _play_arrivals(path: Path, way: int) -> Iterator[Figure]:
    from foretrace.serving.server.load import arrivals

    found = arrivals(str(path), rate=1.0, seconds=1e9 if way & 1 else 2.0)
    yield "arrivals", found
    yield "in order", [1.0 if (found[1:] >= found[:-1]).all() else float("nan")]


def _play_serve_plan(path: Path, way: int) -> Iterator[Figure]:
    from foretrace.serving.server.run import read_plans

    for batch, split in read_plans([path]).items():
        yield "batch", [batch, split.batch, split.threads]


def plan_readers() -> Iterator[Reader]:
    """The readers of this file."""
    files = {
        "placement": ("plan.placement.problem", "problem.json", json.dumps(PROBLEM), _play_problem),
        "latencies": ("serving.server.latencies", "profile.csv", LATENCIES, _play_latencies),
        "arrivals": ("serving.server.load", "log.csv", ARRIVALS, _play_arrivals),
        "serve-plan": ("serving.server.run", "plan.json", json.dumps(SERVE_PLAN), _play_serve_plan),
        "search-state": ("search.minimise", "state.json", json.dumps(STATE), _play_state),
    }
    for name, (module, file, text, play) in files.items():
        yield Reader(name=name, covers=(module,), samples=partial(dict, {file: text.encode()}), play=play)
