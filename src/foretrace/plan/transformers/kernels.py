# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""The compiled loops: one layer, one step, every configuration.

A configuration is a row of FIELDS. Its time is that of Megatron's step (Narayanan et al., SC 2021; Korthikanti et al.,
2022): the micro-batches through the busiest stage, the pipeline's bubble divided by the virtual stages, messages
between stages, the exchange of gradients, the update. Activations are those of Korthikanti et al., section 4, in
general form. Each function works on the fields of arrays that `model.py` fills, by the positions named here.
"""

from __future__ import annotations

import numpy as np

from foretrace.arrays import Float64, Int64
from foretrace.compiled import inner, njit
from foretrace.cost.accelerators import kernels as designed

NONE, SELECTIVE, FULL = 0, 1, 2
FIELDS = ("tensor", "sequence", "context", "pipeline", "virtual", "data", "expert", "micro", "recompute", "zero",
          "overlap", "versions")  # fmt: skip
TENSOR, SEQUENCE, CONTEXT, PIPELINE, VIRTUAL, DATA, EXPERT, MICRO, RECOMPUTE, ZERO, OVERLAP, VERSIONS = range(12)
# Positions in the array of a transformer.
LAYERS, HIDDEN, HEADS, KV, INNER, WORDS, LENGTH, HEAD, GATED, EXPERTS, ACTIVE, TIED, FLASH, CAUSAL = range(14)
# Positions in the array of a machine: rates in FLOP/s and B/s, latencies in s; behind them those of a design.
PEAK, MEMORY, NODE, LINK, LINK_S, NETWORK, CAPACITY = range(7)
# Positions in the array of constants, which stand in this order in software.json.
(MATRIX, GRAIN, PRODUCT_US, BANDWIDTH, SHARED, SPLIT, SCORES, ATTENTION, LINK_SHARE, LINK_TIMES, NETWORK_SHARE,
 NETWORK_US, CROSSING, HOST_US, HOST_BACK, HOST_SPLIT, UPDATE_BYTES, STEP_MS, HIDDEN_SHARE,
 GRADIENT_BYTES, HIDDEN_DATA) = range(21)  # fmt: skip
# Parts of a step's time, s, and what else `evaluate` answers.
PARTS = ("compute", "recomputation", "tensor messages", "context messages", "expert messages", "bubble",
         "pipeline messages", "data messages", "update", "logits")  # fmt: skip
TIME, BYTES = len(PARTS), len(PARTS) + 1
GRADIENT, STATE = 4.0, 12.0  # bytes per weight: gradients added up in float32; its float32 copy and Adam's two moments


@inner
def product_s(m, n, k, peak, c):
    """Return seconds of a matrix product of these sizes; `c`: constants. Small sides leave part of the tiles empty."""
    grain = (1 + c[GRAIN] / m) * (1 + c[GRAIN] / n) * (1 + c[GRAIN] / k)
    return 2 * m * n * k / (peak * c[MATRIX]) * grain + c[PRODUCT_US] * 1e-6


@inner
def moved_s(nbytes, ranks, machine, c, span):
    """Return seconds of a reduce-scatter or all-gather of `nbytes` over neighbours that are `span` ranks apart."""
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
def swapped_s(nbytes, ranks, machine, c, span):
    """Return seconds of an all-to-all of `nbytes` of each rank; the network's part leaves by the rank's own card."""
    if ranks < 2:
        return 0.0
    if ranks * span <= machine[NODE]:
        return machine[LINK_S] * c[LINK_TIMES] + (ranks - 1) / ranks * nbytes / (machine[LINK] * c[LINK_SHARE])
    outside = ranks - max(machine[NODE] / span, 1.0)
    return c[NETWORK_US] * 1e-6 + outside / ranks * nbytes / (machine[NETWORK] * c[NETWORK_SHARE])


@inner
def layer(s, machine, c, at):
    """Return, of a layer and micro-batch, s of forward, backward, what is recomputed, messages; bytes kept.

    Messages are: of tensors with what recomputation repeats, those behind gradients, of context, of experts.
    """
    tensor, sequence, context, micro, recompute = at[TENSOR], at[SEQUENCE], at[CONTEXT], at[MICRO], at[RECOMPUTE]
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
    if machine[designed.CORES]:
        forward, backward, core = designed.layer_s(
            tokens, micro, s[LENGTH] / context, s[LENGTH], h, heads / tensor, max(s[KV] / tensor, 1.0), width,
            inner_share, up, routed, s[EXPERTS] / at[EXPERT], shared / h, machine,
        )  # fmt: skip
    # Two all-reduces each way; with sequence parallelism reduce-scatter and all-gather, and one more all-gather back.
    # Those of the backward pass can hide behind the products that give gradients of weights.
    full = 2 * tokens * h
    one = moved_s(full, tensor, machine, c, 1)
    messages = 4 * one
    behind = 4 * one + (2 * one if sequence else 0.0)
    rotated = 3 * moved_s(2 * 2 * tokens * kv * context, context, machine, c, tensor) if context > 1 else 0.0
    # Words go to the experts that they are routed to, and back, each way.
    swapped = 4 * swapped_s(2 * routed * tokens * h / (tensor if sequence else 1), at[EXPERT], machine, c,
                            tensor * context)  # fmt: skip
    again, again_messages = 0.0, 0.0
    if recompute == FULL:
        again, again_messages = forward, messages
        swapped *= 3 / 2
        rotated *= 4 / 3
    elif recompute == SELECTIVE:
        again = core + (0.0 if s[FLASH] or machine[designed.CORES] else 2 * c[SCORES] * cells / bandwidth)
    # Bytes, in 2 each but masks: inputs of norms, of products, of the feed-forward part.
    masks = 0.0 if s[GATED] else 2.0
    whole = (8 + masks) * shared
    split = tokens * (4 * query + 4 * kv + 2 * (up + 1) * inner_share * routed)
    if s[EXPERTS] > 1:  # words in the order of their experts, a copy for each that they go to
        split += 2 * routed * tokens * h
    scores = 4 * tokens * heads / tensor if s[FLASH] else 5 * cells
    kept = whole + split + scores
    working = 0.0
    if recompute == FULL:
        working = kept
        kept = 2 * shared
    elif recompute == SELECTIVE:
        working = scores
        kept = whole + split
    return forward, backward, again, messages + again_messages, behind, rotated, swapped, kept, working


@inner
def _either(device, host):
    """Return the longer of the two, smoothly: launching hides behind computing, or the reverse."""
    longest = max(device, host)
    return longest * ((device / longest) ** 6 + (host / longest) ** 6) ** (1 / 6)


@inner
def weights(s, at):
    """Return weights of a device, without biases and norms: of a layer but its experts, of these, of an embedding."""
    tensor = at[TENSOR]
    attention = 2 * s[HIDDEN] * s[HEAD] * (s[HEADS] / tensor + max(s[KV] / tensor, 1.0))
    feed = (3 if s[GATED] else 2) * s[HIDDEN] * s[INNER] / tensor
    table = s[WORDS] * s[HIDDEN] / tensor
    if s[EXPERTS] > 1:
        return attention, s[EXPERTS] / at[EXPERT] * feed, table
    return attention + feed, 0.0, table


@inner
def in_flight(at, stage, count, layers):
    """Return layers of a stage times micro-batches whose activations are there at most."""
    pipeline, virtual = at[PIPELINE], at[VIRTUAL]
    if virtual > 1:
        return min(2 * (pipeline - stage - 1) + (virtual - 1) * pipeline + 1, count * virtual) * layers / virtual
    return (min(pipeline - stage, count) if at[VERSIONS] == 1 else pipeline - stage) * layers


@inner
def held(s, at, layers, flight, first, last, kept, working):
    """Return bytes of a device of a stage: weights, gradients, optimizer, activations in flight, what is in work."""
    dense, expert, table = weights(s, at)
    shards, zero = at[DATA] * at[CONTEXT], at[ZERO]
    tables = first + last - (1 if first and last and s[TIED] else 0)
    here = layers * (dense + expert) + tables * table
    shard = (layers * (dense + at[EXPERT] * expert) + tables * table) / shards
    weight = 2.0 * at[VERSIONS] * (shard if zero == 3 else here)
    gradient = GRADIENT * (shard if zero >= 2 else here)
    state = STATE * (shard if zero >= 1 else here)
    tokens = at[MICRO] * s[LENGTH] / at[CONTEXT]
    work = working
    if zero == 3:  # a layer gathered and the one gathered ahead, and the gradient of one before it is shared out
        work += (2 * 2 + GRADIENT) * (dense + expert)
    if last:  # logits and their gradient in float32, and the two inputs of the head
        work += 8 * tokens * s[WORDS] / at[TENSOR] + 4 * tokens * s[HIDDEN] / at[TENSOR]
    return weight, gradient, state, flight * kept, work


@inner
def hop_s(s, machine, c, at):
    """Return seconds until the next stage has a micro-batch's activations, or the one before their gradients."""
    nbytes = 2 * (at[MICRO] * s[LENGTH] / at[CONTEXT]) * s[HIDDEN] / at[TENSOR]  # each tensor rank sends its part
    if at[TENSOR] * at[CONTEXT] * at[DATA] * at[PIPELINE] <= machine[NODE]:
        return machine[LINK_S] * c[LINK_TIMES] + nbytes / (machine[LINK] * c[LINK_SHARE])
    return c[NETWORK_US] * 1e-6 + nbytes / (machine[NETWORK] * c[NETWORK_SHARE])


