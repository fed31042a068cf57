"""`foretrace fleet compare`, `sweep`, `study`: many runs of the same question."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretrace.cli import fleet_options as shared
from foretrace.cli import options
from foretrace.cli.answers import Reply
from foretrace.errors import ForetraceError

if TYPE_CHECKING:
    from foretrace.fleet.result import FleetResult
    from foretrace.fleet.scene import Scene, Spec
    from foretrace.fleet.workload import Workload
    from foretrace.report.views import Result

DEFAULT = "4x4x8"


def compare(
    trace: shared.Trace,
    policy: shared.Policies,
    format: shared.Format = "auto",
    cluster: shared.Cluster = DEFAULT,
    speeds: shared.Speeds = "constant",
    seeds: Annotated[int, typer.Option("--seeds", metavar="N", min=1, help="Runs with shifted submissions.")] = 20,
    jitter_s: Annotated[float, typer.Option("--jitter-s", metavar="S", help="How far submissions are shifted.")] = 60.0,
    subtraces: Annotated[
        int, typer.Option("--subtraces", metavar="N", min=0, help="Instead of seeds: N parts of the log, one by one.")
    ] = 0,
    salvage: shared.Salvage = False,
    jobs: shared.Jobs = 0,
    load: shared.Load = 1.0,
    restart_s: shared.RestartS = 0.0,
    restart_s_per_gpu: shared.RestartPerGpu = 0.0,
) -> Reply:
    """Compare policies on one log, with bootstrap intervals over repeated runs; says what is within noise.

    Example: foretrace fleet compare jobs.csv --cluster 4x4x8 --policy fifo --policy las --policy dally --seeds 20
    """
    from foretrace.fleet import comparison, scene
    from foretrace.fleet.policies import parse
    from foretrace.report import fleet as report
    from foretrace.report import fleet_answers, fleet_page

    spec = scene.Spec(
        trace=str(trace), format=format, salvage=salvage, jobs=jobs, cluster=cluster, speeds=speeds, load=load,
        policy=policy[0], restart_s=restart_s, restart_s_per_gpu=restart_s_per_gpu,
    )  # fmt: skip
    if len(set(policy)) < len(policy):
        raise ForetraceError("--policy names the same policy twice; compare different ones.")
    made = scene.scene(spec)
    runs = {text: replace(made, policy=parse(text)) for text in policy}
    if subtraces:
        parts = comparison.subtraces(made.workload, subtraces)
        how = f"{subtraces} parts of the log"
    else:
        parts = comparison.jittered(made.workload, seeds, jitter_s)
        how = f"submissions shifted by up to {jitter_s:g} s" if seeds > 1 else ""
    with options.progress("playing policies") as tell:
        done = itertools.count(1)

        def seen(*_: object) -> None:
            if tell is not None:
                tell(next(done) / (len(runs) * len(parts)))

        found = comparison.compare(
            {text: partial(_played, one) for text, one in runs.items()},
            parts,
            how=how,
            seen=seen,
        )
    view = fleet_answers.compare(
        found, path=str(trace), cluster=made.cluster.name, gpus=made.cluster.gpus, jobs=len(made.workload),
        next_=shlex.join(
            ["foretrace", "fleet", "sweep", str(trace), "--cluster", cluster]
            + [word for each in policy for word in ("--policy", each)]
            + shared.again(format=format, speeds=speeds, salvage=salvage, jobs=jobs)
            + ["--set", "load=0.5,1,2", "--out", "sweep"]
        ),
    )  # fmt: skip

    def page(path: Path) -> None:
        whole = {text: one.play(record="devices") for text, one in runs.items()}
        first = whole.pop(policy[0])
        one = report.run(first, made.cluster, path=str(trace), repeated=found if len(parts) > 1 else None)
        shown = fleet_page.FleetPage(view=one, result=first, cluster=made.cluster, others=whole, comparison=view)
        fleet_page.write(shown, path)

    return Reply(result=view, page=page)


def sweep(
    trace: shared.Trace,
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where cells are kept; a second call goes on.")],
    policy: shared.Policies,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=V,V", help="Values to try, of load, restart-s, mtbf-h, add, speeds ...; repeat it."
        ),
    ] = None,
    cluster: Annotated[
        list[str] | None, typer.Option("--cluster", metavar="SHAPE|FILE", help="A cluster; repeat it. Default: 4x4x8.")
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", metavar="N", min=1, help="Runs per cell.")] = 1,
    jitter_s: Annotated[
        float, typer.Option("--jitter-s", metavar="S", help="How far a seed shifts submissions.")
    ] = 60.0,
    format: shared.Format = "auto",
    speeds: shared.Speeds = "constant",
    salvage: shared.Salvage = False,
    jobs: shared.Jobs = 0,
    on: Annotated[
        str, typer.Option("--on", metavar="here|ray", help="This machine's cores, or a Ray cluster that sees --out.")
    ] = "here",
) -> Result:
    """Play every combination of policies, clusters, values and seeds; a call that was killed goes on where it was.

    Example: foretrace fleet sweep jobs.csv --policy fifo --policy las --set load=0.5,1,2 --seeds 5 --out sweep
    """
    from foretrace.files import digest
    from foretrace.fleet import scene
    from foretrace.fleet import sweep as sweeping
    from foretrace.report import fleet_questions as report

    base = scene.Spec(trace=str(trace), format=format, salvage=salvage, jobs=jobs, speeds=speeds)
    by: dict[str, Sequence[Any]] = {"policy": policy, "cluster": cluster or [DEFAULT]}
    for text in set_ or []:
        name, values = _values(text, base)
        if name in by:
            raise ForetraceError(f"--set {text}: {name} is given twice; write all its values in one list.")
        by[name] = values
    by["seed"] = list(range(seeds))
    cells = []
    for chosen in itertools.product(*by.values()):
        cell = dict(zip(by, chosen, strict=True))
        if seeds > 1:
            cell["jitter_s"] = jitter_s
        cells.append(cell)
    scene.workload_of(str(trace), format, salvage=salvage)
    for cell in cells:  # what is wrong is said before hours of work
        _check(replace(base, **cell))
    # What is read counts by its content, so that log and folder may be moved together and go on.
    specs = [asdict(replace(base, **each)) for each in cells]
    said = {word for each in specs for text in (each["cluster"], each["speeds"]) for word in re.split(r"[\s=]", text)}
    same = asdict(base) | {"trace": digest(trace)}
    same["files"] = {word: digest(Path(word)) for word in sorted(said) if word and Path(word).exists()}
    for each in specs:
        del each["trace"]
    with options.progress("playing cells") as tell:
        found = sweeping.sweep(partial(play_cell, trace=str(trace)), specs, folder=out, of=same, on=on, progress=tell)
    named = {key: values for key, values in by.items() if len(values) > 1 or key == "policy"}
    fixed = {each.name for each in fields(base)} - set(named)
    rows = tuple({key: value for key, value in row.items() if key not in fixed} for row in found.rows)
    asked = ["compare", "--seeds", "20"] if len(policy) > 1 else ["run"]
    words = [*asked, str(trace), "--cluster", by["cluster"][0]]
    words += [word for each in policy for word in ("--policy", each)]
    words += shared.again(format=format, speeds=speeds, salvage=salvage, jobs=jobs)
    return report.sweep(
        replace(found, rows=rows), source=str(trace), by=by, next_=shlex.join(["foretrace", "fleet", *words])
    )


def _played(made: Scene, workload: Workload) -> FleetResult:
    return replace(made, workload=workload).play()


def play_cell(cell: Mapping[str, Any], *, trace: str) -> dict[str, Any]:
    """Figures of one cell of a log; nan becomes None."""
    from foretrace.fleet.comparison import figures
    from foretrace.fleet.scene import Spec, scene

    result = scene(Spec(trace=trace, **cell)).play()
    found = {name: float(value) if isfinite(value) else None for name, value in figures(result).items()}
    return found | {"jobs": len(result.workload), "finished": int(result.finished.sum())}


def _check(spec: Spec) -> None:
    from foretrace.fleet import policies, scene

    policies.parse(spec.policy)
    scene.parse_speeds(spec.speeds, scene.cluster_of(spec.cluster))


def _values(text: str, base: Spec) -> tuple[str, list[Any]]:
    name, equals, values = text.partition("=")
    name = name.strip().replace("-", "_")
    known = {each.name: type(getattr(base, each.name)) for each in fields(base)}
    for each in ("trace", "format", "salvage", "policy", "cluster", "seed"):
        known.pop(each)
    if not equals or name not in known:
        raise ForetraceError(f"--set {text}: write NAME=V,V with one of {', '.join(sorted(known)).replace('_', '-')}.")
    parts = values.split(";") if known[name] is str else values.split(",")
    try:
        found = [known[name](each) for each in parts]
    except ValueError:
        raise ForetraceError(f"--set {text}: {values} is no list of numbers; write as in load=0.5,1,2.") from None
    if len(set(found)) < len(found):
        raise ForetraceError(f"--set {text}: a value stands twice; keep one.")
    return name, found
