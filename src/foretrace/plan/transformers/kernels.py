# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""The compiled loops: one layer, one step, every configuration.

A configuration is (tensor, sequence parallel, context, pipeline, virtual stages, data, micro-batch, recomputation, ZeRO
stage, overlap). Its time is that of Megatron's step (Narayanan et al., SC 2021; Korthikanti et al., 2022): the
micro-batches through the busiest stage, the pipeline's bubble divided by the virtual stages, messages between stages,
the exchange of gradients, the update. Activations are those of Korthikanti et al., section 4, in general form. Each
function works on the fields of arrays that `model.py` fills, by the positions named here.
"""

from __future__ import annotations

import numpy as np

from foretrace.arrays import Float64, Int64
from foretrace.compiled import inner, njit

NONE, SELECTIVE, FULL = 0, 1, 2
FIELDS = ("tensor", "sequence", "context", "pipeline", "virtual", "data", "micro", "recompute", "zero", "overlap")
# Positions in the array of a transformer.
LAYERS, HIDDEN, HEADS, KV, INNER, WORDS, LENGTH, HEAD, GATED, EXPERTS, ACTIVE, TIED, FLASH, CAUSAL = range(14)
# Positions in the array of a machine: rates in FLOP/s and B/s, latencies in s.
PEAK, MEMORY, NODE, LINK, LINK_S, NETWORK, CAPACITY = range(7)
# Positions in the array of constants, which are those of constants.csv.
(MATRIX, GRAIN, PRODUCT_US, BANDWIDTH, SHARED, SPLIT, SCORES, ATTENTION, LINK_SHARE, LINK_TIMES, NETWORK_SHARE,
 NETWORK_US, CROSSING, HOST_US, HOST_BACK, HOST_SPLIT, UPDATE_BYTES, STEP_MS, HIDDEN_SHARE,
 GRADIENT_BYTES, HIDDEN_DATA) = range(21)  # fmt: skip
# Parts of a step's time, s, and what else `evaluate` answers.
PARTS = ("compute", "recomputation", "tensor messages", "context messages", "bubble", "pipeline messages",
         "data messages", "update", "logits")  # fmt: skip
TIME, BYTES = len(PARTS), len(PARTS) + 1
GRADIENT, STATE = 4.0, 12.0  # bytes per weight: gradients added up in float32; its float32 copy and Adam's two moments


@inner
def product_s(m, n, k, peak, c):
    """Seconds of a matrix product of these sizes; `c`: constants. Small sides leave part of the tiles empty."""
    grain = (1 + c[GRAIN] / m) * (1 + c[GRAIN] / n) * (1 + c[GRAIN] / k)
    return 2 * m * n * k / (peak * c[MATRIX]) * grain + c[PRODUCT_US] * 1e-6


@inner
def moved_s(nbytes, ranks, machine, c, span):
    """Seconds of a reduce-scatter or all-gather of `nbytes` over neighbours that are `span` ranks apart."""
    if ranks < 2:
        return 0.0
    share = (ranks - 1) / ranks * nbytes
    if ranks * span <= machine[NODE]:
        return machine[LINK_S] * c[LINK_TIMES] + share / (machine[LINK] * c[LINK_SHARE])
    inside = max(machine[NODE] / span, 1.0)  # ranks of this group in a node: all of them use its network cards
    crossing = 1.0
    if 1 < span < machine[NODE]:  # a ring enters by one card and leaves by another
        crossing += c[CROSSING] * np.log2(span) * np.log2(ranks * span / machine[NODE]) / 3
    return c[NETWORK_US] * 1e-6 + crossing * share / (machine[NETWORK] * c[NETWORK_SHARE] * inside)


@inner
def layer(s, machine, c, tensor, sequence, context, micro, recompute):
    """Of one layer and micro-batch: s of forward and backward arithmetic, what is recomputed, messages; bytes kept."""
    h, heads, width = s[HIDDEN], s[HEADS], s[HEAD]
    tokens = micro * s[LENGTH] / context
    kv = max(s[KV] / tensor, 1.0) * width
    inner_share, query = s[INNER] / tensor, heads * width / tensor
    up = 2.0 if s[GATED] else 1.0
    peak, routed = machine[PEAK], s[ACTIVE]
    products = product_s(tokens, query + 2 * kv, h, peak, c) + product_s(tokens, h, query, peak, c)
    products += product_s(tokens * routed, up * inner_share, h, peak, c)
    products += product_s(tokens * routed, h, inner_share, peak, c)
    bandwidth = machine[MEMORY] * c[BANDWIDTH]
    cells = tokens * s[LENGTH] * heads / tensor
    shared = tokens * h / (tensor if sequence else 1)
    norms = 2 * c[SHARED] * shared / bandwidth  # with what dropout and residual connections move: as much backward
    passes = 2 * c[SPLIT] * tokens * (query + routed * up * inner_share) / 5 / bandwidth  # half as much again backward
    if s[FLASH]:  # half of a decoder's scores are masked and not computed
        core = (2 if s[CAUSAL] else 4) * cells * width / (peak * c[ATTENTION])
    else:
        core = 4 * cells * width / (peak * c[MATRIX]) + 2 * c[PRODUCT_US] * 1e-6
        passes += 2 * c[SCORES] * cells / bandwidth
    host = c[HOST_US] * 1e-6 * c[HOST_SPLIT] ** np.log2(tensor)
    device = products + core + norms + passes
    forward = _either(device, host)
    back = 2 * products + (2.5 if s[FLASH] else 2.0) * core + norms + 1.5 * passes
    backward = _either(back, host * c[HOST_BACK])
    # Two all-reduces each way; with sequence parallelism reduce-scatter and all-gather, and one more all-gather back.
    # Those of the backward pass can hide behind the products that give gradients of weights.
    full = 2 * tokens * h
    one = moved_s(full, tensor, machine, c, 1)
    messages = 4 * one
    behind = 4 * one + (2 * one if sequence else 0.0)
    rotated = 3 * moved_s(2 * 2 * tokens * kv * context, context, machine, c, tensor) if context > 1 else 0.0
    again, again_messages = 0.0, 0.0
    if recompute == FULL:
        again, again_messages = forward, messages
    elif recompute == SELECTIVE:
        again = core + (0.0 if s[FLASH] else 2 * c[SCORES] * cells / bandwidth)
    # Bytes, in 2 each but masks: inputs of norms, of products, of the feed-forward part.
    masks = 0.0 if s[GATED] else 2.0
    whole = (8 + masks) * shared
    split = tokens * (4 * query + 4 * kv + 2 * (up + 1) * inner_share * routed)
    scores = 4 * tokens * heads / tensor if s[FLASH] else 5 * cells
    kept = whole + split + scores
    working = 0.0
    if recompute == FULL:
        working = kept
        kept = 2 * shared
    elif recompute == SELECTIVE:
        working = scores
        kept = whole + split
    return forward, backward, again, messages + again_messages, behind, rotated, kept, working


@inner
def _either(device, host):
    """The longer of the two, smoothly: launching hides behind computing, or the reverse."""
    longest = max(device, host)
    return longest * ((device / longest) ** 6 + (host / longest) ** 6) ** (1 / 6)


@inner
def weights(s, tensor):
    """Weights of a layer and of an embedding, of one of `tensor` devices, without biases and norms."""
    attention = 2 * s[HIDDEN] * s[HEAD] * (s[HEADS] / tensor + max(s[KV] / tensor, 1.0))
    expert = (3 if s[GATED] else 2) * s[HIDDEN] * s[INNER] / tensor
    return attention + s[EXPERTS] * expert, s[WORDS] * s[HIDDEN] / tensor


@inner
def held(s, tensor, context, pipeline, virtual, data, micro, count, zero, kept, working, stage):
    """Bytes of a device of a stage: weights, gradients, optimizer, activations in flight, what is in work."""
    per_layer, table = weights(s, tensor)
    layers = s[LAYERS] / pipeline
    here = layers * per_layer
    if stage == 0:
        here += table
    if stage == pipeline - 1 and not (pipeline == 1 and s[TIED]):
        here += table
    shards = data * context
    weight = 2.0 * here / (shards if zero == 3 else 1)
    gradient = GRADIENT * here / (shards if zero >= 2 else 1)
    state = STATE * here / (shards if zero >= 1 else 1)
    if virtual > 1:
        chunks = min(2 * (pipeline - stage - 1) + (virtual - 1) * pipeline + 1, count * virtual)
        flight = chunks * layers / virtual
    else:
        flight = min(pipeline - stage, count) * layers
    tokens = micro * s[LENGTH] / context
    work = working
    if zero == 3:  # a layer gathered and the one gathered ahead, and the gradient of one before it is shared out
        work += (2 * 2 + GRADIENT) * per_layer
    if stage == pipeline - 1:  # logits and their gradient in float32, and the two inputs of the head
        work += 8 * tokens * s[WORDS] / tensor + 4 * tokens * s[HIDDEN] / tensor
    return weight, gradient, state, flight * kept, work


@inner
def hop_s(s, machine, c, tensor, context, pipeline, data, micro):
    """Seconds until the next stage has a micro-batch's activations, or the one before their gradients."""
    nbytes = 2 * (micro * s[LENGTH] / context) * s[HIDDEN] / tensor  # each tensor rank sends its part
    if tensor * context * data * pipeline <= machine[NODE]:
        return machine[LINK_S] * c[LINK_TIMES] + nbytes / (machine[LINK] * c[LINK_SHARE])
    return c[NETWORK_US] * 1e-6 + nbytes / (machine[NETWORK] * c[NETWORK_SHARE])


