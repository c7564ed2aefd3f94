"""What only scales a sum of products is taken out of it and multiplies the result instead.

So sums that wait for other sums (softmax's division) need not wait.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..ir.dtypes import DType
from ..ir.expr import Const, Expr, Part, Pointwise, Reduce, pointwise, substitute_axes
from ..ir.ops import CASTS
from ..ir.poly import Axis
from .factor import same_number
from .inline import reductions
from .operands import operands
from .shifts import Term, terms_of, total


def scale_outside(e: Expr) -> Expr | None:
    """A sum of products without the factors that do not vary along it: they multiply the result instead."""
    if not isinstance(e, Part) or not isinstance(e.source, Reduce):
        return None
    reduce = e.source
    sides = operands(reduce)
    if sides is None or not sides[0].dtype.is_float:
        return None
    (over,) = reduce.over
    scaled = [_split(s, over) for s in sides]
    if all(s.factor is None and s.divisor is None for s in scaled):
        return None
    if not all(s.holds(side) for s, side in zip(scaled, sides, strict=True)):
        return None
    inputs = (pointwise("mul", *(pointwise("cast", s.inside, dtype=DType.F32) for s in scaled)),)
    result: Expr = Part(Reduce("sum", inputs, reduce.over), 0)
    for s in scaled:
        if s.factor is not None:
            result = pointwise("mul", result, s.factor)
        if s.divisor is not None:
            result = pointwise("div", result, s.divisor)
    return result


@dataclass(frozen=True, slots=True)
class _Scaled:
    """inside * factor / divisor."""

    inside: Expr
    factor: Expr | None = None
    divisor: Expr | None = None

    def holds(self, e: Expr) -> bool:
        """Whether it equals `e` on random numbers in float64."""
        whole = _wide(self.inside)
        if self.factor is not None:
            whole = pointwise("mul", whole, self.factor)
        if self.divisor is not None:
            whole = pointwise("div", whole, self.divisor)
        return same_number(_wide(e), whole)


def _wide(e: Expr) -> Expr:
    return pointwise("cast", e, dtype=DType.F32)


def _split(e: Expr, over: Axis) -> _Scaled:
    """An expression and what of it only scales it, because it does not vary along `over`."""
    if not isinstance(e, Pointwise):
        return _Scaled(e)
    match e.op:
        case "mul":
            for a, b in (e.args, e.args[::-1]):
                if _scales(b, over):
                    inner = _split(a, over)
                    return replace(inner, factor=_times(inner.factor, b))
            first, second = (_split(a, over) for a in e.args)
            return _Scaled(
                pointwise("mul", first.inside, second.inside),
                _times(first.factor, second.factor),
                _times(first.divisor, second.divisor),
            )
        case "div":
            inner = _split(e.args[0], over)
            if _scales(e.args[1], over):
                return replace(inner, divisor=_times(inner.divisor, e.args[1]))
            return replace(inner, inside=pointwise("div", inner.inside, e.args[1]))
        case "where":
            inner = _split(e.args[1], over)
            if isinstance(e.args[2], Const) and e.args[2].value == 0:
                return replace(inner, inside=pointwise("where", e.args[0], inner.inside, e.args[2], dtype=e.dtype))
        case "exp":
            return _split_exponent(e, over)
        case op if op in CASTS and e.args[0].dtype.is_float:
            inner = _split(e.args[0], over)
            if e.dtype is DType.F16 and not _fits_half(inner.inside):
                return _Scaled(e)
            return replace(inner, inside=pointwise(op, inner.inside, dtype=e.dtype))
    return _Scaled(e)


def _fits_half(e: Expr) -> bool:
    """Whether a value is certainly within what float16 has digits for, as it is: what scaled it may have made it so."""
    match e:
        case Pointwise(op="exp"):  # of a score less the largest: one of them is 1
            return any(sign < 0 and _is_maximum(t) for sign, t in terms_of(e.args[0]))
        case Pointwise(op="where", args=(_, value, other)):
            return _fits_half(value) and isinstance(other, Const) and abs(other.value) <= 1
        case Pointwise(op="mul", args=(first, second)):
            sides = ((first, second), (second, first))
            return any(_fits_half(a) and _is_zero_or_one(b) for a, b in sides)
        case Pointwise(op=op) if op in CASTS and e.dtype is not DType.F16:
            return _fits_half(e.args[0])
    return e.dtype is DType.F16


def _is_maximum(e: Expr) -> bool:
    return isinstance(e, Part) and isinstance(e.source, Reduce) and e.source.monoid == "max"


def _is_zero_or_one(e: Expr) -> bool:
    return isinstance(e, Pointwise) and e.op in CASTS and e.args[0].dtype is DType.BOOL


def _split_exponent(e: Pointwise, over: Axis) -> _Scaled:
    """exp(x - l) with l made of a sum over x: exp(x - m) * exp(m - l), with the maximum m that l is made of.

    What is the same for all of a row, and part of what m is the largest of, stays beside m. Where the sum is one of
    exp(x - n), with n made of m, that is taken: one exponential serves both.
    """
    terms = terms_of(e.args[0])
    varying, fixed = ([t for t in terms if (over in t[1].axes) == wanted] for wanted in (True, False))
    found = reductions(term for _, term in fixed)
    tops = [r for r in found if r.monoid == "max"]
    sums = [r for r in found if r.monoid == "sum" and not set(tops).isdisjoint(reductions(r.inputs))]
    if not varying or len(tops) != 1 or not sums:
        return _Scaled(e)
    beside = next((shared for r in sums if (shared := _shared_shift(r, varying, over)) is not None), None)
    if beside is None:
        beside = [t for t in terms_of(tops[0].inputs[0]) if not t[1].axes.intersection(tops[0].over)]
        beside.append((-1, Part(tops[0], 0)))
    for sign, term in beside:  # what is there already is not taken off twice
        if (sign, term) in fixed:
            fixed.remove((sign, term))
        else:
            fixed.append((-sign, term))
    inside = pointwise("exp", total([*varying, *beside]))
    return _Scaled(inside, pointwise("exp", total(fixed)) if fixed else None)


def _shared_shift(r: Reduce, varying: list[Term], over: Axis) -> list[Term] | None:
    """What a sum of exponentials adds to the same varying terms, for all of a row."""
    (body,) = r.inputs
    if not isinstance(body, Pointwise) or body.op != "exp" or len(r.over) != 1:
        return None
    terms = [(sign, substitute_axes(t, {r.over[0]: over.poly()})) for sign, t in terms_of(body.args[0])]
    shift = [t for t in terms if over not in t[1].axes]
    return shift if [t for t in terms if t not in shift] == varying else None


def _scales(e: Expr, over: Axis) -> bool:
    return over not in e.axes


def _times(a: Expr | None, b: Expr | None) -> Expr | None:
    return b if a is None else a if b is None else pointwise("mul", a, b)
