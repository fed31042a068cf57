"""`activation-offload`: activations leave the memory between forward and backward (vDNN).

On a device they are copied to the host beside the forward pass and fetched ahead of the backward pass, each direction
on a lane of its own; the step grows where a copy is not done in time. On a processor they go to a file.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from foretrace.cost.operators.operator import Operator
from foretrace.graph.insert import EdgeList, extend, insert
from foretrace.graph.taskgraph import Change, EdgeKind, Lane, Phase, TaskGraph, TaskKind
from foretrace.techniques.base import Prior, Technique, derived, parameter, prior
from foretrace.techniques.memory.keeping import (
    hook_tasks,
    hook_time_s,
    insert_keeping,
    keeping_operators,
    keeping_times,
    saved_note,
    step_times,
)
from foretrace.techniques.memory.saved import Saved, Savings, find_saved
from foretrace.trace.trace import LaneKind
from foretrace.training.saved_tensors import Codec, Disk, Keeping, Pinned
from foretrace.training.training import Training

_NAMES = ("write a saved tensor to the file", "read a saved tensor from the file")
_OUT, _BACK = "Memcpy DtoH (activations)", "Memcpy HtoD (activations)"


@dataclass(frozen=True, kw_only=True)
class ActivationOffload(Technique):
    """Saved activations in host memory (of a device) or in a file (of a processor) between forward and backward."""

    across = "each"
    summary = "activations wait for the backward pass in host memory, or in a file"
    source = "vDNN (MICRO 2016), section III; torch saved-tensor hooks"
    effort = "one context manager; host memory or disk"

    to: str = parameter("auto", doc="host, disk, or what suits the device", choices=("auto", "host", "disk"))
    min_bytes: int = parameter(1 << 20, doc="smaller tensors stay where they are", unit="B", least=0)
    prefetch: int = parameter(2, doc="tensors fetched ahead in the backward pass of a device", least=1)
    measured: float | None = prior(
        1.0,
        0.85,
        1.6,
        doc="writing, reading and hooks in a step relative to timed alone",
        why="the page cache is shared with everything else that the machine does; the code of the hooks is in no cache",
    )
    write_gb_s: float | None = derived(unit="GB/s", doc="rate at which activations leave")
    read_gb_s: float | None = derived(unit="GB/s", doc="rate at which they come back")
    hook_us: float | None = prior(
        4.0, 2.0, 10.0, unit="µs", doc="host time per saved variable", why="two calls from autograd into Python"
    )

    def wants(self, graph: TaskGraph) -> tuple[Operator, ...]:
        return keeping_operators("disk", self._chosen(graph)[1]) if self._on_disk(graph) else ()

    def priors(self, graph: TaskGraph) -> dict[str, Prior]:
        found = dict(super().priors(graph))
        if hook_time_s(graph) is not None:
            del found["hook_us"]
        if self._on_disk(graph):
            if keeping_times(graph, "disk", self._chosen(graph)[1]) is not None:
                return found
            found["write_gb_s"], found["read_gb_s"] = _FILE
        else:
            found["write_gb_s"], found["read_gb_s"] = _LINK, _LINK
        del found["measured"]
        return found

    def change(self, graph: TaskGraph) -> TaskGraph:
        disk = self._on_disk(graph)
        if not disk and not graph.on_device.any():
            raise self.refuse("the activations of this recording lie in host memory already; ask for to=disk.")
        if disk and graph.on_device.any():
            raise self.refuse("from a device activations go to host memory first; ask for to=host.")
        savings, chosen = self._chosen(graph)
        if not chosen:
            raise self.refuse(
                f"the recording shows no activations of {self.min_bytes} bytes or more that autograd saves; "
                "record with shapes, or give a smaller min_bytes."
            )
        times, hook_s = step_times(self, graph, chosen, "disk" if disk else "host", ("write_gb_s", "read_gb_s"))
        if disk:
            changed = insert_keeping(graph, savings, times, hook_s, _NAMES)
        else:
            changed = insert_copies(graph, savings, times, hook_s, self.prefetch)
        where = "written to a file" if disk else "copied to the host"
        return changed.noted(saved_note(graph, savings, chosen, 0.0, where))

    def realise(self, training: Training) -> Training:
        cuda = training.device.startswith("cuda")
        if self.to == "host" and not cuda:
            raise self.refuse("the activations of this training lie in host memory already; ask for to=disk.")
        if self.to == "disk" and cuda:
            raise self.refuse("from a device activations go to host memory first; ask for to=host.")
        codec: Codec = Pinned(self.prefetch) if cuda else Disk()
        keeping = Keeping(codec, training.model.parameters(), self.min_bytes)
        return replace(training, around_forward=(*training.around_forward, keeping))

    def _on_disk(self, graph: TaskGraph) -> bool:
        return self.to == "disk" or (self.to == "auto" and graph.info.platform == "cpu")

    def _chosen(self, graph: TaskGraph) -> tuple[Savings, list[Saved]]:
        savings = find_saved(graph)
        return savings, [each for each in savings.tensors if each.nbytes >= self.min_bytes]


_FILE = (
    Prior(1.5, 0.3, 3.0, unit="GB/s", why="into the page cache at first, at the disk's rate later"),
    Prior(3.0, 0.5, 6.0, unit="GB/s", why="from the page cache, or from the disk"),
)
_LINK = Prior(
    12.0,
    6.0,
    24.0,
    unit="GB/s",
    why="pinned copies over PCIe: about 12 GB/s with the third generation, 24 with the fourth",
)


def insert_copies(
    graph: TaskGraph, savings: Savings, times: dict[Saved, tuple[float, float]], hook_s: float, prefetch: int
) -> TaskGraph:
    """Return the graph with a copy out after every saving kernel and one back before the kernel that asks.

    A copy back is ordered when the backward pass has come within `prefetch` tensors of its use, so that only so many
    lie on the device again; on both lanes copies keep their order. Hooks cost host time at the end of the forward pass.
    """
    pairs = [(each, *seconds) for each, seconds in times.items() if each.use >= 0]
    device = graph.lanes[int(graph.lane[pairs[0][0].row])]
    lanes = tuple(
        Lane(rank=device.rank, kind=LaneKind.GPU, device=device.device, stream=stream, label=label)
        for stream, label in ((-2, "activations to the host"), (-3, "activations from the host"))
    )
    n, count = len(graph), len(pairs)
    back = sorted(pairs, key=lambda pair: (pair[0].use, -pair[0].row))
    copies = [(each, each.row, there) for each, there, _ in pairs]  # in the order of saving
    copies += [(each, each.use, seconds) for each, _, seconds in back]
    like, direction = np.array([row for _, row, _ in copies]), np.repeat([0, 1], count)
    tasks = {
        "kind": np.full(2 * count, TaskKind.COPY),
        "lane": len(graph.lanes) + direction,
        "name": len(graph.names) + direction,
        "dur": np.array([round(1e9 * seconds) for _, _, seconds in copies]),
        "nbytes": np.array([each.nbytes for each, _, _ in copies]),
        "phase": np.repeat([Phase.FORWARD, Phase.BACKWARD], count),
        **{key: getattr(graph, key)[like] for key in ("recorded", "layer", "step", "op", "priority")},
    }
    edges = EdgeList()
    outs = {each: n + i for i, (each, *_) in enumerate(pairs)}
    for each, row in outs.items():
        edges.add(each.row, row, EdgeKind.EVENT)
        if row > n:
            edges.add(row - 1, row, EdgeKind.STREAM)
    for i, (each, *_) in enumerate(back):
        row = n + count + i
        edges.add(outs[each], row, EdgeKind.EVENT)
        edges.add(row, each.use, EdgeKind.EVENT)
        if i:
            edges.add(row - 1, row, EdgeKind.STREAM)
        if i >= prefetch and back[i - prefetch][0].use < each.use:
            edges.add(back[i - prefetch][0].use, row, EdgeKind.EVENT)
    made, rows = extend(
        graph,
        tasks,
        edges.columns(),
        names=(_OUT, _BACK),
        lanes=lanes,
        change=Change(what=f"inserted {2 * count} copies", tasks=2 * count),
    )
    hooks = [replace(each, after=int(rows[each.after])) for each in hook_tasks(savings, hook_s)]
    return insert(made, hooks)
