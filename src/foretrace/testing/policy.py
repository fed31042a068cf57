"""`PolicyConformance`: what every scheduling policy must do, as a class of tests to inherit from.

Gangs whole, no GPU twice, the same answer twice, everything finished that can be held, no work lost or won, and nobody
left waiting in an empty cluster. It is played step by step, so that rules and overridden methods are treated alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from foretrace.fleet.cluster import ClusterTree, parse_cluster
from foretrace.fleet.policy import Policy
from foretrace.fleet.result import FleetResult, Segments
from foretrace.fleet.setup import Costs
from foretrace.fleet.speeds import ROUNDING, Shape, Speeds
from foretrace.fleet.stepping import Stepping
from foretrace.fleet.workload import SECOND, Float64, Workload

_SLACK_S = 1e-6  # ends are whole nanoseconds; a job may be held up some hundred times


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Jobs, a cluster and what interruptions cost there."""

    workload: Workload
    cluster: ClusterTree
    costs: Costs = field(default_factory=Costs)


class PolicyConformance:
    """Tests of one policy: override `policy`; `speeds` too where it needs to know more than GPUs and seconds."""

    def policy(self) -> Policy:
        """Return a new instance of the policy."""
        raise NotImplementedError("override policy() and return yours")

    def speeds(self) -> Speeds | None:
        """Return how fast jobs run; None: as `work_s` says, in proportion to the GPUs of an elastic job."""
        return None

    def settings(self) -> Mapping[str, Setting]:
        """Return what it is played on: small, so that everything takes a second or two."""
        few = small_jobs(seed=1, n=16, largest=12)
        return {
            "gangs on two racks": Setting(
                workload=few, cluster=parse_cluster("2x2x4"), costs=Costs(restart_s=5, checkpoint_s=600)
            ),
            "all at once on one node": Setting(
                workload=small_jobs(seed=2, n=12, largest=4, span_s=0), cluster=parse_cluster("1x4")
            ),
            "two kinds and quotas": Setting(
                workload=small_jobs(seed=3, n=14, largest=4, kinds=("", "a", "b")),
                cluster=replace(parse_cluster("2x2@a+2x4@b"), quotas={"red": 5}),
            ),
            "machines that break": Setting(
                workload=small_jobs(seed=4, n=12, largest=6),
                cluster=parse_cluster("2x4"),
                costs=Costs(restart_s=5, checkpoint_s=300, mtbf_h=3, mttr_h=0.1),
            ),
            "elastic jobs and parts of a GPU": Setting(
                workload=small_jobs(seed=5, n=14, largest=4, elastic=True), cluster=parse_cluster("2x4")
            ),
        }

    def test_is_a_policy_with_a_name(self) -> None:
        policy = self.policy()
        assert policy.name and policy.name == policy.name.strip(), "a name to call it by"
        policy.validate()

    def test_keeps_gangs_whole_and_holds_no_gpu_twice(self) -> None:
        for name, setting in self.settings().items():
            played, work = self._played(name, setting), setting.workload
            assert not played.broken, f"{name}: {played.broken}"
            segments = _segments(played.result)
            fewest, most = np.minimum(work.min_gpus, work.gpus), np.maximum(work.max_gpus, work.gpus)
            for at, job in enumerate(segments.job.tolist()):
                gpus = segments.devices_of(at)
                assert len(set(gpus.tolist())) == len(gpus) == segments.gpus[at], f"{name}: {work.job[job]}"
                assert fewest[job] <= len(gpus) <= most[job], f"{name}: {work.job[job]} ran on {len(gpus)} GPUs"
            for gpu, loads in _loads(segments, work.share).items():
                for jobs, share in loads:
                    fits = share <= 1 + 1e-9 or jobs <= played.steps.state.sharers
                    assert fits, f"{name}: GPU {gpu} is held {jobs} times"

    def test_gives_the_same_answer_twice(self) -> None:
        settings = self.settings()
        for name in list(dict.fromkeys((min(settings), max(settings)))):
            first, second = (self._steps(settings[name]).run().result() for _ in range(2))
            for column in ("start_ns", "end_ns", "held_ns", "gpu_ns", "waited_ns"):
                assert np.array_equal(getattr(first, column), getattr(second, column)), f"{name}: {column}"

    def test_stopping_on_the_way_changes_nothing(self) -> None:
        for name, setting in self.settings().items():
            whole = self._steps(setting).run().result()
            assert np.array_equal(whole.end_ns, self._played(name, setting).result.end_ns), name

    def test_finishes_everything_that_can_be_held(self) -> None:
        for name, setting in self.settings().items():
            result = self._played(name, setting).result
            left = setting.workload.job[~result.finished & ~result.never]
            assert not len(left), f"{name}: {', '.join(map(str, left))} never finished, though arrivals stopped"

    def test_loses_and_wins_no_work(self) -> None:
        for name, setting in self.settings().items():
            played, work = self._played(name, setting), setting.workload
            result = played.result
            done = _work_done(played.steps, result)
            lost = _lost(result) if setting.costs.mtbf_h else np.zeros(len(work))
            for job in np.flatnonzero(result.finished):
                excess = done[job] - work.work_s[job]
                too_much = f"{name}: job {work.job[job]} did {excess:+g} s more than there was"
                assert -_SLACK_S <= excess <= lost[job] + _SLACK_S, too_much
                waited = result.end_ns[job] - work.submit_ns[job] - result.held_ns[job]
                assert waited == result.waited_ns[job].sum(), f"{name}: job {work.job[job]}: causes do not sum up"

    def test_leaves_nobody_waiting_in_an_empty_cluster(self) -> None:
        for name, setting in self.settings().items():
            found = self._played(name, setting).idle
            assert not found, f"{name}: {found}"

    def _played(self, name: str, setting: Setting) -> _Played:
        """Return the setting played to the end, stopping after every event: once for all tests that only look."""
        who = type(self), repr(self.policy())
        if who not in _PLAYED:
            while len(_PLAYED) >= _KEPT:
                _PLAYED.pop(next(iter(_PLAYED)))
            _PLAYED[who] = {}
        if name not in _PLAYED[who]:
            _PLAYED[who][name] = _Played(self._steps(setting))
        return _PLAYED[who][name]

    def _steps(self, setting: Setting) -> Stepping:
        return Stepping(
            setting.workload,
            setting.cluster,
            self.policy(),
            speeds=self.speeds(),
            costs=setting.costs,
            seed=1,
            record="devices",
        )


