"""The verifier: every rule held against what it replaces, in float64, on random sizes and random numbers."""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import isnan
from typing import TYPE_CHECKING

from foretrace.plan.rewrite.rules import GraphView, Maker, Rule
from foretrace.plan.rewrite.shapes import UnfitError
from foretrace.plan.rewrite.term import Term
from foretrace.plan.rewrite.terms import Graph, Terms

if TYPE_CHECKING:
    import torch

TOLERANCE = 1e-9  # of the largest value
_LEAST_EXAMPLES = 3
_TRIES = 20  # samples per example that is wanted: a sample may not fit the rule


@dataclass(frozen=True, kw_only=True)
class RuleVerdict:
    """What the verifier found of one rule."""

    name: str
    holds: bool
    examples: int  # random graphs that the rule fitted
    places: int  # rewrites that were compared
    worst: float  # largest difference, as a share of the largest value
    why: str = ""  # why it does not hold, or could not be tried


def verify(rule: Rule, *, seed: int = 0, examples: int = 5) -> RuleVerdict:
    """Hold a rule against random examples of its own. It holds where all of them agree and there were enough."""
    fitted = places = 0
    worst = 0.0
    for number in range(_TRIES * examples):
        if fitted == examples:
            break
        maker = Maker(Terms(), random.Random(seed * 1_000_003 + number))
        try:
            pairs = _pairs(rule, maker)
        except UnfitError:
            continue
        used = 0
        for graph, changed in pairs:
            used += 1
            off = difference(graph, changed, seed=number)
            worst = max(worst, off)
            if not off <= TOLERANCE:
                why = f"differs by {off:.2g} of the largest value on {graph.outputs} against {changed.outputs}"
                return RuleVerdict(name=rule.name, holds=False, examples=fitted, places=places, worst=worst, why=why)
        fitted += bool(used)
        places += used
    least = min(_LEAST_EXAMPLES, examples)
    why = "" if fitted >= least else f"only {fitted} of {_TRIES * examples} random graphs fitted it"
    return RuleVerdict(name=rule.name, holds=not why, examples=fitted, places=places, worst=worst, why=why)


def _pairs(rule: Rule, maker: Maker) -> list[tuple[Graph, Graph]]:
    """Return (old, new) of a random example."""
    if rule.both is not None:
        return [rule.both(maker)]
    graph = rule.sample(maker)
    changed = [graph.replaced(place.pairs) for place in rule.places(GraphView(graph))]
    return [(graph, each) for each in changed if each is not None]


def difference(one: Graph, other: Graph, *, seed: int = 0) -> float:
    """Return the largest difference of their outputs on the same random leaves, as a share of the largest value;
    float64.
    """
    from foretrace.plan.rewrite.emit import evaluate

    values = leaves((one, other), seed=seed)
    worst = 0.0
    for a, b in zip(evaluate(one, values), evaluate(other, values), strict=True):
        if a.shape != b.shape:
            return float("inf")
        if a.numel():
            scale = max(float(a.abs().max()), 1e-30)
            off = float((a - b).abs().max()) / scale
            worst = max(worst, float("inf") if isnan(off) else off)
    return worst


def leaves(graphs: tuple[Graph, ...], *, seed: int = 0) -> dict[Term, torch.Tensor]:
    """Return random float64 values of all leaves of these graphs; those named variance are positive."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    found: dict[Term, torch.Tensor] = {}
    for graph in graphs:
        reached = [each for term in graph.order(constants=True) for each in term.inputs]
        for term in sorted({*reached, *graph.outputs}, key=lambda each: each.number):
            if term not in found and (term.op == "leaf" or term in graph.leaves):
                value = torch.randn(term.dims, generator=generator, dtype=torch.float64)
                found[term] = value.abs() + 0.1 if str(term.get("name", "")).startswith("variance") else value
    return found
