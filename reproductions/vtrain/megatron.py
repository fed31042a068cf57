"""A GPT-like model trained with tensor, pipeline and data parallelism on A100-class nodes: one iteration as a graph.

Times of a stage come from a few measured constants (`Constants`); the schedule, its bubbles and who waits for whom
come from the 1F1B schedule. Setting: Megatron-LM as of Narayanan et al. (SC 2021), mixed precision, activation
recomputation in every layer, gradients averaged after the last micro-batch, ranks of a tensor group side by side, then
those of a data group.

Between nodes, everything shares the network cards of a node: the gradients of all its tensor ranks, in 4 bytes each
(all-reduced once by the node for each of them), activations of which every tensor rank sends its part to the next stage
(SC 2021, 4.1), and tensor groups larger than a node. Where a data group has several ranks in a node that are not
neighbours (tensor degrees between 1 and a node's devices), its exchange takes longer, and more so over more nodes
(`crossing`). A ring then enters a node by the network card of one rank and leaves by another's, so that its messages
cross the switches above the cards, where they meet those of other groups; neighbours that share a card (tensor degree
1) and single ranks (a whole node) do not. That reading is not proven: it takes counters of the switches. So the range
of a prediction reaches from no such factor to twice of what was seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from dataclasses import fields as fields_of
from functools import cache
from math import exp, hypot, log, log2
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from foretrace.errors import ForetraceError
from foretrace.graph.taskgraph import TaskGraph
from reproductions.vtrain.pipeline import Int64, one_forward_one_backward

Float64 = npt.NDArray[np.float64]

STORED = Path(__file__).with_name("megatron.json")
VOCABULARY = 51_200  # of GPT-2, padded as Megatron does
NODE = 8  # devices of a node
_SMOOTH = 6.0  # of the maximum of device and host time: a larger power is sharper


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One job: the model, its batches and how it is split."""

    global_batch: int
    micro_batch: int
    hidden: int
    heads: int
    layers: int
    sequence: int
    tensor: int
    data: int
    pipeline: int

    def __post_init__(self) -> None:
        for each in fields_of(self):
            value = getattr(self, each.name)
            if not (isinstance(value, int) and value > 0):
                raise ForetraceError(f"{each.name.replace('_', ' ')} is {value}; give a whole number above 0.")
        if self.global_batch % (self.micro_batch * self.data):
            raise ForetraceError(
                f"a global batch of {self.global_batch} cannot be cut into micro-batches of {self.micro_batch} on "
                f"{self.data} data-parallel workers."
            )
        if self.layers % self.pipeline:
            raise ForetraceError(f"{self.layers} layers cannot be cut into {self.pipeline} equal stages.")

    @property
    def devices(self) -> int:
        """Devices of the job."""
        return self.tensor * self.data * self.pipeline

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a pipeline and iteration."""
        return self.global_batch // (self.micro_batch * self.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What the iteration time depends on beside the layout; fitted on measured iterations but for what is known."""

    tflops: float = 200.0  # matrix products of unlimited size
    product_us: float = 8.0  # a product beside its arithmetic
    memory_gb_s: float = 1300.0
    shared_passes: float = 15.0  # times that activations (b s h) cross memory per layer, whatever the tensor split
    split_passes: float = 25.0  # the same for what the tensor split divides
    score_passes: float = 6.0  # the same for attention scores (b a s s)
    host_us: float = 1500.0  # launching a layer forward
    host_back: float = 1.5  # launching a layer backward, relative
    host_split: float = 1.2  # launching with twice the tensor degree, relative
    link_us: float = 30.0  # a collective inside a node beside its bytes
    link_gb_s: float = 225.0  # bus bandwidth inside a node
    between_us: float = 60.0
    node_gb_s: float = 95.0  # of all network cards of a node together
    crossing: float = 0.7  # more time per doubling of the tensor degree, where a ring over 8 nodes changes cards
    back: float = 2.0  # backward over forward arithmetic
    update_bytes: float = 30.0  # memory traffic of the update per parameter
    gradient_bytes: float = 4.0  # sent per parameter: gradients are accumulated and averaged in FP32
    step_ms: float = 5.0  # of an iteration, whatever its size


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronFit:
    """Constants, and how far they were off where nothing like the layout had been fitted on.

    10 % and 90 % quantiles of log(measured / predicted) over left-out rows: one_node by tensor degree, over left-out
    shapes (hidden size, tensor degree, micro-batch); several_nodes the widest of all left-out models and tensor
    degrees.
    """

    constants: Constants
    one_node: dict[int, tuple[float, float]]
    several_nodes: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """Seconds of one iteration with their 80 % range, and what the range is made of."""

    seconds: float
    low_s: float
    high_s: float
    why: str


@cache
def shipped() -> MegatronFit:
    """The fit made by `protocol.py` from the published rows of vTrain."""
    text = STORED.read_bytes()
    return msgspec.json.decode(text, type=MegatronFit)


def as_json(fit: MegatronFit) -> dict[str, Any]:
    """A fit as it is stored."""
    return asdict(fit)


