"""`faster-device device=`: kernels of another device, and all that does not change with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from foretrace import flow
from foretrace.cost.calls import Calls
from foretrace.cost.devices import reached
from foretrace.cost.devices.scaled import STEP_RANGES, start_s, step_range
from foretrace.cost.model import CostModel, Prediction
from foretrace.errors import ForetraceError, NotApplicableError
from foretrace.graph.taskgraph import TaskGraph, TaskKind
from foretrace.hardware.devices import Device, catalog, find, named
from foretrace.simulate.timeline import simulate
from foretrace.techniques.arguments import parse
from foretrace.techniques.base import Technique
from foretrace.techniques.compute.faster_device import FasterDevice
from foretrace.techniques.compute.other_device import APART, Sort, as_recorded, elsewhere, field_of, recorded_on
from foretrace.techniques.whatif import whatif
from foretrace.testing import TechniqueConformance
from foretrace.testing.workloads import Cpu, Gpu

V100, H100, MI300X = named("v100"), named("h100"), named("mi300x")


class TestNamedDevice(TechniqueConformance):
    technique: ClassVar[Technique] = parse("faster-device device=h100")


def busy() -> Gpu:
    """Kernels of 20 ms each, at 10 of the 15.7 TFLOP/s of a V100: the device decides the step."""
    return Gpu(kernel_us=20_000, small_us=500, flops=2e11)


def predicted(graph: TaskGraph, **values: object) -> TaskGraph:
    return FasterDevice(device="h100", host=1.0, **values).predict(graph)  # type: ignore[arg-type]


def kernels(graph: TaskGraph, name: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return graph.dur[[i for i in np.flatnonzero(graph.kind == TaskKind.KERNEL) if name in graph.names[graph.name[i]]]]


def test_kernels_take_the_other_devices_times_by_class() -> None:
    graph = busy().graph()
    changed = predicted(graph)
    assert simulate(changed).step_time_s < 0.6 * simulate(graph).step_time_s
    memory = (kernels(changed, "AddFunctor") / 1e9 - start_s(H100)) / (
        kernels(graph, "AddFunctor") / 1e9 - start_s(V100)
    )
    assert memory == pytest.approx(V100.memory_gb_s / H100.memory_gb_s, rel=1e-3)
    assert (kernels(changed, "cudnn") < 0.6 * kernels(graph, "cudnn")).all()
    slower = FasterDevice(device="t4", host=1.0).predict(graph)
    assert (kernels(slower, "cudnn") > kernels(graph, "cudnn")).all()


@pytest.mark.parametrize("target", [H100, named("k80")])
def test_products_of_unknown_sizes_may_follow_peak_rates_or_bandwidths(target: Device) -> None:
    """Products of few rows read their weights, and a recording without sizes does not tell them from large ones."""
    graph = busy().graph()
    unsized = graph.with_columns(flops=np.zeros(len(graph)), shape=np.full(len(graph), -1, dtype=np.int32))
    technique = FasterDevice(device=target.short, host=1.0)
    low, high = (
        kernels(replace(technique, unsized=each).predict(unsized), "cudnn").sum() / kernels(graph, "cudnn").sum()
        for each in (technique.priors(unsized)["unsized"].low, technique.priors(unsized)["unsized"].high)
    )
    assert low < V100.memory_gb_s / target.memory_gb_s < high
    assert low < V100.fp32_tflops / target.fp32_tflops < high
    assert "unsized" not in technique.priors(graph)


def test_copies_hosts_launches_and_structure_stay() -> None:
    graph = busy().graph()
    changed = predicted(graph)
    untouched = ~np.isin(graph.kind, (TaskKind.KERNEL, TaskKind.MEMSET))
    assert (changed.dur[untouched] == graph.dur[untouched]).all()
    assert (changed.src == graph.src).all() and (changed.lag == graph.lag).all()
    twice = predicted(graph, copy=2.0)
    copies = graph.kind == TaskKind.COPY
    assert twice.dur[copies] == pytest.approx(graph.dur[copies] / 2)


def test_a_launch_bound_step_stays_as_it_is() -> None:
    graph = Gpu().graph()
    before, after = simulate(graph), simulate(predicted(graph))
    assert after.step_time_s == before.step_time_s
    device = graph.on_device
    assert predicted(graph).dur[device].sum() < graph.dur[device].sum()


def test_the_recorded_device_changes_nothing_and_the_graph_names_the_new_one() -> None:
    graph = busy().graph()
    same = FasterDevice(device="V100-SXM2", host=1.0).predict(graph)
    assert (same.dur == graph.dur).all()
    changed = predicted(graph)
    assert recorded_on(changed) is H100
    back = FasterDevice(device="v100", host=1.0).predict(changed)
    assert recorded_on(back) is V100
    adds = kernels(back, "AddFunctor"), kernels(graph, "AddFunctor")
    assert adds[0] == pytest.approx(adds[1], rel=1e-3)


def test_every_device_is_found_again_by_the_name_it_is_recorded_under() -> None:
    for device in catalog():
        if device.patterns:
            assert find(as_recorded(device)) is device


def test_ranges_are_assumptions_until_the_user_states_the_ratio() -> None:
    graph = busy().graph()
    found = whatif(graph, [FasterDevice(device="h100")])
    names = {each.assumption.flag: each for each in found.assumptions}
    assert set(names) == {"products", "kernels", "host"}
    assert (names["products"].assumption.low, names["products"].assumption.high) == STEP_RANGES["products"]
    assert names["products"].at_low_s < found.after_s < names["products"].at_high_s
    low, high = found.interval_s
    assert low < found.after_s < high
    stated = FasterDevice(device="h100", compute=2.0)
    assert {each.flag for each in stated.uncertain(graph)} == {"kernels", "host"}
    assert kernels(stated.predict(graph), "cudnn") == pytest.approx(kernels(graph, "cudnn") / 2)
    assert {each.flag for each in FasterDevice(device="h100", ratio=2.0).uncertain(graph)} == {"host"}
    assert {each.flag for each in FasterDevice(ratio=2.0).uncertain(graph)} == {"host"}


def test_the_answer_says_where_the_times_come_from() -> None:
    changes = [change.what for change in predicted(busy().graph()).changes]
    assert any("H100-SXM5-80GB instead of V100-SXM2" in what for what in changes)
    assert any("scaled 100 %" in what for what in changes)
    unknown = [change.what for change in predicted(replace_flops(busy().graph())).changes]
    assert any("no recorded sizes" in what for what in unknown)


def replace_flops(graph: TaskGraph) -> TaskGraph:
    return graph.with_columns(flops=np.zeros(len(graph)))


class Half(CostModel):
    """A model that answers for everything, and gives the target half the time."""

    name = "half"

    def predict(self, calls: Calls, device: Device) -> Prediction:
        seconds = np.full(len(calls), 1e-3 if device is V100 else 5e-4)
        return self._answer(seconds, np.ones(len(calls)), np.ones(len(calls)), "made up")


def test_models_before_it_are_heard_for_products_between_devices_of_one_vendor() -> None:
    graph = Gpu(kernel_us=1000).graph()
    found = elsewhere(graph, V100, H100, [Half()])
    assert found.seconds[found.product] == pytest.approx(5e-4)
    assert found.shares["half"] + found.shares["scaled"] == pytest.approx(1.0)
    assert found.shares["half"] == pytest.approx(
        float(graph.dur[found.rows][found.product].sum() / graph.dur[found.rows].sum())
    )
    other = elsewhere(graph, V100, named("mi300x"), [Half()])
    assert other.shares == {"scaled": pytest.approx(1.0)}


@pytest.mark.parametrize(("text", "graph", "says"), [
    ("faster-device device=h100", Gpu(device="Abacus 9000").graph(), "names its device 'Abacus 9000'"),
    ("faster-device device=h100", Gpu(device="").graph(), "does not name its device"),
    ("faster-device device=abacus", Gpu().graph(), "device 'abacus' is in no catalog"),
    ("faster-device device=h100 recorded=abacus", Gpu().graph(), "device 'abacus' is in no catalog"),
    ("faster-device device=tpu-v4", Gpu().graph(), "no rate of TPU-v4"),
    ("faster-device device=h100 compute=0", Gpu().graph(), "compute must be above 0, got 0"),
    ("faster-device", Gpu().graph(), "device=h100, or give ratio="),
    ("faster-device device=h100", Cpu().graph(), "no device work"),
])  # fmt: skip
def test_what_cannot_be_predicted_is_one_sentence(text: str, graph: TaskGraph, says: str) -> None:
    with pytest.raises(ForetraceError, match=says) as caught:
        parse(text).predict(graph)
    assert "\n" not in str(caught.value)


def test_a_device_that_the_recording_does_not_name_can_be_stated() -> None:
    graph = Gpu(device="Abacus 9000", kernel_us=20_000).graph()
    changed = parse("faster-device device=h100 recorded=v100 host=1").predict(graph)
    assert (changed.dur == predicted(Gpu(kernel_us=20_000).graph()).dur).all()


def test_several_devices_in_one_recording_are_not_guessed() -> None:
    graph = Gpu().graph()
    mixed = replace(graph, info=replace(graph.info, devices=("Tesla V100-SXM2-32GB", "Tesla T4")))
    with pytest.raises(NotApplicableError, match="recorded="):
        parse("faster-device device=h100").predict(mixed)
    alike = replace(graph, info=replace(graph.info, devices=("Tesla V100-SXM2-32GB",) * 8))
    assert recorded_on(alike) is V100


# --- the same model on an H100 and on an MI300X --------------------------------------------------------------


def sides(shared_data: Path, model: str) -> tuple[TaskGraph, TaskGraph]:
    folder = shared_data / "traces" / "tracelens"
    paths = [next(folder.glob(f"{device}_{model}*")) for device in ("h100", "mi300")]
    first, second = (flow.read(path).graph(as_recorded=True).graph for path in paths)
    return first, second


def test_device_time_of_a_decoder_on_the_other_vendors_gpu(shared_data: Path) -> None:
    h100, mi300 = sides(shared_data, "Qwen")
    for graph, target, name in ((h100, mi300, "mi300x"), (mi300, h100, "h100")):
        changed = FasterDevice(device=name, host=1.0).predict(graph)
        device, truth = changed.dur[changed.on_device].sum(), target.dur[target.on_device].sum()
        assert device / truth == pytest.approx(1.0, abs=0.12)
        step, measured = simulate(changed).window_ns, simulate(target).window_ns
        assert step / measured == pytest.approx(1.0, abs=0.15)  # the range of the host, whose factor is 0.9 here


#: Kinds with 5 % of the time that are further off than 20 %: kernels shorter than the start on other recordings.
FAR = {("gaunernst", "mi300x", Sort.WIDE)}


@pytest.mark.parametrize("model, seen", [("Qwen", "Qwen1.5-0.5B-Chat"), ("gaunernst", "bert-small-uncased")])
def test_kinds_of_kernels_on_the_other_vendors_gpu_and_their_ranges(shared_data: Path, model: str, seen: str) -> None:
    """Without what this model showed: the sum within 12 %, large kinds within 20 %, all within their ranges."""
    h100, mi300 = sides(shared_data, model)
    others = reached.without(seen)
    assert len(others) < len(reached.REACHED)
    for graph, target, source, device in ((h100, mi300, H100, MI300X), (mi300, h100, MI300X, H100)):
        found, truth = elsewhere(graph, source, device, (), others), elsewhere(target, device, device)
        measured = target.dur[truth.rows] / 1e9
        assert found.seconds.sum() / measured.sum() == pytest.approx(1.0, abs=0.12)
        for sort in Sort:
            true, said = measured[truth.kind == sort].sum(), found.seconds[found.kind == sort].sum()
            if not true or not said:
                continue
            if true >= 0.05 * measured.sum() and (model, source.short.lower(), sort) not in FAR:
                assert said / true == pytest.approx(1.0, abs=0.2), sort.name
            low, high = step_range(field_of(sort, source, device), source, device)
            assert low < true / said < high


def test_kinds_that_few_recordings_show_have_wider_ranges_between_vendors() -> None:
    graph = busy().graph()
    names = {each.flag: (each.low, each.high) for each in FasterDevice(device="mi300x").uncertain(graph)}
    assert set(names) == {"products", "kernels", *APART.values(), "host"}
    for field, usual in zip(APART.values(), ("products", "products", "kernels", "kernels"), strict=True):
        low, high = names[field]
        assert (low, high) == step_range(field, V100, MI300X)
        assert low < names[usual][0] and high > names[usual][1]
    assert {field_of(sort, V100, H100) for sort in Sort} == {"products", "kernels"}
    assert names["kernels"][0] < step_range("kernels", V100, H100)[0]
    stated = {each.flag for each in FasterDevice(device="mi300x", compute=2.0).uncertain(graph)}
    assert stated == {"kernels", "strided", "rest", "host"}


def test_a_step_that_the_host_holds_does_not_change_with_the_device(shared_data: Path) -> None:
    h100, mi300 = sides(shared_data, "gaunernst")
    for graph, name in ((h100, "mi300x"), (mi300, "h100")):
        changed = FasterDevice(device=name, host=1.0).predict(graph)
        assert simulate(changed).window_ns == pytest.approx(simulate(graph).window_ns, rel=1e-3)
        assert changed.dur[changed.on_device].sum() != graph.dur[graph.on_device].sum()
