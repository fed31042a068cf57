"""What holds whatever is played: nothing is held twice, no work is lost or won, every second of waiting has a cause."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.errors import ForetraceError
from foretrace.fleet.cluster import parse_cluster
from foretrace.fleet.policy import Policy
from foretrace.fleet.result import Cause, FleetResult
from foretrace.fleet.setup import Costs, failures
from foretrace.fleet.simulate import Simulation, simulate
from foretrace.fleet.speeds import ProportionalSpeeds, Shape
from foretrace.fleet.stepping import Stepping
from foretrace.fleet.workload import SECOND, Workload
from foretrace.testing import small_jobs
from foretrace.testing.policy import check_holdings
from tests.fleet.stepping_cases import Case, cases, check_books
from tests.fleet.stepping_policies import Packs, Resizes, keeps_most


def play(case: Case, **other: Any) -> FleetResult:
    return simulate(*case.parts, **(case.options | other))


@given(cases())
@settings(max_examples=25)
def test_gangs_are_whole_and_no_gpu_is_held_twice(case: Case) -> None:
    result = play(case)
    segments, work = result.segments, case.workload
    assert segments is not None
    stretches: dict[int, list[tuple[int, int]]] = {}
    for at, job in enumerate(segments.job.tolist()):
        gpus = segments.devices_of(at).tolist()
        assert len(set(gpus)) == work.gpus[job] == segments.gpus[at]
        kinds = {case.cluster.types[kind] for kind in case.cluster.gpu_type[gpus].tolist()}
        assert len(kinds) == 1 and (not work.gpu_type[job] or kinds <= set(work.gpu_type[job].split("|")))
        for gpu in gpus:
            stretches.setdefault(gpu, []).append((int(segments.start_ns[at]), int(segments.end_ns[at])))
    for gpu, held in stretches.items():
        held.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(held)), f"GPU {gpu} is held twice"
    for tenant, quota in (case.cluster.quotas or {}).items():
        assert _most_held(result, work.tenant == tenant) <= quota


@given(cases())
@settings(max_examples=25)
def test_time_is_accounted_for(case: Case) -> None:
    """A job's time is waiting, every ns of it with a cause, and its stretches; what it held is what it was charged."""
    result = play(case)
    segments, work = result.segments, case.workload
    assert segments is not None
    n = len(work)
    length = segments.end_ns - segments.start_ns
    held = np.zeros(n, np.int64)
    np.add.at(held, segments.job, length)
    assert np.array_equal(held, result.held_ns)
    assert np.array_equal(result.gpu_ns, held * work.gpus.astype(float))
    done = result.finished
    waiting = result.end_ns - work.submit_ns - result.held_ns
    assert np.array_equal(waiting[done], result.waited_ns.sum(axis=1)[done])
    assert (result.waited_ns >= 0).all() and (result.dead_ns >= 0).all() and (result.dead_ns <= result.held_ns).all()
    last = np.full(n, -1)
    np.maximum.at(last, segments.job, segments.end_ns)
    assert np.array_equal(last[done], result.end_ns[done]), "it ends when its last stretch ends"
    first = np.full(n, 2**62)
    np.minimum.at(first, segments.job, segments.start_ns)
    assert np.array_equal(first[result.starts > 0], result.start_ns[result.starts > 0])
    assert np.array_equal(np.bincount(segments.job, minlength=n), result.starts), "one stretch for each start"
    assert (result.start_ns[done] >= work.submit_ns[done]).all()
    span = float(segments.end_ns.max(initial=0) - work.submit_ns.min())
    assert result.gpu_ns.sum() <= max(case.cluster.gpus * span, 0.0)


