"""A closed loop of clients on one engine: a few events per request instead of one per step, quick enough to be fitted.

`clients` requests are in flight; a finished one is followed by the next prompt. Steps between two changes of the batch
are taken together, at the mean context of these steps. Prompts join steps of decoding sequences up to a budget of
tokens (vLLM, TensorRT-LLM), or have steps of their own (SGLang), whose scheduler looks for requests every so many
steps. Requests hold keys and values of prompt and output from their admission on. The engine simulator of the product
says how near this is (`test_aiconfigurator.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foretrace.arrays import Float64, Int64
from foretrace.compiled import njit


class LoopTable(NamedTuple):
    """Times of a step, in seconds."""

    tokens: Float64  # grid
    linear_s: Float64
    sequences: Float64  # grid
    output_s: Float64
    per_context: float  # attention of decoding, for each token attended to
    per_pair: float  # attention of prompts
    host_s: float
    host_per_sequence_s: float


@njit()
def _along(grid: Float64, values: Float64, x: float) -> float:
    low, high = 0, len(grid) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if grid[middle] <= x:
            low = middle
        else:
            high = middle
    return float(values[low] + (x - grid[low]) / (grid[low + 1] - grid[low]) * (values[low + 1] - values[low]))


@njit()
def _least(keys: Int64, slots: Int64, count: int) -> int:
    """Sift the last of a heap up."""
    at = count - 1
    while at > 0:
        above = (at - 1) // 2
        if keys[above] <= keys[at]:
            break
        keys[above], keys[at] = keys[at], keys[above]
        slots[above], slots[at] = slots[at], slots[above]
        at = above
    return at


@njit()
def _drop(keys: Int64, slots: Int64, count: int) -> int:
    """Remove the first of a heap."""
    count -= 1
    keys[0], slots[0] = keys[count], slots[count]
    at = 0
    while True:
        below = 2 * at + 1
        if below >= count:
            break
        if below + 1 < count and keys[below + 1] < keys[below]:
            below += 1
        if keys[at] <= keys[below]:
            break
        keys[at], keys[below] = keys[below], keys[at]
        slots[at], slots[below] = slots[below], slots[at]
        at = below
    return count


@njit()
def play(
    table: LoopTable, prompts: Int64, outputs: Int64, clients: int, most: int, capacity: float, budget: int,
    mixed: bool, poll: int, gather: int, wait: int, front_s: Float64, arrived: Float64, first: Float64, ended: Float64,
) -> None:  # fmt: skip
    """Fill `arrived`, `first` and `ended` (n,) seconds for n requests in their order.

    A process in front of the engine works on request i for `front_s[i]`, one after the other. With decoding sequences,
    prompts wait until `gather` of them do, or for `wait` steps.

    `most` sequences at most are in the engine, which holds `capacity` tokens; a step works on `budget` tokens; `poll`
    steps lie between two looks for requests.
    """
    n = len(prompts)
    keys, slots = np.empty(most + 1, np.int64), np.empty(most + 1, np.int64)  # of decoding: last step, request
    decoding, running, step, polled = 0, 0, 0, 0
    context, held, now = 0.0, 0.0, 0.0
    sent = min(clients, n)
    ready = np.empty(n)
    seen, there, admitted, begun, done, finished, since = 0, 0, 0, 0, 0, 0, -1
    front = 0.0
    for i in range(sent):
        arrived[i] = 0.0
        front += front_s[i]
        ready[i] = front
    while finished < n:
        if running == 0 and there < sent and ready[there] > now:
            now = ready[there]
        while there < sent and ready[there] <= now:
            there += 1
        if step >= polled or running == 0:
            seen = there
            polled = step + poll
        if seen > admitted and since < 0:
            since = step
        gathered = decoding == 0 or wait == 0 or seen - admitted >= gather or step - since >= wait
        while gathered and admitted < seen and running < most:
            need = prompts[admitted] + outputs[admitted]
            if held + need > capacity and running > 0:
                break
            held += need
            running += 1
            admitted += 1
            since = -1
        if begun < admitted:  # a step with parts of prompts; `done` tokens of the prompt `begun` are computed
            beside = decoding if mixed else 0
            left = max(budget - beside, 1)
            pairs, used, outs, last = 0.0, 0, beside, begun
            while last < admitted and left > 0:
                part = min(prompts[last] - done, left)
                pairs += part * (done + 0.5 * part)
                used += part
                left -= part
                done += part
                if done < prompts[last]:
                    break
                done = 0
                last += 1
                outs += 1
            spent = (
                _along(table.tokens, table.linear_s, float(used + beside))
                + _along(table.sequences, table.output_s, max(outs, 1))
                + table.per_pair * pairs + table.host_s + table.host_per_sequence_s * (outs + beside)
            )  # fmt: skip
            if beside:
                spent += table.per_context * context
                context += beside
            now += spent
            if mixed:
                step += 1
            while begun < last:
                first[begun] = now
                keys[decoding], slots[decoding] = step + outputs[begun] - 1, begun
                decoding += 1
                _least(keys, slots, decoding)
                context += prompts[begun] + 1
                begun += 1
        else:
            count = keys[0] - step
            each = (
                _along(table.tokens, table.linear_s, float(decoding))
                + _along(table.sequences, table.output_s, float(decoding))
                + table.host_s + table.host_per_sequence_s * decoding
            )  # fmt: skip
            if sent > seen:  # no longer than until the next look for a request that is there
                if there == seen:
                    count = min(count, int((ready[there] - now) / (each + table.per_context * context)) + 1)
                count = min(count, max(polled - step, 1)) if there > seen else count
            if seen > admitted and since >= 0 and wait > 0:
                count = min(count, max(since + wait - step, 1))
            count = max(count, 1)
            now += count * (each + table.per_context * (context + 0.5 * (count - 1) * decoding))
            context += count * decoding
            step += count
        while decoding > 0 and keys[0] <= step:
            one = slots[0]
            ended[one] = now
            decoding = _drop(keys, slots, decoding)
            running -= 1
            held -= prompts[one] + outputs[one]
            context -= prompts[one] + outputs[one]
            finished += 1
            if sent < n:
                arrived[sent] = now
                front = max(front, now) + front_s[sent]
                ready[sent] = front
                sent += 1


@njit()
def mean_times(
    arrived: Float64, first: Float64, ended: Float64, outputs: Int64, wave: int, share: float
) -> tuple[float, float]:
    """Mean TTFT and TPOT; the first `wave` requests count with weight `share`, the others with the rest."""
    ttft, tpot = np.zeros(2), np.zeros(2)
    n = len(arrived)
    for i in range(n):
        at = 0 if i < wave else 1
        ttft[at] += first[i] - arrived[i]
        tpot[at] += (ended[i] - first[i]) / max(outputs[i] - 1, 1)
    rest = max(n - wave, 1)
    return (
        share * ttft[0] / wave + (1 - share) * ttft[1] / rest,
        share * tpot[0] / wave + (1 - share) * tpot[1] / rest,
    )
