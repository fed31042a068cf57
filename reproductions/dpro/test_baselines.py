"""The search beats the plain ones that published planners use."""

from __future__ import annotations

from foretrace.plan.buckets import default
from foretrace.plan.evaluate import Evaluator
from foretrace.plan.problem import Plan
from foretrace.plan.search import overtaking
from reproductions.dpro.baselines import greedy, mcmc
from tests.plan.test_search import blocks


def test_it_beats_plain_searches_on_repeated_blocks() -> None:
    evaluate = Evaluator.of(blocks())
    ours = overtaking(evaluate).cost
    begin = default(evaluate.problem)
    plain = Plan(ends=begin.ends, chunks=begin.chunks, ahead=True)
    assert ours <= greedy(evaluate, plain, seconds=5).step_ns
    assert ours <= mcmc(evaluate, plain, seconds=0.3).step_ns
    assert ours < evaluate.step_ns(plain)
