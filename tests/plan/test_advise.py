"""Advice: every technique tried, ranked and weighed as `whatif` does, the best combined, nothing passed over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from foretrace import flow
from foretrace.graph.edit import scale
from foretrace.graph.select import select
from foretrace.graph.taskgraph import TaskGraph
from foretrace.plan import advise as plan
from foretrace.plan.advise import Advice, advise
from foretrace.simulate.timeline import simulate
from foretrace.techniques import registry
from foretrace.techniques.arguments import parse_all
from foretrace.techniques.base import Technique
from foretrace.techniques.registry import BUILT_IN, techniques
from foretrace.techniques.whatif import whatif

RECORDINGS = Path(__file__).parents[1] / "data"
LARGE = "traces/hta/trace_diff_control.json.gz"
ONE_STEP = "traces/triosim/h100_vgg13_kineto.json.gz"


@pytest.fixture(scope="module")
def recommender() -> TaskGraph:
    return flow.read(RECORDINGS / "recommender.json.gz").graph().graph


@pytest.fixture(scope="module")
def cnn() -> TaskGraph:
    """Two steps, of 4.2 and 3.3 ms."""
    return flow.read(RECORDINGS / "cnn.json.gz").graph().graph


@pytest.fixture(scope="module")
def exact(recommender: TaskGraph) -> Advice:
    return advise(recommender, work=inf)


def test_every_technique_is_accounted_for_once(exact: Advice) -> None:
    tried = [each.name for each in (*exact.gains, *exact.hidden, *exact.slower)]
    left = [each.name for each in (*exact.refused, *exact.asks) if " + " not in each.name]
    assert not exact.failed
    assert sorted([*tried, *left]) == sorted(name for name, kind in techniques().items() if kind.can_apply())


def test_gains_are_what_whatif_says_and_most_first(recommender: TaskGraph, exact: Advice) -> None:
    assert exact.gains
    saved = [each.saved_s for each in exact.gains]
    assert saved == sorted(saved, reverse=True)
    for each in exact.gains:
        found = whatif(recommender, each.techniques)
        assert (each.after_s, each.interval_s) == (found.after_s, found.interval_s)


def test_what_is_hidden_includes_no_change_and_what_is_shown_does_not(exact: Advice) -> None:
    for each in exact.gains:
        assert each.saved_range_s is not None
        assert 0 < each.saved_range_s[0] <= each.saved_s <= each.saved_range_s[1]
    for each in exact.hidden:
        assert each.saved_range_s is None or each.saved_range_s[0] <= 0 or each.saved_s < 1e-3 * each.before_s
        assert each.saved_range_s is not None or each.saved_s == 0


def test_the_best_are_predicted_together_and_not_summed(recommender: TaskGraph, exact: Advice) -> None:
    assert exact.together is not None
    assert 2 <= len(exact.together.techniques) <= plan.MOST
    found = whatif(recommender, parse_all(map(str, exact.together.techniques)))
    assert (exact.together.after_s, exact.together.interval_s) == (found.after_s, found.interval_s)
    assert exact.together.saved_s > exact.gains[0].saved_s


def test_a_range_found_all_at_once_holds_the_one_found_one_by_one(recommender: TaskGraph, exact: Advice) -> None:
    _holds(exact, advise(recommender, work=0))


def _holds(exact: Advice, quick: Advice) -> None:
    wide = {each.name: each for each in (*quick.gains, *quick.hidden, quick.together) if each is not None}
    compared = 0
    for each in (*exact.gains, exact.together):
        if each is None or each.name not in wide or wide[each.name].how != "all at once":
            continue
        low, high = wide[each.name].interval_s or (inf, -inf)
        assert each.interval_s is not None
        assert low <= each.interval_s[0]
        assert high >= each.interval_s[1]
        assert wide[each.name].after_s == each.after_s
        compared += 1
    assert compared > 1


def test_two_steps_that_differ_tell_little_of_either_and_more_of_what_is_gained(
    cnn: TaskGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = simulate(cnn)
    apart_s = np.ptp(before.step_times_ns) / 1e9
    assert before.noise_s().high_s - before.step_time_s > 1.5 * apart_s, "Student's t of two"
    _with(monkeypatch, _Halves)
    gained = advise(cnn).gains[0]
    assert gained.name == "halves"
    assert gained.saved_range_s is not None and gained.interval_s is not None
    assert gained.saved_range_s[0] > 0.5 * gained.saved_s
    assert np.ptp(gained.saved_range_s) < np.ptp(gained.interval_s), "what moves both alike cancels"


def test_what_two_steps_save_differently_is_hidden(cnn: TaskGraph) -> None:
    before, fused = simulate(cnn), techniques()["fused-optimizer"]()
    steps = np.subtract(before.step_times_ns, simulate(fused.predict(cnn)).step_times_ns)
    assert steps.max() > 2 * steps.min() > 0
    assert "fused-optimizer" in {each.name for each in advise(cnn, work=inf).hidden}


@pytest.mark.parametrize("name", ["cnn", "recommender"])
def test_a_larger_value_does_to_the_step_what_the_field_says(name: str) -> None:
    _directions_hold(flow.read(RECORDINGS / f"{name}.json.gz").graph().graph)


def test_advice_on_a_large_recording_of_a_device(shared_data: Path) -> None:
    found = advise(flow.read(shared_data / LARGE).graph().graph)
    assert not found.failed
    assert found.gains
    assert all(each.interval_s is not None for each in found.gains)


@pytest.mark.parametrize(
    "name",
    [
        "hta/amd_trace_mi250_minitoy_train_ROCm6_2_kineto",
        "hta/trace_filter_sampled_rank-1",
        "param/resnet_kineto",
        "tracelens/b200_eager_trace",
        "tracelens/inference_vllm_decode_full_graph_execution",
        "tracelens/mi300_gaunernst_bert-small-uncased__1016001",
    ],
)
def test_no_technique_fails_on_a_recording(name: str, shared_data: Path) -> None:
    """A sample; `benchmarks/cross.py` asks all."""
    found = advise(flow.read(shared_data / "traces" / f"{name}.json.gz").graph().graph, work=0)
    assert not [f"{each.name}: {each.why}" for each in found.failed]


def test_advice_on_a_recording_of_a_device(shared_data: Path) -> None:
    graph = flow.read(shared_data / ONE_STEP).graph().graph
    found, again, exact = advise(graph), advise(graph), advise(graph, work=inf)
    assert not found.failed
    assert [(e.name, e.interval_s, e.how) for e in again.gains] == [(e.name, e.interval_s, e.how) for e in found.gains]
    assert [e.name for e in found.gains] == [e.name for e in exact.gains]
    _holds(exact, advise(graph, work=0))
    _directions_hold(graph)


def _directions_hold(graph: TaskGraph) -> None:
    found = advise(graph, work=0)
    checked = 0
    for technique in [each.techniques[0] for each in (*found.gains, *found.hidden, *found.slower)]:
        larger = {each.field: each.larger_is for each in technique.parameters()}
        for each in whatif(graph, [technique]).assumptions:
            if not each.assumption.flag:
                continue
            slower = each.at_high_s - each.at_low_s
            if larger[each.assumption.flag] == "faster":
                slower = -slower
            assert slower >= -1e-3 * each.after_s, f"{technique}: {each}"
            checked += 1
    assert checked > 5


def test_every_technique_that_can_be_applied_says_what_it_costs() -> None:
    assert not [kind.name for kind in BUILT_IN if kind.can_apply() and not kind.effort]


def test_a_broken_technique_is_named_and_costs_no_other_its_advice(
    recommender: TaskGraph, exact: Advice, monkeypatch: pytest.MonkeyPatch
) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Broken(_Halves):
        name: ClassVar[str] = "broken"

        def change(self, graph: TaskGraph) -> TaskGraph:
            raise IndexError("list index out of range")

    _with(monkeypatch, Broken)
    found = advise(recommender, work=inf)
    assert [(each.name, each.why) for each in found.failed] == [("broken", "IndexError: list index out of range")]
    assert isinstance(found.failed[0].error, IndexError)
    assert [each.name for each in found.gains] == [each.name for each in exact.gains]


def test_a_technique_of_another_package_is_tried_and_put_together(
    recommender: TaskGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with(monkeypatch, _Halves)
    found = advise(recommender)
    assert "halves" in [each.name for each in found.gains]
    assert found.together is not None
    assert "halves" in found.together.name


@dataclass(frozen=True, kw_only=True)
class _Halves(Technique):
    """Forward and backward pass in half the time."""

    name: ClassVar[str] = "halves"
    summary: ClassVar[str] = "half the time"
    source: ClassVar[str] = "this test"

    def change(self, graph: TaskGraph) -> TaskGraph:
        return scale(graph, select(graph, phase=("forward", "backward")), 0.5)

    def realise(self, training: object) -> object:  # type: ignore[override]
        return training


def _with(monkeypatch: pytest.MonkeyPatch, kind: type[Technique]) -> None:
    known: Callable[[], dict[str, type[Technique]]] = techniques
    monkeypatch.setattr(registry, "techniques", lambda: {kind.name: kind, **known()})
