"""Matrix products whose tiles leave states of reductions: what joins such a region, and whether it pays.

The products run at nearly the rate they have alone, and what they make is not read again for its statistics, nor even
stored if nobody else wants it. Against that stand the states, and the kernel that merges them. Whoever reads the
result anyway could reduce it in passing: then nothing is gained, and the predicted times say so.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil, inf, prod
from typing import TYPE_CHECKING

from ..analysis.access import estimate, numel, storage_bytes
from ..analysis.inline import loaded, reductions
from ..analysis.nest import Refusal
from ..analysis.tile_states import TileContraction, contract_tiles
from ..ir.expr import Reduce, postorder
from ..ir.limits import FOLLOWERS
from ..ir.monoids import MONOIDS
from ..ir.plan import Decision, Group, Store
from ..ir.program import Buffer, Define, Extern
from .close_calls import Times
from .contraction_rows import MOST_MEMBERS, Followers, joined, library_and_one, row_time, scalar_work, waits
from .cost import predict_us
from .regions import TILE, Region, tiles_of

if TYPE_CHECKING:
    from .contractions import Chooser

# Of the rate a product's kernel has without states; with three numbers for each (means and variances); of the time of a
# kernel that sweeps rows. On one H200 sums and maxima took 0.88 to 1.0 of the time predicted; variances, at the first
# rate, 1.6 times that.
STATES, MOMENTS, SURELY = 0.95, 0.5, 0.75


def try_tiles(chooser: Chooser, extern: Extern) -> None:
    """One product whose tiles leave states of the reductions that follow it."""
    product = extern.contraction
    if product is None or product in chooser.taken or chooser.given_up([product]) >= FOLLOWERS:
        return
    early, late = _region(chooser, product)
    for region in dict.fromkeys(((*early, *late), early)):
        if not any(reductions([d.value]) for d in region if d is not product):
            continue
        alone = tuple(sorted(region, key=chooser.order.__getitem__))
        if any(_try(chooser, m, product) for m in dict.fromkeys((joined(chooser, alone, product), alone))):
            return


# --- the region ---


def _region(chooser: Chooser, product: Define) -> tuple[tuple[Define, ...], tuple[Define, ...]]:
    """The product, point-wise work on it, its reductions and what is made of these; and what waits for one of these
    reductions before it reads the product's positions again."""
    size = numel(product.axes)
    whole, made, late = {product.buffer}, set[Buffer](), set[Buffer]()  # all positions of the product; reduced; waiting
    early, after = [product], list[Define]()
    followers = Followers(chooser, product)
    for d in followers:
        if len(followers.seen) >= 2 * MOST_MEMBERS:
            break
        read, reduces = {*loaded(d.value)}, bool(reductions([d.value]))
        if d in chooser.taken or d.buffer in chooser.product_of or waits(chooser, d, whole | made | late):
            continue
        large = numel(d.axes) == size
        if large or reduces:
            fits = large != reduces and bool(read & (whole | late))
        else:
            fits = not read & whole and numel(d.axes) <= max(numel(b.shape) for b in read & (made | late))
        if not fits:
            continue
        if read & late or (read & whole and read & made):
            late.add(d.buffer)
            after.append(d)
        else:
            (whole if large else made).add(d.buffer)
            early.append(d)
        followers.add(d)
    return tuple(early), tuple(after)


# --- the answer ---


def _try(chooser: Chooser, members: tuple[Define, ...], product: Define) -> bool:
    again = chooser.again(members)

    def price(stores: list[Store]) -> tuple[float, str] | Refusal:
        tiles = contract_tiles(stores)
        return tiles if isinstance(tiles, Refusal) else _together(chooser, tiles)

    found = chooser.ask("tiles", members, again, price).value
    first, last = product.origin.node, members[-1].origin.node
    if isinstance(found, Refusal):
        chooser.decisions.append(Decision(first, last, "tiles", False, found.reason))
        return False
    together, why = found
    apart, anyway = _apart(chooser, members, again, product)
    together += anyway
    accepted = together < apart
    reason = f"predicted {together:.1f} us with states of tiles ({why}), {apart:.1f} us by the library and one more"
    if accepted and together > SURELY * (swept := row_time(chooser, product)) and swept < apart:
        chooser.decisions.append(Decision(first, last, "tiles", False, f"{reason}, {swept:.1f} us in one kernel"))
        return False
    decision = Decision(first, last, "tiles", accepted, reason, apart - together)
    region = Region(members, again, tiled=True, predicted_us=together)
    if not anyway:
        decision = chooser.settle(decision, Times(together, apart), region)
    return chooser.answer(region, decision)


