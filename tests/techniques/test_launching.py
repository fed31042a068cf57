"""`cuda-graphs` and `faster-device`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from foretrace.errors import NotApplicableError
from foretrace.graph.edit import remove
from foretrace.graph.select import select
from foretrace.graph.taskgraph import EdgeKind, Phase, TaskGraph
from foretrace.simulate.timeline import simulate
from foretrace.techniques import CudaGraphs, FasterDevice
from foretrace.testing import small_training
from foretrace.testing.workloads import Cpu, Gpu


def busy_ms(graph: TaskGraph) -> float:
    return float(graph.dur[graph.on_device].sum()) / 1e6 / graph.n_steps


def test_a_launch_bound_step_becomes_as_long_as_its_kernels() -> None:
    graph = Gpu(host_us=100, kernel_us=10, data_us=0).graph()
    before, after = simulate(graph).step_time_s, simulate(CudaGraphs().predict(graph)).step_time_s
    assert before > 4e3 * busy_ms(graph) / 1e6
    assert 1e-3 * busy_ms(graph) < after < 1e-3 * busy_ms(graph) + 200e-6


def test_one_launch_per_step_starts_all_kernels() -> None:
    graph = Gpu(data_us=0).graph()
    predicted = CudaGraphs().predict(graph)
    launches = select(predicted, name="cudaGraphLaunch")
    assert launches.sum() == graph.n_steps
    assert not select(predicted, name="cudaLaunchKernel").any()
    assert select(predicted, name="cudaMemcpyAsync", kind="call").sum() == graph.n_steps, "inputs are copied before"
    started = predicted.dst[(predicted.edge_kind == EdgeKind.LAUNCH) & launches[predicted.src]]
    assert len(started) == select(graph, kind="kernel").sum()


def test_only_the_chosen_phases_are_captured() -> None:
    graph = Gpu().graph()
    predicted = CudaGraphs(phases="forward,backward").predict(graph)
    left = select(predicted, name="cudaLaunchKernel")
    assert left.sum() == select(graph, name="cudaLaunchKernel", phase="optimizer").sum()


def test_gradients_set_to_zero_before_the_forward_pass_are_a_graph_of_their_own() -> None:
    """What lies between the two stretches of the optimizer is launched and paid for as before."""
    graph = Gpu(data_us=0).graph()
    zeroed = graph.mask(np.flatnonzero(select(graph, phase="forward", step=0))[:8])
    zeroed |= graph.mask(np.flatnonzero(select(graph, phase="forward", step=1))[:8])
    phase = np.where(zeroed, np.uint8(Phase.OPTIMIZER), graph.phase)
    graph = graph.with_columns(phase=phase)
    launched = select(graph, name="cudaLaunchKernel", phase="optimizer")
    predicted = CudaGraphs(phases="optimizer").predict(graph)
    left = select(predicted, name="cudaLaunchKernel")
    assert left.sum() == select(graph, name="cudaLaunchKernel").sum() - launched.sum()
    assert set(predicted.phase[left].tolist()) == {Phase.FORWARD, Phase.BACKWARD}
    assert select(predicted, name="cudaGraphLaunch").sum() == graph.n_steps + 2
    gone = simulate(remove(graph, select(graph, phase="optimizer")))
    assert simulate(predicted).step_time_s > gone.step_time_s


def test_gaps_shrink_but_overlap_stays() -> None:
    graph = Gpu(host_us=1, data_us=0).graph()
    lags = [simulate(CudaGraphs(gap_us=gap).predict(graph)).step_time_s for gap in (0.0, 1.0)]
    kernels = select(graph, kind="kernel").sum() / graph.n_steps
    assert lags[1] - lags[0] == pytest.approx(kernels * 1e-6, rel=0.05)


def test_a_slow_hand_over_bounds_the_graph() -> None:
    graph = Gpu(kernel_us=2, small_us=2, data_us=0).graph()
    kernels = select(graph, kind="kernel").sum() / graph.n_steps
    slow = simulate(CudaGraphs(node_us=50).predict(graph)).step_time_s
    assert slow == pytest.approx(50e-6 * kernels, rel=0.1)


def test_a_device_bound_step_is_as_long_as_its_kernels_either_way() -> None:
    graph = Gpu(host_us=50, kernel_us=300, data_us=0, steps=6).graph()
    predicted = CudaGraphs().predict(graph)
    assert simulate(predicted).step_time_s == pytest.approx(1e-3 * busy_ms(graph), rel=0.05)


@pytest.mark.parametrize(
    ("graph", "said"),
    [
        (Cpu(), "no device work"),
        (Gpu(sync_in_step=True), r"waits for the device inside step 0 \(cudaStreamSynchronize"),
        (Gpu(layers=0), "no step launches two kernels of"),
    ],
)
def test_what_cannot_be_captured_is_refused(graph: Any, said: str) -> None:
    with pytest.raises(NotApplicableError, match=said):
        CudaGraphs().predict(graph.graph())


def test_a_wait_between_phases_can_be_left_out() -> None:
    graph = Gpu(sync_in_step=True).graph()
    predicted = CudaGraphs(phases="backward,optimizer").predict(graph)
    assert select(predicted, name="cudaGraphLaunch").sum() == graph.n_steps


def test_graphs_of_graphs_are_refused() -> None:
    with pytest.raises(NotApplicableError, match="by graphs already"):
        CudaGraphs().predict(CudaGraphs().predict(Gpu().graph()))


def test_a_faster_device_scales_kernels_by_class() -> None:
    graph = Gpu().graph()
    predicted = FasterDevice(compute=4, memory=2, host=1).predict(graph)
    matrix, other = select(graph, name="volta*"), select(graph, kind="kernel") & ~select(graph, name="volta*")
    assert np.allclose(predicted.dur[matrix], graph.dur[matrix] / 4)
    assert np.allclose(predicted.dur[other], graph.dur[other] / 2)
    assert np.array_equal(predicted.dur[~graph.on_device], graph.dur[~graph.on_device])
    copies = select(graph, kind="copy")
    assert np.array_equal(predicted.dur[copies], graph.dur[copies])


def test_a_host_bound_step_does_not_gain_but_the_other_host_is_uncertain() -> None:
    graph = Gpu(host_us=100, kernel_us=5, small_us=2, data_us=0).graph()
    technique = FasterDevice(ratio=2)
    before, after = simulate(graph).step_time_s, simulate(technique.predict(graph)).step_time_s
    assert after > 0.97 * before
    assert [each.flag for each in technique.uncertain(graph)] == ["host"]
    assert FasterDevice(ratio=2, host=1).uncertain(graph) == ()
    slower = simulate(FasterDevice(ratio=2, host=1.15).predict(graph)).step_time_s
    assert slower == pytest.approx(1.15 * after, rel=0.03)


def test_work_from_before_the_recording_shrinks_too() -> None:
    graph = Gpu(data_us=0, host_us=1).graph()
    first = int(np.flatnonzero(graph.on_device)[0])
    release = graph.release.copy()
    release[first] = 10_000_000
    waiting = graph.with_columns(release=release)
    predicted = FasterDevice(ratio=2, host=1).predict(waiting)
    begin = int(graph.recorded[graph.marks[0]])
    assert predicted.release[first] == begin + (10_000_000 - begin) // 2
    assert np.array_equal(FasterDevice(ratio=2, host=1).predict(graph).release, graph.release)


@pytest.mark.parametrize(
    ("ratios", "said"),
    [({}, "give ratio="), ({"ratio": 0}, "ratio must be above 0"), ({"compute": -1}, "compute must be above 0")],
)
def test_senseless_ratios_are_refused(ratios: dict[str, float], said: str) -> None:
    with pytest.raises(NotApplicableError, match=said):
        FasterDevice(**ratios).predict(Gpu().graph())  # type: ignore[arg-type]
    with pytest.raises(NotApplicableError, match="no device work"):
        FasterDevice(ratio=2).predict(Cpu().graph())


def test_graphs_on_a_processor_cannot_be_applied() -> None:
    with pytest.raises(NotApplicableError, match="runs on a processor"):
        CudaGraphs().apply(small_training())
