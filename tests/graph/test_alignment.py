"""Clocks of several ranks: what is recovered, how sure it is, and what must hold afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.graph.alignment import align
from foretrace.graph.builder import build
from foretrace.graph.collectives import CollectiveCalls, What, collective_calls
from foretrace.graph.matching import Matching
from foretrace.graph.one_run import match_and_align
from foretrace.trace.read import read
from tests.graph.rank_sets import Collective, Job, shifted, work

MS = 1_000_000


def a_set(
    arrivals: Sequence[Sequence[int]],
    transfers: Sequence[int],
    *,
    offsets: Sequence[float],
    drift: Sequence[float] = (),
    jitter: Sequence[Sequence[int]] | None = None,
    kind: str = "all_reduce",
    hosts: Sequence[str] = (),
    members: Sequence[Sequence[int]] | None = None,
) -> list[CollectiveCalls]:
    """Calls of a set of ranks from true arrivals (collectives x ranks, ns), as clocks that are off recorded them."""
    ranks = len(arrivals[0])
    result = []
    for r in range(ranks):
        mine = [i for i in range(len(arrivals)) if members is None or r in members[i]]
        start = np.array([arrivals[i][r] for i in mine], dtype=np.float64)
        last = [max(arrivals[i][s] for s in (range(ranks) if members is None else members[i])) for i in mine]
        end = np.array([a + transfers[i] + (jitter[i][r] if jitter else 0) for a, i in zip(last, mine, strict=True)])
        pace = 1.0 + (drift[r] if drift else 0.0)
        clock = [np.rint(t * pace + offsets[r]).astype(np.int64) for t in (start, end)]
        group = [() if members is None else tuple(members[i]) for i in mine]
        result.append(
            CollectiveCalls(
                rank=r, world_size=ranks, host=hosts[r] if hosts else "", steps=(), row=np.arange(len(mine)),
                start=clock[0], end=clock[1], step_number=np.zeros(len(mine), np.int64),
                sequence=np.array([sum(members is None or members[j] == members[i] for j in range(i)) for i in mine]),
                what=tuple(
                    What(kind=kind, channel="stream 7", group=str(g) if members else "", members=g) for g in group
                ),
            )
        )  # fmt: skip
    return result


def random_set(seed: int, ranks: int, count: int, offsets: Sequence[float], **more: object) -> list[CollectiveCalls]:
    random = np.random.default_rng(seed)
    base = np.cumsum(random.integers(1 * MS, 9 * MS, size=count))
    arrivals = (base[:, None] + random.integers(0, 900_000, size=(count, ranks))).tolist()
    return a_set(arrivals, random.integers(5_000, 90_000, size=count).tolist(), offsets=offsets, **more)  # type: ignore[arg-type]


@given(st.integers(0, 10**6), st.lists(st.integers(-5 * MS, 5 * MS), min_size=2, max_size=6), st.integers(1, 12))
def test_exact_ends_give_exact_offsets(seed: int, offsets: list[int], count: int) -> None:
    found, clock = match_and_align(random_set(seed, len(offsets), count, offsets))
    assert found.matched == count
    assert np.abs(clock.offset_ns - (np.array(offsets) - offsets[0])).max() <= 1.0
    assert clock.known.all() and not clock.drift.any()


@given(st.integers(0, 10**6), st.integers(2, 6))
@settings(max_examples=40)
def test_a_few_disturbed_ends_do_not_move_a_clock(seed: int, ranks: int) -> None:
    random = np.random.default_rng(seed)
    jitter = random.integers(0, 2_000, size=(15, ranks))
    jitter[random.integers(0, 15, size=3), random.integers(0, ranks, size=3)] += 700_000
    offsets = random.integers(-5 * MS, 5 * MS, size=ranks)
    _, clock = match_and_align(random_set(seed, ranks, 15, offsets.tolist(), jitter=jitter.tolist()))
    assert np.abs(clock.offset_ns - (offsets - offsets[0])).max() <= 3_000
    assert 0 < (clock.worst_ns or 0) < 3_000


@given(st.integers(0, 10**6))
@settings(max_examples=30)
def test_nobody_leaves_before_the_last_has_entered(seed: int) -> None:
    random = np.random.default_rng(seed)
    jitter = random.integers(0, 30_000, size=(9, 4))
    calls = random_set(seed, 4, 9, random.integers(-5 * MS, 5 * MS, size=4).tolist(), jitter=jitter.tolist())
    found, clock = match_and_align(calls)
    for each in found.matches:
        starts = [clock.aligned(m.rank, calls[m.rank].start[[m.call]])[0] for m in each.members]
        ends = [clock.aligned(m.rank, calls[m.rank].end[[m.call]])[0] for m in each.members]
        assert min(ends) >= max(starts) - 2
    assert np.all(clock.low_ns <= clock.offset_ns + 2) and np.all(clock.offset_ns <= clock.high_ns + 2)


@pytest.mark.parametrize("pace", [2e-6, -3e-5, 2e-4])
def test_drift_of_a_long_recording_is_found(pace: float) -> None:
    random = np.random.default_rng(5)
    base = np.cumsum(random.integers(200 * MS, 400 * MS, size=60))
    arrivals = (base[:, None] + random.integers(0, 900_000, size=(60, 3))).tolist()
    jitter = random.integers(0, 2_000, size=(60, 3)).tolist()
    calls = a_set(arrivals, [20_000] * 60, offsets=(0, 4 * MS, -MS), drift=(0, pace, 0), jitter=jitter)
    found, clock = match_and_align(calls)
    assert found.matched == 60
    assert clock.drift[1] == pytest.approx(pace, rel=0.05)
    assert clock.drift[[0, 2]].tolist() == [0, 0]
    assert np.abs(clock.offset_ns - [0, 4 * MS, -MS]).max() < 5_000
    for each in found.matches:
        ends = [clock.aligned(m.rank, calls[m.rank].end[[m.call]])[0] for m in each.members]
        assert np.ptp(ends) < 10_000


def test_a_short_recording_shows_no_drift() -> None:
    random = np.random.default_rng(5)
    jitter = random.integers(0, 8_000, size=(20, 3)).tolist()
    _, clock = match_and_align(random_set(1, 3, 20, (0, 5, 9), jitter=jitter))
    assert not clock.drift.any()


def test_ranks_that_share_no_collective_with_the_first_are_tied_through_others() -> None:
    members = [(0, 1), (1, 2), (2, 3)] * 3
    random = np.random.default_rng(2)
    arrivals = (np.arange(1, 10)[:, None] * 5 * MS + random.integers(0, MS, size=(9, 4))).tolist()
    calls = a_set(arrivals, [30_000] * 9, offsets=(0, 100, -5 * MS, 3 * MS), members=members)
    _, clock = match_and_align(calls)
    assert clock.offset_ns.tolist() == pytest.approx([0, 100, -5 * MS, 3 * MS], abs=1)
    assert clock.known.all()


def test_a_rank_that_nothing_ties_to_the_others_is_not_known() -> None:
    members = [(0, 1), (2, 3)] * 4
    arrivals = [[i * 5 * MS + 10 * r for r in range(4)] for i in range(1, 9)]
    calls = a_set(arrivals, [30_000] * 8, offsets=(0, 700, 5 * MS, 5 * MS + 90), members=members)
    _, clock = match_and_align(calls)
    assert clock.known.tolist() == [True, True, False, False]
    assert clock.offset_ns.tolist() == pytest.approx([0, 700, 0, 90], abs=1)  # among themselves they are tied


def test_a_clock_that_ranks_say_they_share_ties_them() -> None:
    members = [(0, 1), (2, 3)] * 4
    arrivals = [[i * 5 * MS + 10 * r for r in range(4)] for i in range(1, 9)]
    calls = a_set(arrivals, [30_000] * 8, offsets=(0, 0, 0, 4 * MS), members=members, hosts=("a", "a", "a", "b"))
    _, clock = match_and_align(calls)
    assert clock.known.all()
    assert clock.offset_ns.tolist() == pytest.approx([0, 0, 0, 4 * MS], abs=1)


def test_a_shared_clock_takes_the_noise_of_the_ends_away() -> None:
    random = np.random.default_rng(8)
    jitter = random.integers(0, 300_000, size=(9, 3)).tolist()
    calls = random_set(3, 3, 9, (0, 0, 0), jitter=jitter, hosts=("a", "a", "a"))
    _, clock = match_and_align(calls)
    assert clock.offset_ns.tolist() == [0, 0, 0]
    assert clock.worst_ns == 1_000


def test_collectives_are_believed_before_a_clock_that_is_said_to_be_shared() -> None:
    _, clock = match_and_align(random_set(3, 3, 9, (0, 5 * MS, 0), hosts=("a", "a", "a")))
    assert clock.offset_ns.tolist() == pytest.approx([0, 5 * MS, 0], abs=1)
    assert "ranks 0, 1, 2 say that they share a clock, but their collectives put rank 1 elsewhere" in clock.notes[0]


def test_broadcasts_do_not_bound_clocks_where_other_collectives_do() -> None:
    even, rooted = random_set(3, 2, 5, (0, MS)), random_set(4, 2, 5, (0, 8 * MS), kind="broadcast")
    calls = [
        replace(
            a,
            start=np.concatenate([a.start, b.start]),
            end=np.concatenate([a.end, b.end]),
            row=np.arange(10),
            sequence=np.arange(10),
            step_number=np.zeros(10, np.int64),
            what=a.what + b.what,
        )
        for a, b in zip(even, rooted, strict=True)
    ]
    found, clock = match_and_align(calls)
    assert found.matched == 10
    assert clock.offset_ns.tolist() == pytest.approx([0, MS], abs=1)


def test_one_rank_has_no_clock_to_compare() -> None:
    _, clock = match_and_align(random_set(3, 2, 5, (0, MS))[:1])
    assert (clock.offset_ns.tolist(), clock.worst_ns) == ([0.0], None)


def test_times_of_a_drifting_clock_are_brought_to_the_common_one() -> None:
    clock = align(Matching(calls=tuple(random_set(3, 2, 5, (0, 0))), matches=()))
    drifting = replace(clock, offset_ns=np.array([0.0, 500.0]), drift=np.array([0.0, 1e-3]))
    true = np.array([0, 10_000, 5_000_000])
    recorded = np.rint(true * 1.001 + 500).astype(np.int64)
    assert np.abs(drifting.aligned(1, recorded) - true).max() <= 5


def test_offsets_of_files_are_found_again(tmp_path: Path) -> None:
    offsets = (0.0, 4_000.5, -3_141.125)
    job = Job(work_us=work(np.random.default_rng(1), 3, 5, 2), collectives=(Collective(),) * 2, offset_us=offsets)
    _, clock = match_and_align([collective_calls(graph) for graph in job.graphs(tmp_path)])
    assert np.abs(clock.offset_ns - np.array(offsets) * 1000).max() <= 2


def test_injected_offsets_of_eight_ranks_are_recovered_within_2_us(shared_data: Path) -> None:
    trace = read(shared_data / "traces/param/dlrm_kineto_8rank")
    calls = [collective_calls(build(trace, info.rank)) for info in trace.ranks]
    _, plain = match_and_align(calls)
    assert np.abs(plain.offset_ns).max() < 3_000
    assert (plain.worst_ns or 0) < 2_000
    random = np.random.default_rng(11)
    for trial in range(40):
        offsets = random.integers(-5 * MS, 5 * MS, size=8)
        if trial % 2:
            offsets[np.arange(8) != random.integers(8)] = 0
        moved = [replace(c, start=c.start + o, end=c.end + o) for c, o in zip(calls, offsets, strict=True)]
        found, clock = match_and_align(moved)
        assert found.matched == 8
        assert np.abs(clock.offset_ns - (offsets - offsets[0]) - plain.offset_ns).max() < 2_000


def test_a_shifted_trace_of_eight_ranks_is_recovered(shared_data: Path) -> None:
    trace = read(shared_data / "traces/param/dlrm_kineto_8rank")
    _, plain = match_and_align([collective_calls(build(trace, info.rank)) for info in trace.ranks])
    for rank, ns in ((3, 5 * MS), (7, -5 * MS), (0, 4_321_000)):
        moved = shifted(trace, rank, ns)
        _, clock = match_and_align([collective_calls(build(moved, info.rank)) for info in moved.ranks])
        expected = plain.offset_ns + np.where(np.arange(8) == rank, ns, 0)
        assert np.abs(clock.offset_ns - (expected - expected[0])).max() < 2_000
