"""All-reduces of a recording of several workers: what they take, and the same gradients in fewer of them."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretrace.graph.edit import cut, remove, retime
from foretrace.graph.taskgraph import Change, EdgeKind, TaskGraph, TaskKind, per_graph
from foretrace.techniques.base import Prior
from foretrace.techniques.compute.updates import find_update, update_bandwidth

Int64 = npt.NDArray[np.int64]

_ALL_REDUCE = re.compile(r"all_?reduce", re.IGNORECASE)
_ISSUE_NS = 200_000  # of host work on either side of a launch, at most, has to do with it


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedAllReduces:
    """Recorded all-reduces (k rows), in the order of their lanes."""

    rows: Int64
    transfer_ns: npt.NDArray[np.float64]  # without waiting: the shortest of all steps at the same place
    nbytes: npt.NDArray[np.float64]  # −1 where the recording does not say
    optimizer_bytes: int  # of the parameters that are updated, 0 if unknown

    def total(self, given: float) -> float:
        """Bytes of a step's gradients, as given, recorded, or as large as the parameters; 0 if unknown."""
        return given or (1.0 if np.all(self.nbytes > 0) else float(self.optimizer_bytes))

    def priors(self, graph: TaskGraph) -> dict[str, Prior]:
        """What joining them depends on."""
        low, value, high = (float(np.percentile(self.transfer_ns, q)) / 1e3 for q in (0, 5, 25))
        copying = update_bandwidth(graph) or Prior(
            200.0, 20.0, 1500.0, unit="GB/s", why="a device copies so much, a core a tenth of it"
        )
        return {
            "fixed_us": Prior(value, low, high, unit="µs", why="the shortest recorded all-reduces take so long"),
            "waiting": Prior(
                1.0,
                0.0,
                1.0,
                unit="",
                why="the others are as late as before, or fewer meetings let their delays even out",
            ),
            "copy_gb_s": copying,
            "host_share": Prior(
                0.6,
                0.1,
                0.95,
                unit="",
                why="host work next to a launch prepares and ends that collective, or belongs to something else",
            ),
        }


@per_graph
def recorded_all_reduces(graph: TaskGraph) -> RecordedAllReduces | None:
    """The all-reduces of the recorded steps; None where there are fewer than two per step."""
    named = np.array([bool(_ALL_REDUCE.search(name)) for name in graph.names], dtype=np.bool_)[graph.name]
    mask = (graph.kind == TaskKind.COLLECTIVE) & named & ~graph.gone & (graph.step >= 0)
    rows = np.flatnonzero(mask & (graph.step < graph.n_steps)).astype(np.int64)
    if len(rows) < 2 * max(graph.n_steps, 1):
        return None
    rows = rows[np.lexsort((rows, graph.step[rows], graph.lane[rows]))]
    shortest = graph.dur[rows].astype(np.float64)
    for lane in np.unique(graph.lane[rows]).tolist():
        mine = graph.lane[rows] == lane
        counts = np.bincount(graph.step[rows[mine]], minlength=graph.n_steps)
        if len(set(counts.tolist())) == 1:
            shortest[mine] = np.tile(shortest[mine].reshape(graph.n_steps, -1).min(axis=0), graph.n_steps)
    update = find_update(graph)
    return RecordedAllReduces(
        rows=rows,
        transfer_ns=shortest,
        nbytes=graph.nbytes[rows].astype(np.float64),
        optimizer_bytes=update.nbytes if update else 0,
    )


def fuse(
    graph: TaskGraph,
    found: RecordedAllReduces,
    *,
    cap: float,
    total: float,
    fixed_ns: float,
    waiting: float,
    copy_gb_s: float,
    host_share: float,
    technique: str,
) -> TaskGraph:
    """Neighbours on a lane joined until they hold `cap` bytes (0: all of a step), in the place of the last of them.

    Work on the results of the former ones stays where it is and no longer waits; what follows the last one waits for
    the whole bucket. `total` are the bytes of a step, shared out by transfer times where the recording has no sizes.
    """
    varies = np.maximum(found.transfer_ns - fixed_ns, 0.0)
    size = found.nbytes
    if np.any(size <= 0):
        size = varies * total * max(graph.n_steps, 1) / max(float(varies.sum()), 1.0)
    waited = graph.dur[found.rows] - found.transfer_ns
    gone = np.zeros(len(graph), dtype=np.bool_)
    kept = np.zeros(len(graph), dtype=np.bool_)
    dur = np.zeros(len(graph))
    step, lane = graph.step[found.rows], graph.lane[found.rows]
    follows = np.append((step[1:] == step[:-1]) & (lane[1:] == lane[:-1]), False).tolist()
    first = 0
    for i, here in enumerate(found.rows.tolist()):
        if follows[i] and not (cap and float(size[first : i + 1].sum()) >= cap):
            gone[here] = True
            continue
        held = float(size[first : i + 1].sum())
        kept[here] = True
        copied = 4 * held / copy_gb_s if i > first else 0.0  # read and written, in and out
        fixed = min(fixed_ns, float(found.transfer_ns[first : i + 1].max()))
        dur[here] = fixed + varies[first : i + 1].sum() + waiting * waited[first : i + 1].sum() + copied
        first = i + 1
    freed = gone[graph.src] & np.isin(graph.edge_kind, (EdgeKind.EVENT, EdgeKind.SYNC, EdgeKind.COLLECTIVE))
    result = remove(cut(graph, freed, technique=technique) if freed.any() else graph, gone, technique=technique)
    result = retime(result, kept, dur[kept], what="joined their work in {}", technique=technique)
    lighter = _issuing(graph, gone) & ~result.gone
    if lighter.any():
        spared = host_share * np.minimum(graph.dur[lighter], _ISSUE_NS)
        shorter = graph.dur[lighter] - spared
        result = retime(result, lighter, shorter, what="took the issuing of messages out of {}", technique=technique)
    per_step = kept.sum() / max(graph.n_steps, 1)
    what = f"{len(found.rows) / max(graph.n_steps, 1):.4g} all-reduces per step became {per_step:.4g}"
    return result.noted(Change(technique=technique, what=what, tasks=int(kept.sum())))


def _issuing(graph: TaskGraph, gone: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Host work directly before and behind the launches of these collectives, up to the next calls of the runtime."""
    dst = graph.dst
    launch = (graph.edge_kind == EdgeKind.LAUNCH) & gone[dst]
    calls = graph.mask(graph.src[launch])
    along = graph.edge_kind == EdgeKind.PROGRAM
    found = graph.mask(graph.src[along & calls[dst]])
    found[dst[along & calls[graph.src]]] = True
    return np.asarray(found & np.isin(graph.kind, (TaskKind.CPU, TaskKind.PYTHON, TaskKind.OPERATOR)) & ~graph.gone)
