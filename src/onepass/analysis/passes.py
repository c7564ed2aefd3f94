"""Reductions over one class in the order and the company they are computed in.

Those that wait for nothing share a sweep; a sum that waits for a maximum grows beside it where the transport rule
says so. What the rule cannot merge takes a sweep of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.expr import Expr, Reduce, substitute_axes
from .contraction import Contraction
from .inline import reductions
from .transport import transport


@dataclass(frozen=True, slots=True)
class Pass:
    """Reductions that share a sweep. Sums `carried` beside the first of them, a maximum, have their h each."""

    level: tuple[Reduce, ...]
    carried: dict[Reduce, Expr]


def passes(c: Contraction) -> list[Pass]:
    """The result's reductions over the swept class."""
    domain = c.nest.stores[0].domain
    depth: dict[Reduce, int] = {}
    for r in reductions(s.value for s in c.nest.stores):
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
    return transport(reduce.inputs[0], leader, leading)
