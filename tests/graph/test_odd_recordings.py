"""Recordings that lack whole classes of events: each is a graph whose replay can be, or one sentence of refusal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foretrace import flow
from foretrace.errors import ForetraceError
from foretrace.report import build
from foretrace.report.profile import peaks_of, profile
from foretrace.simulate.memory import split
from tests.fuzz.readers import recordings

NAMES = ("own_gpu.json", "own.json", "captured.json")
SAMPLES = {name: json.loads(recordings()[name]) for name in NAMES}
KEYS = ("cat", "name", "tid")


def _without(events: list[dict[str, Any]], key: str, most: int) -> Iterator[list[dict[str, Any]]]:
    """Events with some classes by one key left out, and with some alone."""
    classes = sorted({str(each.get(key)) for each in events})
    for count in range(1, most + 1):
        for chosen in combinations(classes, count):
            yield [each for each in events if str(each.get(key)) not in chosen]
            yield [each for each in events if str(each.get(key)) in chosen]


def outcome(path: Path, events: list[dict[str, Any]], head: dict[str, Any]) -> str:
    path.write_text(json.dumps({**head, "traceEvents": events}))
    try:
        run = flow.read(path)
        for as_recorded in (True, False):
            scenario = run.graph(as_recorded=as_recorded)
            timeline = scenario.simulate()
            assert np.isfinite(timeline.step_time_s)
            assert timeline.step_time_s >= 0
            assert (scenario.graph.dur >= 0).all()
            build.show(timeline)
            for by in ("name", "layer", "phase"):
                build.blame(timeline, by)
            timeline.critical_path()
        profile(timeline, peaks=peaks_of(scenario.graph, gflops=1e3, gb_s=100.0), memory=split(run.trace))
    except ForetraceError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("name", SAMPLES)
def test_classes_of_events_left_out(name: str, key: str, tmp_path: Path) -> None:
    head = {each: value for each, value in SAMPLES[name].items() if each != "traceEvents"}
    built = 0
    for events in _without(SAMPLES[name]["traceEvents"], key, 2 if key == "cat" else 1):
        built += not outcome(tmp_path / "t.json", events, head)
    assert built
