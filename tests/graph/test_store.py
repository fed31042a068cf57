"""Saving and loading: equal, memory-mapped, and damaged files are refused in one sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from foretrace import flow
from foretrace.errors import ForetraceError, GraphError, NotApplicableError
from foretrace.flow import read
from foretrace.graph.builder import build
from foretrace.graph.store import MAGIC, load, save
from foretrace.graph.taskgraph import EDGE_COLUMNS, TASK_COLUMNS, Assumption, Change, TaskGraph
from foretrace.techniques.compute.fused_optimizer import FusedOptimizer
from foretrace.techniques.data.prefetch_data import PrefetchData
from foretrace.techniques.selection import Scale
from tests.graph.mutations import mutated
from tests.kineto_files import Recording

RECORDINGS = Path(__file__).parents[1] / "data"


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


@pytest.mark.parametrize("block", range(4))
def test_damaged_files_are_asked_or_refused(tmp_path: Path, block: int) -> None:
    """Whatever is damaged: one sentence, or a graph that answers every question with possible times."""
    graphs = [small(), read(RECORDINGS / "recommender.json.gz").graph().graph]
    contents = [save(graph, tmp_path / "whole.graph").read_bytes() for graph in graphs]
    path = tmp_path / "damaged.graph"
    refused = 0
    for seed in range(75 * block, 75 * (block + 1)):
        path.write_bytes(mutated(contents[seed % 2], seed))
        try:
            refused += not _asked(path)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
    assert 10 < refused < 75


def _asked(path: Path) -> bool:
    """Whether the graph in this file answers; False where it is refused in one sentence."""
    try:
        scenario = flow.load(path)
        timeline = scenario.simulate()
        assert np.all(timeline.step_times_ns >= 0) and np.isfinite(timeline.step_time_s)
        assert timeline.interval_s().low_s >= 0
        timeline.breakdown(), timeline.critical_path(), timeline.blame("layer"), timeline.slack()
        scenario.check()
        found = scenario.apply(Scale(by=0.5, kind="device"), FusedOptimizer(), PrefetchData()).whatif()
        assert 0 <= found.interval_s[0] <= found.after_s <= found.interval_s[1] < np.inf
    except NotApplicableError as reason:
        assert "\n" not in str(reason)
    except ForetraceError as error:
        assert str(error).endswith(".") and "\n" not in str(error)
        return False
    return True


def test_a_header_without_end_is_damaged(tmp_path: Path) -> None:
    path, deep = tmp_path / "deep.graph", b'{"format":3,"info":' + b"[" * 100_000
    path.write_bytes(MAGIC + len(deep).to_bytes(8, "little") + deep)
    with pytest.raises(GraphError, match="damaged header"):
        load(path)
