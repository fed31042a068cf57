# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""The compiled loop: every design times every plan.

A design's layer is summed over operators whose cycles depend on its arrays alone, whose traffic on its buffer alone and
whose vector work on its lanes alone: each is there once, and a design looks them up. A step is that of the planner.
"""

from __future__ import annotations

import numpy as np

from foretrace.arrays import Float64, Int64
from foretrace.compiled import inner, njit
from foretrace.cost.accelerators import kernels as designed
from foretrace.plan.transformers import kernels

LAYER, ROWS = 30, 34  # operators of a layer; with logits forward, their two gradients and their softmax
PASSES = 7  # s forward, backward, of attention's core, of logits forward, in all; the first two where SHARED are cut
SHARED = (0, 6, 7, 11, 12, 18, 19, 29)  # norms and sums, which sequence parallelism cuts by the tensor degree
COUNTS = ("products", "ports", "memory", "vectors")  # of what energy is spent on: multiplications, words, words, steps


@njit()
def operator_rows(s: Float64, tensor: int, sequence: int, micro: int, decode: int, out: Float64) -> None:
    """Fill `out` (ROWS, 7) with the operators of a layer and of the logits of one device; columns as `designed` has.

    `decode`: words in the cache that each sample's one word attends to; 0: those of the sequence.
    """
    tokens, share = micro * s[kernels.LENGTH], s[kernels.WORDS] / tensor
    heads, kv = s[kernels.HEADS] / tensor, max(s[kernels.KV] / tensor, 1.0)
    shared = tokens / tensor if sequence else tokens
    for i in range(LAYER):
        out[i] = designed.operator(
            i, tokens, micro, s[kernels.LENGTH], decode if decode else s[kernels.LENGTH], s[kernels.HIDDEN], heads, kv,
            s[kernels.HEAD], s[kernels.INNER] / tensor, 2.0 if s[kernels.GATED] else 1.0, s[kernels.ACTIVE],
            s[kernels.EXPERTS], shared,
        )  # fmt: skip
    if decode:  # heads that share keys and values read them once
        for i in (designed.CORE[0], designed.CORE[1] - 1):
            out[i, designed.BATCH], out[i, designed.M] = micro * kv, heads / kv
    h = s[kernels.HIDDEN]
    out[LAYER] = 1.0, 1.0, tokens, share, h, 0.0, 0.0
    out[LAYER + 1] = 1.0, 1.0, tokens, h, share, 0.0, 0.0
    out[LAYER + 2] = 1.0, 1.0, h, share, tokens, 0.0, 0.0
    out[LAYER + 3] = 0.0, 1.0, 1.0, 1.0, 1.0, tokens * share, designed.SOFTMAX[0] + designed.SOFTMAX[1]


@njit()
def plan_facts(
    s: Float64, machine: Float64, c: Float64, plans: Int64, batch: int, training: bool, decode: int, out: Float64
) -> None:
    """Fill `out` (plans, 3): bytes of the fullest device, s of a layer's messages forward and backward."""
    for p in range(len(plans)):
        at = plans[p]
        count, layers = batch // (at[kernels.DATA] * at[kernels.MICRO]), s[kernels.LAYERS] / at[kernels.PIPELINE]
        one = kernels.layer(s, machine, c, at)
        need = 0.0
        for stage in (0, at[kernels.PIPELINE] - 1):
            first, last = stage == 0, stage == at[kernels.PIPELINE] - 1
            flight = kernels.in_flight(at, stage, count, layers)
            m = kernels.held(s, at, layers, flight, first, last, one[7], one[8])
            if training:
                need = max(need, m[0] + m[1] + m[2] + m[3] + m[4])
            else:  # weights, what one layer makes, what comes in and goes out, scores of words
                tokens = at[kernels.MICRO] * s[kernels.LENGTH]
                scores = 2 * tokens * s[kernels.WORDS] / at[kernels.TENSOR] if last else 0.0
                attended = decode * layers * 4 * batch / at[kernels.DATA]  # of keys and values, in 2 bytes each
                cache = attended * max(s[kernels.KV] / at[kernels.TENSOR], 1.0) * s[kernels.HEAD]
                cells = 5.0 * decode * at[kernels.MICRO] * s[kernels.HEADS] / at[kernels.TENSOR]
                need = max(need, m[0] + one[7] + one[8] + 4 * tokens * s[kernels.HIDDEN] + scores + cache + cells)
        out[p, 0], out[p, 1], out[p, 2] = need, one[3], one[4]


@inner
def forward_s(s, machine, c, at, forward, messages, head, count):
    """Return seconds of a batch through a pipeline that computes no gradients; hops are times of links."""
    pipeline = at[kernels.PIPELINE]
    pace = s[kernels.LAYERS] / pipeline * (forward + messages)
    hop = kernels.hop_s(s, machine, c, at) if pipeline > 1 else 0.0
    return pipeline * pace + head + (pipeline - 1) * hop + (count - 1) * max(pace + head, hop)


