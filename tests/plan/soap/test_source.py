"""Operators of captured and recorded steps: nothing is lost, windows are those of the model, parts cost less."""

from __future__ import annotations

from math import prod
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from foretrace.cost.calls import Family
from foretrace.errors import ForetraceError
from foretrace.hardware.cluster import Cluster, Link
from foretrace.model.operator_graph import Role
from foretrace.model.target import target
from foretrace.plan.placement.source import PlaceableModel, of_model
from foretrace.plan.soap.operators import Needed
from foretrace.plan.soap.problem import SYNCHRONISATIONS, SoapProblem, ways_of
from foretrace.plan.soap.source import CapturedSoap, _windows

ROOT = Path(__file__).resolve().parents[3]
CLUSTER = Cluster(
    name="small", nodes=2, per_node=2, inside=Link(name="in", gbit_s=100), between=Link(name="out", gbit_s=10)
)


def taken(model: PlaceableModel) -> CapturedSoap:
    on = target("p100")
    return CapturedSoap(model, on.costs(model.graph), on.device)


@pytest.fixture(scope="module", params=["vgg11", "resnet50", "bert", "lstm-lm"])
def model(request: pytest.FixtureRequest) -> PlaceableModel:
    return of_model(request.param, device="p100", devices=4, size="tiny", batch=8)


def test_whole_operators_hold_all_time_and_weights(model: PlaceableModel) -> None:
    found, whole = taken(model), [(1, 1, 1, 1)]
    model.__dict__["host_s"] = np.zeros(len(model.graph))
    passes = [found.times(op, whole) for op in range(len(found.operators))]
    assert sum(float(each.sum()) for pair in passes for each in pair) == pytest.approx(model.costs.seconds.sum())
    weights = sum(each.nbytes for each in model.graph.storages if each.role == Role.WEIGHT)
    assert weights <= found.weight_bytes <= 1.001 * weights  # whole bytes per channel
    assert found.operators[0].sizes[0] == 8


def test_parts_cost_less_and_never_less_than_their_share_of_work(model: PlaceableModel) -> None:
    found = taken(model)
    model.__dict__["host_s"] = np.zeros(len(model.graph))
    for op, operator in enumerate(found.operators):
        ways = ways_of(operator, 4)
        forward, backward = found.times(op, ways)
        one = ways.index((1, 1, 1, 1))
        assert (forward <= forward[one] * 1.3 + 1e-9).all() and (backward <= backward[one] * 1.3 + 1e-9).all(), operator
        fast, slow = (found.at_end(end).times(op, ways)[0] for end in (1, 2))
        assert (fast <= forward + 1e-12).all() and (forward <= slow + 1e-12).all()


def test_data_parallelism_sends_gradients_and_no_activations(model: PlaceableModel) -> None:
    found = taken(model)
    for sync in SYNCHRONISATIONS:
        problem = SoapProblem(found, CLUSTER, sync)
        counted = problem.counted(problem.data_parallel())
        assert counted.exchanged_bytes == 2 * 3 * found.weight_bytes
        assert counted.moved_bytes <= 0.01 * counted.exchanged_bytes
        alone = problem.counted(problem.alone())
        assert (alone.exchanged_bytes, alone.moved_bytes) == (0, 0)
        assert max(alone.held_bytes) == sum(alone.held_bytes)


def test_windows_of_convolutions() -> None:
    found = taken(of_model("resnet50", device="p100", devices=4, size="tiny", batch=8))
    first = next(each for each in found.operators if each.name == "layer1.0.conv2")
    channels = found.operators[first.inputs[0].source].sizes[3]
    assert first.inputs[0].needed[1:] == (Needed(1, -1, 3), Needed(1, -1, 3), Needed(0, 0, channels))
    assert first.splits == "shwc"
    pool = next(each for each in found.operators if each.name == "pool")
    assert pool.inputs[0].needed[1] == Needed(2, -1, 3)
    assert prod(pool.sizes) > 0


def test_windows_of_dilated_pooling() -> None:
    said = '["","[3, 3]","[2, 2]","[1, 1]","[2, 2]","False"]'
    text = (
        f'[[[8,8,16,16],[],[],[],[],[]],["float","ScalarList","ScalarList","ScalarList","ScalarList","Scalar"],{said}]'
    )
    assert _windows("aten::max_pool2d_with_indices", text) == {1: Needed(2, -1, 5), 2: Needed(2, -1, 5)}


def test_attention_reads_every_key_and_its_own_heads() -> None:
    model = of_model("bert", device="p100", devices=4, size="tiny", batch=8)
    found = taken(model)
    at = next(i for i, g in enumerate(found._groups) if model.graph.calls.family[g.nodes[0]] == Family.ATTENTION)
    query, key, value = found.operators[at].inputs
    _, words, width, heads = found.operators[at].sizes
    assert found.operators[query.source].sizes[3] == width * heads
    assert query.needed[1] == Needed(1, 0, 1) and key.needed[1] == value.needed[1] == Needed(0, 0, words)
    assert {each.needed[3] for each in (query, key, value)} == {Needed(width, 0, width)}


def test_recording_is_split_as_the_model_is() -> None:
    model = of_model(str(ROOT / "tests" / "data" / "cnn.json.gz"), device="p100", devices=4)
    found = taken(model)
    problem = SoapProblem(found, CLUSTER, "all-reduce")
    assert found.weight_bytes > 0 and problem.cost(problem.data_parallel()) > 0


def test_what_cannot_be_split_is_said() -> None:
    with pytest.raises(ForetraceError, match="no backward pass"):
        taken(of_model("vgg11", device="p100", devices=4, size="tiny", training=False))
    with pytest.raises(ForetraceError, match="must be at most 4,096"):
        of_model("vgg11", device="p100", devices=100_000, size="tiny")
    with pytest.raises(ForetraceError, match="fewer than `devices=4,000`"):
        of_model("vgg11", device="p100", devices=4_000, size="tiny")
