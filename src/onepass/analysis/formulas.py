"""What a condition says of positions, however it is written.

    ~(tril(ones) > 0) | pad    ->    Some((Positive(j - i), Data(pad)))

Negations are pushed down to inequalities, triangles of numbers are the conditions they were chosen by, and what is
not about positions is left to data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from ..ir.dtypes import DType
from ..ir.expr import Const, Expr, Load, Pointwise, const, pointwise, postorder
from ..ir.ops import CASTS
from ..ir.poly import Axis, Poly, nonnegative
from .conditions import position
from .factor import ARITHMETIC

MOST_LEAVES = 32  # of a formula; a larger one is unknown
MOST_CHOICES = 4  # of a value that is one of several numbers
LARGEST = 100  # of whole numbers that every type has


@dataclass(frozen=True, slots=True)
class Positive:
    """difference > 0."""

    difference: Poly


@dataclass(frozen=True, slots=True)
class Data:
    """A condition that holds or not as data decides; `holds`: whether it is this one or its opposite."""

    condition: Expr
    holds: bool = True


@dataclass(frozen=True, slots=True)
class Unknown:
    """Holds or not: nothing is known."""


@dataclass(frozen=True, slots=True)
class Every:
    """All parts hold."""

    parts: tuple[Formula, ...]


@dataclass(frozen=True, slots=True)
class Some:
    """One of the parts holds, or several."""

    parts: tuple[Formula, ...]


Formula: TypeAlias = Positive | Data | Unknown | Every | Some
Choices: TypeAlias = tuple[tuple[Formula, float], ...]  # numbers, each with what holds where it is the value
ALWAYS, NEVER, UNKNOWN = Every(()), Some(()), Unknown()
_COMPUTED = frozenset(("add", "sub", "mul", "maximum", "minimum"))
_FLIPPED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "eq": "eq", "ne": "ne"}


def every(parts: Iterable[Formula]) -> Formula:
    """All of them."""
    return _joined(Every, parts, NEVER)


def some(parts: Iterable[Formula]) -> Formula:
    """At least one of them."""
    return _joined(Some, parts, ALWAYS)


def _joined(kind: type[Every] | type[Some], parts: Iterable[Formula], decisive: Formula) -> Formula:
    found: dict[Formula, None] = {}
    for part in parts:
        found.update(dict.fromkeys(part.parts if isinstance(part, kind) else (part,)))
    if decisive in found:
        return decisive
    if sum(map(_leaves, found)) > MOST_LEAVES:
        found = dict.fromkeys(map(_without_data, found))
    if sum(map(_leaves, found)) > MOST_LEAVES:
        return UNKNOWN
    return next(iter(found)) if len(found) == 1 else kind(tuple(found))


def _without_data(formula: Formula) -> Formula:
    match formula:
        case Every(parts):
            return every(map(_without_data, parts))
        case Some(parts):
            return some(map(_without_data, parts))
    return UNKNOWN if isinstance(formula, Data) else formula


def _leaves(formula: Formula) -> int:
    return sum(map(_leaves, formula.parts)) if isinstance(formula, Every | Some) else 1


def opposite(formula: Formula) -> Formula:
    """What holds where a formula does not."""
    match formula:
        case Positive(difference):
            return Positive(Poly.ONE - difference)
        case Data(condition, holds):
            return Data(condition, not holds)
        case Every(parts):
            return some(map(opposite, parts))
        case Some(parts):
            return every(map(opposite, parts))
    return UNKNOWN


def adds(number: Expr) -> Data:
    """That a number which is added leaves a sum above -inf."""
    return Data(pointwise("ne", number, const(-math.inf, number.dtype)))


def added_number(formula: Data) -> Expr | None:
    """The number of `adds`."""
    c = formula.condition
    number = c.args[0] if isinstance(c, Pointwise) and c.op == "ne" else None
    is_number = isinstance(number, Load) and number.dtype.is_float
    return number if number is not None and is_number and adds(number) == formula else None


def along(formula: Formula, axis: Axis) -> Formula:
    """The formula without numbers that are added to all positions of an axis alike."""
    match formula:
        case Data():
            number = added_number(formula)
            return formula if number is None or axis in number.axes else ALWAYS
        case Every(parts):
            return every(along(p, axis) for p in parts)
        case Some(parts):
            return some(along(p, axis) for p in parts)
    return formula


def decide(formula: Formula, held: Iterable[Formula] = ()) -> bool | None:
    """Whether a formula holds where the `held` ones do; None: that does not say."""
    held = tuple(held)
    if formula in held or opposite(formula) in held:
        return formula in held
    match formula:
        case Positive(d):
            positive = [h.difference for h in held if isinstance(h, Positive)]
            if nonnegative(d - 1) or any(nonnegative(d - h) for h in positive):
                return True
            return False if nonnegative(-d) or any(nonnegative(Poly.ONE - h - d) for h in positive) else None
        case Every(parts) | Some(parts):
            known = {decide(p, held) for p in parts}
            decisive = isinstance(formula, Some)
            if decisive in known:
                return decisive
            return None if None in known else not decisive
    return None


def formulas(roots: Iterable[Expr]) -> dict[Expr, Formula]:
    """What each condition in some expressions says."""
    found: dict[Expr, Formula] = {}
    numbers: dict[Expr, Choices] = {}
    for e in postorder(roots, into_reductions=False):
        if e.dtype is DType.BOOL:
            said = _formula(e, found, numbers)
            found[e] = Data(e) if said is UNKNOWN else said
            numbers[e] = _merged([(found[e], 1), (opposite(found[e]), 0)])
        elif (choices := _choices(e, found, numbers)) and len(choices) <= MOST_CHOICES:
            numbers[e] = choices
    return found


def _formula(e: Expr, found: dict[Expr, Formula], numbers: dict[Expr, Choices]) -> Formula:
    if isinstance(e, Const):
        return ALWAYS if e.value else NEVER
    if not isinstance(e, Pointwise):
        return UNKNOWN
    match e.op:
        case "bitand":
            return every(found[a] for a in e.args)
        case "bitor":
            return some(found[a] for a in e.args)
        case "bitnot":
            return opposite(found[e.args[0]])
        case "where":
            return chosen(*(found[a] for a in e.args))
        case "cast" if e.args[0] in numbers:
            return some(c for c, value in numbers[e.args[0]] if value)
        case op if op in _FLIPPED:
            if all(a in numbers for a in e.args):
                left, right = (numbers[a] for a in e.args)
                return some(every((c, d)) for c, x in left for d, y in right if ARITHMETIC[op](x, y))
            return _compared(op, *e.args)
    return UNKNOWN


def chosen(condition: Formula, first: Formula, second: Formula) -> Formula:
    """The first where a condition holds, else the second."""
    if first == second:
        return first
    return some((every((condition, first)), every((opposite(condition), second))))


def _compared(op: str, left: Expr, right: Expr) -> Formula:
    """A comparison of positions, or of their distance."""
    if isinstance(right, Pointwise) and right.op == "abs":
        op, left, right = _FLIPPED[op], right, left
    far = isinstance(left, Pointwise) and left.op == "abs"
    a, b = position(left.children[0] if far else left), position(right)
    if a is None or b is None:
        return UNKNOWN
    match op:
        case "eq" | "ne":
            same = every(_compared_positions(k, a, b, far) for k in ("le", "ge"))
            return same if op == "eq" else opposite(same)
    return _compared_positions(op, a, b, far)


def _compared_positions(op: str, a: Poly, b: Poly, far: bool) -> Formula:
    """a against b; `far`: the absolute value of a."""
    signs = (a, -a) if far else (a,)
    if op in ("lt", "le"):
        return every(Positive(b - x + (op == "le")) for x in signs)
    return some(Positive(x - b + (op == "ge")) for x in signs)


def _choices(e: Expr, found: dict[Expr, Formula], numbers: dict[Expr, Choices]) -> Choices | None:
    """A value that is one of a few numbers."""
    if isinstance(e, Const):
        return None if math.isnan(e.value) else ((ALWAYS, float(e.value)),)
    if not isinstance(e, Pointwise):
        return None
    values = e.args[1:] if e.op == "where" else e.args
    if any(a not in numbers for a in values):
        return None
    if e.op == "where":
        condition = found[e.args[0]]
        sides = zip((condition, opposite(condition)), (numbers[a] for a in values), strict=True)
        return _merged([(every((side, c)), value) for side, choices in sides for c, value in choices])
    if e.op in CASTS:
        return _whole(e.dtype, list(numbers[e.args[0]]))
    if e.op in _COMPUTED:
        left, right = (numbers[a] for a in e.args)
        pairs = [(every((c, d)), ARITHMETIC[e.op](x, y)) for c, x in left for d, y in right]
        return _whole(e.dtype, pairs) if all(_is_small(x) for _, x in (*left, *right)) else None
    return None


def _whole(dtype: DType, choices: list[tuple[Formula, float]]) -> Choices | None:
    """The same numbers in another type, if they are small whole ones that every type has."""
    least = 0 if dtype in (DType.U8, DType.U32) else -LARGEST
    plain = dtype.is_float or dtype.is_integer
    return _merged(choices) if plain and all(_is_small(v) and v >= least for _, v in choices) else None


def _is_small(value: float) -> bool:
    return abs(value) <= LARGEST and value == int(value)


def _merged(choices: list[tuple[Formula, float]]) -> Choices:
    """Each number once, those that are none of them left out."""
    values = dict.fromkeys(value for _, value in choices)
    merged = ((some(c for c, v in choices if v == value), value) for value in values)
    return tuple((c, value) for c, value in merged if c != NEVER)