@inner
def exchanged_s(s, machine, c, at, layers, forward, backward, count):
    """Return seconds that a step waits for gradients shared out, for weights gathered, and of a stage's update.

    `forward`, `backward`: s of all layers of the stage for a micro-batch, behind which messages hide.
    """
    dense, expert, table = weights(s, at)
    tables = 2 if at[PIPELINE] == 1 and not s[TIED] else 1
    dense, expert, zero = layers * dense + tables * table, layers * expert, at[ZERO]
    shards, replicas = at[DATA] * at[CONTEXT], at[DATA] * at[CONTEXT] // at[EXPERT]  # of an expert
    own = dense / shards + expert / replicas if zero else dense + expert
    update = c[UPDATE_BYTES] * own / (machine[MEMORY] * c[BANDWIDTH]) + c[STEP_MS] * 1e-3
    if shards < 2:
        return 0.0, 0.0, update
    gradient = moved_s(c[GRADIENT_BYTES] * dense, shards, machine, c, at[TENSOR])
    if expert:
        gradient += moved_s(c[GRADIENT_BYTES] * expert, replicas, machine, c, at[TENSOR] * at[EXPERT])
    gathered = gradient * 2.0 / c[GRADIENT_BYTES]
    if zero == 0:
        shared, gathered = 2 * gradient, 0.0
    elif zero == 1:
        shared = gradient
    else:  # gradients are shared out with every micro-batch; weights gathered once, or twice for each of them
        shared, gathered = gradient * count, gathered * (1 if zero == 2 else 2 * count)
    if at[OVERLAP]:  # behind the backward pass of the last micro-batch and the forward pass of the first, or all
        most, times = c[HIDDEN_DATA], count if zero >= 2 else 1
        shared = max(shared - most * backward * times, (1 - most) * shared)
        behind_s = forward if zero < 3 else (forward + backward) * count
        gathered = max(gathered - most * behind_s, (1 - most) * gathered)
    if at[VERSIONS] > 1:  # behind the passes of the next batch, which need neither
        behind_s = count * (forward + backward)
        shared, gathered = max(shared - behind_s, 0.0), max(gathered - max(behind_s - shared, 0.0), 0.0)
    return shared, gathered, update


