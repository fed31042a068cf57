"""What is said of simulated engines: figures and ranges, steps as graphs, pools apart, and what cannot be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from foretrace import flow
from foretrace.cli.app import run as command
from foretrace.errors import ForetraceError
from foretrace.report import page
from foretrace.report.llm import llm_simulated
from foretrace.serving import requests as served
from foretrace.serving.llm.engine import EngineRules, disaggregate, simulate
from foretrace.serving.llm.metrics import limits, measure
from foretrace.serving.llm.scheduler import bin_seconds, gap_bin
from foretrace.serving.llm.simulation import SimulationConfig, simulated
from foretrace.serving.llm.step_graph import steps_graph
from foretrace.simulate.timeline import simulate as replay
from tests.serving.llm.step_cases import constant

ASK = SimulationConfig(model="llama-3-8b", device="h100", asked="poisson qps=3 prompt=1-400 output=1-60", seconds=30)


def test_figures_of_three_requests() -> None:
    """By hand: steps of 1 s, requests at 0, 0.5 and 10 s with 3, 1 and 2 tokens."""
    steps = constant(1.0, flops_per_token=2, flops_per_output=3, peak_flops=10.0)
    run = simulate(served.of([0.0, 0.5, 10.0], [4, 6, 5], [3, 1, 2]), steps)
    found = measure([run], steps, limits("ttft=1.2s tpot=1s"))
    # first tokens at 1, 2 and 11 s, last at 3, 2 and 12 s
    assert found.latencies["ttft"].p50.value == 1.0 == found.latencies["tpot"].mean.value
    assert found.latencies["ttft"].mean.value == pytest.approx((1 + 1.5 + 1) / 3)
    assert found.latencies["e2e"].mean.value == pytest.approx((3 + 1.5 + 2) / 3)
    gaps, rates = found.latencies["itl"], {name: each.value for name, each in found.rates.items()}
    assert gaps.mean.value == 1.0 and gaps.p99.value == pytest.approx(1.0, rel=0.008)
    assert (rates["seconds"], rates["tokens_per_s"], rates["busy"], rates["goodput"]) == (12, 0.5, 5 / 12, 2 / 12)
    assert rates["mfu"] == pytest.approx((2 * (6 + 6 + 6) + 3 * (3 + 1 + 2)) / 120)
    assert [each.met for each in found.limits] == ["no", "yes"]


def test_a_cache_has_no_more_of_a_prompt_than_there_is() -> None:
    """Twelve equal prompts that take each other's room: what a preempted one finds again was not saved twice."""
    n, at = 12, np.arange(0, 49, 4)
    asked = served.of(
        [0.0] * n, [64] * n, [60] * n, hash_first=at, hashes=np.tile([1, 2, 3, 4], n), hash_tokens=16
    )  # fmt: skip
    steps = constant(0.1, cache=400, flops_per_token=1.0, flops_per_pair=1.0, peak_flops=1.0)
    run = simulate(asked, steps, EngineRules(watermark=0.0, token_budget=64))
    rates = {name: each.value for name, each in measure([run], steps).rates.items()}
    assert run.preemptions > 0
    assert run.hits > run.found.sum() == (n - 1) * 48
    assert rates["prefix_hits"] == pytest.approx((n - 1) / n * 48 / 64)
    once = n * (123 + 123 * 124 / 2) - (n - 1) * (48 + 48 * 49 / 2)  # every token, and those that it attends to
    assert rates["mfu"] == pytest.approx(once / run.seconds)


def test_gap_bins_hold_their_times() -> None:
    for time in np.geomspace(1e-6, 1e3, 999):
        assert bin_seconds(gap_bin(time)) == pytest.approx(time, rel=0.004)
    assert gap_bin(0.0) == 0


def test_every_figure_lies_in_its_range() -> None:
    found = simulated(ASK).figures
    for latency in found.latencies.values():
        for of in ("p50", "p90", "p99", "mean"):
            each = getattr(latency, of)
            assert each.low < each.value < each.high
    rate = found.rates["tokens_per_s"]
    assert None not in (rate.low, rate.value, rate.high)
    assert rate.low <= rate.value <= rate.high  # type: ignore[operator]


@pytest.mark.parametrize("stages", [1, 3])
def test_steps_as_a_graph_take_what_the_engine_took(stages: int) -> None:
    """The replay of the graph ends every step when the engine did, to the rounding of tasks to nanoseconds."""
    grid = np.array([0.0, 50.0, 1e9])
    times = constant(
        0.01, stages=stages, tokens=grid, linear_s=np.array([0.01, 0.02, 1e6]), host_s=0.002, send_s=0.001,
        prefill_s=np.array([[0.0, 0.0], [1e6, 1e6]]), decode_s=np.array([[0.0, 0.0], [0.0, 1e12]]), cache=300,
    )  # fmt: skip
    rules = EngineRules(preemption="swap", sequences=12)
    asked = served.requests("poisson qps=9 prompt=1-90 output=1-30", seconds=9)
    run = simulate(asked, times, rules, log=2000)
    assert run.steps == len(run.log) and run.preemptions
    timeline = replay(steps_graph(run, times, rules))
    ends = np.sort(timeline.end[timeline.graph.marks])[1:] / 1e9
    if stages == 1:
        np.testing.assert_allclose(ends - ends[0], run.log.end - run.log.end[0], atol=1e-6)
    assert ends[-1] - run.log.start[0] == pytest.approx(run.seconds - run.log.start[0], abs=1e-5)
    with pytest.raises(ForetraceError, match="no steps were kept"):
        steps_graph(simulate(asked, times, rules), times, rules)


