"""Sixteen int64 side by side as one value of a compiled loop: what LLVM is not left to find by itself.

It finds vectors in a loop over variants, but tests for overlaps and finishes remainders per task, and converts floats
to integers one by one where the processor has AVX2 and no more. `offset` counts elements from the beginning of a
contiguous array of any dimensions, and is not checked.
"""

# numba types neither its extensions nor what they are handed.
# mypy: disable-error-code="no-untyped-call,misc,import-untyped,untyped-decorator"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic, models, register_model

LANES = 16
COMPILED = not numba.config.DISABLE_JIT  # type: ignore[attr-defined]  # plain Python has no such values
_LONGS, _DOUBLES = ir.VectorType(ir.IntType(64), LANES), ir.VectorType(ir.DoubleType(), LANES)
# Adding it to |x| < LARGEST leaves no bits behind the point: the sum is x rounded to the nearest integer, halves to
# even, in the low bits of its mantissa.
_ROUNDS = 1.5 * 2.0**52
LARGEST = 2.0**51


class _Sixteen(types.Type):
    def __init__(self) -> None:
        super().__init__(name="foretrace.simulate.Sixteen")


SIXTEEN = _Sixteen()


@register_model(_Sixteen)
class _Model(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _LONGS)


def _spread(builder: Any, value: Any, kind: Any) -> Any:
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), zeros)


def _at(context: Any, builder: Any, vector: Any, kind: Any, array: Any, offset: Any) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [offset]), vector.as_pointer())


def _of_two(made: Callable[[Any, Any, Any], Any]) -> Any:
    def typed(_: Any, a: Any, b: Any) -> Any:
        return SIXTEEN(SIXTEEN, SIXTEEN), lambda _context, builder, _signature, args: made(builder, *args)

    return intrinsic(typed)


add = _of_two(lambda builder, a, b: builder.add(a, b))
both = _of_two(lambda builder, a, b: builder.and_(a, b))
larger = _of_two(lambda builder, a, b: builder.select(builder.icmp_signed(">", a, b), a, b))


@intrinsic
def spread(_: Any, value: Any) -> Any:
    """Return the same int64 sixteen times."""
    return SIXTEEN(types.int64), lambda _context, builder, _signature, args: _spread(builder, args[0], _LONGS)


@intrinsic
def load(_: Any, array: Any, offset: Any) -> Any:
    """Return sixteen elements of an int64 array."""

    def made(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_at(context, builder, _LONGS, signature.args[0], *args), align=8)

    return SIXTEEN(array, types.int64), made


@intrinsic
def store(_: Any, array: Any, offset: Any, value: Any) -> Any:
    """Write sixteen elements of an int64 array."""

    def made(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], _at(context, builder, _LONGS, signature.args[0], *args[:2]), align=8)
        return context.get_dummy_value()

    return types.void(array, types.int64, SIXTEEN), made


@intrinsic
def scaled(_: Any, length: Any, factors: Any, offset: Any) -> Any:
    """Return a float64 times sixteen of an array as integers, halves to even; below LARGEST each."""

    def made(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        factor = builder.load(_at(context, builder, _DOUBLES, signature.args[1], *args[1:]), align=8)
        product = builder.fmul(_spread(builder, args[0], _DOUBLES), factor)
        shifted = builder.fadd(product, ir.Constant(_DOUBLES, [_ROUNDS] * LANES))
        bits = int(np.float64(_ROUNDS).view(np.int64))
        return builder.sub(builder.bitcast(shifted, _LONGS), ir.Constant(_LONGS, [bits] * LANES))

    return SIXTEEN(types.float64, factors, types.int64), made
