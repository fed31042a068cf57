"""Choose tasks of a graph by what they are. Every answer is a mask, to be combined with `&`, `|` and `~`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

from foretrace.arrays import Int32, Int64, Mask
from foretrace.errors import GraphError
from foretrace.graph.taskgraph import EdgeKind, Phase, TaskGraph, TaskKind

Text = str | Iterable[str]

DEVICE = tuple(kind for kind in TaskKind if kind.on_device)
HOST = tuple(kind for kind in TaskKind if not kind.on_device)
_GROUPS: dict[str, tuple[TaskKind, ...]] = {"device": DEVICE, "host": HOST}


def select(
    graph: TaskGraph,
    *,
    kind: TaskKind | str | Iterable[TaskKind | str] | None = None,
    phase: Phase | str | Iterable[Phase | str] | None = None,
    name: Text | None = None,
    op: Text | None = None,
    layer: Text | None = None,
    lane: int | Text | None = None,
    step: int | Iterable[int] | None = None,
    device: int | None = None,
    rank: int | Iterable[int] | None = None,
    ignore_case: bool = True,
) -> Mask:
    """Return tasks that satisfy every condition given, gone ones left out (n rows, bool).

    `name`, `op`, `layer` and `lane` are glob patterns over the whole text, or several of which one must
    match: `*` stands for any run of characters, `?` for one, everything else for itself. `lane` matches the
    label of a lane or is its index. `kind` and `phase` are members or their names; "device" and "host" are
    groups of kinds. `step` is an index into `info.steps`, `device` a device number, `rank` one
    or several ranks. Raises GraphError for an unknown kind or phase.
    """
    mask = ~graph.gone
    if kind is not None:
        mask = mask & np.isin(graph.kind, kinds(kind))
    if phase is not None:
        mask = mask & np.isin(graph.phase, phases(phase))
    for pattern, column, table in (
        (name, graph.name, graph.names),
        (op, graph.op, graph.names),
        (layer, graph.layer, graph.layers),
    ):
        if pattern is not None:
            mask = mask & matching(column, table, pattern, ignore_case=ignore_case)
    if lane is not None:
        if isinstance(lane, int):
            mask = mask & (graph.lane == lane)
        else:
            labels = tuple(each.label for each in graph.lanes)
            mask = mask & matching(graph.lane, labels, lane, ignore_case=ignore_case)
    if step is not None:
        mask = mask & np.isin(graph.step, [step] if isinstance(step, int) else list(step))
    if device is not None:
        devices = np.array([each.device for each in graph.lanes], dtype=np.int64)
        mask = mask & (devices[graph.lane] == device)
    if rank is not None:
        mask = mask & np.isin(graph.rank, [rank] if isinstance(rank, int) else list(rank))
    return np.asarray(mask, dtype=np.bool_)


def trained(graph: TaskGraph) -> Mask:
    """Return tasks of the forward and the backward pass, gone ones left out (n rows, bool)."""
    return np.asarray(np.isin(graph.phase, (Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE)) & ~graph.gone)


def previous_on_lane(graph: TaskGraph) -> Int64:
    """Return the task before each on its lane, −1 for the first."""
    order = np.lexsort((np.arange(len(graph)), graph.lane))
    previous = np.full(len(graph), -1, dtype=np.int64)
    same = graph.lane[order[1:]] == graph.lane[order[:-1]]
    previous[order[1:][same]] = order[:-1][same]
    return previous


def launching_call(graph: TaskGraph) -> Int64:
    """Return the call that launched each device task, −1 for other tasks."""
    call = np.full(len(graph), -1, dtype=np.int64)
    launch = graph.edge_kind == EdgeKind.LAUNCH
    call[graph.dst[launch]] = graph.src[launch]
    return call


def matching(column: Int32, table: Sequence[str], pattern: Text, *, ignore_case: bool = True) -> Mask:
    """Return rows whose entry of `table` fits a glob; −1 fits none."""
    patterns = (pattern,) if isinstance(pattern, str) else tuple(pattern)
    return np.asarray(_fitting(tuple(table), patterns, ignore_case)[column])


@lru_cache(maxsize=256)  # what-ifs ask the same of the same graph again and again
def _fitting(table: tuple[str, ...], patterns: tuple[str, ...], ignore_case: bool) -> Mask:
    """Return entries of `table` that fit a glob; one more, for −1, does not."""
    fits = glob(patterns, ignore_case=ignore_case)
    return np.array([*(fits.fullmatch(text) is not None for text in table), False], dtype=np.bool_)


def glob(pattern: Text, *, ignore_case: bool = True) -> re.Pattern[str]:
    """Return one regular expression for one or several globs; only `*` and `?` are special."""
    patterns = [pattern] if isinstance(pattern, str) else list(pattern)
    texts = (re.escape(each).replace(r"\*", ".*").replace(r"\?", ".") for each in patterns)
    return re.compile("|".join(f"(?:{text})" for text in texts) or r"(?!)", re.I | re.S if ignore_case else re.S)


def kinds(given: TaskKind | str | Iterable[TaskKind | str]) -> list[int]:
    """Return task kinds by member, name or group name."""
    found: list[int] = []
    for each in [given] if isinstance(given, (str, TaskKind)) else given:
        if isinstance(each, str) and each.lower() in _GROUPS:
            found += map(int, _GROUPS[each.lower()])
        else:
            found.append(int(_member(TaskKind, each, extra=tuple(_GROUPS))))
    return found


def phases(given: Phase | str | Iterable[Phase | str]) -> list[int]:
    """Return phases by member or name."""
    return [int(_member(Phase, each)) for each in ([given] if isinstance(given, (str, Phase)) else given)]


def _member(enum: type[TaskKind] | type[Phase], given: TaskKind | Phase | str, extra: tuple[str, ...] = ()) -> int:
    if not isinstance(given, str):
        return int(enum(given))
    if given.upper() in enum.__members__:
        return int(enum[given.upper()])
    known = ", ".join([member.name.lower() for member in enum] + list(extra))
    what = "kind" if enum is TaskKind else "phase"
    raise GraphError(f"{what}={given} does not exist; choose from {known}.")
