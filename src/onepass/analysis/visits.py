"""Which part of a sweep a tile of rows may need where data decides: captured positions, documents, lengths, padding.

    pq[i] >= pk[j]    ->    max(pq[i] of the tile) >= pk[j]
    doc[i] == doc[j]  ->    min(doc[i] of the tile) <= doc[j], and doc[j] <= max(doc[i] of the tile)

A condition between a row and a column holds for no row of the tile where it does not hold for the rows' largest (or
smallest) value: columns before the first and after the last that pass this test are not visited, whatever the data.
With the other extremes it holds for every row: there the condition is not computed. A condition without such a test,
of a stored mask for example, is computed once for every row and column (`spelled`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce

from ..ir.dtypes import DType
from ..ir.expr import Const, Expr, Index, Load, Part, Pointwise, Reduce, const, pointwise, postorder, substitute_axes
from ..ir.poly import Axis, Poly, in_range
from ..ir.states import identities
from .access import flat_offset
from .formulas import Data, Every, Formula, Positive, Some, added_number

_OPPOSITE = {"ge": "lt", "gt": "le", "le": "gt", "lt": "ge", "eq": "ne", "ne": "eq"}
_TURNED = {"ge": "le", "gt": "lt", "le": "ge", "lt": "gt", "eq": "eq", "ne": "ne"}
MOST_WORK = 16  # operations of a test


@dataclass(frozen=True, slots=True)
class RowTile:
    """A tile of rows, and the columns that it sweeps.

    The largest and smallest values of the rows are reductions over the axis `over`: position 0 is row `start`.
    `all_rows`: a test that a column must pass for an inequality of positions to hold for every row, or None.
    """

    rows: Axis
    swept: Axis
    over: Axis
    start: Poly = Poly.ZERO
    all_rows: Callable[[Positive], Expr | None] = lambda _: None

    def some_row(self, formula: Formula) -> Expr | None:
        """A condition on a column that holds wherever the formula holds for some row; None: it says nothing."""
        match formula:
            case Data(condition, holds):
                return self._of_data(condition, holds, every=False)
            case Every(parts):
                return _joined("bitand", [e for p in parts if (e := self.some_row(p)) is not None])
            case Some(parts):
                found = [self.some_row(p) for p in parts]
                return None if None in found else _joined("bitor", [e for e in found if e is not None])
        return None

    def every_row(self, formula: Formula) -> Expr | None:
        """A condition on a column under which the formula holds for every row; None: there is no such test."""
        match formula:
            case Positive():
                return self.all_rows(formula)
            case Data(condition, holds):
                return self._of_data(condition, holds, every=True)
            case Every(parts):
                found = [self.every_row(p) for p in parts]
                return None if None in found else _joined("bitand", [e for e in found if e is not None])
            case Some(parts):
                return _joined("bitor", [e for p in parts if (e := self.every_row(p)) is not None])
        return None

    def _of_data(self, condition: Expr, holds: bool, every: bool) -> Expr | None:
        rows = self.rows
        if not _is_cheap(condition):
            return None
        if rows not in condition.axes:
            return _said(condition, holds, every)
        if (compared := _compared(condition, holds, rows)) is None:
            return None
        op, left, right = compared
        # A NaN among the rows would hide the others.
        if rows in right.axes or self.swept in left.axes or not left.dtype.is_integer:
            return None
        tests = {"eq": ("le", "ge"), "ne": ()}.get(op, (op,))
        known = [
            pointwise(t, self._extreme("min" if (t in ("ge", "gt")) is every else "max", left), right) for t in tests
        ]
        return _joined("bitand", known)

    def _extreme(self, monoid: str, value: Expr) -> Expr:
        return Part(Reduce(monoid, (self.of_rows(value, *identities(monoid, (value.dtype,))),), (self.over,)), 0)

    def of_rows(self, value: Expr, beyond: Expr) -> Expr:
        """A value of the rows along `over`, and what stands for rows beyond the last one."""
        at = self.start + self.over
        found = substitute_axes(value, {self.rows: at})
        inside = pointwise("lt", Index(at), Index(self.rows.extent))
        return found if in_range(at, self.rows.extent) else pointwise("where", inside, found, beyond)


def range_of(test: Expr, swept: Axis) -> tuple[Expr, Expr] | None:
    """The first column that passes a test and the end of the last one, where they are all between; else None.

    Of tests that compare the column's own position with numbers: arange(n) < length.
    """
    zero, end = Index(Poly.ZERO), Index(swept.extent)
    first: Expr = zero
    last: Expr = end
    waiting = [test]
    while waiting:
        e = waiting.pop()
        if isinstance(e, Pointwise) and e.op == "bitand":
            waiting += e.args
            continue
        holds = not (isinstance(e, Pointwise) and e.op == "bitnot")
        compared = _compared(e if holds else e.children[0], holds, swept)
        if compared is None or compared[1] is not Index(swept.poly()) or compared[0] in ("eq", "ne"):
            return None
        op, _, number = compared
        if swept in number.axes or not number.dtype.is_integer:
            return None
        number = pointwise("cast", number, dtype=DType.I64)
        if op in ("gt", "le"):  # the end of the type is never left: what is beyond the columns is cut first
            number = pointwise("minimum", pointwise("maximum", number, const(-1, DType.I64)), end) + const(1, DType.I64)
        if op in ("ge", "gt"):
            first = pointwise("maximum", first, number)
        else:
            last = pointwise("minimum", last, number)
    return first if first is zero else pointwise("minimum", first, end), pointwise("maximum", last, zero)


def spelled(formula: Formula, every: bool) -> Expr:
    """A condition on a row and a column under which a formula holds (`every`), or that holds wherever it does."""
    match formula:
        case Positive(difference):
            return pointwise("gt", Index(difference), Index(Poly.ZERO))
        case Data(condition, holds) if _is_cheap(condition):
            return _said(condition, holds, every)
        case Every(parts):
            return _joined("bitand", [spelled(p, every) for p in parts]) or const(True, DType.BOOL)
        case Some(parts):
            return _joined("bitor", [spelled(p, every) for p in parts]) or const(False, DType.BOOL)
    return const(not every, DType.BOOL)


def _said(condition: Expr, holds: bool, every: bool) -> Expr:
    """The condition of a leaf; that a number is added counts as true for every row only where the number is zero."""
    if every and (number := added_number(Data(condition, holds))) is not None:
        return pointwise("eq", number, const(0, number.dtype))
    return condition if holds else pointwise("bitnot", condition)


def usually_grows(formula: Formula, rows: Axis, swept: Axis) -> bool:
    """Whether a row counts more columns the larger its data is: later rows, as a rule, since most positions rise.

    Of a stored mask a row of memory is a query, and later queries see more.
    """
    match formula:
        case Data(condition, holds):
            compared = _compared(condition, holds, rows)
            rises = compared is not None and compared[0] in ("ge", "gt") and rows not in compared[2].axes
            return rises or any(_step(e, rows) > _step(e, swept) > 0 for e in postorder([condition]))
        case Every(parts) | Some(parts):
            return any(usually_grows(p, rows, swept) for p in parts)
    return False


def _step(e: Expr, axis: Axis) -> int:
    """How far apart two neighbours along an axis are loaded; 0 where that is not known."""
    step = flat_offset(e.buffer, e.index).coefficient(axis) if isinstance(e, Load) else None
    return step.constant or 0 if step is not None else 0


def expected(formula: Formula, rows: Axis, swept: Axis) -> float:
    """The part of the columns that a formula is expected to leave, in the mean over the rows.

    Of an order between data of rows and data of columns one half: positions, as a rule. Of a stored mask of booleans
    the same: one that hides little is seldom stored for every row and column. Else nothing is known.
    """
    match formula:
        case Data(Load() as mask, _):
            return 0.5 if {rows, swept} <= mask.axes else 1.0
        case Data(condition, holds):
            compared = _compared(condition, holds, rows)
            ordered = compared is not None and compared[0] in ("ge", "gt", "le", "lt")
            return 0.5 if ordered and compared is not None and swept in compared[2].axes else 1.0
        case Every(parts):
            return min((expected(p, rows, swept) for p in parts), default=1.0)
        case Some(parts):
            return max((expected(p, rows, swept) for p in parts), default=1.0)
    return 1.0


def _compared(condition: Expr, holds: bool, rows: Axis) -> tuple[str, Expr, Expr] | None:
    """A comparison with what varies with the rows on its left."""
    if not isinstance(condition, Pointwise) or condition.op not in _OPPOSITE or rows not in condition.axes:
        return None
    op, (left, right) = condition.op if holds else _OPPOSITE[condition.op], condition.args
    return (op, left, right) if rows in left.axes else (_TURNED[op], right, left)


def _joined(op: str, conditions: list[Expr]) -> Expr | None:
    return reduce(partial(pointwise, op), conditions) if conditions else None


def _is_cheap(condition: Expr) -> bool:
    """Whether a test is a few operations on positions and what memory holds."""
    nodes = list(postorder([condition]))
    known = all(isinstance(e, Load | Index | Const | Pointwise) for e in nodes)
    return known and len(nodes) <= MOST_WORK and any(isinstance(e, Load) for e in nodes)
