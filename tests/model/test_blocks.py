"""Repeated blocks: found, not overlapping, and worth exactly what they stand for."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from foretrace.model.blocks import find, repeats, with_blocks
from foretrace.model.draft import OperatorGraphDraft
from foretrace.model.operator_graph import OperatorGraph, Role
from foretrace.model.texts import TensorType
from tests.model.graphs import chain
from tests.model.random_graphs import operator_graphs

OPS = ("aten::relu", "aten::gelu", "aten::exp", "aten::neg", "aten::sin")


def graph_of(word: list[int], layers: list[str] | None = None) -> OperatorGraph:
    """A chain of operators, one per number."""
    draft = OperatorGraphDraft()
    x = draft.tensor(TensorType(dims=(4, 4)), role=Role.INPUT)
    for at, letter in enumerate(word):
        made = draft.tensor(TensorType(dims=(4, 4)))
        draft.node(OPS[letter], [x], [made], layer=layers[at] if layers else "")
        x = made
    return draft.finish("word")


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=9),
    st.integers(2, 9),
    st.lists(st.integers(3, 4), max_size=4),
    st.lists(st.integers(3, 4), max_size=4),
)
@example([0], 2, [], [])
@example([0, 0, 0, 0, 1], 3, [3], [4])
def test_copies_of_a_block_are_found(block: list[int], copies: int, before: list[int], behind: list[int]) -> None:
    found = repeats(np.array(before + block * copies + behind), least=1)
    saved = sum(length * (times - 1) for _, length, times in found)
    assert saved >= len(block) * (copies - 1)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60))
def test_what_is_found_repeats_and_does_not_overlap(word: list[int]) -> None:
    blocks = find(graph_of(word), least=1)
    for block in blocks:
        copy = word[block.first : block.first + block.length]
        assert word[block.first : block.first + block.length * block.times] == copy * block.times
    for one, other in pairwise(blocks):
        assert one.first + one.length * one.times <= other.first


@settings(max_examples=40)
@given(operator_graphs())
def test_folded_and_unrolled_cost_the_same(graph: OperatorGraph) -> None:
    graph = with_blocks(graph, least=1)
    times = np.ones(len(graph), dtype=np.int64)
    for block in graph.blocks:  # copies are left out, and what is left counts for all
        times[block.first : block.first + block.length] = block.times
        times[block.first + block.length : block.first + block.length * block.times] = 0
    rows, times = np.flatnonzero(times), times[times > 0]
    assert times.sum() == len(graph)
    part = graph.calls.take(rows)
    for column in ("flops", "read_bytes", "written_bytes"):
        assert (getattr(part, column) * times).sum() == pytest.approx(getattr(graph.calls, column).sum())
    for family in np.unique(graph.calls.family):
        assert times[part.family == family].sum() == (graph.calls.family == family).sum()


def test_a_copy_begins_where_the_number_of_its_layer_changes() -> None:
    word = [2, *[0, 1, 0] * 5, 2]
    layers = ["first", *[f"layers.{i}.part" for i in range(5) for _ in range(3)], "last"]
    word[-1] = 0  # one more letter of the pattern: the run could be cut at two places
    (block,) = find(graph_of(word, layers))
    assert (block.first, block.length, block.times, block.layer) == (1, 3, 5, "layers.0.part")


def test_layers_of_a_chain_are_one_block() -> None:
    (block,) = find(chain(12, views=True))
    assert (block.first, block.length, block.times) == (0, 2, 12)


def test_long_words_with_blocks_inside_blocks() -> None:
    rng = np.random.default_rng(0)
    inner = np.tile(rng.integers(0, 40, 11), 3)
    outer = np.concatenate([inner, rng.integers(0, 40, 67)])
    word = np.concatenate([rng.integers(40, 80, 7), np.tile(outer, 400), rng.integers(40, 80, 5)])
    found = repeats(word)
    # The run of 400 copies may begin a few letters early or late, if the letter before it fits by chance.
    assert max(length * (times - 1) for _, length, times in found) == 100 * 399
