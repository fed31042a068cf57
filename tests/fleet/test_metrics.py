"""Figures of a simulated fleet against the same figures counted the slow way."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from foretrace.errors import ForetraceError
from foretrace.fleet import metrics, overtime, rates
from foretrace.fleet.ask import why
from foretrace.fleet.cluster import ClusterTree, parse_cluster
from foretrace.fleet.policies import parse
from foretrace.fleet.policy import Policy
from foretrace.fleet.result import Cause, FleetResult
from foretrace.fleet.scene import Scene
from foretrace.fleet.setup import Costs
from foretrace.fleet.simulate import simulate
from foretrace.fleet.speeds import PairSpeeds
from foretrace.fleet.speeds.closed_form import ConstantSpeeds
from foretrace.fleet.workload import SECOND, Workload
from reproductions.results import simple
from tests.fleet.fleet_demo import packed, segments
from tests.fleet.stepping_policies import Packs

S = SECOND


@pytest.fixture(scope="module")
def cluster() -> ClusterTree:
    return parse_cluster("2x2x8@v100")


@pytest.fixture(scope="module")
def run(cluster: ClusterTree) -> FleetResult:
    return packed(3, 120, cluster)


def at_seconds(result: FleetResult, cluster: ClusterTree) -> npt.NDArray[np.bool_]:
    """(seconds, GPUs) True where a GPU is held during that second."""
    assert result.segments is not None
    last = int(result.segments.end_ns.max() // S)
    held = np.zeros((last, cluster.gpus), bool)
    for k in range(len(result.segments)):
        a, b = result.segments.start_ns[k] // S, result.segments.end_ns[k] // S
        devices = result.segments.devices_of(k)
        assert not held[a:b, devices].any()
        held[a:b, devices] = True
    return held


def test_utilisation_and_queue_over_time_are_exact_means(run: FleetResult, cluster: ClusterTree) -> None:
    held = at_seconds(run, cluster)
    first = int(run.workload.submit_ns[0] // S)
    edges = np.array([first, first + 7, first + 8, first + 60, len(held)], np.float64) * S
    cut = [slice(int(a), int(b)) for a, b in zip(edges[:-1] // S, edges[1:] // S, strict=True)]
    series = overtime.utilisation_over_time(run, edges)
    assert series.exact and series.values == pytest.approx([held[c].mean() for c in cut])
    assert series.mean == pytest.approx(run.utilisation) == metrics.utilisation(run)
    seconds = np.arange(len(held))[:, None] * S
    waits = (run.workload.submit_ns <= seconds) & (run.start_ns > seconds)
    assert overtime.waiting_over_time(run, edges).values == pytest.approx([waits[c].sum(1).mean() for c in cut])
    asked = (waits * run.workload.gpus).sum(1)
    got = overtime.waiting_over_time(run, edges, gpus=True).values
    assert got == pytest.approx([asked[c].mean() for c in cut])
    counts = replace(run, segments=None)
    assert overtime.utilisation_over_time(counts, edges).values == pytest.approx(series.values)
    assert overtime.waiting_over_time(counts, edges).values == pytest.approx([waits[c].sum(1).mean() for c in cut])


def test_waiting_splits_by_cause(run: FleetResult) -> None:
    n = len(run.workload)
    half = (run.queue_s * S / 2).astype(np.int64)
    zero = np.zeros(n, np.int64)
    split = replace(run, waited_ns=np.stack([zero, half, zero, half], 1))
    parts = overtime.waiting_by_cause(split)
    assert set(parts) == {Cause.BEHIND, Cause.SCATTERED}
    total = sum(each.values for each in parts.values())
    assert total == pytest.approx(overtime.waiting_over_time(split).values)
    queue = metrics.queueing(split)
    assert sum(queue.by_cause.values()) + queue.unexplained_s == pytest.approx(queue.total_s)
    assert queue.total_s == pytest.approx(np.nansum(run.queue_s))
    assert overtime.waiting_by_cause(replace(run, waited_ns=np.zeros((n, 0), np.int64))) == {}


@pytest.mark.parametrize("seed", range(4))
def test_slots_are_those_of_every_second(seed: int) -> None:
    cluster = ClusterTree.of([2, 3, 8]) if seed % 2 else side()
    result = packed(seed, 60, cluster)
    held = at_seconds(result, cluster)
    edges = np.linspace(0, len(held), 7).round() * S
    seen = 0
    for found in overtime.slots(result, cluster, [1, 3, 8, 24], cluster.levels, edges=edges, at_ns=50 * S):
        level = cluster.level(found.level)
        inside = np.add.reduceat(~held, cluster.starts[level][:-1], axis=1)
        fit = (inside // found.slot_gpus).sum(1)
        together = np.minimum(
            (~held).sum(1) // found.slot_gpus, (np.diff(cluster.starts[level]) // found.slot_gpus).sum()
        )
        cut = [slice(int(a), int(b)) for a, b in zip(edges[:-1] // S, edges[1:] // S, strict=True)]
        assert found.free == pytest.approx([fit[c].mean() for c in cut], rel=1e-4)
        assert found.together == pytest.approx([together[c].mean() for c in cut], rel=1e-4)
        assert (found.mean_free, found.mean_together) == pytest.approx((fit.mean(), together.mean()))
        assert (found.free_now, found.together_now) == (fit[50], together[50])
        assert found.scattered == pytest.approx(1 - fit.sum() / together.sum())
        assert (np.array(found.free) <= found.together).all()
        seen += 1
    assert seen == (11 if seed % 2 else 7)


def side() -> ClusterTree:
    return parse_cluster("1x8@a+1x4@a+1x2@b+1x8@b+1x4@b")


def test_shared_gpus_are_taken_once(cluster: ClusterTree) -> None:
    load = Workload.of(submit_s=[0, 0, 0], gpus=[1, 1, 1], work_s=[10, 10, 10], share=[0.5, 0.5, 0.5])
    rows = segments([(0, 0, 10, [0], 0), (1, 5, 15, [0], 0), (2, 0, 20, [1], 0)])
    result = simple(
        load, policy="p", cluster="c", gpus=8, start_ns=np.array([0, 5, 0]) * S, end_ns=np.array([10, 15, 20]) * S,
        segments=rows,
    )  # fmt: skip
    one = ClusterTree.of([8])
    edges = np.array([0.0, 15, 20]) * S
    assert overtime.slots(result, one, [1], edges=edges)[0].free == pytest.approx([6, 7])
    assert overtime.utilisation_over_time(result, edges).values == pytest.approx([17.5 / 15 / 8, 0.5 / 8])


@pytest.mark.parametrize("packs", [False, True])
def test_a_shared_gpu_counts_once_in_every_figure(*, packs: bool) -> None:
    """Parts of a GPU, and two whole jobs on one: hours, use, cost and use over time say the same."""
    one = parse_cluster("1x1@v100")
    load = Workload.of(
        submit_s=[0, 0], gpus=[1, 1], work_s=[100, 100], share=[1, 1] if packs else [0.5, 0.25], tenant=["a", "b"],
        model=["m", "m"],
    )  # fmt: skip
    policy = Packs(name="packs", options={"sharers": 2}) if packs else Policy(name="p")
    speeds = PairSpeeds(base=ConstantSpeeds(), left={("m", "m"): 0.5})
    result = simulate(load, one, policy, speeds=speeds if packs else None, record="devices")
    hours = np.array([100, 100] if packs else [50, 25]) / 3600
    assert [each.gpu_h for each in metrics.tenants(result)] == pytest.approx(hours)
    for each in (result, replace(result, segments=None)):
        assert overtime.utilisation_over_time(each).mean == pytest.approx(metrics.utilisation(each))
        assert rates.bills(each, one)[0].used_gpu_h == pytest.approx(hours.sum())
    assert metrics.utilisation(result) == result.utilisation == (1.0 if packs else 0.75)
    assert overtime.slots(result, one, [1])[0].mean_free == pytest.approx(0.0)
    assert metrics.fairness(result) == pytest.approx([1.0, 1.0])


def test_time_begins_with_the_first_submission() -> None:
    load = Workload.of(submit_s=[1000, 1050], gpus=[1, 1], work_s=[100, 50])
    result = simulate(load, parse_cluster("1x2"), Policy(name="p"), record="devices")
    assert overtime.bins(result, 2).tolist() == [1000 * S, 1050 * S, 1100 * S]
    assert overtime.utilisation_over_time(result).mean == pytest.approx(0.75) == result.utilisation
    assert overtime.slots(result, parse_cluster("1x2"), [1])[0].mean_free == pytest.approx(0.5)


def test_a_job_that_can_never_run_makes_nobody_idle() -> None:
    load = Workload.of(submit_s=[0, 1000], gpus=[2, 4], work_s=[100, 100])
    result = simulate(load, parse_cluster("1x2"), Policy(name="p"))
    assert metrics.utilisation(result) == result.utilisation == 1.0
    assert overtime.bins(result, 1).tolist() == [0, 100 * S]


def test_why_counts_gpus_with_room_for_a_part() -> None:
    load = Workload.of(
        submit_s=[0, 0, 10], gpus=[1, 1, 1], work_s=[100] * 3, share=[0.5, 0.9, 0.25], job=["a", "b", "c"]
    )
    scene = Scene(
        workload=load, cluster=parse_cluster("1x2"), policy=parse("fifo"), speeds=ConstantSpeeds(), costs=Costs()
    )  # fmt: skip
    assert [(each.free, each.fits) for each in why(scene, "c", at_s=5).room] == [(1, 1), (1, 1)]
    assert [(each.free, each.fits) for each in why(scene, "c", at_s=20).room] == [(1, 1), (1, 1)]
    assert [each.free for each in why(scene, "b", at_s=20).room] == [0, 0]


def test_parts_of_gpus_that_wait_are_counted_as_parts() -> None:
    load = Workload.of(submit_s=[0] * 4, gpus=[1] * 4, work_s=[100] * 4, share=[0.5] * 4)
    result = simulate(load, parse_cluster("1x1"), Policy(name="p"))
    edges = np.array([0.0, 100, 200]) * S
    assert overtime.waiting_over_time(result, edges, gpus=True).values == pytest.approx([1, 0])
    assert metrics.fairness(result) == pytest.approx([1 / 2, 1 / 2, 2 / 1.5, 2 / 1.5])


def test_the_use_of_a_simulation_that_was_stopped_is_that_up_to_then(cluster: ClusterTree) -> None:
    load = Workload.of(submit_s=[0, 0], gpus=[8, 32], work_s=[10, 1000])
    result = simulate(load, parse_cluster("1x40"), Policy(name="p"), until_s=500.0)
    assert result.stopped_ns == 10 * S, "the last event by then"
    assert result.utilisation == pytest.approx(1.0) == metrics.utilisation(result)


def test_slots_need_places(run: FleetResult, cluster: ClusterTree) -> None:
    with pytest.raises(ForetraceError, match="by counts of GPUs"):
        overtime.slots(replace(run, segments=None), cluster)
    with pytest.raises(ForetraceError, match="a slot of 64 GPUs does not exist on 32"):
        overtime.slots(run, cluster, [64])
    with pytest.raises(ForetraceError, match="names GPU"):
        overtime.slots(run, ClusterTree.of([1, 8]))


def test_fairness_is_its_definition(run: FleetResult) -> None:
    load = run.workload
    begin, end = load.submit_ns / S, run.end_ns / S
    for demand, weight in (("gpus", load.gpus), ("jobs", np.ones(len(load)))):
        rho = metrics.fairness(run, demand=demand)
        for job in (0, 17, 63, 119):
            overlap = np.minimum(end, end[job]) - np.maximum(begin, begin[job])
            mean = (weight * overlap.clip(0)).sum() / (end[job] - begin[job])
            assert rho[job] == pytest.approx(run.jct_s[job] / (load.work_s[job] * max(1, mean / run.gpus)))


def test_jobs_that_do_not_finish_are_counted_and_named() -> None:
    load = Workload.of(submit_s=[0, 0, 10, 20], gpus=[1, 99, 1, 1], work_s=[5, 5, 500, 5], job=["a", "big", "c", "d"])
    result = simple(
        load, policy="p", cluster="c", gpus=4, start_ns=np.array([0, -1, 10, -1]) * S,
        end_ns=np.array([5 * S, -1, -1, -1]), held_ns=np.array([5, 0, 90, 0]) * S, stopped_ns=100 * S,
        never=np.array([False, True, False, False]),
    )  # fmt: skip
    found = metrics.measure(result)
    assert found.coverage == metrics.Coverage(
        jobs=4, finished=1, running=1, waiting=1, never=1,
        names={"running": ("c",), "waiting": ("d",), "never": ("big",)},
    )  # fmt: skip
    assert (found.jct_s.mean, found.jct_s.covers) == (5, 1)
    assert found.mean_jct_at_least_s == pytest.approx((5 + 90 + 80) / 3)
    assert found.queueing.total_s == pytest.approx(80)
    assert found.utilisation == pytest.approx(95 / 400)
    assert np.isnan(metrics.measure(result, only=np.array([1])).jct_s.mean)
    assert overtime.waiting_over_time(result, np.array([0.0, 20, 100]) * S).values == pytest.approx([0, 1])


def test_a_subset_is_measured_alone(run: FleetResult) -> None:
    some = np.arange(0, 120, 3)
    mask = np.zeros(120, bool)
    mask[some] = True
    a, b = metrics.measure(run, only=some), metrics.measure(run, only=mask)
    assert a == b and a.coverage.jobs == 40 == a.jct_s.covers
    assert a.jct_s.mean == pytest.approx(run.jct_s[some].mean())
    rest = metrics.utilisation(run, ~mask)
    assert a.utilisation + rest == pytest.approx(run.utilisation)
    assert [each.tenant for each in a.tenants] == ["t0"] and a.tenants[0].gpu_share == 1
    by = overtime.utilisation_over_time(run, only=some).mean + overtime.utilisation_over_time(run, only=~mask).mean
    assert by == pytest.approx(run.utilisation)


def test_tenants_share_everything(run: FleetResult) -> None:
    found = metrics.measure(run)
    assert {each.tenant for each in found.tenants} == {"t0", "t1", "t2"}
    assert sum(each.gpu_share for each in found.tenants) == pytest.approx(1)
    for each in found.tenants:
        mine = run.workload.tenant == each.tenant
        assert each.p90_jct_s == pytest.approx(np.percentile(run.jct_s[mine], 90))
        assert each.mean_queue_s == pytest.approx(run.queue_s[mine].mean())


def test_communication_in_three_ways() -> None:
    load = Workload.of(submit_s=[0, 0, 0], gpus=[2, 2, 2], work_s=[80, 80, 80])
    rows = segments([(0, 0, 100, [0, 1], 1), (1, 0, 100, [7, 8], 2), (2, 0, 25, [2, 3], 1), (2, 25, 100, [4, 9], 2)])
    result = simple(
        load, policy="p", cluster="c", gpus=16, start_ns=np.zeros(3, np.int64), end_ns=np.full(3, 100 * S),
        comm_ns=np.array([10.0, 20, 40]) * S, segments=rows,
    )  # fmt: skip
    found = metrics.communication(result)
    assert (found.total_s, found.share_of_running) == pytest.approx((70, 70 / 300))
    assert found.gpu_h == pytest.approx(140 / 3600)
    assert found.above_machine_s == pytest.approx(20 + 40 * 0.75)
    assert (found.above_machine_low_s, found.above_machine_high_s) == pytest.approx((20, 60))
    assert metrics.communication(replace(result, segments=None)).above_machine_s is None
    assert metrics.communication(result, machine_level=2).above_machine_s == 0


def test_lost_hours_know_their_reason() -> None:
    load = Workload.of(submit_s=[0, 0, 0], gpus=[2, 4, 1], work_s=[80, 80, 80])
    result = simple(
        load, policy="p", cluster="c", gpus=8, start_ns=np.zeros(3, np.int64), end_ns=np.full(3, 3600 * S),
        dead_ns=np.array([1800, 900, 0]) * S, failed=np.array([1, 0, 0]), preempted=np.array([1, 3, 0]),
        starts=np.array([3, 4, 1]),
    )  # fmt: skip
    found = metrics.lost(result)
    assert (found.gpu_h, found.of_failed_gpu_h, found.of_preempted_gpu_h) == pytest.approx((2, 1, 1))
    assert (found.preemptions, found.failures, found.restarts) == (4, 1, 5)
    assert metrics.utilisation(result, useful=True) == pytest.approx((7 - 2) / 8)


def test_bills_by_kind() -> None:
    cluster = parse_cluster("1x8@v100+1x8@k80")
    load = Workload.of(submit_s=[0, 0], gpus=[4, 2], work_s=[80, 80])
    result = simple(
        load, policy="p", cluster="c", gpus=16, start_ns=np.zeros(2, np.int64), end_ns=np.array([7200, 3600]) * S,
        segments=segments([(0, 0, 7200, [0, 1, 2, 3], 1), (1, 0, 3600, [7, 8], 2)]),
    )  # fmt: skip
    v100, k80 = rates.bills(result, cluster)
    assert (v100.used_gpu_h, k80.used_gpu_h, v100.all_gpu_h) == pytest.approx((9, 1, 16))
    assert "list price" in v100.price_from and v100.usd_per_gpu_h is not None
    assert (v100.usd_used, v100.usd_all) == pytest.approx((9 * v100.usd_per_gpu_h, 16 * v100.usd_per_gpu_h))
    assert v100.busy_w is not None and v100.idle_w is not None
    assert v100.kwh == pytest.approx((9 * v100.busy_w + 7 * v100.idle_w) / 1000)
    assert "assumed when idle" in k80.power_from
    unknown = metrics.measure(result)
    assert [bill.gpu_type for bill in unknown.bills] == [""] and unknown.total("usd_used") is None
    bound = replace(result, segments=None, workload=load.with_columns(gpu_type=np.array(["k80", "tpu"], object)))
    assert [(bill.gpu_type, bill.used_gpu_h) for bill in rates.bills(bound, cluster)] == [
        ("v100", 0),
        ("k80", 8),
        ("tpu", 2),
    ]


def test_a_cdf_keeps_its_tail() -> None:
    values = np.concatenate([np.random.default_rng(0).lognormal(6, 2, 50_000), [np.nan] * 7])
    seconds, share = metrics.cdf(values)
    assert len(seconds) <= 200 and share[-1] == 1 and seconds[-1] == np.nanmax(values)
    known = np.sort(values[:-7])
    assert (np.searchsorted(known, seconds, side="right") / 50_000 == pytest.approx(share)) and (
        share > 0.99
    ).sum() > 40
    few, parts = metrics.cdf(np.array([3.0, 1.0]))
    assert few.tolist() == [1, 3] and parts.tolist() == [0.5, 1]


def test_nothing_is_not_an_error() -> None:
    load = Workload.of(submit_s=[], gpus=[], work_s=[])
    empty = np.zeros(0, np.int64)
    result = simple(load, policy="p", cluster="c", gpus=8, start_ns=empty, end_ns=empty)
    found = metrics.measure(result, ClusterTree.of([8]))
    assert found.coverage.jobs == 0 and np.isnan(found.jct_s.mean) and np.isnan(found.utilisation)
    assert overtime.utilisation_over_time(result).values.sum() == 0
