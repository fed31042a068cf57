"""The published Pollux simulator, round by round, so that its answers can be had exactly.

Source of the mechanism: petuum/adaptdl, branch osdi21-artifact, simulator (Pollux, OSDI'21); oracles in
fleet-scheduling.md 7.2. Time is whole seconds. Every 60 s all jobs advance with what they hold, then the policy decides
for all submitted, unfinished jobs. A changed allocation, also the first, makes no progress for 30 s.

Progress per second = gain of the total batch / seconds per step, both measured (`Profiles`). An epoch ends when
progress reaches the least over all validated batch sizes; the crossing takes a whole number of seconds, rounded half to
even; a job is complete after the last epoch that every batch size was trained for.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet.cluster import ClusterTree, parse_cluster
from foretrace.fleet.pollux.profiles import Profiles
from foretrace.fleet.result import FleetResult, Segments
from foretrace.fleet.workload import SECOND, Workload
from reproductions.pollux.policies import PAUSE_S, Allocations, Job, Optimus, Policy, Tiresias
from reproductions.results import simple

_LONGEST_S = 20 * 365 * 86_400  # a simulation that has not ended by then never will
_OPTIONS = ("profiles", "interval", "generations", "population")


class PolluxSimulator:
    """Simulates a `pollux` workload: jobs of profiled applications on nodes of equal GPUs.

    Options: `profiles`, the folder of profiles (default: a folder `profiles` beside the trace's folder or its parent);
    `interval`, seconds per round (60); for policy pollux also `generations` and `population` of its search.
    """

    name = "pollux"
    policies: tuple[str, ...] = ("tiresias", "optimus", "pollux")
    default_cluster = "16x4"

    def run(
        self, workload: Workload, *, policy: str, cluster: str, seed: int, options: Mapping[str, str]
    ) -> FleetResult:
        """Play the workload to its end.

        Raises ForetraceError for an unknown policy or option, a cluster or profile that cannot be used, and jobs whose
        application or batch size is not profiled. Jobs that ask for more GPUs than there are never start.
        """
        unknown = sorted(set(options) - set(_OPTIONS))
        if unknown:
            raise ForetraceError(f"simulator pollux has no option {unknown[0]!r}; it has {', '.join(_OPTIONS)}.")
        if policy not in self.policies:
            raise ForetraceError(f"simulator pollux has no policy {policy!r}; it has {', '.join(self.policies)}.")
        tree = parse_cluster(cluster or self.default_cluster)
        if len(tree.types) > 1:
            raise ForetraceError(
                f"cluster {tree.name!r} has several kinds of GPU, and profiles were measured on one; name one kind."
            )
        folder = profiles_of(workload, options)
        profiles = Profiles(folder)
        interval = whole(options, "interval", 60)
        rounds = _Rounds(workload, tree, profiles, _policy(policy, seed, options), policy)
        rounds.play(interval)
        return rounds.result(policy, cluster or self.default_cluster, {"profiles": str(folder), "interval_s": interval})


def whole(options: Mapping[str, str], key: str, default: int) -> int:
    """An option as a whole number above zero; raises ForetraceError where it is none."""
    text = options.get(key, str(default)).strip()
    if not text.isdecimal() or int(text) < 1:
        raise ForetraceError(f"option {key} must be a whole number above zero, not {text!r}.")
    return int(text)


def profiles_of(workload: Workload, options: Mapping[str, str]) -> Path:
    """The folder of profiles: as given, else a folder `profiles` beside the trace's folder or its parent."""
    if "profiles" in options:
        return Path(options["profiles"])
    source = Path(workload.origin.path) if workload.origin.path else None
    for folder in (source.parent, source.parent.parent) if source else ():
        if (folder / "profiles").is_dir():
            return folder / "profiles"
    where = f"near {source}" if source else "as the workload was not read from a file"
    raise ForetraceError(f"found no folder of profiles {where}; give it as option profiles=FOLDER.")


def _policy(name: str, seed: int, options: Mapping[str, str]) -> Policy:
    if name == "pollux":
        from reproductions.pollux.search import Pollux

        generations, population = (whole(options, key, 100) for key in ("generations", "population"))
        return Pollux(seed=seed, generations=generations, population=population)
    for key in ("generations", "population"):
        if key in options:
            raise ForetraceError(f"option {key} belongs to policy pollux; leave it out with {name}.")
    return Tiresias() if name == "tiresias" else Optimus()


class _Rounds:
    """The state of one simulation."""

    def __init__(
        self, workload: Workload, tree: ClusterTree, profiles: Profiles, policy: Policy, policy_name: str
    ) -> None:
        self.workload, self.tree, self.policy = workload, tree, policy
        self.nodes = np.diff(tree.starts[0]).tolist()
        self.never = np.zeros(len(workload), bool)
        if policy_name == "tiresias":  # the others choose the number of GPUs themselves
            self.never = workload.gpus > tree.gpus
        self.jobs: list[Job] = []
        for at in np.flatnonzero(~self.never).tolist():
            app = profiles.application(str(workload.model[at]))
            job = Job(
                at=at,
                app=app,
                submit_s=float(workload.submit_ns[at]) / SECOND,
                gpus=int(workload.gpus[at]),
                batch=self._batch(at) if policy_name != "pollux" else 0,
            )
            if policy_name == "tiresias":
                self._check_batch(job, job.gpus)
            elif policy_name == "optimus":
                self._check_batch(job, 1)
            self.jobs.append(job)
        n = len(workload)
        self.start = np.full(n, -1, np.int64)
        self.held_s, self.dead_s = np.zeros(n, np.int64), np.zeros(n, np.int64)
        self.preempted = np.zeros(n, np.int64)
        self.segments: list[list[int]] = []  # job, start, end, GPUs, level, dead; seconds
        self.open: dict[int, int] = {}  # job -> its segment under way
        self.rounds = 0

    def _batch(self, at: int) -> int:
        batch = float(self.workload.batch[at])
        if not (batch >= 1 and batch.is_integer()):
            raise ForetraceError(
                f"job {self.workload.job[at]!r} has no whole batch size, which this policy needs; "
                "add the column batch_size or use policy pollux."
            )
        return int(batch)

    def _check_batch(self, job: Job, gpus: int) -> None:
        """Refuse before the start what would fail on the way."""
        try:
            job.app.neighbours(job.batch)
        except ForetraceError as error:
            raise ForetraceError(f"job {self.workload.job[job.at]!r}: {error}") from None
        if job.batch < gpus * job.app.min_local:
            raise ForetraceError(
                f"job {self.workload.job[job.at]!r}: a total batch of {job.batch} on {gpus} GPUs is less per GPU than "
                f"the {job.app.min_local} that {job.app.name} was profiled with; raise the batch or lower the GPUs."
            )

    def play(self, interval: int) -> None:
        """Until every job is complete."""
        now = 0
        held: Allocations = {}
        waiting = list(self.jobs)  # not yet submitted or not yet complete, in order of the workload
        while waiting:
            for job in waiting:
                if job.placement:
                    self._advance(job, now, interval)
            now += interval
            self.rounds += 1
            waiting = [job for job in waiting if job.end_s < 0]
            active = {job.at: job for job in waiting if job.submit_s <= now}
            if not active:
                continue
            held = {at: taken for at, taken in held.items() if at in active}
            given = self.policy.allocate(now, active, held, self.nodes)
            for at, job in active.items():
                if given.get(at) != held.get(at):
                    self._reallocate(job, given.get(at, []), now)
            held = given
            if now > _LONGEST_S:
                raise ForetraceError(
                    f"after {now:,} simulated seconds {len(active)} jobs are still not complete; use a larger cluster "
                    "or another policy."
                )

    def _advance(self, job: Job, now: int, interval: int) -> None:
        """One round of a job that holds GPUs, from `now` on."""
        app, gpus, policy = job.app, sum(job.placement), self.policy
        pause = min(job.pause_s, interval)
        job.pause_s -= pause
        self.dead_s[job.at] += pause
        self.segments[self.open[job.at]][5] += pause
        left = interval - pause
        while left > 0 and job.end_s < 0:
            passes = job.accumulation + 1
            batch = gpus * job.atomic * passes
            step, sync = app.step_seconds(job.placement, job.atomic)
            if policy.adapts:
                policy.observe(job, step, sync, *app.grad_stats(batch, job.epoch))
            rate = app.gain(batch, job.epoch) / (step + (step - sync) * job.accumulation)
            goal = app.ends[job.epoch]
            if job.progress + rate * left < goal:
                job.progress += rate * left
                left = 0
            else:
                took = round((goal - job.progress) / rate)
                job.epoch += 1
                job.progress = goal
                left -= took
                if job.epoch >= app.epochs:
                    job.end_s = now + interval - left
            if policy.adapts:
                job.atomic, job.accumulation = policy.split(job)
        used = interval - left if job.end_s >= 0 else interval
        job.service += used * gpus
        self.held_s[job.at] += used
        if job.end_s >= 0:
            self._close(job.at, job.end_s)

    def _close(self, at: int, now: int) -> None:
        self.segments[self.open.pop(at)][2] = now

    def _reallocate(self, job: Job, taken: list[int], now: int) -> None:
        if job.at in self.open:
            self._close(job.at, now)
            self.preempted[job.at] += not taken
        runs: list[int] = []
        for i, node in enumerate(taken):
            if i and node == taken[i - 1]:
                runs[-1] += 1
            else:
                runs.append(1)
        job.placement = tuple(runs)
        if not taken:
            return
        job.atomic, job.accumulation = self.policy.split(job)
        job.pause_s = PAUSE_S
        job.starts += 1
        if self.start[job.at] < 0:
            self.start[job.at] = now
        self.open[job.at] = len(self.segments)
        self.segments.append([job.at, now, -1, len(taken), self._level(taken), 0])

    def _level(self, taken: list[int]) -> int:
        if len(taken) == 1:
            return 0
        return 1 + self.tree.around([int(self.tree.starts[0][node]) for node in taken])

    def result(self, policy: str, cluster: str, facts: Mapping[str, object]) -> FleetResult:
        """What happened, in nanoseconds."""
        n = len(self.workload)
        end, starts, service = np.full(n, -1, np.int64), np.zeros(n, np.int64), np.zeros(n)
        for job in self.jobs:
            end[job.at], starts[job.at], service[job.at] = job.end_s, job.starts, job.service
        rows = np.array(self.segments, np.int64).reshape(-1, 6)
        return simple(
            self.workload,
            policy=policy,
            cluster=cluster,
            gpus=self.tree.gpus,
            start_ns=_ns(self.start),
            end_ns=_ns(end),
            held_ns=self.held_s * SECOND,
            dead_ns=self.dead_s * SECOND,
            gpu_ns=service * SECOND,
            starts=starts,
            preempted=self.preempted,
            never=self.never,
            segments=Segments(
                job=rows[:, 0], start_ns=rows[:, 1] * SECOND, end_ns=rows[:, 2] * SECOND, gpus=rows[:, 3],
                level=rows[:, 4], dead_ns=rows[:, 5] * SECOND, offset=np.zeros(len(rows) + 1, np.int64),
                devices=np.zeros(0, np.int64),
            ),
            facts={**facts, **getattr(self.policy, "facts", {})},
            events=self.rounds,
        )  # fmt: skip


def _ns(seconds: np.ndarray[tuple[int], np.dtype[np.int64]]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Whole seconds as nanoseconds, −1 kept."""
    return np.where(seconds < 0, -1, seconds * SECOND)
