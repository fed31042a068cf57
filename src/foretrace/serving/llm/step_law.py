"""The time of a step from sizes and a device: bytes and FLOPs over reached rates, latencies, and work of the host.

The rates that are reached and the latencies are the numbers of `StepLaw`. They are fitted to measured servers
(`reproductions/aiconfigurator`); `laws.csv` holds them with the range that they left on deployments not fitted.

A part of a layer that moves B bytes and computes F FLOPs takes sqrt((B / bandwidth)² + (F / peak)²). Of E experts with
k active each, t tokens meet E (1 − (1 − k/E)^t), if they choose uniformly; those weights are read, and each product of
an expert that is met computes some rows more, since kernels work on tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

import numpy as np

from foretrace import shipped
from foretrace.arrays import Float64
from foretrace.errors import ForetraceError
from foretrace.hardware.devices import Device
from foretrace.names import question, resolve
from foretrace.serving.llm.served_model import ServedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberFormat:
    """Bytes of a weight or cached number by what it belongs to, and how products of experts and others compute."""

    name: str
    experts: float
    dense: float
    attention: float
    cache: float
    expert_peak: str
    dense_peak: str


# Block scales are counted: 1/16 byte for each number of nvfp4, 1/32 of int4 in groups of 32 with 16-bit scales.
FORMATS = {
    each.name: each
    for each in (
        NumberFormat(name="bf16", experts=2, dense=2, attention=2, cache=2, expert_peak="bf16", dense_peak="bf16"),
        NumberFormat(name="fp8", experts=1, dense=1, attention=1, cache=1, expert_peak="fp8", dense_peak="fp8"),
        NumberFormat(name="fp4", experts=0.5625, dense=0.5625, attention=2, cache=1, expert_peak="fp4",
                     dense_peak="bf16"),
        NumberFormat(name="int4", experts=0.5625, dense=2, attention=2, cache=2, expert_peak="bf16",
                     dense_peak="bf16"),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How one engine divides a model: attention over `tp` devices in `dp` groups, experts over `ep` of all devices."""

    tp: int = 1
    dp: int = 1
    ep: int = 1
    pp: int = 1

    @property
    def stage_devices(self) -> int:
        """Devices of a pipeline stage."""
        return self.tp * self.dp

    @property
    def devices(self) -> int:
        """Devices of the engine."""
        return self.stage_devices * self.pp


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLaw:
    """Shares of peak rates that are reached, latencies in seconds, and the 80 % range of a step as factors."""

    engine: str = ""
    weight_rate: float = 0.75  # of memory bandwidth, reading weights of attention and dense parts
    expert_rate: float = 0.6
    cache_rate: float = 0.6
    dense_flops: float = 0.6  # of the peak
    expert_flops: float = 0.3
    expert_flops_fp4: float = 0.15
    tile_rows: float = 16.0  # that are computed for nothing, of each expert that is met
    attention_flops: float = 0.5
    link_rate: float = 0.6  # of one direction of the links between devices
    collective_s: float = 8e-6  # of one collective, for each doubling of the devices
    kernel_s: float = 2e-6  # of one kernel, whatever it computes
    host_s: float = 1e-3
    host_per_sequence_s: float = 1e-5
    request_s: float = 50e-3  # of each request beside steps: on its way, read, and its first token sent
    launch_s: float = 2e-5  # the same for each kernel of the model: a request's first pass is in no graph
    low: float = 0.6
    high: float = 1.6
    calibrated_low: float = 0.7  # after one measured run of the same server
    calibrated_high: float = 1.4


LAWS = {each.engine: each for each in shipped.rows("foretrace.serving.llm", "laws.csv", StepLaw)}


def law_of(engine: str) -> StepLaw:
    """The fitted law of an engine. Raises ForetraceError."""
    found = resolve(engine, LAWS, {"tensorrt-llm": "trtllm"})
    if not found:
        raise ForetraceError(f"`engine=` must be one of {', '.join(LAWS)}, got {engine!r}; {question(engine, LAWS)}")
    return LAWS[found]


_ACROSS = 2.5  # times the latency of a collective, where machines take part; of NCCL's constants for both


def number_format(name: str) -> NumberFormat:
    """The format of this name. Raises ForetraceError."""
    found = resolve(name, FORMATS, {"nvfp4": "fp4", "fp16": "bf16", "fp8_block": "fp8", "int4_wo": "int4"})
    if not found:
        raise ForetraceError(f"`dtype=` must be one of {', '.join(FORMATS)}, got {name!r}; {question(name, FORMATS)}")
    return FORMATS[found]


def peak_flops(device: Device, kind: str) -> float:
    """Dense peak in FLOP/s. Formats that the device has no units for are computed in the next larger one."""
    fp8 = device.fp8_tflops or device.bf16_tflops or device.fp16_tflops
    known = {
        "bf16": device.bf16_tflops or device.fp16_tflops,
        "fp8": fp8,
        "fp4": 2 * fp8 if device.arch.startswith("Blackwell") else fp8,  # twice, by the vendor's documents
    }
    if not known[kind]:
        raise ForetraceError(f"the catalog has no {kind} rate of {device.short}; choose another device.")
    return known[kind] * 1e12


