"""Matrix products whose tiles leave states of reductions: what joins such a region, and whether it pays.

The products run at nearly the rate they have alone, and what they make is not read again for its statistics, nor even
stored if nobody else wants it. Against that stand the states, and the kernel that merges them. Whoever reads the
result anyway could reduce it in passing: then nothing is gained, and the predicted times say so.
"""

from __future__ import annotations

from math import inf

from ..analysis.access import numel, storage_bytes
from ..analysis.contraction import Contraction
from ..analysis.inline import loaded, reductions
from ..analysis.nest import Refusal
from ..analysis.tile_states import contract_tiles
from ..ir.expr import postorder
from ..ir.limits import FOLLOWERS
from ..ir.plan import Chosen, Decision
from ..ir.program import Buffer, Define, Extern
from .chooser import Chooser
from .close_calls import Times
from .contraction_rows import MOST_MEMBERS, Followers, joined, library_and_one, row_time, scalar_work, waits
from .cost import predict_us
from .regions import Region

MOMENTS = 1.6  # times the price of kernels whose tiles leave means and variances (seen on one H200)


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
    again, first, last = chooser.again(members), product.origin.node, members[-1].origin.node

    def refused(reason: str) -> bool:
        chooser.decisions.append(Decision(first, last, "tiles", False, reason))
        return False

    found = chooser.ask("tiles", members, again, contract_tiles).value
    if isinstance(found, Refusal):
        return refused(found.reason)
    apart, anyway = _apart(chooser, members, again, product)
    chosen = _kernel(chooser, found, members, again, apart - anyway)
    if isinstance(chosen, Refusal):
        return refused(chosen.reason)
    together = chosen.time_us + anyway
    accepted = together < apart
    reason = f"predicted {together:.1f} us with states of tiles, {apart:.1f} us by the library and one more"
    if accepted and (swept := row_time(chooser, product)) < together:
        return refused(f"{reason}, {swept:.1f} us in one kernel")
    decision = Decision(first, last, "tiles", accepted, reason, apart - together)
    region = Region(members, again, chosen)
    if not anyway:
        decision = chooser.settle(decision, Times(together, apart), region)
    return chooser.answer(region, decision)


def _kernel(
    chooser: Chooser, c: Contraction, members: tuple[Define, ...], again: tuple[Define, ...], apart: float
) -> Chosen | Refusal:
    """How both kernels run, or why none beat the time without them."""
    if (bound := chooser.bound(c)) >= apart:
        return Refusal(f"at least {bound:.1f} us with states of tiles, predicted {apart:.1f} us without")
    chosen = chooser.kernel([c], members, again, apart)
    least = MOMENTS * chosen.time_us if any(r.monoid == "welford" for r in c.entering) else 0.0
    if least >= apart:
        return Refusal(f"at least {least:.1f} us with states of tiles, predicted {apart:.1f} us without")
    return chosen


# --- without it ---


def _apart(
    chooser: Chooser, members: tuple[Define, ...], again: tuple[Define, ...], product: Define
) -> tuple[float, float]:
    """Predicted time of a product of the library, or with its point-wise work, and kernels around it; and of that the
    part that reads the product's result in any case."""
    library, one = library_and_one(chooser, members)
    size = numel(product.axes)
    large = tuple(d for d in members if numel(d.axes) == size)
    others = [d for d in members if d.buffer not in chooser.product_of]
    readers = {r for d in large for r in chooser.readers.get(d.buffer, ())} - {*members, *chooser.taken}
    outside = sorted((r for r in readers if r.buffer not in chooser.product_of), key=chooser.order.__getitem__)
    anyway = chooser.kernel_us(tuple(outside)) if outside else 0.0
    passing = chooser.kernel_us((*others, *outside)) if outside else inf
    total = library + min(one + anyway, passing)
    tail = _stored_tail(chooser, members, large)
    found = chooser.contracted(tail, again) if len(tail) > 1 else Refusal("nothing is stored")
    if isinstance(found, Refusal):
        return total, anyway
    moved = sum(storage_bytes(d.buffer) for d in chooser.stored(tail))
    work = sum(scalar_work(postorder([d.value])) for d in others if d not in tail)
    own = chooser.kernel([found], tail, again, total).time_us
    return min(total, own + predict_us(moved, work, 1, chooser.target) + anyway), anyway


def _stored_tail(chooser: Chooser, members: tuple[Define, ...], large: tuple[Define, ...]) -> tuple[Define, ...]:
    """Of what has all positions of the product, what is stored and what that is made of."""
    found = {d for d in chooser.stored(members) if d in large}
    for d in reversed(large):
        if found.intersection(chooser.readers.get(d.buffer, ())):
            found.add(d)
    return tuple(d for d in large if d in found)