@inner
def exchanged_s(machine, c, here, forward, backward, span, shards, count, zero, overlap):
    """Seconds that a step waits for gradients shared out and for weights gathered, which `shards` devices have.

    `here`: weights of a device; `forward`, `backward`: s of all its layers for a micro-batch, behind which they hide.
    """
    if shards < 2:
        return 0.0, 0.0
    gradient = moved_s(c[GRADIENT_BYTES] * here, shards, machine, c, span)
    gathered = gradient * 2.0 / c[GRADIENT_BYTES]
    if zero == 0:
        shared, gathered = 2 * gradient, 0.0
    elif zero == 1:
        shared = gradient
    else:  # gradients are shared out with every micro-batch; weights gathered once, or twice for each of them
        shared, gathered = gradient * count, gathered * (1 if zero == 2 else 2 * count)
    if overlap:  # behind the backward pass of the last micro-batch and the forward pass of the first, or all of them
        most, times = c[HIDDEN_DATA], count if zero >= 2 else 1
        shared = max(shared - most * backward * times, (1 - most) * shared)
        behind_s = forward if zero < 3 else (forward + backward) * count
        gathered = max(gathered - most * behind_s, (1 - most) * gathered)
    return shared, gathered


@inner
def step(s, machine, c, one, head_s, tensor, sequence, context, pipeline, virtual, data, micro, count, zero, overlap):
    """Seconds of the parts of a step, in the order of PARTS, and all of them; `one`: what `layer` gives."""
    forward, backward, again, messages, behind, rotated, _, _ = one
    layers = s[LAYERS] / pipeline
    visible = 1 - (c[HIDDEN_SHARE] if overlap else 0.0)
    compute, recomputed = count * layers * (forward + backward), count * layers * again
    tensor_s, context_s = count * layers * (messages + behind * visible), count * layers * rotated * visible
    pace = (compute + recomputed + tensor_s + context_s) / count
    head = count * head_s
    sends = 0.0
    if pipeline > 1:
        hop = hop_s(s, machine, c, tensor, context, pipeline, data, micro)
        sends = 2 * hop * (count * virtual * visible + pipeline - 1)
    per_layer, table = weights(s, tensor)
    here = layers * per_layer + table
    shards = data * context
    shared, gathered = exchanged_s(machine, c, here, layers * forward, layers * backward, tensor, shards, count, zero,
                                   overlap)  # fmt: skip
    if zero >= 2:  # with every micro-batch
        pace += (shared + (gathered if zero == 3 else 0.0)) / count
    bubble = (pipeline - 1) / virtual * pace
    exchange = shared + gathered
    own = here / (shards if zero else 1)
    update = c[UPDATE_BYTES] * own / (machine[MEMORY] * c[BANDWIDTH]) + c[STEP_MS] * 1e-3
    total = compute + recomputed + tensor_s + context_s + bubble + sends + exchange + update + head
    return compute, recomputed, tensor_s, context_s, bubble, sends, exchange, update, head, total


