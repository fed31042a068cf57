"""`reconstruct-batchnorm`: batch normalisation in fewer passes over the data, its ReLU in the same pass.

Daydream's rule for Jung et al.: the ReLU kernels go, the batch-norm kernels take half their time. On a processor the
restructured module is there, so that its passes can be timed beside the plain ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from foretrace.arrays import Mask
from foretrace.cost.operators.calibration import Calibration
from foretrace.cost.operators.operator import Operator
from foretrace.graph import edit
from foretrace.graph.select import select
from foretrace.graph.taskgraph import Phase, TaskGraph, TaskKind
from foretrace.techniques.base import Prior, Technique, derived, parameter, prior
from foretrace.training.training import Training

_FORWARD = ("aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm")
_BACKWARD = tuple(f"{name}_backward" for name in _FORWARD)
_RELU = ("aten::relu", "aten::relu_", "aten::clamp_min", "aten::clamp_min_")
_LEAST = 0.05  # of its recorded time a batch norm keeps, whatever was measured


@dataclass(frozen=True, kw_only=True)
class ReconstructBatchnorm(Technique):
    """Restructured batch normalisation, with the ReLU behind it."""

    across = "each"
    summary = "batch norm in fewer passes over the data, together with its ReLU"
    source = "Jung et al. (MLSys 2019), section 3; Daydream (ATC 2020), section 5.1"
    effort = "modules replaced; sums in another order"
    needs = "a processor, BatchNorm2d in float32"

    min_bytes: int = parameter(
        1 << 20, doc="batch norms of smaller inputs stay: calling the module costs more than it gains", unit="B",
        least=0,
    )  # fmt: skip
    call_us: float | None = prior(
        80.0,
        30.0,
        150.0,
        unit="µs",
        doc="what calling the module costs in a step beyond what it costs timed alone",
        why="some thirty short calls from Python, forward and backward, whose code and data are in no cache there; "
        "measured on two small networks",
    )
    measured: float | None = prior(
        1.0,
        0.8,
        1.2,
        doc="what a batch norm gains in a step relative to what it gains timed alone",
        why="in a step its input was just written by the convolution before it",
    )
    forward: float | None = derived(doc="time of the forward batch norm, relative")
    backward: float | None = derived(doc="time of the backward batch norm, relative")

    def wants(self, graph: TaskGraph) -> tuple[Operator, ...]:
        from foretrace.training.batchnorm import pass_operator

        sizes = dict.fromkeys(tuple(size) for size in self._sizes(graph).values()) if _on_cpu(graph) else {}
        return tuple(pass_operator(list(size), restructured=each) for size in sizes for each in (False, True))

    def priors(self, graph: TaskGraph) -> dict[str, Prior]:
        found = dict(super().priors(graph))
        if self._gains(graph):
            return found
        del found["measured"], found["call_us"]
        return found | (_ON_CPU if _on_cpu(graph) else _ON_DEVICE)

    def change(self, graph: TaskGraph) -> TaskGraph:
        ahead = _training_norms(graph)
        if not ahead.any():
            raise self.refuse("the recording shows no batch normalisation in its forward pass.")
        if _on_cpu(graph):
            ahead &= np.isin(np.arange(len(graph)), list(self._sizes(graph)))
            if not ahead.any():
                raise self.refuse(
                    f"no batch norm of the recording is known to have a float32 input of {self.min_bytes} bytes; "
                    "record with shapes, or give a smaller min_bytes."
                )
        values = self.values(graph)
        gains = self._gains(graph)
        if gains and self.forward is None and self.backward is None:
            rows = np.array(list(gains))
            mask = graph.mask(rows)
            gain_ns = 1e9 * values["measured"] * np.array([gains[row] for row in np.flatnonzero(mask).tolist()])
            gain_ns -= 1e3 * values["call_us"]
            dur = np.maximum(graph.dur[mask] - gain_ns, _LEAST * graph.dur[mask])
            what = "took statistics, normalisation and ReLU of {} together"
            return edit.retime(graph, mask, dur, what=what)
        back = select(graph, op=_BACKWARD, ignore_case=False, phase="backward") & _work(graph)
        changed = edit.scale(graph, ahead, values.get("forward", 1.0))
        if back.any() and not _on_cpu(graph):
            changed = edit.scale(changed, back, values.get("backward", 1.0))
        if _on_cpu(graph):
            return changed
        relu = _relu_behind(graph, ahead)
        return edit.remove(changed, relu) if relu.any() else changed

    def realise(self, training: Training) -> Training:
        import torch

        from foretrace.training.batchnorm import restructure

        if training.device != "cpu":
            raise self.refuse(
                "the restructured module is for processors; on a device PyTorch's batch norm reads its input twice "
                "already, and the fused kernels of the paper are no part of PyTorch."
            )
        batch = next(training.batches(), None)
        if batch is None:
            raise self.refuse("the loader gives no batch to see where ReLUs follow batch norms.")
        with torch.random.fork_rng(devices=[]):  # looking must not move dropout masks
            count, _ = restructure(training.model, training.loss, batch, self.min_bytes)
        if not count:
            raise self.refuse(
                "the model has no BatchNorm2d with parameters, running statistics, a momentum and an input of "
                f"{self.min_bytes} bytes."
            )
        return training

    def _sizes(self, graph: TaskGraph) -> dict[int, list[int]]:
        """Return per forward batch norm (row): sizes of its float32 input."""
        if not _on_cpu(graph):
            return {}
        found = {}
        for row in np.flatnonzero(_training_norms(graph) & (graph.shape >= 0) & (graph.nbytes > 0)).tolist():
            operator = Operator(graph.names[graph.op[row]], graph.shapes[graph.shape[row]])
            dims = operator.tensor(0)
            if operator.type(0) == "float" and len(dims) == 4 and 4 * prod(dims) >= self.min_bytes:
                found[row] = list(dims)
        return found

    def _gains(self, graph: TaskGraph) -> dict[int, float]:
        """Return per forward batch norm (row): measured seconds that restructuring gains, below 0 if it loses."""
        sizes = self._sizes(graph)
        if not sizes or not Calibration.of(graph):
            return {}
        from foretrace.training.batchnorm import pass_operator

        known = Calibration.of(graph)
        found = {}
        for row, size in sizes.items():
            plain, new = (known.time_s(pass_operator(size, restructured=each)) for each in (False, True))
            if plain is None or new is None:
                return {}
            found[row] = plain - new
        return found


def _on_cpu(graph: TaskGraph) -> bool:
    return graph.info.platform == "cpu"


def _work(graph: TaskGraph) -> Mask:
    """Return tasks that do the work: operators of a processor, kernels of a device."""
    return np.asarray(np.isin(graph.kind, (TaskKind.OPERATOR, TaskKind.KERNEL)) & ~graph.gone)


def _training_norms(graph: TaskGraph) -> Mask:
    """Return batch norms of the forward pass."""
    return np.asarray(select(graph, op=_FORWARD, ignore_case=False, phase="forward") & _work(graph))


def _relu_behind(graph: TaskGraph, norms: Mask) -> Mask:
    """Return ReLU tasks that directly follow a batch norm on its lane, and as many of the backward pass."""
    relu = select(graph, op=_RELU, ignore_case=False, phase="forward") & _work(graph)
    found = np.zeros(len(graph), dtype=np.bool_)
    for lane in np.unique(graph.lane[norms]).tolist():
        rows = np.flatnonzero((graph.lane == lane) & _work(graph) & (graph.phase == Phase.FORWARD))
        found[rows[1:][relu[rows[1:]] & norms[rows[:-1]]]] = True
    back = select(graph, op="aten::threshold_backward", ignore_case=False, phase="backward") & _work(graph)
    if relu.sum() == found.sum():
        found |= back
    return found


_ON_DEVICE = {
    "forward": Prior(0.5, 0.4, 0.9, why="Daydream's rule; half of the passes are left"),
    "backward": Prior(0.5, 0.4, 1.0, why="Daydream's rule; half of the passes are left"),
}
_ON_CPU = {"forward": Prior(0.35, 0.15, 1.0, why="PyTorch's own statistics take most of it; measured with one thread")}
