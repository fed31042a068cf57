"""`StepTimes`: how long one step of an engine takes, as grids that a compiled loop reads, and what a device holds.

A step that works on `t` tokens and samples for `n` sequences, with prompt chunks of `c` tokens after `x` tokens that
are in the cache, and `b` decoding sequences whose mean context is `y`, takes on each pipeline stage

    linear(t) + output(n) + sum over chunks of prefill(c, x) + decode(b, y) + host_s + host_per_sequence_s * sequences

Between the points of a grid, times are linear (bilinear in two dimensions). Beyond the last point, the last segment
continues, and a time is never less than at the last point; a chunk beyond it is cut into several. The range of a step
is [low, high] times its seconds; beyond a grid by the factor r = value / last point (the largest of all grids), it
widens to [low / r, high * r].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from foretrace.arrays import Float64
from foretrace.compiled import njit
from foretrace.errors import ForetraceError

MIDDLE, LOW, HIGH = 0, -1, 1  # which end of the range of a step
_GRIDS = {"linear_s": ("tokens",), "output_s": ("sequences",), "prefill_s": ("chunk", "context"),
          "decode_s": ("batch", "mean_context")}  # fmt: skip
_FIRST = {"context": 0.0}  # the first point of a grid is at most this, else 1: nothing is extrapolated downwards


class TimeTable(NamedTuple):
    """Seconds of one device of the slowest (fullest) pipeline stage, what tensor and expert parallelism do included.

    All grids increase.
    """

    tokens: Float64  # (T,) of a step, prompts and decoding sequences together
    linear_s: Float64  # (T,) products, experts, norms, collectives among tensor-parallel devices
    sequences: Float64  # (N,) that get a token from a step
    output_s: Float64  # (N,) the product with the vocabulary, and sampling
    chunk: Float64  # (C,) tokens of one prompt that a step works on
    context: Float64  # (X,) tokens of that sequence that are in the cache before it; begins at 0
    prefill_s: Float64  # (C, X) attention of one chunk, all layers of the stage
    batch: Float64  # (B,) decoding sequences of a step
    mean_context: Float64  # (Y,) tokens that they attend to, mean over the sequences
    decode_s: Float64  # (B, Y) attention of all decoding sequences, all layers of the stage
    host_s: float = 0.0  # of a step, that no device work hides: scheduling, preparing inputs, handling outputs
    host_per_sequence_s: float = 0.0  # the same for each sequence of the step
    low: float = 1.0  # 80 % range of a step, as factors
    high: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepTimes:
    """The time of one step, by what is in it, and the memory of one device of the fullest stage. Seconds, bytes.

    FLOPs are those of the whole model. Raises ForetraceError where a grid is not increasing or begins too late, or its
    times have another shape or are no times.
    """

    table: TimeTable
    model: str = ""
    device: str = ""
    devices: int = 1  # of one engine
    stages: int = 1  # of its pipeline
    server: str = ""  # all that the times depend on, in words
    request_s: float = 0.0  # of a request beside steps: on its way, read, its first token sent back
    send_s: float = 0.0  # from a stage to the next one, per step: latency
    send_per_token_s: float = 0.0
    memory_bytes: float  # of the device
    weight_bytes: float  # on it
    kv_bytes_per_token: float  # keys and values of one token on it
    activation_bytes_per_token: float = 0.0  # largest live activations, per token of a step
    buffer_bytes: float = 0.0  # of communication, graphs, and the context of the process
    flops_per_token: float = 0.0  # of products with weights, two for each weight that a token meets
    flops_per_output: float = 0.0  # of the product with the vocabulary, for each token that comes out
    flops_per_pair: float = 0.0  # of attention, for each token and each token that it attends to
    peak_flops: float = 0.0  # dense peak of all devices of the engine, FLOP/s
    transfer_bytes_per_s: float = 0.0  # from a device to a device of another engine, of keys and values
    accepted: tuple[float, ...] = ()  # of a round's k proposals: probability that the first 1, ..., k all are; no draft
    whys: tuple[str, ...] = ()  # one sentence on each source of the numbers

    def __post_init__(self) -> None:
        """Check the grids and the numbers; loops are compiled for one type of each."""
        alike: Any = (np.ascontiguousarray(each, np.float64) if np.ndim(each) else float(each) for each in self.table)
        t = TimeTable(*alike)
        object.__setattr__(self, "table", t)
        for name, axes in _GRIDS.items():
            for axis in axes:
                grid, first = getattr(t, axis), _FIRST.get(axis, 1.0)
                if grid.ndim != 1 or len(grid) < 2 or not (np.diff(grid) > 0).all() or not 0 <= grid[0] <= first:
                    raise ForetraceError(f"`{axis}=` must be two or more increasing numbers from {first:g} or less on.")
            times = getattr(t, name)
            shape = tuple(len(getattr(t, axis)) for axis in axes)
            if times.shape != shape or not (np.isfinite(times) & (times >= 0)).all():
                raise ForetraceError(f"`{name}=` must be {shape} finite seconds from 0 on, got shape {times.shape}.")
        if not 0 < t.low <= 1 <= t.high < np.inf:
            raise ForetraceError(f"the range of a step must hold 1, got `low={t.low:g}` and `high={t.high:g}`.")

    def capacity_tokens(self, utilisation: float, tokens_per_step: int) -> float:
        """Return tokens that fit beside weights, activations of the largest step, and buffers; it may be below 0."""
        free = self.memory_bytes * utilisation - self.weight_bytes - self.buffer_bytes
        return (free - self.activation_bytes_per_token * tokens_per_step) / self.kv_bytes_per_token


# --- compiled: the seconds of one step -------------------------------------------------------------------------------


@njit()
def segment(grid: Float64, x: float) -> int:
    """Return the i with grid[i] <= x < grid[i + 1]; the first or the last segment where x lies outside."""
    return min(max(int(np.searchsorted(grid, x, side="right")) - 1, 0), len(grid) - 2)


@njit()
def along(grid: Float64, values: Float64, x: float) -> float:
    """Return a time of a grid with one axis."""
    i = segment(grid, x)
    share = (x - grid[i]) / (grid[i + 1] - grid[i])
    found: float = values[i] + share * (values[i + 1] - values[i])
    return max(found, values[i + 1]) if share > 1.0 else found


@njit()
def _between(values: Float64, i: int, j: int, s: float, t: float) -> float:
    upper = values[i, j] + t * (values[i, j + 1] - values[i, j])
    lower = values[i + 1, j] + t * (values[i + 1, j + 1] - values[i + 1, j])
    found: float = upper + s * (lower - upper)
    return found


@njit()
def within(rows: Float64, columns: Float64, values: Float64, i: int, j: int, x: float, y: float) -> float:
    """Return a time of a grid with two axes, whose segments i and j are known."""
    s = (x - rows[i]) / (rows[i + 1] - rows[i])
    t = (y - columns[j]) / (columns[j + 1] - columns[j])
    found: float = _between(values, i, j, s, t)
    return max(found, _between(values, i, j, min(s, 1.0), min(t, 1.0))) if s > 1.0 or t > 1.0 else found


@njit()
def across(rows: Float64, columns: Float64, values: Float64, x: float, y: float) -> float:
    """Return a time of a grid with two axes."""
    return within(rows, columns, values, segment(rows, x), segment(columns, y), x, y)


@njit()
def prefill_seconds(table: TimeTable, chunk: int, context: int) -> float:
    """Return seconds of the attention of a chunk of a prompt after a context.

    A longer chunk than the grid has counts as several of the longest, each after those before it: its pairs of tokens
    grow with its square, which a straight line would miss.
    """
    most, found, left, before = table.chunk[-1], 0.0, float(chunk), float(context)
    while left > most:
        found += across(table.chunk, table.context, table.prefill_s, most, before)
        left, before = left - most, before + most
    return found + across(table.chunk, table.context, table.prefill_s, left, before)


@njit()
def decode_seconds(table: TimeTable, sequences: int, context: float) -> float:
    """Return seconds of the attention of decoding sequences with this mean context."""
    return across(table.batch, table.mean_context, table.decode_s, sequences, context)


@njit()
def fixed_seconds(table: TimeTable, tokens: int, sequences: int, outputs: int) -> float:
    """Return seconds of a step, all but attention."""
    host = table.host_s + table.host_per_sequence_s * sequences
    return along(table.tokens, table.linear_s, tokens) + along(table.sequences, table.output_s, outputs) + host


@njit()
def beyond(table: TimeTable, step: Any) -> float:
    """Return by which factor a step, a record with its counts, lies outside of the grids, prompts aside."""
    found = max(step.tokens / table.tokens[-1], step.outputs / table.sequences[-1])
    if step.decodes:
        found = max(found, step.decodes / table.batch[-1], step.context / step.decodes / table.mean_context[-1])
    return float(found)


@njit()
def in_range(table: TimeTable, seconds: float, beyond: float, end: int) -> float:
    """Return the middle or an end of the range of a step that lies outside of grids by the factor `beyond`."""
    if end == LOW:
        return seconds * table.low / max(beyond, 1.0)
    return seconds * table.high * max(beyond, 1.0) if end == HIGH else seconds
