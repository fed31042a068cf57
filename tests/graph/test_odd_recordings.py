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
from foretrace.graph.builder import build as build_graph
from foretrace.graph.store import load, save
from foretrace.report.profile import profile
from foretrace.report.show import blame, show
from foretrace.simulate.memory import split
from foretrace.simulate.overhead import unprofiled
from foretrace.simulate.timeline import simulate
from foretrace.techniques.compute.rates import peaks_of
from tests.fuzz.recording_readers import recordings
from tests.kineto_files import MAIN, Recording

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
            show(timeline)
            for by in ("name", "layer", "phase"):
                blame(timeline, by)
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


@pytest.mark.parametrize("thread", [3_004_819_264, "3004819264", 140_511_934_383_680, 10**25, "1" * 25, 1e300, "main"])
def test_any_number_or_name_of_a_thread(thread: float | str, tmp_path: Path) -> None:
    """Old recordings name threads by their addresses, which are wider than the thread ids of a kernel."""
    r = Recording()
    for i in range(3):
        r.note(f"ProfilerStep#{i}", 100 * i, 90)
        r.op("aten::mm", 100 * i + 10, 20)
        r.launch("k", 100 * i + 15, 5, 100 * i + 25, 30)
    for event in r.events:
        event["tid"] = thread if event["tid"] == MAIN else event["tid"]
    graph = flow.read(r.write(tmp_path / "run.json")).graph().graph
    again = load(save(graph, tmp_path / "run.graph"))
    assert [lane.label for lane in again.lanes] == [lane.label for lane in graph.lanes]
    assert simulate(again).step_time_s == pytest.approx(100e-6, rel=0.2)


def launching(steps: int, cut: int) -> Recording:
    """Steps of ten launches of 5 us and kernels of 30 us, of which the last `cut` are not in the recording."""
    r = Recording()
    for i in range(10 * steps):
        if i % 10 == 0:
            r.note(f"ProfilerStep#{i // 10}", 400 * (i // 10), 390)
        at = 400 * (i // 10) + 10 + 10 * (i % 10)
        if i < 10 * steps - cut:
            r.launch("k", at, 5, 400 * (i // 10) + 20 + 31 * (i % 10), 30)
        else:
            r.call("cudaLaunchKernel", at, 5)
    return r


def test_a_step_whose_kernels_the_recording_lacks_is_left_out() -> None:
    whole, cut = build_graph(launching(3, 0).trace()), build_graph(launching(3, 4).trace())
    assert whole.info.steps == (0, 1, 2) and not whole.info.carried
    assert cut.info.steps == (0, 1)
    assert "4 launches at the end have no work in the recording" in " ".join(cut.info.notes)
    assert simulate(cut).step_time_s == pytest.approx(simulate(whole).step_time_s, rel=0.01)


def test_the_only_step_may_take_longer_where_kernels_are_cut_off() -> None:
    whole, cut = (simulate(unprofiled(build_graph(launching(1, n).trace()))) for n in (0, 4))
    assert "4 launches" in " ".join(cut.graph.info.notes)
    [said] = [each for each in cut.shifts if each.source == "work after the recording's end"]
    assert said.slower_s == pytest.approx(4 * 30e-6)
    assert whole.interval_s(0.8).high_s < cut.interval_s(0.8).high_s


def test_launches_captured_into_a_graph_are_not_cut_off() -> None:
    r = launching(2, 0)
    r.call("cudaStreamBeginCapture", 830, 5)
    for i in range(5):
        r.call("cudaLaunchKernel", 840 + 10 * i, 5)
    r.call("cudaStreamEndCapture", 900, 5)
    graph = build_graph(r.trace())
    assert graph.info.steps == (0, 1)
    assert "5 launches were captured into a graph" in " ".join(graph.info.notes)


@pytest.mark.parametrize(("kept", "whole"), [(0, False), (4, False), (9, True)])
def test_what_lost_its_end_lost_the_device_work_that_is_written_there(tmp_path: Path, kept: int, whole: bool) -> None:
    r = Recording()
    r.note("ProfilerStep#1", 0, 1000)
    for i in range(10):
        r.op("aten::mm", 100 * i, 80)
    for i in range(kept):
        r.launch("gemm", 100 * i + 10, 5, 100 * i + 20, 60)
    r.launch("gemm", 910, 5, 920, 60)
    text = r.write(tmp_path / "whole.json").read_text()
    path = tmp_path / "cut.json"
    path.write_text(text[:-20])
    if whole:
        notes = flow.scenario(path, salvage=True).graph.info.notes
        assert "the end of the file is lost: work of the device may be missing from any step." in notes
    else:
        with pytest.raises(ForetraceError, match=r"cut.json lost its end, and with it the device's work of \d+ % of"):
            flow.scenario(path, salvage=True)
