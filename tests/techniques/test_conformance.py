"""All techniques pass the tests of `foretrace.testing`, and any two of them compose."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import permutations
from typing import ClassVar

import numpy as np
import pytest

from foretrace.errors import NotApplicableError
from foretrace.graph.taskgraph import TaskGraph
from foretrace.techniques.arguments import parse
from foretrace.techniques.base import Technique
from foretrace.techniques.registry import techniques
from foretrace.testing import TechniqueConformance, recorded, small_training
from foretrace.testing.technique import check_valid
from foretrace.testing.workloads import Cpu, Gpu, optimizer_facts

EXAMPLES = {
    "prefetch-data": "prefetch-data workers=2",
    "mixed-precision": "mixed-precision",
    "fused-optimizer": "fused-optimizer",
    "cuda-graphs": "cuda-graphs",
    "compiled": "compiled",
    "channels-last": "channels-last",
    "batch-size": "batch-size by=2",
    "gradient-accumulation": "gradient-accumulation steps=2",
    "activation-recomputation": "activation-recomputation blocks=Conv2d",
    "reconstruct-batchnorm": "reconstruct-batchnorm min_bytes=0",
    "activation-offload": "activation-offload to=disk min_bytes=0",
    "activation-compression": "activation-compression min_bytes=0",
    "structured-dropout": "structured-dropout p=0.5",
    "speculative-decoding": "speculative-decoding draft=1us",
    "clustered-heads": "clustered-heads clusters=2",
    "product-quantisation": "product-quantisation prototypes=8",
    "data-parallel": "data-parallel workers=4 network=1gbit/50us",
    "fully-sharded": "fully-sharded workers=4 network=1gbit/50us blocks=Conv2d",
    "bucket-fusion": "bucket-fusion cap_mb=5",
    "tensor-partition": "tensor-partition elements=10000",
    "priority": "priority",
    "hierarchical-allreduce": "hierarchical-allreduce levels=2x2",
    "parameter-server": "parameter-server servers=2",
    "local-steps": "local-steps workers=4 network=1gbit/50us",
    "gradient-compression": "gradient-compression method=fp16",
    "model-parallel-compression": "model-parallel-compression method=quantise rows=64 hidden=32 layers=2 network=1gbit",
    "partial-backprop": "partial-backprop workers=2 network=1gbit/50us",
    "kfac": "kfac",
    "contention": "contention network=1gbit/50us",
    "faster-device": "faster-device ratio=2",
    "sparse-accelerator": "sparse-accelerator input=0.5±0.1 gradient=0.4",
    "replace-kernel": "replace-kernel phase=backward kind=kernel|operator time_us=7",
    "scale": "scale phase=forward by=0.5",
    "remove": "remove op=aten::relu|aten::clamp_min",
}
# Their files inherit the conformance tests themselves, with options and models that suit them.
WITH_OWN_TESTS = {
    "mixed-precision",
    "channels-last",
    "batch-size",
    "gradient-accumulation",
    "activation-recomputation",
    "reconstruct-batchnorm",
    "activation-offload",
    "activation-compression",
    "structured-dropout",
    "speculative-decoding",
    "clustered-heads",
    "product-quantisation",
    "data-parallel",
    "fully-sharded",
    "bucket-fusion",
    "tensor-partition",
    "priority",
    "hierarchical-allreduce",
    "parameter-server",
    "local-steps",
    "gradient-compression",
    "model-parallel-compression",
    "partial-backprop",
    "kfac",
    "contention",
    "sparse-accelerator",
}
# They begin with one worker alone, so each refuses what another one has made of it.
DISTRIBUTED = ("data-parallel", "fully-sharded", "local-steps", "partial-backprop", "model-parallel-compression")
ON_DEVICES_ONLY = {"cuda-graphs", "faster-device"}
REFUSED = {
    ("cuda-graphs", "mixed-precision"),
    ("cuda-graphs", "fused-optimizer"),
    ("mixed-precision", "cuda-graphs"),
    ("cuda-graphs", "local-steps"),
    ("cuda-graphs", "model-parallel-compression"),
    ("gradient-accumulation", "model-parallel-compression"),
    *permutations(DISTRIBUTED, 2),
    *((first, "gradient-accumulation") for first in DISTRIBUTED),
    ("gradient-accumulation", "kfac"),
    *((first, "kfac") for first in DISTRIBUTED if first != "data-parallel"),  # it reckons with averaged gradients
}


class TestPrefetchData(TechniqueConformance):
    technique: ClassVar[Technique] = parse(EXAMPLES["prefetch-data"])


class TestFusedOptimizer(TechniqueConformance):
    technique: ClassVar[Technique] = parse(EXAMPLES["fused-optimizer"])


class TestCudaGraphs(TechniqueConformance):
    technique: ClassVar[Technique] = parse(EXAMPLES["cuda-graphs"])


class TestCompiled(TechniqueConformance):
    technique: ClassVar[Technique] = parse(EXAMPLES["compiled"])
    test_apply_gives_a_training_that_trains = None  # type: ignore[assignment]  # compiles for long: see test_compiled.py


class TestFasterDevice(TechniqueConformance):
    technique: ClassVar[Technique] = parse(EXAMPLES["faster-device"])


class TestReplaceKernel(TechniqueConformance):
    technique: ClassVar[Technique] = parse(EXAMPLES["replace-kernel"])


class TestScale(TechniqueConformance):
    technique: ClassVar[Technique] = parse(EXAMPLES["scale"])


class TestRemove(TechniqueConformance):
    technique: ClassVar[Technique] = parse(EXAMPLES["remove"])


def test_every_technique_is_tested() -> None:
    here = {each.technique.name for each in globals().values() if isinstance(each, type) and hasattr(each, "technique")}
    assert here | WITH_OWN_TESTS == set(EXAMPLES) == set(techniques())


@cache
def graphs() -> Mapping[str, TaskGraph]:
    """Written out as a builder would: a network on a GPU and a perceptron on a processor; and a real recording."""
    return {
        "gpu": Gpu(recording=optimizer_facts(6, 60_000, "SGD", momentum=0.9)).graph(),
        "cpu": Cpu(recording=optimizer_facts(10, 1_000_000)).graph(),
        "recorded": recorded(small_training()),
    }


@cache
def alone(technique: str, on: str) -> TaskGraph | None:
    """One technique predicted by itself; None where it does not fit."""
    try:
        return parse(EXAMPLES[technique]).predict(graphs()[on])
    except NotApplicableError:
        return None


@pytest.mark.parametrize("first", EXAMPLES)
def test_two_techniques_compose(first: str) -> None:
    for name in graphs():
        one = alone(first, name)
        if one is None:
            continue
        for second, text in EXAMPLES.items():
            if second == first or alone(second, name) is None:
                continue
            try:
                both = parse(text).predict(one)
            except NotApplicableError as reason:
                assert str(reason).startswith(second)
                assert (first, second) in REFUSED, f"{name}: {reason}"
                continue
            assert (first, second) not in REFUSED, f"{second} on {name}"
            check_valid(both)
            assert {change.technique for change in both.changes} >= {first, second}


@pytest.mark.parametrize("name", sorted(set(EXAMPLES) - {"faster-device", "fused-optimizer", "local-steps"}))
@pytest.mark.parametrize("platform", ["gpu", "cpu"])
def test_where_nothing_fits_the_reason_is_given(name: str, platform: str) -> None:
    graph = (Gpu if platform == "gpu" else Cpu)(layers=0, data_us=0).graph()
    bare = graph if platform == "cpu" else graph.with_columns(phase=np.zeros_like(graph.phase))
    with pytest.raises(NotApplicableError, match=f"^{name}: .*[.]$"):
        parse(EXAMPLES[name]).predict(bare)
