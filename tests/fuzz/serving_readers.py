"""Readers of what is served: traces of requests, results of load generators, calibrations of servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from foretrace.errors import ForetraceError
from tests.fuzz.reader import Figure, Reader

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
    from foretrace.serving.requests import requests
    from tests.serving.llm.step_cases import constant

    found = requests(str(path), seconds=100.0 * (way & 1))
    yield "arrivals", found.arrival_s
    yield "tokens", np.concatenate([found.prompt, found.output])
    if found.prompt.max() + found.output.max() > 1_000_000 or len(found) > 1000:
        raise ForetraceError("requests of this size are not simulated here.")
    times = constant(0.01, cache=2e6)
    run = simulate(found, times, EngineRules(policy=("chunked", "prefill-first")[way >> 1 & 1]))
    yield "figures", measure([run], times)


BENCH = {
    "backend": "vllm", "request_rate": "inf", "max_concurrency": 2, "completed": 4, "total_input_tokens": 400,
    "total_output_tokens": 40, "mean_ttft_ms": 61.5, "mean_tpot_ms": 8.25,
}  # fmt: skip
LEVEL = {
    name: {figure: {"value": value} for figure in ("p50", "p90", "p99", "mean")}
    for name, value in (("ttft_s", 0.1), ("tpot_s", 0.01))
}
RUNS = {
    "vllm.json": json.dumps(BENCH).encode(),
    "sglang.jsonl": "\n".join(
        json.dumps(BENCH | {"max_concurrency": None, "request_rate": rate}) for rate in (0.5, float("inf"))
    ).encode(),
    "lengths.json": json.dumps(BENCH | {"input_lens": [9, 8, 7, 6], "output_lens": [2, 1, 3, 4]}).encode(),
    "own.json": json.dumps(
        {
            "command": "llm simulate",
            "requests": 4,
            "source": "closed concurrency=2 prompt=90 output=9",
            "server": "",
            "replicas": 1,
            "policy": "chunked",
            "pools": None,
            "speculation": None,
        }
        | LEVEL
    ).encode(),
}
CALIBRATIONS = {
    "server.json": json.dumps(
        {"format": 2, "model": "", "device": "", "devices": 1, "stages": 1, "server": "", "level": 1.1, "host_s": 0.003,
         "request_s": 0.05, "low": 0.8, "high": 1.2, "runs": []}
    ).encode(),
}  # fmt: skip


def _play_runs(path: Path, way: int) -> Iterator[Figure]:
    from foretrace.serving.llm.calibration import read_runs

    for run in read_runs(path):
        yield run.source, [run.load, run.ttft_s, run.tpot_s]
        yield "tokens", np.concatenate([run.requests.prompt, run.requests.output])


def _play_calibration(path: Path, way: int) -> Iterator[Figure]:
    from foretrace.serving.llm.calibration import read_calibration
    from tests.serving.llm.step_cases import constant

    steps = read_calibration(path).applied(constant(0.01))
    table = steps.table
    yield "steps", [*table.linear_s, table.host_s, steps.request_s, table.low, table.high]


FOUND = {
    "engine": {"tp": 1, "pp": 1, "policy": "chunked", "token_budget": 512, "sequences": 32}, "requests_per_s": 4.5,
    "tokens_per_s_device": 90.0, "tokens_per_s_user": 30.0,
}  # fmt: skip
STATES = {"state.json": json.dumps({"question": "asked", "found": [FOUND]}).encode()}


def _play_state(path: Path, way: int) -> Iterator[Figure]:
    from foretrace.serving.llm.capacity import read_state

    for one in read_state(path, "asked"):
        yield "rates", [one.requests_per_s, one.tokens_per_s_device, one.tokens_per_s_user]


def serving_readers() -> Iterator[Reader]:
    """One for each kind of file."""
    yield Reader(name="requests", covers=("serving.requests",), samples=lambda: TRACES, play=_play_requests)
    yield Reader(name="engine-runs", covers=("serving.llm.calibration",), samples=lambda: RUNS, play=_play_runs)
    yield Reader(name="engine-calibration", covers=("serving.llm.calibration",), samples=lambda: CALIBRATIONS,
                 play=_play_calibration)  # fmt: skip
    yield Reader(name="engine-capacities", covers=("serving.llm.capacity",), samples=lambda: STATES, play=_play_state)
