"""Whether a sum may grow beside a maximum that it depends on, and what carries it along.

The rule must apply and hold on numbers. And before the maximum has met a term that counts it is -inf, to which
nothing can be carried: the sum's own terms must vanish wherever the maximum's are -inf (softmax's do).
"""

from __future__ import annotations

from collections.abc import Iterator

from ..ir.expr import Expr, Part, Pointwise, Reduce, const, postorder, substitute
from ..ir.monoids import lowest
from ..ir.poly import Axis
from .bounds import is_zero
from .factor import factor, holds, same_number


def transport(term: Expr, leader: Reduce, leading: Expr, axis: Axis) -> Expr | None:
    """h with which a sum of `term` over an axis follows a maximum of `leading` over it; None: it cannot."""
    result = Part(leader, 0)
    h = factor(term, result, axis)
    if h is None or not holds(term, result, h):
        return None
    worst = const(lowest(leading.dtype), leading.dtype)
    same: dict[Expr, Expr] = {e: worst for e in _exponents(term) if e is leading or same_number(e, leading)}
    return h if is_zero(substitute(term, {**same, leader: leader})) else None


def _exponents(term: Expr) -> Iterator[Expr]:
    """What is added up, or scaled, to what an exponential is taken of."""
    powers = [e for e in postorder([term], into_reductions=False) if isinstance(e, Pointwise) and e.op[:3] == "exp"]
    stack = [a for e in powers for a in e.args]
    while stack:
        e = stack.pop()
        yield e
        match e:
            case Pointwise(op="sub" | "cast" | "widen" | "narrow"):
                stack.append(e.args[0])
            case Pointwise(op="add" | "mul"):
                stack += e.args
