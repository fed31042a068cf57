"""`foretrace fleet`: many jobs on one cluster, questions about runs of them, workloads like one, and exports."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from foretrace import fleet as fleets
from foretrace import report
from foretrace.cli import options
from foretrace.cli.answers import Reply, Result, group, page_asked, writable
from foretrace.cli.fleet_options import COSTS, JOBS, LOG, Load, Played, Policies, Seed, following, plays
from foretrace.cli.fleet_slurm import live, rig
from foretrace.cli.options import argument, flag, option
from foretrace.errors import ForetraceError, refused
from foretrace.files import write_text

if TYPE_CHECKING:
    from foretrace.fleet.result import FleetResult
    from foretrace.fleet.scene import Spec


@plays(*JOBS, *COSTS, "policy", "cluster", "load", "seed", "checkpoint_gb", "storage_gb_s")
def run(
    spec: Spec,
    *,
    measure: str = option("", "A-B", "Means over these jobs only, by number."),
    out: Path | None = option(None, "FILE.csv", "Write a row per job, too."),
    grid: options.Grid = None,
) -> Reply:
    """Play a log of jobs on a cluster under a policy.

    Says completion times, waiting and its reasons, and how much of the cluster is used.

    Example: foretrace fleet run jobs.csv --cluster 2x4x8 --policy "dally lease-s=600" --out rows.csv
    """
    writable(out)
    made = fleets.scene.scene(spec)
    result = made.play(
        record="devices" if page_asked() or len(made.workload) <= fleets.scene.RECORD_UP_TO else "nothing"
    )
    tell_origin(result)
    only = fleets.scene.measured(measure, result.workload)
    other = "fifo" if spec.policy.split()[:1] == ["las"] else "las"
    next_ = following(["compare"], spec, {"policy": [spec.policy, other]}, also=["restart_s"])
    view = report.fleet.run(result, made.cluster, path=spec.trace, only=only, next_=next_, grid=grid)
    if out is not None:
        write_text(out, fleets.rows_by_job(result, only))
    page = report.fleet_page.FleetPage(view=view, result=result, cluster=made.cluster)
    return Reply(result=view, page=lambda: report.fleet_page.render(page))


def tell_origin(result: FleetResult) -> None:
    """Write rows that were refused, and what was read differently from what is written, on standard error."""
    origin = result.workload.origin
    if origin.refused:
        first = origin.refused[0]
        rows = f"{len(origin.refused):,} of {origin.rows:,} rows were left out"
        options.say(f"{rows}, the first at {first.where}: {first.why}")


@plays(*JOBS, "policy", "cluster", "seed", "restart_s")
def why(
    spec: Spec,
    job: str = argument(..., "JOB", "The job's name in the log."),
    at: float | None = option(None, "SECONDS", "The moment to show; by default where its longest wait begins."),
) -> Result:
    """Say why a job waits, and what would help.

    Names the binding constraint and who holds the GPUs, and plays changes that could let the job start sooner.

    Example: foretrace fleet why jobs.csv job150 --cluster 2x4x8 --policy fifo
    """
    made = fleets.scene.scene(spec)
    with options.progress("playing changes") as tell:
        found = fleets.ask.why(made, job, at_s=at, progress=tell)
    asked, named = ("whatif", "now") if found.asked else ("run", "policy")
    next_ = following([asked], spec, {named: spec.policy}, also=["seed", "restart_s"], then=found.asked)
    return report.fleet_questions.why(found, source=spec.trace, policy=spec.policy, cluster=spec.cluster, next_=next_)


@plays(*JOBS, *COSTS, "cluster", "load", "seed")
def whatif(
    spec: Spec,
    add_rack: int = option(0, "N", "More of the cluster's outermost units.", least=0),
    policy: str = option("", "NAME [KEY=VALUE ...]", "Another policy."),
    to_cluster: str = option("", "SHAPE|FILE", "Another cluster."),
    network: str = option("", "400Gbps", "Bandwidth per GPU between machines, at every level above."),
    to_load: float = option(0, "FACTOR", "Factor on the arrival rate."),
    now: str = option("fifo", "NAME [KEY=VALUE ...]", "The current policy."),
) -> Result:
    """Play the same jobs as it is, and with changes.

    Changes are more racks, another policy, another cluster, another network, another load.

    Example: foretrace fleet whatif jobs.csv --cluster 2x4x8 --now fifo --add-rack 2 --policy dally
    """
    spec = replace(spec, policy=now)
    changes = fleets.variants.changes(
        spec, add=add_rack, policy=policy, cluster=to_cluster, network=network, load=to_load
    )
    if not changes:
        raise ForetraceError("nothing would change; give --add-rack, --policy, --to-cluster, --network or --to-load.")
    after = replace(spec, **{name: value for change in changes.values() for name, value in change.items()})
    first, second = fleets.scene.scene(spec), fleets.scene.scene(after)
    further = ["compare", "--policy", now, "--policy", after.policy]
    if after.policy == now:  # one policy is compared with itself by nobody
        further = ["sweep", "--policy", now, "--set", "add=0,1,2", "--out", "sweep"]
    return report.fleet_questions.whatif(
        first.play(), second.play(), source=spec.trace, changes=list(changes), next_=following(further, spec, {}),
        words=(f"{now} on {first.cluster.name}", f"{after.policy} on {second.cluster.name}"),
    )  # fmt: skip


@plays(*JOBS, "policy", "cluster", "seed")
def slots(
    spec: Spec,
    size: list[int] | None = option(None, "GPUS", "Size of a job; repeat it.", least=1),
    at: float | None = option(None, "SECONDS", "The moment to show; by default the end."),
) -> Result:
    """Count jobs of a size for which there is room.

    Fragmentation in slots, at one moment and over time.

    Example: foretrace fleet slots jobs.csv --cluster 4x4x8 --size 8 --size 64 --at 86400
    """
    made = fleets.scene.scene(spec)
    next_ = following(["run"], spec, {"policy": spec.policy}, also=["seed"], then={"html": "fleet.html"})
    return report.fleet_questions.slots(
        made.play(record="devices"), made.cluster, sizes=size, at_s=at, path=spec.trace, next_=next_
    )


@plays(*JOBS, "cluster", "load", "restart_s", "restart_s_per_gpu")
def compare(
    spec: Spec,
    policy: Policies,
    *,
    seeds: int = option(20, "N", "Runs with shifted submissions.", least=1),
    jitter_s: float = option(60.0, "S", "How far submissions are shifted."),
    subtraces: int = option(0, "N", "Instead of seeds: N parts of the log, one by one.", least=0),
) -> Reply:
    """Compare policies on one log, with intervals.

    They are bootstrap intervals over repeated runs; what is within noise is said.

    Example: foretrace fleet compare jobs.csv --cluster 4x4x8 --policy fifo --policy las --policy dally --seeds 20
    """
    if len(set(policy)) < len(policy):
        raise ForetraceError("--policy names the same policy twice; compare different ones.")
    made = fleets.scene.scene(replace(spec, policy=policy[0]))
    runs = {text: replace(made, policy=fleets.policy_of(text)) for text in policy}
    parts, how = fleets.comparison.repetitions(made.workload, seeds, jitter_s, subtraces)
    with options.progress("playing policies") as tell:
        share = itertools.count(1)
        seen = (lambda *_: tell(next(share) / (len(runs) * len(parts)))) if tell is not None else (lambda *_: None)
        found = fleets.comparison.compare(
            {text: partial(fleets.scene.played, one) for text, one in runs.items()}, parts, how=how, seen=seen
        )
    view = report.fleet_policies.compare(
        found, path=spec.trace, cluster=made.cluster.name, gpus=made.cluster.gpus, jobs=len(made.workload),
        next_=following(["sweep"], spec, {"policy": policy}, then={"set": "load=0.5,1,2", "out": "sweep"}),
    )  # fmt: skip

    def page() -> str:
        first, *others = ((text, one.play(record="devices")) for text, one in runs.items())
        shown = report.fleet.run(first[1], made.cluster, path=spec.trace, repeated=found if len(parts) > 1 else None)
        whole = report.fleet_page.FleetPage(
            view=shown, result=first[1], cluster=made.cluster, others=dict(others), comparison=view
        )
        return report.fleet_page.render(whole)

    return Reply(result=view, page=page)


@plays(*JOBS)
def sweep(
    spec: Spec,
    policy: Policies,
    out: Path = option(..., "FOLDER", "Where cells are kept; a second call resumes."),
    set_: list[str] | None = option(
        None, "NAME=V,V", "Values to try, of load, restart-s, mtbf-h, add, speeds ...; repeat it.", "--set"
    ),
    cluster: list[str] | None = option(None, "SHAPE|FILE", "A cluster; repeat it. Default: 4x4x8."),
    seeds: int = option(1, "N", "Runs per cell.", least=1),
    jitter_s: float = option(60.0, "S", "How far a seed shifts submissions."),
    *,
    on: str = option("here", "here|ray", "This machine's cores, or a Ray cluster that sees --out."),
) -> Result:
    """Play every combination; a killed sweep continues.

    Combinations are of policies, clusters, values and seeds; a call that was killed resumes.

    Example: foretrace fleet sweep jobs.csv --policy fifo --policy las --set load=0.5,1,2 --seeds 5 --out sweep
    """
    clusters = cluster or [Played.cluster]
    by = fleets.variants.axes(spec, policy, clusters, set_ or [], seeds)
    with options.progress("playing cells") as tell:
        found = fleets.variants.sweep(
            spec, by, folder=out, jitter_s=jitter_s if seeds > 1 else 0.0, on=on, progress=tell
        )
    asked = ["compare", "--seeds", "20"] if len(policy) > 1 else ["run"]
    next_ = following(asked, replace(spec, cluster=clusters[0]), {"policy": policy})
    return report.fleet_policies.sweep(found, source=spec.trace, by=by, next_=next_)


@plays(*LOG)
def fit(
    spec: Spec,
    out: Path = option(..., "FILE.json", "Where the generator is kept."),
) -> Result:
    """Fit a generator of workloads to a log.

    It learns the rhythm, sweeps, sizes and durations by tenant.

    Example: foretrace fleet fit jobs.csv --out like-ours.json
    """
    made = fleets.fit_generator(fleets.workload_of(spec.trace, spec.format, salvage=spec.salvage))
    made.save(out)
    return report.fleet_policies.fit(made, path=spec.trace, stored=str(out))


def generate(
    generator: Path = argument(..., "GENERATOR", "What foretrace fleet fit wrote."),
    out: Path = option(..., "FILE.csv", "Where the jobs go."),
    jobs: int | None = option(None, "N", "Number of jobs.", least=1),
    days: float | None = option(None, "D", "Or the days of jobs to generate."),
    load: Load = 1.0,
    seed: Seed = 0,
) -> Result:
    """Generate a workload like a fitted one.

    It may be of any length and load.

    Example: foretrace fleet generate like-ours.json --jobs 10000 --load 1.5 --out more.csv
    """
    if (jobs is None) == (days is None):
        raise ForetraceError("say either --jobs or --days, how much to generate.")
    made = fleets.load_generator(generator).generate(jobs=jobs, days=days, load=load, seed=seed)
    fleets.write_csv(made, out)
    return report.fleet_policies.generate(made, stored=str(out))


@plays(*LOG, "policy", "cluster", "jobs")
def export(
    spec: Spec,
    to: str = option(..., "slurm|kueue|volcano|ray", "The scheduler to write for."),
    out: Path = option(..., "FOLDER", "Where the files go."),
    job: list[str] | None = option(None, "JOB", "Only this job; repeat it."),
    level: str = option("", "NAME", "Keep jobs inside one unit of it; default: as small as fits."),
    wait_s: float = option(math.inf, "S", "How long a job insists on it (the delay timer); inf: forever."),
    play: bool = flag("--play", "Take placements from a simulation of --policy."),
) -> Result:
    """Write decisions as a scheduler's own files.

    They are Slurm directives, Kueue and Volcano manifests, or placement groups of Ray.

    Example: foretrace fleet export jobs.csv --to slurm --level rack --wait-s 3600 --job job3 --out scripts
    """
    if job and len(set(job)) < len(job):
        raise ForetraceError("--job names the same job twice; write each once.")
    if spec.policy != "fifo" and not play:
        raise ForetraceError("--policy decides where jobs go only with --play; add it, or leave --policy out.")
    made = fleets.scene.scene(spec)
    result = made.play(record="devices") if play else None
    files = fleets.exported(
        made.workload, made.cluster, result, to=to, job=job or None, level=level or None, wait_s=wait_s
    )
    with refused(f"cannot write to {out}", "choose another folder"):
        out.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write_text(out / name, text)
    return report.fleet_policies.export(list(files), to=to, folder=str(out))


def policies() -> Result:
    """List scheduling policies with their parameters.

    Example: foretrace fleet policies
    """
    return report.fleet_policies.FleetPoliciesView(policies=fleets.described_policies())


fleet = group(
    "fleet", "Simulate logs of many jobs; ask why and what if.", run=run, compare=compare, why=why, whatif=whatif,
    slots=slots, sweep=sweep, fit=fit, generate=generate, export=export, live=live, policies=policies, rig=rig,
)  # fmt: skip
