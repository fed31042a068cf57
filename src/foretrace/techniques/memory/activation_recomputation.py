"""`activation-recomputation`: blocks keep their inputs alone and run forward once more in the backward pass.

The forward work of the chosen blocks is there twice: where it was, and ahead of the block's backward. Beside it comes
what checkpointing takes itself: hooks around every saved tensor, and the state of the random numbers kept and restored,
so that dropout falls alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretrace.arrays import Int64
from foretrace.cost.operators.calibration import Calibration
from foretrace.cost.operators.operator import Operator
from foretrace.graph.edit import scale
from foretrace.graph.insert import HostTask, insert
from foretrace.graph.taskgraph import Change, EdgeKind, Phase, TaskGraph, TaskKind
from foretrace.techniques.base import Prior, Technique, derived, parameter, prior
from foretrace.techniques.memory.blocks import AUTO, choose, layer_prefixes, modules_of, recorded_modules
from foretrace.techniques.memory.saved import find_saved
from foretrace.techniques.repeat import Copy, repeat
from foretrace.training.checkpoints import LARGE, SMALL, checkpoint_operator, is_recomputed, recomputed
from foretrace.training.training import Training

_ONCE = (TaskKind.MARK, TaskKind.JOIN, TaskKind.DATA, TaskKind.COLLECTIVE)
_NODE = "autograd::engine::evaluate_function: "


@dataclass(frozen=True, kw_only=True)
class ActivationRecomputation(Technique):
    """Checkpoint blocks of the model: less activation memory for more time."""

    across, repeats = "each", True  # of other blocks
    summary = "blocks run forward once more in backward instead of keeping their activations"
    source = "Chen et al., Training Deep Nets with Sublinear Memory Cost (2016); torch.utils.checkpoint"
    effort = "a wrapper around the blocks"

    blocks: str = parameter(AUTO, doc="modules by path or class, a glob; auto: the repeated class with most parameters")
    again: float | None = prior(
        1.0,
        0.9,
        1.12,
        doc="time of the second forward pass of a block relative to the first",
        why="fewer results stay in memory, but they are written where others were; the last operators may be left out",
    )
    block_us: float | None = derived(unit="µs", doc="time of checkpointing per block")
    variable_us: float | None = derived(unit="µs", doc="time of checkpointing per saved variable")

    def wants(self, graph: TaskGraph) -> tuple[Operator, ...]:
        if graph.info.platform != "cpu":
            return ()
        return tuple(checkpoint_operator(count, kept=kept) for count in (SMALL, LARGE) for kept in (True, False))

    def priors(self, graph: TaskGraph) -> dict[str, Prior]:
        found = dict(super().priors(graph))
        calibration = Calibration.of(graph)
        times = [calibration.time_s(each) for each in self.wants(graph)]
        block, each, why = 150.0, 8.0, "measured with PyTorch 2 on a server core"
        if times and None not in times:
            small, large = times[1] - times[0], times[3] - times[2]  # type: ignore[operator]  # none is None
            each = max(1e6 * (large - small) / (LARGE - SMALL), 0.1)
            block = max(1e6 * small - SMALL * each, 1.0)
            why = "blocks of small operators timed alone on this machine"
        low, high = (0.7, 1.5) if times and None not in times else (0.5, 2.5)
        found["block_us"] = Prior(block, low * block, high * block, unit="µs", why=why)
        found["variable_us"] = Prior(each, low * each, high * each, unit="µs", why=why)
        return found

    def change(self, graph: TaskGraph) -> TaskGraph:
        values = self.values(graph)
        found = self._runs(graph)
        if not found:
            raise self.refuse("the recording shows no forward and backward of these modules; record with modules.")
        nodes = np.array([name.startswith(_NODE) and "AccumulateGrad" not in name for name in graph.names])
        whole = int(nodes[graph.name[(graph.phase == Phase.BACKWARD) & ~graph.gone]].sum())
        each = max(find_saved(graph).variables / whole, 1.0) if whole else 1.0  # variables that a node saves
        new = []
        for run in found:
            count = each * int(nodes[graph.name[run.backward]].sum()) or int((graph.flops[run.forward] > 0).sum())
            ns = 1e3 * (values["block_us"] + values["variable_us"] * count)
            new.append(
                HostTask(
                    after=run.ahead,
                    name="checkpoint",
                    dur_ns=round(ns),
                    kind=TaskKind.CPU if graph.on_device.any() else TaskKind.PYTHON,
                    like=int(run.forward[0]),
                    phase=Phase.RECOMPUTE,
                )
            )
        hooked = insert(graph, new)
        copies = [Copy(rows=run.forward, after=run.after) for run in self._runs(hooked)]
        count = sum(len(copy.rows) for copy in copies)
        per_step = len(copies) / max(graph.n_steps, 1)
        what = f"ran the forward pass of {per_step:.3g} blocks per step once more, each ahead of its backward"
        result = repeat(hooked, copies, phase=Phase.RECOMPUTE, change=Change(what=what, tasks=count))
        recomputed = np.asarray((result.phase == Phase.RECOMPUTE) & ~result.gone) & (
            result.name != _index(result.names, "checkpoint")
        )
        if values["again"] != 1.0:
            result = scale(result, recomputed, values["again"])
        return result.noted(*self._notes(graph, found))

    def realise(self, training: Training) -> Training:
        chosen = choose(modules_of(training.model), self.blocks)
        if not chosen:
            raise self.refuse(self._none("the model"))
        modules = [training.model.get_submodule(each.path) for each in chosen]
        if any(is_recomputed(each) for module in modules for each in module.modules()):
            raise self.refuse("these modules are recomputed already.")
        for module in modules:
            recomputed(module)
        return training

    def _none(self, where: str) -> str:
        if self.blocks == AUTO:
            return f"{where} repeats no module class that has modules inside; name the modules with blocks=."
        return f"{where} has no module whose path or class fits blocks={self.blocks}."

    def _runs(self, graph: TaskGraph) -> list[_Run]:
        """Return every step's forward and backward of every block; refuses where no module can be one."""
        facts = graph.info.recording
        modules = recorded_modules(facts.get("modules", []))
        if not modules:
            raise self.refuse("the recording says nothing about the modules of its model; record it with foretrace.")
        chosen = choose(modules, self.blocks)
        if not chosen:
            raise self.refuse(self._none("the model"))
        live = ~graph.gone & ~np.isin(graph.kind, _ONCE) & (graph.step >= 0)
        found = []
        for layers in layer_prefixes(chosen, facts, graph.layers):
            mine = live & np.isin(graph.layer, layers)
            if (mine & (graph.phase == Phase.RECOMPUTE) & (graph.name != _index(graph.names, "checkpoint"))).any():
                raise self.refuse("these modules are recomputed already.")
            for step in range(graph.n_steps):
                run = _run(graph, np.flatnonzero(mine & (graph.step == step)))
                if run is not None:
                    found.append(run)
        return found

    def _notes(self, graph: TaskGraph, found: list[_Run]) -> tuple[Change, ...]:
        """Return what becomes of memory, and of statistics."""
        notes = []
        rows = np.concatenate([run.forward for run in found])
        inside = set(rows.tolist())
        steps = max(graph.n_steps, 1)
        kept = [each for each in find_saved(graph).tensors if each.row in inside]
        if kept:
            first = [min((each for each in kept if each.row in set(run.forward.tolist())), default=None,
                         key=lambda each: each.row) for run in found]  # fmt: skip
            inputs = sum(each.nbytes for each in first if each is not None)
            saved = (sum(each.nbytes for each in kept) - inputs) / steps
            what = f"about {max(saved, 0) / 1e6:.3g} MB per step need not be kept from forward to backward"
            notes.append(Change(what=what, tasks=len(kept)))
        names = np.unique(graph.op[rows[graph.op[rows] >= 0]])
        if any("batch_norm" in graph.names[i] for i in names.tolist()):
            what = "batch normalisation inside the blocks updates its running statistics twice per step"
            notes.append(Change(what=what, tasks=len(found)))
        return tuple(notes)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Run:
    """One block in one step."""

    forward: Int64
    backward: Int64
    ahead: int  # host task ahead of its backward
    after: dict[int, int]  # per lane of the forward, what its repetition follows


