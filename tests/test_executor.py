"""Independent work gives the same answer wherever it runs, and its errors come back as themselves."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from foretrace import executor, flow
from foretrace.errors import ForetraceError, MissingExtraError, TraceError
from foretrace.graph.builder import build
from foretrace.graph.taskgraph import EDGE_COLUMNS, TASK_COLUMNS, TaskGraph
from foretrace.trace.read import read
from tests.graph.rank_sets import Job, work


def square(value: int) -> int:
    time.sleep(0.01 * (value % 3))  # the last does not finish last
    return value * value


def refuse(value: int) -> int:
    if value == 2:
        raise TraceError("file 2 is no recording: leave it out.")
    return value


def die(value: int) -> int:
    if value == 1:
        os._exit(9)
    return value


def die_once(mark: Path) -> str:
    if not mark.exists():
        mark.touch()
        os._exit(9)
    return mark.name


def meet(folder: Path) -> int:
    """Wait for another process here, so that one does not do the work of two."""
    (folder / str(os.getpid())).touch()
    while len(list(folder.iterdir())) < 2:
        time.sleep(0.01)
    return os.getpid()


@pytest.fixture
def ranks(tmp_path: Path) -> Path:
    random = np.random.default_rng(1)
    return Job(work_us=work(random, 4, 3, 2), entry_us=(0.0, 40.0, 10.0, 20.0)).write(tmp_path)


@pytest.fixture(scope="module")
def no_cluster() -> Iterator[None]:
    """Ray is there and not running; nothing of it is left afterwards."""
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    assert not ray.is_initialized()
    yield
    assert not ray.is_initialized()


def same(one: TaskGraph, other: TaskGraph) -> bool:
    """Equal up to the numbering of names and shapes."""

    def texts(graph: TaskGraph, key: str) -> list[str]:
        table = graph.shapes if key == "shape" else graph.names
        return [table[i] if i >= 0 else "" for i in getattr(graph, key).tolist()]

    told = all(texts(one, key) == texts(other, key) for key in ("name", "op", "shape"))
    plain = [key for key in (*TASK_COLUMNS, *EDGE_COLUMNS, "in_ptr", "marks") if key not in ("name", "op", "shape")]
    return told and one.lanes == other.lanes and all(
        np.array_equal(getattr(one, key), getattr(other, key)) for key in plain
    )  # fmt: skip


@pytest.mark.parametrize("pool", [True, False])
def test_results_keep_the_order_of_the_items(pool: bool) -> None:
    told: list[float] = []
    assert executor.map(square, range(7), pool=pool, progress=told.append) == [i * i for i in range(7)]
    assert told == [pytest.approx(i / 7) for i in range(1, 8)]
    assert executor.map(square, [], pool=pool) == []


@pytest.mark.parametrize("pool", [True, False])
def test_a_mistake_comes_back_as_itself(pool: bool) -> None:
    with pytest.raises(TraceError, match=r"^file 2 is no recording: leave it out\.$"):
        executor.map(refuse, range(4), pool=pool)
    with pytest.raises(ValueError, match=r"math domain|got -1"):  # up to Python 3.13, and after it
        executor.map(math.sqrt, [1.0, -1.0], pool=pool)


@pytest.mark.skipif(executor.cores() < 2, reason="one core: no pool is started")
def test_a_killed_worker_is_told() -> None:
    with pytest.raises(ForetraceError, match="a worker process died after"):
        executor.map(die, range(4))


@pytest.mark.skipif(executor.cores() < 2, reason="one core: no pool is started")
def test_an_item_whose_worker_died_is_begun_again(tmp_path: Path) -> None:
    assert executor.map(die_once, [tmp_path / "a", tmp_path / "b"], again=2) == ["a", "b"]


def test_a_place_keeps_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "cores", lambda: 2)

    def who(name: str) -> set[int]:
        (tmp_path / name).mkdir()
        return set(executor.map(meet, [tmp_path / name] * 2, pool=processes))

    with executor.place("here") as processes:
        first, second = who("first"), who("second")
        with pytest.raises(ForetraceError, match="a worker process died after"):
            executor.map(die, range(2), pool=processes)
        third = who("third")
    assert first == second and not third & first
    assert not any(Path(f"/proc/{each}").exists() for each in first | third)


def test_places_that_do_not_exist(monkeypatch: pytest.MonkeyPatch, ranks: Path) -> None:
    with pytest.raises(ForetraceError, match="`on=moon` does not exist; choose here or ray"):
        executor.map(square, [1], on="moon")
    with pytest.raises(ForetraceError, match="`on=moon`"):
        flow.rank_graphs(ranks, on="moon")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"foretrace\[ray\]"):
        executor.map(square, [1], on="ray")


def test_ranks_read_apart_are_the_ranks_of_one_trace(ranks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = read(ranks)
    together = [build(trace, info.rank) for info in trace.ranks]
    for least in (1 << 40, 0):  # a loop, then a pool
        monkeypatch.setattr("foretrace.graph.ranks.POOL_PAYS_BYTES", least)
        apart = flow.rank_graphs(ranks)
        assert all(same(one, other) for one, other in zip(together, apart, strict=True))
        assert [each.info.window_ns for each in apart] == [each.info.window_ns for each in together]
    assert [graph.lanes[0].rank for graph in flow.rank_graphs(ranks, ranks=[3, 1])] == [1, 3]


def test_ranks_that_no_file_tells_are_numbered_by_place(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    for i, file in enumerate(Job(work_us=work(random, 3, 2)).run()[0]):
        file.write(tmp_path / f"{'abc'[i]}.json")
    graphs = flow.rank_graphs(tmp_path)
    trace = read(tmp_path)
    assert [{lane.rank for lane in graph.lanes} for graph in graphs] == [{0}, {1}, {2}]
    assert all(same(build(trace, i), graph) for i, graph in enumerate(graphs))
    assert [graph.info.world_size for graph in graphs] == [3, 3, 3]
    assert "taken as rank 2 by its place" in " ".join(graphs[2].info.notes)


def test_mistakes_in_sets_of_ranks(ranks: Path) -> None:
    with pytest.raises(TraceError, match="has no rank 9: choose from 0, 1, 2, 3"):
        flow.rank_graphs(ranks, ranks=[9])
    with pytest.raises(TraceError, match="has no step"):
        flow.rank_graphs(ranks, steps=[99])
    (ranks / "rank2.json").write_text("dear reader")
    (ranks / "notes.json").write_text('{"shape": [1, 2]}')
    with pytest.raises(TraceError, match=r"rank2\.json"):
        flow.rank_graphs([ranks / f"rank{i}.json" for i in range(4)])
    kept = flow.rank_graphs(ranks, salvage=True)
    assert len(kept) == 3 and any("left out" in note for note in kept[0].info.notes)
    (ranks / "rank2.json").write_text((ranks / "rank1.json").read_text())
    with pytest.raises(TraceError, match="are both rank 1"):
        flow.rank_graphs(ranks)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Ray's own making
@pytest.mark.usefixtures("no_cluster")
def test_ray_is_started_for_the_call_and_leaves_standard_output_alone(capfd: pytest.CaptureFixture[str]) -> None:
    import ray

    with pytest.raises(ForetraceError, match="a worker process died after"):
        executor.map(die, range(2), on="ray")
    assert not ray.is_initialized()
    assert capfd.readouterr().out == ""


@pytest.mark.usefixtures("no_cluster")
@pytest.mark.filterwarnings("ignore")  # of Ray's own making
def test_a_cluster_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ForetraceError, match=r"no Ray cluster answers at RAY_ADDRESS=127\.0\.0\.1:1"):
        executor.map(square, [1, 2], on="ray")
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")  # of a cluster that was killed
    assert executor._address() == "local"
