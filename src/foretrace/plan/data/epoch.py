"""An epoch as a task graph: the training on one lane, the disk on another, which does one request after the other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import ceil

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
    """Return states that are computed in `compute_s`, for each of which `fresh` partitions are read; then a commit.

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
    """Return batches of an epoch with so many `training` nodes, and its graph with the costs, with low and with high
    ones.

    Of links every state is told; of nodes all states are one, whose neighbours are put in order before they are
    trained, and nothing is read meanwhile.
    """
    linked, held, count = job.task == "links", job.loader == "partition buffer", sizes.partitions
    items, edges, fresh, states = [float(sizes.edges if linked else training)], [float(sizes.edges)], [0.0], 1
    if held and linked:
        order, buckets = out_of_core.link_states(job, count, np.random.default_rng(job.seed))
        items = edges = [len(each) * sizes.edges / count**2 for each in buckets]
        fresh = [len(order[0]), *(len({*after} - {*before}) for before, after in pairwise(order))]
    elif held:
        own = min(-(-training // -(-sizes.nodes // count)), count)  # partitions of training nodes
        states, drawn = max(-(-own // job.buffer), 1), max(job.buffer - own, 0)
        stays = drawn / max(count - own, 1) if states == 1 else 0.0
        fresh = [(drawn if states == 1 else states * job.buffer) * (1 - stays)]
        edges = [states * sizes.edges * (job.buffer / count) ** 2]
    steps = [float(ceil(each / job.batch)) for each in items]
    batches = max(int(sum(steps)), states)
    if job.loader == "rows from disk":
        steps = [each / costs.batch for each in items]
    found = []
    for k in range(3):
        compute = [costs.steps_s(n, m)[k] + e * costs.edge_s[k] for n, m, e in zip(items, steps, edges, strict=True)]
        commit_s = costs.commit_s[k] if linked else 0.0
        found.append(
            epoch_graph(
                compute, fresh, read_s=costs.read_s[k], write_s=commit_s / max(job.buffer, 1), commit_s=commit_s,
                spare=out_of_core.spare_of(job) if linked else 0,
            )
        )  # fmt: skip
    return batches, found
