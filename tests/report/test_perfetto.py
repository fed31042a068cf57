"""The export is a Chrome trace that a viewer can lay out: rows without crossings, arrows that bind."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foretrace.errors import ForetraceError
from foretrace.report.perfetto import FIRST_LANE, export, write
from foretrace.report.tracks import Track
from tests.report.report_demo import NASTY


def events(tracks: list[Track], **options: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(export(tracks, **options))["traceEvents"]
    return found


def processes(found: list[dict[str, Any]]) -> dict[int, str]:
    return {e["pid"]: e["args"]["name"] for e in found if e["ph"] == "M" and e["name"] == "process_name"}


def test_every_run_is_a_process_recorded_first(tracks: list[Track]) -> None:
    found = events(tracks)
    assert list(processes(found).values()) == ["recorded", "prefetch-data"]
    order = {e["pid"]: e["args"]["sort_index"] for e in found if e["name"] == "process_sort_index"}
    assert sorted(order, key=order.__getitem__) == list(processes(found))


def test_slices_carry_the_simulated_times(tracks: list[Track]) -> None:
    found = events(tracks)
    for pid, track in zip(processes(found), tracks, strict=True):
        slices = [e for e in found if e["ph"] == "X" and e["pid"] == pid and "args" in e]
        longs = track.end > track.start
        assert len(slices) == int(longs.sum())
        assert sum(e["dur"] for e in slices) == pytest.approx(float((track.end - track.start).sum()) / 1000)
        steps = [e for e in found if e["ph"] == "X" and e["pid"] == pid and e["name"].startswith("step ")]
        assert [round(e["dur"] * 1000) for e in steps] == np.diff(track.marks).tolist()
        assert [e["ts"] for e in slices] and min(e["ts"] for e in slices) >= 0
    assert any(e["args"]["name"] == NASTY for e in found if e["ph"] == "X" and "args" in e)


def test_runs_are_aligned_at_the_first_step(tracks: list[Track]) -> None:
    firsts = [e["ts"] for e in events(tracks) if e["name"] == "step 3"]
    assert len(firsts) == 2 and firsts[0] == firsts[1]


def test_rows_never_cross(tracks: list[Track]) -> None:
    track = tracks[0]
    row = int(np.flatnonzero((track.graph.lane == 2) & (track.end > track.start))[5])
    end = track.end.copy()
    end[row] += 3_000  # as with programmatic dependent launch: the next kernel starts before this one ends
    crossed = Track(name="crossed", graph=track.graph, start=track.start, end=end, critical=track.critical)
    for found in (events(tracks), events([crossed])):
        rows = defaultdict(list)
        for e in found:
            if e["ph"] == "X":
                rows[e["pid"], e["tid"]].append((round(e["ts"] * 1000), round((e["ts"] + e["dur"]) * 1000)))
        for slices in rows.values():
            slices.sort()
            assert all(a[1] <= b[0] for a, b in pairwise(slices))
    assert any("overlapping" in e["args"].get("name", "") for e in events([crossed]) if e["ph"] == "M")


def test_arrows_leave_and_reach_slices(tracks: list[Track]) -> None:
    found = events(tracks)
    slices: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for e in found:
        if e["ph"] == "X":
            slices[e["pid"], e["tid"]].append((e["ts"], e["ts"] + e["dur"]))
    starts = {e["id"]: e for e in found if e["ph"] == "s"}
    ends = {e["id"]: e for e in found if e["ph"] == "f"}
    assert starts and starts.keys() == ends.keys()
    for e in [*starts.values(), *ends.values()]:
        assert any(a <= e["ts"] <= b for a, b in slices[e["pid"], e["tid"]])
    assert all(starts[i]["ts"] <= ends[i]["ts"] for i in starts)
    assert not [e for e in events(tracks, arrows=False) if e["ph"] in "sf"]


def test_no_arrow_leaves_a_lane_of_no_rank(tracks: list[Track]) -> None:
    track = tracks[0]
    leaving = {e["tid"] for e in events([track]) if e["ph"] == "s"}
    for gone in range(len(track.graph.lanes)):
        lanes = tuple(replace(lane, rank=-1) if i == gone else lane for i, lane in enumerate(track.graph.lanes))
        found = events([replace(track, graph=replace(track.graph, lanes=lanes))])
        assert {e["tid"] for e in found if e["ph"] == "s"} <= leaving - {FIRST_LANE + gone}


def test_gz_is_compressed_and_files_are_whole(tracks: list[Track], tmp_path: Path) -> None:
    plain, packed = tmp_path / "t.json", tmp_path / "t.json.gz"
    write(tracks, plain)
    write(tracks, packed)
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t.json", "t.json.gz"]
    with pytest.raises(ForetraceError, match="cannot write"):
        write(tracks, tmp_path / "missing" / "t.json")


def test_events_have_what_viewers_need(tracks: list[Track]) -> None:
    payload = json.loads(export(tracks))
    assert payload["displayTimeUnit"] == "ms"
    for e in payload["traceEvents"]:
        assert e["ph"] in "XMsf" and {"pid", "tid", "name", "ts"} <= e.keys()
        if e["ph"] == "X":
            assert e["dur"] > 0


def test_nothing_to_export() -> None:
    with pytest.raises(ValueError, match="at least one track"):
        export([])
