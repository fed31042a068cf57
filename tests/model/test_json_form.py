"""The JSON form: exact round trips, what follows from little, and mistakes that name file, field and mend."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.errors import ForetraceError
from foretrace.graph.taskgraph import Phase
from foretrace.model.blocks import with_blocks
from foretrace.model.fusion import fuse
from foretrace.model.operator_graph import BEFORE, OperatorGraph, Role
from foretrace.model.readers.json_form import dumps, loads, write
from foretrace.model.readers.sources import load_operators
from tests.model.graphs import chain
from tests.model.random_graphs import operator_graphs

PAGE = Path(__file__).parents[2] / "docs" / "operators.md"
EXAMPLES = re.findall(r"```json\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def of(form: dict[str, Any]) -> OperatorGraph:
    return loads(json.dumps(form).encode(), "m.json")


def small(**changes: Any) -> dict[str, Any]:
    """A product and a ReLU, with some fields replaced."""
    form: dict[str, Any] = {
        "format": "foretrace operators",
        "version": 1,
        "tensors": [{"dims": [4, 8]}, {"dims": [8, 2]}, {"dims": [4, 2]}, {"dims": [4, 2]}],
        "nodes": [
            {"op": "aten::mm", "inputs": [0, 1], "outputs": [2]},
            {"op": "aten::relu", "inputs": [2], "outputs": [3]},
        ],
    }
    return form | changes


def whole(graph: OperatorGraph) -> OperatorGraph:
    """With lifetimes that end with the step at the latest."""
    storages = tuple(replace(each, dies=min(each.dies, len(graph))) for each in graph.storages)
    return replace(graph, storages=storages)


@settings(max_examples=40)
@given(operator_graphs())
def test_round_trip_is_exact(graph: OperatorGraph) -> None:
    for each in (graph, with_blocks(graph, least=1), fuse(graph)):
        assert loads(dumps(each)) == each


def test_round_trip_of_files_plain_and_packed(tmp_path: Path) -> None:
    graph = with_blocks(whole(chain(6, views=True)))
    for name in ("graph.json", "graph.json.gz"):
        write(graph, tmp_path / name)
        assert load_operators(tmp_path / name) == graph


def test_the_first_example_of_the_page_has_memory_flops_and_bytes() -> None:
    graph = loads(EXAMPLES[0].encode())
    assert graph.flops == 2 * (2 * 8 * 64 * 256) + 2 * 8 * 256
    assert graph.parameters == 64 * 256
    roles = {s.name: s.role for s in graph.storages if s.name}
    assert roles == {"x": Role.INPUT, "w": Role.WEIGHT, "gradient of y": Role.INPUT}
    hidden = graph.storages[graph.tensors[2].storage]
    assert graph.tensors[2].storage == graph.tensors[3].storage
    assert (hidden.role, hidden.born, hidden.dies) == (Role.ACTIVATION, 0, 2)
    assert [node.phase for node in graph.nodes] == [Phase.FORWARD] * 2 + [Phase.BACKWARD] * 3
    last = graph.storages[graph.tensors[7].storage]
    assert (last.role, last.born, last.dies) == (Role.GRADIENT, 4, 5)
    assert graph.nodes[3].read_bytes == graph.nodes[3].flops == 0


def test_the_second_example_of_the_page_is_a_list_of_calls() -> None:
    graph = loads(EXAMPLES[1].encode())
    assert len(graph) == 13
    assert graph.flops == 12 * 2 * 8 * 64 * 256 + 8 * 256
    assert graph.nodes[0].read_bytes == 2 * (8 * 64 + 64 * 256)
    assert "guessed from sizes" in graph.notes[-1]
    assert len(EXAMPLES) == 2


def test_work_that_is_given_is_kept_and_what_is_left_out_follows() -> None:
    form = small()
    form["nodes"][0] |= {"flops": 7, "layer": "fc"}
    graph = of(form)
    assert (graph.nodes[0].flops, graph.nodes[0].read_bytes, graph.nodes[0].layer) == (7, 4 * (32 + 16), "fc")
    assert graph.nodes[1].flops == 8
    assert [s.born for s in graph.storages] == [BEFORE, BEFORE, 0, 1]


def test_convolutions_need_no_strides_where_the_result_is_known() -> None:
    tensors = [{"dims": [2, 3, 32, 32]}, {"dims": [16, 3, 3, 3]}, {"dims": [2, 16, 16, 16]}]
    nodes = [{"op": "aten::conv2d", "inputs": [0, 1], "outputs": [2]}]
    assert of(small(tensors=tensors, nodes=nodes)).flops == 2 * (2 * 16 * 16 * 16) * 27


MISTAKES: list[tuple[dict[str, Any], str]] = [
    (small(version=2), r"version 2 .* reads version 1"),
    (small(format="onnx"), r'"format": "foretrace operators"'),
    (small(nodes=[]), r"nodes is empty"),
    (small(calls=[{"op": "aten::mm", "dims": [[2]]}]), r"calls cannot be given with nodes"),
    (small(nodes=[{"op": "aten::relu", "inputs": [9]}]), r"nodes\[0\]\.inputs has tensor 9, of 4 tensors"),
    (small(nodes=[{"op": "aten::relu", "inputs": [-1]}]), r"nodes\[0\]\.inputs has tensor -1"),
    (small(nodes=[{"op": "aten::relu", "inputs": [2], "outputs": [2]}]), r"tensor 2, which node 0 makes"),
    (small(nodes=[{"op": "aten::relu", "outputs": [2]}] * 2), r"nodes\[1\]\.outputs has tensor 2, which node 0 makes"),
    (small(nodes=[{"op": ""}]), r"nodes\[0\]\.op is empty"),
    (small(nodes=[{"op": "aten::relu", "phase": "fwd"}]), r"'fwd' is no phase; use one of none, data, forward"),
    (small(nodes=[{"op": "aten::relu", "flops": -1}]), r"nodes\[0\]\.flops is -1"),
    (small(nodes=[{"op": "aten::relu", "text": "[[1]]"}]), r"nodes\[0\]\.text is no list of \[dims, types, concrete\]"),
    (small(nodes=[{"op": "aten::relu", "text": '[[[-1]],["float"],[""]]'}]), r"a size that is no number"),
    (small(nodes=[{"op": "aten::relu", "flop": 1}]), r"unknown field `flop` .*\$\.nodes\[0\]"),
    (small(tensors=[{"dims": [-4, 8]}]), r"\$\.tensors\[0\]\.dims\[0\]"),
    (small(tensors=[{"dims": [2**40, 2**40]}]), r"tensors\[0\]\.dims hold more"),
    (small(tensors=[{"dims": [4], "dtype": "float99"}]), r"tensors\[0\]\.dtype 'float99' is no known type"),
    (small(tensors=[{"dims": [4], "role": "king"}] * 4), r"tensors\[0\]\.role 'king' is no role"),
    (small(tensors=[{"dims": [4], "of": 1}] * 4), r"tensors\[0\]\.of is 1; name a tensor that stands before"),
    (small(storages=[]), r"tensors\[0\]\.storage is -1, of 0 storages"),
    (small(storages=[{"nbytes": 1, "role": "input", "born": 3, "dies": 1}]), r"storages\[0\] lives from 3 to 1"),
    (small(blocks=[{"first": 1, "length": 1, "times": 2}]), r"blocks\[0\] ends behind the last node"),
    (small(nodes=[], tensors=[], calls=[{"op": "aten::mm"}]), r"calls\[0\] has no dims"),
    (small(nodes=[], tensors=[], calls=[{"op": "x", "dims": [[1]], "times": 10**7}]), r"\$\.calls\[0\]\.times"),
]


@pytest.mark.parametrize(("form", "says"), MISTAKES)
def test_mistakes_name_file_field_and_mend(form: dict[str, Any], says: str) -> None:
    with pytest.raises(ForetraceError, match=says) as error:
        of(form)
    assert str(error.value).startswith("m.json")
    assert str(error.value).endswith(".")


def test_what_is_no_json_is_said() -> None:
    with pytest.raises(ForetraceError, match="is no JSON text"):
        loads(b'{"format": "foretrace operators", "version": 1')


PIECES = st.sampled_from(
    ["-1", "0", "1", "3", "1e999", "null", "[]", "[[]]", "{}", '""', '"weight"', "true", "9223372036854775807", "1.5"]
)


@given(st.integers(0, 3), st.data())
def test_changed_files_are_a_graph_or_a_sentence(which: int, data: st.DataObject) -> None:
    text = (*EXAMPLES, dumps(whole(chain(2, views=True))).decode(), json.dumps(small()))[which]
    for _ in range(data.draw(st.integers(1, 3))):
        values = [m.span() for m in re.finditer(r'-?\d+|"[^"]*"(?!\s*:)', text)]
        begin, end = data.draw(st.sampled_from(values))
        text = text[:begin] + data.draw(PIECES) + text[end:]
    try:
        graph = loads(text.encode())
    except ForetraceError:
        return
    assert len(graph.calls) == len(graph) > 0
    assert graph.flops >= 0
    assert loads(dumps(graph)) == graph
