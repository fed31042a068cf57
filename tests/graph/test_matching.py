"""Collectives of several ranks: which are one, and what is said of those that are not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from foretrace.errors import GraphError
from foretrace.graph.builder import build
from foretrace.graph.collectives import CollectiveCalls, What, collective_calls, kind_of
from foretrace.graph.matching import listed, match
from foretrace.graph.one_run import match_and_align
from foretrace.trace.read import read
from tests.graph.rank_sets import Collective, Job, work
from tests.kineto_files import Recording

RANDOM = np.random.default_rng(7)


def calls_of(job: Job, folder: Path, ranks: list[int] | None = None) -> list[CollectiveCalls]:
    return [collective_calls(graph) for graph in job.graphs(folder, ranks)]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*)", "all_reduce"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "reduce_scatter"),
        ("nccl:_all_gather_base", "all_gather"),
        ("gloo:all_reduce", "all_reduce"),
        ("c10d::alltoall_base_", "all_to_all"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("all_to_allv", "all_to_all"),
        ("nccl:send 0->1", "send"),
        ("ncclDevKernel_SendRecv", "send_recv"),
        ("nccl:reduce", "reduce"),
        ("barrier", "barrier"),
    ],
)
def test_one_word_for_every_name_of_a_collective(name: str, kind: str) -> None:
    assert kind_of(name) == kind


@pytest.mark.parametrize("described", [True, False])
@pytest.mark.parametrize("numbered", [True, False])
def test_all_ranks_that_make_the_same_calls_match(tmp_path: Path, described: bool, numbered: bool) -> None:
    collectives = (Collective(), Collective(kind="AllGather", elements=7))
    job = Job(
        work_us=work(RANDOM, 3, 4, 2),
        collectives=collectives,
        described=described,
        numbered=numbered,
        offset_us=(0, 4000, -3000),
    )
    found = match(calls_of(job, tmp_path))
    assert found.matched == 8
    assert found.unmatched() == ()
    assert [m.what.kind for m in found.matches] == ["all_reduce", "all_gather"] * 4
    assert all(sorted(p.rank for p in m.members) == [0, 1, 2] for m in found.matches)


def test_what_newer_recordings_say_of_a_collective_is_kept(tmp_path: Path) -> None:
    (call, *_), *_ = (calls.what for calls in calls_of(Job(work_us=work(RANDOM, 2, 1)), tmp_path))
    assert (call.kind, call.group, call.members, call.group_size) == ("all_reduce", "0.0", (0, 1), 2)
    assert call.nbytes == 4096


def test_groups_that_the_recording_names_are_told_apart(tmp_path: Path) -> None:
    across, along = ((0, 2), (1, 3)), ((0, 1), (2, 3))
    job = Job(work_us=work(RANDOM, 4, 3, 2), collectives=(Collective(groups=across), Collective(groups=along)))
    found = match(calls_of(job, tmp_path))
    assert found.matched == 3 * 4
    assert {tuple(sorted(p.rank for p in m.members)) for m in found.matches} == {*across, *along}


def test_groups_that_nobody_names_are_told_apart_by_when_they_end(tmp_path: Path) -> None:
    along = ((0, 1), (2, 3))
    job = Job(
        work_us=work(RANDOM, 4, 6, 2),
        collectives=(Collective(groups=along), Collective(kind="AllGather", groups=((0, 2), (1, 3)))),
        described=False,
        offset_us=(0, 5000, -900, 20),
    )
    found, clock = match_and_align(calls_of(job, tmp_path))
    assert found.matched == 6 * 4
    assert any("ranks 0-1; 2-3" in sentence for sentence in found.missing)
    assert np.allclose(clock.offset_ns, [0, 5e6, -9e5, 2e4], atol=2000)


def test_a_lost_call_is_named_and_the_others_match_by_number(tmp_path: Path) -> None:
    calls = calls_of(Job(work_us=work(RANDOM, 3, 5)), tmp_path)
    calls[1] = _without(calls[1], [2])
    found = match(calls)
    assert (len(found.matches), found.matched) == (5, 4)
    assert any("only ranks 0, 2 recorded it" in sentence for sentence in found.unmatched())


def test_lost_calls_without_numbers_are_matched_by_time(tmp_path: Path) -> None:
    job = Job(work_us=work(RANDOM, 3, 6, 3), collectives=(Collective(),) * 3, described=False, offset_us=(0, 4e3, -5e3))
    calls = calls_of(job, tmp_path)
    calls[1] = _without(calls[1], [4])
    found, clock = match_and_align(calls)
    assert (len(found.matches), found.matched) == (18, 17)
    assert any("only ranks 0, 2 recorded it" in sentence for sentence in found.unmatched())
    assert np.allclose(clock.offset_ns, [0, 4e6, -5e6], atol=2000)


def _without(calls: CollectiveCalls, rows: list[int]) -> CollectiveCalls:
    keep = np.setdiff1d(np.arange(len(calls)), rows)
    columns = {key: getattr(calls, key)[keep] for key in ("row", "start", "end", "step_number", "sequence")}
    return replace(calls, **columns, what=tuple(calls.what[i] for i in keep))


def test_calls_that_disagree_are_named_with_both_sides(tmp_path: Path) -> None:
    calls = calls_of(Job(work_us=work(RANDOM, 3, 4)), tmp_path)
    odd = replace(calls[2].what[1], in_elements=5, out_elements=5)
    calls[2] = replace(calls[2], what=(calls[2].what[0], odd, *calls[2].what[2:]))
    found = match(calls)
    (sentence, *_) = found.unmatched()
    assert "number 2 of process group 0.0 is all_reduce of 1024 float on rank 0" in sentence
    assert "all_reduce of 5 float on rank 2" in sentence
    assert [len(m.members) for m in found.matches] == [3, 2, 3, 3]


def test_missing_ranks_are_counted_and_named(tmp_path: Path) -> None:
    found = match(calls_of(Job(work_us=work(RANDOM, 4, 2)), tmp_path, ranks=[0, 2]))
    assert found.matched == 2
    assert found.missing == (
        "2 of 4 ranks are not in this set (1, 3): waiting for them counts as transfer, and the last to arrive may be "
        "one of them.",
    )
    assert all(m.size == 4 and m.complete for m in found.matches)


def test_streams_of_other_numbers_on_every_rank_are_the_same_channel(tmp_path: Path) -> None:
    calls = calls_of(Job(work_us=work(RANDOM, 2, 4), described=False), tmp_path)
    calls[1] = replace(calls[1], what=tuple(replace(w, channel="stream 77") for w in calls[1].what))
    found = match(calls)
    assert found.matched == 4
    assert found.matches[0].what.channel == "communication stream 1"


def test_ranks_of_jobs_of_other_sizes_are_refused(tmp_path: Path) -> None:
    calls = calls_of(Job(work_us=work(RANDOM, 2, 2)), tmp_path)
    with pytest.raises(GraphError, match="rank 0 is one of 2 ranks and rank 1 one of 8: these are recordings of diff"):
        match([calls[0], replace(calls[1], world_size=8)])


def test_process_groups_that_their_members_describe_differently_are_refused(tmp_path: Path) -> None:
    calls = calls_of(Job(work_us=work(RANDOM, 3, 2)), tmp_path)
    other = tuple(replace(w, members=(0, 1)) for w in calls[1].what)
    with pytest.raises(GraphError, match=r"process group 0.0 has the ranks 0-2 on rank 0 and 0-1 on rank 1"):
        match([calls[0], replace(calls[1], what=other), calls[2]])


def test_one_rank_twice_is_refused(tmp_path: Path) -> None:
    calls = calls_of(Job(work_us=work(RANDOM, 2, 2)), tmp_path)
    with pytest.raises(GraphError, match="rank 0 is given twice"):
        match([calls[0], calls[0]])


def test_ranks_without_a_common_step_are_refused_where_only_order_could_match(tmp_path: Path) -> None:
    calls = calls_of(Job(work_us=work(RANDOM, 2, 2), described=False), tmp_path)
    with pytest.raises(GraphError, match=r"no step in common \(rank 0 recorded 5-6; rank 1 recorded 8-9\)"):
        match([calls[0], replace(calls[1], steps=(8, 9), step_number=calls[1].step_number + 3)])


def test_collectives_of_different_jobs_are_refused(tmp_path: Path) -> None:
    calls = calls_of(Job(work_us=work(RANDOM, 2, 6), described=False), tmp_path)
    other = tuple(replace(w, kind="all_gather") for w in calls[1].what)
    with pytest.raises(GraphError, match=r"no collective in common .*6 all_reduce.*6 all_gather"):
        match_and_align([calls[0], replace(calls[1], what=other)])


def test_recordings_of_different_days_are_refused(tmp_path: Path) -> None:
    calls = calls_of(Job(work_us=work(RANDOM, 2, 6), described=False), tmp_path)
    day = 3 * 86_400 * 10**9
    late = replace(calls[1], start=calls[1].start + day, end=calls[1].end + day)
    with pytest.raises(GraphError, match="rank 0 was recorded 3 days before rank 1"):
        match_and_align([calls[0], late])


def test_calls_that_cannot_be_one_are_taken_apart(tmp_path: Path) -> None:
    calls = calls_of(Job(work_us=work(RANDOM, 2, 9)), tmp_path)
    start, end = calls[1].start.copy(), calls[1].end.copy()
    start[4], end[4] = start[4] + 10**9, end[4] + 10**9
    found, _ = match_and_align([calls[0], replace(calls[1], start=start, end=end)])
    assert found.matched == 8
    assert any("leaves it" in sentence and "so these are not one" in sentence for sentence in found.unmatched())


def test_transfers_between_two_ranks_match_by_peers_and_order() -> None:
    files = []
    for rank in range(3):
        file = Recording()
        file.extra["distributedInfo"] = {"rank": rank, "world_size": 3, "backend": "nccl"}
        for i in range(3):
            if rank < 2:
                _transfer(file, "send", rank, rank + 1, 1000.0 + 100 * i)
            if rank > 0:
                _transfer(file, "recv", rank - 1, rank, 1000.0 + 100 * i)
        files.append(file)
    found = match([collective_calls(build(file.trace())) for file in files])
    assert found.matched == 6
    assert {m.what.peers for m in found.matches} == {(0, 1), (1, 2)}
    assert all(len(m.members) == 2 for m in found.matches)
    assert found.unmatched() == ()


def _transfer(file: Recording, kind: str, source: int, destination: int, ts: float) -> None:
    args = {"Collective name": kind, "In msg nelems": 64, "dtype": "Float", "Group size": 3, "Process Group Name": "0"}
    args |= {"Dst Rank": destination} if kind == "send" else {"Src Rank": source}
    stream = 30 if kind == "send" else 31
    file.on_device(
        "kernel", "ncclDevKernel_SendRecv(x)", ts + 7, 20, file.call("cudaLaunchKernel", ts, 5), stream, **args
    )


def test_peers_in_the_name_of_an_annotation_are_read() -> None:
    file = Recording()
    file.note("nccl:recv 1<-0", 990, 40)
    file.on_device("kernel", "ncclDevKernel_SendRecv(x)", 1007, 20, file.call("cudaLaunchKernel", 1000, 5), 30)
    (what,) = collective_calls(build(file.trace())).what
    assert (what.kind, what.peers) == ("recv", (0, 1))


def test_a_transfer_whose_peer_did_not_record_it_is_named() -> None:
    files = [Recording(), Recording()]
    for rank, file in enumerate(files):
        file.extra["distributedInfo"] = {"rank": rank, "world_size": 2, "backend": "nccl"}
        _transfer(file, "send" if rank == 0 else "recv", 0, 1, 1000.0)
    _transfer(files[0], "send", 0, 1, 1100.0)
    found, _ = match_and_align([collective_calls(build(file.trace())) for file in files])
    assert found.matched == 1
    assert found.unmatched() == (
        "send of the transfers from rank 0 to rank 1: only rank 0 recorded it (the first at 0.107 ms).",
    )


@given(lost=st.sets(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=8), numbered=st.booleans())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_lost_calls_leave_only_true_matches(
    tmp_path_factory: pytest.TempPathFactory, lost: set[tuple[int, int]], numbered: bool
) -> None:
    # Without numbers a match rests on time: what is lost must leave clocks something to go by.
    assume(numbered or len(lost) <= 3)
    calls = list(_whole(tmp_path_factory, numbered))
    place = [np.setdiff1d(np.arange(10), [c for r, c in lost if r == rank]) for rank in range(3)]
    calls = [_without(each, [c for r, c in lost if r == each.rank]) for each in calls]
    try:
        found, _ = match_and_align(calls)
    except GraphError:
        assert not numbered  # nothing certain is left
        return
    for each in found.matches:
        assert len({int(place[m.rank][m.call]) for m in each.members}) == 1
    whole = sum(all((rank, c) not in lost for rank in range(3)) for c in range(10))
    if numbered:
        assert found.matched == whole


_CACHE: dict[bool, list[CollectiveCalls]] = {}


def _whole(factory: pytest.TempPathFactory, numbered: bool) -> list[CollectiveCalls]:
    if numbered not in _CACHE:
        job = Job(work_us=work(np.random.default_rng(3), 3, 5, 2), collectives=(Collective(),) * 2, described=numbered)
        _CACHE[numbered] = calls_of(job, factory.mktemp("set"))
    return _CACHE[numbered]


def test_the_eight_ranks_of_a_recommender(shared_data: Path) -> None:
    trace = read(shared_data / "traces/param/dlrm_kineto_8rank")
    found, _ = match_and_align([collective_calls(build(trace, info.rank)) for info in trace.ranks])
    assert (found.matched, found.unmatched(), found.missing) == (8, (), ())
    kinds = [m.what.kind for m in found.matches]
    assert kinds == ["all_to_all"] * 4 + ["all_reduce", "all_to_all", "all_reduce", "all_reduce"]


def test_two_sampled_ranks_of_many_say_what_is_missing(shared_data: Path) -> None:
    names = ("timeline_analysis_sampled_rank-0.json.gz", "trace_filter_sampled_rank-1.json.gz")
    trace = read([shared_data / "traces/hta" / name for name in names])
    found, _ = match_and_align([collective_calls(build(trace, info.rank)) for info in trace.ranks])
    assert found.matched == 5
    assert "126 of 128 ranks are not in this set (2-127)" in found.missing[0]
    assert any("only rank 1 recorded them" in sentence for sentence in found.unmatched())


def test_numbers_are_listed_as_runs() -> None:
    assert listed([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert listed([2]) == "2"
    assert listed(list(range(0, 40, 2))).endswith("... (20 in all)")


def test_a_description_counts_bytes_of_the_larger_message() -> None:
    what = What(kind="all_gather", channel="x", dtype="c10::BFloat16", in_elements=10, out_elements=80)
    assert what.nbytes == 160
    assert What(kind="all_reduce", channel="x").nbytes == -1
