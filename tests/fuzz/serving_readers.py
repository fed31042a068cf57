"""Readers of what is served: traces of requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from foretrace.errors import ForetraceError
from tests.fuzz.readers import Figure, Reader

TRACES = {
    "azure.csv": b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6,37,44\n2023-11-16 18:15:50.9,3,9\n",
    "vidur.csv": b"arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,48,10\n0.052,31,8\n0.09,110,27\n",
    "own.csv": b"arrival_s,prompt,output\n1.5,30,4\n0,10,2\n2,7,1\n",
    "mooncake.jsonl": "\n".join(
        json.dumps({"timestamp": 250 * i, "input_length": 1100, "output_length": 5 + i, "hash_ids": [7, 8, 9 + i]})
        for i in range(4)
    ).encode(),
}


def _play_requests(path: Path, way: int) -> Iterator[Figure]:
    from foretrace.serving.llm.engine import EngineRules, simulate
    from foretrace.serving.llm.metrics import measure
    from foretrace.serving.llm.requests import requests
    from tests.serving.llm.step_cases import constant

    found = requests(str(path), seconds=100.0 * (way & 1))
    yield "arrivals", found.arrival_s
    yield "tokens", np.concatenate([found.prompt, found.output])
    if found.prompt.max() + found.output.max() > 1_000_000 or len(found) > 1000:
        raise ForetraceError("requests of this size are not simulated here.")
    times = constant(0.01, cache=2e6)
    run = simulate(found, times, EngineRules(policy=("chunked", "prefill-first")[way >> 1 & 1]))
    yield "figures", measure([run], times)


def serving_readers() -> Iterator[Reader]:
    """One for each kind of file."""
    yield Reader(name="requests", covers=("serving.llm.requests",), samples=lambda: TRACES, play=_play_requests)
