"""Lowering: what depends on what, on one device, on several, on a processor; and the estimate of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.cost.calls import Calls
from foretrace.cost.devices.roofline import Roofline
from foretrace.cost.model import Chain, CostModel, Prediction
from foretrace.errors import ForetraceError
from foretrace.graph.edit import remove
from foretrace.graph.taskgraph import EdgeKind, Phase, TaskKind
from foretrace.hardware.cluster import Cluster, parse_link
from foretrace.hardware.devices import Device, named
from foretrace.model.estimate import estimate_step
from foretrace.model.lower import HostCosts, lower
from foretrace.model.operator_graph import Role, Storage
from foretrace.simulate.timeline import simulate
from foretrace.techniques.compute.classes import TaskPrecision, WorkClass, classify
from foretrace.techniques.distributed.gradients import find_gradients
from tests.model.graphs import chain

H100 = named("h100")


@dataclass(frozen=True, kw_only=True)
class Fixed(CostModel):
    """Every call takes as long; the range is what is given."""

    seconds: float
    name: str = "fixed"
    low: float = 0.9
    high: float = 1.2

    def predict(self, calls: Calls, device: Device) -> Prediction:
        n = len(calls)
        return self._answer(np.full(n, self.seconds), np.full(n, self.low), np.full(n, self.high), "by definition")


def cluster_of(workers: int, link: str) -> Cluster:
    """Machines of one device, two of them: what leaves a machine is ten times slower."""
    return Cluster(
        name="test", nodes=2, per_node=(workers + 1) // 2, inside=parse_link(link), between=parse_link("1gbit/9us")
    )


def costs(seconds: float) -> Chain:
    return Chain(members=(Fixed(seconds=seconds),))


def test_large_kernels_hide_their_launches() -> None:
    host = HostCosts()
    step = simulate(lower(chain(10), device=H100, costs=costs(1e-3)).graph).step_time_s
    first = host.forward_ns + host.latency_ns
    assert step == pytest.approx(10 * 1e-3 + (first + 9 * host.gap_ns + host.return_ns) / 1e9, abs=1e-9)


def test_a_step_without_its_last_kernel_still_waits_for_the_others() -> None:
    graph = lower(chain(10), device=H100, costs=costs(1e-3)).graph
    last = np.zeros(len(graph), dtype=np.bool_)
    last[np.flatnonzero(graph.kind == TaskKind.KERNEL)[-1]] = True
    saved = simulate(graph).step_time_s - simulate(remove(graph, last)).step_time_s
    assert saved == pytest.approx(1e-3, rel=0.02)


def test_small_kernels_take_as_long_as_their_launches() -> None:
    host = HostCosts()
    found = estimate_step(chain(10, views=True), device=H100, costs=costs(1e-6))
    launches = 10 * (host.forward_ns + host.call_ns) + 9 * host.view_ns
    tail = host.latency_ns - host.call_ns + 1000 + host.return_ns
    assert found.step_time_s == pytest.approx((launches + tail) / 1e9, abs=1e-9)
    assert found.launch_bound


def test_a_view_has_no_kernel_and_no_cost() -> None:
    operators = chain(3, views=True)
    found = lower(operators, device=H100, costs=costs(1e-5))
    assert (found.graph.kind == TaskKind.KERNEL).sum() == 3
    assert found.task.tolist().count(-1) == 3
    kernels = found.task[found.task >= 0]
    assert (found.graph.dur[kernels] == 10_000).all()
    assert [found.graph.layers[i] for i in found.graph.layer[kernels]] == ["layers.0", "layers.1", "layers.2"]


def test_devices_wait_for_what_is_sent_to_them_once() -> None:
    operators = chain(4, views=True)
    cluster = cluster_of(4, "10gbit/0us")
    devices = {"layers.1": 1, "layers.2": 1, "layers.3": 2}
    placement = tuple(devices.get(node.layer, 0) for node in operators.nodes)
    found = lower(operators, device=H100, costs=costs(1e-3), placement=placement, cluster=cluster)
    copies = np.flatnonzero(found.graph.kind == TaskKind.COPY)
    assert len(copies) == 2  # 0 -> 1 and 1 -> 2
    nbits = 4 * 64 * 128 * 8
    assert found.graph.dur[copies].tolist() == [round(nbits / 10), round(nbits / 1 + 9000)]  # inside, between machines
    times = simulate(found.graph)
    kernel = found.task[[0, 2, 4, 6]]
    for before, copy, after in ((kernel[0], copies[0], kernel[1]), (kernel[2], copies[1], kernel[3])):
        assert times.end[before] <= times.start[copy] < times.end[copy] <= times.start[after]


def test_every_device_has_a_thread_that_launches_for_it() -> None:
    operators = chain(20)
    whole = simulate(lower(operators, device=H100, costs=costs(1e-6)).graph).step_times_ns.sum()
    for devices in (2, 4):
        placement = tuple(at * devices // 20 for at in range(20))
        cluster = cluster_of(devices, "100gbit/0us")
        found = lower(operators, device=H100, costs=costs(1e-6), placement=placement, cluster=cluster).graph
        assert found.info.world_size == devices
        assert sum(lane.label == "main thread" for lane in found.lanes) == devices
        called = (found.kind == TaskKind.CALL) & (found.dur > 0)
        assert simulate(found).end[called].max() <= whole / devices


def test_what_leaves_a_machine_shares_its_network_interface() -> None:
    operators = chain(4)
    places = (0, 2, 1, 3)  # devices 0 and 1 are in one machine, 2 and 3 in another
    cluster = cluster_of(4, "10gbit/0us")
    found = lower(operators, device=H100, costs=costs(1e-3), placement=places, cluster=cluster).graph
    copies = found.lane[found.kind == TaskKind.COPY]
    assert [found.lanes[each].label for each in copies] == [f"network interface of machine {m}" for m in (0, 1, 0)]


def test_a_processor_runs_one_operator_after_another() -> None:
    found = lower(chain(5), device=H100, costs=costs(1e-3), own_processor=True)
    assert simulate(found.graph).step_time_s == pytest.approx(5e-3)
    assert set(found.graph.edge_kind.tolist()) == {int(EdgeKind.PROGRAM)}


def test_the_range_comes_from_models_and_host() -> None:
    found = estimate_step(chain(10), device=H100, costs=costs(1e-3))
    assert found.interval_s[0] == pytest.approx(found.step_time_s - 1e-3, rel=0.02)  # 10 % of ten kernels of 1 ms
    assert found.interval_s[1] == pytest.approx(found.step_time_s + 2e-3, rel=0.02)
    assert not found.launch_bound
    assert found.cost_sources == {"fixed": 1.0}


def test_unknown_operators_are_costed_by_bytes_and_counted() -> None:
    found = estimate_step(chain(3, unknown=True), device=H100, costs=Chain(members=(Roofline(),)))
    assert found.unknown_share == pytest.approx(1.0)
    assert found.warnings == (
        "3 calls of operators that nothing is known of but their bytes: mylib::product (3x); they make 100.0 % of the "
        "kernel time.",
    )
    assert found.utilisation == 0.0


def test_what_cannot_be_placed_or_costed() -> None:
    class Silent(Fixed):
        def predict(self, calls: Calls, device: Device) -> Prediction:
            return self._answer(np.full(len(calls), np.nan), np.ones(len(calls)), np.ones(len(calls)), "")

    with pytest.raises(ForetraceError, match=r"aten::addmm in layers\.0 takes; add roofline"):
        lower(chain(1), device=H100, costs=Chain(members=(Silent(seconds=0.0),)))
    with pytest.raises(ForetraceError, match="no cluster was given"):
        lower(chain(2), device=H100, costs=costs(1e-3), placement=(0, 1))
    with pytest.raises(ForetraceError, match="2 devices for the 3 operators of chain"):
        lower(chain(3), device=H100, costs=costs(1e-3), placement=(0, 1))
    with pytest.raises(ForetraceError, match="counted from 0"):
        lower(chain(1), device=H100, costs=costs(1e-3), placement=(-1,))


@settings(max_examples=40)
@given(
    st.integers(1, 12),
    st.floats(1e-7, 1e-3),
    st.booleans(),
    st.lists(st.integers(0, 2), min_size=24, max_size=24),
)
def test_a_step_is_never_shorter_than_what_bounds_it(
    layers: int, kernel_s: float, views: bool, places: list[int]
) -> None:
    operators = chain(layers, views=views)
    placement = tuple(places[: len(operators)])
    cluster = cluster_of(3, "100gbit/2us")
    found = lower(operators, device=H100, costs=costs(kernel_s), placement=placement, cluster=cluster)
    times = simulate(found.graph)
    kernels = found.task[found.task >= 0]
    assert times.step_times_ns.sum() >= found.graph.dur[kernels].sum()  # each product needs the one before it
    host = np.isin(found.graph.kind, (TaskKind.CPU, TaskKind.CALL))
    for lane in np.unique(found.graph.lane[host]):  # a thread per device
        assert times.step_times_ns.sum() >= found.graph.dur[host & (found.graph.lane == lane)].sum()


def test_a_lowered_graph_says_what_its_kernels_are() -> None:
    found = lower(chain(2, views=True), device=H100, costs=costs(1e-3)).graph
    classes = classify(found)
    kernels = found.kind == TaskKind.KERNEL
    assert set(classes.work[kernels].tolist()) == {WorkClass.GEMM}
    assert set(classes.precision[kernels].tolist()) == {TaskPrecision.SINGLE}


def test_gradients_are_known_where_every_weight_has_one() -> None:
    operators = chain(2)
    assert not find_gradients(lower(operators, device=H100, costs=costs(1e-3)).graph)
    last = len(operators)
    backward = [
        replace(node, phase=Phase.BACKWARD, inputs=(), outputs=(), layer="") for node in reversed(operators.nodes)
    ]
    made = [
        Storage(nbytes=4 * 128 * 128, role=Role.GRADIENT, born=last + i, dies=last + 2, name=f"layers.{1 - i}.weight")
        for i in range(2)
    ]
    trained = replace(operators, nodes=(*operators.nodes, *backward), storages=(*operators.storages, *made))
    graph = lower(trained, device=H100, costs=costs(1e-3)).graph
    found = find_gradients(graph)
    assert [each.name for each in found] == ["layers.1.weight", "layers.0.weight"]
    assert [each.shape for each in found] == [(128, 128)] * 2
    assert found[0].ready[0] < found[1].ready[0]
    assert (graph.kind[[int(each.device[0]) for each in found]] == TaskKind.KERNEL).all()
