"""The matrices of a product: `Reduce(sum, a * b, k)` whose operands each lack an axis the other has."""

from __future__ import annotations

from ..ir.dtypes import DType
from ..ir.expr import Expr, Pointwise, Reduce
from ..ir.poly import Axis


def operands(reduce: Reduce) -> tuple[Expr, Expr] | None:
    """The matrices of a product, as the matrix unit is given them; None for any other reduction."""
    if (factors := factors_of(reduce)) is None:
        return None
    left, right = map(uncast, factors)
    own = (left.axes - right.axes, right.axes - left.axes)
    if left.dtype is not right.dtype or not all(own) or not all(reduce.over[0] in s.axes for s in (left, right)):
        return None
    return left, right


def factors_of(reduce: Reduce) -> tuple[Expr, Expr] | None:
    """What each term of a sum over one axis is the product of."""
    body = reduce.inputs[0]
    if reduce.monoid != "sum" or len(reduce.over) != 1 or not isinstance(body, Pointwise) or body.op != "mul":
        return None
    left, right = body.args
    return left, right


def uncast(e: Expr) -> Expr:
    """An operand of 32 bits before it was widened from what the matrix unit takes."""
    if isinstance(e, Pointwise) and e.op == "cast":
        (inner,) = e.args
        if inner.dtype.is_half or inner.dtype is (DType.I8 if e.dtype is DType.I32 else DType.F8E4M3):
            return inner
    return e


def sided(sides: tuple[Expr, Expr], rows: Axis) -> tuple[Expr, Expr]:
    """The operand that has the rows first."""
    return sides if rows in sides[0].axes else sides[::-1]
