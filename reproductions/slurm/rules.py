"""Small adversarial workloads, one per rule, for a private Slurm of 8 nodes × 2 GPUs below two leaf switches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from foretrace.fleet.policies import parse
from foretrace.fleet.policies.slurm import SlurmPolicy
from foretrace.fleet.policies.slurm_options import NodeWindow, tasks_of
from foretrace.fleet.rig import against
from foretrace.fleet.rig.against import RigErrors
from foretrace.fleet.rig.cluster import SlurmSetup, private
from foretrace.fleet.rig.play import for_rig, play, slurm_setup
from foretrace.fleet.workload import SECOND, Workload
from reproductions.slurm.runs import compared, keep, pace, ran_of, stored

RUNS = Path(__file__).parent / "rules.jsonl.gz"

SETUP = SlurmSetup(nodes=8, gpus=2, racks=2)
_QUICK = "bf_interval=3,bf_resolution=1,batch_sched_delay=0,sched_interval=3"


class Rule(NamedTuple):
    """A rule that a workload is made for, the policy, and what happens to nodes."""

    name: str
    policy: str
    jobs: Workload
    failures: tuple[NodeWindow, ...] = ()


def _drawn(count: int, seed: int, span_s: float, run_s: tuple[int, int], limits_s: Sequence[int]) -> Workload:
    random = np.random.default_rng([seed, 0x72756C])
    return Workload.of(
        submit_s=np.sort(random.integers(0, int(span_s), count)), gpus=random.choice([1, 2, 4, 8], count),
        work_s=random.integers(*run_s, count).astype(float), estimate_s=random.choice(limits_s, count).astype(float),
        model=random.choice(["one", "two", "three"], count),
    )  # fmt: skip


def rules() -> dict[str, Rule]:
    """All of them by name."""
    fails = (NodeWindow(0, 0, 12.0, 40.0), NodeWindow(5, 5, 20.0, 30.0), NodeWindow(3, 3, 25.0))
    late = _drawn(20, 1, 60, (20, 100), (60,))
    chain = _drawn(24, 2, 25, (3, 12), (60, 120))
    random = np.random.default_rng(3)
    waits = [""] * 6
    for at in range(6, len(chain)):
        first, second = random.choice(at, 2, replace=False).tolist()
        kind = random.integers(4)
        waits.append(("", f"afterok:{first}", f"afterany:{first}:{second}", "singleton")[kind])
    above = _drawn(12, 4, 10, (70, 90), (60, 120))
    after = ["", "", "", "", *(f"afterany:{at}" for at in range(8))]
    weighed = _drawn(40, 5, 80, (4, 20), (60, 120))
    found = (
        Rule("TIMEOUT", f"fifo slurm={_QUICK}", late),
        Rule("TIMEOUT, backfill", f"backfill slurm={_QUICK}", late),
        Rule("node down", f"backfill slurm={_QUICK}", _drawn(20, 6, 30, (5, 25), (60, 120)), fails),
        Rule("dependencies", f"backfill slurm={_QUICK}", _with(chain, waits)),
        Rule("afterany of TIMEOUT", f"backfill slurm={_QUICK}", _with(above, after)),
        Rule("age and size", f"priority slurm={_QUICK} weights=age=1000,size=3000,max-age=2", weighed),
        Rule("size", f"priority slurm={_QUICK} weights=size=1000", weighed),
        *_arrays(),
        *_operated(),
        *_preempted(),
        *_accounted(),
    )
    return {each.name: each._replace(jobs=for_rig(each.jobs, SETUP, 1.0)) for each in found}


def _with(jobs: Workload, dependency: Sequence[str]) -> Workload:
    return _told(jobs, dependency=dependency)


def _told(jobs: Workload, **columns: Iterable[str]) -> Workload:
    """The jobs with columns as sbatch has them."""
    return replace(jobs, details={name: np.array(list(texts), object) for name, texts in columns.items()})


def _arrays() -> list[Rule]:
    """Tasks of unequal lengths, of arrays that run two or four at a time, between other jobs."""
    single = _drawn(12, 7, 40, (5, 25), (60, 120))
    specs = ["0-9%2", "", "1-7:2", "", "0-11%4", "", "", "2,4,9", "", "", "0-5", ""]
    tasks = tasks_of(_told(single, array=specs))
    random = np.random.default_rng(7)
    tasks = tasks.with_columns(work_s=random.integers(4, 20, len(tasks)).astype(float))
    after = ["" if not name else "afterany:4" if name == "10" else "" for name in tasks.details["array_of"]]
    late = replace(tasks, details={**tasks.details, "dependency": np.array(after, object)})
    return [
        Rule("arrays", f"backfill slurm={_QUICK}", tasks), Rule("arrays, no backfill", f"fifo slurm={_QUICK}", tasks),
        Rule("afterany of an array", f"backfill slurm={_QUICK}", late),
    ]  # fmt: skip


def _operated() -> list[Rule]:
    """Nodes that are drained and come back; maintenance of a part and of all, which short limits fit before."""
    jobs, other = (_drawn(28, seed, 60, (8, 30), (60, 120)) for seed in (8, 14))
    return [
        Rule("drain and resume", f"backfill slurm={_QUICK} drain=0-2@8-50,5@20-70,7@30", jobs),
        Rule("drain, other jobs", f"backfill slurm={_QUICK} drain=1@10-60,4-6@15-45,0@70-90", other),
        Rule("reservation of half", f"backfill slurm={_QUICK} reservation=0-3@70-110", jobs),
        Rule("reservation of all", f"backfill slurm={_QUICK} reservation=0-7@75-100", jobs),
        Rule("reservation, no backfill", f"fifo slurm={_QUICK} reservation=4-7@70-110", jobs),
    ]


def _preempted() -> list[Rule]:
    """Long jobs of a low partition on all nodes, and short ones of a high one."""
    low, high = _drawn(14, 9, 15, (40, 70), (120,)), _drawn(8, 10, 50, (5, 15), (60,))
    both = Workload.of(
        submit_s=[*(low.submit_ns // SECOND), *(high.submit_ns // SECOND + 12)],
        gpus=[*low.gpus, *np.minimum(2 * high.gpus, 16)],
        work_s=[*low.work_s, *high.work_s], estimate_s=[*low.estimate_s, *high.estimate_s],
        tenant=["low"] * 14 + ["high"] * 8,
    )  # fmt: skip
    tiers = f"priority slurm={_QUICK} priority-tier=high=10,low=1"
    modes = ("requeue", "suspend")
    return [Rule(f"partition_prio, {mode}", f"{tiers} preempt-mode={mode}", both) for mode in modes]


def _accounted() -> list[Rule]:
    """What needs slurmdbd: priority of QOS; fair share of three users, one of them greedy."""
    jobs = _drawn(30, 11, 40, (6, 20), (60, 120))
    random = np.random.default_rng(11)
    few = jobs.with_columns(
        gpus=np.minimum(jobs.gpus, 4), user=random.choice(["ann", "bob", "eve"], 30, p=[0.25, 0.25, 0.5]).astype(object)
    )
    few = _told(few, qos=random.choice(["high", "low"], 30, p=[0.4, 0.6]))
    random.random(16)  # of a rule that is gone: what is drawn below stays as it was played
    shared = _drawn(44, 13, 100, (12, 30), (60,))
    greedy = np.array(["eve"] * 20 + random.choice(["ann", "bob", "eve"], 24).tolist(), object)
    return [
        Rule("QOS", f"priority slurm={_QUICK} weights=qos=1000 qos=high=10,low=1", few),
        Rule("fair share", f"priority slurm={_QUICK} weights=fairshare=10000", shared.with_columns(user=greedy)),
    ]


class RuleRow(NamedTuple):
    """A rule: errors of the simulation over its runs, and what the runs differ by (None of one)."""

    name: str
    policy: str
    jobs: int
    runs: int
    mean_jct_s: float
    simulated: RigErrors
    repeats: RigErrors | None


def play_rules(*, repeats: int, together: int, path: Path) -> None:
    """Play what the file does not have yet, so many at a time; each is kept when it is done."""
    have = {(each["rule"], each["repeat"]) for each in stored(path)}

    def one(rule: Rule, repeat: int) -> str:
        policy = _policy(rule)
        with private(slurm_setup(SETUP, policy)) as slurm:
            ran = play(slurm, rule.jobs, policy, failures=rule.failures)
        keep(path, {"rule": rule.name, "repeat": repeat}, ran)
        return f"{rule.name}, run {repeat + 1}"

    wanted = [(rule, at) for at in range(repeats) for rule in rules().values() if (rule.name, at) not in have]
    with ThreadPoolExecutor(together) as pool:
        for done in pool.map(lambda each: one(*each), wanted):
            print(done, flush=True)


def rule_rows(runs: Sequence[dict[str, Any]]) -> list[RuleRow]:
    """Simulate every stored run and compare, a row per rule."""
    found = []
    for rule in rules().values():
        mine, policy = [each for each in runs if each["rule"] == rule.name], _policy(rule)
        ran = [ran_of(each) for each in mine]
        paces = [pace(run, (other for other in runs if other["rule"] != rule.name)) for run in mine]
        if ran:
            made = compared(rule.jobs, SETUP, policy, ran, paces, failures=rule.failures)
            mean = float(np.mean([each.jct_s.mean() for each in ran]))
            found.append(RuleRow(rule.name, rule.policy, len(rule.jobs), len(ran), mean, made,
                                 against.between(ran, SETUP, policy)))  # fmt: skip
    return found


def _policy(rule: Rule) -> SlurmPolicy:
    made = parse(rule.policy)
    assert isinstance(made, SlurmPolicy)
    return made
