"""The same answers on a Ray cluster as here, also where its workers die; one cluster for all of these tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foretrace import executor, flow
from foretrace.arrays import Float64
from foretrace.errors import ForetraceError, TraceError
from foretrace.plan.soap.problem import best_strategy
from foretrace.search.minimise import minimise
from foretrace.search.strategies import MCMC
from foretrace.serving.llm import capacity
from foretrace.serving.llm.simulation import simulated
from reproductions.flexflow.test_problem import problem_of
from tests.search.test_minimise import PROBLEM, Numbers
from tests.serving.llm.test_capacity import ASK
from tests.test_executor import die, ranks, refuse, same, square

__all__ = ["ranks"]
pytestmark = [
    pytest.mark.slow("starts a Ray cluster"),
    pytest.mark.filterwarnings("ignore"),  # of Ray's own making
]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """A real cluster on this machine."""
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    assert ray.is_initialized()  # what was running before stays
    ray.shutdown()


def test_capacities_and_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "RULES", (("chunked", 512), ("prefill-first", 0)))
    monkeypatch.setattr(capacity, "SEQUENCES", (8, 128))
    found, here = (capacity.capacities(replace(ASK, on=on), devices=1, seconds=60).engines for on in ("ray", "here"))
    assert found == here and any(one.requests_per_s for one in found)
    many = replace(ASK, asked="poisson qps=20 prompt=64-256 output=16-64", seconds=20, replicas=40, slo="")
    played, plain = simulated(replace(many, on="ray")), simulated(many)
    np.testing.assert_array_equal(played.run.finish_s, plain.run.finish_s)
    assert played.figures.latencies == plain.figures.latencies and played.run.replicas == 40


def test_same_plan_here_and_on_ray() -> None:
    pytest.importorskip("torch")
    from tests.plan.soap.test_plan import planned

    here, there = (planned(on=on).strategies for on in ("here", "ray"))
    assert here == there
    assert all(each.calls <= 200 for each in here)


def test_chains_of_a_layered_model() -> None:
    problem = problem_of("recurrent", 2, 2, "gather")
    here, there = (best_strategy(problem, calls=300, chains=3, seed=5, on=on) for on in (None, "ray"))
    assert here == there and here.best is not None


def test_chains_whose_workers_are_killed(tmp_path: Path) -> None:
    given: dict[str, Any] = {"strategy": MCMC(beta=0.3), "calls": 403, "chains": 3, "seed": 2}
    here = minimise(PROBLEM, **given)
    assert minimise(PROBLEM, **given, on="ray") == here
    dying = Numbers(PROBLEM.space, 7, 0.2, die_once=tmp_path / "died")
    assert minimise(dying, **given, on="ray") == here
    assert (tmp_path / "died").exists()


def writeable(array: Float64) -> bool:
    """Whether a worker may write on what it is given; else its loops would be compiled once more."""
    return array.flags.writeable


def test_work_and_its_mistakes(ranks: Path) -> None:
    told: list[float] = []
    assert executor.map(square, range(5), on="ray", progress=told.append) == [0, 1, 4, 9, 16]
    assert told[-1] == 1.0 and len(told) == 5
    assert executor.map(writeable, [np.zeros(9), np.zeros(1 << 18)], on="ray") == [True, True]
    on_ray = flow.rank_graphs(ranks, on="ray")
    assert all(same(one, other) for one, other in zip(flow.rank_graphs(ranks), on_ray, strict=True))
    assert on_ray[0].dur.flags.writeable  # not in the cluster's memory
    with pytest.raises(TraceError, match=r"^file 2 is no recording: leave it out\.$"):
        executor.map(refuse, range(4), on="ray")
    with pytest.raises(ForetraceError, match="a worker process died after"):
        executor.map(die, range(2), on="ray")
