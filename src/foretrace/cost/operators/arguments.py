"""Arguments for an operator call from what a recording says about it: tensors of the recorded sizes, types and layout.

A recording keeps sizes, types and scalar values, not contents. Contents matter where they are indices (they must be
valid) and where a call changes its input again and again (values must neither vanish nor overflow, since denormal
numbers are slow): `Values` sees to both. Of `aten::index` and `aten::index_put_` a recording does not say the indices;
they get one index per row of the first dimension.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

from foretrace.cost.operators.operator import CHANNELS_LAST, FLOATS, Operator
from foretrace.errors import ForetraceError
from foretrace.plaintext import whole_number

if TYPE_CHECKING:
    import torch

LIST = "TensorList"  # as recorded; "TensorList:c10::BFloat16" says what its tensors are, where a twin changed it
_DTYPES = {
    "float": "float32",
    "double": "float64",
    "c10::BFloat16": "bfloat16",
    "c10::Half": "float16",
    "long int": "int64",
    "long": "int64",
    "int": "int32",
    "short": "int16",
    "signed char": "int8",
    "unsigned char": "uint8",
    "bool": "bool",
    "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
}
_CODES = {"float32": 6, "float64": 7, "bfloat16": 15, "float16": 5}  # c10::ScalarType, as recorded
_CASTS = ("aten::_to_copy", "aten::to")  # their dtype argument is the type to cast to, whatever the input's
_SCALING = ("mul_", "div_", "_foreach_mul_", "_foreach_div_")  # repeated in place, they would vanish or overflow
# They write their own input and may meet any values there, however often they are called.
_RANDOM_IN_PLACE = ("copy_", "relu_", "clamp_min_", "clamp_", "index_put_", "_index_put_impl_", "fill_", "zero_",
                    "bernoulli_", "normal_", "uniform_", "hardtanh_", "leaky_relu_")  # fmt: skip
_POOL = 1 << 20  # random numbers that tensors are filled from


class UnknownCallError(ForetraceError):
    """The call cannot be made again from what the recording says; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class BoundCall:
    """One set of arguments of an operator, ready to be called."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self) -> object:
        return self.function(*self.args, **self.kwargs)

    def cloned(self) -> BoundCall:
        """Return the same call on copies of its tensors."""
        return BoundCall(
            function=self.function,
            args=tuple(_clone(each) for each in self.args),
            kwargs={key: _clone(each) for key, each in self.kwargs.items()},
        )

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        values = (*self.args, *self.kwargs.values())
        tensors = [each for value in values for each in (value if isinstance(value, list) else [value])]
        return sum(each.numel() * each.element_size() for each in tensors if hasattr(each, "element_size"))


def _clone(value: Any) -> Any:
    if isinstance(value, list):
        return [_clone(each) for each in value]
    return value.clone() if hasattr(value, "element_size") else value  # keeps the memory layout


def prepare(operator: Operator, device: str = "cpu") -> BoundCall:
    """Return the call with fresh arguments. Raises UnknownCallError with the reason."""
    from foretrace.cost.operators.consistent import completed

    operator = _dispatched(operator)
    packet = _packet(operator.name)
    overload = _overload(operator, packet)
    values = Values(operator, device)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    given = len(operator.dims)
    for i, argument in enumerate(overload._schema.arguments):
        if i >= given:
            if not argument.has_default_value() and not str(argument.type).startswith("Optional"):
                raise UnknownCallError(f"the recording does not say its argument {argument.name}")
            if argument.has_default_value() or argument.kwarg_only:
                continue
            value = None
        else:
            value = values.of(i, argument)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return BoundCall(function=overload._op, args=completed(operator.name, args, kwargs), kwargs=kwargs)


def callable_alone(operator: Operator) -> bool:
    """Return whether the call can be made again from what is known of it."""
    try:
        prepare(operator)
    except (UnknownCallError, RuntimeError, ValueError, TypeError, IndexError):
        return False
    return True


def _dispatched(operator: Operator) -> Operator:
    """Return the convolution that PyTorch runs where oneDNN has none for the 16-bit type of its twin; else the same
    call.

    Recorded in float32 a convolution is `mkldnn_convolution`; in 16 bit it is that only where oneDNN computes in it.
    """
    if operator.name != "aten::mkldnn_convolution" or not operator.types:
        return operator
    kind = operator.types[0]
    if kind not in _DTYPES or (dtype := _DTYPES[kind]) not in ("bfloat16", "float16") or _onednn_computes(dtype):
        return operator
    x, weight, bias, pad, stride, dilation, groups = range(7)
    order = (x, weight, bias, stride, pad, dilation)
    columns = (operator.dims, operator.types, operator.concrete)
    dims, types, concrete = ([column[i] for i in order] for column in columns)
    zeros = str([0] * (len(operator.dims[weight]) - 2))
    return Operator.of(
        "aten::convolution",
        [*dims, [], [], operator.dims[groups]],
        [*types, "Scalar", "ScalarList", operator.types[groups]],
        [*concrete, "False", zeros, operator.concrete[groups]],
        operator.layout,
    )


def _onednn_computes(dtype: str) -> bool:
    """Return whether PyTorch gives convolutions and products of this type to oneDNN here."""
    import torch

    short = {"bfloat16": "bf16", "float16": "fp16"}[dtype]
    return bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{short}_supported")())


def _packet(name: str) -> Any:
    import torch

    space, _, base = name.partition("::")
    if space not in ("aten", "torchvision") or not base:
        raise UnknownCallError("it is no operator that can be called alone")
    try:
        return getattr(getattr(torch.ops, space), base)
    except (AttributeError, RuntimeError):
        raise UnknownCallError(f"this PyTorch ({torch.__version__}) has no such operator") from None


@cache
def _schemas(packet: Any) -> tuple[tuple[Any, tuple[tuple[str, bool, bool], ...]], ...]:
    """Return per overload the overload itself and, of its arguments, the type, whether a default exists, whether by
    keyword only.
    """
    found = []
    for name in packet.overloads():
        overload = getattr(packet, name)
        schema = overload._schema.arguments
        found.append((overload, tuple((str(a.type), a.has_default_value(), a.kwarg_only) for a in schema)))
    return tuple(found)


def _overload(operator: Operator, packet: Any) -> Any:
    """Return the overload that fits the recorded arguments best."""
    dims, types, concrete = operator.dims, operator.types, operator.concrete
    best, best_score = None, -1.0
    for overload, schema in _schemas(packet):
        if len(schema) < len(dims):
            continue
        if any(not default and "Optional" not in kind for kind, default, _ in schema[len(dims) :]):
            continue
        scores = [_fits(kind, *each) for (kind, _, _), *each in zip(schema, dims, types, concrete, strict=False)]
        if 0.0 in scores:
            continue
        score = sum(scores) - 0.1 * (len(schema) - len(dims)) + (0.05 if overload._overloadname == "default" else 0.0)
        if score > best_score:
            best, best_score = overload, score
    if best is None:
        raise UnknownCallError("no overload of it takes the recorded arguments")
    return best


def _fits(kind: str, dims: Any, found: str, concrete: str) -> float:
    """Return how well a recorded argument fits a type of the schema: 0 not at all, 1 exactly."""
    optional, kind = kind.startswith("Optional["), kind.removeprefix("Optional[").removesuffix("]" * kind.count("["))
    if found == "":
        return 1.0 if optional or kind in ("str", "List[Optional[Tensor", "Generator", "Device") else 0.3
    if found.startswith(LIST):
        return 1.0 if kind.startswith(("List[Tensor", "List[Optional[Tensor")) else 0.0
    if found == "ScalarList":
        return 1.0 if kind.startswith(("List[int", "List[float", "List[bool", "List[number")) else 0.0
    if found == "Scalar":
        if kind in ("Tensor",) or kind.startswith("List"):
            return 0.2 if kind in ("List[int", "List[float") else 0.0  # int[1] takes a number
        if kind == "bool":
            return 1.0 if concrete in ("True", "False", "") else 0.0
        if kind == "int":
            return 0.9 if whole_number(concrete) is not None or not concrete else 0.0
        return 0.9
    if found in _DTYPES:
        return 1.0 if kind == "Tensor" else 0.5 if kind in ("number", "float", "int") and dims == [] else 0.0
    return 0.5


class Values:
    """What the arguments of one call hold."""

    def __init__(self, operator: Operator, device: str) -> None:
        self.operator, self.device = operator, device
        self.base = operator.name.partition("::")[2]
        self.dims, self.types, self.concrete = operator.dims, operator.types, operator.concrete
        self.in_place = self.base.endswith("_")
        self.floating = next((t for t in self.types if t in FLOATS), "")

    def of(self, i: int, argument: Any) -> Any:
        """Return the value of argument `i`."""
        kind, found, dims = str(argument.type), self.types[i], self.dims[i]
        if found.startswith(LIST):
            element = found.partition(":")[2] or ("long int" if "indices" in argument.name else "float")
            name = "" if element == "long int" else argument.name
            return [self.tensor(name, each, element) for each in dims]
        if "Tensor" in kind and found in _DTYPES:
            return self.tensor(argument.name, dims, found)
        if found == "" or found in ("Scalar", "ScalarList"):
            return self._plain(i, argument, kind)
        if found in _DTYPES and kind in ("number", "float", "int", "Optional[number]"):
            return 1
        raise UnknownCallError(f"its argument {argument.name} is of the type {found!r}")

    def tensor(self, name: str, dims: list[int], found: str) -> torch.Tensor:
        """Return a tensor of these sizes and this recorded type, with values that suit the argument of this name."""
        import torch

        if found not in _DTYPES or any(not isinstance(n, int) for n in dims):
            raise UnknownCallError(f"its argument {name} is of the type {found!r}")
        dtype: torch.dtype = getattr(torch, _DTYPES[found])
        if dtype.is_floating_point or dtype.is_complex:
            made = self._floats(name, dims, dtype)
            if len(dims) == 4 and self.operator.layout == CHANNELS_LAST:
                made = made.contiguous(memory_format=torch.channels_last)
            return made.to(self.device)
        if dtype == torch.bool:
            count = prod(dims)
            drawn = _pool()[:count] > 0.5 if count <= _POOL else torch.ones(count, dtype=dtype)
            return drawn.reshape(dims).to(self.device)
        bound = self._bound(name)
        if dtype == torch.uint8 or bound is None:
            return torch.ones(dims, dtype=dtype, device=self.device)
        if name in ("offsets", "offset2bag"):  # of an embedding bag: ascending
            count = max(prod(dims), 1)
            begins = (torch.arange(count) * max(bound // count, 1)).clamp_(max=bound - 1)
            return begins.reshape(dims).to(self.device, dtype)
        return torch.randint(0, max(bound, 1), dims, dtype=dtype).to(self.device)

    def _floats(self, name: str, dims: list[int], dtype: torch.dtype) -> torch.Tensor:
        import torch

        count = prod(dims)
        if count <= 1 or (self.in_place and self.base not in _RANDOM_IN_PLACE):
            return torch.ones(dims, dtype=dtype)
        pool = _pool(dtype)
        made = torch.empty(count, dtype=dtype)
        for start in range(0, count, _POOL):
            part = made[start : start + _POOL]
            part.copy_(pool[: len(part)])
        return made.reshape(dims)

    def _bound(self, name: str) -> int | None:
        """Return exclusive upper bound of the indices in the argument of this name; None where it holds no indices."""
        base, dims = self.base, self.dims
        if base in ("embedding", "embedding_renorm_", "_embedding_bag", "_embedding_bag_forward_only", "embedding_bag"):
            if name in ("offsets", "offset2bag"):
                return prod(dims[1]) or 1
            return int(dims[0][0]) if dims[0] else None
        if base in ("embedding_dense_backward", "embedding_backward"):
            return whole_number(self._text(2))
        if base == "_embedding_bag_dense_backward":
            return whole_number(self._text(6)) if name == "indices" else 1
        if base.startswith(("nll_loss", "cross_entropy_loss")) and name == "target":
            scores = dims[1] if "backward" in base else dims[0]
            return int(scores[1] if len(scores) > 1 else scores[0])
        if base.startswith("max_pool") and name == "indices":
            return int(prod(dims[1][2:]))
        if base == "gather_backward":
            return self._along(dims[1], 2)
        if base.startswith(("index_select", "index_add", "index_copy", "index_fill", "gather", "scatter")):
            return self._along(dims[0], 1) if dims[0] else 1
        if base in ("index", "index_put_", "_index_put_impl_", "index_put", "take"):
            return int(dims[0][0]) if dims[0] else 1
        return None

    def _along(self, dims: list[int], i: int) -> int | None:
        """Return the size of the axis that argument `i` names; None where there is no such axis."""
        axis = whole_number(self._text(i)) or 0
        return int(dims[axis]) if -len(dims) <= axis < len(dims) else None

    def _text(self, i: int) -> str:
        return self.concrete[i] if i < len(self.concrete) else ""

    def _plain(self, i: int, argument: Any, kind: str) -> Any:
        """Return the value of an argument that is no tensor."""
        text = self._text(i)
        real = str(getattr(argument, "real_type", argument.type))
        if "Device" in real:
            return self.device if text or not kind.startswith("Optional") else None
        if text == "":
            return self._unsaid(i, argument, kind)
        value = parse(text)
        if "ScalarType" in real:
            return self._code(argument.name, value)
        if self.base in _SCALING and kind == "number":
            return 1.0
        if kind in ("float", "Optional[float]"):
            return float(value)
        if "List[float]" in kind and isinstance(value, list):
            return [float(each) for each in value]
        if "List[int]" in kind and not isinstance(value, list):
            return [value]
        return value

    def _unsaid(self, i: int, argument: Any, kind: str) -> Any:
        if "List[Optional[Tensor]]" in kind and "index" in self.base:
            import torch

            size = self.dims[0]
            rows = self.dims[2][0] if self.base.startswith(("index_put", "_index_put")) and self.dims[2] else size[0]
            if self.base != "index" and self.dims[2] and list(self.dims[2][1:]) != list(size[1:]):
                raise UnknownCallError("the recording does not say its indices")
            return [torch.randint(0, max(size[0], 1), (rows,)).to(self.device)]
        if argument.has_default_value():
            return argument.default_value
        if kind.startswith("Optional"):
            return None
        if kind.startswith("List"):
            return []
        raise UnknownCallError(f"the recording does not say its argument {argument.name}")

    def _code(self, name: str, value: Any) -> Any:
        """Return a dtype argument. Where a twin changed the type of the inputs, one that named the old type follows."""
        mine = _CODES.get(_DTYPES.get(self.floating, ""))
        if self.operator.name in _CASTS or mine is None or value not in _CODES.values():
            return value
        return mine


def parse(text: str) -> Any:
    """Return a scalar or list as a recording writes it: "True", "1", "1e-05", "0.", "[2, 2]", "inf"."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        pass
    try:
        return float(text)  # inf, nan
    except ValueError:
        return text


@cache
def _pool(dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return random numbers in (0, 1): positive, so that roots, logarithms and variances exist."""
    import torch

    made = torch.rand(_POOL, generator=torch.Generator().manual_seed(0)).clamp_(min=1e-3)
    return made if dtype is None else made.to(dtype)
