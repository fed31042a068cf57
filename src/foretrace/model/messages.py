"""What the workers of a step send each other: which collective, how large, behind which operator, ahead of which.

- data parallel (ZeRO 0): gradients are all-reduced in buckets while the backward pass of the last micro-batch continues
  (Li et al., PyTorch Distributed, VLDB 2020);
- ZeRO 1 and 2 (Rajbhandari et al., SC 2020): the buckets are reduce-scattered instead, by stage 2 in every micro-batch,
  and what a worker has updated is all-gathered at the end;
- ZeRO 3, FSDP (Zhao et al., VLDB 2023): the parameters of a block are all-gathered ahead of its forward and its
  backward pass, while the block before computes and one more is gathered at most; its gradients are reduce-scattered
  behind its backward pass. What no block holds is gathered at the beginning and kept;
- tensor parallel (Shoeybi et al., Megatron-LM, 2019): two all-reduces per block in the forward pass, two in the
  backward pass, one of the embedding and one of the scores' gradient; the device waits for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import numpy.typing as npt

from foretrace.cost.network.network import CollectiveKind
from foretrace.graph.taskgraph import Phase
from foretrace.model.memory.memory import Blocks, Sharding
from foretrace.model.operator_graph import OperatorGraph, Role

Int64 = npt.NDArray[np.int64]

MIB = 1024 * 1024
FIRST_MB, CAP_MB = 1.0, 25.0  # of DistributedDataParallel's buckets where the user sets no size
DATA, TENSOR = "exchange", "exchange within a layer"  # names of their lanes
# Bytes that are moved per byte of gradients: into what is sent (read, written); and, where they are reduced in float32,
# as 16-bit numbers read and twice as large ones written, then divided by the workers in place.
_FLAT, _WIDENED = 2.0, 7.0
_ROWS = (".attention.output", ".inner.down")  # products whose results are added up over a tensor group (forward)
_COLUMNS = ((".attention.query", ".attention.key", ".attention.value"), (".inner.gate", ".inner.up"))  # and backward


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCollective:
    """One message of a step; nodes are those of the graph that runs."""

    kind: CollectiveKind
    name: str
    nbytes: float  # as `cost.network` counts them
    issued: int  # the host issues it behind this node; −1: first of all
    after: int  # it needs the kernel of this node; −1: none
    before: int  # the kernel of this node, or the next one behind it, needs it; number of nodes: the end of the step
    lane: str = DATA
    copied: float = 0.0  # bytes that the device moves behind `after` and ahead of it


def bucketed(
    nbytes: Sequence[int], caps_bytes: Sequence[float], types: Sequence[object] | None = None
) -> list[list[int]]:
    """Return tensors in buckets: one is closed once it holds at least its cap; the last cap holds for all further ones.

    The rule of `compute_bucket_assignment_by_size` in PyTorch's reducer. Tensors of different `types` (on one device)
    fill buckets of their own; buckets that are not full come last.
    """
    closed: list[list[int]] = []
    open_: dict[object, list[int]] = {}
    size: dict[object, int] = {}
    number: dict[object, int] = {}
    for i, each in enumerate(nbytes):
        kind = None if types is None else types[i]
        open_.setdefault(kind, []).append(i)
        size[kind] = size.get(kind, 0) + each
        if size[kind] >= caps_bytes[min(number.get(kind, 0), len(caps_bytes) - 1)]:
            closed.append(open_.pop(kind))
            size[kind], number[kind] = 0, number.get(kind, 0) + 1
    return closed + list(open_.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Nodes of one block in one pass of one micro-batch: first .. last."""

    block: int
    forward: bool
    first: int
    last: int


def collectives(
    operators: OperatorGraph, repeated: OperatorGraph, origin: Int64, *, sharding: Sharding
) -> list[ModelCollective]:
    """Return the messages of a step, in the order in which they are issued.

    `operators` is one micro-batch, `repeated` the step that runs, and `origin` says which node of the one each node of
    the other is (`repeat.again`).
    """
    step = _Step(operators, repeated, origin)
    found = list(_of_tensors(step)) if sharding.tensor > 1 else []
    if sharding.workers > 1:
        wide = 2 if sharding.master else 1  # gradients are added up in float32
        found += _gathered(step, wide) if sharding.stage == 3 else _reduced(step, sharding.stage, wide)
    return sorted(found, key=lambda each: each.issued)


class _Step:
    """A step as it runs: nodes of one micro-batch, again and again."""

    def __init__(self, operators: OperatorGraph, repeated: OperatorGraph, origin: Int64) -> None:
        self.operators, self.origin, self.count = operators, origin, len(origin)
        self.blocks = Blocks.of(operators)
        self.nodes = repeated.nodes
        phase = np.array([node.phase for node in repeated.nodes], dtype=np.int64)
        self.update = np.flatnonzero(phase == Phase.OPTIMIZER)
        self.until = int(self.update[0]) if len(self.update) else self.count  # who needs the gradients
        self.runs = self._runs(phase)
        self.last_of = {node: i for i, node in enumerate(origin.tolist())}  # where a node runs for the last time

    def _runs(self, phase: Int64) -> list[_Run]:
        block = self.blocks.of_node[self.origin]
        rows = np.flatnonzero((block >= 0) & (phase != Phase.OPTIMIZER))
        found = []
        for (key, forward), group in groupby(rows.tolist(), key=lambda i: (int(block[i]), phase[i] == Phase.FORWARD)):
            mine = list(group)
            found.append(_Run(block=key, forward=bool(forward), first=mine[0], last=mine[-1]))
        return found


