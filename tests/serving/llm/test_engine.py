"""The compiled engine against its plain twin, against what queueing theory knows, and what must never happen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from foretrace.errors import ForetraceError
from foretrace.serving import requests as served
from foretrace.serving.llm import scheduler
from foretrace.serving.llm.engine import DoesNotFitError, EngineRules, Served, engine_arrays, simulate
from foretrace.serving.llm.metrics import latencies_of
from foretrace.serving.llm.step_times import StepTimes
from foretrace.serving.requests import Requests, requests
from tests.serving.llm.plain_engine import serve
from tests.serving.llm.step_cases import constant, engine_rules, request_lists, steps


def same_as_twin(asked: Requests, times: StepTimes, rules: EngineRules, **more: Any) -> Served:
    """What both answer; bit for bit the same."""
    found = simulate(asked, times, rules, **more)
    seqs, engine = serve(asked, times, rules, **more)
    for column, name in ((found.first_s, "first"), (found.finish_s, "finish")):
        np.testing.assert_array_equal(column, [getattr(each, name) for each in seqs])
    np.testing.assert_array_equal(found.preempted, [each.preempted for each in seqs])
    np.testing.assert_array_equal(found.found, [each.found for each in seqs])
    gaps = np.zeros(scheduler.GAP_BINS, np.int64)
    np.add.at(gaps, [scheduler.gap_bin(each) for each in engine.gaps], 1)
    np.testing.assert_array_equal(found.gaps, gaps)
    assert (found.steps, found.preemptions, found.hits) == (engine.steps_begun, engine.preemptions, engine.hits)
    assert found.used_s == engine.area
    assert found.kv_most == engine.most_used / engine.total
    return found


@given(data=st.data(), asked=request_lists(), rules=engine_rules(), end=st.sampled_from([0, -1, 1]))
def test_twin(data: st.DataObject, asked: Requests, rules: EngineRules, end: int) -> None:
    times = data.draw(steps(tokens=data.draw(st.integers(16, 600))))
    computed = data.draw(st.booleans()) and not asked.concurrency and bool((asked.output > 1).all())
    found = same_as_twin(asked, times, rules, end=end, begun_s=asked.arrival_s - 0.5 if computed else None)
    conserved(asked, found, computed)


def conserved(asked: Requests, found: Served, computed: bool = False) -> None:
    """Nobody is lost, no token comes out twice, and the cache never holds more than it can."""
    done = ~np.isnan(found.finish_s)
    assert found.emitted == (asked.output - computed)[done].sum()
    least = (asked.output - 1 + (0 if computed else asked.prompt))[done].sum()
    assert found.computed + found.hits >= least
    if not found.preemptions:
        assert found.computed + found.hits == least
    assert 0 <= found.kv_most <= 1
    assert computed or (found.arrival_s <= found.first_s)[done].all()
    assert (found.first_s <= found.finish_s)[done].all()
    assert found.gaps.sum() == found.emitted - (0 if computed else done.sum())
    np.testing.assert_allclose(found.over_time[:, 0].sum(), found.used_s, rtol=1e-9, atol=1e-12)
    stayed = (found.finish_s - found.arrival_s)[done].sum()  # Little's law: who runs or waits, over time
    np.testing.assert_allclose(found.over_time[:, 1:].sum(), stayed, rtol=1e-9, atol=1e-9)


# --- known answers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rho", [0.3, 0.7, 0.9])
def test_m_d_1(rho: float) -> None:
    """One at a time, every step equally long: an M/D/1 queue. Exactly Lindley's recursion; its mean is known."""
    service, n = 0.1, 200_000
    arrival = np.cumsum(np.random.default_rng(7).exponential(service / rho, n))
    found = simulate(served.of(arrival, np.ones(n), np.ones(n)), constant(service), EngineRules(sequences=1))
    wait = found.finish_s - service - arrival
    ahead = arrival - service * np.arange(n)
    np.testing.assert_allclose(wait, np.maximum.accumulate(ahead) - ahead, atol=1e-6)
    assert wait.mean() == pytest.approx(rho * service / (2 * (1 - rho)), rel=0.04)


def test_one_request() -> None:
    """A prompt in three chunks, then a token per step; the first comes with the last chunk."""
    times = constant(1.0, prefill_s=np.array([[0.0, 0.0], [1e9, 1e9]]))  # 1 s for each token of a chunk
    found = simulate(served.of([5.0], [250], [4]), times, EngineRules(token_budget=100))
    assert (found.first_s[0], found.finish_s[0], found.steps) == (5 + 3 + 250, 5 + 3 + 250 + 3, 6)


def test_pipeline() -> None:
    """Two stages of 1 s: two halves of a batch take turns, so a token takes 2 s and none of them idles."""
    asked = served.of([0.0] * 4, [1] * 4, [11] * 4)
    found = simulate(asked, constant(1.0, stages=2), EngineRules(sequences=4))
    assert sorted(found.finish_s) == [22, 22, 23, 23]
    assert found.busy_s == 22 and found.steps == 22


