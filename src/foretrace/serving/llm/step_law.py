"""The time of a step from sizes and a device: bytes and FLOPs over reached rates, latencies, and work of the host.

The rates that are reached and the latencies are the numbers of `StepLaw`. They are fitted to measured servers
(`reproductions/aiconfigurator`); `laws.csv` holds them with the range that they left on deployments not fitted.

A part of a layer that moves B bytes and computes F FLOPs takes sqrt((B / bandwidth)² + (F / peak)²). Of E experts with
k active each, t tokens meet E (1 − (1 − k/E)^t), if they choose uniformly; those weights are read, and each product of
an expert that is met computes some rows more, since kernels work on tiles.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import log2

import numpy as np

from foretrace import shipped
from foretrace.arrays import Float64
from foretrace.errors import ForetraceError
from foretrace.hardware.devices import Device
from foretrace.names import chosen
from foretrace.serving.llm.served_model import ServedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberFormat:
    """Bytes of a weight or cached number by what it belongs to, and how products of experts and others compute.

    Block scales are counted: 1/16 byte for each number of nvfp4, 1/32 of int4 in groups of 32 with 16-bit scales.
    """

    name: str
    experts: float
    dense: float
    attention: float
    cache: float
    expert_peak: str
    dense_peak: str


FORMATS = {each.name: each for each in shipped.rows("foretrace.serving.llm", "formats.csv", NumberFormat)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How one engine divides a model: attention over `tp` devices in `dp` groups, experts over `ep` of all devices."""

    tp: int = 1
    dp: int = 1
    ep: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name, value in asdict(self).items():
            if value < 1:
                raise ForetraceError(f"`{name}=` must be 1 or more, got {value}.")

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
    """Return the fitted law of an engine. Raises ForetraceError."""
    wrong = f"`engine=` must be one of {', '.join(LAWS)}, got {engine!r}"
    return LAWS[chosen(engine, LAWS, wrong, {"tensorrt-llm": "trtllm"})]


_ACROSS = 2.5  # times the latency of a collective, where machines take part; of NCCL's constants for both


def number_format(name: str) -> NumberFormat:
    """Return the format of this name. Raises ForetraceError."""
    wrong = f"`dtype=` must be one of {', '.join(FORMATS)}, got {name!r}"
    aliases = {"nvfp4": "fp4", "fp16": "bf16", "fp8_block": "fp8", "int4_wo": "int4"}
    return FORMATS[chosen(name, FORMATS, wrong, aliases)]


def peak_flops(device: Device, kind: str) -> float:
    """Return dense peak in FLOP/s. Formats that the device has no units for are computed in the next larger one."""
    fp8 = device.fp8_tflops or device.bf16_tflops or device.fp16_tflops
    known = {
        "bf16": device.bf16_tflops or device.fp16_tflops,
        "fp8": fp8,
        "fp4": 2 * fp8 if device.arch.startswith("Blackwell") else fp8,  # twice, by the vendor's documents
    }
    if not known[kind]:
        raise ForetraceError(f"the catalog has no {kind} rate of {device.short}; choose another device.")
    return known[kind] * 1e12


