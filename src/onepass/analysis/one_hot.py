"""A sum with at most one term: sum over a of where(a == k, v, 0) is v where 0 <= k < extent.

Losses make such sums: the gradient of a gather is a scatter, and softmax's backward adds it up. Found through
operations that leave zero alone; a factor is taken to be finite, as eager's own backward kernels do.
"""

from __future__ import annotations

from ..ir.expr import Const, Expr, Index, Part, Pointwise, Reduce, const, pointwise
from ..ir.poly import Axis, Poly

_KEEP_ZERO = ("cast", "widen", "narrow", "neg")


def sum_of_one(part: Part) -> Expr | None:
    """The value of a sum whose terms are zero but for one; None where it is not known to be one."""
    reduce = part.source
    if not isinstance(reduce, Reduce) or reduce.monoid != "sum":
        return None
    for axis in reduce.over:
        found = _one_hot(reduce.inputs[0], axis)
        if found is None:
            continue
        term = _where_inside(*found, axis.extent)
        rest = tuple(a for a in reduce.over if a is not axis)
        return Part(Reduce("sum", (term,), rest), 0) if rest else term
    return None


def _where_inside(position: Expr, value: Expr, extent: Poly) -> Expr:
    if isinstance(position, Pointwise) and position.op in ("check_index", "wrap_index"):
        limit = position.args[1]
        if (limit.poly if isinstance(limit, Index) else Poly.of(int(getattr(limit, "value", -1)))) is extent:
            return value  # its own check keeps it inside
    above = pointwise("ge", position, const(0, position.dtype))
    inside = pointwise("bitand", above, pointwise("lt", position, Index(extent)))
    return pointwise("where", inside, value, const(0, value.dtype))


def _one_hot(e: Expr, axis: Axis) -> tuple[Expr, Expr] | None:
    """(k, v) where e is v at axis == k and zero elsewhere, both the same for all positions of the axis."""
    if not isinstance(e, Pointwise) or axis not in e.axes:
        return None
    if e.op in _KEEP_ZERO:
        found = _one_hot(e.args[0], axis)
        return found and (found[0], Pointwise(e.op, (found[1],), e.dtype))
    if e.op in ("mul", "div"):
        for k, other in ((0, e.args[1]), (1, e.args[0])):
            if axis in other.axes or (e.op == "div" and k == 1):
                continue
            found = _one_hot(e.args[k], axis)
            if found is not None:
                args = (found[1], other) if k == 0 else (other, found[1])
                return found[0], Pointwise(e.op, args, e.dtype)
        return None
    if e.op != "where":
        return None
    condition, value, other = e.args
    if not (isinstance(other, Const) and other.value == 0):
        return None
    if axis not in condition.axes:
        found = _one_hot(value, axis)
        return found and (found[0], pointwise("where", condition, found[1], other))
    if axis in value.axes or not (isinstance(condition, Pointwise) and condition.op == "eq"):
        return None
    for place, position in (condition.args, condition.args[::-1]):
        if isinstance(place, Index) and place.poly.axis is axis and axis not in position.axes:
            return position, value
    return None
