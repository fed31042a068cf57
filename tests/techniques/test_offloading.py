"""Activations of a device copied to the host and back: on lanes of their own, hidden where there is time for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from foretrace import flow
from foretrace.cost.operators.operator import Operator
from foretrace.errors import NotApplicableError
from foretrace.graph.taskgraph import Phase, TaskGraph
from foretrace.simulate.timeline import simulate
from foretrace.techniques.arguments import parse
from foretrace.testing.technique import check_valid
from foretrace.testing.workloads import Gpu

DATA = Path(__file__).parents[1] / "data"
SIZE = [32, 64, 56, 56]
NBYTES = 4 * 32 * 64 * 56 * 56  # 25.7 MB
SAVED = 7  # the first input, and the result of every ReLU, which is the next input


def graph() -> TaskGraph:
    """Six convolutions of 2 ms whose kernels know their inputs."""
    made = Gpu(layers=6, kernel_us=2000).graph()
    convolution = Operator.of("aten::cudnn_convolution", [SIZE, [64, 64, 3, 3]], ["float", "float"]).text
    relu = Operator.of("aten::relu", [SIZE], ["float"]).text
    shape = np.full(len(made), -1, dtype=np.int32)
    for i, name in enumerate(("aten::cudnn_convolution", "aten::relu")):
        shape[made.on_device & (made.op == made.names.index(name))] = i
    return replace(made.with_columns(shape=shape), shapes=(convolution, relu))


def test_copies_hide_behind_the_computation_where_they_are_short() -> None:
    before = simulate(graph()).step_time_s
    after = parse("activation-offload write_gb_s=100 read_gb_s=100 hook_us=0").predict(graph())
    check_valid(after)
    copies = [(lane.label, int((after.lane == i).sum())) for i, lane in enumerate(after.lanes)][2:]
    assert copies == [("activations to the host", SAVED * 4), ("activations from the host", SAVED * 4)]
    assert before < simulate(after).step_time_s < before + 1.2e-3, (
        "the last one out and the first one back are waited for"
    )
    assert f"{SAVED * NBYTES:,} bytes" in after.changes[-1].what


def test_the_step_grows_where_they_are_not() -> None:
    after = parse("activation-offload write_gb_s=2 read_gb_s=2 hook_us=0").predict(graph())
    assert simulate(after).step_time_s > 2 * SAVED * NBYTES / 2e9, "out and back, one after the other, on a slow link"


def test_copies_back_keep_within_what_is_fetched_ahead() -> None:
    step_s = [
        simulate(
            parse(f"activation-offload write_gb_s=12 read_gb_s=12 prefetch={n} hook_us=0").predict(graph())
        ).step_time_s
        for n in (1, 2, 6)
    ]
    assert step_s[0] >= step_s[1] >= step_s[2]


def test_compression_on_a_device_is_kernels_with_launches() -> None:
    before, after = graph(), parse("activation-compression hook_us=0").predict(graph())
    check_valid(after)
    names = [after.names[i] for i in after.name[after.on_device].tolist()]
    assert names.count("compress a saved tensor") == names.count("decompress a saved tensor") == SAVED * 4
    assert simulate(after).step_time_s > simulate(before).step_time_s
    added = after.on_device & (after.op == after.names.index("aten::_to_copy"))
    assert set(after.phase[added].tolist()) == {Phase.FORWARD, Phase.BACKWARD}


def test_a_device_cannot_write_to_a_file() -> None:
    with pytest.raises(Exception, match="go to host memory first"):
        parse("activation-offload to=disk").predict(graph())


@pytest.mark.parametrize("text", ["activation-compression min_bytes=1", "activation-offload min_bytes=1"])
def test_inference_keeps_nothing_for_a_backward_pass(text: str) -> None:
    graph = flow.scenario(DATA / "decode.json.gz").graph
    with pytest.raises(NotApplicableError, match="shows no backward pass that needs the activations"):
        parse(text).predict(graph)
