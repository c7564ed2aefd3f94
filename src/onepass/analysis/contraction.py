"""Groups with matrix products: which axes are a program's rows and columns, and what is swept.

A product is `Reduce(sum, a * b, k)` whose operands each lack an axis the other has. A program owns a tile of rows and
columns of the result; every reduction of the result is a sweep over one class, and inside such a sweep the products
that its terms are made of are computed again, tile by tile. Whatever only scales a sum is taken out of it, so that
sums which wait for other sums (softmax's division) need not wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..ir.dtypes import DType
from ..ir.expr import (
    Const,
    Expr,
    Index,
    Load,
    Part,
    Pointwise,
    Random,
    Reduce,
    const,
    pointwise,
    postorder,
    rewrite,
    substitute_axes,
)
from ..ir.ops import CASTS
from ..ir.plan import Store
from ..ir.poly import Axis, Poly
from .access import estimate, flat_offset
from .collapse import collapse
from .digits import join_digits
from .factor import same_number
from .inline import reductions
from .nest import Nest, Refusal, direct_reductions
from .scores import in_base_two, positions_apart, unrounded
from .single_row import ROW, with_row
from .unify import unify

MOST_HELD = 256  # of an axis that a program holds whole beside a swept one
LEAST_TILE = 16  # of a matrix unit


@dataclass(frozen=True, slots=True)
class Contraction:
    """A nest of matrix products. `rows` and `columns` are classes of the result that a program has a tile of."""

    nest: Nest
    rows: Axis
    columns: Axis
    swept: Axis  # the class that the result's own reductions run over
    inner: tuple[Axis, ...]  # classes that products inside the sweep run over

    @property
    def grid(self) -> tuple[Axis, ...]:
        """Classes of which a program has one position."""
        return tuple(c for c in self.nest.classes if c in self.nest.stores[0].domain - {self.rows, self.columns})


def operands(reduce: Reduce) -> tuple[Expr, Expr] | None:
    """The matrices of a product, as the matrix unit is given them; None for any other reduction."""
    body = reduce.inputs[0]
    if reduce.monoid != "sum" or len(reduce.over) != 1 or not isinstance(body, Pointwise) or body.op != "mul":
        return None
    left, right = (uncast(a) for a in body.args)
    own = (left.axes - right.axes, right.axes - left.axes)
    if left.dtype is not right.dtype or not all(own) or not all(reduce.over[0] in s.axes for s in (left, right)):
        return None
    return left, right


def uncast(e: Expr) -> Expr:
    """An operand of 32 bits before it was widened from what the matrix unit takes."""
    if isinstance(e, Pointwise) and e.op == "cast":
        (inner,) = e.args
        if inner.dtype.is_half or inner.dtype is (DType.I8 if e.dtype is DType.I32 else DType.F8E4M3):
            return inner
    return e


def largest_first(nest: Nest) -> Nest | Refusal:
    """The nest with the store first whose classes all others have a part of."""
    largest = max(nest.stores, key=lambda s: len(s.domain))
    others = [s for s in nest.stores if s is not largest]
    if any(s.region for s in nest.stores) or any(not s.domain <= largest.domain for s in others):
        return Refusal("its results have different shapes")
    return replace(nest, stores=(largest, *others))


def contract(stores: Iterable[Store]) -> Contraction | Refusal:
    """The roles of a group's classes, or why its products have no common program."""
    nest = join_digits(collapse(unify(list(stores))))
    if all(operands(r) is None for r in reductions(s.value for s in nest.stores)):
        nest = with_row(nest)
    nest = in_shared_base(replace(nest, stores=tuple(replace(s, value=prepared(s.value)) for s in nest.stores)))
    ordered = largest_first(nest)
    return ordered if isinstance(ordered, Refusal) else contract_nest(ordered)


