"""Views: operations that only rewrite index maps and define nothing.

The shape of a view comes from FX; arguments say how its points map to the source. A size or offset
that cannot be placed for symbolic sizes raises `Unsupported`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from ..ir.poly import Poly, nonnegative
from ..ir.program import contiguous_strides
from .context import Context
from .registry import Unsupported, lowers
from .values import Ref, own_point, reshape_point, split_linear


def wrap_dim(dim: int, ndim: int) -> int:
    """A dimension counted from either end, as one from the front."""
    return dim + max(ndim, 1) if dim < 0 else dim


def wrap_index(index: int | Poly, size: Poly) -> Poly:
    """A position counted from either end; must be provably one or the other."""
    position = Poly.of(index)
    if nonnegative(position):
        return position
    if nonnegative(-position - 1) and nonnegative(position + size):
        return position + size
    raise Unsupported(f"index {position} of a dimension of size {size} may be negative")


@lowers("alias detach lift lift_fresh alias_copy detach_copy lift_fresh_copy prims.view_of.default")
def alias(ctx: Context, x: Ref) -> Ref:
    return x


@lowers("view _unsafe_view reshape view_copy unsqueeze unsqueeze_copy")
@lowers("squeeze.default/dim/dims squeeze_copy.default/dim/dims")
def view(ctx: Context, x: Ref, *where: Any) -> Ref:
    shape = ctx.out.shape
    return x if shape == x.shape else x.view(shape, reshape_point(x.shape, shape))


@lowers("permute permute_copy")
def permute(ctx: Context, x: Ref, dims: Sequence[int]) -> Ref:
    axes = own_point(ctx.out.shape)
    point = [Poly.ZERO] * x.ndim
    for to, source in enumerate(dims):
        point[wrap_dim(source, x.ndim)] = axes[to]
    return x.view(ctx.out.shape, point)


@lowers("transpose.int transpose_copy.int")
def transpose(ctx: Context, x: Ref, a: int, b: int) -> Ref:
    order = list(range(x.ndim))
    if order:
        a, b = wrap_dim(a, x.ndim), wrap_dim(b, x.ndim)
        order[a], order[b] = order[b], order[a]
    return permute(ctx, x, order)


lowers("t t_copy")(lambda ctx, x: permute(ctx, x, range(x.ndim)[::-1]))


@lowers("expand expand_copy")
def expand(ctx: Context, x: Ref, size: Any, implicit: bool = False) -> Ref:
    shape = ctx.out.shape
    return x.view(shape, own_point(shape)[len(shape) - x.ndim :])


@lowers("slice.Tensor slice_copy.Tensor narrow_copy")
def slice_(
    ctx: Context, x: Ref, dim: int = 0, start: int | Poly | None = None, end: Any = None, step: int | Poly = 1
) -> Ref:
    dim = wrap_dim(dim, x.ndim)
    # FX's shape says where it ends. Past the end the slice is empty, so the start needs no clamp from above.
    return _part(x, ctx.out.shape, dim, slice_start(start, x.shape[dim]), step)


def _part(x: Ref, shape: Sequence[Poly], dim: int, start: Poly, step: int | Poly = 1) -> Ref:
    """The part of a shape that begins at `start` of a dimension."""
    point = list(own_point(shape))
    point[dim] = start + point[dim] * step
    return x.view(shape, point)


def slice_start(start: int | Poly | None, size: Poly) -> Poly:
    """Where a slice begins; a start before the front is clamped to 0."""
    if start is None:
        return Poly.ZERO
    if isinstance(start, int) and start < 0 and size.constant is not None:
        return Poly.of(max(0, size.constant + start))
    return wrap_index(start, size)


@lowers("select.int select_copy.int")
def select(ctx: Context, x: Ref, dim: int, index: int | Poly) -> Ref:
    dim = wrap_dim(dim, x.ndim)
    point = list(own_point(ctx.out.shape))
    point.insert(dim, wrap_index(index, x.shape[dim]))
    return x.view(ctx.out.shape, point)


@lowers("split.Tensor unsafe_split.Tensor split_copy.Tensor split_with_sizes split_with_sizes_copy")
def split(ctx: Context, x: Ref, sizes: Any, dim: int = 0) -> tuple[Ref, ...]:
    dim = wrap_dim(dim, x.ndim)
    starts = accumulate((meta.shape[dim] for meta in ctx.outs), initial=Poly.ZERO)
    return tuple(_part(x, meta.shape, dim, start) for meta, start in zip(ctx.outs, starts, strict=False))


@lowers("unbind.int unbind_copy.int")
def unbind(ctx: Context, x: Ref, dim: int = 0) -> tuple[Ref, ...]:
    return tuple(select(ctx, x, dim, number) for number in range(len(ctx.outs)))


@lowers("diagonal diagonal_copy")
def diagonal(ctx: Context, x: Ref, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Ref:
    first, second = wrap_dim(dim1, x.ndim), wrap_dim(dim2, x.ndim)
    *rest, along = own_point(ctx.out.shape)
    point = list(rest)
    for dim in sorted((first, second)):
        point.insert(dim, along + (max(-offset, 0) if dim == first else max(offset, 0)))
    return x.view(ctx.out.shape, point)


@lowers("unfold unfold_copy")
def unfold(ctx: Context, x: Ref, dim: int, size: int, step: int) -> Ref:
    *point, within = own_point(ctx.out.shape)
    if not x.ndim:
        return x.view(ctx.out.shape, ())
    dim = wrap_dim(dim, x.ndim)
    point[dim] = point[dim] * step + within
    return x.view(ctx.out.shape, point)


@lowers("as_strided as_strided_copy")
def as_strided(ctx: Context, x: Ref, size: Any, stride: Any, storage_offset: int | Poly | None = None) -> Ref:
    """Only of a whole row-major buffer: strides in its storage are then positions in it."""
    buffer = x.buffer
    if not x.is_whole or buffer.strides != contiguous_strides(buffer.shape) or buffer.name.startswith("a"):
        raise Unsupported("as_strided of a tensor whose storage has another layout")
    steps = zip(own_point(ctx.out.shape), stride, strict=True)
    position = sum((at * step for at, step in steps), Poly.of(storage_offset or 0))
    return x.view(ctx.out.shape, split_linear(position, x.shape))
