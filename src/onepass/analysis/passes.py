"""Reductions over one class in the order and the company they are computed in.

Those that wait for nothing share a sweep; a sum that waits for a maximum grows beside it where the transport rule
says so. What the rule cannot merge takes a sweep of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.expr import Expr, Reduce, substitute_axes
from ..ir.poly import Poly
from .access import estimate
from .bounds import Range, find_ranges, needed
from .contraction import Contraction
from .formulas import some
from .inline import reductions
from .nest import direct_reductions
from .transport import transport
from .visits import expected

SAMPLES = 16  # tiles of rows that stand for all


@dataclass(frozen=True, slots=True)
class Pass:
    """Reductions that share a sweep. Sums `carried` beside the first of them, a maximum, have their h each."""

    level: tuple[Reduce, ...]
    carried: dict[Reduce, Expr]

    @property
    def sums(self) -> tuple[Reduce, ...]:
        """Those that no maximum leads."""
        return tuple(r for r in self.level if r.monoid == "sum")

    def skips(self, c: Contraction) -> bool:
        """Whether steps without any term that counts are passed over.

        Sums that no maximum leads are asked where products are spared, and as long as they wait for nothing.
        """
        waiting = any(c.nest.sweeps(r, c.swept) for s in self.sums for r in direct_reductions(s.inputs))
        known = all(r.monoid in ("max", "sum") for r in self.level)
        return known and not (self.sums and (waiting or not c.inner))


def passes(c: Contraction) -> list[Pass]:
    """The result's reductions over the swept class."""
    domain = c.nest.stores[0].domain
    depth: dict[Reduce, int] = {}
    for r in c.nest.reductions:
        if r.axes <= domain and c.nest.sweeps(r, c.swept):
            depth[r] = 1 + max((depth[d] for d in reductions(r.inputs) if d in depth), default=-1)
    levels = [[r for r in depth if depth[r] == k] for k in range(1 + max(depth.values()))]
    found: list[Pass] = []
    while levels:
        level, following = levels[0], levels[1] if len(levels) > 1 else []
        leader, carried = _carried(level, following)
        found.append(Pass((*leader, *(r for r in level if r not in leader)), carried))
        levels = levels[2 if carried else 1 :]
    return found


def visited(c: Contraction, lanes: int) -> float:
    """The part of the swept class that masks leave to tiles of so many rows, in the mean over the result's rows."""
    found = passes(c)
    if not c.inner or not all(one.skips(c) for one in found):
        return 1.0
    rows, length = estimate(c.rows.extent), estimate(c.swept.extent)
    visits: list[float] = []
    for one in found:
        terms = {r: substitute_axes(r.inputs[0], {r.over[0]: c.swept.poly()}) for r in (*one.level, *one.carried)}
        counts = some(needed(term, r.monoid, r not in one.sums) for r, term in terms.items())
        for k in range(SAMPLES):
            ranges = find_ranges(counts, c.rows, c.swept, Poly.of(k * rows // SAMPLES), lanes)
            known = any(b.slope for b in ranges[-1])  # what positions rule out is counted
            visits.append(_length(ranges, length) * (1.0 if known else expected(counts, c.rows, c.swept)))
    return sum(visits) / max(1, len(visits) * length)


def _length(ranges: list[Range], most: int) -> int:
    """How many positions there are in ranges, as far as they are known beforehand."""
    total = 0
    for one in ranges:
        at_start = [(b.upper, b.loose.substitute(dict.fromkeys(b.loose.axes, Poly.ZERO))) for b in one]
        ends = [[estimate(place) for up, place in at_start if up is upper] for upper in (False, True)]
        total += max(0, min([most, *ends[1]]) - max([0, *ends[0]]))
    return min(total, most)


def shares_out(c: Contraction) -> bool:
    """Whether programs may share out the swept class and leave states, which a second kernel merges.

    There are as many states for each row and column as there are programs for it. Where the swept class and these may
    both grow, they would be too many.
    """
    known = all(a.extent.constant is not None for a in (c.rows, c.columns) if a is not c.swept)
    return len(passes(c)) == 1 and (known or c.swept.extent.constant is not None)


def _carried(level: list[Reduce], following: list[Reduce]) -> tuple[tuple[Reduce, ...], dict[Reduce, Expr]]:
    """The maximum beside which all that follows may grow, and what carries each sum along; nothing else."""
    for leader in (r for r in level if r.monoid == "max"):
        carried = {r: h for r in following if (h := carrier(r, leader, level)) is not None}
        if following and len(carried) == len(following):
            return (leader,), carried
    return (), {}


def carrier(reduce: Reduce, leader: Reduce, level: list[Reduce]) -> Expr | None:
    """What carries a sum along with a maximum, if nothing else that still changes enters it."""
    unfinished = set(level) - {leader}
    if reduce.monoid != "sum" or any(r in unfinished for r in reductions(reduce.inputs)):
        return None
    leading = substitute_axes(leader.inputs[0], {leader.over[0]: reduce.over[0].poly()})
    return transport(reduce.inputs[0], leader, leading, reduce.over[0])
