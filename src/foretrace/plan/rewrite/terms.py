"""`Terms`: where every distinct value of a functional graph exists once; `Graph`: the values that are wanted.

    terms = Terms()
    x = terms.leaf("x", (1, 8, 14, 14))
    w = terms.leaf("w", (16, 8, 3, 3), constant=True)
    y = terms.make("relu", (terms.make("conv2d", (x, w), stride=(1, 1), padding=(1, 1), ...),))

Equal operators on equal inputs are the same object, so a graph is the tuple of its outputs, two graphs are the same
where their outputs are, and common subexpressions are found by themselves. A term is *constant* where it follows from
weights alone: it is computed once, when the rewritten model is made, and costs nothing in a run. Numbers rise along
every edge, so sorting by them is a topological order.

`make` keeps a normal form: views of views, a slice of a concatenation, slices concatenated again and permutations of
permutations are cancelled at once. These cancellations are rules like others and verified like them (`normal.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from foretrace.plan.rewrite import normal, shapes
from foretrace.plan.rewrite.term import Dims, Term

COMMUTATIVE = ("add", "mul")


class Terms:
    """All values of one session, each once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Term] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def leaf(
        self, name: str, dims: Iterable[int], *, dtype: str = "float32", constant: bool = False,
        strides: Dims | None = None,
    ) -> Term:  # fmt: skip
        """Return a value from outside: an input, or a weight (`constant`). The same name is the same value."""
        shape = tuple(dims)
        return self._intern("leaf", (), {"name": name}, shape, strides or shapes.contiguous(shape), dtype, constant)

    def make(self, op: str, inputs: Sequence[Term], **attributes: Any) -> Term:
        """Return the value of a known operator, in normal form. Raises `shapes.UnfitError` where the inputs do not fit
        it.
        """
        if op in COMMUTATIVE and len(inputs) == 2 and inputs[0].number > inputs[1].number:
            inputs = (inputs[1], inputs[0])
        simpler = normal.simplified(self.make, op, inputs, attributes)
        if simpler is not None:
            return simpler
        key = (op, tuple(each.number for each in inputs), *sorted(attributes.items()))
        found = self._known.get(key)
        if found is not None:
            return found
        dims, strides = shapes.infer(op, inputs, attributes)
        constant = all(each.constant for each in inputs)
        dtype = inputs[0].dtype if inputs else attributes.get("dtype", "float32")
        return self._intern(op, tuple(inputs), attributes, dims, strides, dtype, constant)

    def opaque(
        self, op: str, inputs: Sequence[Term], attributes: dict[str, Any], dims: Dims, strides: Dims, dtype: str
    ) -> Term:
        """Return the value of an operator that only PyTorch knows; its sizes come from the capture."""
        constant = bool(inputs) and all(each.constant for each in inputs)
        return self._intern(op, tuple(inputs), attributes, dims, strides, dtype, constant)

    def again(self, term: Term, inputs: Sequence[Term]) -> Term:
        """Return the same operator on other inputs of the same sizes."""
        if all(a is b for a, b in zip(term.inputs, inputs, strict=True)):
            return term
        if term.op in shapes.KNOWN:
            return self.make(term.op, inputs, **term.lookup)
        return self.opaque(term.op, inputs, term.lookup, term.dims, term.strides, term.dtype)

    def _intern(
        self, op: str, inputs: tuple[Term, ...], attributes: dict[str, Any], dims: Dims, strides: Dims, dtype: str,
        constant: bool,
    ) -> Term:  # fmt: skip
        ordered = tuple(sorted(attributes.items()))
        key = (op, tuple(each.number for each in inputs), *ordered)
        found = self._known.get(key)
        if found is None:
            found = Term(
                op=op, inputs=inputs, attributes=ordered, dims=dims, strides=strides, dtype=dtype, constant=constant,
                number=self._count, lookup=dict(ordered),
            )  # fmt: skip
            self._known[key] = found
            self._count += 1
        if found.dims != dims:
            raise ValueError(f"{op} exists with the sizes {found.dims}, not {dims}")  # a leaf named twice
        return found


@dataclass(frozen=True, eq=False)
class Graph:
    """Values that are wanted. `leaves` are terms taken as given although more is known of them (a part of a graph)."""

    terms: Terms
    outputs: tuple[Term, ...]
    leaves: frozenset[Term] = frozenset()

    @property
    def key(self) -> tuple[int, ...]:
        """Same key, same graph (among those of one `Terms`)."""
        return tuple(each.number for each in self.outputs)

    def order(self, *, constants: bool = False) -> list[Term]:
        """Return operators that run, inputs before users; with `constants` also what is computed once. No leaves."""
        seen: set[Term] = set()
        stack = list(self.outputs)
        while stack:
            term = stack.pop()
            if term in seen or term.op == "leaf" or term in self.leaves or (term.constant and not constants):
                continue
            seen.add(term)
            stack += term.inputs
        return sorted(seen, key=lambda each: each.number)

    def given(self) -> list[Term]:
        """Return leaves that the operators of `order` read, constants included; in order of their numbers."""
        found = {each for term in self.order() for each in term.inputs if self._is_given(each)}
        return sorted(found | {each for each in self.outputs if self._is_given(each)}, key=lambda each: each.number)

    def _is_given(self, term: Term) -> bool:
        return term.op == "leaf" or term in self.leaves or term.constant

    def replaced(self, pairs: Iterable[tuple[Term, Term]]) -> Graph | None:
        """Return the graph with every first term of a pair replaced by the second; None where that would need
        itself.
        """
        table = dict(pairs)
        old = list(table)
        for term in self.order():
            if term not in table and any(each in table for each in term.inputs):
                table[term] = self.terms.again(term, [table.get(each, each) for each in term.inputs])
        found = Graph(self.terms, tuple(table.get(each, each) for each in self.outputs), self.leaves)
        left = set(found.order())
        return None if any(each in left for each in old) else found

    def users(self) -> dict[Term, list[Term]]:
        """Return operators that read each term; a term read twice by one operator has it once."""
        found: dict[Term, list[Term]] = {}
        for term in self.order():
            for each in dict.fromkeys(term.inputs):
                found.setdefault(each, []).append(term)
        return found
