"""`foretrace fleet fit`, `generate`, `export`, `policies`: workloads like one, decisions as files of schedulers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretrace.cli.fleet_options import LOG, Load, Seed, plays
from foretrace.errors import ForetraceError

if TYPE_CHECKING:
    from foretrace.fleet.scene import Spec
    from foretrace.report.views import Result


@plays(*LOG)
def fit(
    spec: Spec,
    out: Annotated[Path, typer.Option("--out", metavar="FILE.json", help="Where the generator is kept.")],
) -> Result:
    """Fit a generator of workloads to a log.

    It learns the rhythm, sweeps, sizes and durations by tenant.

    Example: foretrace fleet fit jobs.csv --out like-ours.json
    """
    from foretrace.fleet.scene import workload_of
    from foretrace.fleet.synthetic import fit as fitted
    from foretrace.report import fleet_policies as report

    made = fitted(workload_of(spec.trace, spec.format, salvage=spec.salvage))
    made.save(out)
    return report.fit(made, path=spec.trace, stored=str(out))


def generate(
    generator: Annotated[Path, typer.Argument(metavar="GENERATOR", help="What foretrace fleet fit wrote.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE.csv", help="Where the jobs go.")],
    jobs: Annotated[int | None, typer.Option("--jobs", metavar="N", min=1, help="Number of jobs.")] = None,
    days: Annotated[float | None, typer.Option("--days", metavar="D", help="Or the days of jobs to generate.")] = None,
    load: Load = 1.0,
    seed: Seed = 0,
) -> Result:
    """Generate a workload like a fitted one.

    It may be of any length and load.

    Example: foretrace fleet generate like-ours.json --jobs 10000 --load 1.5 --out more.csv
    """
    from foretrace.fleet.formats import write_csv
    from foretrace.fleet.synthetic import load_generator
    from foretrace.report import fleet_policies as report

    if (jobs is None) == (days is None):
        raise ForetraceError("say either --jobs or --days, how much to generate.")
    made = load_generator(generator).generate(jobs=jobs, days=days, load=load, seed=seed)
    write_csv(made, out)
    return report.generate(made, stored=str(out))


@plays(*LOG, "policy", "cluster", "jobs")
def export(
    spec: Spec,
    to: Annotated[str, typer.Option("--to", metavar="slurm|kueue|volcano|ray", help="The scheduler to write for.")],
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where the files go.")],
    job: Annotated[list[str] | None, typer.Option("--job", metavar="JOB", help="Only this job; repeat it.")] = None,
    level: Annotated[
        str, typer.Option("--level", metavar="NAME", help="Keep jobs inside one unit of it; default: as small as fits.")
    ] = "",
    wait_s: Annotated[
        float,
        typer.Option("--wait-s", metavar="S", help="How long a job insists on it (the delay timer); inf: forever."),
    ] = math.inf,
    play: Annotated[bool, typer.Option("--play", help="Take placements from a simulation of --policy.")] = False,
) -> Result:
    """Write decisions as a scheduler's own files.

    They are Slurm directives, Kueue and Volcano manifests, or placement groups of Ray.

    Example: foretrace fleet export jobs.csv --to slurm --level rack --wait-s 3600 --job job3 --out scripts
    """
    from foretrace.files import write_text
    from foretrace.fleet import scene
    from foretrace.fleet.export import export as exported
    from foretrace.report import fleet_policies as report

    if job and len(set(job)) < len(job):
        raise ForetraceError("--job names the same job twice; write each once.")
    if spec.policy != "fifo" and not play:
        raise ForetraceError("--policy decides where jobs go only with --play; add it, or leave --policy out.")
    made = scene.scene(spec)
    result = made.play(record="devices") if play else None
    files = exported(made.workload, made.cluster, result, to=to, job=job or None, level=level or None, wait_s=wait_s)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ForetraceError(f"cannot write to {out} ({error.strerror or error}); choose another folder.") from None
    for name, text in files.items():
        write_text(out / name, text)
    return report.export(list(files), to=to, folder=str(out))


def policies() -> Result:
    """List scheduling policies with their parameters.

    Example: foretrace fleet policies
    """
    from foretrace.fleet.policies.registry import described
    from foretrace.report.fleet_policies import FleetPoliciesView

    return FleetPoliciesView(policies=described())
