"""speculative-decoding: what a recorded token costs with a draft, against a known round."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import pytest

from foretrace.errors import NotApplicableError
from foretrace.flow import read
from foretrace.graph.edit import remove
from foretrace.graph.select import select
from foretrace.graph.taskgraph import TaskGraph
from foretrace.simulate.timeline import simulate
from foretrace.techniques.arguments import parse
from foretrace.techniques.base import Technique
from foretrace.techniques.compute.speculative_decoding import SpeculativeDecoding
from foretrace.techniques.selection import Scale
from foretrace.testing import TechniqueConformance
from foretrace.testing.technique import check_valid
from foretrace.testing.workloads import Gpu

DATA = Path(__file__).parents[1] / "data"


@lru_cache
def decoding(name: str = "decode") -> TaskGraph:
    return read(DATA / f"{name}.json.gz").graph().graph


@lru_cache
def on_gpu() -> TaskGraph:
    graph = Gpu().graph()
    return remove(graph, select(graph, phase=("backward", "optimizer")))


class TestSpeculativeDecoding(TechniqueConformance):
    technique: ClassVar[Technique] = parse("speculative-decoding draft=1us k=3 acceptance=0.6")

    def graphs(self) -> Mapping[str, TaskGraph]:
        return {"cpu": decoding(), "gpu": on_gpu()}

    def test_composes(self) -> None:
        """Decoding has no backward pass that another technique could change."""
        half = Scale(phase="forward", by=0.5)
        for graph in self.graphs().values():
            for first, second in ((half, self.technique), (self.technique, half)):
                check_valid(second.predict(first.predict(graph)))


def step_s(graph: TaskGraph, **how: object) -> float:
    return simulate(SpeculativeDecoding(**how).predict(graph)).step_time_s  # type: ignore[arg-type]


def test_a_step_is_a_share_of_a_round() -> None:
    before = simulate(decoding()).step_time_s
    found = step_s(decoding(), draft="0.1ms", k=4, tokens=2.5, verify=1.2, host=0.1)
    assert found == pytest.approx((1.2 * before + 4 * 1e-4 + 5 * 0.1 * before) / 2.5, rel=0.01)


def test_a_recorded_draft_is_what_it_took() -> None:
    graph = decoding()
    recorded = SpeculativeDecoding(draft=str(DATA / "decode-draft.json.gz")).priors(graph)["pass_ms"]
    assert recorded.value == pytest.approx(1e3 * simulate(decoding("decode-draft")).step_time_s, rel=0.3)
    shape = SpeculativeDecoding(draft="1x64").priors(graph)["pass_ms"]
    assert shape.low <= recorded.value <= shape.high


def test_more_is_accepted_more_is_gained() -> None:
    times = [step_s(decoding(), draft="0.05ms", acceptance=rate) for rate in ("0.2", "0.5", "0.9")]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("draft=0.1ms k=0", "k=0 proposes nothing"),
        ("draft=0.1ms acceptance=1.5", "acceptance=1.5 must be shares"),
        ("draft=9s", "takes as long as one of the recorded model"),
        ("draft=0ms", "must be a time above 0"),
        ("draft=9x64", "is not smaller than the recorded model of 4 x 64"),
        ("draft=nowhere.json", "there is none"),
        ("draft=0.1ms tokens=9", "must be from 1 to k \\+ 1 = 5"),
        ("draft=0.1ms host=-1", "host must be 0 or more"),
        ("draft=0.1ms verify=0", "verify must be above 0, got 0"),
    ],
)
def test_what_it_refuses(words: str, said: str) -> None:
    with pytest.raises(NotApplicableError, match=said):
        parse(f"speculative-decoding {words}").predict(decoding())


def test_layers_are_found_within_the_modules_that_hold_them() -> None:
    with pytest.raises(NotApplicableError, match="the recorded model of 4 x 256"):
        parse("speculative-decoding draft=9x256").predict(decoding("decode-heads"))


def test_trainings_are_refused() -> None:
    with pytest.raises(NotApplicableError, match="the recording trains"):
        SpeculativeDecoding(draft="1us").predict(Gpu().graph())
