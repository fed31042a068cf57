"""Profiles of PipeDream's profiler and graphs of Piper, as both were published."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from foretrace.arrays import Float64
from foretrace.plan.pipelines.stages import CostGraph, NodeCosts
from foretrace.reading import parse_json, read_text

_NODE = re.compile(
    r"(?P<id>\S+) -- (?P<what>.*) -- forward_compute_time=(?P<forward>\S+), "
    r"backward_compute_time=(?P<backward>\S+), activation_size=(?P<activation>.*), parameter_size=(?P<parameters>\S+)"
)
_EDGE = re.compile(r"\s+(?P<source>\S+) -- (?P<target>\S+)")


def profile(compute_s: Sequence[float], weight_bytes: Sequence[float], edges: Iterable[tuple[int, int]]) -> CostGraph:
    """Layers as PipeDream's optimiser takes them: times and weights, messages that cost nothing."""
    none = np.zeros((2, len(compute_s)))
    costs = NodeCosts(
        time=none + np.array(compute_s), kept_bytes=none, fixed_bytes=none, weight_bytes=np.array(weight_bytes),
        entering={}, leaving={},
    )  # fmt: skip
    return CostGraph(edges=dict.fromkeys(edges, 0.0), costs={1: costs})


def profile_of(text: str) -> CostGraph:
    """A profile without inputs and unused parts."""
    found = [each for each in map(_NODE.fullmatch, text.splitlines()) if each]
    links = [(each["source"], each["target"]) for each in map(_EDGE.fullmatch, text.splitlines()) if each]
    assert len(found) + len(links) == len(text.splitlines())
    used = {source for source, _ in links}
    nodes = {
        each["id"]: each
        for each in found
        if not each["what"].startswith("Input") and (each["id"] in used or not each["what"].startswith("__getitem__"))
    }
    place = {key: at for at, key in enumerate(nodes)}
    return profile(
        [(float(each["forward"]) + float(each["backward"])) / 1e3 for each in nodes.values()],
        [float(each["parameters"]) for each in nodes.values()],
        [(place[a], place[b]) for a, b in links if a in place and b in place],
    )


def cost_graph(path: Path) -> CostGraph:
    """A graph with TMPCs (time and memory) of every node per degree."""
    found = parse_json(read_text(path, mend="give a graph in Piper's format"), str(path))
    place = {node["id"]: at for at, node in enumerate(found["nodes"])}
    edges: dict[tuple[int, int], float] = {}
    for edge in found["edges"]:
        key = place[edge["sourceId"]], place[edge["destId"]]
        edges[key] = edges.get(key, 0.0) + float(edge["communicationCost"])
    degrees = set.intersection(*(set(node["TMPCs"]) for node in found["nodes"]))
    costs = {int(t): _costs([node["TMPCs"][t] for node in found["nodes"]], place) for t in degrees}
    return CostGraph(edges=edges, costs=costs)


def _costs(nodes: list[Any], place: Mapping[Any, int]) -> NodeCosts:
    """Costs at one degree: of every node two ways, the second computes again; one that has no second has the first."""

    def column(key: str) -> Float64:
        return np.array([[float(ways[min(row, len(ways) - 1)][key]) for ways in nodes] for row in (0, 1)])

    def near(key: str) -> dict[tuple[int, int], float]:
        return {
            ((place[int(other)], v) if key == "syncTimeFw" else (v, place[int(other)])): float(nbytes)
            for v, ways in enumerate(nodes)
            for other, nbytes in ways[0][key].items()
        }

    return NodeCosts(
        time=column("timePerSample"), kept_bytes=column("memoryUsageA"), fixed_bytes=column("memoryUsageB"),
        weight_bytes=column("parameterSize")[0], entering=near("syncTimeFw"), leaving=near("syncTimeBw"),
    )  # fmt: skip
