"""Execution traces: real ones of every version that is at hand, our own from this PyTorch, and damaged ones."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.cost.calls import Family
from foretrace.errors import ForetraceError
from foretrace.graph.taskgraph import Phase
from foretrace.model.operator_graph import BEFORE, OperatorGraph, Role
from foretrace.model.readers import protobuf
from foretrace.model.readers.chakra import VERSIONS, from_chakra
from foretrace.model.readers.sources import CHAKRA, load_operators, reader_of

Argument = tuple[Any, Any, str]


def tensor(number: int, storage: int, dims: list[int]) -> Argument:
    elements = 1
    for size in dims:
        elements *= size
    return [number, storage, 0, elements, 4, "cpu"], dims, "Tensor(float)"


def node(at: int, name: str, parent: int, inputs: list[Argument], outputs: list[Argument], tid: int = 1) -> Any:
    """In the Chakra form."""
    part = [
        {"values": [a[0] for a in each], "shapes": [a[1] for a in each], "types": [a[2] for a in each]}
        for each in (inputs, outputs)
    ]
    attributes = [{"name": "tid", "type": "uint64", "value": tid}]
    return {"id": at, "name": name, "ctrl_deps": parent, "inputs": part[0], "outputs": part[1], "attrs": attributes}


def old(each: Any) -> Any:
    """The same node as PyTorch wrote it up to schema 1.0.1."""
    found = {"id": each["id"], "name": each["name"], "parent": each["ctrl_deps"], "tid": 1}
    for key in ("input", "output"):
        part = each[f"{key}s"]
        found |= {f"{key}s": part["values"], f"{key}_shapes": part["shapes"], f"{key}_types": part["types"]}
    return found


X, W, Y, Z = tensor(10, 11, [4, 8]), tensor(12, 13, [2, 8]), tensor(14, 15, [4, 2]), tensor(16, 17, [4, 2])
WT = tensor(18, 13, [8, 2])
NODES = [
    node(1, "[pytorch|profiler|execution_trace|process]", 0, [], []),
    node(2, "[pytorch|profiler|execution_trace|thread]", 1, [], []),
    node(20, "aten::linear", 2, [X, W], [Y]),
    node(21, "aten::t", 20, [W], [WT]),
    node(22, "aten::mm", 20, [X, WT], [Y]),
    node(23, "aten::relu_", 2, [Y], [Y]),
    node(24, "aten::empty_like", 2, [Y], [Z]),
    node(25, "aten::fill_", 2, [Z, (1.0, [], "Double")], [Z]),
    node(26, "aten::add", 2, [Y, Z, (1, [], "Int")], [tensor(30, 31, [4, 2])]),
    node(27, "mylib::special", 2, [Y], [tensor(32, 33, [4, 2])]),
]


def trace(nodes: list[Any], version: str = "1.1.1-chakra.0.0.4") -> bytes:
    return json.dumps({"schema": version, "pid": 1, "nodes": nodes}).encode()


def read(nodes: list[Any] = NODES, version: str = "1.1.1-chakra.0.0.4", **options: Any) -> OperatorGraph:
    return from_chakra(trace(nodes, version), "small", where="t.json", **options)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_in_both_forms(version: str) -> None:
    nodes = [old(each) for each in NODES] if "chakra" not in version else NODES
    graph = read(nodes, version)
    assert [n.op for n in graph.nodes] == [
        "aten::t", "aten::mm", "aten::relu_", "aten::fill_", "aten::add", "mylib::special",
    ]  # fmt: skip
    assert graph.source == f"chakra {version}"
    assert graph.flops == 2 * 4 * 8 * 2 + 3 * 8


def test_tensors_are_followed_through_views_allocations_and_work_in_place() -> None:
    graph = read()
    t, mm, relu, fill, add, special = graph.nodes
    storage = [graph.tensors[i].storage for i in (t.inputs[0], t.outputs[0], mm.inputs[1])]
    assert len(set(storage)) == 1
    assert graph.storages[storage[0]].role == Role.WEIGHT
    assert graph.storages[storage[0]].born == BEFORE
    assert relu.inputs == mm.outputs
    assert graph.tensors[relu.outputs[0]].storage == graph.tensors[mm.outputs[0]].storage
    assert fill.inputs == ()  # `empty_like` gave memory, no value
    assert graph.storages[graph.tensors[fill.outputs[0]].storage].born == 3
    assert add.inputs == (relu.outputs[0], fill.outputs[0])
    assert special.inputs == relu.outputs
    assert graph.calls.family[-1] == Family.OTHER
    assert (special.read_bytes, special.written_bytes) == (32, 32)
    assert graph.notes == ("operators outside ATen are known by their bytes only: mylib::special (1).",)


def test_results_given_as_arguments_are_not_read() -> None:
    graph = read(
        [NODES[0], NODES[1], node(20, "aten::mm", 2, [X, WT, Y], [Y]), node(21, "triton_poi_relu", 2, [Y, Z], [])]
    )
    mm, kernel = graph.nodes
    assert (len(mm.inputs), mm.read_bytes, mm.written_bytes) == (2, 4 * (32 + 16), 4 * 8)
    assert (kernel.inputs, kernel.read_bytes, kernel.written_bytes) == (mm.outputs, 4 * 8, 4 * 8)


def test_steps_end_with_the_optimizer_and_the_last_whole_one_is_taken() -> None:
    nodes = [NODES[0], NODES[1]]
    for step in range(3):
        first = 100 * (step + 1)
        rows = [
            node(first, "aten::mm", 2, [X, WT], [tensor(first, first, [4, 2])]),
            node(first + 1, "autograd::engine::evaluate_function: MmBackward0", 2, [], []),
            node(first + 2, "aten::mm", first + 1, [X, WT], [tensor(first + 2, first + 2, [4, 2])]),
            node(first + 3, "Optimizer.step#SGD.step", 2, [], []),
            node(first + 4, "aten::add_", first + 3, [W, W, (1, [], "Int")], [W]),
        ]
        nodes += rows
    nodes.append(node(900, "aten::mm", 2, [X, WT], [tensor(900, 900, [4, 2])]))
    graph = read(nodes)
    assert [n.phase for n in graph.nodes] == [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER]
    assert graph.notes == ("step 2 of 3 training steps.",)
    assert read(nodes, step=0).notes == ("step 0 of 3 training steps.",)
    weight = graph.storages[graph.tensors[graph.nodes[-1].inputs[0]].storage]
    assert weight.role == Role.WEIGHT
    with pytest.raises(ForetraceError, match="has 3 training steps, counted from 0, and no step 3"):
        read(nodes, step=3)


MISTAKES = [
    (trace(NODES, "2.0.0"), r"schema '2\.0\.0', and this foretrace reads 1\.0\.0, 1\.0\.1"),
    (b'{"nodes": []}', "without a schema"),
    (b'{"workload_graph": []}', "has no sizes of tensors"),
    (b'{"schema": "1.0.1", "nodes": 3}', "nodes is no list"),
    (b'{"schema": "1.0.1", "nodes": [', "no whole JSON text"),
    (trace([]), "no operator in that step"),
    (trace([{"id": 1}]), r"nodes\[0\] cannot be read \(KeyError: 'inputs'\)"),
    (
        trace([node(1, "aten::relu", 0, [([1, 2, 0, 4, 4, "cpu"], [-4], "Tensor(float)")], [Y])]),
        r"node 1 \(aten::relu\)",
    ),
    (trace([node(1, "aten::relu", 0, [([1, 2, 0, 4, 4, ""], [2**40] * 2, "Tensor(float)")], [Y])]), "any memory holds"),
    (b"\x05hello", "is no Chakra execution trace"),
    (b"", "is no Chakra execution trace: it is empty"),
]


@pytest.mark.parametrize(("data", "says"), MISTAKES)
def test_mistakes(data: bytes, says: str) -> None:
    with pytest.raises(ForetraceError, match=says) as error:
        from_chakra(data, "x", where="t.json")
    assert str(error.value).startswith("t.json")


@given(st.data())
def test_changed_traces_are_a_graph_or_a_sentence(data: st.DataObject) -> None:
    nodes = json.loads(json.dumps([old(each) for each in NODES] if data.draw(st.booleans()) else NODES))
    for _ in range(data.draw(st.integers(1, 3))):
        place: Any = data.draw(st.sampled_from(nodes))
        for _ in range(4):
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = data.draw(st.sampled_from(keys))
            if data.draw(st.booleans()) and isinstance(place[key], dict | list):
                place = place[key]
                continue
            place[key] = data.draw(
                st.sampled_from([None, -1, 2**70, 0, "", "aten::mm", [], {}, [[1]], 1.5, "Tensor(float)"])
            )
            break
    version = data.draw(st.sampled_from(VERSIONS))
    try:
        graph = read(nodes, version)
    except ForetraceError:
        return
    assert len(graph.calls) == len(graph) > 0


@settings(max_examples=60)
@given(st.binary(max_size=80))
def test_bytes_are_a_graph_or_a_sentence(data: bytes) -> None:
    try:
        from_chakra(data, "x")
    except ForetraceError as error:
        assert str(error).endswith(".")


def test_protocol_buffers_by_hand() -> None:
    """Field 1 of 150, field 2 a text, field 3 eight bytes; and a message cut short."""
    data = b"\x08\x96\x01\x12\x02hi\x19" + b"\0" * 8
    assert list(protobuf.fields(data)) == [(1, 150), (2, b"hi"), (3, b"\0" * 8)]
    assert protobuf.signed(2**64 - 1) == -1
    assert protobuf.numbers(b"\x03\x96\x01") == [3, 150]
    assert protobuf.double(b"\0\0\0\0\0\0\xf0?") == 1.0
    with pytest.raises(ForetraceError, match="is cut"):
        list(protobuf.fields(b"\x12\x09hi"))


def test_a_trace_that_this_pytorch_records(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from torch.profiler import ExecutionTraceObserver

    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(4, 3, 8, 8), torch.randint(0, 10, (4,))

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    step()
    observer = ExecutionTraceObserver()
    observer.register_callback(str(tmp_path / "et.json"))
    observer.start()
    step()
    observer.stop()
    observer.unregister_callback()
    assert reader_of(tmp_path / "et.json") == CHAKRA
    graph = load_operators(tmp_path / "et.json", batch=4)
    assert graph.parameters == sum(p.numel() for p in model.parameters())
    conv, product = 2 * 4 * 8 * 36 * 27, 2 * 4 * 288 * 10
    products = [
        n.flops for n, f in zip(graph.nodes, graph.calls.family, strict=True) if f in (Family.GEMM, Family.CONV)
    ]
    assert sum(products) == 2 * conv + 3 * product  # no gradient of the input
    assert {n.phase for n in graph.nodes} == {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER}
    held = {role: sum(s.nbytes for s in graph.storages if s.role == role) for role in Role}
    assert held[Role.WEIGHT] == held[Role.OPTIMIZER] == 4 * graph.parameters
    assert held[Role.GRADIENT] >= 4 * graph.parameters


PARAMETERS = 25_557_032  # of ResNet-50
FLOPS = 7.794e11  # of its step with 32 samples: 3 times 4.1 G multiply-adds each, less the first gradient


@pytest.mark.parametrize(
    ("file", "version"),
    [
        ("param/resnet_1gpu_et.json.gz", "1.1.1"),
        ("chakra/chakra.0.et.gz", "1.0.1"),
    ],
)
def test_real_traces_of_resnet50(shared_data: Path, file: str, version: str) -> None:
    graph = load_operators(shared_data / "traces" / file)
    assert version in graph.source
    assert graph.parameters == PARAMETERS
    assert graph.flops == pytest.approx(FLOPS, rel=0.001)
    assert {n.phase for n in graph.nodes} >= {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER}
    held = {role: sum(s.nbytes for s in graph.storages if s.role == role) for role in Role}
    assert held[Role.ACTIVATION] == pytest.approx(2.7e9, rel=0.05)
    assert held[Role.OPTIMIZER] == 4 * PARAMETERS


def test_real_trace_of_a_recommender(shared_data: Path) -> None:
    graph = load_operators(shared_data / "traces/param/dlrm_pytorch_et_8rank/dlrm_eg_0.json.gz")
    assert graph.source == "chakra 1.0.1"
    assert {"c10d::alltoall_base_", "c10d::allreduce_"} <= set(graph.unknown())


def test_workload_graph_of_chakra_is_refused(shared_data: Path) -> None:
    with pytest.raises(ForetraceError, match="has no sizes of tensors"):
        load_operators(shared_data / "traces/chakra/chakra.0.json.gz")


def test_a_cut_real_trace_is_a_sentence(shared_data: Path, tmp_path: Path) -> None:
    for file in ("param/linear_et.json.gz", "chakra/chakra.0.et.gz"):
        data = gzip.decompress((shared_data / "traces" / file).read_bytes())
        cut = tmp_path / file.rpartition("/")[2].removesuffix(".gz")
        cut.write_bytes(data[: len(data) // 2])
        with pytest.raises(ForetraceError, match=r"JSON text|is cut"):
            load_operators(cut)
