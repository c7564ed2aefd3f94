"""Conditions on axes: deciding comparisons, and the breakpoints where a loop should be cut.

cat, pad and masks compare an axis with a size; cutting the loop there makes each piece unconditional.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from ..ir.dtypes import DType
from ..ir.expr import Const, Expr, Index, Pointwise, const, postorder, rewrite
from ..ir.poly import Axis, Poly, Quotient, lower_bound, nonnegative, upper_bound

_COMPARISONS = frozenset(("lt", "le", "gt", "ge"))
_ARITHMETIC = frozenset(("cast", "narrow", "widen", "neg", "add", "sub", "mul", "floordiv", "truncdiv"))
_LARGEST = {DType.I32: (1 << 31) - 1, DType.F64: 1 << 53, DType.F32: 1 << 24, DType.F16: 1 << 11, DType.BF16: 1 << 8}
MOST_DEPTH = 8  # of arithmetic on positions


def has_conditions(values: Iterable[Expr]) -> bool:
    """Whether any comparison of index polys appears."""
    return any(difference(e) is not None for e in postorder(list(values)))


def difference(e: Expr) -> Poly | None:
    """The number that is positive where a comparison of positions holds; None for any other expression."""
    if not isinstance(e, Pointwise) or e.op not in _COMPARISONS:
        return None
    left, right = (position(a) for a in e.args)
    if left is None or right is None:
        return None
    return (right - left if e.op in ("lt", "le") else left - right) + (e.op in ("le", "ge"))


def position(e: Expr, depth: int = MOST_DEPTH) -> Poly | None:
    """The whole number that a value is, if it is one of positions alone and its type has them all."""
    if isinstance(e, Index):
        return e.poly
    if isinstance(e, Const) and e.dtype is not DType.BOOL:
        return Poly.of(int(e.value)) if math.isfinite(e.value) and e.value == int(e.value) else None
    if not isinstance(e, Pointwise) or e.op not in _ARITHMETIC or not depth:
        return None
    if e.op in ("floordiv", "truncdiv") and not e.dtype.is_integer:
        return None
    parts = [position(a, depth - 1) for a in e.args]
    numbers = [p for p in parts if p is not None]
    if len(numbers) < len(parts) or all(isinstance(a, Const) for a in e.args):
        return None
    result = _computed(e.op, numbers)
    return result if result is not None and _has(e.dtype, result) else None


def _computed(op: str, numbers: list[Poly]) -> Poly | None:
    match op, numbers:
        case "cast" | "narrow" | "widen", [a]:
            return a
        case "neg", [a]:
            return -a
        case "add", [a, b]:
            return a + b
        case "sub", [a, b]:
            return a - b
        case "mul", [a, b] if a.constant is not None or b.constant is not None:
            return a * b
        case "floordiv" | "truncdiv", [a, b] if b.constant is not None and b.constant > 0:
            return a // b if op == "floordiv" or nonnegative(a) else None
    return None


def _has(dtype: DType, number: Poly) -> bool:
    """Whether a type has every value of a position. What int64 computes is never out of its range."""
    if dtype is DType.I64:
        return True
    low, high = lower_bound(number), upper_bound(number)
    if low is None or high is None or low.constant is None or high.constant is None or dtype not in _LARGEST:
        return False
    return -_LARGEST[dtype] <= low.constant and high.constant <= _LARGEST[dtype]


def breakpoints(values: Iterable[Expr], axis: Axis) -> set[Poly]:
    """Positions of `axis` where some comparison with it changes its outcome."""
    numbers = (difference(e) for e in postorder(list(values)))
    points = (_turn(d, axis) for d in numbers if d is not None and d.axes == {axis})
    return {p for p in points if p is not None}


def _turn(d: Poly, axis: Axis) -> Poly | None:
    """The position of `axis` from which a number is positive, or no longer; None where it may turn more than once."""
    varying = [(monomial, step) for monomial, step in d.terms if any(axis in a.axes for a in monomial)]
    if len(varying) != 1 or len(varying[0][0]) != 1:
        return None
    ((atom,), step) = varying[0]
    rest = d - atom * step
    at = -rest // step + 1 if step > 0 else (rest - step - 1) // -step
    if isinstance(atom, Quotient):
        return _turn(atom.numerator - atom.denominator * at + 1, axis)
    return at if atom is axis else None


def ordered(points: set[Poly], extent: Poly) -> list[Poly] | None:
    """0, the points inside (0, extent) in order, extent; None if their order cannot be proven."""
    inside = [p for p in points if nonnegative(p - 1) and nonnegative(extent - 1 - p)]
    if any(p not in inside and not nonnegative(-p) and not nonnegative(p - extent) for p in points):
        return None
    result: list[Poly] = []
    for p in inside:
        place = 0
        while place < len(result) and nonnegative(p - result[place]):
            place += 1
        if place < len(result) and not nonnegative(result[place] - p):
            return None
        if not (place and result[place - 1] is p):
            result.insert(place, p)
    return [Poly.ZERO, *result, extent]


def specialise(
    values: tuple[Expr, ...], bindings: Mapping[Axis, Poly], finished: Iterable[Expr] = ()
) -> tuple[Expr, ...]:
    """Fold the comparisons that the bound axes' ranges decide, and what hangs on them.

    `finished` reductions have been computed as they are and stay so.
    """
    if not has_conditions(values):
        return values

    def fold(e: Expr) -> Expr | None:
        if (d := difference(e)) is None:
            return fold_logic(e)
        d = d.substitute(bindings)
        holds = nonnegative(d - 1)
        return const(holds, DType.BOOL) if holds or nonnegative(-d) else None

    memo: dict[Expr, Expr] = {r: r for r in finished}
    return tuple(rewrite(v, fold, None, memo) for v in values)


def fold_logic(e: Expr) -> Expr | None:
    """What is left of an operation on bools when one side is known; None if neither is, and for any other value."""
    if e.dtype is not DType.BOOL or not isinstance(e, Pointwise) or e.op not in ("bitand", "bitor", "bitnot"):
        return None
    if e.op == "bitnot":
        a = e.args[0]
        return const(not a.value, DType.BOOL) if isinstance(a, Const) else None
    for a, b in (e.args, e.args[::-1]):
        if isinstance(a, Const):
            absorbing = (e.op == "bitor") == bool(a.value)
            return a if absorbing else b
    return None
