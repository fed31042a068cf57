"""JigSaw: what a schedule must keep, figures that follow by hand, memory, speeds beside each other, and the study."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import foretrace as ft
from foretrace.errors import ForetraceError, NotApplicableError
from foretrace.graph.taskgraph import TaskGraph
from foretrace.simulate.timeline import simulate
from foretrace.techniques.distributed.gradients import find_gradients
from foretrace.techniques.distributed.partial_backprop import backward_costs
from foretrace.training.partial import grouped
from reproductions.jigsaw.schedule import IterationSchedule, Rules, need_bytes, schedule
from reproductions.jigsaw.sharing import four_arms, jigsaw_speeds, pair_speeds
from reproductions.jigsaw.study import (
    DISPATCH,
    equal_jobs,
)
from reproductions.jigsaw.tasks import IterationJob, compute_bound, lower_bound_ns, recorded_job

DATA = Path(__file__).resolve().parents[2] / "tests" / "data"
LONGEST, READY = DISPATCH["longest-first"], DISPATCH["first-ready"]


# --- any jobs under any rules --------------------------------------------------------------------------------


@st.composite
def jobs(draw: st.DrawFn) -> IterationJob:
    workers = draw(st.integers(1, 4))
    ups = st.lists(st.integers(0, 20), min_size=workers, max_size=workers)
    tasks = np.cumsum(draw(ups)) + draw(st.integers(1, 20))
    sizes = np.cumsum(draw(ups))
    return IterationJob(
        name=f"job {draw(st.integers(0, 10**6))}",
        task_ns=tuple(tasks.tolist()),
        communication_ns=draw(st.integers(0, 30)),
        full_ns=int(tasks[-1]),
        full_communication_ns=draw(st.integers(0, 40)),
        iterations=draw(st.integers(1, 6)),
        fixed_bytes=draw(st.integers(0, 10)),
        activation_bytes=tuple(sizes.tolist()),
        full_activation_bytes=int(sizes[-1]),
    )


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[IterationJob], int, Rules]:
    many = draw(st.lists(jobs(), min_size=1, max_size=5))
    activations = draw(st.sampled_from(("kept", "returned")))
    enough = max(need_bytes([each], activations) for each in many)
    rules = Rules(
        order=draw(st.sampled_from(("longest-first", "first-ready"))),
        rotation=draw(st.sampled_from(("same", "opposed", "none"))),
        bound=draw(st.booleans()),
        slots=draw(st.integers(1, 4)),
        switch_ns=draw(st.sampled_from((0, 0, 3))),
        memory_bytes=draw(st.sampled_from((None, enough, enough + 20))),
        activations=activations,
    )
    return many, max(each.workers for each in many) + draw(st.integers(0, 3)), rules


@settings(max_examples=50)
@given(problems())
def test_what_every_schedule_keeps(problem: tuple[list[IterationJob], int, Rules]) -> None:
    many, gpus, rules = problem
    found = schedule(many, gpus, rules)
    every_iteration_is_done_behind_its_barrier(found, rules)
    one_task_at_a_time_and_no_idle_gpu_with_work(found, rules)
    memory_and_slots_are_kept(found, rules)
    assert found.makespan_ns >= lower_bound_ns(many, gpus)
    if rules.bound:
        shared = lower_bound_ns(many, gpus, found.placement, rotates=rules.rotation != "none")
        assert found.makespan_ns >= shared
    again = schedule(many, gpus, rules)
    for each in fields(found):
        one, other = getattr(found, each.name), getattr(again, each.name)
        if isinstance(one, np.ndarray):
            assert np.array_equal(one, other)
        else:
            assert str(one) == str(other)


def every_iteration_is_done_behind_its_barrier(found: IterationSchedule, rules: Rules) -> None:
    for i, job in enumerate(found.jobs):
        mine = found.job == i
        k = job.workers
        assert mine.sum() == k * job.iterations and len(found.barriers_ns[i]) == job.iterations
        before = found.begun_ns[i]
        depths = np.zeros((job.iterations, k), np.int64)
        for turn in range(job.iterations):
            rows = np.flatnonzero(mine & (found.iteration == turn))
            assert sorted(found.worker[rows]) == list(range(k))
            assert sorted(found.depth[rows]) == list(range(1, k + 1))
            assert set(found.gpu[rows]) <= set(found.placement[i])
            took = found.end_ns[rows] - found.start_ns[rows]
            assert took.tolist() == [job.task_ns[depth - 1] for depth in found.depth[rows]]
            assert (found.start_ns[rows] - found.switch_ns[rows]).min() >= before
            before = found.end_ns[rows].max() + job.communication_ns
            assert found.barriers_ns[i][turn] == before
            depths[turn, found.worker[rows]] = found.depth[rows]
            if rules.bound:
                assert [found.placement[i][worker] for worker in found.worker[rows]] == found.gpu[rows].tolist()
        assert found.finished_ns[i] == before
        for start in range(0, job.iterations - k + 1):
            per_worker = {tuple(sorted(depths[start : start + k, worker].tolist())) for worker in range(k)}
            if rules.rotation != "none":
                assert per_worker == {tuple(range(1, k + 1))}
            else:
                assert per_worker == {(worker + 1,) * k for worker in range(k)}


def one_task_at_a_time_and_no_idle_gpu_with_work(found: IterationSchedule, rules: Rules) -> None:
    begin = found.start_ns - found.switch_ns
    for gpu in range(found.gpus):
        rows = np.flatnonzero(found.gpu == gpu)
        rows = rows[np.argsort(begin[rows], kind="stable")]
        assert (begin[rows][1:] >= found.end_ns[rows][:-1]).all()
        changes = np.concatenate([[False], found.job[rows][1:] != found.job[rows][:-1]])[: len(rows)]
        assert (found.switch_ns[rows] == np.where(changes, rules.switch_ns, 0)).all()
    for row in range(len(found.job)):
        i, turn = found.job[row], found.iteration[row]
        ready = found.barriers_ns[i][turn - 1] if turn else found.begun_ns[i]
        for gpu in [found.gpu[row]] if rules.bound else found.placement[i]:
            other = found.gpu == gpu
            inside = np.minimum(found.end_ns, begin[row]) - np.maximum(begin, ready)
            assert np.clip(inside[other], 0, None).sum() == begin[row] - ready


def memory_and_slots_are_kept(found: IterationSchedule, rules: Rules) -> None:
    begin = found.start_ns - found.switch_ns
    for gpu in range(found.gpus):
        resident = [i for i, where in enumerate(found.placement) if gpu in where]
        most = 0
        for row in np.flatnonzero(found.gpu == gpu).tolist():
            now = begin[row]
            there = [i for i in resident if found.begun_ns[i] <= now < found.finished_ns[i] or i == found.job[row]]
            assert len(there) <= rules.slots
            need = sum(found.jobs[i].fixed_bytes for i in there)
            for i in there:
                job = found.jobs[i]
                ran = (found.gpu == gpu) & (found.job == i) & (begin <= now)
                if rules.activations == "returned":
                    ran &= found.end_ns > now
                need += max((job.activations(depth) for depth in found.depth[ran]), default=0)
            most = max(most, need)
        assert most <= found.peak_bytes[gpu]  # between tasks more may be resident than at their starts
        if rules.memory_bytes is not None:
            assert found.peak_bytes[gpu] <= rules.memory_bytes


@settings(max_examples=25)
@given(problems())
def test_gpus_never_do_more_than_they_can(problem: tuple[list[IterationJob], int, Rules]) -> None:
    many, gpus, rules = problem
    arms = four_arms(many, gpus, rules, iterations=20)
    most = max(compute_bound([each]) for each in many)
    assert max(arms.own, arms.packed) < 1.3 and max(arms.partial, arms.jigsaw) < 1.3 * most  # few iterations: coarse
    assert (1 + arms.time_sharing) * (1 + arms.partial_share) == pytest.approx(1 + arms.together)


# --- by hand -------------------------------------------------------------------------------------------------


def test_two_jobs_by_hand() -> None:
    """F = 1, B = 2, K = 2, tasks of 2 and 3, exchanges of 1: longest-first makes the barriers meet, first-ready not."""
    one = IterationJob(name="a", task_ns=(2, 3), communication_ns=1, full_ns=3, full_communication_ns=1, iterations=4)
    many = [one, one]
    together = [range(2), range(2)]
    meeting = schedule(many, 2, LONGEST, placement=together)
    assert [each.tolist() for each in meeting.barriers_ns] == [[6, 12, 18, 24]] * 2  # 5 of work, then all exchange
    apart = schedule(many, 2, READY, placement=together)
    assert [each.tolist() for each in apart.barriers_ns] == [[4, 9, 14, 19], [6, 11, 16, 21]]  # always at work
    assert lower_bound_ns(many, 2, together) == 20


def test_a_switch_costs_where_the_job_changes() -> None:
    job = IterationJob(name="a", task_ns=(5,), communication_ns=0, full_ns=5, full_communication_ns=0, iterations=3)
    alone = schedule([job], 1, Rules(slots=2, switch_ns=2))
    assert alone.makespan_ns == 15 and alone.switches == 0
    both = schedule([job, job], 1, Rules(order="first-ready", switch_ns=2))
    assert both.switches == 5 and both.makespan_ns == 6 * 5 + 5 * 2


@pytest.mark.parametrize("workers", [2, 3, 4, 8])
@pytest.mark.parametrize("exchange", [0.0, 0.1, 0.3])
def test_gains_in_closed_form(workers: int, exchange: float) -> None:
    """Compute is 1, the mean partial task m, exchanges c and c (K + 1) / 2K."""
    left = (workers + 1) / (2 * workers)
    mean, less = (1 + 2 * left) / 3, exchange * left
    many = equal_jobs(2, workers, exchange)
    longest, ready = four_arms(many, workers, LONGEST), four_arms(many, workers, READY)
    assert longest.partial_alone == pytest.approx((1 + exchange) / (1 + less) - 1, abs=1e-3)
    assert longest.time_sharing == pytest.approx(exchange, abs=1e-3)
    assert longest.together == pytest.approx(2 * (1 + exchange) / (2 * mean + less) - 1, abs=6e-3)
    assert ready.together == pytest.approx((1 + exchange) / mean - 1, abs=6e-3)
    assert ready.partial_share == pytest.approx(compute_bound(many) - 1, abs=6e-3)


def test_without_sharers_the_deepest_worker_sets_the_pace() -> None:
    for traffic, gain in ((1.0, 0.0), (None, 1.3 / (1 + 0.3 * 5 / 8) - 1)):
        arms = four_arms(equal_jobs(1, 4, 0.3, traffic=traffic), 4, READY)
        assert arms.together == arms.partial_alone == pytest.approx(gain, abs=1e-9)


# --- memory, placement, refusals -----------------------------------------------------------------------------


def sized(name: str, fixed: int, activations: int, workers: int = 2) -> IterationJob:
    return IterationJob.of(
        name=name,
        workers=workers,
        forward_s=1,
        backward_s=2,
        iterations=4,
        fixed_bytes=fixed,
        activation_bytes=activations,
    )


def test_a_placement_that_does_not_fit_is_refused_with_the_reason() -> None:
    both = [sized("a", 3_000_000_000, 4_000_000_000), sized("b", 2_000_000_000, 4_000_000_000)]
    kept = Rules(memory_bytes=10_000_000_000)
    with pytest.raises(ForetraceError, match=r"'a' and 'b' need 13 GB on a GPU of 10 GB \(GPU 0\); place them apart"):
        schedule(both, 2, kept, placement=[(0, 1), (0, 1)])
    returned = schedule(both, 2, Rules(memory_bytes=10_000_000_000, activations="returned"), placement=[(0, 1), (0, 1)])
    assert returned.peak_bytes.tolist() == [9_000_000_000] * 2
    apart = schedule(both, 2, kept)  # one after the other
    assert apart.begun_ns[1] == apart.finished_ns[0] and "need 13 GB" in apart.waits[1]
    with pytest.raises(ForetraceError, match="it can never begin"):
        schedule(both, 2, Rules(memory_bytes=6_000_000_000))


def test_depths_that_rotate_leave_room_for_nothing_unless_activations_are_given_back() -> None:
    """A deep task always meets a shallow one, and still each job keeps room for its deepest."""
    both = [sized("a", 10, 90, workers=3), sized("b", 20, 60, workers=3)]
    for activations, most in (("kept", 30 + 150), ("returned", 30 + 90)):
        rules = Rules(order="first-ready", rotation="opposed", activations=activations)
        found = schedule(both, 3, rules, placement=[(0, 1, 2), (0, 1, 2)])
        assert found.peak_bytes.tolist() == [most] * 3 == [need_bytes(both, activations)] * 3
    still = schedule(both, 3, Rules(order="first-ready", rotation="none"), placement=[(0, 1, 2), (2, 1, 0)])
    assert still.peak_bytes.tolist() == [30 + 30 + 60, 30 + 60 + 40, 30 + 90 + 20]


def test_a_later_job_passes_one_that_waits() -> None:
    found = schedule([sized("a", 0, 0), sized("b", 0, 0), sized("c", 0, 0, workers=1)], 3, Rules(slots=1))
    assert found.begun_ns.tolist() == [0, 12 * 10**9, 0]
    assert "2 jobs on a GPU of 1 slots" in found.waits[1]


@pytest.mark.parametrize(
    ("placement", "says"),
    [
        ([(0, 1)], "2 jobs and 1 placements"),
        ([(0, 1), (0, 0)], "2 different GPUs of 0 to 1"),
        ([(0, 1), (0, 2)], "is placed on 0, 2"),
        ([(0, 1), ()], "is placed on none"),
    ],
)
def test_placements_that_cannot_be(placement: list[tuple[int, ...]], says: str) -> None:
    with pytest.raises(ForetraceError, match=says) as reason:
        schedule([sized("a", 0, 0), sized("b", 0, 0)], 2, placement=placement)
    assert str(reason.value).endswith(".")


def test_nonsense_is_refused_in_a_sentence() -> None:
    def refuse(says: str, **changes: object) -> None:
        with pytest.raises(ForetraceError, match=says) as reason:
            IterationJob.of(**({"name": "a", "workers": 2, "forward_s": 1.0, "backward_s": 2.0} | changes))  # type: ignore[arg-type]
        assert str(reason.value).endswith(".")

    refuse("has 0 workers", workers=0)
    refuse("0 iterations", iterations=0)
    refuse("negative communication", communication_s=-1.0)
    refuse("without a duration", forward_s=0.0, backward_s=0.0)
    refuse("negative amount of memory", fixed_bytes=-1)
    with pytest.raises(ForetraceError, match="order=fifo does not exist"):
        Rules(order="fifo")
    with pytest.raises(ForetraceError, match="4 workers and the cluster 3 GPUs"):
        schedule([sized("a", 0, 0, workers=4)], 3)
    with pytest.raises(ForetraceError, match="never ends"):
        schedule(equal_jobs(1, 2, 0.0), 2)
    with pytest.raises(ForetraceError, match="no job"):
        schedule([], 2)


# --- speeds for a cluster simulator --------------------------------------------------------------------------


def test_speeds_of_jobs_that_share() -> None:
    two = equal_jobs(2, 2, 0.0)
    assert jigsaw_speeds(two, partial=False).relative == pytest.approx([0.5, 0.5], rel=1e-3)
    assert jigsaw_speeds(two, partial=False).gain == pytest.approx(0, abs=2e-3)
    assert jigsaw_speeds(two).gain == pytest.approx(0.2, abs=3e-3)
    alone = jigsaw_speeds(equal_jobs(1, 2, 1.0))
    assert alone.relative[0] == pytest.approx(6 / 5.25, rel=1e-6) and alone.gain == pytest.approx(alone.relative[0] - 1)


def test_longest_first_starves_short_tasks_and_first_ready_does_not() -> None:
    long, short = (
        IterationJob.of(name=name, workers=1, forward_s=f, backward_s=2 * f)
        for name, f in (("long", 2.0), ("short", 1.0))
    )
    starved = jigsaw_speeds([long, short], Rules(order="longest-first")).relative
    assert starved[0] == pytest.approx(1) and starved[1] < 0.02
    assert jigsaw_speeds([long, short]).relative == pytest.approx([2 / 3, 1 / 3], rel=0.02)


def test_pairs_are_a_table_and_those_without_memory_are_named() -> None:
    kinds = [sized("a", 1, 1), sized("b", 1, 3), sized("big", 5, 5, workers=4)]
    table = pair_speeds(kinds, Rules(order="first-ready", memory_bytes=11), iterations=8)
    assert set(table.refused) == {("a", "big"), ("b", "big"), ("big", "big")}
    assert "need 12 GB" not in table.refused["a", "big"] and "'a' and 'big' need" in table.refused["a", "big"]
    assert np.isnan(table.relative[2]).all() and np.isnan(table.relative[:, 2]).all()
    assert (table.relative[:2, :2] > 0.55).all() and (table.relative[:2, :2] <= 1).all()
    assert table.alone == pytest.approx([1, 1, 1])
    with pytest.raises(ForetraceError, match="they cannot share it"):
        jigsaw_speeds(kinds[1:], Rules(memory_bytes=11))


def test_a_wide_job_beside_a_narrow_one() -> None:
    wide, narrow = equal_jobs(1, 4, 0.0)[0], equal_jobs(1, 1, 0.0)[0]
    found = jigsaw_speeds([wide, narrow])
    assert 0.5 < found.relative[0] < 0.65 and 0.4 < found.relative[1] < 0.6


# --- a recorded job ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def graph() -> TaskGraph:
    return ft.read(DATA / "cnn.json.gz").graph().graph


def test_a_recorded_step_as_tasks_by_depth(graph: TaskGraph) -> None:
    job = recorded_job(graph, workers=4, network="10gbit/20us", name="cnn")
    assert job.full_ns == job.task_ns[-1] == round(1e9 * simulate(graph).step_time_s)
    assert list(job.task_ns) == sorted(set(job.task_ns)) and job.task_ns[0] < 0.85 * job.full_ns
    cost = backward_costs(graph, find_gradients(graph))
    group = grouped(cost, 4)
    for depth in (1, 2, 3):  # on a processor's one thread a step is shorter by what is left out
        left_out = cost[group >= depth].sum()
        assert job.full_ns - job.task_ns[depth - 1] == pytest.approx(left_out, rel=0.15)
    assert list(job.activation_bytes) == sorted(set(job.activation_bytes)) and job.activation_bytes[0] > 0
    assert job.fixed_bytes == 2 * sum(each.nbytes for each in find_gradients(graph))  # SGD without momentum
    assert 0 < job.communication_ns < job.full_communication_ns
    found = jigsaw_speeds([job, job], READY)
    assert found.gain > 0 and (found.relative > 0.5).all()


def test_a_recording_without_gradients_is_refused(graph: TaskGraph) -> None:
    facts = {key: value for key, value in graph.info.recording.items() if key not in ("gradient_order", "parameters")}
    bare = replace(graph, info=replace(graph.info, recording=facts), name=np.zeros_like(graph.name))
    with pytest.raises(NotApplicableError, match="gradients"):
        recorded_job(bare, workers=2, network="10gbit", name="bare")


# --- the study -----------------------------------------------------------------------------------------------
