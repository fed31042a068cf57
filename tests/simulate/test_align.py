"""`align`: equal keys, in order, as many as a plain difference would find on ordinary input."""

from __future__ import annotations

from difflib import SequenceMatcher
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.simulate import compare
from foretrace.simulate.compare import align

KEYS = st.lists(st.integers(0, 5), max_size=40)


@given(KEYS, KEYS)
def test_pairs_are_equal_keys_in_order(before: list[int], after: list[int]) -> None:
    pairs = align(before, after)
    assert all(before[a] == after[b] for a, b in pairs)
    for (a, b), (c, d) in pairwise(pairs):
        assert a < c
        assert b < d


@given(KEYS)
def test_a_sequence_matches_itself(keys: list[int]) -> None:
    assert align(keys, keys) == [(i, i) for i in range(len(keys))]


@given(st.lists(st.integers(), unique=True, max_size=40), st.data())
def test_removed_items_cost_only_themselves(keys: list[int], data: st.DataObject) -> None:
    kept = [key for key in keys if data.draw(st.booleans())]
    assert len(align(keys, kept)) == len(kept)


def test_a_layer_that_lost_one_operator_keeps_the_layers_after_it_in_place() -> None:
    layer = ["norm", "mm", "gelu", "mm", "add"]
    before = layer * 12
    after = layer * 2 + ["norm", "mm", "mm", "add"] + layer * 9
    pairs = align(before, after)
    assert len(pairs) == len(after)
    assert dict(pairs)[len(before) - 1] == len(after) - 1


def test_nothing_in_common_is_no_pair() -> None:
    assert align("abc", "xyz") == []
    assert align("", "xyz") == []


@given(KEYS, KEYS)
def test_as_long_as_any_alignment(before: list[int], after: list[int]) -> None:
    blocks = SequenceMatcher(None, before, after, autojunk=False).get_matching_blocks()
    assert len(align(before, after)) >= sum(block.size for block in blocks)


@given(KEYS, KEYS)
def test_sequences_far_apart_are_pinned_and_keep_order(before: list[int], after: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "MOST_EDITS", 2)
        pairs = align(before, after)
    assert all(before[a] == after[b] for a, b in pairs)
    assert all(a < c and b < d for (a, b), (c, d) in pairwise(pairs))
    assert bool(pairs) == bool(set(before) & set(after))
