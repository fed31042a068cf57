"""Where data lies: what was touched long ago is far, what was just made is near."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.model.memory.reuse import reuse
from foretrace.model.operator_graph import BEFORE, Node, OperatorGraph, Role, Storage, Tensor

KIB = 1024


def graph(nbytes: list[int], nodes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> OperatorGraph:
    """Tensors of these bytes, each on memory of its own; made by the first node that has them as an output."""
    born = {tensor: i for i, (_, outputs) in reversed(list(enumerate(nodes))) for tensor in outputs}
    return OperatorGraph(
        name="test",
        nodes=tuple(
            Node(
                op="aten::add",
                inputs=inputs,
                outputs=outputs,
                read_bytes=float(sum(nbytes[i] for i in inputs)),
                written_bytes=float(sum(nbytes[i] for i in outputs)),
            )
            for inputs, outputs in nodes
        ),
        tensors=tuple(Tensor(dims=(each // 4,), dtype="float32", storage=i) for i, each in enumerate(nbytes)),
        storages=tuple(
            Storage(nbytes=each, role=Role.TEMPORARY, born=born.get(i, BEFORE), dies=len(nodes))
            for i, each in enumerate(nbytes)
        ),
    )


def test_what_was_just_made_is_near_and_what_was_left_long_ago_is_far() -> None:
    made = graph([64 * KIB, 64 * KIB, 4096 * KIB, 4096 * KIB], [((0,), (1,)), ((2,), (3,)), ((1,), (1,)), ((1,), (1,))])
    shares = reuse(made).far_shares()
    assert shares[0] == 0.5  # the input was touched a step ago, the memory of the output just now
    assert shares[1] == 1.0  # larger than what is kept
    assert shares[2] == 1.0  # 8 MiB were touched since
    assert shares[3] == 0.0


def test_what_a_call_reads_again_and_again_is_near_however_large() -> None:
    """As where it is timed again and again; what others touched in between drives it out."""
    weight, small, large = 4096 * KIB, KIB, 1024 * KIB
    made = graph([weight, small, large], [((0,), (1,)), ((0,), (1,)), ((2,), (2,)), ((0,), (1,))])

    def share(nbytes: np.ndarray) -> np.ndarray:
        return np.minimum(nbytes / large, 1.0)

    found = reuse(made).far_shares(share)
    assert found[1] == 0.0
    assert found[3] == pytest.approx(1.0, abs=1e-3)
    assert found[0] == 0.0  # the last call of the step before


def test_a_small_step_stays_near_from_one_to_the_next() -> None:
    assert reuse(graph([KIB, KIB], [((0,), (1,)), ((1,), (0,))])).far_shares().tolist() == [0.0, 0.0]


def test_views_and_empty_steps_touch_nothing() -> None:
    assert reuse(graph([], [])).far_shares().tolist() == []
    assert reuse(graph([KIB], [((), ())])).far_shares().tolist() == [0.0]


def test_new_tensors_lie_on_the_memory_freed_last() -> None:
    nodes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), (0,)), ((), (1,)), ((0, 1), (2,)), ((), (3,))]
    made = graph([64 * KIB, 64 * KIB, 4096 * KIB, 64 * KIB], nodes)
    lives = [(0, 2), (1, 2), (2, 4), (3, 4)]
    storages = tuple(
        replace(each, born=born, dies=dies) for each, (born, dies) in zip(made.storages, lives, strict=True)
    )
    found = reuse(replace(made, storages=storages))
    assert found.since[found.node == 3].tolist() == [(4096 + 64) * KIB]  # what node 2 read last and freed


@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True), min_size=1, max_size=8))
def test_distances_are_those_of_a_list_of_what_was_used_last(touched: list[list[int]]) -> None:
    sizes = [KIB * (i + 1) for i in range(5)]
    made = graph(sizes, [(tuple(each), ()) for each in touched])
    made = replace(made, storages=tuple(replace(each, born=BEFORE) for each in made.storages))
    order: list[int] = []  # used last at the end
    expected: list[float] = []
    for each in touched * 2:
        expected += [sum(sizes[i] for i in order[order.index(one) if one in order else 0 :]) for one in each]
        order = [i for i in order if i not in each] + each
    assert reuse(made).since.tolist() == pytest.approx(expected[len(expected) // 2 :])


def test_code_of_a_convolution_is_that_of_its_sizes() -> None:
    """Another convolution in between does not bring it back; another addition does."""
    made = graph([64 * KIB] * 4, [((0,), (1,)), ((2,), (3,)), ((0,), (1,))])
    nodes = [
        replace(node, op="aten::convolution", text=f"[[[{sides}]]]")
        for node, sides in zip(made.nodes, (1, 2, 1), strict=True)
    ]
    assert reuse(made).code[2] == 128 * KIB
    assert reuse(replace(made, nodes=tuple(nodes))).code[2] == 256 * KIB
