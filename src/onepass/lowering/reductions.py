"""Reductions: one `Reduce` at the root of a definition, whatever comes before it inside.

16-bit floats accumulate in float32. What follows a reduction (the division of a mean) is a
definition of its own, so that fusion decides where it runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..ir.dtypes import DType
from ..ir.expr import Expr, Index, Part, Pointwise, Reduce, calculate, literal, pointwise, postorder
from ..ir.poly import Axis, Poly, nonnegative, product
from ..ir.program import Buffer, Define, Statement
from .context import Context
from .registry import lowers
from .values import Ref, Shape, axis, linear_position, own_point
from .views import wrap_dim

Dims = Sequence[int] | int | None


@dataclass(frozen=True, slots=True)
class Frame:
    """Where a reduction reads: the point of its input, over the result's axes and its own."""

    shape: Shape  # of the result
    point: Shape
    over: tuple[Axis, ...]
    reduced: Shape  # sizes of the reduced dimensions
    position: Poly  # row-major position within the reduced dimensions

    @property
    def count(self) -> Poly:
        return product(self.reduced)


def frame(x: Ref, dims: Dims, keepdim: bool) -> Frame:
    """The frame of a reduction over `dims`; all of them if there are none."""
    chosen = {wrap_dim(d, x.ndim) for d in ([dims] if isinstance(dims, int) else dims or ())}
    which = [d for d in range(x.ndim) if not chosen or d in chosen]
    kept = [d for d in range(x.ndim) if keepdim or d not in which]
    shape = tuple(Poly.ONE if d in which else x.shape[d] for d in kept)
    reduced = tuple(x.shape[d] for d in which)
    inner = [axis(k, extent, "r") for k, extent in enumerate(reduced)]
    places = dict(zip(kept, own_point(shape), strict=True)) | dict(zip(which, inner, strict=True))
    over = tuple(p.axis for p in inner if p.axis is not None)
    return Frame(shape, tuple(places[d] for d in range(x.ndim)), over, reduced, linear_position(inner, reduced))


def reduce(monoid: str, value: Expr, at: Frame) -> Expr:
    """The reduction of `value` over the frame; of one element, the element."""
    if not at.over:
        return value
    return Part(Reduce(monoid, (value,), at.over), 0)


def _input(ctx: Context, x: Ref, at: Frame, dtype: DType) -> Expr:
    """The element being reduced, converted as eager converts it and ready to accumulate."""
    value = x.at(at.point)
    if x.dtype is not dtype and not (x.dtype.is_half and dtype is DType.F32):
        value = ctx.convert(value, dtype, exact=True)
    return ctx.computing(value, dtype)


def _plain(
    on_numbers: str, on_bool: str, ctx: Context, x: Ref, dims: Dims = None, keepdim: bool = False, **options: Any
) -> Expr:
    at = frame(x, dims, keepdim)
    monoid = on_bool if ctx.out.dtype is DType.BOOL else on_numbers
    return reduce(monoid, _input(ctx, x, at, ctx.out.dtype), at)


# The monoid of each operation: on numbers, and on bool.
lowers("sum.default/dim_IntList prims.sum.default")(partial(_plain, "sum", "any"))
lowers("prod.default/dim_int")(partial(_plain, "prod", "all"))
lowers("max amax prims.amax.default")(partial(_plain, "max", "any"))
lowers("min amin prims.amin.default")(partial(_plain, "min", "all"))


@lowers("mean.default/dim")
def mean(ctx: Context, x: Ref, dims: Dims = None, keepdim: bool = False, **options: Any) -> Ref:
    at = frame(x, dims, keepdim)
    compute = ctx.out.dtype.compute
    summed = reduce("sum", _input(ctx, x, at, ctx.out.dtype), at)
    total = ctx.define_internal(summed, at.shape, compute)
    result = ctx.define(total.aligned(at.shape) / ctx.size(at.count, compute))
    if isinstance(summed, Part) and isinstance(summed.source, Reduce) and nonnegative(at.count - 1):
        ctx.means[result.buffer] = summed.source
    return result


def _is_nonzero(ctx: Context, x: Ref, at: Frame) -> Expr:
    return calculate("ne", ctx.computing(x.at(at.point), x.dtype, exact=True), 0)


def _truth(monoid: str, ctx: Context, x: Ref, dims: Dims = None, keepdim: bool = False) -> Expr:
    at = frame(x, dims, keepdim)
    found = reduce(monoid, x.at(at.point) if x.dtype is DType.BOOL else _is_nonzero(ctx, x, at), at)
    if ctx.out.dtype is DType.BOOL:
        return found
    return ctx.define_internal(found, at.shape, DType.BOOL).aligned(at.shape)  # uint8 in, uint8 out


lowers("any.default/dim/dims")(partial(_truth, "any"))
lowers("all.default/dim/dims")(partial(_truth, "all"))


# value and index


