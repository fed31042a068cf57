"""A pipeline schedule as a task graph: stages are lanes, micro-batches pass forward and backward through them."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from foretrace.compiled import njit
from foretrace.errors import GraphError
from foretrace.graph.assemble import assemble
from foretrace.graph.taskgraph import NO_RELEASE, EdgeKind, GraphInfo, Lane, Phase, TaskGraph, TaskKind
from foretrace.trace.trace import LaneKind

Int64 = npt.NDArray[np.int64]

NAMES = ("forward", "backward", "exchange gradients", "update", "step")
FORWARD, BACKWARD, EXCHANGE, UPDATE, STEP = range(len(NAMES))


def one_forward_one_backward(
    forward_ns: Int64, backward_ns: Int64, send_ns: Int64, exchange_ns: Int64, update_ns: Int64, *, micro_batches: int
) -> TaskGraph:
    """The graph of one iteration of the 1F1B schedule with a flush (PipeDream-Flush; Narayanan et al., SC 2021, 2.2).

    Times per stage (p) in ns: of one micro-batch forward and backward, of sending activations to the next stage (the
    last entry is not used; gradients take as long on the way back), of averaging gradients and of the update, both of
    which come last. Raises GraphError for fewer than one stage or micro-batch.
    """
    p = len(forward_ns)
    if p < 1 or micro_batches < 1:
        raise GraphError(f"a pipeline of {p} stages and {micro_batches} micro-batches does nothing; give one of both.")
    shape = _shape(p, micro_batches)
    table = np.stack([forward_ns, backward_ns, exchange_ns, update_ns, np.zeros(p, np.int64)]).astype(np.int64)
    stage = np.minimum(shape.lane, p - 1)
    crossing = shape.lane[shape.src] != shape.lane[shape.dst]
    crossing &= (shape.name[shape.src] <= BACKWARD) & (shape.name[shape.dst] <= BACKWARD)
    first = np.minimum(shape.lane[shape.src], shape.lane[shape.dst])
    lag = np.where(crossing, np.asarray(send_ns, dtype=np.int64)[np.minimum(first, p - 1)], 0)
    return shape.with_columns(dur=table[shape.name, stage], lag=lag, typical=lag)


@lru_cache(maxsize=256)
def _shape(p: int, m: int) -> TaskGraph:
    """The schedule of p stages and m micro-batches, all times 0."""
    number = np.arange(m)
    stage = np.repeat(np.arange(p), m)
    forward, backward = np.arange(p * m).reshape(p, m), p * m + np.arange(p * m).reshape(p, m)
    exchange = 2 * p * m + np.arange(p)
    update, begin, end = exchange + p, 2 * p * m + 2 * p, 2 * p * m + 2 * p + 1
    src, dst = list[Int64](), list[Int64]()

    def edges(u: Int64, v: Int64) -> None:
        src.append(u)
        dst.append(v)

    for s in range(p):
        warm = min(p - 1 - s, m)  # forwards before the first backward
        order = [forward[s, :warm]]
        for i in range(m - warm):
            order += [forward[s, warm + i : warm + i + 1], backward[s, i : i + 1]]
        order += [backward[s, m - warm :], exchange[s : s + 1], update[s : s + 1]]
        row = np.concatenate(order)
        edges(row[:-1], row[1:])
        edges(np.array([begin]), row[:1])
        edges(row[-1:], np.array([end]))
        if s + 1 < p:
            edges(forward[s, number], forward[s + 1, number])
            edges(backward[s + 1, number], backward[s, number])
    total, n = np.concatenate(src), 2 * p * m + 2 * p + 2
    counts = (p * m, p * m, p, p, 2)
    phases = (Phase.FORWARD, Phase.BACKWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.NONE)
    release = np.full(n, NO_RELEASE)
    release[begin] = 0
    return assemble(
        {
            "kind": np.repeat([TaskKind.KERNEL, TaskKind.MARK], [n - 2, 2]),
            "phase": np.repeat(phases, counts),
            "lane": np.concatenate([stage, stage, np.arange(p), np.arange(p), [p, p]]),
            "name": np.repeat(np.arange(len(NAMES)), counts),
            "step": np.zeros(n),
            "dur": np.zeros(n),
            "release": release,
        },
        {
            "src": total,
            "dst": np.concatenate(dst),
            "edge_kind": np.full(len(total), EdgeKind.DATA),
            "lag": np.zeros(len(total)),
        },
        marks=np.array([begin, end]),
        names=NAMES,
        layers=(),
        lanes=(
            *(Lane(rank=s, kind=LaneKind.GPU, device=0, label=f"stage {s}") for s in range(p)),
            Lane(rank=0, kind=LaneKind.MODEL, label="steps"),
        ),
        info=GraphInfo(source="1F1B pipeline", world_size=p, steps=(0,)),
    )


@njit(error_model="numpy")
def pipeline_ends(forward: Int64, backward: Int64, send: Int64, micro_batches: int) -> Int64:
    """(p,) when each stage has done its last backward under 1F1B with a flush; times as `one_forward_one_backward`.

    The same schedule as that graph, without building it: stages go on in turns, each as far as its inputs allow.
    """
    p, m = len(forward), micro_batches
    ahead, behind = np.zeros((p, m), np.int64), np.zeros((p, m), np.int64)  # ends of forwards and backwards
    free, begun, ended = np.zeros(p, np.int64), np.zeros(p, np.int64), np.zeros(p, np.int64)
    done = 0
    while done < p * m:
        for s in range(p):
            warm = min(p - 1 - s, m)
            while ended[s] < m:
                i, j = begun[s], ended[s]
                if i < m and i <= warm + j:
                    if s > 0 and begun[s - 1] <= i:
                        break
                    at = free[s] if s == 0 else max(free[s], ahead[s - 1, i] + send[s - 1])
                    ahead[s, i] = free[s] = at + forward[s]
                    begun[s] += 1
                else:
                    if s + 1 < p and ended[s + 1] <= j:
                        break
                    at = free[s] if s + 1 == p else max(free[s], behind[s + 1, j] + send[s])
                    behind[s, j] = free[s] = at + backward[s]
                    ended[s] += 1
                    done += 1
    return free