@inner
def head_s(s, machine, c, tensor, context, micro):
    """Seconds of the logits of a micro-batch, forward and backward."""
    tokens = micro * s[LENGTH] / context
    cells = tokens * s[WORDS] / tensor
    return 3 * product_s(tokens, s[WORDS] / tensor, s[HIDDEN], machine[PEAK], c) + 16 * cells / (
        machine[MEMORY] * c[BANDWIDTH]
    )


@njit()
def evaluate(s: Float64, machine: Float64, c: Float64, at: Int64, batch: int, out: Float64, stages: Float64) -> None:
    """Fill `out` (PARTS, TIME, BYTES of the fullest stage) and `stages` (pipeline, 5) for one configuration."""
    tensor, sequence, context, pipeline, virtual = at[0], at[1], at[2], at[3], at[4]
    data, micro, recompute, zero, overlap = at[5], at[6], at[7], at[8], at[9]
    count = batch // (data * micro)
    one = layer(s, machine, c, tensor, sequence, context, micro, recompute)
    head = head_s(s, machine, c, tensor, context, micro)
    found = step(
        s, machine, c, one, head, tensor, sequence, context, pipeline, virtual, data, micro, count, zero, overlap
    )
    for i in range(10):
        out[i] = found[i]
    out[BYTES] = 0.0
    for stage in range(pipeline):
        parts = held(s, tensor, context, pipeline, virtual, data, micro, count, zero, one[6], one[7], stage)
        for i in range(5):
            stages[stage, i] = parts[i]
        out[BYTES] = max(out[BYTES], parts[0] + parts[1] + parts[2] + parts[3] + parts[4])


