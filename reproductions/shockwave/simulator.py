"""The round scheduler of the Shockwave study (NSDI 2023) as it ran on 32 real GPUs, to be held against those runs.

Sources: uw-mad-dash/shockwave 8a44f4a, scheduler/scheduler.py and scheduler/policies (MIT); fleet-lessons.md 5.1, 5.3.
Every constant is the published one but two, which were chosen by leaving out one of the real runs at a time (see
`make reproduce NAME=shockwave`): `decide` = ahead instead of boundary, and a restart of 24 s instead of the 20 s of the
published simulator. Time is whole rounds of `round_s` on fixed boundaries.

A round: jobs submitted so far take part. If jobs came, left or changed their batch size since shares were computed,
the policy computes them again, and accounts are reset if that was `reset_s` ago: a job's deficit grows by share x time
since the last reset less what it received, and every job is credited half a round. Jobs are taken by (share over the
fraction of all time received, deficit, share), descending, ties by submission, as long as they fit, those of no share
too. A job that was not in the round before, or that stopped at a change of batch size, pays `restart_s` first. At a
change it stops until the next round (`wait` = change); the published simulator lets it go on (`wait` = none). Whoever
ends inside a round leaves its GPUs idle to the boundary. Only numbers of GPUs count (92 of the 120 jobs use one).

That is `decide` = boundary. `decide` = ahead, the default, goes by the clock of the published program on a real
cluster: a round is decided half a round before it begins; processes of newcomers start where GPUs of their nodes are
free, from then on; a job that other jobs push to other GPUs restarts; a process that ends is credited all it received,
also from before the last reset.

`predict` repeats a run with what nobody knows drawn anew. One of the study's three real runs was slow: it reports 11.5
instead of 2 % more GPU time than its jobs need, for reasons that no rule knows, and its jobs took 12 % longer. The
range of a prediction therefore reaches to runs whose jobs all take `SLOW` times as long.

Left out of both: the limit of 1.5 times the expected run time, after which the study removes a job; seconds that real
rounds last too long; arrivals that are looked for every 10 s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet.cluster import parse_cluster
from foretrace.fleet.result import FleetResult, Segments
from foretrace.fleet.workload import Float64, Int64, Workload, nanoseconds
from reproductions.results import simple
from reproductions.shockwave.market import Market, Settings
from reproductions.shockwave.policies import ALIASES, make
from reproductions.shockwave.profile import RECORDED, Job, profiles, read_results, rows_of
from reproductions.shockwave.rounds import FOREVER, Chooser, Fleet, Rules, Runs, Shares, simulate

OPTIONS = (
    "profiles", "profile", "leave_out", "round_s", "restart_s", "reset_s", "wait", "alpha", "leftover", "decide",
    "slower", "runs",
    *(f"market_{key}" for key in Settings.names()),
)  # fmt: skip
CHOICES = {"wait": ("change", "none"), "leftover": ("centre", "raise"), "decide": ("ahead", "boundary")}
SLOW = 1.10  # times that a slow run takes over what its jobs need, less what normal runs do
LATE_S = 20.0  # after which a real cluster has noticed an arrival, at most
RUN_TIMES = 0.03  # standard deviation of the logarithm of a job's run time from one run to the next
RESTART_S = 3.0  # that restarts differ by, up and down
RULES = 0.02  # relative error of the rules themselves: what two simulations of the study differ by
RUNS = 12  # of a prediction
NO_RANGE = (
    "one run has no interval, and one of the study's three real runs was 12 % longer for reasons that no rule knows: "
    "--option runs=12 gives a range that covers such a run"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Median, and the 80 % range that covers a slow run."""

    mid: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What several runs say together. jct_s: (n,) median completion time per job, in the order of the log."""

    jct_s: Float64
    mean_jct_s: Range
    makespan_s: Range
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Study:
    """One question: which jobs, by which rules."""

    workload: Workload
    policy: str  # as it is known
    rules: Rules
    jobs: list[Job]
    options: Mapping[str, str]
    facts: dict[str, Any]


class Shockwave:
    """The study's scheduler.

    Options: profiles (file of recorded results), profile (recorded, steps, duration), leave_out (the policy whose
    recorded results are not used for run times; by default the one that runs), round_s, restart_s, reset_s,
    wait (change, none), decide (ahead, boundary), leftover (centre, raise: see `settled`), alpha (of allox), market_*
    (of shockwave, see `Settings`), slower (times that every job takes as long as alone), runs (that many more, drawn
    as `predict` does, for a sentence with a range among the facts).
    """

    name = "shockwave"
    policies: tuple[str, ...] = (
        "allox", "finish_time_fairness", "max_min_fairness", "gandiva_fair", "min_total_duration",
        "max_sum_throughput_perf", "shockwave", "isolated", "isolated_plus", *ALIASES,
    )  # fmt: skip
    default_cluster = "8x4"

    def run(
        self, workload: Workload, *, policy: str, cluster: str, seed: int, options: Mapping[str, str]
    ) -> FleetResult:
        """Simulate; `seed` is not used, nothing here is drawn. facts: where run times come from, rounds, settings.

        Run times are by default those of recorded results beside the log, of other policies than this one; else the
        log's own. Raises ForetraceError for an unknown policy, cluster or option, and for results that cannot be read.
        """
        study = self._study(workload, policy, cluster, options)
        runs = _number(options, "runs", 0, 0)
        if runs != int(runs):
            raise ForetraceError(f"option runs={options['runs']} must be a whole number.")
        said = (
            self.predict(workload, policy=policy, cluster=cluster, seed=seed, options=options, runs=int(runs)).why
            if runs
            else NO_RANGE
        )
        done, facts = _play(study)
        never = workload.gpus > study.rules.gpus
        return _result(
            workload, done, study.rules, never, facts | {"rules": study.rules, "range": said}, policy, cluster
        )

    def predict(
        self, workload: Workload, *, policy: str, cluster: str, seed: int, options: Mapping[str, str], runs: int = RUNS
    ) -> Prediction:
        """Play so many runs with what nobody knows drawn anew, each once as it is and once as a slow run.

        Drawn are when arrivals are noticed (0 to `LATE_S` late), run times (`RUN_TIMES`), and restarts (`RESTART_S` up
        or down). Medians are of the normal runs; ranges go from their 10 % quantile to the 90 % quantile of the slow
        ones, and `RULES` beyond on both sides. Raises as `run`, and ForetraceError for fewer than two runs.
        """
        if runs < 2:
            raise ForetraceError(f"{runs} runs give no range; take 2 or more.")
        study = self._study(workload, policy, cluster, options)
        random, n = np.random.default_rng(seed), len(workload)
        if not n or (workload.gpus > study.rules.gpus).any():
            raise ForetraceError("a range needs jobs that all fit the cluster; leave the others out.")
        normal, slow = list[Float64](), list[Float64]()
        for _ in range(runs):
            times = np.exp(random.normal(0.0, RUN_TIMES, n))
            late = random.uniform(0.0, LATE_S, n)
            restart_s = max(study.rules.restart_s + random.uniform(-RESTART_S, RESTART_S), 0.0)
            rules = replace(study.rules, restart_s=min(restart_s, study.rules.round_s - 1e-3))
            for factor, found in ((1.0, normal), (SLOW, slow)):
                jobs = [job.taking(job.work_s * each * factor) for job, each in zip(study.jobs, times, strict=True)]
                done, _ = _play(replace(study, rules=rules, jobs=jobs), late)
                found.append(done.end - _submit_s(workload))
        submit = _submit_s(workload)
        mean = _range([float(each.mean()) for each in normal], [float(each.mean()) for each in slow])
        makespan = _range(
            [float((submit + each).max()) for each in normal], [float((submit + each).max()) for each in slow]
        )
        why = (
            f"80 % range of {runs} runs, arrivals up to {LATE_S:g} s late, run times ± {100 * RUN_TIMES:g} %, restarts "
            f"± {RESTART_S:g} s, up to slow ones whose jobs take {100 * (SLOW - 1):.0f} % longer, as one of the "
            f"study's three did: mean completion {mean.low:,.0f} to {mean.high:,.0f} s, makespan "
            f"{makespan.low:,.0f} to {makespan.high:,.0f} s"
        )
        return Prediction(jct_s=np.median(normal, axis=0), mean_jct_s=mean, makespan_s=makespan, why=why)

    def _study(self, workload: Workload, policy: str, cluster: str, options: Mapping[str, str]) -> _Study:
        known = policy.lower()
        known = ALIASES.get(known, known)
        if known not in self.policies:
            raise ForetraceError(f"shockwave has no policy {policy!r}; choose one of {', '.join(self.policies)}.")
        for key in options:
            if key not in OPTIONS:
                raise ForetraceError(f"shockwave has no option {key!r}; there are {', '.join(OPTIONS)}.")
        for key, among in CHOICES.items():
            if options.get(key, among[0]) not in among:
                raise ForetraceError(f"option {key}={options[key]} is unknown; write one of {', '.join(among)}.")
        tree = parse_cluster(cluster)
        rules = Rules(
            round_s=_number(options, "round_s", 120.0, 1.0), restart_s=_number(options, "restart_s", 24.0, 0.0),
            reset_s=_number(options, "reset_s", 1000.0, 0.0), stops=options.get("wait", "change") == "change",
            gpus=tree.gpus, per_node=tree.per_node, ahead=options.get("decide", "ahead") == "ahead",
            strict=known == "isolated_plus",
        )  # fmt: skip
        if rules.restart_s >= rules.round_s:
            raise ForetraceError(
                f"a restart of {rules.restart_s:g} s in rounds of {rules.round_s:g} s leaves jobs no time to"
                " progress; make round_s longer."
            )
        jobs, facts = profiles(
            workload,
            kind=options.get("profile", ""),
            path=options.get("profiles", ""),
            without=options.get("leave_out", known),
        )
        slower = _number(options, "slower", 1.0, 1e-3)
        jobs = [job.taking(job.work_s * slower) for job in jobs] if slower != 1 else jobs
        return _Study(workload=workload, policy=known, rules=rules, jobs=jobs, options=options, facts=facts)


def _submit_s(workload: Workload) -> Float64:
    """(n,) seconds after the first arrival."""
    found: Float64 = (workload.submit_ns - (workload.submit_ns[0] if len(workload) else 0)) * 1e-9
    return found


def _play(study: _Study, late_s: Float64 | None = None) -> tuple[Runs, dict[str, Any]]:
    """All rounds, with arrivals noticed so much later than they are; and facts of the policy."""
    rules, options, n = study.rules, study.options, len(study.workload)
    facts = dict(study.facts)
    if study.policy == "shockwave":
        settings = Settings.of(rules.gpus, {k[7:]: v for k, v in options.items() if k.startswith("market_")})
        chooser: Chooser = Market(settings, rules.gpus, rules.round_s)
        facts["market"] = settings
    else:
        policy = make(study.policy, _number(options, "alpha", 0.2, 0.0), options.get("leftover", "centre"))
        chooser = Shares(policy, rules, n)
    submit = _submit_s(study.workload) + (0.0 if late_s is None else late_s)
    fleet = Fleet(list(study.jobs), study.workload.gpus, submit, epoch=[0.0] * n, phase=[0] * n)
    queue = np.flatnonzero(study.workload.gpus <= rules.gpus)
    return simulate(fleet, chooser, rules, queue[np.argsort(submit[queue], kind="stable")].tolist()), facts


def _range(normal: list[float], slow: list[float]) -> Range:
    return Range(
        mid=float(np.median(normal)),
        low=float(np.quantile(normal, 0.1)) / (1 + RULES),
        high=float(np.quantile(slow, 0.9)) * (1 + RULES),
    )


def _number(options: Mapping[str, str], key: str, default: float, least: float) -> float:
    try:
        value = float(options.get(key, default))
    except ValueError:
        value = float("nan")
    if not least <= value < FOREVER:
        raise ForetraceError(f"option {key}={options[key]} must be a number from {least:g} on.")
    return value


def _result(
    workload: Workload, runs: Runs, rules: Rules, never: Any, facts: dict[str, Any], policy: str, cluster: str
) -> FleetResult:
    n = len(workload)
    first = float(workload.submit_ns[0]) * 1e-9 if n else 0.0

    def clock(seconds: Float64) -> Int64:
        return np.where(seconds < 0, -1, nanoseconds(np.maximum(seconds, 0.0) + first))

    table = np.array(sorted(runs.rows, key=lambda row: row[1])).reshape(-1, 3)
    which = table[:, 0].astype(np.int64)
    took = table[:, 2] - table[:, 1]
    dead = np.minimum(took, rules.restart_s)
    start = np.full(n, -1.0)
    start[which[::-1]] = table[::-1, 1]
    held = np.bincount(which, took, n)
    segments = Segments(
        job=which, start_ns=clock(table[:, 1]), end_ns=clock(table[:, 2]), gpus=workload.gpus[which],
        level=np.zeros(len(which), np.int64), dead_ns=nanoseconds(dead),
        offset=np.zeros(len(which) + 1, np.int64), devices=np.zeros(0, np.int64),
    )  # fmt: skip
    return simple(
        workload, policy=policy, cluster=cluster, gpus=rules.gpus, start_ns=clock(start), end_ns=clock(runs.end),
        held_ns=nanoseconds(held), gpu_ns=held * 1e9 * workload.gpus,
        dead_ns=nanoseconds(np.bincount(which, dead, n)), starts=np.bincount(which, minlength=n).astype(np.int64),
        preempted=runs.preempted, never=np.asarray(never), segments=segments,
        facts=facts | {"rounds": runs.rounds, "moved": runs.moved, "segments": "numbers of GPUs only"},
        events=runs.rounds,
    )  # fmt: skip


def compare(result: FleetResult, recorded: Mapping[str, Any]) -> dict[str, float]:
    """How far a result is from a recorded run of the same jobs; errors are simulated / recorded − 1.

    recorded: `jct_list` (n,) s, `makespan` s (by default that of the jobs). jct: of the mean; makespan: against last
    (arrival + JCT) less first arrival of the recorded jobs; makespan_field: against the recorded number; discrepancy:
    recorded number / recomputed − 1 (fleet-lessons.md 5.3); per_job: median |error| of JCT; per_job_log: root of the
    mean squared log(simulated / recorded). In the study the number of finish_time_fairness is an hour short: the
    clocks went back during that run, and the study's own comparison adds 3,600 s
    (scheduler/reproduce/analyze_fidelity.py). Raises ForetraceError where the jobs are not as many.
    """
    took = np.asarray(recorded["jct_list"], float)
    if len(took) != len(result.workload):
        raise ForetraceError(
            f"the recorded run has {len(took):,} jobs and the result {len(result.workload):,}; compare the same jobs."
        )
    took = took[rows_of(result.workload)]
    submit = result.workload.submit_ns * 1e-9
    makespan = float((submit + took).max() - submit.min())
    said, ours = float(recorded.get("makespan", makespan)), result.jct_s
    return {
        "jct": float(ours.mean() / took.mean() - 1),
        "makespan": result.makespan_s / makespan - 1,
        "makespan_field": result.makespan_s / said - 1,
        "discrepancy": said / makespan - 1,
        "per_job": float(np.median(np.abs(ours / took - 1))),
        "per_job_log": float(np.sqrt(np.mean(np.log(ours / took) ** 2))),
    }


def recorded_runs(path: str | Path) -> dict[str, Any]:
    """Recorded results by `run|policy|kind`, of a file or the folder it lies in; raises ForetraceError without."""
    file = Path(path)
    found = read_results(file / RECORDED if file.is_dir() else file)
    if isinstance(found, str):
        raise ForetraceError(f"{found}; name the recorded results of the study.")
    return found