def _extreme(monoid: str, ctx: Context, x: Ref, dim: int | None = None, keepdim: bool = False) -> tuple[Expr, Expr]:
    """The extreme value over a dimension (all of them where there is none), and its position."""
    at = frame(x, dim, keepdim)
    value = ctx.computing(x.at(at.point), x.dtype, exact=True)
    if value.dtype is DType.BOOL:
        value = pointwise("cast", value, dtype=DType.U8)
    if not at.over:
        return value, literal(0, DType.I64)
    state = Reduce(monoid, (value, Index(at.position)), at.over)
    return Part(state, 0), Part(state, 1)


lowers("max.dim")(partial(_extreme, "argmax"))
lowers("min.dim")(partial(_extreme, "argmin"))
lowers("argmax")(lambda *args: _extreme("argmax", *args)[1])
lowers("argmin")(lambda *args: _extreme("argmin", *args)[1])


# variance


def _variance(ctx: Context, x: Ref, dims: Dims, correction: float | int | None, keepdim: bool) -> tuple[Expr, Expr]:
    """Variance and mean by Welford's method, each as a value over the result's shape."""
    at = frame(x, dims, keepdim)
    compute = ctx.out.dtype.compute
    value = _input(ctx, x, at, ctx.out.dtype)
    mean_value: Expr
    squares: Expr
    if at.over:
        # In float64 where eager does: data far from zero would lose most of its variance otherwise.
        wide = DType.F64 if ctx.wide_statistics else compute
        state = Reduce("welford", (pointwise("cast", value, dtype=wide),), at.over)
        mean_value, squares = (pointwise("cast", Part(state, k), dtype=compute) for k in (0, 1))
    else:
        mean_value, squares = value, value - value  # 0, or NaN of a value that is not finite
    total = ctx.define_internal(squares, at.shape, compute).aligned(at.shape)
    average = ctx.define_internal(mean_value, at.shape, compute).aligned(at.shape)
    if not nonnegative(at.count - 1):  # the mean of nothing is NaN
        some = pointwise("gt", Index(at.count), Index(Poly.ZERO))
        average = calculate("where", some, average, math.nan)
    return total / _degrees(ctx, at.count, correction, compute), average


def _degrees(ctx: Context, count: Poly, correction: float | int | None, dtype: DType) -> Expr:
    """max(count - correction, 0)."""
    correction = 1 if correction is None else correction
    constant = count.constant
    if constant is not None:
        return literal(max(constant - correction, 0), dtype)
    return calculate("maximum", ctx.size(count, dtype) - correction, 0)


def _spread(
    root: bool, ctx: Context, x: Ref, dims: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> Expr | tuple[Expr, Expr]:
    """The variance or its root, and the mean where the operation gives that too."""
    variance, average = _variance(ctx, x, dims, correction, keepdim)
    spread = pointwise("sqrt", variance) if root else variance
    return (spread, average) if len(ctx.outs) > 1 else spread


lowers("var.correction var_mean.correction")(partial(_spread, False))
lowers("std.correction std_mean.correction")(partial(_spread, True))


# norms


@lowers("linalg_vector_norm")
def vector_norm(
    ctx: Context, x: Ref, order: float | int = 2, dims: Dims = None, keepdim: bool = False, **options: Any
) -> Expr:
    at = frame(x, dims, keepdim)
    compute = ctx.out.dtype.compute
    size = pointwise("abs", _input(ctx, x, at, ctx.out.dtype))
    if order in (math.inf, -math.inf):
        return reduce("max" if order > 0 else "min", size, at)
    if order == 0:
        return reduce("sum", pointwise("cast", _is_nonzero(ctx, x, at), dtype=compute), at)
    if order == 1:
        return reduce("sum", size, at)
    powered = size * size if order == 2 else calculate("pow", size, order)
    total = ctx.define_internal(reduce("sum", powered, at), at.shape, compute).aligned(at.shape)
    return pointwise("sqrt", total) if order == 2 else calculate("pow", total, 1 / order)


def share_welford(statements: Sequence[Statement], means: Mapping[Buffer, Reduce]) -> list[Statement]:
    """Take a mean from the Welford state where the variance of the same values is computed too."""
    states = {
        (_narrow_input(node), node.over): node
        for s in statements
        if isinstance(s, Define)
        for node in postorder([s.value])
        if isinstance(node, Reduce) and node.monoid == "welford"
    }
    result = list(statements)
    for k, s in enumerate(statements):
        summed = means.get(s.buffer) if isinstance(s, Define) else None
        if summed is not None and (state := states.get((summed.inputs[0], summed.over))) is not None:
            assert isinstance(s, Define)
            value = pointwise("cast", Part(state, 0), dtype=summed.dtype)
            half = s.buffer.dtype.is_half
            result[k] = replace(s, value=pointwise("narrow", value, dtype=s.buffer.dtype) if half else value)
    return result


def _narrow_input(state: Reduce) -> Expr:
    """What enters a Welford state, before it was widened to float64."""
    (value,) = state.inputs
    return value.args[0] if isinstance(value, Pointwise) and value.op == "cast" else value
