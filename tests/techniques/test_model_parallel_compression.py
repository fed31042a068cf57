"""Compression at model-parallel boundaries predicted: bytes by hand, recorded and stated boundaries, refusals."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import ClassVar

import numpy as np
import pytest

from foretrace.cost.network.network import CollectiveKind
from foretrace.errors import NotApplicableError
from foretrace.graph.taskgraph import GraphInfo, Lane, Phase, TaskGraph, TaskKind
from foretrace.simulate.timeline import simulate
from foretrace.techniques.arguments import parse
from foretrace.techniques.base import Technique
from foretrace.techniques.distributed.model_parallel_compression import ModelParallelCompression
from foretrace.testing import TechniqueConformance, recorded, small_training
from foretrace.testing.workloads import Writer
from foretrace.trace.trace import LaneKind

STATED = {"rows": 64, "hidden": 32, "layers": 2, "network": "1gbit/20us"}


@lru_cache
def alone() -> TaskGraph:
    return recorded(small_training())


class TestConformance(TechniqueConformance):
    technique: ClassVar[Technique] = ModelParallelCompression(method="quantise", **STATED)  # type: ignore[arg-type]


class TestConformanceOfPipelines(TechniqueConformance):
    technique: ClassVar[Technique] = ModelParallelCompression(
        method="autoencoder",
        where="pipeline",
        **STATED,  # type: ignore[arg-type]
    )


def test_bytes_by_hand() -> None:
    nbytes = 4 * 100 * 64
    reduce, gather, send = CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.SEND

    def sent(**given: object) -> tuple[CollectiveKind, float]:
        return ModelParallelCompression(hidden=64, workers=4, **given)._sent(nbytes)  # type: ignore[arg-type]

    assert sent(method="none") == (reduce, nbytes)
    assert sent(method="autoencoder", share=0.25) == (reduce, nbytes / 4)
    assert sent(method="topk", share=0.25) == (gather, 4 * 2 * nbytes / 4)
    assert sent(method="randomk", share=0.25) == (reduce, nbytes / 4)
    assert sent(method="quantise", bits=4) == (gather, 4 * (nbytes / 8 + 8))
    assert sent(method="quantise", bits=8, where="pipeline") == (send, nbytes / 4 + 8)


def recorded_pair(count: int = 4) -> TaskGraph:
    """A step of so many forward all-reduces of 1 MB, 1 ms each, between kernels of 1 ms."""
    lanes = (Lane(rank=0, kind=LaneKind.CPU), Lane(rank=0, kind=LaneKind.GPU, device=0, stream=7))
    writer = Writer(lanes=lanes, info=GraphInfo(platform="cuda", steps=(0,)))
    writer.mark()
    for _ in range(count):
        writer.task(TaskKind.KERNEL, 1, "gemm", 1_000_000, phase=int(Phase.FORWARD))
        writer.task(TaskKind.COLLECTIVE, 1, "ncclAllReduce", 1_000_000, phase=int(Phase.FORWARD), nbytes=1_000_000)
    writer.mark()
    return writer.graph()


def test_stated_boundaries_shrink_with_the_method() -> None:
    graph = alone()
    steps = {}
    for method in ("none", "quantise", "autoencoder"):
        technique = ModelParallelCompression(
            method=method,
            rows=4096,
            hidden=256,
            layers=4,
            network="1gbit",
            encode_gb_s=None if method == "none" else 1e6,
            decode_gb_s=None if method == "none" else 1e6,
        )
        changed = technique.predict(graph)
        steps[method] = simulate(changed).step_time_s
        messages = (changed.kind == TaskKind.COLLECTIVE) & ~changed.gone
        assert messages.sum() == 2 * 2 * 4 * changed.n_steps
    each = 4 * 4096 * 256 * 8 / 1e9
    plain = simulate(graph).step_time_s
    assert steps["none"] == pytest.approx(plain + 16 * each, rel=0.02)
    assert steps["autoencoder"] == pytest.approx(plain + (12 + 4 * 26 / 256) * each, rel=0.03)
    assert steps["none"] > steps["quantise"] > steps["autoencoder"]


def test_slow_coding_costs_more_than_it_saves() -> None:
    stated = {"rows": 4096, "hidden": 256, "layers": 4, "network": "25gbit"}
    none = ModelParallelCompression(method="none", **stated).predict(alone())  # type: ignore[arg-type]
    topk = ModelParallelCompression(method="topk", **stated).predict(alone())  # type: ignore[arg-type]
    assert simulate(topk).step_time_s > simulate(none).step_time_s


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("method=quantise bits=3 rows=8 hidden=8 layers=1 network=1gbit", "bits=3"),
        ("method=topk share=0", "share must be above 0 and at most 1, got 0"),
        ("method=topk workers=1", "workers must be 2"),
        ("method=topk rows=-1", "0 or more"),
        ("method=topk", "or state what it would exchange"),
        ("method=topk rows=8 hidden=8 layers=1", "network="),
    ],
)
def test_nonsense_is_refused_in_a_sentence(text: str, says: str) -> None:
    with pytest.raises(NotApplicableError, match=says) as reason:
        parse(f"model-parallel-compression {text}").predict(alone())
    assert str(reason.value).endswith(".")


def test_last_half_of_recorded_boundaries() -> None:
    graph = recorded_pair()
    technique = ModelParallelCompression(method="randomk", share=0.1, encode_gb_s=1e6, decode_gb_s=1e6)
    rows = technique._recorded(graph)
    assert len(rows) == 4
    assert technique._chosen(graph, rows).tolist() == rows[2:].tolist()
    after = technique._replaced(graph, rows)
    assert np.allclose(after.dur[rows] / graph.dur[rows], [1, 1, 0.1, 0.1], rtol=1e-3)


DIMS = '[[[[500,500]],[],[],[]],["TensorList","","Scalar","Scalar"],["","","1","0"]]'


def gloo_pair(*calls: tuple[str, Phase, int]) -> TaskGraph:
    """A step on a thread that calls gloo for 1 MB each time, 1 ms of work between, and waits so many ms behind it."""
    writer = Writer(lanes=(Lane(rank=0, kind=LaneKind.CPU),), info=GraphInfo(platform="cpu", steps=(0,)))
    writer.mark()
    for name, phase, wait_ms in calls:
        writer.task(TaskKind.OPERATOR, 0, "aten::mm", 1_000_000, phase=int(phase))
        writer.task(TaskKind.OPERATOR, 0, name, 1_000, phase=int(phase))
        writer.task(TaskKind.OPERATOR, 0, "_Sent", 1_000_000 * wait_ms, phase=int(phase))
    writer.mark()
    graph = writer.graph()
    issued = np.array([name.startswith("c10d::") for name in graph.names])[graph.name]
    return replace(graph, shapes=(DIMS,)).with_columns(shape=np.where(issued, 0, -1).astype(np.int32))


def test_threads_that_wait_for_gloo_are_messages() -> None:
    graph = gloo_pair(("c10d::send", Phase.FORWARD, 1), ("c10d::recv_", Phase.BACKWARD, 30))
    technique = ModelParallelCompression(
        method="topk", where="pipeline", network="800mbit", share=0.1, encode_gb_s=1.0, decode_gb_s=1.0, transfer=1.0
    )
    rows = technique._recorded(graph)
    assert technique._sizes(graph) == (1_000_000,) and graph.dur[rows].tolist() == [1_000_000, 30_000_000]
    # 10 ms to send 1 MB: what the first saves of its 8 ms beyond the 1 ms that it waits is saved by the second, and
    # that one's gradient needs no indices. Coding forward 1 + 1 ms, backward 1 ms.
    after = technique._replaced(graph, rows).dur[rows] / 1e6
    assert after.tolist() == pytest.approx([2.0, 30.0 - 7.0 - 9.0 + 1.0], rel=1e-3)


def test_sums_of_gloo_and_the_transfers_beside_them() -> None:
    call = "c10d::allreduce_"
    graph = gloo_pair((call, Phase.FORWARD, 10), (call, Phase.FORWARD, 10), (call, Phase.BACKWARD, 10))
    technique = ModelParallelCompression(
        method="randomk", network="800mbit", share=0.1, encode_gb_s=1.0, decode_gb_s=1.0, transfer=1.0
    )
    rows = technique._recorded(graph)
    assert len(rows) == 2
    after = technique._replaced(graph, rows).dur[rows] / 1e6
    assert after.tolist() == pytest.approx([10.0, 10.0 - 9.0 + 3.0], rel=1e-3)  # the last half, scattered backward
