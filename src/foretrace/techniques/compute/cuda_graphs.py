"""`cuda-graphs`: a step captured once and then launched as a whole; the host work between its launches is
gone.

Every stretch of a step in which no other than the chosen phases launch is captured as one graph, inputs copied before:
gradients may be set to zero far from the step of the optimizer. Its device tasks keep their order and their waits for
each other, follow each other more closely, and start from one call, which hands them over one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretrace.arrays import Int64, Mask
from foretrace.graph.edit import remove, retime
from foretrace.graph.insert import edge_columns, extend, typical
from foretrace.graph.select import phases, select
from foretrace.graph.taskgraph import Change, EdgeKind, Phase, TaskGraph, TaskKind
from foretrace.techniques.base import Prior, Technique, derived, parameter, prior
from foretrace.techniques.compute.classes import holes
from foretrace.training.training import Training

_LEADING = 0.1  # input copies may come after this share of a step's launches (zero_grad), not later


@dataclass(frozen=True, kw_only=True)
class CudaGraphs(Technique):
    """Launch the chosen phases of every step as one CUDA (HIP) graph."""

    across = "each"
    summary = "every step launched as one graph: no launch overhead between its kernels"
    source = "torch.cuda.graphs"
    effort = "capture code; fixed shapes, and memory that stays reserved"
    needs = "a CUDA device"

    phases: str = parameter("forward,backward,optimizer", doc="phases to capture, separated by commas")
    gap_us: float | None = derived(unit="µs", doc="time between two kernels of a graph on one stream")
    node_us: float | None = derived(unit="µs", doc="time to hand over one task of the graph")
    holes: float | None = derived(doc="time of host stretches of over 1 ms between two calls or operators, relative")
    launch_us: float | None = prior(
        12.0,
        5.0,
        30.0,
        unit="µs",
        doc="time to launch a graph, without its tasks",
        why="one call through framework and driver, like one to three kernel launches",
    )

    def priors(self, graph: TaskGraph) -> dict[str, Prior]:
        found = dict(super().priors(graph))
        if not graph.on_device.any():
            return found
        gap = typical(graph).gap_ns / 1e3
        found["gap_us"] = Prior(
            min(gap, 1.0),
            min(gap, 0.5),
            max(gap, 0.5),
            unit="µs",
            why=f"kernels of a graph follow after about 1 µs; recorded without a graph: {gap:.2g} µs",
        )
        if np.any(select(graph, phase=self._phases()) & holes(graph)):
            found["holes"] = Prior(
                1.0,
                0.0,
                1.0,
                why="the recording does not show what the host does in them; what only leads to launches would go",
            )
        rocm = graph.info.platform == "rocm"
        found["node_us"] = Prior(
            2.9 if rocm else 0.05,
            1.0 if rocm else 0.01,
            3.5 if rocm else 0.3,
            unit="µs",
            why="a recorded HIP graph launch of 544 kernels took 1.57 ms"
            if rocm
            else "the driver uploads a graph once",
        )
        return found

    def change(self, graph: TaskGraph) -> TaskGraph:
        if not graph.on_device.any():
            raise self.refuse("the recording has no device work to launch.")
        launches = _launches(graph)
        if not (launches & select(graph, phase=self._phases())).any():
            raise self.refuse(f"no kernel is launched in {self.phases}.")
        known = _Known.of(graph)
        stretches = (each for step in range(graph.n_steps) for each in self._stretches(graph, launches, step))
        regions = [each for calls in stretches if (each := self._region(graph, known, calls)) is not None]
        if not regions:
            raise self.refuse(f"no step launches two kernels of {self.phases} in a row, and one alone gains nothing.")
        return self._launch_graphs(graph, regions)

    def realise(self, training: Training) -> Training:
        import torch

        if torch.device(training.device).type != "cuda":
            raise self.refuse("the training runs on a processor, which has no launches to put into a graph.")
        if "optimizer" not in self._phases():
            return training.compiled("reduce-overhead")
        raise self.refuse(
            "PyTorch's graphs hold the model, not the loop of this optimizer; ask for phases=forward,backward."
        )

    def _phases(self) -> list[str]:
        words = [word.strip().lower() for word in self.phases.split(",") if word.strip()]
        return [*words, "recompute"] if "backward" in words else words

    def _stretches(self, graph: TaskGraph, launches: Mask, step: int) -> list[Int64]:
        """Return launching calls of a step by stretch; a single one gains nothing as a graph."""
        calls = np.flatnonzero(launches & (graph.step == step))
        mine = np.isin(graph.phase[calls], [*phases(self._phases()), Phase.NONE])
        others = np.cumsum(~mine)[mine]
        return [each for each in np.split(calls[mine], np.flatnonzero(np.diff(others)) + 1) if len(each) > 1]

    def _region(self, graph: TaskGraph, known: _Known, calls: Int64) -> _Region | None:
        """Return what the graph of a stretch holds; refuses where the host must wait or copy in the middle."""
        step = int(graph.step[calls[0]])
        number = graph.info.steps[step] if step < len(graph.info.steps) else step
        inputs = calls[known.copies_in[calls]]
        if len(inputs):
            early = np.searchsorted(calls, inputs[-1]) <= _LEADING * len(calls)
            if not early:
                raise self.refuse(
                    f"step {number} copies data to the device in its middle ({_where(graph, int(inputs[-1]))}); "
                    "copy it before the step, or capture fewer phases=."
                )
            calls = calls[calls > inputs[-1]]
            if not len(calls):
                return None
        waits = known.waits[(known.waits > calls[0]) & (known.waits < calls[-1])]
        if len(waits):
            raise self.refuse(
                f"the host waits for the device inside step {number} ({_where(graph, int(waits[0]))}), which a graph "
                "cannot hold; move it to the end of the step, or capture fewer phases=."
            )
        rows = np.arange(calls[0], calls[-1] + 1)
        inside = np.isin(graph.kind[rows], (TaskKind.CPU, TaskKind.CALL, TaskKind.RETURN)) & ~graph.gone[rows]
        inside &= (graph.step[rows] == step) & (graph.phase[rows] != Phase.DATA) & ~known.holes[rows]
        device = known.launched[np.isin(known.launch, calls)]
        if len(device) > 1.5 * len(calls):
            raise self.refuse(f"step {number} launches its kernels by graphs already.")
        return _Region(first=int(calls[0]), host=rows[inside], device=device)

    def _launch_graphs(self, graph: TaskGraph, regions: list[_Region]) -> TaskGraph:
        """Put one launch in the place of each region's first, take its host work out and tie its tasks to it."""
        latency, values = typical(graph).latency_ns, self.values(graph)
        gap, node_ns, launch_ns = (1e3 * values[name] for name in ("gap_us", "node_us", "launch_us"))
        host = graph.mask(np.concatenate([region.host for region in regions]))
        result = remove(graph, host)
        kept = holes(result) & select(result, phase=self._phases())
        if kept.any() and values["holes"] != 1:
            dur = (values["holes"] * result.dur[kept]).astype(np.float64)
            what = "shortened {} of which the recording does not show what they do"
            result = retime(result, kept, dur, what=what)
        edges = edge_columns(result)
        src, dst, kind = edges["src"], edges["dst"], edges["edge_kind"]
        captured = np.full(len(graph), -1, dtype=np.int64)
        for region in regions:
            captured[region.device] = region.first
        along = (kind == EdgeKind.STREAM) & (captured[src] >= 0) & (captured[src] == captured[dst])
        for column in (edges["lag"], edges["typical"]):
            column[along] = np.minimum(column[along], round(gap))
        calls = len(graph) + np.arange(len(regions))
        firsts = np.array([region.first for region in regions])
        for call, first in zip(calls, firsts, strict=True):
            src[(src == first) & (kind == EdgeKind.PROGRAM)] = call
        counts = [len(region.device) for region in regions]
        order = np.concatenate([np.arange(count) for count in counts])
        result, _ = extend(
            result,
            {
                **{key: getattr(graph, key)[firsts] for key in ("phase", "lane", "step", "layer")},
                "kind": np.full(len(regions), TaskKind.CALL),
                "name": np.full(len(regions), len(graph.names)),
                "dur": np.rint(launch_ns + node_ns * np.array(counts)),
                "recorded": graph.recorded[firsts],
            },
            {
                "src": np.concatenate([firsts, np.repeat(calls, counts)]),
                "dst": np.concatenate([calls, *[region.device for region in regions]]),
                "edge_kind": np.repeat([int(EdgeKind.PROGRAM), int(EdgeKind.LAUNCH)], [len(regions), sum(counts)]),
                "lag": np.rint(np.append(np.zeros(len(regions)), max(latency, launch_ns) + node_ns * order)),
                "from_start": np.repeat([False, True], [len(regions), sum(counts)]),
            },
            names=["hipGraphLaunch" if graph.info.platform == "rocm" else "cudaGraphLaunch"],
            old_edges={key: column[(kind != EdgeKind.LAUNCH) | (captured[dst] < 0)] for key, column in edges.items()},
            change=Change(
                what=f"launched {sum(counts):,} device tasks by {len(regions)} graph launch{'es' * (len(regions) > 1)}",
                tasks=sum(counts) + len(regions),
            ),
        )
        return result


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Known:
    """What all steps of a graph are looked at for."""

    launch: Int64  # calls of live device tasks, by call and task
    launched: Int64  # the task of each
    copies_in: Mask  # calls that copy to the device (n)
    holes: Mask  # stretches of the host that nobody knows what of (n)
    waits: Int64  # where the host returns from waiting for the device

    @classmethod
    def of(cls, graph: TaskGraph) -> _Known:
        dst = graph.dst
        live = np.flatnonzero((graph.edge_kind == EdgeKind.LAUNCH) & ~graph.gone[dst])
        live = live[np.lexsort((dst[live], graph.src[live]))]
        copies = select(graph, kind="copy", name=("*HtoD*", "*HostToDevice*"))
        copies_in = graph.mask(graph.src[live][copies[dst[live]]])
        returns = (graph.edge_kind == EdgeKind.SYNC) & (graph.kind[dst] == TaskKind.RETURN) & ~graph.gone[dst]
        return cls(
            launch=graph.src[live].astype(np.int64),
            launched=dst[live].astype(np.int64),
            copies_in=copies_in,
            holes=holes(graph),
            waits=np.unique(dst[returns]).astype(np.int64),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Region:
    """What one graph holds: the first launch, the host tasks that go, the device tasks in order of their launch."""

    first: int
    host: Int64
    device: Int64


def _launches(graph: TaskGraph) -> Mask:
    """Return calls that launch device tasks."""
    calls = graph.mask(graph.src[(graph.edge_kind == EdgeKind.LAUNCH) & ~graph.gone[graph.dst]])
    return np.asarray(calls & (graph.kind == TaskKind.CALL))


def _where(graph: TaskGraph, row: int) -> str:
    """Return a host task by its name and the operator around it."""
    name, op = graph.names[graph.name[row]], graph.op[row]
    return name if op < 0 or graph.names[op] == name else f"{name} in {graph.names[op]}"