def iteration(layout: Layout, fit: MegatronFit | None = None) -> Iteration:
    """One iteration of a layout: its time, its range and the reason of that; the stored fit by default.

    The range holds errors of the fit at shapes (hidden size, tensor degree, micro-batch) that were left out of it, and
    where data groups change network cards, that this factor is known from few layouts: none to twice of it.
    """
    known = fit or shipped()
    c = known.constants
    seconds = iteration_s(layout, c)
    near = layout.devices <= NODE
    degree = min(known.one_node, key=lambda t: abs(log(t / layout.tensor)))
    low, high = known.one_node[degree] if near else known.several_nodes
    where = f"shapes of one node, tensor degree {degree}" if near else "models and tensor degrees of several nodes"
    why = f"left-out {where}: {_percent(exp(low))} to {_percent(exp(high))}"
    if crosses(layout):
        none, twice = (iteration_s(layout, replace(c, crossing=times * c.crossing)) for times in (0.0, 2.0))
        low, high = -hypot(low, log(seconds / none)), hypot(high, log(twice / seconds))
        cards = f"{_percent(none / seconds)} to {_percent(twice / seconds)}"
        why += f"; gradients that change network cards: {cards}"
    return Iteration(seconds=seconds, low_s=seconds * exp(low), high_s=seconds * exp(high), why=why)


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


def iteration_s(layout: Layout, constants: Constants) -> float:
    """Seconds of one iteration."""
    return length_s(stage_times(layout, constants), layout.micro_batches)


def crosses(layout: Layout) -> bool:
    """Whether rings of the gradients' exchange between nodes enter a node by one network card and leave by another."""
    return 1 < layout.tensor < NODE and layout.data > 1 and layout.tensor * layout.data > NODE


def stage_times(layout: Layout, c: Constants) -> Mapping[str, Float64]:
    """Seconds per stage (p): forward and backward of a micro-batch, send, exchange and update."""
    b, s, h, t, p = layout.micro_batch, layout.sequence, layout.hidden, layout.tensor, layout.pipeline
    tokens = b * s
    layers = layout.layers // p
    passes = (c.shared_passes * tokens * h + c.split_passes * tokens * h / t) * 2
    passes += c.score_passes * b * layout.heads * s * s / t * 2
    arithmetic = (24 * tokens * h * h + 4 * tokens * s * h) / t / (c.tflops * 1e12)
    memory, products = passes / (c.memory_gb_s * 1e9), 6 * c.product_us * 1e-6
    reduce = 2 * _reduce(2 * tokens * h, t, c.link_us, c.link_gb_s) if t <= NODE else 0.0
    if t > NODE:
        reduce = 2 * _reduce(2 * tokens * h, t, c.between_us, c.node_gb_s)
    host = c.host_us * 1e-6 * c.host_split ** log2(t)
    forward_layer = _either(arithmetic + memory + products + reduce, host)
    backward_layer = (
        _either(c.back * arithmetic + c.back * memory + 2 * products + reduce, host * c.host_back) + forward_layer
    )  # which is run once more: activation recomputation
    forward, backward = np.full(p, layers * forward_layer), np.full(p, layers * backward_layer)
    logits = 2 * tokens * h * VOCABULARY / t / (c.tflops * 1e12) + 8 * tokens * VOCABULARY / t / (c.memory_gb_s * 1e9)
    forward[-1] += logits
    backward[-1] += 2 * logits
    parameters = np.full(p, layers * 12.0 * h * h)  # of a stage, all tensor ranks together
    parameters[0] += VOCABULARY * h
    if p > 1:
        parameters[-1] += VOCABULARY * h
    if layout.devices <= NODE:
        send = c.link_us * 1e-6 + 2 * tokens * h / t / (c.link_gb_s * 1e9)
    else:  # all devices of a node send at the same time
        send = c.between_us * 1e-6 + 2 * tokens * h / t * NODE / (c.node_gb_s * 1e9)
    exchange = np.array([_exchange(layout, c.gradient_bytes * each, c) for each in parameters])
    update = c.update_bytes * parameters / t / (c.memory_gb_s * 1e9) + c.step_ms * 1e-3
    return {
        "forward": forward,
        "backward": backward,
        "send": np.full(p, send),
        "exchange": exchange,
        "update": update,
    }


def _exchange(layout: Layout, nbytes: float, c: Constants) -> float:
    """Averaging the gradients of a stage, of so many bytes over all tensor ranks."""
    t, d = layout.tensor, layout.data
    if t * d <= NODE:
        return _reduce(nbytes / t, d, c.link_us, c.link_gb_s)
    spans = max(t / NODE, 1.0)  # nodes of a tensor group, each of which has its part only
    factor = 1 + c.crossing * log2(t) * log2(t * d / NODE) / 3 if crosses(layout) else 1.0
    return _reduce(factor * nbytes / spans, d, c.between_us, c.node_gb_s)


def _reduce(nbytes: float, workers: int, latency_us: float, gb_s: float) -> float:
    if workers == 1:
        return 0.0
    return latency_us * 1e-6 + 2 * (workers - 1) / workers * nbytes / (gb_s * 1e9)


def _either(device: float, host: float) -> float:
    """The longer of two, smoothly: the host hides behind the device or the reverse."""
    longest = max(device, host)
    return float(longest * ((device / longest) ** _SMOOTH + (host / longest) ** _SMOOTH) ** (1 / _SMOOTH))


def graph(layout: Layout, constants: Constants) -> TaskGraph:
    """The iteration as a graph, one lane per stage, whose replay lasts `iteration_s`."""
    return one_forward_one_backward(*_whole(stage_times(layout, constants)), micro_batches=layout.micro_batches)


def length_s(times: Mapping[str, Float64], micro_batches: int) -> float:
    """Seconds of an iteration of these stage times: what the replay of its graph gives, without building it."""
    from reproductions.vtrain.pipeline import pipeline_ends

    forward, backward, send, exchange, update = _whole(times)
    return float((pipeline_ends(forward, backward, send, micro_batches) + exchange + update).max()) / 1e9


def _whole(times: Mapping[str, Float64]) -> Sequence[Int64]:
    """Nanoseconds, in the order of `one_forward_one_backward`."""
    keys = ("forward", "backward", "send", "exchange", "update")
    return [np.rint(times[key] * 1e9).astype(np.int64) for key in keys]