@dataclass(kw_only=True)
class LawTimes:
    """Seconds of the parts of a step on one pipeline stage, by a law, whose numbers may be arrays (..., 1)."""

    model: ServedModel
    device: Device
    layout: Layout
    kept: NumberFormat
    law: StepLaw

    @property
    def kernels(self) -> int:
        """Kernels of all layers, as open engines launch them.

        Attention: norm, projection, norms of queries and keys, positions and cache, attention, projection, collective.
        A latent: three more projections. An index over keys: nine more (two projections, a norm, positions, two
        conversions, weights, scores, selection). Dense: norm, two products, activation, collective. Experts: norm,
        router, choice, order, two products, activation, sum, collective; shared ones: three. In fp8, which has scales
        of blocks, one more before each product, which converts what it multiplies; in fp4 that is part of the norm or
        activation ahead, and int4 is weights alone.
        """
        model, eight = self.model, self.kept.name == "fp8"
        attention = 7 + (3 if model.latent else 0) + (9 if model.index else 0)
        experts = 9 + (3 if model.shared_inner else 0)
        if eight:
            attention, experts = attention + (3 if model.latent else 2), experts + (4 if model.shared_inner else 2)
        return model.layers * attention + model.dense * (7 if eight else 5) + model.moe_layers * experts

    @property
    def request_s(self) -> float:
        """What a request takes beside steps."""
        return self.law.request_s + self.law.launch_s * self.kernels

    def linear(self, tokens: Float64) -> Float64:
        """Return (T,) all products but the output's, norms and collectives, for `tokens` (T,) of the engine."""
        model, law, everyone = self.model, self.law, self.layout.stage_devices
        weights = model.attention_parameters
        total = self.kernels * law.kernel_s + model.layers * self._product(
            weights * self.kept.attention / self.layout.tp, weights * tokens / everyone, self.kept.dense_peak
        )
        if model.dense:
            total = total + model.dense * self._fed(model.dense_parameters, tokens)
        if model.experts:
            total = total + model.moe_layers * self.experts(tokens)
        if everyone > 1:
            nbytes = 2 * model.hidden * tokens / self.layout.dp
            total = total + 2 * model.layers * self.all_reduce(nbytes)
        found: Float64 = total / self.layout.pp
        return found

    def experts(self, tokens: Float64) -> Float64:
        """Return (T,) the experts of one layer, with those that every token meets."""
        model, kept, everyone = self.model, self.kept, self.layout.stage_devices
        met = model.experts * (1 - (1 - model.active / model.experts) ** tokens)
        share = self.law.expert_flops_fp4 if kept.name == "fp4" else self.law.expert_flops
        found = self._product(
            met * model.expert_parameters * kept.experts / everyone,
            model.expert_parameters * (model.active * tokens + met * self.law.tile_rows) / everyone,
            kept.expert_peak, self.law.expert_rate, share,
        )  # fmt: skip
        return found + self._fed(model.shared_parameters, tokens) if model.shared_inner else found

    @property
    def fed_peak(self) -> str:
        """Kind of peak of a dense feed-forward part."""
        return self.kept.expert_peak if self.kept.name == "fp4" else self.kept.dense_peak

    def _fed(self, weights: int, tokens: Float64) -> Float64:
        """Return (T,) a dense feed-forward part with so many weights."""
        everyone = self.layout.stage_devices
        return self._product(weights * self.kept.dense / everyone, weights * tokens / everyone, self.fed_peak)

    def _product(
        self, nbytes: float | Float64, multiplied: Float64, peak: str, rate: float | None = None,
        flops: float | None = None,
    ) -> Float64:  # fmt: skip
        """Return products that read so many bytes and multiply and add so often, at shares of peaks (dense ones)."""
        rate = self.law.weight_rate if rate is None else rate
        flops = self.law.dense_flops if flops is None else flops
        found: Float64 = np.hypot(
            nbytes / (self.device.memory_gb_s * 1e9 * rate), 2 * multiplied / (peak_flops(self.device, peak) * flops)
        )
        return found

    def all_reduce(self, nbytes: Float64) -> Float64:
        """Return one among the devices of a stage; across machines if need be."""
        everyone = self.layout.stage_devices
        within = everyone <= (self.device.node_devices or everyone)
        rate = (self.device.scaleup_gb_s / 2 if within else self.device.network_gb_s) * 1e9 * self.law.link_rate
        latency_s = self.law.collective_s * log2(everyone) * (1.0 if within else _ACROSS)
        return latency_s + 2 * (everyone - 1) / everyone / rate * nbytes

    def output(self, sequences: Float64) -> Float64:
        """Return (N,) the product with the vocabulary, in 16 bits."""
        weights = self.model.words * self.model.hidden / self.layout.tp
        return self._product(2 * weights, weights * sequences / self.layout.dp, "bf16")

    @property
    def cache_bytes(self) -> float:
        """Bytes of keys and values of one token on one device."""
        model = self.model
        share = 1 if model.latent else min(self.layout.tp, model.kv_heads)
        return model.kv_numbers * self.kept.cache / share * model.attending / self.layout.pp

    @property
    def decode_per_token(self) -> float:
        """Of attention, for each token that a decoding sequence of the engine attends to."""
        width = 2 * self.model.latent + self.model.rope if self.model.latent else 2 * self.model.head
        read_s = self.cache_bytes / self.layout.dp / (self.device.memory_gb_s * 1e9 * self.law.cache_rate)
        found: float = np.hypot(read_s, self._attention(width))
        return found

    @property
    def prefill_per_pair(self) -> float:
        """Of attention, for each token of a prompt and each token that it attends to."""
        return self._attention(self.model.head + (self.model.value or self.model.head))

    def _attention(self, width: int) -> float:
        """Return one token attending to another, with keys and values of this width together."""
        layout, peak = self.layout, peak_flops(self.device, "bf16") * self.law.attention_flops
        return 2 * self.model.heads / layout.tp * width * self.model.attending / layout.pp / layout.dp / peak

    def prefill(self, chunk: Float64, context: Float64) -> Float64:
        """Return (C, X) attention of a chunk after a context."""
        return self.prefill_per_pair * chunk[:, None] * (context + 0.5 * chunk[:, None])

    def decode(self, batch: Float64, context: Float64) -> Float64:
        """Return (B, Y) attention of decoding sequences with this mean context."""
        return np.outer(batch, context) * self.decode_per_token