def contract_nest(nest: Nest) -> Contraction | Refusal:
    """The roles of the classes of a nest whose values are prepared, its largest store first."""
    largest = nest.stores[0]
    found = reductions(s.value for s in nest.stores)
    tops = [r for r in found if r.axes <= largest.domain]
    products = [(r, sides) for r in tops if (sides := operands(r)) is not None]
    if not products:
        return Refusal("no matrix product is at the root")
    roles = _rows_and_columns(nest, *products[0])
    if isinstance(roles, Refusal):
        return roles
    rows, columns = roles
    swept = {nest.bound[a] for r in tops for a in r.over}
    if len(swept) != 1:
        return Refusal("its reductions run over different axes")
    inside = [r for r in found if r not in tops]
    inner = tuple(dict.fromkeys(nest.bound[a] for r in inside for a in r.over))
    contraction = Contraction(nest, rows, columns, swept.pop(), inner)
    reason = _obstacle(contraction, tops, inside)
    return contraction if reason is None else Refusal(reason)


def prepared(value: Expr, kept: frozenset[Expr] = frozenset()) -> Expr:
    """The value as a sweep computes it best; `kept` roundings stay."""
    value = rewrite(value, _extreme)
    matrices = [r.inputs[0] for r in reductions([value]) if operands(r) is not None]
    value = unrounded(value, kept.union(a for m in matrices for a in m.children))
    return rewrite(positions_apart(value), scale_outside)


def in_shared_base(nest: Nest) -> Nest:
    """Exponentials in base two, unless results would then disagree on the base and need their sums twice."""
    changed = tuple(replace(s, value=in_base_two(s.value)) for s in nest.stores)
    counts = [len(reductions(s.value for s in stores)) for stores in (changed, nest.stores)]
    return replace(nest, stores=changed) if counts[0] <= counts[1] else nest


def _extreme(e: Expr) -> Expr | None:
    """The value of an argmax or argmin whose position nobody may want: a plain maximum or minimum."""
    if not isinstance(e, Part) or not isinstance(e.source, Reduce) or e.source.monoid not in ("argmax", "argmin"):
        return None
    return Part(Reduce(e.source.monoid[3:], e.source.inputs[:1], e.source.over), 0) if e.index == 0 else None


def _rows_and_columns(nest: Nest, reduce: Reduce, sides: tuple[Expr, Expr]) -> tuple[Axis, Axis] | Refusal:
    """Rows belong to the operand that is itself computed from products, else to the one not stored contiguously."""
    left, right = sides
    if reductions([right]) and not reductions([left]):
        left, right = right, left
    store = nest.stores[0]
    offset = flat_offset(store.buffer, store.index)
    last = next((a for a in store.domain - {ROW} if offset.coefficient(a) is Poly.ONE), None)
    if not reductions([left]) and last in left.axes - right.axes:
        left, right = right, left
    own = [[a for a in one.axes - other.axes if a in store.domain] for one, other in ((left, right), (right, left))]
    if not all(own):
        return Refusal("a matrix has no axis of its own in the result")
    rows, columns = (max(axes, key=lambda a: (estimate(a.extent), a.name)) for axes in own)
    if last in own[1]:
        columns = last
    return rows, columns


def _obstacle(c: Contraction, tops: list[Reduce], inside: list[Reduce]) -> str | None:
    grid = frozenset(c.grid)
    if c.swept in grid | {c.rows, c.columns}:
        return "an axis of the result is also summed over"
    held = (c.columns, *c.inner) if inside else ()
    if any(a.extent.constant is None for a in held):
        return "the length of an axis beside the swept one is known at run time only"
    if any((a.extent.constant or 0) > MOST_HELD for a in held):
        return f"an axis beside the swept one is longer than {MOST_HELD}"
    if any(a in (c.rows, c.swept) for a in c.inner):
        return "products inside share an axis with the sweep around them"
    for r in tops:
        sides = operands(r)
        if sides is not None:
            left, right = sided(sides, c.rows)
            if c.rows not in left.axes or c.rows in right.axes or c.columns not in right.axes or c.columns in left.axes:
                return "two products have other rows or columns"
            if reductions([right]):
                return "both matrices are computed from products"
            if not {c.rows, *r.over} <= varying(left) or not {c.columns, *r.over} <= varying(right):
                return "a matrix is expanded along one of its axes"
        elif r.monoid not in ("max", "min", "sum", "prod") or c.columns in r.axes:
            return f"a {r.monoid} beside a product"
        elif len(r.over) != 1:
            return "a reduction over several axes beside a product"
        if not r.axes <= grid | {c.rows, c.columns}:
            return "a reduction has an axis that the result does not have"
    for r in inside:
        sides = operands(r)
        if sides is None or len(r.over) != 1:
            return f"a {r.monoid} inside the sweep"
        left, right = sided(sides, c.rows)
        if c.rows in right.axes or reductions([left, right]) or c.rows not in left.axes:
            return "a product inside the sweep does not have the result's rows"
        steps = {a for a in left.axes | right.axes if c.nest.bound.get(a) is c.swept}
        if not steps or steps & left.axes:
            return "a product inside the sweep is not one of rows and steps"
        if not {c.rows, *r.over} <= varying(left) or not {*steps, *r.over} <= varying(right):
            return "a matrix is expanded along one of its axes"
    return None


