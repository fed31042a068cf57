"""Steps on this machine's processor: what calls cost beyond operators, which operators are timed, and a real one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from foretrace.cost.calls import Calls, Family
from foretrace.cost.operators import store
from foretrace.cost.operators.bench import OperatorTimings
from foretrace.cost.operators.local import Local, unsure_key
from foretrace.cost.operators.operator import Operator
from foretrace.errors import ForetraceError
from foretrace.graph.taskgraph import Phase
from foretrace.hardware.devices import named
from foretrace.model import on_processor, timed_operators
from foretrace.model.capture.capture import capture
from foretrace.model.host_chains import KINDS, PARTS, chains, kinds_of, network, time_key
from foretrace.model.lower import lower
from foretrace.model.machine_state import alike, probe
from foretrace.model.on_processor import (
    LEAST,
    HostOverhead,
    Processor,
    calibrated,
    keep,
    operators,
)  # fmt: skip
from foretrace.model.timed_operators import TimedOperators, agreed
from foretrace.simulate.timeline import simulate
from foretrace.training.training import Training


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def made_up(beyond_s: tuple[float, float, float], view_s: float) -> dict[str, float]:
    """Times of the networks on a processor where calls take so much longer in a step than alone."""
    local = Local.of({})
    times: dict[str, float] = {}
    for kind in KINDS:
        graph = capture(network(kind), like="cpu")
        own = local.parts(graph.calls)[0]
        views = graph.calls.family == Family.NONE
        taken = []
        for phase, extra in zip((Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER), beyond_s, strict=True):
            at = np.array([node.phase == phase for node in graph.nodes])
            taken.append(float((own + np.where(views, view_s, extra))[at].sum()))
        seconds = (taken[0], taken[0] + taken[1], taken[2])
        times |= {time_key(kind, part): value for part, value in zip(PARTS, seconds, strict=True)}
    return times


def test_what_calls_cost_beyond_their_operators_is_recovered() -> None:
    beyond = (8e-6, 6e-6, 7e-6)
    found = HostOverhead.of(made_up(beyond, -1e-6), Local.of({}))
    assert found.networks == len(KINDS)
    assert found.call_s == pytest.approx(beyond, rel=0.3)
    assert found.view_s[:2] == pytest.approx((-1e-6, -1e-6), abs=1.5e-6)


def test_without_networks_it_is_assumed() -> None:
    found = HostOverhead.of({}, Local.of({}))
    assert found.networks == 0
    assert all(each == pytest.approx(1.5 * found.alone_s) for each in found.call_s)


def test_operators_are_distinct_and_so_many() -> None:
    for k in (LEAST, 12, 50):
        found = operators(k)
        assert len(set(found)) == k
        assert found[-len(chains(kinds_of(k))) :] == chains(kinds_of(k))
    with pytest.raises(ForetraceError, match="4 operators say too little"):
        operators(4)


def small(hidden: int = 256) -> Training:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 8))

    class Loader:
        batch_size = 32

        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter([torch.randn(32, 64)])

    return Training(
        name="small",
        model=model,
        optimizers=(torch.optim.SGD(model.parameters(), lr=0.1),),
        loader=Loader(),
        loss=lambda model, batch: model(batch).square().mean(),
    )


def test_a_step_is_its_operators_and_what_calls_them() -> None:
    local = Local.of({})
    host = HostOverhead(call_s=(1e-3, 2e-3, 4e-3), view_s=(0.0, 0.0, 0.0), alone_s=1e-6, networks=2)
    graph = capture(small(), like="cpu")
    found = Processor(local=local, host=host).step(graph)
    work = graph.calls.family != Family.NONE
    phases = np.array([node.phase for node in graph.nodes])
    counted = [int((work & (phases == each)).sum()) for each in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)]
    assert found.host_s == pytest.approx(1e-3 * counted[0] + 2e-3 * counted[1] + 4e-3 * counted[2], rel=1e-3)
    assert found.seconds == pytest.approx(found.operators_s + found.host_s)
    assert found.low_s < found.seconds < found.high_s
    assert found.unknown == 0


def test_lowered_on_the_processor_it_takes_as_long() -> None:
    graph = capture(small(), like="cpu")
    processor = Processor(local=Local.of({}), host=HostOverhead.of({}, Local.of({})))
    lowered = lower(graph, device=named("h100"), costs=processor.costs(graph), own_processor=True)
    assert simulate(lowered.graph).step_time_s == pytest.approx(processor.step(graph).seconds, rel=1e-3)
    with pytest.raises(ForetraceError, match="give all of its calls"):
        processor.costs(graph).predict(graph.calls.take(np.arange(2)), named("h100"))


def test_nothing_measured_is_refused() -> None:
    with pytest.raises(ForetraceError, match="calibrate device --operators 50"):
        Processor.of({"near something": 1.0})


def test_three_probes_say_something_of_a_step() -> None:
    """A machine twice as slow in everything is twice as slow, and its range is wide."""
    graph = capture(network("linear"), like="cpu")
    state = np.array([1e-6, 2e-4, 7e-4])
    fast, slow = (Processor.probed(each).step(graph) for each in (state, 2 * state))
    assert slow.seconds / fast.seconds == pytest.approx(2.0, rel=0.15)
    assert fast.high_s / fast.low_s > 1.5


def test_what_is_worth_timing_is_what_decides_the_step() -> None:
    graph = capture(small(), like="cpu")
    local = Local.of({})
    processor = Processor(local=local, host=HostOverhead.of({}, local))
    first, *rest = processor.telling(graph, 3)
    assert any(each.name in ("aten::addmm", "aten::mm") for each in (first, *rest))
    assert len({first, *rest}) == 3
    assert first not in processor.telling(graph, 3, {first.key})
    assert len(processor.telling(graph, 1000)) < len(graph)


def test_a_slowed_machine_keeps_times_of_calmer_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETRACE_CACHE", str(tmp_path))
    machine = {"cpu": "test"}
    add, mul = (Operator.of(f"aten::{each}", [[64, 64], [64, 64]], ["float", "float"]).key for each in ("add", "mul"))

    def seen(probe_s: float, **seconds: float) -> str:
        timings = OperatorTimings(seconds={{"add": add, "mul": mul}[key]: value for key, value in seconds.items()})
        return keep(machine, TimedOperators(measured=timings, usual_s=np.array([1e-6, 1e-4, probe_s]), alike=1.0))[1]

    seen(1e-6, add=4e-6)
    assert "2.0 times faster in another" in seen(2e-6, add=8e-6, mul=9e-6)
    known = store.load(machine)
    assert known[add] == 4e-6 and known[mul] == 9e-6
    slowed, calm = Processor.of(known), Processor.of({add: 4e-6, mul: 9e-6})
    assert slowed.slowed == pytest.approx(2.0)
    graph = capture(small(), like="cpu")
    wide, narrow = slowed.step(graph), calm.step(graph)
    assert wide.seconds == pytest.approx(narrow.seconds)
    assert wide.high_s > 1.2 * narrow.high_s
    assert "2.0 times faster in another" in seen(0.5e-6, mul=3e-6)


ADD, MM = (Operator.of(f"aten::{each}", [[512, 512], [512, 512]], ["float", "float"]).key for each in ("add", "mm"))
CALM = np.array([1e-6, 1e-4, 1e-3])


def a_round(slower: float = 1.0, **seconds: float) -> TimedOperators:
    """A round in which the machine's probes were so many times slower than calm."""
    keys = {"add": ADD, "mm": MM}
    samples = {keys[each]: [(value, slower * CALM)] * 3 for each, value in seconds.items()}
    timings = OperatorTimings()
    return TimedOperators(measured=timings, usual_s=CALM, alike=1.0, samples=samples, states=[slower * CALM] * 6)


