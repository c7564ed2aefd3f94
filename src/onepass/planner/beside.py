"""Matrix products that read the same matrix, side by side in one launch: Q, K and V of any widths.

What is gained is launches, and the last round of tiles of each product, which the next one fills. Products that are
already regions with their own epilogues take part as they are. Predicted time decides, on all of them or none.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..analysis.contractions import side_by_side
from ..analysis.inline import reductions
from ..analysis.nest import Refusal
from ..analysis.operands import operands, uncast
from ..analysis.single_row import vector_and_matrix
from ..ir.expr import Expr, Load
from ..ir.limits import FOLLOWERS
from ..ir.plan import Decision
from ..ir.program import Define
from .chooser import Chooser
from .close_calls import Times
from .links import Links
from .regions import Region

MOST_BESIDE = 8


@dataclass(frozen=True, slots=True)
class _Side:
    """A region that may share a launch, as it is planned so far."""

    region: Region
    time_us: float


def join_beside(chooser: Chooser) -> None:
    """Put regions and single products that read the same matrix into one launch where that is faster."""
    for regions in _sharing(chooser):
        kept = _independent(regions, chooser.links)[:MOST_BESIDE]
        sides = [_side(r, chooser) for r in kept]
        refused = [(r, s.reason) for r, s in zip(kept, sides, strict=True) if isinstance(s, Refusal)]
        chooser.decisions += [_decision([r], False, reason) for r, reason in refused]
        known = [s for s in sides if isinstance(s, _Side)]
        if len(known) > 1:
            _decide(known, chooser)


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
            region = next(r for r in chooser.regions if product in r.members)
            inside = [d for d in region.members if _left(d) is not None]
            if inside != [product]:
                continue
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


def _side(region: Region, chooser: Chooser) -> _Side | Refusal:
    c = chooser.contracted(region.members, region.again)
    if isinstance(c, Refusal):
        return c
    return _Side(region, region.chosen.time_us if region.chosen else chooser.apart(region.members, region.again))


def _decide(sides: list[_Side], chooser: Chooser) -> None:
    """One launch of all sides, if it is predicted to be faster."""
    regions = [s.region for s in sides]
    members = tuple(sorted((d for r in regions for d in r.members), key=chooser.order.__getitem__))
    again = tuple(dict.fromkeys(d for r in regions for d in r.again))
    apart = sum(s.time_us for s in sides)
    found = chooser.ask("beside", members, again, side_by_side)
    if isinstance(found.value, Refusal):
        chooser.decisions.append(_decision(regions, False, found.value.reason))
        return
    chosen = chooser.kernel(found.value, members, again, apart)
    together = chosen.time_us
    ways = "side by side in one launch", f"in {len(sides)}"
    reason = f"predicted {together:.1f} us {ways[0]}, {apart:.1f} us {ways[1]}"
    joined = Region(members, again, chosen)
    kernels = tuple(r for r in regions if r in chooser.regions)
    decision = _decision(regions, together < apart, reason, apart - together)
    decision = chooser.settle(decision, Times(together, apart, ways=ways), joined, kernels)
    chooser.decisions.append(decision)
    if decision.accepted:
        chooser.regions[:] = [r for r in chooser.regions if r not in regions]
        chooser.regions.append(joined)
        chooser.taken.update(joined.members)
        chooser.links.join(joined.members, joined.again)


def _decision(regions: list[Region], accepted: bool, reason: str, saved_us: float = 0.0) -> Decision:
    first, last = (r.members[-1].origin.node for r in (regions[0], regions[-1]))
    return Decision(first, last, "beside", accepted, reason, saved_us)
