"""What is played: one list of jobs whose length follows their placement, under three ways to ask for switches.

Dally's timers (arXiv 2401.16492) are `--switches=1@WAIT` of sbatch: a job insists on one leaf switch for so long, then
takes what there is. *Strict* never stops insisting, *spread* never insists. Everything else is the same: sched/backfill
on 16 nodes × 4 GPUs below four leaf switches. How long a job takes on which nodes is the simulator's closed form for
its model (`ClosedFormSpeeds`); on Slurm the job looks at its own list of nodes and sleeps as long as that says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from foretrace.fleet.cluster import ClusterTree
from foretrace.fleet.policies import parse
from foretrace.fleet.policies.slurm import SlurmPolicy
from foretrace.fleet.rig.cluster import SlurmSetup
from foretrace.fleet.rig.play import RigRun, for_rig, switches_of
from foretrace.fleet.setup import Costs
from foretrace.fleet.simulate import simulate
from foretrace.fleet.speeds import Shape
from foretrace.fleet.speeds.closed_form import ClosedFormSpeeds
from foretrace.fleet.workload import Float64, Workload

SETUP = SlurmSetup(nodes=16, gpus=4, racks=4)
RACK = SETUP.nodes // SETUP.racks
SPEEDS = ClosedFormSpeeds(bandwidth_gb_s=(300.0, 12.5, 2.0), levels=SETUP.tree.levels)  # node, rack, between racks
WAIT = "0:30"  # one and a half mean run times, as Dally's are one and two leases
_QUICK = "bf_interval=5,bf_resolution=1,batch_sched_delay=0,sched_interval=5,max_switch_wait=100000"
ARMS = {
    "strict": f"backfill slurm={_QUICK} switches=1",
    "timers": f"backfill slurm={_QUICK} switches=1@{WAIT}",
    "spread": f"backfill slurm={_QUICK}",
}
LOADS, SEEDS = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.25, 1.5), (0, 1, 2, 3, 4)
SPAN_S, RUN_S, LONGEST_S = 180.0, 20.0, 50.0
_SIZES = {1: 0.25, 4: 0.25, 8: 0.3, 16: 0.2}
_MODELS = ("AlexNet", "VGG11", "ResNet50", "ResNet18", "BERT-large")
_PHASES = 12  # simulations behind a range
LAUNCHES_S = (0.1, 0.8)  # what starting a job took in the kept runs of reproductions/slurm


def jobs(load: float, seed: int) -> Workload:
    """Poisson arrivals in three minutes, GPU-seconds of this share of the cluster if no job were ever slowed."""
    random = np.random.default_rng([seed, 0x736C])
    mean = sum(size * part for size, part in _SIZES.items())
    count = max(round(load * SPAN_S * SETUP.nodes * SETUP.gpus / (mean * RUN_S)), 8)
    gpus = random.choice(list(_SIZES), count, p=list(_SIZES.values()))
    work = np.clip(random.lognormal(np.log(RUN_S) - 0.18, 0.6, count), 3.0, LONGEST_S)
    made = Workload.of(
        submit_s=np.sort(random.uniform(0, SPAN_S, count)), gpus=gpus, work_s=work, model=random.choice(_MODELS, count)
    )
    slowest = [1 / min(speeds(made, job).values()) for job in range(count)]
    # a user asks for what the job may need where it is slowest
    return for_rig(made.with_columns(estimate_s=made.work_s * slowest * 1.2), SETUP, 1.0)


def speeds(workload: Workload, job: int) -> dict[str, float]:
    """Progress of a job by the nodes that it has in each rack, the largest first: "2", "1+1"."""
    gpus = int(workload.gpus[job])
    nodes = -(-gpus // SETUP.gpus)
    found = {}
    for parts in _partitions(nodes, RACK):
        if len(parts) <= SETUP.racks:
            shape = Shape(gpus, (nodes, len(parts), 1), even=len(set(parts)) == 1)
            found["+".join(map(str, parts))] = SPEEDS.speed(workload, job, shape).progress
    return found


def _partitions(count: int, most: int) -> Iterator[tuple[int, ...]]:
    if not count:
        yield ()
    for first in range(min(count, most), 0, -1):
        for rest in _partitions(count - first, first):
            yield (first, *rest)


def script(workload: Workload, job: int) -> str:
    """What the job does on Slurm: sleep as long as the table says of the nodes that it got."""
    cases = "\n".join(
        f"{parts}) exec sleep {workload.work_s[job] / speed:.3f} ;;" for parts, speed in speeds(workload, job).items()
    )
    return f"""#!/bin/sh
