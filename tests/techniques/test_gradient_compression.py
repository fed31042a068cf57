"""Gradient compression: sizes by hand, messages in the graph, coding measured or assumed, refusals, the real thing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from math import ceil
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pytest
import torch

from foretrace.cost.network.network import CollectiveKind
from foretrace.cost.operators.calibration import Calibration
from foretrace.errors import NotApplicableError
from foretrace.graph.taskgraph import TaskGraph, TaskKind
from foretrace.simulate.timeline import simulate
from foretrace.techniques.arguments import parse
from foretrace.techniques.base import Technique
from foretrace.techniques.distributed.coding import TIMED
from foretrace.techniques.distributed.compressors import METHODS, low_rank, parts, ratio
from foretrace.techniques.distributed.data_parallel import DataParallel
from foretrace.techniques.distributed.gradient_compression import GradientCompression, _take_momentum
from foretrace.techniques.whatif import whatif
from foretrace.testing import TechniqueConformance, recorded, small_training
from foretrace.training.compression.settings import CompressionSettings
from tests.gloo_workers import together

SLOW = "0.02gbit/50us"


@lru_cache
def alone() -> TaskGraph:
    return recorded(small_training())


@lru_cache
def exchanged(network: str = SLOW) -> TaskGraph:
    return DataParallel(workers=4, network=network, bucket_mb=0.02).predict(alone())


def _messages(graph: TaskGraph) -> npt.NDArray[np.int64]:
    """Rows of the compressed messages."""
    live = np.flatnonzero((graph.kind == TaskKind.COLLECTIVE) & ~graph.gone)
    return live[["compressed" in graph.names[i] for i in graph.name[live]]]


class TestConformance(TechniqueConformance):
    technique: ClassVar[Technique] = GradientCompression(method="topk")

    def graphs(self) -> Mapping[str, TaskGraph]:
        return {"cpu": exchanged()}


class TestConformanceOfPowerSgd(TestConformance):
    technique: ClassVar[Technique] = GradientCompression(method="powersgd", rank=2)


class TestConformanceOfHalf(TestConformance):
    technique: ClassVar[Technique] = GradientCompression(method="fp16")


def resnet_50() -> list[tuple[int, ...]]:
    """Shapes of its 161 parameters (He et al., CVPR 2016, table 1)."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    wide = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for i in range(blocks):
            for shape in ((width, wide, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)):
                shapes += [shape, shape[:1], shape[:1]]
            if i == 0:
                shapes += [(4 * width, wide, 1, 1), (4 * width,), (4 * width,)]
            wide = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


RESNET_50 = resnet_50()


