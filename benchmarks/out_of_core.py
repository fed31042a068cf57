"""Train a generated graph of 10 million edges within enforced memory, and in memory: quality, seconds, predictions.

    python benchmarks/out_of_core.py [--graph TEXT] [--memory 110] [--epochs 4] [--seeds 3] [--loaders]

Seconds are those of the processor in the training thread and of waiting for the disk. `--loaders` also times a loader
that reads rows one by one, and what of PyTorch Geometric's loaders works without its compiled extras. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import process_time
from typing import Any

from msgspec.structs import replace as but

from foretrace.experiment.processes import limited
from foretrace.plan.data.plan import GraphSource, plan_data, try_plan
from foretrace.training.rows.out_of_core import TrainingJob, train

GRAPH = "planted:nodes=1000000 edges=10000000 communities=10000"


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def one_by_one(source: GraphSource, partitions: int, *, batch: int = 64, batches: int = 4) -> float:
    """Edges per second where a batch reads and writes its rows one by one, past the page cache."""
    with tempfile.TemporaryDirectory() as folder:
        graph = source.partitioned(Path(folder) / "graph", partitions)
        job = TrainingJob(folder=str(graph.folder), task="links", loader="rows from disk", batch=batch, batches=batches)
        epoch = limited(train, job).epochs[0]
    return epoch.batches * batch / epoch.s


def geometric() -> dict[str, str]:
    """What PyTorch Geometric's loaders do on a small graph here: batches, or why not."""
    from importlib import import_module

    loader: Any = import_module("torch_geometric.loader")
    utils: Any = import_module("torch_geometric.utils")
    data: Any = import_module("torch_geometric.data").Data(edge_index=utils.erdos_renyi_graph(200, 0.05), num_nodes=200)
    made: dict[str, Callable[[], Any]] = {
        "NeighborLoader": lambda: loader.NeighborLoader(data, num_neighbors=[10, 10], batch_size=32),
        "LinkNeighborLoader": lambda: loader.LinkNeighborLoader(data, num_neighbors=[10, 10], batch_size=32),
        "ClusterLoader": lambda: loader.ClusterLoader(loader.ClusterData(data, num_parts=4)),
        "GraphSAINTNodeSampler": lambda: loader.GraphSAINTNodeSampler(data, batch_size=32),
        "RandomNodeLoader": lambda: loader.RandomNodeLoader(data, num_parts=4),
    }
    found = {}
    for name, make in made.items():
        try:
            found[name] = f"{len(list(make()))} batches"
        except Exception as error:  # what is missing is the answer
            found[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", default=GRAPH)
    parser.add_argument("--memory", type=float, default=110, help="MB")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=10_000)
    parser.add_argument("--loaders", action="store_true")
    given = parser.parse_args()
    begin = process_time()
    source = GraphSource.of(given.graph)
    say(graph=given.graph, edges=source.sizes.edges, generated_cpu_s=round(process_time() - begin, 1))
    if given.loaders:
        say(loader="rows from disk", edges_per_s=one_by_one(source, 16))
        try:
            say(loader="PyTorch Geometric", **geometric())
        except ImportError as error:
            say(loader="PyTorch Geometric", missing=str(error))
    plan = plan_data(source, memory_bytes=int(given.memory * 1e6), batch=given.batch)
    choice = plan.choice
    for seed in range(given.first_seed, given.first_seed + given.seeds):
        _, tried = try_plan(replace(plan, job=but(plan.job, seed=seed)), source, epochs=given.epochs)
        measured, over = tried.measured, tried.over_memory
        say(
            graph=given.graph, edges=source.sizes.edges, limit_mb=given.memory, choice=choice.name,
            planned_mb=choice.memory_bytes / 1e6, swaps=choice.swaps, bound=choice.swaps_bound,
            predicted_s=(choice.epoch_s, choice.low_s, choice.high_s), seed=seed, quality=tried.quality,
            quality_in_memory=tried.in_memory_quality, epochs_s=tried.epochs_s, epochs_in_memory_s=tried.in_memory_s,
            waited_s=tried.waited_s, peak_mb=tried.peak_bytes / 1e6, direct=tried.direct,
            peak_in_memory_mb=tried.in_memory_peak_bytes / 1e6, moved_gb=tried.moved_bytes / 1e9,
            measured_over_predicted=[measured.value, measured.low, measured.high],
            over_in_memory=[over.value, over.low, over.high],
        )  # fmt: skip


if __name__ == "__main__":
    main()
