"""How terms are computed: as a few calls of PyTorch, the same for the check in float64 and the rewritten model.

Some operators can be computed in more than one way (a convolution with its ReLU as one call of oneDNN, or as a
convolution and a ReLU in place). `ways` names them; costs decide which one a model gets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from foretrace.plan.rewrite.term import Term

PLAIN, FUSED = "aten", "onednn"


@dataclass(frozen=True, slots=True)
class In:
    """An input of the term, by position."""

    at: int


@dataclass(frozen=True, slots=True)
class Made:
    """The result of an earlier call, by position."""

    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One call; arguments may hold `In` and `Made`, also in lists."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()


def ways(term: Term) -> tuple[str, ...]:
    """Return how this term can be computed on this back end, the plain one first."""
    if term.op in ("conv2d", "linear") and term.dtype == "float32" and not term.constant:
        one_epilogue = not (term.op == "linear" and term["added"] and term["act"])
        if (term["act"] or term["added"]) and one_epilogue and _has_onednn():
            return PLAIN, FUSED
    return (PLAIN,)


@cache
def _has_onednn() -> bool:
    import torch

    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_convolution_pointwise")


def steps(term: Term, way: str = PLAIN, *, double: bool = False) -> list[Step]:
    """Return the calls that compute a term, the last one its value. With `double`, float32 in its arguments is
    float64.
    """
    if term.op in ("conv2d", "linear"):
        return _fused(term) if way == FUSED else _plain(term)
    if "target" in term.lookup:
        return _opaque(term, double=double)
    if term.op == "gelu":
        import torch

        how = (("approximate", term["approximate"]),)
        return [Step(target=torch.ops.aten.gelu.default, args=(In(0),), kwargs=how)]
    target, *rest = _call(term)
    return [Step(target=target, args=tuple(rest))]


def compute(term: Term, inputs: Sequence[torch.Tensor], way: str = PLAIN, *, double: bool = False) -> torch.Tensor:
    """Return the value of a term from those of its inputs."""
    made: list[Any] = []
    for step in steps(term, way, double=double):
        made.append(step.target(*filled(step.args, inputs, made), **filled(dict(step.kwargs), inputs, made)))
    value: torch.Tensor = made[-1]
    return value


def filled(value: Any, inputs: Sequence[Any], made: Sequence[Any]) -> Any:
    """Return arguments with what `In` and `Made` stand for."""
    if isinstance(value, In):
        return inputs[value.at]
    if isinstance(value, Made):
        return made[value.at]
    if isinstance(value, (list, tuple)):
        return type(value)(filled(each, inputs, made) for each in value)
    if isinstance(value, dict):
        return {key: filled(each, inputs, made) for key, each in value.items()}
    return value


def _plain(term: Term) -> list[Step]:
    """Return the product, then what follows it in place: nobody else sees the value between."""
    import torch

    aten = torch.ops.aten
    at = 2
    bias = In(at) if term["bias"] else None
    at += bool(term["bias"])
    if term.op == "linear":
        found = [Step(target=aten.linear.default, args=(In(0), In(1), bias))]
    else:
        sizes = (list(term["stride"]), list(term["padding"]), list(term["dilation"]), term["groups"])
        found = [Step(target=aten.conv2d.default, args=(In(0), In(1), bias, *sizes))]
    if term["added"]:
        found.append(Step(target=aten.add_.Tensor, args=(Made(len(found) - 1), In(at))))
    if term["act"] == "relu":
        found.append(Step(target=aten.relu_.default, args=(Made(len(found) - 1),)))
    elif term["act"] == "gelu":
        found.append(Step(target=aten.gelu.default, args=(Made(len(found) - 1),)))
    return found


def _fused(term: Term) -> list[Step]:
    import torch

    mkldnn = torch.ops.mkldnn
    bias = In(2) if term["bias"] else None
    added = In(2 + bool(term["bias"]))
    act = term["act"]
    if term.op == "linear":
        if term["added"]:
            return [Step(target=mkldnn._linear_pointwise.binary, args=(In(0), added, In(1), bias, "add"))]
        extra: tuple[Any, ...] = ([], "none") if act == "gelu" else ([], "")
        return [Step(target=mkldnn._linear_pointwise.default, args=(In(0), In(1), bias, act, *extra))]
    sizes = (list(term["padding"]), list(term["stride"]), list(term["dilation"]), term["groups"])
    if term["added"]:
        after: tuple[Any, ...] = (act or None, [], None)
        args = (In(0), added, In(1), bias, *sizes, "add", 1.0, *after)
        return [Step(target=mkldnn._convolution_pointwise.binary, args=args)]
    return [Step(target=mkldnn._convolution_pointwise.default, args=(In(0), In(1), bias, *sizes, act, [], ""))]


def _opaque(term: Term, *, double: bool) -> list[Step]:
    import operator

    args, kwargs = term["args"], term["kwargs"]
    if double:
        args, kwargs = _doubled(args), _doubled(kwargs)
    found = [Step(target=term["target"], args=_lists(args), kwargs=tuple((k, _lists(v)) for k, v in kwargs))]
    if term["out"] is not None:
        found.append(Step(target=operator.getitem, args=(Made(0), term["out"])))
    return found


def _lists(value: Any) -> Any:
    """Return tuples below the top as the lists that schemas want."""
    if isinstance(value, tuple):
        return tuple(list(_lists(each)) if isinstance(each, tuple) else each for each in value)
    return value


def _doubled(value: Any) -> Any:
    import torch

    if isinstance(value, tuple):
        return tuple(_doubled(each) for each in value)
    return torch.float64 if value is torch.float32 else value


def _call(term: Term) -> tuple[Any, ...]:
    """Return (target, arguments…) of a known operator that is one call."""
    import torch

    aten = torch.ops.aten
    op, a = term.op, term.lookup
    if op in ("add", "mul"):
        return getattr(aten, op).Tensor, In(0), In(1)
    if op in ("relu", "sigmoid", "tanh", "silu", "neg"):
        return getattr(aten, op).default, In(0)
    if op == "hardtanh":
        return aten.hardtanh.default, In(0), a["low"], a["high"]
    if op in ("mul_scalar", "add_scalar"):
        return getattr(aten, op[:3]).Scalar, In(0), a["value"]
    if op == "matmul":
        return aten.matmul.default, In(0), In(1)
    if op == "batch_norm":
        return aten.batch_norm.default, In(0), In(1), In(2), In(3), In(4), False, 0.1, a["eps"], True
    if op == "concat":
        return aten.cat.default, [In(i) for i in range(len(term.inputs))], a["axis"]
    if op == "slice":
        return aten.narrow.default, In(0), a["axis"], a["start"], a["length"]
    if op == "permute":
        return aten.permute.default, In(0), list(a["order"])
    if op == "reshape":
        return aten.reshape.default, In(0), list(a["dims"])
    if op == "avg_pool":
        sizes = (list(a["kernel"]), list(a["stride"]), list(a["padding"]))
        return aten.avg_pool2d.default, In(0), *sizes, a["ceil"], a["count_padding"]
    if op == "max_pool":
        sizes = (list(a["kernel"]), list(a["stride"]), list(a["padding"]))
        return aten.max_pool2d.default, In(0), *sizes, [1, 1], a["ceil"]
    return _weights(term)


def _weights(term: Term) -> tuple[Any, ...]:
    """Return what happens to weights when a model is made."""
    import torch

    aten = torch.ops.aten
    op, a = term.op, term.lookup
    if op == "pad_kernel":
        rows, columns = a["rows"], a["columns"]
        return aten.constant_pad_nd.default, In(0), [columns, columns, rows, rows]
    if op == "unit_kernel":
        return unit_kernel, a["channels"], a["rows"], a["columns"], a["dtype"]
    if op == "grouped_kernel":
        return grouped_kernel, In(0), a["groups"], a["into"]
    if op == "chain_kernel":
        return chain_kernel, In(0), In(1)
    if op == "sum_kernel":
        return sum_kernel, In(0)
    if op == "rsqrt_eps":
        return rsqrt_eps, In(0), a["eps"]
    raise KeyError(op)


def unit_kernel(channels: int, rows: int, columns: int, dtype: str) -> torch.Tensor:
    """Return the kernel of a convolution that gives its input back; rows and columns are odd."""
    import torch

    found = torch.zeros(channels, channels, rows, columns, dtype=getattr(torch, dtype))
    index = torch.arange(channels)
    found[index, index, rows // 2, columns // 2] = 1.0
    return found


def grouped_kernel(w: torch.Tensor, groups: int, into: int) -> torch.Tensor:
    """Return weights (o, c, h, w) of a convolution in `groups` groups as those of one in `into` groups, zero where
    apart.
    """
    o, c, rows, columns = w.shape
    share = groups // into
    found = w.new_zeros(into, share, o // groups, share, c, rows, columns)
    parts = w.reshape(into, share, o // groups, c, rows, columns)
    for i in range(share):
        found[:, i, :, i] = parts[:, i]
    return found.reshape(o, share * c, rows, columns)


def chain_kernel(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the kernel of a pointwise convolution with weights `first` and then one with weights `second`."""
    import torch

    return torch.einsum("omhw,mc->ochw", second, first[:, :, 0, 0])


def sum_kernel(w: torch.Tensor) -> torch.Tensor:
    """Return what a kernel makes of an image of ones, away from its borders."""
    return w.flatten(1).sum(1)


def rsqrt_eps(variance: torch.Tensor, eps: float) -> torch.Tensor:
    """Return 1 / standard deviation."""
    return (variance + eps).rsqrt()
