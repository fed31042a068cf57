"""`gradient-accumulation`: the batch of a step cut into micro-batches whose gradients are added before one update.

Samples per step stay, and so does the update; forward and backward run several times on fewer samples, each with the
fixed cost of its calls, and from the second time on every gradient is added to the one before. What is gained is
memory: only one micro-batch's activations are alive at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import numpy as np

from foretrace.arrays import Mask
from foretrace.cost.operators.calibration import Calibration
from foretrace.cost.operators.operator import Operator
from foretrace.graph.insert import DeviceTask, HostTask, insert
from foretrace.graph.select import trained
from foretrace.graph.taskgraph import Change, Phase, TaskGraph, TaskKind
from foretrace.techniques.base import Prior, derived, parameter
from foretrace.techniques.compute.batch_size import OnSamples, Rescaling, sample_twins
from foretrace.techniques.compute.batching import Resize, micro_batches, parameter_shapes, recorded_size, with_facts
from foretrace.techniques.compute.updates import find_update, update_bandwidth
from foretrace.techniques.memory.saved import find_saved
from foretrace.techniques.repeat import Copy, before, repeat
from foretrace.training.batches import parts
from foretrace.training.training import Training

_LEFT_OUT = (TaskKind.MARK, TaskKind.DATA, TaskKind.COLLECTIVE)  # once per step, whatever the number of micro-batches
_ADD = "aten::add_"


@dataclass(frozen=True, kw_only=True)
class GradientAccumulation(OnSamples):
    """Cut every batch into parts and add up their gradients."""

    summary = "a batch in several parts, gradients added: less activation memory for more time"
    source = "Huang et al. (GPipe, NeurIPS 2019), micro-batches; PyTorch, gradient accumulation"
    effort = "a loop over parts of the batch"

    steps: int = parameter(doc="micro-batches that a batch is cut into", least=2)
    recorded: int | None = parameter(None, doc="samples per step of the recording, if it does not say", unit="samples")
    bandwidth_gb_s: float | None = derived(unit="GB/s", doc="memory bandwidth of adding gradients, where not measured")
    loop_us: float | None = derived(unit="µs", doc="Python of one more micro-batch beside forward and backward")

    def wants(self, graph: TaskGraph) -> tuple[Operator, ...]:
        resize = self._resize(graph)
        if graph.info.platform != "cpu" or resize is None:
            return ()
        return (*sample_twins(graph, resize).wanted(graph), *dict.fromkeys(_additions(graph)))

    def priors(self, graph: TaskGraph) -> dict[str, Prior]:
        found = self._plan(graph).priors(graph)
        if _added_s(graph) is None and (bandwidth := update_bandwidth(graph)) is not None:
            found["bandwidth_gb_s"] = bandwidth
        found["loop_us"] = Prior(
            60.0, 20.0, 150.0, unit="µs", why="cutting the batch, dividing the loss, one more call of backward"
        )
        return found

    def change(self, graph: TaskGraph) -> TaskGraph:
        if graph.info.recording.get("distributed"):
            raise self.refuse("put gradient-accumulation before what makes the workers exchange messages.")
        plan = self.planned(graph, self._plan(graph))
        added_ns, tensors = self._adding(graph)
        micro = plan.on(graph, self.values(graph))
        repeated, count = self._repeated(micro, plan)
        if not count:
            raise self.refuse("the recording shows no step that is complete, from forward to the update.")
        result = insert(repeated, self._gradients(repeated, added_ns, tensors))
        result = with_facts(result, micro_batches=self.steps * micro_batches(graph))
        saved = sum(each.nbytes for each in find_saved(graph).tensors) / max(graph.n_steps, 1)
        if saved:
            what = (
                f"about {saved / 1e6:.3g} MB saved for the backward pass shrink to {saved / self.steps / 1e6:.3g} MB; "
                "gradients and optimizer state stay"
            )
            result = result.noted(Change(what=what, tasks=count))
        return result

    def realise(self, training: Training) -> Training:
        if training.run is not None:
            raise self.refuse("the training has a step of its own (run=), which does not cut batches.")
        if (samples := training.batch_size) and samples * training.micro_batches % self._parts(training):
            raise self.refuse(f"batches of {samples} samples cannot be cut into {self._parts(training)} equal parts.")
        parts(next(iter(training.loader)), self._parts(training))  # refuses batches that cannot be cut
        return replace(training, micro_batches=self._parts(training))

    def _parts(self, training: Training) -> int:
        return self.steps * training.micro_batches

    def _resize(self, graph: TaskGraph) -> Resize | None:
        samples = self.recorded or recorded_size(graph)
        if not samples:
            return None
        parts = micro_batches(graph)
        if samples % (parts * self.steps):
            raise self.refuse(f"a batch of {samples} samples cannot be cut into {parts * self.steps} equal parts.")
        return Resize(before=samples // parts, after=samples // parts // self.steps, fixed=parameter_shapes(graph))

    def _plan(self, graph: TaskGraph) -> Rescaling:
        """Return forward and backward on a micro-batch; the batch is loaded and copied to the device as a whole."""
        resize = self._resize(graph)
        plan = Rescaling.of(graph, resize, 1 / self.steps)
        return replace(plan, loading=np.zeros_like(plan.loading), kernels=plan.kernels & ~_copies(graph))

    def _adding(self, graph: TaskGraph) -> tuple[float, int]:
        """Return the time in ns to add all gradients once, and their number. Raises where their sizes are unknown."""
        operators = _additions(graph)
        measured = _added_s(graph)
        if measured is not None:
            return 1e9 * measured * self.values(graph)["measured"], len(operators)
        update = find_update(graph)
        nbytes = sum(4 * prod(each.dims[0]) for each in operators) or (update.nbytes if update else 0)
        if not nbytes:
            raise self.refuse("the recording does not tell how large the gradients are; record with shapes.")
        count = len(operators) or (update.tensors if update else 0)
        rate = self.values(graph).get("bandwidth_gb_s")
        if rate is None:
            raise self.refuse("the device's bandwidth is unknown; give bandwidth_gb_s=.")
        return 3 * nbytes / rate, count

    def _repeated(self, graph: TaskGraph, plan: Rescaling) -> tuple[TaskGraph, int]:
        """Return forward and backward of every step run `steps` times; also the number of tasks that were added."""
        again = trained(graph)
        again &= ~np.isin(graph.kind, _LEFT_OUT) & ~_copies(graph)
        copies: list[Copy] = []
        for step in range(graph.n_steps):
            rows = np.flatnonzero(again & (graph.step == step)).astype(np.int64)
            after = before(graph, rows) if len(rows) else None
            if after is not None:
                copies += [Copy(rows=rows, after=after)] * (self.steps - 1)
        count = sum(len(copy.rows) for copy in copies)
        if not copies:
            return graph, 0
        what = f"ran forward and backward {self.steps} times per step, on 1/{self.steps} of the samples each"
        return repeat(graph, copies, change=Change(what=what, tasks=count)), count

    def _gradients(self, graph: TaskGraph, added_ns: float, tensors: int) -> list[HostTask | DeviceTask]:
        """Return what adding gradients and the loop over micro-batches take, at the end of every step's
        backward pass.
        """
        more = self.steps - 1
        loop_ns = 1e3 * self.values(graph)["loop_us"]
        new: list[HostTask | DeviceTask] = []
        backward = (graph.phase == Phase.BACKWARD) & ~graph.gone & ~np.isin(graph.kind, _LEFT_OUT)
        for step in range(graph.n_steps):
            mine = backward & (graph.step == step)
            host = np.flatnonzero(mine & ~graph.on_device & (graph.kind != TaskKind.JOIN))
            device = np.flatnonzero(mine & graph.on_device)
            if not len(host):
                continue
            last = int(host[-1])
            new.append(HostTask(after=last, name="micro-batches", dur_ns=round(more * loop_ns), kind=TaskKind.PYTHON))
            if not len(device):
                new.append(HostTask(after=last, name=_ADD, dur_ns=round(more * added_ns), kind=TaskKind.OPERATOR))
                continue
            cost_ns = 1e3 * _CALL_US * max(tensors, 1)
            new.append(HostTask(after=last, name=_ADD, dur_ns=round(more * cost_ns)))
            new.append(
                DeviceTask(
                    after=int(device[-1]),
                    launched_after=last,
                    name="add gradients",
                    op=_ADD,
                    dur_ns=round(more * added_ns),
                )
            )
        return new


_CALL_US = 8.0  # host time of one small kernel through autograd


def _copies(graph: TaskGraph) -> Mask:
    """Return copies between host and device, and the calls that start them."""
    copies = graph.kind == TaskKind.COPY
    calls = np.array(["Memcpy" in name or "memcpy" in name for name in graph.names], dtype=np.bool_)
    return np.asarray(copies | (calls[graph.name] & np.isin(graph.kind, (TaskKind.CALL, TaskKind.RETURN))))


def _additions(graph: TaskGraph) -> tuple[Operator, ...]:
    """Return the addition of every trained parameter's gradient to the one before; empty where sizes are unknown."""
    found = [each for each in graph.info.recording.get("parameters", []) if each.get("trained")]
    types = {"float32": "float", "bfloat16": "c10::BFloat16", "float16": "c10::Half", "float64": "double"}
    return tuple(
        Operator.of(
            _ADD,
            [each["shape"], each["shape"], []],
            [types.get(each["dtype"], "float")] * 2 + ["Scalar"],
            ["", "", "1"],
        )
        for each in found
    )


def _added_s(graph: TaskGraph) -> float | None:
    """Return seconds to add all gradients once, None where that was not measured.

    Of the two arrays of an addition one was just written, the other lies where the batch before left it: the time
    is the mean of those with data near and far.
    """
    calibration = Calibration.of(graph)
    times = [calibration.midway_s(each) for each in _additions(graph)]
    known = [each for each in times if each is not None]
    return sum(known) if times and len(known) == len(times) else None
