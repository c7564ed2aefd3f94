"""Rows joined of a long part and single positions (a column of sinks beside the scores), taken apart.

A reduction over such a row is that of the long part combined with the terms at the single positions, and products that
read the long part alone then run over the same axis.
"""

from __future__ import annotations

from itertools import pairwise

from ..ir.expr import Expr, Part, Reduce, pointwise, rewrite, substitute_axes
from ..ir.poly import Axis, Poly
from .conditions import breakpoints, has_conditions, ordered, specialise
from .shifts import extreme

MOST_SINGLE = 4  # positions beside the long part
_COMBINING = {"sum": "add", "prod": "mul", "max": "maximum", "min": "minimum"}


def single_apart(value: Expr) -> Expr:
    """The value with reductions over rows that comparisons cut into a long part and a few single positions apart."""
    if not has_conditions([value]):
        return value
    cut = rewrite(rewrite(value, extreme), _cut)
    return specialise((cut,), {})[0]


def _cut(e: Expr) -> Expr | None:
    if not isinstance(e, Part) or not isinstance(e.source, Reduce) or e.source.monoid not in _COMBINING:
        return None
    reduce = e.source
    if len(reduce.over) != 1:
        return None
    (over,) = reduce.over
    points = ordered(breakpoints(reduce.inputs, over), over.extent)
    if points is None or len(points) < 3:
        return None
    parts = [(low, high - low) for low, high in pairwise(points)]
    long = [(low, size) for low, size in parts if size.constant is None or size.constant > MOST_SINGLE]
    if len(long) != 1 or over.extent - long[0][1] not in map(Poly.of, range(1, MOST_SINGLE + 1)):
        return None
    inner = Axis(f"{over.name}_long", long[0][1])
    result: Expr = Part(Reduce(reduce.monoid, (_at(reduce, long[0][0] + inner),), (inner,)), 0)
    for low, size in parts:
        if (low, size) not in long:
            for k in range(size.constant or 0):
                result = pointwise(_COMBINING[reduce.monoid], result, _at(reduce, low + k))
    return result


def _at(reduce: Reduce, place: Poly) -> Expr:
    """What enters a reduction at some of its positions."""
    return specialise((substitute_axes(reduce.inputs[0], {reduce.over[0]: place}),), {})[0]
