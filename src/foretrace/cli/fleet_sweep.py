"""`foretrace fleet compare` and `sweep`: many runs of the same question."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretrace.cli import options
from foretrace.cli.answers import Reply
from foretrace.cli.fleet_options import JOBS, Played, Policies, following, plays, repeated
from foretrace.errors import ForetraceError

if TYPE_CHECKING:
    from foretrace.fleet.result import FleetResult
    from foretrace.fleet.scene import Scene, Spec
    from foretrace.fleet.workload import Workload
    from foretrace.report.views import Result


@plays(*JOBS, "cluster", "load", "restart_s", "restart_s_per_gpu")
def compare(
    spec: Spec,
    policy: Policies,
    *,
    seeds: Annotated[int, typer.Option("--seeds", metavar="N", min=1, help="Runs with shifted submissions.")] = 20,
    jitter_s: Annotated[float, typer.Option("--jitter-s", metavar="S", help="How far submissions are shifted.")] = 60.0,
    subtraces: Annotated[
        int, typer.Option("--subtraces", metavar="N", min=0, help="Instead of seeds: N parts of the log, one by one.")
    ] = 0,
) -> Reply:
    """Compare policies on one log, with intervals.

    They are bootstrap intervals over repeated runs; what is within noise is said.

    Example: foretrace fleet compare jobs.csv --cluster 4x4x8 --policy fifo --policy las --policy dally --seeds 20
    """
    from foretrace.fleet import comparison, scene
    from foretrace.fleet.policies import parse
    from foretrace.report import fleet, fleet_page, fleet_policies
    from foretrace.report.fleet_page import FleetPage

    if len(set(policy)) < len(policy):
        raise ForetraceError("--policy names the same policy twice; compare different ones.")
    made = scene.scene(replace(spec, policy=policy[0]))
    runs = {text: replace(made, policy=parse(text)) for text in policy}
    parts, how = _repetitions(made.workload, seeds, jitter_s, subtraces)
    with options.progress("playing policies") as tell:
        share = itertools.count(1)
        seen = (lambda *_: tell(next(share) / (len(runs) * len(parts)))) if tell is not None else (lambda *_: None)
        found = comparison.compare(
            {text: partial(_played, one) for text, one in runs.items()}, parts, how=how, seen=seen
        )
    view = fleet_policies.compare(
        found, path=spec.trace, cluster=made.cluster.name, gpus=made.cluster.gpus, jobs=len(made.workload),
        next_=following(["sweep"], spec, *repeated(policy), then=["--set", "load=0.5,1,2", "--out", "sweep"]),
    )  # fmt: skip

    def page(path: Path) -> None:
        first, *others = ((text, one.play(record="devices")) for text, one in runs.items())
        shown = fleet.run(first[1], made.cluster, path=spec.trace, repeated=found if len(parts) > 1 else None)
        whole = FleetPage(view=shown, result=first[1], cluster=made.cluster, others=dict(others), comparison=view)
        fleet_page.write(whole, path)

    return Reply(result=view, page=page)


def _repetitions(workload: Workload, seeds: int, jitter_s: float, subtraces: int) -> tuple[Sequence[Workload], str]:
    """The workloads that every policy plays, and what they are, for people."""
    from foretrace.fleet import comparison

    if subtraces:
        return comparison.subtraces(workload, subtraces), f"{subtraces} parts of the log"
    how = f"submissions shifted by up to {jitter_s:g} s" if seeds > 1 else ""
    return comparison.jittered(workload, seeds, jitter_s), how


@plays(*JOBS)
def sweep(
    spec: Spec,
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where cells are kept; a second call resumes.")],
    policy: Policies,
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
    *,
    on: Annotated[
        str, typer.Option("--on", metavar="here|ray", help="This machine's cores, or a Ray cluster that sees --out.")
    ] = "here",
) -> Result:
    """Play every combination; a killed sweep continues.

    Combinations are of policies, clusters, values and seeds; a call that was killed resumes.

    Example: foretrace fleet sweep jobs.csv --policy fifo --policy las --set load=0.5,1,2 --seeds 5 --out sweep
    """
    from foretrace.fleet import sweep as sweeping
    from foretrace.report import fleet_policies as report

    by = _axes(spec, policy, cluster or [Played.cluster], set_ or [], seeds)
    moved: dict[str, Any] = {"jitter_s": jitter_s} if seeds > 1 else {}
    cells = [replace(spec, **dict(zip(by, each, strict=True)), **moved) for each in itertools.product(*by.values())]
    _check(spec, cells)
    specs = [{name: value for name, value in asdict(each).items() if name != "trace"} for each in cells]
    play = partial(play_cell, trace=spec.trace)
    with options.progress("playing cells") as tell:
        found = sweeping.sweep(play, specs, folder=out, of=_same(spec, cells), on=on, progress=tell)
    fixed = {each.name for each in fields(spec)} - {name for name in by if len(by[name]) > 1 or name == "policy"}
    rows = tuple({key: value for key, value in row.items() if key not in fixed} for row in found.rows)
    asked = ["compare", "--seeds", "20"] if len(policy) > 1 else ["run"]
    next_ = following(asked, replace(spec, cluster=cells[0].cluster), *repeated(policy))
    return report.sweep(replace(found, rows=rows), source=spec.trace, by=by, next_=next_)


def _axes(
    spec: Spec, policy: Sequence[str], cluster: Sequence[str], given: Sequence[str], seeds: int
) -> dict[str, Sequence[Any]]:
    """Values by the field of a spec, in the order in which they are combined."""
    by: dict[str, Sequence[Any]] = {"policy": policy, "cluster": cluster}
    for text in given:
        name, values = _values(text, spec)
        if name in by:
            raise ForetraceError(f"--set {text}: {name} is given twice; write all its values in one list.")
        by[name] = values
    return by | {"seed": list(range(seeds))}


def _same(spec: Spec, cells: Sequence[Spec]) -> dict[str, Any]:
    """What all cells share; what is read counts by its content, so that log and folder may be moved together."""
    from foretrace.files import digest

    said = {word for each in cells for text in (each.cluster, each.speeds) for word in re.split(r"[\s=]", text)}
    files = {word: digest(Path(word)) for word in sorted(said) if word and Path(word).exists()}
    return asdict(spec) | {"trace": digest(Path(spec.trace)), "files": files}


def _played(made: Scene, workload: Workload) -> FleetResult:
    return replace(made, workload=workload).play()


def play_cell(cell: Mapping[str, Any], *, trace: str) -> dict[str, Any]:
    """Figures of one cell of a log; nan becomes None."""
    from foretrace.fleet.comparison import figures
    from foretrace.fleet.scene import Spec, scene

    result = scene(Spec(trace=trace, **cell)).play()
    found = {name: float(value) if isfinite(value) else None for name, value in figures(result).items()}
    return found | {"jobs": len(result.workload), "finished": int(result.finished.sum())}


def _check(spec: Spec, cells: Sequence[Spec]) -> None:
    """Say what is wrong before hours of work."""
    from foretrace.fleet import policies, scene

    scene.workload_of(spec.trace, spec.format, salvage=spec.salvage)
    for each in cells:
        policies.parse(each.policy)
        scene.parse_speeds(each.speeds, scene.cluster_of(each.cluster))


def _values(text: str, base: Spec) -> tuple[str, list[Any]]:
    """The field of a spec and the values that --set gives it."""
    name, equals, values = text.partition("=")
    name = name.strip().replace("-", "_")
    others = ("trace", "format", "salvage", "policy", "cluster", "seed")
    known = {each.name: type(getattr(base, each.name)) for each in fields(base) if each.name not in others}
    if not equals or name not in known:
        raise ForetraceError(f"--set {text}: write NAME=V,V with one of {', '.join(sorted(known)).replace('_', '-')}.")
    try:
        found = [known[name](each) for each in values.split(";" if known[name] is str else ",")]
    except ValueError:
        raise ForetraceError(f"--set {text}: {values} is no list of numbers; write as in load=0.5,1,2.") from None
    if len(set(found)) < len(found):
        raise ForetraceError(f"--set {text}: a value stands twice; keep one.")
    return name, found
