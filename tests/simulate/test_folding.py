"""Folding: many ranks out of a few. It equals the unfolded run, knows simple answers, and refuses what cannot be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.errors import ForetraceError, NotApplicableError
from foretrace.graph.collectives import collective_calls
from foretrace.graph.join import join
from foretrace.graph.one_run import match_and_align
from foretrace.graph.taskgraph import TaskGraph
from foretrace.simulate.folding import _Draws, fold, scale
from foretrace.simulate.replay import replay
from foretrace.simulate.transfers import meetings_of
from tests.simulate.rank_graphs import rank_set
from tests.simulate.unfolded import unfolded

MS = 1_000_000

works = st.tuples(st.integers(2, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**32 - 1))


def drawn(shape: tuple[int, int, int, int]) -> npt.NDArray[np.int64]:
    ranks, steps, each, seed = shape
    return np.random.default_rng(seed).integers(1, 50, (ranks, steps, each)) * 10_000


def doubled(kind: str, nbytes: float, workers: int) -> tuple[float, float, float]:
    """A network on which time doubles with every doubling of the workers."""
    del kind, nbytes
    return workers * 1e-6, workers * 0.5e-6, workers * 2e-6


def copied(graph: TaskGraph, ranks: int, copies: int, world: int) -> list[TaskGraph]:
    lanes = [tuple(replace(lane, rank=lane.rank + k * ranks) for lane in graph.lanes) for k in range(copies)]
    return [replace(graph, lanes=each, info=replace(graph.info, world_size=world)) for each in lanes]


def test_waits_and_transfers_of_a_run_that_can_be_worked_out_by_hand() -> None:
    work = np.array([[[10, 20]], [[30, 20]]]) * MS  # rank 1 comes 20 ms later to the first collective
    found = scale(rank_set(work, 5 * MS), 6, price=doubled, samples=0)
    assert found.recorded_s == pytest.approx(0.060)
    assert found.predicted_s == found.folded_s == pytest.approx(0.030 + 0.015 + 0.020 + 0.015)  # transfers x 6 / 2
    assert found.wait_s == pytest.approx([0.020, 0.0] * 3)
    assert found.transfer_s == pytest.approx([0.030] * 6)
    assert found.last_share == pytest.approx([1 / 12, 1 / 6 + 1 / 12] * 3)
    assert found.recorded_wait_s == pytest.approx(0.010) and found.recorded_transfer_s == pytest.approx(0.010)
    assert [found.low_s, found.high_s] == pytest.approx([0.065, 0.110])


@given(works, st.integers(1, 4))
def test_folding_ranks_that_do_not_vary_is_the_unfolded_run(shape: tuple[int, int, int, int], copies: int) -> None:
    graphs = rank_set(drawn(shape), 7_000)
    folded = fold(graphs, copies * len(graphs), price=doubled)
    start, end = replay(folded.graph)
    whole, row = unfolded(folded.graph, folded.meets, copies)
    start_of_all, end_of_all = replay(whole)
    assert np.array_equal(end_of_all[row], np.repeat(end[:, None], copies, axis=1))
    assert np.array_equal(start_of_all[row], np.repeat(start[:, None], copies, axis=1))


@given(works, st.integers(1, 3))
def test_folding_is_the_joined_run_of_as_many_recordings(shape: tuple[int, int, int, int], copies: int) -> None:
    """Against `join` itself: the recordings of the copies, combined like any other set."""
    graphs = rank_set(drawn(shape), 7_000)
    ranks = len(graphs)
    many = [copy for graph in graphs for copy in copied(graph, ranks, copies, ranks * copies)]
    matching, clock = match_and_align([collective_calls(graph) for graph in many])
    joined = join(many, matching=matching, clock=clock)
    start, end = replay(joined)
    found = meetings_of(joined, matching, clock)
    wait = np.zeros(ranks * copies)
    np.add.at(wait, joined.rank[found.arrival], start[found.transfer] - start[found.arrival])
    # As recorded: a network on which nothing changes with the number of workers.
    one = scale(graphs, ranks * copies, price=lambda kind, nbytes, workers: (1e-3, 1e-3, 1e-3), samples=0)
    assert one.wait_s == pytest.approx(wait / shape[1] / 1e9)
    assert one.predicted_s == pytest.approx(float(np.median(np.diff(end[joined.marks]))) / 1e9)


@settings(max_examples=30)
@given(works, st.integers(0, 40), st.integers(0, 2**16))
def test_more_ranks_that_vary_never_end_earlier(shape: tuple[int, int, int, int], more: int, seed: int) -> None:
    ranks, _, each, number = shape
    graphs = rank_set(drawn((ranks, 1, each, number)), 7_000)
    found = scale(graphs, ranks + more, price=doubled, samples=4, seed=seed)
    assert found.predicted_s >= found.folded_s
    assert found.low_s <= found.predicted_s <= found.high_s
    assert len(found.wait_s) == ranks + more and np.all(found.last_share >= 0)
    assert found.last_share.sum() == pytest.approx(1)
    if not more:
        assert found.predicted_s == found.folded_s


@settings(max_examples=20)
@given(works)
def test_as_many_ranks_as_were_recorded_take_as_long(shape: tuple[int, int, int, int]) -> None:
    graphs = rank_set(drawn(shape), 7_000)
    found = scale(graphs, len(graphs), price=doubled, samples=3)
    assert found.predicted_s == found.folded_s == found.recorded_s
    assert found.wait_s.mean() == pytest.approx(found.recorded_wait_s)


def test_the_last_of_many_comes_later_as_extremes_do() -> None:
    """One collective per step and steps that vary by chance: the step follows the slowest of N draws."""
    random = np.random.default_rng(3)
    work = np.rint(random.normal(100, 10, (4, 40, 1)) * 10_000).astype(np.int64)
    graphs = rank_set(work, 1_000)
    steps = {n: scale(graphs, n, samples=8).predicted_s for n in (4, 64, 1024)}
    assert steps[4] < steps[64] < steps[1024]
    # Drawn with replacement from 40 steps per rank, the slowest of 1,024 is the slowest that was recorded.
    assert steps[1024] == pytest.approx((work.max() + 1_000) / 1e9, rel=0.02)


def test_a_rank_that_the_last_copy_lacks_repeats_one_that_exists() -> None:
    """Three of two recorded ranks: whatever would be drawn for the fourth must not make the others wait."""
    folded = fold(rank_set(drawn((2, 4, 1, 5)), 7_000), 3)
    assert folded.copies == 2 and folded.recorded_rank.tolist() == [0, 1, 0]
    draws = _Draws(folded, 0)
    factors = draws.columns(0, 2)
    lane = folded.graph.rank
    here, missing = (np.unique(draws.group[(lane == rank) & (draws.group >= 0)]) for rank in (0, 1))
    alone = missing[~np.isin(missing, here)]  # groups of rank 1 only: transfers are shared
    assert np.array_equal(factors[alone, 0], factors[alone, 1])
    assert not np.array_equal(factors[here, 0], factors[here, 1])


def test_the_same_seed_gives_the_same_answer() -> None:
    graphs = rank_set(drawn((3, 4, 2, 5)), 7_000)
    first, again, other = (scale(graphs, 50, samples=4, seed=seed) for seed in (1, 1, 2))
    assert first.predicted_s == again.predicted_s and np.array_equal(first.wait_s, again.wait_s)
    assert not np.array_equal(first.wait_s, other.wait_s)


def test_a_network_unlike_the_recorded_one_is_taken_at_its_word() -> None:
    graphs = rank_set(drawn((2, 1, 1, 0)), 1_000_000)
    sized = [graph.with_columns(nbytes=np.where(graph.kind == 9, 4_000_000, -1).astype(np.int64)) for graph in graphs]
    said = []
    for each in sized:  # what a newer recording tells of its collectives
        what = {"kind": "all_reduce", "channel": "stream 7", "dtype": "float", "in_elements": 1_000_000,
                "out_elements": 1_000_000}  # fmt: skip
        collectives = {"what": [what], "call": [0], "sequence": [-1], "world_size": 2}
        said.append(replace(each, info=replace(each.info, collectives=collectives)))
    near = fold(said, 8, price=lambda kind, nbytes, workers: (workers * 1e-3 / 2, 0.0, 1.0))
    assert near.transfers.ratio == pytest.approx(1.0) and not near.transfers.absolute
    assert near.graph.dur[near.meetings.transfer].tolist() == [4_000_000, 4_000_000]
    far = fold(said, 8, price=lambda kind, nbytes, workers: (workers * 1e-1 / 2, 0.0, 1.0))
    assert far.transfers.ratio == pytest.approx(0.01) and far.transfers.absolute
    assert far.graph.dur[far.meetings.transfer].tolist() == [400_000_000, 400_000_000]


def test_transfers_from_one_rank_to_another_do_not_grow() -> None:
    graphs = rank_set(drawn((2, 2, 2, 0)), 7_000)
    what = [{"kind": "all_reduce", "channel": "stream 7"}, {"kind": "send_recv", "channel": "a", "peers": (0, 1)}]
    said = {"what": what, "call": [0, 1, 0, 1], "sequence": [-1] * 4, "world_size": 2}
    sets = [replace(graph, info=replace(graph.info, collectives=said)) for graph in graphs]
    assert fold(sets, 8).grows.tolist() == [True, False, True, False]
    with pytest.raises(NotApplicableError, match="a multiple of 2 ranks, as 6"):
        fold(sets, 7)


def test_what_the_network_cannot_price_stays_as_recorded() -> None:
    found = fold(rank_set(drawn((2, 1, 2, 0)), 7_000), 8, price=lambda kind, nbytes, workers: None)
    assert np.array_equal(found.graph.dur, found.recorded.dur)
    assert any(each.name == "transfers kept: all_reduce" for each in found.transfers.assumptions)


@pytest.mark.parametrize(("ranks", "says"), [(1, "fewer than the 2"), (0, "fewer"), (20_000, "at most 16,384")])
def test_numbers_of_ranks_that_cannot_be(ranks: int, says: str) -> None:
    with pytest.raises(NotApplicableError, match=says):
        scale(rank_set(drawn((2, 1, 1, 0)), 7_000), ranks)


def test_sets_that_cannot_stand_for_more() -> None:
    graphs = rank_set(drawn((2, 1, 1, 0)), 7_000)
    with pytest.raises(NotApplicableError, match="is one rank"):
        scale(graphs[:1], 8)
    with pytest.raises(ForetraceError, match="given twice"):
        scale([graphs[0], graphs[0]], 8)


def test_eight_recorded_ranks(shared_data: object) -> None:
    from pathlib import Path

    from foretrace.graph.ranks import rank_graphs

    assert isinstance(shared_data, Path)
    graphs = rank_graphs(shared_data / "traces" / "param" / "dlrm_kineto_8rank")
    found = scale(graphs, 1024, samples=8)
    assert found.recorded_wait_s == pytest.approx(5.86e-3, abs=1e-5)
    assert found.recorded_transfer_s == pytest.approx(0.21e-3, abs=5e-6)
    assert found.predicted_s > found.recorded_s and found.wait_s.mean() > found.recorded_wait_s
    assert len(found.step_s) == 1024 and np.isfinite(found.step_s).all()
