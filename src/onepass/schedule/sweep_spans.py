"""The parts of a sweep between which the conditions of its terms differ, in steps.

Interval analysis (`analysis/bounds.py`) gives the ranges outside which every term is its reduction's identity. Steps
outside are skipped; in the steps where all conditions hold, they are not tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..analysis.bounds import Range
from ..ir.poly import Poly


@dataclass(frozen=True, slots=True)
class Span:
    """Steps from the last of `after` to the first of `before`; `holding` is not negative in all of them."""

    holding: tuple[Poly, ...] = ()
    after: tuple[Poly, ...] = ()
    before: tuple[Poly, ...] = ()


WHOLE = Span()


def spans(ranges: list[Range], step: int, resolve: Callable[[Poly], Poly]) -> list[Span]:
    """The spans of ranges, in their order. `resolve`: a position in terms of the loops that run."""

    def begun(positions: Iterable[Poly]) -> tuple[Poly, ...]:
        """How many steps there are up to positions, one that is cut left out."""
        return tuple(resolve(p) // step for p in positions)

    def steps(positions: Iterable[Poly]) -> tuple[Poly, ...]:
        """How many steps there are up to positions, one that is cut included."""
        return begun(p + step - 1 for p in positions)

    found: list[Span] = []
    behind: tuple[Poly, ...] = ()  # the ranges before
    for early in ranges[:-1]:
        ends = steps(b.loose for b in early)
        found.append(Span((), behind, ends))
        behind = (*behind, *ends)
    # The last range: where a lower bound may fail, where all hold, and where an upper one may fail.
    lower, upper = ([b for b in ranges[-1] if b.upper == up] for up in (False, True))
    starts = (*behind, *begun(b.loose for b in lower))
    ends = steps(b.loose for b in upper)
    checked = [next((b for b in side if b.slope), side[0]) for side in (lower, upper) if side]
    settled = steps(b.tight for b in checked if not b.upper)
    doubtful = begun(b.tight for b in checked if b.upper)
    if settled:  # where both ends are close this has all
        found.append(Span((), starts, (*ends, *settled)))
    found.append(Span(tuple(b.difference for b in checked), (*starts, *settled), (*ends, *doubtful)))
    if doubtful:
        found.append(Span((), (*starts, *settled, *doubtful), ends))
    return found
