"""Step times and requests that tests make."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from foretrace.serving import requests as served
from foretrace.serving.llm.engine import EngineRules
from foretrace.serving.llm.step_times import StepTimes, TimeTable
from foretrace.serving.requests import Requests

BYTES = 1000.0  # of a token's keys and values


def constant(seconds: float, *, cache: float = 1e9, **other: Any) -> StepTimes:
    """Every step takes the same; `cache` tokens fit."""
    grid, none = np.array([0.0, 1e9]), np.zeros((2, 2))
    fields: dict[str, Any] = {
        "tokens": grid, "linear_s": np.full(2, seconds), "sequences": grid, "output_s": np.zeros(2),
        "chunk": grid, "context": grid, "prefill_s": none, "batch": grid, "mean_context": grid, "decode_s": none,
    } | {name: other.pop(name) for name in TimeTable._fields if name in other}  # fmt: skip
    sizes = {"memory_bytes": cache * BYTES / 0.9, "weight_bytes": 0.0, "kv_bytes_per_token": BYTES} | other
    return StepTimes(table=TimeTable(**fields), **sizes)


@st.composite
def steps(draw: st.DrawFn, tokens: int) -> StepTimes:
    """Grids of a few points that requests reach beyond; a cache of so many tokens."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    grids: dict[str, Any] = {
        name: np.sort(rng.choice(np.arange(2, 200), 3, replace=False)).astype(float)
        for name in ("tokens", "sequences", "chunk", "context", "batch", "mean_context")
    }
    for name, grid in grids.items():
        grid[0] = 0.0 if name == "context" else 1.0
    table = TimeTable(
        **grids, linear_s=rng.random(3), output_s=rng.random(3) * 0.1, prefill_s=rng.random((3, 3)),
        decode_s=rng.random((3, 3)), host_s=float(rng.random() * 0.1), host_per_sequence_s=float(rng.random() * 0.01),
        low=0.8, high=1.3,
    )  # fmt: skip
    return StepTimes(
        table=table, send_s=0.01, send_per_token_s=0.001, stages=draw(st.integers(1, 3)),
        accepted=tuple(draw(st.sampled_from([(), (), (0.6,), (1.0, 0.5, 0.25, 0.1), (0.0, 0.0)]))),
        request_s=draw(st.sampled_from([0.0, 0.25, 3.0])),
        memory_bytes=tokens * BYTES / 0.9, weight_bytes=0.0, kv_bytes_per_token=BYTES,
    )  # fmt: skip


@st.composite
def engine_rules(draw: st.DrawFn) -> EngineRules:
    """Small engines."""
    return EngineRules(
        policy=draw(st.sampled_from(["prefill-first", "chunked", "orca", "static"])),
        token_budget=draw(st.integers(1, 80)),
        sequences=draw(st.integers(1, 9)),
        block=draw(st.sampled_from([1, 4, 16])),
        watermark=draw(st.sampled_from([0.0, 0.01, 0.2])),
        preemption=draw(st.sampled_from(["recompute", "swap"])),
        swap_bytes=draw(st.sampled_from([0.0, 100 * BYTES, 1e9])),
        swap_bytes_per_s=1e6,
    )


@st.composite
def request_lists(draw: st.DrawFn) -> Requests:
    """Some requests, many of them at the same moment or with the same beginning."""
    n = draw(st.integers(1, 25))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    prompt, output = rng.integers(1, 90, n), rng.integers(1, draw(st.sampled_from([2, 60])), n)
    arrival = np.sort(rng.choice(np.round(rng.random(n) * draw(st.sampled_from([0.0, 5.0, 40.0])), 1), n))
    more: dict[str, Any] = {}
    if draw(st.booleans()):
        counts = -(-prompt // 16)
        family = rng.integers(0, 3, n)
        alike = rng.integers(0, 5, n)
        hashes = [[f * 100 + j if j <= a else 1000 * (i + 1) + j for j in range(c)]
                  for i, (f, a, c) in enumerate(zip(family, alike, counts, strict=True))]  # fmt: skip
        more = {
            "hash_first": np.concatenate([[0], np.cumsum(counts)]),
            "hashes": np.concatenate(hashes),
            "hash_tokens": 16,
        }
    if draw(st.integers(0, 3)) == 0:
        more["concurrency"], arrival = draw(st.integers(1, 6)), np.zeros(n)
    return served.of(arrival, prompt, output, **more)
