"""Matrix products whose rows are reduced: what joins such a region, and whether one kernel of it pays.

From a product on, every reader joins that keeps its rows apart: point-wise work, reductions of its columns, a value
picked from every row, and what is made of these. The predicted time decides, and the answer says what it is made of.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Iterator

from ..analysis.access import estimate, numel, storage_bytes
from ..analysis.inline import loaded, reductions
from ..analysis.library_price import product_us
from ..analysis.rows import arrange
from ..ir.expr import Expr, Load, Pointwise, Reduce, postorder
from ..ir.limits import FOLLOWERS
from ..ir.monoids import MONOIDS
from ..ir.ops import OPS
from ..ir.program import Buffer, Define, Extern
from .chooser import Chooser, Defines, Kind
from .cost import predict_us

MOST_MEMBERS, MOST_SEEN = 48, 256


def try_rows(chooser: Chooser, extern: Extern) -> None:
    """One product with reductions of its rows, and what else keeps rows apart."""
    product = extern.contraction
    if product is None or product in chooser.taken or chooser.given_up([product]) >= FOLLOWERS:
        return
    for members, again in _choices(chooser, product):
        if chooser.attempt(ROWS, members, again, (product.origin.node, members[-1].origin.node)):
            return


def row_time(chooser: Chooser, product: Define) -> float:
    """The least predicted time of one kernel that reduces a product's rows; without end where there is none."""
    return min((chooser.time_us(arrange, *choice) for choice in _choices(chooser, product)), default=math.inf)


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


def _choices(chooser: Chooser, product: Define) -> Iterator[tuple[Defines, Defines]]:
    """Members of one kernel, with what they read computed again; else with less of it."""
    for column in (-1, -2):
        following = _region(chooser, product, len(product.dimensions) + column)
        for members in dict.fromkeys((joined(chooser, following, product), following)) if following else ():
            yield from ((members, again) for again in chooser.ways_again(members))


# --- its time ---


def scalar_work(nodes: Iterable[Expr]) -> float:
    """Scalar operations of point-wise values and reductions at all their points."""
    total = 0.0
    for e in nodes:
        if isinstance(e, Pointwise):
            total += OPS[e.op].cost * numel(e.axes)
        elif isinstance(e, Reduce):
            total += MONOIDS[e.monoid].cost * numel((*e.axes, *e.over))
    return total


def library_and_one(chooser: Chooser, members: Defines) -> tuple[float, float]:
    """Predicted time of the library's products, and of one kernel for all that follows."""
    products = [d for d in members if d.buffer in chooser.product_of]
    others = [d for d in members if d not in products]
    made = {d.buffer for d in others}
    reads = dict.fromkeys(b for d in others for b in loaded(d.value) if b not in made)
    written = [d.buffer for d in chooser.stored(members) if d not in products]
    moved, work = sum(map(storage_bytes, (*reads, *written))), sum(scalar_work(postorder([d.value])) for d in others)
    return sum(product_us(d, chooser.target) for d in products), predict_us(moved, work, 1, chooser.target)


def _without(chooser: Chooser, members: Defines, _again: Defines) -> tuple[float, float]:
    return sum(library_and_one(chooser, members)), 0.0


ROWS = Kind("rows", arrange, _without, ("in one kernel", "by the library and one more"))
