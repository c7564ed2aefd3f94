"""Matrix products that read the same matrix, side by side in one launch: Q, K and V of any widths.

What is gained is launches, and the last round of tiles of each product, which the next one fills. Products that are
already regions with their own epilogues take part as they are. Predicted time decides, on all of them or none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from ..analysis.contraction import Contraction
from ..analysis.inline import reductions
from ..analysis.nest import Refusal
from ..analysis.operands import operands, uncast
from ..analysis.single_row import vector_and_matrix
from ..ir.expr import Expr, Load
from ..ir.limits import FOLLOWERS
from ..ir.plan import Decision
from ..ir.program import Define, Extern
from ..ir.target import Target
from .close_calls import Times
from .links import Links
from .regions import Effort, Region, tiles_of

MOST_BESIDE = 8


class Prices(Protocol):
    """What the first tier knows of regions."""

    target: Target
    products: list[Extern]
    taken: set[Define]
    regions: list[Region]
    decisions: list[Decision]
    links: Links

    def contracted(self, members: tuple[Define, ...], again: tuple[Define, ...]) -> Contraction | Refusal: ...

    def given_up(self, members: Iterable[Define]) -> int: ...

    def effort(self, c: Contraction, others: int = 0) -> Effort: ...

    def apart(self, members: tuple[Define, ...], again: tuple[Define, ...]) -> float: ...

    def settle(self, decision: Decision, times: Times, region: Region, apart: tuple[Region, ...]) -> Decision: ...


@dataclass(frozen=True, slots=True)
class _Side:
    """A region that may share a launch, as it is planned so far."""

    region: Region
    contraction: Contraction
    time_us: float


def join_beside(prices: Prices) -> None:
    """Put regions and single products that read the same matrix into one launch where that is faster."""
    for regions in _sharing(prices):
        kept = _independent(regions, prices.links)[:MOST_BESIDE]
        sides = [_side(r, prices) for r in kept]
        refused = [(r, s.reason) for r, s in zip(kept, sides, strict=True) if isinstance(s, Refusal)]
        prices.decisions += [_decision([r], False, reason) for r, reason in refused]
        known = [s for s in sides if isinstance(s, _Side)]
        if len(known) > 1:
            _decide(known, prices)


# --- who ---


def _sharing(prices: Prices) -> list[list[Region]]:
    """Regions of one product each, by the matrix that they read first."""
    found: dict[Expr, list[Region]] = {}
    for extern in prices.products:
        product = extern.contraction
        assert product is not None
        matrix = _left(product) if prices.given_up([product]) < FOLLOWERS else None
        region = Region((product,), ())
        if product in prices.taken:
            region = next(r for r in prices.regions if product in r.members)
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


def _side(region: Region, prices: Prices) -> _Side | Refusal:
    c = prices.contracted(region.members, region.again)
    if isinstance(c, Refusal):
        return c
    kernel = region in prices.regions
    time_us = prices.effort(c).time_us(prices.target) if kernel else prices.apart(region.members, region.again)
    launch_us = prices.target.launch_us
    return _Side(region, c, launch_us + (time_us - launch_us) * _rounds(tiles_of(c), prices.target))


def _rounds(tiles: int, target: Target) -> float:
    """How much longer tiles take than processors that are busy to the end."""
    rounds = tiles / target.processors
    return math.ceil(rounds) / rounds if rounds > 1 else 1.0


def _decide(sides: list[_Side], prices: Prices) -> None:
    """One launch of all sides, if it is predicted to be faster."""
    tiles = sum(tiles_of(s.contraction) for s in sides)
    efforts = [prices.effort(s.contraction, tiles - tiles_of(s.contraction)) for s in sides]
    unit = sum(e.unit_us for e in efforts) * _rounds(tiles, prices.target)
    whole = Effort(unit, sum(e.moved for e in efforts), sum(e.operations for e in efforts))
    together, apart = whole.time_us(prices.target), sum(s.time_us for s in sides)
    ways = "side by side in one launch", f"in {len(sides)}"
    reason = f"predicted {together:.1f} us {ways[0]}, {apart:.1f} us {ways[1]}"
    regions = [s.region for s in sides]
    joined = _joined(regions, together)
    kernels = tuple(r for r in regions if r in prices.regions)
    decision = _decision(regions, together < apart, reason, apart - together)
    decision = prices.settle(decision, Times(together, apart, ways=ways), joined, kernels)
    prices.decisions.append(decision)
    if decision.accepted:
        prices.regions[:] = [r for r in prices.regions if r not in regions]
        prices.regions.append(joined)
        prices.taken.update(joined.members)
        prices.links.join(joined.members, joined.again)


def _joined(regions: list[Region], predicted_us: float) -> Region:
    members = tuple(d for r in regions for d in r.members)
    again = tuple(dict.fromkeys(d for r in regions for d in r.again))
    return Region(members, again, beside=True, predicted_us=predicted_us)


def _decision(regions: list[Region], accepted: bool, reason: str, saved_us: float = 0.0) -> Decision:
    first, last = (r.members[-1].origin.node for r in (regions[0], regions[-1]))
    return Decision(first, last, "beside", accepted, reason, saved_us)
