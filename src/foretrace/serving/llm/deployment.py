"""`step_times`: the `StepTimes` of a model on devices: measured operators where there are some, else the law of a step.

The host's work is a term of its own: nothing that was measured on a device holds it. Ranges: `StepLaw.low` and `.high`
are what the law missed on deployments that it was not fitted to; they widen where a device has other links than those
of the fit, or operators come from another engine or shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.hardware.accelerators import AcceleratorDevice
from foretrace.hardware.devices import Device, named
from foretrace.serving.llm import step_law
from foretrace.serving.llm.calibration import read_calibration
from foretrace.serving.llm.operator_tables import MeasuredTimes, OperatorTables, read_tables
from foretrace.serving.llm.served_model import ServedModel, served_model
from foretrace.serving.llm.step_law import LawTimes, Layout, StepLaw, law_of, number_format
from foretrace.serving.llm.step_times import StepTimes, TimeTable

_TOKENS = np.unique(np.round(np.geomspace(1, 32768, 31)))
_SEQUENCES = np.unique(np.round(np.geomspace(1, 4096, 19)))
_CONTEXTS = np.unique(np.round(np.geomspace(1, 131072, 18)))
_INDEXED = 4  # times the tokens that an index finds: no server with longer contexts was measured
_BUFFERS = 1.5 * 2**30  # process, graphs and library of collectives; of systems/h100_sxm.yaml of aiconfigurator, less
# what it holds in reserve
_DESIGNED = 5.0  # more range where the device does not exist
_OTHER_LINKS = 1.3  # more range where devices are joined by PCIe: the fit is of NVLink
_OTHER_ENGINE = 1.2  # where operators were measured with another engine
_OTHER_SHAPE = 1.15  # where attention is scaled from other numbers of heads
# More range where experts are fewer than those of every model of the fit, so that each computes more rows: Mixtral 8x7B
# in MLPerf Inference v4.1 is 1.8 (H100) and 2.0 times (H200) as quick as the law.
_FEW_EXPERTS, _LEAST_EXPERTS = 2.0, 128
_SEND_S = 10e-6


def checked(model: ServedModel, layout: Layout) -> None:
    """Raise ForetraceError where a model cannot be divided so."""
    everyone, experts = layout.stage_devices, model.experts
    for name, good, wanted in (
        ("tp", model.heads % layout.tp == 0, f"divide the {model.heads} heads of {model.name}"),
        ("tp", model.latent or not model.kv_heads % layout.tp or not layout.tp % model.kv_heads,
         f"divide the {model.kv_heads} heads of keys of {model.name}, or be a multiple of them"),
        ("pp", layout.pp <= model.layers, f"be at most the {model.layers} layers of {model.name}"),
        ("ep", layout.ep == 1 or experts, f"be 1, since {model.name} has no experts to divide"),
        ("ep", everyone % layout.ep == 0 and (experts % layout.ep == 0),
         f"divide the {experts} experts of {model.name} and {everyone} devices"),
    ):  # fmt: skip
        if not good:
            raise ForetraceError(f"`{name}=` must {wanted}, got {getattr(layout, name)}.")


def step_times(
    model: str | ServedModel, device: str | Device, *, tp: int = 1, dp: int = 1, pp: int = 1, ep: int = 1,
    dtype: str = "bf16", engine: str = "vllm", tables: Path | OperatorTables | None = None, law: StepLaw | None = None,
    calibration: Path | None = None,
) -> StepTimes:  # fmt: skip
    """Return step times and memory of one engine.

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
    if kept.name == "int4" and not model.experts:
        raise ForetraceError(
            f"`dtype=int4` keeps the weights of experts in 4 bits and all others in 16, and {model.name} has no "
            "experts; choose bf16, fp8 or fp4."
        )
    law = law or law_of(engine)
    if isinstance(tables, Path):
        tables = read_tables(tables, device, engine)
    linked = device if device.scaleup_gb_s else replace(device, scaleup_gb_s=2 * device.pcie_gb_s)
    wide = _OTHER_LINKS if layout.stage_devices > 1 and not device.scaleup_gb_s else 1.0
    whys = [f"{engine}: rates and latencies fitted to measured servers"]
    if kept.cache < 2:
        whys.append(f"{kept.name}: keys and values are kept in 8 bits, too")
    if isinstance(device, AcceleratorDevice):
        wide *= _DESIGNED
        whys.append("the device is designed, not built: servers with GPUs say little of it, so the range is wide")
    sizes: dict[str, Any] = {"model": model, "device": linked, "layout": layout, "kept": kept, "law": law}
    parts = LawTimes(**sizes) if tables is None else MeasuredTimes(**sizes, tables=tables)
    context = _CONTEXTS
    if model.index:
        context = context[context <= _INDEXED * model.index]
        whys.append(f"attention to all tokens, though {model.name} chooses {model.index:,}: less for long contexts")
    before = np.concatenate([[0.0], context])
    fullest = ceil(model.layers / pp) / model.layers * pp  # layers of that stage over the mean
    grids: dict[str, Any] = {
        "tokens": _TOKENS, "linear_s": fullest * parts.linear(_TOKENS),
        "sequences": _SEQUENCES, "output_s": parts.output(_SEQUENCES),
        "chunk": _TOKENS, "context": before, "prefill_s": fullest * parts.prefill(_TOKENS, before),
        "batch": _SEQUENCES, "mean_context": context, "decode_s": fullest * parts.decode(_SEQUENCES, context),
        "host_s": law.host_s, "host_per_sequence_s": law.host_per_sequence_s / dp,  # each group has a scheduler
    }  # fmt: skip
    if isinstance(parts, MeasuredTimes):
        wide *= _OTHER_SHAPE if parts.scaled else 1.0
        wide *= _OTHER_ENGINE if any(not each.startswith(engine) for each in parts.used.values()) else 1.0
        whys += [f"{name.replace('_', '-')}: measured with {source}" for name, source in parts.used.items()]
        whys += dict.fromkeys(parts.left)
    if 0 < model.experts < _LEAST_EXPERTS and "experts" not in getattr(parts, "used", ()):
        wide *= _FEW_EXPERTS
        whys.append(f"{model.experts} experts: measured servers have {_LEAST_EXPERTS} or more, so the range is wide")
    found = StepTimes(
        table=TimeTable(**grids, low=law.low / wide, high=law.high * wide), model=model.name, device=device.short,
        devices=layout.devices, stages=pp, server=_server(parts, law.engine or engine), request_s=parts.request_s,
        send_s=_SEND_S if pp > 1 else 0.0,
        send_per_token_s=2 * model.hidden / (linked.scaleup_gb_s / 2 * 1e9 * law.link_rate) if pp > 1 else 0.0,
        **memory(parts),  # type: ignore[arg-type]  # floats by name
        flops_per_token=2.0 * model.active_parameters, flops_per_output=2.0 * model.words * model.hidden,
        flops_per_pair=2.0 * model.heads * (model.head + (model.value or model.head)) * model.attending,
        peak_flops=step_law.peak_flops(device, kept.expert_peak if model.experts else parts.fed_peak) * layout.devices,
        transfer_bytes_per_s=(device.network_gb_s or 12.5) * 1e9, whys=tuple(whys),
    )  # fmt: skip
    return found if calibration is None else read_calibration(calibration).applied(found)