racks=$(echo "$SLURM_JOB_NODELIST" | awk '{{
    gsub(/[^0-9,-]/, "")
    count = split($0, ranges, ",")
    for (i = 1; i <= count; i++) {{
        ends = split(ranges[i], end, "-")
        for (node = end[1] + 0; node <= end[ends] + 0; node++) in_rack[int(node / {RACK})]++
    }}
    for (size = {RACK}; size > 0; size--)
        for (rack = 0; rack < {SETUP.racks}; rack++)
            if (in_rack[rack] == size) said = said (said == "" ? "" : "+") size
    print said
}}')
case "$racks" in
{cases}
esac
exit 3
"""


def launch_s(work: Workload, ran: RigRun) -> float:
    """Mean seconds that a job took beyond what its nodes make of its run time."""
    taken = []
    for job, nodes in enumerate(ran.nodes):
        parts = sorted(np.unique(np.array(nodes) // RACK, return_counts=True)[1].tolist(), reverse=True)
        sleeps = work.work_s[job] / speeds(work, job)["+".join(map(str, parts))]
        taken.append(max(ran.end_s[job] - ran.start_s[job] - sleeps, 0.0))
    return float(np.mean(taken))


class Outcome(NamedTuple):
    """What came of one list of jobs, simulated or played."""

    jct_s: float  # mean
    makespan_s: float
    spread: float  # part of the jobs on several nodes that lie below several leaf switches

    @classmethod
    def of(cls, work: Workload, jct_s: Float64, end_s: Float64, switches: Float64) -> Outcome:
        """From columns by job."""
        wide = work.gpus > SETUP.gpus
        return cls(float(jct_s.mean()), float(end_s.max()), float((switches[wide] > 1).mean()))


def policy(arm: str) -> SlurmPolicy:
    """The policy of an arm."""
    made = parse(ARMS[arm])
    assert isinstance(made, SlurmPolicy)
    return made


def simulated(work: Workload, arm: str, *, phase: int = 0, cluster: ClusterTree = SETUP.tree) -> Outcome:
    """One simulation before anything is played; what cannot be known then is drawn by `phase`: when the schedulers
    wake, and how long starting each job takes.
    """
    random = np.random.default_rng([phase, 0x7068])
    decides = replace(policy(arm), background_s=float(-random.uniform(0, 1)), backfill_s=float(-random.uniform(0, 5)))
    least, most = LAUNCHES_S
    costs = Costs(restart_s=least, first_start=True)
    longer = work.with_columns(work_s=work.work_s + random.uniform(0, most - least, len(work)))
    made = simulate(longer, cluster, decides, speeds=SPEEDS, costs=costs, record="devices")
    assert made.segments is not None
    switches = np.zeros(len(work))
    for at, job in enumerate(made.segments.job.tolist()):
        switches[job] = switches_of(made.segments.devices_of(at) // SETUP.gpus, SETUP)
    return Outcome.of(work, made.jct_s, made.end_ns / 1e9, switches)


def predicted(work: Workload, arm: str) -> list[Outcome]:
    """Simulations over what cannot be known before."""
    return [simulated(work, arm, phase=phase) for phase in range(_PHASES)]


class Level(NamedTuple):
    """What the simulator says of a load: mean JCT per arm and seed."""

    load: float
    jct_s: Float64  # (seeds, arms)

    @property
    def gaps(self) -> Float64:
        """(seeds,) the slowest arm over the fastest one, less 1."""
        return np.asarray(self.jct_s.max(axis=1) / self.jct_s.min(axis=1) - 1)


def levels(loads: Sequence[float] = LOADS, seeds: Sequence[int] = SEEDS) -> list[Level]:
    """What is simulated to choose what is played."""
    return [
        Level(load, np.array([[simulated(jobs(load, seed), arm).jct_s for arm in ARMS] for seed in seeds]))
        for load in loads
    ]


def chosen(found: Sequence[Level], seeds: Sequence[int] = SEEDS) -> dict[str, tuple[float, int]]:
    """Load and seed where the arms are farthest apart, by their mean over seeds and then by seed; and the largest load
    at which no seed tells them apart by 1 %. *second*: the same load with the seed that comes next.
    """
    most = max(found, key=lambda each: float(each.gaps.mean()))
    least = max((each for each in found if each.gaps.max() < 0.01), key=lambda each: each.load)
    second, first = (seeds[int(at)] for at in np.argsort(most.gaps)[-2:])
    return {"largest": (most.load, first), "none": (least.load, first), "second": (most.load, second)}