@given(cases())
@settings(max_examples=25)
def test_work_is_conserved_across_preemption_migration_and_failure(case: Case) -> None:
    """Progress of every stretch at its speed is the work of the job, plus what failures undid."""
    result = play(case)
    segments, work = result.segments, case.workload
    assert segments is not None
    speeds = case.speeds or ProportionalSpeeds()
    unmeasured = [_shape(case, segments.devices_of(at).tolist()) for at in range(len(segments))]
    pace = np.array(
        [speeds.speed(work, job, shape).progress for job, shape in zip(segments.job.tolist(), unmeasured, strict=True)]
    )
    done, fastest, restarts = np.zeros(len(work)), np.zeros(len(work)), np.zeros(len(work), np.int64)
    np.add.at(done, segments.job, pace * (segments.end_ns - segments.start_ns - segments.dead_ns) / SECOND)
    np.maximum.at(fastest, segments.job, pace)
    np.add.at(restarts, segments.job, segments.dead_ns)
    lost = (result.dead_ns - restarts) / SECOND * fastest
    slack = 1e-8 * (1 + result.starts + case.workload.work_s)
    assert (done - work.work_s - lost <= slack)[result.finished].all(), "no more than is needed"
    assert (done - work.work_s >= -slack)[result.finished].all(), "no less"
    calm = result.finished & (result.failed == 0)
    assert np.array_equal(result.dead_ns[calm], restarts[calm]), "only restarts and failures cost progress"
    assert (done - work.work_s <= slack)[calm].all()


@given(cases())
@settings(max_examples=20)
def test_the_same_input_gives_the_same_result(case: Case) -> None:
    first, second = play(case), play(case)
    for name in ("start_ns", "end_ns", "held_ns", "gpu_ns", "waited_ns"):
        assert np.array_equal(getattr(first, name), getattr(second, name)), name
    assert first.decisions == second.decisions
    quiet = play(case, record="nothing", explain=None)
    assert np.array_equal(first.end_ns, quiet.end_ns) and first.events == quiet.events, "looking changes nothing"


@given(cases(), st.lists(st.floats(0, 500), min_size=1, max_size=5))
@settings(max_examples=20)
def test_stopping_on_the_way_changes_nothing(case: Case, stops: list[float]) -> None:
    played = Simulation(*case.parts, **case.options)
    for until in sorted(stops):
        played.run(until_s=until)
        check_books(played)
    assert np.array_equal(played.run().result().end_ns, play(case).end_ns)


@given(cases())
@settings(max_examples=20)
def test_everything_that_can_be_held_is_finished(case: Case) -> None:
    result = play(case)
    assert np.array_equal(result.finished, ~result.never)


@given(cases(), st.sampled_from((2, 8)))
@settings(max_examples=20)
def test_a_clock_in_other_units_changes_nothing_else(case: Case, by: int) -> None:
    """All times twice as long (a power of two, exact in floats): so is the schedule, and nothing else differs.

    Failures are drawn again and bands are crossed at whole ns, so both are left out.
    """
    policy, costs = case.policy, replace(case.costs, mtbf_h=0.0)
    if policy.order_rule == "queues":
        policy = replace(policy, order_rule="service")
    work = replace(case.workload, work_s=np.ceil(case.workload.work_s))
    longer = replace(work, submit_ns=work.submit_ns * by, work_s=work.work_s * by, estimate_s=work.estimate_s * by)
    waits = tuple(each * by for each in policy.waits_s)
    stretched = replace(policy, lease_s=policy.lease_s * by, waits_s=waits)
    dear = replace(costs, restart_s=costs.restart_s * by)
    first = simulate(work, case.cluster, policy, costs=costs)
    second = simulate(longer, case.cluster, stretched, costs=dear)
    went = ~first.never
    assert np.array_equal(first.start_ns[went] * by, second.start_ns[went])
    assert np.array_equal(first.end_ns[went] * by, second.end_ns[went])
    assert np.array_equal(first.preempted, second.preempted)
    assert np.array_equal(first.waited_ns * by, second.waited_ns)


@given(cases())
@settings(max_examples=15)
def test_gpus_beside_that_nobody_may_use_change_nothing(case: Case) -> None:
    """A part of a kind that no job is bound to: the others are played as without it. (More GPUs of a kind in use may
    well delay a job: list scheduling is not monotone.)
    """
    if len(case.cluster.levels) != 2 or case.cluster.types == ("",) or case.cluster.quotas or case.costs.mtbf_h:
        return
    kinds = "|".join(case.cluster.types)
    bound = replace(case.workload, gpu_type=np.array([each or kinds for each in case.workload.gpu_type], object))
    wider = replace(
        case.cluster,
        starts=(
            np.append(case.cluster.starts[0], case.cluster.gpus + 3),
            np.array([0, case.cluster.gpus + 3], np.int64),
        ),
        gpu_type=np.append(case.cluster.gpu_type, np.full(3, len(case.cluster.types))),
        types=(*case.cluster.types, "unused"),
        names=(),
    )
    if case.policy.preempt_rule == "always" or case.policy.admit_rule == "backfill":
        return  # they count GPUs by number, whatever their kind
    first, second = simulate(bound, case.cluster, case.policy), simulate(bound, wider, case.policy)
    assert np.array_equal(first.end_ns, second.end_ns)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("order", ["key", "remaining"])