def test_of_rounds_that_differ_the_least_counts_and_is_unsure() -> None:
    found = agreed([a_round(add=1.0, mm=2.0), a_round(add=1.1, mm=5.0)])
    assert found.measured.seconds == pytest.approx({ADD: 1.05, MM: 2.0})
    assert found.unsure == pytest.approx({MM: 2.5})
    assert found.known[unsure_key(MM)] == pytest.approx(2.5)
    third = agreed([a_round(mm=2.0), a_round(mm=5.0), a_round(mm=2.1)])
    assert third.measured.seconds[MM] == pytest.approx(2.05)
    assert not third.unsure


def test_operators_that_never_met_the_machine_calm_are_as_unsure_as_it_was_slow() -> None:
    found = agreed([a_round(1.6, add=1.0), a_round(1.6, add=1.0)], CALM)
    assert found.alike == 0.0
    assert found.unsure == pytest.approx({ADD: 1.6})


def test_what_differed_is_timed_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def slow_second(wanted: list[Operator], **_: object) -> TimedOperators:
        asked.append([each.key for each in wanted])
        return a_round(add=1.0, mm=3.0 if len(asked) == 2 else 2.0)

    monkeypatch.setattr(timed_operators, "timed", slow_second)
    both = [Operator(name, text) for name, _, text in (key.partition(" ") for key in (ADD, MM))]
    found = timed_operators.in_rounds(both)
    assert asked == [[ADD, MM], [MM, ADD], [MM]]
    assert not found.unsure


