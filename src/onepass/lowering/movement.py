"""Movement: copies, joins, pads and scatters of slices, as masked regions of one iteration space.

`where(d0 < n, a[d0], b[d0 - n])`: a load may be out of range where its condition is false; such
points are never used. Values keep their stored type, so nothing is rounded on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from itertools import accumulate
from operator import and_
from typing import Any

from ..ir.dtypes import DType
from ..ir.expr import Expr, Index, literal, pointwise
from ..ir.poly import Poly
from .context import Context
from .registry import Unsupported, lowers
from .values import Ref, own_point
from .views import slice_start, wrap_dim, wrap_index


def less(a: Poly, b: Poly) -> Expr:
    """a < b, a literal where ranges prove it."""
    return pointwise("lt", Index(a), Index(b))


def at_least(a: Poly, b: Poly) -> Expr:
    return pointwise("ge", Index(a), Index(b))


def both(conditions: Sequence[Expr]) -> Expr:
    """The conjunction of conditions; true for none."""
    return reduce(and_, conditions) if conditions else literal(True, DType.BOOL)


def replaced(ctx: Context, x: Ref, where: Expr, value: Expr) -> Expr:
    """x, with another value where a condition holds."""
    return pointwise("where", where, ctx.convert(value, ctx.out.dtype), x.aligned(x.shape))


lowers("clone")(lambda ctx, x, **options: x.aligned(ctx.out.shape))


@lowers("copy")
def copy(ctx: Context, x: Ref, source: Ref, non_blocking: bool = False) -> Expr:
    if source.device != ctx.out.device and source.ndim:
        raise Unsupported("a copy between devices")
    return ctx.convert(source.aligned(ctx.out.shape), ctx.out.dtype, exact=True)


@lowers("cat")
def cat(ctx: Context, tensors: Sequence[Ref], dim: int = 0) -> Expr:
    shape, dtype = ctx.out.shape, ctx.out.dtype
    # Eager ignores inputs of shape (0,), whatever the rank of the others.
    parts = [x for x in tensors if x.ndim == len(shape) and x.shape[wrap_dim(dim, x.ndim)] is not Poly.ZERO]
    if not parts:
        return literal(0, dtype)
    dim = wrap_dim(dim, len(shape))
    axes = own_point(shape)
    starts = list(accumulate((part.shape[dim] for part in parts), initial=Poly.ZERO))
    values: list[Expr] = []
    for part, start in zip(parts, starts, strict=False):
        point = list(axes)
        point[dim] = axes[dim] - start
        values.append(ctx.convert(part.at(point), dtype))
    return _choose(axes[dim], values, starts[1:])


def _choose(at: Poly, values: Sequence[Expr], ends: Sequence[Poly]) -> Expr:
    """values[k] where `at` is before ends[k]: a balanced tree, so that many inputs stay shallow."""
    if len(values) == 1:
        return values[0]
    half = len(values) // 2
    left, right = _choose(at, values[:half], ends[:half]), _choose(at, values[half:], ends[half:])
    return pointwise("where", less(at, ends[half - 1]), left, right)


@lowers("constant_pad_nd")
def constant_pad_nd(ctx: Context, x: Ref, pad: Sequence[int | Poly], value: float | int | bool = 0) -> Expr:
    point = list(own_point(ctx.out.shape))
    inside: list[Expr] = []
    for number in range(len(pad) // 2):
        dim = x.ndim - 1 - number
        before, after = Poly.of(pad[2 * number]), Poly.of(pad[2 * number + 1])
        at = point[dim]
        point[dim] = at - before
        # A negative pad only crops.
        if not _is_crop(before):
            inside.append(at_least(at, before))
        if not _is_crop(after):
            inside.append(less(at, before + x.shape[dim]))
    return pointwise("where", both(inside), x.at(point), literal(value, ctx.out.dtype))


def _is_crop(amount: Poly) -> bool:
    constant = amount.constant
    return constant is not None and constant <= 0


@lowers("flip")
def flip(ctx: Context, x: Ref, dims: Sequence[int]) -> Expr:
    point = list(own_point(x.shape))
    for dim in {wrap_dim(d, x.ndim) for d in dims}:
        if x.ndim:
            point[dim] = x.shape[dim] - 1 - point[dim]
    return x.at(point)


@lowers("roll")
def roll(ctx: Context, x: Ref, shifts: Sequence[int | Poly], dims: Sequence[int] = ()) -> Expr:
    if not dims:
        if x.ndim > 1:
            raise Unsupported("a roll of the flattened tensor")
        dims = [0]
    point = list(own_point(x.shape))
    if not x.ndim or any(e is Poly.ZERO for e in x.shape):
        return x.at(point)
    total: dict[int, Poly] = {}
    for shift, dim in zip(shifts, dims, strict=True):
        dim = wrap_dim(dim, x.ndim)
        total[dim] = total.get(dim, Poly.ZERO) + shift
    return _rolled(x, point, list(total.items()))


def _rolled(x: Ref, point: list[Poly], shifts: list[tuple[int, Poly]]) -> Expr:
    if not shifts:
        return x.at(point)
    (dim, amount), *rest = shifts
    size = x.shape[dim]
    shift = amount % size
    if shift is Poly.ZERO:
        return _rolled(x, point, rest)
    here = point[dim]
    wrapped, moved = list(point), list(point)
    wrapped[dim], moved[dim] = here - shift + size, here - shift
    return pointwise("where", less(here, shift), _rolled(x, wrapped, rest), _rolled(x, moved, rest))


@lowers("repeat")
def repeat(ctx: Context, x: Ref, repeats: Sequence[int | Poly]) -> Expr:
    if any(e is Poly.ZERO for e in x.shape):
        return literal(0, ctx.out.dtype)
    axes = own_point(ctx.out.shape)[len(ctx.out.shape) - x.ndim :]
    return x.at([at % size for at, size in zip(axes, x.shape, strict=True)])


def _triangle(kept: str, ctx: Context, x: Ref, diagonal: int | Poly = 0) -> Expr:
    *_, row, column = own_point(x.shape)
    keep = pointwise(kept, Index(column), Index(row + diagonal))
    return pointwise("where", keep, x.aligned(x.shape), literal(0, x.dtype))


lowers("tril")(partial(_triangle, "le"))
lowers("triu")(partial(_triangle, "ge"))


@lowers("select_scatter")
def select_scatter(ctx: Context, x: Ref, source: Ref, dim: int, index: int | Poly) -> Expr:
    dim = wrap_dim(dim, x.ndim)
    axes = own_point(x.shape)
    point = [p for k, p in enumerate(axes) if k != dim]
    here = pointwise("eq", Index(axes[dim]), Index(wrap_index(index, x.shape[dim])))
    return replaced(ctx, x, here, source.at(point))


@lowers("slice_scatter")
def slice_scatter(
    ctx: Context, x: Ref, source: Ref, dim: int = 0, start: int | Poly | None = None, end: Any = None, step: Any = 1
) -> Expr:
    dim = wrap_dim(dim, x.ndim)
    axes = own_point(x.shape)
    begin, at = slice_start(start, x.shape[dim]), axes[dim]
    length = source.shape[dim]
    inside = [at_least(at, begin)] if begin is not Poly.ZERO else []
    if step != 1:
        inside.append(pointwise("eq", Index((at - begin) % step), Index(Poly.ZERO)))
    last = begin + length * step
    if last is not x.shape[dim]:
        inside.append(less(at, last))
    point = list(axes)
    point[dim] = (at - begin) // step
    return replaced(ctx, x, both(inside), source.at(point))


@lowers("diagonal_scatter")
def diagonal_scatter(ctx: Context, x: Ref, source: Ref, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Expr:
    first, second = wrap_dim(dim1, x.ndim), wrap_dim(dim2, x.ndim)
    axes = own_point(x.shape)
    on_diagonal = pointwise("eq", Index(axes[second]), Index(axes[first] + offset))
    along = axes[first] if offset >= 0 else axes[second]
    point = [p for k, p in enumerate(axes) if k not in (first, second)]
    return replaced(ctx, x, on_diagonal, source.at([*point, along]))
