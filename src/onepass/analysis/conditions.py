"""Conditions on axes: deciding comparisons, and the breakpoints where a loop should be cut.

cat, pad and masks compare an axis with a size; cutting the loop there makes each piece unconditional.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..ir.dtypes import DType
from ..ir.expr import Const, Expr, Index, Pointwise, const, pointwise, postorder, rewrite
from ..ir.poly import Axis, Poly, nonnegative

_COMPARISONS = frozenset(("lt", "le", "gt", "ge"))


def has_conditions(values: Iterable[Expr]) -> bool:
    """Whether any comparison of index polys appears."""
    return any(as_difference(e) is not None for e in postorder(list(values)))


def as_difference(e: Expr) -> tuple[Poly, Poly] | None:
    """(low, high) with the comparison equal to low < high."""
    if not isinstance(e, Pointwise) or e.op not in _COMPARISONS:
        return None
    left, right = (_poly(a) for a in e.args)
    if left is None or right is None:
        return None
    match e.op:
        case "lt":
            return left, right
        case "le":
            return left, right + 1
        case "gt":
            return right, left
    return right, left + 1


def _poly(e: Expr) -> Poly | None:
    if isinstance(e, Index):
        return e.poly
    if isinstance(e, Const) and e.dtype is DType.I64:
        return Poly.of(int(e.value))
    return None


def breakpoints(values: Iterable[Expr], axis: Axis) -> set[Poly]:
    """Positions of `axis` where some comparison with it changes its outcome."""
    found: set[Poly] = set()
    for e in postorder(list(values)):
        pair = as_difference(e)
        if pair is None:
            continue
        difference = pair[1] - pair[0]  # true while > 0
        coefficient = difference.coefficient(axis)
        if coefficient is None or difference.axes != {axis}:
            continue
        if coefficient.constant == -1:  # rest - axis > 0
            found.add(difference + axis)
        elif coefficient.constant == 1:  # axis + rest > 0
            found.add(Poly.ONE - (difference - axis))
    return found


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
        pair = as_difference(e)
        if pair is not None:
            low, high = (p.substitute(bindings) for p in pair)
            if nonnegative(high - low - 1):
                return const(True, DType.BOOL)
            return const(False, DType.BOOL) if nonnegative(low - high) else None
        if isinstance(e, Pointwise) and e.op in ("bitand", "bitor", "bitnot"):
            return fold_logic(e)
        if isinstance(e, Pointwise) and e.op == "where":
            return pointwise("where", *e.args, dtype=e.dtype)
        return None

    memo: dict[Expr, Expr] = {r: r for r in finished}
    return tuple(rewrite(v, fold, None, memo) for v in values)


def fold_logic(e: Pointwise) -> Expr | None:
    """What is left of an operation on bools when one side is known; None if neither is, or they are integers' bits."""
    if e.dtype is not DType.BOOL:
        return None
    if e.op == "bitnot":
        a = e.args[0]
        return const(not a.value, DType.BOOL) if isinstance(a, Const) else None
    for a, b in (e.args, e.args[::-1]):
        if isinstance(a, Const):
            absorbing = (e.op == "bitor") == bool(a.value)
            return a if absorbing else b
    return None
