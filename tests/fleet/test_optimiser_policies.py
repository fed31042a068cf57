"""Policies that solve something: small cases by hand or by trying everything, and logs with published answers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from foretrace.errors import ForetraceError, MissingExtraError
from foretrace.fleet import allocations, formats, policies
from foretrace.fleet.cluster import ClusterTree, parse_cluster
from foretrace.fleet.policies.packing import TablePairs
from foretrace.fleet.policies.rounds import stretched
from foretrace.fleet.policy import Policy
from foretrace.fleet.pollux.goodput import GoodputSpeeds, with_work
from foretrace.fleet.pollux.profiles import Profiles
from foretrace.fleet.result import Cause, FleetResult
from foretrace.fleet.setup import Costs
from foretrace.fleet.simulate import simulate
from foretrace.fleet.speeds import PairSpeeds, ProportionalSpeeds, Shape, Speed
from foretrace.fleet.speeds.closed_form import ConstantSpeeds
from foretrace.fleet.speeds.throughputs import ThroughputTable
from foretrace.fleet.stepping import Stepping
from foretrace.fleet.workload import SECOND, Float64, Int64, Workload
from foretrace.testing import PolicyConformance
from foretrace.testing.policy import check_holdings


@dataclass(frozen=True, kw_only=True)
class Told:
    """Progress by (model, kind of GPU) times a power of the GPUs by model."""

    rates: dict[tuple[str, str], float] = field(default_factory=dict)
    powers: dict[str, float] = field(default_factory=dict)
    name: str = "told"

    def kinds(self, workload: Workload) -> Int64:
        names = sorted(set(workload.model.tolist()))
        return np.array([names.index(each) for each in workload.model.tolist()], np.int64)

    def speed(self, workload: Workload, job: int, shape: Shape) -> Speed:
        model = str(workload.model[job])
        if self.rates and (model, shape.gpu_type) not in self.rates:
            raise ForetraceError(f"nobody told how fast {model} is on {shape.gpu_type}; tell it.")
        return Speed(self.rates.get((model, shape.gpu_type), 1.0) * shape.gpus ** self.powers.get(model, 0.0))


def jobs(work_s: list[float], models: str, **columns: object) -> Workload:
    n = len(work_s)
    given = {"submit_s": [0.0] * n, "gpus": [1] * n, "model": list(models)} | columns
    return Workload.of(work_s=work_s, **given)  # type: ignore[arg-type]


def time_on(result: FleetResult, cluster: ClusterTree) -> Float64:
    """(jobs, kinds) seconds."""
    assert result.segments is not None
    found = np.zeros((len(result.workload), len(cluster.types)))
    for at, job in enumerate(result.segments.job.tolist()):
        kind = cluster.gpu_type[result.segments.devices_of(at)[0]]
        found[job, kind] += (result.segments.end_ns[at] - result.segments.start_ns[at]) / SECOND
    return found


# ---- Gavel and AlloX
FAST_SLOW = {("a", "fast"): 4.0, ("a", "slow"): 1.0, ("b", "fast"): 2.0, ("b", "slow"): 1.0}


def test_max_min_gives_the_time_that_the_linear_program_says() -> None:
    cluster = parse_cluster("1x1@fast+3x1@slow")
    # against a quarter of fast and three of slow: (1 + 3 x) / 1.75 = (2 - x) / 1.25, so that x is 9 / 22
    x = allocations.max_min([[4, 1], [2, 1]], [1, 1], [1, 3])
    assert x[0] == pytest.approx([9 / 22, 13 / 22])
    steps = Stepping(
        jobs([4e5, 4e5], "ab"), cluster, policies.parse("gavel-max-min round-s=100"), speeds=Told(rates=FAST_SLOW),
        record="devices",
    )  # fmt: skip
    steps.run(until_s=100_000)
    assert time_on(steps.result(), cluster) / 1e5 == pytest.approx(x, abs=0.01)


def test_makespan_leaves_the_longer_job_on_the_faster_gpu() -> None:
    # with a fast GPU for itself the first takes 150 s, more than the second on the slow one
    speeds = Told(rates={(job, kind): rate for job in "ab" for kind, rate in (("fast", 2.0), ("slow", 1.0))})
    cluster = parse_cluster("1x1@fast+1x1@slow")
    for name, ends in (("gavel-makespan", [150.0, 100.0]), ("allox", [150.0, 100.0])):
        result = simulate(jobs([300, 100], "ab"), cluster, policies.make(name, round_s=10.0), speeds=speeds)
        assert (result.end_ns / SECOND).tolist() == ends


def test_allox_matches_two_jobs_and_two_gpus() -> None:
    # together 100 + 111 s; the other way round 200 + 100 s, and 100 + 200 s one after the other on the fast one
    rates = {("a", "fast"): 1.0, ("a", "slow"): 0.5, ("b", "fast"): 1.0, ("b", "slow"): 0.9}
    cluster = parse_cluster("1x1@fast+1x1@slow")
    result = simulate(jobs([100, 100], "ab"), cluster, policies.make("allox"), speeds=Told(rates=rates))
    assert result.end_ns / SECOND == pytest.approx([100, 100 / 0.9])


def test_finish_time_fairness_serves_who_is_later_than_alone() -> None:
    # one GPU; the first job has had it for 600 s when the second comes, whose ρ is to be no larger
    work = jobs([1000, 1000], "ab", submit_s=[0.0, 600.0])
    policy = policies.make("gavel-ftf", round_s=10.0, reset_s=0.0)
    result = simulate(work, parse_cluster("1x1"), policy)
    # the program's own ρ at that moment: (600 + 400 / x) / 1400 = (1000 / (1 - x)) / 2000
    rho = allocations.finish_time_fairness(
        [[1], [1]], [1, 1], [1], elapsed=[600, 0], remaining=[400, 1000], alone=[1400, 2000]
    )[1]
    first = result.jct_s[0] / 1400
    assert first == pytest.approx(rho, abs=0.02)


@pytest.mark.parametrize("name", ["gavel-max-min", "gavel-ftf", "gavel-makespan", "allox", "pollux", "sia"])
def test_decides_at_rounds_only_and_leaves_who_may_stay(name: str) -> None:
    work = jobs([5000, 500], "ab", submit_s=[0.0, 10.0])
    result = simulate(
        work, parse_cluster("1x2"), policies.make(name, round_s=360.0), costs=Costs(restart_s=7), record="segments"
    )
    assert (result.start_ns / SECOND).tolist() == [0, 360]
    assert result.waited_ns[1, Cause.ROUND] == 350 * SECOND
    assert result.starts.tolist() == [1, 1]
    assert result.end_ns[0] == 5000 * SECOND  # undisturbed by thirteen rounds


@pytest.mark.parametrize("name", ["gavel-max-min", "sia", "pollux"])
def test_a_kind_without_a_speed_is_left_out_and_none_at_all_is_a_mistake(name: str) -> None:
    cluster = parse_cluster("1x1@slow+1x1@fast")
    only = Told(rates={("a", "fast"): 1.0})
    assert simulate(jobs([100], "a"), cluster, policies.make(name), speeds=only).end_ns[0] == 100 * SECOND
    with pytest.raises(ForetraceError, match="nobody told how fast b is"):
        simulate(jobs([100], "b"), cluster, policies.make(name), speeds=only)


@pytest.mark.parametrize(("consolidate", "running"), [(True, 2), (False, 3)])
def test_gang_that_must_lie_together_waits_or_spreads(consolidate: bool, running: int) -> None:
    # two jobs of three GPUs leave one free on each of two nodes of four
    work = jobs([1000, 1000, 100], "abc", gpus=[3, 3, 2])
    policy = policies.make("gavel-max-min", consolidate=consolidate)
    steps = Stepping(work, parse_cluster("2x4"), policy)
    steps.run(until_s=50)
    check_holdings(steps)
    assert len(steps.view.running) == running
    steps.run()
    waited = steps.result().waited_ns.sum(axis=0)
    assert waited[Cause.SCATTERED] > 0 if consolidate else not waited.any()
    assert steps.result().finished.all()


class TestStrictGavel(PolicyConformance):
    def policy(self) -> Policy:
        return policies.make("gavel-max-min", consolidate=True)


# ---- Pollux
def counts_at_start(work: Workload, cluster: str, policy: Policy, speeds: Told) -> list[int]:
    steps = Stepping(work, parse_cluster(cluster), policy, speeds=speeds)
    steps.run(until_s=0)
    check_holdings(steps)
    return [len(steps.devices_of(job)) for job in range(len(work))]


POWERS = {"a": 0.9, "b": 0.1, "c": 0.5}


def test_pollux_finds_the_best_power_mean() -> None:
    work = stretched(jobs([1000, 1000, 1000], "abc"), 1, 8)
    found = counts_at_start(work, "1x8", policies.make("pollux"), Told(powers=POWERS))

    def mean(sizes: tuple[int, ...]) -> float:  # speed-ups over a fair share of ceil(8 / 3) = 3
        ups = [(size / 3) ** power for size, power in zip(sizes, POWERS.values(), strict=True)]
        return float(1 / sum(1 / (each + 1e-3) for each in ups))

    best = max((each for each in product(range(1, 9), repeat=3) if sum(each) <= 8), key=mean)
    assert found[0] > found[2] > found[1]
    assert tuple(found) == best


def test_pollux_steps_over_sizes_that_gain_nothing() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Stairs(Told):
        def speed(self, workload: Workload, job: int, shape: Shape) -> Speed:
            return Speed(4.0 if shape.gpus >= 4 else 1.0)

    work = stretched(jobs([1000], "a"), 1, 4)
    assert counts_at_start(work, "1x4", policies.make("pollux"), Stairs()) == [4]


def test_pollux_leaves_alone_who_was_stopped_often() -> None:
    def grown(restart_s: float) -> int:
        work = stretched(jobs([1e5, 70], "aa", submit_s=[0.0, 0.0]), 1, 2)
        steps = Stepping(
            work, parse_cluster("1x2"), policies.make("pollux", restart_s=restart_s), speeds=Told(powers={"a": 0.2})
        )
        steps.run(until_s=130)
        return len(steps.devices_of(0))

    # a second GPU makes it 15 % faster; at 120 s a restart of 1 s is worth that, and one of 60 s is not
    assert (grown(1.0), grown(60.0)) == (2, 1)


# ---- Sia
def test_sia_takes_the_kind_and_number_that_are_best_for_all() -> None:
    rates = {("a", "x"): 3.0, ("a", "y"): 1.0, ("b", "x"): 1.2, ("b", "y"): 1.0, ("c", "x"): 1.0, ("c", "y"): 2.0}
    speeds = Told(rates=rates, powers=POWERS)
    work = stretched(jobs([1e4, 1e4, 1e4], "abc"), 1, 4)
    cluster = parse_cluster("1x2@x+1x4@y")
    steps = Stepping(work, cluster, policies.make("sia"), speeds=speeds)
    steps.run(until_s=0)
    check_holdings(steps)
    held = [steps.devices_of(job) for job in range(3)]
    found = tuple((cluster.types[cluster.gpu_type[each[0]]], len(each)) for each in held)

    choices = [*(("x", size) for size in (1, 2)), *(("y", size) for size in (1, 2, 4))]
    rate = {(job, choice): rates[job, choice[0]] * choice[1] ** POWERS[job] for job, choice in product("abc", choices)}
    least = {job: min(rate[job, choice] for choice in choices) for job in "abc"}

    def cost(way: tuple[tuple[str, int], ...]) -> float:
        return float(sum((rate[job, choice] / least[job]) ** -0.5 for job, choice in zip("abc", way, strict=True)))

    able = [
        way
        for way in product(choices, repeat=3)
        if all(sum(size for kind, size in way if kind == each) <= room for each, room in (("x", 2), ("y", 4)))
    ]
    assert cost(found) == pytest.approx(min(map(cost, able)))
    assert found[0][0] == "x" and found[2][0] == "y"


def test_sia_respects_quotas_and_says_who_waits_for_them() -> None:
    work = stretched(jobs([600, 600, 600], "aaa", tenant=["red", "red", "blue"]), 1, 4)
    cluster = replace(parse_cluster("1x8"), quotas={"red": 1})
    steps = Stepping(work, cluster, policies.make("sia"), speeds=Told(powers=POWERS))
    steps.run(until_s=30)
    check_holdings(steps)
    assert sorted(len(steps.devices_of(job)) for job in range(3)) == [0, 1, 4]
    result = steps.run().result()
    assert result.finished.all() and result.waited_ns[:, Cause.QUOTA].sum() > 0


@pytest.mark.parametrize(("name", "module"), [("sia", "scipy.optimize"), ("gavel-max-min", "scipy.optimize")])
def test_without_scipy_they_say_how_to_get_it(name: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    work = stretched(jobs([100, 100], "ab"), 1, 2)
    with pytest.raises(MissingExtraError, match="pip install scipy"):
        simulate(work, parse_cluster("1x2"), policies.make(name))


# ---- sharing GPUs
PAIRS = PairSpeeds(base=ProportionalSpeeds(), left={("a", "b"): 0.7, ("b", "a"): 0.8, ("a", "a"): 0.5, ("b", "b"): 0.5})


def test_packing_gains_what_the_table_says() -> None:
    work = jobs([100, 100], "ab")
    shared = simulate(work, parse_cluster("1x1"), policies.make("packing"), speeds=PAIRS)
    # the second ends after 100 / 0.8 s, when the first has done 87.5 s of its work
    assert (shared.end_ns / SECOND).tolist() == [137.5, 125.0]
    for apart in (
        simulate(work, parse_cluster("1x1"), policies.make("packing", threshold=1.5), speeds=PAIRS),
        simulate(jobs([100, 100], "aa"), parse_cluster("1x1"), policies.make("packing"), speeds=PAIRS),
    ):
        assert (apart.end_ns / SECOND).tolist() == [100.0, 200.0]


def test_packing_takes_the_better_partner_and_moves_out_when_a_gpu_is_free() -> None:
    work = jobs([100, 300, 300], "aba", submit_s=[0.0, 0.0, 10.0])
    steps = Stepping(work, parse_cluster("1x2"), policies.make("packing"), speeds=PAIRS, record="devices")
    steps.run(until_s=50)
    assert steps.devices_of(2) == steps.devices_of(1) != steps.devices_of(0)
    steps.run(until_s=101)
    assert sorted(steps.devices_of(1) + steps.devices_of(2)) == [0, 1]
    result = steps.run().result()
    # 90 s together: 0.8 and 0.7 of their speeds
    assert result.end_ns / SECOND == pytest.approx([100, 300 + 90 * 0.2, 10 + 300 + 90 * 0.3])
    assert result.starts.tolist() == [1, 1, 2]  # the one that gains most moves


@pytest.mark.parametrize("name", ["packing", "jigsaw"])
def test_sharing_needs_a_model_of_pairs(name: str) -> None:
    with pytest.raises(
        ForetraceError, match=r"does not; give `speeds=` 'throughputs=FILE pairs=yes', or .* one with pair"
    ):
        simulate(jobs([100, 100], "ab"), parse_cluster("1x1"), policies.make(name))


# ---- parameters
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gavel-max-min round-s=0", "a round takes 1 s or more"),
        ("gavel-ftf reset-s=-1", "reset-s is a number of seconds"),
        ("allox alpha=0", "alpha is a part of the jobs"),
        ("pollux restart-s=-1", "restart-s is a number"),
        ("pollux elastic=4", "write elastic=1-16"),
        ("sia elastic=0-4", "from 1 up"),
        ("sia power=0.5", "power is a number below 0"),
        ("sia change=-1", "numbers from 0 up"),
        ("themis fairness=-1", "fairness must be 0 to 1, got -1"),
        ("qssf memory=-1", "memory must be 0 to 1, got -1"),
        ("dally history-leases=0", "tuned from 1 lease or more, not 0"),
        ("packing threshold=-1", "threshold is what two jobs get done together"),
    ],
)
def test_mistakes_get_a_sentence(text: str, words: str) -> None:
    with pytest.raises(ForetraceError, match=words):
        policies.parse(text)


def test_elastic_jobs_keep_what_they_ask_for_in_their_range() -> None:
    work = jobs([1, 1, 1], "abc", gpus=[2, 32, 1], share=[1.0, 1.0, 0.5])
    made = stretched(work, 4, 16)
    assert made.min_gpus.tolist() == [2, 4, 1] and made.max_gpus.tolist() == [16, 32, 1]
    with pytest.raises(ForetraceError, match="give a range from 1 up"):
        stretched(work, 4, 2)
    same = simulate(work, parse_cluster("4x16"), policies.parse("pollux elastic=4-16"))
    assert same.workload.max_gpus.tolist() == [16, 32, 1] and same.finished.all()
    with pytest.raises(ForetraceError, match="equally fast on all"):
        simulate(work, parse_cluster("4x16"), policies.parse("sia elastic=4-16"), speeds=ConstantSpeeds())


# ---- logs with published answers
def test_gavel_of_96_jobs_is_near_its_simulator(shared_data: Path) -> None:
    folder = shared_data / "fleet/gavel"
    table = ThroughputTable.read(folder / "simulation_throughputs.json.gz")
    work = formats.read(folder / "physical_cluster/max_min_fairness.trace")
    work = replace(work, work_s=table.run_times(work))
    cluster = parse_cluster("1x4@v100+1x4@p100+1x4@k80")
    result = simulate(work, cluster, policies.make("gavel-max-min"), speeds=table)
    # max_min_fairness_perf, whose rounds start when the last job of a round is through with its steps
    assert float(result.jct_s.mean()) == pytest.approx(66166.292, rel=0.02)


def test_packing_by_measured_pairs(shared_data: Path) -> None:
    folder = shared_data / "fleet/gavel"
    table = ThroughputTable.read(folder / "simulation_throughputs.json.gz")
    work = formats.read(folder / "physical_cluster/max_min_fairness.trace")
    work = replace(work, work_s=table.run_times(work))
    pairs = TablePairs.read(folder / "simulation_throughputs.json.gz")
    first, second = np.flatnonzero(work.gpus == 1)[:2].tolist()
    one, two = ((str(work.model[job]), 1) for job in (first, second))
    assert pairs.pair(work, first, second) == table.pair_rates("v100", one, two)[0] / table.rate("v100", *one)

    def mean(policy: str) -> float:
        return float(simulate(work, parse_cluster("3x4@v100"), policies.parse(policy), speeds=pairs).jct_s.mean())

    assert mean("packing") < mean("packing threshold=9") == mean("fifo-skip")
    with pytest.raises(ForetraceError, match="those on v100"):
        simulate(work, parse_cluster("3x4@k80"), policies.make("packing"), speeds=pairs)
    with pytest.raises(ForetraceError, match=r"`speeds=` 'throughputs=FILE pairs=yes', or .* such as TablePairs"):
        simulate(work, parse_cluster("3x4@v100"), policies.make("packing"), speeds=table)


def test_elastic_policies_beat_a_rigid_one_on_pollux_jobs(shared_data: Path) -> None:
    folder = shared_data / "fleet/pollux"
    profiles = Profiles(folder / "profiles")
    work = with_work(formats.read(folder / "workloads/workload-6.csv"), profiles)
    cluster, costs = parse_cluster("16x4"), Costs(restart_s=30)

    def mean(policy: Policy, change: Callable[[Workload], Workload], adapt: bool) -> float:
        speeds = GoodputSpeeds(profiles, adapt=adapt)
        result = simulate(change(work), cluster, policy, speeds=speeds, costs=costs)
        assert result.finished.all()
        return float(result.jct_s.mean())

    rigid = mean(policies.parse("tiresias thresholds=57600"), lambda each: each, False)
    pollux = mean(policies.make("pollux"), lambda each: stretched(each, 1, 16), True)
    assert pollux < 0.8 * rigid  # published: 2446 against 3470 s, 0.70
