"""Engines that decode with a draft: step times of rounds in which it proposes k tokens and the target verifies them.

A round of n decoding sequences takes what `speculative/rounds.py` says, here as grids over n and context, so that each
step of a simulated engine costs what its own batch costs: `linear` and `output` of a step count the proposed tokens;
`decode(n, y)` holds attention of k + 1 tokens of each sequence, k passes of the draft, and what a draft reads again
where all was accepted. Prompts pass through the draft, too; its weights and cache lie on one of the target's devices.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.serving.llm.served_model import ServedModel, served_model
from foretrace.serving.llm.step_times import MIDDLE, StepTimes, along, decode_seconds, prefill_seconds
from foretrace.techniques.compute.acceptance import Acceptance, checked_k

_HEAD = 128  # width of a head of a draft, where the target's is no divisor
# Of the host's time of a step, that a pass of a draft takes: low, middle, high. Engines schedule a round once; a pass
# is launched and sampled on its own.
HOST = (0.05, 0.3, 1.0)


def read_draft(text: str, target: ServedModel) -> ServedModel:
    """Return a draft by layers x width (2x2048), by name, or config.json. ForetraceError where it can be none."""
    if shape := re.fullmatch(r"([1-9]\d{0,2})x([1-9]\d{1,5})", text):
        draft = draft_like(target, int(shape[1]), int(shape[2]))
    elif re.match(r"\d", text):  # no decoder's name begins so
        raise ForetraceError(
            f"draft must be LAYERSxWIDTH such as 4x2048 (up to 999x999999), or a decoder's name, got {text}; give one."
        )
    else:
        draft = served_model(text)
    checked_draft(target, draft)
    return draft


def draft_like(target: ServedModel, layers: int, width: int) -> ServedModel:
    """Return a dense draft of the target's kind and vocabulary."""
    ratio = target.inner / target.hidden if target.inner else 8 / 3
    head = target.head if width % target.head == 0 and not target.latent else min(_HEAD, width)
    return ServedModel(
        name=f"{layers}x{width}", layers=layers, hidden=width, heads=width // head, kv_heads=width // head, head=head,
        words=target.words, inner=round(ratio * width / 64) * 64, dense=layers, gated=target.gated, tied=target.tied,
    )  # fmt: skip


def checked_draft(target: ServedModel, draft: ServedModel) -> None:
    """Raise ForetraceError where a model cannot be a draft of the target."""
    if draft.words != target.words:
        raise ForetraceError(
            f"{draft.name} knows {draft.words:,} tokens and {target.name} {target.words:,}; a draft must have the "
            "target's vocabulary."
        )
    if draft.active_parameters >= target.active_parameters:
        raise ForetraceError(
            f"{draft.name} has {draft.active_parameters / 1e9:.3g} B parameters that a token meets, {target.name} "
            f"{target.active_parameters / 1e9:.3g} B; a draft must be smaller than its target."
        )


def pass_seconds(steps: StepTimes, batch: int, tokens: int, context: int) -> float:
    """Return seconds of the device for `tokens` more tokens of each of `batch` sequences."""
    t, all_tokens = steps.table, batch * tokens
    attention = decode_seconds(t, batch, context)
    if tokens > 1:  # the cache is read once for all of them, until arithmetic takes longer
        attention = max(attention, batch * prefill_seconds(t, tokens, context))
    linear = along(t.tokens, t.linear_s, all_tokens) + along(t.sequences, t.output_s, all_tokens)
    return float(linear + attention)


def drafted_steps(target: StepTimes, draft: StepTimes, accepted: Acceptance, k: int, end: int = MIDDLE) -> StepTimes:
    """Return step times of an engine that decodes in rounds of k proposals.

    Args:
        target: without a draft, and without a pipeline.
        draft: on one device.
        accepted: what the target accepts.
        k: proposals of a round.
        end: of the ranges of acceptance and of the host's work for a pass: LOW and HIGH are the quick and the slow one.

    Raises:
        ForetraceError: a pipeline, or a k that cannot be.

    """
    checked_k(k)
    if target.stages > 1:
        raise ForetraceError("drafts are timed for targets without a pipeline; use `tp=` in place of `pp=`.")
    t, d, share = target.table, draft.table, HOST[end + 1]
    survival = accepted.survivals(k, -end)
    decode, prefill = np.empty_like(t.decode_s), np.empty_like(t.prefill_s)
    for i, n in enumerate(t.batch.tolist()):
        host = share * (t.host_s + t.host_per_sequence_s * n)
        for j, context in enumerate(t.mean_context.tolist()):
            attention = max(t.decode_s[i, j], n * prefill_seconds(t, k + 1, context))
            one, two = (pass_seconds(draft, n, tokens, context) for tokens in (1, 2))
            decode[i, j] = attention + k * (one + host) + survival[-1] * max(two - one, 0.0)
    for i, tokens in enumerate(t.chunk.tolist()):
        linear = along(d.tokens, d.linear_s, tokens)
        for j, context in enumerate(t.context.tolist()):
            prefill[i, j] = t.prefill_s[i, j] + linear + prefill_seconds(d, tokens, context)
    table = t._replace(decode_s=decode, prefill_s=prefill, low=min(t.low, d.low), high=max(t.high, d.high))
    return replace(
        target, table=table, accepted=survival, weight_bytes=target.weight_bytes + draft.weight_bytes,
        kv_bytes_per_token=target.kv_bytes_per_token + draft.kv_bytes_per_token,
    )  # fmt: skip
