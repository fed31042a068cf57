"""The step-by-step engine: equal to the compiled one bit for bit, and what only it can do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.errors import ForetraceError
from foretrace.fleet.cluster import parse_cluster
from foretrace.fleet.policies import parse
from foretrace.fleet.policy import Policy, Wait
from foretrace.fleet.result import Cause, FleetResult
from foretrace.fleet.setup import Costs
from foretrace.fleet.simulate import Simulation, simulate
from foretrace.fleet.speeds import PairSpeeds, ProportionalSpeeds
from foretrace.fleet.speeds.closed_form import ConstantSpeeds
from foretrace.fleet.stepping import Stepping, View
from foretrace.fleet.workload import SECOND, Workload
from foretrace.testing.policy import check_holdings
from tests.fleet.stepping_cases import Case, cases, check_books
from tests.fleet.stepping_policies import Packs, Resizes

COLUMNS = (
    "start_ns",
    "end_ns",
    "held_ns",
    "dead_ns",
    "gpu_ns",
    "comm_ns",
    "starts",
    "preempted",
    "failed",
    "waited_ns",
)


def check_equal(a: FleetResult, b: FleetResult) -> None:
    for name in (*COLUMNS, "never"):
        assert np.array_equal(getattr(a, name), getattr(b, name)), name
    assert a.segments is not None and b.segments is not None
    for column in fields(a.segments):
        assert np.array_equal(getattr(a.segments, column.name), getattr(b.segments, column.name)), column.name
    assert (a.events, a.stopped_ns, a.decisions) == (b.events, b.stopped_ns, b.decisions)


@given(cases(), st.sampled_from((None, 30.0, 333.3)))
@settings(max_examples=60)
def test_equal_to_the_compiled_engine_bit_for_bit(case: Case, until_s: float | None) -> None:
    compiled = Simulation(*case.parts, **case.options).run(until_s=until_s)
    steps = Stepping(*case.parts, **case.options).run(until_s=until_s)
    check_books(compiled)
    check_holdings(steps)
    check_equal(compiled.result(), steps.result())
    assert compiled.now_s == steps.now_s and compiled.stopped == steps.stopped


@dataclass(frozen=True, kw_only=True)
class Spelled(Policy):
    """Overrides every decision with the rule as written."""

    def order(self, view: View, waiting: Any) -> Any:
        return view.ordered(waiting)

    def admit(self, view: View, job: int) -> Wait | None:
        return view.admitted(job)

    def place(self, view: View, job: int) -> Any:
        return view.placed(job)

    def preempt(self, view: View) -> Any:
        return view.outranked()


@given(cases())
@settings(max_examples=15)
def test_rules_called_from_overridden_methods_are_the_same_rules(case: Case) -> None:
    given_ = {each.name: getattr(case.policy, each.name) for each in fields(Policy)}
    key = case.policy.key(case.workload)
    spelled = type("Spelled", (Spelled,), {"key": lambda self, workload: key})(**given_)
    steps = Stepping(case.workload, case.cluster, spelled, **case.options)
    rules = Stepping(*case.parts, **case.options)
    for name in ("start_ns", "end_ns", "held_ns", "starts", "preempted", "failed"):
        assert np.array_equal(getattr(steps.run().result(), name), getattr(rules.run().result(), name)), name


# ---- timers go off when nothing else happens
@pytest.mark.parametrize("engine", [Simulation, Stepping])
def test_a_delay_timer_wakes_a_job_that_waits_alone(engine: Callable[..., Any]) -> None:
    """Two machines of two GPUs; one GPU of each is taken for an hour, so two are free on two machines."""
    policy = Policy(name="waits", place_rule="delay", waits_s=(600.0,))
    work = Workload.of(submit_s=[0, 0, 0, 1, 20], gpus=[1, 1, 1, 1, 2], work_s=[3600, 10, 3600, 10, 10])
    result = engine(work, parse_cluster("2x2"), policy).run().result()
    last = work.submit_ns[4]
    assert result.start_ns[:4].tolist() == [0, 0, 0, SECOND]
    assert result.start_ns[4] == last + 600 * SECOND, "at t_last + wait, though nothing happens then"
    assert result.waited_ns[4, Cause.TIMER] == 600 * SECOND
    assert result.end_ns[4] == last + 610 * SECOND


@pytest.mark.parametrize("engine", [Simulation, Stepping])
def test_the_first_in_line_waits_for_gpus_and_the_others_for_it(engine: Callable[..., Any]) -> None:
    """Also while no GPU at all is free, when nobody in line is looked at."""
    work = Workload.of(submit_s=[0, 10, 20], gpus=[4, 4, 1], work_s=[100, 50, 10])
    result = engine(work, parse_cluster("1x4"), Policy(name="first", admit_rule="block")).run().result()
    assert result.start_ns.tolist() == [0, 100 * SECOND, 150 * SECOND]
    assert result.waited_ns[1, Cause.FULL] == 90 * SECOND
    assert (result.waited_ns[2, Cause.BEHIND], result.waited_ns[2, Cause.FULL]) == (80 * SECOND, 50 * SECOND)


@pytest.mark.parametrize("engine", [Simulation, Stepping])
def test_a_lease_ends_when_nothing_else_happens(engine: Callable[..., Any]) -> None:
    work = Workload.of(submit_s=[0, 100], gpus=[2, 2], work_s=[1000, 50])
    policy = Policy(name="turns", order_rule="service", preempt_rule="lease", lease_s=300)
    result = engine(work, parse_cluster("1x2"), policy, costs=Costs(restart_s=7)).run().result()
    assert result.start_ns[1] == 300 * SECOND, "the first end of a lease after it came"
    assert result.end_ns[1] == 350 * SECOND
    assert result.end_ns[0] == (1000 + 50 + 7) * SECOND and result.dead_ns[0] == 7 * SECOND
    assert result.waited_ns[1, Cause.FULL] == 200 * SECOND


@pytest.mark.parametrize("engine", [Simulation, Stepping])
def test_one_who_lost_gpus_keeps_a_claim_to_others(engine: Callable[..., Any]) -> None:
    """GPUs that a preempted job once had are taken: that must not cost it those that it holds now."""
    work = Workload.of(submit_s=[6, 16, 26], gpus=[2, 1, 1], work_s=[53, 31, 9])
    policy = Policy(name="turns", order_rule="service", preempt_rule="lease", lease_s=10)
    result = engine(work, parse_cluster("2x2"), policy, record="devices").run().result()
    segments = result.segments
    assert segments is not None and result.finished.all()
    for job in range(3):
        mine = np.flatnonzero(segments.job == job)
        for a, b in pairwise(mine):
            same = set(segments.devices_of(a).tolist()) == set(segments.devices_of(b).tolist())
            assert not (same and segments.end_ns[a] == segments.start_ns[b]), "closed and opened on the same GPUs"


# ---- elastic jobs
def test_an_elastic_job_grows_when_gpus_are_left() -> None:
    work = Workload.of(
        submit_s=[0, 0], gpus=[2, 4], work_s=[100, 90], min_gpus=[2, 1], max_gpus=[2, 4], job=["rigid", "elastic"]
    )
    steps = Stepping(work, parse_cluster("1x4"), Resizes(name="grows"), costs=Costs(restart_s=5), record="devices")
    result = steps.run().result()
    segments = result.segments
    assert segments is not None
    assert [(int(j), int(g)) for j, g in zip(segments.job, segments.gpus, strict=True)] == [(0, 2), (1, 2), (1, 4)]
    # half as fast for 100 s on 2 GPUs: 50 of 90; then 5 s to restart and the other 40 on 4
    assert result.end_ns[1] == (100 + 5 + 40) * SECOND
    assert result.dead_ns[1] == 5 * SECOND and result.starts[1] == 2 and result.preempted[1] == 1
    assert result.gpu_ns[1] == (2 * 100 + 4 * 45) * SECOND
    played = simulate(work, parse_cluster("1x4"), Resizes(name="grows"), costs=Costs(restart_s=5))
    assert played.end_ns.tolist() == result.end_ns.tolist() and played.facts["engine"] == "stepping"


def test_an_elastic_job_that_keeps_its_gpus_pays_nothing() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Nervous(Policy):
        def preempt(self, view: View) -> Any:
            return view.running

        def place(self, view: View, job: int) -> Any:
            return view.gpus_of(job) or view.placed(job)

        def review(self, view: View) -> int:
            return view.now_ns + SECOND

    work = Workload.of(submit_s=[0, 3], gpus=[2, 2], work_s=[100, 10])
    result = Stepping(work, parse_cluster("1x4"), Nervous(name="nervous"), costs=Costs(restart_s=5)).run().result()
    assert result.end_ns.tolist() == [100 * SECOND, 13 * SECOND]
    assert result.preempted.tolist() == [0, 0] and result.dead_ns.sum() == 0


def test_a_job_may_start_on_fewer_gpus_than_it_asks_for_where_the_policy_can() -> None:
    work = Workload.of(submit_s=[0], gpus=[8], work_s=[10], min_gpus=[2], max_gpus=[8])
    assert Stepping(work, parse_cluster("1x4"), Policy(name="rigid")).run().result().never.all()
    result = Stepping(work, parse_cluster("1x4"), Resizes(name="fits")).run().result()
    assert result.end_ns[0] == 20 * SECOND and not result.never.any()


# ---- several jobs on a GPU
def test_parts_of_a_gpu_fill_the_fullest_first() -> None:
    work = Workload.of(
        submit_s=[0, 1, 2, 3, 4], gpus=[1] * 5, work_s=[100] * 5, share=[0.3, 0.6, 0.5, 0.1, 1.0], job=list("abcde")
    )
    steps = Stepping(work, parse_cluster("1x4"), Policy(name="parts"), record="devices").run(until_s=10)
    check_holdings(steps)
    assert [steps.devices_of(job) for job in range(5)] == [[0], [0], [1], [0], [2]]
    result = steps.run().result()
    assert result.end_ns.tolist() == [(100 + at) * SECOND for at in range(5)], "parts do not disturb each other"
    assert np.allclose(result.gpu_ns, np.array([0.3, 0.6, 0.5, 0.1, 1.0]) * 100 * SECOND)


def test_packing_runs_elastic_jobs_on_the_gpus_they_request() -> None:
    work = Workload.of(
        submit_s=[0, 0, 0], gpus=[2, 2, 8], work_s=[10] * 3, min_gpus=[1, 1, 1], max_gpus=[2, 4, 8],
        tenant=["red", "red", "blue"],
    )  # fmt: skip
    pairs = PairSpeeds(base=ProportionalSpeeds(), left={})
    cluster = replace(parse_cluster("1x4"), quotas={"red": 3})
    result = simulate(work, cluster, parse("packing"), speeds=pairs)
    assert result.never.tolist() == [False, False, True]
    assert (result.start_ns[:2] // SECOND).tolist() == [0, 10], "the quota allows one of them"


def test_a_quota_holds_jobs_of_parts_as_the_parts_they_need() -> None:
    work = Workload.of(submit_s=[0], gpus=[4], work_s=[10], share=[0.5], tenant=["red"])
    for quota, ends in ((2, True), (1, False)):
        result = simulate(work, replace(parse_cluster("1x4"), quotas={"red": quota}), Policy(name="p"))
        assert bool(result.finished.all()) == ends and bool(result.never.all()) != ends


def test_packed_jobs_slow_each_other_down_while_they_are_together() -> None:
    work = Workload.of(submit_s=[0, 20], gpus=[1, 1], work_s=[100, 30], model=["m0", "m1"])
    speeds = PairSpeeds(base=ConstantSpeeds(), left={("m0", "m1"): 0.5, ("m1", "m0"): 0.75})
    seen = []

    class Watches(PairSpeeds):
        def speed(self, workload: Workload, job: int, shape: Any) -> Any:
            seen.append(shape.sharers)
            return super().speed(workload, job, shape)

    packs = Packs(name="packs", options={"sharers": 2})
    steps = Stepping(work, parse_cluster("1x1"), packs, speeds=Watches(base=speeds.base, left=speeds.left))
    result = steps.run().result()
    # together from 20: the second needs 30 / 0.75 = 40 s; the first does 20 + 40 * 0.5 = 40 by then, 60 are left
    assert result.end_ns.tolist() == [120 * SECOND, 60 * SECOND]
    assert set(seen) == {0, 1}
    assert result.gpu_ns.sum() == pytest.approx(120 * SECOND), "no more GPU time than there was"


def test_a_failure_undoes_what_was_done_at_each_speed() -> None:
    """A packed job loses what it did since its start, at the speeds that it had."""
    work = Workload.of(submit_s=[0, 20], gpus=[1, 1], work_s=[10_000, 30], model=["m0", "m1"])
    speeds = PairSpeeds(base=ConstantSpeeds(), left={("m0", "m1"): 0.5, ("m1", "m0"): 0.75})
    packs = Packs(name="packs", options={"sharers": 2})
    costs = Costs(mtbf_h=1.0, mttr_h=0.05)
    steps = Stepping(work, parse_cluster("1x1"), packs, speeds=speeds, costs=costs, seed=3)
    while steps.run(max_events=steps.state.events + 1).stopped:
        job = steps.state.jobs[0]
        if job.failed == 1 and job.status == "waiting":
            break
    assert steps.state.jobs[0].failed == 1
    assert steps.view.remaining_s(0) == pytest.approx(10_000, abs=1e-6)


def test_packing_whole_jobs_needs_a_model_that_knows_pairs() -> None:
    work = Workload.of(submit_s=[0, 0], gpus=[1, 1], work_s=[10, 10], job=["one", "two"])
    with pytest.raises(ForetraceError, match=r"'packs' puts job 'two' on a GPU beside 'one'.*pair"):
        Stepping(work, parse_cluster("1x1"), Packs(name="packs", options={"sharers": 2})).run()
    with pytest.raises(ForetraceError, match=r"'m'.*beside 'm'"):
        same = replace(work, model=np.array(["m", "m"], object))
        pairs = PairSpeeds(base=ProportionalSpeeds(), left={})
        Stepping(same, parse_cluster("1x1"), Packs(name="packs", options={"sharers": 2}), speeds=pairs).run()


# ---- mistakes of a policy
@dataclass(frozen=True, kw_only=True)
class Gives(Policy):
    """Gives the second job what the test says; the first one runs by the rules."""

    gpus: Sequence[int] = ()
    preempts: Sequence[int] = ()
    offers: Sequence[int] = field(default=(0, 1))
    again: int | None = None

    def order(self, view: View, waiting: Any) -> Any:
        return waiting if view.now_ns == 0 else self.offers

    def place(self, view: View, job: int) -> Any:
        return view.placed(job) if job == 0 else self.gpus

    def preempt(self, view: View) -> Any:
        return self.preempts if view.now_ns else ()

    def review(self, view: View) -> int | None:
        return self.again


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"gpus": (99, 2)}, r"'gives' at 10 s, job 'b': gives it GPU 99; the cluster has GPUs 0 to 4"),
        ({"gpus": (0, 2)}, r"job 'b': gives it GPU 0, which job 'a' holds"),
        ({"gpus": (2,)}, r"job 'b': places it on 1 GPUs and it runs on 2"),
        ({"gpus": (2, 2)}, r"job 'b': gives it a GPU twice"),
        ({"gpus": (2, 4)}, r"job 'b': gives it GPU 4, a kind that it may not use"),
        ({"offers": (0,)}, r"job 'a': offers GPUs to it, and it is not waiting but running"),
        ({"offers": (7,)}, r"offers GPUs to job number 7; there are 2 jobs"),
        ({"preempts": (1,)}, r"job 'b': preempts it, and it is not running but waiting"),
        ({"again": 5}, r"wants to decide again at 5 ns, which is not later"),
    ],
)
def test_a_mistake_of_a_policy_says_who_when_and_what(wrong: dict[str, Any], message: str) -> None:
    wrong = {"offers": (1,), "gpus": (2, 3)} | wrong
    work = Workload.of(submit_s=[0, 10], gpus=[2, 2], work_s=[100, 10], job=["a", "b"], gpu_type=["x", "x"])
    with pytest.raises(ForetraceError, match=message):
        Stepping(work, parse_cluster("2x2@x+1x1@y"), Gives(name="gives", **wrong)).run()


def test_a_gang_of_two_kinds_and_a_quota_are_refused() -> None:
    work = Workload.of(submit_s=[0, 10], gpus=[2, 2], work_s=[100, 10], job=["a", "b"], tenant=["t", "t"])
    cluster = parse_cluster("2x2@x+1x1@y")
    with pytest.raises(ForetraceError, match=r"job 'b': mixes kinds of GPUs \(2 and 4\)"):
        Stepping(work, cluster, Gives(name="gives", gpus=(2, 4), offers=(1,))).run()
    elastic = replace(work, max_gpus=np.array([2, 3]), gpus=np.array([1, 1]), min_gpus=np.array([1, 1]))
    with pytest.raises(ForetraceError, match=r"job 'b': gives its tenant more than its quota"):
        limited = replace(parse_cluster("1x4"), quotas={"t": 3})
        Stepping(elastic, limited, Gives(name="gives", gpus=(1, 2, 3), offers=(1,))).run()


def test_a_policy_that_waits_for_ever_is_found() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Never(Policy):
        def place(self, view: View, job: int) -> Wait:
            return Wait(Cause.ROUND)

        def review(self, view: View) -> int:
            return view.now_ns + SECOND

    work = Workload.of(submit_s=[0], gpus=[1], work_s=[1], job=["a"])
    with pytest.raises(ForetraceError, match=r"has looked 10,001 times .* \(first 'a'\)"):
        Stepping(work, parse_cluster("1x1"), Never(name="never")).run()


def test_the_view_shows_the_moment() -> None:
    work = Workload.of(
        submit_s=[0, 10, 10], gpus=[2, 1, 4], work_s=[100, 50, 5], gpu_type=["", "x", ""], tenant=["t", "u", "u"]
    )
    cluster = replace(parse_cluster("2x2@x+1x2@y"), quotas={"u": 4})
    steps = Stepping(work, cluster, Policy(name="looked-at"), costs=Costs(first_start=True, restart_s=4)).run(
        until_s=12
    )
    view = steps.view
    assert (view.now_s, view.running.tolist(), view.waiting.tolist()) == (10.0, [0, 1], [2])
    assert [view.status(job) for job in range(3)] == ["running", "running", "waiting"]
    assert view.remaining_s(0) == pytest.approx(94) and view.attained_gpu_s(0) == 20 and view.held_s(0) == 10
    assert view.gpus_of(0) == (0, 1) and view.gpus_of(2) == ()
    assert view.free_gpus == 3 and view.free(0) == [0, 1, 2] and view.free(gpu_type="y") == [2]
    assert view.free_in(1, 0) == [3] and view.jobs_on(2) == (1,)
    assert view.may_use(1, 3) and not view.may_use(1, 4) and not view.may_use(2, 0)
    assert view.quota_left(2) == 3 and view.quota_left(0) == float("inf")
    assert view.together(2, 2) == [4, 5] and view.together(2, 3) == [] and view.together(1, 1) == [3]
    assert view.speed_of(0, [0, 4]).progress == 1.0 and view.rate(0) == 1.0
    assert view.last_ns(2) == 10 * SECOND and view.starts(0) == 1 and view.estimate_s(2) == 5.0
    assert steps.looks_again_s == 64.0 and not steps.finished


def test_the_view_tells_when_a_lease_ends_and_which_band_serves() -> None:
    work = Workload.of(submit_s=[0, 100], gpus=[2, 2], work_s=[1000, 50])
    leases = Policy(name="turns", order_rule="service", preempt_rule="lease", lease_s=300)
    assert Stepping(work, parse_cluster("1x2"), leases).run(until_s=12).view.lease_end_ns(0) == 300 * SECOND
    queues = Policy(name="bands", order_rule="queues", thresholds_gpu_s=(100.0,), preempt_rule="always")
    view = Stepping(work, parse_cluster("1x2"), queues).run(until_s=400).view
    assert view.band(0) == 1  # 2 GPUs for more than 50 s
