"""The algebra of groups with matrix products: one ordered table of rules, applied once to each group.

In: the nest of a group, its axes aligned (`unify`). Out: a nest of the same results in the form that roles of axes are
read from. Each rule says why it is true. A rule that is true of real numbers only is checked in float64 on random
numbers wherever it is applied, and is dropped where the check fails.

Rules about single operations come earlier: `parts.unroll` changes the program before it is planned, and
`one_hot.sum_of_one` applies while operations are inlined. `parts.cut_rows` makes axes that must be aligned again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..ir.expr import Expr, rewrite
from .collapse import collapse
from .nest import Nest
from .parts import join_digits
from .scaling import scale_outside
from .scores import in_shared_base, jumping, multiplied, positions_apart, unrounded
from .shifts import extreme, settled
from .single_row import with_row


@dataclass(frozen=True, slots=True)
class Rule:
    """A step from a nest to an equal one. `checked`: in float64 on random numbers.

    `rows` and `tiles`: whether it applies where programs own whole rows, and where they own tiles of results.
    """

    name: str
    why: str
    apply: Callable[[Nest], Nest]
    checked: bool = False
    rows: bool = True
    tiles: bool = True


def _each(change: Callable[[Expr], Expr]) -> Callable[[Nest], Nest]:
    """A rule about the value of one store."""
    return lambda nest: nest.with_values(change)


def _nodes(change: Callable[[Expr], Expr | None]) -> Callable[[Nest], Nest]:
    """A rule about one node of a value."""
    return _each(lambda value: rewrite(value, change))


RULES = (
    Rule("collapse", "an access at i * J + j walks (i, j) as one axis", collapse),
    Rule("digits", "sums have no order, so the digits of a summed axis are one axis", join_digits, rows=False),
    Rule("single row", "an axis of extent 1 adds 0 to any position", with_row, rows=False),
    Rule(
        "roundings of tiles", "a product comes in float32: 16 bits only lose digits of it", _each(unrounded), rows=False
    ),
    Rule(
        "roundings of rows",
        "the same, where no result jumps with the last digit",
        _each(lambda value: unrounded(value, jumping(value))),
        tiles=False,
    ),
    Rule("quotients", "x / c = x * (1 / c) for a number c", _each(multiplied), checked=True, tiles=False),
    Rule("extremes", "the value at the position of the maximum is the maximum", _nodes(extreme)),
    Rule("shifts", "rounding keeps order, so max(x - h) = max(x) - h", _nodes(settled)),
    Rule("positions", "float32 holds every whole number below 2 ** 24", _nodes(positions_apart)),
    Rule("scaling", "sum(x * c) = sum(x) * c where c does not vary along the sum", _nodes(scale_outside), checked=True),
    Rule("base two", "exp(x - m) = exp2(x * log2(e) - m * log2(e))", in_shared_base, checked=True),
)


def normalise(nest: Nest, rows: bool = False) -> Nest:
    """The nest in the form that `contraction.py` reads. `rows`: programs own whole rows of a product."""
    for rule in RULES:
        if rule.rows if rows else rule.tiles:
            nest = rule.apply(nest)
    return nest
