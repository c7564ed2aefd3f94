"""A sum with at most one term that counts: sum over a of where(a == k, v, 0) is v where 0 <= k < extent.

Losses make such sums: the gradient of a gather is a scatter, and softmax's backward adds it up. Found through
operations that leave zero alone. What the other terms become is kept: zero, or NaN where a factor is not finite.
"""

from __future__ import annotations

from collections.abc import Callable

from ..ir.expr import Const, Expr, Index, Part, Pointwise, Reduce, const, pointwise, reduction_of
from ..ir.ops import CHECKED
from ..ir.poly import Axis, Poly

_KEEP_ZERO = ("cast", "widen", "narrow", "neg")


def sum_of_one(part: Part) -> Expr | None:
    """The value of a sum whose terms are zero but for one; None where it is not known to be one."""
    reduce = reduction_of(part, "sum")
    if reduce is None:
        return None
    for axis in reduce.over:
        found = _one_hot(reduce.inputs[0], axis)
        if found is None:
            continue
        term = _total(*found, axis.extent)
        rest = tuple(a for a in reduce.over if a is not axis)
        return Part(Reduce("sum", (term,), rest), 0) if rest else term
    return None


def _total(position: Expr, value: Expr, other: Expr, extent: Poly) -> Expr:
    """The sum: the one term where its position is inside, and the others, which are all zero or all NaN."""
    term = value if isinstance(other, Const) else pointwise("add", value, other)
    if isinstance(position, Pointwise) and position.op in CHECKED:
        limit = position.args[1]
        if (limit.poly if isinstance(limit, Index) else Poly.of(int(getattr(limit, "value", -1)))) is extent:
            return term  # its own check keeps it inside
    above = pointwise("ge", position, const(0, position.dtype))
    inside = pointwise("bitand", above, pointwise("lt", position, Index(extent)))
    return pointwise("where", inside, term, other)


def _one_hot(e: Expr, axis: Axis) -> tuple[Expr, Expr, Expr] | None:
    """(k, v, z) where e is v at axis == k and z elsewhere, all the same for all positions of the axis."""
    if not isinstance(e, Pointwise) or axis not in e.axes:
        return None
    if e.op in _KEEP_ZERO:
        found = _one_hot(e.args[0], axis)
        return found and _through(found, lambda x: pointwise(e.op, x, dtype=e.dtype))
    if e.op == "mul" and axis not in e.args[0].axes:
        found = _one_hot(e.args[1], axis)
        return found and _through(found, lambda x: pointwise("mul", e.args[0], x))
    if e.op in ("mul", "div"):
        found = _one_hot(e.args[0], axis) if axis not in e.args[1].axes else None
        return found and _through(found, lambda x: pointwise(e.op, x, e.args[1]))
    return _chosen(e, axis) if e.op == "where" else None


def _through(found: tuple[Expr, Expr, Expr], change: Callable[[Expr], Expr]) -> tuple[Expr, Expr, Expr]:
    position, value, other = found
    return position, change(value), change(other)


def _chosen(e: Pointwise, axis: Axis) -> tuple[Expr, Expr, Expr] | None:
    condition, value, other = e.args
    if not (isinstance(other, Const) and other.value == 0):
        return None
    if axis not in condition.axes:
        found = _one_hot(value, axis)
        return found and _through(found, lambda x: pointwise("where", condition, x, other))
    if axis in value.axes or not (isinstance(condition, Pointwise) and condition.op == "eq"):
        return None
    for place, position in (condition.args, condition.args[::-1]):
        if isinstance(place, Index) and place.poly.axis is axis and axis not in position.axes:
            return position, value, other
    return None
