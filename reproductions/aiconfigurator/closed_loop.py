"""A closed loop of clients on one engine: of which steps its mean TTFT and TPOT consist, whatever these steps take.

`clients` requests are in flight; a finished one is followed by the next prompt. Who is in which step depends on counts
of tokens and steps alone, never on a time, so a row is played once, and means of it for any step times are one product:
`play(...) @ components`. Steps between two changes of the batch are taken together, at the mean context of these steps.
Prompts join steps of decoding sequences up to a budget of tokens (vLLM, TensorRT-LLM), or have steps of their own
(SGLang), whose scheduler looks for requests every so many steps. Requests hold keys and values of prompt and output
from their admission on. The engine simulator of the product says how near this is (`test_aiconfigurator.py`).
"""

from __future__ import annotations

import numpy as np

from foretrace.arrays import Float64, Int64
from foretrace.compiled import njit

TOKENS = np.unique(np.round(np.geomspace(1, 65536, 34)))
SEQUENCES = np.unique(np.round(np.geomspace(1, 8192, 20)))
# Behind times of steps by TOKENS and by SEQUENCES that get a token: seconds of attention for each token that decoding
# attends to and for each pair of a prompt, and of the host for each step and for each sequence of a step.
OTHERS = 4


@njit()
def _between(made: Float64, grid: Float64, first: int, x: float, tpot: float, ttft: float) -> None:
    """Count a time at x with the two points of the grid around it; the last segment continues."""
    low, high = 0, len(grid) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if grid[middle] <= x:
            low = middle
        else:
            high = middle
    share = (x - grid[low]) / (grid[low + 1] - grid[low])
    made[0, first + low] += tpot * (1 - share)
    made[0, first + low + 1] += tpot * share
    made[1, first + low] += ttft * (1 - share)
    made[1, first + low + 1] += ttft * share


@njit()
def _up(keys: Int64, slots: Int64, count: int) -> None:
    """Sift the last of a heap up."""
    at = count - 1
    while at > 0:
        above = (at - 1) // 2
        if keys[above] <= keys[at]:
            break
        keys[above], keys[at] = keys[at], keys[above]
        slots[above], slots[at] = slots[at], slots[above]
        at = above


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
    tokens: Float64, sequences: Float64, prompts: Int64, outputs: Int64, clients: int, most: int, capacity: float,
    budget: int, mixed: bool, poll: int, gather: int, wait: int, share: float,
) -> Float64:  # fmt: skip
    """(2, tokens + sequences + OTHERS) of what mean TPOT and TTFT of n requests in their order consist.

    `tokens` and `sequences` are grids of times of steps. `most` sequences at most are in the engine, which holds
    `capacity` tokens; a step works on `budget` tokens; `poll` steps lie between two looks for requests. With decoding
    sequences, prompts wait until `gather` of them do, or for `wait` steps. The first `clients` requests count with
    weight `share`, the others with the rest; there must be more of them than clients.
    """
    n, t, o = len(prompts), len(tokens), len(tokens) + len(sequences)
    made = np.zeros((2, o + OTHERS))
    weights = np.full(n, (1 - share) / (n - clients))
    weights[:clients] = share / clients
    keys, slots = np.empty(most + 1, np.int64), np.empty(most + 1, np.int64)  # of decoding: last step, request
    decoding, running, step, polled, context, held = 0, 0, 0, 0, 0.0, 0.0
    sent, seen, admitted, begun, done, finished, since = clients, 0, 0, 0, 0, 0, -1
    tpot, ttft = 0.0, weights[:clients].sum()  # weights of a second: of who decodes, by token, and of who waits
    while finished < n:
        if step >= polled or running == 0:
            seen, polled = sent, step + poll
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
            count, worked, attended = 1, float(used + beside), context if beside else 0.0
            decoded = 1 if mixed else 0  # steps of those that decode
            made[0, o + 1] += tpot * pairs
            made[1, o + 1] += ttft * pairs
        else:
            count, last, outs = keys[0] - step, begun, decoding
            if sent > seen:  # no longer than until the next look
                count = min(count, max(polled - step, 1))
            if seen > admitted and since >= 0 and wait > 0:
                count = min(count, max(since + wait - step, 1))
            count = decoded = max(count, 1)
            worked, attended = float(decoding), count * (context + 0.5 * (count - 1) * decoding)
        _between(made, tokens, 0, worked, tpot * count, ttft * count)
        _between(made, sequences, t, float(max(outs, 1)), tpot * count, ttft * count)
        for at, times in ((o, attended), (o + 2, float(count)), (o + 3, float(count * max(outs, 1)))):
            made[0, at] += tpot * times
            made[1, at] += ttft * times
        context += decoded * decoding
        step += decoded
        while begun < last:
            keys[decoding], slots[decoding] = step + outputs[begun] - 1, begun
            decoding += 1
            _up(keys, slots, decoding)
            context += prompts[begun] + 1
            ttft -= weights[begun]
            tpot += weights[begun] / max(outputs[begun] - 1, 1)
            begun += 1
        while decoding > 0 and keys[0] <= step:
            one = slots[0]
            decoding = _drop(keys, slots, decoding)
            running -= 1
            held -= prompts[one] + outputs[one]
            context -= prompts[one] + outputs[one]
            tpot -= weights[one] / max(outputs[one] - 1, 1)
            finished += 1
            if sent < n:
                ttft += weights[sent]
                sent += 1
    return made