def test_a_cache_is_in_use_on_all_stages_of_a_pipeline() -> None:
    """One sequence in a pipeline of four stages holds its block until it leaves the last one."""
    found = simulate(served.of([0.0], [4], [5]), constant(1.0, stages=4))
    assert (found.seconds, found.busy_s, found.used_s) == (20, 5, 20)


def test_batching_policies_differ() -> None:
    """A short request beside a long one: static batching makes a third one wait for the long one, Orca does not."""
    asked = served.of([0.0, 0.0, 0.5], [1, 1, 1], [2, 50, 1])
    finish = {
        policy: simulate(asked, constant(1.0), EngineRules(policy=policy, sequences=2)).finish_s[2]
        for policy in ("static", "orca", "chunked", "prefill-first")
    }
    assert finish == {"static": 51, "orca": 3, "chunked": 3, "prefill-first": 3}


def test_prefill_first_stalls_decoding_and_chunks_do_not() -> None:
    """A long prompt that comes later: whole, it holds up the tokens of the other; in chunks, it does not."""
    times = constant(0.0, linear_s=np.array([0.0, 1e9]))  # 1 s per token of a step
    asked = served.of([0.0, 5.5], [1, 1000], [20, 1])
    whole = simulate(asked, times, EngineRules(policy="prefill-first"))
    pieces = simulate(asked, times, EngineRules(policy="chunked", token_budget=10))
    assert np.flatnonzero(whole.gaps)[-1] >= scheduler.gap_bin(1000.0)
    assert np.flatnonzero(pieces.gaps)[-1] == scheduler.gap_bin(10.0)
    assert whole.first_s[1] < pieces.first_s[1]


def test_preemption_storm() -> None:
    """Everybody fits at first and nobody at last: prompts and what they generated are computed again."""
    asked = served.of([0.0] * 20, [30] * 20, [60] * 20)
    for preemption in ("recompute", "swap"):
        found = simulate(asked, constant(0.1, cache=800), EngineRules(preemption=preemption, watermark=0.0))
        conserved(asked, found)
        assert found.preemptions > 10
        least = (asked.prompt + asked.output - 1).sum()
        assert (found.computed > least) == (preemption == "recompute")


def test_prefix_cache() -> None:
    """The second of two equal prompts computes only what is behind the last whole block."""
    more: dict[str, Any] = {"hash_first": np.array([0, 4, 8]), "hashes": np.array([1, 2, 3, 4] * 2), "hash_tokens": 16}
    found = simulate(served.of([0.0, 100.0], [64, 64], [5, 5], **more), constant(1.0))
    assert found.hits == 48 and found.computed == 2 * (64 + 4) - 48


def test_routers() -> None:
    """Least outstanding avoids the engine with the long request; prefix-aware finds the one that knows the prompt."""
    asked = served.of([0.0, 1.0, 2.0, 3.0], [1] * 4, [1000, 1, 1000, 1])
    rules = EngineRules(sequences=1)
    turns = simulate(asked, constant(1.0), rules, replicas=2)
    least = simulate(asked, constant(1.0), rules, replicas=2, router="least-outstanding")
    assert turns.finish_s[2] == 2000 and least.finish_s[2] < 1010
    names = np.array([1, 2, 3, 1, 2, 3])
    more: dict[str, Any] = {
        "hash_first": np.arange(0, 16, 2),
        "hashes": np.array([[i, i + 10] for i in [*names, 1]]).ravel(),
    }
    asked = served.of(np.arange(7) * 100.0, [32] * 7, [2] * 7, **more, hash_tokens=16)
    hits = {
        router: simulate(asked, constant(1.0), replicas=2, router=router).hits
        for router in ("round-robin", "least-outstanding", "prefix-aware")
    }
    assert hits["prefix-aware"] == 4 * 16 > hits["round-robin"]


@given(asked=request_lists(), rules=engine_rules(), replicas=st.integers(1, 30))
def test_round_robin_replicas_are_independent(asked: Requests, rules: EngineRules, replicas: int) -> None:
    """Together as each one alone with its own requests."""
    assume(not asked.concurrency)
    times = constant(0.3, cache=200)
    found = simulate(asked, times, rules, replicas=replicas)
    for k in range(min(replicas, len(asked))):
        alone = simulate(asked.take(np.arange(k, len(asked), replicas)), times, rules)
        np.testing.assert_array_equal(found.finish_s[k::replicas], alone.finish_s)


def test_many_replicas_in_processes() -> None:
    """Spread over processes, the answer is the same as in this one."""
    asked = requests("poisson qps=3000 prompt=1-50 output=1-9", seconds=80)
    few = asked.take(np.arange(7, len(asked), 100))
    found = simulate(asked, constant(0.01), replicas=100)
    np.testing.assert_array_equal(found.finish_s[7::100], simulate(few, constant(0.01)).finish_s)
    assert found.emitted == asked.output.sum() and found.replicas == 100


