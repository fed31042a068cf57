"""`fused-optimizer`: the parameter update of a step in a few kernels instead of several per parameter.

A fused update reads and writes every optimizer array once, so it takes bytes over bandwidth, and a little
host time per parameter tensor. Everything that the recording shows inside `Optimizer.step` goes; `zero_grad`
stays. On a processor the step of either implementation over parameters of the recorded sizes can be timed alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from foretrace.cost.operators.calibration import Calibration
from foretrace.cost.operators.operator import Operator
from foretrace.cost.operators.similar import OperatorRatio
from foretrace.graph.edit import remove
from foretrace.graph.insert import DeviceTask, HostTask, insert, typical
from foretrace.graph.taskgraph import TaskGraph, TaskKind
from foretrace.techniques.base import Prior, Technique, derived, parameter, prior
from foretrace.techniques.compute.updates import OptimizerRun, Update, find_update, runs, step_tasks, update_bandwidth
from foretrace.training.optimizers import remade, step_operator
from foretrace.training.training import Training

_ON_CPU, _ON_DEVICE = ("Adam", "AdamW", "SGD", "Adagrad"), ("Adam", "AdamW", "SGD")
_TENSOR_US = {"Adam": 3.5, "AdamW": 3.5, "Adagrad": 2.0, "SGD": 1.2}
_TENSORS_PER_LAUNCH = {3: 64, 5: 48, 7: 36}  # so many pointers fit into the arguments of one kernel
_BYTES_PER_LAUNCH = 320 * 65_536 * 4  # blocks of one kernel x elements of a block


@dataclass(frozen=True, kw_only=True)
class FusedOptimizer(Technique):
    """Replace the optimizer's loop over parameters by its fused (or multi-tensor) implementation."""

    across = "each"
    summary = "the optimizer's fused implementation: one pass over all parameters"
    source = "Daydream (ATC 2020), FusedAdam; torch.optim, arguments fused and foreach"
    effort = "one argument of the optimizer"

    implementation: str = parameter("fused", doc="fused, or foreach (multi-tensor)", choices=("fused", "foreach"))
    measured: float | None = prior(
        1.0,
        0.9,
        1.1,
        doc="update in a step relative to the update timed alone",
        why="alone, the arrays come from memory; in a step, some gradients are still in a cache",
    )
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

    def wants(self, graph: TaskGraph) -> tuple[Operator, ...]:
        update = find_update(graph)
        return () if update is None else self._operators(graph, update)

    def priors(self, graph: TaskGraph) -> dict[str, Prior]:
        found = dict(super().priors(graph))
        update = find_update(graph)
        if update is not None and self._ratio(graph, update) is not None:
            return {"measured": found["measured"]}
        del found["measured"]
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
            cost,
            0.6 * cost,
            2 * cost,
            unit="µs",
            why="measured with PyTorch 2 on a server core; others take 0.6 to 2 times as long",
        )
        return found

    def change(self, graph: TaskGraph) -> TaskGraph:
        update = find_update(graph)
        if update is None:
            raise self.refuse("the recording shows no optimizer step (no Optimizer.step ranges).")
        ratio = self._ratio(graph, update)
        self._check(graph, update, ratio)
        usual = typical(graph) if graph.on_device.any() else None
        mask = step_tasks(graph)
        found = runs(graph, mask)
        if not found:
            raise self.refuse("the optimizer runs inside a graph launch; put fused-optimizer before cuda-graphs.")
        values = self.values(graph)
        new: list[HostTask | DeviceTask] = []
        for run in found:
            if ratio is not None:
                ns = float(graph.dur[run.host].sum()) * ratio.value * values["measured"]
                name = f"aten::_{self.implementation}_{update.optimizer.lower()}_"
                new.append(HostTask(after=int(run.host[0]), name=name, dur_ns=round(ns), kind=TaskKind.OPERATOR))
            else:
                new += _fused(graph, run, update, values)
        return insert(remove(graph, mask), new, usual=usual)

    def realise(self, training: Training) -> Training:
        settings = {"fused": self.implementation == "fused", "foreach": self.implementation == "foreach"}
        optimizers = tuple(remade(each, **settings) for each in training.optimizers)
        return replace(training, optimizers=optimizers)

    def _check(self, graph: TaskGraph, update: Update, ratio: OperatorRatio | None) -> None:
        allowed = _ON_CPU if graph.info.platform == "cpu" else _ON_DEVICE
        if update.fused:
            raise self.refuse(f"the optimizer ({update.optimizer}) is fused already.")
        if self.implementation == "foreach" and ratio is None:
            raise self.refuse(
                "what foreach takes is known from measurements only; run foretrace calibrate run on the recording, "
                "or ask for implementation=fused."
            )
        if update.optimizer not in allowed:
            raise self.refuse(f"PyTorch has no fused {update.optimizer} here; it has {', '.join(allowed)}.")
        if graph.info.platform == "cpu" and not update.nbytes:
            raise self.refuse("the recording does not tell how many parameters there are; record with shapes.")

    def _operators(self, graph: TaskGraph, update: Update) -> tuple[Operator, ...]:
        """Return the recorded update and the one asked for, to be timed alone; empty where that cannot be known."""
        sizes = [list(each) for each in update.sizes]
        if graph.info.platform != "cpu" or update.fused or not sizes or update.optimizer not in _ON_CPU:
            return ()
        kept: dict[str, Any] = {
            key: value
            for key, value in update.settings.items()
            if key not in ("fused", "foreach", "differentiable", "capturable", "decoupled_weight_decay", "lr")
        }
        before = kept | {"foreach": bool(update.settings.get("foreach")), "fused": False}
        after = kept | {"foreach": self.implementation == "foreach", "fused": self.implementation == "fused"}
        return step_operator(update.optimizer, sizes, before), step_operator(update.optimizer, sizes, after)

    def _ratio(self, graph: TaskGraph, update: Update) -> OperatorRatio | None:
        pair = self._operators(graph, update)
        return Calibration.of(graph).ratio(pair[0], pair[1]) if pair else None


def _fused(
    graph: TaskGraph, run: OptimizerRun, update: Update, values: dict[str, float]
) -> list[HostTask | DeviceTask]:
    """Return what takes the place of one optimizer step."""
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
        ceil(update.tensors / _TENSORS_PER_LAUNCH[update.accesses]), ceil(update.nbytes / _BYTES_PER_LAUNCH), 1
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
