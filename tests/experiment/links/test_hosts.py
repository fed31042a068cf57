"""What workers take beside their collectives is measured on real ones, and what they say of several is worked out."""

from __future__ import annotations

import pytest

from foretrace.experiment.links.hosts import (
    SteppedTogether,
    StepTogether,
    TimeHosts,
    step_together,
    time_hosts,
    together,
)
from foretrace.experiment.messages import Setup
from foretrace.experiment.processes import Workers

pytest.importorskip("torch")


def test_hosts_are_timed_on_a_real_link(pair: Workers) -> None:
    found = pair.ask(time_hosts, TimeHosts(bytes_per_s=1e6, turns=2), "timing")
    for each in found:
        assert {"company", "stretch"} <= set(each.found)
        assert all(0 < low <= value <= high for value, low, high in each.found.values())
        assert each.found["company"][1] >= 1 and each.found["stretch"][1] >= 1


def test_steps_are_made_together_and_waits_do_not_count(pair: Workers) -> None:
    request = StepTogether(setup=Setup(work="4x64kb/1ms"), steps=3)
    for each in pair.ask(step_together, request, "stepping"):
        assert len(each.plain_s) == len(each.waited_s) == 3
        assert all(step_s >= 0.004 for step_s in (*each.plain_s, *each.waited_s))
        assert min(each.waited_s) < 0.1  # the wait of 100 ms is not in it


def test_what_steps_made_together_say_of_workers() -> None:
    one = SteppedTogether(plain_s=(0.010, 0.012, 0.010, 0.010, 0.500), waited_s=(0.011, 0.013, 0.011, 0.011, 0.501))
    two = SteppedTogether(plain_s=(0.012, 0.010, 0.012, 0.012, 0.012), waited_s=(0.015, 0.013, 0.015, 0.015, 0.015))
    found = together([one, two])
    assert (found["workers"], found["steps"]) == (2, 5)
    assert found["late_ms"][0] == pytest.approx(1.0)  # the last one is 1 ms behind the mean, but for one interruption
    assert found["cold_ms"][0] == pytest.approx(2.0)
    assert found["step_ms"] == pytest.approx(11.0)
    for value, low, high in (found["late_ms"], found["cold_ms"]):
        assert 0 <= low <= value <= high
