"""`Rule`: a small named rewrite of a graph; `GraphView`: a graph as rules look at it.

A rule finds places: pairs of terms, old and new, that are equal for all inputs. It has a condition on sizes and
attributes, which is the code that finds, and a maker of random examples, on which the verifier (`verifier.py`) holds
old and new against each other in float64. What fails there is not used.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from foretrace.plan.rewrite.shapes import UnfitError
from foretrace.plan.rewrite.term import Term
from foretrace.plan.rewrite.terms import Graph, Terms

Pairs = tuple[tuple[Term, Term], ...]


@dataclass(frozen=True, slots=True, eq=False)
class RuleMatch:
    """Where a rule fits: what replaces what, and the operators that it looked at."""

    pairs: Pairs
    looked_at: tuple[Term, ...]


class GraphView:
    """A graph with what rules ask of it."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.terms = graph.terms
        self.order = graph.order()
        self._inside = frozenset(self.order)
        self._outputs = frozenset(graph.outputs)

    @cached_property
    def users(self) -> dict[Term, list[Term]]:
        """Operators that read each term."""
        return self.graph.users()

    @cached_property
    def _by_op(self) -> dict[str, list[Term]]:
        found: dict[str, list[Term]] = {}
        for term in self.order:
            found.setdefault(term.op, []).append(term)
        return found

    def of(self, *ops: str) -> list[Term]:
        """Return operators of these kinds that run, in order."""
        found = [each for op in ops for each in self._by_op.get(op, ())]
        return found if len(ops) == 1 else sorted(found, key=lambda each: each.number)

    def runs(self, term: Term, *ops: str) -> bool:
        """Return whether a term is an operator of this graph that runs (no leaf, no constant), of one of
        these kinds.
        """
        return term in self._inside and (not ops or term.op in ops)

    def alone(self, term: Term) -> bool:
        """Return whether one operator reads it, and nobody outside."""
        return term not in self._outputs and len(self.users.get(term, ())) == 1

    def private(self, term: Term, *ops: str) -> bool:
        """Return whether it is an operator of one of these kinds that can vanish with its only reader."""
        return self.runs(term, *ops) and self.alone(term)


Find = Callable[[GraphView], Iterable[RuleMatch]]
Sample = Callable[["Maker"], Graph]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rewrite."""

    name: str
    what: str  # one line
    source: str  # paper or tool that has it, "" if ours
    find: Find
    sample: Sample
    always: bool = False  # removes work wherever it fits, so it is applied before any search
    both: Callable[[Maker], tuple[Graph, Graph]] | None = None  # old and new, made without looking for a place

    def places(self, view: GraphView) -> Iterator[RuleMatch]:
        """Yield where it fits, in the order of the graph. A place whose sizes do not fit after all is left out."""
        found = iter(self.find(view))
        while True:
            try:
                place = next(found)
            except StopIteration:
                return
            except UnfitError:  # a generator that raised is over
                return
            if all(old is not new for old, new in place.pairs):
                yield place


@dataclass
class Maker:
    """Makes random graphs for the verifier: leaves with random small sizes."""

    terms: Terms
    draw: random.Random
    count: int = 0
    leaves: list[Term] = field(default_factory=list)

    def pick(self, *choices: Any) -> Any:
        """Return one of these."""
        return self.draw.choice(choices)

    def size(self, low: int = 1, high: int = 6) -> int:
        """Return a random size."""
        return self.draw.randint(low, high)

    def input(self, *dims: int) -> Term:
        """Return a value that differs in every run."""
        return self._leaf("input", dims, constant=False)

    def weight(self, *dims: int) -> Term:
        """Return a value of the model."""
        return self._leaf("weight", dims, constant=True)

    def _leaf(self, kind: str, dims: Sequence[int], *, constant: bool) -> Term:
        self.count += 1
        found = self.terms.leaf(f"{kind}{self.count}", dims, dtype="float64", constant=constant)
        self.leaves.append(found)
        return found

    def image(self, channels: int | None = None, low: int = 3) -> Term:
        """Return a batch of images."""
        return self.input(self.size(1, 2), channels or self.size(), self.size(low, 8), self.size(low, 8))

    def conv(
        self, x: Term, *, out: int | None = None, kernel: tuple[int, int] | None = None, groups: int = 1,
        stride: tuple[int, int] | None = None, padding: tuple[int, int] | None = None, bias: bool | None = None,
        act: str | None = None, same: bool = False, dilation: int = 1,
    ) -> Term:  # fmt: skip
        """Return a convolution that fits, whatever is not given drawn at random."""
        rows, columns = kernel or (self.pick(1, 3), self.pick(1, 3, 3))
        reach = tuple(dilation * (k - 1) // 2 for k in (rows, columns))
        if same:
            padding, stride = (reach[0], reach[1]), (1, 1)
        padding = padding or (self.pick(reach[0], reach[0] + 1), self.pick(reach[1], reach[1] + 1))
        stride = stride or self.pick((1, 1), (2, 2), (1, 2))
        channels = out or groups * self.size(1, 4)
        w = self.weight(channels, x.dims[1] // groups, rows, columns)
        with_bias = self.pick(True, False) if bias is None else bias
        inputs = (x, w, self.weight(channels)) if with_bias else (x, w)
        return self.terms.make(
            "conv2d", inputs, stride=stride, padding=padding, dilation=(dilation, dilation), groups=groups,
            bias=with_bias, added=False, act=self.pick("", "relu") if act is None else act,
        )  # fmt: skip

    def linear(self, x: Term, out: int | None = None, *, bias: bool | None = None, act: str = "") -> Term:
        """Return a linear layer."""
        n = out or self.size()
        with_bias = self.pick(True, False) if bias is None else bias
        w = self.weight(n, x.dims[-1])
        inputs = (x, w, self.weight(n)) if with_bias else (x, w)
        return self.terms.make("linear", inputs, bias=with_bias, added=False, act=act)

    def graph(self, *outputs: Term) -> Graph:
        """Return the graph of these values."""
        return Graph(self.terms, outputs)


def parts(term: Term) -> tuple[Term, Term, Term | None, Term | None]:
    """Return (x, w, bias, addend) of a convolution or linear layer."""
    rest = list(term.inputs[2:])
    bias = rest.pop(0) if term["bias"] else None
    return term.inputs[0], term.inputs[1], bias, rest.pop(0) if term["added"] else None


def remade(
    terms: Terms, term: Term, x: Term, w: Term, bias: Term | None, added: Term | None = None, **changes: Any
) -> Term:
    """Return a convolution or linear layer like this one with other inputs and some other attributes."""
    inputs = tuple(each for each in (x, w, bias, added) if each is not None)
    settings = {**term.lookup, "bias": bias is not None, "added": added is not None, **changes}
    return terms.make(term.op, inputs, **settings)


def column(terms: Terms, vector: Term, rank: int) -> Term:
    """Return a vector over the first dimension of something of this rank."""
    return terms.make("reshape", (vector,), dims=(vector.dims[0], *(1,) * (rank - 1)))
