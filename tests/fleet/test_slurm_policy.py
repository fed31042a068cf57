"""Slurm's rules worked out by hand, without Slurm: when its schedulers look, what they reserve, where jobs go."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.errors import ForetraceError
from foretrace.fleet.cluster import ClusterTree
from foretrace.fleet.policies import parse
from foretrace.fleet.policies.slurm import REQUEUE_S, SlurmPolicy
from foretrace.fleet.policies.slurm_options import SchedulerParameters, limits_min, switch_request
from foretrace.fleet.result import FleetResult
from foretrace.fleet.setup import Costs
from foretrace.fleet.simulate import simulate
from foretrace.fleet.speeds.closed_form import ClosedFormSpeeds, Profile
from foretrace.fleet.workload import SECOND, Workload

TINY = ClusterTree.of((2, 2, 4), levels=("rack", "node"))  # nodes 0, 1 below one switch, 2, 3 below the other
AT_ONCE = "bf_interval=10,bf_resolution=1,batch_sched_delay=0,sched_interval=60"


def play(policy: str, *jobs: tuple[float, int, float, float], cluster: ClusterTree = TINY, **known: Any) -> FleetResult:
    """Jobs as (submission, GPUs, run time, limit)."""
    submit, gpus, work, limit = zip(*jobs, strict=True)
    workload = Workload.of(submit_s=submit, gpus=gpus, work_s=work, estimate_s=limit)
    return simulate(workload, cluster, parse(policy), record="devices", **known)


def starts(made: FleetResult) -> list[float]:
    return [round(each / SECOND, 1) for each in made.start_ns.tolist()]


def nodes(made: FleetResult, job: int, per_node: int = 4) -> list[int]:
    assert made.segments is not None
    (at,) = np.flatnonzero(made.segments.job == job)[-1:]
    return sorted(set((made.segments.devices_of(int(at)) // per_node).tolist()))


def test_nothing_starts_before_the_background_thread_wakes() -> None:
    # it wakes every 1.005 s from 0 on; the pass that a submission asks for comes batch_sched_delay after the last
    made = play(f"fifo slurm={AT_ONCE}", (0.0, 4, 10, 60), (0.2, 4, 10, 60), (1.1, 4, 10, 60))
    assert starts(made) == [1.0, 1.0, 2.0]
    made = play("fifo slurm=batch_sched_delay=5", (0.0, 4, 10, 60), (1.2, 4, 10, 60), (7.0, 4, 10, 60))
    assert starts(made) == [1.0, 6.0, 11.1], "1.005, then at the first waking at least five whole seconds later"


def test_the_main_scheduler_stops_at_the_first_that_does_not_fit() -> None:
    jobs = ((0.0, 12, 100, 120), (1.0, 8, 10, 60), (2.0, 4, 10, 60))
    assert starts(play(f"fifo slurm={AT_ONCE}", *jobs))[2] > 100, "one node is free, and the head is in front"
    assert starts(play(f"backfill slurm={AT_ONCE}", *jobs))[2] == 10.0, "the backfill scheduler looks every 10 s"


def test_the_backfill_scheduler_waits_for_something_to_change() -> None:
    # it looks at 0 and 10 s; from 20 s on nothing has changed, so that it looks every second until something does
    jobs = ((0.0, 12, 100, 120), (33.2, 8, 10, 60), (33.3, 4, 10, 60))
    assert starts(play(f"backfill slurm={AT_ONCE}", *jobs))[2] == 34.0, "and not at 40 s"


def test_limits_decide_who_may_pass_not_run_times() -> None:
    # the head needs both free nodes and the two that are held until their limit, 120 s
    before = ((0.0, 8, 100, 120), (1.0, 16, 10, 60))
    made = play(f"backfill slurm={AT_ONCE}", *before, (2.0, 4, 30, 60), (3.0, 4, 30, 180))
    assert starts(made)[2] == 10.0 and starts(made)[3] > 100, "60 s of limit end before the reservation, 180 s do not"
    assert limits_min(made.workload).tolist() == [2, 1, 1, 3]
    assert limits_min(Workload.of(submit_s=[0, 0], gpus=[1, 1], work_s=[10, 56])).tolist() == [1, 2], "none stated"


def test_whole_nodes_are_reserved() -> None:
    # the head waits for two GPUs on the only node with three in use; one GPU of it stays free and is reserved, too
    one = ClusterTree.of((1, 1, 4), levels=("rack", "node"))
    jobs = ((0.0, 3, 100, 120), (1.0, 2, 10, 60), (2.0, 1, 30, 180))
    assert starts(play(f"backfill slurm={AT_ONCE}", *jobs, cluster=one))[2] == 100.0
    assert starts(play("backfill", *jobs, cluster=one))[2] == 2.0, "EASY counts GPUs: there are two more then"


def test_depth_and_window_bound_what_is_planned() -> None:
    jobs = ((0.0, 12, 1000, 1200), (1.0, 8, 10, 60), (2.0, 8, 10, 60), (3.0, 4, 10, 60))
    assert starts(play(f"backfill slurm={AT_ONCE}", *jobs))[3] == 10.0
    shallow = play(f"backfill slurm={AT_ONCE},bf_max_job_test=2", *jobs)
    assert starts(shallow)[3] > 1000, "only two jobs are tested"
    # without a reservation beyond the window the last job, which needs an hour, starts before the head
    late = ((0.0, 12, 1000, 1200), (1.0, 16, 10, 60), (2.0, 4, 3000, 3600))
    assert starts(play(f"backfill slurm={AT_ONCE}", *late))[2] > 1000
    assert starts(play(f"backfill slurm={AT_ONCE},bf_window=10", *late))[2] == 10.0


def test_nodes_come_from_the_leaf_switch_that_fits_best() -> None:
    made = play(f"fifo slurm={AT_ONCE}", (0.0, 4, 100, 120), (2.0, 4, 100, 120), (4.0, 8, 100, 120), (6.0, 2, 9, 60))
    assert [nodes(made, job) for job in range(3)] == [[0], [1], [2, 3]], "the fuller leaf first"
    # racks of four: three nodes fit on the first switch, two on the second; a job of two takes the second
    wide = ClusterTree.of((2, 4, 4), levels=("rack", "node"))
    made = play(
        f"fifo slurm={AT_ONCE}", (0.0, 4, 100, 120), (2.0, 16, 100, 120), (4.0, 8, 100, 120), (6.0, 4, 9, 60),
        cluster=wide,
    )  # fmt: skip
    assert nodes(made, 0) == [0] and nodes(made, 1) == [4, 5, 6, 7] and nodes(made, 2) == [1, 2]
    assert nodes(made, 3) == [3]


def test_within_a_leaf_the_first_node_is_taken_not_the_fullest() -> None:
    # node 1 has two GPUs free and node 0 three: best fit would take node 1
    made = play(f"fifo slurm={AT_ONCE}", (0.0, 3, 5, 60), (1.5, 2, 100, 120), (3.0, 1, 100, 120), (8.0, 2, 100, 120))
    assert [nodes(made, job) for job in range(4)] == [[0], [1], [0], [0]]


def test_a_timer_for_switches_runs_out() -> None:
    # a node is free below either switch when the last job comes, which insists on one switch for a minute
    jobs = ((0.0, 4, 500, 600), (1.5, 4, 3, 60), (2.5, 4, 500, 600), (10.0, 8, 30, 60))
    often = AT_ONCE.replace("sched_interval=60", "sched_interval=10")
    assert starts(play(f"fifo slurm={often}", *jobs))[3] == pytest.approx(10, abs=1.1)
    assert starts(play(f"fifo slurm={often} switches=1@1:00", *jobs))[3] == pytest.approx(75, abs=6)
    # nothing happens when a timer runs out: the next pass in any case notices it, and the longest wait is capped
    assert starts(play(f"fifo slurm={AT_ONCE} switches=1@1:00", *jobs))[3] == pytest.approx(121, abs=1.1)
    capped = starts(play(f"fifo slurm={often},max_switch_wait=20 switches=1@1:00", *jobs))[3]
    assert capped == pytest.approx(35, abs=6)


def test_exclusive_jobs_share_no_node() -> None:
    jobs = ((0.0, 1, 50, 60), (0.1, 1, 50, 60), (0.2, 1, 50, 60), (0.3, 1, 50, 60), (0.4, 1, 50, 60))
    made = play(f"fifo slurm={AT_ONCE} exclusive=yes", *jobs)
    assert [nodes(made, job)[0] for job in range(4)] == [0, 1, 2, 3] and starts(made)[4] > 50
    assert starts(play(f"fifo slurm={AT_ONCE}", *jobs))[4] == 1.0


def test_the_larger_priority_goes_first() -> None:
    workload = Workload.of(submit_s=[0, 1.1, 1.2], gpus=[16, 16, 16], work_s=[10, 10, 10], priority=[0, 1, 2])
    made = simulate(workload, TINY, parse(f"priority slurm={AT_ONCE}"))
    assert made.start_ns[2] < made.start_ns[1]


def test_a_job_that_a_failure_sent_back_is_held() -> None:
    costs = Costs(failures=((20.0, 0, 30.0),))
    made = play(f"fifo slurm={AT_ONCE}", (0.0, 16, 50, 60), (5.0, 4, 10, 60), costs=costs)
    assert made.failed[0] == 1 and made.starts[0] == 2
    assert made.segments is not None
    again = made.segments.start_ns[made.segments.job == 0][-1] / SECOND
    assert 20 + REQUEUE_S <= again <= 20 + REQUEUE_S + 1.1 + 60, "and others start meanwhile"
    assert 20 < made.start_ns[1] / SECOND < 40


def test_a_job_above_its_limit_is_ended() -> None:
    made = play(f"fifo slurm={AT_ONCE}", (0.0, 1, 500, 60))
    assert made.jct_s[0] == pytest.approx(90), "limits are checked every 30 s; the third check is the first above"
    early = parse(f"fifo slurm={AT_ONCE}")
    assert isinstance(early, SlurmPolicy)
    assert simulate(made.workload, TINY, replace(early, checks_s=3.0)).jct_s[0] == pytest.approx(63)


def test_a_job_that_its_nodes_slow_is_ended_too() -> None:
    workload = Workload.of(submit_s=[0], gpus=[8], work_s=[50], estimate_s=[60], model=["m"])
    slow = ClosedFormSpeeds(
        bandwidth_gb_s=(1.0, 1.0, 1.0), levels=TINY.levels,
        profiles=(Profile(name="m", compute_ms=1000.0, gradient_mb=1000.0, batch=1),),
    )  # fmt: skip
    made = simulate(workload, TINY, parse(f"fifo slurm={AT_ONCE}"), speeds=slow)
    assert made.jct_s[0] == pytest.approx(90), "it would take far more than its limit of a minute"


def depends(*texts: str, **columns: Any) -> list[float]:
    """Starts of jobs of 40 s each, a node each, that depend on each other as said."""
    count = len(texts)
    workload = Workload.of(
        submit_s=[0.0] * count, gpus=[4] * count, work_s=[40.0] * count, estimate_s=[60.0] * count,
        details={"dependency": np.array(texts, object)}, **columns,
    )  # fmt: skip
    return starts(simulate(workload, TINY, parse(f"fifo slurm={AT_ONCE}")))


def test_dependencies_are_waited_for() -> None:
    assert depends("", "", "")[2] == 1.0, "nodes are free"
    assert depends("", "afterok:0", "afterany:0:1") == [1.0, pytest.approx(41.2, abs=1.1), pytest.approx(82, abs=2.1)]
    apart = depends("", "singleton", "singleton", model=["a", "a", "b"])
    assert apart[2] == 1.0 and apart[1] > 40, "only jobs of its name and user matter"
    late = Workload.of(
        submit_s=[0.0] * 3, gpus=[4] * 3, work_s=[500.0, 10.0, 10.0], estimate_s=[60.0] * 3,
        details={"dependency": np.array(["", "afterok:0", "afterany:0"], object)},
    )  # fmt: skip
    made = simulate(late, TINY, parse(f"backfill slurm={AT_ONCE}"), until_s=1000)
    assert made.finished.tolist() == [True, False, True], "a job that its limit ended is not ok"
    for wrong in ("afterok", "afterok:1", "singleton:0", "after:0"):
        with pytest.raises(ForetraceError, match="with earlier jobs, or singleton"):
            depends("", wrong)


def test_priorities_are_weighted_once_a_minute() -> None:
    # all wait for the first, which holds everything; the large one goes first by size, the early one by age
    jobs = ((0.0, 16, 130, 180), (2.0, 4, 10, 60), (70.0, 16, 10, 60))
    by_size = starts(play(f"priority slurm={AT_ONCE} weights=size=1000", *jobs))
    assert by_size[2] < by_size[1]
    by_age = starts(play(f"priority slurm={AT_ONCE} weights=age=10000,size=1,max-age=10", *jobs))
    assert by_age[1] < by_age[2]
    # 58 s after the last weighing a job has as much age as one that just came: the larger one goes first
    late = ((62.0, 16, 30, 60), (63.0, 4, 10, 60), (81.0, 16, 10, 60))
    stale = starts(play(f"priority slurm={AT_ONCE} weights=age=10000,size=1", *late))
    assert stale[2] < stale[1]


@pytest.mark.parametrize(("text", "said"), [
    ("fifo slurm=bf_intervall=3", "did you mean bf_interval"),
    ("backfill slurm=bf_interval=0", "from 1 up, got '0'"),
    ("backfill slurm=bf_interval=x", "from 1 up, got 'x'"),
    ("backfill slurm=bf_interval", "is no key=value; it takes sched_interval="),
    ("fifo slurm=yes switches=x", "N@minutes:seconds"),
    ("priority slurm=yes weights=age", "'age' is no key=value; it takes age=, size=, qos=, fairshare=, max-age="),
    ("priority weights=age=1", "add slurm=yes"),
    ("fifo slurm=yes switches=1@1:2:3:4", "N@minutes:seconds"),
    ("priority slurm=yes preempt=yes", "write preempt-mode=requeue"),
])  # fmt: skip
def test_what_is_wrong_is_said(text: str, said: str) -> None:
    with pytest.raises(ForetraceError, match=said):
        parse(text)


def test_requests_are_read_as_sbatch_does() -> None:
    assert switch_request("2@1:30", 300) == (2, 90.0) and switch_request("", 300) == (0, 300.0)
    assert switch_request("1@10", 300) == (1, 300.0), "minutes, capped"
    assert SchedulerParameters.parse("yes") == SchedulerParameters() == SchedulerParameters.parse("defaults")


JOB = st.tuples(st.integers(0, 60), st.sampled_from([1, 2, 3, 4, 8, 16]), st.integers(1, 50), st.integers(1, 200))
POLICIES = ("fifo slurm=yes", f"backfill slurm={AT_ONCE}", f"backfill slurm={AT_ONCE} switches=1@1:00")


@settings(max_examples=10, deadline=None)
@given(st.lists(JOB, min_size=1, max_size=15), st.sampled_from(POLICIES))
def test_every_job_ends_and_no_start_is_before_a_pass(jobs: list[tuple[int, int, int, int]], policy: str) -> None:
    made = play(policy, *jobs)
    assert made.finished.all() and (made.start_ns >= made.workload.submit_ns).all()
    again = play(policy, *jobs)
    assert (again.start_ns == made.start_ns).all(), "the same input, the same result"
    decides = parse(policy)
    assert isinstance(decides, SlurmPolicy)
    moved = simulate(made.workload, TINY, replace(decides, background_s=0.4))
    assert moved.finished.all()
