"""Strategies by name: the page's calls give the page's points; what is no point is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from foretrace.cli.app import run
from foretrace.errors import ForetraceError
from foretrace.plan.export import TARGETS
from foretrace.plan.soap.problem import SYNCHRONISATIONS
from foretrace.plan.transformers.model import Parallelism
from foretrace.plan.transformers.strategies import STRATEGIES, named
from reproductions.flexflow.layers import problem as soap
from reproductions.flexflow.models import MODELS, p100_cluster

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "strategies.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| [^|]+ \| `named\(([^`]+)\)` \| ([^|]+) \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("call", "point"), ROWS)
def test_the_page_builds_what_it_says(call: str, point: str) -> None:
    name, devices, *rest = call.split(", ")
    given = {key: int(value) for key, value in (each.split("=") for each in rest)}
    found = named(name.strip('"'), int(devices), **given)
    assert point.strip() in str(found)
    assert found.devices == int(devices)


ELSEWHERE = re.findall(r"^\| [^|]+ \| `((?:foretrace|Soap)[^`]+)` \| [^|]+ \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("call", ELSEWHERE)
def test_what_is_no_point_is_built_elsewhere(call: str, capsys: pytest.CaptureFixture[str]) -> None:
    if call.startswith("foretrace"):
        small = "bert --size tiny" if any(each in call for each in ("place", "pipeline", "soap")) else "gpt2-xl"
        words = call.replace("MODEL", small).split()[1:]
        assert run([*words, "--device", "a100-80gb", "--devices", "2"]) == 0
        assert capsys.readouterr().out
        return
    sync = re.findall('"([^"]+)"', call)[0]
    assert sync in SYNCHRONISATIONS
    problem = soap(MODELS["alexnet"](64), p100_cluster(), sync)
    moved = problem.counted(problem.data_parallel()).exchanged_bytes
    assert moved == 2 * 15 * problem.model.weight_bytes  # the same volume, by a ring or by one server
    assert (problem.cost(problem.data_parallel()) > 300) == (sync == "gather")


def test_the_page_has_every_name_and_target() -> None:
    on_page = {call.split(", ")[0].strip('"') for call, _ in ROWS}
    twins = {"model": "tensor", "zero-3": "fsdp"}
    assert on_page | twins.keys() == STRATEGIES.keys()
    assert all(named(one, 8) == named(other, 8) for one, other in twins.items())
    assert dict(re.findall(r"^\| `([\w-]+)` \| `([\w.]+)` \|", PAGE, re.MULTILINE)) == {
        name: each.file for name, each in TARGETS.items()
    }


def test_other_fields_are_kept_and_the_rest_of_the_devices_is_taken() -> None:
    found = named("fsdp", 64, tensor=4, micro=2, recompute=2)
    assert found == Parallelism(tensor=4, data=16, micro=2, recompute=2, zero=3)
    assert named("data", 8, data=4, tensor=2) == Parallelism(tensor=2, data=4)


@pytest.mark.parametrize(
    ("name", "devices", "given", "said"),
    [
        ("expert", 8, {"expert": 3}, "give 1"),
        ("dta", 8, {}, "data"),
        ("hybrid", 8, {}, "tensor"),
        ("hybrid", 8, {"tensor": 3}, "give 9"),
        ("hybrid", 8, {"tensor": 0}, "above 0"),
        ("3d", 8, {"tensor": 2, "pipeline": 4}, "data"),
        ("data", 8, {"data": 4}, "multiply to 8"),
        ("data", 8, {"depth": 4}, "depth"),
    ],
)
def test_what_is_no_point_is_refused(name: str, devices: int, given: dict[str, int], said: str) -> None:
    with pytest.raises(ForetraceError, match=said):
        named(name, devices, **given)
