"""Offers of rented machines: arithmetic that can be checked by hand, choices, and tables that are wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from foretrace.errors import ForetraceError, NotApplicableError
from foretrace.flow import read
from foretrace.graph.taskgraph import TaskGraph
from foretrace.hardware.devices import catalog
from foretrace.hardware.instances import Instance, instances
from foretrace.plan.cloud import RentalRequest, advise
from foretrace.report import workers as report
from foretrace.simulate.timeline import simulate
from foretrace.techniques.distributed.data_parallel import DataParallel

RECORDED = Path(__file__).parents[1] / "data" / "cnn.json.gz"
T4 = Instance(
    name="one", provider="", region="", device="T4", devices=1, vcpus=8, memory_gb=16, network_gbit_s=10,
    bursts=False, price_per_h=2.0, date="2026-01-01", source="",
)  # fmt: skip


@pytest.fixture(scope="module")
def graph() -> TaskGraph:
    return read(RECORDED).graph().graph


def test_one_machine_is_the_measured_step(graph: TaskGraph) -> None:
    wanted = RentalRequest(samples=7200, epochs=5, counts=(1,), steps_s={"T4": 0.5})
    (offer,) = advise(graph, [T4], wanted).offers
    loading = simulate(graph).breakdown().median_s()["data_loading"] / simulate(graph).step_time_s
    assert offer.step_s == offer.compute_s == pytest.approx(0.5, rel=1e-6)
    assert loading > 0.1 and offer.step_low_s < 0.5 * (1 - loading)  # how much of it was loading is not known
    assert offer.steps_per_epoch == 3600  # two samples a step
    assert offer.hours == pytest.approx(5 * 3600 * offer.step_s / 3600)
    assert offer.dollars == pytest.approx(2 * offer.hours)
    assert offer.step_low_s <= offer.step_s <= offer.step_high_s
    assert offer.communication_s == 0


def test_more_machines_are_faster_and_dearer_and_the_front_is_what_nothing_beats(graph: TaskGraph) -> None:
    found = advise(graph, [T4], RentalRequest(samples=7200, counts=(1, 2, 4), steps_s={"T4": 0.5}))
    assert [offer.count for offer in found.offers] == [4, 2, 1]
    assert all(np.diff([offer.dollars for offer in found.offers]) < 0)
    assert all(offer.on_front for offer in found.offers)
    dear = replace(T4, name="dear", price_per_h=9.0)
    both = advise(graph, [T4, dear], RentalRequest(samples=7200, counts=(1,), steps_s={"T4": 0.5}))
    assert {offer.instance: offer.on_front for offer in both.offers} == {"one": True, "dear": False}
    assert "</svg>" in report.pareto_svg(report.cloud(both, RentalRequest(samples=7200), source="run"))


def test_a_network_whose_bursts_are_spent_is_one_of_a_quarter(graph: TaskGraph) -> None:
    """What computing hid before, it does not hide then: the wait is not four times what it was, but more."""
    wanted = RentalRequest(samples=7200, counts=(2,), gradient_mb=400.0, steps_s={"T4": 0.5})
    steady, bursts, quarter = (
        advise(graph, [replace(T4, **how)], wanted).offers[0]
        for how in ({}, {"bursts": True}, {"network_gbit_s": 2.5})
    )  # fmt: skip
    assert bursts.step_s == steady.step_s and bursts.step_low_s == steady.step_low_s
    assert bursts.step_high_s == pytest.approx(quarter.step_high_s) and bursts.step_high_s > steady.step_high_s
    assert quarter.communication_s > 4 * steady.communication_s


def test_the_choice_keeps_within_time_and_money(graph: TaskGraph) -> None:
    steps = {"T4": 0.5}
    free = advise(graph, [T4], RentalRequest(samples=7200, steps_s=steps))
    assert free.chosen is not None and free.chosen.count == 1 and free.why == "cheapest"
    quick = advise(graph, [T4], RentalRequest(samples=7200, hours=0.2, steps_s=steps))
    assert quick.chosen is not None and quick.chosen.count == 4
    fastest = advise(graph, [T4], RentalRequest(samples=7200, dollars=100, steps_s=steps))
    assert fastest.chosen is not None and fastest.chosen.count == 4
    none = advise(graph, [T4], RentalRequest(samples=7200, hours=1e-6, steps_s=steps))
    assert none.chosen is None and none.why.startswith("nothing fits")


def test_slow_processors_stall_the_step(graph: TaskGraph) -> None:
    slow = replace(T4, vcpus=1)
    loaded = replace(graph, info=replace(graph.info, recording={
        **graph.info.recording,
        "steps": [{"phase": "active", "loader_cpu_ns": 3_000_000_000, "loader_wall_ns": 3_000_000_000}],
    }))  # fmt: skip
    (offer,) = advise(loaded, [slow], RentalRequest(samples=100, counts=(1,), steps_s={"T4": 0.5})).offers
    assert offer.step_s == pytest.approx(3.0)
    assert offer.data_s > 2
    assert (offer.step_low_s, offer.step_high_s) == pytest.approx((2.0, 6.0)), "processors differ"


def test_a_job_of_seconds_is_told_in_seconds_and_a_reason_once(graph: TaskGraph) -> None:
    wanted = RentalRequest(samples=20, counts=(1,), steps_s={"T4": 0.5})
    short = report.cloud(advise(graph, [T4], wanted), wanted, source="run")
    assert "one: an epoch in 5.00 s (" in short.headline.replace("1 x ", "")


def test_machines_that_cannot_be_predicted_leave_the_others_and_are_told_once(
    graph: TaskGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one has several devices, the second one has one of the same: only gradients are not known."""

    def unknown(self: DataParallel, graph: TaskGraph) -> TaskGraph:
        raise NotApplicableError("no gradients")

    monkeypatch.setattr(DataParallel, "predict", unknown)
    four = replace(T4, name="four", devices=4)
    others = [replace(each, name=f"{each.name}-l4", device="L4") for each in (four, T4)]
    wanted = RentalRequest(samples=7200, counts=(1,), steps_s={"T4": 0.5, "L4": 0.4})
    found = advise(graph, [four, T4, *others], wanted)
    assert {offer.instance for offer in found.offers} == {"one", "one-l4"}
    assert found.left_out == ("T4, L4: no gradients",)


