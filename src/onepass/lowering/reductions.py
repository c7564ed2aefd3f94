"""Reductions: one `Reduce` at the root of a definition, whatever comes before it inside.

16-bit floats accumulate in float32. What follows a reduction (the division of a mean) is a
definition of its own, so that fusion decides where it runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..ir.dtypes import DType
from ..ir.expr import Expr, Index, Part, Pointwise, Reduce, pointwise, postorder
from ..ir.poly import Axis, Poly, nonnegative, product
from ..ir.program import Buffer, Define, Statement
from .context import Context
from .promotion import literal
from .registry import lowers
from .values import Ref, Shape, axis, linear_position
from .views import wrap_dim

aten = torch.ops.aten
prims = torch.ops.prims
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
    chosen = [dims] if isinstance(dims, int) else list(dims or ())
    which = {wrap_dim(d, x.ndim) for d in chosen} if chosen else set(range(x.ndim))
    shape: list[Poly] = []
    point: list[Poly] = []
    inner: list[Poly] = []
    reduced: list[Poly] = []
    for number, extent in enumerate(x.shape):
        if number in which:
            inner.append(axis(len(reduced), extent, "r"))
            point.append(inner[-1])
            reduced.append(extent)
            if keepdim:
                shape.append(Poly.ONE)
        else:
            point.append(axis(len(shape), extent))
            shape.append(extent)
    over = tuple(a for a in (p.axis for p in inner) if a is not None)
    return Frame(tuple(shape), tuple(point), over, tuple(reduced), linear_position(inner, reduced))


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


# The monoid of each operation: on numbers, and on bool.
_MONOIDS: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("sum", "any", (aten.sum.default, aten.sum.dim_IntList, prims.sum.default)),
    ("prod", "all", (aten.prod.default, aten.prod.dim_int)),
    ("max", "any", (aten.max.default, aten.amax.default, prims.amax.default)),
    ("min", "all", (aten.min.default, aten.amin.default, prims.amin.default)),
)


def _plain(on_numbers: str, on_bool: str) -> Callable[..., Ref]:
    def rule(ctx: Context, x: Ref, dims: Dims = None, keepdim: bool = False, **options: Any) -> Ref:
        at = frame(x, dims, keepdim)
        monoid = on_bool if ctx.out.dtype is DType.BOOL else on_numbers
        return ctx.define(reduce(monoid, _input(ctx, x, at, ctx.out.dtype), at))

    return rule


for _on_numbers, _on_bool, _targets in _MONOIDS:
    lowers(*_targets)(_plain(_on_numbers, _on_bool))


@lowers(aten.mean.default, aten.mean.dim)
def mean(ctx: Context, x: Ref, dims: Dims = None, keepdim: bool = False, **options: Any) -> Ref:
    at = frame(x, dims, keepdim)
    compute = ctx.out.dtype.compute
    summed = reduce("sum", _input(ctx, x, at, ctx.out.dtype), at)
    total = ctx.define_internal(summed, at.shape, compute)
    result = ctx.define(pointwise("div", total.aligned(at.shape), ctx.size(at.count, compute)))
    if isinstance(summed, Part) and isinstance(summed.source, Reduce) and nonnegative(at.count - 1):
        ctx.means[result.buffer] = summed.source
    return result


def _truth(monoid: str, ctx: Context, x: Ref, dims: Dims = None, keepdim: bool = False) -> Ref:
    at = frame(x, dims, keepdim)
    value = x.at(at.point)
    if x.dtype is not DType.BOOL:
        value = ctx.computing(value, x.dtype, exact=True)
        value = pointwise("ne", value, literal(0, value.dtype))
    if ctx.out.dtype is DType.BOOL:
        return ctx.define(reduce(monoid, value, at))
    found = ctx.define_internal(reduce(monoid, value, at), at.shape, DType.BOOL)  # uint8 in, uint8 out
    return ctx.define(found.aligned(at.shape))


lowers(aten.any.default, aten.any.dim, aten.any.dims)(partial(_truth, "any"))
lowers(aten.all.default, aten.all.dim, aten.all.dims)(partial(_truth, "all"))


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


def _index(monoid: str, ctx: Context, *args: Any) -> Ref:
    return ctx.define(_extreme(monoid, ctx, *args)[1])


def _value_and_index(monoid: str, ctx: Context, *args: Any) -> tuple[Ref, Ref]:
    value, index = _extreme(monoid, ctx, *args)
    return ctx.define(value, ctx.outs[0]), ctx.define(index, ctx.outs[1])


for _monoid, _alone, _with_value in (
    ("argmax", aten.argmax.default, aten.max.dim),
    ("argmin", aten.argmin.default, aten.min.dim),
):
    lowers(_alone)(partial(_index, _monoid))
    lowers(_with_value)(partial(_value_and_index, _monoid))


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
        mean_value, squares = value, pointwise("sub", value, value)  # 0, or NaN of a value that is not finite
    total = ctx.define_internal(squares, at.shape, compute).aligned(at.shape)
    average = ctx.define_internal(mean_value, at.shape, compute).aligned(at.shape)
    if not nonnegative(at.count - 1):  # the mean of nothing is NaN
        some = pointwise("gt", Index(at.count), Index(Poly.ZERO))
        average = pointwise("where", some, average, literal(math.nan, compute))
    return pointwise("div", total, _degrees(ctx, at.count, correction, compute)), average


def _degrees(ctx: Context, count: Poly, correction: float | int | None, dtype: DType) -> Expr:
    """max(count - correction, 0)."""
    correction = 1 if correction is None else correction
    constant = count.constant
    if constant is not None:
        return literal(max(constant - correction, 0), dtype)
    left = pointwise("sub", ctx.size(count, dtype), literal(correction, dtype))
    return pointwise("maximum", left, literal(0, dtype))


def _spread(
    root: bool, ctx: Context, x: Ref, dims: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> Ref | tuple[Ref, ...]:
    """The variance or its root, and the mean where the operation gives that too."""
    variance, average = _variance(ctx, x, dims, correction, keepdim)
    values = (pointwise("sqrt", variance) if root else variance, average)
    found = tuple(ctx.define(value, meta) for value, meta in zip(values, ctx.outs, strict=False))
    return found if len(found) > 1 else found[0]


lowers(aten.var.correction, aten.var_mean.correction)(partial(_spread, False))
lowers(aten.std.correction, aten.std_mean.correction)(partial(_spread, True))


# norms


@lowers(aten.linalg_vector_norm.default)
def vector_norm(
    ctx: Context, x: Ref, order: float | int = 2, dims: Dims = None, keepdim: bool = False, **options: Any
) -> Ref:
    at = frame(x, dims, keepdim)
    dtype = ctx.out.dtype
    compute = dtype.compute
    size = pointwise("abs", _input(ctx, x, at, dtype))
    if order in (math.inf, -math.inf):
        return ctx.define(reduce("max" if order > 0 else "min", size, at))
    if order == 0:
        stored = ctx.computing(x.at(at.point), x.dtype, exact=True)
        present = pointwise("ne", stored, literal(0, stored.dtype))
        return ctx.define(reduce("sum", pointwise("cast", present, dtype=compute), at))
    if order == 1:
        return ctx.define(reduce("sum", size, at))
    powered = pointwise("mul", size, size) if order == 2 else pointwise("pow", size, literal(order, compute))
    total = ctx.define_internal(reduce("sum", powered, at), at.shape, compute).aligned(at.shape)
    if order == 2:
        return ctx.define(pointwise("sqrt", total))
    return ctx.define(pointwise("pow", total, literal(1 / order, compute)))


def share_welford(statements: Sequence[Statement], means: Mapping[Buffer, Reduce]) -> list[Statement]:
    """Take a mean from the Welford state where the variance of the same values is computed too."""
    states = {
        (_narrow_input(node), node.over): node
        for s in statements
        if isinstance(s, Define)
        for node in postorder([s.value])
        if isinstance(node, Reduce) and node.monoid == "welford"
    }
    result: list[Statement] = []
    for statement in statements:
        if states and isinstance(statement, Define) and (summed := means.get(statement.buffer)) is not None:
            state = states.get((summed.inputs[0], summed.over))
            if state is not None:
                buffer = statement.buffer
                mean_value = pointwise("cast", Part(state, 0), dtype=summed.dtype)
                value = pointwise("narrow", mean_value, dtype=buffer.dtype) if buffer.dtype.is_half else mean_value
                statement = Define(buffer, statement.axes, value, statement.origin)
        result.append(statement)
    return result


def _narrow_input(state: Reduce) -> Expr:
    """What enters a Welford state, before it was widened to float64."""
    (value,) = state.inputs
    return value.args[0] if isinstance(value, Pointwise) and value.op == "cast" else value
