"""Strategies of the SOAP space: bytes against plain counts, times against a plain simulation, what a search keeps."""

from __future__ import annotations

import pickle
from collections import defaultdict
from itertools import product
from math import inf
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.errors import ForetraceError
from foretrace.graph.taskgraph import TaskKind
from foretrace.hardware.devices import named
from foretrace.plan.soap.operators import Needed
from foretrace.plan.soap.problem import (
    SYNCHRONISATIONS,
    Codes,
    SoapProblem,
    Split,
    Synchronisation,
    best_strategy,
)
from foretrace.search.space import Infeasible
from foretrace.simulate.timeline import simulate
from reproductions.flexflow.cluster import SoapCluster
from reproductions.flexflow.layers import LayeredModel
from reproductions.flexflow.layers import problem as made
from reproductions.flexflow.models import MODELS, k80_cluster, p100_cluster, rnnlm
from reproductions.flexflow.plain import PlainStep


def cluster(nodes: int, per_node: int) -> SoapCluster:
    return SoapCluster(name="small", device=named("p100"), nodes=nodes, per_node=per_node, link=18e9, network=10e9)


def convolutional(samples: int = 5) -> LayeredModel:
    """Windows with padding and stride, branches, sums, flat products; sizes that no power of two divides."""
    model = LayeredModel("convolutional")
    first = model.window("a", (samples, 9, 7, 3), (3, 3), 1, (1, 1), 6)
    left = model.window("b", first, (3, 1), 1, (1, 0), 5)
    right = model.window("c", first, (1, 3), 1, (0, 1), 3)
    joined = model.concatenate("d", (left, right, first))
    pooled = model.window("e", joined, (3, 3), 2, (1, 1))
    summed = model.together("f", (pooled, model.window("g", pooled, (1, 1), 1, (0, 0), 14)))
    model.loss("loss", model.linear("fc", summed, 10, flat=True))
    return model


def recurrent(samples: int = 6) -> LayeredModel:
    """Chunks and single steps that share weights, attention, a product split over them."""
    model = LayeredModel("recurrent")
    hidden, before = [], None
    for i in range(3):
        word = model.embedding(f"word{i}", "word", samples, 2, 11, 6)
        before = model.lstm(f"lstm{i}", "lstm", word, before, 5)
        hidden.append(before)
    for i, step in enumerate((1, 1)):
        word = model.embedding(f"out{i}", "out", samples, step, 9, 4)
        before = model.lstm(f"step{i}", "step", word, before, 5)
        at = model.attention(f"attend{i}", "attend", before, hidden)
        model.loss(f"loss{i}", model.linear(f"soft{i}", at, 13, "soft"))
    return model


SMALL = {"convolutional": convolutional, "recurrent": recurrent}


def problem_of(
    name: str, nodes: int, per_node: int, sync: Synchronisation, memory_gb: float | None = None
) -> SoapProblem:
    return made(SMALL[name](), cluster(nodes, per_node), sync, memory_gb)


def mixed(problem: SoapProblem, rng: Random) -> Codes:
    """A random point, or one a few changes from data parallelism, where parts of one layer agree more."""
    if rng.random() < 0.5:
        return problem.space.random(rng)
    point = problem.data_parallel()
    for _ in range(rng.randrange(6)):
        point = problem.space.neighbour(point, rng)
    return point


STRATEGIES = {
    "name": st.sampled_from(sorted(SMALL)),
    "shape": st.sampled_from([(1, 1), (1, 4), (2, 2), (3, 2), (2, 4), (4, 4), (16, 4)]),
    "sync": st.sampled_from(sorted(SYNCHRONISATIONS)),
    "seed": st.integers(0, 2**32),
}


@settings(max_examples=60, deadline=None)
@given(**STRATEGIES)
def test_compiled_simulation_is_the_plain_one(
    name: str, shape: tuple[int, int], sync: Synchronisation, seed: int
) -> None:
    problem = problem_of(name, *shape, sync)
    point = mixed(problem, Random(seed))
    plain = PlainStep(problem, point)
    found, tasks = problem.simulated(point)
    assert found == plain.makespan_ns
    counted = problem.counted(point)
    assert tasks.end[: counted.tasks].tolist() == [task.end for task in plain.tasks]
    assert (counted.moved_bytes, counted.exchanged_bytes) == (plain.moved, plain.exchanged)
    assert counted.held_bytes == tuple(plain.held[device] for device in range(problem.machine.devices))


