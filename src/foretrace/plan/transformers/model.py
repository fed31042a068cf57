"""`Parallelism` and `DeviceRates`: the time and the memory of one way to train a transformer, part by part.

`Software` is a set of constants, fitted on iterations that others measured with one generation of training software
(`benchmarks/transformer_steps.py` fits and stores them), with how far predictions were off on rows that were left out.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from functools import cache, lru_cache
from importlib.resources import files
from math import log

import msgspec
import numpy as np

from foretrace.arrays import Float64, Int64
from foretrace.cost.network.nccl import nccl_network
from foretrace.cost.network.network import CollectiveKind
from foretrace.errors import ForetraceError
from foretrace.hardware.accelerators import Accelerator, AcceleratorDevice
from foretrace.hardware.devices import Device, named
from foretrace.plan.transformers import kernels
from foretrace.plan.transformers.shape import TransformerSizes

RECOMPUTATIONS = ("none", "selective", "full")
KINDS = ("weights", "gradients", "optimizer", "activations", "in work")
ENDS = {"sequence": (0, 1), "recompute": (0, 2), "zero": (0, 3), "overlap": (0, 1), "versions": (1, 2)}  # others: 1 up
_ROUNDED = 1e-5  # tasks are whole nanoseconds
NODE = 8  # devices of a node, where the catalog does not say


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """One way to split a model, its batch and its memory. Degrees multiply to the number of devices."""

    tensor: int = 1
    sequence: int = 0  # 1: norms and dropout are split over the tensor group, too
    context: int = 1
    pipeline: int = 1
    virtual: int = 1  # stages of the interleaved schedule that each device has
    data: int = 1
    expert: int = 1  # devices of the data group that share the experts of a layer out; divides `data`
    micro: int = 1  # samples of a micro-batch
    recompute: int = 0  # position in RECOMPUTATIONS
    zero: int = 0  # ZeRO stage over data and context
    overlap: int = 0  # 1: gradients and messages between stages hide behind computing
    versions: int = 1  # of the weights; 2: PipeDream-2BW, without a flush

    @property
    def devices(self) -> int:
        return self.tensor * self.context * self.pipeline * self.data

    def __str__(self) -> str:
        said = [f"tensor {self.tensor}"] + (["sequence parallel"] if self.sequence else [])
        said += [f"context {self.context}"] if self.context > 1 else []
        said += [f"pipeline {self.pipeline}"] + ([f"virtual stages {self.virtual}"] if self.virtual > 1 else [])
        said += [f"data {self.data}"] + ([f"expert {self.expert}"] if self.expert > 1 else [])
        again = RECOMPUTATIONS[self.recompute] if self.recompute else "no"
        said += [f"micro-batch {self.micro}", f"{again} recomputation"]
        said += [f"ZeRO {self.zero}"] if self.zero else []
        said += ["overlap"] if self.overlap else []
        return ", ".join(said + (["two versions of the weights"] if self.versions > 1 else []))


@dataclass(frozen=True, kw_only=True)
class Software:
    """Constants fitted on the iterations of one generation of training software.

    `low` and `high` are ends of log(measured / predicted) on rows that were left out of fits, with a tenth beyond each;
    `other_low` and `other_high` are those on devices of which no row was fitted.
    """

    name: str
    what: str
    flash: bool  # attention in one kernel, which writes no scores
    constants: dict[str, float]
    devices: tuple[str, ...]  # that it was fitted on
    low: float
    high: float
    other_low: float
    other_high: float
    rows: int  # that the constants were fitted on

    def range_on(self, device: str, *, scored: bool = True) -> tuple[float, float]:
        """Return logarithms of the ends of the 80 % range over the prediction; twice as wide if not `scored`."""
        low, high = (self.low, self.high) if device in self.devices else (self.other_low, self.other_high)
        return (low, high) if scored else (2 * low, 2 * high)


@cache
def softwares() -> dict[str, Software]:
    """Return all stored fits by name."""
    text = files("foretrace.plan.transformers").joinpath("software.json").read_bytes()
    return {each.name: each for each in msgspec.json.decode(text, type=list[Software])}


# On designs nothing is fitted: links at their rate, no latency, nothing hides behind computing, gradients in 2 bytes,
# attention operator by operator. Ends of the range: of `codesign`'s winners with ports as PHAZE's mapper has them.
_NOTHING = ("network_us", "crossing", "host_us", "step_ms", "hidden_share", "hidden_data", "product_us", "grain")
_WHOLE = ("matrix", "bandwidth", "shared", "split", "scores", "attention", "link_share", "link_times", "network_share",
          "host_back", "host_split")  # fmt: skip
DESIGNED = Software(
    name="designed", what="systolic arrays by closed forms, nothing fitted or measured", flash=False,
    constants={**dict.fromkeys(_NOTHING, 0.0), **dict.fromkeys(_WHOLE, 1.0), "update_bytes": 30.0,
               "gradient_bytes": 2.0},
    devices=(), rows=0, low=log(0.8), high=log(10.0), other_low=log(0.8), other_high=log(10.0),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DeviceRates:
    """Rates of a device and of its links: FLOP/s and B/s, latency in s, capacity in B."""

    device: str
    peak: float
    memory: float
    node: int
    link: float  # one direction, of a ring inside the node
    link_s: float
    network: float  # one direction, per device
    capacity: float
    design: tuple[float, ...] = (0.0,) * 7  # as `Accelerator.array` gives it; zeros for a device of the catalog

    def array(self) -> Float64:
        """Return it as `kernels` takes it."""
        *rates, design = astuple(self)[1:]
        return np.array([*rates, *design], dtype=np.float64)


@lru_cache(maxsize=64)
def machine(name: str, *, network_gb_s: float = 0.0, peak_tflops: float = 0.0) -> DeviceRates:
    """Return a device of the catalog with its links: NCCL's own figures where it has some, otherwise the data sheet's.

    The memory that counts is the data sheet's GB; what a device has beyond (GiB) is left to the context, to NCCL and to
    fragmentation. Raises ForetraceError for an unknown device and for one without 16-bit matrix units.
    """
    found = named(name)
    peak = peak_tflops or found.bf16_tflops or found.fp16_tflops
    if not peak:
        raise ForetraceError(
            f"device {found.short} has no known rate of 16-bit products, which a plan needs; choose a device that has "
            "(foretrace devices lists them)."
        )
    node = found.node_devices or NODE
    link, link_s = _link(found, node)
    if isinstance(found, AcceleratorDevice):
        return on_design(replace(found.design, link_gb_s=network_gb_s or found.design.link_gb_s))
    return DeviceRates(
        device=found.short, peak=peak * 1e12, memory=found.memory_gb_s * 1e9, node=node, link=link, link_s=link_s,
        network=(network_gb_s or found.network_gb_s or 12.5) * 1e9, capacity=found.memory_gb * 1e9,
    )  # fmt: skip


def on_design(design: Accelerator) -> DeviceRates:
    """Return a design whose devices are all alike far from each other."""
    return DeviceRates(
        device=str(design), peak=design.peak_flops, memory=design.hbm_gb_s * 1e9, node=1, link=design.link_gb_s * 1e9,
        link_s=0.0, network=design.link_gb_s * 1e9, capacity=design.hbm_gb * 1e9, design=design.array(),
    )  # fmt: skip


def _link(device: Device, node: int) -> tuple[float, float]:
    try:
        net = nccl_network(device.short, node, {})
    except ForetraceError:  # not NVIDIA's, or older than NCCL's constants
        return (device.scaleup_gb_s / 2 or device.pcie_gb_s) * 1e9, 15e-6
    small, large = (net.cost(CollectiveKind.REDUCE_SCATTER, nbytes).seconds for nbytes in (1024.0, 2.0**30))
    return (node - 1) / node * 2.0**30 / (large - small), small


def vector(model: TransformerSizes, software: Software) -> Float64:
    """Return a transformer as `kernels` takes it."""
    return np.array(
        [model.layers, model.hidden, model.heads, model.kv_heads, model.inner, model.words, model.length, model.head,
         model.gated, model.experts, model.active, model.tied, software.flash, model.causal], dtype=np.float64,
    )  # fmt: skip


def constant_vector(software: Software) -> Float64:
    """Return constants as `kernels` takes them: in the order of the fits that are stored."""
    return np.array([software.constants[each] for each in softwares()["megatron"].constants], dtype=np.float64)


def fields_of(configuration: Parallelism) -> Int64:
    """Return a configuration as `kernels` takes it."""
    return np.array([getattr(configuration, name) for name in kernels.FIELDS], dtype=np.int64)


def configuration_of(row: Int64) -> Parallelism:
    """Return a configuration from a row of `kernels`."""
    return Parallelism(**dict(zip(kernels.FIELDS, row.tolist(), strict=True)))


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """One configuration's step: seconds with their 80 % range, seconds by part, memory by stage."""

    configuration: Parallelism
    seconds: float
    interval_s: tuple[float, float]
    parts: dict[str, float]
    memory: tuple[dict[str, float], ...]  # bytes of a device of each stage, by KINDS

    def range_beside(self, simulated_s: float | None) -> tuple[float, float]:
        """Return the range with its end as much later as the simulated passes end after the closed form, if they do.

        What the closed form takes to be hidden, passes may wait for; nothing measured says which of them is right.
        """
        low, high = self.interval_s
        longer = (simulated_s or 0.0) / self.seconds
        return low, high * (longer if longer > 1 + _ROUNDED else 1.0)

    @property
    def peak_bytes(self) -> float:
        return max(sum(each.values()) for each in self.memory)
