"""Matrix products that read the same matrix, side by side in one launch: Q, K and V of any widths.

What is gained is launches, and the last round of tiles of each product, which the next one fills. Products that are
already regions with their own epilogues take part as they are. Predicted time decides, on all of them or none.
"""

from __future__ import annotations

from dataclasses import replace

from ..analysis.contraction import contract
from ..analysis.contractions import side_by_side
from ..analysis.inline import reductions
from ..analysis.nest import Refusal
from ..analysis.operands import operands, uncast
from ..analysis.single_row import vector_and_matrix
from ..ir.expr import Expr, Load
from ..ir.limits import FOLLOWERS
from ..ir.program import Define
from .chooser import Chooser, Kind
from .links import Links
from .regions import Region

MOST_BESIDE = 8
BESIDE = Kind("beside", side_by_side, lambda *_: (0.0, 0.0))


def join_beside(chooser: Chooser) -> None:
    """Put regions and single products that read the same matrix into one launch where that is faster."""
    for regions in _sharing(chooser):
        sides: dict[Region, float] = {}
        for region in _independent(regions, chooser.links)[:MOST_BESIDE]:
            found = chooser.contracted(contract, region.members, region.again)
            if isinstance(found, Refusal):
                chooser.refuse(BESIDE, _names([region]), found.reason)
            else:
                sides[region] = region.chosen.time_us if region.chosen else chooser.apart(region.members, region.again)
        if len(sides) > 1:
            _try(chooser, sides)


# --- who ---


def _sharing(chooser: Chooser) -> list[list[Region]]:
    """Regions of one product each, by the matrix that they read first."""
    found: dict[Expr, list[Region]] = {}
    for extern in chooser.products:
        product = extern.contraction
        assert product is not None
        matrix = _left(product) if chooser.given_up([product]) < FOLLOWERS else None
        region = Region((product,), ())
        if product in chooser.taken:
            own = [r for r in chooser.regions if product in r.members]
            if [d for r in own for d in (*r.members, *r.again) if _left(d) is not None] != [product]:
                continue
            (region,) = own
        if matrix is not None:
            found.setdefault(matrix, []).append(region)
    return [regions for regions in found.values() if len(regions) > 1]


def _left(define: Define) -> Expr | None:
    """The first matrix of a product, or its only row, if it is read from memory."""
    sides = [side for r in reductions([define.value]) for side in operands(r) or vector_and_matrix(r) or ()]
    rows = [a for a in define.dimensions[-2:-1] if a in define.axes]
    columns = frozenset(define.axes[-1:])
    return next(
        (s for s in map(uncast, sides) if isinstance(s, Load) and s.axes >= {*rows} and not s.axes & columns), None
    )


def _independent(regions: list[Region], links: Links) -> list[Region]:
    """Regions none of which waits for another, as early as they come."""
    kept: dict[int, Region] = {}
    for r in regions:
        step = links.node_of[r.members[0].buffer]
        if not any(links.connected(step, k) for k in kept):
            kept[step] = r
    return list(kept.values())


# --- whether ---


def _try(chooser: Chooser, sides: dict[Region, float]) -> None:
    """One launch of all sides, each with its time alone."""
    members = chooser.ordered(d for r in sides for d in r.members)
    again = tuple(dict.fromkeys(d for r in sides for d in r.again))
    kind = replace(
        BESIDE, without=lambda *_: (sum(sides.values()), 0.0), ways=("side by side in one launch", f"in {len(sides)}")
    )
    chooser.attempt(kind, members, again, _names(list(sides)))


def _names(regions: list[Region]) -> tuple[str, str]:
    return regions[0].members[-1].origin.node, regions[-1].members[-1].origin.node