def test_pools_apart() -> None:
    """One request by hand: 1 s of prompt, 4 s of transfer, then two steps of 1 s; a second one waits for the link."""
    times = constant(1.0, transfer_bytes_per_s=2500.0)  # 10 tokens of 1,000 bytes
    run = disaggregate(served.of([0.0, 0.0], [10, 10], [3, 3]), times, prefill=1, decode=1)
    assert run.first_s.tolist() == [1, 1]
    assert run.finish_s.tolist() == [1 + 4 + 2, 1 + 4 + 4 + 2]
    assert run.emitted == 6 and run.replicas == 2
    one = disaggregate(served.of([0.0], [10], [1]), times, prefill=2, decode=3)
    assert one.finish_s.tolist() == [1] and one.replicas == 5
    with pytest.raises(ForetraceError, match="each pool must have an engine"):
        disaggregate(served.of([0.0], [10], [1]), times, prefill=0, decode=1)
    with pytest.raises(ForetraceError, match="`transfer_bytes_per_s=` must be above 0"):
        disaggregate(served.of([0.0], [10], [1]), constant(1.0), prefill=1, decode=1)
    with pytest.raises(ForetraceError, match="open arrivals"):
        disaggregate(served.requests("closed concurrency=1 requests=2"), times, prefill=1, decode=1)


def test_a_short_prompt_overtakes_a_long_one() -> None:
    """Prompts of 9 and 1 s on engines of their own: the second request arrives first, and each keeps its own length."""
    times = constant(0.0, linear_s=np.array([0.0, 1e9]), transfer_bytes_per_s=1e12)  # 1 s per token of a step
    run = disaggregate(served.of([0.0, 0.0], [9, 1], [2, 5]), times, prefill=2, decode=1)
    assert run.first_s.tolist() == [9, 1]
    assert run.finish_s == pytest.approx([10, 5])


def test_best_pools_are_the_best_that_were_tried() -> None:
    found = simulated(
        SimulationConfig(model="llama-3-8b", device="h100", asked="poisson qps=20", seconds=20, replicas=4,
                         pools="best", slo="ttft=1s tpot=30ms")
    )  # fmt: skip
    assert [(each.prefill, each.decode) for each in found.tried] == [(1, 3), (2, 2), (3, 1)]
    assert found.split is not None and found.split.goodput == max(each.goodput for each in found.tried)
    assert found.figures.rates["goodput"].value == pytest.approx(found.split.goodput)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"model": "llama-2-70b", "device": "a100-40gb"}, r"does not fit.*`tp=\d` is the smallest number of devices"),
        ({"slo": "ttft=10us"}, r"`slo=ttft.p99=1e-05s` cannot be kept: a prompt of"),
        ({"slo": "tpot=1us"}, "cannot be kept"),
        ({"pools": "2-3"}, "must be engines for prompts and for decoding as 2:6"),
        ({"pools": "2:3", "replicas": 4}, "are 5 engines"),
        ({"pools": "best"}, "two pools need two engines"),
        ({"pools": "best", "replicas": 4000}, "every split of at most 1000 engines, .*; give one split as `pools=10"),
        ({"asked": "burst requests=2 prompt=9000000 output=1"}, "does not fit|no request fits"),
        ({"router": "near"}, "`router=near` does not exist"),
    ],
)
def test_what_cannot_be(more: dict[str, object], said: str) -> None:
    ask = SimulationConfig(**({"model": ASK.model, "device": ASK.device, "asked": ASK.asked, "seconds": 30.0} | more))  # type: ignore[arg-type]
    with pytest.raises(ForetraceError, match=said) as error:
        simulated(ask)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("row", "latency", "of"), [
    ({"output_length": 1, "hash_ids": [0, 0]}, "e2e", "p50"),  # no answer has a second token
    ({"output_length": 9, "hash_ids": [1, 2]}, "ttft", "p50"),  # all but the first find their prompt in the cache
])  # fmt: skip
def test_a_limit_that_requests_keep_is_possible(row: dict[str, object], latency: str, of: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [row | {"timestamp": 1000 * i, "input_length": 1025} for i in range(9)]
    path.write_text("\n".join(map(json.dumps, rows)))
    ask = SimulationConfig(model="llama-3-8b", device="h100", asked=str(path))
    least = getattr(simulated(ask).figures.latencies[latency], of).low
    assert least is not None
    (met,) = simulated(replace(ask, slo=f"{latency}.{of}={1.01 * least}s")).figures.limits
    assert met.met == "maybe"


def test_page_shows_distributions_and_the_cache() -> None:
    found = llm_simulated(simulated(ASK))
    text = page.render(found)
    assert text.count("<polyline") == 5
    for word in ("time to first token", "per token", "KV cache in use", "waiting"):
        assert word in text
    assert text == page.render(found)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "llm",
        "simulate",
        "llama-3-8b",
        "--device",
        "h100",
        "--requests",
        "poisson qps=5 prompt=1-200 output=1-30",
    ]
    save, perfetto = tmp_path / "steps.graph", tmp_path / "steps.json"
    assert command([*words, "--seconds", "20", "--save", str(save), "--perfetto", str(perfetto)]) == 0
    assert json.loads(perfetto.read_text())["traceEvents"]
    assert flow.scenario(save).simulate().step_time_s > 0
    capsys.readouterr()
    assert command([*words, "--seconds", "20", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["answered"] == found["requests"] > 50
    assert found["ttft_s"]["p99"]["low"] <= found["ttft_s"]["p99"]["value"] <= found["ttft_s"]["p99"]["high"]
    assert command([*words, "--slo", "ttft=1us"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "--slo" in said


def test_a_seed_below_zero_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["llm", "simulate", "llama-3-8b", "--device", "h100", "--seed", "-1"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