@given(asked=request_lists(), rules=engine_rules())
def test_the_scheduler_drives_another_engine(asked: Requests, rules: EngineRules) -> None:
    """A loop as a live engine has it makes the same steps as the simulator, where all come at once."""
    assume(not asked.concurrency)
    asked = replace(asked, arrival_s=np.zeros(len(asked)))
    rules = replace(rules, swap_bytes=0.0)
    found = simulate(asked, constant(1.0, cache=400), rules)
    state = scheduler.one_engine(engine_arrays(asked, rules, found.blocks))
    for i in range(len(asked)):
        scheduler.push(state, i)
    now = 0.0
    while scheduler.schedule(state):
        now += 1.0
        scheduler.complete(state, state.e[0].number, now)
    np.testing.assert_array_equal(state.seqs.finish, found.finish_s)


def test_closed_loop() -> None:
    """Two clients: each sends when it has its answer."""
    asked = requests("closed concurrency=2 requests=6 prompt=1 output=3")
    found = simulate(asked, constant(1.0))
    np.testing.assert_array_equal(found.arrival_s, [0, 0, 3, 3, 6, 6])
    np.testing.assert_array_equal(found.finish_s, [3, 3, 6, 6, 9, 9])


@pytest.mark.parametrize("clients", [1, 3])
def test_clients_of_a_closed_loop_keep_littles_law(clients: int) -> None:
    """What a request takes beside the engine passes before its client sends the next one."""
    asked = requests(f"closed concurrency={clients} requests={20 * clients} prompt=1 output=3")
    found = simulate(asked, constant(1.0, request_s=7.0))
    (latency,) = set(latencies_of(found)["e2e"])
    assert latency == 7 + 3
    assert len(asked) / found.seconds * latency == pytest.approx(clients)


def test_range_widens_beyond_the_grids() -> None:
    """Twice beyond the last point of a grid, the range of a step is twice as wide."""
    grid = np.array([1.0, 4.0])
    times = constant(1.0, batch=grid)
    rules, asked = EngineRules(sequences=8), served.of([0.0] * 8, [1] * 8, [2] * 8)
    found = [simulate(asked, times, rules, end=end).seconds for end in (-1, 0, 1)]
    assert found == [1 + 0.5, 2, 1 + 2]


def test_a_prompt_beyond_the_grids_costs_its_pairs() -> None:
    """Attention grows with the square of a prompt, also where the grid of chunks ends at an eighth of it."""
    grid = np.array([0.0, 100.0, 125.0])
    pairs = grid[:, None] * (grid + grid[:, None] / 2)
    times = constant(1.0, chunk=grid, context=grid, prefill_s=pairs)
    found = simulate(served.of([0.0], [1000], [1]), times, EngineRules(policy="orca"))
    assert found.first_s[0] == pytest.approx(1 + 1000**2 / 2)


# --- what cannot be --------------------------------------------------------------------------------------------------


def test_refusals() -> None:
    asked = served.of([0.0, 0.0], [10, 500], [2, 2])
    found = simulate(asked, constant(1.0, cache=400))
    assert np.isnan(found.finish_s).tolist() == [False, True] and found.emitted == 2
    with pytest.raises(DoesNotFitError, match=r"does not fit: 5000\.0 GB of weights"):
        simulate(asked, constant(1.0, weight_bytes=5e12))
    with pytest.raises(ForetraceError, match=r"`router=near` does not exist; choose .*round-robin"):
        simulate(asked, constant(1.0), router="near")
    with pytest.raises(ForetraceError, match="`replicas=` must be 1 or more, got 0"):
        simulate(asked, constant(1.0), replicas=0)
    with pytest.raises(ForetraceError, match="clients of a closed loop keep their replica"):
        simulate(requests("closed concurrency=2 requests=4"), constant(1.0), replicas=2, router="least-outstanding")
    with pytest.raises(ForetraceError, match="`block=7` must divide the 16 tokens of a hash"):
        more: dict[str, Any] = {"hash_first": np.array([0, 1]), "hashes": np.array([1]), "hash_tokens": 16}
        simulate(served.of([0.0], [16], [2], **more), constant(1.0), EngineRules(block=7))
    for wrong in ({"policy": "fifo"}, {"sequences": 0}, {"utilisation": 1.2}, {"swap_bytes": -1.0}):
        with pytest.raises(ForetraceError):
            EngineRules(**wrong)
    with pytest.raises(ForetraceError, match="`tokens=` must be two or more increasing numbers"):
        constant(1.0, tokens=np.array([1.0, 1.0]))
    with pytest.raises(ForetraceError, match="the range of a step must hold 1"):
        constant(1.0, low=1.2)