def test_an_unsure_time_is_believed_less_than_the_other_operators() -> None:
    graph = capture(small(), like="cpu")
    operators = [Operator(op, text) for op, text in zip(graph.calls.op, graph.calls.text, strict=True)]
    times = {each.key: 1e-5 for each in operators if each.name in ("aten::addmm", "aten::mm")}
    unsure = times | {unsure_key(key): 4.0 for key in times}
    sure, doubted, nothing = (Local.of(each).total(graph.calls) for each in (times, unsure, {}))
    assert sure[1] < doubted[1] <= 1.05 * nothing[1]
    assert abs(np.log(doubted[0] / nothing[0])) < abs(np.log(sure[0] / nothing[0]))


def test_ranges_widen_where_the_machine_differs_from_when_it_was_calibrated() -> None:
    local = Local.of({})
    before = Processor(local=local, host=HostOverhead.of({}, local), usual_s=CALM)
    steady, memory, all_of_it = (before.now(CALM * np.array(each)) for each in ([1.1] * 3, [1, 1, 3], [3, 3, 3]))
    graph, large = capture(small(), like="cpu"), capture(small(hidden=50_000), like="cpu")
    assert steady.step(graph) == before.step(graph) == memory.step(graph)  # which finds all in a cache
    found = [each.step(large) for each in (before, memory, all_of_it)]
    assert len({each.seconds for each in found}) == 1
    assert found[0].high_s < found[1].high_s < found[2].high_s
    assert found[2].high_s > 3 * found[2].seconds
    assert replace(before, usual_s=np.full(3, np.inf)).now(CALM).drift is None


def test_probes_are_of_calls_products_and_memory() -> None:
    found = probe()
    assert found.shape == (3,)
    assert (found > 0).all()
    assert found[2] > found[0]
    assert alike(found, found * 1.1) and not alike(found, found * [1.0, 1.0, 1.3])


def test_constants_of_a_step_are_measured_twice_and_the_least_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = iter([{"a": 3.0, "b": 1.0}, {"a": 2.0, "b": 4.0}])
    monkeypatch.setattr("foretrace.model.effects.measured", lambda: next(rounds))
    none = TimedOperators(measured=OperatorTimings(), usual_s=CALM, alike=1.0)
    monkeypatch.setattr(on_processor, "in_rounds", lambda *_, **how: none)
    assert calibrated(50).measured.seconds == {"a": 2.0, "b": 1.0}
    assert calibrated(50, budget_s=1.0).measured.seconds == {}, "no time for any"


def test_a_real_calibration_says_something_of_a_real_step() -> None:
    """Only that it is no nonsense: times are those of a shared machine."""
    timed = calibrated(10, turns=1, target_s=0.0005)
    assert not timed.measured.failed
    assert (timed.usual_s > 0).all()
    processor = Processor.of(timed.measured.seconds)
    assert processor.local.measured == 10 - len(chains(kinds_of(10)))
    step = processor.step(capture(small(), like="cpu"))
    assert 1e-5 < step.seconds < 1e-1
    rates = processor.rates()
    assert rates.product_gflop_s > 0.1
    assert rates.near_gb_s > 0.1
    assert "GFLOP/s" in rates.headline
    assert Calls.of([]).op == ()