def _units(step: _Step) -> tuple[dict[int, int], int]:
    """Return bytes of the weights of every block, and of what no block holds alone."""
    graph = step.operators
    users: dict[int, set[int]] = {}
    for i, node in enumerate(graph.nodes):
        if node.phase != Phase.OPTIMIZER:
            for tensor in node.inputs:
                row = graph.tensors[tensor].storage
                if graph.storages[row].role == Role.WEIGHT:
                    users.setdefault(row, set()).add(int(step.blocks.of_node[i]))
    sizes: dict[int, int] = {}
    root = 0
    for row, blocks in users.items():
        if len(blocks) == 1 and -1 not in blocks:
            (block,) = blocks
            sizes[block] = sizes.get(block, 0) + graph.storages[row].nbytes
        else:
            root += graph.storages[row].nbytes
    return sizes, root


def _message(kind: CollectiveKind, what: str, nbytes: float, behind: int, *, before: int) -> ModelCollective:
    """Return a message that is issued behind a node, whose result it needs."""
    return ModelCollective(kind=kind, name=f"{kind} {what}", nbytes=nbytes, issued=behind, after=behind, before=before)


def _gradients(kind: CollectiveKind, what: str, size: int, wide: int, behind: int, step: _Step) -> ModelCollective:
    """Return a message of so many bytes of gradients, `wide` times as many where they are added up in float32."""
    message = _message(kind, what, wide * size, behind, before=step.until)
    return replace(message, copied=(_FLAT + (_WIDENED if wide > 1 else 0.0)) * size)


def _gathered(step: _Step, wide: int) -> Iterator[ModelCollective]:
    """Yield ZeRO 3."""
    sizes, root = _units(step)
    names = step.blocks.names
    if root:
        yield _message(CollectiveKind.ALL_GATHER, "what no block holds", root, -1, before=0)
    runs = [run for run in step.runs if run.block in sizes]
    for i, run in enumerate(runs):
        size, name = sizes[run.block], names[run.block]
        again = "" if run.forward else " again"
        former = runs[i - 1].first if i else -1
        free = runs[i - 2].last if i > 1 else -1  # two gathered blocks are there at most
        gather = _message(CollectiveKind.ALL_GATHER, f"{name}{again}", size, former, before=run.first)
        yield replace(gather, after=free)
        if not run.forward:
            yield _gradients(CollectiveKind.REDUCE_SCATTER, name, size, wide, run.last, step)
    if root and step.until:
        yield _gradients(CollectiveKind.REDUCE_SCATTER, "what no block holds", root, wide, step.until - 1, step)


def _reduced(step: _Step, stage: int, wide: int) -> Iterator[ModelCollective]:
    """Yield data parallel and ZeRO 1, 2."""
    graph = step.operators
    gradients = sorted((each.born, each.nbytes) for each in graph.storages if each.role == Role.GRADIENT)
    gradients = [each for each in gradients if each[0] >= 0]
    kind = CollectiveKind.ALL_REDUCE if stage == 0 else CollectiveKind.REDUCE_SCATTER
    buckets = bucketed([size for _, size in gradients], [FIRST_MB * MIB, CAP_MB * MIB])
    for number, bucket in enumerate(buckets):
        ready = gradients[max(bucket)][0]
        places = np.flatnonzero(step.origin == ready) if stage == 2 else [step.last_of[ready]]
        size = sum(gradients[i][1] for i in bucket)
        for at in places:
            yield _gradients(kind, f"bucket {number}", size, wide, int(at), step)
    weights = sum(each.nbytes for each in graph.storages if each.role == Role.WEIGHT)
    if stage and len(step.update):
        yield _message(
            CollectiveKind.ALL_GATHER, "updated parameters", weights, int(step.update[-1]), before=step.count
        )


def _of_tensors(step: _Step) -> Iterator[ModelCollective]:
    """Yield tensor parallel: sums over the group where a block's two products are cut along what is summed over."""
    graph = step.operators
    nbytes = next(
        (
            graph.tensors[node.outputs[-1]].nbytes
            for node in graph.nodes
            if node.layer.endswith(_ROWS[0]) and node.flops
        ),
        0,
    )

    def behind(last: int, what: str) -> ModelCollective:
        return replace(_message(CollectiveKind.ALL_REDUCE, what, nbytes, last, before=last + 1), lane=TENSOR)

    for run in step.runs:
        rows = range(run.first, run.last + 1)
        name = step.blocks.names[run.block]
        for suffix in _ROWS:
            mine = [i for i in rows if step.nodes[i].layer.endswith(suffix) and step.nodes[i].phase != Phase.BACKWARD]
            if mine:
                yield behind(mine[-1], f"result of {name}{suffix}")
        for group in _COLUMNS:
            mine = [i for i in rows if step.nodes[i].layer.endswith(group) and step.nodes[i].phase == Phase.BACKWARD]
            if mine:
                yield behind(mine[-1], f"gradient of {name}{group[0].rpartition('.')[0]}")
    for name, phase in (("embedding", Phase.FORWARD), ("scores", Phase.BACKWARD)):
        found = {i for i, node in enumerate(step.nodes) if node.layer == name and node.phase == phase}
        for i in sorted(found):
            if i + 1 not in found:
                yield behind(i, name)
