"""Tensors from nothing: constants, ranges, uninitialised storage."""

from __future__ import annotations

from typing import Any

from ..ir.dtypes import DType
from ..ir.expr import Expr, Index, literal, pointwise
from ..ir.poly import Poly
from .context import Context
from .registry import lowers
from .values import own_point


@lowers("full full_like fill.Scalar/Tensor scalar_tensor")
def full(ctx: Context, *args: Any, **options: Any) -> Expr:
    """The value is the last argument; before it is a size or a tensor, if anything."""
    return ctx.stored(args[-1])


@lowers("empty.memory_format empty_like empty_strided empty_permuted new_empty new_empty_strided")
def empty(ctx: Context, *args: Any, **options: Any) -> Expr:
    # Uninitialised memory may hold anything; a constant is never worth a load.
    return literal(0, ctx.out.dtype)


@lowers("arange.start_step")
def arange(ctx: Context, start: float | int | Poly, end: Any, step: float | int | Poly = 1, **options: Any) -> Expr:
    (at,) = own_point(ctx.out.shape)
    if ctx.out.dtype.is_integer:  # eager truncates both before it steps
        start, step = (int(v) if isinstance(v, float) else v for v in (start, step))
    if isinstance(start, int | Poly) and isinstance(step, int | Poly):
        return Index(Poly.of(start) + at * step)
    # Eager steps in float64 and rounds once.
    return ctx.read(start, DType.F64) + ctx.convert(Index(at), DType.F64) * ctx.read(step, DType.F64)


lowers("prims.iota.default")(lambda ctx, length, *, start, step, **options: arange(ctx, start, None, step))


@lowers("eye.default/m")
def eye(ctx: Context, *sizes: Any, **options: Any) -> Expr:
    row, column = own_point(ctx.out.shape)
    return pointwise("eq", Index(row), Index(column))
