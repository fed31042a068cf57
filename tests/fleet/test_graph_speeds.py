"""Speeds simulated from recordings: two real ones, and written-out steps whose times can be worked out by hand."""

from __future__ import annotations

import runpy
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.errors import ForetraceError
from foretrace.fleet.cluster import ClusterTree, parse_cluster
from foretrace.fleet.policy import Policy
from foretrace.fleet.simulate import simulate
from foretrace.fleet.speeds import Shape, Speed
from foretrace.fleet.speeds.closed_form import ClosedFormSpeeds, Profile, speed_table
from foretrace.fleet.speeds.graph import Exchange, GraphSpeeds, link_text
from foretrace.fleet.workload import Workload
from foretrace.flow import read
from foretrace.graph.edit import scale
from foretrace.graph.store import save
from foretrace.graph.taskgraph import TaskGraph
from foretrace.simulate.timeline import simulate as timeline_of
from foretrace.techniques.base import Technique
from tests.techniques.backward import NODE, Backward

DATA = Path(__file__).resolve().parents[1] / "data"
RECORDED = {"cnn": DATA / "cnn.json.gz", "recommender": DATA / "recommender.json.gz"}
NETWORKS = ("200gbit/5us", "25gbit/15us", "2gbit/30us")  # node, rack, cluster
# What a prediction adds beside the messages: nothing, so that times can be worked out by hand.
PLAIN = {
    "gradient_us": 0.0, "step_us": 0.0, "launch_us": 0.0, "waiting_ms": 0.0, "company": 1.0, "transfer": 1.0,
    "copy_gb_s": 1e12,
}  # fmt: skip

PACKED, RACK, RACKS, APART = (
    Shape(4, (1, 1, 1)), Shape(4, (2, 1, 1)), Shape(4, (2, 2, 1)), Shape(4, (4, 2, 1)),
)  # fmt: skip


@pytest.fixture(scope="module")
def recorded() -> dict[str, TaskGraph]:
    """Recordings of the examples, made by foretrace; the first has little to send, the second much."""
    return {name: read(path).graph().graph for name, path in RECORDED.items()}


def jobs(*models: str, gpus: int = 4, **columns: Any) -> Workload:
    n = len(models)
    return Workload.of(submit_s=[0.0] * n, gpus=[gpus] * n, work_s=[1.0] * n, model=list(models), **columns)


def progress(speeds: GraphSpeeds, model: str, shape: Shape) -> float:
    return speeds.speed(jobs(model, gpus=shape.gpus), 0, shape).progress


# --- two recorded jobs ---------------------------------------------------------------------------------------


def test_the_job_with_more_to_send_suffers_more_from_being_spread(recorded: dict[str, TaskGraph]) -> None:
    speeds = GraphSpeeds(NETWORKS, recorded)
    work = jobs("cnn", "recommender")
    found = {(job, shape): speeds.speed(work, job, shape) for job in (0, 1) for shape in (PACKED, RACK, RACKS, APART)}
    for job in (0, 1):
        placed = [found[job, shape] for shape in (PACKED, RACK, RACKS, APART)]
        assert [each.progress for each in placed] == sorted((each.progress for each in placed), reverse=True)
        assert [each.communication for each in placed] == sorted(each.communication for each in placed)
        assert all(0 < each.progress < 1 and 0 < each.communication < 1 - each.progress for each in placed)
    for shape in (RACK, RACKS, APART):
        lost = [1 - found[job, shape].progress / found[job, PACKED].progress for job in (0, 1)]
        assert lost[1] > 5 * lost[0] > 0, shape
        assert found[1, shape].communication > 2 * found[0, shape].communication
    assert speeds.step_s("cnn") == timeline_of(recorded["cnn"]).step_time_s


def test_progress_has_the_range_of_what_is_assumed(recorded: dict[str, TaskGraph]) -> None:
    speeds, work = GraphSpeeds(NETWORKS, recorded), jobs("cnn", "recommender")
    for job in (0, 1):
        said = speeds.speed(work, job, APART).progress
        low, high = speeds.interval(work, job, APART)
        assert 0 < low < said < high
    assert high - low > 0.01 * said  # messages over slow links rest on assumptions
    alone = Shape(1, (1, 1, 1))
    assert speeds.interval(work, 0, alone) == (speeds.speed(work, 0, alone).progress,) * 2