def _run(graph: TaskGraph, rows: Int64) -> _Run | None:
    """Return the block whose tasks these are; None where forward or backward is missing."""
    forward = rows[graph.phase[rows] == Phase.FORWARD]
    backward = rows[(graph.phase[rows] == Phase.BACKWARD) & ~graph.on_device[rows]]
    if not len(forward) or not len(backward):
        return None
    first = int(backward[0])
    there = np.flatnonzero(graph.lane == graph.lane[first])
    place = int(np.searchsorted(there, first))
    if place == 0:
        return None
    ahead = int(there[place - 1])
    after = {}
    for lane in np.unique(graph.lane[forward]).tolist():
        after[lane] = _launched_before(graph, lane, ahead) if graph.on_device[graph.lane == lane][0] else ahead
    return None if min(after.values()) < 0 else _Run(forward=forward, backward=backward, ahead=ahead, after=after)


def _launched_before(graph: TaskGraph, lane: int, host: int) -> int:
    """Return the last task of a stream that was launched before a host task; −1 if there is none."""
    launch = np.flatnonzero((graph.edge_kind == EdgeKind.LAUNCH) & (graph.src <= host))
    launched = graph.dst[launch]
    mine = launched[graph.lane[launched] == lane]
    return int(mine.max()) if len(mine) else -1


def _index(names: tuple[str, ...], name: str) -> int:
    return names.index(name) if name in names else -1
