"""A training step written out: forward, backward with gradients of known size and time, update. Times in ms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from foretrace.cost.operators.operator import Operator
from foretrace.graph.taskgraph import GraphInfo, Lane, Phase, TaskGraph, TaskKind
from foretrace.testing.workloads import STEP, THREAD, Writer
from foretrace.trace.trace import LaneKind

MS = 1_000_000
NODE = "torch::autograd::AccumulateGrad"

# What a prediction would add around the messages: nothing, so that times can be worked out by hand.
PLAIN = "gradient_us=0 step_us=0 launch_us=0 waiting_ms=0 company=1 transfer=1 copy_gb_s=1e12"  # copies take no time


@dataclass(kw_only=True)
class Backward:
    """Layer i takes `forward_ms` and `backward_ms`, the last layer's gradient is ready first."""

    elements: Sequence[int]  # of each layer's gradient, first layer first
    forward_ms: float = 1.0
    backward_ms: float = 2.0
    update_ms: float = 1.0
    steps: int = 4
    types: Sequence[str] = ()
    recording: dict[str, object] = field(default_factory=dict)

    def graph(self) -> TaskGraph:
        """The graph, on a processor, with every layer a Linear module of its own."""
        count = len(self.elements)
        types = self.types or ["float"] * count
        facts = {
            "modules": [
                {"root": 0, "name": "", "class": "Sequential", "parameters": 0},
                *({"root": 0, "name": str(i), "class": "Linear", "parameters": n} for i, n in enumerate(self.elements)),
            ],
            "module_calls": list(range(count + 1)),
            "parameters": [
                {
                    "root": 0,
                    "name": f"{i}.weight",
                    "shape": [n],
                    "dtype": "float32",
                    "numel": n,
                    "trained": True,
                    "optimizer": -1,
                }
                for i, n in enumerate(self.elements)
            ],
            "gradient_order": [[i, count - i] for i in reversed(range(count))],
            **self.recording,
        }
        writer = Writer(
            lanes=(Lane(rank=0, kind=LaneKind.CPU, label="main thread"),),
            info=GraphInfo(platform="cpu", steps=tuple(range(self.steps)), recording=facts),
        )
        writer.mark()
        for _ in range(self.steps):
            for i in range(count):
                self._work(writer, "aten::addmm", self.forward_ms, Phase.FORWARD, i)
            for i in reversed(range(count)):
                self._work(writer, "aten::mm", self.backward_ms, Phase.BACKWARD, i)
                writer.task(TaskKind.OPERATOR, THREAD, NODE, 0, op=NODE, shape=i, phase=int(Phase.BACKWARD))
            layer = STEP.format("SGD")
            update = round(self.update_ms * MS)
            writer.task(TaskKind.OPERATOR, THREAD, "aten::add_", update, layer=layer, phase=int(Phase.OPTIMIZER))
            writer.mark()
        shapes = [Operator.of(NODE, [[n]], [kind]).text for n, kind in zip(self.elements, types, strict=True)]
        return replace(writer.graph(), shapes=tuple(shapes))

    def _work(self, writer: Writer, name: str, time_ms: float, phase: Phase, layer: int) -> None:
        writer.task(
            TaskKind.OPERATOR, THREAD, name, round(time_ms * MS), layer=f"Sequential_0.Linear_{layer}", phase=int(phase)
        )
