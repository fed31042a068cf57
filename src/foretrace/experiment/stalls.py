"""Stalls of a training step, read from one recording of one worker (Stash, ICDCS 2023, section III; DS-Analyzer).

Stash finds them by differential runs; `foretrace.experiment.differential` does those. Here they come from one graph:
how long the step stalls on data is in the recording, and what it would wait for other workers is predicted.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from foretrace.errors import ForetraceError, GraphError, spelled
from foretrace.graph.taskgraph import TaskGraph
from foretrace.simulate.overhead import clock_of, stored_ns
from foretrace.simulate.timeline import simulate
from foretrace.techniques.distributed.data_parallel import DataParallel
from foretrace.techniques.whatif import whatif


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """One stall: seconds per step, 80 % range, share of the step that contains it."""

    name: str  # "interconnect", "network", "preparation", "fetch"
    seconds: float
    low_s: float
    high_s: float
    share: float
    why: str  # how it is known

    @classmethod
    def of(cls, name: str, seconds: float, between: tuple[float, float], step_s: float, why: str) -> Stall:
        """Return a stall of a step that takes so long."""
        share = seconds / step_s if step_s > 0 else 0.0
        return cls(name=name, seconds=seconds, low_s=between[0], high_s=between[1], share=share, why=why)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalls:
    """The bars of one recording."""

    alone_s: float  # step of one worker whose batches lie ready
    recorded_s: float
    interval_s: tuple[float, float]  # of `recorded_s`, 80 %
    bars: tuple[Stall, ...]
    unknown: tuple[str, ...]  # which bars cannot be told, and why


def stalls(
    graph: TaskGraph, *, workers: int = 1, inside: str = "", between: str = "", gradient_mb: float = 0.0
) -> Stalls:
    """Return stalls of `workers` joined by the links `inside` a machine, and by `between` where machines are apart.

    Links and files are written as for `data-parallel`. Raises NotApplicableError where gradients are not known,
    GraphError for a graph of several ranks.
    """
    if workers < 1:
        raise ForetraceError(f"`workers={workers}` cannot be; one is the least.")
    need_one_rank(graph)
    timeline = simulate(graph)
    recorded = timeline.step_time_s
    loading = timeline.breakdown().median_s()["data_loading"]
    alone = recorded - sum(each or 0.0 for each in _in_loader(graph, loading))
    bars, unknown = list[Stall](), list[str]()
    joined = {"interconnect": inside, "network": between}
    before_s, before_low, before_high = recorded, recorded, recorded
    for name, link in joined.items():
        if workers < 2 or not link:
            given = "inside" if name == "interconnect" else "between"
            unknown.append(spelled(f"{name}: one worker was recorded; say `workers=N` `{given}=LINK`"))
            continue
        found = whatif(graph, [DataParallel(workers=workers, network=link, gradient_mb=gradient_mb)])
        low, high = found.interval_s
        bars.append(
            Stall.of(
                name,
                max(found.after_s - before_s, 0.0),
                (max(low - before_high, 0.0), max(high - before_low, 0.0)),
                found.after_s,
                f"{workers} workers over {link}, predicted from one",
            )
        )
        before_s, before_low, before_high = found.after_s, low, high
    waiting, fetch = _in_loader(graph, loading)
    if fetch is None:
        unknown.append("fetch: batches came from loader processes or the recorder did not time the loader")
    noise = timeline.interval_s()
    spread = (noise.high_s - noise.low_s) / 2 / recorded if recorded else 0.0
    why = "time in the loader that nothing hides" + ("" if fetch is None else ", on a core or waiting for one")
    bars.append(_measured("preparation", waiting, spread, recorded, why))
    if fetch is not None:
        bars.append(_measured("fetch", fetch, spread, recorded, "time in the loader that waits for storage"))
    lies = noise.low_s, noise.high_s
    return Stalls(alone_s=alone, recorded_s=recorded, interval_s=lies, bars=tuple(bars), unknown=tuple(unknown))


def need_one_rank(graph: TaskGraph) -> None:
    """Raise GraphError for a graph of several ranks: what one worker would take alone is not in it."""
    if len({lane.rank for lane in graph.lanes if lane.rank >= 0}) > 1:
        raise GraphError(f"{graph.info.source or 'this graph'} holds several ranks; give a recording of one worker.")


def loader_s(graph: TaskGraph) -> float | None:
    """Return processor seconds that preparing one step's batches takes; None where the recorder did not time it."""
    found = [step["loader_cpu_ns"] for step in _steps(graph) if step.get("loader_cpu_ns")]
    return median(found) / 1e9 if found else None


def _measured(name: str, seconds: float, spread: float, recorded: float, why: str) -> Stall:
    return Stall.of(name, seconds, (seconds * max(1 - spread, 0.0), seconds * (1 + spread)), recorded, why)


def _in_loader(graph: TaskGraph, loading: float) -> tuple[float, float | None]:
    """Return seconds per step that the loader prepares, and that it waits for storage (None where others load).

    Where the recorder saw for how long it waited for a core, both are as it saw them. On the CPU clock, what others
    take of the whole step is no stall of the loader: only what it waited beyond that counts.
    """
    loaders: list[dict[str, Any]] = graph.info.recording.get("loaders", [])
    steps = [step for step in _steps(graph) if step.get("loader_wall_ns")]
    if not steps or any(each.get("num_workers") for each in loaders):
        return loading, None
    if any("loader_queued_ns" not in step for step in steps):
        fetch = median(step["loader_wall_ns"] - step.get("loader_cpu_ns", 0) for step in steps) / 1e9
        fetch = min(max(fetch, 0.0), loading)
        return loading - fetch, fetch
    others = median(_others(step) for step in steps) if clock_of(graph) == "cpu" else 0.0
    prepared = (
        step["loader_cpu_ns"] + max(step["loader_queued_ns"] - others * step["loader_cpu_ns"], 0) for step in steps
    )
    return median(prepared) / 1e9, median(map(stored_ns, steps)) / 1e9


def _others(step: dict[str, Any]) -> float:
    """Return the time that others took of a step outside its loader, per CPU time."""
    cpu = max(float(step["cpu_ns"] - step["loader_cpu_ns"]), 1.0)
    return max((float(step["wall_ns"] - step["loader_wall_ns"]) - cpu) / cpu, 0.0)


def _steps(graph: TaskGraph) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = graph.info.recording.get("steps", [])
    return [step for step in steps if step.get("phase") in ("before", "after", "active")]
