"""Neighbour samplers as candidates: what is predicted is what a loader does, memory holds, staleness is stated."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from time import sleep

import numpy as np
import pytest

from foretrace.arrays import Float32, Int64
from foretrace.errors import ForetraceError
from foretrace.plan.data.neighbour_caches import candidates, fan_outs, samplers
from foretrace.plan.data.plan import DataCandidate, ranked
from foretrace.training.rows.graphs import Adjacency, planted
from foretrace.training.rows.neighbours import CachePolicy, NeighbourLists, blocks, policies
from foretrace.training.rows.rows import Rows, RowsInMemory
from foretrace.training.rows.samplers import NeighborLoader

NODES, FAN_OUT, BATCH, EVERY = 2000, (6, 4), 64, 5
ARMS: dict[str, CachePolicy | None] = {"plain": None, **policies(EVERY)}
NODE_SET = np.arange(NODES)


def random_graph(degree: int = 30, nodes: int = NODES) -> Adjacency:
    return Adjacency.of(np.random.default_rng(0).integers(0, nodes, (nodes * degree // 2, 2)), nodes)


class CountedLists(NeighbourLists):
    """A second for every block that is read, and nothing else takes time."""

    def clock(self) -> float:
        assert isinstance(self.kept, Rows)
        return float(self.kept.counters.rows_read)


def counted(adjacency: Adjacency, width: int = 16) -> NeighbourLists:
    return CountedLists(adjacency.starts, RowsInMemory(blocks(adjacency, width)))


@pytest.mark.parametrize("name", ARMS)
def test_what_is_predicted_is_what_a_loader_takes(name: str) -> None:
    lists, policy, periods = counted(random_graph()), ARMS[name], 12
    (found,) = candidates(
        lists, num_neighbors=FAN_OUT, input_nodes=NODE_SET, batch_size=BATCH, among={name: policy}, seed=1
    )
    loader = NeighborLoader(lists, num_neighbors=FAN_OUT, batch_size=BATCH, cache=policy, seed=2)
    random, begin = np.random.default_rng(3), lists.clock()
    for _ in range(periods * EVERY + 1):  # the first refresh comes after as many
        loader.sample(random.permutation(NODES)[:BATCH])
    taken = (lists.clock() - begin) / (periods * EVERY)
    assert found.epoch_s / found.batches == pytest.approx(taken, rel=0.08, abs=0.01)
    assert found.low_s / found.batches <= taken + 0.01 and taken <= found.high_s / found.batches + 0.01
    assert found.batches == len(NeighborLoader(lists, num_neighbors=FAN_OUT, batch_size=BATCH))


@pytest.mark.parametrize("width", [0, 64, 1024])
@pytest.mark.parametrize("degree", [8, 60])
def test_memory_holds_and_is_not_exaggerated(width: int, degree: int) -> None:
    adjacency = random_graph(degree, 20_000)
    for name in ("plain", "fcr", "otf-partial-fetch"):
        rows = RowsInMemory(blocks(adjacency, width)) if width else None
        lists = NeighbourLists(adjacency.starts, rows) if rows else NeighbourLists.of(adjacency)
        (found,) = candidates(
            lists, num_neighbors=(10, 5), input_nodes=np.arange(20_000), batch_size=256, among={name: ARMS[name]},
        )  # fmt: skip
        tracemalloc.start()
        loader = NeighborLoader(lists, num_neighbors=(10, 5), batch_size=256, shuffle=True, cache=ARMS[name])
        for _, _ in zip(range(2 * EVERY), loader, strict=False):
            pass
        peak = tracemalloc.get_traced_memory()[1] + lists.memory_bytes
        tracemalloc.stop()
        assert peak <= found.memory_bytes <= 2.5 * peak, (name, peak, found.memory_bytes)


def test_samplers_of_any_graph_are_timed() -> None:
    for adjacency in (random_graph(), random_graph(1, 1), Adjacency.of(np.empty((0, 2), np.int64), 3)):
        for lists in (
            NeighbourLists.of(adjacency),
            NeighbourLists(adjacency.starts, RowsInMemory(blocks(adjacency, 8))),
        ):
            for each in candidates(lists, num_neighbors=(2,), input_nodes=np.arange(adjacency.nodes), batch_size=2):
                assert 0 <= each.low_s <= each.epoch_s <= each.high_s < np.inf


def test_staleness_is_stated_and_the_choice_fits_the_memory() -> None:
    adjacency = random_graph(60)
    lists = counted(adjacency, 64)
    found = list(candidates(lists, num_neighbors=FAN_OUT, input_nodes=NODE_SET, batch_size=BATCH))
    assert [each.loader for each in found] == ["plain", *policies()]
    hub = int(adjacency.degrees.max())
    for each in found:
        notes = " ".join(each.notes)
        assert each.loader == "plain" or (f"a node of {hub} neighbours shows " in notes and "were filled in" in notes)
    best, plain = ranked(found, 10**9)[0], found[0]
    assert best.epoch_s < 0.1 * plain.epoch_s and best.memory_bytes > plain.memory_bytes
    assert ranked(found, plain.memory_bytes) == (plain,)
    few = candidates(
        lists, num_neighbors=FAN_OUT, input_nodes=NODE_SET, batch_size=BATCH, memory_bytes=plain.memory_bytes
    )
    assert [each.loader for each in few if each.epoch_s < np.inf] == ["plain"], "what does not fit is not filled"
    all_of_them = list(candidates(lists, num_neighbors=(-1,), input_nodes=NODE_SET, batch_size=BATCH))
    assert [each.loader for each in all_of_them] == ["plain"]
    (empty,) = candidates(lists, num_neighbors=(2,), input_nodes=NODE_SET[:0], batch_size=1, among={"p": None})
    assert (empty.batches, empty.epoch_s) == (0, 0.0)


def test_samplers_are_ranked_within_a_memory(tmp_path: Path) -> None:
    data = planted(nodes=800, edges=24_000, communities=4, features=1)
    adjacency = data.adjacency

    def ranked_within(memory_bytes: int) -> tuple[DataCandidate, ...]:
        return samplers(data, folder=tmp_path, memory_bytes=memory_bytes, num_neighbors=FAN_OUT, batch_size=BATCH)

    found, small = ranked_within(10**9), ranked_within(13 * 10**5)
    assert len(found) == 2 + len(policies()) and list(tmp_path.iterdir()) == []
    assert [each.epoch_s for each in found] == sorted(each.epoch_s for each in found)
    by_name = {(each.loader, each.parameters["lists"]): each for each in found}
    in_memory, on_disk = by_name["plain", "memory"], by_name["plain", "disk"]
    assert in_memory.disk_bytes == 0 and on_disk.disk_bytes > 4 * len(adjacency.neighbours)
    assert in_memory.epoch_s < on_disk.epoch_s, "every list is in memory"
    assert by_name["otf", "disk"].epoch_s < on_disk.epoch_s
    assert 0 < len(small) < len(found) and all(each.memory_bytes <= 1.3e6 for each in small)
    with pytest.raises(ForetraceError, match="the least that works is"):
        ranked_within(10)


@pytest.mark.parametrize("text", ["", "a", "10,", "3,-2", "1.5", "0", "10,0"])
def test_what_is_no_fan_out_is_refused(text: str) -> None:
    assert fan_outs("10, 5,-1") == (10, 5, -1)
    with pytest.raises(ForetraceError, match="must be numbers of neighbours per hop"):
        fan_outs(text)


def test_the_clock_of_lists_leaves_out_nothing_that_is_waited_for() -> None:
    class Slow(RowsInMemory):
        def _get(self, ids: Int64) -> Float32:
            sleep(0.05)
            return super()._get(ids)

    lists = NeighbourLists(np.array([0, 8]), Slow(np.arange(8, dtype=np.int32).view(np.float32).reshape(4, 2)))
    assert isinstance(lists.kept, Slow)
    begin = lists.clock()
    np.testing.assert_array_equal(lists.read(np.array([7, 0])), [7, 0])
    assert lists.kept.counters.wait_s >= 0.04 and lists.clock() - begin >= lists.kept.counters.wait_s
