"""Many int64 side by side as one value of a compiled loop: what LLVM is not left to find by itself.

It finds vectors in a loop over variants, but tests for overlaps and finishes remainders per task, and converts floats
to integers one by one where the processor has AVX2 and no more. `offset` counts elements from the beginning of a
contiguous array of any dimensions, and is not checked.
"""

# numba types neither its extensions nor what they are handed.
# mypy: disable-error-code="no-untyped-call,misc,import-untyped,untyped-decorator"

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.registry import cpu_target
from numba.extending import intrinsic, models, register_model

_features = cpu_target.target_context.codegen()._tm_features
LANES = 32 if "+avx512f" in _features else 16  # four registers of 512 or 256 bits, eight of 128
COMPILED = not numba.config.DISABLE_JIT  # type: ignore[attr-defined]  # plain Python has no such values
_LONGS, _DOUBLES = ir.VectorType(ir.IntType(64), LANES), ir.VectorType(ir.DoubleType(), LANES)
# Adding it to |x| < LARGEST leaves no bits behind the point: the sum is x rounded to the nearest integer, halves to
# even, in the low bits of its mantissa.
_ROUNDS = 1.5 * 2.0**52
LARGEST = 2.0**51
# A time of t ns is the int64 ZERO + t. Its bits are those of a positive float64, and later ones are larger: floats are
# compared in one instruction where int64 take four, with AVX2 and no more. That holds from NO_RELEASE and any lag to
# 138 years: releases and durations of a sound graph that reach to LATEST, with its delays and lags, stay well below.
ZERO = int(np.float64(_ROUNDS).view(np.int64))
LATEST = 1 << 59


class _Many(types.Type):
    def __init__(self) -> None:
        super().__init__(name="foretrace.simulate.Many")


MANY = _Many()


@register_model(_Many)
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


def _latest(builder: Any, a: Any, b: Any) -> Any:
    name, kind = f"llvm.maxnum.v{LANES}f64", ir.FunctionType(_DOUBLES, [_DOUBLES, _DOUBLES])
    maximum = cgutils.get_or_insert_function(builder.module, kind, name)
    pair = builder.bitcast(a, _DOUBLES), builder.bitcast(b, _DOUBLES)
    return builder.bitcast(builder.call(maximum, pair, fastmath=("nnan", "nsz")), _LONGS)


@intrinsic
def add(_: Any, a: Any, b: Any) -> Any:
    """Return the sums."""
    return MANY(MANY, MANY), lambda _context, builder, _signature, args: builder.add(*args)


@intrinsic
def latest(_: Any, a: Any, b: Any) -> Any:
    """Return the later of two times."""
    return MANY(MANY, MANY), lambda _context, builder, _signature, args: _latest(builder, *args)


@intrinsic
def less(_: Any, a: Any, b: Any, where: Any) -> Any:
    """Return a - b where all bits are set, and a where none is."""

    def made(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.sub(args[0], builder.and_(args[1], args[2]))

    return MANY(MANY, MANY, MANY), made


@intrinsic
def spread(_: Any, value: Any) -> Any:
    """Return the same int64 in all lanes."""
    return MANY(types.int64), lambda _context, builder, _signature, args: _spread(builder, args[0], _LONGS)


@intrinsic
def load(_: Any, array: Any, offset: Any) -> Any:
    """Return LANES elements of an int64 array."""

    def made(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_at(context, builder, _LONGS, signature.args[0], *args), align=8)

    return MANY(array, types.int64), made


@intrinsic
def store(_: Any, array: Any, offset: Any, value: Any) -> Any:
    """Write LANES elements of an int64 array."""

    def made(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], _at(context, builder, _LONGS, signature.args[0], *args[:2]), align=8)
        return context.get_dummy_value()

    return types.void(array, types.int64, MANY), made


@intrinsic
def scaled(_: Any, length: Any, factors: Any, offset: Any) -> Any:
    """Return a float64 times LANES elements of an array as integers, halves to even; below LARGEST each."""

    def made(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        factor = builder.load(_at(context, builder, _DOUBLES, signature.args[1], *args[1:]), align=8)
        product = builder.fmul(_spread(builder, args[0], _DOUBLES), factor)
        shifted = builder.fadd(product, ir.Constant(_DOUBLES, [_ROUNDS] * LANES))
        return builder.sub(builder.bitcast(shifted, _LONGS), ir.Constant(_LONGS, [ZERO] * LANES))

    return MANY(types.float64, factors, types.int64), made
