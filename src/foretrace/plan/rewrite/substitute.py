"""`substitute`: a whole graph rewritten: what always pays, then parts of the graph searched one by one and joined, then
the places where they meet.

Parts that are alike up to their weights (the layers of a transformer, blocks of the same sizes) are searched once: a
part is first written with numbered inputs and weights, and like parts are then the same terms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from foretrace.deadline import Deadline
from foretrace.plan.rewrite.costs import OperatorCosts
from foretrace.plan.rewrite.rules import Rule
from foretrace.plan.rewrite.search import Derivation, exhausted, search
from foretrace.plan.rewrite.split import boundary, by_level, parts
from foretrace.plan.rewrite.term import Term
from foretrace.plan.rewrite.terms import Graph

Tell = Callable[[float, float, float], None]  # share done, seconds now, seconds at the start
PART = 30  # operators of a part, as the artefact of MetaFlow has it


@dataclass(frozen=True, kw_only=True, eq=False)
class Rewriting:
    """What became of a graph. Seconds are those of the costs that the search used."""

    before: Graph
    folded: Graph  # after the rules that always pay, before any search
    after: Graph
    before_s: float
    after_s: float
    rules: tuple[str, ...]  # with repetitions
    parts: int
    alike: int  # parts that had been searched before
    steps: int
    seen: int
    complete: bool  # no part ran out of budget or time


@dataclass
class _Run:
    """The searches of one rewriting, with what they have in common."""

    rules: tuple[Rule, ...]
    costs: OperatorCosts
    alpha: float
    budget: int
    until: Deadline | None
    known: dict[tuple[int, ...], Derivation]  # what became of parts that were searched
    used: list[str]
    steps: int = 0
    seen: int = 0
    alike: int = 0
    complete: bool = True

    def improve(self, graph: Graph, inside: Sequence[Term], *, now: Graph | None = None) -> dict[Term, Term]:
        """Return old output of a set of operators -> new one, searched as a graph of its own."""
        given, wanted = boundary(graph, inside)
        part, real = abstract(graph, inside, given, wanted)
        best = self.known.get(part.key)
        if best is None:
            found = search(part, self.rules, self.costs, alpha=self.alpha, budget=self.budget, until=self.until)
            best = self.known[part.key] = found.best or Derivation(part, ())
            self.steps += found.steps
            self.seen += found.calls
            self.complete = self.complete and found.ended == "finished"
        else:
            self.alike += 1
        if not best.rules:
            return {}
        self.used += best.rules
        return dict(zip(wanted, rewritten(best.graph, real), strict=True))


def substitute(
    graph: Graph, rules: Sequence[Rule], costs: OperatorCosts, *, alpha: float = 1.05, budget: int = 60,
    until: Deadline | None = None, most: int = PART, tell: Tell | None = None,
) -> Rewriting:  # fmt: skip
    """Return the graph rewritten by these rules (verified ones) as far as the costs fall.

    Args:
        graph: what to rewrite.
        rules: verified rules.
        costs: seconds of operators.
        alpha: see `search.search`.
        budget: graphs to expand per part.
        until: when to stop with the best so far.
        most: operators of a part.
        tell: (share done, seconds now, seconds at the start), after every part.

    """
    before_s = costs.of(graph)
    run = _Run(
        rules=tuple(rules), costs=costs, alpha=alpha, budget=budget, until=until, known={}, used=[],
    )  # fmt: skip
    now = folded = _always(graph, rules, run.used)
    cut = parts(now, rules, most=most)
    total = max(2 * len(cut) - 1, 1)
    table: dict[Term, Term] = {}
    for number, inside in enumerate(cut):
        better = {} if _late(until) else run.improve(now, inside)
        for term in sorted(inside, key=lambda each: each.number):
            if term in better:
                continue
            moved = [table.get(each, each) for each in term.inputs]
            table[term] = now.terms.again(term, moved)
        for old, new in better.items():
            table[old] = moved_term(new, table, now)
        if tell is not None:
            tell((number + 1) / total, costs.of(_joined(now, table)), before_s)
    joined = _joined(now, table)
    now = joined if costs.of(joined) < costs.of(now) else now
    now = _across(now, len(cut), run, most, lambda share: tell(share, costs.of(now), before_s) if tell else None)
    return Rewriting(
        before=graph, folded=folded, after=now, before_s=before_s, after_s=costs.of(now), rules=tuple(run.used),
        parts=len(cut), alike=run.alike, steps=run.steps, seen=run.seen, complete=run.complete and not _late(until),
    )  # fmt: skip


def _late(until: Deadline | None) -> bool:
    return until is not None and until.over


def _joined(graph: Graph, table: dict[Term, Term]) -> Graph:
    """Return it with the parts done so far in the place of their old selves."""
    full = dict(table)
    for term in graph.order():
        if term not in full and any(each in full for each in term.inputs):
            full[term] = graph.terms.again(term, [full.get(each, each) for each in term.inputs])
    return Graph(graph.terms, tuple(full.get(each, each) for each in graph.outputs), graph.leaves)


def moved_term(term: Term, table: dict[Term, Term], graph: Graph) -> Term:
    """Return a new term of a part on what its inputs have become."""
    inner = Graph(graph.terms, (term,), frozenset(table))
    own: dict[Term, Term] = {}
    for each in inner.order(constants=False):
        inputs = [own.get(e) or table.get(e, e) for e in each.inputs]
        own[each] = graph.terms.again(each, inputs)
    return own.get(term) or table.get(term, term)


def _always(graph: Graph, rules: Sequence[Rule], used: list[str]) -> Graph:
    """Return rules that remove work wherever they fit, until they do not fit any more."""
    changing = True
    while changing:
        changing = False
        for rule in rules:
            if rule.always:
                graph, count = exhausted(graph, rule, most=len(graph.order()))
                used += [rule.name] * count
                changing = changing or count > 0
    return graph


def _across(graph: Graph, count: int, run: _Run, most: int, tell: Callable[[float], None]) -> Graph:
    """Search windows around the places where parts met: intervals of a topological order, so convex themselves."""
    for number in range(1, count):
        if _late(run.until):
            break
        order = by_level(graph)
        centre = round(number * len(order) / count)
        window = order[max(0, centre - most // 2) : centre + most // 2]
        pairs = run.improve(graph, window)
        changed = graph.replaced(pairs.items()) if pairs else None
        if changed is not None and run.costs.of(changed) < run.costs.of(graph):
            graph = changed
        tell((count + number) / max(2 * count - 1, 1))
    return graph


def abstract(
    graph: Graph, inside: Sequence[Term], given: Sequence[Term], wanted: Sequence[Term]
) -> tuple[Graph, dict[Term, Term]]:
    """Return a part written with numbered inputs and weights, and what these numbers stand for."""
    terms = graph.terms
    table: dict[Term, Term] = {}
    for term in given:
        kind = "weight" if term.constant else "input"
        name = f"@{kind} {len(table)} {list(term.dims)} {list(term.strides)} {term.dtype}"
        table[term] = terms.leaf(name, term.dims, dtype=term.dtype, constant=term.constant, strides=term.strides)
    real = {stand_in: term for term, stand_in in table.items()}
    for term in sorted(inside, key=lambda each: each.number):
        table[term] = terms.again(term, [table[each] for each in term.inputs])
    return Graph(terms, tuple(table[each] for each in wanted)), real


def rewritten(part: Graph, real: dict[Term, Term]) -> list[Term]:
    """Return the outputs of a part with numbered inputs and weights on the real ones."""
    table = dict(real)
    for term in part.order(constants=True):
        table[term] = part.terms.again(term, [table[each] for each in term.inputs])
    return [table[each] for each in part.outputs]
