"""A GPT-like model trained with tensor, pipeline and data parallelism on A100-class nodes: one iteration as a graph.

Times of a stage come from a few measured constants (`Constants`); the schedule, its bubbles and who waits for whom
come from simulating the 1F1B graph. Setting: Megatron-LM as of Narayanan et al. (SC 2021), mixed precision, activation
recomputation in every layer, gradients averaged after the last micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from dataclasses import fields as fields_of
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from foretrace.errors import ForetraceError
from foretrace.plan.pipeline import one_forward_one_backward
from foretrace.simulate.replay import replay

Float64 = npt.NDArray[np.float64]

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
    """What the iteration time depends on beside the layout; fitted on measured iterations."""

    tflops: float = 200.0  # matrix products of unlimited size
    product_us: float = 8.0  # a product beside its arithmetic
    memory_gb_s: float = 1300.0
    shared_passes: float = 15.0  # times that activations (b s h) cross memory per layer, whatever the tensor split
    split_passes: float = 25.0  # the same for what the tensor split divides
    score_passes: float = 6.0  # the same for attention scores (b a s s)
    host_us: float = 1500.0  # launching a layer forward
    host_back: float = 1.5  # launching a layer backward, relative
    host_split: float = 1.2  # launching with a tensor split, relative
    link_us: float = 30.0  # a collective inside a node beside its bytes
    link_gb_s: float = 200.0  # bus bandwidth inside a node
    between_us: float = 60.0
    between_gb_s: float = 10.0  # of one device between nodes
    back: float = 2.0  # backward over forward arithmetic
    update_bytes: float = 30.0  # memory traffic of the update per parameter
    gradient_bytes: float = 4.0  # sent per parameter
    step_ms: float = 5.0  # of an iteration, whatever its size


@cache
def shipped() -> Constants:
    """The constants of the package, fitted by `benchmarks/vtrain.py` on half of the published rows of vTrain."""
    text = files("foretrace.plan").joinpath("megatron.json").read_bytes()
    return Constants(**msgspec.json.decode(text, type=dict[str, float]))


def as_json(constants: Constants) -> dict[str, Any]:
    """Constants as they are stored."""
    return asdict(constants)


def iteration_s(layout: Layout, constants: Constants) -> float:
    """Seconds of one iteration."""
    return _simulated(layout, stage_times(layout, constants))


def stage_times(layout: Layout, c: Constants) -> Mapping[str, Float64]:
    """Seconds per stage (p): forward and backward of a micro-batch, send, exchange and update."""
    b, s, h, t, p = layout.micro_batch, layout.sequence, layout.hidden, layout.tensor, layout.pipeline
    tokens = b * s
    layers = layout.layers // p
    passes = (c.shared_passes * tokens * h + c.split_passes * tokens * h / t) * 2
    passes += c.score_passes * b * layout.heads * s * s / t * 2
    arithmetic = (24 * tokens * h * h + 4 * tokens * s * h) / t / (c.tflops * 1e12)
    memory, products = passes / (c.memory_gb_s * 1e9), 6 * c.product_us * 1e-6
    reduce = 2 * _reduce(2 * tokens * h, t, c, inside=t <= NODE)
    host = c.host_us * 1e-6 * (c.host_split if t > 1 else 1.0)
    forward_layer = _either(arithmetic + memory + products + reduce, host)
    backward_layer = (
        _either(c.back * arithmetic + c.back * memory + 2 * products + reduce, host * c.host_back) + forward_layer
    )  # which is run once more: activation recomputation
    forward, backward = np.full(p, layers * forward_layer), np.full(p, layers * backward_layer)
    logits = 2 * tokens * h * VOCABULARY / t / (c.tflops * 1e12) + 8 * tokens * VOCABULARY / t / (c.memory_gb_s * 1e9)
    forward[-1] += logits
    backward[-1] += 2 * logits
    parameters = np.full(p, layers * 12 * h * h / t)
    parameters[0] += VOCABULARY * h / t
    if p > 1:
        parameters[-1] += VOCABULARY * h / t
    near = layout.devices <= NODE
    send = (c.link_us if near else c.between_us) * 1e-6 + 2 * tokens * h / (
        (c.link_gb_s if near else c.between_gb_s) * 1e9
    )
    exchange = np.array(
        [_reduce(c.gradient_bytes * each, layout.data, c, inside=t * layout.data <= NODE) for each in parameters]
    )
    update = c.update_bytes * parameters / (c.memory_gb_s * 1e9) + c.step_ms * 1e-3
    return {
        "forward": forward,
        "backward": backward,
        "send": np.full(p, send),
        "exchange": exchange,
        "update": update,
    }


def _reduce(nbytes: float, workers: int, c: Constants, *, inside: bool) -> float:
    if workers == 1:
        return 0.0
    latency, rate = (c.link_us, c.link_gb_s) if inside else (c.between_us, c.between_gb_s)
    return latency * 1e-6 + 2 * (workers - 1) / workers * nbytes / (rate * 1e9)


def _either(device: float, host: float) -> float:
    """The longer of two, smoothly: the host hides behind the device or the reverse."""
    longest = max(device, host)
    return float(longest * ((device / longest) ** _SMOOTH + (host / longest) ** _SMOOTH) ** (1 / _SMOOTH))


def _simulated(layout: Layout, times: Mapping[str, Float64]) -> float:
    graph = one_forward_one_backward(
        *(np.rint(times[key] * 1e9).astype(np.int64) for key in ("forward", "backward", "send", "exchange", "update")),
        micro_batches=layout.micro_batches,
    )
    _, end = replay(graph)
    return float(end[graph.marks[-1]] - end[graph.marks[0]]) / 1e9
