"""ONNX models made here: sizes, ATen names, work, memory, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.cost.calls import Family
from foretrace.errors import ForetraceError, MissingExtraError
from foretrace.model.operator_graph import OperatorGraph, Role
from foretrace.model.readers.onnx import from_onnx
from foretrace.model.readers.sources import ONNX, load_operators, reader_of

onnx = pytest.importorskip("onnx", reason="the onnx extra is not installed")
FLOAT, INT = 1, 7


def weight(name: str, *dims: int) -> Any:
    size = 4
    for each in dims:
        size *= each
    return onnx.helper.make_tensor(name, FLOAT, dims, bytes(size), raw=True)


def model(
    nodes: list[Any], inputs: dict[str, list[Any]], outputs: dict[str, list[Any]], weights: list[Any], opset: int = 17
) -> bytes:
    make = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        nodes,
        "test",
        [make(name, INT if name.startswith("ids") else FLOAT, dims) for name, dims in inputs.items()],
        [make(name, FLOAT, dims) for name, dims in outputs.items()],
        weights,
    )
    imports = [onnx.helper.make_opsetid("", opset), onnx.helper.make_opsetid("my.ops", 1)]
    data: bytes = onnx.helper.make_model(graph, opset_imports=imports).SerializeToString()
    return data


def one(
    op: str, inputs: dict[str, list[int]], weights: list[Any], *, opset: int = 17, **attributes: Any
) -> OperatorGraph:
    """A model of one node."""
    outputs = attributes.pop("outputs", ["y"])
    node = onnx.helper.make_node(op, [*inputs, *[w.name for w in weights]], outputs, **attributes)
    return from_onnx(model([node], inputs, {outputs[0]: None}, weights, opset), "one")  # type: ignore[dict-item]


def cnn(batch: str | int = "batch") -> bytes:
    make = onnx.helper.make_node
    nodes = [
        make("Conv", ["x", "w", "b"], ["c"], name="/conv1/Conv", strides=[2, 2], pads=[1, 1, 1, 1]),
        make("BatchNormalization", ["c", "scale", "shift", "mean", "var"], ["n"], name="/bn1/Norm"),
        make("Relu", ["n"], ["r"], name="/Relu"),
        make("MaxPool", ["r"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        make("Flatten", ["p"], ["f"]),
        make("Gemm", ["f", "w2", "b2"], ["y"], transB=1, name="/fc/Gemm"),
        make("Softmax", ["y"], ["q"]),
    ]
    weights = [
        weight("w", 16, 3, 3, 3), weight("b", 16), weight("scale", 16), weight("shift", 16), weight("mean", 16),
        weight("var", 16), weight("w2", 10, 1024), weight("b2", 10),
    ]  # fmt: skip
    return model(nodes, {"x": [batch, 3, 32, 32]}, {"q": [batch, 10]}, weights)


def test_a_small_network() -> None:
    graph = from_onnx(cnn(), "cnn", dims={"batch": 8})
    assert [node.op for node in graph.nodes] == [
        "aten::convolution", "aten::native_batch_norm", "aten::relu", "aten::max_pool2d", "aten::view", "aten::addmm",
        "aten::_softmax",
    ]  # fmt: skip
    conv, _, _, pool, view, gemm, _ = graph.nodes
    assert conv.flops == 2 * 8 * 16 * 16 * 16 * 27
    assert gemm.flops == 2 * 8 * 1024 * 10
    assert pool.flops == 8 * 16 * 8 * 8 * 4
    assert (view.flops, view.read_bytes) == (0, 0)
    assert graph.tensors[view.inputs[0]].storage == graph.tensors[view.outputs[0]].storage
    assert graph.parameters == 16 * 27 + 16 + 32 + 10240 + 10
    assert (graph.batch, graph.source, conv.layer) == (8, "onnx opset 17", "conv1")
    statistics = [s.name for s in graph.storages if s.role == Role.BUFFER]
    assert statistics == ["mean", "var"]
    result = graph.storages[graph.tensors[graph.nodes[-1].outputs[0]].storage]
    assert result.dies == len(graph)


def test_open_dimensions_are_asked_for_by_name() -> None:
    with pytest.raises(ForetraceError, match=r"the sizes of batch are not fixed; give them, as in `dim=batch=8`\."):
        from_onnx(cnn(), "cnn")
    with pytest.raises(ForetraceError, match=r"has no open dimension 'seq'; it has batch"):
        from_onnx(cnn(), "cnn", dims={"batch": 2, "seq": 3})
    with pytest.raises(ForetraceError, match="a number from 1 on"):
        from_onnx(cnn(), "cnn", dims={"batch": 0})
    nameless = model([onnx.helper.make_node("Relu", ["x"], ["y"])], {"x": [None, 4]}, {"y": [None, 4]}, [])
    with pytest.raises(ForetraceError, match=r"`dim=x\.0=8`"):
        from_onnx(nameless, "n")
    assert from_onnx(nameless, "n", dims={"x.0": 3}).nodes[0].flops == 12
    assert from_onnx(cnn(4), "cnn").batch == 4


@pytest.mark.parametrize(
    ("graph", "op", "flops"),
    [
        (lambda: one("MatMul", {"a": [4, 8], "b": [8, 3]}, []), "aten::mm", 2 * 4 * 8 * 3),
        (lambda: one("MatMul", {"a": [2, 4, 8]}, [weight("w", 8, 3)]), "aten::mm", 2 * 2 * 4 * 8 * 3),
        (lambda: one("MatMul", {"a": [2, 5, 4, 8], "b": [2, 5, 8, 3]}, []), "aten::bmm", 2 * 10 * 4 * 8 * 3),
        (lambda: one("Einsum", {"a": [2, 5, 4], "b": [2, 4, 3]}, [], equation="bik,bkj->bij"), "aten::bmm", 2 * 2 * 60),
        (lambda: one("Gemm", {"a": [8, 4]}, [weight("w", 8, 3)], transA=1), "aten::mm", 2 * 4 * 8 * 3),
        (
            lambda: one("ConvTranspose", {"x": [1, 4, 5, 5]}, [weight("w", 4, 6, 3, 3)]),
            "aten::conv_transpose2d",
            2 * 100 * 54,
        ),
        (
            lambda: one("LayerNormalization", {"x": [4, 8]}, [weight("s", 8), weight("t", 8)]),
            "aten::native_layer_norm",
            32,
        ),
        (lambda: one("ReduceMean", {"x": [4, 8]}, [], axes=[1]), "aten::mean", 32),
        (lambda: one("GlobalAveragePool", {"x": [2, 3, 4, 4]}, []), "aten::adaptive_avg_pool2d", 96),
        (lambda: one("Concat", {"a": [2, 3], "b": [4, 3]}, [], axis=0), "aten::cat", 0),
        (lambda: one("Add", {"a": [4, 1], "b": [4, 8]}, []), "aten::add", 32),
    ],
)
def test_operators_and_their_flops(graph: Any, op: str, flops: float) -> None:
    (node,) = graph().nodes
    assert (node.op, node.flops) == (op, flops)


def test_recurrent_layers_and_attention() -> None:
    lstm = one(
        "LSTM", {"x": [7, 2, 8]}, [weight("w", 1, 20, 8), weight("r", 1, 20, 5)], hidden_size=5, outputs=["y", "h", "c"]
    )
    assert lstm.nodes[0].op == "aten::lstm"
    assert lstm.nodes[0].flops == 2 * 7 * 2 * (20 * 8 + 20 * 5)
    if onnx.defs.onnx_opset_version() < 23:
        pytest.skip(f"this onnx knows opset {onnx.defs.onnx_opset_version()}, attention came with 23")
    sizes = {"q": [2, 10, 64], "k": [2, 12, 64], "v": [2, 12, 64]}
    found = one("Attention", sizes, [], opset=23, q_num_heads=4, kv_num_heads=4)
    assert found.calls.family[0] == Family.ATTENTION
    assert found.flops == 2 * (2 * 4 * 10 * 12) * (16 + 16)


def test_lookups_constants_and_shapes_that_are_computed() -> None:
    make = onnx.helper.make_node
    number = onnx.helper.make_tensor("n", INT, [1], [0])
    nodes = [
        make("Gather", ["table", "ids"], ["e"]),
        make("Shape", ["e"], ["s"]),
        make("Constant", [], ["zero"], value=number),
        make("Gather", ["s", "zero"], ["rows"]),
        make("Constant", [], ["rest"], value=onnx.helper.make_tensor("m", INT, [1], [-1])),
        make("Concat", ["rows", "rest"], ["to"], axis=0),
        make("Reshape", ["e", "to"], ["y"]),
    ]
    graph = from_onnx(model(nodes, {"ids": [3, 5]}, {"y": [3, 40]}, [weight("table", 100, 8)]), "lookup")
    assert [node.op for node in graph.nodes] == ["aten::embedding", "aten::view"]
    assert graph.calls.family[0] == Family.LOOKUP
    assert graph.nodes[0].read_bytes + graph.nodes[0].written_bytes == 15 * 8 + 2 * 15 * 8 * 4
    assert graph.parameters == 800


def test_unknown_operators_of_other_domains_count_by_their_bytes() -> None:
    make = onnx.helper.make_node
    nodes = [make("Magic", ["x"], ["m"], domain="my.ops"), make("Relu", ["m"], ["y"])]
    graph = from_onnx(model(nodes, {"x": [4, 8]}, {"y": [4, 8]}, []), "magic")
    assert graph.unknown() == {"my.ops::Magic": 1}
    assert (graph.nodes[0].read_bytes, graph.nodes[0].written_bytes) == (128, 128)
    assert "my.ops::Magic (1)" in graph.notes[0]
    assert "size of the first input" in graph.notes[1]


def test_what_cannot_be_known_names_the_node() -> None:
    make = onnx.helper.make_node
    inner = onnx.helper.make_graph([], "branch", [], [])
    branch = [make("If", ["x"], ["y"], name="choose", then_branch=inner, else_branch=inner)]
    with pytest.raises(ForetraceError, match=r"node choose \(If\) is control flow"):
        from_onnx(model(branch, {"x": [1]}, {"y": [1]}, []), "branch")
    nodes = [make("NonZero", ["x"], ["i"], name="find"), make("Cast", ["i"], ["y"], to=FLOAT)]
    with pytest.raises(ForetraceError, match=r"of node find \(NonZero\) depends on data"):
        from_onnx(model(nodes, {"x": [4]}, {"y": [None, None]}, []), "data")
    with pytest.raises(ForetraceError, match=r"m\.onnx: node odd \(Relux\) is no operator of ONNX"):
        from_onnx(model([make("Relux", ["x"], ["y"], name="odd")], {"x": [4]}, {"y": [4]}, []), "odd", where="m.onnx")
    with pytest.raises(ForetraceError, match="nothing depends on the inputs"):
        from_onnx(model([make("Relu", ["w"], ["y"])], {"x": [4]}, {"y": [4]}, [weight("w", 4)]), "still")
    for data in (b"", b"\x08\x07hello", b"\xff" * 40):
        with pytest.raises(ForetraceError, match="is no ONNX model"):
            from_onnx(data, "bytes")


def test_a_weight_of_a_negative_size_is_refused() -> None:
    damaged = weight("w", 16, 3)
    damaged.dims[1] = -1
    with pytest.raises(ForetraceError, match="tensor w must have sizes that a memory can hold, got 16, -1"):
        one("MatMul", {"x": [2, 3]}, [damaged])


def test_files_are_known_by_their_content(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(cnn())
    assert reader_of(tmp_path / "model.bin") == ONNX
    graph = load_operators(tmp_path / "model.bin", dims={"batch": 2})
    assert (graph.name, graph.batch) == ("model", 2)


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingExtraError, match=r"foretrace\[onnx\]"):
        from_onnx(b"x", "model")


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.integers(0, 255), st.integers(0, 10_000))
def test_changed_bytes_are_a_graph_or_a_sentence(at: int, byte: int, cut: int) -> None:
    data = bytearray(SMALL)
    data[at % len(data)] = byte
    try:
        graph = from_onnx(bytes(data[: len(data) - cut % 3]), "model", dims={"batch": 2})
    except ForetraceError:
        return
    assert len(graph.calls) == len(graph) > 0


SMALL = model(
    [
        onnx.helper.make_node("Conv", ["x", "w"], ["c"], strides=[2, 2]),
        onnx.helper.make_node("Relu", ["c"], ["r"]),
        onnx.helper.make_node("Gather", ["r", "ids"], ["y"], axis=1),
    ],
    {"x": ["batch", 1, 5, 5], "ids": [2]},
    {"y": ["batch", 2, 2, 2]},
    [weight("w", 3, 1, 2, 2)],
)
