"""`foretrace fleet why`, `whatif`, `slots`: questions about jobs that wait and clusters that could change."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from foretrace.cli import fleet_options as shared
from foretrace.cli import options
from foretrace.errors import ForetraceError

if TYPE_CHECKING:
    from foretrace.fleet.cluster import ClusterTree
    from foretrace.report.views import Result

DEFAULT = "4x4x8"


def why(
    trace: shared.Trace,
    job: Annotated[str, typer.Argument(metavar="JOB", help="The job's name in the log.")],
    at: Annotated[
        float | None,
        typer.Option("--at", metavar="SECONDS", help="When to look; by default where its longest wait begins."),
    ] = None,
    format: shared.Format = "auto",
    policy: shared.Policy = "fifo",
    cluster: shared.Cluster = DEFAULT,
    speeds: shared.Speeds = "constant",
    salvage: shared.Salvage = False,
    jobs: shared.Jobs = 0,
    seed: shared.Seed = 0,
    restart_s: shared.RestartS = 0.0,
) -> Result:
    """Say why a job waits, and what would help.

    Names the binding constraint and who holds the GPUs, and plays changes that could let the job start sooner.

    Example: foretrace fleet why jobs.csv job150 --cluster 2x4x8 --policy fifo
    """
    from foretrace.fleet import ask, scene
    from foretrace.report import fleet_questions as report

    spec = scene.Spec(
        trace=str(trace), format=format, salvage=salvage, jobs=jobs, cluster=cluster, policy=policy, speeds=speeds,
        seed=seed, restart_s=restart_s,
    )  # fmt: skip
    made = scene.scene(spec)
    with options.progress("playing changes") as tell:
        found = ask.why(made, job, at_s=at, progress=tell)
    again = shared.again(format=format, speeds=speeds, salvage=salvage, jobs=jobs, seed=seed, restart_s=restart_s)
    return report.why(found, source=str(trace), policy=policy, cluster=cluster, again=again)


def whatif(
    trace: shared.Trace,
    add_rack: Annotated[
        int, typer.Option("--add-rack", metavar="N", min=0, help="More of the cluster's outermost units.")
    ] = 0,
    policy: Annotated[str, typer.Option("--policy", metavar="NAME [KEY=VALUE ...]", help="Another policy.")] = "",
    to_cluster: Annotated[str, typer.Option("--to-cluster", metavar="SHAPE|FILE", help="Another cluster.")] = "",
    network: Annotated[
        str,
        typer.Option("--network", metavar="400Gbps", help="Bandwidth per GPU between machines, at every level above."),
    ] = "",
    to_load: Annotated[float, typer.Option("--to-load", metavar="FACTOR", help="Jobs so many times as dense.")] = 0,
    format: shared.Format = "auto",
    now: Annotated[str, typer.Option("--now", metavar="NAME [KEY=VALUE ...]", help="The policy as it is.")] = "fifo",
    cluster: shared.Cluster = DEFAULT,
    speeds: shared.Speeds = "constant",
    salvage: shared.Salvage = False,
    jobs: shared.Jobs = 0,
    load: shared.Load = 1.0,
    seed: shared.Seed = 0,
    restart_s: shared.RestartS = 0.0,
    restart_s_per_gpu: shared.RestartPerGpu = 0.0,
    checkpoint_s: shared.CheckpointS = 0.0,
    mtbf_h: shared.MtbfH = 0.0,
    mttr_h: shared.MttrH = 1.0,
) -> Result:
    """Play the same jobs as it is, and with changes.

    Changes are more racks, another policy, another cluster, another network, another load.

    Example: foretrace fleet whatif jobs.csv --cluster 2x4x8 --now fifo --add-rack 2 --policy dally
    """
    from foretrace.fleet import scene
    from foretrace.report import fleet_questions as report

    spec = scene.Spec(
        trace=str(trace), format=format, salvage=salvage, jobs=jobs, cluster=cluster, policy=now, speeds=speeds,
        load=load, seed=seed, restart_s=restart_s, restart_s_per_gpu=restart_s_per_gpu, checkpoint_s=checkpoint_s,
        mtbf_h=mtbf_h, mttr_h=mttr_h,
    )  # fmt: skip
    changes, after = [], spec
    if to_cluster:
        after = replace(after, cluster=to_cluster)
        changes.append(f"cluster {to_cluster}")
    tree = scene.cluster_of(after.cluster)
    if add_rack:
        after = replace(after, add=add_rack)
        unit = tree.levels[-2] if len(tree.levels) > 1 else "unit"
        changes.append(f"{add_rack} more {unit}{'s' if add_rack > 1 else ''}")
    if policy:
        after = replace(after, policy=policy)
        changes.append(f"policy {policy}")
    if network:
        after = replace(after, speeds=_faster(after.speeds, network, tree))
        changes.append(f"{network} between machines")
    if to_load:
        after = replace(after, load=to_load)
        changes.append(f"{to_load:g} × the load")
    if not changes:
        raise ForetraceError("nothing would change; give --add-rack, --policy, --to-cluster, --network or --to-load.")
    first, second = scene.scene(spec), scene.scene(after)
    further = ["compare", "--policy", now, "--policy", after.policy]
    if after.policy == now:  # one policy is compared with itself by nobody
        further = ["sweep", "--policy", now, "--set", "add=0,1,2", "--out", "sweep"]
    again = shared.again(format=format, speeds=speeds, salvage=salvage, jobs=jobs)
    return report.whatif(
        first.play(),
        second.play(),
        source=str(trace),
        words=(f"{now} on {first.cluster.name}", f"{after.policy} on {second.cluster.name}"),
        changes=changes,
        next_=shlex.join(["foretrace", "fleet", *further, str(trace), "--cluster", cluster, *again]),
    )


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


def slots(
    trace: shared.Trace,
    size: Annotated[
        list[int] | None, typer.Option("--size", metavar="GPUS", min=1, help="Size of a job; repeat it.")
    ] = None,
    at: Annotated[
        float | None, typer.Option("--at", metavar="SECONDS", help="When to look; by default the end.")
    ] = None,
    format: shared.Format = "auto",
    policy: shared.Policy = "fifo",
    cluster: shared.Cluster = DEFAULT,
    speeds: shared.Speeds = "constant",
    salvage: shared.Salvage = False,
    jobs: shared.Jobs = 0,
    seed: shared.Seed = 0,
) -> Result:
    """Count jobs of a size for which there is room.

    Fragmentation in slots, at one moment and over time.

    Example: foretrace fleet slots jobs.csv --cluster 4x4x8 --size 8 --size 64 --at 86400
    """
    from foretrace.fleet import scene
    from foretrace.report import fleet_answers as report

    spec = scene.Spec(
        trace=str(trace), format=format, salvage=salvage, jobs=jobs, cluster=cluster, policy=policy, speeds=speeds,
        seed=seed,
    )  # fmt: skip
    made = scene.scene(spec)
    again = shared.again(format=format, speeds=speeds, salvage=salvage, jobs=jobs, seed=seed)
    result = made.play(record="devices")
    return report.slots(
        result, made.cluster, sizes=size, at_s=at, path=str(trace),
        next_=shlex.join(
            [*["foretrace", "fleet", "run"], str(trace), "--cluster", cluster, "--policy", policy, *again]
        )
        + " --html fleet.html",
    )  # fmt: skip
