"""A model of many equal blocks from a capture of four: the middle ones stand for all.

    graph = unrolled(capture(decoder with 4 layers), "layers", 80)

Blocks 1 and 2 of the capture are held against each other, node by node. What differs between them says how a block
hangs together with the one before and the one after it; then copies are put between the two, in the forward pass in
order, in the backward pass in reverse. Calls on lists of tensors (the `foreach` updates of optimizers) get the copies'
tensors into their lists. The result equals the capture of the deep model (tests hold them equal).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import msgspec

from foretrace.cost.calls import describe
from foretrace.errors import ForetraceError
from foretrace.graph.taskgraph import Phase
from foretrace.model.operator_graph import DTYPE_BYTES, Node, OperatorGraph, RepeatedBlock, Storage, Tensor

CAPTURED = 4  # blocks that a capture must have: first, two to compare, last
_A, _B = 1, 2  # the two


class _Unlike(Exception):
    """The capture is not as regular as it must be; the text says where."""


def unrolled(graph: OperatorGraph, prefix: str, times: int) -> OperatorGraph:
    """Return the graph with `times` blocks "prefix.0", "prefix.1", ... where the captured one has four.

    Raises ForetraceError where the two middle blocks are not alike, or do something that cannot be repeated.
    """
    if times < CAPTURED:
        raise ForetraceError(f"{times} blocks are fewer than the {CAPTURED} that a capture for unrolling has.")
    if times == CAPTURED:
        return graph
    try:
        return _Unrolling(graph, prefix, times).result()
    except _Unlike as error:
        raise ForetraceError(
            f"{graph.name} cannot be unrolled from {CAPTURED} blocks {prefix}: {error}; capture it whole."
        ) from error


@dataclass(slots=True)
class _Run:
    """Neighbouring nodes of one block."""

    block: int  # −1: of none
    first: int
    end: int
    pair: int = -1  # number of the pair of runs (block 1, block 2) that it is one of


class _Unrolling:
    def __init__(self, graph: OperatorGraph, prefix: str, times: int) -> None:
        self.graph = graph
        self.times = times
        self.more = times - CAPTURED
        self.last = _B + self.more  # number that block 2 has in the end
        self.pattern = re.compile(rf"^({re.escape(prefix)}\.)(\d+)(?=\.|$)")
        self.names: dict[tuple[str, int], str] = {}
        self.block = [self._block(node.layer) for node in graph.nodes]
        self.storage_block = [self._block(each.name) for each in graph.storages]
        self.tensor_block = [self.storage_block[each.storage] for each in graph.tensors]
        self.wide: dict[int, list[int]] = {}  # node -> block of every input, for calls on lists
        self._label_updates()
        self.runs = self._runs()
        self.later: dict[int, int] = {}  # tensor of block 1 -> its like of block 2
        self.later_storage: dict[int, int] = {}
        self.like_node: dict[int, int] = {}  # node of block 1 -> its like of block 2
        self._match()
        self.first_node = {b: a for a, b in self.like_node.items()}
        self.earlier = {b: a for a, b in self.later.items()}
        self.earlier_storage = {b: a for a, b in self.later_storage.items()}
        self._place()

    def _block(self, name: str) -> int:
        found = self.pattern.match(name)
        return int(found.group(2)) if found else -1

    def _renamed(self, name: str, block: int) -> str:
        key = name, block
        if key not in self.names:
            self.names[key] = self.pattern.sub(rf"\g<1>{block}", name)
        return self.names[key]

    def _number(self, block: int) -> int:
        """Return a captured block's number among all."""
        return block if block <= _A else block + self.more

    # --- which block nodes and tensors are of

    def _label_updates(self) -> None:
        """Label calls outside of modules with the block whose tensors they work on, or of several (`wide`)."""
        for i, node in enumerate(self.graph.nodes):
            blocks = [self.tensor_block[t] for t in node.inputs]
            if node.phase == Phase.OPTIMIZER and self.block[i] < 0:
                seen = {each for each in blocks if each >= 0}
                if len(seen) > 1:
                    if not node.op.startswith(("aten::_foreach_", "aten::_fused_")):
                        raise _Unlike(f"{node.op} works on several blocks at once")
                    self.wide[i] = blocks
                    for at, tensor in enumerate(node.outputs):
                        self.tensor_block[tensor] = blocks[at % self._length(node)]
                    self._label_storages(node.outputs)
                    continue
                self.block[i] = seen.pop() if seen else -1
            for tensor in node.outputs:
                self.tensor_block[tensor] = self.block[i]
            self._label_storages(node.outputs)

    def _label_storages(self, tensors: Sequence[int]) -> None:
        for tensor in tensors:
            at = self.graph.tensors[tensor].storage
            if self.storage_block[at] < 0 and self.graph.storages[at].born >= 0:
                self.storage_block[at] = self.tensor_block[tensor]

    @staticmethod
    def _length(node: Node) -> int:
        dims = msgspec.json.decode(node.text)[0]
        return len(dims[0])

    def _runs(self) -> list[_Run]:
        runs: list[_Run] = []
        for i, block in enumerate(self.block):
            if not runs or runs[-1].block != block or i in self.wide:
                runs.append(_Run(block=block, first=i, end=i))
            runs[-1].end = i + 1
        pairs = 0
        for left, right in pairwise(runs):
            if {left.block, right.block} == {_A, _B}:
                left.pair = right.pair = pairs
                pairs += 1
        for run in runs:
            if run.block in (_A, _B) and run.pair < 0:
                node = self.graph.nodes[run.first]
                raise _Unlike(f"{node.op} of {node.layer} has no counterpart in the next block")
        return runs

    # --- what in block 2 is what in block 1

    def _match(self) -> None:
        graph = self.graph
        roles: dict[tuple[str, int], int] = {(s.name, s.role): i for i, s in enumerate(graph.storages) if s.name}
        for i, each in enumerate(graph.storages):
            if each.name and self._block(each.name) == _A:
                like = roles.get((self._renamed(each.name, _B), each.role))
                if like is None:
                    raise _Unlike(f"{each.name} has no like in the next block")
                self.later_storage[i] = like
        by_storage: dict[int, list[int]] = {}
        for t, tensor in enumerate(graph.tensors):
            if graph.producer[t] < 0:
                by_storage.setdefault(tensor.storage, []).append(t)
        for a, b in self.later_storage.items():
            for x, y in zip(by_storage.get(a, []), by_storage.get(b, []), strict=False):
                self.later[x] = y
        pairs: dict[int, dict[int, _Run]] = {}
        for run in self.runs:
            if run.pair >= 0:
                pairs.setdefault(run.pair, {})[run.block] = run
        for pair in pairs.values():
            self._match_runs(pair[_A], pair[_B])
        for i, blocks in self.wide.items():
            node, length = graph.nodes[i], self._length(graph.nodes[i])
            for chunk in range(0, len(node.outputs), length):
                part = node.outputs[chunk : chunk + length]
                ones = [t for t, b in zip(part, blocks[:length], strict=False) if b == _A]
                twos = [t for t, b in zip(part, blocks[:length], strict=False) if b == _B]
                if len(ones) != len(twos):
                    raise _Unlike(f"{node.op} works on unlike lists")
                for a, b in zip(ones, twos, strict=True):
                    self._alike(a, b)

    def _alike(self, a: int, b: int) -> None:
        self.later[a] = b
        s, t = self.graph.tensors[a].storage, self.graph.tensors[b].storage
        if self.later_storage.setdefault(s, t) != t:
            raise _Unlike("memory is handed from block to block in another way each time")

    def _match_runs(self, one: _Run, two: _Run) -> None:
        if one.end - one.first != two.end - two.first:
            raise _Unlike("a block makes more calls than the next one")
        for i, j in zip(range(one.first, one.end), range(two.first, two.end), strict=True):
            x, y = self.graph.nodes[i], self.graph.nodes[j]
            if (x.op, x.text, x.phase, self._renamed(x.layer, _B)) != (y.op, y.text, y.phase, y.layer):
                raise _Unlike(f"{x.op} of {x.layer} is {y.op} of {y.layer} in the next block")
            for a, b in zip(x.outputs, y.outputs, strict=True):
                self._alike(a, b)
            self.like_node[i] = j

    # --- where everything comes to stand

    def _place(self) -> None:
        """Assign a new index to every captured node, and of every node of every copy."""
        self.at: dict[int, int] = {}
        self.copy_at: dict[tuple[int, int], int] = {}  # (node of block 2, number of the copy)
        self.order: list[tuple[int, int]] = []  # (captured node, number of the copy, −1 for itself)
        for k, run in enumerate(self.runs):
            for i in range(run.first, run.end):
                self.at[i] = len(self.order)
                self.order.append((i, -1))
            following = self.runs[k + 1] if k + 1 < len(self.runs) else None
            if following is None or run.pair < 0 or following.pair != run.pair:
                continue
            template = run if run.block == _B else following
            forward = run.block == _A
            copies = range(_B, _B + self.more)
            for copy in copies if forward else reversed(copies):
                for i in range(template.first, template.end):
                    self.copy_at[i, copy] = len(self.order)
                    self.order.append((i, copy))

    # --- the result

    def result(self) -> OperatorGraph:
        graph = self.graph
        self.tensors: list[Tensor] = list(graph.tensors)
        self.storages: list[Storage] = [self._kept(i, each) for i, each in enumerate(graph.storages)]
        self.tensor_copy: dict[tuple[int, int], int] = {}
        self.storage_copy: dict[tuple[int, int], int] = {}
        nodes: list[Node] = []
        for i, copy in self.order:
            node = graph.nodes[i]
            if copy >= 0:
                nodes.append(self._copied(i, self.first_node[i], copy))
            elif i in self.like_node:
                nodes.append(self._copied(self.like_node[i], i, _A))
            elif i in self.first_node:
                nodes.append(self._copied(i, self.first_node[i], self.last))
            elif i in self.wide:
                nodes.append(self._widened(i, node))
            else:
                nodes.append(replace(node, layer=self._moved(node.layer)))
        return replace(
            graph,
            nodes=tuple(nodes),
            tensors=tuple(self.tensors),
            storages=tuple(self.storages),
            blocks=self._blocks(),
            notes=(*graph.notes, f"captured with {CAPTURED} of {self.times} equal blocks and unrolled"),
        )

    def _kept(self, at: int, storage: Storage) -> Storage:
        """Return a captured storage; what blocks 1 and 2 hand on goes to the copies between them."""
        name = self._moved(storage.name)
        two = self.later_storage.get(at, at)
        one = self.earlier_storage.get(two, two)
        if one == two:
            return replace(storage, born=self._when(storage.born), dies=self._when(storage.dies), name=name)
        return self._placed(two, one, _A if at == one else self.last, name)

    def _placed(self, two: int, one: int, copy: int, name: str) -> Storage:
        """Return what storages of blocks 2 and 1 are in block number `copy`."""
        second, first = self.graph.storages[two], self.graph.storages[one]
        born, dies = self._event(second.born, first.born, copy), self._event(second.dies, first.dies, copy)
        return replace(first if copy == _A else second, born=born, dies=dies, name=name)

    def _moved(self, name: str) -> str:
        block = self._block(name)
        return name if block < 0 else self._renamed(name, self._number(block))

    def _when(self, node: int) -> int:
        if node < 0:
            return node
        return len(self.order) if node >= len(self.graph.nodes) else self.at[node]

    def _instance(self, node: int, copy: int) -> int:
        """Return new index of what is `node` of block 2 in block number `copy`."""
        if copy == _A:
            return self.at[self.first_node[node]]
        return self.at[node] if copy == self.last else self.copy_at[node, copy]

    def _tensor(self, two: int, copy: int) -> int:
        """Return what a tensor of block 2 is in block number `copy`."""
        if copy == self.last:
            return two
        if copy == _A:
            return self.earlier[two]
        if (two, copy) not in self.tensor_copy:
            self.tensor_copy[two, copy] = len(self.tensors)
            tensor = self.graph.tensors[two]
            storage = self._storage(tensor.storage, copy)
            self.tensors.append(replace(tensor, storage=storage))
        return self.tensor_copy[two, copy]

    def _storage(self, two: int, copy: int) -> int:
        one = self.earlier_storage.get(two)
        if one is None or one == two:
            return two  # shared by all blocks
        if (two, copy) not in self.storage_copy:
            self.storage_copy[two, copy] = len(self.storages)
            name = self._renamed(self.graph.storages[two].name, copy)
            self.storages.append(self._placed(two, one, copy, name))
        return self.storage_copy[two, copy]

    def _event(self, two: int, one: int, copy: int) -> int:
        """Return when a copy's storage is born or dies, from when those of blocks 2 and 1 do."""
        mine = one if copy == _A else two
        if two < 0 or two >= len(self.graph.nodes):
            return self._when(mine)
        block, before = self.block[two], self.block[one] if 0 <= one < len(self.graph.nodes) else -1
        if block == _B:  # in its own block
            return self._instance(two, copy)
        if block == _A:  # in the block before, as in the backward pass
            return self._when(one) if copy == _A else self._instance(self.like_node[two], copy - 1)
        if before == _B:  # in the block after it
            return self._when(two) if copy == self.last else self._instance(one, copy + 1)
        if block in (-1, before) or two == one:
            return self._when(mine)  # when something happens to all
        raise _Unlike("memory lives longer than to the next block")

    def _copied(self, second: int, first: int, copy: int) -> Node:
        """Return what nodes `second` of block 2 and `first` of block 1 are in block number `copy`."""
        node, like = self.graph.nodes[second], self.graph.nodes[first]
        inputs = []
        for two, one in zip(node.inputs, like.inputs, strict=True):
            if two == one:
                inputs.append(two)  # the same for all
            elif self.later.get(one) == two:
                inputs.append(self._tensor(two, copy))
            elif two in self.later:  # of block 1: of the block before
                inputs.append(one if copy == _A else self._tensor(self.later[two], copy - 1))
            elif one in self.earlier:  # of block 2: of the block after
                inputs.append(two if copy == self.last else self._tensor(one, copy + 1))
            else:
                raise _Unlike(f"{node.op} of {node.layer} reads what no other block makes")
        return Node(  # `replace` would take most of the time of unrolling
            op=node.op,
            inputs=tuple(inputs),
            outputs=tuple([self._tensor(t, copy) for t in node.outputs]),
            text=node.text,
            phase=node.phase,
            layer=self._renamed(node.layer, copy),
            flops=node.flops,
            read_bytes=node.read_bytes,
            written_bytes=node.written_bytes,
        )

    def _widened(self, i: int, node: Node) -> Node:
        """Return a call on lists, the copies' tensors put between those of blocks 1 and 2."""
        dims, types, concrete = msgspec.json.decode(node.text)
        blocks = self.wide[i]
        inputs: list[int] = []
        at = 0
        for column, kind in enumerate(types):
            if kind.startswith("TensorList"):
                count = len(dims[column])
                part, labels = node.inputs[at : at + count], blocks[at : at + count]
                inputs += self._between(part, labels)
                sizes = self._between(list(range(count)), labels, copies=False)
                dims[column] = [dims[column][k] for k in sizes]
                at += count
            elif kind not in ("", "Scalar", "ScalarList") and at < len(node.inputs):
                inputs.append(node.inputs[at])  # one tensor for the whole list
                at += 1
        labels = blocks[: self._length(node)]
        for column, kind in enumerate(types):
            values = concrete[column].strip("[]").split(", ")
            if kind == "ScalarList" and len(values) == len(labels):  # a number for every tensor
                places = self._between(list(range(len(labels))), labels, copies=False)
                concrete[column] = "[" + ", ".join(values[k] for k in places) + "]"
        if at != len(node.inputs):
            raise _Unlike(f"{node.op} takes tensors in a way that is not known")
        length = self._length(node)
        outputs: list[int] = []
        for chunk in range(0, len(node.outputs), length):
            outputs += self._between(node.outputs[chunk : chunk + length], blocks[:length])
        text = msgspec.json.encode([dims, types, concrete]).decode()
        results = [self.tensors[t] for t in outputs]
        call = describe(
            node.op, text, [each.dims for each in results], [DTYPE_BYTES.get(each.dtype, 4) for each in results]
        )
        return replace(
            node, inputs=tuple(inputs), outputs=tuple(outputs), text=text, flops=call.flops,
            read_bytes=call.read_bytes, written_bytes=call.written_bytes,
        )  # fmt: skip

    def _between(self, items: Sequence[int], labels: Sequence[int], *, copies: bool = True) -> list[int]:
        """Return `items` with the copies of block 2's before them: tensors, or their places in the list."""
        first = next((k for k, label in enumerate(labels) if label == _B), None)
        if first is None:
            return list(items)
        mine = [item for item, label in zip(items, labels, strict=True) if label == _B]
        if any(label != _B for label in labels[first : first + len(mine)]):
            raise _Unlike("a list does not have the tensors of a block side by side")
        more: list[Any] = []
        for copy in range(_B, _B + self.more):
            more += [self._tensor(item, copy) for item in mine] if copies else mine
        return [*items[:first], *more, *items[first:]]

    def _blocks(self) -> tuple[RepeatedBlock, ...]:
        """Return the copies as repeated blocks, which begin with block 1 or, in the backward pass, with block 2."""
        found = []
        for run, after in zip(self.runs, self.runs[1:], strict=False):
            if run.pair >= 0 and run.pair == after.pair:
                layer = self.pattern.match(self.graph.nodes[run.first].layer)
                name = self._moved(layer.group(0)) if layer else ""
                found.append(
                    RepeatedBlock(first=self.at[run.first], length=run.end - run.first, times=self.more + 2, layer=name)
                )
        return tuple(found)
