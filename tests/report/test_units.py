"""Figures: three significant digits, the unit that gives 1 to 999, names that stay apart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.report.units import (
    UNITS,
    amount,
    between,
    change,
    count,
    digits,
    in_unit,
    of,
    seconds,
    share,
    short_name,
    short_names,
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
    [(174.4, "174"), (99.96, "100"), (9.996, "10.0"), (0.12, "0.12"), (0.004, "0"), (-2.5, "−2.50"), (1234.0, "1,230")],
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
    assert (count(1840), count(0.17), count(3.0)) == ("1,840", "0.17", "3")
    assert (amount(19_267_584, "B"), amount(512, "B")) == ("19.3 MB", "512 B")


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


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, 512, true, 1>(cudnnTensorStruct)", "bn_fw_tr_1C11_kernel_NCHW"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float>, at::detail::Array<char*, 3> >(int)",
            "vectorized_elementwise_kernel [Add]",
        ),
        ("void (anonymous namespace)::softmax_warp_forward<float, 10, true>(float*)", "softmax_warp_forward"),
        ("void evil::kernel<int>(int*)", "evil::kernel"),
        ("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", "DataLoader.__next__"),
        ("Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD (Pageable -> Device)"),
        ("aten::addmm", "aten::addmm"),
        ("", "(no name)"),
        ("<><<((", "<><<(("),
    ],
)  # fmt: skip
def test_short_name(name: str, short: str) -> None:
    assert short_name(name) == short


@given(st.text(max_size=200), st.integers(16, 80))
def test_short_name_always_fits(name: str, width: int) -> None:
    assert 0 < len(short_name(name, width)) <= width


def test_names_that_would_read_the_same_show_their_difference() -> None:
    names = ["void dnn::wgrad<float, 128, 6, 7>(int)", "void dnn::wgrad<float, 128, 6, 8>(int)", "aten::mm"]
    first, second, third = short_names(names)
    assert (first, second) == ("wgrad …7>(int)", "wgrad …8>(int)")
    assert third == "aten::mm"
    assert short_names([names[0], names[0]]) == ["wgrad", "wgrad"]
