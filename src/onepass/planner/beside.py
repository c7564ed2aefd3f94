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
from ..analysis.inline import loaded, reductions
from ..analysis.nest import Refusal
from ..analysis.operands import operands, uncast
from ..analysis.single_row import vector_and_matrix
from ..ir.expr import Expr, Load
from ..ir.limits import FOLLOWERS
from ..ir.plan import Decision
from ..ir.program import Buffer, Define, Extern, HostValue, Program
from ..ir.target import Target
from .close_calls import Times
from .groups import things
from .regions import Effort, Region, tiles_of

MOST_BESIDE = 8


class Prices(Protocol):
    """What the first tier knows of regions."""

    target: Target
    products: list[Extern]
    taken: set[Define]
    regions: list[Region]
    decisions: list[Decision]

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


def join_beside(prices: Prices, program: Program) -> None:
    """Put regions and single products that read the same matrix into one launch where that is faster."""
    sharing = _sharing(prices)
    links = _Links(program, prices.regions) if sharing else None
    for regions in sharing:
        assert links is not None
        kept = _independent(regions, links)[:MOST_BESIDE]
        sides = [_side(r, prices) for r in kept]
        refused = [(r, s.reason) for r, s in zip(kept, sides, strict=True) if isinstance(s, Refusal)]
        prices.decisions += [_decision([r], False, reason) for r, reason in refused]
        known = [s for s in sides if isinstance(s, _Side)]
        if len(known) > 1 and _decide(known, prices):
            links.join(s.region for s in known)


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


class _Links:
    """What comes after what, regions taken as a whole: they are single steps of the plan."""

    def __init__(self, program: Program, regions: Iterable[Region]) -> None:
        self.whole: dict[Define, Define] = {}  # a member of a region -> the one that stands for all of it
        self.after: dict[object, set[object]] = {}
        self.span: dict[object, tuple[int, int]] = {}
        self.wide: set[object] = set()  # steps of several statements
        maker: dict[Buffer | HostValue, object] = {}
        ordered: object = None
        for number, s in enumerate(program.statements):
            step: Define | Extern
            made: Buffer | HostValue
            used: Iterable[Buffer | HostValue]
            match s:
                case Define():
                    step, made, used = s, s.buffer, loaded(s.value)
                case Extern():
                    step, made, used = s.contraction or s, s.result, things((s.args, s.kwargs))
                case _:
                    continue
            self.span[step] = number, number
            for b in used:
                self._link(maker.get(b), step)
            if isinstance(s, Extern) and s.ordered:
                self._link(ordered, step)
                ordered = step
            maker[made] = step
        for r in regions:
            self.join([r])
            for b in (b for d in r.again for b in loaded(d.value)):
                self._link(maker.get(b), r.members[0])

    def _link(self, first: object, second: object) -> None:
        if first is not None:
            self.after.setdefault(first, set()).add(second)

    def join(self, regions: Iterable[Region]) -> None:
        """Make one step of regions."""
        first, *others = (d for r in regions for d in r.members)
        low, high = zip(*(self.span[self.step(d)] for d in (first, *others)), strict=True)
        for d in others:
            self.after.setdefault(first, set()).update(self.after.pop(d, ()))
        self.whole |= dict.fromkeys((first, *others), first)
        self.span[first] = min(low), max(high)
        self.wide |= {first} if others else set()

    def step(self, statement: object) -> object:
        """What stands for the whole that a statement belongs to."""
        return self.whole.get(statement, statement)  # type: ignore[call-overload]

    def reaches(self, first: object, limit: int) -> set[object]:
        """Every step that must come after one, as far as those that start up to a statement."""
        found: set[object] = set()
        stack = [first]
        while stack:
            for s in map(self.step, self.after.get(stack.pop(), ())):
                if s not in found and self.span[s][0] <= limit:
                    found.add(s)
                    stack.append(s)
        return found

    def horizon(self, steps: Iterable[object]) -> int:
        """A statement that no step lies across, not before any of these: what starts later leads to none of them."""
        limit, last = -1, max(self.span[s][1] for s in steps)
        while limit != last:
            limit = last
            last = max((high for low, high in map(self.span.__getitem__, self.wide) if low <= limit), default=limit)
            last = max(last, limit)
        return limit


def _independent(regions: list[Region], links: _Links) -> list[Region]:
    """Regions none of which waits for another, as early as they come."""
    steps = [links.step(r.members[0]) for r in regions]
    limit = links.horizon(steps)
    kept: dict[object, Region] = {}
    reached: set[object] = set()
    for r, step in zip(regions, steps, strict=True):
        later = links.reaches(step, limit)
        if step not in reached and not later & kept.keys():
            kept[step] = r
            reached |= later
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


def _decide(sides: list[_Side], prices: Prices) -> bool:
    """One launch of all sides, if it is predicted to be faster; the answer."""
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
    return decision.accepted


def _joined(regions: list[Region], predicted_us: float) -> Region:
    members = tuple(d for r in regions for d in r.members)
    again = tuple(dict.fromkeys(d for r in regions for d in r.again))
    return Region(members, again, beside=True, predicted_us=predicted_us)


def _decision(regions: list[Region], accepted: bool, reason: str, saved_us: float = 0.0) -> Decision:
    first, last = (r.members[-1].origin.node for r in (regions[0], regions[-1]))
    return Decision(first, last, "beside", accepted, reason, saved_us)
