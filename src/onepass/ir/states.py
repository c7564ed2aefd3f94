"""States of monoids as expressions: the one that nothing has entered yet, and two that become one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .dtypes import DType
from .expr import Const, Expr, const, pointwise
from .monoids import identity

_OPERATIONS = {"sum": "add", "prod": "mul", "max": "maximum", "min": "minimum"}
JOINED = frozenset((*_OPERATIONS, "argmax", "argmin", "logsumexp"))  # the monoids that `joined` knows


def identities(monoid: str, dtypes: Iterable[DType]) -> list[Const]:
    """The state nothing has entered yet, one literal per part (`dtypes` are the parts')."""
    first = next(iter(dtypes))
    neutral = const(identity(monoid, first), first)
    match monoid:
        case "welford" | "welford_merge":
            return [neutral] * 3
        case "logsumexp" | "linear":
            return [neutral, const(0, first)]
        case "argmax" | "argmin":
            return [neutral, const((1 << 63) - 1, DType.I64)]  # loses every tie, so an equal first element enters
    return [neutral]


def share(x: Expr, top: Expr) -> Expr:
    """exp(x - top), also where both are the same infinity."""
    return pointwise("where", pointwise("eq", x, top), const(1.0, x.dtype), pointwise("exp", x - top))


def joined(monoid: str, before: Sequence[Expr], after: Sequence[Expr]) -> list[Expr]:
    """The state of what entered one state, then of what entered another."""
    if monoid in _OPERATIONS:
        return [pointwise(_OPERATIONS[monoid], before[0], after[0])]
    (value, index), (x, at) = before, after
    if monoid == "logsumexp":
        top = pointwise("maximum", value, x)
        return [top, index * share(value, top) + at * share(x, top)]
    is_nan = pointwise("isnan", x) & ~pointwise("isnan", value)
    equal = pointwise("eq", x, value) | (pointwise("isnan", x) & pointwise("isnan", value))
    beyond = pointwise("gt" if monoid == "argmax" else "lt", x, value)
    wins = beyond | is_nan | (equal & pointwise("lt", at, index))
    return [pointwise("where", wins, new, old) for new, old in ((x, value), (at, index))]