def test_powersgd_ratios_of_resnet_50() -> None:
    """By hand: matrices n x m become r (n + m) numbers, vectors stay. The study is quoted with 72, 37 and 19."""
    assert len(RESNET_50) == 161 and sum(torch.Size(each).numel() for each in RESNET_50) == 25_557_032
    shapes = [shape for shape in RESNET_50 if len(shape) > 1]
    n_m = [(shape[0], torch.Size(shape).numel() // shape[0]) for shape in shapes]
    for rank in (4, 8, 16):
        by_hand = sum(n * m for n, m in n_m) / sum(rank * (n + m) for n, m in n_m)
        everything = sum(torch.Size(shape).numel() for shape in RESNET_50)
        vectors = everything - sum(n * m for n, m in n_m)
        compressed = ratio(CompressionSettings(method="powersgd", rank=rank, min_rate=1.0), RESNET_50)
        assert compressed == pytest.approx(everything / (vectors + sum(rank * (n + m) for n, m in n_m)))
        quoted = {4: 72, 8: 37, 16: 19}[rank]
        assert compressed < quoted < by_hand  # the matrices alone shrink by more than that


def test_low_rank_follows_the_rule_of_the_hook() -> None:
    assert low_rank([(100, 50)], 4, 2.0) == (0, 400, 200)
    assert low_rank([(10, 10)], 4, 2.0) == (100, 0, 0)  # 80 x 2 is not below 100
    assert low_rank([(7,), ()], 4, 2.0) == (8, 0, 0)
    assert low_rank([(64, 3, 3, 3)], 2, 2.0) == (0, 128, 54)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_low_rank_is_what_torch_decides(rank: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _should_compress

    shapes = [(64, 3, 7, 7), (64,), (1000, 2048), (8, 8), (3, 500), (2, 2), (1, 9)]
    plain = p = q = 0
    for shape in shapes:
        matrix = torch.empty(shape).view(shape[0], -1)
        n, m = matrix.shape
        r = min(n, m, rank)
        compress, whole, _ = _should_compress(n, m, r, 2.0)
        plain, p, q = (plain, p + n * r, q + m * r) if compress else (plain + whole, p, q)
    assert low_rank(shapes, rank, 2.0) == (plain, p, q)


def test_messages_by_hand() -> None:
    shapes = [(100, 10), (24,)]
    reduce, gather = CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER

    def found(**given: object) -> list[tuple[CollectiveKind, float]]:
        return [(part.kind, part.nbytes) for part in parts(CompressionSettings(**given), shapes, 8)]  # type: ignore[arg-type]

    assert found(method="fp16") == found(method="bf16") == [(reduce, 2048)]
    assert found(method="powersgd", rank=2) == [(reduce, 4 * 24), (reduce, 4 * 200), (reduce, 4 * 20)]
    assert found(method="randomk", share=0.1) == [(reduce, 4 * ceil(102.4))]
    assert found(method="topk", share=0.1) == [(gather, 8 * 4 * ceil(102.4))] * 2
    assert found(method="dgc", share=0.1) == found(method="topk", share=0.1)
    assert found(method="sign") == [(gather, 8 * (128 + 4))]


@pytest.mark.parametrize("method", METHODS)
def test_on_a_slow_link_every_method_helps_and_on_a_fast_one_none_does_much(method: str) -> None:
    technique = GradientCompression(method=method, rank=1)
    slow, fast = exchanged(), exchanged("400gbit")
    assert simulate(technique.predict(slow)).step_time_s < simulate(slow).step_time_s
    assert simulate(technique.predict(fast)).step_time_s > simulate(fast).step_time_s


def test_without_cost_and_without_gain_nothing_changes() -> None:
    """Free coding at a ratio of 1 is the uncompressed exchange."""
    free = GradientCompression(method="powersgd", min_rate=1e9, encode_gb_s=1e9, decode_gb_s=1e9, hook_us=0, crowding=0)
    for network in (SLOW, "1gbit/1ms"):
        plain = replace(DataParallel(workers=4, network=network, bucket_mb=1.0), backend="nccl").predict(alone())
        assert simulate(free.predict(plain)).step_time_s == pytest.approx(simulate(plain).step_time_s, rel=1e-6)


def test_gathering_methods_get_worse_with_workers() -> None:
    took = {}
    for workers in (4, 64):
        graph = DataParallel(workers=workers, network="0.02gbit").predict(alone())
        for method in ("topk", "sign", "randomk"):
            changed = GradientCompression(method=method, decode_gb_s=1e6, hook_us=0).predict(graph)
            took[method, workers] = changed.dur[_messages(changed)].sum()
    assert took["topk", 64] / took["topk", 4] == pytest.approx(63 / 3, rel=0.02)
    assert took["sign", 64] / took["sign", 4] == pytest.approx(63 / 3, rel=0.02)
    assert took["randomk", 64] / took["randomk", 4] == pytest.approx((63 / 64) / (3 / 4), rel=0.02)


def test_measured_hooks_replace_assumptions() -> None:
    technique, graph = GradientCompression(method="topk"), exchanged()
    before = {each.flag for each in technique.uncertain(graph)}
    assert {"encode_gb_s", "decode_gb_s", "crowding"} <= before
    wanted = technique.wants(graph)
    times = {each.key: 1e-3 * (2 if '"part": "all"' in each.concrete[1] else 1) for each in wanted}
    known = Calibration(machine={}, seconds=times).on(graph)
    assert {each.flag for each in technique.uncertain(known)} == {"measured", "crowding"}
    buckets = len(known.info.recording["distributed"]["parts"])
    encode, decode, measured = technique.coding_s(known)
    assert measured == TIMED and encode == pytest.approx(1e-3 * buckets) and decode == pytest.approx(1e-3 * buckets)


def test_encoding_stands_on_the_lane_of_the_backward_pass() -> None:
    graph = GradientCompression(method="topk").predict(exchanged())
    names = {graph.names[i] for i in graph.name[graph.kind == TaskKind.CPU]}
    assert "encode bucket 0" in names
    messages = {graph.names[i] for i in graph.name[_messages(graph)]}
    assert messages == {f"compressed bucket {i}" for i in range(len(messages))}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("method=topk share=0", "share must be above 0 and at most 1, got 0"),
        ("method=topk share=2", "share must be above 0 and at most 1, got 2"),
        ("method=powersgd rank=0", "rank must be 1 or more, got 0"),
        ("method=powersgd start=1", "start must be 2 or more"),
        ("method=powersgd min_rate=0", "min_rate"),
        ("method=dgc clip=-1", "clip must be 0 or more, got -1"),
        ("method=fp16 encode_gb_s=0", "encode_gb_s"),
        ("method=fp16 crowding=3", "crowding"),
    ],
)
def test_nonsense_is_refused_in_a_sentence(text: str, says: str) -> None:
    with pytest.raises(NotApplicableError, match=says) as reason:
        parse(f"gradient-compression {text}").predict(exchanged())
    assert str(reason.value).endswith(".")


def test_it_needs_data_parallel_before_it_and_once_is_enough() -> None:
    technique = GradientCompression(method="fp16")
    with pytest.raises(NotApplicableError, match="data-parallel"):
        technique.predict(alone())
    with pytest.raises(NotApplicableError, match="compression"):
        technique.predict(technique.predict(exchanged()))
    with pytest.raises(NotApplicableError, match="apply data-parallel first"):
        technique.apply(small_training())


def test_its_interval_holds_the_prediction() -> None:
    found = whatif(alone(), [DataParallel(workers=4, network=SLOW), GradientCompression(method="sign")])
    low, high = found.interval_s
    assert low < found.after_s < high


def test_dgc_takes_over_the_momentum_of_sgd_alone() -> None:
    training = small_training()
    weights, rest = [[each] for each in training.model.parameters()][:2]
    sgd, adam = torch.optim.SGD(weights, lr=0.1, momentum=0.9), torch.optim.Adam(rest)
    assert _take_momentum(replace(training, optimizers=(adam, sgd))) == 0.9
    assert sgd.param_groups[0]["momentum"] == 0 and adam.param_groups[0]["betas"] == (0.9, 0.999)
    assert _take_momentum(replace(training, optimizers=(adam,))) == 0


def train(rank: int) -> list[float]:
    """Losses with data-parallel and two hooks, one after the other; copies keep their hooks."""
    training = small_training()
    parallel = DataParallel(workers=2, network="1gbit", bucket_mb=0.01).apply(training)
    found = []
    for method in ("powersgd", "dgc"):
        treated = GradientCompression(method=method, rank=2, share=0.2).apply(parallel)
        again = treated.copied()
        assert again.around_forward[-1].parallel is again.model  # type: ignore[attr-defined]
        found.append([float(loss) for loss in again.steps(4)][-1])
    return found


@pytest.mark.slow("starts real processes for the methods")
def test_applied_behind_data_parallel_on_real_processes() -> None:
    first, second = together(train, 2)
    assert all(abs(loss) < 10 for loss in (*first, *second))