@njit()
def price(
    s: Float64, machine: Float64, c: Float64, plans: Int64, pair_of: Int64, facts: Float64, batch: int, training: bool,
    rows: Float64, degrees: Int64, product_of: Int64, cycles: Float64, ports: Float64, memory: Float64,
    buffers: Float64, arrays_of: Int64, buffer_of: Int64, lanes: Float64, seconds: Float64, chosen: Int64,
    counts: Float64,
) -> None:  # fmt: skip
    """Fill `seconds` and `chosen` (designs) with each design's best plan, `counts` (designs, 4) with what it spends.

    `pair_of` (plans): which tensor degree and micro-batch; `degrees` (pairs) the former, `rows` (pairs, ROWS, 7) and
    `product_of` (pairs, ROWS) their operators and where their products stand in `cycles` and `ports` (arrays, products)
    and `memory` (buffers, products); `arrays_of`, `buffer_of`, `lanes`: of each design.
    """
    clock, rate = machine[designed.CLOCK], machine[designed.MEMORY]
    pairs = len(rows)
    took = np.zeros((pairs, PASSES))
    for d in range(len(lanes)):
        a, g = arrays_of[d], buffer_of[d]
        for q in range(pairs):
            for k in range(PASSES):
                took[q, k] = 0.0
            for i in range(ROWS):
                if rows[q, i, designed.KIND]:
                    j = product_of[q, i]
                    each = max(cycles[a, j] / clock, memory[g, j] * designed.WORD / rate)
                    cut = each
                else:
                    numbers, work = rows[q, i, designed.NUMBERS], rows[q, i, designed.EACH] / (lanes[d] * clock)
                    each = max(numbers * work, designed.vector_bytes(numbers, buffers[g]) / rate)
                    cut = each
                    if degrees[q] > 1 and i in SHARED:
                        numbers /= degrees[q]
                        cut = max(numbers * work, designed.vector_bytes(numbers, buffers[g]) / rate)
                if i >= LAYER:
                    took[q, 4] += each
                    if i == LAYER:
                        took[q, 3] += each
                elif i >= designed.FORWARD:
                    took[q, 1] += each
                    took[q, 6] += cut
                else:
                    took[q, 0] += each
                    took[q, 5] += cut
                    if designed.CORE[0] <= i < designed.CORE[1]:
                        took[q, 2] += each
        best, which = np.inf, -1
        for p in range(len(plans)):
            at, q = plans[p], pair_of[p]
            count = batch // (at[kernels.DATA] * at[kernels.MICRO])
            forward, backward = took[q, 0], took[q, 1]
            if at[kernels.SEQUENCE]:
                forward, backward = took[q, 5], took[q, 6]
            if training:
                again = 0.0
                if at[kernels.RECOMPUTE] == kernels.FULL:
                    again = forward
                elif at[kernels.RECOMPUTE] == kernels.SELECTIVE:
                    again = took[q, 2]
                one = (forward, backward, again, facts[p, 1], facts[p, 2], 0.0, 0.0, 0.0, 0.0)
                step_s = kernels.step(s, machine, c, at, one, took[q, 4], count)[kernels.TIME]
            else:
                step_s = forward_s(s, machine, c, at, forward, facts[p, 1], took[q, 3], count)
            if step_s < best:
                best, which = step_s, p
        seconds[d], chosen[d] = best, which
        at, q = plans[which], pair_of[which]
        count = batch // (at[kernels.DATA] * at[kernels.MICRO])
        shares = float(count * at[kernels.TENSOR] * at[kernels.DATA])
        for i in range(ROWS):
            times = 1.0 if i >= LAYER else s[kernels.LAYERS]
            if not training and (i > LAYER or designed.FORWARD <= i < LAYER):
                continue
            core = designed.CORE[0] <= i < designed.CORE[1]
            again = at[kernels.RECOMPUTE] == kernels.FULL or (at[kernels.RECOMPUTE] == kernels.SELECTIVE and core)
            if training and i < designed.FORWARD and again:
                times *= 2
            r = rows[q, i]
            if r[designed.KIND]:
                j = product_of[q, i]
                counts[d, 0] += shares * times * r[designed.BATCH] * r[designed.M] * r[designed.N] * r[designed.K]
                counts[d, 1] += shares * times * ports[a, j]
                counts[d, 2] += shares * times * memory[g, j]
            else:
                numbers = r[designed.NUMBERS] / (degrees[q] if at[kernels.SEQUENCE] and i in SHARED else 1)
                counts[d, 1] += shares * times * 2 * numbers
                counts[d, 2] += shares * times * designed.vector_bytes(numbers, buffers[g]) / designed.WORD
                counts[d, 3] += shares * times * numbers * r[designed.EACH]


@njit()
def forward_parts(s: Float64, machine: Float64, c: Float64, at: Int64, decode: int, out: Float64) -> None:
    """Fill `out` with s of a stage of a forward pass, of its logits, and of a hop."""
    rows, took = np.zeros((ROWS, 7)), kernels.layer(s, machine, c, at)[3]  # messages
    operator_rows(s, at[kernels.TENSOR], at[kernels.SEQUENCE], at[kernels.MICRO], decode, rows)
    for i in range(designed.FORWARD):
        took += operator_s(rows[i], machine)
    out[0] = s[kernels.LAYERS] / at[kernels.PIPELINE] * took
    out[1] = operator_s(rows[LAYER], machine)
    out[2] = kernels.hop_s(s, machine, c, at) if at[kernels.PIPELINE] > 1 else 0.0


@njit()
def operator_s(row: Float64, machine: Float64) -> float:
    """Return seconds of one of `operator_rows`."""
    if row[designed.KIND]:
        return designed.product_s(row[designed.BATCH], row[designed.M], row[designed.N], row[designed.K], machine)  # type: ignore[no-any-return]
    return designed.vector_s(row[designed.NUMBERS], row[designed.EACH], machine)  # type: ignore[no-any-return]


@njit()
def front(area: Float64, seconds: Float64, joules: Float64, order: Int64, kept: Int64) -> int:
    """Fill `kept` with the designs that none beats in area, time and energy at once; `order`: by area, then time."""
    count = 0
    for d in order:
        beaten = False
        for k in range(count):
            e = kept[k]
            if seconds[e] <= seconds[d] and joules[e] <= joules[d]:
                beaten = True
                break
        if not beaten:
            kept[count] = d
            count += 1
    return count
