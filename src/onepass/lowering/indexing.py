"""Indexing by data: a load whose index holds a value, checked as eager checks it.

Scatters are masked regions where one comparison per element says it all; the others are left to
the library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..ir.dtypes import DType
from ..ir.expr import Expr, Index, indirect, pointwise
from ..ir.poly import Poly
from .context import Context, Operand
from .movement import both, less, replaced
from .registry import Unsupported, lowers
from .values import Ref, own_point
from .views import wrap_dim


def _position(ctx: Context, value: Expr, size: Poly, *, wraps: bool = False) -> Expr:
    """An index value, checked against the size of its dimension."""
    return pointwise("wrap_index" if wraps else "check_index", ctx.convert(value, DType.I64), Index(size))


@lowers("index.Tensor _unsafe_index.Tensor")
def index(ctx: Context, x: Ref, indices: Sequence[Ref | None]) -> Expr:
    given = [k for k, i in enumerate(indices) if i is not None]
    tensors = [i for i in indices if i is not None]
    if any(not i.dtype.is_integer or i.dtype is DType.U8 for i in tensors):
        raise Unsupported("indexing by a mask: the size of its result depends on data")
    rank = max(i.ndim for i in tensors)
    adjacent = given == list(range(given[0], given[-1] + 1))
    front = given[0] if adjacent else 0  # where the dimensions of the indices go
    axes = own_point(ctx.out.shape)
    others = [p for k, p in enumerate(axes) if not front <= k < front + rank]
    point: list[Poly] = []
    for dim, extent in enumerate(x.shape):
        tensor = indices[dim] if dim < len(indices) else None
        if tensor is None:
            point.append(others.pop(0))
            continue
        value = tensor.at(axes[front + rank - tensor.ndim : front + rank])
        point.append(indirect(_position(ctx, value, extent, wraps=True)))
    return x.at(point)


@lowers("index_select")
def index_select(ctx: Context, x: Ref, dim: int, indices: Ref) -> Expr:
    if not x.ndim:
        raise Unsupported("index_select of a 0-d tensor")
    dim = wrap_dim(dim, x.ndim)
    point = list(own_point(ctx.out.shape))
    value = indices.at([point[dim]] if indices.ndim else [])
    point[dim] = indirect(_position(ctx, value, x.shape[dim]))
    return x.at(point)


@lowers("gather")
def gather(ctx: Context, x: Ref, dim: int, indices: Ref, *, sparse_grad: bool = False) -> Expr:
    if not x.ndim or x.ndim != indices.ndim:
        raise Unsupported("gather between different numbers of dimensions")
    dim = wrap_dim(dim, x.ndim)
    point = list(own_point(ctx.out.shape))
    point[dim] = indirect(_position(ctx, indices.aligned(ctx.out.shape), x.shape[dim]))
    return x.at(point)


@lowers("embedding")
def embedding(ctx: Context, weight: Ref, indices: Ref, *ignored: Any) -> Expr:
    axes = own_point(ctx.out.shape)
    row = indirect(_position(ctx, indices.at(axes[: indices.ndim]), weight.shape[0]))
    return weight.at([row, *axes[indices.ndim :]])


@lowers("scatter.value/src")
def scatter(ctx: Context, x: Ref, dim: int, indices: Ref, source: Operand, adds: bool = False) -> Expr:
    """A scatter of one element per line: where the position is the index."""
    if not x.ndim or indices.ndim != x.ndim:
        raise Unsupported("scatter into a 0-d tensor")
    dim = wrap_dim(dim, x.ndim)
    if indices.shape[dim] is not Poly.ONE:
        raise Unsupported("a scatter of several elements per line")
    axes = own_point(x.shape)
    value = source.at([*axes[:dim], Poly.ZERO, *axes[dim + 1 :]]) if isinstance(source, Ref) else ctx.stored(source)
    if adds:
        value = pointwise("add", ctx.read(x), ctx.convert(value, ctx.read(x).dtype))
    target = _position(ctx, indices.at(axes), x.shape[dim])
    here = [pointwise("eq", Index(axes[dim]), target)]
    for k, extent in enumerate(x.shape):
        if k != dim and indices.shape[k] is not extent:
            here.append(less(axes[k], indices.shape[k]))
    return replaced(ctx, x, both(here), value)


@lowers("scatter_add")
def scatter_add(ctx: Context, x: Ref, dim: int, indices: Ref, source: Ref) -> Expr:
    if ctx.out.dtype is DType.BOOL:
        raise Unsupported("a sum of bools")
    return scatter(ctx, x, dim, indices, source, adds=True)


@lowers("index_put _unsafe_index_put")
def index_put(ctx: Context, x: Ref, indices: Sequence[Ref | None], values: Ref, accumulate: bool = False) -> Expr:
    """x[mask] = a single value."""
    if accumulate or len(indices) != 1 or indices[0] is None or indices[0].dtype is not DType.BOOL:
        raise Unsupported("a scatter to indices that are data")
    if any(extent is not Poly.ONE for extent in values.shape):
        raise Unsupported("a masked scatter of several values")
    mask = indices[0]
    return replaced(ctx, x, mask.at(own_point(x.shape)[: mask.ndim]), values.at([Poly.ZERO] * values.ndim))