def test_one_simulation_per_class(recorded: dict[str, TaskGraph], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Exchange] = []
    real = GraphSpeeds._simulated

    def counted(self: GraphSpeeds, graph: TaskGraph, exchange: Exchange, model: str) -> Any:
        made.append(exchange)
        return real(self, graph, exchange, model)

    monkeypatch.setattr(GraphSpeeds, "_simulated", counted)
    same = "25gbit/15us"  # two levels joined by networks alike
    speeds = GraphSpeeds(("200gbit/5us", same, same), recorded | {"twin": recorded["cnn"]})
    work = jobs("cnn", "cnn", "twin", "recommender")
    assert speeds.kinds(work).tolist() == [0, 0, 0, 1]
    first = [speeds.speed(work, job, PACKED) for job in range(4)]
    assert len(made) == speeds.simulations == 2 and first[0] == first[1] == first[2] != first[3]
    assert [speeds.speed(work, job, Shape(4, (1, 1, 1))) for job in range(4)] == first
    assert speeds.simulations == 2
    # Four nodes of one rack and four racks are other shapes, but the same exchange over the same network.
    apart = speeds.speed(work, 0, Shape(4, (4, 1, 1)))
    assert speeds.simulations == 3
    assert speeds.speed(work, 2, Shape(4, (4, 4, 1))) == apart and speeds.simulations == 3
    assert speeds.speed(work, 0, Shape(1, (1, 1, 1))) == Speed(0.25) and len(made) == 3


def test_equal_shapes_are_equal_in_another_object_and_from_other_files(
    recorded: dict[str, TaskGraph], tmp_path: Path
) -> None:
    stored = save(recorded["recommender"], tmp_path / "recommender.graph")
    work = jobs("recommender", str(stored), str(RECORDED["recommender"]))
    speeds = GraphSpeeds(NETWORKS, {"recommender": str(RECORDED["recommender"])})
    other = GraphSpeeds(NETWORKS, recorded)
    assert speeds.kinds(work).tolist() == [0, 1, 0]  # the name and its path are one recording
    for shape in (PACKED, APART):
        found = [speeds.speed(work, job, shape) for job in range(3)]
        assert found[0] == found[1] == found[2] == other.speed(jobs("recommender"), 0, shape)


@settings(max_examples=15)
@given(
    rates=st.lists(st.floats(0.5, 400), min_size=3, max_size=3),
    late=st.lists(st.floats(0, 100), min_size=3, max_size=3),
    faster=st.floats(1, 20),
    level=st.integers(0, 2),
    shape=st.sampled_from([PACKED, RACK, RACKS, APART, Shape(5, (2, 2, 1), even=False), Shape(8, (4, 2, 1))]),
    which=st.sampled_from(["recommender", "buckets"]),
)
def test_a_faster_network_never_makes_it_slower(
    rates: list[float], late: list[float], faster: float, level: int, shape: Shape, which: str
) -> None:
    graphs = {"recommender": _recommender(), "buckets": _BUCKETS}
    options: dict[str, Any] = {"bucket_mb": 0.5}

    def at(rate: float, latency: float) -> float:
        texts = [link_text(*pair) for pair in zip(rates, late, strict=True)]
        texts[level] = link_text(rate, latency)
        return progress(GraphSpeeds(texts, graphs, options=options), which, shape)

    before = at(rates[level], late[level])
    assert 0 < before <= 1
    assert at(rates[level] * faster, late[level]) >= before
    assert at(rates[level], late[level] / faster) >= before


_BUCKETS = Backward(
    elements=[300_000, 2_000_000, 40_000, 900_000, 700_000, 1_500_000], backward_ms=1.0, steps=2
).graph()
_KEPT: list[TaskGraph] = []


def _recommender() -> TaskGraph:
    if not _KEPT:
        _KEPT.append(read(RECORDED["recommender"]).graph().graph)
    return _KEPT[0]


# --- worked out by hand --------------------------------------------------------------------------------------


