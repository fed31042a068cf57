"""`foretrace fleet fit`, `generate`, `export`, `policies`: workloads like one, decisions as files of schedulers."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretrace.cli import fleet_options as shared
from foretrace.errors import ForetraceError

if TYPE_CHECKING:
    from foretrace.report.views import Result


def fit(
    trace: shared.Trace,
    out: Annotated[Path, typer.Option("--out", metavar="FILE.json", help="Where the generator is kept.")],
    format: shared.Format = "auto",
    salvage: shared.Salvage = False,
) -> Result:
    """Fit a generator of workloads to a log.

    It learns the rhythm, sweeps, sizes and durations by tenant.

    Example: foretrace fleet fit jobs.csv --out like-ours.json
    """
    from foretrace.fleet.scene import workload_of
    from foretrace.fleet.synthetic import fit as fitted
    from foretrace.report import fleet_answers as report

    made = fitted(workload_of(str(trace), format, salvage=salvage))
    made.save(out)
    return report.fit(made, path=str(trace), stored=str(out))


def generate(
    generator: Annotated[Path, typer.Argument(metavar="GENERATOR", help="What foretrace fleet fit wrote.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE.csv", help="Where the jobs go.")],
    jobs: Annotated[int | None, typer.Option("--jobs", metavar="N", min=1, help="So many jobs.")] = None,
    days: Annotated[float | None, typer.Option("--days", metavar="D", help="Or so many days of jobs.")] = None,
    load: shared.Load = 1.0,
    seed: shared.Seed = 0,
) -> None:
    """Generate a workload like a fitted one.

    It may be of any length and load.

    Example: foretrace fleet generate like-ours.json --jobs 10000 --load 1.5 --out more.csv
    """
    from foretrace.fleet.formats import write_csv
    from foretrace.fleet.synthetic import load_generator

    if (jobs is None) == (days is None):
        raise ForetraceError("say either --jobs or --days, how much to generate.")
    made = load_generator(generator).generate(jobs=jobs, days=days, load=load, seed=seed)
    write_csv(made, out)
    span = float(made.submit_ns[-1]) / 86400e9 if len(made) else 0.0
    print(f"{len(made):,} jobs over {span:.3g} days are in {out}\n  next: foretrace fleet run {shlex.quote(str(out))}")


def export(
    trace: shared.Trace,
    to: Annotated[str, typer.Option("--to", metavar="slurm|kueue|volcano|ray", help="For which scheduler.")],
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where the files go.")],
    job: Annotated[list[str] | None, typer.Option("--job", metavar="JOB", help="Only this job; repeat it.")] = None,
    level: Annotated[
        str, typer.Option("--level", metavar="NAME", help="Keep jobs inside one unit of it; default: as small as fits.")
    ] = "",
    wait_s: Annotated[
        float,
        typer.Option("--wait-s", metavar="S", help="How long a job insists on it (the delay timer); inf: for ever."),
    ] = math.inf,
    play: Annotated[bool, typer.Option("--play", help="Take placements from playing the log under --policy.")] = False,
    format: shared.Format = "auto",
    policy: shared.Policy = "fifo",
    cluster: shared.Cluster = "4x4x8",
    salvage: shared.Salvage = False,
    jobs: shared.Jobs = 0,
) -> None:
    """Write decisions as a scheduler's own files.

    They are Slurm directives, Kueue and Volcano manifests, or placement groups of Ray.

    Example: foretrace fleet export jobs.csv --to slurm --level rack --wait-s 3600 --job job3 --out scripts
    """
    from foretrace.files import write_text
    from foretrace.fleet import scene
    from foretrace.fleet.export import export as exported

    spec = scene.Spec(trace=str(trace), format=format, salvage=salvage, jobs=jobs, cluster=cluster, policy=policy)
    if job and len(set(job)) < len(job):
        raise ForetraceError("--job names the same job twice; write each once.")
    if policy != "fifo" and not play:
        raise ForetraceError("--policy decides where jobs go only with --play; add it, or leave --policy out.")
    if play:
        made = scene.scene(spec)
        workload, tree = made.workload, made.cluster
        result = made.play(record="devices")
    else:
        workload = scene.shaped(scene.workload_of(str(trace), format, salvage=salvage), spec)
        tree, result = scene.cluster_of(cluster), None
    files = exported(workload, tree, result, to=to, job=job or None, level=level or None, wait_s=wait_s)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ForetraceError(f"cannot write to {out} ({error.strerror or error}); choose another folder.") from None
    for name, text in files.items():
        write_text(out / name, text)
    print(f"{len(files):,} file{'s' if len(files) != 1 else ''} for {to} in {out}")


def policies() -> Result:
    """List scheduling policies with their parameters.

    Example: foretrace fleet policies
    """
    from foretrace.report import fleet_questions as report

    return report.policies()
