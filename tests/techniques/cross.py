"""Cross: what a technique must do on any recording, for tests and for the command that crosses all with all.

A cell is a graph and one technique or several in turn. It ends *sound* (a graph whose replay is finite, deterministic
and possible), *refused* (one sentence that names the reason), or *wrong*, which is a bug. Settings are derived from the
metadata of the parameters, so a technique that joins the registry is in the cross by itself.
"""

from __future__ import annotations

import hashlib
import json
import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from foretrace.errors import ForetraceError
from foretrace.graph.insert import edge_columns, extend
from foretrace.graph.sound import first_fault
from foretrace.graph.taskgraph import EDGE_COLUMNS, TASK_COLUMNS, Change, EdgeKind, TaskGraph, TaskKind
from foretrace.simulate.timeline import Timeline, simulate
from foretrace.techniques.base import CONTRADICTS, Parameter, Technique

Outcome = Literal["sound", "refused", "wrong"]

_LONGEST_SENTENCE = 600
# What a user of any model could write, by the name of a parameter: (first setting, second setting).
_GIVEN: dict[str, tuple[str, str]] = {
    "network": ("25gbit/20us", "1gbit/50us"),
    "workers": ("4", "3"),
    "levels": ("2x2", "3x1"),
    "networks": ("200gbit;25gbit", "100gbit;1gbit"),
    "steps": ("2", "4"),
    "to": ("", ""),  # another unit for each technique; `by` or the default says it
    "by": ("2", "0.5"),
    "time_us": ("5", "200"),
    "device": ("h100", ""),
    "ratio": ("", "2"),
    "phase": ("backward", ""),
    "name": ("", "*e*"),
    "kind": ("", ""),
    "op": ("", ""),
    "layer": ("", ""),
    "lane": ("", ""),
    "step": ("", ""),
    "rank": ("", ""),
    "recorded": ("", ""),
    "phases": ("", "forward,backward"),
    "blocks": ("", ""),
    "buckets_mb": ("", ""),  # excludes bucket_mb
    "crowding": ("", "0.5"),
    "interference": ("", "1.2"),
    "rows": ("512", "64"),
    "hidden": ("256", "64"),
    "layers": ("2", "4"),
    "bits": ("", "4"),
}
_OF_UNIT = {"×": "1.1", "µs": "20", "ms": "1", "GB/s": "10", "MB": "100", "MiB": "8"}  # of numbers without a default
_LARGE = 1_000  # numbers above are halved, others doubled


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """How one cell ended. `says` is the refusal, or what is wrong; `digest` is of all times and tells runs apart."""

    outcome: Outcome
    says: str = ""
    before_s: float = 0.0
    after_s: float = 0.0
    digest: str = ""

    @property
    def odd(self) -> bool:
        """Whether the step changed by more than a factor of 20: possible, but worth a look."""
        return self.outcome == "sound" and not 0.05 <= self.after_s / max(self.before_s, 1e-9) <= 20


def settings(kind: type[Technique]) -> tuple[str, str]:
    """Two ways to write a technique: what it needs and no more; and everything another way than by default."""
    first, second = [kind.name], [kind.name]
    for each in kind.parameters():
        given = _GIVEN.get(each.name) if each.type != "bool" and not each.choices else None
        if given is None:
            given = (_plain(each) if each.required else "", _other(each))
        for words, value in zip((first, second), given, strict=True):
            if value:
                words.append(f"{each.name}={value}")
    return " ".join(first), " ".join(second)


def _plain(each: Parameter) -> str:
    """A value for a parameter that has no default."""
    if each.choices:
        return next(choice for choice in each.choices if choice)
    return {"int": "2", "float": "1.5", "bool": "yes", "str": "*"}[each.type]


