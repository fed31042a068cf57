"""What workers take beside their collectives is measured on real ones, and what they say of several is worked out."""

from __future__ import annotations

import pytest

from foretrace.experiment.links.hosts import (
    SteppedTogether,
    StepTogether,
    TimeHosts,
    of_all,
    step_together,
    time_hosts,
    together,
)
from foretrace.experiment.messages import Setup
from foretrace.experiment.processes import Workers

pytest.importorskip("torch")


def test_hosts_are_timed_on_a_real_link(pair: Workers) -> None:
    found = pair.ask(time_hosts, TimeHosts(bytes_per_s=1e6, turns=2), "timing")
    for each in (*found, of_all(found)):
        assert {"company", "stretch"} <= set(each)
        assert all(0 <= low <= value <= high for value, low, high in each.values())
        assert all(low > 0 for name, (_, low, _) in each.items() if name != "delay_us")  # no delay may be seen at all
        assert each["company"][1] >= 1 and each["stretch"][1] >= 1
    request = StepTogether(setup=Setup(work="4x64kb/1ms"), steps=3, pause_s=0.2)
    for steps in pair.ask(step_together, request, "stepping"):
        waited_s = [sum(parts) for parts in steps.parts_s]
        assert len(steps.free_s) == len(waited_s) == 5  # of whole blocks
        assert {len(parts) for parts in steps.parts_s} == {1}  # a model without buffers waits once
        assert min(steps.free_s) >= 0.004 and 0.004 <= min(waited_s) < 0.2  # without pauses


def test_a_model_with_buffers_waits_before_its_forward_pass_too(pair: Workers) -> None:
    request = StepTogether(setup=Setup(work="mobilenet-v2"), steps=1, pause_s=0.0)
    for steps in pair.ask(step_together, request, "stepping"):
        assert {len(parts) for parts in steps.parts_s} == {2}
        assert len(steps.waits_s) == len(steps.parts_s) and min(steps.waits_s) > 0


def test_what_steps_made_together_say_of_workers() -> None:
    one, two = (0.010, 0.012, 0.010, 0.010, 0.500), (0.012, 0.010, 0.012, 0.012, 0.012)

    def steps(free_s: tuple[float, ...], later_s: float) -> SteppedTogether:
        waits_s = tuple(max(both) - own + 0.0003 for *both, own in zip(one, two, free_s, strict=True))  # a message, too
        parts_s = tuple((each / 2, each / 2 + later_s) for each in free_s)
        return SteppedTogether(free_s=free_s, parts_s=parts_s, waits_s=waits_s)

    step_s, found = together([steps(one, 0.003), steps(two, 0.003)])
    assert (found["workers"], found["steps"]) == (2, 5)
    value, low, high = found["late_ms"]
    assert value == pytest.approx(1.0)  # the last one is 1 ms behind the mean, but for one interruption
    assert 0 <= low <= value <= high
    assert found["resumed_ms"] == pytest.approx((3.0, 3.0, 3.0))
    assert step_s == pytest.approx(0.011)
    assert together([steps(one, -0.001), steps(one, -0.001)])[1]["resumed_ms"] == (0.0, 0.0, 0.0)
