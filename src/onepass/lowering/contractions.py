"""Matrix products as sums of products: what an `Extern` of the library could be inside a kernel.

Operands keep their own type up to the product (`cast`, which a kernel does not undo): the matrix unit is given what
the library would be given. The planner decides which of the two runs.
"""

from __future__ import annotations

from functools import partial
from operator import mul
from typing import Any

import torch

from ..ir.dtypes import DType
from ..ir.expr import Expr, Part, Reduce, pointwise
from ..ir.poly import Axis, Poly
from ..ir.program import Buffer
from .context import Context
from .reasons import why_library
from .recurrences import is_state
from .registry import Rule, Unsupported, lowers
from .values import Ref, axis

aten = torch.ops.aten
CONTRACTIONS: dict[object, Rule] = {}
# What sums of products of a type are kept in.
_SUMS = {
    DType.BF16: DType.F32, DType.F16: DType.F32, DType.F32: DType.F32, DType.I8: DType.I32, DType.F8E4M3: DType.F32,
}  # fmt: skip


# Registers the sum of products of an operation; called like it, with the context and its result in front.
contracts = partial(lowers, table=CONTRACTIONS)


def _sum_of_products(ctx: Context, left: Ref, right: Ref) -> Expr | None:
    """Over the last dimension of one matrix and the last but one of the other, in 32 bits."""
    inside = left.shape[-1]
    if left.dtype is not right.dtype or left.dtype not in _SUMS or inside.constant in (0, 1):
        return None
    over = Axis("r0", inside)
    sides = (pointwise("cast", side, dtype=_SUMS[left.dtype]) for side in _terms(left, right, over.poly()))
    product = pointwise("mul", *sides)
    return Part(Reduce("sum", (product,), (over,)), 0)


def _terms(left: Ref, right: Ref, inside: Poly) -> tuple[Expr, Expr]:
    """The two factors of one term of a sum of products."""
    batch = len(left.shape) - 2
    outer = [axis(k, left.shape[k]) for k in range(batch)]
    rows, columns = axis(batch, left.shape[-2]), axis(batch + 1, right.shape[-1])
    return left.at([*outer, rows, inside]), right.at([*outer, inside, columns])


@lowers("mm bmm")
def outer_product(ctx: Context, left: Ref, right: Ref) -> Expr:
    """A product of one column and one row has no sum: it is point-wise work. One of a vector and the states of a
    recurrence is a sum for each step, where the states are. All others are the planner's.
    """
    if Poly.ONE in (left.shape[-2], right.shape[-1]) and any(is_state(ctx, x.buffer) for x in (left, right)):
        total = _sum_of_products(ctx, left, right)
        if total is not None:
            return ctx.convert(total, ctx.out.dtype)
    if left.shape[-1] is not Poly.ONE or not left.dtype.is_float:
        raise Unsupported(why_library(aten.mm.default))
    return ctx.convert(mul(*(ctx.computing(x, left.dtype) for x in _terms(left, right, Poly.ZERO))), ctx.out.dtype)


@contracts("mm bmm _int_mm")
def product(ctx: Context, out: Buffer, left: Ref, right: Ref) -> Expr | None:
    total = _sum_of_products(ctx, left, right)
    return None if total is None else ctx.convert(total, out.dtype)


@contracts("addmm baddbmm")
def sum_and_product(
    ctx: Context, out: Buffer, added: Ref, left: Ref, right: Ref, *, beta: Any = 1, alpha: Any = 1
) -> Expr | None:
    total = _sum_of_products(ctx, left, right)
    if total is None or not isinstance(beta, int | float) or not isinstance(alpha, int | float):
        return None
    if alpha != 1:
        total = total * float(alpha)
    if beta != 0:
        term = ctx.computing(added.aligned(out.shape), out.dtype)
        total = total + (term if beta == 1 else term * float(beta))
    return ctx.convert(total, out.dtype)


@contracts("_scaled_mm")
def scaled_product(
    ctx: Context, out: Buffer, left: Ref, right: Ref, left_scale: Ref, right_scale: Ref, bias: Ref | None = None,
    result_scale: Ref | None = None, *options: object,
) -> Expr | None:  # fmt: skip
    """One scale for a whole matrix, or for each of its rows and of the other's columns."""
    total = _sum_of_products(ctx, left, right)
    of_rows, of_columns = _scale(left_scale, out, 0), _scale(right_scale, out, 1)
    if total is None or of_rows is None or of_columns is None or result_scale is not None or not out.dtype.is_float:
        return None
    total = total * of_rows * of_columns
    if bias is not None:
        total = total + ctx.computing(bias.aligned(out.shape), bias.dtype)
    return ctx.convert(total, out.dtype)


def _scale(scale: Ref, out: Buffer, dim: int) -> Expr | None:
    """A factor of the result that varies along one of its dimensions, or not at all."""
    if scale.dtype is not DType.F32:
        return None
    if all(n is Poly.ONE for n in scale.shape):
        return scale.at([Poly.ZERO] * scale.ndim)
    own = tuple(n if k == dim else Poly.ONE for k, n in enumerate(out.shape))
    return scale.aligned(out.shape) if scale.shape == own else None