def _other(each: Parameter) -> str:
    """Another value than the default."""
    if each.choices:
        return each.choices[-1 if each.required else 1]
    if each.type == "bool":
        return "no" if each.default else "yes"
    if each.prior is not None:
        return f"{each.prior.high:g}"
    if not each.default:
        return _OF_UNIT.get(each.unit, "2" if each.required else "")
    if each.type == "int":
        return str(each.default // 2 if each.default > _LARGE else 2 * each.default + 1)
    return f"{each.default / 2:g}" if each.type == "float" else ""


def judge(graph: TaskGraph, techniques: Sequence[Technique]) -> Cell:
    """Apply the techniques in turn and look at what comes out."""
    try:
        before = simulate(graph)
        after, chain = before, graph
        for technique in techniques:
            chain = technique.predict(chain)
            after = simulate(chain)
        after.step_times_ns  # noqa: B018  (raises where steps are out of order)
    except ForetraceError as error:
        return _refusal(str(error))
    except Exception as error:  # whatever else is raised is a bug, and the cross continues
        at = traceback.extract_tb(error.__traceback__)[-1]
        return Cell(
            outcome="wrong", says=f"{type(error).__name__}: {error} ({Path(at.filename).name}:{at.lineno} {at.name})"
        )
    wrong = impossible(before, after)
    return Cell(
        outcome="wrong" if wrong else "sound",
        says=wrong,
        before_s=before.step_time_s,
        after_s=after.step_time_s,
        digest=_digest(after),
    )


def _refusal(says: str) -> Cell:
    """A refusal is one sentence about the recording or the request, not about the insides of a graph."""
    inside = re.search(rf"\bcycle\b|not sound|Traceback|points outside|{CONTRADICTS}", says)
    whole = says and "\n" not in says and says.rstrip().endswith((".", "?", '"')) and len(says) <= _LONGEST_SENTENCE
    return Cell(outcome="wrong" if inside or not whole else "refused", says=says)


def impossible(before: Timeline, after: Timeline) -> str:
    """What cannot be about a predicted timeline, "" if nothing."""
    graph = after.graph
    fault = first_fault(replace(graph, passed={}))  # all of it, whatever passed before
    if fault is not None:
        return f"the graph is not sound: {fault.says}"
    if len(graph.marks) != len(before.graph.marks):
        return f"{graph.n_steps} steps of {before.graph.n_steps} are left"
    live = ~graph.gone
    if not live.any():
        return "no task is left"
    span = int(after.end[live].max()) - int(after.start[live].min())
    longest = int(graph.dur[live].max(initial=0))
    if span < longest:
        return f"all ends after {span} ns, but one task takes {longest} ns"
    most = _most_ns(graph)
    if after.window_ns > most:
        return f"the steps take {after.window_ns} ns, but all tasks and waits together {most} ns"
    if after.step_time_s <= 0 < before.step_time_s:
        return f"a step takes {after.step_time_s} s"
    return ""


def _most_ns(graph: TaskGraph) -> int:
    """What all tasks and waits take one after the other: no run of the graph is longer between two marks."""
    live = ~graph.gone
    work = int(graph.dur[live].sum()) + int(graph.delay[live].sum())
    lag = np.zeros(len(graph), dtype=np.int64)
    np.maximum.at(lag, graph.dst, np.maximum(graph.lag, 0))
    times = graph.release[graph.release > -(1 << 60)]  # also of what is gone
    released = int(times.max() - times.min()) if len(times) else 0
    return work + int(lag.sum()) + released


def _digest(timeline: Timeline) -> str:
    """Of every column and every time: equal for two runs of the same prediction."""
    found = hashlib.blake2b(digest_size=12)
    for key in (*TASK_COLUMNS, *EDGE_COLUMNS, "in_ptr", "marks"):
        found.update(np.ascontiguousarray(getattr(timeline.graph, key)).tobytes())
    found.update(timeline.start.tobytes() + timeline.end.tobytes())
    found.update(repr((timeline.graph.changes, timeline.graph.assumptions)).encode())
    return found.hexdigest()


# -- recordings that tell less ---------------------------------------------------------------------------------


def _texts(graph: TaskGraph, change: Callable[[list[Any]], list[Any]]) -> TaskGraph:
    return replace(graph, shapes=tuple(json.dumps(change(json.loads(text))) for text in graph.shapes))


def _without(graph: TaskGraph, *columns: str) -> TaskGraph:
    value = {"phase": 0, "flops": 0.0}
    made = {key: np.full_like(getattr(graph, key), value.get(key, -1)) for key in columns}
    return graph.with_columns(**made)


def _flat(sizes: list[Any]) -> bool:
    return all(isinstance(size, int) for size in sizes)


def _steps(graph: TaskGraph, marks: npt.NDArray[np.int32], step: npt.NDArray[np.int32]) -> TaskGraph:
    one = replace(graph, marks=marks, info=replace(graph.info, steps=graph.info.steps[:1]))
    return one.with_columns(step=step.astype(np.int32))


def _says(graph: TaskGraph, **info: Any) -> TaskGraph:
    return replace(graph, info=replace(graph.info, **info))


def full_queue(graph: TaskGraph) -> TaskGraph:
    """The recording as it would be with a device six times slower and a launch queue of few places: the host runs ahead
    until it waits for a slot at nearly every launch. A recording without a device stays as it is.
    """
    dst, device = graph.dst, graph.on_device
    launch = np.flatnonzero(
        (graph.edge_kind == EdgeKind.LAUNCH) & device[dst] & (graph.kind[graph.src] == TaskKind.CALL)
    )
    program = (graph.edge_kind == EdgeKind.PROGRAM) & ~graph.from_start
    returns = np.zeros(len(graph), dtype=np.bool_)
    returns[graph.src[program & (graph.kind[dst] == TaskKind.RETURN)]] = True
    call, first = np.unique(graph.src[launch], return_index=True)
    task = dst[launch][first].astype(np.int64)
    call, task = call[~returns[call]], task[~returns[call]]
    slower = graph.with_columns(dur=np.where(device, 6 * graph.dur, graph.dur))
    edges, src, back = edge_columns(slower), list[int](), list[int]()
    for lane in np.unique(graph.lane[task]).tolist():
        there = np.flatnonzero((graph.lane == lane) & ~graph.gone)
        mine = np.flatnonzero(graph.lane[task] == lane)
        places = min(1022, max(len(there) // 12, 3))
        place = np.searchsorted(there, task[mine]) - places - 1
        src += there[place[place >= 0]].tolist()
        back += mine[place >= 0].tolist()
    if not back:
        return graph
    waits = call[back].astype(np.int64)
    row = np.arange(len(graph), dtype=np.int64)
    row[waits] = len(graph) + np.arange(len(back))
    follow = program | (graph.edge_kind == EdgeKind.THREAD) & ~graph.from_start
    edges["src"] = np.where(follow, row[graph.src], graph.src).astype(np.int32)
    columns = {key: getattr(graph, key)[waits] for key in ("lane", "name", "phase", "layer", "step", "op", "shape")}
    made, _ = extend(
        slower,
        {
            **columns,
            "kind": np.full(len(back), TaskKind.RETURN),
            "dur": np.zeros(len(back)),
            "recorded": graph.recorded[waits] + graph.dur[waits],
        },
        {
            "src": np.concatenate([waits, src]),
            "dst": np.concatenate([row[waits], row[waits]]),
            "edge_kind": np.repeat([int(EdgeKind.PROGRAM), int(EdgeKind.QUEUE)], len(back)),
            "lag": np.repeat([0, 1_000], len(back)),
        },
        old_edges=edges,
        change=Change(technique="", what="filled the launch queue", tasks=len(back)),
    )
    nothing = (
        {"kind": np.empty(0, np.uint8)},
        {key: np.empty(0, np.int64) for key in ("src", "dst", "edge_kind", "lag")},
    )
    in_time = made.with_columns(recorded=simulate(made).start)
    return extend(in_time, *nothing, change=made.changes[-1])[0]  # rows by time, as the builder has them


#: The same recording as other profilers and other settings would have made it, by what it lacks.
maimed: dict[str, Callable[[TaskGraph], TaskGraph]] = {
    "full queue": full_queue,
    "no shapes": lambda graph: _without(graph, "shape", "nbytes", "flops"),
    "no values": lambda graph: _texts(graph, lambda inputs: [inputs[0], inputs[1], []]),
    "no types": lambda graph: _texts(graph, lambda inputs: [inputs[0], [], inputs[2]]),
    "fewer inputs": lambda graph: _texts(graph, lambda inputs: [inputs[0][:1], inputs[1][:1], inputs[2][:1]]),
    "scalars only": lambda graph: _texts(graph, lambda inputs: [[[] for _ in inputs[0]], inputs[1], inputs[2]]),
    "lists of tensors": lambda graph: _texts(
        graph, lambda inputs: [[[each] if each and _flat(each) else each for each in inputs[0]], *inputs[1:]]
    ),
    "empty tensors": lambda graph: _texts(
        graph, lambda inputs: [[[0] * len(each) if _flat(each) else each for each in inputs[0]], *inputs[1:]]
    ),
    "no phases": lambda graph: _without(graph, "phase"),
    "no operators": lambda graph: _without(graph, "op", "shape"),
    "no layers": lambda graph: _without(graph, "layer"),
    "no facts": lambda graph: _says(graph, recording={}, devices=(), calibration={}),
    "facts alone": lambda graph: _says(_without(graph, "shape", "phase", "op", "layer", "nbytes")),
    "one step": lambda graph: _steps(graph, graph.marks[:2], np.where(graph.step == 0, 0, -1)),
    "all steps in one": lambda graph: _steps(graph, graph.marks[[0, -1]], np.minimum(graph.step, 0)),
}
