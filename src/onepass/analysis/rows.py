"""Matrix products whose rows are reduced: norms, softmax and its statistics, arg-max, cross-entropy of logits.

A program owns rows of the product. Columns that fit a tile are held: after the products' own sum every reduction is
a fold of what is there, and results may have columns. Longer ones are swept a tile at a time, products computed
inside; what waits for the reductions has no columns then. Nothing of rows x columns need ever be stored.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..ir.expr import Expr, Reduce
from ..ir.plan import Store
from ..ir.poly import Axis
from .access import estimate
from .contraction import Contraction, contract, largest_first, varying
from .inline import reductions
from .nest import Nest, Refusal
from .normalise import normalise
from .operands import operands
from .unify import unify

MOST_COLUMNS = 512  # of a row that a program holds


def arrange(stores: Iterable[Store]) -> Contraction | Refusal:
    """The program of a group with products: of the result's rows and columns, or of rows alone."""
    stores = list(stores)
    found = contract(stores)
    return contract_rows(stores) if isinstance(found, Refusal) else found


def contract_rows(stores: Iterable[Store]) -> Contraction | Refusal:
    """The roles of a group's classes where a product's rows are reduced, or why it is no such group."""
    ordered = largest_first(normalise(unify(stores), rows=True))
    if isinstance(ordered, Refusal):
        return ordered
    nest = ordered
    found = nest.reductions
    products = [r for r in found if operands(r) is not None]
    inner = tuple(dict.fromkeys(nest.bound[a] for r in products for a in r.over))
    swept = {nest.bound[a] for r in found if r not in products for a in r.over} - set(inner)
    if not products or len(swept) != 1:
        return Refusal("no axis of a matrix product is the only one that is reduced")
    (columns,) = swept
    rows = _rows(nest, products[0], columns)
    if rows is None:
        return Refusal("a matrix has no axis of its own in the result")
    beside = tuple(r for r in found if r not in products and not nest.sweeps(r, columns))
    size = columns.extent.constant
    held = size is not None and size <= MOST_COLUMNS
    c = Contraction(nest, rows, columns, columns, inner, held, beside)
    reason = _obstacle(c, found)
    return c if reason is None else Refusal(reason)


def _rows(nest: Nest, product: Reduce, columns: Axis) -> Axis | None:
    """The longest class of the result that only the matrix without the columns has."""
    sides = sided_by(nest, operands(product) or (), columns)
    if sides is None:
        return None
    own = [a for a in sides[0].axes - sides[1].axes if a in nest.stores[0].domain]
    return max(own, key=lambda a: (estimate(a.extent), a.name), default=None)


def sided_by(nest: Nest, sides: tuple[Expr, ...], columns: Axis) -> tuple[Expr, Expr] | None:
    """The matrices of a product, the one that has the columns last; None if not exactly one has them."""
    with_columns = [any(nest.bound.get(a, a) is columns for a in side.axes) for side in sides]
    if with_columns == [False, True]:
        return sides[0], sides[1]
    return (sides[1], sides[0]) if with_columns == [True, False] else None


def _obstacle(c: Contraction, found: list[Reduce]) -> str | None:
    result = frozenset((*c.grid, c.rows))
    if c.rows in c.inner or c.columns in c.inner or any(a in result for a in c.inner):
        return "an axis of the result is also summed over"
    if any(c.nest.sweeps(r, c.columns) for r in reductions(s.value for s in c.passing)):
        return f"a row of {c.columns.extent!r} waits for its reductions, but only {MOST_COLUMNS} fit a program"
    if len(c.passing) == len(c.nest.stores):
        return "nothing is made of the reductions"
    for r in found:
        reason = _product_obstacle(c, r) if operands(r) is not None else _reduction_obstacle(c, r, result)
        if reason is not None:
            return reason
    return None


def _product_obstacle(c: Contraction, r: Reduce) -> str | None:
    sides = sided_by(c.nest, operands(r) or (), c.columns)
    if sides is None or c.rows not in sides[0].axes or c.rows in sides[1].axes:
        return "two products have other rows or columns"
    if reductions(sides):
        return "a matrix is computed from reductions"
    columns = {a for a in sides[1].axes if c.nest.bound.get(a, a) is c.columns}
    if not {c.rows, *r.over} <= varying(sides[0]) or not {*columns, *r.over} <= varying(sides[1]):
        return "a matrix is expanded along one of its axes"
    if not r.axes - columns <= {*c.grid, c.rows}:
        return "a product has an axis that the result does not have"
    return None


def _reduction_obstacle(c: Contraction, r: Reduce, result: frozenset[Axis]) -> str | None:
    if len(r.over) != 1:
        return "a reduction over several axes of a product"
    if not r.axes <= result:
        return "a reduction has an axis that the result does not have"
    if r in c.beside and reductions(r.inputs):
        return "what products sum over is also reduced after them"
    if r.monoid == "welford_merge":
        return "a merge of states beside a product"
    return None


def row_reductions(c: Contraction) -> list[Reduce]:
    """The reductions over the columns, producers first."""
    found = c.nest.reductions
    return [r for r in found if operands(r) is None and c.nest.sweeps(r, c.columns)]