def test_one_bucket_is_the_closed_form() -> None:
    """Nothing can hide behind the backward pass where all gradients are sent after it."""
    graph = Backward(elements=[1_000_000, 500_000], forward_ms=1, backward_ms=2, update_ms=1).graph()  # 7 ms, 6 MB
    speeds = GraphSpeeds(("80gbit/10us", "8gbit"), {"m": graph}, options={**PLAIN, "bucket_mb": 100.0})
    profile = Profile(name="m", compute_ms=7, gradient_mb=6, batch=1)
    closed = ClosedFormSpeeds(bandwidth_gb_s=[10, 1], profiles=[profile])
    assert speeds.step_s("m") == pytest.approx(7e-3)
    work = jobs("m", gpus=4)
    for shape in (Shape(4, (4, 1)), Shape(4, (2, 1), even=False)):
        one = speeds.speed(work, 0, shape)
        assert one.progress == pytest.approx(closed.speed(work, 0, shape).progress, rel=1e-6)
        assert one.communication == pytest.approx(9 / 16, rel=1e-6)  # 2·3/4·6 MB at 1 GB/s: 9 ms beside 7
    # Inside a node: 0.9 ms and 6 hops of 10 µs.
    assert progress(speeds, "m", Shape(4, (1, 1))) == pytest.approx(7 / 7.96, rel=1e-6)
    # Two nodes of two: 2·1/2·6 MB at 10 GB/s and 2 hops; 2·1/2·3 MB at 1 GB/s: half the bytes cross.
    assert progress(speeds, "m", Shape(4, (2, 1))) == pytest.approx(7 / (7 + 0.62 + 3), rel=1e-6)
    ring = GraphSpeeds(("80gbit/10us", "8gbit"), {"m": graph}, scheme="ring", options={**PLAIN, "bucket_mb": 100.0})
    assert progress(ring, "m", Shape(4, (2, 1))) == pytest.approx(7 / 16, rel=1e-6)


def test_overlap_with_the_backward_pass_is_simulated() -> None:
    """The last layer's gradient travels while the first layer is still at work; the closed form cannot know."""
    graph = Backward(elements=[1_000, 1_000_000], forward_ms=1, backward_ms=2, update_ms=1).graph()
    speeds = GraphSpeeds(("16gbit",), {"m": graph}, options={**PLAIN, "bucket_mb": 1.0})
    speed = speeds.speed(jobs("m", gpus=2), 0, Shape(2, (1,)))
    # 4 MB at 2 GB/s take the 2 ms of the first layer's backward pass; its own 4 kB come after it.
    assert speed.progress == pytest.approx(7 / 7.002, rel=1e-6)
    assert speed.communication == pytest.approx(0.002 / 7.002, rel=1e-6)
    closed = ClosedFormSpeeds(
        bandwidth_gb_s=[2], profiles=[Profile(name="m", compute_ms=7, gradient_mb=4.004, batch=1)]
    )
    assert closed.speed(jobs("m", gpus=2), 0, Shape(2, (1,))).progress == pytest.approx(7 / 9.002, rel=1e-6)


def test_buckets_take_all_levels_one_after_the_other() -> None:
    """4 MB on two nodes of two: 0.2 ms inside, 2 ms across, 0.2 ms back; ready 4 and 6 ms after the step began."""
    graph = Backward(elements=[1_000_000, 1_000_000], forward_ms=1, backward_ms=2, update_ms=1).graph()
    options = {**PLAIN, "bucket_mb": 1.0}
    in_order = GraphSpeeds(("80gbit", "8gbit"), {"m": graph}, options=options)
    assert progress(in_order, "m", Shape(4, (2, 1))) == pytest.approx(7 / (4 + 2 * 2.4 + 1), rel=1e-6)
    overlapping = GraphSpeeds(("80gbit", "8gbit"), {"m": graph}, options={**options, "backend": "nccl"})
    assert progress(overlapping, "m", Shape(4, (2, 1))) == pytest.approx(7 / (6.2 + 2 + 0.2 + 1), rel=1e-6)


def test_exchanges_of_shapes() -> None:
    speeds = GraphSpeeds(("300gbit", "100gbit", "10gbit"))
    assert speeds.exchange(Shape(16, (4, 2, 1))).dims == ((4, "300gbit"), (2, "100gbit"), (2, "10gbit"))
    assert speeds.exchange(Shape(16, (4, 2, 1))).workers == 16
    assert speeds.exchange(Shape(16, (4, 2, 1), even=False)).dims == ((16, "10gbit"),)
    assert speeds.exchange(Shape(3, (3, 1, 1))).dims == ((3, "100gbit"),)


# --- kinds of GPUs, elastic jobs, what is assumed ------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Slower(Technique):
    """Everything takes so many times as long."""

    name: ClassVar[str] = "slower-for-this-test"
    summary: ClassVar[str] = "all tasks scaled"
    source: ClassVar[str] = "none"
    times: float = 2.0

    def change(self, graph: TaskGraph) -> TaskGraph:
        return scale(graph, np.ones(len(graph), np.bool_), self.times)