@pytest.mark.parametrize("sync", SYNCHRONISATIONS)
@pytest.mark.parametrize("name", ["alexnet", "nmt"])
def test_published_shapes_are_simulated_as_plainly(name: str, sync: Synchronisation) -> None:
    problem = made(MODELS[name](64), p100_cluster(), sync)
    rng = Random(name + sync)
    for point in (problem.data_parallel(), problem.expert(), problem.space.neighbour(problem.expert(), rng)):
        assert problem.simulated(point)[0] == PlainStep(problem, point).makespan_ns


def parts(problem: SoapProblem, point: Codes, op: int) -> list[tuple[int, set[tuple[int, ...]]]]:
    """Device and elements of every part, one by one."""
    sizes, split = problem.model.operators[op].sizes, problem.space.split(op, point[op])
    devices = problem.machine.devices
    places = sorted(range(devices), key=lambda device: (device % split.stride, device))
    found: dict[tuple[int, ...], set[tuple[int, ...]]] = {at: set() for at in product(*map(range, split.degrees))}
    owner = [
        {x: next(k for k in range(d) if size * k // d <= x < size * (k + 1) // d) for x in range(size)}
        for size, d in zip(sizes, split.degrees, strict=True)
    ]
    for element in product(*map(range, sizes)):
        found[tuple(o[x] for o, x in zip(owner, element, strict=True))].add(element)
    return [((split.first + places[i]) % devices, elements) for i, elements in enumerate(found.values())]


@settings(max_examples=12, deadline=None)
@given(name=STRATEGIES["name"], seed=STRATEGIES["seed"])
def test_resharded_bytes_are_a_count_of_elements(name: str, seed: int) -> None:
    """Every element that a part needs and that another device made is sent once to each part, and its gradient back."""
    problem = problem_of(name, 2, 2, "all-reduce")
    point = mixed(problem, Random(seed))
    operators = problem.model.operators
    bytes_of: dict[tuple[int, int, int, int], int] = defaultdict(int)
    held = [parts(problem, point, op) for op in range(len(operators))]
    for op, operator in enumerate(operators):
        for i, (device, elements) in enumerate(held[op]):
            for each in operator.inputs:
                needed = {
                    read
                    for element in elements
                    for read in product(*(
                        range(x * need.stride + need.offset, x * need.stride + need.offset + need.extent)
                        for x, need in zip(element, each.needed, strict=True)
                    ))
                }  # fmt: skip
                for j, (other, theirs) in enumerate(held[each.source]):
                    if other != device and (common := needed & theirs):
                        bytes_of[op, i, each.source, j] += 4 * len(common)
    assert PlainStep(problem, point).messages == bytes_of
    assert problem.counted(point).moved_bytes == 2 * sum(bytes_of.values())


@settings(max_examples=30, deadline=None)
@given(**STRATEGIES)
def test_weights_are_exchanged_once_per_device_that_holds_them(
    name: str, shape: tuple[int, int], sync: Synchronisation, seed: int
) -> None:
    """Channel by channel: k devices that hold it move 2 (k − 1) times its bytes, however many operators use it."""
    problem = problem_of(name, *shape, sync)
    point = mixed(problem, Random(seed))
    holders: dict[tuple[str, int], set[int]] = defaultdict(set)
    per = {}
    for op, operator in enumerate(problem.model.operators):
        if operator.weight_bytes:
            per[operator.layer] = operator.weight_bytes
            for device, elements in parts(problem, point, op):
                for channel in {element[3] for element in elements}:
                    holders[operator.layer, channel].add(device)
    plain = sum(2 * (len(devices) - 1) * per[layer] for (layer, _), devices in holders.items())
    assert problem.counted(point).exchanged_bytes == plain


def test_a_weight_of_many_chunks_is_exchanged_as_if_it_had_one() -> None:
    for sync in SYNCHRONISATIONS:
        volumes = set()
        for chunk in (10, 20, 40):
            problem = made(rnnlm(64, chunk), p100_cluster(), sync)
            volumes.add(problem.counted(problem.data_parallel()).exchanged_bytes)
        assert volumes == {2 * 15 * 4 * rnnlm(64).parameters}


@pytest.mark.parametrize("sync", SYNCHRONISATIONS)
@pytest.mark.parametrize("name", sorted(SMALL))
def test_a_search_is_never_worse_than_its_baselines_and_repeats_itself(name: str, sync: Synchronisation) -> None:
    problem = problem_of(name, 2, 2, sync)
    found = best_strategy(problem, calls=300, chains=2, seed=3)
    assert found.best is not None
    assert found.cost <= min(problem.cost(problem.data_parallel()), problem.cost(problem.expert()))
    assert found.cost == PlainStep(problem, found.best).makespan_ns / 1e6
    again = best_strategy(pickle.loads(pickle.dumps(problem)), calls=300, chains=2, seed=3)
    assert (again.best, again.cost, again.curve) == (found.best, found.cost, found.curve)


def test_memory_limits_are_kept() -> None:
    free = problem_of("convolutional", 2, 2, "all-reduce")
    limit = 1.02 * min(max(free.counted(point).held_bytes) for point in (free.data_parallel(), free.expert()))
    tight = problem_of("convolutional", 2, 2, "all-reduce", limit / 1e9)
    found = best_strategy(tight, calls=400, chains=2)
    assert found.best is not None
    assert max(tight.counted(found.best).held_bytes) <= limit
    assert set(found.infeasible) == {"a device holds more than its memory"}
    none = problem_of("convolutional", 2, 2, "all-reduce", 1e-6)
    assert isinstance(none.cost(none.data_parallel()), Infeasible)
    assert best_strategy(none, calls=50).cost == inf


@pytest.mark.parametrize("machines", [p100_cluster, k80_cluster])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_published_models_split_as_their_baselines_say(name: str, machines: object) -> None:
    here = p100_cluster() if machines is p100_cluster else k80_cluster()
    problem = made(MODELS[name](4 * here.devices), here, "all-reduce")
    for op, code in enumerate(problem.data_parallel()):
        assert problem.space.split(op, code) == Split((here.devices, 1, 1, 1), 0, 1)
    assert 0 < problem.cost(problem.expert()) < inf
    rng = Random(0)
    point = problem.expert()
    for _ in range(50):
        point = problem.space.neighbour(point, rng)
        for op, code in enumerate(point):
            assert problem.space.code(op, problem.space.split(op, code)) == code


def test_parameters_are_those_of_the_papers() -> None:
    """Millions, without the scales and shifts of normalisation and the biases before them."""
    published = {"alexnet": 61.1, "inception-v3": 23.8, "resnet-101": 44.5}
    for name, millions in published.items():
        assert MODELS[name](16).parameters / 1e6 == pytest.approx(millions, rel=0.005)


def test_what_cannot_be_is_refused() -> None:
    model = LayeredModel("wrong")
    with pytest.raises(ForetraceError, match="sizes of 1 or more"):
        model.window("a", (1, 2, 2, 3), (3, 3), channels=4)
    model.put(name="a", layer="w", sizes=(4, 1, 1, 8), splits="s", flops=1, weights=3)
    with pytest.raises(ForetraceError, match="same weights"):
        model.put(name="b", layer="w", sizes=(4, 1, 1, 8), splits="s", flops=1, weights=4)
    with pytest.raises(ForetraceError, match="1 to 64 devices"):
        made(model, cluster(17, 4), "gather")
    with pytest.raises(ForetraceError, match="all-reduce or gather"):
        made(model, cluster(1, 2), "tree")  # type: ignore[arg-type]
    slow = SoapCluster(name="slow", device=named("p100"), nodes=2, per_node=1, link=1.0, network=0.01)
    with pytest.raises(ForetraceError, match="within half an hour"):
        problem = made(model, slow, "gather")
        problem.cost(problem.data_parallel())
    problem = made(model, cluster(1, 2), "gather")
    with pytest.raises(ForetraceError, match="cannot be split"):
        problem.space.code(0, Split((1, 1, 1, 2), 0, 1))
    assert Needed(1, 0, 1) and np.array(problem.columns.sizes).tolist() == [[4, 1, 1, 8]]


@settings(max_examples=30, deadline=None)
@given(**STRATEGIES)
def test_the_expanded_graph_is_simulated_alike(
    name: str, shape: tuple[int, int], sync: Synchronisation, seed: int
) -> None:
    problem = problem_of(name, *shape, sync)
    point = mixed(problem, Random(seed))
    graph = problem.expand(point)
    timeline = simulate(graph)
    found, tasks = problem.simulated(point)
    count = problem.counted(point).tasks
    work = graph.kind != TaskKind.MARK
    assert timeline.window_ns == found
    assert sorted(timeline.end[work]) == sorted(tasks.end[:count])
    for lane in range(len(graph.lanes)):  # runs one task at a time
        here = np.flatnonzero((graph.lane == lane) & work)
        by_start = here[np.lexsort((timeline.end[here], timeline.start[here]))]
        assert np.all(timeline.start[by_start][1:] >= timeline.end[by_start][:-1])
