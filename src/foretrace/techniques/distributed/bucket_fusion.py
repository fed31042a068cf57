"""`bucket-fusion`: gradients are sent in fewer, larger messages.

On the messages that `data-parallel` put into a graph it is another cap of the buckets. On a recording of several
workers it joins the recorded all-reduces: every message has a fixed time that is then paid once per bucket.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np

from foretrace.arrays import Float64, Int64, Mask
from foretrace.graph.edit import cut, remove, retime
from foretrace.graph.taskgraph import Change, EdgeKind, TaskGraph, TaskKind, per_graph
from foretrace.model.messages import MIB, bucketed
from foretrace.techniques.base import Prior, Technique, derived, parameter
from foretrace.techniques.compute.updates import find_update, update_bandwidth
from foretrace.techniques.distributed.messages import by_size, plan_of, replanned
from foretrace.training.training import Training

_ALL_REDUCE = re.compile(r"all_?reduce", re.IGNORECASE)
_ISSUE_NS = 200_000  # of host work on either side of a launch, at most, has to do with it
_WAITING = Prior(
    1.0, 0.0, 1.0, unit="share", why="the others are as late as before, or fewer meetings let their delays even out"
)
_HOST_SHARE = Prior(
    0.6,
    0.1,
    0.95,
    unit="share",
    why="host work next to a launch prepares and ends that collective, or belongs to something else",
)


@dataclass(frozen=True, kw_only=True)
class BucketFusion(Technique):
    """Send gradients in buckets of another size."""

    summary = "gradients in fewer, larger messages: buckets of another size, or all in one"
    source = "Hu et al., dPRO (MLSys 2022), tensor fusion; Sergeev and Del Balso, Horovod (2018)"
    effort = "one argument (bucket_cap_mb); memory for the larger buckets"
    needs = "as many processes as workers"

    cap_mb: float = parameter(
        0.0, doc="size at which a bucket is sent; 0 sends all gradients in one", unit="MiB", least=0, below=1e6
    )
    total_mb: float = parameter(
        0.0, doc="gradients of a recorded step, if the recording does not say", unit="MB", least=0, below=1e9
    )
    fixed_us: float | None = derived(unit="µs", doc="time of a recorded all-reduce that does not depend on its size")
    waiting: float | None = derived(unit="share", doc="share of recorded waiting inside all-reduces that stays")
    copy_gb_s: float | None = derived(unit="GB/s", doc="bandwidth of copying recorded gradients into a bucket and back")
    host_share: float | None = derived(
        unit="share", doc="share of host work around a removed launch that goes with it", larger_is="faster"
    )

    def change(self, graph: TaskGraph) -> TaskGraph:
        found = self._recorded(graph)
        if found is None:
            plan = plan_of(graph, self)
            sizes = [each.nbytes for each in plan.gradients(graph)]
            types = [each.itemsize for each in plan.gradients(graph)]
            parts = by_size(sizes, bucketed(sizes, [int(self.cap_mb * MIB) or float("inf")], types))
            return replanned(graph, replace(plan, parts=parts), self)
        return self._fused(graph, found)

    def _fused(self, graph: TaskGraph, found: RecordedAllReduces) -> TaskGraph:
        """Return neighbours on a lane joined until they hold `cap_mb` (0: all of a step), in the place of the last of
        them.

        Work on the results of the former ones stays where it is and no longer waits; what follows the last one waits
        for the whole bucket. The bytes of a step are shared out by transfer times where the recording has no sizes.
        """
        total, values, cap = found.total(self.total_mb * 1e6), self.values(graph), self.cap_mb * MIB
        if cap and not total:
            raise self.refuse("the recording does not tell how large its messages are; give total_mb= or cap_mb=0.")
        fixed_ns = 1e3 * values["fixed_us"]
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
            copied = 4 * held / values["copy_gb_s"] if i > first else 0.0  # read and written, in and out
            fixed = min(fixed_ns, float(found.transfer_ns[first : i + 1].max()))
            dur[here] = fixed + varies[first : i + 1].sum() + values["waiting"] * waited[first : i + 1].sum() + copied
            first = i + 1
        freed = gone[graph.src] & np.isin(graph.edge_kind, (EdgeKind.EVENT, EdgeKind.SYNC, EdgeKind.COLLECTIVE))
        result = remove(cut(graph, freed) if freed.any() else graph, gone)
        result = retime(result, kept, dur[kept], what="joined their work in {}")
        lighter = _issuing(graph, gone) & ~result.gone
        if lighter.any():
            shorter = graph.dur[lighter] - values["host_share"] * np.minimum(graph.dur[lighter], _ISSUE_NS)
            what = "took the issuing of messages out of {}"
            result = retime(result, lighter, shorter, what=what)
        per_step = kept.sum() / max(graph.n_steps, 1)
        what = f"{len(found.rows) / max(graph.n_steps, 1):.4g} all-reduces per step became {per_step:.4g}"
        return result.noted(Change(what=what, tasks=int(kept.sum())))

    def priors(self, graph: TaskGraph) -> dict[str, Prior]:
        found = self._recorded(graph)
        if found is None:
            return {}
        low, value, high = (float(np.percentile(found.transfer_ns, q)) / 1e3 for q in (0, 5, 25))
        copying = update_bandwidth(graph) or Prior(
            200.0, 20.0, 1500.0, unit="GB/s", why="a device copies so much, a core a tenth of it"
        )
        return {
            "fixed_us": Prior(value, low, high, unit="µs", why="the shortest recorded all-reduces take so long"),
            "waiting": _WAITING,
            "copy_gb_s": copying,
            "host_share": _HOST_SHARE,
        }

    def _recorded(self, graph: TaskGraph) -> RecordedAllReduces | None:
        """Return messages of a recording of several workers; None where `data-parallel` put them in."""
        if graph.info.recording.get("distributed"):
            return None
        return recorded_all_reduces(graph)

    def realise(self, training: Training) -> Training:
        from foretrace.training.data_parallel import in_replicas, replicas, unwrapped

        wrapped = replicas(training, self.name)
        return in_replicas(
            unwrapped(training, self.name),
            self.name,
            bucket_cap_mb=self.cap_mb or 1e6,
            gradient_as_bucket_view=wrapped.gradient_as_bucket_view,
            find_unused_parameters=wrapped.find_unused_parameters,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedAllReduces:
    """Recorded all-reduces (k rows), in the order of their lanes."""

    rows: Int64
    transfer_ns: Float64  # without waiting: the shortest of all steps at the same place
    nbytes: Float64  # −1 where the recording does not say
    optimizer_bytes: int  # of the parameters that are updated, 0 if unknown

    def total(self, given: float) -> float:
        """Return bytes of a step's gradients, as given, recorded, or as large as the parameters; 0 if unknown."""
        return given or (1.0 if np.all(self.nbytes > 0) else float(self.optimizer_bytes))


@per_graph
def recorded_all_reduces(graph: TaskGraph) -> RecordedAllReduces | None:
    """Return the all-reduces of the recorded steps; None where there are fewer than two per step."""
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


def _issuing(graph: TaskGraph, gone: Mask) -> Mask:
    """Return host work directly before and behind the launches of these collectives, up to the next calls of the
    runtime.
    """
    dst = graph.dst
    launch = (graph.edge_kind == EdgeKind.LAUNCH) & gone[dst]
    calls = graph.mask(graph.src[launch])
    along = graph.edge_kind == EdgeKind.PROGRAM
    found = graph.mask(graph.src[along & calls[dst]])
    found[dst[along & calls[graph.src]]] = True
    return np.asarray(found & np.isin(graph.kind, (TaskKind.CPU, TaskKind.PYTHON, TaskKind.OPERATOR)) & ~graph.gone)
