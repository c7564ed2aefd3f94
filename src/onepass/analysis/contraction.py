"""Groups with matrix products: which axes are a program's rows and columns, and what is swept.

A product is `Reduce(sum, a * b, k)` whose operands each lack an axis the other has. A program owns a tile of rows and
columns of the result; every reduction of the result is a sweep over one class, and inside such a sweep the products
that its terms are made of are computed again, tile by tile.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ..ir.expr import Expr, Index, Load, Part, Random, Reduce, postorder
from ..ir.plan import Store
from ..ir.poly import Axis, Poly
from .access import estimate, flat_offset
from .inline import reductions
from .nest import Nest, NestStore, Refusal
from .normalise import normalise
from .operands import operands, sided
from .parts import cut_rows
from .single_row import ROW
from .unify import unify

DIFFERENT_AXES = "its reductions run over different axes"
MOST_HELD = 256  # of an axis that a program holds whole beside a swept one
LEAST_TILE = 16  # of a matrix unit


@dataclass(frozen=True, slots=True)
class Carried:
    """A sum whose terms depend on a maximum: `h` of the maximum scales the sum (the transport rule).

    `stand_in`: the maximum of a tile, in the terms of the sum over that tile.
    """

    top: Reduce
    h: Expr
    stand_in: Load | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Contraction:
    """A nest of matrix products. `rows` and `columns` are classes of the result that a program has a tile of.

    Columns that are reduced (`rows.py`) are the swept class, too. Tiles may leave states of reductions of the result
    (`tile_states.py`): the values that enter such a reduction are stores of the nest, to nowhere.
    """

    nest: Nest
    rows: Axis
    columns: Axis
    swept: Axis  # the class that the result's own reductions run over
    inner: tuple[Axis, ...]  # classes that products inside the sweep run over
    held: bool = False  # columns are reduced, and one tile has all of them
    beside: tuple[Reduce, ...] = ()  # reductions of rows over a class that products sum over (the logit of one target)
    leaving: tuple[NestStore, ...] = ()  # stores of the products' kernel, where tiles leave states
    waiting: tuple[NestStore, ...] = ()  # stores that depend on merged states
    entering: dict[Reduce, tuple[Expr, ...]] = field(default_factory=dict)  # the inputs of a state, in a tile's axes
    carried: dict[Reduce, Carried] = field(default_factory=dict)

    @property
    def grid(self) -> tuple[Axis, ...]:
        """Classes of which a program has one position."""
        return tuple(c for c in self.nest.classes if c in self.nest.stores[0].domain - {self.rows, self.columns})

    @property
    def reduces_columns(self) -> bool:
        """Whether the result's own reductions run over the columns of its products."""
        return self.columns is self.swept

    @property
    def passing(self) -> tuple[NestStore, ...]:
        """Stores of swept columns: they depend on no reduction of the columns, so that every step stores its own."""
        swept = self.reduces_columns and not self.held
        return tuple(s for s in self.nest.stores if self.columns in s.domain) if swept else ()

    def sweeps(self, reduce: Reduce) -> frozenset[Axis]:
        """The classes a reduction runs over."""
        return frozenset(self.nest.bound[a] for a in reduce.over)


def largest_first(nest: Nest) -> Nest | Refusal:
    """The nest with the store first whose classes all others have a part of."""
    if nest.scans:
        return Refusal("a scan beside a matrix product")
    largest = max(nest.stores, key=lambda s: len(s.domain))
    others = [s for s in nest.stores if s is not largest]
    if any(s.region for s in nest.stores) or any(not s.domain <= largest.domain for s in others):
        return Refusal("its results have different shapes")
    return replace(nest, stores=(largest, *others))


def contract(stores: Iterable[Store]) -> Contraction | Refusal:
    """The roles of a group's classes, or why its products have no common program."""
    stores = list(stores)
    found = _contract(stores)
    if isinstance(found, Refusal):
        apart = [replace(s, value=cut_rows(s.value)) for s in stores]
        again = _contract(apart) if apart != stores else found
        return found if isinstance(again, Refusal) else again
    return found


def _contract(stores: list[Store]) -> Contraction | Refusal:
    ordered = largest_first(normalise(unify(stores)))
    return ordered if isinstance(ordered, Refusal) else contract_nest(ordered)


def contract_nest(nest: Nest) -> Contraction | Refusal:
    """The roles of the classes of a nest whose values are prepared, its largest store first."""
    largest = nest.stores[0]
    found = nest.reductions
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
        return Refusal(DIFFERENT_AXES)
    inside = [r for r in found if r not in tops]
    inner = tuple(dict.fromkeys(nest.bound[a] for r in inside for a in r.over))
    contraction = Contraction(nest, rows, columns, swept.pop(), inner)
    reason = _obstacle(contraction, tops, inside)
    return contraction if reason is None else Refusal(reason)


def _rows_and_columns(nest: Nest, reduce: Reduce, sides: tuple[Expr, Expr]) -> tuple[Axis, Axis] | Refusal:
    """Rows belong to the operand that is itself computed from products, else to the one not stored contiguously; where
    nothing is stored, to the one whose classes come first."""
    left, right = sides
    if reductions([right]) and not reductions([left]):
        left, right = right, left
    store = nest.stores[0]
    offset = flat_offset(store.buffer, store.index)
    last = next((a for a in store.domain - {ROW} if offset.coefficient(a) is Poly.ONE), None)
    later = _first(nest, left.axes - right.axes) > _first(nest, right.axes - left.axes)
    if not reductions([left]) and (later if last is None else last in left.axes - right.axes):
        left, right = right, left
    own = [[a for a in one.axes - other.axes if a in store.domain] for one, other in ((left, right), (right, left))]
    if not all(own):
        return Refusal("a matrix has no axis of its own in the result")
    rows, columns = (max(axes, key=lambda a: (estimate(a.extent), a.name)) for axes in own)
    if last in own[1]:
        columns = last
    return rows, columns


def _first(nest: Nest, axes: frozenset[Axis]) -> int:
    return min((k for k, c in enumerate(nest.classes) if c in axes), default=len(nest.classes))


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
