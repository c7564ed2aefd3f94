"""Masks that are inequalities of positions: which steps of a sweep they rule out, and which they leave alone.

A term that is the identity of its reduction wherever a condition fails need not be visited there. For a tile of rows
the condition `d(row, swept) > 0`, affine in both, bounds the swept class from one side: beyond the loosest row
nothing matters, within the tightest one the condition always holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ..ir.dtypes import DType
from ..ir.expr import Const, Expr, Pointwise, const, rewrite
from ..ir.monoids import identity
from ..ir.poly import Axis, Poly
from .conditions import as_difference, fold_logic


@dataclass(frozen=True, slots=True)
class Bound:
    """A condition that holds for positions below (or from) a line: `loose` for some row of a tile, `tight` for all."""

    condition: Expr
    upper: bool
    loose: Poly  # upper: the first position out of reach; lower: the first within
    tight: Poly  # upper: the first position where it may fail; lower: the first where it always holds
    grows: bool  # with the row


def find_bounds(term: Expr, monoid: str, rows: Axis, swept: Axis, first_row: Poly, lanes: int) -> list[Bound]:
    """The bounds that a term of a reduction over `swept` gives, for rows [first_row, first_row + lanes)."""
    found: list[Bound] = []
    for condition in _required(term, identity(monoid, term.dtype)):
        pair = as_difference(condition)
        if pair is None:
            continue
        difference = pair[1] - pair[0]  # holds where > 0
        along, across = difference.coefficient(swept), difference.coefficient(rows)
        if along is None or across is None or along.constant not in (1, -1) or across.constant is None:
            continue
        rest = difference - along * swept - across * rows
        if rest.axes & {rows, swept}:
            continue
        last_row = first_row + (lanes - 1)
        most, least = (last_row, first_row) if across.constant > 0 else (first_row, last_row)
        high, low = rest + across * most, rest + across * least
        if along.constant == -1:  # swept < across * row + rest
            found.append(Bound(condition, True, high, low, across.constant > 0))
        else:  # swept > -(across * row + rest)
            found.append(Bound(condition, False, Poly.ONE - high, Poly.ONE - low, across.constant < 0))
    return found


def _required(term: Expr, neutral: object) -> Iterable[Expr]:
    """Conditions without which the term is neutral."""
    stack = [term]
    while stack:
        e = stack.pop()
        if not isinstance(e, Pointwise) or e.op != "where":
            continue
        condition, a, b = e.args
        if isinstance(b, Const) and b.value == neutral:
            yield from _conjuncts(condition)
            stack.append(a)
        elif isinstance(a, Const) and a.value == neutral:
            yield from (n for c in _disjuncts(condition) if (n := negated(c)) is not None)
            stack.append(b)


def _conjuncts(e: Expr) -> Iterable[Expr]:
    if isinstance(e, Pointwise) and e.op == "bitand":
        for a in e.args:
            yield from _conjuncts(a)
    elif isinstance(e, Pointwise) and e.op == "bitnot":
        yield from (n for c in _disjuncts(e.args[0]) if (n := negated(c)) is not None)
    else:
        yield e


def _disjuncts(e: Expr) -> Iterable[Expr]:
    if isinstance(e, Pointwise) and e.op == "bitor":
        for a in e.args:
            yield from _disjuncts(a)
    else:
        yield e


_OPPOSITE = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt"}


def negated(e: Expr) -> Expr | None:
    """The opposite comparison of positions."""
    if isinstance(e, Pointwise) and e.op in _OPPOSITE and as_difference(e) is not None:
        return Pointwise(_OPPOSITE[e.op], e.args, DType.BOOL)
    return None


def vanishes(term: Expr, condition: Expr, finished: Iterable[Expr]) -> bool:
    """Whether a term of a sum is provably zero where a condition fails: only then may it be left out there."""
    opposite = negated(condition)
    return opposite is not None and is_zero(assuming(term, (opposite,), finished))


def is_zero(e: Expr) -> bool:
    """Whether it is provably zero, as long as what it is multiplied with is a number."""
    if isinstance(e, Const):
        return e.value == 0
    if not isinstance(e, Pointwise):
        return False
    match e.op:
        case "mul":
            return any(map(is_zero, e.args))
        case "cast" | "narrow" | "widen":
            return is_zero(e.args[0])
        case "where":
            return all(map(is_zero, e.args[1:]))
        case "exp" | "exp2":
            return _is_lowest(e.args[0])
    return False


def _is_lowest(e: Expr) -> bool:
    """Whether it is -inf, as long as what is added to it is a number."""
    if isinstance(e, Const):
        return e.dtype.is_float and float(e.value) == -math.inf
    if not isinstance(e, Pointwise):
        return False
    match e.op:
        case "add":
            return any(map(_is_lowest, e.args))
        case "sub" | "cast" | "narrow" | "widen":
            return _is_lowest(e.args[0])
        case "mul":
            pairs = (e.args, e.args[::-1])
            return any(_is_lowest(a) and isinstance(b, Const) and float(b.value) > 0 for a, b in pairs)
        case "where":
            return all(map(_is_lowest, e.args[1:]))
    return False


def assuming(value: Expr, conditions: Iterable[Expr], finished: Iterable[Expr]) -> Expr:
    """The value where the conditions hold. `finished` reductions stay as they are."""
    true, false = const(True, DType.BOOL), const(False, DType.BOOL)
    memo: dict[Expr, Expr] = {r: r for r in finished}
    for c in conditions:
        memo[c] = true
        if (opposite := negated(c)) is not None:
            memo[opposite] = false

    def fold(e: Expr) -> Expr | None:
        return fold_logic(e) if isinstance(e, Pointwise) and e.op in ("bitand", "bitor", "bitnot") else None

    return rewrite(value, fold, None, memo)
