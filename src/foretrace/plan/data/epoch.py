"""An epoch as a task graph: the training on one lane, the disk on another, which does one request after the other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from foretrace.graph.taskgraph import EdgeKind, GraphInfo, Lane, TaskGraph, TaskKind
from foretrace.graph.writer import GraphWriter
from foretrace.plan.data.costs import AccessCosts
from foretrace.trace.trace import LaneKind
from foretrace.training.rows import out_of_core
from foretrace.training.rows.out_of_core import TrainingJob
from foretrace.training.rows.partitions import GraphSizes


def epoch_graph(
    compute_s: Sequence[float], fresh: Sequence[float], *, read_s: float = 0.0, write_s: float = 0.0, spare: int = 0,
    commit_s: float = 0.0,
) -> TaskGraph:  # fmt: skip
    """States that are computed in `compute_s`, for each of which `fresh` partitions are read; then a commit.

    `spare` partitions are read while the state before is computed, after what that state put out was written.
    """
    lanes = Lane(rank=0, kind=LaneKind.CPU, label="training"), Lane(rank=0, kind=LaneKind.LINK, label="disk")
    writer = GraphWriter(lanes, GraphInfo(source="an epoch", platform="cpu", world_size=1, steps=(0,)))
    writer.mark(0, "epoch", release=0, step=0)

    def move(what: str, partitions: float, seconds: float, state: int, after: int) -> None:
        if partitions:
            task = writer.task(
                TaskKind.COPY, 1, what, round(1e9 * partitions * seconds), step=0, layer=f"state {state}"
            )
            writer.edge(after, task, EdgeKind.DATA)

    move("read", fresh[0], read_s, 0, writer.last[0])
    for k, (seconds, after) in enumerate(zip(compute_s, (*fresh[1:], 0), strict=True)):
        before, loaded = writer.last[0], writer.last.get(1)
        work = writer.task(TaskKind.OPERATOR, 0, "train", round(1e9 * seconds), step=0, layer=f"state {k}")
        if fresh[k] and loaded is not None:
            writer.edge(loaded, work, EdgeKind.DATA)
        ahead = min(spare, after)
        move("write", fresh[k] if k else 0, write_s, k - 1, before)
        move("read", ahead, read_s, k + 1, before)
        move("read", after - ahead, read_s, k + 1, work)
    move("commit", 1 if commit_s else 0, commit_s, len(compute_s) - 1, writer.last[0])
    writer.mark(0, "epoch", [writer.last[1]] if 1 in writer.last else [], step=-1)
    return writer.graph()


def epochs(job: TrainingJob, sizes: GraphSizes, training: int, costs: AccessCosts) -> tuple[int, list[TaskGraph]]:
    """Batches of an epoch with so many `training` nodes, and its graph with the costs, with low and with high ones."""
    if job.task == "nodes":
        return _node_epochs(job, sizes, training, costs)
    count, held = sizes.partitions, job.loader == "partition buffer"
    edges, fresh = np.array([float(sizes.edges)]), [0]
    if held:
        states, buckets = out_of_core.link_states(job, count, np.random.default_rng(job.seed))
        edges = np.array([len(each) for each in buckets]) * sizes.edges / count**2
        fresh = [len(states[0]), *(len({*after} - {*before}) for before, after in pairwise(states))]
    steps = np.ceil(edges / job.batch)
    batches = max(int(steps.sum()), 1)
    if job.loader == "rows from disk":
        return batches, [epoch_graph([each], fresh) for each in costs.steps_s(sizes.edges, sizes.edges / costs.batch)]
    found = []
    for k, commit_s in enumerate(costs.commit_s):
        compute = [costs.steps_s(n, m)[k] + n * costs.edge_s[k] for n, m in zip(edges, steps, strict=True)]
        moves = {"read_s": costs.read_s[k], "write_s": commit_s / job.buffer} if held else {}
        found.append(epoch_graph(compute, fresh, spare=out_of_core.spare_of(job), commit_s=commit_s, **moves))
    return batches, found


def _node_epochs(job: TrainingJob, sizes: GraphSizes, training: int, costs: AccessCosts) -> tuple[int, list[TaskGraph]]:
    """Of nodes: neighbours of each state are put in order, then its nodes trained; nothing is read meanwhile."""
    count, batches = sizes.partitions, max(-(-training // job.batch), 1)
    edges, reads = float(sizes.edges), 0.0
    if job.loader == "partition buffer":
        own = min(-(-training // -(-sizes.nodes // count)), count)  # partitions of training nodes
        states = max(-(-own // job.buffer), 1)
        drawn = max(job.buffer - own, 0)
        stays = drawn / max(count - own, 1) if states == 1 else 0.0
        reads = (drawn if states == 1 else states * job.buffer) * (1 - stays)
        edges, batches = states * edges * (job.buffer / count) ** 2, max(batches, states)
    each = training / costs.batch if job.loader == "rows from disk" else batches
    return batches, [
        epoch_graph([step + edges * edge], [reads], read_s=read)
        for step, edge, read in zip(costs.steps_s(training, each), costs.edge_s, costs.read_s, strict=True)
    ]