def test_with_room_for_all_nobody_waits(seed: int, order: Any) -> None:
    work = small_jobs(seed=seed, n=20, largest=8)
    result = simulate(work, parse_cluster("20x8"), Policy(name="roomy", order_rule=order))
    assert np.array_equal(result.start_ns, work.submit_ns)
    assert np.array_equal(result.end_ns, work.submit_ns + np.rint(work.work_s * SECOND).astype(np.int64))
    assert result.waited_ns.sum() == 0


@pytest.mark.parametrize("engine", [Simulation, Stepping])
def test_machines_break_until_the_last_job_ends(engine: Any) -> None:
    """Jobs of the whole cluster, one after the other: failures late as early, however often it is looked at."""
    work = Workload.of(submit_s=[0] * 60, gpus=[64] * 60, work_s=[3600] * 60)
    parts = work, parse_cluster("8x8"), Policy(name="p", admit_rule="block")
    costs = Costs(mtbf_h=10, mttr_h=0.01)
    result = engine(*parts, costs=costs, seed=1).run().result()
    third = np.searchsorted(np.sort(result.end_ns), np.array([1, 2]) / 3 * result.end_ns.max())
    in_order = result.failed[np.argsort(result.end_ns)]
    assert all(part.sum() > 3 for part in np.split(in_order, third))
    again = engine(*parts, costs=costs, seed=1)
    while again.run(max_events=again.result().events + 7).stopped:
        pass
    assert np.array_equal(again.result().end_ns, result.end_ns)


def test_jobs_that_no_engine_reaches_are_refused() -> None:
    work = Workload.of(submit_s=[0, 4.7e9], gpus=[1, 1], work_s=[1, 1])
    with pytest.raises(ForetraceError, match="come after 146 years"):
        simulate(work, parse_cluster("1x1"), Policy(name="p"))


def test_machines_break_alike_whichever_others_there_are() -> None:
    """A what-if of further racks compares the same failures."""
    costs, one = Costs(mtbf_h=20, mttr_h=1), parse_cluster("2x2x8")
    times, units, ups = failures(one.bigger(1), costs, 10**15, seed=3)
    for column, more in zip(failures(one, costs, 10**15, seed=3), (times, units, ups), strict=True):
        assert np.array_equal(column, more[units < 4])


def test_a_job_that_never_ends_between_two_failures_is_refused() -> None:
    work = Workload.of(submit_s=[0], gpus=[64], work_s=[360_000])
    with pytest.raises(ForetraceError, match=r"before all jobs end; give more hours, or let jobs save"):
        simulate(work, parse_cluster("8x8"), Policy(name="p"), costs=Costs(mtbf_h=40, mttr_h=0.01))


@pytest.mark.parametrize("seed", range(12))
def test_nobody_who_passes_delays_the_first_in_line_on_its_kind_of_gpu(seed: int) -> None:
    """EASY: the first that does not fit starts no later than if nobody had come behind it."""
    random = np.random.default_rng(seed)
    work = Workload.of(
        submit_s=[0] * 14, gpus=random.choice([1, 2, 4], 14), work_s=random.integers(5, 60, 14),
        gpu_type=random.choice(["a", "b"], 14),
    )  # fmt: skip
    cluster, policy = parse_cluster("1x4@a+1x4@b"), Policy(name="p", admit_rule="backfill", place_rule="greedy")
    start = simulate(work, cluster, policy).start_ns
    first = int(np.flatnonzero(start > 0)[0])
    alone = simulate(work.take(np.arange(first + 1)), cluster, policy).start_ns
    assert start[first] <= alone[first]


