"""`StepTimes`: how long one step of an engine takes, as grids that a compiled loop reads, and what a device holds.

A step that works on `t` tokens and samples for `n` sequences, with prompt chunks of `c` tokens after `x` tokens that
are in the cache, and `b` decoding sequences whose mean context is `y`, takes on each pipeline stage

    linear(t) + output(n) + sum over chunks of prefill(c, x) + decode(b, y) + host_s + host_per_sequence_s * sequences

Between the points of a grid, times are linear (bilinear in two dimensions). Beyond the last point, the last segment
continues, and a time is never less than at the last point. The range of a step is [low, high] times its seconds; beyond
a grid by the factor r = value / last point (the largest of all grids), it widens to [low / r, high * r].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from foretrace.arrays import Float64
from foretrace.errors import ForetraceError

_GRIDS = {"linear_s": ("tokens",), "output_s": ("sequences",), "prefill_s": ("chunk", "context"),
          "decode_s": ("batch", "mean_context")}  # fmt: skip
_FIRST = {"context": 0.0}  # the first point of a grid is at most this, else 1: nothing is extrapolated downwards


class TimeTable(NamedTuple):
    """The part of `StepTimes` that compiled loops read. See there."""

    tokens: Float64
    linear_s: Float64
    sequences: Float64
    output_s: Float64
    chunk: Float64
    context: Float64
    prefill_s: Float64
    batch: Float64
    mean_context: Float64
    decode_s: Float64
    host_s: float
    host_per_sequence_s: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepTimes:
    """The time of one step, by what is in it, and the memory of one device. Seconds, bytes.

    Times and bytes are those of one device of the slowest (fullest) pipeline stage; tensor and expert parallelism are
    in them. FLOPs are those of the whole model. Raises ForetraceError where a grid is not increasing or begins too
    late, or its times have another shape or are no times.
    """

    model: str = ""
    device: str = ""
    devices: int = 1  # of one engine
    stages: int = 1  # of its pipeline
    tokens: Float64  # (T,) of a step, prompts and decoding sequences together; increasing, as all grids
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
    request_s: float = 0.0  # of a request beside steps: on its way, read, its first token sent back
    low: float = 1.0  # 80 % range of a step, as factors
    high: float = 1.0
    send_s: float = 0.0  # from a stage to the next one, per step: latency
    send_per_token_s: float = 0.0
    memory_bytes: float  # of the device
    weight_bytes: float  # on it
    kv_bytes_per_token: float  # keys and values of one token on it
    activation_bytes_per_token: float = 0.0  # largest live activations, per token of a step
    buffer_bytes: float = 0.0  # of communication, graphs, and the context of the process
    flops_per_token: float = 0.0  # of products with weights, two for each weight that a token meets
    flops_per_pair: float = 0.0  # of attention, for each token and each token that it attends to
    peak_flops: float = 0.0  # dense peak of all devices of the engine, FLOP/s
    transfer_bytes_per_s: float = 0.0  # from a device to a device of another engine, of keys and values
    accepted: tuple[float, ...] = ()  # of a round's k proposals: probability that the first 1, ..., k all are; no draft
    whys: tuple[str, ...] = ()  # one sentence on each source of the numbers

    def __post_init__(self) -> None:
        """Check the grids and the numbers."""
        for name, axes in _GRIDS.items():
            for axis in axes:
                grid = getattr(self, axis)
                first = _FIRST.get(axis, 1.0)
                if grid.ndim != 1 or len(grid) < 2 or not (np.diff(grid) > 0).all() or not 0 <= grid[0] <= first:
                    raise ForetraceError(f"`{axis}=` must be two or more increasing numbers from {first:g} or less on.")
            times = getattr(self, name)
            shape = tuple(len(getattr(self, axis)) for axis in axes)
            if times.shape != shape or not (np.isfinite(times) & (times >= 0)).all():
                raise ForetraceError(f"`{name}=` must be {shape} finite seconds from 0 on, got shape {times.shape}.")
        if not 0 < self.low <= 1 <= self.high < np.inf:
            raise ForetraceError(f"the range of a step must hold 1, got `low={self.low:g}` and `high={self.high:g}`.")

    @property
    def table(self) -> TimeTable:
        """What a compiled loop reads."""
        grids = {name: np.ascontiguousarray(getattr(self, name), np.float64) for name in TimeTable._fields[:10]}
        return TimeTable(**grids, host_s=float(self.host_s), host_per_sequence_s=float(self.host_per_sequence_s),
                         low=float(self.low), high=float(self.high))  # fmt: skip

    def capacity_tokens(self, utilisation: float, tokens_per_step: int) -> float:
        """Return tokens whose keys and values fit beside weights, activations of the largest step, and buffers; may be
        < 0.
        """
        free = self.memory_bytes * utilisation - self.weight_bytes - self.buffer_bytes
        return (free - self.activation_bytes_per_token * tokens_per_step) / self.kv_bytes_per_token
