"""Repeated blocks of an `OperatorGraph`: runs of nodes that come several times, one copy after another.

The nodes become a word with one letter per different (operator, inputs, phase, work). A run with period p is a stretch
where letter i equals letter i + p. Candidates for p are the distances between equal windows of 1, 2, 4, ... letters: a
block has fewer different windows than letters only if it repeats inside itself, so some window of a length between a
quarter and half of a block comes once per copy, and its distance is the period (Morse and Hedlund, 1938).
"""

from __future__ import annotations

import heapq
import re
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from foretrace.model.operator_graph import OperatorGraph, RepeatedBlock
from foretrace.trace.tables import Interner

Int64 = npt.NDArray[np.int64]

_MOST_PERIODS = 600  # candidates that are checked; those that promise most first
_NUMBER = re.compile(r"\d+")


def with_blocks(graph: OperatorGraph, *, least: int = 2) -> OperatorGraph:
    """Return the graph with the blocks that `find` finds."""
    return replace(graph, blocks=find(graph, least=least))


def find(graph: OperatorGraph, *, least: int = 2) -> tuple[RepeatedBlock, ...]:
    """Return blocks that do not overlap, in order, each saving `least` nodes or more; largest savings first."""
    word = letters(graph)
    layers = [node.layer for node in graph.nodes]
    found = []
    runs = repeats(word, least=least)
    limits = [first for first, _, _ in runs[1:]] + [len(word)]
    for (first, length, times), limit in zip(runs, limits, strict=False):
        start = _aligned(layers, word, (first, length, times), limit)
        found.append(RepeatedBlock(first=start, length=length, times=times, layer=layers[start]))
    return tuple(found)


def letters(graph: OperatorGraph) -> Int64:
    """Return one number per node (n rows); nodes that cost the same by any model have the same one."""
    known, found = Interner(), []
    for node in graph.nodes:
        made = tuple((graph.tensors[i].dims, graph.tensors[i].dtype) for i in node.outputs)
        work = (node.flops, node.read_bytes, node.written_bytes)
        found.append(known[node.op, node.text, node.phase, *work, made])
    return np.array(found, dtype=np.int64)


def repeats(word: Int64, *, least: int = 2) -> list[tuple[int, int, int]]:
    """Return (first, length, times) of repeats that do not overlap, in order."""
    runs: list[tuple[int, int, int]] = []  # (saved, first, period, end) with the sign of saved turned, for the heap
    heap: list[tuple[int, int, int, int]] = []
    for period in _periods(word).tolist():
        equal = np.concatenate([[False], word[:-period] == word[period:], [False]])
        edges = np.flatnonzero(equal[1:] != equal[:-1])
        begins, ends = edges[::2], edges[1::2] + period
        times = (ends - begins) // period
        for at in np.flatnonzero((times > 1) & (period * (times - 1) >= least)).tolist():
            heap.append((-period * (int(times[at]) - 1), period, int(begins[at]), int(ends[at])))
    heapq.heapify(heap)
    taken = np.zeros(len(word) + 1, dtype=np.bool_)
    while heap:
        _, period, begin, end = heapq.heappop(heap)
        free = np.flatnonzero(np.diff(np.concatenate([[True], taken[begin:end], [True]]).astype(np.int8)))
        if len(free) == 2 and free[1] - free[0] == end - begin:
            times_here = (end - begin) // period
            runs.append((begin, period, times_here))
            taken[begin : begin + period * times_here] = True
            continue
        for left, right in zip(free[::2].tolist(), free[1::2].tolist(), strict=True):
            count = (right - left) // period
            if count > 1 and period * (count - 1) >= least:
                heapq.heappush(heap, (-period * (count - 1), period, begin + left, begin + right))
    return sorted(runs)


def _periods(word: Int64) -> Int64:
    """Return distances that may be periods, those that may save most first."""
    n = len(word)
    promise: dict[int, int] = {}
    names, size = np.unique(word, return_inverse=True)[1].astype(np.int64), 1
    while size <= n // 2:
        order = np.argsort(names, kind="stable")
        same = names[order[1:]] == names[order[:-1]]
        gaps = (order[1:] - order[:-1])[same]
        gaps = gaps[(gaps >= size) & (gaps <= 8 * size)]
        values, counts = np.unique(gaps, return_counts=True)
        for gap, count in zip(values.tolist(), counts.tolist(), strict=True):
            # `count` windows at this distance: a run of about count + size letters beyond its first copy.
            promise[gap] = max(promise.get(gap, 0), count + size)
        names = np.unique(names[:-size] * n + names[size:], return_inverse=True)[1].astype(np.int64)
        size *= 2
    best = sorted(promise, key=lambda gap: (-promise[gap], gap))[:_MOST_PERIODS]
    return np.array([gap for gap in best if gap <= n // 2], dtype=np.int64)


def _aligned(layers: list[str], word: Int64, run: tuple[int, int, int], limit: int) -> int:
    """Return where the first copy begins: a run may be cut anywhere, and a layer with another number begins a block.

    No copy ends behind `limit`.
    """
    first, length, times = run
    end = first + length * times
    while end < limit and word[end] == word[end - length]:
        end += 1
    slack = min(end - first - length * times, length - 1)
    for shift in range(slack + 1):
        at = first + shift
        before = layers[at - 1] if at else ""
        if layers[at] and _numbered(layers[at]) != _numbered(before):
            return at
    return first


def _numbered(layer: str) -> str:
    """Return the path of a layer up to its first number: "layers.3" of "layers.3.mlp.0"."""
    found = _NUMBER.search(layer)
    return layer[: found.end()] if found else layer
