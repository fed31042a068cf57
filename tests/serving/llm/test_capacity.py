"""The most that each deployment serves within limits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foretrace import executor
from foretrace.errors import ForetraceError
from foretrace.report.llm import llm_capacity
from foretrace.serving.llm import capacity as search
from foretrace.serving.llm.capacity import Deployed, capacities, deployments
from foretrace.serving.llm.deployment import step_times
from foretrace.serving.llm.engine import EngineRules, simulate
from foretrace.serving.llm.metrics import falls_behind, latency_statistics, limits
from foretrace.serving.llm.simulation import SimulationConfig
from foretrace.serving.requests import requests

ASK = SimulationConfig(
    model="llama-2-7b", device="h100", asked="poisson prompt=64-256 output=16-64 requests=300",
    slo="ttft.p99=0.2s tpot.p99=40ms",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _few() -> Any:
    """Two policies and two numbers of sequences; the search is the same with more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "RULES", (("chunked", 512), ("prefill-first", 0)))
        patch.setattr(search, "SEQUENCES", (8, 128))
        yield


def test_rate_keeps_limits_and_the_next_does_not() -> None:
    found = capacities(ASK, devices=1, seconds=60)
    assert len(found.engines) == len(list(deployments(1))) == 4
    assert found.left == 0
    for one in found.engines:
        assert one.requests_low <= one.requests_per_s <= one.requests_high
        rules = EngineRules(
            policy=one.engine.policy, token_budget=one.engine.token_budget, sequences=one.engine.sequences
        )
        for factor, kept in ((1.0, True), (1.03, False))[: 1 if one.bound_by == "queue" else 2]:
            asked = requests(ASK.asked + " qps=1")
            gaps = asked.arrival_s - asked.arrival_s[0]
            rate = one.requests_per_s * factor
            faster = replace(asked, arrival_s=gaps * (len(asked) - 1) / gaps[-1] / rate)
            run = simulate(faster, step_times("llama-2-7b", "h100"), rules)
            met = all((latency_statistics(run, each.latency)[each.of] or 0) <= each.seconds for each in limits(ASK.slo))
            assert (met and not falls_behind(run)) == kept, (one, factor)


def test_nothing_beats_the_best_in_both() -> None:
    found = capacities(ASK, devices=1, seconds=60)
    best = [one for one in found.engines if one.best]
    assert best[0] is found.engines[0]
    for one in found.engines:
        assert any(
            each.tokens_per_s_device >= one.tokens_per_s_device and each.tokens_per_s_user >= one.tokens_per_s_user
            for each in best
        )
    assert found.price_per_h is not None
    cost = best[0].usd_per_million_tokens
    assert cost == pytest.approx(found.price_per_h / 3600 / best[0].tokens_per_s_device * 1e6)


def test_an_engine_of_several_devices_is_paid_on_a_machine_that_has_them() -> None:
    """An L4 costs 0.81 dollars alone and 1.15 in a machine of four; engines beyond any machine take the largest."""
    alone, together, beyond = (search._price("l4", devices)[0] for devices in (1, 2, 16))
    assert (alone, together) == pytest.approx((0.8048, 4.6016 / 4)) and beyond is not None
    found = capacities(replace(ASK, model="llama-3-8b", device="l4", slo="ttft.p50=9s"), devices=2, seconds=60)
    for one in found.engines:
        if one.usd_per_million_tokens:
            price = alone if one.engine.devices == 1 else together
            assert price is not None
            assert one.usd_per_million_tokens == pytest.approx(price / 3600 / one.tokens_per_s_device * 1e6)


def test_few_requests_are_told() -> None:
    """50 requests are served at 12 per second, where 20,000 alike are at 17: the engine fills and drains meanwhile."""
    config = replace(ASK, asked="poisson requests=50 prompt=8 output=2")
    told = [llm_capacity(capacities(each, devices=1, seconds=0)).notes for each in (config, replace(
        config, asked="poisson requests=300 prompt=8 output=2"))]  # fmt: skip
    assert ["are few" in " ".join(each) for each in told] == [True, False]


def test_search_stops_and_goes_on(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "_TOGETHER", 0.5)
        patch.setattr(executor, "cores", lambda: 2)
        first = capacities(ASK, devices=1, seconds=0, state=state)
    assert (len(first.engines), first.left) == (1, 3)
    whole = capacities(ASK, devices=1, seconds=60, state=state)
    assert whole.left == 0
    assert whole.engines == capacities(ASK, devices=1, seconds=60).engines
    with pytest.raises(ForetraceError, match="answers another question"):
        capacities(replace(ASK, seed=1), devices=1, state=state)
    state.write_text("{")
    with pytest.raises(ForetraceError, match="is no state of a capacity search"):
        capacities(ASK, devices=1, state=state)


def test_what_does_not_fit_is_said() -> None:
    found = capacities(replace(ASK, model="llama-2-70b"), devices=1, seconds=60)
    assert all(not one.requests_per_s and "does not fit" in one.reason for one in found.engines)
    assert not any(one.best for one in found.engines)


def test_limits_that_nothing_keeps() -> None:
    found = capacities(replace(ASK, slo="ttft.p99=1ms"), devices=1, seconds=60)
    assert all(one.reason == "breaks ttft.p99 at any rate" for one in found.engines)


@pytest.mark.parametrize(
    ("ask", "how", "said"),
    [
        (replace(ASK, slo=""), {}, "must have a limit"),
        (ASK, {"devices": 0}, "`devices=` must be 1 or more"),
        (replace(ASK, asked="closed concurrency=4 requests=9"), {}, "rate that can be changed"),
        (ASK, {"seconds": float("inf")}, "never ends"),
    ],
)
def test_what_cannot_be_asked(ask: SimulationConfig, how: dict[str, Any], said: str) -> None:
    with pytest.raises(ForetraceError, match=said):
        capacities(ask, **how)


def test_engines_are_counted() -> None:
    assert Deployed(tp=4, pp=2, policy="chunked", token_budget=512, sequences=8).devices == 8
    assert {one.devices for one in deployments(8)} == {1, 2, 4, 8}
