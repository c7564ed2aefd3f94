"""Masks that are inequalities of positions: which steps of a sweep they rule out, and which they leave alone.

A term that is the identity of its reduction wherever a condition fails need not be visited there. For a tile of rows
the condition `d(row, swept) > 0`, monotone in both, bounds the swept class from one side: beyond the loosest row
nothing matters, within the tightest one the condition always holds. Where one of two conditions is enough, what they
leave are two ranges.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from ..ir.dtypes import DType
from ..ir.expr import Const, Expr, Load, Pointwise, const, postorder, rewrite
from ..ir.monoids import lowest
from ..ir.ops import CASTS
from ..ir.poly import Axis, Poly, Quotient
from .conditions import fold_logic
from .formulas import (
    ALWAYS,
    NEVER,
    Data,
    Every,
    Formula,
    Positive,
    Some,
    added_number,
    adds,
    chosen,
    decide,
    every,
    formulas,
    some,
)

MOST_RANGES = 2


@dataclass(frozen=True, slots=True)
class Bound:
    """A condition that holds for positions below (or from) a line: `loose` for some row of a tile, `tight` for all."""

    difference: Poly  # the condition is that it is positive
    upper: bool
    loose: Poly  # upper: the first position out of reach; lower: the first within
    tight: Poly  # upper: the first position where it may fail; lower: the first where it always holds
    slope: int  # with the row: 1 if the line rises, -1 if it falls


Range: TypeAlias = tuple[Bound, ...]


def find_ranges(needed: Formula, rows: Axis, swept: Axis, first_row: Poly, lanes: int) -> list[Range]:
    """Positions of `swept` that may count for rows [first_row, first_row + lanes): one range, or several in order.

    Of several each one but the last starts where the class does, and has one end.
    """
    bounds: dict[Poly, Bound | None] = {}
    for d in _differences(needed):
        bounds[d] = find_bound(d, rows, swept, first_row, lanes)
    ranges = [tuple(b for d in one if (b := bounds[d]) is not None) for one in _ranges(needed, bounds)]
    ranges.sort(key=lambda one: (any(not b.upper for b in one), any(b.slope for b in one)))
    if any(not b.upper for one in ranges[:-1] for b in one):
        return [()]
    return [*((min(one, key=lambda b: abs(b.slope)),) for one in ranges[:-1]), ranges[-1]]


def _differences(formula: Formula) -> Iterable[Poly]:
    match formula:
        case Positive(d):
            yield d
        case Every(parts) | Some(parts):
            for part in parts:
                yield from _differences(part)


_Held: TypeAlias = tuple[Poly, ...]  # differences that are positive in a range


def _ranges(formula: Formula, bounds: dict[Poly, Bound | None]) -> list[_Held]:
    """Ranges outside of which a formula fails: one of them everything where nothing better is known."""
    match formula:
        case Positive(d):
            return [(d,)] if bounds[d] is not None else [()]
        case Every(parts):
            found: list[_Held] = [()]
            for part in parts:
                both = _distinct((*a, *b) for a in found for b in _ranges(part, bounds))
                found = both if len(both) <= MOST_RANGES else found
            return found
        case Some(parts):
            either = _distinct(one for part in parts for one in _ranges(part, bounds))
            return either if len(either) <= MOST_RANGES else [()]
    return [()]


def _distinct(ranges: Iterable[_Held]) -> list[_Held]:
    """Ranges that are within no other one."""
    found: list[_Held] = []
    for one in ranges:
        if not any(_within(one, other) for other in found):
            found = [*(other for other in found if not _within(other, one)), _least(one)]
    return found


def _least(one: _Held) -> _Held:
    """A range without the conditions that others of it imply."""
    left = list(dict.fromkeys(one))
    for d in tuple(left):
        if decide(Positive(d), [Positive(other) for other in left if other is not d]):
            left.remove(d)
    return tuple(left)


def _within(one: _Held, other: _Held) -> bool:
    return all(decide(Positive(d), map(Positive, one)) for d in other)


def find_bound(difference: Poly, rows: Axis, swept: Axis, first_row: Poly, lanes: int) -> Bound | None:
    """The bound of the swept class that a condition gives for a tile of rows."""
    solved = _solved(difference, swept)
    along = solved.coefficient(swept) if solved is not None else None
    if solved is None or along is None or along.constant not in (1, -1):
        return None
    rest = solved - along * swept
    slope = _slope(rest, rows)
    if swept in rest.axes or slope is None or rest.indirects():
        return None
    ends = (first_row, first_row + (lanes - 1))
    least, most = (rest.substitute({rows: end}) for end in (ends if slope >= 0 else ends[::-1]))
    if along.constant == -1:  # swept < rest
        return Bound(difference, True, most, least, slope)
    return Bound(difference, False, Poly.ONE - most, Poly.ONE - least, -slope)


def _solved(difference: Poly, swept: Axis) -> Poly | None:
    """Another difference that is positive where this one is, with the swept class itself in it, once."""
    for monomial, c in difference.terms:
        if not any(swept in a.poly().axes for a in monomial):
            continue
        if len(monomial) != 1:
            return None
        rest = difference - Poly(((monomial, c),))
        (atom,) = monomial
        limit = (rest - 1) // abs(c) + 1  # the least integer that is not below rest / |c|
        limit = limit if c < 0 else -limit  # atom < limit, or atom > limit
        if atom is swept:
            return limit - swept if c < 0 else swept - limit
        if not isinstance(atom, Quotient) or atom.denominator.constant is None:
            return None
        b, inner = atom.denominator, atom.numerator
        # inner // b < limit where inner < b * limit, and inner // b > limit where inner >= b * (limit + 1)
        return _solved(b * limit - inner if c < 0 else inner - b * (limit + 1) + 1, swept)
    return None


def _slope(poly: Poly, axis: Axis) -> int | None:
    """1 where it never falls along an axis, -1 where it never rises, 0 where it is the same; None: not known."""
    slopes: set[int] = set()
    for monomial, c in poly.terms:
        if not any(axis in a.poly().axes for a in monomial):
            continue
        (atom,) = monomial if len(monomial) == 1 else (None,)
        inner: int | None = None
        if atom is axis:
            inner = 1
        elif isinstance(atom, Quotient) and axis not in atom.denominator.axes:
            inner = _slope(atom.numerator, axis)
        if inner is None:
            return None
        slopes.add(inner if c > 0 else -inner)
    slopes.discard(0)
    return None if len(slopes) > 1 else next(iter(slopes), 0)


# --- what a term needs ---


def needed(term: Expr, monoid: str, guarded: bool) -> Formula:
    """What holds wherever a term of a reduction is not its identity, as long as the rest of it is a number.

    `guarded`: of a maximum, or of a sum that grows beside it. Elsewhere a statistic that is read, -inf for a row
    without any term, would make its terms NaN.
    """
    match monoid:
        case "sum":
            return _needs(term, guarded)[term].nonzero
        case "max":
            return _needs(term, guarded)[term].above
    return ALWAYS


def is_zero(e: Expr) -> bool:
    """Whether it is provably zero, as long as what it is multiplied with is a number."""
    return _needs(e, guarded=True)[e].nonzero == NEVER


@dataclass(frozen=True, slots=True)
class _Needs:
    """What must hold for a value to be another than zero; than the smallest (-inf); than infinity."""

    nonzero: Formula = ALWAYS
    above: Formula = ALWAYS
    below: Formula = ALWAYS


_ANY = _Needs()


def _needs(root: Expr, guarded: bool) -> dict[Expr, _Needs]:
    conditions = formulas([root])
    found: dict[Expr, _Needs] = {}
    loaded: set[Expr] = set()  # what data enters, products apart
    never: set[Expr] = set()  # what is not -inf, whatever the data
    for e in postorder([root], into_reductions=False):
        if not guarded and (isinstance(e, Load) or not loaded.isdisjoint(e.children)):
            loaded.add(e)
        if _is_never_lowest(e, never):
            never.add(e)
        if isinstance(e, Const):
            found[e] = _of_number(e)
        elif e.dtype is DType.BOOL:
            found[e] = _Needs(conditions[e])
        elif isinstance(e, Pointwise) and e.op == "where":
            a, b = (found[x] for x in e.args[1:])
            sides = zip((a.nonzero, a.above, a.below), (b.nonzero, b.above, b.below), strict=True)
            found[e] = _Needs(*(chosen(conditions[e.args[0]], *both) for both in sides))
        elif isinstance(e, Pointwise) and e.op in ("add", "sub"):
            unknown = [a in loaded and not (e.op == "sub" and a in never) for a in e.args]
            found[e] = _of_sum(e, [_added(a, e.op) or found[a] for a in e.args], unknown)
        elif isinstance(e, Pointwise):
            found[e] = _of_operation(e, [found[a] for a in e.args])
        else:
            found[e] = _ANY
    return found


def _is_never_lowest(e: Expr, never: set[Expr]) -> bool:
    """Whether a value of data is chosen so that it is no -inf: subtracted from -inf, it leaves -inf or NaN."""
    if not isinstance(e, Pointwise) or not e.dtype.is_float:
        return False
    match e.op:
        case "where":
            condition, instead, x = e.args
            tested = isinstance(condition, Pointwise) and condition.op == "eq" and x in condition.args
            lowest_one = tested and any(isinstance(a, Const) and a.value == -math.inf for a in condition.children)
            return lowest_one and isinstance(instead, Const) and instead.value != -math.inf
        case "mul":
            return any(a in never and isinstance(c, Const) and c.value > 0 for a, c in (e.args, e.args[::-1]))
    return e.op in CASTS and e.args[0] in never


def _of_number(e: Const) -> _Needs:
    value = e.value
    tests = (value == 0, value == lowest(e.dtype), e.dtype.is_float and value == math.inf)
    return _Needs(*(NEVER if test else ALWAYS for test in tests))


def _added(e: Expr, op: str) -> _Needs | None:
    """What must hold for a number that memory holds to leave a sum above -inf."""
    while isinstance(e, Pointwise) and e.op in CASTS:
        e = e.args[0]
    is_number = isinstance(e, Load) and e.dtype.is_float and not e.children
    return _Needs(above=adds(e)) if op == "add" and is_number else None


def _of_sum(e: Pointwise, args: list[_Needs], loaded: list[bool]) -> _Needs:
    """Infinity stays what it is beside a number."""
    if not e.dtype.is_float:
        return _ANY
    first, last = args
    sides = [side for side, other in ((first, loaded[1]), (last, loaded[0])) if not other]
    if e.op == "sub":
        sides = [side for side in sides if side is first]
    nonzero = some((first.nonzero, last.nonzero))
    return _Needs(nonzero, every(side.above for side in sides), every(side.below for side in sides))


def _of_operation(e: Pointwise, args: list[_Needs]) -> _Needs:
    first, last = args[0], args[-1]
    if e.op in CASTS:
        from_float = e.args[0].dtype.is_float and e.dtype.is_float
        return first if from_float else _Needs(first.nonzero) if e.dtype.is_float else _ANY
    if not e.dtype.is_float:
        return _ANY
    match e.op:
        case "neg":
            return _Needs(first.nonzero, first.below, first.above)
        case "mul":
            return _Needs(every((first.nonzero, last.nonzero)), *_scaled(e, args))
        case "div" if isinstance(e.args[1], Const) and math.isfinite(e.args[1].value) and e.args[1].value > 0:
            return first
        case "div":
            finite = isinstance(e.args[0], Const) and math.isfinite(e.args[0].value)
            return _Needs(last.below if finite else ALWAYS)
        case "exp" | "exp2":
            return _Needs(first.above, below=first.below)
    return _ANY


def _scaled(e: Pointwise, args: list[_Needs]) -> tuple[Formula, Formula]:
    """What must hold for a product with a positive number to be above -inf, and below infinity."""
    for (number, _), (_, other) in ((e.args, args), (e.args[::-1], args[::-1])):
        if isinstance(number, Const) and 0 < number.value < math.inf:
            return other.above, other.below
    return ALWAYS, ALWAYS


# --- what is left where conditions hold ---


def assuming(value: Expr, held: Iterable[Formula], finished: Iterable[Expr]) -> Expr:
    """The value where formulas hold. `finished` reductions stay as they are."""
    held = tuple(held)
    if not held:
        return value
    said = formulas([value])
    memo: dict[Expr, Expr] = {r: r for r in finished}
    memo |= {e: const(known, DType.BOOL) for e, f in said.items() if (known := decide(f, held)) is not None}
    added = [e for f in held if isinstance(f, Data) and (e := added_number(f)) is not None]
    memo |= {e: const(0, e.dtype) for e in added}  # where it is known to hold, zero is added
    return rewrite(value, _fold_sum if added else fold_logic, None, memo)


def _fold_sum(e: Expr) -> Expr | None:
    """What is left of a sum with zero, and of logic with what is known."""
    if isinstance(e, Pointwise) and e.op == "add" and e.dtype.is_float:
        for a, b in (e.args, e.args[::-1]):
            if isinstance(a, Const) and a.value == 0:
                return b
    return fold_logic(e)
