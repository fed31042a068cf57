"""A `Spec` made into others: with changes that a user asks about, and as the cells of a sweep."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from foretrace.errors import ForetraceError
from foretrace.files import digest
from foretrace.fleet import policies
from foretrace.fleet import sweep as sweeping
from foretrace.fleet.cluster import ClusterTree
from foretrace.fleet.comparison import figures
from foretrace.fleet.metrics import known
from foretrace.fleet.scene import Spec, cluster_of, parse_speeds, scene, workload_of
from foretrace.hardware.cluster import parse_link


def changes(
    spec: Spec, *, add: int = 0, policy: str = "", cluster: str = "", network: str = "", load: float = 0
) -> dict[str, dict[str, Any]]:
    """Return by its words what each change makes of a spec: units more, another policy, cluster, network or load."""
    tree = cluster_of(cluster or spec.cluster)
    unit = tree.levels[-2] if len(tree.levels) > 1 else "unit"
    found = {
        f"cluster {cluster}": cluster and {"cluster": cluster},
        f"{add} more {unit}{'s' if add > 1 else ''}": add and {"add": add},
        f"policy {policy}": policy and {"policy": policy},
        f"{network} between machines": network and {"speeds": _faster(spec.speeds, network, tree)},
        f"{load:g} × the load": load and {"load": load},
    }
    return {words: change for words, change in found.items() if isinstance(change, dict)}


def _faster(speeds: str, network: str, tree: ClusterTree) -> str:
    """Return the model of speed with another bandwidth on all levels above the innermost."""
    words = shlex.split(speeds)
    kind = words[0].partition("=")[0] if words else ""
    gbit = parse_link(network).gbit_s
    if kind not in ("closed-form", "graphs"):
        raise ForetraceError(
            f"`network=` changes nothing with `speeds={kind}`, which knows no network; use closed-form or graphs."
        )
    key = "gb-s=" if kind == "closed-form" else "links="
    given = next((word.removeprefix(key) for word in words[1:] if word.startswith(key)), "")
    if given:
        inside = given.split(",")[0]
    elif tree.gbit_s and tree.gbit_s[0]:
        inside = f"{tree.gbit_s[0] / 8:g}" if kind == "closed-form" else f"{tree.gbit_s[0]:g}gbit"
    else:
        raise ForetraceError(
            f"`network=` needs to know what joins GPUs inside a machine; give `speeds='{kind} {key}...'`."
        )
    outside = f"{gbit / 8:g}" if kind == "closed-form" else f"{gbit:g}gbit"
    values = ",".join([inside] + [outside] * (len(tree.levels) - 1))
    return shlex.join([*(word for word in words if not word.startswith(key)), f"{key}{values}"])


def axes(
    spec: Spec, policy: Sequence[str], cluster: Sequence[str], given: Sequence[str], seeds: int
) -> dict[str, Sequence[Any]]:
    """Return values by the field of a spec, in order of combination; given: texts such as "load=0.5,1"."""
    by: dict[str, Sequence[Any]] = {"policy": policy, "cluster": cluster}
    for text in given:
        name, values = _values(text, spec)
        if name in by:
            raise ForetraceError(f"`set={text}`: {name} is given twice; write all its values in one list.")
        by[name] = values
    return by | {"seed": list(range(seeds))}


def _values(text: str, base: Spec) -> tuple[str, list[Any]]:
    """Return the field of a spec and the values that a text gives it."""
    name, equals, values = text.partition("=")
    name = name.strip().replace("-", "_")
    others = ("trace", "format", "salvage", "policy", "cluster", "seed")
    kinds = {each.name: type(getattr(base, each.name)) for each in fields(base) if each.name not in others}
    if not equals or name not in kinds:
        raise ForetraceError(f"`set={text}`: write NAME=V,V with one of {', '.join(sorted(kinds)).replace('_', '-')}.")
    try:
        found = [kinds[name](each) for each in values.split(";" if kinds[name] is str else ",")]
    except ValueError:
        raise ForetraceError(f"`set={text}`: {values} is no list of numbers; write as in load=0.5,1,2.") from None
    if len(set(found)) < len(found):
        raise ForetraceError(f"`set={text}`: a value stands twice; keep one.")
    return name, found


def sweep(
    spec: Spec,
    by: Mapping[str, Sequence[Any]],
    *,
    folder: Path,
    jitter_s: float = 0.0,
    on: str = "here",
    progress: Callable[[float], None] | None = None,
) -> sweeping.Swept:
    """Return every combination of `axes`, each shifted by up to `jitter_s`; a row names what differs and its policy."""
    shift = {"jitter_s": jitter_s}
    cells = [replace(spec, **(shift | dict(zip(by, each, strict=True)))) for each in itertools.product(*by.values())]
    # Say what is wrong before hours of work.
    workload_of(spec.trace, spec.format, salvage=spec.salvage)
    for each in cells:
        policies.parse(each.policy)
        parse_speeds(each.speeds, cluster_of(each.cluster))
    specs = [{name: value for name, value in asdict(each).items() if name != "trace"} for each in cells]
    play = partial(play_cell, trace=spec.trace)
    found = sweeping.sweep(play, specs, folder=folder, of=_same(spec, cells), on=on, progress=progress)
    fixed = {each.name for each in fields(spec)} - {name for name in by if len(by[name]) > 1 or name == "policy"}
    rows = tuple({key: value for key, value in row.items() if key not in fixed} for row in found.rows)
    return replace(found, rows=rows)


def _same(spec: Spec, cells: Sequence[Spec]) -> dict[str, Any]:
    """Return what all cells share; what is read counts by its content, so that log and folder may be moved together."""
    said = {word for each in cells for text in (each.cluster, each.speeds) for word in re.split(r"[\s=]", text)}
    files = {word: digest(Path(word)) for word in sorted(said) if word and Path(word).exists()}
    return asdict(spec) | {"trace": digest(Path(spec.trace)), "files": files}


def play_cell(cell: Mapping[str, Any], *, trace: str) -> dict[str, Any]:
    """Return figures of one cell of a log; nan becomes None."""
    result = scene(Spec(trace=trace, **cell)).play()
    found: dict[str, Any] = {name: known(value) for name, value in figures(result).items()}
    return found | {"jobs": len(result.workload), "finished": int(result.finished.sum())}
