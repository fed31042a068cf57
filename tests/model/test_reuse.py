"""Where data lies: what was touched long ago is far, what was just made is near."""

from __future__ import annotations

from foretrace.model.memory.reuse import far_shares
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
    shares = far_shares(made)
    assert shares[0] == 0.5  # the input was touched a step ago, the output is new
    assert shares[1] == 1.0  # larger than what is kept
    assert shares[2] == 1.0  # 8 MiB were touched since
    assert shares[3] == 0.0


def test_a_small_step_stays_near_from_one_to_the_next() -> None:
    assert far_shares(graph([KIB, KIB], [((0,), (1,)), ((1,), (0,))])).tolist() == [0.0, 0.0]


def test_views_and_empty_steps_touch_nothing() -> None:
    assert far_shares(graph([], [])).tolist() == []
    assert far_shares(graph([KIB], [((), ())])).tolist() == [0.0]
