"""Products of values that are themselves made of products, where several want the same: attention's backward.

    S = q kᵀ, dP = dO vᵀ  ->  dS  ->  dQ = dS k, dK = dSᵀ q, dV = Pᵀ dO

What lies between is larger than all operands and results, and every kernel would compute it again. A family is all
products at the end that share such values. It is decided on as a whole: its kernels, of which those with the same rows
and the same sweep are one, against all of it by the library with what lies between stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ..analysis.access import storage_bytes
from ..analysis.contraction import contract
from ..analysis.inline import loaded, reductions
from ..analysis.nest import Refusal
from ..analysis.reach import reached
from ..ir.plan import Decision
from ..ir.program import Define
from .chooser import Chooser, Defines
from .close_calls import AROUND, Times
from .reading import MOST_MEMBERS, is_short
from .regions import Region

MOST_ENDS = 8  # products of one family


def try_families(chooser: Chooser) -> None:
    """Decide on every family."""
    waiting = [(last, inner) for e in chooser.products if (last := e.contraction) and (inner := _inner(chooser, last))]
    while waiting:
        last, shared = waiting.pop(0)
        ends, found = [last], set(shared)
        while joining := [(d, own) for d, own in waiting if not found.isdisjoint(own)]:
            waiting = [w for w in waiting if w not in joining]
            ends += [d for d, _ in joining]
            found.update(*(own for _, own in joining))
        if 1 < len(ends) <= MOST_ENDS and len(found) <= MOST_MEMBERS:
            _consider(chooser, chooser.ordered(ends), found)


def _inner(chooser: Chooser, last: Define) -> set[Define]:
    """What lies between a product and the short ones that it is made of and that grow, these included."""
    firsts = [d for d in chooser.products_above(last) if is_short(d) and _grows(d) and d is not last]
    return {*chooser.between(last, firsts), *firsts} - {last} if firsts else set()


def _grows(product: Define) -> bool:
    """Whether a product is larger than each of its matrices."""
    return storage_bytes(product.buffer) > max(map(storage_bytes, loaded(product.value)))


def _consider(chooser: Chooser, ends: Defines, inner: set[Define]) -> None:
    """The kernels of a family, if they are all possible and faster."""
    names = chooser.ordered(inner)[0].origin.node, ends[-1].origin.node

    def refuse(reason: str) -> None:
        chooser.decisions.append(Decision(*names, "again", False, reason))

    rows = tuple(d for d in inner if reductions([d.value]) and d.buffer not in chooser.product_of)
    wanted = next((d for d in inner if d not in rows and not chooser.only_for(d, {*ends, *inner})), None)
    if wanted is not None:
        return refuse(f"{wanted.origin.node} is wanted elsewhere")
    found = [_kernels(chooser, ends, inner), *(_kernels_after(chooser, ends, inner, rows, end) for end in ends if rows)]
    possible = [kernels for kernels in found if not isinstance(kernels, Refusal)]
    if not possible:
        return refuse(next(kernels.reason for kernels in found if isinstance(kernels, Refusal)))
    regions = min(possible, key=lambda kernels: sum(map(_us, kernels)))
    everything = chooser.ordered({*inner, *(m for r in regions for m in r.members)})
    more = chooser.ordered({a for r in regions for a in r.again} - inner)
    together, apart = sum(map(_us, regions)), chooser.apart(everything, more)
    repeated = ", ".join(d.origin.node for d in everything if d in inner and d.buffer in chooser.product_of)
    ways = f"in {len(regions)} kernels that each compute {repeated}", AROUND
    reason = f"predicted {together:.1f} us {ways[0]}, {apart:.1f} us {ways[1]}"
    decision = Decision(*names, "again", together < apart, reason, apart - together)
    chooser.answer(regions, decision, Times(together, apart, ways=ways))


def _kernels(chooser: Chooser, ends: Sequence[Define], inner: set[Define]) -> list[Region] | Refusal:
    """A kernel for each product at the end, or for several."""
    found: dict[Defines, Region] = {}
    for d in ends:
        region = _kernel(chooser, (d,), inner)
        if isinstance(region, Refusal):
            return region
        found[(d,)] = region
    return [*_joined(chooser, found, inner).values()]


def _kernels_after(
    chooser: Chooser, ends: Sequence[Define], inner: set[Define], rows: Defines, first: Define
) -> list[Region] | Refusal:
    """The same, where the kernel of one product stores what rows are reduced to, and the others read it."""
    left: set[Define] = set()
    for d in chooser.ordered(inner - {*rows}):
        if d.buffer in chooser.product_of or any(s in left for s in chooser.sources(d)):
            left.add(d)
    stores = _kernel(chooser, (first,), inner, rows)
    others = _kernels(chooser, [d for d in ends if d is not first], left)
    if isinstance(stores, Refusal) or isinstance(others, Refusal):
        return stores if isinstance(stores, Refusal) else others if isinstance(others, Refusal) else []
    return [stores, *others]


def _joined(chooser: Chooser, apart: dict[Defines, Region], inner: set[Define]) -> dict[Defines, Region]:
    """Products that are faster in one sweep have one kernel."""
    done: dict[Defines, Region] = {}
    for products, region in apart.items():
        for others in done:
            both = _kernel(chooser, (*others, *products), inner)
            if isinstance(both, Region) and _us(both) < _us(done[others]) + _us(region):
                del done[others]
                done[(*others, *products)] = both
                break
        else:
            done[products] = region
    return done


def _us(region: Region) -> float:
    return region.chosen.time_us if region.chosen is not None else math.inf


def _kernel(chooser: Chooser, products: Defines, inner: set[Define], rows: Defines = ()) -> Region | Refusal:
    """One kernel of products at the end, with the work on their results that is possible. `rows`: stored beside."""

    def inside(define: Define) -> Iterable[Define]:
        return (s for s in chooser.sources(define) if s in inner)

    own = {*reached((s for p in products for s in inside(p)), inside)}
    if not own.issuperset(rows):
        return Refusal("a product does not need all that rows are reduced to")
    refusal = Refusal("")
    longest = [d for p in products for d in _own_tail(chooser, p, products)]
    for followed in dict.fromkeys((tuple(longest), ())):
        members = chooser.ordered({*products, *followed, *rows})
        again = chooser.ordered({*own, *chooser.again((*members, *own))} - {*rows})
        found = chooser.contracted(contract, members, again)
        if not isinstance(found, Refusal):
            return Region(members, again, chooser.kernel(found, members, again))
        refusal = found
    return refusal


def _own_tail(chooser: Chooser, product: Define, products: Defines) -> list[Define]:
    """Point-wise work on a product's result that needs no other product's, but those of its kernel."""
    found: list[Define] = []
    for d in chooser.tails(product)[0]:
        if any(s.buffer in chooser.product_of and s not in products for s in chooser.sources(d)):
            break
        found.append(d)
    return found
