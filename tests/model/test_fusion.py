"""Fusion: what becomes one kernel, and what must stay true whatever the graph."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings

from foretrace.cost.calls import Family
from foretrace.graph.taskgraph import Phase
from foretrace.model.draft import OperatorGraphDraft
from foretrace.model.fusion import FusionRule, fuse
from foretrace.model.operator_graph import OperatorGraph, Role
from foretrace.model.texts import TensorType
from tests.model.random_graphs import operator_graphs

ROW = TensorType(dims=(32, 64))


def ops(graph: OperatorGraph) -> list[str]:
    return [node.op for node in graph.nodes]


def start() -> tuple[OperatorGraphDraft, int]:
    draft = OperatorGraphDraft()
    return draft, draft.tensor(ROW, role=Role.INPUT)


def after(
    draft: OperatorGraphDraft, op: str, *inputs: int, value: TensorType = ROW, phase: Phase = Phase.FORWARD
) -> int:
    made = draft.tensor(value)
    draft.node(op, inputs, [made], phase=phase)
    return made


def test_chain_of_pointwise_operators_is_one_kernel_that_reads_and_writes_once() -> None:
    draft, x = start()
    a = after(draft, "aten::mul", x, x)
    b = after(draft, "aten::gelu", a)
    after(draft, "aten::add", b, x)
    graph = draft.finish("chain")
    fused = fuse(graph)
    assert ops(fused) == ["fused::pointwise"]
    node = fused.nodes[0]
    assert node.flops == graph.flops
    assert (node.read_bytes, node.written_bytes) == (32 * 64 * 4, 32 * 64 * 4)
    assert fused.calls.family.tolist() == [Family.ELEMENTWISE]
    assert len(fused.tensors) == 2
    assert fused.notes[-1] == "fusion makes 1 kernels of 3 operators: 2 by pointwise."


def test_a_value_that_others_read_is_still_written() -> None:
    draft, x = start()
    a = after(draft, "aten::relu", x)
    after(draft, "aten::exp", a)
    after(draft, "aten::cat", a)
    fused = fuse(draft.finish("two readers"))
    assert ops(fused) == ["fused::pointwise", "aten::cat"]
    assert len(fused.nodes[0].outputs) == 2
    assert fused.nodes[0].written_bytes == 2 * ROW.dims[0] * ROW.dims[1] * 4


def test_epilogue_only_where_nobody_else_reads_the_product() -> None:
    draft, x = start()
    w = draft.tensor(TensorType(dims=(64, 64)), role=Role.WEIGHT)
    y = after(draft, "aten::mm", x, w)
    z = after(draft, "aten::relu", y)
    after(draft, "aten::add", z, x)
    graph = draft.finish("epilogue")
    assert ops(fuse(graph)) == ["aten::mm"]
    assert ops(fuse(graph, [FusionRule.POINTWISE])) == ["aten::mm", "fused::pointwise"]
    draft.node("aten::cat", [y], [draft.tensor(ROW)])
    assert ops(fuse(draft.finish("read twice"))) == ["aten::mm", "fused::pointwise", "aten::cat"]


def test_norm_takes_what_follows_and_a_view_between_is_gone() -> None:
    draft, x = start()
    y = after(draft, "aten::native_layer_norm", x)
    flat = draft.tensor(TensorType(dims=(32 * 64,)), storage=draft.tensors[y].storage)
    draft.node("aten::view", [y], [flat])
    after(draft, "aten::gelu", flat, value=TensorType(dims=(32 * 64,)))
    assert ops(fuse(draft.finish("norm"))) == ["aten::native_layer_norm"]


def test_sum_takes_what_makes_its_input() -> None:
    draft, x = start()
    y = after(draft, "aten::mul", x, x)
    s = after(draft, "aten::sum", y, value=TensorType(dims=(64,)))
    after(draft, "aten::sqrt", s, value=TensorType(dims=(64,)))
    graph = draft.finish("sum")
    assert ops(fuse(graph)) == ["aten::sum"]
    assert fuse(graph).nodes[0].written_bytes == 64 * 4


def test_nothing_is_fused_across_phases() -> None:
    draft, x = start()
    y = after(draft, "aten::relu", x)
    after(draft, "aten::threshold_backward", x, y, phase=Phase.BACKWARD)
    graph = draft.finish("phases")
    assert fuse(graph) == graph


def test_no_kernel_waits_for_itself() -> None:
    draft, x = start()
    y = after(draft, "aten::relu", x)
    c = after(draft, "aten::cat", y)
    after(draft, "aten::add", y, c)
    assert ops(fuse(draft.finish("around"))) == ["aten::relu", "aten::cat", "aten::add"]


def test_a_view_that_is_a_result_keeps_what_it_shows() -> None:
    draft, x = start()
    y = after(draft, "aten::relu", x)
    after(draft, "aten::native_layer_norm", y)
    draft.node("aten::view", [y], [draft.tensor(draft.value(y), storage=draft.tensors[y].storage)], phase=Phase.FORWARD)
    fused = fuse(draft.finish("view"))
    check(fused)
    assert ops(fused)[-1] == "aten::view"


def test_an_unknown_rule_is_a_mistake() -> None:
    draft, x = start()
    after(draft, "aten::relu", x)
    with pytest.raises(ValueError, match="horizontal"):
        fuse(draft.finish("x"), ["horizontal"])


def check(graph: OperatorGraph) -> None:
    """Every read is of a value that was made before, and that its storage still holds."""
    held: dict[int, int] = {}  # storage -> tensor that was written to it last
    of: dict[int, int] = {}  # view -> what it is a view of
    made = {i: at for at, node in enumerate(graph.nodes) for i in node.outputs}
    for at, node in enumerate(graph.nodes):
        for i in node.inputs:
            assert made.get(i, -1) < at
            storage = graph.tensors[i].storage
            assert held.get(storage, of.get(i, i)) == of.get(i, i)
            life = graph.storages[storage]
            assert life.born <= at <= max(life.dies, 0) or life.dies == len(graph)
        for i in node.outputs:
            if node.op == "aten::view":
                of[i] = of.get(node.inputs[0], node.inputs[0])
            else:
                held[graph.tensors[i].storage] = i


@settings(max_examples=60)
@given(operator_graphs())
def test_flops_stay_bytes_never_grow_order_and_results_hold(graph: OperatorGraph) -> None:
    check(graph)
    for rules in ([], [FusionRule.POINTWISE], list(FusionRule)):
        fused = fuse(graph, rules)
        check(fused)
        assert fused.flops == pytest.approx(graph.flops)
        assert fused.nbytes <= graph.nbytes * (1 + 1e-12)
        assert len(fused) <= len(graph)
        for phase in Phase:
            sums = [sum(n.flops for n in each.nodes if n.phase == phase) for each in (graph, fused)]
            assert sums[0] == pytest.approx(sums[1])
        lasting = {s.name for s in graph.storages if s.dies == len(graph)}
        assert lasting <= {s.name for s in fused.storages if s.dies == len(fused)}
        assert fused.parameters == graph.parameters
        if not rules:
            assert [n.op for n in fused.nodes] == [n.op for n in graph.nodes]
    assert np.isclose(fuse(fuse(graph)).flops, graph.flops)


SCRIPT = """
import os, re
import torch
import torch._inductor.config as config
from torch._inductor.graph import GraphLowering
torch.set_num_threads(1)
config.compile_threads = 1
config.fx_graph_cache = False
config.cpp.simdlen = 1
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(64), torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)
    def forward(self, x):
        return (x + self.down(torch.nn.functional.gelu(self.up(self.norm(x)))) * 0.5).relu()
