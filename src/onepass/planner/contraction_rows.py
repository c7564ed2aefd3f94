"""Matrix products whose rows are reduced: what joins such a region, and whether one kernel of it pays.

From a product on, every reader joins that keeps its rows apart: point-wise work, reductions of its columns, a value
picked from every row, and what is made of these. The predicted time decides, and the answer says what it is made of.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Iterator

from ..analysis.access import estimate, numel
from ..analysis.inline import loaded, reductions
from ..analysis.rows import arrange
from ..ir.expr import Load, postorder
from ..ir.program import Buffer, Define
from .chooser import Chooser, Defines, Kind

MOST_MEMBERS, MOST_SEEN = 48, 256


def row_time(chooser: Chooser, product: Define) -> float:
    """The least predicted time of one kernel that reduces a product's rows; without end where there is none."""
    return min((chooser.time_us(arrange, *region) for region in _regions(chooser, product)), default=math.inf)


# --- the region ---


def followers(
    chooser: Chooser, start: Iterable[Define], joins: Callable[[Define], bool], most: int = MOST_MEMBERS
) -> Defines:
    """The start, and definitions without products that read it or what joined before, each asked in program order."""
    found, seen = dict.fromkeys(start), set[Define]()
    waiting: list[tuple[int, Define]] = []

    def add(define: Define) -> None:
        found[define] = None
        for d in chooser.readers_of(define) - seen:
            seen.add(d)
            heapq.heappush(waiting, (chooser.order[d], d))

    for d in (*found,):
        add(d)
    while waiting and len(found) < most:
        _, d = heapq.heappop(waiting)
        free = d not in chooser.taken and d.buffer not in chooser.product_of
        if free and not waits(chooser, d, {f.buffer for f in found}) and joins(d):
            add(d)
    return tuple(found)


def _region(chooser: Chooser, product: Define, column: int) -> Defines:
    """The product and all that follows from its rows, in order; () if nothing reduces them."""
    columns: dict[Buffer, int | None] = {product.buffer: column}  # which dimension is the columns; None: none is
    rows = numel(product.axes) // max(1, estimate(product.dimensions[column].extent))

    def joins(d: Define) -> bool:
        kind = _kind(d, columns, rows)
        if kind is not None:
            columns[d.buffer] = kind if kind >= 0 else None
        return kind is not None

    members = followers(chooser, [product], joins)
    return members if any(columns[d.buffer] is None and reductions([d.value]) for d in members) else ()


def waits(chooser: Chooser, define: Define, region: Collection[Buffer]) -> bool:
    """Whether a value needs something from outside that itself needs the region: they cannot be one kernel."""
    links = chooser.links
    inside = links.makers(region)
    return links.waits(links.makers(loaded(define.value)) - inside, inside, MOST_SEEN)


def joined(chooser: Chooser, members: Defines, product: Define) -> Defines:
    """The members, and other products of that size with point-wise work on them that only the members read."""
    found, size = set(members), numel(product.axes)
    waiting = [s for m in members for s in chooser.sources(m)]
    while waiting and len(found) < MOST_MEMBERS:
        d = waiting.pop()
        reduces = d.buffer not in chooser.product_of and reductions([d.value])
        if d in found or d in chooser.taken or reduces or numel(d.axes) != size or not chooser.only_for(d, found):
            continue
        if waits(chooser, d, {m.buffer for m in found}):
            continue
        found.add(d)
        waiting += chooser.sources(d)
    return tuple(sorted(found, key=chooser.order.__getitem__))


def _kind(define: Define, columns: dict[Buffer, int | None], rows: int) -> int | None:
    """Which dimension of a value made of rows is their columns; -1: it has none; None: it mixes rows."""
    over = {a for r in reductions([define.value]) for a in r.over}
    places = list(define.dimensions)
    found: set[int] = set()
    for e in postorder([define.value]):
        column = columns.get(e.buffer) if isinstance(e, Load) else None
        if not isinstance(e, Load) or column is None:
            continue
        at = e.index[column]
        if at.axis is not None and at.axis in places and at.axis not in over:
            found.add(places.index(at.axis))
        elif at.axis is not None and over == {at.axis}:
            found.add(-1)
        elif at.axes & over or (at.axes and not at.indirects()):
            return None
        else:  # picked from every row
            found.add(-1)
    if len(found) > 1 and -1 in found and over:
        return None
    kind = max(found, default=-1)
    if kind < 0:
        made = not over or found == {-1}
        return -1 if made and numel(define.axes) <= rows else None
    return None if over or len(found - {-1}) > 1 else kind


def _regions(chooser: Chooser, product: Define) -> Iterator[tuple[Defines, Defines]]:
    """Members of one kernel, with what they read computed again; else with less of it."""
    for column in (-1, -2):
        following = _region(chooser, product, len(product.dimensions) + column)
        for members in dict.fromkeys((joined(chooser, following, product), following)) if following else ():
            yield from ((members, again) for again in chooser.ways_again(members))


def _without(chooser: Chooser, members: Defines, _again: Defines) -> tuple[float, float]:
    return sum(chooser.library_and_one(members)), 0.0


ROWS = Kind("rows", arrange, _without, ("in one kernel", "by the library and one more"), _regions)
