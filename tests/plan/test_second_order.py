"""The choice of a gradient-worker fraction."""

from __future__ import annotations

from functools import lru_cache

import pytest

from foretrace.errors import ForetraceError
from foretrace.graph.taskgraph import TaskGraph
from foretrace.plan.second_order import SecondOrderPlan, frequency, plan_second_order
from foretrace.testing import recorded, small_training

NETWORK = "1gbit/50us"


@lru_cache
def alone() -> TaskGraph:
    return recorded(small_training())


@lru_cache
def planned() -> SecondOrderPlan:
    return plan_second_order(alone(), workers=4, network=NETWORK, every=((10, 100), (1, 10)))


def test_the_curve_goes_from_the_least_memory_to_the_least_communication() -> None:
    found = planned()
    curve = found.candidates[:3]
    assert [each.gradient_workers for each in curve] == [1, 2, 4]
    assert [each.memory_bytes for each in curve] == sorted(each.memory_bytes for each in curve)
    assert curve[0].gradients_bytes > 0 == curve[-1].gradients_bytes
    assert curve[0].inverses_bytes == 0 < curve[-1].inverses_bytes
    assert found.choice in curve  # of the first frequency
    for each in found.candidates:
        low, high = each.interval_s
        assert low <= each.step_s <= high and each.added_interval_s[0] <= each.added_s <= each.added_interval_s[1]
        assert each.memory_bytes < each.peak_bytes


def test_memory_bounds_the_choice() -> None:
    curve = planned().candidates[:3]
    least = plan_second_order(alone(), workers=4, network=NETWORK, memory_bytes=curve[0].peak_bytes)
    fits = [each.peak_bytes <= curve[0].peak_bytes for each in curve]
    assert [each.fits for each in least.candidates] == fits and not all(fits) and least.choice.fits
    with pytest.raises(ForetraceError, match=r"no gradient-worker fraction fits 0\.001 MB: the least, 0\.25, takes up"):
        plan_second_order(alone(), workers=4, network=NETWORK, memory_bytes=1e3)


def test_one_worker_sends_nothing() -> None:
    found = plan_second_order(alone(), workers=1, network="")
    assert len(found.candidates) == 1 and found.choice.sent_bytes == 0
    value, low, high = found.pays_below
    assert low < value < high < 1.2


def test_frequencies_and_networks_that_are_none() -> None:
    assert frequency("10/100") == (10, 100)
    for text in ("10", "0/5", "a/b", "1/2/3"):
        with pytest.raises(ForetraceError, match="every must be steps between factors and between inverses"):
            frequency(text)
    with pytest.raises(ForetraceError, match="'' is no link; write a rate above 0"):
        plan_second_order(alone(), workers=8, network="")
