"""The parts of a sweep between which the conditions of its terms differ, in steps.

Interval analysis (`analysis/bounds.py`) gives the ranges outside which every term is its reduction's identity, and a
short sweep those that data leaves (`analysis/visits.py`). Steps outside are skipped; in the steps where all conditions
hold, they are not tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..analysis.bounds import Range
from ..analysis.formulas import Formula, Positive
from ..ir.poly import Poly


@dataclass(frozen=True, slots=True)
class Span:
    """Steps from the last of `after` to the first of `before`; `holding` is true in all of them."""

    holding: tuple[Formula, ...] = ()
    after: tuple[Poly, ...] = ()
    before: tuple[Poly, ...] = ()
    seldom: bool = False  # data says how many steps there are, and few are expected
    part: float = 1.0  # of the steps between these ends, what data is expected to leave
    beside: int = 0  # spans before and after this one that are seldom


WHOLE = Span()


@dataclass(frozen=True, slots=True)
class Visited:
    """Positions that data leaves: from `first` to `last` of them; `holding` is true from `settled` to `doubtful`.

    Each is one position or none.
    """

    first: tuple[Poly, ...] = ()
    last: tuple[Poly, ...] = ()
    holding: tuple[Formula, ...] = ()
    settled: tuple[Poly, ...] = ()
    doubtful: tuple[Poly, ...] = ()
    part: float = 1.0  # of the positions, as is expected


def spans(ranges: list[Range], step: int, resolve: Callable[[Poly], Poly], visited: Visited = Visited()) -> list[Span]:
    """The spans of ranges, in their order. `resolve`: a position in terms of the loops that run."""

    def begun(positions: Iterable[Poly]) -> tuple[Poly, ...]:
        """How many steps there are up to positions, one that is cut left out."""
        return tuple(resolve(p) // step for p in positions)

    def steps(positions: Iterable[Poly]) -> tuple[Poly, ...]:
        """How many steps there are up to positions, one that is cut included."""
        return begun(p + step - 1 for p in positions)

    found: list[Span] = []
    behind, most = begun(visited.first), steps(visited.last)  # the ranges before, what data leaves
    for early in ranges[:-1]:
        ends = steps(b.loose for b in early)
        found.append(Span((), behind, (*ends, *most)))
        behind = (*behind, *ends)
    # The last range: where a lower bound may fail, where all hold, and where an upper one may fail.
    lower, upper = ([b for b in ranges[-1] if b.upper == up] for up in (False, True))
    starts = (*behind, *begun(b.loose for b in lower))
    ends = (*steps(b.loose for b in upper), *most)
    if visited.holding:  # found for all conditions together
        holding, settled, doubtful = visited.holding, steps(visited.settled), begun(visited.doubtful)
    else:
        checked = [next((b for b in side if b.slope), side[0]) for side in (lower, upper) if side]
        holding = tuple(Positive(b.difference) for b in checked)
        settled = steps(b.tight for b in checked if not b.upper)
        doubtful = begun(b.tight for b in checked if b.upper)
    opening = bool(settled) and not set(settled) <= set(starts)
    if opening:  # where both ends are close this has all
        found.append(Span((), starts, (*ends, *settled), bool(visited.holding)))
    part = 1.0 if any(b.slope for b in ranges[-1]) else visited.part  # what positions rule out is counted
    found.append(
        Span(
            holding,
            (*starts, *settled),
            (*ends, *doubtful),
            False,
            part,
            (opening + bool(doubtful)) * bool(visited.holding),
        )
    )
    if doubtful:
        found.append(Span((), (*starts, *settled, *doubtful), ends, bool(visited.holding)))
    return found
