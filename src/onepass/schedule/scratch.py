"""Which values of a sweep are kept in per-program scratch for the sweeps after it.

Recomputing is free for a load that is still in cache; an exp, an erf or a random draw is not. A value
is kept when recomputing it costs more than a trip through the nearest cache and a row of it fits there.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..analysis.access import work_of
from ..ir.expr import Expr, Load, Part, Reduce, postorder
from ..ir.kernel import Local
from ..ir.poly import Axis, Poly, product
from .builder import Kept
from .leaf import Item, Leaf, cuts

KEEP_COST = 6.0
LOAD_COST = 1.5


def choose_kept(cluster: Sequence[Item], later: Sequence[Item], inner: frozenset[Axis], leaf: Leaf) -> dict[Expr, Kept]:
    """The values the sweep over `inner` should leave behind for `later` ones."""
    size = product(a.extent for a in inner).constant
    if not inner or not later or size is None or leaf.nest.split in inner:
        return {}
    if any(len(cuts(a, [*cluster, *later])) > 1 for a in inner):
        return {}
    made = {e for i in cluster for v in i.values for e in postorder([v], into_reductions=False) if e.axes & inner}
    budget = leaf.target.cache_bytes // 4
    kept: dict[Expr, Kept] = {}
    for e in _topmost([v for i in later for v in i.values], made):
        needed = size * e.dtype.bytes
        if needed <= budget and recompute_cost(e) >= KEEP_COST and leaf.builder.kept(e) is None:
            budget -= needed
            local = Local(leaf.builder.name("row"), e.dtype, size)
            kept[e] = Kept(local, linear(leaf.layout.order(inner)))
    return kept


def _topmost(values: Sequence[Expr], made: set[Expr]) -> list[Expr]:
    """The first values already made that a walk from the top meets."""
    found: dict[Expr, None] = {}
    seen: set[Expr] = set()
    stack = list(values)
    while stack:
        e = stack.pop()
        if e in seen:
            continue
        seen.add(e)
        if e in made:
            found[e] = None
        elif not isinstance(e, Part):
            stack.extend(e.children)
    return list(found)


def recompute_cost(value: Expr) -> float:
    """Work to compute one element again, reductions finished."""
    nodes = postorder([value], into_reductions=False)
    return sum(LOAD_COST if isinstance(e, Load) else work_of(e) for e in nodes if not isinstance(e, Reduce))


def linear(axes: Sequence[Axis]) -> Poly:
    """The position in an array over axes, the last one fastest."""
    total = Poly.ZERO
    for a in axes:
        total = total * a.extent + a
    return total