@njit()
def passes(s: Float64, machine: Float64, c: Float64, at: Int64, batch: int, out: Float64) -> None:
    """Fill `out` with the s of a device's layers for a micro-batch, forward and backward, of logits, and of hops.

    All as `step` counts them: passes hold what ZeRO 2 and 3 exchange with each of them, but no hops. A hop to the next
    stage is two figures: what the stage waits for, and what hides. The last is what is exchanged with the update.
    """
    tensor, sequence, context, pipeline, data, micro, recompute = at[0], at[1], at[2], at[3], at[5], at[6], at[7]
    zero, count = at[8], batch // (data * micro)
    forward, backward, again, messages, behind, rotated, _, _ = layer(
        s, machine, c, tensor, sequence, context, micro, recompute
    )
    layers = s[LAYERS] / pipeline
    hidden = c[HIDDEN_SHARE] if at[9] else 0.0
    before = messages / 2 if recompute == FULL else messages  # the other half is sent when it is computed again
    per_layer, table = weights(s, tensor)
    shared, gathered = exchanged_s(machine, c, layers * per_layer + table, layers * forward, layers * backward, tensor,
                                   data * context, count, zero, at[9])  # fmt: skip
    each = gathered / count / 2 if zero == 3 else 0.0
    out[0] = layers * (forward + before + rotated * (1 - hidden) / 3) + each
    out[1] = layers * (backward + again + messages - before + (behind + rotated * 2 / 3) * (1 - hidden)) + each
    if zero >= 2:
        out[1] += shared / count
    out[2] = head_s(s, machine, c, tensor, context, micro)
    hop = hop_s(s, machine, c, tensor, context, pipeline, data, micro) if pipeline > 1 else 0.0
    out[3], out[4] = (1 - hidden) * hop, hidden * hop
    out[5] = (0.0 if zero >= 2 else shared) + (0.0 if zero == 3 else gathered)


@inner
def fits(s, tensor, context):
    """Whether heads, feed-forward part and words can be cut so."""
    if s[HEADS] % tensor or s[INNER] % tensor or s[LENGTH] % (2 * context if context > 1 else 1):
        return False
    return s[KV] % tensor == 0 or tensor % s[KV] == 0


