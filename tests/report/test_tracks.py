"""What the page draws is what was simulated: the packed columns decode to the same times."""

from __future__ import annotations

import base64
import zlib
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from foretrace.graph.taskgraph import EdgeKind, TaskKind
from foretrace.report.tracks import NO_EDGE, Track, binding_edges, pack
from foretrace.simulate.replay import replay
from tests.report.report_demo import demo_graph, make_tracks


def unpack(meta: dict[str, Any], data: str) -> list[dict[str, Any]]:
    """The decoder of data.js in numpy."""
    raw = zlib.decompress(base64.b64decode(data))
    tracks = []
    for track in meta["tracks"]:
        at, n = track["offset"], track["n"]
        columns: dict[str, Any] = {}
        for key, name in meta["columns"]:
            width = np.dtype(name).itemsize
            planes = np.frombuffer(raw[at : at + n * width], dtype=np.uint8).reshape(width, n)
            columns[key] = np.ascontiguousarray(planes.T).view(name).ravel()
            at += n * width
        start = np.zeros(n, dtype=np.int64)
        heads = [first for _, first in track["lanes"]] + [n]
        for first, last in pairwise(heads):
            start[first:last] = np.cumsum(columns["gap"][first:last].astype(np.int64)) * track["tick"]
        columns["start"] = start
        columns["end"] = start + columns["dur"].astype(np.int64) * track["tick"]
        tracks.append(columns)
    return tracks


def test_every_task_comes_back(tracks: list[Track]) -> None:
    meta, data = pack(tracks)
    assert [track["name"] for track in meta["tracks"]] == ["recorded", "prefetch-data"]
    for track, columns in zip(tracks, unpack(meta, data), strict=True):
        origin = min(int(track.marks[0]), int(track.start.min()))
        graph = track.graph
        want = sorted(
            zip(
                (track.start - origin).tolist(),
                (track.end - origin).tolist(),
                (graph.names[i] for i in graph.name),
                graph.kind.tolist(),
                (graph.layers[i] if i >= 0 else "" for i in graph.layer),
                strict=True,
            )
        )
        got = sorted(
            zip(
                columns["start"].tolist(),
                columns["end"].tolist(),
                (meta["names"][i] for i in columns["name"]),
                columns["kind"].tolist(),
                (meta["layers"][i] for i in columns["layer"]),
                strict=True,
            )
        )
        assert got == want
        assert columns["critical"].sum() == len(track.critical)


def test_causes_point_at_the_binding_task(tracks: list[Track]) -> None:
    meta, data = pack(tracks[:1])
    track, (columns,) = tracks[0], unpack(meta, data)
    source, why = binding_edges(track.graph, track.start, track.end)
    cause = np.arange(len(source)) - columns["cause"]
    called = [meta["names"][i] for i in columns["name"]]
    named = [
        (called[i], int(columns["start"][i]), called[cause[i]], int(columns["why"][i]))
        for i in np.flatnonzero(columns["cause"])
    ]
    names, name = track.graph.names, track.graph.name
    want = [
        (names[name[v]], int(track.start[v]), names[name[source[v]]], int(why[v])) for v in np.flatnonzero(source >= 0)
    ]
    assert sorted(named) == sorted(want)
    assert int((why == NO_EDGE).sum()) == int((columns["why"] == NO_EDGE).sum())


def test_the_binding_edge_explains_the_start(tracks: list[Track]) -> None:
    track = tracks[0]
    graph = track.graph
    source, why = binding_edges(graph, track.start, track.end)
    assert {EdgeKind(k) for k in np.unique(why) if k != NO_EDGE} >= {EdgeKind.LAUNCH, EdgeKind.STREAM, EdgeKind.SYNC}
    programs = np.flatnonzero(why == EdgeKind.PROGRAM)
    assert np.array_equal(track.start[programs], track.end[source[programs]])


def test_recorded_and_predicted_share_their_lanes(tracks: list[Track]) -> None:
    meta, _ = pack(tracks)
    assert [lane["label"] for lane in meta["lanes"]] == [
        "main thread",
        "autograd thread",
        "stream 7",
        "stream 20 (nccl)",
    ]
    assert [[lane for lane, _ in track["lanes"]] for track in meta["tracks"]] == [[0, 1, 2, 3]] * 2
    assert not any(lane["quiet"] for lane in meta["lanes"][2:])


def test_marks_are_the_step_boundaries(tracks: list[Track]) -> None:
    meta, _ = pack(tracks)
    for track, described in zip(tracks, meta["tracks"], strict=True):
        assert np.array_equal(np.diff(described["marks"]), np.diff(track.marks))
        assert described["steps"] == ["3", "4", "5", "6", "7", "8"]


def test_too_many_tasks_draw_whole_steps_around_the_focus(tracks: list[Track]) -> None:
    per_step = len(tracks[0].graph) // 6
    meta, _ = pack(tracks[:1], focus_step=4, max_tasks=int(2.5 * per_step))
    described = meta["tracks"][0]
    assert len(described["steps"]) == 2
    assert described["first_step"] <= 4 < described["first_step"] + 2
    assert described["all_steps"] == 6
    alone, _ = pack(tracks[:1], focus_step=99, max_tasks=1)
    assert alone["tracks"][0]["steps"] == ["8"]


def test_long_gaps_survive() -> None:
    graph = demo_graph(steps=2, layers=2)
    slow = graph.with_columns(dur=np.where(graph.kind == TaskKind.DATA, np.int64(20_000_000_000), graph.dur))
    start, end = replay(slow)
    meta, data = pack([Track(name="slow", graph=slow, start=start, end=end, critical=np.zeros(0, dtype=np.int64))])
    described, (columns,) = meta["tracks"][0], unpack(meta, data)
    assert described["tick"] == 10
    assert columns["end"].max() == pytest.approx(int(end.max() - start.min()), abs=20)


def test_packing_is_small_and_repeatable() -> None:
    tracks = make_tracks(steps=12, layers=32)
    _, data = pack(tracks[:1])
    assert len(data) < 12 * len(tracks[0].graph)
    assert pack(tracks[:1])[1] == data


def test_nothing_to_pack() -> None:
    with pytest.raises(ValueError, match="at least one track"):
        pack([])