def test_kinds_of_gpus_by_techniques() -> None:
    graph = Backward(elements=[1_000_000, 500_000], forward_ms=1, backward_ms=2, update_ms=1).graph()
    types = {"fast": (), "slow": (Slower(),)}
    speeds = GraphSpeeds(("8gbit",), {"m": graph}, gpu_types=types, options={**PLAIN, "bucket_mb": 100.0})
    one, four = jobs("m", gpus=1), jobs("m", gpus=4)
    assert speeds.speed(one, 0, Shape(1, (1,), gpu_type="fast")).progress == 1
    assert speeds.speed(one, 0, Shape(1, (1,), gpu_type="slow")).progress == pytest.approx(0.5)
    assert speeds.speed(four, 0, Shape(4, (1,), gpu_type="fast")).progress == pytest.approx(7 / 16, rel=1e-6)
    assert speeds.speed(four, 0, Shape(4, (1,), gpu_type="slow")).progress == pytest.approx(7 / 23, rel=1e-6)
    with pytest.raises(ForetraceError, match=r"nothing of GPUs of kind 'other' \(it has 'fast', 'slow'"):
        speeds.speed(four, 0, Shape(4, (1,), gpu_type="other"))
    with pytest.raises(ForetraceError, match="neither a named recording"):
        speeds.kinds(jobs("x", gpus=1))  # even one GPU needs to know what runs on it


def test_gpus_held_over_gpus_asked_for() -> None:
    speeds = GraphSpeeds(NETWORKS, {"m": _BUCKETS})
    asked4 = speeds.speed(jobs("m", gpus=4), 0, Shape(8, (2, 1, 1)))
    asked8 = speeds.speed(jobs("m", gpus=8), 0, Shape(8, (2, 1, 1)))
    assert asked4.progress == pytest.approx(2 * asked8.progress) and speeds.simulations == 1
    kinds = speeds.kinds(Workload.of(submit_s=[0] * 3, gpus=[4, 8, 4], work_s=[1] * 3, model=["m"] * 3))
    assert kinds.tolist() == [0, 1, 0]


def test_assumptions_are_collected(recorded: dict[str, TaskGraph]) -> None:
    speeds = GraphSpeeds(NETWORKS, recorded, options={"waiting_ms": 0.0})
    before = speeds.assumptions
    assert not any("recommender" in each for each in before)
    progress(speeds, "recommender", RACK)
    said = "\n".join(speeds.assumptions[len(before) :])
    assert "recommender: 0.9068 MB of gradients in 1 bucket, from the recording." in said
    assert "company 1.02 (1 to 1.1) ×" in said and "transfer 1 (" in said
    assert "waiting ms" not in said  # stated, so not assumed
    stated = GraphSpeeds(NETWORKS, recorded, options={"gradient_mb": 3.0})
    progress(stated, "cnn", RACK)
    assert any(each.startswith("cnn: 3 MB of gradients") and each.endswith("stated.") for each in stated.assumptions)


# --- on a cluster --------------------------------------------------------------------------------------------


def test_a_fleet_of_recorded_jobs(recorded: dict[str, TaskGraph]) -> None:
    """The same jobs, packed and scattered: whoever sends more loses more, and time of communication adds up."""
    cluster = ClusterTree.of((2, 2, 4), levels=("rack", "node"), gbit_s=(200.0, 25.0, 2.0))
    speeds = GraphSpeeds.on(cluster, recorded, latency_us=(5, 15, 30))
    assert speeds.networks == NETWORKS
    n = 60
    random = np.random.default_rng(1)
    model = random.choice(["cnn", "recommender"], n)
    steps = random.integers(20_000, 60_000, n)
    work = Workload.of(
        submit_s=random.uniform(0, 600, n),
        gpus=random.choice([1, 3, 4], n),
        work_s=steps * np.array([speeds.step_s(each) for each in model]),
        model=model.tolist(),
    )
    lost: dict[tuple[str, str], float] = {}
    for rule in ("strict", "greedy"):
        result = simulate(work, cluster, Policy(name=rule, place_rule=rule), speeds=speeds)
        assert result.finished.all()
        single = work.gpus == 1
        np.testing.assert_allclose(result.held_ns[single] * 1e-9, work.work_s[single], rtol=1e-6)
        assert (result.held_ns[~single] * 1e-9 > work.work_s[~single]).all()
        for name in ("cnn", "recommender"):
            mine = (work.model == name) & ~single
            lost[rule, name] = float(result.comm_ns[mine].sum() / result.held_ns[mine].sum())
    assert lost["greedy", "recommender"] > 2 * lost["strict", "recommender"]
    gain = {name: lost["greedy", name] - lost["strict", name] for name in ("cnn", "recommender")}
    assert gain["recommender"] > 2 * gain["cnn"] >= 0
    assert speeds.simulations <= 24  # shapes are few, jobs many


