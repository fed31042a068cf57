"""`activation-compression`: activations wait for the backward pass in 16 bit.

What autograd saves is rounded once between forward and backward; forward and the backward's arithmetic stay in float32
(Gist's delayed precision reduction). It costs a cast when an activation is saved and one when it is asked for, and buys
half of the memory between them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from foretrace.cost.operators.operator import Operator
from foretrace.graph.taskgraph import TaskGraph
from foretrace.techniques.base import Prior, Technique, derived, parameter, prior
from foretrace.techniques.memory.keeping import (
    cast_bandwidth,
    hook_time_s,
    insert_keeping,
    keeping_operators,
    keeping_times,
    saved_note,
    step_times,
)
from foretrace.techniques.memory.saved import Saved, Savings, find_saved
from foretrace.training.saved_tensors import Keeping, Narrow
from foretrace.training.training import Training

_CAST_BYTES = 1.5  # per byte of float32: read, and half of it written, or the reverse
_NAMES = ("compress a saved tensor", "decompress a saved tensor")


@dataclass(frozen=True, kw_only=True)
class ActivationCompression(Technique):
    """Saved float32 activations as bfloat16 or float16 between forward and backward."""

    across = "each"
    summary = "activations wait for the backward pass in 16 bit: half their memory, two casts each"
    source = "Gist (ISCA 2018), section 3.3: delayed precision reduction; torch saved-tensor hooks"
    effort = "one context manager; activations in 16 bit"

    format: str = parameter("bfloat16", doc="what activations wait in", choices=("bfloat16", "float16"))
    min_bytes: int = parameter(65_536, doc="smaller tensors stay as they are", unit="B", least=0)
    measured: float | None = prior(
        1.0,
        0.85,
        1.6,
        doc="casts and hooks in a step relative to timed alone",
        why="what was just computed is partly in a cache; the code of the hooks, in Python, is in none",
    )
    bandwidth_gb_s: float | None = derived(unit="GB/s", doc="bytes read and written per second by a cast")
    hook_us: float | None = prior(
        4.0, 2.0, 10.0, unit="µs", doc="host time per saved variable", why="two calls from autograd into Python"
    )

    def wants(self, graph: TaskGraph) -> tuple[Operator, ...]:
        return keeping_operators(self.format, self._chosen(graph)[1]) if graph.info.platform == "cpu" else ()

    def priors(self, graph: TaskGraph) -> dict[str, Prior]:
        found = dict(super().priors(graph))
        if hook_time_s(graph) is not None:
            del found["hook_us"]
        if keeping_times(graph, self.format, self._chosen(graph)[1]) is not None:
            return found
        del found["measured"]
        found["bandwidth_gb_s"] = cast_bandwidth(graph)
        return found

    def change(self, graph: TaskGraph) -> TaskGraph:
        savings, chosen = self._chosen(graph)
        if not chosen:
            raise self.refuse(
                f"the recording shows no float32 activations of {self.min_bytes} bytes or more that autograd saves; "
                "record with shapes, or give a smaller min_bytes."
            )
        rates = ("bandwidth_gb_s", "bandwidth_gb_s")
        times, hook_s = step_times(self, graph, chosen, self.format, rates, _CAST_BYTES)
        changed = insert_keeping(graph, savings, times, hook_s, _NAMES)
        return changed.noted(saved_note(graph, savings, chosen, 0.5, f"kept as {self.format}"))

    def realise(self, training: Training) -> Training:
        keeping = Keeping(Narrow(self.format), training.model.parameters(), self.min_bytes)
        return replace(training, around_forward=(*training.around_forward, keeping))

    def _chosen(self, graph: TaskGraph) -> tuple[Savings, list[Saved]]:
        savings = find_saved(graph)
        return savings, [each for each in savings.tensors if each.dtype == "float" and each.nbytes >= self.min_bytes]
