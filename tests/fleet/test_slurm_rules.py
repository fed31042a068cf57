"""Slurm's rules for arrays, nodes that are drained or reserved, preemption, QOS and fair share, worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.errors import ForetraceError
from foretrace.fleet.cluster import ClusterTree, parse_cluster
from foretrace.fleet.policies import parse
from foretrace.fleet.policies.slurm import REQUEUE_S
from foretrace.fleet.policies.slurm_options import NodeWindow, fair_tree, tasks_of, windows
from foretrace.fleet.result import FleetResult
from foretrace.fleet.simulate import simulate
from foretrace.fleet.workload import SECOND, Workload

TINY = ClusterTree.of((2, 2, 4), levels=("rack", "node"))
AT_ONCE = "bf_interval=10,bf_resolution=1,batch_sched_delay=0,sched_interval=60"


def play(policy: str, *jobs: tuple[float, int, float, float], **columns: Any) -> FleetResult:
    """Jobs as (submission, GPUs, run time, limit); columns as sbatch has them, or of the workload."""
    submit, gpus, work, limit = zip(*jobs, strict=True)
    given = [name for name in ("array", "qos", "dependency") if name in columns]
    details: dict[str, Any] = {name: np.array(columns.pop(name), object) for name in given}
    workload = Workload.of(submit_s=submit, gpus=gpus, work_s=work, estimate_s=limit, details=details, **columns)
    return simulate(workload, TINY, parse(policy), record="devices")


def starts(made: FleetResult) -> list[float]:
    return [round(each / SECOND, 1) for each in made.start_ns.tolist()]


def nodes(made: FleetResult, job: int) -> list[int]:
    assert made.segments is not None
    (at,) = np.flatnonzero(made.segments.job == job)[-1:]
    return sorted(set((made.segments.devices_of(int(at)) // 4).tolist()))


def test_an_array_runs_as_many_tasks_as_it_may() -> None:
    made = play(f"fifo slurm={AT_ONCE}", (0.0, 4, 20, 60), (0.5, 4, 20, 60), array=["0-4%2", ""])
    assert made.workload.job.tolist() == ["0_0", "0_1", "0_2", "0_3", "0_4", "1"]
    when = starts(made)
    assert when[:2] == [1.0, 1.0] and when[5] == 1.0, "the job behind it passes the tasks that must wait, also in fifo"
    assert when[2] == when[3] == pytest.approx(22, abs=1.1) and when[4] == pytest.approx(43, abs=2.1)
    free = play(f"fifo slurm={AT_ONCE}", (0.0, 4, 20, 60), (0.5, 4, 20, 60), array=["0-4", ""])
    assert starts(free)[:4] == [1.0] * 4 and starts(free)[5] > 20, "without a limit it holds all nodes"


def test_a_job_that_may_lie_on_two_kinds_of_gpus_is_refused() -> None:
    work = Workload.of(submit_s=[0, 0], gpus=[4, 8], work_s=[10, 10], gpu_type=["", ""], job=["one", "two"])
    mixed = parse_cluster("1x2x4@a+1x2x4@b")
    with pytest.raises(ForetraceError, match=r"job 'two' may get a and b at once .* name one of them as its gpu_type"):
        simulate(work, mixed, parse("fifo slurm=yes"))
    named = simulate(replace(work, gpu_type=np.array(["", "b"], object)), mixed, parse("fifo slurm=yes"))
    assert named.finished.all()


def test_the_rest_of_an_array_moves_to_the_end_of_the_list_without_backfill() -> None:
    jobs = ((0.0, 12, 200, 240), (0.5, 4, 20, 60), (2.0, 4, 20, 60))  # one node is left: three tasks, and a job
    plain = starts(play(f"fifo slurm={AT_ONCE}", *jobs, array=["", "0-2", ""]))
    assert plain[4] < plain[3], "the second task started after the job came"
    assert plain[2] < plain[4]
    by_priority = starts(play(f"priority slurm={AT_ONCE}", *jobs, array=["", "0-2", ""]))
    assert by_priority[3] < by_priority[4]


def test_a_dependency_on_an_array_waits_for_all_its_tasks() -> None:
    jobs = ((0.0, 4, 20, 60), (0.0, 4, 5, 60), (0.0, 4, 5, 60))
    made = play(f"fifo slurm={AT_ONCE}", *jobs, array=["1-3:2%1", "", ""], dependency=["", "afterok:0", "afterok:0_1"])
    assert made.workload.job.tolist() == ["0_1", "0_3", "1", "2"]
    assert starts(made)[3] == pytest.approx(22, abs=1.1) and starts(made)[2] == pytest.approx(43, abs=2.1)


def test_nodes_are_reserved_for_twenty_tasks_of_an_array_at_most() -> None:
    # all nodes are busy until 120 s by their limit; 16 tasks fill them for 60 s from then on, 4 more follow, no 21st.
    # The last job would fit beside the first for 110 s, were it not for the tasks that the scheduler looks at before
    jobs = ((0.0, 12, 100, 120), (1.0, 16, 10, 60), (2.0, 4, 5, 60))
    few = play(f"backfill slurm={AT_ONCE}", *jobs, array=["", "0-2", ""])
    assert starts(few)[4] == 10.0, "its limit ends before the first task may start"
    longer = play(f"backfill slurm={AT_ONCE}", *jobs[:2], (2.0, 4, 5, 180), array=["", "0-2", ""])
    assert starts(longer)[4] > 100


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=12, unique=True), st.integers(1, 5))
def test_tasks_are_those_that_are_listed(tasks: list[int], most: int) -> None:
    text = ",".join(map(str, tasks)) + f"%{most}"
    work = Workload.of(submit_s=[0], gpus=[1], work_s=[1], details={"array": np.array([text], object)})
    made = tasks_of(work)
    assert made.job.tolist() == [f"0_{each}" for each in sorted(tasks)] and tasks_of(made) is made


def test_a_drained_node_takes_no_new_jobs() -> None:
    jobs = ((0.0, 4, 60, 120), (3.0, 4, 5, 60), (3.0, 16, 5, 60))
    made = play(f"fifo slurm={AT_ONCE} drain=0-1@2-30", *jobs)
    assert nodes(made, 0) == [0] and made.jct_s[0] == pytest.approx(61, abs=1.1), "who runs there runs on"
    assert nodes(made, 1) == [2] and starts(made)[2] > 60
    back = play(f"fifo slurm={AT_ONCE} drain=0-3@2-30", (0.0, 4, 10, 60), (3.0, 4, 5, 60))
    assert starts(back)[1] == pytest.approx(30.5, abs=0.7), "the resume asks for a pass"


def test_who_needs_more_nodes_than_are_up_holds_up_the_queue() -> None:
    jobs = ((3.0, 8, 5, 60), (4.0, 4, 5, 60))
    made = starts(play(f"fifo slurm={AT_ONCE} drain=0-2@2-30", *jobs))
    assert made == [pytest.approx(30.5, abs=0.7)] * 2, "a node is free, but two are not up"


def test_maintenance_is_kept_free_by_limits() -> None:
    # nodes 0, 1 are reserved from 100 s: a limit of a minute ends before that, one of two minutes does not
    made = play(
        f"backfill slurm={AT_ONCE} reservation=0-1@100-200", (0.0, 4, 5, 60), (0.0, 4, 5, 120), (0.0, 8, 5, 120)
    )
    assert nodes(made, 0) == [0] and nodes(made, 1) == [2] and starts(made)[2] == pytest.approx(5.5, abs=1)
    assert nodes(made, 2) == [2, 3]
    # three nodes with a limit of two minutes: too few are outside of it until it ends; others go on meanwhile
    wide = play(f"fifo slurm={AT_ONCE} reservation=0-1@100-200", (0.0, 12, 5, 120), (0.0, 4, 5, 120))
    assert starts(wide)[1] == 1.0 and starts(wide)[0] >= 200
    over = play(
        f"backfill slurm={AT_ONCE} reservation=0-3@100-200", (0.0, 4, 5, 60), (0.0, 4, 5, 180), (50.0, 4, 5, 60)
    )
    assert starts(over)[0] <= 1.0 and starts(over)[1] >= 200 and starts(over)[2] >= 200


TIERS = f"priority slurm={AT_ONCE} priority-tier=high=10,low=1"
LOW_HIGH = ((0.0, 8, 100, 120), (0.0, 4, 100, 120), (0.0, 4, 100, 120), (5.0, 8, 10, 60))
LINES = ["low", "low", "low", "high"]


def test_a_higher_partition_takes_from_the_smallest_of_lower_ones() -> None:
    made = play(f"{TIERS} preempt-mode=requeue", *LOW_HIGH, tenant=LINES)
    # the two small ones are taken first, then whoever holds most of the nodes that were found: the same two nodes
    assert starts(made)[3] == pytest.approx(7, abs=1.1) and nodes(made, 3) == [2, 3]
    assert made.starts.tolist() == [1, 2, 2, 1]
    assert made.segments is not None
    again = made.segments.start_ns[made.segments.job == 1][-1] / SECOND
    assert 5 + REQUEUE_S <= again <= 8 + REQUEUE_S, "a job that was sent back is held"
    assert made.jct_s[1] == pytest.approx(again + 100, abs=0.1), "and begins anew"


def test_suspended_jobs_keep_their_gpus() -> None:
    waits = [starts(play(f"{TIERS}{mode}", *LOW_HIGH, tenant=LINES))[3] for mode in ("", " preempt-mode=suspend")]
    assert waits[0] == waits[1] >= 100, "suspension frees no GPU, so nobody is suspended for one"


def test_a_higher_partition_is_served_first() -> None:
    jobs = ((0.0, 16, 20, 60), (1.0, 16, 10, 60), (2.0, 16, 10, 60))
    made = starts(play(TIERS, *jobs, tenant=["low", "low", "high"]))
    assert made[2] < made[1]


def test_a_qos_weighs() -> None:
    jobs = ((0.0, 16, 20, 60), (1.0, 16, 10, 60), (2.0, 16, 10, 60))
    made = play(f"priority slurm={AT_ONCE} qos=high=10,low=1 weights=qos=1000", *jobs, qos=["low", "low", "high"])
    assert starts(made)[2] < starts(made)[1]


def test_who_used_least_goes_first() -> None:
    work = Workload.of(submit_s=[0] * 4, gpus=[1] * 4, work_s=[1] * 4, user=["a", "b", "c", "d"])
    assert fair_tree(work, {"a": 5.0, "b": 0.0, "c": 9.0, "d": 5.0}).tolist() == [0.75, 1.0, 0.25, 0.75]
    jobs = ((0.0, 16, 80, 120), (1.0, 16, 10, 60), (2.0, 16, 10, 60))
    made = starts(play(f"priority slurm={AT_ONCE} weights=fairshare=1000", *jobs, user=["a", "a", "b"]))
    assert made[2] < made[1]


@pytest.mark.parametrize(("text", "said"), [
    ("backfill slurm=yes reservation=4@3-2", "the end later"),
    ("backfill slurm=yes reservation=0-9@0-100", "`reservation` must name nodes from 0 to 3, got 9"),
    ("fifo slurm=yes drain=x", "NODES@SECONDS-SECONDS"),
    ("fifo drain=0@3", "add slurm=yes"),
    ("priority slurm=yes preempt-mode=kill priority-tier=high=2", "one of off, requeue, suspend, got 'kill'"),
    ("priority slurm=yes preempt-mode=requeue", "who comes before whom"),
    ("priority slurm=yes priority-tier=high", "such as high=10,low=1, got 'high'"),
    ("priority slurm=yes qos=high=1,high=2", "`qos` must be NAME=NUMBER, such as high=10,low=1, got 'high=2'"),
    ("priority slurm=yes weights=fairness=3", "has no parameter fairness; did you mean fairshare="),
])  # fmt: skip
def test_what_is_wrong_is_said(text: str, said: str) -> None:
    with pytest.raises(ForetraceError, match=said):
        play(text, (0.0, 1, 1, 60))


@pytest.mark.parametrize("text", ["x", "3-1", "1%0", "0-99999999", "1,1", "0-2000", "1-", "%2"])
def test_an_array_that_is_none(text: str) -> None:
    with pytest.raises(ForetraceError, match=r"job '0': `array` must be such as 0-9%2"):
        play(f"fifo slurm={AT_ONCE}", (0.0, 1, 1, 60), array=[text])


def test_a_qos_that_nobody_named() -> None:
    with pytest.raises(ForetraceError, match="`qos` 'other' is not among high"):
        play(f"priority slurm={AT_ONCE} qos=high=1", (0.0, 1, 1, 60), qos=["other"])


def test_windows_are_read() -> None:
    assert windows("fail", "0-3@60-120,7@30.5") == (NodeWindow(0, 3, 60.0, 120.0), NodeWindow(7, 7, 30.5))
    assert windows("fail", "") == ()


JOB = st.tuples(st.integers(0, 60), st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 40), st.integers(1, 150))
POLICIES = (
    f"{TIERS} preempt-mode=requeue", f"{TIERS} preempt-mode=suspend reservation=0-1@30-90",
    f"backfill slurm={AT_ONCE} reservation=0-3@40-60 drain=2@5-20",
)  # fmt: skip


@settings(max_examples=8, deadline=None)
@given(st.lists(JOB, min_size=1, max_size=12), st.sampled_from(POLICIES), st.integers(0, 2**12 - 1))
def test_every_job_ends(jobs: list[tuple[int, int, int, int]], policy: str, high: int) -> None:
    tenants = ["high" if high >> at & 1 else "low" for at in range(len(jobs))]
    made, again = (play(policy, *jobs, tenant=tenants) for _ in range(2))
    assert made.finished.all() and (made.start_ns >= made.workload.submit_ns).all()
    assert (again.end_ns == made.end_ns).all(), "the same input, the same result"
