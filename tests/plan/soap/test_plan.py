"""`foretrace plan soap`: never slower than what people do, within memory, the same anywhere."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest

pytest.importorskip("torch")

from foretrace.cli.app import run
from foretrace.errors import ForetraceError
from foretrace.plan.soap.plan import SoapPlan, plan_soap
from foretrace.plan.soap.problem import Codes, SoapProblem
from foretrace.report import jsonout

SMALL = ["plan", "soap", "vgg11", "--size", "tiny", "--device", "p100", "--devices", "4"]


def planned(**changes: object) -> SoapPlan:
    given = {"device": "p100", "devices": 4, "size": "tiny", "calls": 200, "per_node": 2, "between": "10gbit"}
    return plan_soap("vgg11", **(given | changes))  # type: ignore[arg-type]


def test_answer_is_never_slower_and_its_graph_takes_as_long(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "best.json"
    assert run([*SMALL, "--calls", "400", "--json", "--perfetto", str(path)]) == 0
    found = jsonout.loads(capsys.readouterr().out, "plan soap")
    assert {each.synchronisation for each in found.strategies} == {"all-reduce", "gather"}
    for each in found.strategies:
        assert each.step_s <= min(time for time in each.baselines_s.values() if time is not None)
        assert each.interval_s[0] <= each.step_s <= each.interval_s[1]
        assert each.gain_interval[0] <= each.gain <= each.gain_interval[1]
        assert max(each.memory_bytes) <= found.memory_limit_bytes
        assert all(len(one.devices) == prod(one.parts) for one in each.operators)
    assert json.loads(path.read_text())["traceEvents"]
    assert run([*SMALL, "--calls", "60"]) == 0
    assert "gradients by" in capsys.readouterr().out


@pytest.mark.slow("prices a model of full size")
def test_a_step_is_within_its_range_where_faster_operators_make_it_longer() -> None:
    for each in plan_soap("seq2seq", device="a100-80gb", devices=4, calls=100).strategies:
        assert each.interval_s[0] <= each.step_s <= each.interval_s[1]


def test_best_one_is_simulated_alike() -> None:
    found = planned()
    best = found.strategies[0]
    assert found.simulated.window_ns == pytest.approx(1e9 * best.step_s)
    assert best.calls <= 200


def test_memory_is_kept_or_what_it_takes_is_said() -> None:
    free = planned()
    held = [max(each.memory_bytes) for each in free.strategies]
    tight = planned(memory_limit=0.97 * max(held))
    assert all(max(each.memory_bytes) <= 0.97 * max(held) for each in tight.strategies)
    with pytest.raises(ForetraceError, match=r"the least needs .* GB: give `memory_limit=`"):
        planned(memory_limit=0.02 * max(held))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"devices": 100}, "at most 64"),
        ({"devices": 6, "per_node": 4}, "whole machines of `per_node=4`"),
        ({"device": "here"}, "one processor"),
        ({"device": "p1000"}, "p100"),
        ({"between": ""}, "no network of"),
    ],
)
def test_what_cannot_be_is_said(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ForetraceError, match=said):
        planned(**changes)


def test_an_interrupted_search_ends_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first Ctrl-C ends the command: no second search begins with the calls that it was given."""
    whole, priced = SoapProblem.cost, list[int]()

    def interrupted(problem: SoapProblem, point: Codes) -> float:
        priced.append(1)
        if len(priced) == 20:
            raise KeyboardInterrupt
        return whole(problem, point)

    monkeypatch.setattr(SoapProblem, "cost", interrupted)
    assert run([*SMALL, "--calls", "100000"]) == 130
    assert len(priced) == 20