class _Played:
    """A simulation that was looked at after every event, and what was wrong on the way."""

    def __init__(self, steps: Stepping) -> None:
        self.steps, self.broken, self.idle = steps, "", ""
        while steps.run(max_events=steps.state.events + 1).stopped:
            try:
                check_holdings(steps)
            except AssertionError as error:
                self.broken = self.broken or f"at {steps.now_s:g} s {error}"
            self.idle = self.idle or self._waits_for_nothing()
        self.result = steps.result()

    def _waits_for_nothing(self) -> str:
        view = self.steps.view
        if view.free_gpus < view.cluster.gpus or self.steps.looks_again_s is not None:
            return ""  # somebody runs, a machine is broken, or a timer of the policy will go off
        for job in view.waiting.tolist():
            if view.together(job, int(view.workload.gpus[job])):
                return f"at {view.now_s:g} s nothing runs, and job {view.workload.job[job]} waits and would fit"
        return ""


_PLAYED: dict[tuple[type, str], dict[str, _Played]] = {}
_KEPT = 64  # policies whose simulations are kept for the next test


def _segments(result: FleetResult) -> Segments:
    assert result.segments is not None
    return result.segments


def check_holdings(steps: Stepping) -> None:
    """Check that every GPU is free, broken, or held by jobs that fit, and that counts agree (AssertionError)."""
    state = steps.state
    held: dict[int, list[int]] = {}
    for at in sorted(state.running):
        job = state.jobs[at]
        assert job.status == "running" and job.fewest <= len(set(job.gpus)) == len(job.gpus) <= job.most, f"job {at}"
        for gpu in job.gpus:
            held.setdefault(gpu, []).append(at)
    for gpu, owners in enumerate(state.owners):
        assert sorted(owners) == held.get(gpu, []), f"GPU {gpu}: owners and holders differ"
        fits = len(owners) <= max(state.sharers, 1) or state.load(gpu) <= 1 + ROUNDING
        assert fits and not (owners and state.broken[gpu]), f"GPU {gpu} is held by {owners}"
        assert state.open[gpu] == (not owners and not state.broken[gpu]), f"GPU {gpu} is held by {owners}"
    assert state.free == [int((state.open & mine).sum()) for mine in state.of_kind]
    assert state.free_gpus == sum(state.free)
    assert state.waiting == {job.at for job in state.jobs if job.status == "waiting"}
    for tenant, quota in enumerate(state.facts.quota.tolist()):
        assert state.used[tenant] <= quota + ROUNDING, f"tenant {tenant} holds {state.used[tenant]} of {quota}"


