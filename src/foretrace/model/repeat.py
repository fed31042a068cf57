"""Nodes that run again: forward passes that are recomputed, micro-batches whose gradients are added up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from foretrace.graph.taskgraph import Phase
from foretrace.model.memory.memory import Blocks, Sharding
from foretrace.model.operator_graph import OperatorGraph

Int64 = npt.NDArray[np.int64]


def again(
    operators: OperatorGraph,
    *,
    recompute: int = 0,
    reentrant: bool = False,
    accumulate: int = 1,
    sharding: Sharding | None = None,
) -> tuple[OperatorGraph, Int64]:
    """Return the nodes of a step in which every `recompute`-th block of the model runs forward again before its
    backward pass (Chen et al. 2016; 0: none), which has so many micro-batches before its update, and whose update is of
    a share of the parameters (`sharding`); and for each of them the node of `operators` that it is.

    A block stops running again once it has what its backward pass reads, as PyTorch's checkpoints do (its last product
    is then left out); with `reentrant`, it runs to its end, as those of Megatron-LM and PyTorch's reentrant ones.

    For costs: tensors and storages stay those of one pass, so memory is asked of the graph that is given
    (`memory.peak` has all three). `batch` is that of all micro-batches together.
    """
    phase = np.array([node.phase for node in operators.nodes], dtype=np.int64)
    order, once_more = _with_recomputation(operators, recompute, reentrant)
    update = phase[order] == Phase.OPTIMIZER
    order = np.concatenate([np.tile(order[~update], accumulate), order[update]])
    once_more = np.concatenate([np.tile(once_more[~update], accumulate), once_more[update]])
    share = 1.0 if sharding is None else sharding.update_share
    if len(order) == len(operators) and share == 1.0:
        return operators, order
    nodes = []
    for i, second in zip(order.tolist(), once_more.tolist(), strict=True):
        node = operators.nodes[i]
        if second:
            node = replace(node, phase=Phase.RECOMPUTE)
        elif node.phase == Phase.OPTIMIZER and share != 1.0:
            node = replace(node, flops=node.flops * share, read_bytes=node.read_bytes * share,
                           written_bytes=node.written_bytes * share)  # fmt: skip
        nodes.append(node)
    same = len(order) == len(operators)
    found = replace(
        operators, nodes=tuple(nodes), batch=operators.batch * accumulate, blocks=operators.blocks if same else ()
    )
    return found, order


def _with_recomputation(operators: OperatorGraph, every: int, reentrant: bool) -> tuple[Int64, npt.NDArray[np.bool_]]:
    """Return nodes in the order in which they run, and which of them run once more there."""
    if not every:
        return np.arange(len(operators)), np.zeros(len(operators), dtype=np.bool_)
    blocks = Blocks.of(operators)
    chosen = blocks.every(every)
    forward: dict[int, list[int]] = {}
    for i, (block, node) in enumerate(zip(blocks.of_node.tolist(), operators.nodes, strict=True)):
        if block in chosen and node.phase == Phase.FORWARD:
            forward.setdefault(block, []).append(i)
    if not reentrant:
        forward = {block: mine[: _until(operators, blocks, block, mine)] for block, mine in forward.items()}
    begins = {first: block for block, (first, _) in blocks.backward.items()}
    order: list[int] = []
    second: list[bool] = []
    for i in range(len(operators)):
        more = forward.get(begins[i], []) if i in begins else []
        order += [*more, i]
        second += [True] * len(more) + [False]
    return np.array(order, dtype=np.int64), np.array(second, dtype=np.bool_)


def _until(operators: OperatorGraph, blocks: Blocks, block: int, forward: list[int]) -> int:
    """Return how many of a block's forward nodes make what its backward pass reads."""
    of = {tensor: operators.tensors[tensor].storage for i in forward for tensor in operators.nodes[i].outputs}
    made = {storage for storage in of.values() if operators.storages[storage].born >= forward[0]}
    first, last = blocks.backward.get(block, (0, -1))
    mine = (i for i in range(first, last + 1) if blocks.of_node[i] == block)
    read = {operators.tensors[tensor].storage for i in mine for tensor in operators.nodes[i].inputs}
    kept = made & read
    needed = (j for j, i in enumerate(forward, 1) if any(of[tensor] in kept for tensor in operators.nodes[i].outputs))
    return max(needed, default=0)
