"""A model cut into stages: nothing is lost, and the schedules are those of the stages."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from foretrace.cli.app import run
from foretrace.errors import ForetraceError
from foretrace.model.operator_graph import Role
from foretrace.plan.pipelines.cut import cut, stage_costs
from foretrace.plan.placement.place import place
from foretrace.plan.placement.source import PlaceableModel, of_model


@pytest.fixture(scope="module")
def model() -> PlaceableModel:
    return of_model("vgg11", device="a100", devices=2, size="tiny")


def test_stages_hold_all_times_and_weights(model: PlaceableModel) -> None:
    nothing = np.zeros(len(model.graph))
    costs = stage_costs(model, place(model.problem()), model.costs.seconds, nothing)
    passes = sum(each.forward_s + each.backward_s + each.update_s for each in costs)
    assert passes == pytest.approx(float(model.costs.seconds.sum()))
    weights = sum(each.nbytes for each in model.graph.storages if each.role == Role.WEIGHT)
    assert sum(each.weight_bytes for each in costs) == weights
    assert costs[0].hop_s > 0


def test_the_optimizer_is_where_the_weights_are(model: PlaceableModel) -> None:
    """SGD with momentum: as many bytes of state as of weights, and an update in proportion to them."""
    problem = model.problem()
    placement = place(problem)
    costs = stage_costs(model, placement, model.costs.seconds, np.zeros(len(model.graph)))
    assert [each.state_bytes for each in costs] == pytest.approx([each.weight_bytes for each in costs])
    rate = sum(each.update_s for each in costs) / sum(each.weight_bytes for each in costs)
    assert [each.update_s for each in costs] == pytest.approx([rate * each.weight_bytes for each in costs])
    assert problem.saved is not None
    for device, each in zip(placement.devices, costs, strict=True):
        kept = device.memory - problem.saved[list(device.nodes)].sum()
        assert kept == pytest.approx(3 * each.weight_bytes)


def test_a_pass_takes_as_long_as_its_host(model: PlaceableModel) -> None:
    hosts = np.ones(len(model.graph))
    costs = stage_costs(model, place(model.problem()), model.costs.seconds, hosts)
    forward = ~model.backward & ~model.updates
    assert sum(each.forward_s for each in costs) == forward.sum()


def test_schedules_are_in_order_with_their_ranges(model: PlaceableModel) -> None:
    found = cut(model, micro_batches=4)
    known = [each.batch_s for each in found.schedules if each.batch_s is not None]
    assert known == sorted(known)
    assert {each.name for each in found.schedules if each.batch_s is None} == {"interleaved"}
    for each in found.schedules:
        if each.batch_s is not None and each.interval_s is not None:
            assert each.interval_s[0] <= each.batch_s <= each.interval_s[1]
            # No schedule is faster than the slowest stage's work.
            slowest = max(4 * (cost.forward_s + cost.backward_s) for cost in found.stages)
            assert each.batch_s >= slowest * (1 - 1e-6)


def test_what_cannot_be_is_said(model: PlaceableModel) -> None:
    with pytest.raises(ForetraceError, match="no schedule 1b1f; choose from gpipe"):
        cut(model, micro_batches=4, names=["1b1f"])
    with pytest.raises(ForetraceError, match="must be placement, pipedream, piper, got 'alpa'"):
        cut(model, micro_batches=4, planner="alpa")
    with pytest.raises(ForetraceError, match=r"more passes than are simulated; give [0-9]+ or fewer"):
        cut(model, micro_batches=10**6)
    unsized = tuple(replace(each, role=Role.TEMPORARY) for each in model.graph.storages)
    with pytest.raises(ForetraceError, match="says nothing of sizes in memory"):
        cut(replace(model, graph=replace(model.graph, storages=unsized)), micro_batches=4)
    with pytest.raises(ForetraceError, match="no backward pass"):
        cut(of_model("vgg11", device="a100", devices=2, size="tiny", training=False), micro_batches=4)


@pytest.mark.parametrize("planner", ["pipedream", "piper"])
def test_planners_with_replicas_cut_the_same_model(model: PlaceableModel, planner: str) -> None:
    whole, found = (cut(model, micro_batches=4, names=["1f1b-flush"], planner=each) for each in ("placement", planner))
    assert sum(each.replicas for each in found.stages) <= model.devices
    rows = sorted(row for each in found.placement.devices for row in each.nodes)
    assert rows == list(range(len(found.placement.problem)))
    assert sum(each.weight_bytes for each in found.stages) == sum(each.weight_bytes for each in whole.stages)
    again = sum(each.backward_s for each in found.stages) - sum(each.backward_s for each in whole.stages)
    assert again == pytest.approx(0.0, abs=1e-9) and not any(found.recomputed)  # there is room
    (one,) = found.schedules
    assert one.interval_s and one.batch_s and one.interval_s[0] <= one.batch_s <= one.interval_s[1]


def test_a_backward_pass_that_reads_a_later_block_is_no_cycle() -> None:
    model = of_model("llama", device="a100", devices=2, size="tiny")
    found = cut(model, micro_batches=4, names=["1f1b-flush"], planner="piper")
    assert sum(each.replicas for each in found.stages) <= 2
    assert found.schedules[0].fits


def test_little_memory_has_layers_computed_again() -> None:
    model = of_model("vgg11", device="a100", devices=2, size="tiny", batch=64)
    free = cut(model, micro_batches=4, names=["1f1b-flush"], planner="piper").schedules[0]
    assert free.memory_bytes
    tight = replace(model, memory_limit=0.8 * max(free.memory_bytes))
    found = cut(tight, micro_batches=4, names=["1f1b-flush"], planner="piper")
    (one,) = found.schedules
    assert one.fits and any(found.recomputed)
    with pytest.raises(ForetraceError, match="nothing fits in 1,000 bytes on each of 2 devices"):
        cut(replace(model, memory_limit=1000.0), micro_batches=4, planner="piper")


def test_what_does_not_fit_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "pipeline", "vgg11", "--size", "tiny", "--device", "a100", "--devices", "2"]
    assert run([*words, "--json"]) == 0
    needed = {each["name"]: each["memory_bytes"] for each in json.loads(capsys.readouterr().out)["schedules"]}
    limit = (max(needed["gpipe"]) + max(needed["1f1b-flush"])) / 2e6
    assert run([*words, "--memory-limit", f"{limit:.3f}MB", "--json"]) == 0
    fits = {each["name"]: each["fits"] for each in json.loads(capsys.readouterr().out)["schedules"]}
    assert fits["1f1b-flush"]
    assert not fits["gpipe"]
    assert run([*words, "--memory-limit", "1MB"]) == 2
    said = re.search(r"once per device; give --memory-limit (\d+MB)", capsys.readouterr().err)
    assert said and run([*words, "--memory-limit", said[1]]) == 0


def test_command_prints_and_writes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["plan", "pipeline", "vgg11", "--size", "tiny", "--device", "a100", "--devices", "2", "--schedule", "2bw"]
    assert run([*words, "--html", str(tmp_path / "page.html")]) == 0
    assert "2bw takes" in capsys.readouterr().out
    assert run([*words, "--planner", "pipedream"]) == 0
    assert "the cut by pipedream" in capsys.readouterr().out
    assert "bubble" in (tmp_path / "page.html").read_text()
