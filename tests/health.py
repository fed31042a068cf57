"""The suite's own health, as a plugin: files that take longest run first, and what takes long says why."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator, Iterable
from importlib import import_module
from typing import Any

import pytest
from hypothesis import settings

LONG_S = 20.0  # CPU seconds, child processes included; a test that takes more says why: @pytest.mark.slow("...")
UNSAID = "NO REASON STATED"
TWINS = ("graph", "simulate", "plan", "search", "serving", "fleet")  # rooms whose engines are held equal to plain twins
# Files of 7 s of CPU and more: a process takes whole files, and none is left with one at the end. The first compiles
# every loop; files that call the same loops come when it is done, so that no other process compiles them as well.
LONGEST = (
    "tests/cli/test_deterministic.py", "tests/model/test_capture.py",
    "tests/trace/test_record_command.py", "tests/training/pipeline/test_runtime.py", "tests/search/test_strategies.py",
    "tests/zoo/test_zoo.py", "tests/serving/energy/test_colocate.py", "reproductions/speculative/test_speculative.py",
    "tests/test_readme.py", "tests/plan/placement/test_command.py", "tests/cli/test_face.py", "tests/cli/test_next.py",
    "tests/training/rows/test_trainer.py", "tests/training/rows/test_out_of_core.py",
    "tests/graph/test_odd_recordings.py", "tests/techniques/test_cross.py", "tests/cli/test_estimate.py",
    "tests/golden/test_golden.py", "tests/plan/placement/test_known.py", "tests/plan/rows/test_rows.py",
    "tests/report/test_fleet_page.py", "tests/cli/test_headlines.py",
)  # fmt: skip
# Files whose tests mostly wait, for schedulers, links and time limits: one process takes them all from the beginning,
# and two others compute meanwhile. Of more than three processes, all but two share them.
WAITING = (
    "tests/serving/server/test_soak.py", "tests/experiment/links/test_verify.py", "tests/experiment/test_verify.py",
    "tests/fleet/test_slurm_rig.py", "tests/test_on_ray.py", "tests/fleet/test_export_for_real.py",
    "tests/test_executor.py", "tests/experiment/test_stalls.py", "tests/experiment/test_collectives.py",
    "tests/fleet/live/test_questions.py", "reproductions/slurm_dally/test_slurm_dally.py",
    "tests/serving/server/test_worker.py", "tests/serving/server/test_server.py",
    "tests/experiment/links/test_processes.py", "tests/experiment/links/test_hosts.py",
    "tests/experiment/links/test_netns.py", "tests/experiment/test_forks.py",
)  # fmt: skip
THRESHOLDS = (50_000, 20, 100)  # new objects, and searches among younger ones, that begin a search for garbage
NEW_MODULES = 20
SLOW_TIMEOUT_S = 1500.0  # by the clock: half a minute of CPU can take ten where others compute as well


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, then others with slow tests; let these take longer."""
    slow = [item for item in items if item.get_closest_marker("slow")]
    for item in slow:
        item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))
    first = {item.path for item in slow}
    longest = {name: at for at, name in enumerate(dict.fromkeys((*WAITING, *LONGEST)))}
    rest = len(longest)
    items.sort(key=lambda item: longest.get(item.nodeid.partition("::")[0], rest + (item.path not in first)))
    for item in items:
        _keep_to_profile(item)


def _keep_to_profile(item: pytest.Item) -> None:
    """A property draws no more examples than the profile says, also where it states a number.

    In rooms whose engines have plain twins it draws the number that it states.
    """
    if set(item.nodeid.split("/")) & set(TWINS):
        return
    function, profile = getattr(item, "function", None), settings.default
    stated: settings | None = getattr(function, "_hypothesis_internal_use_settings", None)
    if function is not None and stated and profile and stated.max_examples > profile.max_examples:
        function._hypothesis_internal_use_settings = settings(stated, max_examples=profile.max_examples)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Whole files to each process, and those that wait to few."""
    if config.getoption("dist") != "loadfile":
        return None
    scheduler: Any = import_module("xdist.scheduler").LoadFileScheduling(config, log)
    groups, of_file = max(scheduler.numnodes - 2, 1), scheduler._split_scope

    def of_group(nodeid: str) -> str:
        file = str(of_file(nodeid))
        return f"waiting {WAITING.index(file) % groups}" if file in WAITING else file

    scheduler._split_scope = of_group
    return scheduler


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Take modules and collected tests, which live to the end, out of every search for garbage: a third of the time.

    And search less often in what tests make: the usual thresholds take a tenth of a simulation's time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(*THRESHOLDS)
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Do the same with what a test has imported."""
    before = len(sys.modules)
    try:
        return (yield)
    finally:
        if len(sys.modules) > before + NEW_MODULES:
            gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Keep the CPU time of a test, which a busy machine changes little, and the reason that it states."""
    before = sum(os.times()[:4])
    try:
        return (yield)
    finally:
        item.user_properties.append(("cpu_s", sum(os.times()[:4]) - before))
        if (marker := item.get_closest_marker("slow")) and marker.args:
            item.user_properties.append(("slow", str(marker.args[0])))


def long_tests(reports: Iterable[pytest.TestReport]) -> dict[str, str]:
    """CPU seconds and stated reason of each test that took more than LONG_S, the longest first."""
    kept = {each.nodeid: dict(each.user_properties) for each in reports}
    took = {test: float(str(said.get("cpu_s", 0.0))) for test, said in kept.items()}
    longest = sorted((test for test in took if took[test] > LONG_S), key=lambda test: -took[test])
    return {test: f"{took[test]:.0f} s of CPU: {kept[test].get('slow', UNSAID)}" for test in longest}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the tests that took long."""
    reports = [each for each in terminalreporter.getreports("passed") if each.when == "call"]
    if long := long_tests(reports):
        terminalreporter.section(f"tests over {LONG_S:g} s of CPU")
        for test, said in long.items():
            terminalreporter.line(f"{test}: {said}")
