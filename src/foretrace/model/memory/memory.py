"""How much memory a step needs, by what for, over its course, and whether it fits a device.

    found = peak(graph, recompute=True, sharding=Sharding(workers=8, stage=3))
    found.peak_bytes, found.by_category, found.fits(80e9).verdict

Every storage of an OperatorGraph is there from the node that makes it up to the node after which it is free; the sum
over storages is the timeline. Training techniques change these lives:

- recomputation: what a block of the model keeps for its backward pass is free after the block's forward pass and there
  again when its backward pass begins (Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016);
- sharding: the optimizer's state (ZeRO 1), gradients too (2), weights too (3, which is FSDP), each worker one part of
  them (Rajbhandari et al., ZeRO, SC 2020). Whole weights of stage 3 are there while their block runs and while the
  block before it does, which has them fetched ahead; whole gradients until the end of their block's backward pass;
- accumulation: gradients are there from the step before, and what a backward pass makes is added to them.

On a GPU memory comes from PyTorch's caching allocator, whose blocks and segments `allocator.py` plays through.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from foretrace.errors import ForetraceError
from foretrace.graph.taskgraph import Phase
from foretrace.model.memory.allocator import reserved
from foretrace.model.operator_graph import BEFORE, OperatorGraph, Role

Int64 = npt.NDArray[np.int64]

CATEGORIES = (
    "inputs", "weights", "buffers", "activations", "gradients", "optimizer", "temporary", "workspace", "communication",
)  # fmt: skip
_COMMUNICATION = len(CATEGORIES) - 1
BLOCK_BYTES = 512  # the CUDA caching allocator gives out multiples of this

# What a process has on a device beside its tensors: context, kernels of CUDA and its libraries, cuBLAS workspaces.
CONTEXT_BYTES = (0.4e9, 1.2e9)
_GROWTH = 0.03  # of reserved memory over many steps, at most, beyond the replay of one
# The same on a processor: PyTorch alone is 0.23 GB. Eight models of the zoo took 0.31 to 0.42 GB before their first
# step; in steps, small ones 0.1 GB more than the peak of their tensors, ResNet-50 at full size 1.22 times that peak.
PROCESS_BYTES = (0.2e9, 0.6e9)
_FREED = 0.5  # of the peak, at most: what the C library keeps of freed memory


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """What is shared out among `workers` (ZeRO): stage 1 optimizer state, 2 gradients too, 3 weights too; 0 nothing.

    With several workers and stage 0 or 1, gradients are also in buckets that are reduced, as DDP has them. `master`:
    what is captured computes on 16-bit copies of the weights, and the update works on float32 (mixed precision of FSDP,
    DeepSpeed and Megatron). `tensor` devices share every layer; a graph is that of one of them.
    """

    workers: int = 1
    stage: int = 0
    master: bool = False
    tensor: int = 1

    def __post_init__(self) -> None:
        if self.workers < 1 or self.stage not in (0, 1, 2, 3):
            raise ForetraceError(
                f"ZeRO stage {self.stage} over {self.workers} workers is not possible: stages are 0 to 3, over 1 "
                "worker or more."
            )

    @property
    def update_share(self) -> float:
        """Work of a worker's update, relative to that of the captured one."""
        return (2.0 if self.master else 1.0) / (self.workers if self.stage else 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lives:
    """Pieces of memory, as columns: bytes, category, first and last node during which each is there (n rows).

    `born` is BEFORE (−1) for what the step finds; `dies` is the number of nodes for what outlives it.
    """

    nbytes: Int64
    category: npt.NDArray[np.uint8]  # -> CATEGORIES
    born: Int64
    dies: Int64

    @classmethod
    def of(cls, graph: OperatorGraph) -> Lives:
        """Return the storages of a graph as they are."""
        rows = graph.storages
        return cls(
            nbytes=np.array([each.nbytes for each in rows], dtype=np.int64),
            category=np.array([each.role for each in rows], dtype=np.uint8),
            born=np.array([each.born for each in rows], dtype=np.int64),
            dies=np.array([each.dies for each in rows], dtype=np.int64),
        )

    def __len__(self) -> int:
        return len(self.nbytes)

    def timeline(self, count: int) -> Int64:
        """Return bytes by category during each of `count` nodes (categories x count)."""
        change = np.zeros((len(CATEGORIES), count + 1), dtype=np.int64)
        born = np.clip(self.born, 0, count)
        after = np.clip(self.dies + 1, 0, count)
        there = self.dies >= self.born
        np.add.at(change, (self.category[there], born[there]), self.nbytes[there])
        np.add.at(change, (self.category[there], after[there]), -self.nbytes[there])
        return np.cumsum(change[:, :count], axis=1)


@dataclass(frozen=True, kw_only=True)
class MemoryFit:
    """Whether a step fits a device. `needed_bytes` is a range; the margin is what is left, negative if it lacks."""

    verdict: str  # "fits", "tight" (it depends on what was assumed) or "does not fit"
    needed_bytes: tuple[float, float]
    margin_bytes: tuple[float, float]  # at worst, at best
    assumptions: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class StepMemory:
    """Memory of a step."""

    timeline: Int64  # bytes by category during each node (categories x nodes)
    reserved_bytes: int  # what the caching allocator takes from the device at most, 0 if it was not replayed
    notes: tuple[str, ...] = ()

    @cached_property
    def total(self) -> Int64:
        """Bytes during each node."""
        return np.asarray(self.timeline.sum(axis=0))

    @property
    def at(self) -> int:
        """The node during which most is there."""
        return int(self.total.argmax()) if self.total.size else 0

    @property
    def peak_bytes(self) -> int:
        """Most bytes of tensors at one time."""
        return int(self.total.max(initial=0))

    @property
    def by_category(self) -> dict[str, int]:
        """Bytes at the peak, by what for."""
        if not self.total.size:
            return dict.fromkeys(CATEGORIES, 0)
        return dict(zip(CATEGORIES, self.timeline[:, self.at].tolist(), strict=True))

    def fits(self, device_bytes: float, most_bytes: float = 0.0) -> MemoryFit:
        """Return whether it fits a device with so much memory, or up to `most_bytes` of it."""
        most_bytes = max(device_bytes, most_bytes)
        if self.reserved_bytes:
            process, held, growth = CONTEXT_BYTES, max(self.reserved_bytes, self.peak_bytes), _GROWTH
            what = "CUDA's context, kernels and library workspaces take"
            more = (
                f"the caching allocator holds between the peak of tensors and {(held - self.peak_bytes) / 1e9:.2g} GB "
                f"more (a replay of one step), and grows by up to {100 * growth:.0f} % over many steps"
            )
        else:
            process, held, growth = PROCESS_BYTES, self.peak_bytes, _FREED
            what = "Python with PyTorch and other libraries takes"
            more = f"the C library keeps freed memory, up to {100 * growth:.0f} % of the peak of tensors"
        least, most = self.peak_bytes + process[0], held * (1 + growth) + process[1]
        low, high = (each / 1e9 for each in process)
        sizes = (f"the device has {device_bytes / 1e9:.3g} to {most_bytes / 1e9:.3g} GB: vendors count in 2^30 bytes",)
        return MemoryFit(
            verdict="fits" if most <= device_bytes else "does not fit" if least > most_bytes else "tight",
            needed_bytes=(least, most),
            margin_bytes=(device_bytes - most, most_bytes - least),
            assumptions=(f"{what} {low:g} to {high:g} GB", more, *(sizes if most_bytes > device_bytes < most else ())),
        )


def peak(
    graph: OperatorGraph,
    *,
    recompute: int = 0,
    sharding: Sharding | None = None,
    accumulate: int = 1,
    allocator: str = "cuda",
) -> StepMemory:
    """Return the memory of a step. Every `recompute`-th block computes its activations again (0: none).

    `accumulate` is the number of micro-batches whose gradients are added up; `graph` is one of them. `allocator`
    "cuda" rounds blocks to 512 bytes and replays the caching allocator, "none" counts the bytes that were asked for, as
    the allocator of a processor does. Raises ForetraceError for settings that cannot be.
    """
    if accumulate < 1:
        raise ForetraceError(f"accumulate={accumulate} is too small; give the number of micro-batches, 1 or more.")
    if allocator not in ("cuda", "none"):
        raise ForetraceError(f"there is no allocator {allocator!r}; choose cuda or none.")
    lives, notes = Lives.of(graph), list[str]()
    blocks = Blocks.of(graph)
    if recompute:
        lives = _recomputed(graph, lives, blocks, blocks.every(recompute))
        if not blocks.names:
            notes.append("the model has no repeated blocks, so nothing is recomputed")
    if accumulate > 1:
        lives = _accumulated(lives, len(graph))
    if sharding is not None and (sharding.workers > 1 or sharding.master):
        lives = _sharded(graph, lives, blocks, sharding)
    if allocator == "cuda":
        lives = replace(lives, nbytes=-(-lives.nbytes // BLOCK_BYTES) * BLOCK_BYTES)
    held = reserved(lives.nbytes, lives.born, lives.dies, len(graph)) if allocator == "cuda" else 0
    return StepMemory(timeline=lives.timeline(len(graph)), reserved_bytes=held, notes=tuple(notes))


# --- blocks of a model


@dataclass(frozen=True, kw_only=True, eq=False)
class Blocks:
    """The repeated blocks of a model ("layers.0", "layers.1", ...) and when they run."""

    names: tuple[str, ...]
    of_node: Int64  # block of every node, −1 if none
    forward: dict[int, tuple[int, int]]  # block -> first and last node of its forward pass
    backward: dict[int, tuple[int, int]]

    @classmethod
    def of(cls, graph: OperatorGraph) -> Blocks:
        """Return the outermost modules with a number for a name, of lists with two members or more."""
        layers = dict.fromkeys(node.layer for node in graph.nodes)
        names = {layer: block_of(layer) for layer in layers}
        lists: dict[str, set[str]] = {}
        for name in names.values():
            if name:
                lists.setdefault(re.sub(r"\d+$", "", name), set()).add(name)
        found = {name: i for i, name in enumerate(n for each in lists.values() if len(each) > 1 for n in sorted(each))}
        of_node = np.array([found.get(names[node.layer], -1) for node in graph.nodes], dtype=np.int64)
        spans: dict[Phase, dict[int, tuple[int, int]]] = {Phase.FORWARD: {}, Phase.BACKWARD: {}}
        for i, (block, node) in enumerate(zip(of_node.tolist(), graph.nodes, strict=True)):
            phase = Phase.BACKWARD if node.phase == Phase.RECOMPUTE else node.phase
            if block >= 0 and phase in spans:
                first, _ = spans[phase].get(block, (i, i))
                spans[phase][block] = (first, i)
        return cls(names=tuple(found), of_node=of_node, forward=spans[Phase.FORWARD], backward=spans[Phase.BACKWARD])

    def every(self, which: int) -> frozenset[int]:
        """Return every `which`-th block in the order of the forward pass; none for 0."""
        order = sorted(self.forward, key=lambda block: self.forward[block][0])
        return frozenset(order[which - 1 :: which]) if which else frozenset()


def block_of(layer: str) -> str:
    """Return the block that a layer is in: "model.layers.3.mlp" is in "model.layers.3"; "" if in none."""
    parts = layer.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
        if i and parts[i - 1] and re.search(r"\d$", part) and len(parts) > i + 1 and parts[i + 1].isdigit():
            return ".".join(parts[: i + 2])
    return ""


# --- techniques


def _with(lives: Lives, rows: Iterable[tuple[int, int, int, int]]) -> Lives:
    """Return the lives and more of them: (bytes, category, born, dies)."""
    table = np.array(list(rows), dtype=np.int64).reshape(-1, 4)
    return Lives(
        nbytes=np.concatenate([lives.nbytes, table[:, 0]]),
        category=np.concatenate([lives.category, table[:, 1].astype(np.uint8)]),
        born=np.concatenate([lives.born, table[:, 2]]),
        dies=np.concatenate([lives.dies, table[:, 3]]),
    )


def _recomputed(graph: OperatorGraph, lives: Lives, blocks: Blocks, chosen: frozenset[int]) -> Lives:
    """Return what a block alone reads lives twice: in its forward and in its backward pass."""
    readers: dict[int, set[int]] = {}
    for i, node in enumerate(graph.nodes):
        if node.phase == Phase.FORWARD:
            for tensor in node.inputs:
                readers.setdefault(graph.tensors[tensor].storage, set()).add(int(blocks.of_node[i]))
    dies = lives.dies.copy()
    again = []
    for row in np.flatnonzero((lives.category == Role.ACTIVATION) & (lives.born >= 0)).tolist():
        born = int(lives.born[row])
        block = int(blocks.of_node[born])
        if block not in chosen or block not in blocks.backward or readers.get(row, {block}) - {block}:
            continue  # outside of blocks, or what a block hands on: kept
        last = blocks.forward[block][1]
        begins = blocks.backward[block][0]
        if dies[row] <= last or begins > dies[row]:
            continue
        again.append((int(lives.nbytes[row]), int(Role.ACTIVATION), begins, int(dies[row])))
        dies[row] = last
    return _with(replace(lives, dies=dies), again)


def _accumulated(lives: Lives, count: int) -> Lives:
    """Return lives where gradients are there already: those that are made now are added to them and freed."""
    rows = np.flatnonzero((lives.category == Role.GRADIENT) & (lives.born >= 0))
    dies, category = lives.dies.copy(), lives.category.copy()
    kept = [(int(lives.nbytes[row]), int(Role.GRADIENT), BEFORE, int(dies[row])) for row in rows.tolist()]
    dies[rows] = np.minimum(lives.born[rows] + 1, np.minimum(lives.dies[rows], count))
    category[rows] = Role.TEMPORARY
    return _with(replace(lives, dies=dies, category=category), kept)


def _sharded(graph: OperatorGraph, lives: Lives, blocks: Blocks, sharding: Sharding) -> Lives:
    n = sharding.workers if sharding.stage else 1
    nbytes, dies, category = lives.nbytes.copy(), lives.dies.copy(), lives.category.copy()
    more: list[tuple[int, int, int, int]] = []
    if sharding.stage >= 1 or sharding.master:
        updating = np.array([node.phase == Phase.OPTIMIZER for node in graph.nodes] + [False, False], dtype=np.bool_)
        mine = category == Role.OPTIMIZER
        mine |= (category == Role.TEMPORARY) & updating[np.clip(lives.born, -1, len(graph))]  # what an update makes
        nbytes[mine] = -(-nbytes[mine] * (2 if sharding.master else 1) // n)
    if sharding.master:  # in float32, beside the 16-bit ones; all that a worker of ZeRO 3 keeps
        rows = np.flatnonzero(category == Role.WEIGHT).tolist()
        more += [(2 * -(-int(nbytes[row]) // n), int(Role.WEIGHT), BEFORE, len(graph)) for row in rows]
    gradients = np.flatnonzero(category == Role.GRADIENT).tolist()
    if sharding.workers == 1:
        pass
    elif sharding.stage < 2:
        more += [(int(nbytes[row]), _COMMUNICATION, BEFORE, len(graph)) for row in gradients]  # DDP's buckets
    else:
        for row in gradients:
            born, last = int(lives.born[row]), int(dies[row])
            whole = int(nbytes[row])
            nbytes[row] = -(-whole * (2 if sharding.master else 1) // n)
            if born >= 0:
                block = int(blocks.of_node[born])
                end = min(blocks.backward[block][1] if block in blocks.backward else born, last)
                more.append((whole, _COMMUNICATION, born, end))
    if sharding.stage == 3:
        more += _gathered(graph, lives, blocks)
        mine = category == Role.WEIGHT
        nbytes[mine] = 0 if sharding.master else -(-nbytes[mine] // n)
    return _with(replace(lives, nbytes=nbytes, dies=dies, category=category), more)


def _gathered(graph: OperatorGraph, lives: Lives, blocks: Blocks) -> list[tuple[int, int, int, int]]:
    """Return whole weights while they are needed."""
    uses: dict[int, dict[Phase, list[int]]] = {}
    for i, node in enumerate(graph.nodes):
        phase: Phase = Phase.BACKWARD if node.phase == Phase.RECOMPUTE else node.phase
        if phase not in (Phase.FORWARD, Phase.BACKWARD):
            continue
        for tensor in node.inputs:
            row = graph.tensors[tensor].storage
            if lives.category[row] == Role.WEIGHT:
                uses.setdefault(row, {}).setdefault(phase, []).append(i)
    rows = []
    ahead: dict[Phase, dict[int, int]] = {
        Phase.FORWARD: _before(blocks.forward),
        Phase.BACKWARD: _before(blocks.backward),
    }
    for row, found in uses.items():
        size = int(lives.nbytes[row])
        seen = {int(blocks.of_node[i]) for each in found.values() for i in each}
        block = next(iter(seen)) if len(seen) == 1 else -1
        if block < 0:  # the root's stay from their first use to their last one
            every = [i for each in found.values() for i in each]
            rows.append((size, _COMMUNICATION, min(every), max(every)))
            continue
        for each_phase in found:
            spans = blocks.forward if each_phase == Phase.FORWARD else blocks.backward
            first, last = spans[block]
            rows.append((size, _COMMUNICATION, ahead[each_phase].get(block, first), last))
    return rows


def _before(spans: dict[int, tuple[int, int]]) -> dict[int, int]:
    """Return block -> first node of the block that runs before it."""
    ordered = sorted(spans.items(), key=lambda item: item[1][0])
    return {after: span[0] for (_, span), (after, _) in pairwise(ordered)}