def look(lowering):
    code = lowering.codegen()[0]
    calls = re.findall(r"^ +(cpp_fused_\\w+|extern_kernels[.]addmm)[(]", getattr(code, "value", code), re.MULTILINE)
    print("calls", *calls, flush=True)
    os._exit(0)  # before a compiler is needed
GraphLowering.compile_to_module = look
with torch.no_grad():
    torch.compile(torch.nn.Sequential(Block(), Block()).eval())(torch.randn(32, 64))
"""


@pytest.mark.slow
def test_same_kernels_as_torch_compile_plans() -> None:
    """Two blocks of norm, product, GELU, product, residual, as TorchInductor schedules them for a processor."""
    pytest.importorskip("torch._inductor")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        capture_output=True, text=True, check=False, env=environment, timeout=240,
    )  # fmt: skip
    if "calls" not in done.stdout:
        pytest.skip(f"torch.compile does not plan kernels here: {done.stderr[-300:]}")
    planned = done.stdout.split("calls")[1].split()
    draft = OperatorGraphDraft()
    x = draft.tensor(TensorType(dims=(32, 64)), role=Role.INPUT)
    wide = TensorType(dims=(32, 256))
    for _ in range(2):
        up, down = (draft.tensor(TensorType(dims=dims), role=Role.WEIGHT) for dims in ((64, 256), (256, 64)))
        n = after(draft, "aten::native_layer_norm", x, value=TensorType(dims=(32, 64)))
        h = after(draft, "aten::gelu", after(draft, "aten::addmm", n, up, value=wide), value=wide)
        d = after(draft, "aten::mul", after(draft, "aten::addmm", h, down))
        x = after(draft, "aten::relu", after(draft, "aten::add", x, d))
    # On a processor, products are calls of a library, which knows no epilogue.
    fused = fuse(draft.finish("blocks"), [FusionRule.POINTWISE, FusionRule.NORM, FusionRule.REDUCTION])
    assert ["addmm" in each for each in planned] == ["addmm" in each for each in ops(fused)]
    assert len(ops(fused)) == 9  # 5 kernels and 4 products, of 14 operators
