"""Which commands are given a time, and what each says that it does not hold for."""

from __future__ import annotations

import typer

from foretrace.cli.app import application
from tests.cli.test_ranges import commands

# Where each is held: tests/plan/test_budget.py, tests/rewrite/test_search.py, tests/verify/test_arms.py,
# tests/cost/test_bench.py.
TIMED = {
    "optimise": "compiling once, come on top",
    "rewrite": "measuring come on top",
    "verify": "recording and calibration come on top",
    "calibrate device": "for all operators",
    "calibrate run": "for all operators",
    "compression advise": "timing hooks",
    "rig verify": "calibration come on top",
}


def test_every_time_that_can_be_given_says_what_it_is_for() -> None:
    found = {}
    for name, command in commands(typer.main.get_command(application())):
        for option in command.params:
            if "--seconds" in getattr(option, "opts", ()):
                found[name] = option.help
    assert set(found) == set(TIMED)
    assert all(TIMED[name] in found[name] for name in found), found
