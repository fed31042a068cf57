"""`step_times`: the `StepTimes` of a model on devices: measured operators where there are some, else the law of a step.

The host's work is a term of its own: nothing that was measured on a device holds it. Ranges: `StepLaw.low` and `.high`
are what the law missed on deployments that it was not fitted to; they widen where a device has other links than those
of the fit, or operators come from another engine or shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path

import numpy as np

from foretrace.arrays import Float64
from foretrace.errors import ForetraceError
from foretrace.hardware.accelerators import AcceleratorDevice
from foretrace.hardware.devices import Device, named
from foretrace.serving.llm import step_law
from foretrace.serving.llm.calibration import read_calibration
from foretrace.serving.llm.operator_tables import OperatorTables, TimeGrid, nearest, read_tables
from foretrace.serving.llm.served_model import ServedModel, served_model
from foretrace.serving.llm.step_law import Layout, NumberFormat, StepLaw, law_of, number_format
from foretrace.serving.llm.step_times import StepTimes

_TOKENS = np.unique(np.round(np.geomspace(1, 32768, 31)))
_SEQUENCES = np.unique(np.round(np.geomspace(1, 4096, 19)))
_CONTEXTS = np.unique(np.round(np.geomspace(1, 131072, 18)))
_BUFFERS = 1.5 * 2**30  # process, graphs and library of collectives; of systems/h100_sxm.yaml of aiconfigurator, less
# what it holds in reserve
_DESIGNED = 5.0  # more range where the device does not exist
_OTHER_LINKS = 1.3  # more range where devices are joined by PCIe: the fit is of NVLink
_OTHER_ENGINE = 1.2  # where operators were measured with another engine
_OTHER_SHAPE = 1.15  # where attention is scaled from other numbers of heads
_SEND_S = 10e-6


def checked(model: ServedModel, layout: Layout) -> None:
    """Raise ForetraceError where a model cannot be divided so."""
    for name, value in (("tp", layout.tp), ("dp", layout.dp), ("ep", layout.ep), ("pp", layout.pp)):
        if value < 1:
            raise ForetraceError(f"`{name}=` must be 1 or more, got {value}.")
    if model.heads % layout.tp:
        raise ForetraceError(f"`tp=` must divide the {model.heads} heads of {model.name}, got {layout.tp}.")
    if layout.pp > model.layers:
        raise ForetraceError(f"`pp=` must be at most the {model.layers} layers of {model.name}, got {layout.pp}.")
    if layout.ep > 1 and (not model.experts or layout.stage_devices % layout.ep or model.experts % layout.ep):
        many = f"the {model.experts} experts and {layout.stage_devices} devices" if model.experts else "experts"
        raise ForetraceError(f"`ep=` must divide {many} of {model.name}, got {layout.ep}.")


def step_times(
    model: str | ServedModel, device: str | Device, *, tp: int = 1, dp: int = 1, pp: int = 1, ep: int = 1,
    dtype: str = "bf16", engine: str = "vllm", tables: Path | OperatorTables | None = None, law: StepLaw | None = None,
    calibration: Path | None = None,
) -> StepTimes:  # fmt: skip
    """Step times and memory of one engine.

    Args:
        model: a name, a `config.json`, or sizes.
        device: a name of the catalog.
        tp: devices that share each layer.
        dp: groups of them that attend to different sequences.
        pp: stages.
        ep: devices among which whole experts are divided, of tp x dp.
        dtype: of FORMATS.
        engine: whose law, of `step_law.LAWS`.
        tables: a folder of measured operators, or what was read from one.
        law: instead of the engine's.
        calibration: a file of `foretrace llm calibrate`, for this very server.

    Raises:
        ForetraceError: something is unknown, or the model cannot be divided so.

    """
    model = served_model(model) if isinstance(model, str) else model
    device = named(device) if isinstance(device, str) else device
    layout, kept = Layout(tp=tp, dp=dp, pp=pp, ep=ep), number_format(dtype)
    checked(model, layout)
    law = law or law_of(engine)
    if isinstance(tables, Path):
        tables = read_tables(tables, device, engine)
    linked = device if device.scaleup_gb_s else replace(device, scaleup_gb_s=2 * device.pcie_gb_s)
    wide = _OTHER_LINKS if layout.stage_devices > 1 and not device.scaleup_gb_s else 1.0
    whys = [f"{engine}: rates and latencies fitted to measured servers"]
    if isinstance(device, AcceleratorDevice):
        wide *= _DESIGNED
        whys.append("the device is designed, not built: servers with GPUs say little of it, so the range is wide")
    linear = step_law.linear_seconds(model, linked, layout, kept, law, _TOKENS)
    output = step_law.output_seconds(model, device, layout, law, _SEQUENCES)
    pairs = step_law.prefill_per_pair(model, device, layout, law)
    contexts = np.concatenate([[0.0], _CONTEXTS])
    prefill = pairs * _TOKENS[:, None] * (contexts + 0.5 * _TOKENS[:, None])
    decode = np.outer(_SEQUENCES, _CONTEXTS) * step_law.decode_per_token(model, device, layout, kept, law)
    if tables is not None:
        read = _Measured(model, linked, layout, kept, law, tables)
        linear, output = read.linear(linear), read.output(output)
        prefill, decode = read.prefill(contexts, prefill), read.decode(decode)
        wide *= _OTHER_SHAPE if read.scaled else 1.0
        wide *= _OTHER_ENGINE if any(not each.startswith(engine) for each in read.used.values()) else 1.0
        whys += [f"{name.replace('_', '-')}: measured with {source}" for name, source in read.used.items()]
        whys += dict.fromkeys(read.left)
    layers = ceil(model.layers / pp) / model.layers * pp  # of the fullest stage, over the mean
    found = StepTimes(
        model=model.name, device=device.short, devices=layout.devices, stages=pp, tokens=_TOKENS,
        linear_s=layers * linear, sequences=_SEQUENCES, output_s=output, chunk=_TOKENS, context=contexts,
        prefill_s=layers * prefill, batch=_SEQUENCES, mean_context=_CONTEXTS, decode_s=layers * decode,
        host_s=law.host_s, host_per_sequence_s=law.host_per_sequence_s / dp,  # each group has a scheduler
        request_s=step_law.request_seconds(model, law),
        low=law.low / wide, high=law.high * wide,
        send_s=_SEND_S if pp > 1 else 0.0,
        send_per_token_s=2 * model.hidden / (linked.scaleup_gb_s / 2 * 1e9 * law.link_rate) if pp > 1 else 0.0,
        **memory(model, device, layout, kept),  # type: ignore[arg-type]  # floats by name
        flops_per_token=2.0 * model.active_parameters,
        flops_per_pair=2.0 * model.heads * (model.head + (model.value or model.head)) * model.attending,
        peak_flops=step_law.peak_flops(device, kept.expert_peak if model.experts else kept.dense_peak) * layout.devices,
        transfer_bytes_per_s=(device.network_gb_s or 12.5) * 1e9, whys=tuple(whys),
    )  # fmt: skip
    return found if calibration is None else read_calibration(calibration).applied(found)


def memory(model: ServedModel, device: Device, layout: Layout, kept: NumberFormat) -> dict[str, float]:
    """Bytes on a device of the fullest stage, as `StepTimes` names them; vendors count memory in 2^30 bytes."""
    everyone = layout.stage_devices
    experts = model.moe_layers * model.experts * model.expert_parameters * kept.experts / everyone
    fed = (model.dense * model.dense_parameters + model.moe_layers * model.shared_parameters) * kept.dense / everyone
    attention = model.layers * model.attention_parameters * kept.attention / layout.tp
    table = 2.0 * model.words * model.hidden / layout.tp
    share = ceil(model.layers / layout.pp) / model.layers
    # Of a token: the residual and its norm, and the widest of what a layer makes of it, in 16 bits.
    wide = max(2 * model.inner / layout.tp, model.active * (2 * model.expert_inner / everyone + model.hidden),
               (model.heads + 2 * model.kv_heads) * model.head / layout.tp)  # fmt: skip
    return {
        "memory_bytes": device.memory_gb * 2.0**30,
        "weight_bytes": share * (experts + fed + attention) + table * (1 if model.tied or layout.pp > 1 else 2),
        "kv_bytes_per_token": step_law.cache_bytes(model, layout, kept) * share * layout.pp / layout.dp,
        "activation_bytes_per_token": 2.0 * (2 * model.hidden + wide) / layout.dp,
        "buffer_bytes": _BUFFERS,
    }


@dataclass
class _Measured:
    """The grids of a deployment from measured operators, each where it was measured; `left` says what was not."""

    model: ServedModel
    device: Device
    layout: Layout
    kept: NumberFormat
    law: StepLaw
    tables: OperatorTables
    left: list[str] = field(default_factory=list)
    used: dict[str, str] = field(default_factory=dict)
    scaled: bool = False

    def linear(self, by_law: Float64) -> Float64:
        model, tp, everyone, tables = self.model, self.layout.tp, self.layout.stage_devices, self.tables
        tokens, own = _TOKENS, np.maximum(_TOKENS / self.layout.dp, 1.0)
        if model.latent or model.mixing or (self.kept.attention < 2 and self.kept.name != "fp8"):
            self.left.append("products by the law: those of this attention were not measured")
            return by_law
        heads, kv = model.heads / tp, max(model.kv_heads / tp, 1)
        qkv = tables.product(own, (heads + 2 * kv) * model.head, model.hidden, self.kept.name)
        out = tables.product(own, model.hidden, heads * model.head, self.kept.name)
        if qkv is None or out is None:
            self.left.append(f"products by the law: none of {self.kept.name} were measured")
            return by_law
        total = model.layers * (qkv + out)
        self.used["gemm"] = tables.sources["gemm"]
        if model.dense:
            wide = (2 if model.gated else 1) * model.inner / everyone
            up = tables.product(tokens, wide, model.hidden, self.kept.name)
            down = tables.product(tokens, model.hidden, model.inner / everyone, self.kept.name)
            assert up is not None and down is not None  # the type was measured
            total = total + model.dense * (up + down)
        if model.experts:
            total = total + model.moe_layers * self._experts()
        # Norms, positions and activations: their bytes at the rate of weights, and a kernel each beside the products.
        nbytes = 2.0 * (8 * model.hidden + 4 * heads * model.head)
        rate = self.device.memory_gb_s * 1e9 * self.law.weight_rate
        products = 2 * model.layers + 2 * model.dense + 2 * model.moe_layers
        small = (step_law.kernels(model) - products - 2 * model.layers) * self.law.kernel_s
        total = total + model.layers * nbytes * own / rate + max(small, 0.0)
        if everyone > 1:
            total = total + 2 * model.layers * self._all_reduce(2.0 * model.hidden * own)
        found: Float64 = total / self.layout.pp
        return found

    def _experts(self) -> Float64:
        model, layout = self.model, self.layout
        key = (model.hidden, model.expert_inner, model.active, model.experts, layout.stage_devices // layout.ep,
               layout.ep)  # fmt: skip
        names = ("fp8_block", "fp8") if self.kept.name == "fp8" else (
            {"bf16": "bfloat16", "int4": "int4_wo"}.get(self.kept.name, self.kept.name),
        )  # fmt: skip
        grid = next((self.tables.experts[name, key] for name in names if (name, key) in self.tables.experts), None)
        if grid is not None:
            self.used["experts"] = self.tables.sources["experts"]
            return grid.at(_TOKENS)
        self.left.append("experts by the law: these sizes were not measured")
        with_, without = (
            step_law.linear_seconds(each, self.device, replace(layout, pp=1), self.kept, self.law, _TOKENS)
            for each in (model, replace(model, experts=0, shared_inner=0))
        )
        return (with_ - without) / model.moe_layers

    def _all_reduce(self, nbytes: Float64) -> Float64:
        everyone = self.layout.stage_devices
        if everyone in self.tables.all_reduce:
            self.used["all_reduce"] = self.tables.sources["all_reduce"]
            return self.tables.all_reduce[everyone].at(nbytes)
        self.left.append(f"collectives of {everyone} devices by the law: they were not measured")
        latency_s, per_byte = step_law.collective(self.device, self.layout, self.law)
        return latency_s + per_byte * nbytes

    def output(self, by_law: Float64) -> Float64:
        rows = np.maximum(_SEQUENCES / self.layout.dp, 1.0)
        found = self.tables.product(rows, self.model.words / self.layout.tp, self.model.hidden, "bf16")
        return by_law if found is None else found

    def _attention(self, what: str) -> tuple[TimeGrid, float] | None:
        grids: Mapping[tuple[int, ...], TimeGrid] = getattr(self.tables, what)
        model, tp = self.model, self.layout.tp
        wanted = (max(model.heads // tp, 1), max(model.kv_heads // tp, 1), model.head)
        found = None if model.latent or self.kept.cache < 2 else nearest(grids, wanted)
        if found is None:
            self.left.append(f"attention ({what}) by the law: it was not measured")
        else:
            self.used[what] = self.tables.sources[what]
            self.scaled |= wanted not in grids
        return found

    def decode(self, by_law: Float64) -> Float64:
        found = self._attention("decode")
        if found is None:
            return by_law
        grid, scale = found
        rows = np.maximum(_SEQUENCES / self.layout.dp, 1.0)
        seconds: Float64 = scale * self.model.attending / self.layout.pp * grid.at(rows[:, None], _CONTEXTS)
        return np.maximum.accumulate(np.where(np.isfinite(seconds), seconds, by_law), axis=1)

    def prefill(self, contexts: Float64, by_law: Float64) -> Float64:
        """A chunk after a context costs what the whole prompt does more than the context alone, and never less than
        the chunk alone.
        """
        found = self._attention("prefill")
        if found is None:
            return by_law
        grid, scale = found
        whole = grid.at(1.0, _TOKENS[:, None] + contexts)
        before = np.where(contexts > 0, grid.at(1.0, np.maximum(contexts, 1.0)), 0.0)
        seconds: Float64 = np.maximum(whole - before, grid.at(1.0, _TOKENS)[:, None])
        return scale * self.model.attending / self.layout.pp * np.maximum.accumulate(seconds, axis=0)
