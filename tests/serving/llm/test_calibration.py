"""Overheads fitted to runs: those that made a run are found again; results of load generators as they save them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from foretrace.errors import ForetraceError
from foretrace.report.llm import llm_simulated
from foretrace.serving.llm.calibration import MeasuredRun, calibrate, read_calibration, read_runs, scaled
from foretrace.serving.llm.deployment import step_times
from foretrace.serving.llm.engine import simulate
from foretrace.serving.llm.metrics import latency_statistics
from foretrace.serving.llm.simulation import SimulationConfig, simulated
from foretrace.serving.llm.step_times import StepTimes
from foretrace.serving.requests import requests

STEPS = step_times("llama-3-8b", "h100")


def run_of(steps: StepTimes, text: str) -> MeasuredRun:
    """What this server would measure of these requests."""
    asked = requests(text)
    run = simulate(asked, steps)
    ttft_s, tpot_s = (latency_statistics(run, name)["mean"] for name in ("ttft", "tpot"))
    assert ttft_s and tpot_s
    return MeasuredRun(source=text, load=float(asked.concurrency), requests=asked, ttft_s=ttft_s, tpot_s=tpot_s)


LOADS = [f"closed concurrency={n} prompt=800-1000 output=100-120 requests={4 * n}" for n in (2, 32)]


@pytest.mark.parametrize(("level", "host_s"), [(1.0, 1e-3), (1.7, 6e-3), (0.6, 2e-4)])
def test_two_loads_tell_host_and_devices_apart(level: float, host_s: float) -> None:
    server = scaled(STEPS, level, host_s, 0.07, 0.9, 1.1)
    found = calibrate(STEPS, [run_of(server, text) for text in LOADS], 0.8, 1.3)
    assert found.level == pytest.approx(level, rel=0.03)
    assert found.host_s == pytest.approx(host_s, rel=0.1, abs=1e-4)
    assert found.request_s == pytest.approx(0.07, abs=5e-3)
    assert (found.low, found.high) == (0.8, 1.3), "nothing is left of the runs: the range of one run at other loads"
    for run in found.runs:
        assert run.tpot_after_s == pytest.approx(run.tpot_s, rel=1e-2)


def test_one_load_gives_the_level_alone_and_is_kept(tmp_path: Path) -> None:
    found = calibrate(STEPS, [run_of(scaled(STEPS, 1.4, STEPS.table.host_s, 0.05, 1, 1), LOADS[0])], 0.8, 1.3)
    assert found.host_s == STEPS.table.host_s and found.level == pytest.approx(1.4, rel=0.01)
    path = tmp_path / "server.json"
    found.save(path)
    assert read_calibration(path) == found
    again = step_times("llama-3-8b", "h100", calibration=path)
    assert again.request_s == found.request_s and (again.table.linear_s == found.level * STEPS.table.linear_s).all()
    others: list[dict[str, Any]] = [{"tp": 2}, {"dtype": "fp8"}, {"engine": "sglang"}]
    for other, said in zip(others, ("tp=2, bf16, vllm", "fp8, vllm", "bf16, sglang"), strict=True):
        with pytest.raises(ForetraceError, match=f"not of llama-3-8b on H100-SXM5-80GB \\({said}\\)"):
            step_times("llama-3-8b", "h100", calibration=path, **other)


def test_runs_that_contradict_widen_the_range() -> None:
    one = run_of(STEPS, LOADS[0])
    found = calibrate(STEPS, [one, replace(one, tpot_s=2.5 * one.tpot_s)], 0.8, 1.3)
    assert found.high > 1.5 and found.low < 0.7


def test_a_server_beyond_belief_is_refused() -> None:
    with pytest.raises(ForetraceError, match="check `tp=`"):
        calibrate(STEPS, [replace(run_of(STEPS, LOADS[0]), tpot_s=9.0)], 0.8, 1.3)
    with pytest.raises(ForetraceError, match="give one measured run"):
        calibrate(STEPS, [], 0.8, 1.3)


VLLM: dict[str, Any] = {
    "date": "20260401-101010", "backend": "vllm", "model_id": "m", "num_prompts": 40, "request_rate": "inf",
    "max_concurrency": 4, "duration": 31.2, "completed": 40, "total_input_tokens": 36000, "total_output_tokens": 3600,
    "mean_ttft_ms": 61.5, "median_ttft_ms": 60.1, "mean_tpot_ms": 8.25, "mean_itl_ms": 8.2,
}  # fmt: skip


def test_what_vllm_saves(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(VLLM))
    (found,) = read_runs(path)
    assert (found.ttft_s, found.tpot_s, found.load) == (0.0615, 0.00825, 4.0)
    assert len(found.requests) == 40 and found.requests.concurrency == 4
    assert found.requests.prompt.mean() == pytest.approx(900, rel=0.03)
    path.write_text(json.dumps(VLLM | {"input_lens": [7] * 40, "output_lens": [90] * 40, "max_concurrency": None,
                                       "request_rate": 2.0}))  # fmt: skip
    (found,) = read_runs(path)
    assert (found.requests.prompt == 7).all() and found.requests.concurrency == 0
    assert found.requests.arrival_s[-1] == pytest.approx(20, rel=0.5)


def test_clients_that_a_rate_leaves_idle_are_no_load(tmp_path: Path) -> None:
    """At 2 requests per second, each 0.8 s long, 64 clients would be a server that is 40 times as busy."""
    path = tmp_path / "bench.json"
    for rate, clients, load in ((2.0, 64, (2.0, 0)), (200.0, 64, (64.0, 64)), (float("inf"), 64, (64.0, 64))):
        path.write_text(json.dumps(VLLM | {"completed": 80, "max_concurrency": clients, "request_rate": rate}))
        (found,) = read_runs(path)
        assert (found.load, found.requests.concurrency) == load


def test_a_simulation_is_a_run_of_its_own_engine_alone(tmp_path: Path) -> None:
    """Of a trace, the requests are read again; several engines, another policy or another server are no run of it."""
    trace, path = tmp_path / "trace.csv", tmp_path / "run.json"
    trace.write_text("arrival_s,prompt,output\n" + "".join(f"{i},{400 + i},{20 + i}\n" for i in range(40)))
    config = SimulationConfig(model="llama-3-8b", device="h100", asked=str(trace), seconds=30)
    ran = msgspec.to_builtins(llm_simulated(simulated(config)))
    path.write_text(json.dumps(ran))
    runs = read_runs(path)
    assert len(runs[0].requests) == 30
    found = calibrate(STEPS, runs, 0.8, 1.3)
    assert found.level == pytest.approx(1, abs=1e-3) and found.request_s == pytest.approx(STEPS.request_s, abs=1e-4)
    with pytest.raises(ForetraceError, match=r"ran llama-3-8b on H100.*, not llama-2-7b"):
        calibrate(step_times("llama-2-7b", "h100"), runs, 0.8, 1.3)
    for other in ({"replicas": 4}, {"policy": "static"}):
        path.write_text(json.dumps(ran | other))
        with pytest.raises(ForetraceError, match="must be of one engine without a draft"):
            read_runs(path)


def test_what_sglang_appends(tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    rows = [VLLM | {"backend": "sglang", "max_concurrency": n, "request_rate": float("inf")} for n in (4, 8)]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")  # with the word Infinity, as Python writes it
    found = read_runs(path)
    assert [run.load for run in found] == [4.0, 8.0] and found[1].source == "bench.jsonl, line 2"


@pytest.mark.parametrize(("text", "said"), [
    ("", "no result"), ("[1]", "no result"), ("{", "no JSON"), ("{}", "missing required field `completed`"),
    (json.dumps(VLLM | {"mean_tpot_ms": -1}), "> 0.0 - at `\\$.mean_tpot_ms`"),
    (json.dumps(VLLM | {"mean_ttft_ms": float("nan")}), "at `\\$.mean_ttft_ms`"),
    ('{"command": "llm simulate", "requests": 3, "source": "closed concurrency=2"}', "missing required field `server`"),
])  # fmt: skip
def test_what_is_no_run(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(text)
    with pytest.raises(ForetraceError, match=said):
        read_runs(path)


@pytest.mark.parametrize("text", ["{}", "x", '{"format": 1}'])
def test_what_is_no_calibration(text: str, tmp_path: Path) -> None:
    path = tmp_path / "server.json"
    path.write_text(text)
    with pytest.raises(ForetraceError, match="calibration"):
        read_calibration(path)