@inner
def step(s, machine, c, at, one, head, count):
    """Return seconds of the parts of a step, in the order of PARTS, and all of them; `one`: what `layer` gives."""
    forward, backward, again, messages, behind, rotated, swapped, _, _ = one
    pipeline, virtual, zero = at[PIPELINE], at[VIRTUAL], at[ZERO]
    layers = s[LAYERS] / pipeline
    visible = 1 - (c[HIDDEN_SHARE] if at[OVERLAP] else 0.0)
    compute, recomputed = count * layers * (forward + backward), count * layers * again
    tensor_s, context_s = count * layers * (messages + behind * visible), count * layers * rotated * visible
    expert_s = count * layers * swapped
    pace = (compute + recomputed + tensor_s + context_s + expert_s) / count
    heads = count * head
    fill = pipeline - 1 if at[VERSIONS] == 1 else 0  # without a flush the pipeline stays full
    sends = 0.0
    if pipeline > 1:
        sends = 2 * hop_s(s, machine, c, at) * (count * virtual * visible + fill)
    shared, gathered, update = exchanged_s(s, machine, c, at, layers, layers * forward, layers * backward, count)
    if zero >= 2:  # with every micro-batch
        pace += (shared + (gathered if zero == 3 else 0.0)) / count
    bubble = fill / virtual * pace
    exchange = shared + gathered
    total = compute + recomputed + tensor_s + context_s + expert_s + bubble + sends + exchange + update + heads
    return compute, recomputed, tensor_s, context_s, expert_s, bubble, sends, exchange, update, heads, total