def kernels(model: ServedModel) -> int:
    """Kernels of all layers, as open engines launch them.

    Attention: norm, projection, norms of queries and keys, positions and cache, attention, projection, collective. A
    latent: three more projections. An index over keys: nine more (two projections, a norm, positions, two conversions,
    weights, scores, selection). Experts: norm, router, choice, order, two products, activation, sum, collective;
    shared ones: three.
    """
    attention = 7 + (3 if model.latent else 0) + (9 if model.index else 0)
    experts = 9 + (3 if model.shared_inner else 0)
    return model.layers * attention + model.dense * 5 + model.moe_layers * experts


def request_seconds(model: ServedModel, law: StepLaw) -> float:
    """Seconds that a request takes beside steps."""
    return law.request_s + law.launch_s * kernels(model)


def _both(nbytes: Float64, rate: float, flops: Float64, peak: float) -> Float64:
    found: Float64 = np.hypot(nbytes / rate, flops / peak)
    return found


def linear_seconds(
    model: ServedModel, device: Device, layout: Layout, kept: NumberFormat, law: StepLaw, tokens: Float64
) -> Float64:
    """Seconds of all products but the output's, of norms and collectives, of one stage for `tokens` of the engine."""
    bandwidth = device.memory_gb_s * 1e9
    dense_peak, expert_peak = (peak_flops(device, kind) for kind in (kept.dense_peak, kept.expert_peak))
    everyone = layout.stage_devices
    attention = _both(
        np.full_like(tokens, model.attention_parameters * kept.attention / layout.tp),
        bandwidth * law.weight_rate,
        2 * model.attention_parameters * tokens / everyone,
        dense_peak * law.dense_flops,
    )

    def fed(weights: int) -> Float64:
        peak = (expert_peak if kept.name == "fp4" else dense_peak) * law.dense_flops
        return _both(np.full_like(tokens, weights * kept.dense / everyone), bandwidth * law.weight_rate,
                     2 * weights * tokens / everyone, peak)  # fmt: skip

    total = model.layers * attention + kernels(model) * law.kernel_s
    if model.dense:
        total = total + model.dense * fed(model.dense_parameters)
    if model.experts:
        met = model.experts * (1 - (1 - model.active / model.experts) ** tokens)
        experts = _both(
            met * model.expert_parameters * kept.experts / everyone,
            bandwidth * law.expert_rate,
            2 * model.expert_parameters * (model.active * tokens + met * law.tile_rows) / everyone,
            expert_peak * (law.expert_flops_fp4 if kept.name == "fp4" else law.expert_flops),
        )
        shared = fed(model.shared_parameters) if model.shared_inner else 0.0
        total = total + model.moe_layers * (experts + shared)
    if everyone > 1:
        latency_s, per_byte = collective(device, layout, law)
        total = total + 2 * model.layers * (latency_s + per_byte * 2 * model.hidden * tokens / layout.dp)
    found: Float64 = total / layout.pp
    return found


def collective(device: Device, layout: Layout, law: StepLaw) -> tuple[float, float]:
    """Latency of an all-reduce among the devices of a stage, and seconds for each byte; across machines if need be."""
    everyone = layout.stage_devices
    within = everyone <= (device.node_devices or everyone)
    rate = (device.scaleup_gb_s / 2 if within else device.network_gb_s) * 1e9 * law.link_rate
    latency = law.collective_s * log2(everyone) * (1.0 if within else _ACROSS)
    return latency, 2 * (everyone - 1) / everyone / rate


def output_seconds(model: ServedModel, device: Device, layout: Layout, law: StepLaw, sequences: Float64) -> Float64:
    """Seconds of the product with the vocabulary, in 16 bits."""
    weights = model.words * model.hidden / layout.tp
    return _both(np.full_like(sequences, 2.0 * weights), device.memory_gb_s * 1e9 * law.weight_rate,
                 2 * weights * sequences / layout.dp, peak_flops(device, "bf16") * law.dense_flops)  # fmt: skip


def cache_bytes(model: ServedModel, layout: Layout, kept: NumberFormat) -> float:
    """Bytes of keys and values of one token on one device of a stage."""
    share = 1 if model.latent else min(layout.tp, model.kv_heads)
    return model.kv_numbers * kept.cache / share * model.attending / layout.pp


def decode_per_token(model: ServedModel, device: Device, layout: Layout, kept: NumberFormat, law: StepLaw) -> float:
    """Seconds of attention for each token that a decoding sequence of the engine attends to."""
    nbytes = cache_bytes(model, layout, kept) / layout.dp
    width = 2 * model.latent + model.rope if model.latent else 2 * model.head
    flops = 2 * model.heads / layout.tp * width * model.attending / layout.pp / layout.dp
    rate, peak = device.memory_gb_s * 1e9 * law.cache_rate, peak_flops(device, "bf16") * law.attention_flops
    found: float = np.hypot(nbytes / rate, flops / peak)
    return found


def prefill_per_pair(model: ServedModel, device: Device, layout: Layout, law: StepLaw) -> float:
    """Seconds of attention for each token of a prompt and each token that it attends to."""
    width = model.head + (model.value or model.head)
    flops = 2 * model.heads / layout.tp * width * model.attending / layout.pp / layout.dp
    return flops / (peak_flops(device, "bf16") * law.attention_flops)
