"""The compiled engine against its plain twin, against what queueing theory knows, and what must never happen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from foretrace.errors import ForetraceError
from foretrace.serving.llm import requests as served
from foretrace.serving.llm import scheduler
from foretrace.serving.llm.engine import DoesNotFitError, EngineRules, Served, simulate
from foretrace.serving.llm.requests import Requests, requests
from foretrace.serving.llm.step_times import StepTimes
from tests.serving.llm.plain_engine import serve
from tests.serving.llm.step_cases import constant, engine_rules, request_lists, steps


def same_as_twin(asked: Requests, times: StepTimes, rules: EngineRules, **more: Any) -> Served:
    """What both answer; bit for bit the same."""
    found = simulate(asked, times, rules, **more)
    seqs, engine = serve(asked, times, rules, **more)
    for column, name in ((found.first_s, "first"), (found.finish_s, "finish")):
        np.testing.assert_array_equal(column, [getattr(each, name) for each in seqs])
    np.testing.assert_array_equal(found.preempted, [each.preempted for each in seqs])
    gaps = np.zeros(scheduler.GAP_BINS, np.int64)
    np.add.at(gaps, [scheduler.gap_bin(each) for each in engine.gaps], 1)
    np.testing.assert_array_equal(found.gaps, gaps)
    assert (found.steps, found.preemptions, found.hits) == (engine.steps_begun, engine.preemptions, engine.hits)
    assert found.used_s == engine.area
    assert found.kv_most == engine.most_used / engine.total
    return found


@given(data=st.data(), asked=request_lists(), rules=engine_rules(), end=st.sampled_from([0, -1, 1]))
def test_twin(data: st.DataObject, asked: Requests, rules: EngineRules, end: int) -> None:
    times = data.draw(steps(tokens=data.draw(st.integers(16, 600))))
    computed = data.draw(st.booleans()) and not asked.concurrency and bool((asked.output > 1).all())
    found = same_as_twin(asked, times, rules, end=end, computed=computed)
    conserved(asked, found, computed)


def conserved(asked: Requests, found: Served, computed: bool = False) -> None:
    """Nobody is lost, no token comes out twice, and the cache never holds more than it can."""
    done = ~np.isnan(found.finish_s)
    assert found.emitted == (asked.output - computed)[done].sum()
    least = (asked.output - 1 + (0 if computed else asked.prompt))[done].sum()
    assert found.computed + found.hits >= least
    if not found.preemptions:
        assert found.computed + found.hits == least
    assert 0 <= found.kv_most <= 1
    assert (found.arrival_s <= found.first_s)[done].all() and (found.first_s <= found.finish_s)[done].all()
    assert found.gaps.sum() == found.emitted - (0 if computed else done.sum())
    np.testing.assert_allclose(found.over_time[:, 0].sum(), found.used_s, rtol=1e-9, atol=1e-12)
