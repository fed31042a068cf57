"""Searching: relaxed beats greedy where it must, any sequence of rules keeps the function, parts cover everything."""

from __future__ import annotations

import random
from collections.abc import Iterable
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.cost.devices.roofline import Roofline
from foretrace.deadline import Deadline
from foretrace.hardware.devices import named
from foretrace.plan.rewrite.catalog import RULES
from foretrace.plan.rewrite.costs import ModelCosts, OperatorCosts, work_of
from foretrace.plan.rewrite.rules import Maker
from foretrace.plan.rewrite.search import neighbours, search
from foretrace.plan.rewrite.split import by_level, parts, source_side
from foretrace.plan.rewrite.substitute import substitute
from foretrace.plan.rewrite.term import Term
from foretrace.plan.rewrite.terms import Graph, Terms
from foretrace.plan.rewrite.verifier import difference

pytest.importorskip("torch")


class Stated(OperatorCosts):
    """A start for every operator but views, and its multiplications; so a search has a known answer."""

    def __init__(self, start_s: float = 1e-3, per_product_s: float = 1e-7) -> None:
        super().__init__()
        self.start_s, self.per_product_s = start_s, per_product_s

    def price(self, new: dict[str, Term]) -> dict[str, float]:
        return {text: self.seconds(term) for text, term in new.items()}

    def seconds(self, term: Term) -> float:
        if term.op in ("slice", "permute", "reshape"):
            return 0.0
        inner = prod(term.inputs[1].dims[1:]) if term.op in ("conv2d", "linear") else 1
        return self.start_s + self.per_product_s * term.size * inner


def branches(m: Maker) -> Graph:
    """A 1x1 and a 3x3 convolution of the same input: merging them needs the smaller one enlarged first."""
    x = m.input(1, 4, 6, 6)
    small = m.conv(x, out=4, kernel=(1, 1), same=True, bias=True, act="relu")
    large = m.conv(x, out=4, kernel=(3, 3), same=True, bias=True, act="relu")
    return m.graph(small, large)


def test_relaxed_search_reaches_what_greedy_cannot() -> None:
    m, costs = Maker(Terms(), random.Random(0)), Stated()
    graph = branches(m)
    greedy = search(graph, RULES, costs, alpha=1.0, budget=200)
    relaxed = search(graph, RULES, costs, alpha=1.5, budget=200)
    everything = search(graph, RULES, costs, alpha=1e9, budget=200)
    assert greedy.cost == costs.of(graph)
    assert greedy.ended == "finished"
    assert relaxed.cost < 0.8 * greedy.cost
    assert relaxed.cost == everything.cost
    assert relaxed.best is not None
    assert relaxed.best.rules == ("enlarge-kernel", "merge-convolutions")
    merged = next(each for each in relaxed.best.graph.order() if each.op == "conv2d")
    assert merged.dims == (1, 8, 6, 6)
    assert difference(graph, relaxed.best.graph) < 1e-12


def test_greedy_goes_on_from_what_is_better() -> None:
    m = Maker(Terms(), random.Random(0))
    x = m.input(1, 4, 6, 6)
    convs = [m.conv(x, out=2, kernel=(3, 3), same=True, bias=True, act="") for _ in range(2)]
    graph = m.graph(*(m.terms.make("relu", (each,)) for each in convs))
    best = search(graph, RULES, Stated(), alpha=1.0, budget=50).best
    assert best is not None
    assert [each.op for each in best.graph.order()] == ["conv2d", "slice", "slice"]
    assert len(best.rules) == 2


