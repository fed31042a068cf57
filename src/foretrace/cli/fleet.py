"""`foretrace fleet`: many jobs on one cluster."""

from __future__ import annotations

import csv
import io
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretrace.cli import fleet_files, fleet_questions, fleet_sweep
from foretrace.cli import fleet_options as shared
from foretrace.cli.answers import Reply, answers, page_asked, writable

if TYPE_CHECKING:
    from foretrace.fleet.result import FleetResult
    from foretrace.fleet.workload import Int64

fleet = typer.Typer(
    name="fleet",
    short_help="Play logs of many jobs on one cluster; ask why and what if.",
    help="Many jobs, one cluster: play logs of jobs under scheduling policies, ask why and what if.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Measure = Annotated[str, typer.Option("--measure", metavar="A-B", help="Means over these jobs only, by number.")]
COLUMNS = (
    "job", "gpus", "submit_s", "start_s", "end_s", "jct_s", "queue_s", "held_s", "dead_s", "starts", "preempted",
    "failed", "status",
)  # fmt: skip


@fleet.command("run")
@answers
def run(
    trace: shared.Trace,
    format: shared.Format = "auto",
    policy: shared.Policy = "fifo",
    cluster: shared.Cluster = "",
    speeds: shared.Speeds = "constant",
    salvage: shared.Salvage = False,
    jobs: shared.Jobs = 0,
    load: shared.Load = 1.0,
    measure: Measure = "",
    seed: shared.Seed = 0,
    restart_s: shared.RestartS = 0.0,
    restart_s_per_gpu: shared.RestartPerGpu = 0.0,
    checkpoint_s: shared.CheckpointS = 0.0,
    checkpoint_gb: shared.CheckpointGb = "",
    storage_gb_s: shared.StorageGbS = 2.0,
    mtbf_h: shared.MtbfH = 0.0,
    mttr_h: shared.MttrH = 1.0,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE.csv", help="Write a row per job, too.")] = None,
) -> Reply:
    """Play a log of jobs on a cluster under a policy.

    Says completion times, waiting and its reasons, and how much of the cluster is used.

    Example: foretrace fleet run jobs.csv --cluster 2x4x8 --policy "dally lease-s=600" --out rows.csv
    """
    from foretrace.files import write_text
    from foretrace.fleet import scene as scenes
    from foretrace.report import fleet as report
    from foretrace.report import fleet_page

    writable(out)
    spec = scenes.Spec(
        trace=str(trace), format=format, salvage=salvage, jobs=jobs, cluster=cluster or scenes.DEFAULT_CLUSTER,
        policy=policy, speeds=speeds, restart_s=restart_s, restart_s_per_gpu=restart_s_per_gpu,
        checkpoint_s=checkpoint_s, checkpoint_gb=checkpoint_gb, storage_gb_s=storage_gb_s,
        mtbf_h=mtbf_h, mttr_h=mttr_h, load=load, seed=seed,
    )  # fmt: skip
    made = scenes.scene(spec)
    tree = made.cluster
    result = made.play(record="devices" if page_asked() or len(made.workload) <= scenes.RECORD_UP_TO else "nothing")
    tell_origin(result)
    only = scenes.measured(measure, result.workload)
    other = "fifo" if policy.split()[:1] == ["las"] else "las"
    again = shared.again(format=format, speeds=speeds, salvage=salvage, jobs=jobs, restart_s=restart_s)
    words = [str(trace), "--cluster", cluster or scenes.DEFAULT_CLUSTER, "--policy", policy, "--policy", other, *again]
    next_ = shlex.join(["foretrace", "fleet", "compare", *words])
    view = report.run(result, tree, path=str(trace), only=only, next_=next_)
    page = fleet_page.FleetPage(view=view, result=result, cluster=tree)
    return Reply(
        result=view,
        files={out: lambda path: write_text(path, per_job(result, only))},
        page=lambda path: fleet_page.write(page, path),
    )


def tell_origin(result: FleetResult) -> None:
    """Rows that were refused, and what was read differently from what is written, on standard error."""
    origin = result.workload.origin
    if origin.refused:
        first = origin.refused[0]
        print(
            f"foretrace: {len(origin.refused):,} of {origin.rows:,} rows were left out, the first at {first.where}: "
            f"{first.why}",
            file=sys.stderr,
        )


def per_job(result: FleetResult, only: Int64 | None = None) -> str:
    """CSV text with a row per job: times in seconds after the log's zero, empty where there is none."""
    workload = result.workload
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    chosen = range(len(workload)) if only is None else only.tolist()
    jct, queue = result.jct_s, result.queue_s

    def seconds(ns: int) -> str:
        return repr(ns / 1e9) if ns >= 0 else ""

    for at in chosen:
        done = result.end_ns[at] >= 0
        status = (
            "never" if result.never[at] else "done" if done else "running" if result.start_ns[at] >= 0 else "waiting"
        )
        writer.writerow(
            (
                workload.job[at],
                int(workload.gpus[at]),
                seconds(int(workload.submit_ns[at])),
                seconds(int(result.start_ns[at])),
                seconds(int(result.end_ns[at])),
                repr(float(jct[at])) if done else "",
                repr(float(queue[at])) if done else "",
                seconds(int(result.held_ns[at])),
                seconds(int(result.dead_ns[at])),
                int(result.starts[at]),
                int(result.preempted[at]),
                int(result.failed[at]),
                status,
            )
        )
    return out.getvalue()


fleet.command("compare", short_help="Compare policies on one log, with intervals.")(answers(fleet_sweep.compare))
fleet.command("why")(answers(fleet_questions.why))
fleet.command("whatif")(answers(fleet_questions.whatif))
fleet.command("slots")(answers(fleet_questions.slots))
fleet.command("sweep", short_help="Play every combination; a killed sweep goes on.")(answers(fleet_sweep.sweep))
fleet.command("fit")(answers(fleet_files.fit))
fleet.command("generate")(fleet_files.generate)
fleet.command("export")(fleet_files.export)
fleet.command("policies")(answers(fleet_files.policies))
