"""What a path or a name is, and what is no model."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest

from foretrace.errors import ForetraceError
from foretrace.serving.server.models import ModelSource, TensorSpec

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """One network in every format, and its answers to ones."""
    folder = tmp_path_factory.mktemp("formats")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).eval()
    example = torch.ones(2, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(net).save(folder / "net.pt")
    open_batch = ({0: torch.export.Dim("batch")},)
    torch.export.save(torch.export.export(net, (example,), dynamic_shapes=open_batch), folder / "open.pt2")
    torch.export.save(torch.export.export(net, (example,)), folder / "fixed.pt2")
    torch.save(net.state_dict(), folder / "weights.pt")
    weights = {name: each.detach().numpy() for name, each in net.named_parameters()}
    _write_onnx(folder / "net.onnx", weights, "batch")
    _write_onnx(folder / "fixed.onnx", weights, 2)
    return folder, net(example).detach().numpy()


def _write_onnx(path: Path, weights: dict[str, np.ndarray], batch: int | str) -> None:
    onnx = pytest.importorskip("onnx")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    nodes = [
        helper.make_node("Gemm", ["x", "0.weight", "0.bias"], ["a"], transB=1),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Gemm", ["b", "2.weight", "2.bias"], ["y"], transB=1),
    ]
    given = [helper.make_tensor_value_info("x", kind, [batch, 4])]
    made = [helper.make_tensor_value_info("y", kind, [batch, 3])]
    tensors = [onnx.numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "net", given, made, tensors)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)


@pytest.mark.parametrize(
    ("name", "inputs", "fixed"),
    [
        ("net.pt", ("x=float32[4]",), None),
        ("open.pt2", (), None),
        ("fixed.pt2", (), 2),
        ("net.onnx", (), None),
        ("fixed.onnx", (), 2),
    ],
)
def test_every_format_gives_the_answers_of_the_network(
    files: tuple[Path, np.ndarray], name: str, inputs: tuple[str, ...], fixed: int | None
) -> None:  # fmt: skip
    if name.endswith(".onnx"):
        pytest.importorskip("onnxruntime")
    folder, expected = files
    model = ModelSource(name=str(folder / name), inputs=tuple(map(TensorSpec.parse, inputs))).load()
    assert model.facts.fixed_batch == fixed
    (spec,) = model.facts.inputs
    assert (spec.dtype, spec.sizes) == ("float32", (4,))
    for samples in (1, 2) if fixed else (1, 2, 5):
        (found,) = model({spec.name: np.ones((samples, 4), np.float32)}).values()
        np.testing.assert_allclose(found, np.repeat(expected[:1], samples, axis=0), rtol=1e-5)
    if fixed:
        with pytest.raises(ForetraceError, match="takes 2 samples at once, got 3"):
            model({spec.name: np.ones((3, 4), np.float32)})


def test_a_function_of_a_script_with_named_inputs_and_outputs(script: Path) -> None:
    model = ModelSource(name=f"{script}:net").load()
    assert [(each.name, each.dtype, each.sizes) for each in model.facts.inputs] == [
        ("x", "float32", (3,)), ("word", "int64", ()),
    ]  # fmt: skip
    assert [each.name for each in model.facts.outputs] == ["y", "root"]
    again = ModelSource(name=f"{script}:net").load()
    assert again.facts == model.facts  # seeded, so that every process has the same weights
    assert ModelSource(name=f"{script}:unseeded").load().facts != model.facts


@pytest.mark.parametrize("name", ["gnn", "actor-critic", "ncf", "bert"])
def test_models_of_the_zoo_answer_each_sample_by_itself(name: str) -> None:
    if name == "bert":
        pytest.importorskip("transformers")
    model = ModelSource(name=name, size="tiny").load()
    given = model.examples(3)
    together = model(given)
    alone = model({key: each[1:2] for key, each in given.items()})
    for key, each in together.items():
        np.testing.assert_allclose(each[1:2], alone[key], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "inputs", "words"),
    [
        ("detector", (), "first dimension counts the samples, got objectness"),
        ("resnet5o", (), "did you mean resnet50"),
        ("nowhere.pt", (), "nowhere.pt does not exist; name a file that does."),
        ("net.pt", (), "which does not say its inputs"),
        ("net.pt", ("x=float32[5]",), "mat1 and mat2"),
        ("weights.pt", (), "cannot be loaded"),
        ("nets.py", (), "must be SCRIPT.py:FUNCTION"),
        ("nets.py:three", (), "must return (module, example inputs)"),
        ("nets.py:bare", (), "must return (module, example inputs)"),
        ("nets.py:total", (), "must return tensors whose first dimension counts the samples"),
        ("nets.py:broken", (), "raises ValueError: no weights here; see that broken() runs by itself."),
        ("nets.py:none", (), "has no function none()"),
        ("damaged.onnx", (), "cannot be loaded"),
    ],
)
def test_what_is_no_model(
    files: tuple[Path, np.ndarray], script: Path, name: str, inputs: tuple[str, ...], words: str
) -> None:  # fmt: skip
    folder = script.parent if name.startswith("nets") else files[0]
    (files[0] / "damaged.onnx").write_bytes(b"\x08\x07damaged")
    known = name in ("detector", "resnet5o")
    source = ModelSource(
        name=name if known else str(folder / name), size="tiny", inputs=tuple(map(TensorSpec.parse, inputs))
    )
    with pytest.raises((ForetraceError, RuntimeError)) as found:
        source.load()
    assert words in str(found.value)


@pytest.mark.parametrize(
    "text", ["x", "x=float32", "x=float32[a]", "x=string[3]", "x=float32[0]", "=f[1]", "x=int8[9999999,9999999]"]
)
def test_inputs_that_say_nothing(text: str) -> None:
    with pytest.raises(ForetraceError):
        TensorSpec.parse(text)