@inner
def head_s(s, machine, c, at):
    """Return seconds of the logits of a micro-batch, forward and backward."""
    tokens, share = at[MICRO] * s[LENGTH] / at[CONTEXT], s[WORDS] / at[TENSOR]
    moved = 16 * tokens * share / (machine[MEMORY] * c[BANDWIDTH])
    if machine[designed.CORES]:
        product = designed.product_s(1.0, tokens, share, s[HIDDEN], machine)
        product += designed.product_s(1.0, tokens, s[HIDDEN], share, machine)
        product += designed.product_s(1.0, s[HIDDEN], share, tokens, machine)
        return product + designed.vector_s(tokens * share, sum(designed.SOFTMAX), machine)
    return 3 * product_s(tokens, share, s[HIDDEN], machine[PEAK], c) + moved


@njit()
def evaluate(s: Float64, machine: Float64, c: Float64, at: Int64, batch: int, out: Float64, stages: Float64) -> None:
    """Fill `out` (PARTS, TIME, BYTES of the fullest stage) and `stages` (pipeline, 5) for one configuration."""
    count, layers = batch // (at[DATA] * at[MICRO]), s[LAYERS] / at[PIPELINE]
    one = layer(s, machine, c, at)
    found = step(s, machine, c, at, one, head_s(s, machine, c, at), count)
    for i in range(TIME + 1):
        out[i] = found[i]
    out[BYTES] = 0.0
    for stage in range(at[PIPELINE]):
        flight = in_flight(at, stage, count, layers)
        parts = held(s, at, layers, flight, stage == 0, stage == at[PIPELINE] - 1, one[7], one[8])
        for i in range(5):
            stages[stage, i] = parts[i]
        out[BYTES] = max(out[BYTES], parts[0] + parts[1] + parts[2] + parts[3] + parts[4])


@inner
def stage_s(s, machine, c, at, layers, count):
    """Return seconds of a stage of so many layers, as `step` counts them.

    They are: a micro-batch's forward and backward pass, with what ZeRO 2 and 3 exchange with each of them; logits; what
    the stage waits for a hop to the next one, and what of it hides; update and exchange at the end of the step.
    """
    forward, backward, again, messages, behind, rotated, swapped, _, _ = layer(s, machine, c, at)
    zero, hidden = at[ZERO], c[HIDDEN_SHARE] if at[OVERLAP] else 0.0
    # Where all is computed again, so are messages: half of those of tensors, a third of experts', a quarter of context.
    before = messages / 2 if at[RECOMPUTE] == FULL else messages
    routed = swapped / 3 if at[RECOMPUTE] == FULL else swapped / 2
    turned = rotated / 4 if at[RECOMPUTE] == FULL else rotated / 3
    shared, gathered, update = exchanged_s(s, machine, c, at, layers, layers * forward, layers * backward, count)
    each = gathered / count / 2 if zero == 3 else 0.0
    there = layers * (forward + before + routed + turned * (1 - hidden)) + each
    back = layers * (
        backward + again + messages - before + swapped - routed + (behind + rotated - turned) * (1 - hidden)
    )
    back += each + (shared / count if zero >= 2 else 0.0)
    hop = hop_s(s, machine, c, at) if at[PIPELINE] > 1 else 0.0
    end = update + (0.0 if zero >= 2 else shared) + (0.0 if zero == 3 else gathered)
    return there, back, head_s(s, machine, c, at), (1 - hidden) * hop, hidden * hop, end


@njit()
def passes(s: Float64, machine: Float64, c: Float64, at: Int64, layers: float, count: int) -> tuple[float, ...]:
    return stage_s(s, machine, c, at, layers, count)  # type: ignore[no-any-return]


@njit()
def stage_columns(s: Float64, machine: Float64, c: Float64, ways: Int64, count: int, out: Float64) -> None:
    """Fill `out` (ways, layers + 1, 4, 4) for stages of so many layers: in the middle, first, last, first and last.

    Columns are s of a micro-batch's passes with all of its hops, s at the end of the step, bytes, and bytes for each
    micro-batch in flight. `ways`: rows of FIELDS.
    """
    for way in range(len(ways)):
        at = ways[way]
        one = layer(s, machine, c, at)
        for layers in range(1, out.shape[1]):
            there, back, head, seen, hidden, end = stage_s(s, machine, c, at, layers, count)
            for kind in range(4):
                last = kind >= 2
                m = held(s, at, layers, layers, kind % 2 == 1, last, one[7], one[8])
                out[way, layers, kind, 0] = there + back + 2 * (seen + hidden) + (head if last else 0.0)
                out[way, layers, kind, 1] = end
                out[way, layers, kind, 2] = m[0] + m[1] + m[2] + m[4]
                out[way, layers, kind, 3] = m[3]