def test_a_recording_on_a_processor_needs_measured_steps(graph: TaskGraph) -> None:
    with pytest.raises(ForetraceError, match="`step=T4=SECONDS`"):
        advise(graph, [T4], RentalRequest(samples=100))


def test_a_measured_step_of_a_device_that_nobody_offers_is_refused(graph: TaskGraph) -> None:
    found = advise(graph, [T4], RentalRequest(samples=100, counts=(1,), steps_s={"nvidia t4": 0.5}))
    assert found.offers[0].step_s == pytest.approx(0.5, rel=1e-6), "as the catalog also calls it"
    with pytest.raises(ForetraceError, match="`step=T44`: no offer has such a device; did you mean T4"):
        advise(graph, [T4], RentalRequest(samples=100, steps_s={"T4": 0.5, "T44": 0.5}))


def test_a_file_of_another_currency_and_region(graph: TaskGraph, tmp_path: Path) -> None:
    head = "name,region,device,devices,vcpus,memory_gb,network_gbit_s,price_per_h,date,currency\n"
    path = tmp_path / "prices.csv"
    path.write_text(f"{head}a,north,T4,1,4,16,25,2,2026-03-01,eur\na,south,T4,1,4,16,25,1,2026-03-02,eur\n")
    wanted = RentalRequest(samples=7200, counts=(1,), steps_s={"T4": 0.5})
    found = advise(graph, instances(path), wanted)
    assert found.chosen is not None and (found.chosen.name, found.chosen.currency) == ("1 x a in south", "EUR")
    view = report.cloud(found, wanted, source="run")
    shown = "\n".join(str(each) for each in view.shown(20))
    assert "EUR" in view.headline and "2026-03-01, 2026-03-02 in north, south" in shown
    path.write_text(f"{head}a,north,T4,1,4,16,25,2,,eur\nb,,T4,1,4,16,25,1,,\n")
    with pytest.raises(ForetraceError, match="EUR and USD cannot be compared"):
        advise(graph, instances(path), wanted)


def test_every_shipped_type_has_a_known_device() -> None:
    names = {each.short for each in catalog()}
    found = instances()
    assert len(found) > 20
    assert all(each.device in names and each.price_per_h > 0 and each.date for each in found)
    assert len({each.name for each in found}) == len(found)
    eight = next(each for each in found if each.name == "p3.16xlarge").cluster(2)
    assert (eight.nodes, eight.per_node, eight.workers) == (2, 8, 16)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "lists no instance types"),
        ("name,device\n", "lists no instance types"),
        ("name,device,devices,vcpus,memory_gb,network_gbit_s,price_per_h\na,T4,1,4,16,25,-1\n", "price_per_h is '-1'"),
        (
            "name,device,devices,vcpus,memory_gb,network_gbit_s,price_per_h\na,T4,1,4,16,nan,1\n",
            "network_gbit_s is 'nan'",
        ),
        ("name,device,devices,vcpus,memory_gb,network_gbit_s,price_per_h\na,,1,4,16,25,1\n", "no device"),
        ("name,device,devices,vcpus,memory_gb,network_gbit_s,price_per_h\na,T4,0.5,4,16,25,1\n", "devices is '0.5'"),
    ],
)
def test_a_wrong_table_is_named_with_its_line(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "prices.csv"
    path.write_text(text)
    with pytest.raises(ForetraceError, match=complaint):
        instances(path)


def test_a_table_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ForetraceError, match="does not exist"):
        instances(tmp_path / "missing.csv")
    (tmp_path / "odd.csv").write_text(
        "name,device,devices,vcpus,memory_gb,network_gbit_s,price_per_h\na,Z9,1,4,16,25,1\n"
    )
    with pytest.raises(ForetraceError, match="no device 'Z9'"):
        _ = instances(tmp_path / "odd.csv")[0].kind
