"""Who keeps, decomposes and sends what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.errors import ForetraceError
from foretrace.training.second_order.grid import FactoredLayer, factored, fractions, share_out, skips

LAYERS = [FactoredLayer(name=str(i), inputs=a, outputs=g) for i, (a, g) in enumerate([(65, 32), (33, 8), (9, 64)])]


@given(st.integers(1, 24), st.lists(st.tuples(st.integers(1, 99), st.integers(1, 99)), min_size=1, max_size=9))
def test_every_layer_has_one_column_and_one_worker_that_decomposes_it(
    workers: int, sides: list[tuple[int, int]]
) -> None:
    layers = [FactoredLayer(name=str(i), inputs=a, outputs=g) for i, (a, g) in enumerate(sides)]
    before = 0
    for fraction in fractions(workers):
        shares = share_out(layers, workers=workers, fraction=fraction)
        kept = [shares.preconditions(rank) for rank in range(workers)]
        assert sorted(i for rank in range(workers) for i in shares.decomposes(rank)) == list(range(len(layers)))
        for rank in range(workers):
            assert set(shares.decomposes(rank)) <= set(kept[rank])
            assert set(shares.column(rank)) & set(shares.row(rank)) == {rank}
            assert sorted(i for other in shares.row(rank) for i in kept[other]) == list(range(len(layers)))
        total = sum(shares.held_bytes(rank) for rank in range(workers))
        assert total >= before  # more gradient workers keep more together
        before = total


def test_bytes_by_hand() -> None:
    """Factors of 65 and 32, 33 and 8, 9 and 64 in float32."""
    shares = share_out(LAYERS, workers=2, fraction=0.5)
    factors = 4 * (65**2 + 32**2 + 33**2 + 8**2 + 9**2 + 64**2)
    first = 4 * (65**2 + 32**2 + 65 * 32)
    others = 4 * (33**2 + 8**2 + 33 * 8 + 9**2 + 64**2 + 9 * 64)
    assert sorted(shares.held_bytes(rank) for rank in (0, 1)) == sorted((factors + first, factors + others))
    traffic = shares.traffic(0)
    assert traffic.factors == 4 * (65 * 66 + 32 * 33 + 33 * 34 + 8 * 9 + 9 * 10 + 64 * 65) // 2
    assert (traffic.inverses, traffic.gradients) == (0, 4 * (65 * 32 + 33 * 8 + 9 * 64))
    whole = share_out(LAYERS, workers=2, fraction=1).traffic(1)
    assert (whole.inverses, whole.gradients) == (first + others, 0)
    alone = share_out(LAYERS, workers=1, fraction=1).traffic(0)
    assert (alone.factors, alone.inverses, alone.gradients) == (0, 0, 0)


@pytest.mark.parametrize("fraction", [0.3, 1.5, -0.5, float("nan")])
def test_a_fraction_that_gives_no_grid_is_refused(fraction: float) -> None:
    with pytest.raises(ForetraceError, match=r"^fraction must be one of 0\.25, 0\.5, 1 for 4 workers, got .*one\.$"):
        share_out(LAYERS, workers=4, fraction=fraction)


def test_a_fraction_of_nothing_is_one_gradient_worker() -> None:
    assert share_out(LAYERS, workers=4, fraction=0).gradient_workers == 1


def test_sides_and_names() -> None:
    assert factored("", (16, 3, 3, 3), bias=True) == FactoredLayer(name="", inputs=28, outputs=16)
    assert skips("head*, stem", "stem") and not skips("head*", "body.head") and not skips("", "stem")
