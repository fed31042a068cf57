"""Operators of a rewritten graph timed alone, by `foretrace.cost.operators.bench`: its sizes and strides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretrace.cost.operators.arguments import BoundCall
from foretrace.cost.operators.operator import Operator
from foretrace.plan.rewrite import ops

if TYPE_CHECKING:
    import torch

    from foretrace.plan.rewrite.term import Term

_NAME = f"{__name__}:prepare"
_waiting: dict[str, tuple[Term, str]] = {}  # by text, while they are measured


def measure(terms: dict[str, Term], failed: dict[str, str], *, target_s: float) -> dict[str, tuple[float, float, str]]:
    """(seconds with far data, with near data, way) by signature; what cannot be timed is named in `failed`."""
    from foretrace.cost.operators import bench

    asked: dict[str, list[tuple[str, Operator]]] = {}
    for text, term in terms.items():
        for way in ops.ways(term):
            operator = Operator(_NAME, f"{way} {text}")
            _waiting[operator.text] = (term, way)
            asked.setdefault(text, []).append((way, operator))
    try:
        found = bench.measure((each for pairs in asked.values() for _, each in pairs), target_s=target_s)
    finally:
        _waiting.clear()
    times: dict[str, tuple[float, float, str]] = {}
    for text, pairs in asked.items():
        best: tuple[float, float, str] | None = None
        for way, operator in pairs:
            if operator.key in found.seconds:
                far_s = found.seconds[operator.key]
                this = (far_s, min(found.seconds.get(operator.near_key, far_s), far_s), way)
                if best is None or sum(this[:2]) < sum(best[:2]):
                    best = this
            else:
                failed[terms[text].op] = found.failed.get(operator.key, "it was not timed")
        if best is not None:
            times[text] = best
    return times


def prepare(operator: Operator) -> BoundCall:
    """The call to be timed."""
    term, way = _waiting[operator.text]
    tensors = tuple(_tensor(each) for each in term.inputs)
    return _Strided(function=_compiled(term, way), args=tensors, kwargs={})


def _compiled(term: Term, way: str) -> Any:
    """The calls of a term as a function without our own overhead, as the rewritten module has them."""
    import torch
    from torch import fx

    graph = fx.Graph()
    inputs = [graph.placeholder(f"x{i}") for i in range(len(term.inputs))]
    made: list[fx.Node] = []
    for step in ops.steps(term, way):
        args, kwargs = ops.filled(step.args, inputs, made), ops.filled(dict(step.kwargs), inputs, made)
        made.append(graph.call_function(step.target, args, kwargs))
    graph.output(made[-1])
    return fx.GraphModule(torch.nn.Module(), graph).forward


@dataclass(frozen=True, kw_only=True)
class _Strided(BoundCall):
    """A call whose tensors keep their strides when it is copied, holes included."""

    def cloned(self) -> BoundCall:
        return _Strided(function=self.function, args=tuple(_copy(each) for each in self.args), kwargs=self.kwargs)


def _extent(dims: Sequence[int], strides: Sequence[int]) -> int:
    return 1 + sum((n - 1) * step for n, step in zip(dims, strides, strict=True))


def _tensor(term: Term) -> torch.Tensor:
    """Random positive numbers; zeros where integers are asked for, which are indices into anything."""
    import torch

    dtype: torch.dtype = getattr(torch, term.dtype)
    count = _extent(term.dims, term.strides) if term.size else 0
    if dtype.is_floating_point:
        base = torch.rand(count, generator=torch.Generator().manual_seed(count)).add_(0.1).to(dtype)
    else:
        base = torch.ones(count, dtype=dtype) if dtype == torch.bool else torch.zeros(count, dtype=dtype)
    return base.as_strided(term.dims, term.strides)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    base = tensor.as_strided((_extent(tensor.shape, tensor.stride()) if tensor.numel() else 0,), (1,)).clone()
    return base.as_strided(tensor.shape, tensor.stride())
