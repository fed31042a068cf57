"""What every technique must do: keep the graph valid, leave the original alone, say what it did, compose."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from foretrace.errors import NotApplicableError
from foretrace.graph.taskgraph import TaskGraph
from foretrace.simulate.timeline import simulate
from foretrace.techniques.arguments import parse
from foretrace.techniques.base import Technique
from foretrace.techniques.registry import techniques
from tests.graph.small_graphs import assert_valid, columns
from tests.techniques.workloads import Cpu, Gpu, optimizer_facts

EXAMPLES = {
    "prefetch-data": "prefetch-data workers=2",
    "mixed-precision": "mixed-precision",
    "fused-optimizer": "fused-optimizer",
    "cuda-graphs": "cuda-graphs",
    "compiled": "compiled",
    "channels-last": "channels-last",
    "batch-size": "batch-size by=2",
    "gradient-accumulation": "gradient-accumulation steps=2",
    "activation-recomputation": "activation-recomputation",
    "reconstruct-batchnorm": "reconstruct-batchnorm",
    "activation-offload": "activation-offload",
    "activation-compression": "activation-compression",
    "structured-dropout": "structured-dropout p=0.5",
    "faster-device": "faster-device ratio=2",
    "replace-kernel": "replace-kernel phase=backward kind=kernel|operator time_us=7",
    "scale": "scale phase=forward by=0.5",
    "remove": "remove op=aten::relu",
}
ON_CPU = {
    "batch-size",
    "gradient-accumulation",
    "compiled",
    "prefetch-data",
    "mixed-precision",
    "fused-optimizer",
    "replace-kernel",
    "scale",
    "remove",
}
GRAPHS = {
    "gpu": Gpu(recording=optimizer_facts(6, 60_000, "SGD", momentum=0.9)).graph(),
    "cpu": Cpu(recording=optimizer_facts(10, 1_000_000)).graph(),
}
# Needs the modules of a real model: see the conformance class of its own tests.
ON_MODULES = {
    "activation-recomputation",
    "activation-compression",
    "activation-offload",
    "reconstruct-batchnorm",
    "structured-dropout",
}
REFUSED = {("cuda-graphs", "mixed-precision"), ("cuda-graphs", "fused-optimizer"), ("mixed-precision", "cuda-graphs")}
CASES = [
    (name, kind) for name in EXAMPLES for kind in GRAPHS if name in ON_CPU or (kind == "gpu" and name not in ON_MODULES)
]


def test_every_technique_has_an_example() -> None:
    assert set(techniques()) == set(EXAMPLES)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_predict(name: str, kind: str) -> None:
    graph, technique = GRAPHS[kind], parse(EXAMPLES[name])
    before = columns(graph)
    predicted = technique.predict(graph)
    assert_valid(predicted)
    assert columns(graph) == before, "the original must not change"
    assert len(predicted.marks) == len(graph.marks)
    made = predicted.changes[len(graph.changes) :]
    assert made and all(change.what for change in made) and sum(change.tasks for change in made) > 0
    assert {change.technique for change in made} <= {name, ""}
    assert columns(technique.predict(graph)) == columns(predicted), "the same twice"
    assert simulate(predicted).step_time_s > 0


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_assumptions_can_be_replaced(name: str, kind: str) -> None:
    graph, technique = GRAPHS[kind], parse(EXAMPLES[name])
    predicted = technique.predict(graph)
    assumed = technique.uncertain(graph)
    assert [a for a in predicted.assumptions if a.flag] == list(assumed)
    for assumption in assumed:
        assert assumption.low <= assumption.value <= assumption.high
        assert assumption.why and assumption.technique == name
        given = parse(f"{technique} {assumption.flag}={assumption.value!r}")
        assert assumption.flag not in {each.flag for each in given.uncertain(graph)}
        assert columns(given.predict(graph)) == columns(predicted), "the central value, given, changes nothing"


@pytest.mark.parametrize(("first", "second"), list(permutations(sorted(set(EXAMPLES) - ON_MODULES), 2)))
def test_two_techniques_compose(first: str, second: str) -> None:
    for kind, graph in GRAPHS.items():
        if kind == "cpu" and not {first, second} <= ON_CPU:
            continue
        try:
            both = parse(EXAMPLES[second]).predict(parse(EXAMPLES[first]).predict(graph))
        except NotApplicableError as reason:
            assert str(reason).startswith(second)
            assert (first, second) in REFUSED
            continue
        assert (first, second) not in REFUSED
        assert_valid(both)
        assert {change.technique for change in both.changes} >= {first, second}


def empty(platform: str) -> TaskGraph:
    """A recording with steps and nothing that a technique could work on."""
    graph = (Gpu if platform == "gpu" else Cpu)(layers=0, data_us=0).graph()
    return graph if platform == "cpu" else graph.with_columns(phase=np.zeros_like(graph.phase))


@pytest.mark.parametrize("name", sorted(set(EXAMPLES) - {"faster-device", "fused-optimizer"}))
@pytest.mark.parametrize("platform", ["gpu", "cpu"])
def test_where_nothing_fits_the_reason_is_given(name: str, platform: str) -> None:
    with pytest.raises(NotApplicableError, match=f"^{name}: .*[.]$"):
        parse(EXAMPLES[name]).predict(empty(platform))


@pytest.mark.parametrize("kind", list(techniques().values()))
def test_techniques_describe_themselves(kind: type[Technique]) -> None:
    assert kind.summary and kind.source and kind.name == kind.name.lower()
    for each in kind.parameters():
        assert each.doc, f"{kind.name} {each.name}"
        assert each.type in ("float", "int", "bool", "str")
