# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""The compiled loops: one product on systolic arrays, what crosses the memory for it, one layer of a transformer.

Cycles on an array are SCALE-Sim's closed forms (Samajdar et al., ISPASS 2020; equal to its program). All cores share a
buffer whose ports give so many words a cycle; nothing is sent to several cores at once, which would need a network on
the chip. Sums of products are not split over cores.
"""

from __future__ import annotations

import numpy as np

from foretrace.arrays import Float64
from foretrace.compiled import inner, njit
from foretrace.hardware.accelerators import Accelerator

# Positions in the array of a machine, behind the first seven, which planners have of any device.
CORES, ROWS, COLUMNS, LANES, BUFFER, PORTS, CLOCK = range(7, 14)
MEMORY = 1
WORD = 2.0  # bytes of a number
# Operations of a lane for each number, forward and backward: moments, differences, a reciprocal root; the largest, an
# exponential in four, a sum, a quotient; a polynomial of eight; a sum. Assumed: no vector unit is described in public.
NORM, SOFTMAX, ACTIVATION, ADD = (7.0, 10.0), (8.0, 4.0), (8.0, 10.0), (1.0, 1.0)
OUTPUT, WEIGHT, INPUT = range(3)  # what stays in the array
# Rows of a layer's operators: forward in their order, then backward.
OPERATORS = (
    "norm 1", "query key value", "scores", "softmax", "context", "output", "residual 1", "norm 2", "up", "activation",
    "down", "residual 2",
    "residual 2 back", "down input", "down weight", "activation back", "up input", "up weight", "norm 2 back",
    "residual 1 back", "output input", "output weight", "context input", "context weight", "softmax back",
    "scores input", "scores weight", "query key value input", "query key value weight", "norm 1 back",
)  # fmt: skip
FORWARD = 12  # of them
# Of the others: the forward operator whose gradients each computes, and which are those of what came in.
BACK_OF = (11, 10, 10, 9, 8, 8, 7, 6, 5, 5, 4, 4, 3, 2, 2, 1, 1, 0)
OF_INPUT = (13, 16, 20, 22, 25, 27)
CORE = (2, 5)  # first and last + 1 of attention's core, which selective recomputation repeats
KIND, BATCH, M, N, K, NUMBERS, EACH = range(7)  # columns: 1 for products; sizes; of vectors, numbers and work on each


@inner
def folds(flow, m, n, k, rows, columns):
    """Return folds of a product, cycles of each, words that cross the ports in each."""
    if flow == OUTPUT:
        count = np.ceil(m / rows) * np.ceil(n / columns)
        return count, k + rows + columns - 2, k * (rows + columns) + rows * columns
    if flow == WEIGHT:
        count, streamed = np.ceil(k / rows) * np.ceil(n / columns), m
    else:
        count, streamed = np.ceil(k / rows) * np.ceil(m / columns), n
    return count, streamed + 2 * rows + columns - 2, rows * columns + streamed * (rows + 2 * columns)


@inner
def spread(b, m, n, k, cores, rows, columns, ports):
    """Return cycles of `b` products at the best split over cores and dataflow, and words that cross the ports."""
    best, words = np.inf, 0.0
    used = float(cores)
    while used >= 1 and b * m * n * k < best * used * rows * columns:  # fewer cores read less
        over = 1.0
        while True:
            part = 1.0
            while over * part <= used:
                m_share, n_share = np.ceil(m / part), np.ceil(n / np.floor(used / (over * part)))
                shares = np.ceil(m / m_share) * np.ceil(n / n_share)
                for flow in range(3):
                    count, each, moved = folds(flow, m_share, n_share, k, rows, columns)
                    total = count * moved * shares * b
                    cycles = max(np.ceil(b / over) * count * each, total / ports)
                    if cycles < best:
                        best, words = cycles, total
                if part >= m:
                    break
                part *= 2
            if over >= b or over * 2 > used:
                break
            over *= 2
        used = np.floor(used / 2)
    return best, words


@inner
def traffic(m, n, k, buffer):
    """Return words that cross the memory for one product, the best of tilings that fit into half of the buffer (in
    words).

    The other half is loaded ahead. Never below each operand once; the whole if it fits.
    """
    once = m * k + k * n + m * n
    room = buffer / 2
    if once <= room:
        return once
    best = np.inf
    for swapped in range(2):
        rows, columns = (n, m) if swapped else (m, n)
        parts = 1.0
        while True:  # columns in so many parts; output tiles, or panels of k, stay
            width = np.ceil(columns / parts)
            if width + 1 <= room:
                step = min(k, max(room / 16 / (width + 1), 1.0))  # of k that is streamed at a time
                height = np.floor((room - width * step) / (width + step))
                if height >= 1:
                    again = np.ceil(rows / min(height, rows))
                    best = min(best, rows * k * np.ceil(columns / width) + k * columns * again + m * n)
                if (k + 1) * width + k <= room:
                    best = min(best, rows * k * np.ceil(columns / width) + k * columns + m * n)
            if width <= 1:
                break
            parts *= 2
    deep = np.floor(room / (min(m, n) + 1))  # of k, whose operand stays while sums of outputs come and go
    if deep >= 1:
        best = min(best, m * k + k * n + m * n * (2 * np.ceil(k / min(deep, k)) - 1))
    return max(min(best, 2 * m * n * k + m * n), once)


@inner
def product_s(b, m, n, k, machine):
    """Return seconds of `b` products; memory and arrays work at the same time."""
    cycles, _ = spread(b, m, n, k, machine[CORES], machine[ROWS], machine[COLUMNS], machine[PORTS])
    moved = b * traffic(m, n, k, machine[BUFFER] / WORD)
    return max(cycles / machine[CLOCK], moved * WORD / machine[MEMORY])


@inner
def vector_bytes(numbers, buffer):
    """Return bytes that cross the memory for a vector operator: in and out, or none where half of the buffer keeps
    both.
    """
    return 2 * WORD * numbers if 2 * WORD * numbers > buffer / 2 else 0.0


@inner
def vector_s(numbers, each, machine):
    """Return seconds of `each` operations on every one of so many numbers."""
    work = numbers * each / (machine[LANES] * machine[CLOCK])
    return max(work, vector_bytes(numbers, machine[BUFFER]) / machine[MEMORY])


@inner
def operator(
    i, tokens, micro, query_length, length, hidden, heads, kv, width, inner_share, up, active, experts, shared
):  # fmt: skip
    """Return row `i` of OPERATORS for what a device has of a layer: kind, sizes, numbers, work on each.

    `heads`, `kv`, `inner_share`, `experts`: of the device; `up`: matrices that widen; `active`: experts that a token
    goes through, which are spread evenly over `experts`; `shared`: tokens of norms and sums.
    """
    back = 1 if i >= FORWARD else 0
    at = BACK_OF[i - FORWARD] if back else i
    cells, routed = micro * heads * query_length * length, tokens * active
    if at in (0, 7):
        return 0.0, 1.0, 1.0, 1.0, 1.0, shared * hidden, NORM[back]
    if at == 3:
        return 0.0, 1.0, 1.0, 1.0, 1.0, cells, SOFTMAX[back]
    if at in (6, 11):
        return 0.0, 1.0, 1.0, 1.0, 1.0, shared * hidden, ADD[back]
    if at == 9:
        return 0.0, 1.0, 1.0, 1.0, 1.0, routed * inner_share, ACTIVATION[back] + (up - 1)
    b = 1.0
    if at == 1:
        m, n, k = tokens, (heads + 2 * kv) * width, hidden
    elif at == 2:
        b, m, n, k = micro * heads, query_length, length, width
    elif at == 4:
        b, m, n, k = micro * heads, query_length, width, length
    elif at == 5:
        m, n, k = tokens, hidden, heads * width
    elif at == 8:
        b = min(experts, routed)
        m, n, k = routed / b, up * inner_share, hidden
    else:
        b = min(experts, routed)
        m, n, k = routed / b, hidden, inner_share
    if back:  # gradients of what came in, then of the weight (or of the other operand)
        return (1.0, b, m, k, n, 0.0, 0.0) if i in OF_INPUT else (1.0, b, k, n, m, 0.0, 0.0)
    return 1.0, b, m, n, k, 0.0, 0.0


@inner
def layer_s(
    tokens, micro, query_length, length, hidden, heads, kv, width, inner_share, up, active, experts, shared, machine
):  # fmt: skip
    """Return seconds of a layer forward, backward, and of attention's core forward, one operator after another."""
    forward, backward, core = 0.0, 0.0, 0.0
    for i in range(30):
        kind, b, m, n, k, numbers, each = operator(
            i, tokens, micro, query_length, length, hidden, heads, kv, width, inner_share, up, active, experts, shared
        )
        took = product_s(b, m, n, k, machine) if kind else vector_s(numbers, each, machine)
        if i >= FORWARD:
            backward += took
        else:
            forward += took
            if CORE[0] <= i < CORE[1]:
                core += took
    return forward, backward, core


