"""`expand`: the step of one strategy as a TaskGraph, for the house's simulator, its timelines and its what-ifs.

Every device, every link within a node and either direction of a node's network interface is a lane. A task lies on the
first one that it holds, and waits, through an edge of contention, for the last one that held any other: a message
holds two interfaces, an all-reduce all links of its ring. Lanes keep the order in which the compiled loop ran them.
"""

from __future__ import annotations

import numpy as np

from foretrace.graph.taskgraph import EdgeKind, GraphInfo, Lane, Phase, TaskGraph, TaskKind
from foretrace.graph.writer import GraphWriter
from foretrace.hardware.cluster import Cluster
from foretrace.plan.soap.engine import Tasks
from foretrace.plan.soap.problem import Codes, SoapProblem
from foretrace.trace.trace import LaneKind


def expand(problem: SoapProblem, point: Codes) -> TaskGraph:
    """Return the tasks of a strategy, in the order of the compiled loop, between the marks of one step."""
    _, tasks = problem.simulated(point)
    operators, cluster = problem.model.operators, problem.cluster
    parts = sum(int(np.prod(problem.space.split(op, code).degrees)) for op, code in enumerate(point))
    count = problem.counted(point).tasks
    followers = [_followers(tasks, task) for task in range(count)]
    layers = list(dict.fromkeys(each.layer for each in operators))
    inputs = [each for each in operators for _ in each.inputs]
    info = GraphInfo(source=problem.model.name, platform="cuda", world_size=cluster.workers, steps=(0,))
    writer = GraphWriter([Lane(rank=0, kind=LaneKind.CPU, label="steps")], info)
    writer.mark(0, release=0, step=0)
    lanes: dict[int, int] = {}  # of a resource
    last: dict[int, int] = {}  # row on each resource
    rows: dict[int, int] = {}
    for task in np.argsort(tasks.waits[:count]).tolist():
        owner, phase = int(tasks.owner[task]), Phase.FORWARD if task < parts else Phase.BACKWARD
        if owner < len(operators):
            kind, layer, name = TaskKind.KERNEL, operators[owner].layer, operators[owner].name
        elif owner < len(operators) + len(inputs):
            reader = inputs[owner - len(operators)]
            kind, layer, name = TaskKind.COPY, reader.layer, f"input of {reader.name}"
            phase = Phase.FORWARD if (task - 2 * parts) % 2 == 0 else Phase.BACKWARD
        else:
            layer = layers[owner - len(operators) - len(inputs)]
            kind, name = TaskKind.COLLECTIVE, f"gradients of {layer}"
        held = _resources(tasks, task, cluster)
        if held[0] not in lanes:
            lanes[held[0]] = writer.lane(_lane(held[0], cluster))
        lane = lanes[held[0]]
        waited = {last[each] for each in held if each in last} - {writer.last.get(lane)}
        rows[task] = writer.task(kind, lane, name, int(tasks.takes[task]), layer=layer, phase=phase)
        last |= dict.fromkeys(held, rows[task])
        for before in waited:
            writer.edge(before, rows[task], EdgeKind.CONTENTION)
    for task, after in enumerate(followers):
        for then in after:
            writer.edge(rows[task], rows[then], EdgeKind.DATA)
    for task in rows.keys() - {then for after in followers for then in after}:
        writer.edge(writer.marks[0], rows[task], EdgeKind.DATA)
    writer.mark(0, after=rows.values(), step=-1)
    return writer.graph()


def _followers(tasks: Tasks, task: int) -> list[int]:
    found, at = dict[int, None](), int(tasks.head[task])
    while at >= 0:
        found[int(tasks.target[at])] = None
        at = int(tasks.following[at])
    return list(found)


def _resources(tasks: Tasks, task: int, cluster: Cluster) -> list[int]:
    """Return what a task holds, as the compiled loop numbers devices, links and interfaces."""
    ring, n, per_node = int(tasks.ring[task]), cluster.workers, cluster.per_node
    if not ring:
        return list(dict.fromkeys((int(tasks.first[task]), int(tasks.second[task]))))
    members, base = [device for device in range(n) if ring >> device & 1], n * (1 + n)
    found = list[int]()
    for one, other in zip(members, members[1:] + members[:1], strict=True):
        here, there = one // per_node, other // per_node
        found += [n * (1 + one) + other] if here == there else [base + here, base + n + there]
    return found


def _lane(resource: int, cluster: Cluster) -> Lane:
    n = cluster.workers
    if resource < n:
        return Lane(rank=resource, kind=LaneKind.GPU, device=resource, stream=0, label=f"device {resource}")
    if resource < n * (1 + n):
        one, other = divmod(resource - n, n)
        return Lane(rank=one, kind=LaneKind.LINK, label=f"{one} to {other}")
    node = resource - n * (1 + n)
    way, node = ("into", node - n) if node >= n else ("out of", node)
    return Lane(rank=node * cluster.per_node, kind=LaneKind.LINK, label=f"network {way} node {node}")
