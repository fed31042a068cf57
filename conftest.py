"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Examples of a property that states no number. How long one takes says something about the machine: no deadline.
for name, examples in {"quick": 40, "ci": 100, "thorough": 2000}.items():
    settings.register_profile(name, deadline=None, max_examples=examples)
settings.load_profile(os.environ.get("FORETRACE_EXAMPLES", "quick"))

LONG_S = 20.0  # a test that takes longer says why: @pytest.mark.slow("...")

os.environ.setdefault("FORETRACE_POISON", "1")  # what a pass leaves unwritten shows, in subprocesses as well


@pytest.fixture(scope="session", autouse=True)
def own_places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or writes the user's calibrations and ledger; subprocesses inherit this."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORETRACE_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("FORETRACE_LEDGER", str(tmp_path_factory.mktemp("ledger") / "ledger.sqlite"))
        yield


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real traces and measurements; it is not part of the project, so tests skip without it."""
    given = os.environ.get("FORETRACE_SHARED_DATA")
    beside = Path(__file__).resolve().parents[1] / "shared" / "data"
    path = Path(given) if given else beside
    if not (path / "traces").is_dir():
        pytest.skip(f"shared data not found at {path}; set FORETRACE_SHARED_DATA to its folder")
    return path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first, so that no worker is left with one at the end; why they are slow, for the report."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    for item in items:
        if (marker := item.get_closest_marker("slow")) and marker.args:
            item.user_properties.append(("slow", str(marker.args[0])))


def long_tests(reports: Iterable[pytest.TestReport]) -> dict[str, str]:
    """The stated reason ("" for none) of each test that took longer than LONG_S, the longest first."""
    longest = sorted((each for each in reports if each.duration > LONG_S), key=lambda each: -each.duration)
    return {each.nodeid: str(dict(each.user_properties).get("slow", "")) for each in longest}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name what took long."""
    reports = [each for each in terminalreporter.getreports("passed") if each.when == "call"]
    if long := long_tests(reports):
        terminalreporter.section(f"tests over {LONG_S:g} s, and why")
        for test, reason in long.items():
            terminalreporter.line(f"{test}: {reason or 'NO REASON STATED'}")
