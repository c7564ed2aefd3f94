"""Matrix products whose results are reduced: what joins such a region, and whether one kernel of it pays.

Two kinds of kernels. Whole rows: from a product on, every reader joins that keeps its rows apart: point-wise work,
reductions of its columns, a value picked from every row, and what is made of these. Tiles that leave states: products
run at nearly the rate they have alone, and what they make is not read again for its statistics, nor even stored if
nobody else wants it; against that stand the states, and the kernel that merges them. Whoever reads the result anyway
could reduce it in passing: then nothing is gained, and the predicted times say so.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Iterator

from ..analysis.access import estimate, numel, operation_cost, storage_bytes
from ..analysis.contraction import contract
from ..analysis.inline import loaded, reductions
from ..analysis.rows import arrange
from ..analysis.tile_states import contract_tiles
from ..ir.expr import Load, postorder
from ..ir.program import Buffer, Define
from .chooser import Chooser, Defines, Kind
from .cost import predict_us
from .reading import MOST_MEMBERS

MOST_SEEN = 256

# --- what joins ---


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
        if free and not _waits(chooser, d, {f.buffer for f in found}) and joins(d):
            add(d)
    return tuple(found)


def _waits(chooser: Chooser, define: Define, region: Collection[Buffer]) -> bool:
    """Whether a value needs something from outside that itself needs the region: they cannot be one kernel."""
    links = chooser.links
    inside = links.makers(region)
    return links.waits(links.makers(loaded(define.value)) - inside, inside, MOST_SEEN)


def _joined(chooser: Chooser, members: Defines, product: Define) -> Defines:
    """The members, and other products of that size with point-wise work on them that only the members read."""
    found, size = set(members), numel(product.axes)
    waiting = [s for m in members for s in chooser.sources(m)]
    while waiting and len(found) < MOST_MEMBERS:
        d = waiting.pop()
        reduces = d.buffer not in chooser.product_of and reductions([d.value])
        if d in found or d in chooser.taken or reduces or numel(d.axes) != size or not chooser.only_for(d, found):
            continue
        if _waits(chooser, d, {m.buffer for m in found}):
            continue
        found.add(d)
        waiting += chooser.sources(d)
    return chooser.ordered(found)


# --- whole rows ---


def _row_members(chooser: Chooser, product: Define, column: int) -> Defines:
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


def _row_regions(chooser: Chooser, product: Define) -> Iterator[tuple[Defines, Defines]]:
    """Members of one kernel, with what they read computed again; else with less of it."""
    for column in (-1, -2):
        following = _row_members(chooser, product, len(product.dimensions) + column)
        for members in dict.fromkeys((_joined(chooser, following, product), following)) if following else ():
            yield from ((members, again) for again in chooser.ways_again(members))


def _without_rows(chooser: Chooser, members: Defines, _again: Defines) -> tuple[float, float]:
    return sum(chooser.library_and_one(members)), 0.0


ROWS = Kind("rows", arrange, _without_rows, ("in one kernel", "by the library and one more"), _row_regions)

# --- tiles that leave states ---


def _tile_regions(chooser: Chooser, product: Define) -> Iterator[tuple[Defines, Defines]]:
    """All that follows from a product, or no more than what waits for none of its reductions."""
    early, late = _tile_members(chooser, product)
    for region in dict.fromkeys(((*early, *late), early)):
        if any(reductions([d.value]) for d in region if d is not product):
            alone = chooser.ordered(region)
            for members in dict.fromkeys((_joined(chooser, alone, product), alone)):
                yield members, chooser.again(members)


def _tile_members(chooser: Chooser, product: Define) -> tuple[Defines, Defines]:
    """The product, point-wise work on it, its reductions and what is made of these; and what waits for one of these
    reductions before it reads the product's positions again."""
    size = numel(product.axes)
    whole, made, late = {product.buffer}, set[Buffer](), set[Buffer]()  # all positions of the product; reduced; waiting
    early, after = [product], list[Define]()

    def joins(d: Define) -> bool:
        read, reduces, large = {*loaded(d.value)}, bool(reductions([d.value])), numel(d.axes) == size
        if large or reduces:
            fits = large != reduces and bool(read & (whole | late))
        else:
            fits = not read & whole and numel(d.axes) <= max(numel(b.shape) for b in read & (made | late))
        if fits and (read & late or (read & whole and read & made)):
            late.add(d.buffer)
            after.append(d)
        elif fits:
            (whole if large else made).add(d.buffer)
            early.append(d)
        return fits

    followers(chooser, [product], joins, 2 * MOST_MEMBERS)
    return tuple(early), tuple(after)


def _without_tiles(chooser: Chooser, members: Defines, again: Defines) -> tuple[float, float | None]:
    """Predicted time of a product of the library, or with its point-wise work, and kernels around it; what reads the
    product's result in any case may reduce it in passing, which cannot be measured by itself."""
    library, one = chooser.library_and_one(members)
    large, outside = _large(chooser, members), _outside(chooser, members)
    others = [d for d in members if d.buffer not in chooser.product_of]
    if outside and (anyway := chooser.kernel_us(outside)) < math.inf:
        one = min(one, max(0.0, chooser.kernel_us((*others, *outside)) - anyway))
    total = library + one
    tail = _stored_tail(chooser, members, large)
    if len(tail) > 1:
        moved = sum(storage_bytes(d.buffer) for d in chooser.stored(tail))
        rest = predict_us(moved, operation_cost(d.value for d in others if d not in tail), 1, chooser.target)
        total = min(total, chooser.time_us(contract, tail, again, total) + rest)
    return total, None if outside else 0.0


def _outside(chooser: Chooser, members: Defines) -> Defines:
    """What reads the product's positions in any case."""
    readers = {r for d in _large(chooser, members) for r in chooser.readers_of(d)} - {*members, *chooser.taken}
    return chooser.ordered(r for r in readers if r.buffer not in chooser.product_of)


def _large(chooser: Chooser, members: Defines) -> Defines:
    """Members that have all positions of the product."""
    size = numel(_product(chooser, members).axes)
    return tuple(d for d in members if numel(d.axes) == size)


def _product(chooser: Chooser, members: Defines) -> Define:
    return max((d for d in members if d.buffer in chooser.product_of), key=lambda d: numel(d.axes))


def _stored_tail(chooser: Chooser, members: Defines, large: Defines) -> Defines:
    """Of what has all positions of the product, what is stored and what that is made of."""
    found = {d for d in chooser.stored(members) if d in large}
    for d in reversed(large):
        if found.intersection(chooser.readers.get(d.buffer, ())):
            found.add(d)
    return tuple(d for d in large if d in found)


def _by_rows(chooser: Chooser, members: Defines) -> float:
    """The time of one kernel that reduces whole rows of the product, and has its other readers inside."""
    regions = _row_regions(chooser, _product(chooser, members))
    swept = min((chooser.time_us(arrange, *region) for region in regions), default=math.inf)
    return swept - (chooser.kernel_us(outside) if (outside := _outside(chooser, members)) else 0.0)


TILES = Kind(
    "tiles",
    contract_tiles,
    _without_tiles,
    ("with states of tiles", "by the library and one more"),
    _tile_regions,
    _by_rows,
)
