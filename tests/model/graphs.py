"""Small operator graphs for tests."""

from __future__ import annotations

import json

from foretrace.graph.taskgraph import Phase
from foretrace.model.operator_graph import BEFORE, Node, OperatorGraph, Role, Storage, Tensor


def linear_text(m: int, k: int, n: int) -> str:
    return json.dumps([[[n], [m, k], [k, n], [], []], ["float"] * 3 + ["Scalar"] * 2, ["", "", "", "1", "1"]])


def chain(layers: int, m: int = 64, k: int = 128, *, views: bool = False, unknown: bool = False) -> OperatorGraph:
    """`layers` products of [m x k] by [k x k], one behind the other, each in a layer of its own."""
    tensors = [Tensor(dims=(m, k), dtype="float32", storage=0)]
    storages = [Storage(nbytes=4 * m * k, role=Role.INPUT, born=BEFORE, dies=0)]
    nodes: list[Node] = []
    last = 0
    for i in range(layers):
        storages.append(Storage(nbytes=4 * k * k, role=Role.WEIGHT, born=BEFORE, dies=10**6, name=f"layers.{i}.weight"))
        tensors.append(Tensor(dims=(k, k), dtype="float32", storage=len(storages) - 1))
        weight = len(tensors) - 1
        storages.append(Storage(nbytes=4 * m * k, role=Role.ACTIVATION, born=len(nodes), dies=len(nodes) + 1))
        tensors.append(Tensor(dims=(m, k), dtype="float32", storage=len(storages) - 1))
        out = len(tensors) - 1
        nodes.append(
            Node(
                op="aten::addmm" if not unknown else "mylib::product",
                inputs=(last, weight),
                outputs=(out,),
                text=linear_text(m, k, k),
                phase=Phase.FORWARD,
                layer=f"layers.{i}",
                flops=0.0 if unknown else 2.0 * m * k * k,
                read_bytes=4.0 * (m * k + k * k),
                written_bytes=4.0 * m * k,
            )
        )
        last = out
        if views:
            tensors.append(Tensor(dims=(k, m), dtype="float32", storage=len(storages) - 1))
            text = json.dumps([[[m, k]], ["float"], [""]])
            nodes.append(
                Node(op="aten::t", inputs=(last,), outputs=(len(tensors) - 1,), text=text, phase=Phase.FORWARD)
            )
            last = len(tensors) - 1
    return OperatorGraph(
        name="chain", nodes=tuple(nodes), tensors=tuple(tensors), storages=tuple(storages), batch=m, source="test"
    )
