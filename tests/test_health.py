"""What runs the tests: which of them a change asks for, and how long ones are told from those that say why."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import health

ROOT = Path(__file__).resolve().parents[1]
CHANGED: dict[str, Any] = runpy.run_path(str(ROOT / ".ci" / "changed.py"))


@pytest.mark.parametrize(
    ("file", "tests"),
    [
        ("src/foretrace/graph/edit.py", {"tests/graph"}),
        ("src/foretrace/cost/devices/roofline.py", {"tests/cost"}),
        ("src/foretrace/files.py", {"tests/test_files.py"}),
        ("tests/fleet/test_metrics.py", {"tests/fleet"}),
        ("tests/test_files.py", {"tests/test_files.py"}),
        ("tests/data/cnn.json.gz", {"tests/data"}),
        ("reproductions/dally/study.py", {"reproductions/dally"}),
    ],
)
def test_a_file_stands_for_the_tests_of_its_room(file: str, tests: set[str]) -> None:
    assert CHANGED["tests_of"](file) == tests


def test_a_helper_stands_for_its_users_and_a_page_for_the_tests_that_name_it() -> None:
    assert {"tests/techniques", "tests/training"} <= CHANGED["tests_of"]("tests/gloo_workers.py")
    assert "tests/techniques/test_write_a_technique.py" in CHANGED["tests_of"]("docs/write-a-technique.md")


def test_nothing_is_asked_for_twice_and_everything_is_there() -> None:
    asked = CHANGED["chosen"]({"src/foretrace/graph/edit.py", "tests/test_flow.py", "src/foretrace/cli/app.py"})
    assert asked[:2] == ["tests/cli", "tests/graph"]
    assert not any(each.startswith("tests/cli/") for each in asked) and len(set(asked)) == len(asked)
    for each in CHANGED["SMOKE"]:
        file, _, test = each.partition("::")
        assert f"def {test}" in (ROOT / file).read_text(encoding="utf-8")


def test_long_tests_are_named_with_their_reasons() -> None:
    def report(name: str, cpu_s: float, *said: tuple[str, str]) -> pytest.TestReport:
        place = (name, 1, name)
        return pytest.TestReport(
            name, place, {}, "passed", None, "call", user_properties=[("cpu_s", cpu_s), *said], duration=cpu_s
        )

    found = health.long_tests(
        [report("quick", 1.0), report("long", 25.0), report("longer", 90.0, ("slow", "trains a model"))]
    )
    assert found == {"longer": "90 s of CPU: trains a model", "long": f"25 s of CPU: {health.UNSAID}"}


def test_files_that_take_longest_are_there() -> None:
    named = (*health.WAITING, *health.LONGEST)
    assert len(set(named)) == len(named)
    assert [each for each in named if not (ROOT / each).is_file()] == []


@pytest.mark.parametrize(("processes", "groups"), [(2, 1), (3, 1), (5, 3)])
def test_files_that_wait_are_shared_by_all_processes_but_two(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch, processes: int, groups: int
) -> None:
    pytest.importorskip("xdist")
    monkeypatch.setattr(pytestconfig.option, "dist", "loadfile")
    monkeypatch.setattr(pytestconfig.option, "tx", ["popen"] * processes)
    scopes = health.pytest_xdist_make_scheduler(pytestconfig, None)._split_scope
    assert len({scopes(f"{each}::test_it[a::b]") for each in health.WAITING}) == groups
    assert scopes("tests/graph/test_edit.py::test_it") == "tests/graph/test_edit.py"
    monkeypatch.setattr(pytestconfig.option, "dist", "load")
    assert health.pytest_xdist_make_scheduler(pytestconfig, None) is None


@pytest.mark.slow("so that it is one of them")
def test_slow_tests_may_take_longer_by_the_clock(request: pytest.FixtureRequest) -> None:
    marker = request.node.get_closest_marker("timeout")
    assert marker.args == (health.SLOW_TIMEOUT_S,) and float(request.config.getini("timeout")) < health.SLOW_TIMEOUT_S


DRAWN: list[int] = []


@settings(max_examples=5_000, database=None)
@given(st.integers(0, 1 << 40))
def test_a_property_that_states_more_examples_than_the_profile(value: int) -> None:
    DRAWN.append(value)


def test_draws_as_many_as_the_profile_says() -> None:
    if not DRAWN:
        pytest.skip("the property was not asked for")
    assert settings.default and len(DRAWN) < min(
        5_000, 2 * settings.default.max_examples
    )  # the same value may be tried again
