"""Matrix products whose rows have disappeared: one query, one token.

An axis of extent 1 is in no index, so the product of one row and a matrix looks like any weighted sum. Its row comes
back as an axis of extent 1 that is added to a position: that changes nothing, and the product has the roles again
that every other one has.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir.expr import Expr, Load, Reduce, postorder, substitute
from ..ir.poly import Axis, Poly
from .inline import reductions
from .nest import Nest
from .operands import factors_of, operands

ROW = Axis("row", Poly.ONE)


def vector_and_matrix(reduce: Reduce) -> tuple[Expr, Expr] | None:
    """The sides of a product of one row, or of one column, and a matrix; None for any other reduction."""
    if (factors := factors_of(reduce)) is None:
        return None
    vector, matrix = sorted(factors, key=lambda a: len(a.axes))
    whole = reduce.over[0] in vector.axes and vector.axes < matrix.axes
    return (vector, matrix) if whole else None


def with_row(nest: Nest) -> Nest:
    """The nest with one row for the products that have none; unchanged where a product has its rows."""
    if any(operands(r) is not None for r in nest.reductions):
        return nest
    found = [(r, sides) for r in nest.reductions if (sides := vector_and_matrix(r)) is not None]
    vectors = [(vector, r.over[0]) for r, (vector, _) in found if not reductions([vector])]
    loads = {e for v, over in vectors for e in postorder([v]) if isinstance(e, Load) and over in e.axes}
    if not loads or not all(s.index for s in nest.stores):
        return nest
    memo: dict[Expr, Expr] = {e: Load(e.buffer, _placed(e.index, e.buffer.shape)) for e in loads}
    stores = tuple(
        replace(s, index=_placed(s.index, s.buffer.shape), value=substitute(s.value, memo), domain=s.domain | {ROW})
        for s in nest.stores
    )
    return replace(nest, stores=stores, classes=(ROW, *nest.classes))


def _placed(index: tuple[Poly, ...], shape: tuple[Poly, ...]) -> tuple[Poly, ...]:
    """A position with the row: in a dimension of extent 1, else in the first."""
    at = next((k for k, size in enumerate(shape) if size is Poly.ONE), 0)
    return tuple(p + ROW if k == at else p for k, p in enumerate(index))
