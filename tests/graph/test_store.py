"""Saving and loading: equal, memory-mapped, and damaged files are refused in one sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foretrace.errors import GraphError
from foretrace.graph.builder import build
from foretrace.graph.store import load, save
from foretrace.graph.taskgraph import EDGE_COLUMNS, TASK_COLUMNS, Assumption, Change, TaskGraph
from tests.kineto_files import Recording


def small() -> TaskGraph:
    r = Recording()
    r.note("ProfilerStep#1", 0, 900)
    r.launch("k <&>", 10, 5, 20, 700)
    r.call("cudaDeviceSynchronize", 30, 695)
    graph = build(r.trace())
    assumption = Assumption(technique="t", name="x", value=1.0, low=0.5, high=2.0, unit="", why="because", flag="x")
    return graph.noted(Change(technique="t", what="did it", tasks=3), assumptions=(assumption,))


def equal(a: TaskGraph, b: TaskGraph) -> bool:
    columns = [*TASK_COLUMNS, *EDGE_COLUMNS, "in_ptr", "marks"]
    same = all(np.array_equal(getattr(a, c), getattr(b, c)) for c in columns)
    tables = ("names", "layers", "lanes", "info", "changes", "assumptions")
    return same and all(getattr(a, t) == getattr(b, t) for t in tables)


def test_round_trip_is_exact(tmp_path: Path) -> None:
    graph = small()
    assert equal(load(save(graph, tmp_path / "a.fg")), graph)


def test_loading_maps_the_file(tmp_path: Path) -> None:
    graph = load(save(small(), tmp_path / "a.fg"))
    base = graph.dur
    while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
        assert base.base is not None
        base = base.base
    assert isinstance(base, np.memmap)
    assert not graph.dur.flags.writeable


def test_a_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    path = save(small(), tmp_path / "a.fg")
    before = path.read_bytes()
    broken = replace(small(), names=(object(),))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        save(broken, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content", [b"", b"{}", b"foretrg\n", b"foretrg\n" + b"\xff" * 8, b"PK\x03\x04" * 50])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.fg"
    path.write_bytes(content)
    with pytest.raises(GraphError):
        load(path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match=r"nowhere\.fg cannot be read"):
        load(tmp_path / "nowhere.fg")


def test_another_format_version_is_named(tmp_path: Path) -> None:
    path = save(small(), tmp_path / "a.fg")
    path.write_bytes(path.read_bytes().replace(b'"format":3', b'"format":7', 1))
    with pytest.raises(GraphError, match="format 7"):
        load(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_files_load_or_are_refused(tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(save(small(), tmp_path / "a.fg").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, len(content)))]
    path = tmp_path / "b.fg"
    path.write_bytes(content)
    try:
        graph = load(path)
    except GraphError:
        return
    assert len(graph.src) == graph.in_ptr[-1]
