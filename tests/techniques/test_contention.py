"""Transfers that share links: times worked out by hand, nothing changes where nothing is shared, never faster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace import flow
from foretrace.cost.network.link_network import LinkNetwork
from foretrace.cost.network.network import Network
from foretrace.cost.network.parse import network
from foretrace.errors import GraphError, NotApplicableError
from foretrace.graph.join import join
from foretrace.graph.taskgraph import TaskGraph, TaskKind
from foretrace.simulate.timeline import Timeline, simulate
from foretrace.techniques.arguments import parse
from foretrace.techniques.base import Technique
from foretrace.techniques.whatif import whatif
from foretrace.testing import TechniqueConformance, recorded, small_training
from foretrace.testing.technique import check_valid
from foretrace.testing.workloads import Gpu, optimizer_facts
from tests.simulate.rank_graphs import rank_set
from tests.simulate.test_groups import Ranks, group_graphs
from tests.techniques.backward import PLAIN, Backward
from tests.techniques.test_data_parallel import THREE, messages

CNN = Path(__file__).parents[1] / "data" / "cnn.json.gz"
TWO_BUCKETS = f"data-parallel workers=2 network=8gbit bucket_mb=1.5 {PLAIN}"  # 3 MB at 7 ms, 4 MB at 9 ms, 1 GB/s


@lru_cache
def recorded_small() -> TaskGraph:
    return recorded(small_training(), steps=5)


@lru_cache
def exchanging() -> Mapping[str, TaskGraph]:
    """A processor's recording and a device's, both with the messages of data-parallel."""
    ring = "data-parallel workers=4 network=1gbit/50us bucket_mb=0.01 company=1"
    gpu = Gpu(steps=6, recording=optimizer_facts(6, 60_000, "SGD", momentum=0.9)).graph()
    return {
        "cpu": parse(ring).predict(recorded_small()),
        "gpu": parse(f"{ring} gradient_mb=1").predict(gpu),
    }


class OnMessages(TechniqueConformance):
    def graphs(self) -> Mapping[str, TaskGraph]:
        return exchanging()


class TestNothingShared(OnMessages):
    technique: ClassVar[Technique] = parse("contention")


class TestOthersOnTheLinks(OnMessages):
    technique: ClassVar[Technique] = parse("contention background=0.4 interference=1.2")


del OnMessages  # only its subclasses are tests


def predicted(graph: TaskGraph, *texts: str) -> Timeline:
    for text in texts:
        graph = parse(text).predict(graph)
        check_valid(graph)
    return simulate(graph)


def cluster(folder: Path, text: str) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(text)
    return path


def ranks() -> TaskGraph:
    """Two steps of four ranks: work of 10 to 40 us, then an all-reduce of 100 us."""
    work = np.tile(np.arange(1, 5)[:, None, None] * 10_000, (1, 2, 1))
    return join(rank_set(work, 100_000))


FOUR = "name: four\nnodes: 4\nper_node: 1\ninside: 80gbit\nbetween: 8gbit\n"


def test_two_groups_over_one_oversubscribed_switch_take_twice_as_long(tmp_path: Path) -> None:
    """3 MB at 7 ms and, one more in flight, 4 MB at 10 ms: the core carries half of them at a time.

    By 10 ms the first has half of its 3 ms behind it; from then on each gets a quarter, so it ends at 16 ms. The second
    has 2.5 of its 4 ms left and gets a half: 21 ms. Two groups need 2 × 7 ms in all.
    """
    graph = Backward(elements=THREE).graph()
    core = cluster(tmp_path, FOUR + "oversubscription: 2\n")
    alone = predicted(graph, TWO_BUCKETS)
    assert [each[1:] for each in messages(alone)] == [(7.0, 10.0), (10.0, 14.0)]
    shared = predicted(graph, TWO_BUCKETS, f"contention groups=2 network={core}")
    assert [each[1:] for each in messages(shared)] == [(7.0, 16.0), (10.0, 21.0)]
    assert shared.step_times_ns.tolist() == [22_000_000] * 4
    said = [change.what for change in shared.graph.changes if change.technique == "contention"]
    assert said == [
        "8 of 8 transfers share a link of four with another one, of 2 groups that send at the same time: "
        "28 → 80 ms in all, most load on core",
        "the step goes from 15 to 22 ms",
    ]


@pytest.mark.parametrize(
    ("text", "groups"),
    [(FOUR, 2), (FOUR + "oversubscription: 2\n", 1), (FOUR.replace("per_node: 1", "per_node: 2"), 1)],
)
def test_disjoint_links_change_nothing(text: str, groups: int, tmp_path: Path) -> None:
    graph = parse(TWO_BUCKETS).predict(Backward(elements=THREE).graph())
    after = parse(f"contention groups={groups} network={cluster(tmp_path, text)}").predict(graph)
    assert np.array_equal(after.dur, graph.dur)
    again = parse("contention").predict(after)  # nothing was shared, so it may be asked again
    assert np.array_equal(again.dur, graph.dur)
    assert after.changes[-1].what.endswith("none takes longer")


def test_levels_of_all_machines_share_the_way_out(tmp_path: Path) -> None:
    """Two machines of two: both pairs between the machines send at the same time over one link."""
    graph = Backward(elements=[4_000_000], steps=1).graph()  # 16 MB
    path = cluster(tmp_path, "nodes: 2\nper_node: 2\ninside: 80gbit\nbetween: 8gbit\n")
    levels = "hierarchical-allreduce levels=2x2 networks=80gbit;8gbit"
    base = [f"data-parallel workers=4 network=8gbit bucket_mb=1000 {PLAIN}", levels]

    def lengths(*texts: str) -> list[float]:
        return [round(end - start, 6) for _, start, end in messages(predicted(graph, *base, *texts), 0)]

    assert lengths() == [0.8, 8.0, 0.8]  # half of 16 MB at 10 GB/s, all of 8 MB at 1 GB/s
    assert lengths(f"contention network={path}") == [0.8, 16.0, 0.8]
    with pytest.raises(NotApplicableError, match="several networks; give the file of the cluster"):
        lengths("contention")


def test_communication_slows_what_runs_beside_it() -> None:
    """The last 2 ms of the backward pass begin with the first message at 7 ms and take 3 ms beside it."""
    graph = parse(TWO_BUCKETS).predict(Backward(elements=THREE).graph())
    plain, slowed = simulate(graph), predicted(graph, "contention interference=1.5")
    changed = np.flatnonzero(slowed.graph.dur != graph.dur)
    assert graph.dur[changed].tolist() == [2_000_000] * 4 and slowed.graph.dur[changed].tolist() == [3_000_000] * 4
    assert (plain.step_time_s, slowed.step_time_s) == (0.015, 0.015)  # behind the messages
    late = predicted(graph, "contention interference=2")  # 1.5 of 2 ms beside the message, the rest beside the next
    assert late.graph.dur[changed].tolist() == [3_500_000] * 4


def test_others_on_the_links_take_their_share() -> None:
    graph = Backward(elements=[1_000_000]).graph()  # 4 MB at 3 ms
    ring = f"data-parallel workers=2 network=8gbit/1ms {PLAIN}"
    assert [each[1:] for each in messages(predicted(graph, ring))] == [(3.0, 9.0)]  # two latencies, 4 ms
    assert [each[1:] for each in messages(predicted(graph, ring, "contention background=0.5"))] == [(3.0, 13.0)]


def test_a_prediction_ranges_over_others_on_the_links() -> None:
    found = whatif(Backward(elements=[1_000_000]).graph(), [parse(TWO_BUCKETS), parse("contention")])
    weighed = {each.assumption.flag: each for each in found.assumptions}["background"]
    assert weighed.at_low_s == found.after_s
    assert weighed.at_high_s == pytest.approx(found.after_s + 4e-3 * (1 / 0.7 - 1), abs=1e-9)


def test_end_to_end_on_a_recording() -> None:
    run = flow.read(CNN).graph()
    found = run.apply(parse("data-parallel workers=4 network=1gbit"), parse("contention")).whatif()
    assert found.stages[1].after_s == found.stages[0].after_s
    busy = run.apply(parse("data-parallel workers=4 network=1gbit"), parse("contention background=0.9")).whatif()
    assert busy.after_s > found.after_s


@pytest.mark.parametrize(
    "text",
    [
        "parameter-server servers=2 colocated=yes",
        "parameter-server servers=2",
        "tensor-partition elements=1000",
        "hierarchical-allreduce levels=2x2",
        "priority",
        "gradient-compression method=fp16",
        "gradient-compression method=topk",
    ],
)
def test_messages_of_other_techniques_take_what_they_took(text: str) -> None:
    for graph in exchanging().values():
        changed = parse(text).predict(graph)
        after = parse("contention").predict(changed)
        assert np.array_equal(after.dur, changed.dur)
        slower = parse("contention background=0.5").predict(changed)
        assert np.all(slower.dur >= changed.dur) and np.any(slower.dur > changed.dur)


def test_a_push_and_a_pull_share_links_where_servers_sit_beside_workers() -> None:
    """4 MB are ready at 2.1 and 2.2 ms. Server 0 sends to worker 1 over the links on which worker 0 sends to server 1,
    and that push has 0.1 ms left when the pull begins at 6.1 ms: both at half the rate, it ends at 6.3 ms.
    """
    graph = Backward(elements=[1_000_000] * 2, backward_ms=0.1).graph()
    ring = f"data-parallel workers=2 network=8gbit bucket_mb=1 {PLAIN}"
    servers = "parameter-server servers=2 colocated=yes sharded=no sum_gb_s=1e9"
    plain, shared = predicted(graph, ring, servers), predicted(graph, ring, servers, "contention")
    assert [each[1:] for each in messages(plain)] == [(2.1, 6.1), (2.2, 6.2), (6.1, 10.1), (6.2, 10.2)]
    assert [each[1:] for each in messages(shared)] == [(2.1, 6.1), (2.2, 6.3), (6.1, 10.2), (6.3, 10.3)]


@pytest.mark.parametrize(
    "text", ["local-steps workers=4 network=1gbit", "fully-sharded workers=2 network=1gbit/20us blocks=Conv2d"]
)
def test_messages_without_a_plan_take_what_they_took(text: str) -> None:
    graph = parse(text).predict(recorded_small())
    assert np.array_equal(parse("contention").predict(graph).dur, graph.dur)


chains = st.tuples(
    st.integers(2, 5),
    st.lists(st.sampled_from((1_000, 250_000, 400_000, 1_000_000)), min_size=1, max_size=4),
    st.sampled_from((0.001, 0.5, 1.5, 100)),
    st.sampled_from((0, 1, 50, 700)),
    st.sampled_from((0.7, 1.0, 1.3)),
)


@settings(max_examples=40)
@given(chains)
def test_alone_everything_takes_what_the_graph_says(chain: tuple[int, list[int], float, int, float]) -> None:
    graph = _chain(*chain)
    after = parse("contention").predict(graph)
    assert np.array_equal(after.dur, graph.dur)


@settings(max_examples=40)
@given(
    chains, st.integers(1, 3), st.sampled_from((0.0, 0.2, 0.9)), st.sampled_from(("", "1", "1.3", "2")),
    st.sampled_from((1, 2, 6)),
)  # fmt: skip
def test_never_faster_than_without(
    chain: tuple[int, list[int], float, int, float], groups: int, background: float, factor: str, over: int
) -> None:
    graph = _chain(*chain)
    before = simulate(graph)
    text = f"contention groups={groups} background={background} interference={factor}"
    found = parse(text).predict(graph)
    after = simulate(found)
    assert np.all(found.dur >= graph.dur)
    assert np.all(after.end >= before.end)
    with pytest.MonkeyPatch.context() as patch:  # the same cluster behind a core that carries less

        def behind(text: str, workers: int) -> Network:
            found = network(text, workers)
            assert isinstance(found, LinkNetwork)
            return replace(found, cluster=replace(found.cluster, oversubscription=float(over)))

        patch.setattr("foretrace.techniques.data.contention.network", behind)
        assert np.all(parse(text).predict(graph).dur >= graph.dur)


def _chain(workers: int, elements: list[int], bucket_mb: float, latency_us: int, transfer: float) -> TaskGraph:
    ring = f"data-parallel workers={workers} network=8gbit/{latency_us}us bucket_mb={bucket_mb} {PLAIN}"
    return parse(ring.replace("transfer=1", f"transfer={transfer}")).predict(
        Backward(elements=elements, steps=2).graph()
    )


# -- recorded ranks ------------------------------------------------------------------------------------------------


def test_recorded_ranks_that_share_nothing_stay_as_they_are() -> None:
    graph = ranks()
    after = parse("contention network=8gbit").predict(graph)
    assert np.array_equal(after.dur, graph.dur)
    columns = {key: getattr(graph, key).tobytes() for key in ("dur", "src", "lag")}
    slowed = simulate(parse("contention network=8gbit background=0.5").predict(graph))
    assert columns == {key: getattr(graph, key).tobytes() for key in columns}
    transfers = slowed.graph.kind == TaskKind.COLLECTIVE
    assert slowed.graph.dur[transfers].tolist() == [200_000] * 8
    assert simulate(graph).step_time_s == pytest.approx(140e-6) and slowed.step_time_s == pytest.approx(240e-6)


def two_groups() -> TaskGraph:
    """Ranks 0 and 2, and 1 and 3 at the same time, in collectives of 100 ns; then all four in one more."""
    build = Ranks(4, slots=[1], ordered=True)
    begin = {rank: [build.task(2 * rank, TaskKind.KERNEL, 10)] for rank in range(4)}
    for pair in ((0, 2), (1, 3)):
        build.collective({rank: begin[rank] for rank in pair}, 100)
    _, last = build.collective({rank: [] for rank in range(4)}, 50)
    build.task(0, TaskKind.KERNEL, 1, list(last.values()))
    return build.graph()


def test_groups_of_recorded_ranks_share_a_switch(tmp_path: Path) -> None:
    core = cluster(tmp_path, FOUR + "oversubscription: 2\n")
    graph = two_groups()
    after = predicted(graph, f"contention network={core}")
    transfers = after.graph.kind == TaskKind.COLLECTIVE
    assert sorted(after.graph.dur[transfers].tolist()) == [50] * 4 + [200] * 4
    assert "4 of 5" not in after.graph.changes[-1].what
    (said,) = (each.what for each in after.graph.changes if "transfers share" in each.what)
    assert said.startswith("2 of 3 transfers share a link of four with another one: 0.00025 → 0.00045 ms in all")
    disjoint = predicted(graph, f"contention network={cluster(tmp_path, FOUR)}")
    assert np.array_equal(disjoint.graph.dur, graph.dur)


@settings(max_examples=60)
@given(group_graphs(ordered=True), st.sampled_from((0.0, 0.5)))
def test_no_transfer_of_several_ranks_gets_shorter(graph: TaskGraph, background: float) -> None:
    try:
        # `predict` would also settle what follows, which may add tasks.
        after = parse(f"contention network=8gbit background={background}").change(graph)
    except NotApplicableError as reason:
        assert str(reason).startswith("contention: ") and str(reason).endswith(".")
        return
    except GraphError as reason:  # random marks need not follow each other once transfers take longer
        assert "the marks of the graph do not follow each other" in str(reason)
        return
    moved = graph.kind == TaskKind.COLLECTIVE
    assert np.all(after.dur[moved] >= graph.dur[moved]) and np.array_equal(after.dur[~moved], graph.dur[~moved])


def test_kernels_recorded_beside_collectives_are_not_slowed_twice() -> None:
    """Four kernels of 100 alone and four of 130 beside a collective: measured, 1.3; as long as recorded."""
    from tests.simulate.test_interference import _ranks

    graph = _ranks(slowed=130).graph()
    after = parse("contention network=8gbit interference=measured").predict(_without_channel(graph))
    assert np.array_equal(after.dur, graph.dur)
    assert any("kernels take 1.3 times as long" in change.what for change in after.changes)


def _without_channel(graph: TaskGraph) -> TaskGraph:
    """The same graph as the recording of one rank of two."""
    lanes = tuple(replace(lane, rank=0) for lane in graph.lanes)
    return replace(graph, lanes=lanes)


def test_the_recorded_eight_ranks(shared_data: Path, tmp_path: Path) -> None:
    graph = flow.read(shared_data / "traces/param/dlrm_kineto_8rank").global_graph().graph
    path = cluster(tmp_path, "nodes: 2\nper_node: 4\ninside: 100gbit\nbetween: 100gbit/5us\n")
    assert np.array_equal(parse(f"contention network={path} interference=measured").predict(graph).dur, graph.dur)
    after = parse(f"contention network={path} background=0.5").predict(graph)
    transfers = graph.kind == TaskKind.COLLECTIVE
    assert np.all(after.dur >= graph.dur) and after.dur[transfers].sum() > graph.dur[transfers].sum()


# -- refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("background=1", "background must be 0 or more and less than 1"),
        ("background=-0.1", "background must be 0 or more"),
        ("groups=0", "groups=0 cannot be"),
        ("groups=-3", "groups=-3 cannot be"),
        ("interference=0.5", "is no slow-down"),
        ("interference=nan", "is no slow-down"),
        ("interference=inf", "is no slow-down"),
        ("interference=-2", "is no slow-down"),
        ("interference=much", "is no slow-down"),
        ("interference=measured", "these messages were put in; give a number"),
        ("network=-1gbit", "is no link"),
        ("network=nothing.yaml", "nothing.yaml"),
        ("network=nccl:H100-SXM5-80GB", "not which links they share"),
        ("network={four} groups=3", "four has 4 devices, not 6"),
    ],
)
def test_what_cannot_be_is_refused(text: str, said: str, tmp_path: Path) -> None:
    graph = parse(TWO_BUCKETS).predict(Backward(elements=THREE).graph())
    with pytest.raises(NotApplicableError, match=said) as caught:
        parse("contention " + text.format(four=cluster(tmp_path, FOUR))).predict(graph)
    assert str(caught.value).startswith("contention: ") and str(caught.value).endswith(".")


def test_values_that_are_no_numbers_are_refused() -> None:
    from foretrace.techniques.data.contention import Contention

    graph = parse(TWO_BUCKETS).predict(Backward(elements=THREE).graph())
    for value in (float("nan"), float("inf")):
        with pytest.raises(NotApplicableError, match="background must be 0 or more"):
            Contention(background=value).predict(graph)


def test_it_is_counted_once() -> None:
    graph = parse(TWO_BUCKETS).predict(Backward(elements=THREE).graph())
    shared = parse("contention background=0.5").predict(graph)
    with pytest.raises(NotApplicableError, match="share links already; give it once"):
        parse("contention").predict(shared)
    with pytest.raises(NotApplicableError, match="changed by contention already"):
        parse("bucket-fusion").predict(shared)
    with_company = parse("data-parallel workers=2 network=8gbit").predict(Backward(elements=THREE).graph())
    with pytest.raises(NotApplicableError, match=r"slows computing beside messages already .* give company=1 there"):
        parse("contention interference=1.2").predict(with_company)


def test_a_recording_needs_transfers_workers_and_a_network() -> None:
    with pytest.raises(NotApplicableError, match="shows no transfers between workers"):
        parse("contention").predict(Backward(elements=THREE).graph())
    with pytest.raises(NotApplicableError, match="does not tell its network"):
        parse("contention").predict(ranks())
    with pytest.raises(NotApplicableError, match="groups= goes with messages"):
        parse("contention network=8gbit groups=2").predict(ranks())
    with pytest.raises(NotApplicableError, match="three kernels of a sort"):
        parse("contention network=8gbit interference=measured").predict(ranks())
    alone = ranks()
    alone = replace(alone, lanes=tuple(replace(each, rank=0) for each in alone.lanes))
    alone = replace(alone, info=replace(alone.info, world_size=1))
    with pytest.raises(NotApplicableError, match="does not tell how many workers"):
        parse("contention network=8gbit").predict(alone)