def test_a_search_is_deterministic_and_keeps_to_its_budget_and_time() -> None:
    found = []
    for _ in range(2):
        m = Maker(Terms(), random.Random(0))
        found.append(search(branches(m), RULES, Stated(), alpha=1.5, budget=50))
    assert (found[0].curve, found[0].calls) == (found[1].curve, found[1].calls)
    assert found[0].best is not None and found[1].best is not None
    assert found[0].best.rules == found[1].best.rules
    assert found[0].best.graph.key == found[1].best.graph.key
    m = Maker(Terms(), random.Random(0))
    short = search(branches(m), RULES, Stated(), alpha=1.5, budget=1)
    assert (short.steps, short.ended) == (1, "steps")
    late = search(branches(m), RULES, Stated(), alpha=1.5, budget=50, until=Deadline(0.0))
    assert (late.steps, late.calls, late.ended) == (0, 1, "seconds")


@pytest.mark.parametrize("seconds", [1.5, 4.0, 10.0])
def test_a_graph_whose_price_would_come_too_late_is_not_priced(seconds: float) -> None:
    now = [0.0]

    class Slow(Stated):
        def price(self, new: dict[str, Term]) -> dict[str, float]:
            now[0] += 0.2 * len(new)
            return super().price(new)

    m = Maker(Terms(), random.Random(0))
    found = search(branches(m), RULES, Slow(), alpha=1.5, budget=50, until=Deadline(seconds, lambda: now[0]))
    assert found.calls >= 1 and now[0] <= 1.1 * seconds


def network(m: Maker, blocks: int, channels: int = 4) -> Graph:
    """Blocks of branches, with batch norms, one after another."""
    x = m.input(1, channels, 5, 5)
    for _ in range(blocks):
        ways = []
        for kernel in ((1, 1), (3, 3), (3, 1)):
            conv = m.conv(x, out=2, kernel=kernel, same=True, bias=False, act="")
            variance = m.terms.leaf(f"variance{m.count}", (2,), dtype="float64", constant=True)
            norm = (conv, m.weight(2), m.weight(2), m.weight(2), variance)
            ways.append(m.terms.make("relu", (m.terms.make("batch_norm", norm, eps=1e-3),)))
        joined = m.terms.make("concat", ways, axis=1)
        x = m.terms.make("add", (m.conv(joined, out=channels, kernel=(1, 1), same=True, bias=True, act=""), x))
    return m.graph(x)


def test_a_network_is_rewritten_in_parts_to_an_equal_one() -> None:
    m = Maker(Terms(), random.Random(1))
    graph = network(m, 4)
    shares: list[float] = []
    found = substitute(
        graph, RULES, Stated(), alpha=1.3, budget=15, most=12, tell=lambda share, now, before: shares.append(share)
    )
    assert found.parts > 1
    assert found.after_s < 0.6 * found.before_s
    assert found.after_s == pytest.approx(Stated().of(found.after))
    assert difference(graph, found.after) < 1e-9
    assert found.rules.count("fold-batch-norm") == 12
    assert shares == sorted(shares)
    assert shares[-1] <= 1.0


def test_parts_that_are_alike_are_searched_once() -> None:
    m = Maker(Terms(), random.Random(2))
    x = m.input(2, 4)
    outputs = []
    for _ in range(6):
        outputs.append(m.terms.make("relu", (m.linear(m.linear(m.input(2, 4), 4, bias=True), 4, bias=True),)))
    graph = m.graph(x, *outputs)
    found = substitute(graph, RULES, Stated(), alpha=1.05, budget=20, most=3)
    assert found.alike > 0
    assert difference(graph, found.after) < 1e-12


@settings(max_examples=12)
@given(st.integers(0, 10_000), st.lists(st.integers(0, 10_000), min_size=1, max_size=5))
def test_any_sequence_of_rules_keeps_the_function(seed: int, choices: list[int]) -> None:
    m = Maker(Terms(), random.Random(seed))
    graph = network(m, 1) if seed % 2 else products(m)
    now = graph
    for choice in choices:
        found = list(neighbours(now, RULES))
        if not found:
            break
        now = found[choice % len(found)][1]
        assert [each.dims for each in now.outputs] == [each.dims for each in graph.outputs]
    assert difference(graph, now, seed=seed) < 1e-9


