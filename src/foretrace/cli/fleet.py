"""`foretrace fleet`: many jobs on one cluster, and questions about one run of them."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretrace.cli import fleet_files, fleet_sweep, options
from foretrace.cli.answers import Reply, answers, page_asked, writable
from foretrace.cli.fleet_options import COSTS, JOBS, following, plays, spelt
from foretrace.errors import ForetraceError

if TYPE_CHECKING:
    from foretrace.fleet.cluster import ClusterTree
    from foretrace.fleet.result import FleetResult
    from foretrace.fleet.scene import Spec
    from foretrace.report.views import Result


@plays(*JOBS, *COSTS, "policy", "cluster", "load", "seed", "checkpoint_gb", "storage_gb_s")
def run(
    spec: Spec,
    *,
    measure: Annotated[
        str, typer.Option("--measure", metavar="A-B", help="Means over these jobs only, by number.")
    ] = "",
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE.csv", help="Write a row per job, too.")] = None,
) -> Reply:
    """Play a log of jobs on a cluster under a policy.

    Says completion times, waiting and its reasons, and how much of the cluster is used.

    Example: foretrace fleet run jobs.csv --cluster 2x4x8 --policy "dally lease-s=600" --out rows.csv
    """
    from foretrace.files import write_text
    from foretrace.fleet import scene as scenes
    from foretrace.fleet.per_job import per_job
    from foretrace.report import fleet as report
    from foretrace.report import fleet_page

    writable(out)
    made = scenes.scene(spec)
    result = made.play(record="devices" if page_asked() or len(made.workload) <= scenes.RECORD_UP_TO else "nothing")
    tell_origin(result)
    only = scenes.measured(measure, result.workload)
    other = "fifo" if spec.policy.split()[:1] == ["las"] else "las"
    next_ = following(["compare"], spec, "--policy", spec.policy, "--policy", other, also=["restart_s"])
    view = report.run(result, made.cluster, path=spec.trace, only=only, next_=next_)
    if out is not None:
        write_text(out, per_job(result, only))
    page = fleet_page.FleetPage(view=view, result=result, cluster=made.cluster)
    return Reply(result=view, page=lambda path: fleet_page.write(page, path))


def tell_origin(result: FleetResult) -> None:
    """Rows that were refused, and what was read differently from what is written, on standard error."""
    origin = result.workload.origin
    if origin.refused:
        first = origin.refused[0]
        rows = f"{len(origin.refused):,} of {origin.rows:,} rows were left out"
        options.say(f"{rows}, the first at {first.where}: {first.why}")


@plays(*JOBS, "policy", "cluster", "seed", "restart_s")
def why(
    spec: Spec,
    job: Annotated[str, typer.Argument(metavar="JOB", help="The job's name in the log.")],
    at: Annotated[
        float | None,
        typer.Option("--at", metavar="SECONDS", help="The moment to show; by default where its longest wait begins."),
    ] = None,
) -> Result:
    """Say why a job waits, and what would help.

    Names the binding constraint and who holds the GPUs, and plays changes that could let the job start sooner.

    Example: foretrace fleet why jobs.csv job150 --cluster 2x4x8 --policy fifo
    """
    from foretrace.fleet import ask, scene
    from foretrace.report import fleet_questions as report

    made = scene.scene(spec)
    with options.progress("playing changes") as tell:
        found = ask.why(made, job, at_s=at, progress=tell)
    asked, named = ("whatif", "--now") if found.asked else ("run", "--policy")
    next_ = following([asked], spec, named, spec.policy, also=["seed", "restart_s"], then=spelt(found.asked))
    return report.why(found, source=spec.trace, policy=spec.policy, cluster=spec.cluster, next_=next_)


@plays(*JOBS, *COSTS, "cluster", "load", "seed")
def whatif(
    spec: Spec,
    add_rack: Annotated[
        int, typer.Option("--add-rack", metavar="N", min=0, help="More of the cluster's outermost units.")
    ] = 0,
    policy: Annotated[str, typer.Option("--policy", metavar="NAME [KEY=VALUE ...]", help="Another policy.")] = "",
    to_cluster: Annotated[str, typer.Option("--to-cluster", metavar="SHAPE|FILE", help="Another cluster.")] = "",
    network: Annotated[
        str,
        typer.Option("--network", metavar="400Gbps", help="Bandwidth per GPU between machines, at every level above."),
    ] = "",
    to_load: Annotated[float, typer.Option("--to-load", metavar="FACTOR", help="Factor on the arrival rate.")] = 0,
    now: Annotated[str, typer.Option("--now", metavar="NAME [KEY=VALUE ...]", help="The current policy.")] = "fifo",
) -> Result:
    """Play the same jobs as it is, and with changes.

    Changes are more racks, another policy, another cluster, another network, another load.

    Example: foretrace fleet whatif jobs.csv --cluster 2x4x8 --now fifo --add-rack 2 --policy dally
    """
    from foretrace.fleet import scene
    from foretrace.report import fleet_questions as report

    spec = replace(spec, policy=now)
    changes = _changes(spec, add_rack, policy, to_cluster, network, to_load)
    if not changes:
        raise ForetraceError("nothing would change; give --add-rack, --policy, --to-cluster, --network or --to-load.")
    after = replace(spec, **{name: value for change in changes.values() for name, value in change.items()})
    first, second = scene.scene(spec), scene.scene(after)
    further = ["compare", "--policy", now, "--policy", after.policy]
    if after.policy == now:  # one policy is compared with itself by nobody
        further = ["sweep", "--policy", now, "--set", "add=0,1,2", "--out", "sweep"]
    return report.whatif(
        first.play(), second.play(), source=spec.trace, changes=list(changes), next_=following(further, spec),
        words=(f"{now} on {first.cluster.name}", f"{after.policy} on {second.cluster.name}"),
    )  # fmt: skip


def _changes(
    spec: Spec, add_rack: int, policy: str, to_cluster: str, network: str, to_load: float
) -> dict[str, dict[str, Any]]:
    """By its words, what each change makes of a spec."""
    from foretrace.fleet import scene

    tree = scene.cluster_of(to_cluster or spec.cluster)
    unit = tree.levels[-2] if len(tree.levels) > 1 else "unit"
    found = {
        f"cluster {to_cluster}": to_cluster and {"cluster": to_cluster},
        f"{add_rack} more {unit}{'s' if add_rack > 1 else ''}": add_rack and {"add": add_rack},
        f"policy {policy}": policy and {"policy": policy},
        f"{network} between machines": network and {"speeds": _faster(spec.speeds, network, tree)},
        f"{to_load:g} × the load": to_load and {"load": to_load},
    }
    return {words: change for words, change in found.items() if isinstance(change, dict)}


def _faster(speeds: str, network: str, tree: ClusterTree) -> str:
    """The model of speed with another bandwidth on all levels above the innermost."""
    from foretrace.hardware.cluster import parse_link

    words = shlex.split(speeds)
    kind = words[0].partition("=")[0] if words else ""
    gbit = parse_link(network).gbit_s
    if kind not in ("closed-form", "graphs"):
        raise ForetraceError(
            f"--network changes nothing with --speeds {kind}, which knows no network; use closed-form or graphs."
        )
    key = "gb-s=" if kind == "closed-form" else "links="
    given = next((word.removeprefix(key) for word in words[1:] if word.startswith(key)), "")
    if given:
        inside = given.split(",")[0]
    elif tree.gbit_s and tree.gbit_s[0]:
        inside = f"{tree.gbit_s[0] / 8:g}" if kind == "closed-form" else f"{tree.gbit_s[0]:g}gbit"
    else:
        raise ForetraceError(
            f"--network needs to know what joins GPUs inside a machine; give --speeds '{kind} {key}...'."
        )
    outside = f"{gbit / 8:g}" if kind == "closed-form" else f"{gbit:g}gbit"
    values = ",".join([inside] + [outside] * (len(tree.levels) - 1))
    return shlex.join([*(word for word in words if not word.startswith(key)), f"{key}{values}"])


@plays(*JOBS, "policy", "cluster", "seed")
def slots(
    spec: Spec,
    size: Annotated[
        list[int] | None, typer.Option("--size", metavar="GPUS", min=1, help="Size of a job; repeat it.")
    ] = None,
    at: Annotated[
        float | None, typer.Option("--at", metavar="SECONDS", help="The moment to show; by default the end.")
    ] = None,
) -> Result:
    """Count jobs of a size for which there is room.

    Fragmentation in slots, at one moment and over time.

    Example: foretrace fleet slots jobs.csv --cluster 4x4x8 --size 8 --size 64 --at 86400
    """
    from foretrace.fleet import scene
    from foretrace.report import fleet_questions as report

    made = scene.scene(spec)
    next_ = following(["run"], spec, "--policy", spec.policy, also=["seed"], then=["--html", "fleet.html"])
    return report.slots(made.play(record="devices"), made.cluster, sizes=size, at_s=at, path=spec.trace, next_=next_)


fleet = typer.Typer(
    name="fleet",
    short_help="Simulate logs of many jobs on one cluster; ask why and what if.",
    help="Many jobs on one cluster: simulate logs under scheduling policies, ask why and what if.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
for command in (
    run, fleet_sweep.compare, why, whatif, slots, fleet_sweep.sweep, fleet_files.fit, fleet_files.generate,
    fleet_files.export, fleet_files.policies,
):  # fmt: skip
    fleet.command(command.__name__)(answers(command))
