"""Every rule and every cancellation of the normal form holds in float64; wrong rules are found out."""

from __future__ import annotations

import random

import pytest

from foretrace.plan.rewrite import normal
from foretrace.plan.rewrite.catalog import RULES, verified
from foretrace.plan.rewrite.rules import GraphView, Maker, Rule, RuleMatch
from foretrace.plan.rewrite.term import Term
from foretrace.plan.rewrite.terms import Graph, Terms
from foretrace.plan.rewrite.verifier import TOLERANCE, difference, verify

pytest.importorskip("torch")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_holds_on_random_sizes(rule: Rule) -> None:
    verdict = verify(rule, seed=1, examples=5)
    assert verdict.holds, verdict
    assert verdict.examples == 5
    assert verdict.places >= 5
    assert verdict.worst <= TOLERANCE


def test_names_differ() -> None:
    assert len({each.name for each in RULES}) == len(RULES)


def test_a_wrong_rule_is_not_usable() -> None:
    def find(view: GraphView) -> list[RuleMatch]:
        return [RuleMatch(((term, view.terms.make("tanh", term.inputs)),), (term,)) for term in view.of("relu")]

    wrong = Rule(
        name="wrong", what="", source="", find=find, sample=lambda m: m.graph(m.terms.make("relu", (m.image(),)))
    )
    usable, verdicts = verified([wrong])
    assert usable == ()
    assert not verdicts[0].holds
    assert "differs by" in verdicts[0].why


def test_a_rule_that_fits_nothing_is_not_usable() -> None:
    idle = Rule(name="idle", what="", source="", find=lambda view: [], sample=lambda m: m.graph(m.image()))
    verdict = verify(idle)
    assert not verdict.holds
    assert "fitted" in verdict.why


class _Raw(Terms):
    """Terms without a normal form, to compare with."""

    def make(self, op: str, inputs: object, **attributes: object) -> Term:
        raise NotImplementedError


def _cancelled(name: str, m: Maker) -> tuple[Term, list[int], int]:
    """(term in normal form, sizes of its only input, operators that it has at most)."""
    x = m.input(4, 6, 5)
    make = m.terms.make
    if name == "slice-of-all":
        return make("slice", (x,), axis=1, start=0, length=6), [0], 0
    if name == "slice-of-slice":
        inner = make("slice", (x,), axis=1, start=1, length=4)
        return make("slice", (inner,), axis=1, start=1, length=2), [2], 1
    if name == "slice-of-concat":
        whole = make("concat", (m.input(4, 2, 5), x), axis=1)
        return make("slice", (whole,), axis=1, start=3, length=2), [1], 1
    if name == "concat-of-one":
        return make("concat", (x,), axis=0), [0], 0
    if name == "concat-of-concat":
        return make("concat", (make("concat", (x, x), axis=0), x), axis=0), [0], 1
    if name == "concat-of-slices":
        parts = [make("slice", (x,), axis=1, start=start, length=2) for start in (1, 3)]
        return make("concat", parts, axis=1), [1], 1
    if name == "permute-of-permute":
        return make("permute", (make("permute", (x,), order=(1, 2, 0)),), order=(2, 0, 1)), [0], 0
    assert name == "reshape-of-reshape"
    return make("reshape", (make("reshape", (x,), dims=(24, 5)),), dims=(4, 30)), [0], 1


@pytest.mark.parametrize("name", normal.CANCELLATIONS)
def test_every_cancellation_gives_the_same_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    m = Maker(Terms(), random.Random(0))
    short, _, most = _cancelled(name, m)
    assert len(Graph(m.terms, (short,)).order()) <= most
    with monkeypatch.context() as patch:
        patch.setattr(normal, "simplified", lambda *_: None)
        raw = Maker(Terms(), random.Random(0))
        long, _, _ = _cancelled(name, raw)
    assert len(Graph(raw.terms, (long,)).order()) > len(Graph(m.terms, (short,)).order())
    import torch

    from foretrace.plan.rewrite.emit import evaluate

    values = {}
    for mine, theirs in zip(m.leaves, raw.leaves, strict=True):
        values[mine] = values[theirs] = torch.randn(mine.dims, dtype=torch.float64)
    assert torch.equal(evaluate(Graph(m.terms, (short,)), values)[0], evaluate(Graph(raw.terms, (long,)), values)[0])


def test_equal_values_are_one_term_and_numbers_rise() -> None:
    m = Maker(Terms(), random.Random(3))
    x, y = m.input(2, 3), m.input(2, 3)
    assert m.terms.make("add", (x, y)) is m.terms.make("add", (y, x))
    graph = m.graph(m.terms.make("relu", (m.terms.make("add", (x, y)),)))
    assert [each.number for each in graph.order()] == sorted(each.number for each in graph.order())
    assert difference(graph, graph) == 0.0


def test_a_replacement_that_would_need_itself_is_refused() -> None:
    m = Maker(Terms(), random.Random(0))
    first = m.terms.make("relu", (m.input(2, 2),))
    second = m.terms.make("tanh", (first,))
    graph = m.graph(first, second)
    merged = m.terms.make("concat", (first, second), axis=0)  # made of what it replaces
    pairs = [
        (first, m.terms.make("slice", (m.terms.make("neg", (merged,)),), axis=0, start=0, length=2)),
        (second, m.terms.make("slice", (m.terms.make("neg", (merged,)),), axis=0, start=2, length=2)),
    ]
    assert graph.replaced(pairs) is None