def products(m: Maker) -> Graph:
    """Linear layers, products, permutations and activations."""
    x = m.input(m.size(), 4, 3)
    q, k = m.linear(x, 3), m.linear(x, 3)
    scores = m.terms.make("matmul", (q, m.terms.make("permute", (k,), order=(0, 2, 1))))
    scores = m.terms.make("tanh", (m.terms.make("mul_scalar", (scores,), value=0.5),))
    mixed = m.terms.make("matmul", (scores, m.linear(x, 3, act="relu")))
    return m.graph(m.terms.make("add", (m.linear(m.linear(mixed, 5), 3), x)))


@settings(max_examples=30)
@given(st.integers(2, 8), st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7), st.integers(0, 9)), max_size=24))
def test_a_cut_is_as_large_as_the_flow_of_scipy(count: int, edges: list[tuple[int, int, int]]) -> None:
    sparse = pytest.importorskip("scipy.sparse")
    edges = [(a % count, b % count, room) for a, b, room in edges if a % count != b % count]
    dense = np.zeros((count, count), dtype=np.int32)
    for a, b, room in edges:
        dense[a, b] += room
    from scipy.sparse.csgraph import maximum_flow

    side = source_side({(0, count - 1): 0.0} | {(a, b): float(dense[a, b]) for a, b, _ in edges}, 0, count - 1)
    assert 0 in side
    assert count - 1 not in side
    most = maximum_flow(sparse.csr_matrix(dense), 0, count - 1).flow_value
    assert sum(room for a, b, room in edges if a in side and b not in side) == most


@settings(max_examples=8)
@given(st.integers(0, 1000), st.integers(1, 3), st.integers(4, 20))
def test_parts_cover_all_operators_and_are_convex(seed: int, blocks: int, most: int) -> None:
    graph = network(Maker(Terms(), random.Random(seed)), blocks)
    found = parts(graph, RULES, most=most)
    assert sorted(each.number for part in found for each in part) == [each.number for each in graph.order()]
    assert all(len(part) <= most for part in found)
    place = {term: i for i, part in enumerate(found) for term in part}
    for term in graph.order():
        assert all(place[each] <= place[term] for each in term.inputs if each in place)
    assert set(by_level(graph)) == set(graph.order())


def test_cuts_pass_between_what_rules_need_together() -> None:
    """Two blocks, joined by one tensor: the cut is there, and convolutions stay with their batch norms."""
    graph = network(Maker(Terms(), random.Random(0)), 2)
    found = parts(graph, RULES, most=14)
    together = {term: i for i, part in enumerate(found) for term in part}
    for norm in (each for each in graph.order() if each.op == "batch_norm"):
        assert together[norm] == together[norm.inputs[0]]


def test_costs_of_a_model_know_flops_and_give_views_for_nothing() -> None:
    m = Maker(Terms(), random.Random(0))
    x = m.terms.leaf("x", (2, 8, 10, 10))
    w = m.terms.leaf("w", (16, 8, 3, 3), constant=True)
    conv = m.terms.make(
        "conv2d", (x, w), stride=(2, 2), padding=(1, 1), dilation=(1, 1), groups=1, bias=False, added=False, act="relu"
    )
    graph = m.graph(m.terms.make("slice", (conv,), axis=1, start=0, length=8))
    assert sum(work_of(each).flops for each in graph.order()) == 2 * (2 * 16 * 5 * 5) * (8 * 9)
    costs = ModelCosts(Roofline(), named("h100"))
    assert costs.of(graph) == costs.of(m.graph(conv)) > 0
    assert costs.unknown == {}


def test_constants_cost_nothing() -> None:
    m = Maker(Terms(), random.Random(0))
    w = m.weight(3, 3)
    heavy: Iterable[Term] = [m.terms.make("matmul", (w, w))]
    graph = m.graph(m.terms.make("matmul", (m.input(2, 3), *heavy)))
    assert [each.op for each in graph.order()] == ["matmul"]
    assert len(graph.order(constants=True)) == 2