def test_a_table_to_look_at_before_a_run(recorded: dict[str, TaskGraph]) -> None:
    rows = speed_table(
        GraphSpeeds(NETWORKS, recorded), ["cnn", "recommender"], gpus=4, levels=["node", "rack", "cluster"]
    )
    found = {(row.model, row.level): row.progress for row in rows}
    assert found["recommender", "node"] > found["recommender", "rack"] > found["recommender", "cluster"]


def test_the_example_with_recordings(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    script = Path(__file__).resolve().parents[2] / "examples" / "fleet_recorded_jobs.py"
    options = [f"--job={name}={path}" for name, path in RECORDED.items()]
    monkeypatch.setattr(sys, "argv", [str(script), *options, "--jobs", "30"])
    runpy.run_path(str(script), run_name="__main__")
    said = capsys.readouterr().out
    assert "4 nodes of 2 racks" in said and "greedy" in said and "cnn: 0.02 MB of gradients in 1 bucket" in said


# --- what cannot be ------------------------------------------------------------------------------------------


def test_networks_that_cannot_be() -> None:
    with pytest.raises(ForetraceError, match="no link"):
        GraphSpeeds(("fast",))
    with pytest.raises(ForetraceError, match="there is no network"):
        GraphSpeeds(())
    with pytest.raises(ForetraceError, match="scheme=tree must be levels or ring"):
        GraphSpeeds(NETWORKS, scheme="tree")
    with pytest.raises(ForetraceError, match="gives no bandwidth for node, cluster"):
        GraphSpeeds.on(parse_cluster("2x4"))
    cluster = ClusterTree.of((2, 4), gbit_s=(100.0, 10.0))
    with pytest.raises(ForetraceError, match="congestion=0"):
        GraphSpeeds.on(cluster, congestion=0)
    with pytest.raises(ForetraceError, match="one for each of node, cluster"):
        GraphSpeeds.on(cluster, latency_us=(1, 2, 3))
    assert GraphSpeeds.on(cluster, congestion=4, latency_us=(0, 1.5)).networks == ("100gbit", "2.5gbit/1.5us")


def test_jobs_and_shapes_that_cannot_be(tmp_path: Path) -> None:
    speeds = GraphSpeeds(NETWORKS, {"m": _BUCKETS, "gone": tmp_path / "gone.json"})
    with pytest.raises(
        ForetraceError, match=r"job '1' is of the model 'x', which is neither a named recording \(m, gone\)"
    ):
        speeds.kinds(jobs("m", "x"))
    with pytest.raises(ForetraceError, match="'x'"):
        speeds.speed(jobs("x"), 0, PACKED)
    with pytest.raises(ForetraceError, match="no recording of the model"):
        speeds.step_s("x\0y.json")
    assert speeds.kinds(jobs("x", gpus=1)).tolist() == [0]
    assert speeds.speed(jobs("x", gpus=1), 0, Shape(1, (1, 1, 1))) == Speed(1.0)
    with pytest.raises(ForetraceError, match=r"model 'gone' of job '0'.*gone\.json"):
        speeds.speed(jobs("gone"), 0, PACKED)
    with pytest.raises(ForetraceError, match="2 levels and networks are given for 3"):
        speeds.speed(jobs("m"), 0, Shape(4, (1, 1)))
    with pytest.raises(ForetraceError, match="one GPU"):
        speeds.speed(jobs("m"), 0, Shape(4, (1, 1, 1), sharers=1))
    bare = Backward(elements=[10], steps=2).graph()
    unnamed = tuple("something" if name == NODE else name for name in bare.names)
    silent = replace(bare, names=unnamed, info=replace(bare.info, recording={}))
    with pytest.raises(ForetraceError, match=r"model 'm' of job '0': data-parallel: .*gradient_mb="):
        GraphSpeeds(NETWORKS, {"m": silent}).speed(jobs("m"), 0, PACKED)