def _together(chooser: Chooser, c: TileContraction) -> tuple[float, str]:
    """Predicted time of both kernels, and what it is made of. A tile is folded before the next one is multiplied."""
    target, effort = chooser.target, chooser.effort(c)
    stored = chooser.effort(replace(c, nest=replace(c.nest, stores=c.leaving))).operations if c.leaving else 0.0
    size = numel((*c.grid, c.rows, c.columns))
    folds = sum(MONOIDS[r.monoid].cost * size for r in c.entering)
    elements = sum(len(r.part_dtypes) * _states(c, r) for r in c.entering)
    states = sum(d.bytes * _states(c, r) for r in c.entering for d in r.part_dtypes)
    rounds = tiles_of(c) / target.processors
    rate = MOMENTS if any(r.monoid == "welford" for r in c.entering) else STATES
    unit = effort.unit_us / rate + (effort.operations - stored + folds) / target.operations_per_us
    unit *= ceil(rounds) / rounds if rounds else 1.0  # to the last tile, with other processors idle
    rest = predict_us(effort.moved + states, stored, 0, target)
    written = sum(storage_bytes(s.buffer) for s in c.waiting)
    kernels = len({s.domain for s in c.waiting})
    finish = predict_us(states + written, elements, kernels, target)
    why = f"products and their reductions {unit:.1f} us, the rest {rest:.1f} us, the finish {finish:.1f} us"
    return target.launch_us + max(unit, rest) + 0.1 * min(unit, rest) + finish, why


def _states(c: TileContraction, reduce: Reduce) -> int:
    """How many states of a reduction all tiles leave."""
    tiled = {a: -(-estimate(a.extent) // TILE) for a in (c.rows, c.columns) if a in c.sweeps(reduce)}
    return numel([a for a in (*c.grid, c.rows, c.columns) if a not in tiled]) * prod(tiled.values())


# --- without it ---


def _apart(
    chooser: Chooser, members: tuple[Define, ...], again: tuple[Define, ...], product: Define
) -> tuple[float, float]:
    """Predicted time of a product of the library, or with its point-wise work, and kernels around it; and of that the
    part that reads the product's result in any case."""
    library, one = library_and_one(chooser, members, chooser.rate([product.value]))
    size = numel(product.axes)
    large = tuple(d for d in members if numel(d.axes) == size)
    others = [d for d in members if d.buffer not in chooser.product_of]
    readers = {r for d in large for r in chooser.readers.get(d.buffer, ())} - {*members, *chooser.taken}
    outside = sorted((r for r in readers if r.buffer not in chooser.product_of), key=chooser.order.__getitem__)
    anyway = _kernel_us(chooser, outside) if outside else 0.0
    passing = _kernel_us(chooser, [*others, *outside]) if outside else inf
    total = library + min(one + anyway, passing)
    tail = _stored_tail(chooser, members, large)
    found = chooser.contracted(tail, again) if len(tail) > 1 else Refusal("nothing is stored")
    if isinstance(found, Refusal):
        return total, anyway
    moved = sum(storage_bytes(d.buffer) for d in chooser.stored(tail))
    work = sum(scalar_work(postorder([d.value])) for d in others if d not in tail)
    return min(total, chooser.together(found) + predict_us(moved, work, 1, chooser.target) + anyway), anyway


def _stored_tail(chooser: Chooser, members: tuple[Define, ...], large: tuple[Define, ...]) -> tuple[Define, ...]:
    """Of what has all positions of the product, what is stored and what that is made of."""
    found = {d for d in chooser.stored(members) if d in large}
    for d in reversed(large):
        if found.intersection(chooser.readers.get(d.buffer, ())):
            found.add(d)
    return tuple(d for d in large if d in found)


def _kernel_us(chooser: Chooser, defines: list[Define]) -> float:
    """Predicted time of one kernel; without end where there is none."""

    def kernel(stores: list[Store]) -> float:
        return chooser.price(Group(tuple(stores), tuple(defines)), chooser.target)

    return chooser.ask("kernel", tuple(defines), (), kernel).value
