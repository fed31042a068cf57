"""Operators timed on this machine and kept for predictions: all that training consists of, a few, a recording's own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from foretrace.cost.operators import bench, store
from foretrace.cost.operators.calibration import Calibration
from foretrace.cost.operators.grid import chosen
from foretrace.cost.operators.machine import ALLOCATOR, allocator_settings, differences, fingerprint, fingerprint_of
from foretrace.deadline import Deadline
from foretrace.errors import ForetraceError, NotApplicableError, needing
from foretrace.graph.taskgraph import TaskGraph
from foretrace.hardware.processor import operator_threads
from foretrace.model import on_processor
from foretrace.techniques.base import Technique
from foretrace.techniques.measuring import calibrated

Tell = Callable[[float], None] | None
_AGAIN = "FORETRACE_CALIBRATES_AGAIN"  # set for the process that runs in the environment of a recording


@dataclass(frozen=True, kw_only=True)
class KeptTimes:
    """What was timed, in seconds by operator key, and where it is kept."""

    machine: Mapping[str, Any]  # that it holds for: see `fingerprint`
    stored: Path
    seconds: Mapping[str, float]
    failed: Mapping[str, str]  # what could not be timed, with the reason
    said: tuple[str, ...] = ()  # the processor's rates in sentences, where they tell more than the times


def every_operator(threads: int | None, seconds: float, tell: Tell = None) -> KeptTimes:
    """Time the operators that training consists of, in all sizes and precisions."""
    with _threads(threads):
        machine = fingerprint()
        wanted = [each for point in chosen().grid for each in point.operators]
        found = bench.measure(wanted, budget_s=seconds, progress=tell)
    return KeptTimes(
        machine=machine, stored=store.save(machine, found.seconds), seconds=found.seconds, failed=found.failed
    )


def few_operators(count: int, threads: int | None, seconds: float, tell: Tell = None) -> KeptTimes:
    """Time the most informative operators, in several turns. Raises ForetraceError where they are too few."""
    with _threads(threads):
        on_processor.operators(count)  # says so where they are too few
        machine = fingerprint()
        timed = on_processor.calibrated(count, budget_s=seconds, progress=tell)
        found = timed.measured
        if not any(key.startswith("aten::") for key in found.seconds):
            raise ForetraceError(f"no operator could be timed within {seconds:g} s; give `seconds=` more.")
        path, state = on_processor.keep(machine, timed)
        rates = on_processor.Processor.of(found.seconds).rates()
        said = (rates.headline, *rates.lines, "", f"{state}.")
    return KeptTimes(machine=machine, stored=path, seconds=found.seconds, failed=found.failed, said=said)


def recorded_operators(
    graph: TaskGraph,
    techniques: Sequence[Technique],
    seconds: float,
    *,
    source: str,
    trust: Sequence[str] = (),
    tell: Tell = None,
) -> KeptTimes:
    """Time what `techniques` want to know of the operators of a recording; `trust` names packages that these may call.

    Raises ForetraceError where the recording (`source`) was made elsewhere.
    """
    recorded = machine_of(graph, source)
    with _threads(recorded["threads"]):
        machine = fingerprint()
        if other := differences(recorded, machine):
            raise ForetraceError(f"{source} was recorded elsewhere: {', '.join(other)}; calibrate there.")
        known = Calibration.load_for(graph).on(graph)
        measure = partial(bench.measure, progress=tell, trust=trust)
        found = calibrated(known, techniques, measure, Deadline(seconds))  # for all techniques together
    path = store.save(machine, found.seconds) if found.seconds else store.path_for(machine)
    return KeptTimes(machine=machine, stored=path, seconds=found.seconds, failed=found.failed)


def with_hooks(
    graph: TaskGraph, chains: Sequence[Sequence[Technique]], seconds: float, tell: Tell = None
) -> tuple[TaskGraph, str]:
    """Return the graph with the times of what all chains of techniques want, kept for later; and what was not timed, or
    why.

    The graph stays as it is where this is not the machine of the recording.
    """
    recorded = fingerprint_of(graph.info.recording)
    if not recorded or recorded["device"] != "cpu":
        return graph, "hooks are timed on processors only, for a recording that says on which machine it was made"
    failed: dict[str, str] = {}
    until = Deadline(seconds)
    with _threads(recorded["threads"]):
        machine = fingerprint()
        if other := differences(recorded, machine):
            return graph, f"hooks were not timed: the recording was made elsewhere ({', '.join(other)})"
        for i, chain in enumerate(chains):
            share = Deadline(until.budget_s / (len(chains) - i), until.clock)
            try:
                found = calibrated(graph, chain, bench.measure, share)
            except NotApplicableError:
                continue
            if found.seconds:
                store.save(machine, found.seconds)
                graph = Calibration.load_for(graph).on(graph)
            failed |= found.failed
            if tell is not None:
                tell((i + 1) / len(chains))
    reasons = sorted(set(failed.values()))
    return graph, f"{len(failed)} hooks could not be timed: {'; '.join(reasons)}" if failed else ""


def as_here(graph: TaskGraph) -> TaskGraph:
    """Return the graph as if it had been recorded by this process: with what that would say of its machine and
    settings.
    """
    from foretrace.trace.observe import machine

    facts = {"machine": machine.machine(), "environment": machine.environment(), **machine.torch_settings()}
    return replace(graph, info=replace(graph.info, recording={**graph.info.recording, **facts}))


def machine_of(graph: TaskGraph, source: str) -> dict[str, Any]:
    """Return the fingerprint of a recording. Raises ForetraceError where it does not say enough, or says of a GPU."""
    found = fingerprint_of(graph.info.recording)
    if not found:
        raise ForetraceError(
            f"{source} does not say on which machine and with how many threads it was recorded, so no time measured "
            "here would fit; record it with foretrace record."
        )
    if found["device"] != "cpu":
        raise ForetraceError(f"{source} was recorded on {found['device']}; calibrations are for processors so far.")
    return found


def environment_like(allocator: Mapping[str, str]) -> dict[str, str] | None:
    """Return the environment of a process with these allocator settings, which it only takes at its start; None: ours
    has.

    Raises ForetraceError where they cannot be had.
    """
    mine = allocator_settings()
    if mine == dict(allocator):
        return None
    if _AGAIN in os.environ or mine.get("LD_PRELOAD") != allocator.get("LD_PRELOAD"):  # known by its name only
        wanted = " ".join(f"{key}={value}" for key, value in sorted(allocator.items())) or "none"
        raise ForetraceError(f"the recording ran with other allocator settings ({wanted}); set these and run again.")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(ALLOCATOR) or key == "LD_PRELOAD"}
    return {**kept, **{key: value for key, value in allocator.items() if key != "LD_PRELOAD"}, _AGAIN: "1"}


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    with needing("calibrate"), operator_threads(number):
        yield
