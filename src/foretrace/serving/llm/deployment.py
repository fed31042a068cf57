"""`step_times`: the `StepTimes` of a model on devices."""

from __future__ import annotations

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.hardware.devices import named
from foretrace.model.decoder_config import decoder_config
from foretrace.serving.llm.step_times import StepTimes

_REACHED, _RANGE = 0.6, 1.5  # of peaks; nothing here is measured


def step_times(model: str, device: str, *, tp: int = 1, pp: int = 1) -> StepTimes:
    """A roofline of peaks, 16-bit weights and caches. Raises ForetraceError where the model cannot be divided so."""
    one, on = decoder_config(model), named(device)
    if one.heads % tp:
        raise ForetraceError(f"`tp=` must divide the {one.heads} heads of {one.name}, got {tp}.")
    rate, flops = _REACHED * on.memory_gb_s * 1e9, _REACHED * on.bf16_tflops * 1e12
    table, width = 2.0 * one.words * one.hidden / tp, one.hidden // one.heads
    weights = 2.0 * one.parameters / tp / pp
    cache = 4.0 * one.layers * max(one.kv_heads / tp, 1) * width / pp
    tokens, contexts = np.unique(np.geomspace(1, 32768, 31).round()), np.unique(np.geomspace(1, 131072, 18).round())
    pair = 4.0 * one.layers * one.hidden / tp / pp
    reduce_s = 2 * one.layers / pp * (10e-6 + 4 * one.hidden * tokens / (on.scaleup_gb_s / 2 * 1e9)) if tp > 1 else 0.0
    before = np.concatenate([[0.0], contexts])
    return StepTimes(
        model=one.name, device=on.short, devices=tp * pp, stages=pp, tokens=tokens, sequences=tokens, chunk=tokens,
        context=before, batch=tokens, mean_context=contexts,
        linear_s=np.maximum((weights - table) / rate, (weights - table) * tokens / flops) + reduce_s,
        output_s=np.maximum(table / rate, table * tokens / flops),
        prefill_s=pair * tokens[:, None] * (before + tokens[:, None] / 2) / flops,
        decode_s=cache * tokens[:, None] * contexts / rate, host_s=1e-3, host_per_sequence_s=1e-5,
        low=1 / _RANGE, high=_RANGE, memory_bytes=on.memory_gb * 1e9, weight_bytes=weights, kv_bytes_per_token=cache,
        activation_bytes_per_token=2.0 * (4 * one.hidden + 2 * one.inner / tp), buffer_bytes=2e9,
        flops_per_token=2.0 * one.parameters, flops_per_pair=4.0 * one.layers * one.hidden,
        peak_flops=on.bf16_tflops * 1e12 * tp * pp, transfer_bytes_per_s=on.network_gb_s * 1e9,
        whys=("roofline of peak rates",),
    )  # fmt: skip
