"""ATen operators of an exported graph as terms: those that rules know by their meaning, all others as they are."""

from __future__ import annotations

from typing import Any

from foretrace.errors import ForetraceError
from foretrace.plan.rewrite.ops import In
from foretrace.plan.rewrite.term import Term
from foretrace.plan.rewrite.terms import Terms

_SAME = ("clone", "detach", "alias", "contiguous", "dropout", "lift_fresh_copy", "lift", "detach_copy")
_CHECKS = ("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range_for_size")
_RESHAPES = ("view", "_unsafe_view", "reshape", "flatten", "unsqueeze", "squeeze", "unflatten", "_reshape_copy")
_UNARY = ("relu", "sigmoid", "tanh", "silu", "neg")
Unread = tuple[Any, ...]


class NodeReader:
    """What each node of an exported graph is as a term."""

    def __init__(self, terms: Terms, name: str) -> None:
        self.terms, self.name = terms, name
        self.made: dict[Any, Any] = {}  # node -> Term, or a list of terms
        self.unread: dict[Any, Unread] = {}  # nodes with several results that only PyTorch knows

    def term(self, node: Any) -> Term:
        """Return the value of a node. Raises ForetraceError where it is none that a graph could hold."""
        found = self.made.get(node)
        if not isinstance(found, Term):
            raise ForetraceError(
                f"{self.name} uses {node.target} in a way that is not understood; leave this operator out of the part "
                "that is rewritten."
            )
        return found

    def leaf(self, node: Any, *, constant: bool, label: str) -> Term | None:
        """Return an input or a weight; None where it is no tensor."""
        import torch

        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return None
        found = self.terms.leaf(
            label, tuple(value.shape), dtype=dtype_name(value), constant=constant, strides=tuple(value.stride())
        )
        self.made[node] = found
        return found

    def call(self, node: Any) -> None:
        """Read one call."""
        import operator

        if node.target is operator.getitem:
            source, at = node.args
            if source in self.unread:
                self.made[node] = self._opaque(node, *self.unread[source], out=at)
            else:
                self.made[node] = self.made[source][at]
            return
        target = node.target
        base = target._schema.name.removeprefix("aten::") if hasattr(target, "_schema") else str(target)
        if base in _CHECKS:
            return
        self._refuse(node, base)
        found = self._known(node, base, list(node.args), dict(node.kwargs))
        if found is not None:
            self.made[node] = found
        elif isinstance(node.meta.get("val"), (tuple, list)):
            self.unread[node] = (target, node.args, node.kwargs)
        else:
            self.made[node] = self._opaque(node, target, node.args, node.kwargs, out=None)

    def _refuse(self, node: Any, base: str) -> None:
        import torch

        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            raise ForetraceError(
                f"{self.name} uses {base}, a step that depends on data; make its path static or rewrite the part "
                "without it."
            )
        if torch.Tag.nondeterministic_seeded in target.tags and base not in _SAME and not _fixed(node):
            raise ForetraceError(
                f"{self.name} draws random numbers ({base}), so no rewritten model could be held against it; take the "
                "sampling out of forward()."
            )
        if target._schema.is_mutable:
            raise ForetraceError(f"{self.name} changes a tensor in place ({base}); use {base.rstrip('_')} instead.")

    def _known(self, node: Any, base: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Return the term of an operator that rules know; None for any other."""
        import torch

        make = self.terms.make
        x = self.made.get(args[0]) if args and hasattr(args[0], "op") else None
        value = node.meta.get("val")
        if base in ("cat", "concat"):
            parts = [each for each in map(self.made.get, args[0]) if isinstance(each, Term)]
            kind = (value.dim(), dtype_name(value))
            if len(parts) == len(args[0]) and all((each.rank, each.dtype) == kind for each in parts):
                return make("concat", parts, axis=(args[1] if len(args) > 1 else kwargs.get("dim", 0)) % value.dim())
            return None
        if not isinstance(x, Term):
            return None
        if base in _SAME:
            return x
        if isinstance(value, torch.Tensor) and dtype_name(value) != x.dtype:
            return None
        if base in _RESHAPES:
            return make("reshape", (x,), dims=tuple(value.shape))
        if base in ("permute", "transpose", "t", "numpy_T"):
            return make("permute", (x,), order=_order(base, args, x.rank))
        if base == "slice":
            return self._slice(x, value, args, kwargs)
        if base in ("split", "split_with_sizes", "chunk"):
            axis = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % x.rank
            return self._pieces(x, axis, [int(each.shape[axis]) for each in value])
        if x.dtype not in ("float32", "float64", "float16", "bfloat16"):
            return None
        return self._arithmetic(base, x, args, kwargs)

    def _slice(self, x: Term, value: Any, args: list[Any], kwargs: dict[str, Any]) -> Term | None:
        axis, start, _, step = _with(args[1:], 0, 0, None, 1)
        axis, step = kwargs.get("dim", axis) % x.rank, kwargs.get("step", step)
        begin = kwargs.get("start", start) or 0
        if step != 1:
            return None
        begin = max(begin + x.dims[axis], 0) if begin < 0 else begin
        length = int(value.shape[axis])
        return self.terms.make("slice", (x,), axis=axis, start=begin, length=length) if length else None

    def _pieces(self, x: Term, axis: int, lengths: list[int]) -> list[Term]:
        found, start = [], 0
        for length in lengths:
            found.append(self.terms.make("slice", (x,), axis=axis, start=start, length=length))
            start += length
        return found

    def _arithmetic(self, base: str, x: Term, args: list[Any], kwargs: dict[str, Any]) -> Any:
        make = self.terms.make
        others = [self.made.get(each) if hasattr(each, "op") else each for each in args[1:]]
        second = others[0] if others else None
        if base in _UNARY:
            return make(base, (x,))
        if base == "gelu":
            return make("gelu", (x,), approximate=kwargs.get("approximate", "none"))
        if base in ("hardtanh", "relu6"):
            low, high = _with(others, -1.0, 1.0) if base == "hardtanh" else [0.0, 6.0]
            return make("hardtanh", (x,), low=float(low), high=float(high))
        if base in ("add", "mul") and kwargs.get("alpha", 1) == 1:
            if isinstance(second, Term):
                return make(base, (x, second)) if second.dtype == x.dtype else None
            if isinstance(second, (int, float)) and not isinstance(second, bool):
                return make(f"{base}_scalar", (x,), value=float(second))
        if base == "div" and isinstance(second, (int, float)) and second and "rounding_mode" not in kwargs:
            return make("mul_scalar", (x,), value=1.0 / float(second))
        if base in ("matmul", "mm", "bmm") and isinstance(second, Term) and x.rank >= 2 and second.rank >= 2:
            return make("matmul", (x, second))
        if base == "linear" and isinstance(second, Term) and second.rank == 2:
            bias = others[1] if len(others) > 1 else None
            return make("linear", _given(x, second, bias), bias=bias is not None, added=False, act="")
        if base == "addmm" and not kwargs and isinstance(others[0], Term) and isinstance(others[1], Term):
            left, right = others[0], others[1]
            if x.dims == (right.dims[1],):
                weight = make("permute", (right,), order=(1, 0))
                return make("linear", (left, weight, x), bias=True, added=False, act="")
        return self._images(base, x, others)

    def _images(self, base: str, x: Term, others: list[Any]) -> Any:
        make = self.terms.make
        if x.rank != 4:
            return None
        if base == "conv2d" and isinstance(others[0], Term):
            w, bias, stride, padding, dilation, groups = _with(others, None, None, 1, 0, 1, 1)
            if isinstance(padding, str):
                return None
            return make(
                "conv2d", _given(x, w, bias), stride=_pair(stride), padding=_pair(padding), dilation=_pair(dilation),
                groups=groups, bias=bias is not None, added=False, act="",
            )  # fmt: skip
        if base == "_native_batch_norm_legit_no_training" and all(isinstance(each, Term) for each in others[:4]):
            return [make("batch_norm", (x, *others[:4]), eps=float(others[5])), None, None]
        if base == "batch_norm" and all(isinstance(each, Term) for each in others[:4]) and not others[4]:
            return make("batch_norm", (x, *others[:4]), eps=float(others[6]))
        if base == "avg_pool2d":
            kernel, stride, padding, ceil, counted, divisor = _with(others, 1, [], 0, False, True, None)
            if divisor is None:
                return make(
                    "avg_pool", (x,), kernel=_pair(kernel), stride=_pair(stride or kernel), padding=_pair(padding),
                    ceil=bool(ceil), count_padding=bool(counted),
                )  # fmt: skip
        if base == "max_pool2d":
            kernel, stride, padding, dilation, ceil = _with(others, 1, [], 0, 1, False)
            if _pair(dilation) == (1, 1):
                return make(
                    "max_pool", (x,), kernel=_pair(kernel), stride=_pair(stride or kernel), padding=_pair(padding),
                    ceil=bool(ceil),
                )  # fmt: skip
        return None

    def _opaque(self, node: Any, target: Any, args: Any, kwargs: Any, *, out: int | None) -> Term:
        inputs: list[Term] = []

        def stored(value: Any) -> Any:
            if hasattr(value, "op") and hasattr(value, "graph"):
                inputs.append(self.term(value))
                return In(len(inputs) - 1)
            if isinstance(value, (list, tuple)):
                return tuple(stored(each) for each in value)
            return value

        kept = stored(args)
        named = tuple((key, stored(each)) for key, each in sorted(kwargs.items()))
        value = node.meta["val"]
        if not hasattr(value, "shape"):
            raise ForetraceError(
                f"{self.name} has an operator whose sizes depend on the data ({target}); make them fixed (masks, topk, "
                "torch.where)."
            )
        attributes = {"target": target, "args": kept, "kwargs": named, "out": out}
        name = target._schema.name.replace("::", ".")
        return self.terms.opaque(name, inputs, attributes, tuple(value.shape), tuple(value.stride()), dtype_name(value))


def dtype_name(value: Any) -> str:
    """Return the type of a tensor as "float32"."""
    return str(value.dtype).removeprefix("torch.")


def _fixed(node: Any) -> bool:
    """Return whether an operator that may draw random numbers does not here: no dropout, or not in training."""
    given = {each.name: each.default_value for each in node.target._schema.arguments if each.has_default_value()}
    given |= dict(zip((each.name for each in node.target._schema.arguments), node.args, strict=False))
    given |= node.kwargs
    if "train" in given:  # recurrent layers
        return not given["train"] or not given.get("dropout")
    return "dropout_p" in given and not given["dropout_p"]


def _order(base: str, args: list[Any], rank: int) -> tuple[int, ...]:
    order = list(range(rank))
    if base == "permute":
        return tuple(i % rank for i in args[1])
    if base == "transpose":
        i, j = args[1] % rank, args[2] % rank
        order[i], order[j] = j, i
        return tuple(order)
    return tuple(reversed(order))


def _pair(value: Any) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    return (value[0], value[0]) if len(value) == 1 else (value[0], value[1])


def _with(given: list[Any], *defaults: Any) -> list[Any]:
    """Return arguments with the defaults of those that are not given."""
    return [*given, *defaults[len(given) :]]


def _given(*values: Any) -> tuple[Term, ...]:
    return tuple(each for each in values if isinstance(each, Term))
