"""Which part of a sweep a tile of rows may need where data decides: captured positions, documents, lengths, padding.

    pq[i] >= pk[j]    ->    max(pq[i] of the tile) >= pk[j]
    doc[i] == doc[j]  ->    min(doc[i] of the tile) <= doc[j], and doc[j] <= max(doc[i] of the tile)

A condition between a row and a column holds for no row of the tile where it does not hold for the rows' largest (or
smallest) value: columns before the first and after the last that pass this test are not visited, whatever the data.
"""

from __future__ import annotations

from ..ir.expr import Const, Expr, Index, Load, Part, Pointwise, Reduce, pointwise, postorder, substitute_axes
from ..ir.poly import Axis
from .formulas import Data, Every, Formula, Some

_OPPOSITE = {"ge": "lt", "gt": "le", "le": "gt", "lt": "ge", "eq": "ne", "ne": "eq"}
_TURNED = {"ge": "le", "gt": "lt", "le": "ge", "lt": "gt", "eq": "eq", "ne": "ne"}
MOST_WORK = 16  # operations of a test


def may_count(formula: Formula, rows: Axis, swept: Axis, over: Axis) -> Expr | None:
    """A condition on a column that holds wherever the formula holds for some row of a tile; None: it says nothing.

    The largest and smallest values of a tile's rows are reductions over the axis `over`, which stands for `rows`.
    """
    match formula:
        case Data(condition, holds):
            return _of_data(condition, holds, rows, swept, over)
        case Every(parts):
            known = [e for p in parts if (e := may_count(p, rows, swept, over)) is not None]
            return _joined("bitand", known) if known else None
        case Some(parts):
            found = [may_count(p, rows, swept, over) for p in parts]
            known = [e for e in found if e is not None]
            return _joined("bitor", known) if known and len(known) == len(found) else None
    return None


def _joined(op: str, conditions: list[Expr]) -> Expr:
    total = conditions[0]
    for condition in conditions[1:]:
        total = pointwise(op, total, condition)
    return total


def _of_data(condition: Expr, holds: bool, rows: Axis, swept: Axis, over: Axis) -> Expr | None:
    if not _is_cheap(condition):
        return None
    if rows not in condition.axes:
        return condition if holds else pointwise("bitnot", condition)
    if not isinstance(condition, Pointwise) or condition.op not in _OPPOSITE:
        return None
    op, (left, right) = condition.op if holds else _OPPOSITE[condition.op], condition.args
    if rows not in left.axes:
        op, left, right = _TURNED[op], right, left
    if (
        rows in right.axes or swept in left.axes or not left.dtype.is_integer
    ):  # a NaN among the rows would hide the others
        return None
    tests = {"ge": ["ge"], "gt": ["gt"], "le": ["le"], "lt": ["lt"], "eq": ["le", "ge"]}.get(op, [])
    known = [pointwise(t, _extreme("max" if t in ("ge", "gt") else "min", left, rows, over), right) for t in tests]
    return _joined("bitand", known) if known else None


def _extreme(monoid: str, value: Expr, rows: Axis, over: Axis) -> Expr:
    return Part(Reduce(monoid, (substitute_axes(value, {rows: over.poly()}),), (over,)), 0)


def _is_cheap(condition: Expr) -> bool:
    """Whether a test is a few operations on positions and what memory holds."""
    nodes = list(postorder([condition]))
    known = all(isinstance(e, Load | Index | Const | Pointwise) for e in nodes)
    return known and len(nodes) <= MOST_WORK and any(isinstance(e, Load) for e in nodes)
