"""`emit`: a graph of terms as a `torch.fx.GraphModule`; what follows from weights alone is computed once."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretrace.files import write_bytes
from foretrace.plan.rewrite import ops
from foretrace.plan.rewrite.capture import Model, PlainValue
from foretrace.plan.rewrite.term import Term
from foretrace.plan.rewrite.terms import Graph

if TYPE_CHECKING:
    import torch
    from torch.fx import GraphModule

Way = Callable[[Term], str]


def plain(_: Term) -> str:
    """Return every operator as ATen has it."""
    return ops.PLAIN


@dataclass(frozen=True, kw_only=True, eq=False)
class Emitted:
    """A module of flat tensor inputs and results, and how to call it like the original model."""

    module: GraphModule
    model: Model

    def flat(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Return the tensors that the module takes, of the arguments that the original takes."""
        import torch
        from torch.utils import _pytree as pytree

        values = pytree.tree_leaves((args, kwargs))
        pairs = zip(values, self.model.inputs, strict=True)
        return [each for each, term in pairs if term is not None and isinstance(each, torch.Tensor)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the original would return."""
        from torch.utils import _pytree as pytree

        found = self.module(*self.flat(args, kwargs))
        values = [each.value if isinstance(each, PlainValue) else found[each] for each in self.model.results]
        return pytree.tree_unflatten(values, self.model.structure)

    def write(self, path: Path) -> None:
        """Write it as `torch.export` does (.pt2)."""
        import torch

        flat = tuple(self.flat(self.model.args, self.model.kwargs))
        buffer = io.BytesIO()
        with torch.no_grad():
            torch.export.save(torch.export.export(self.module, flat, strict=False), buffer)
        write_bytes(path, buffer.getvalue())


def emit(model: Model, graph: Graph, *, way: Way = plain, double: bool = False) -> Emitted:
    """Return the graph as a module. With `double`, in float64 throughout, as the check of equality wants it.

    Weights are folded in float64 and rounded once.
    """
    import torch
    from torch import fx, nn

    root = nn.Module()
    made = fx.Graph()
    nodes: dict[Term, fx.Node] = {}
    for i, term in enumerate(model.inputs):
        if term is not None:
            nodes[term] = made.placeholder(_name(term["name"], i))
    folded = constants(graph, model.weights, double=double)
    calls: dict[tuple[Any, ...], fx.Node] = {}

    def node_of(term: Term) -> fx.Node:
        if term not in nodes:  # a constant that is used
            name = f"weight_{term.number}"
            value = folded[term]
            if value.is_floating_point():
                root.register_parameter(name, nn.Parameter(value, requires_grad=False))
            else:
                root.register_buffer(name, value)
            nodes[term] = made.get_attr(name)
        return nodes[term]

    for term in graph.order():
        inputs = [node_of(each) for each in term.inputs]
        done: list[fx.Node] = []
        for step in ops.steps(term, way(term), double=double):
            args, kwargs = ops.filled(step.args, inputs, done), ops.filled(dict(step.kwargs), inputs, done)
            key = (step.target, repr(args), repr(kwargs), len(done) or term.number if not _shared(term) else 0)
            if key not in calls:
                calls[key] = made.call_function(step.target, args, kwargs)
            done.append(calls[key])
        nodes[term] = done[-1]
    made.output(tuple(node_of(each) for each in graph.outputs))
    made.lint()
    module = fx.GraphModule(root, made, class_name="Rewritten")
    module.eval()
    with torch.no_grad():
        module.requires_grad_(False)
    return Emitted(module=module, model=model)


def _shared(term: Term) -> bool:
    """Return whether the call of a term serves other terms, too: one call with several results."""
    return term.get("out") is not None


def constants(graph: Graph, weights: Mapping[Term, torch.Tensor], *, double: bool) -> dict[Term, torch.Tensor]:
    """Return what every constant that operators read holds: computed in float64, given in the type of the graph."""
    import torch

    needed = {each for term in graph.order() for each in term.inputs if each.constant}
    needed |= {each for each in graph.outputs if each.constant}
    inner = Graph(graph.terms, tuple(sorted(needed, key=lambda each: each.number)))
    values: dict[Term, torch.Tensor] = {}

    def wide(term: Term) -> torch.Tensor:
        value = weights[term]
        return value.double() if value.is_floating_point() else value

    with torch.no_grad():
        for term in inner.order(constants=True):
            inputs = [values[each] if each in values else wide(each) for each in term.inputs]
            values[term] = ops.compute(term, inputs, double=True)
    found = {}
    for term in needed:
        if term.op == "leaf" and not double:
            found[term] = weights[term]
            continue
        value = values[term] if term in values else wide(term)
        if value.is_floating_point():
            value = value.to(torch.float64 if double else getattr(torch, term.dtype))
        found[term] = value.contiguous()
    return found


def evaluate(graph: Graph, values: Mapping[Term, torch.Tensor], *, double: bool = True) -> list[torch.Tensor]:
    """Return the outputs from the values of leaves, operator by operator as ATen has them; constants included."""
    import torch

    known: dict[Term, torch.Tensor] = dict(values)
    with torch.no_grad():
        for term in graph.order(constants=True):
            if term not in known:
                known[term] = ops.compute(term, [known[each] for each in term.inputs], double=double)
    return [known[each] for each in graph.outputs]


def _name(label: str, i: int) -> str:
    word = "".join(each if each.isalnum() else "_" for each in label)
    return word if word.isidentifier() else f"input_{i}"
