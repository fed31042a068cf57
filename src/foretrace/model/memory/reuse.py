"""Where the data and the code of a call lie: how many bytes were touched since they were used last.

A cache keeps what was used last (Mattson et al. 1970, stack distances): a tensor is found in one that holds all the
different bytes touched since. New tensors lie on the memory freed last of their size, as allocators give it; what a
step uses for the first time was used a step ago.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretrace.compiled import njit
from foretrace.cost.calls import Family
from foretrace.model.operator_graph import BEFORE, OperatorGraph
from foretrace.trace.tables import Interner

KEPT_BYTES = 2 << 20  # by the caches of one core, where they were not measured

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reuse:
    """Of the n calls of a step and the m tensors that they touch, in order."""

    node: Int64  # [m] that touches
    nbytes: Float64  # [m] touched
    since: Float64  # [m] different bytes touched since that memory was, itself among them
    code: Float64  # [n] different bytes touched since this operator, or convolution of these sizes, began
    before: Float64  # [n] bytes that the call before it touched

    def far_shares(self, share: Callable[[Float64], Float64] | None = None) -> Float64:
        """Return per call the share of its bytes that are not in a core's caches, 0 to 1 (n).

        `share` says it of memory between whose uses so many bytes of others were touched: a call that is timed again
        and again finds its data near, however much that is. By default none is kept beyond KEPT_BYTES.
        """
        n = len(self.code)
        total = np.bincount(self.node, weights=self.nbytes, minlength=n)
        others = np.maximum(self.since - total[self.node], 0.0)
        away = self.nbytes * ((self.since > KEPT_BYTES) if share is None else share(others))
        return np.asarray(np.bincount(self.node, weights=away, minlength=n) / np.maximum(total, 1.0))


def reuse(graph: OperatorGraph) -> Reuse:
    """Return the reuse of a step that follows one like it."""
    n = len(graph)
    node, block, nbytes = _touches(graph)
    names = Interner()
    # The code of a convolution is compiled for its sizes.
    own = (graph.calls.family == Family.CONV).tolist()
    code = [f"{each.op} {each.text}" if of else each.op for each, of in zip(graph.nodes, own, strict=True)]
    op = np.array([names[each] for each in code] * 2, dtype=np.int64)
    start = np.searchsorted(node, np.arange(2 * n + 1))
    since, behind = _distances(start, block, nbytes, op, int(block.max(initial=-1)) + 1, int(op.max(initial=-1)) + 1)
    at = node >= n
    moved = np.bincount(node[at] - n, weights=nbytes[at], minlength=n)
    return Reuse(node=node[at] - n, nbytes=nbytes[at], since=since[at], code=behind[n:], before=np.roll(moved, 1))


def _touches(graph: OperatorGraph) -> tuple[Int64, Int64, Float64]:
    """Return node, piece of memory and bytes of everything touched in two steps."""
    n = len(graph)
    born, dying = defaultdict(list), defaultdict(list)
    for i, storage in enumerate(graph.storages):
        if storage.born != BEFORE:
            born[storage.born].append(i)
            dying[min(storage.dies, n - 1)].append(i)
    free: dict[int, list[int]] = defaultdict(list)  # by size, those freed last at the end
    lies: dict[int, int] = {}
    pieces, rows = 0, []
    for turn in (0, n):
        for i, node in enumerate(graph.nodes):
            for each in born[i]:
                known = free[graph.storages[each].nbytes]
                lies[each] = known.pop() if known else pieces
                pieces += lies[each] == pieces
            touched = dict.fromkeys((*node.inputs, *node.outputs))
            whole = sum(graph.tensors[each].nbytes for each in touched)
            moved = max(node.read_bytes + node.written_bytes, 0.0)
            for each in touched if moved else ():  # a view touches nothing
                tensor = graph.tensors[each]
                at = lies.setdefault(tensor.storage, pieces)
                pieces += at == pieces
                rows.append((turn + i, at, tensor.nbytes * min(moved / max(whole, 1), 1.0)))
            for each in dying[i]:
                free[graph.storages[each].nbytes].append(lies[each])
    table = np.array(rows, dtype=np.float64).reshape(-1, 3)
    return table[:, 0].astype(np.int64), table[:, 1].astype(np.int64), table[:, 2].copy()


@njit()
def _distances(
    start: Int64, block: Int64, nbytes: Float64, op: Int64, blocks: int, ops: int
) -> tuple[Float64, Float64]:
    n, m = len(start) - 1, len(block)
    tree = np.zeros(m + 1)  # Fenwick's, over touches: bytes of those that are the last of their memory
    held, at, last = np.zeros(blocks), np.full(blocks, -1), np.full(ops, -1)
    since, code = np.zeros(m), np.zeros(n)
    total = 0.0
    for i in range(n):
        for j in range(start[i], start[i + 1] + 1):
            began = last[op[i]] if j == start[i + 1] else at[block[j]]
            found, k = total, began
            while k > 0:
                found -= tree[k]
                k -= k & -k
            if j == start[i + 1]:
                code[i] = found if began >= 0 else total
            else:
                since[j] = found if began >= 0 else total
        last[op[i]] = start[i]
        for j in range(start[i], start[i + 1]):
            for where, more in ((at[block[j]], -held[block[j]]), (j, nbytes[j])):
                if where >= 0:
                    total += more
                    k = where + 1
                    while k <= m:
                        tree[k] += more
                        k += k & -k
            at[block[j]], held[block[j]] = j, nbytes[j]
    return since, code
