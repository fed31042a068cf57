"""Figures: three significant digits, in the unit that gives 1 to 999."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.report.units import (
    MINUS,
    UNITS,
    between,
    change,
    column,
    count,
    digits,
    in_unit,
    of,
    seconds,
    share,
    share_at_most,
    speed,
    unit_for,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.1741, "174 ms"),
        (0.0581, "58.1 ms"),
        (0.0091, "9.10 ms"),
        (0.0009996, "1.00 ms"),
        (0.00099949, "999 µs"),
        (1.5e-5, "15.0 µs"),
        (4e-9, "4.00 ns"),
        (12.34, "12.3 s"),
        (12_345.0, "12,300 s"),
        (0.0, "0"),
        (-0.0058, "−5.80 ms"),
        (float("nan"), "– s"),
    ],
)
def test_seconds(value: float, text: str) -> None:
    assert seconds(value) == text


@given(st.floats(min_value=1e-9, max_value=999.0))
def test_seconds_keeps_three_digits_in_a_unit_from_1_to_999(value: float) -> None:
    number, unit = seconds(value).split()
    assert 1 <= float(number) <= 999
    scale = next(u.seconds for u in UNITS if u.name == unit)
    assert float(number) * scale == pytest.approx(value, rel=5.001e-3)
    assert len(number.replace(".", "")) == 3


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (174.4, "174"),
        (99.96, "100"),
        (9.996, "10.0"),
        (0.12, "0.120"),
        (0.0619, "0.06"),
        (0.004, "0"),
        (-2.5, "−2.50"),
        (1234.0, "1,230"),
    ],
)
def test_digits(value: float, text: str) -> None:
    assert digits(value) == text


def test_parts_share_the_unit_of_their_whole() -> None:
    assert of(0.0581, 0.174) == "58.1 of every 174 ms"
    assert of(0.0581, 0.174, every=False) == "58.1 of 174 ms"
    assert between(0.084, 0.101, unit_for(0.174)) == "84.0 – 101"
    assert in_unit(0.0021, unit_for(0.174)) == "2.10"


def test_signs_and_shares() -> None:
    assert change(0.0021) == "+2.10 ms"
    assert change(-0.057) == "−57.0 ms"
    assert change(0.0) == change(-0.0) == "0"
    assert share(0.3341) == "33.4 %"
    assert [share_at_most(gap) for gap in (0.0, 3e-6, 0.0062)] == ["at most 0 %", "less than 0.01 %", "at most 0.620 %"]
    assert (count(1840), count(0.17), count(3.0)) == ("1,840", "0.170", "3")


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (0.174, 0.092, "1.89× faster"),
        (0.092, 0.174, "1.89× slower"),
        (1.0, 0.99, "1.00 % faster"),
        (1.0, 1.01, "1.00 % slower"),
        (1.0, 1.0, "no change"),
        (0.0, 0.0, "no change"),
        (0.0, 1.0, "–"),
    ],
)
def test_speed(before: float, after: float, text: str) -> None:
    assert speed(before, after) == text


@given(st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=8))
def test_a_column_has_one_unit_where_it_can_be_read_and_its_points_in_one_line(values: list[float]) -> None:
    cells = column(values, signed=True)
    wide = max(map(len, cells))
    flush = [cell.rjust(wide) for cell in cells]
    largest = unit_for(max(map(abs, values)))
    for value, cell in zip(values, cells, strict=True):
        assert cell.strip() == "0" if abs(value) < 5e-12 else cell[:1] != "0" or cell.startswith("0.")
        assert abs(value) < 0.005 * largest.seconds or cell.rstrip().endswith(largest.name)
    points = {cell.index(".") for cell in flush if "." in cell}
    assert len(points) <= 1
    if points:
        ends = {len(cell.rstrip().rstrip("nµms").rstrip(" ")) for cell in flush if "." not in cell}
        assert ends <= points  # a whole number ends where the others have their point
    for value, cell in zip(values, cells, strict=True):
        if not cell.startswith("0"):
            assert (value < 0) == cell.startswith(MINUS) and (value > 0) == cell.startswith("+")


def test_columns_read_as_written() -> None:
    assert column([0.0693, 0.0151, 0.000919]) == ["69.3   ms", "15.1   ms", "0.919 ms"]
    assert column([0.1, 2.0]) == ["0.100 s", "2.00  s"]
    assert column([]) == []
    assert column([0.0]) == ["0"]
    assert column([1.2, 0.0, 2e-6]) == ["1.20 s ", "0      ", "2.00 µs"]
