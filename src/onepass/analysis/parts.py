"""Reductions in parts: a reduction of an axis is the combination of the reductions of its parts.

    sum over (k:32, p:2) of x[2k + p] * where(p < 1, low(w[k]), high(w[k]))
      = sum over k of x[2k] * low(w[k])  +  sum over k of x[2k + 1] * high(w[k])

Three rules follow from this. `unroll` writes out reductions of a few elements. `join_digits` gives each sum of products
one axis: a short digit that conditions ask for is unrolled, other digits are joined. `cut_rows` separates single
positions from a long row, so that products that read the long part alone run over the same axis.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..ir.expr import (
    Expr,
    Load,
    Part,
    Pointwise,
    Reduce,
    pointwise,
    postorder,
    reduction_of,
    rewrite,
    substitute,
    substitute_axes,
)
from ..ir.poly import Axis, Poly
from ..ir.program import Define, Program
from .access import flat_offset
from .collapse import merge
from .conditions import breakpoints, difference, has_conditions, ordered, specialise
from .inline import loaded
from .nest import Nest
from .shifts import extreme

MOST_TERMS = 8  # of a reduction that is written out
MOST_UNROLLED = 4  # values of a digit, and parts that conditions cut an axis into
MOST_SINGLE = 4  # positions next to the long part of a row
_COMBINE = {"sum": "add", "prod": "mul", "max": "maximum", "min": "minimum"}


def _combined(reduce: Reduce, parts: Iterable[dict[Axis, Poly]], rest: tuple[Axis, ...] = ()) -> Expr:
    """The reduction over `rest` at each place of its other axes, combined in this order."""
    total, *others = (_at(reduce, place, rest) for place in parts)
    for term in others:
        total = pointwise(_COMBINE[reduce.monoid], total, term)
    return total


def _at(reduce: Reduce, place: dict[Axis, Poly], rest: tuple[Axis, ...]) -> Expr:
    """The reduction over `rest` at one place of its other axes."""
    term = specialise((substitute_axes(reduce.inputs[0], place),), {})[0]
    return Part(Reduce(reduce.monoid, (term,), rest), 0) if rest else term


# --- reductions of a few elements ---


def unroll(program: Program) -> Program:
    """The program with its shortest reductions written out: x[0] + x[1] instead of a sweep over an axis of two.

    A reader may then compute the result wherever it needs it (the gradient of repeated key heads, rotated halves of
    it). Terms are combined in the order of the axis, as a sweep does. Elements that lie side by side in memory stay a
    reduction: a tile reads them together. So do elements that others read as well (softmax over an axis of two): the
    reduction and its readers share a sweep, and nothing is computed twice.
    """
    readers = Counter(b for d in program.defines() for b in loaded(d.value))
    statements = tuple(
        replace(s, value=rewrite(s.value, _written_out))
        if isinstance(s, Define) and all(readers[b] == 1 for b in loaded(s.value))
        else s
        for s in program.statements
    )
    return replace(program, statements=statements)


def _written_out(e: Expr) -> Expr | None:
    """The result of a reduction as a chain of point-wise operations, where it is short."""
    reduce = reduction_of(e, *_COMBINE)
    if reduce is None:
        return None
    extents = [a.extent.constant for a in reduce.over]
    terms = math.prod(n or MOST_TERMS + 1 for n in extents)
    if not 1 < terms <= MOST_TERMS or not _lies_apart(reduce):
        return None
    places = itertools.product(*(map(Poly.of, range(n or 0)) for n in extents))
    return _combined(reduce, (dict(zip(reduce.over, at, strict=True)) for at in places))


def _lies_apart(reduce: Reduce) -> bool:
    """Whether no load has neighbours in memory along a reduced axis."""
    loads = [e for e in postorder(reduce.inputs) if isinstance(e, Load)]
    offsets = [flat_offset(e.buffer, e.index) for e in loads]
    return bool(offsets) and not any(p.coefficient(a) in (Poly.ONE, None) for p in offsets for a in reduce.over)


# --- sums of products ---


def join_digits(nest: Nest) -> Nest:
    """The nest with one axis for every product's sum."""
    if all(len(r.over) == 1 and not _halves(r) for r in _products(nest)):
        return nest
    nest = nest.with_values(lambda value: rewrite(value, _without_digit))
    return _without_halves(_joined(nest))


def _products(nest: Nest) -> list[Reduce]:
    return [r for r in nest.reductions if _is_product(r)]


def _is_product(r: Reduce) -> bool:
    return r.monoid == "sum" and isinstance(r.inputs[0], Pointwise) and r.inputs[0].op == "mul"


