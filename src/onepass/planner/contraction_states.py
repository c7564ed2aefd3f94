"""Matrix products whose tiles leave states of reductions: what joins such a region, and whether it pays.

The products run at nearly the rate they have alone, and what they make is not read again for its statistics, nor even
stored if nobody else wants it. Against that stand the states, and the kernel that merges them. Whoever reads the
result anyway could reduce it in passing: then nothing is gained, and the predicted times say so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..analysis.access import numel, operation_cost, storage_bytes
from ..analysis.contraction import contract
from ..analysis.inline import loaded, reductions
from ..analysis.tile_states import contract_tiles
from ..ir.program import Buffer, Define
from .chooser import Chooser, Defines, Kind
from .contraction_rows import MOST_MEMBERS, followers, joined, row_time
from .cost import predict_us

# --- the region ---


def _regions(chooser: Chooser, product: Define) -> Iterator[tuple[Defines, Defines]]:
    """All that follows from a product, or no more than what waits for none of its reductions."""
    early, late = _followers(chooser, product)
    for region in dict.fromkeys(((*early, *late), early)):
        if any(reductions([d.value]) for d in region if d is not product):
            alone = tuple(sorted(region, key=chooser.order.__getitem__))
            for members in dict.fromkeys((joined(chooser, alone, product), alone)):
                yield members, chooser.again(members)


def _followers(chooser: Chooser, product: Define) -> tuple[Defines, Defines]:
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


# --- without it ---


def _without(chooser: Chooser, members: Defines, again: Defines) -> tuple[float, float | None]:
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
    return tuple(sorted((r for r in readers if r.buffer not in chooser.product_of), key=chooser.order.__getitem__))


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


def _whole_rows(chooser: Chooser, members: Defines) -> float:
    """The time of one kernel that reduces whole rows of the product, and has its other readers inside."""
    swept = row_time(chooser, _product(chooser, members))
    return swept - (chooser.kernel_us(outside) if (outside := _outside(chooser, members)) else 0.0)


TILES = Kind(
    "tiles", contract_tiles, _without, ("with states of tiles", "by the library and one more"), _regions, _whole_rows
)
