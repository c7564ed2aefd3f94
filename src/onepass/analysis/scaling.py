"""What only scales a sum of products is taken out of it and multiplies the result instead.

So sums that wait for other sums (softmax's division) need not wait.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..ir.dtypes import DType
from ..ir.expr import Expr, Part, Pointwise, Reduce, const, pointwise, reduction_of, rewrite, substitute_axes
from ..ir.ops import CASTS
from ..ir.poly import Axis
from .factor import is_constant_zero, same_number
from .inline import reductions
from .nest import direct_reductions
from .operands import operands
from .shifts import Term, cancelled, terms_of, total


def scale_outside(e: Expr) -> Expr | None:
    """A sum of products without the factors that do not vary along it: they multiply the result instead."""
    reduce = reduction_of(e, "sum")
    sides = operands(reduce) if reduce is not None else None
    if reduce is None or sides is None or not sides[0].dtype.is_float:
        return None
    (over,) = reduce.over
    scaled = [_split(s, over) for s in sides]
    if all(s.factor is None and s.divisor is None for s in scaled):
        return None
    if not all(s.holds(side) for s, side in zip(scaled, sides, strict=True)):
        return None
    inputs = (pointwise("mul", *(_wide(s.inside) for s in scaled)),)
    result: Expr = Part(Reduce("sum", inputs, reduce.over), 0)
    for s in scaled:
        result = s.scale(result)
    return result


@dataclass(frozen=True, slots=True)
class _Scaled:
    """inside * factor / divisor."""

    inside: Expr
    factor: Expr | None = None
    divisor: Expr | None = None

    def holds(self, e: Expr) -> bool:
        """Whether it equals `e` on random numbers in float64."""
        return same_number(_wide(e), self.scale(_wide(self.inside)))

    def scale(self, e: Expr) -> Expr:
        """e * factor / divisor."""
        e = e if self.factor is None else pointwise("mul", e, self.factor)
        return e if self.divisor is None else pointwise("div", e, self.divisor)


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
            zero = next((k for k in (1, 2) if is_constant_zero(e.args[k])), None)
            if zero is not None:
                return _chosen(e, _split(e.args[3 - zero], over), zero, over)
        case "exp":
            return _split_exponent(e, over)
        case op if op in CASTS and e.args[0].dtype.is_float:
            inner = _split(e.args[0], over)
            if e.dtype is DType.F16 and not _fits_half(inner, over):
                inner = _split(rewrite(e.args[0], lambda x: _less_largest(x, over)), over)
                if not _fits_half(inner, over):
                    return _Scaled(e)
            return replace(inner, inside=pointwise(op, inner.inside, dtype=e.dtype))
    return _Scaled(e)


def _chosen(e: Pointwise, inner: _Scaled, zero: int, over: Axis) -> _Scaled:
    """A choice between something scaled and zero, its argument of that number.

    Where nothing is chosen along the sum it is zero, whatever scales it: a statistic of no terms may be no number.
    """
    condition = e.args[0]
    sides = (inner.inside, e.args[2]) if zero == 2 else (e.args[1], inner.inside)
    inside = pointwise("where", condition, *sides, dtype=e.dtype)
    scales = (inner.factor, inner.divisor)
    if not direct_reductions(x for x in scales if x is not None):
        return replace(inner, inside=inside)
    taken = condition if zero == 2 else pointwise("bitnot", condition)
    if not _scales(taken, over):
        count = Part(Reduce("sum", (pointwise("cast", taken, dtype=DType.F32),), (over,)), 0)
        taken = pointwise("ne", count, const(0.0, DType.F32))
    guarded = (x if x is None else pointwise("where", taken, x, const(1.0, x.dtype), dtype=x.dtype) for x in scales)
    return _Scaled(inside, *guarded)


def _fits_half(s: _Scaled, over: Axis) -> bool:
    """Whether what is scaled is within what float16 has digits for, as it is: what scales it may have made it so.

    Exponentials of which the largest is 1 are. Some of them alone may all be small: then what divides them must be
    the sum of all, so that they were even smaller.
    """
    weight, others = s.inside, False
    while True:
        match weight:
            case Pointwise(op="where", args=(_, first, second)) if is_constant_zero(first) or is_constant_zero(second):
                weight, others = (second if is_constant_zero(first) else first), True
            case Pointwise(op="mul", args=(first, second)) if _is_zero_or_one(first) or _is_zero_or_one(second):
                weight, others = (second if _is_zero_or_one(first) else first), True
            case Pointwise(op=op) if op in CASTS and weight.dtype is not DType.F16:
                weight = weight.args[0]
            case _:
                break
    if weight.dtype is DType.F16:
        return True
    sums = [r for r in direct_reductions(x for x in (s.factor, s.divisor) if x is not None) if r.monoid == "sum"]
    whole = all(_is_zero_or_one(r.inputs[0]) or _largest_is_one(r.inputs[0], r.over[0]) for r in sums)
    return _largest_is_one(weight, over) and (whole or not others)


def _largest_is_one(e: Expr, over: Axis) -> bool:
    """Whether it is the exponential of numbers along an axis, less the largest of them."""
    if not isinstance(e, Pointwise) or e.op != "exp":
        return False
    tops = [r for r in direct_reductions([e]) if r.monoid == "max" and len(r.over) == 1]
    return any(same_number(e.args[0], _below(r, over)) for r in tops)


def _below(top: Reduce, over: Axis) -> Expr:
    """What a maximum is the largest of, along an axis, less the maximum."""
    return pointwise("sub", substitute_axes(top.inputs[0], {top.over[0]: over.poly()}), Part(top, 0))


def _is_zero_or_one(e: Expr) -> bool:
    return isinstance(e, Pointwise) and e.op in CASTS and e.args[0].dtype is DType.BOOL


def _split_exponent(e: Pointwise, over: Axis, always: bool = False) -> _Scaled:
    """exp(x - l) with l made of a sum over x: exp(x - m) * exp(m - l), with the maximum m that l is made of.

    What is the same for all of a row, and part of what m is the largest of, stays beside m. Where the sum is one of
    exp(x - n), with n made of m, that is taken: one exponential serves both. `always`: whatever else l is made of, if
    m is the largest x.
    """
    terms = terms_of(e.args[0])
    varying, fixed = ([t for t in terms if (over in t[1].axes) == wanted] for wanted in (True, False))
    found = reductions(term for _, term in fixed)
    tops = [r for r in found if r.monoid == "max"]
    sums = [r for r in found if r.monoid == "sum" and not set(tops).isdisjoint(reductions(r.inputs))]
    if not varying or len(tops) != 1 or not (sums or always):
        return _Scaled(e)
    shared = None if always else next((t for r in sums if (t := _shared_shift(r, varying, over)) is not None), None)
    if shared is None:
        shared = [t for t in terms_of(tops[0].inputs[0]) if not t[1].axes.intersection(tops[0].over)]
        shared.append((-1, Part(tops[0], 0)))
    fixed = cancelled([*fixed, *((-sign, term) for sign, term in shared)])
    inside = pointwise("exp", total([*varying, *shared]))
    if always and not _largest_is_one(inside, over):
        return _Scaled(e)
    return _Scaled(inside, pointwise("exp", total(fixed)) if fixed else None)


def _less_largest(e: Expr, over: Axis) -> Expr | None:
    """An exponential of which the largest is 1, times what is left of it for all of a row."""
    if not isinstance(e, Pointwise) or e.op != "exp":
        return None
    s = _split_exponent(e, over, always=True)
    return None if s.factor is None else pointwise("mul", s.inside, s.factor)


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
