"""Random operator graphs, small and whole: views, work in place, three phases, results that live on."""

from __future__ import annotations

from hypothesis import strategies as st

from foretrace.graph.taskgraph import Phase
from foretrace.model.draft import OperatorGraphDraft
from foretrace.model.operator_graph import OperatorGraph, Role
from foretrace.model.texts import TensorType

ROWS, WIDTH = 6, 8
SHAPES = ((ROWS, WIDTH), (WIDTH, ROWS), (ROWS * WIDTH,))
UNARY = ("aten::relu", "aten::gelu", "aten::exp", "aten::clone")
IN_PLACE = ("aten::relu_", "aten::mul_")
PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


@st.composite
def operator_graphs(draw: st.DrawFn, *, most: int = 14) -> OperatorGraph:
    """One to `most` nodes; every read is of the value that its storage holds at that time."""
    draft = OperatorGraphDraft()
    x = draft.tensor(TensorType(dims=(ROWS, WIDTH)), role=Role.INPUT, name="s0")
    w = draft.tensor(TensorType(dims=(WIDTH, WIDTH)), role=Role.WEIGHT, name="s1")
    live = [x]
    phases = sorted(draw(st.lists(st.sampled_from(PHASES), min_size=1, max_size=most)))
    for phase in phases:
        kind = draw(
            st.sampled_from(["unary", "unary", "add", "in place", "view", "mm", "norm", "softmax", "sum", "cat"])
        )
        read = draw(st.sampled_from(live))
        value = draft.value(read)
        name = f"s{len(draft.tensors)}"
        if kind == "add":
            same = [i for i in live if draft.value(i).dims == value.dims]
            other = draw(st.sampled_from(same))
            made = draft.tensor(value, name=name)
            draft.node("aten::add", [read, other], [made], phase=phase)
        elif kind == "in place" and read != x:
            made = draft.tensor(value, storage=draft.tensors[read].storage)
            draft.node(draw(st.sampled_from(IN_PLACE)), [read], [made], phase=phase)
            storage = draft.tensors[read].storage
            live = [i for i in live if draft.tensors[i].storage != storage]  # the old values are gone
        elif kind == "view" and len(value.dims) == 2:
            made = draft.tensor(TensorType(dims=draw(st.sampled_from(SHAPES))), storage=draft.tensors[read].storage)
            if draft.tensors[made].nbytes != draft.tensors[read].nbytes:
                continue
            draft.node("aten::view", [read], [made], phase=phase)
        elif kind == "mm" and value.dims == (ROWS, WIDTH):
            made = draft.tensor(TensorType(dims=(ROWS, WIDTH)), name=name)
            draft.node("aten::mm", [read, w], [made], phase=phase)
        elif kind == "norm" and value.dims == (ROWS, WIDTH):
            made = draft.tensor(value, name=name)
            draft.node("aten::native_layer_norm", [read], [made], phase=phase)
        elif kind == "softmax":
            made = draft.tensor(value, name=name)
            draft.node("aten::_softmax", [read], [made], phase=phase)
        elif kind == "sum" and value.dims == (ROWS, WIDTH):
            made = draft.tensor(TensorType(dims=(WIDTH,)), name=name)
            draft.node("aten::sum", [read], [made], phase=phase)
            continue  # of another size: a result
        elif kind == "cat":
            made = draft.tensor(value, name=name)
            draft.node("aten::cat", [read], [made], phase=phase)
        else:
            made = draft.tensor(value, name=name)
            draft.node(draw(st.sampled_from(UNARY)), [read], [made], phase=phase)
        live.append(made)
    if not draft.nodes:
        made = draft.tensor(draft.value(x), name="last")
        draft.node("aten::relu", [x], [made])
    return draft.finish("random", source="test", batch=ROWS, unread_live=draw(st.booleans()))
