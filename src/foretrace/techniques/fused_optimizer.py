"""`fused-optimizer`: the parameter update of a step in a few kernels instead of several per parameter.

A fused update reads and writes every optimizer array once, so it takes bytes over bandwidth, and a little
host time per parameter tensor. Everything that the recording shows inside `Optimizer.step` goes; `zero_grad`
stays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING, ClassVar

from foretrace.graph.edit import remove
from foretrace.graph.insert import DeviceTask, HostTask, insert, typical
from foretrace.graph.taskgraph import TaskGraph, TaskKind
from foretrace.techniques.base import Prior, Technique, derived, prior
from foretrace.techniques.updates import Run, Update, find_update, runs, step_tasks, update_bandwidth

if TYPE_CHECKING:
    from foretrace.training.training import Training

_ON_CPU, _ON_DEVICE = ("Adam", "AdamW", "SGD", "Adagrad"), ("Adam", "AdamW", "SGD")
_TENSOR_US = {"Adam": 3.5, "AdamW": 3.5, "Adagrad": 2.0, "SGD": 1.2}
_TENSORS_PER_LAUNCH = {3: 64, 5: 48, 7: 36}  # so many pointers fit into the arguments of one kernel
_BYTES_PER_LAUNCH = 320 * 65_536 * 4  # blocks of one kernel x elements of a block


@dataclass(frozen=True, kw_only=True)
class FusedOptimizer(Technique):
    """Replace the optimizer's operators by its fused implementation (`fused=True`)."""

    name: ClassVar[str] = "fused-optimizer"
    summary: ClassVar[str] = "the optimizer's fused implementation: one pass over all parameters"
    source: ClassVar[str] = "Daydream (ATC 2020), FusedAdam; torch.optim, argument fused"

    bandwidth_gb_s: float | None = derived(unit="GB/s", doc="memory bandwidth that the fused update reaches")
    kernel_share: float | None = prior(
        1.0,
        0.25,
        1.0,
        doc="time of the fused kernels relative to the removed ones, where bytes are unknown",
        why="Daydream keeps their sum; one pass over the arrays can be up to four times faster than several",
    )
    tensor_us: float | None = derived(unit="µs", doc="host time per parameter tensor")
    fixed_us: float | None = prior(
        30.0,
        15.0,
        120.0,
        unit="µs",
        doc="host time per optimizer step",
        why="entering the step and grouping tensors by device and type",
    )
    host_share: float | None = prior(
        0.35,
        0.2,
        0.8,
        doc="host time of the fused step relative to the recorded one, where the number of tensors is unknown",
        why="fused against foreach: 0.27 (Adam) to 0.33 (SGD) measured with many small tensors",
    )

    def priors(self, graph: TaskGraph) -> dict[str, Prior]:
        found = dict(super().priors(graph))
        update = find_update(graph)
        bandwidth = update_bandwidth(graph) if update and update.nbytes else None
        if bandwidth is not None:
            del found["kernel_share"]
            found["bandwidth_gb_s"] = bandwidth
        if update and update.tensors:
            del found["host_share"]
        else:
            del found["fixed_us"]
            return found
        cost = _TENSOR_US.get(update.optimizer, 3.5)
        found["tensor_us"] = Prior(
            value=cost,
            low=0.6 * cost,
            high=2 * cost,
            unit="µs",
            why="measured with PyTorch 2 on a server core; others take 0.6 to 2 times as long",
        )
        return found

    def change(self, graph: TaskGraph) -> TaskGraph:
        update = find_update(graph)
        if update is None:
            raise self.refuse("the recording shows no optimizer step (no Optimizer.step ranges).")
        self._check(graph, update)
        usual = typical(graph) if graph.on_device.any() else None
        mask = step_tasks(graph)
        found = runs(graph, mask)
        if not found:
            raise self.refuse("the optimizer runs inside a graph launch; put fused-optimizer before cuda-graphs.")
        values = self.values(graph)
        new = [task for run in found for task in _fused(graph, run, update, values)]
        return insert(remove(graph, mask, technique=self.name), new, usual=usual, technique=self.name)

    def realise(self, training: Training) -> Training:
        from foretrace.training.optimizers import remade

        return replace(
            training, optimizers=tuple(remade(each, fused=True, foreach=None) for each in training.optimizers)
        )

    def _check(self, graph: TaskGraph, update: Update) -> None:
        allowed = _ON_CPU if graph.info.platform == "cpu" else _ON_DEVICE
        if update.fused:
            raise self.refuse(f"the optimizer ({update.optimizer}) is fused already.")
        if update.optimizer not in allowed:
            raise self.refuse(f"PyTorch has no fused {update.optimizer} here; it has {', '.join(allowed)}.")
        if graph.info.platform == "cpu" and not update.nbytes:
            raise self.refuse("the recording does not tell how many parameters there are; record with shapes.")


def _fused(graph: TaskGraph, run: Run, update: Update, values: dict[str, float]) -> list[HostTask | DeviceTask]:
    """What takes the place of one optimizer step."""
    anchor = int(run.host[0])
    if update.tensors:
        host_ns = 1e3 * (values["fixed_us"] + values["tensor_us"] * update.tensors)
    else:
        host_ns = float(graph.dur[run.host].sum()) * values["host_share"]
    if update.nbytes and "bandwidth_gb_s" in values:
        work_ns = update.nbytes * update.accesses / values["bandwidth_gb_s"]
    else:
        work_ns = float(graph.dur[run.device].sum()) * values["kernel_share"]
    name = f"aten::_fused_{update.optimizer.lower()}_"
    if not len(run.device):
        python = f"Optimizer.step#{update.optimizer}.step"
        return [
            HostTask(after=anchor, name=python, dur_ns=round(host_ns), kind=TaskKind.PYTHON),
            HostTask(after=anchor, name=name, dur_ns=round(work_ns), kind=TaskKind.OPERATOR),
        ]
    launches = max(
        ceil(update.tensors / _TENSORS_PER_LAUNCH[update.accesses]),
        ceil(update.nbytes / _BYTES_PER_LAUNCH),
        1,
    )
    kernel = DeviceTask(
        after=int(run.device[0]),
        launched_after=anchor,
        name=f"fused_{update.optimizer.lower()}",
        op=name,
        dur_ns=round(work_ns / launches),
        nbytes=update.nbytes * update.accesses // launches if update.nbytes else -1,
    )
    return [HostTask(after=anchor, name=name, dur_ns=round(host_ns)), *[kernel] * launches]