@njit()
def fits(s: Float64, tensor: int, context: int) -> bool:
    """Return whether heads, feed-forward part and words can be cut so."""
    if s[HEADS] % tensor or s[INNER] % tensor or s[LENGTH] % (2 * context if context > 1 else 1):
        return False
    return bool(s[KV] % tensor == 0 or tensor % s[KV] == 0)


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
    at = np.empty(len(FIELDS), np.int64)
    at[VERSIONS] = low[VERSIONS]  # given: two versions are another training
    for tensor in range(low[TENSOR], min(high[TENSOR], devices) + 1):
        if devices % tensor:
            continue
        at[TENSOR] = tensor
        for context in range(low[CONTEXT], min(high[CONTEXT], devices // tensor) + 1):
            if devices // tensor % context or not fits(s, tensor, context):
                continue
            at[CONTEXT], left = context, devices // (tensor * context)
            for data in range(low[DATA], min(high[DATA], left, batch) + 1):
                pipeline = left // data
                if left % data or batch % data or pipeline < low[PIPELINE] or pipeline > high[PIPELINE]:
                    continue
                if s[LAYERS] % pipeline:
                    continue
                at[DATA], at[PIPELINE], chunk, share = data, pipeline, int(s[LAYERS]) // pipeline, batch // data
                for micro in range(low[MICRO], min(high[MICRO], share) + 1):
                    if share % micro:
                        continue
                    at[MICRO], count = micro, share // micro
                    head = head_s(s, machine, c, at)
                    for expert in range(low[EXPERT], min(high[EXPERT], data, int(s[EXPERTS])) + 1):
                        if data % expert or s[EXPERTS] % expert:
                            continue
                        at[EXPERT] = expert
                        for sequence in range(low[SEQUENCE], min(high[SEQUENCE], 1) + 1):
                            if sequence and (tensor == 1 or s[LENGTH] % (tensor * context)):
                                continue
                            at[SEQUENCE] = sequence
                            for recompute in range(low[RECOMPUTE], high[RECOMPUTE] + 1):
                                at[RECOMPUTE] = recompute
                                one = layer(s, machine, c, at)
                                for virtual in range(low[VIRTUAL], min(high[VIRTUAL], chunk) + 1):
                                    if virtual > 1 and (pipeline == 1 or chunk % virtual or count % pipeline):
                                        continue
                                    at[VIRTUAL] = virtual
                                    for zero in range(low[ZERO], high[ZERO] + 1):
                                        if zero and data * context == 1:
                                            continue
                                        if at[VERSIONS] > 1 and (zero > 1 or virtual > 1 or pipeline == 1
                                                                 or pipeline > count + 1):  # fmt: skip
                                            continue
                                        at[ZERO] = zero
                                        need = 0.0
                                        for stage in (0, pipeline - 1):  # those between have less than the first
                                            flight = in_flight(at, stage, count, s[LAYERS] / pipeline)
                                            m = held(s, at, s[LAYERS] / pipeline, flight, stage == 0,
                                                     stage == pipeline - 1, one[7], one[8])  # fmt: skip
                                            need = max(need, m[0] + m[1] + m[2] + m[3] + m[4])
                                        for overlap in range(low[OVERLAP], high[OVERLAP] + 1):
                                            at[OVERLAP] = overlap
                                            valid += 1
                                            found = step(s, machine, c, at, one, head, count)
                                            if need > machine[CAPACITY]:
                                                _keep(spill_rows, spill_times, found[TIME], at)
                                                continue
                                            fitting += 1
                                            _keep(rows, times, found[TIME], at)
                                            if best[TIME] > 0:
                                                part, most = -1, 0.0
                                                for i in range(TIME):
                                                    if found[i] - best[i] > most:
                                                        part, most = i, found[i] - best[i]
                                                if part >= 0:
                                                    lost[part] += 1
    return valid, fitting


@inner
def _keep(rows, times, total, at):
    """Insert a configuration into the quickest if it is one of them."""
    place = len(times) - 1
    if total >= times[place]:
        return
    while place > 0 and times[place - 1] > total:
        times[place] = times[place - 1]
        for i in range(len(at)):
            rows[place, i] = rows[place - 1, i]
        place -= 1
    times[place] = total
    for i in range(len(at)):
        rows[place, i] = at[i]
