"""The closed formula of the utility of gradient compression."""

from __future__ import annotations

import pytest

from reproductions.compression_utility.formula import Link, Sent, compressed_s, required_ratio, synchronous_s


def test_the_closed_formula_by_hand() -> None:
    link = Link(workers=4, bytes_per_s=1e9, latency_s=1e-3)
    assert link.all_reduce_s(4e9) == pytest.approx(6e-3 + 6.0)
    assert link.all_gather_s(1e9) == pytest.approx(3e-3 + 3.0)
    one = 20 * 2**20  # one bucket: nothing beside the backward pass
    assert synchronous_s(1.0, one, link) == pytest.approx(1.0 + link.all_reduce_s(one))
    assert compressed_s(1.0, Sent(reduced=(1e6,), gathered=(1e6,), coding_s=0.5), link) == pytest.approx(
        1.5 + link.all_reduce_s(1e6) + link.all_gather_s(1e6)
    )
    assert required_ratio(1.0, 1e6, link) == 1.0
    needed = required_ratio(1.0, 4e9, link)
    assert needed is not None
    assert synchronous_s(1.0, 4e9 / needed, link, overlap=1.0) == pytest.approx(1.05, rel=1e-3)
    assert required_ratio(0.01, 4e9, link) is None  # latency alone is 6 ms
    assert synchronous_s(1.0, 1e9, Link(workers=1, bytes_per_s=1e9)) == 1.0