@njit()
def sweep(
    s: Float64, machine: Float64, c: Float64, devices: int, batch: int, low: Int64, high: Int64, best: Float64,
    rows: Int64, times: Float64, spill_rows: Int64, spill_times: Float64, lost: Int64,
) -> tuple[int, int]:  # fmt: skip
    """Time every valid configuration with all fields within `low` and `high`: how many there are, and how many fit.

    `rows` and `times` become the quickest that fit, `spill_rows` and `spill_times` the quickest that do not. Where
    `best` holds the parts of a step, `lost` counts by which part each loses most to it.
    """
    valid, fitting = 0, 0
    compare = best[TIME] > 0
    worst, spill_worst = np.inf, np.inf
    for tensor in range(low[0], min(high[0], devices) + 1):
        if devices % tensor:
            continue
        for context in range(low[2], min(high[2], devices // tensor) + 1):
            if devices // tensor % context or not fits(s, tensor, context):
                continue
            left = devices // (tensor * context)
            for data in range(low[5], min(high[5], left, batch) + 1):
                if left % data or batch % data:
                    continue
                pipeline = left // data
                if pipeline < low[3] or pipeline > high[3] or s[LAYERS] % pipeline:
                    continue
                chunk = int(s[LAYERS]) // pipeline
                share = batch // data
                for micro in range(low[6], min(high[6], share) + 1):
                    if share % micro:
                        continue
                    count = share // micro
                    head = head_s(s, machine, c, tensor, context, micro)
                    for sequence in range(low[1], min(high[1], 1) + 1):
                        if sequence and (tensor == 1 or s[LENGTH] % (tensor * context)):
                            continue
                        for recompute in range(low[7], high[7] + 1):
                            one = layer(s, machine, c, tensor, sequence, context, micro, recompute)
                            for virtual in range(low[4], min(high[4], chunk) + 1):
                                if virtual > 1 and (pipeline == 1 or chunk % virtual or count % pipeline):
                                    continue
                                for zero in range(low[8], high[8] + 1):
                                    if zero and data * context == 1:
                                        continue
                                    need = 0.0
                                    for stage in (0, pipeline - 1):  # those between have less than the first
                                        m = held(
                                            s, tensor, context, pipeline, virtual, data, micro, count, zero, one[6],
                                            one[7], stage,
                                        )  # fmt: skip
                                        need = max(need, m[0] + m[1] + m[2] + m[3] + m[4])
                                    for overlap in range(low[9], high[9] + 1):
                                        valid += 1
                                        found = step(
                                            s, machine, c, one, head, tensor, sequence, context, pipeline, virtual,
                                            data, micro, count, zero, overlap,
                                        )  # fmt: skip
                                        total = found[9]
                                        if need > machine[CAPACITY]:
                                            if total >= spill_worst:
                                                continue
                                            spill_worst = _keep(
                                                spill_rows, spill_times, total, tensor, sequence, context, pipeline,
                                                virtual, data, micro, recompute, zero, overlap,
                                            )  # fmt: skip
                                            continue
                                        fitting += 1
                                        if compare:
                                            at, most = -1, 0.0
                                            for i in range(9):
                                                if found[i] - best[i] > most:
                                                    at, most = i, found[i] - best[i]
                                            if at >= 0:
                                                lost[at] += 1
                                        if total < worst:
                                            worst = _keep(
                                                rows, times, total, tensor, sequence, context, pipeline, virtual, data,
                                                micro, recompute, zero, overlap,
                                            )  # fmt: skip
    return valid, fitting


@inner
def _keep(rows, times, total, tensor, sequence, context, pipeline, virtual, data, micro, recompute, zero, overlap):
    """Insert a configuration into the quickest, and answer what the next one has to be below."""
    at = len(times) - 1
    while at > 0 and times[at - 1] > total:
        times[at] = times[at - 1]
        for i in range(10):
            rows[at, i] = rows[at - 1, i]
        at -= 1
    times[at] = total
    values = (tensor, sequence, context, pipeline, virtual, data, micro, recompute, zero, overlap)
    for i in range(10):
        rows[at, i] = values[i]
    return times[len(times) - 1]