@pytest.mark.parametrize("engine", [Simulation, Stepping])
@pytest.mark.parametrize("kind", ["a", ""])
def test_room_is_made_on_the_kind_of_gpu_that_is_asked_for(engine: Any, kind: str) -> None:
    """However many of another kind are free; a job that may use those takes them, and nobody makes room."""
    work = Workload.of(submit_s=[0, 10], gpus=[4, 4], work_s=[1000, 10], gpu_type=["a", kind])
    policy = Policy(name="p", order_rule="remaining", preempt_rule="always")
    result = engine(work, parse_cluster("1x4@a+1x4@b"), policy).run().result()
    assert (result.start_ns // SECOND).tolist() == [0, 10]
    assert (result.end_ns // SECOND).tolist() == [1010 if kind else 1000, 20]


@pytest.mark.parametrize("engine", [Simulation, Stepping])
def test_a_tenant_at_its_quota_reserves_nothing(engine: Any) -> None:
    """Others use the GPUs that are free meanwhile, however long they run."""
    work = Workload.of(
        submit_s=[0, 1, 2], gpus=[4, 2, 4], work_s=[100, 10, 500], tenant=["red", "red", "blue"]
    )  # fmt: skip
    cluster = replace(parse_cluster("1x8"), quotas={"red": 4})
    result = engine(work, cluster, Policy(name="p", admit_rule="backfill")).run().result()
    assert (result.start_ns // SECOND).tolist() == [0, 100, 2]
    assert result.waited_ns[1, Cause.QUOTA] == 99 * SECOND


# ---- elastic jobs and sharing, which have a speed that changes
@given(st.integers(0, 10_000), st.sampled_from(("resizes", "packs", "parts")), st.booleans(), st.booleans())
@settings(max_examples=25)
def test_the_step_by_step_engine_keeps_its_books(seed: int, which: str, leases: bool, breaks: bool) -> None:
    work = small_jobs(seed=seed, n=14, largest=4, elastic=which != "packs")
    turns: dict[str, Any] = {"preempt_rule": "lease", "lease_s": 900.0, "order_rule": "service"} if leases else {}
    policy, speeds = {
        "resizes": (Resizes(name="resizes", **turns), None),
        "packs": (Packs(name="packs", options={"sharers": 2}, **turns), keeps_most()),
        "parts": (Policy(name="parts", **turns), None),
    }[which]
    costs = Costs(restart_s=11, checkpoint_s=500, mtbf_h=4.0 if breaks else 0.0, mttr_h=0.1)
    steps = Stepping(work, parse_cluster("2x4"), policy, speeds=speeds, costs=costs, seed=seed, record="devices")
    while steps.run(max_events=steps.state.events + 5).stopped:
        check_holdings(steps)
    result = steps.result()
    assert result.finished.all()
    segments = result.segments
    assert segments is not None
    held = np.zeros(len(work), np.int64)
    np.add.at(held, segments.job, segments.end_ns - segments.start_ns)
    assert np.array_equal(held, result.held_ns)
    assert np.array_equal(result.end_ns - work.submit_ns - held, result.waited_ns.sum(axis=1))
    span = float(result.end_ns.max() - work.submit_ns.min())
    assert result.gpu_ns.sum() <= steps.cluster.gpus * span * (1 + 1e-12), "no more GPU time than there is"
    if which == "parts" and not breaks:
        progress = (held - result.dead_ns) / SECOND
        assert np.allclose(progress, work.work_s, rtol=0, atol=1e-6), "at speed 1 the time held is the work"


def _most_held(result: FleetResult, whose: Any) -> int:
    segments = result.segments
    assert segments is not None
    mine = whose[segments.job]
    times = np.concatenate([segments.end_ns[mine], segments.start_ns[mine]])
    change = np.concatenate([-segments.gpus[mine], segments.gpus[mine]])
    order = np.argsort(times, kind="stable")  # at one moment those who go first
    return int(np.cumsum(change[order]).max(initial=0))


def _shape(case: Case, gpus: list[int]) -> Shape:
    levels = range(len(case.cluster.levels))
    counts = [np.unique([case.cluster.unit_of(level, gpu) for gpu in gpus], return_counts=True)[1] for level in levels]
    return Shape(
        gpus=len(gpus),
        units=tuple(len(each) for each in counts),
        even=all(len(set(each.tolist())) == 1 for each in counts),
        gpu_type=case.cluster.types[int(case.cluster.gpu_type[gpus[0]])],
    )