def varying(e: Expr) -> frozenset[Axis]:
    """The axes along which a value differs in memory or by position, not only in shape."""
    found: set[Axis] = set()
    for node in postorder([e], into_reductions=False):
        match node:
            case Load():
                found |= flat_offset(node.buffer, node.index).axes
            case Index():
                found |= node.poly.axes
            case Part() | Random():
                found |= node.axes
    return frozenset(found)


def sided(sides: tuple[Expr, Expr], rows: Axis) -> tuple[Expr, Expr]:
    """The operand that has the rows first."""
    return sides if rows in sides[0].axes else sides[::-1]


# --- what only scales a sum ---


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
            zero = next((k for k in (1, 2) if _is_zero(e.args[k])), None)
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


def _is_zero(e: Expr) -> bool:
    return isinstance(e, Const) and e.value == 0


def _fits_half(s: _Scaled, over: Axis) -> bool:
    """Whether what is scaled is within what float16 has digits for, as it is: what scales it may have made it so.

    Exponentials of which the largest is 1 are. Some of them alone may all be small: then what divides them must be
    the sum of all, so that they were even smaller.
    """
    weight, others = s.inside, False
    while True:
        match weight:
            case Pointwise(op="where", args=(_, first, second)) if _is_zero(first) or _is_zero(second):
                weight, others = (second if _is_zero(first) else first), True
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

    What is the same for all of a row, and part of what m is the largest of, stays beside m. `always`: whatever else l
    is made of, if m is the largest x.
    """
    terms = _terms(e.args[0])
    varying, fixed = ([t for t in terms if (over in t[1].axes) == wanted] for wanted in (True, False))
    found = reductions(term for _, term in fixed)
    tops = [r for r in found if r.monoid == "max"]
    if not varying or len(tops) != 1:
        return _Scaled(e)
    beside = [t for t in _terms(tops[0].inputs[0]) if not t[1].axes.intersection(tops[0].over)]
    beside.append((-1, Part(tops[0], 0)))
    for sign, term in beside:  # what is there already is not taken off twice
        if (sign, term) in fixed:
            fixed.remove((sign, term))
        else:
            fixed.append((-sign, term))
    inside = pointwise("exp", _total([*varying, *beside]))
    summed = any(r.monoid == "sum" and tops[0] in reductions(r.inputs) for r in found)
    if not summed and not (always and _largest_is_one(inside, over)):
        return _Scaled(e)
    return _Scaled(inside, pointwise("exp", _total(fixed)) if fixed else None)


def _less_largest(e: Expr, over: Axis) -> Expr | None:
    """An exponential of which the largest is 1, times what is left of it for all of a row."""
    if not isinstance(e, Pointwise) or e.op != "exp":
        return None
    s = _split_exponent(e, over, always=True)
    return None if s.factor is None else pointwise("mul", s.inside, s.factor)


def _terms(e: Expr) -> list[tuple[int, Expr]]:
    """A sum and its terms, each with its sign."""
    found: list[tuple[int, Expr]] = []
    stack: list[tuple[int, Expr]] = [(1, e)]
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


def _total(terms: list[tuple[int, Expr]]) -> Expr:
    (sign, total), *others = sorted(terms, key=lambda t: -t[0])
    total = total if sign > 0 else pointwise("neg", total)
    for sign, term in others:
        total = pointwise("add" if sign > 0 else "sub", total, term)
    return total


def _scales(e: Expr, over: Axis) -> bool:
    return over not in e.axes


def _times(a: Expr | None, b: Expr | None) -> Expr | None:
    return b if a is None else a if b is None else pointwise("mul", a, b)
