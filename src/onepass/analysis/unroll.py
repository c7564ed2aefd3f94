"""Reductions of a few elements become point-wise work: x[0] + x[1] instead of a sweep over an axis of two.

A reader may then compute the result wherever it needs it (the gradient of repeated key heads, rotated halves of it).
Terms are combined in the order of the axis, as a sweep does. Elements that lie side by side in memory stay a
reduction: a tile reads them together. So do elements that others read as well (softmax over an axis of two): the
reduction and its readers share a sweep, and nothing is computed twice.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

from ..ir.expr import Expr, Load, Part, Reduce, pointwise, postorder, rewrite, substitute_axes
from ..ir.poly import Poly
from ..ir.program import Define, Program
from .access import flat_offset
from .inline import loaded

MOST_TERMS = 8
_COMBINE = {"sum": "add", "prod": "mul", "max": "maximum", "min": "minimum"}


def unroll(program: Program) -> Program:
    """The program with its shortest reductions written out."""
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
    if not isinstance(e, Part) or not isinstance(e.source, Reduce) or e.source.monoid not in _COMBINE:
        return None
    reduce = e.source
    extents = [a.extent.constant for a in reduce.over]
    terms = 1
    for n in extents:
        terms *= n or MOST_TERMS + 1
    if not 1 < terms <= MOST_TERMS or not _lies_apart(reduce):
        return None
    total: Expr | None = None
    for places in itertools.product(*(range(n or 0) for n in extents)):
        at = {a: Poly.of(k) for a, k in zip(reduce.over, places, strict=True)}
        term = substitute_axes(reduce.inputs[0], at)
        total = term if total is None else pointwise(_COMBINE[reduce.monoid], total, term)
    return total


def _lies_apart(reduce: Reduce) -> bool:
    """Whether no load has neighbours in memory along a reduced axis."""
    loads = [e for e in postorder(reduce.inputs) if isinstance(e, Load)]
    offsets = [flat_offset(e.buffer, e.index) for e in loads]
    return bool(offsets) and not any(p.coefficient(a) in (Poly.ONE, None) for p in offsets for a in reduce.over)
