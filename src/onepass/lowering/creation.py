"""Tensors from nothing: constants, ranges, uninitialised storage."""

from __future__ import annotations

from typing import Any

import torch

from ..ir.dtypes import DType
from ..ir.expr import Index, pointwise
from ..ir.poly import Poly
from .context import Context
from .promotion import literal
from .registry import lowers
from .values import Ref, own_point

aten = torch.ops.aten
prims = torch.ops.prims


@lowers(aten.full.default, aten.full_like.default, aten.fill.Scalar, aten.fill.Tensor, aten.scalar_tensor.default)
def full(ctx: Context, *args: Any, **options: Any) -> Ref:
    """The value is the last argument; before it is a size or a tensor, if anything."""
    return ctx.define(ctx.stored(args[-1], ctx.out.dtype))


@lowers(
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.empty_permuted.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
)
def empty(ctx: Context, *args: Any, **options: Any) -> Ref:
    # Uninitialised memory may hold anything; a constant is never worth a load.
    return ctx.define(literal(0, ctx.out.dtype))


@lowers(aten.arange.start_step)
def arange(ctx: Context, start: float | int | Poly, end: Any, step: float | int | Poly = 1, **options: Any) -> Ref:
    (at,) = own_point(ctx.out.shape)
    if ctx.out.dtype.is_integer:  # eager truncates both before it steps
        start, step = (int(v) if isinstance(v, float) else v for v in (start, step))
    if isinstance(start, int | Poly) and isinstance(step, int | Poly):
        return ctx.define(ctx.convert(Index(Poly.of(start) + at * step), ctx.out.dtype))
    # Eager steps in float64 and rounds once.
    moved = pointwise("mul", ctx.convert(Index(at), DType.F64), ctx.read(step, DType.F64))
    return ctx.define(ctx.convert(pointwise("add", ctx.read(start, DType.F64), moved), ctx.out.dtype))


@lowers(prims.iota.default)
def iota(ctx: Context, length: Any, *, start: int | Poly, step: int | Poly, **options: Any) -> Ref:
    return arange(ctx, start, None, step)


@lowers(aten.eye.default, aten.eye.m)
def eye(ctx: Context, *sizes: Any, **options: Any) -> Ref:
    row, column = own_point(ctx.out.shape)
    return ctx.define(ctx.convert(pointwise("eq", Index(row), Index(column)), ctx.out.dtype))