def _server(of: LawTimes, engine: str) -> str:
    """Return text such as "llama-3-8b on H100-SXM5-80GB (tp=2, bf16, vllm)"."""
    divided = [f"{name}={value}" for name, value in asdict(of.layout).items() if value > 1]
    measured = ["measured operators"] if isinstance(of, MeasuredTimes) else []
    return f"{of.model.name} on {of.device.short} ({', '.join([*divided, of.kept.name, engine, *measured])})"


def beside(layout: Mapping[str, Any], draft: ServedModel) -> dict[str, Any]:
    """Return the arguments of `step_times` for a draft, which has one device, beside a target with this layout."""
    own = {key: value for key, value in layout.items() if key in ("dtype", "engine")}
    if not draft.experts and number_format(own.get("dtype", "bf16")).name == "int4":
        own["dtype"] = "bf16"  # as all weights but those of experts
    return own


def memory(of: LawTimes) -> dict[str, float]:
    """Return bytes on a device of the fullest stage, as `StepTimes` names them; vendors count memory in 2^30 bytes."""
    model, layout, kept, everyone = of.model, of.layout, of.kept, of.layout.stage_devices
    experts = model.moe_layers * model.experts * model.expert_parameters * kept.experts / everyone
    fed = (model.dense * model.dense_parameters + model.moe_layers * model.shared_parameters) * kept.dense / everyone
    attention = model.layers * model.attention_parameters * kept.attention / layout.tp
    table = 2.0 * model.words * model.hidden / layout.tp
    share = ceil(model.layers / layout.pp) / model.layers
    # Of a token: the residual and its norm, and the widest of what a layer makes of it, in 16 bits.
    wide = max(2 * model.inner / layout.tp, model.active * (2 * model.expert_inner / everyone + model.hidden),
               (model.heads + 2 * model.kv_heads) * model.head / layout.tp)  # fmt: skip
    return {
        "memory_bytes": of.device.memory_gb * 2.0**30,
        "weight_bytes": share * (experts + fed + attention) + table * (1 if model.tied or layout.pp > 1 else 2),
        "kv_bytes_per_token": of.cache_bytes * share * layout.pp / layout.dp,
        "activation_bytes_per_token": 2.0 * (2 * model.hidden + wide) / layout.dp,
        "buffer_bytes": _BUFFERS,
    }
