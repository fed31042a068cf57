"""Names cut to what tells them apart, and never to the same text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.report.names import short_name, short_names


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, 512, true, 1>(cudnnTensorStruct)", "bn_fw_tr_1C11_kernel_NCHW"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float>, Array<char*, 3> >(int)",
            "vectorized_elementwise_kernel [Add]",
        ),
        ("void (anonymous namespace)::softmax_warp_forward<float, 10, true>(float*)", "softmax_warp_forward"),
        ("void evil::kernel<int>(int*)", "evil::kernel"),
        ("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", "DataLoader.__next__"),
        ("Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD (Pageable -> Device)"),
        ("aten::addmm", "aten::addmm"),
        ("", "(no name)"),
        ("<><<((", "<><<(("),
        ("void cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm>(Params)", "cutlass_75_tensorop_bf16_s1688gemm"),
        ("_ZN5aiter24add_rmsnorm_quant_kernelIDF16bDF16bLi64EEEvPT0_", "add_rmsnorm_quant_kernel"),
        ("_ZN7ck_tile6kentryILi1ENS_12Rmsnorm2dFwdINS_27Rmsnorm2dFwd", "kentry [Rmsnorm2dFwd]"),
        ("_ZN", "_ZN"),
        ("_ZN99short", "short"),
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
    long = ["Cijk_" + "a" * 60 + end + "b" * 60 for end in ("_MT16_", "_MT32_", "_MT32_x")]
    assert len(set(short_names(long, 48))) == 3
    assert short_names([names[0], names[0]]) == ["wgrad", "wgrad"]


@given(st.lists(st.text(max_size=120), max_size=12), st.integers(16, 60))
def test_short_names_always_fit(names: list[str], width: int) -> None:
    assert all(0 < len(short) <= width for short in short_names(names, width))
