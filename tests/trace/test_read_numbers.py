"""Numbers of recordings, against Python's own exact arithmetic."""

from __future__ import annotations

from decimal import ROUND_HALF_EVEN, Decimal

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import Raw

from foretrace.trace.decimals import MAX_NS, integers, nanoseconds

plain = st.decimals(0, 4 * 10**15, places=3).map(str)
any_places = st.integers(0, 9).flatmap(lambda n: st.decimals(0, 10**9, places=n).map(str))
odd = st.sampled_from(["-0.5", "-3", "1e3", "2.5E-3", "0", "000", '"7.25"', "0.0005", "0.0015", "9" * 16, "9" * 30])
wrong = st.sampled_from(["null", "true", '""', '"x"', "", "[1]", "1e99", "1e-99999999", "Infinity", '"1,2"', '"1.2.3"'])


def exact(text: str) -> int | None:
    try:
        value = Decimal(text.strip('"'))
        rounded = int((value * 1000).to_integral_value(ROUND_HALF_EVEN)) if value.adjusted() < 30 else 10**40
    except ArithmeticError:
        return None
    return rounded if abs(rounded) <= MAX_NS else None


@given(
    st.one_of(
        st.lists(plain, min_size=1),
        st.lists(any_places, min_size=1),
        st.lists(plain | any_places | odd),
        st.lists(plain | odd | wrong),
    )
)
@example(["1.000", "2"])
@example(["1702839461731622.250", "9999999999999999.999"])
@example(["9223372036854775807.001", "1"])
def test_nanoseconds_are_exact(texts: list[str]) -> None:
    values, good = nanoseconds([Raw(t.encode()) for t in texts])
    expected = [exact(t) for t in texts]
    assert good.tolist() == [e is not None for e in expected]
    assert values.tolist() == [e or 0 for e in expected]


@given(st.lists(st.integers(-(2**70), 2**70), min_size=1))
def test_whole_microseconds(values: list[int]) -> None:
    found, good = nanoseconds(values)
    assert good.tolist() == [abs(v) <= MAX_NS // 1000 for v in values]
    assert found.tolist() == [v * 1000 if abs(v) <= MAX_NS // 1000 else 0 for v in values]


def test_integers_of_all_kinds() -> None:
    found, good = integers([3, None, "0x10", " 7 ", 2.0, -1])
    assert found.tolist() == [3, -1, 16, 7, 2, -1]
    assert good.all()
    for value in (2.5, "", "seven", 2**63, float("nan"), float("inf"), True and "1e3", [1]):
        found, good = integers([value, 5])
        assert good.tolist() == [False, True]
        assert found.tolist() == [0, 5]
    for values in ([], [1, 2]):
        found, good = integers(values)
        assert found.dtype == np.int64
        assert found.tolist() == values
