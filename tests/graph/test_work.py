"""FLOPs and bytes from recorded shapes: known answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.graph.calls import RuntimeCall, classify_call, is_collective
from foretrace.graph.work import operator_work


def shapes(dims: list[Any], kind: str = "float", concrete: list[str] | None = None) -> str:
    types = [kind if d else "Scalar" for d in dims]
    return json.dumps([dims, types, concrete or [""] * len(dims)])


@pytest.mark.parametrize(
    ("name", "text", "flops", "nbytes"),
    [
        ("aten::mm", shapes([[3, 4], [4, 5]]), 2 * 3 * 4 * 5, 4 * (12 + 20 + 15)),
        ("aten::addmm", shapes([[5], [3, 4], [4, 5], [], []]), 2 * 3 * 4 * 5, 4 * (5 + 12 + 20 + 15)),
        ("aten::bmm", shapes([[2, 3, 4], [2, 4, 5]]), 2 * 2 * 3 * 4 * 5, 4 * (24 + 40 + 30)),
        ("aten::linear", shapes([[6, 3, 4], [5, 4], [5]]), 2 * 18 * 4 * 5, 4 * (72 + 20 + 5 + 90)),
        (
            "aten::convolution",
            shapes(
                [[2, 3, 8, 8], [16, 3, 3, 3], [16], [], [], [], [], [], []],
                concrete=["", "", "", "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1"],
            ),
            2 * (2 * 16 * 4 * 4) * 27,
            4 * (384 + 432 + 16 + 512),
        ),
        ("aten::add_", shapes([[10, 10], [10, 10], []], "c10::BFloat16"), 100, 2 * 300),
    ],
)
def test_known_work(name: str, text: str, flops: float, nbytes: int) -> None:
    assert operator_work(name, text) == (nbytes, flops)


def test_operator_without_tensors_has_no_known_work() -> None:
    assert operator_work("aten::item", shapes([[]])) == (-1, 0.0)


@pytest.mark.parametrize("name", ["aten::mul", "aten::mm"])
def test_sizes_that_no_float_holds_are_unknown_work(name: str) -> None:
    assert operator_work(name, shapes([[10**200, 10**200], [10**200, 10**200]])) == (-1, 0.0)


@given(st.text(max_size=30), st.text(max_size=60))
def test_any_text_is_survived(name: str, text: str) -> None:
    nbytes, flops = operator_work(name, text)
    assert nbytes >= -1 and flops >= 0


json_values = st.recursive(st.none() | st.integers(0, 9) | st.text(max_size=4), lambda x: st.lists(x, max_size=4))


@given(st.sampled_from(["aten::mm", "aten::conv2d", "aten::linear", "aten::convolution_backward"]), json_values)
def test_odd_shapes_are_survived(name: str, value: Any) -> None:
    operator_work(name, json.dumps([[value, value], ["float", "float"], ["", "[1, 1]"]]))


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("cudaLaunchKernel", RuntimeCall.LAUNCH),
        ("cudaLaunchKernelExC", RuntimeCall.LAUNCH),
        ("cuLaunchKernelEx", RuntimeCall.LAUNCH),
        ("hipExtModuleLaunchKernel", RuntimeCall.LAUNCH),
        ("hipModuleLaunchKernel", RuntimeCall.LAUNCH),
        ("cudaLaunchCooperativeKernel", RuntimeCall.LAUNCH),
        ("cudaGraphLaunch", RuntimeCall.GRAPH),
        ("hipGraphLaunch", RuntimeCall.GRAPH),
        ("cudaMemcpyAsync", RuntimeCall.COPY),
        ("hipMemcpyWithStream", RuntimeCall.COPY_SYNC),
        ("cudaMemsetAsync", RuntimeCall.MEMSET),
        ("cudaDeviceSynchronize", RuntimeCall.SYNC_DEVICE),
        ("cudaStreamSynchronize", RuntimeCall.SYNC_STREAM),
        ("hipEventSynchronize", RuntimeCall.SYNC_EVENT),
        ("cudaEventRecordWithFlags", RuntimeCall.RECORD),
        ("hipStreamWaitEvent", RuntimeCall.WAIT),
        ("cudaMalloc", RuntimeCall.ALLOC),
        ("cudaFree", RuntimeCall.ALLOC),
        ("cuModuleLoadData", RuntimeCall.LOAD),
        ("cudaEventQuery", RuntimeCall.CHEAP),
        ("cudaFuncGetAttributes", RuntimeCall.CHEAP),
        ("INVALID", RuntimeCall.CHEAP),
    ],
)
def test_call_classes(name: str, call: RuntimeCall) -> None:
    assert classify_call(name) == call


def test_collectives_are_known_by_their_kernels() -> None:
    assert is_collective("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)")
    assert is_collective("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)")
    assert not is_collective("void at::native::reduce_kernel<512, 1>")
