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
PASSES = 5  # seconds forward, backward, of attention's core, of logits forward, of logits in all
COUNTS = ("products", "ports", "memory", "vectors")  # of what energy is spent on: multiplications, words, words, steps


@njit()
def operator_rows(s: Float64, tensor: int, micro: int, out: Float64) -> None:
    """Fill `out` (ROWS, 7) with the operators of a layer and of the logits of one device; columns as `designed` has."""
    tokens, share = micro * s[kernels.LENGTH], s[kernels.WORDS] / tensor
    for i in range(LAYER):
        out[i] = designed.operator(
            i, tokens, micro, s[kernels.LENGTH], s[kernels.LENGTH], s[kernels.HIDDEN], s[kernels.HEADS] / tensor,
            max(s[kernels.KV] / tensor, 1.0), s[kernels.HEAD], s[kernels.INNER] / tensor,
            2.0 if s[kernels.GATED] else 1.0, s[kernels.ACTIVE], tokens,
        )  # fmt: skip
    h = s[kernels.HIDDEN]
    out[LAYER] = 1.0, 1.0, tokens, share, h, 0.0, 0.0
    out[LAYER + 1] = 1.0, 1.0, tokens, h, share, 0.0, 0.0
    out[LAYER + 2] = 1.0, 1.0, h, share, tokens, 0.0, 0.0
    out[LAYER + 3] = 0.0, 1.0, 1.0, 1.0, 1.0, tokens * share, designed.SOFTMAX[0] + designed.SOFTMAX[1]


@njit()
def plan_facts(
    s: Float64, machine: Float64, c: Float64, plans: Int64, batch: int, training: bool, out: Float64
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
                need = max(need, m[0] + one[7] + one[8] + 4 * tokens * s[kernels.HIDDEN] + scores)
        out[p, 0], out[p, 1], out[p, 2] = need, one[3], one[4]


@inner
def forward_s(s, machine, c, at, forward, messages, head, count):
    """Seconds of a batch through a pipeline that computes no gradients; hops are times of links."""
    pipeline = at[kernels.PIPELINE]
    pace = s[kernels.LAYERS] / pipeline * (forward + messages)
    hop = kernels.hop_s(s, machine, c, at) if pipeline > 1 else 0.0
    return pipeline * pace + head + (pipeline - 1) * hop + (count - 1) * max(pace + head, hop)


@njit()
def price(
    s: Float64, machine: Float64, c: Float64, plans: Int64, pair_of: Int64, facts: Float64, batch: int, training: bool,
    rows: Float64, product_of: Int64, cycles: Float64, ports: Float64, memory: Float64, buffers: Float64,
    arrays_of: Int64, buffer_of: Int64, lanes: Float64, seconds: Float64, chosen: Int64, counts: Float64,
) -> None:  # fmt: skip
    """Fill `seconds` and `chosen` (designs) with each design's best plan, `counts` (designs, 4) with what it spends.

    `pair_of` (plans): which tensor degree and micro-batch; `rows` (pairs, ROWS, 7) and `product_of` (pairs, ROWS) their
    operators and where their products stand in `cycles` and `ports` (arrays, products) and `memory` (buffers,
    products); `arrays_of`, `buffer_of`, `lanes`: of each design. A design without a plan stays infinite.
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
                else:
                    numbers = rows[q, i, designed.NUMBERS]
                    each = max(numbers * rows[q, i, designed.EACH] / (lanes[d] * clock),
                               designed.vector_bytes(numbers, buffers[g]) / rate)  # fmt: skip
                if i >= LAYER:
                    took[q, 4] += each
                    if i == LAYER:
                        took[q, 3] += each
                elif i >= designed.FORWARD:
                    took[q, 1] += each
                else:
                    took[q, 0] += each
                    if designed.CORE[0] <= i < designed.CORE[1]:
                        took[q, 2] += each
        best, which = np.inf, -1
        for p in range(len(plans)):
            at, q = plans[p], pair_of[p]
            count = batch // (at[kernels.DATA] * at[kernels.MICRO])
            if training:
                again = 0.0
                if at[kernels.RECOMPUTE] == kernels.FULL:
                    again = took[q, 0]
                elif at[kernels.RECOMPUTE] == kernels.SELECTIVE:
                    again = took[q, 2]
                one = (took[q, 0], took[q, 1], again, facts[p, 1], facts[p, 2], 0.0, 0.0, 0.0, 0.0)
                step_s = kernels.step(s, machine, c, at, one, took[q, 4], count)[kernels.TIME]
            else:
                step_s = forward_s(s, machine, c, at, took[q, 0], facts[p, 1], took[q, 3], count)
            if step_s < best:
                best, which = step_s, p
        seconds[d], chosen[d] = best, which
        if which < 0:
            continue
        at, q = plans[which], pair_of[which]
        count = batch // (at[kernels.DATA] * at[kernels.MICRO])
        for k in range(4):
            counts[d, k] = 0.0
        shares = float(count * at[kernels.TENSOR] * at[kernels.DATA])
        for i in range(ROWS):
            times = 1.0 if i >= LAYER else s[kernels.LAYERS]
            if not training and (i > LAYER or designed.FORWARD <= i < LAYER):
                continue
            if (
                training
                and i < designed.FORWARD
                and (
                    at[kernels.RECOMPUTE] == kernels.FULL
                    or (at[kernels.RECOMPUTE] == kernels.SELECTIVE and designed.CORE[0] <= i < designed.CORE[1])
                )
            ):
                times *= 2
            r = rows[q, i]
            if r[designed.KIND]:
                j = product_of[q, i]
                counts[d, 0] += shares * times * r[designed.BATCH] * r[designed.M] * r[designed.N] * r[designed.K]
                counts[d, 1] += shares * times * ports[a, j]
                counts[d, 2] += shares * times * memory[g, j]
            else:
                moved = designed.vector_bytes(r[designed.NUMBERS], buffers[g]) / designed.WORD
                counts[d, 1] += shares * times * 2 * r[designed.NUMBERS]
                counts[d, 2] += shares * times * moved
                counts[d, 3] += shares * times * r[designed.NUMBERS] * r[designed.EACH]


@njit()
def forward_parts(s: Float64, machine: Float64, c: Float64, at: Int64, out: Float64) -> None:
    """Fill `out` with s of a stage of a forward pass, of its logits, and of a hop."""
    one = kernels.layer(s, machine, c, at)
    tokens, share = at[kernels.MICRO] * s[kernels.LENGTH], s[kernels.WORDS] / at[kernels.TENSOR]
    out[0] = s[kernels.LAYERS] / at[kernels.PIPELINE] * (one[0] + one[3])
    out[1] = designed.product_s(1.0, tokens, share, s[kernels.HIDDEN], machine)
    out[2] = kernels.hop_s(s, machine, c, at) if at[kernels.PIPELINE] > 1 else 0.0


@njit()
def front(area: Float64, seconds: Float64, joules: Float64, order: Int64, kept: Int64) -> int:
    """Fill `kept` with the designs that none beats in area, time and energy at once; `order`: by area, then time."""
    count = 0
    for d in order:
        if seconds[d] == np.inf:
            continue
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
