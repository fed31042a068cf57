"""Readers of the planners: problems of others, and the state of a search."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

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
    from foretrace.serving.server.measure import read
    from foretrace.serving.server.split import split_table

    for profile in read(path):
        latency_s = profile.latency_s(0.6 if way & 1 else 0.5)
        threads = min(max(each.threads for each in latency_s), 8)
        for split in split_table(latency_s, threads=threads, batch=5).splits(5):
            yield "latency", profile.alone_s(split)
        profile.save(path)


def _play_state(path: Path, way: int) -> Iterator[Figure]:
    from foretrace.reading import parse_json, read_bytes
    from foretrace.search.minimise import SearchState

    try:
        yield "chains", len(SearchState.of_json(parse_json(read_bytes(path), str(path))).costs)
    except ValueError as error:
        raise ForetraceError(str(error)) from None


def _play_arrivals(path: Path, way: int) -> Iterator[Figure]:
    from foretrace.serving.server.load import arrivals

    found = arrivals(str(path), rate=1.0, seconds=1e9 if way & 1 else 2.0)
    yield "arrivals", found
    yield "in order", [1.0 if (found[1:] >= found[:-1]).all() else float("nan")]


def _play_serve_plan(path: Path, way: int) -> Iterator[Figure]:
    from foretrace.serving.server.run import read_plans

    for batch, split in read_plans([path]).items():
        yield "batch", [batch, split.batch, split.threads]


def _lookups() -> dict[str, bytes]:
    import pyarrow as arrow
    from pyarrow import parquet

    packed, columns = io.BytesIO(), io.BytesIO()
    ids, offsets = np.array([3, 1, 3, 0, 2, 5]), np.array([0, 2, 2, 6])
    arrays: dict[str, Any] = {"users.ids": ids, "users.offsets": offsets, "items.ids": np.array([9, 8, 9])}
    np.savez_compressed(packed, **arrays)
    table = {"users": [[3, 1], [], [3, 0, 2, 5]], "items": [9, 8, 9]}
    parquet.write_table(arrow.table(table), columns)
    return {"ids.npz": packed.getvalue(), "ids.parquet": columns.getvalue()}


def _play_lookups(path: Path, way: int) -> Iterator[Figure]:
    from foretrace.training.rows.lookups import read

    found = read(path, samples=2 * (way & 1))
    for ids, offsets in found.read(0, way & 1, 2):
        yield "ids", ids
        yield "offsets", offsets
    yield "tables", [[table.rows, len(table.ids)] for table in found.tables]


def _play_reuse(path: Path, way: int) -> Iterator[Figure]:
    from foretrace.training.rows.lookups import read_reuse, reused

    for each in read_reuse(path):
        yield "histogram", [each.mean, *each.rows, *each.lookups]
        yield "ids", reused(each, samples=4 + way, batches=2, pooling=8).tables[0].ids


REUSE = """fbgemm.pt
Avg col size: 2.0
Histogram of col sizes:
(0, 1]: 0.500
(1, 2]: 0.250
(2+: 0.250
Ratio of index distribution at different column sizes:
(0, 1]: 0.250
(1, 2]: 0.250
(2+: 0.500
"""


def _graph() -> bytes:
    held = io.BytesIO()
    np.savez(
        held, edges=np.array([[0, 1], [1, 2], [3, 3]]), label=np.array([0, 1, 0, -1]), train_idx=np.array([0, 1]),
        test_idx=np.array([2]), x_shape=np.array([4, 3]), x_data=np.ones(3), x_indices=np.array([0, 2, 1]),
        x_indptr=np.array([0, 1, 2, 3, 3]),
    )  # fmt: skip
    return held.getvalue()


def _play_graph(path: Path, way: int) -> Iterator[Figure]:
    from foretrace.training.rows import graphs, partitions

    data = graphs.read(path)
    if data.adjacency.nodes > 10_000:
        raise ForetraceError("a graph of this size is not partitioned here.")
    found = partitions.write(data, path.parent / "graph", partitions=1 + (way & 1) * (data.adjacency.nodes > 1))
    yield "edges", partitions.read(found.folder).sizes.edges
    yield "degrees", data.adjacency.degrees


MASKS = {"samples": [{"layers": [
    {"weight": [4, 3, 3, 3], "input": [3, 8, 8], "dense": {"forward": 9.0, "weight gradient": 8.0},
     "sparse": {"forward": 9.0, "weight gradient": 3.0}}
]}]}  # fmt: skip


def _play_masks(path: Path, way: int) -> Iterator[Figure]:
    from foretrace.techniques.compute.sparse_accelerator import MaskFile

    for step in MaskFile.read(path).samples:
        for layer in step.layers:
            yield "cycles", [*layer.dense.values(), *layer.sparse.values()]


def plan_readers() -> Iterator[Reader]:
    """The readers of this file."""
    files = {
        "placement": ("plan.placement.problem", "problem.json", json.dumps(PROBLEM), _play_problem),
        "latencies": ("serving.server.measure", "profile.csv", LATENCIES, _play_latencies),
        "arrivals": ("serving.server.load", "log.csv", ARRIVALS, _play_arrivals),
        "reuse": ("training.rows.lookups", "stats.txt", REUSE, _play_reuse),
        "serve-plan": ("serving.server.run", "plan.json", json.dumps(SERVE_PLAN), _play_serve_plan),
        "masks": ("techniques.compute.sparse_accelerator", "masks.json", json.dumps(MASKS), _play_masks),
        "search-state": ("search.minimise", "state.json", json.dumps(STATE), _play_state),
    }
    yield Reader(name="lookups", covers=("training.rows.lookups",), samples=_lookups, play=_play_lookups)
    yield Reader(
        name="node-data", covers=("training.rows.graphs",), samples=lambda: {"graph.npz": _graph()}, play=_play_graph
    )
    for name, (module, file, text, play) in files.items():
        yield Reader(name=name, covers=(module,), samples=partial(dict, {file: text.encode()}), play=play)
