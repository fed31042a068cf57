"""Data-parallel: buckets as PyTorch forms them, messages beside the backward pass, times worked out by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.cost.network.collective_table import series_of, table_of
from foretrace.cost.network.network import CollectiveKind
from foretrace.errors import NotApplicableError
from foretrace.graph.taskgraph import Phase, TaskGraph, TaskKind
from foretrace.model.messages import MIB, bucketed
from foretrace.simulate.noise import expected_max
from foretrace.simulate.timeline import Timeline, simulate
from foretrace.techniques.arguments import parse
from foretrace.techniques.base import Technique
from foretrace.techniques.distributed.data_parallel import DataParallel
from foretrace.techniques.distributed.gradients import find_gradients, first_uses, spread_gradients
from foretrace.techniques.explain import path_parts
from foretrace.techniques.whatif import whatif
from foretrace.testing import TechniqueConformance, recorded, small_training
from foretrace.testing.workloads import Gpu, optimizer_facts
from tests.techniques.backward import NODE, PLAIN, Backward

GPU = Gpu(steps=6, recording=optimizer_facts(6, 60_000, "SGD", momentum=0.9))
THREE = (1_000_000, 500_000, 250_000)  # numbers of the gradients: 4, 2 and 1 MB, the smallest one ready first


def predicted(graph: TaskGraph, text: str) -> Timeline:
    return simulate(parse(f"data-parallel {text} {PLAIN}").predict(graph))


def messages(timeline: Timeline, step: int = 1) -> list[tuple[str, float, float]]:
    """Name, start and end (ms since the step began) of the messages of a step."""
    graph = timeline.graph
    rows = np.flatnonzero((graph.kind == TaskKind.COLLECTIVE) & (graph.step == step) & ~graph.gone)
    begin = timeline.end[graph.marks[step]]
    found = [(graph.names[graph.name[i]], timeline.start[i] - begin, timeline.end[i] - begin) for i in rows]
    return sorted(((name, start / 1e6, end / 1e6) for name, start, end in found), key=lambda each: each[1:])


@lru_cache
def small() -> TaskGraph:
    return recorded(small_training(), steps=6)


class TestOnRecordings(TechniqueConformance):
    technique: ClassVar[Technique] = parse("data-parallel workers=4 network=1gbit/50us bucket_mb=0.01")


class TestSizeGiven(TechniqueConformance):
    technique: ClassVar[Technique] = parse("data-parallel workers=4 network=1gbit gradient_mb=2 bucket_mb=0.1")

    def graphs(self) -> Mapping[str, TaskGraph]:
        return {"gpu": GPU.graph(), "cpu": small()}


def test_two_buckets_by_hand() -> None:
    graph = Backward(elements=THREE).graph()
    # 8 Gbit/s is 1 MB per ms; a ring of two sends the buffer once. Forward 3 ms, gradients at 5, 7 and 9 ms, update 1.
    result = predicted(graph, "workers=2 network=8gbit bucket_mb=1.5")
    assert messages(result) == [("all-reduce bucket 0", 7.0, 10.0), ("all-reduce bucket 1", 10.0, 14.0)]
    assert result.step_times_ns.tolist() == [15_000_000] * 4


def test_every_gradient_by_itself_by_hand() -> None:
    result = predicted(Backward(elements=THREE).graph(), "workers=2 network=8gbit bucket_mb=0.1")
    assert [(start, end) for _, start, end in messages(result)] == [(5, 6), (7, 9), (9, 13)]
    assert result.step_times_ns.tolist() == [14_000_000] * 4


def test_all_in_one_bucket_overlaps_nothing() -> None:
    result = predicted(Backward(elements=THREE).graph(), "workers=2 network=8gbit bucket_mb=1000")
    assert messages(result) == [("all-reduce bucket 0", 9.0, 16.0)]
    assert result.step_times_ns.tolist() == [17_000_000] * 4


def test_ring_of_four_and_latency() -> None:
    result = predicted(Backward(elements=[1_000_000]).graph(), "workers=4 network=8gbit/100us")
    (_, start, end) = messages(result)[0]
    assert end - start == pytest.approx(2 * 3 * 0.1 + 4 * 2 * 3 / 4)


def test_waiting_for_the_last_worker_counts_once() -> None:
    graph = Backward(elements=THREE).graph()
    late = f"data-parallel workers=2 network=8gbit bucket_mb=0.1 {PLAIN}".replace("waiting_ms=0", "waiting_ms=0.5")
    assert simulate(parse(late).predict(graph)).step_time_s == pytest.approx(14.5e-3)


def test_gloo_overlaps_the_fixed_parts_of_two_messages() -> None:
    graph = Backward(elements=[250_000] * 8, backward_ms=0.001).graph()
    text = "workers=2 network=8gbit/500us bucket_mb=0.1"
    gloo, nccl = predicted(graph, f"{text} backend=gloo"), predicted(graph, f"{text} backend=nccl")
    assert nccl.step_time_s - gloo.step_time_s == pytest.approx(7 * 1e-3, rel=0.01)  # 2 x 500 µs per message


def test_copies_and_the_reducer_take_host_time() -> None:
    graph = Backward(elements=THREE).graph()
    base = f"data-parallel workers=2 network=8000gbit {PLAIN}"
    times = {
        "copy_gb_s=1e12": "copy_gb_s=1",  # 7 MB read and written, in and out
        "gradient_us=0": "gradient_us=100",
        "step_us=0": "step_us=700",
        "launch_us=0": "launch_us=300",
    }
    free = simulate(parse(base).predict(graph)).step_time_s
    more = {
        new: simulate(parse(base.replace(old, new)).predict(graph)).step_time_s - free for old, new in times.items()
    }
    assert more["copy_gb_s=1"] == pytest.approx(28e-3, rel=1e-3)
    assert more["gradient_us=100"] == pytest.approx(0.3e-3, rel=1e-2)
    assert more["step_us=700"] == pytest.approx(0.7e-3, rel=1e-2)
    assert more["launch_us=300"] == pytest.approx(0.6e-3, rel=1e-2)  # two buckets: 1 MiB, then the rest
    views = base.replace("copy_gb_s=1e12", "copy_gb_s=1") + " views=yes"
    assert simulate(parse(views).predict(graph)).step_time_s - free == pytest.approx(14e-3, rel=1e-3)


def test_buffers_are_sent_before_the_forward_pass() -> None:
    graph = Backward(elements=THREE, recording={"buffer_bytes": 2_000_000}).graph()
    result = predicted(graph, "workers=2 network=8gbit bucket_mb=1000")
    assert messages(result)[0] == ("broadcast of buffers", 0.0, 2.0)
    assert result.step_times_ns.tolist() == [19_000_000] * 4


@settings(max_examples=25)
@given(
    elements=st.lists(st.integers(1_000, 2_000_000), min_size=1, max_size=6),
    gbit=st.floats(0.1, 100),
    workers=st.integers(2, 16),
    cap=st.floats(0.01, 10),
)
def test_faster_links_never_slow_a_step_down_and_overlap_never_hurts(
    elements: list[int], gbit: float, workers: int, cap: float
) -> None:
    graph = Backward(elements=elements, steps=3).graph()
    step = [
        predicted(graph, f"workers={workers} network={rate:.6f}gbit bucket_mb={cap:.6f}").step_time_s
        for rate in (gbit, 2 * gbit)
    ]
    alone = simulate(graph).step_time_s
    assert step[0] >= step[1] >= alone
    nbytes = 4 * sum(elements)
    transfer = 2 * (workers - 1) / workers * nbytes / (gbit * 1e9 / 8)
    assert step[0] <= alone + transfer * (1 + 1e-6) + 1e-6  # as if nothing overlapped
    assert step[0] >= min(transfer, step[0])


@given(
    sizes=st.lists(st.integers(1, 10_000), min_size=1, max_size=40), caps=st.lists(st.integers(1, 30_000), min_size=1)
)
def test_buckets_hold_every_gradient_once_and_in_order(sizes: list[int], caps: list[int]) -> None:
    found = bucketed(sizes, caps)
    assert [i for bucket in found for i in bucket] == list(range(len(sizes)))
    for number, bucket in enumerate(found[:-1]):
        held = [sizes[i] for i in bucket]
        cap = caps[min(number, len(caps) - 1)]
        assert sum(held) >= cap > sum(held[:-1])


def test_buckets_of_two_types() -> None:
    assert bucketed([4, 4, 4, 4, 4], [8], ["a", "b", "a", "b", "a"]) == [[0, 2], [1, 3], [4]]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("workers=1 network=1gbit", "workers must be 2 or more"),
        ("workers=2 network=1gbit bucket_mb=0", "bucket_mb=0.0 is no size"),
        ("workers=2 network=1gbit bucket_mb=-3", "bucket_mb=-3.0 is no size"),
        ("workers=2 network=1gbit buckets_mb=1,x", "buckets_mb=1,x is no list"),
        ("workers=2 network=1gbit buckets_mb=1,nan", "buckets_mb=1,nan is no list"),
        ("workers=2 network=1gbit buckets_mb=1,2 bucket_mb=3", "exclude each other"),
        ("workers=2 network=1gbit gradient_mb=-1", "gradient_mb must be 0 or more and below 1,000,000,000, got -1"),
    ],
)
def test_mistakes_are_refused(text: str, said: str) -> None:
    with pytest.raises(NotApplicableError, match=said):
        parse(f"data-parallel {text}").predict(Backward(elements=THREE).graph())


def test_a_second_time_is_refused_and_a_recording_without_gradients_says_what_to_give() -> None:
    technique = parse("data-parallel workers=2 network=1gbit")
    with pytest.raises(NotApplicableError, match="already exchanges messages"):
        technique.predict(technique.predict(Backward(elements=THREE).graph()))
    with pytest.raises(NotApplicableError, match=r"gradient_mb=0\.24"):
        technique.predict(GPU.graph())


def test_on_a_device_streams_wait_and_the_host_does_not() -> None:
    graph = GPU.graph()
    result = predicted(graph, "workers=2 network=1gbit gradient_mb=1 bucket_mb=1000")
    assert simulate(graph).step_time_s < result.step_time_s
    # 1 MB at 125 MB/s behind the backward pass
    assert result.step_time_s == pytest.approx(8e-3 + 2.9e-3, rel=0.2)
    assert path_parts(result)[0].time_s > 0
    prediction = whatif(graph, [parse(f"data-parallel workers=2 network=1gbit gradient_mb=1 bucket_mb=1000 {PLAIN}")])
    assert "communication" in prediction.why_not_more
    assert "gaps between kernels" not in prediction.why_not_more


def test_why_not_more_names_late_workers() -> None:
    text = f"data-parallel workers=2 network=8000gbit {PLAIN}".replace("waiting_ms=0", "waiting_ms=30")
    said = whatif(Backward(elements=THREE).graph(), [parse(text)]).why_not_more
    assert "waiting for other workers" in said


def test_the_network_is_an_assumption_with_its_range() -> None:
    graph = Backward(elements=THREE).graph()
    prediction = whatif(graph, [parse("data-parallel workers=2 network=1gbit")])
    transfer = next(each for each in prediction.assumptions if each.assumption.flag == "transfer")
    assert transfer.at_low_s < prediction.after_s < transfer.at_high_s
    low, high = prediction.interval_s
    assert low < prediction.after_s < high


def test_gradients_of_micro_batches_are_sent_once() -> None:
    graph = parse("gradient-accumulation steps=2").predict(small())
    after = parse("data-parallel workers=2 network=1gbit bucket_mb=0.001").predict(graph)
    sent = (after.kind == TaskKind.COLLECTIVE) & (after.step == 1)
    once = parse("data-parallel workers=2 network=1gbit bucket_mb=0.001").predict(small())
    assert sent.sum() == ((once.kind == TaskKind.COLLECTIVE) & (once.step == 1)).sum()
    ready = {int(each.ready[1]) for each in find_gradients(graph)}
    nodes = np.flatnonzero((graph.name == graph.names.index(NODE)) & (graph.step == 1) & ~graph.gone)
    assert len(ready) == len(find_gradients(small()))
    assert min(ready) > nodes[len(nodes) // 2 - 1], "the first micro-batch's are not sent"


def test_observed_gradients_of_micro_batches_are_those_of_the_last_one() -> None:
    graph = Gpu(steps=3, recording=optimizer_facts(6, 60_000, "SGD")).graph()
    facts = {**graph.info.recording, "micro_batches": 2}
    halved = replace(graph, info=replace(graph.info, recording=facts))
    whole, half = (spread_gradients(each, 1e6)[0].ready for each in (graph, halved))
    assert np.all(half > whole)


def test_first_uses_are_in_the_forward_pass_and_in_order() -> None:
    graph = Backward(elements=THREE).graph()
    uses = first_uses(graph, find_gradients(graph))
    assert np.all(graph.phase[uses] == Phase.FORWARD) and np.all(np.diff(uses, axis=0) < 0)
    mirrored = first_uses(graph, spread_gradients(graph, 1e6))
    assert np.all(graph.phase[mirrored] == Phase.FORWARD) and np.all(np.diff(mirrored, axis=0) <= 0)


def test_spread_gradients_are_even_or_skewed() -> None:
    graph = GPU.graph()
    even, late = spread_gradients(graph, 64e6), spread_gradients(graph, 64e6, skew=0.2)
    assert sum(each.nbytes for each in even) == 64_000_000
    assert np.all(np.diff([each.ready[0] for each in even]) >= 0)
    assert np.mean([each.ready[0] for each in late]) > np.mean([each.ready[0] for each in even])


def test_expected_largest_of_normal_numbers() -> None:
    assert expected_max(2) == pytest.approx(1 / np.sqrt(np.pi), abs=1e-3)
    assert expected_max(4) == pytest.approx(1.0294, abs=1e-3)


CAPS: dict[str, dict[str, Any]] = {
    "default": {},
    "one": {"bucket_mb": 0.01},
    "list": {"buckets_mb": "0.001,0.02,0.005"},
    "unused": {"bucket_mb": 0.01, "unused": True},
}


@pytest.mark.parametrize("name", ["small", "transformer", "ncf"])
def test_buckets_are_those_of_the_real_reducer(name: str, alone: None) -> None:
    from foretrace.training.data_parallel import in_replicas
    from foretrace.zoo.registry import training

    made = small_training() if name == "small" else training(name)
    graph = small() if name == "small" else recorded(made)
    gradients = find_gradients(graph)
    largest = max(each.nbytes for each in gradients) / MIB
    for chosen in CAPS.values():
        caps = chosen | ({"bucket_mb": largest / 2} if "bucket_mb" in chosen else {})
        technique = DataParallel(workers=2, network="1gbit", **caps)
        options: dict[str, Any] = {"find_unused_parameters": technique.unused}
        if technique.buckets_mb:
            options["bucket_cap_mb_list"] = [float(each) for each in technique.buckets_mb.split(",")]
        elif technique.bucket_mb:
            options["bucket_cap_mb"] = technique.bucket_mb
        real = in_replicas(made.copied().with_batches(2), "test", **options)
        for _ in real.steps(3):
            pass
        wrapped: Any = real.model
        log = wrapped._get_ddp_logging_data()
        sizes = log["bucket_sizes"] if technique.unused else log["rebuilt_bucket_sizes"]
        mine = [sum(gradients[i].nbytes for i in bucket) for bucket in technique.assigned(gradients)]
        assert mine == [int(each) for each in sizes.split(",")], caps


def test_what_was_measured_of_hosts_takes_the_place_of_priors(tmp_path: Path) -> None:
    """By the table of the link, and by steps that several workers made together."""
    points = [(1e3, 1e-4, 0.0), (1e7, 0.1, 0.0)]
    series = series_of("here", kind=CollectiveKind.ALL_REDUCE, workers=2, per_node=2, points=points)
    hosts = {"company": (1.25, 1.1, 1.4), "stretch": (1.05, 1.0, 1.2), "gradient_us": (9.0, 6.0, 12.0)}
    table_of("here", [series], backend="gloo", hosts=hosts).save(tmp_path / "link.json")
    made = {"workers": 2, "steps": 9, "late_ms": [1.5, 1.0, 2.0]}
    graph = Backward(elements=THREE, recording={"together": made}).graph()
    technique = parse(f"data-parallel workers=2 network={tmp_path / 'link.json'}")
    values = technique.values(graph)
    expected = {"company": 1.25, "stretch": 1.05, "gradient_us": 9.0, "waiting_ms": 1.5}
    assert {name: values[name] for name in expected} == expected
    said = {each.flag: each for each in technique.uncertain(graph)}
    assert (said["company"].low, said["company"].high, said["gradient_us"].unit) == (1.1, 1.4, "µs")
    of_four = parse(f"data-parallel workers=4 network={tmp_path / 'link.json'}").priors(graph)["waiting_ms"].value
    assert of_four == pytest.approx(1.5 * expected_max(4) / expected_max(2))
    graph = Backward(elements=THREE, recording={"together": made | {"resumed_ms": [4.0, 2.0, 5.0]}}).graph()
    waits = technique.priors(graph)["waiting_ms"]  # what takes longer does so however many wait
    assert (waits.value, waits.low, waits.high) == (5.5, 3.0, 7.0) and "wait for each other" in waits.why
