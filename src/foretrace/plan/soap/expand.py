"""`expand`: the step of one strategy as a TaskGraph, for the house's simulator, its timelines and its what-ifs.

Every device, every link within a node and either direction of a node's network interface is a lane. A task lies on the
first one that it holds, and waits, through an edge of contention, for the last one that held any other: a message
holds two interfaces, an all-reduce all links of its ring. Lanes keep the order in which the compiled loop ran them.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np

from foretrace.graph.assemble import assemble
from foretrace.graph.taskgraph import NO_RELEASE, EdgeKind, GraphInfo, Lane, Phase, TaskGraph, TaskKind
from foretrace.plan.soap.cluster import SoapCluster
from foretrace.plan.soap.engine import Tasks
from foretrace.plan.soap.problem import Codes, SoapProblem
from foretrace.trace.trace import LaneKind


def expand(problem: SoapProblem, point: Codes) -> TaskGraph:
    """The tasks of a strategy, in the order of the compiled loop, between the marks of one step."""
    _, tasks = problem.simulated(point)
    operators, cluster = problem.model.operators, problem.cluster
    parts = sum(int(np.prod(problem.space.split(op, code).degrees)) for op, code in enumerate(point))
    count = problem.counted(point).tasks
    followers = [_followers(tasks, task) for task in range(count)]
    edges = [(task, then, EdgeKind.DATA) for task, after in enumerate(followers) for then in after]
    columns: dict[str, list[int]] = {key: [] for key in ("kind", "phase", "lane", "name", "layer")}
    names: dict[str, int] = {}
    layers = {name: i for i, name in enumerate(dict.fromkeys(each.layer for each in operators))}
    lanes: dict[int, int] = {}  # of a resource
    inputs = [op for op, each in enumerate(operators) for _ in each.inputs]
    holds = [_resources(tasks, task, cluster) for task in range(count)]
    for task, held in enumerate(holds):
        owner = int(tasks.owner[task])
        phase = Phase.FORWARD if task < parts else Phase.BACKWARD
        if owner < len(operators):
            kind, layer = TaskKind.KERNEL, layers[operators[owner].layer]
            name = operators[owner].name
        elif owner < len(operators) + len(inputs):
            op = inputs[owner - len(operators)]
            kind, layer, name = TaskKind.COPY, layers[operators[op].layer], f"input of {operators[op].name}"
            phase = Phase.FORWARD if (task - 2 * parts) % 2 == 0 else Phase.BACKWARD
        else:
            kind, layer = TaskKind.COLLECTIVE, owner - len(operators) - len(inputs)
            name = f"gradients of {list(layers)[layer]}"
        lane = lanes.setdefault(held[0], len(lanes))
        for key, value in zip(columns, (kind, phase, lane, names.setdefault(name, len(names)), layer), strict=True):
            columns[key].append(int(value))
    last: dict[int, int] = {}  # task on each resource
    for task in _order(tasks, followers):
        for at, resource in enumerate(holds[task]):
            if resource in last:
                same = at == 0 and holds[last[resource]][0] == resource
                edges.append((last[resource], task, EdgeKind.STREAM if same else EdgeKind.CONTENTION))
            last[resource] = task
    begin, end, clock = count, count + 1, len(lanes)
    waiting = {then for _, then, _ in edges}
    edges += [(begin, task, EdgeKind.DATA) for task in range(count) if task not in waiting]
    edges += [(task, end, EdgeKind.SYNC) for task in range(count)] + [(begin, end, EdgeKind.PROGRAM)]
    given: dict[str, Any] = {
        key: np.array(values + 2 * [filler])
        for (key, values), filler in zip(
            columns.items(), (TaskKind.MARK, Phase.NONE, clock, names.setdefault("step", len(names)), -1), strict=True
        )
    }
    given["dur"] = np.append(tasks.takes[:count], (0, 0))
    given["step"] = np.append(np.zeros(count + 1, dtype=np.int64), -1)
    given["release"] = np.full(count + 2, NO_RELEASE)
    given["release"][begin] = 0
    src, dst, kinds = (np.array(each) for each in zip(*dict.fromkeys(edges), strict=True))
    return assemble(
        given,
        {"src": src, "dst": dst, "edge_kind": kinds, "lag": np.zeros_like(src)},
        marks=np.array((begin, end)),
        names=tuple(names),
        layers=tuple(layers),
        lanes=(*(_lane(each, cluster) for each in lanes), Lane(rank=0, kind=LaneKind.CPU, label="steps")),
        info=GraphInfo(source=problem.model.name, platform="cuda", world_size=cluster.devices, steps=(0,)),
    )


def _followers(tasks: Tasks, task: int) -> list[int]:
    found, at = [], int(tasks.head[task])
    while at >= 0:
        found.append(int(tasks.target[at]))
        at = int(tasks.following[at])
    return found


def _resources(tasks: Tasks, task: int, cluster: SoapCluster) -> list[int]:
    """What a task holds, as the compiled loop numbers devices, links and interfaces."""
    ring, n, per_node = int(tasks.ring[task]), cluster.devices, cluster.per_node
    if not ring:
        return [int(each) for each in (tasks.first[task], tasks.second[task]) if each >= 0]
    members, base = [device for device in range(n) if ring >> device & 1], n * (1 + n)
    found = list[int]()
    for one, other in zip(members, members[1:] + members[:1], strict=True):
        here, there = one // per_node, other // per_node
        found += [n * (1 + one) + other] if here == there else [base + here, base + n + there]
    return found


def _order(tasks: Tasks, followers: list[list[int]]) -> list[int]:
    """All tasks as the loop took them: who is ready first, then the lower number."""
    waits = np.bincount([then for after in followers for then in after], minlength=len(followers)).tolist()
    heap = [(0, task) for task, left in enumerate(waits) if not left]
    heapify(heap)
    found = []
    while heap:
        found.append(heappop(heap)[1])
        for then in followers[found[-1]]:
            waits[then] -= 1
            if not waits[then]:
                heappush(heap, (int(tasks.ready[then]), then))
    return found


def _lane(resource: int, cluster: SoapCluster) -> Lane:
    n = cluster.devices
    if resource < n:
        return Lane(rank=resource, kind=LaneKind.GPU, device=resource, stream=0, label=f"device {resource}")
    if resource < n * (1 + n):
        one, other = divmod(resource - n, n)
        return Lane(rank=one, kind=LaneKind.LINK, label=f"{one} to {other}")
    node = resource - n * (1 + n)
    way, node = ("into", node - n) if node >= n else ("out of", node)
    return Lane(rank=node * cluster.per_node, kind=LaneKind.LINK, label=f"network {way} node {node}")
