"""Nodes that run again: forward passes that are recomputed, micro-batches whose gradients are added up."""

from __future__ import annotations

from dataclasses import replace

from foretrace.graph.taskgraph import Phase
from foretrace.model.memory import Blocks
from foretrace.model.operator_graph import Node, OperatorGraph


def again(operators: OperatorGraph, *, recompute: bool = False, accumulate: int = 1) -> OperatorGraph:
    """The nodes of a step in which every block of the model runs forward again before its backward pass
    (`recompute`, Chen et al. 2016), and which has so many micro-batches before its update.

    For costs: tensors and storages stay those of one pass, so memory is asked of the graph that is given
    (`memory.peak` has both). `batch` is that of all micro-batches together.
    """
    nodes = list(operators.nodes)
    if recompute:
        nodes = _with_recomputation(operators)
    if accumulate > 1:
        update = [node for node in nodes if node.phase == Phase.OPTIMIZER]
        nodes = [node for node in nodes if node.phase != Phase.OPTIMIZER] * accumulate + update
    if len(nodes) == len(operators):
        return operators
    return replace(operators, nodes=tuple(nodes), batch=operators.batch * accumulate, blocks=())


def _with_recomputation(operators: OperatorGraph) -> list[Node]:
    blocks = Blocks.of(operators)
    forward: dict[int, list[Node]] = {}
    for block, node in zip(blocks.of_node.tolist(), operators.nodes, strict=True):
        if block >= 0 and node.phase == Phase.FORWARD:
            forward.setdefault(block, []).append(replace(node, phase=Phase.RECOMPUTE))
    begins = {first: block for block, (first, _) in blocks.backward.items()}
    found: list[Node] = []
    for i, node in enumerate(operators.nodes):
        if i in begins:
            found += forward.get(begins[i], [])
        found.append(node)
    return found