def _without_digit(e: Expr) -> Expr | None:
    """A sum of products for each value of its short digits, until none is left."""
    reduce = reduction_of(e, "sum")
    if reduce is None or not _is_product(reduce):
        return None
    for digit in reduce.over if len(reduce.over) > 1 else ():
        count = digit.extent.constant
        compared = (d.axes for e in postorder(reduce.inputs) if (d := difference(e)) is not None)
        if count is None or count > MOST_UNROLLED or not any(digit in axes for axes in compared):
            continue
        rest = tuple(a for a in reduce.over if a is not digit)
        places = [{digit: Poly.of(k)} for k in range(count)]
        if _share_loads(reduce, places, rest):
            return rewrite(_combined(reduce, places, rest), _without_digit)
    return None


def _share_loads(reduce: Reduce, places: Sequence[dict[Axis, Poly]], rest: tuple[Axis, ...]) -> bool:
    """Whether the parts of a sum at all places load an element in common."""
    parts = [postorder([_at(reduce, place, rest)]) for place in places]
    return bool(set.intersection(*({e for e in p if isinstance(e, Load) and e.axes.issuperset(rest)} for p in parts)))


def _joined(nest: Nest) -> Nest:
    """The nest with the classes that a product sums over as one."""
    digits = next((tuple(nest.bound[a] for a in r.over) for r in _products(nest) if len(r.over) > 1), ())
    own = [r for r in nest.reductions if any(nest.bound[a] in digits for a in r.over)]
    if not digits or any(tuple(nest.bound[a] for a in r.over) != digits for r in own):
        return nest
    return nest if any(s.domain & set(digits) for s in nest.stores) else _joined(merge(nest, digits))


def _halves(r: Reduce) -> int:
    """How many equal parts conditions cut the summed axis into; 0 where they do not, or into too many."""
    extent = r.over[0].extent.constant
    points = {p.constant for p in breakpoints([r.inputs[0]], r.over[0])} if len(r.over) == 1 else set()
    if extent is None or len(points) != 1:
        return 0
    (point,) = points
    fits = point is not None and 0 < point < extent and extent % point == 0 and extent // point <= MOST_UNROLLED
    return extent // point if fits and point else 0


def _without_halves(nest: Nest) -> Nest:
    """The nest with a product for each part that conditions cut a summed axis into."""
    for r in _products(nest):
        if (count := _halves(r)) and (halved := _halved(nest, nest.bound[r.over[0]], count)) is not None:
            return _without_halves(halved)
    return nest


def _halved(nest: Nest, whole: Axis, count: int) -> Nest | None:
    """The nest with a class cut into equal parts; None where a reduction of it is cut otherwise."""
    swept = [r for r in nest.reductions if nest.sweeps(r, whole)]
    part = Axis(f"{whole.name}h", whole.extent // count)
    own = {r: Axis(f"{r.over[0].name}h", part.extent) for r in swept}
    places = {r: [{r.over[0]: a + part.extent * k} for k in range(count)] for r, a in own.items()}
    if not all(_is_product(r) and _halves(r) == count and _share_loads(r, places[r], (own[r],)) for r in swept):
        return None
    totals: dict[Expr, Expr] = {Part(r, 0): _combined(r, places[r], (a,)) for r, a in own.items()}
    classes = tuple(part if c is whole else c for c in nest.classes)
    bound = nest.bound | dict.fromkeys(own.values(), part)
    return replace(nest.with_values(lambda value: substitute(value, totals)), classes=classes, bound=bound)


# --- rows joined of a long part and single positions ---


def cut_rows(value: Expr) -> Expr:
    """The value with reductions of a long part, where comparisons cut a row into it and a few single positions."""
    if not has_conditions([value]):
        return value
    return specialise((rewrite(rewrite(value, extreme), _cut),), {})[0]


def _cut(e: Expr) -> Expr | None:
    reduce = reduction_of(e, *_COMBINE)
    if reduce is None or len(reduce.over) != 1:
        return None
    (over,) = reduce.over
    points = ordered(breakpoints(reduce.inputs, over), over.extent)
    if points is None or len(points) < 3:
        return None
    parts = [(low, high - low) for low, high in itertools.pairwise(points)]
    long = [(low, size) for low, size in parts if size.constant is None or size.constant > MOST_SINGLE]
    if len(long) != 1 or over.extent - long[0][1] not in map(Poly.of, range(1, MOST_SINGLE + 1)):
        return None
    inner = Axis(f"{over.name}_long", long[0][1])
    result = _at(reduce, {over: long[0][0] + inner}, (inner,))
    single = [low + k for low, size in parts if (low, size) not in long for k in range(size.constant or 0)]
    for place in single:
        result = pointwise(_COMBINE[reduce.monoid], result, _at(reduce, {over: place}, ()))
    return result
