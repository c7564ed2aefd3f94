"""Terms that are the same for a whole row, moved out of maxima: one sweep then finds a row's maximum and uses it.

Rounding keeps order, so max(x - h) is max(x) - h to the last bit, for an h of the whole row. A score from which the
maximum is taken twice, by the user and by softmax, is then one from which it is taken once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from ..ir.expr import Expr, Part, Pointwise, Reduce, pointwise, reduction_of, rewrite
from ..ir.poly import Axis
from .inline import reductions
from .nest import direct_reductions

Term: TypeAlias = tuple[int, Expr]  # a sign, and what is added or taken off


def terms_of(e: Expr) -> list[Term]:
    """A sum and its terms, each with its sign."""
    found: list[Term] = []
    stack: list[Term] = [(1, e)]
    while stack:
        sign, x = stack.pop()
        match x:
            case Pointwise(op="add" | "sub", args=(first, second)):
                stack += [(sign if x.op == "add" else -sign, second), (sign, first)]
            case Pointwise(op="neg", args=(inner,)):
                stack.append((-sign, inner))
            case _:
                found.append((sign, x))
    return found


def total(terms: list[Term]) -> Expr:
    (sign, total), *others = sorted(terms, key=lambda t: -t[0])
    total = total if sign > 0 else pointwise("neg", total)
    for sign, term in others:
        total = pointwise("add" if sign > 0 else "sub", total, term)
    return total


def cancelled(terms: Iterable[Term]) -> list[Term]:
    """Terms without pairs that are the same but for the sign."""
    left: list[Term] = []
    for sign, term in terms:
        if (-sign, term) in left:
            left.remove((-sign, term))
        else:
            left.append((sign, term))
    return left


def extreme(e: Expr) -> Expr | None:
    """The value of an argmax or argmin whose position nobody may want: a plain maximum or minimum."""
    reduce = reduction_of(e, "argmax", "argmin")
    if reduce is None or e is not Part(reduce, 0):
        return None
    return Part(Reduce(reduce.monoid[3:], reduce.inputs[:1], reduce.over), 0)


def settled(e: Expr) -> Expr | None:
    """A value with what is the same for all of a row, and found by reductions, out of maxima and together."""
    if isinstance(e, Part) and isinstance(e.source, Reduce) and len(e.source.over) == 1:
        return _settled_reduction(e.source)
    if not isinstance(e, Pointwise) or e.op not in ("maximum", "minimum"):
        return None
    first, second = (terms_of(a) for a in e.args)
    shared = [t for t in first if t in second and reductions([t[1]])]
    rest = [[t for t in terms if t not in shared] for terms in (first, second)]
    if not shared or not all(rest):
        return None
    return total([(1, pointwise(e.op, *(total(terms) for terms in rest))), *shared])


def _settled_reduction(reduce: Reduce) -> Expr | None:
    (over,) = reduce.over
    body = reduce.inputs[0]
    if reduce.monoid in ("max", "min"):
        fixed, varying = _apart(body, over)
        if fixed and varying:
            return total([(1, Part(Reduce(reduce.monoid, (total(varying),), reduce.over), 0)), *fixed])
    if reduce.monoid == "sum":
        inside: dict[Expr, Expr] = {r: r for r in direct_reductions([body])}
        together = rewrite(body, lambda e: _regrouped(e, over), None, inside)
        return Part(Reduce("sum", (together,), reduce.over), 0) if together is not body else None
    return None


def _apart(e: Expr, over: Axis) -> tuple[list[Term], list[Term]]:
    """What of a sum is the same along an axis and found by reductions; the rest."""
    terms = terms_of(e)
    fixed = [t for t in terms if over not in t[1].axes and reductions([t[1]])]
    return fixed, [t for t in terms if t not in fixed]


def _regrouped(e: Expr, over: Axis) -> Expr | None:
    """exp(x - a - b) as exp(x - (a + b)), without what a and b have in common."""
    if not isinstance(e, Pointwise) or e.op != "exp":
        return None
    fixed, varying = _apart(e.args[0], over)
    left = cancelled(fixed)
    if len(fixed) < 2 or not left or not varying:
        return None
    return pointwise("exp", pointwise("sub", total(varying), total([(-sign, term) for sign, term in left])))