@njit()
def product_columns(sizes: Float64, machines: Float64, out: Float64) -> None:
    """Fill `out` (machines, products, 3): cycles, words across the ports, words across the memory.

    `sizes` (products, 4): b, m, n, k. `machines` (machines, 14): as above.
    """
    for i in range(len(machines)):
        at = machines[i]
        for j in range(len(sizes)):
            b, m, n, k = sizes[j, 0], sizes[j, 1], sizes[j, 2], sizes[j, 3]
            cycles, words = spread(b, m, n, k, at[CORES], at[ROWS], at[COLUMNS], at[PORTS])
            out[i, j, 0] = cycles
            out[i, j, 1] = words
            out[i, j, 2] = b * traffic(m, n, k, at[BUFFER] / WORD)


@njit()
def systolic(flow: int, m: Float64, n: Float64, k: Float64, rows: Float64, columns: Float64, out: Float64) -> None:
    """Fill `out` with the cycle at which one array is done, counted from 0 as SCALE-Sim does."""
    for i in range(len(m)):
        count, each, _ = folds(flow, m[i], n[i], k[i], rows[i], columns[i])
        out[i] = count * each - 1


def machine_columns(design: Accelerator) -> Float64:
    """Return a design as `kernels` takes it, without what planners add."""
    return np.array([0.0, design.hbm_gb_s * 1e9, 0.0, 0.0, 0.0, 0.0, 0.0, *design.array()])


def product_cycles(b: Float64, m: Float64, n: Float64, k: Float64, designs: list[Accelerator]) -> Float64:
    """Return (designs, products, 3): cycles of all cores, words across the ports, words across the memory.

    `b`, `m`, `n`, `k` (products): sizes of each.
    """
    out = np.zeros((len(designs), len(m), 3))
    machines = np.array([machine_columns(each) for each in designs]).reshape(-1, CLOCK + 1)
    product_columns(np.stack([b, m, n, k], axis=1).astype(np.float64), machines, out)
    return out


def systolic_cycles(flow: str, m: Float64, n: Float64, k: Float64, rows: Float64, columns: Float64) -> Float64:
    """Return when one array is done with each product, in cycles from 0 as SCALE-Sim counts them; `flow`: os,
    ws or is.
    """
    out = np.zeros(len(m))
    systolic(("os", "ws", "is").index(flow), m, n, k, rows, columns, out)
    return out
