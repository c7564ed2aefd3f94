"""Matrix products as sums of products: what an `Extern` of the library could be inside a kernel.

Operands keep their own type up to the product (`cast`, which a kernel does not undo): the matrix unit is given what
the library would be given. The planner decides which of the two runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..ir.dtypes import DType
from ..ir.expr import Expr, Part, Reduce, pointwise
from ..ir.poly import Axis
from ..ir.program import Buffer
from .context import Context
from .promotion import literal
from .values import Ref, axis

aten = torch.ops.aten
Rule = Callable[..., Expr | None]
CONTRACTIONS: dict[object, Rule] = {}
_OPERANDS = (DType.BF16, DType.F16, DType.F32)


def contracts(*targets: object) -> Callable[[Rule], Rule]:
    """Register the sum of products of an operation; called like it, with the context and its result in front."""

    def register(rule: Rule) -> Rule:
        CONTRACTIONS.update(dict.fromkeys(targets, rule))
        return rule

    return register


def _sum_of_products(ctx: Context, left: Ref, right: Ref) -> Expr | None:
    """Over the last dimension of one matrix and the last but one of the other, in float32."""
    inside = left.shape[-1]
    if left.dtype is not right.dtype or left.dtype not in _OPERANDS or inside.constant in (0, 1):
        return None
    batch = len(left.shape) - 2
    outer = [axis(k, left.shape[k]) for k in range(batch)]
    rows, columns = axis(batch, left.shape[-2]), axis(batch + 1, right.shape[-1])
    over = Axis("r0", inside)
    sides = (left.at([*outer, rows, over.poly()]), right.at([*outer, over.poly(), columns]))
    product = pointwise("mul", *(pointwise("cast", side, dtype=DType.F32) for side in sides))
    return Part(Reduce("sum", (product,), (over,)), 0)


@contracts(aten.mm.default, aten.bmm.default)
def product(ctx: Context, out: Buffer, left: Ref, right: Ref) -> Expr | None:
    total = _sum_of_products(ctx, left, right)
    return None if total is None else ctx.convert(total, out.dtype)


@contracts(aten.addmm.default, aten.baddbmm.default)
def sum_and_product(
    ctx: Context, out: Buffer, added: Ref, left: Ref, right: Ref, *, beta: Any = 1, alpha: Any = 1
) -> Expr | None:
    total = _sum_of_products(ctx, left, right)
    if total is None or not isinstance(beta, int | float) or not isinstance(alpha, int | float):
        return None
    if alpha != 1:
        total = pointwise("mul", total, literal(float(alpha), DType.F32))
    if beta != 0:
        term = ctx.computing(added.aligned(out.shape), out.dtype)
        total = pointwise("add", total, term if beta == 1 else pointwise("mul", term, literal(float(beta), DType.F32)))
    return ctx.convert(total, out.dtype)