def small_jobs(
    *,
    seed: int,
    n: int,
    largest: int,
    span_s: float = 4 * 3600,
    kinds: tuple[str, ...] = ("",),
    elastic: bool = False,
) -> Workload:
    """Return jobs of seconds to hours on 1 to `largest` GPUs, some with stated run times, of two tenants and models."""
    random = np.random.default_rng(seed)
    gpus = np.minimum(2 ** random.integers(0, 4, n), largest)
    share = np.where((gpus == 1) & (random.random(n) < 0.5), 0.4, 1.0) if elastic else np.ones(n)
    whole = elastic & (share == 1)
    return Workload.of(
        submit_s=np.sort(random.integers(0, int(span_s) + 1, n)),
        gpus=gpus,
        work_s=np.rint(np.exp(random.uniform(np.log(30), np.log(9000), n))),
        model=[f"m{each}" for each in random.integers(0, 2, n)],
        tenant=[("red", "blue")[each] for each in random.integers(0, 2, n)],
        gpu_type=[kinds[each] for each in random.integers(0, len(kinds), n)],
        estimate_s=np.where(random.random(n) < 0.5, np.nan, 3600.0),
        priority=random.integers(0, 3, n).astype(float),
        min_gpus=np.where(whole, np.maximum(gpus // 2, 1), gpus),
        max_gpus=np.where(whole, np.minimum(gpus * 2, largest), gpus),
        share=share,
        name=f"small jobs {seed}",
    )


def _loads(segments: Segments, share: Float64) -> dict[int, list[tuple[int, float]]]:
    """Return jobs and the sum of their shares on each GPU, after every change."""
    changes: dict[int, list[tuple[int, int, float]]] = {}
    for at, job in enumerate(segments.job.tolist()):
        for gpu in segments.devices_of(at).tolist():
            changes.setdefault(gpu, []).append((int(segments.start_ns[at]), 1, float(share[job])))
            changes[gpu].append((int(segments.end_ns[at]), -1, -float(share[job])))
    found: dict[int, list[tuple[int, float]]] = {}
    for gpu, rows in changes.items():
        jobs, load = 0, 0.0
        for _, by, part in sorted(rows):  # at one moment those who go before those who come
            jobs, load = jobs + by, load + part
            found.setdefault(gpu, []).append((jobs, load))
    return found


def _work_done(steps: Stepping, result: FleetResult) -> Float64:
    """Return (n,) seconds of work at speed 1 that every job did, computed from where it lay and beside whom."""
    segments, work = _segments(result), steps.workload
    held = [frozenset(segments.devices_of(at).tolist()) for at in range(len(segments))]
    pair = getattr(steps.speeds, "pair", None)
    done = np.zeros(len(work))
    for at, job in enumerate(segments.job.tolist()):
        start, end = int(segments.start_ns[at] + segments.dead_ns[at]), int(segments.end_ns[at])
        meets = (segments.start_ns < end) & (segments.end_ns > start)
        beside = [other for other in np.flatnonzero(meets).tolist() if other != at and held[other] & held[at]]
        edges = {start, end}
        for other in beside:
            edges |= {t for t in (int(segments.start_ns[other]), int(segments.end_ns[other])) if start < t < end}
        times = sorted(edges)
        for begin, until in pairwise(times):
            now = [k for k in beside if segments.start_ns[k] <= begin < segments.end_ns[k]]
            there = [[int(segments.job[k]) for k in now if gpu in held[k]] for gpu in held[at]]
            crowd = max(len(each) for each in there)
            speed = steps.speeds.speed(work, job, _shape(steps.cluster, sorted(held[at]), crowd)).progress
            if pair is not None:
                speed *= min(np.prod([pair(work, job, other) for other in each]) for each in there)
            done[job] += speed * (until - begin) / SECOND
    return done


def _shape(cluster: ClusterTree, gpus: list[int], sharers: int) -> Shape:
    counts = [
        np.unique([cluster.unit_of(level, gpu) for gpu in gpus], return_counts=True)[1]
        for level in range(len(cluster.levels))
    ]
    return Shape(
        gpus=len(gpus),
        units=tuple(len(each) for each in counts),
        even=all(len(set(each.tolist())) == 1 for each in counts),
        gpu_type=cluster.types[int(cluster.gpu_type[gpus[0]])],
        sharers=sharers,
    )


def _lost(result: FleetResult) -> Float64:
    """Return (n,) seconds without progress beyond restarts: the work that failures undid, at speed 1 or more."""
    segments = _segments(result)
    restarts = np.bincount(segments.job, weights=segments.dead_ns, minlength=len(result.end_ns))
    rate = np.maximum(1.0, result.workload.max_gpus / result.workload.gpus)
    return (result.dead_ns - restarts) / SECOND * rate
