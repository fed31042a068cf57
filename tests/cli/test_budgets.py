"""Every option that limits what a command spends is held by a test; those of time that share it, here, on a fake clock.

No second of the machine is counted: the clock moves where work would be done, and what is asked is how far it got.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from foretrace import deadline
from foretrace.cli.app import application
from foretrace.cost.operators.operator import Operator
from foretrace.techniques.base import Technique
from tests.cli.conftest import DATA, Cli
from tests.cli.test_ranges import commands

ROOT = Path(__file__).resolve().parents[2]
HERE = "tests/cli/test_budgets.py::"
# What is spent, and the tests that hold it.
HELD = {
    "optimise --seconds": ["tests/plan/test_budget.py::test_all_that_follows_the_search_is_in_the_time"],
    "optimise --memory-limit": [
        "tests/plan/test_optimise.py::test_a_limit_brings_the_techniques_that_save",
        "tests/plan/test_optimise.py::test_an_impossible_limit_names_the_smallest_that_is_possible",
    ],
    "rewrite --seconds": [
        "tests/plan/rewrite/test_search.py::test_a_graph_whose_price_would_come_too_late_is_not_priced"
    ],
    "rewrite --budget": [
        "tests/plan/rewrite/test_search.py::test_a_search_is_deterministic_and_keeps_to_its_budget_and_time"
    ],
    "serve load --seconds": ["tests/serving/server/test_load.py::test_a_closed_loop_keeps_to_its_time"],
    "llm capacity --seconds": ["tests/serving/llm/test_capacity.py::test_search_stops_and_goes_on"],
    "llm draft --parameters": [
        "tests/serving/speculative/test_drafts.py::test_shallow_drafts_are_quicker_at_equal_acceptance"
    ],
    "llm draft --latency-ms": ["tests/serving/speculative/test_drafts.py::test_a_limit_of_latency_is_kept"],
    "plan place --memory-limit": ["tests/plan/placement/test_command.py::test_what_cannot_be"],
    "plan pipeline --memory-limit": ["tests/plan/pipelines/test_cut.py::test_what_does_not_fit_is_said"],
    "plan soap --memory-limit": ["tests/plan/soap/test_plan.py::test_memory_is_kept_or_what_it_takes_is_said"],
    "plan soap --calls": ["tests/test_on_ray.py::test_same_plan_here_and_on_ray"],
    "plan place --seconds": ["tests/plan/placement/test_small.py::test_integer_program_has_the_time_that_is_given"],
    "codesign --calls": ["tests/plan/codesign/test_searched.py::test_designs_are_those_that_are_enumerated"],
    "plan transformer --calls": ["tests/plan/codesign/test_searched.py::test_designs_are_those_that_are_enumerated"],
    "serve plan --seconds": ["tests/experiment/test_arms.py::test_turns_keep_their_time"],
    "serve plan --memory-limit": ["tests/serving/server/test_plan.py::test_memory_holds_so_many_instances"],
    "verify --seconds": [
        "tests/experiment/test_arms.py::test_plans_keep_to_the_time_or_to_the_least",
        "tests/experiment/test_arms.py::test_turns_keep_their_time",
    ],
    "calibrate device --seconds": [
        HERE + "test_operators_share_their_time",
        "tests/cost/test_gpu_products.py::test_products_keep_their_time",
    ],
    "calibrate device --operators": ["tests/model/test_on_processor.py::test_operators_are_distinct_and_so_many"],
    "estimate --measure": ["tests/cli/test_estimate.py::test_this_processor"],
    "calibrate run --seconds": [HERE + "test_operators_share_their_time"],
    "calibrate network --limit": ["tests/experiment/test_collectives.py::test_a_limit_in_time_holds"],
    "compression advise --seconds": [HERE + "test_operators_share_their_time"],
    "plan second-order --seconds": [HERE + "test_operators_share_their_time"],
    "rig verify --seconds": ["tests/experiment/links/test_verify.py::test_turns_keep_their_time"],
    "energy tune --evaluations": [
        "tests/serving/energy/test_recorded.py::test_no_more_settings_are_measured_than_asked"
    ],
    "energy colocate --seconds": ["tests/serving/energy/test_colocate.py::test_two_real_processes_share_a_core"],
    "kernels --seconds": ["tests/experiment/test_kernels.py::test_parts_add_up_to_the_step"],
    "program --calibrate": ["tests/cost/programs/test_programs.py::test_calibration_is_kept"],
    "program --measure": ["tests/cost/programs/test_programs.py::test_schedules_are_ranked_and_the_best_timed"],
    "cloud advise --budget": ["tests/plan/test_cloud.py::test_the_choice_keeps_within_time_and_money"],
    "cloud advise --within": ["tests/plan/test_cloud.py::test_the_choice_keeps_within_time_and_money"],
}  # fmt: skip
LIMITS = re.compile(r"--(.*-)?(seconds|budget|limit|within|timeout|calls|measure|operators|most|max)(-.*)?")
TELLS = re.compile(r"at most|stop after|time to spend|for the search|for running|for all epochs|may measure", re.I)
OTHERS = {
    "llm simulate --seconds": "how long requests come, in the simulation",
    "llm capacity --devices": "which engines are tried",
    "llm simulate --token-budget": "what a step of the engine holds",
    "fleet run --measure": "which jobs a mean is over",
    "compression advise --measure": "whether anything is timed",
    "plan second-order --measure": "whether anything is timed",
    "plan look-ups --most-loss": "which settings may be chosen",
    "rewrite --measure": "whether anything is timed",
}
# What stands in the help of those that leave something out.
BESIDES = {
    "optimise": "compiling once, are extra",
    "rewrite": "measuring are extra",
    "verify": "recording and calibration are extra",
    "rig verify": "recording and calibration are extra",
}


def budgets() -> dict[str, str]:
    """The options of all commands that sound like a limit of what is spent, with their help."""
    found = {}
    for name, command in commands(typer.main.get_command(application())):
        for option in command.params:
            word = next((each for each in getattr(option, "opts", ()) if each.startswith("--")), "")
            if word and (LIMITS.fullmatch(word) or TELLS.search(option.help or "")):
                found[f"{name} {word}"] = option.help
    return found


def test_every_budget_is_held_by_a_test() -> None:
    assert set(budgets()) == set(HELD) | set(OTHERS)
    for tests in HELD.values():
        for each in tests:
            file, _, name = each.partition("::")
            nodes = ast.walk(ast.parse((ROOT / file).read_text()))
            assert any(isinstance(node, ast.FunctionDef) and node.name == name for node in nodes), each


def test_what_a_time_is_not_for_is_said() -> None:
    for name, words in BESIDES.items():
        assert words in budgets()[f"{name} --seconds"]


@dataclass
class Clock:
    """Seconds that pass only where something is timed or predicted."""

    now: float = 100.0
    timed: int = 0
    last: float = 0.0  # when the last timing ended

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float, work: Callable[..., Any]) -> Callable[..., Any]:
        def done(*given: Any, **named: Any) -> Any:
            self.now += seconds
            return work(*given, **named)

        return done

    def group(self, group: list[Operator], found: Any, *_: Any) -> None:
        """In the place of timing a few operators."""
        self.now += 0.4
        self.timed += len(group)
        self.last = self.now
        found.seconds.update({key: 1e-5 for each in group for key in (each.key, each.near_key)})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    from foretrace.cost.operators import bench

    found = Clock()
    monkeypatch.setattr(deadline, "uncompiled", found)
    monkeypatch.setattr(bench, "_measure_group", found.group)
    monkeypatch.setattr(Technique, "predict", found.passes(0.05, Technique.predict))
    return found


LINK = ["--network", "1gbit", "--workers", "2", "--gradient-mb", "4"]
SHARED = {
    "calibrate device": ["--threads", "1"],
    "calibrate device, a few": ["--threads", "1", "--operators", "12"],
    "calibrate run": ["RUN", "--do", "channels-last", "--do", "fused-optimizer"],
    "compression advise": ["RUN", *LINK, "--method", "powersgd rank=4", "--method", "topk share=0.01"],
}


@pytest.mark.parametrize("seconds", [3])
@pytest.mark.parametrize("name", SHARED)
def test_operators_share_their_time(
    cli: Cli, clock: Clock, name: str, seconds: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("FORETRACE_CACHE", str(tmp_path))
    monkeypatch.setattr("foretrace.experiment.calibrate.differences", lambda one, other: [])
    monkeypatch.setattr("foretrace.cli.calibrate._elsewhere", lambda *_: False)
    words = [str(DATA / "cnn.json.gz") if each == "RUN" else each for each in SHARED[name]]
    began = clock.now
    answer = cli(*name.partition(",")[0].split(), *words, "--seconds", str(seconds), "--json")
    assert answer.code == 0, answer.err
    assert clock.timed
    assert clock.last - began <= seconds + 0.4 + 1e-9  # nothing is known of how long the first group of a share takes
    assert clock.last - began >= 0.5 * seconds or "no time was left" not in answer.out
