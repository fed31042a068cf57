"""Where the data of a call lies: how much else was touched since each of its tensors was touched last.

A tensor is found in a core's caches if what was read and written since then fits them (Mattson et al. 1970,
stack distances, with bytes counted once per call instead of distinct ones). What a step touches for the first time was
touched a step ago.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from foretrace.model.operator_graph import OperatorGraph

KEPT_BYTES = 2 << 20  # by the caches of one core

Float64 = npt.NDArray[np.float64]


def far_shares(graph: OperatorGraph) -> Float64:
    """Per node, the share of its bytes that are not in a core's caches, 0 to 1 (n)."""
    moved = np.array([max(node.read_bytes + node.written_bytes, 0.0) for node in graph.nodes])
    after = np.cumsum(moved)
    step = float(after[-1]) if len(after) else 0.0
    last: dict[int, float] = {}
    found = np.zeros(len(graph))
    for i, node in enumerate(graph.nodes):
        if moved[i] <= 0:
            continue  # a view touches nothing
        before = float(after[i] - moved[i])
        far = total = 0.0
        touched = dict.fromkeys((*node.inputs, *node.outputs))
        for tensor in touched:
            storage = graph.tensors[tensor].storage
            nbytes = float(graph.tensors[tensor].nbytes)
            known = graph.storages[storage]
            since = before - last[storage] if storage in last else step
            if known.born == i:  # new: on memory that was freed not long ago, if it is small
                since = nbytes
            total += nbytes
            far += nbytes if since > KEPT_BYTES else 0.0
        for tensor in touched:
            last[graph.tensors[tensor].storage] = float(after[i])
        found[i] = far / total if total else 0.0
    return found
