"""Operators of recorded steps: counted once, on processors and GPUs; what is guessed is said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from foretrace import flow
from foretrace.cost.calls import Family
from foretrace.errors import ForetraceError, GraphError
from foretrace.graph.taskgraph import Phase, TaskGraph
from foretrace.model.operator_graph import Role
from foretrace.model.readers.calls import Called, from_calls, from_recording, outputs_of
from foretrace.model.readers.sources import GRAPH, load_operators, reader_of
from foretrace.model.texts import TensorType, text_of

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def cnn() -> TaskGraph:
    return flow.read(DATA / "cnn.json.gz").graph().graph


def test_flops_are_those_of_the_recorded_step(cnn: TaskGraph) -> None:
    for step, number in enumerate(cnn.info.steps):
        graph = from_recording(cnn, "cnn", step=number)
        mine = cnn.flops[cnn.step == step]
        assert graph.flops == pytest.approx(mine.sum(), rel=0.02)  # views and calls without tensors aside
        assert graph.batch == 2
    assert from_recording(cnn).flops == from_recording(cnn, step=cnn.info.steps[-1]).flops


def test_phases_layers_and_weights(cnn: TaskGraph) -> None:
    graph = from_recording(cnn, "cnn")
    assert {node.phase for node in graph.nodes} >= {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER}
    first = graph.nodes[0]
    assert (first.op, first.layer) == ("aten::mkldnn_convolution", "Net_0.Conv2d_0")
    roles = [graph.storages[graph.tensors[i].storage].role for i in first.inputs]
    assert roles == [Role.INPUT, Role.WEIGHT, Role.WEIGHT]
    second = next(n for n in graph.nodes[1:] if "conv" in n.op)
    made = {i: at for at, node in enumerate(graph.nodes) for i in node.outputs}
    assert second.inputs[0] in made
    assert "guessed from sizes" in graph.notes[-1]
    assert graph.source == "recording of cpu"


def test_mistakes(cnn: TaskGraph, tmp_path: Path) -> None:
    with pytest.raises(GraphError, match=r"has no step 99; its steps are 13, 14\."):
        from_recording(cnn, step=99)
    with pytest.raises(GraphError, match="record_shapes=True"):
        from_recording(cnn.with_columns(shape=np.full_like(cnn.shape, -1)), "cnn")
    with pytest.raises(ForetraceError, match="no open dimensions"):
        load_operators(DATA / "cnn.json.gz", dims={"batch": 3})


def test_a_saved_graph_is_as_good_as_the_recording(cnn: TaskGraph, tmp_path: Path) -> None:
    flow.read(DATA / "cnn.json.gz").graph().save(tmp_path / "cnn.graph")
    assert reader_of(tmp_path / "cnn.graph") == GRAPH
    one, other = load_operators(tmp_path / "cnn.graph"), load_operators(DATA / "cnn.json.gz")
    assert one == replace(other, name=one.name)


def text(*dims: list[int], dtype: str = "float32") -> str:
    return text_of(list(dims), [dtype] * len(dims))


@pytest.mark.parametrize(
    ("op", "dims", "result"),
    [
        ("aten::mm", [[4, 8], [8, 3]], (4, 3)),
        ("aten::bmm", [[5, 4, 8], [5, 8, 3]], (5, 4, 3)),
        ("aten::linear", [[2, 4, 8], [3, 8], [3]], (8, 3)),
        ("aten::relu", [[4, 8]], (4, 8)),
        ("aten::add", [[4, 1], [4, 8]], (4, 8)),
        ("aten::sum", [[4, 8]], ()),
        ("aten::cat", [[4, 8]], (32,)),
    ],
)
def test_results_follow_from_inputs(op: str, dims: list[list[int]], result: tuple[int, ...]) -> None:
    assert outputs_of(op, text(*dims)) == [TensorType(dims=result)]


def test_gradients_find_the_weights_of_their_layer() -> None:
    rows = [
        Called(op="aten::linear", text=text([4, 8], [6, 8]), layer="a"),
        Called(op="aten::linear", text=text([4, 6], [8, 6]), layer="b"),
        Called(op="aten::mm", text=text([4, 8], [8, 6]), phase=Phase.BACKWARD, layer="b"),
    ]
    graph = from_calls(rows, "two", source="test")
    assert graph.parameters == 2 * 48
    assert graph.nodes[2].inputs[1] == graph.nodes[1].inputs[1]
    assert graph.nodes[1].inputs[0] == graph.nodes[0].outputs[0]


def test_gpu_recording_of_resnet50(shared_data: Path) -> None:
    folder = shared_data / "traces" / "kineto"
    graph = load_operators(folder / "resnet50_num_workers_0.worker0.1623143089861.pt.trace.json.gz")
    assert graph.source == "recording of Tesla V100-DGXS-32GB"
    assert graph.flops == pytest.approx(7.6e11, rel=0.02)  # old recordings lack some strides
    assert graph.parameters == pytest.approx(25_557_032, rel=0.01)


def test_gpu_recording_of_bert(shared_data: Path) -> None:
    graph = load_operators(shared_data / "traces/tracelens/h100_gaunernst_bert-small-uncased__1016001.json.gz")
    families = graph.calls.family.tolist()
    assert families.count(Family.ATTENTION) == 4
    assert families.count(Family.GEMM) == 26
    assert all(node.phase == Phase.FORWARD for node in graph.nodes)
