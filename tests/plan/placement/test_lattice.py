"""All predecessor-closed sets of blocks, beside every set that is one; too many are given up, wide graphs at once."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.plan.placement.blocks import PlacementBlocks
from foretrace.plan.placement.ideals import lattice

EDGES = st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5)).filter(lambda edge: edge[0] < edge[1]))


@settings(max_examples=50)
@given(count=st.integers(0, 6), edges=EDGES, most=st.integers(1, 70))
def test_all_sets_or_none(count: int, edges: set[tuple[int, int]], most: int) -> None:
    inside = {(a, b) for a, b in edges if b < count}
    closed = [
        mask for mask in range(1 << count) if all(mask >> a & 1 or not mask >> b & 1 for a, b in inside)
    ]  # fmt: skip
    found = lattice(PlacementBlocks.of(((block,) for block in range(count)), inside), most)
    assert (sorted(found) if found is not None else None) == (closed if len(closed) <= most else None)
    assert found is None or [each.bit_count() for each in found] == sorted(each.bit_count() for each in found)


def test_a_thousand_blocks_beside_each_other_behind_a_chain_are_too_many() -> None:
    chain = {(at, at + 1) for at in range(999)}
    fan = {(999, 1000 + at) for at in range(1000)}
    assert lattice(PlacementBlocks.of(((block,) for block in range(2000)), chain | fan)) is None
