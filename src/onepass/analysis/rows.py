"""Matrix products whose rows are reduced: norms, softmax and its statistics, arg-max, cross-entropy of logits.

A program owns rows of the product. Columns that fit a tile are held: after the products' own sum every reduction is
a fold of what is there, and results may have columns. Longer ones are swept a tile at a time, products computed
inside; what waits for the reductions has no columns then. Nothing of rows x columns need ever be stored.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..ir.dtypes import DType
from ..ir.expr import Const, Expr, Pointwise, Reduce, const, pointwise, postorder, rewrite
from ..ir.ops import DISCONTINUOUS
from ..ir.plan import Store
from ..ir.poly import Axis
from .access import estimate
from .collapse import collapse
from .contraction import Contraction, contract, in_shared_base, largest_first, prepared, varying
from .factor import same_number
from .inline import reductions
from .nest import Nest, NestStore, Refusal, direct_reductions
from .operands import operands
from .unify import unify

MOST_COLUMNS = 512  # of a row that a program holds
LARGEST_FACTOR = 2.0**100  # with a reciprocal that is an ordinary number, too


@dataclass(frozen=True, slots=True, eq=False)
class RowContraction(Contraction):
    """Products whose columns are reduced: `columns` and `swept` are the same class, `inner` those of the products.

    `beside`: reductions of rows over a class that products sum over (the logit of one target).
    """

    held: bool  # all columns are in one tile
    beside: tuple[Reduce, ...]

    @property
    def passing(self) -> tuple[NestStore, ...]:
        """Stores of swept columns: they wait for no reduction of them, so that every step stores its own."""
        return () if self.held else tuple(s for s in self.nest.stores if self.columns in s.domain)

    def is_product(self, reduce: Reduce) -> bool:
        """Whether the matrix unit computes it."""
        return operands(reduce) is not None


def arrange(stores: Iterable[Store]) -> Contraction | Refusal:
    """The program of a group with products: of the result's rows and columns, or of rows alone."""
    stores = list(stores)
    found = contract(stores)
    if not isinstance(found, Refusal):
        return found
    rows = contract_rows(stores)
    return found if isinstance(rows, Refusal) else rows


def contract_rows(stores: Iterable[Store]) -> RowContraction | Refusal:
    """The roles of a group's classes where a product's rows are reduced, or why it is no such group."""
    nest = collapse(unify(list(stores)))
    stored = tuple(replace(s, value=prepared_rows(s.value)) for s in nest.stores)
    nest = in_shared_base(replace(nest, stores=stored))
    ordered = largest_first(nest)
    if isinstance(ordered, Refusal):
        return ordered
    nest = ordered
    found = reductions(s.value for s in nest.stores)
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
    c = RowContraction(nest, rows, columns, columns, inner, held, beside)
    reason = _obstacle(c, found)
    return c if reason is None else Refusal(reason)


def prepared_rows(value: Expr) -> Expr:
    """The value as a sweep computes it best: divisions of a product by a number are multiplications."""
    kept = _jumping(value)

    def multiplied(e: Expr) -> Expr | None:
        if not isinstance(e, Pointwise) or e.op != "div" or e.dtype is not DType.F32 or e in kept:
            return None
        x, by = e.args
        if not isinstance(by, Const) or not 1 / LARGEST_FACTOR < abs(float(by.value)) < LARGEST_FACTOR:
            return None
        if not any(operands(r) is not None for r in direct_reductions([x])):
            return None
        product = pointwise("mul", x, const(1 / float(by.value), DType.F32))
        return product if same_number(e, product) else None

    return rewrite(prepared(value, kept), multiplied)


def _jumping(value: Expr) -> frozenset[Expr]:
    """What discontinuous operations read: they see values rounded as eager has them, and the largest of them, too."""
    roots: list[Expr] = []
    for e in postorder([value]):
        match e:
            case Reduce(monoid="argmax" | "argmin"):
                roots += e.inputs
            case Pointwise() if e.op in DISCONTINUOUS or (e.op == "cast" and not e.dtype.is_float):
                roots += e.args
    found: set[Expr] = set()
    while roots:
        read = [e for e in postorder(roots, into_reductions=False) if e not in found]
        found.update(read)
        roots = [x for e in read if isinstance(e, Reduce) and e.monoid in ("max", "min") for x in e.inputs]
    return frozenset(found)


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


def _obstacle(c: RowContraction, found: list[Reduce]) -> str | None:
    result = frozenset((*c.grid, c.rows))
    if c.rows in c.inner or c.columns in c.inner or any(a in result for a in c.inner):
        return "an axis of the result is also summed over"
    if any(c.nest.sweeps(r, c.columns) for r in reductions(s.value for s in c.passing)):
        return f"a row of {c.columns.extent!r} waits for its reductions, but only {MOST_COLUMNS} fit a program"
    if len(c.passing) == len(c.nest.stores):
        return "nothing is made of the reductions"
    for r in found:
        reason = _product_obstacle(c, r) if c.is_product(r) else _reduction_obstacle(c, r, result)
        if reason is not None:
            return reason
    return None


def _product_obstacle(c: RowContraction, r: Reduce) -> str | None:
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


def _reduction_obstacle(c: RowContraction, r: Reduce, result: frozenset[Axis]) -> str | None:
    if len(r.over) != 1:
        return "a reduction over several axes of a product"
    if not r.axes <= result:
        return "a reduction has an axis that the result does not have"
    if r in c.beside and reductions(r.inputs):
        return "what products sum over is also reduced after them"
    if r.monoid == "welford_merge":
        return "a merge of states beside a product"
    return None


def row_reductions(c: RowContraction) -> list[Reduce]:
    """The reductions over the columns, producers first."""
    found = reductions(s.value for s in c.nest.stores)
    return [r for r in found if not c.is_product(r) and c.nest.sweeps(r, c.columns)]
