"""Which matrix products run inside kernels, with what around them: the first tier of planning.

A product goes to the library unless something around it makes a kernel of it pay: a second product that reads what
the first one made (the matrix between them is then never stored), reductions of its rows, or point-wise work.
Each region is tried whole; the answer keeps its number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from ..analysis.access import flat_offset, numel, storage_bytes
from ..analysis.contraction import DIFFERENT_AXES, contract
from ..analysis.contractions import side_by_side
from ..analysis.inline import loads_of, reductions
from ..analysis.nest import Refusal
from ..ir.limits import FOLLOWERS
from ..ir.plan import Decision
from ..ir.poly import Axis, Poly
from ..ir.program import Define, Extern, Program, Statement
from .beside import join_beside
from .chooser import Chooser, Defines, Kind
from .close_calls import Judge
from .contraction_families import try_families
from .contraction_reductions import ROWS, TILES, followers
from .library_attention import Offer, call, offered
from .reading import MOST_MEMBERS, UNPACKED_ROWS, is_short
from .regions import Regions
from .setting import Setting

REDUCED = TILES, ROWS  # the kinds of regions with reductions of a product's result
MOST_RESULTS = 3  # of point-wise work on one product
NEARLY = 1.1  # storing what could be computed inside takes memory, and a stored mask bounds no sweep


def choose_contractions(program: Program, setting: Setting, judge: Judge | None = None) -> Regions:
    """Decide on every matrix product of a program. `judge`: measures close calls."""
    if not setting.target.products_per_us or not setting.options.fuse:
        return Regions(program, (), ())
    chooser = Chooser(program, setting, judge)
    for region in chooser.asked.regions.values():
        if any(d.buffer in chooser.product_of for d in region):
            chooser.force((contract, *(kind.read for kind in REDUCED), side_by_side), chooser.ordered(region))
    try_families(chooser)
    short = _lead_to_short(chooser)
    for extern in reversed(chooser.products):
        if extern.contraction in short:
            _try_chain(chooser, extern)
    for extern in chooser.products:
        for kind in REDUCED:
            chooser.try_regions(kind, extern.contraction)
    for extern in sorted(chooser.products, key=_terms):  # what two products share is of the one that is soonest done
        _try_alone(chooser, extern)
    join_beside(chooser)
    chosen = {d for r in chooser.regions for d in (*r.members, *r.again)}
    statements = tuple(s for found in program.statements for s in _instead(chooser, found, chosen))
    return Regions(replace(program, statements=statements), tuple(chooser.regions), tuple(chooser.decisions))


def _instead(chooser: Chooser, statement: Statement, chosen: set[Define]) -> Iterable[Statement]:
    """What becomes of a statement: a definition inside a kernel, a call that stands for many, or itself."""
    define = statement.contraction if isinstance(statement, Extern) else statement
    if not isinstance(define, Define) or define not in chooser.calls:
        return [define if isinstance(define, Define) and define in chosen else statement]
    call = chooser.calls[define]
    return [call] if define.buffer is call.result else []


# --- a product that reads another ---


def _try_chain(chooser: Chooser, extern: Extern) -> None:
    """A region from one product to a later one, through whatever is computed in between."""
    last = extern.contraction
    if last is None or last in chooser.taken:
        return
    short = (d for d in chooser.products_above(last) if is_short(d))  # longer ones could not be computed again
    found = [*reversed(chooser.ordered(short))]  # the nearest first
    # All at once; where that is no kernel, what depends on one of them, the others read from memory.
    for firsts in [found, *([first] for first in found if len(found) > 1)]:
        if not firsts:
            continue
        core, names = {last, *chooser.between(last, firsts)}, (firsts[0].origin.node, last.origin.node)
        after = chooser.tails(last) if chooser.given_up(core) < FOLLOWERS else [()]
        regions = [members for tail in after if (members := _grown(chooser, core, tail, last))]
        offer = _offer(chooser, regions, *names) if chooser.offers and regions else None
        if any(_consider(chooser, CHAIN, members, names, offer) for members in regions):
            return


def _offer(chooser: Chooser, regions: list[Defines], first: str, last: str) -> Offer | None:
    """The library's attention in the place of a region, if it is nothing else."""
    found = offered(chooser, [r for r in regions if chooser.is_possible(r)])
    if isinstance(found, Refusal):
        chooser.decisions.append(Decision(first, last, "library", False, found.reason))
    return found if isinstance(found, Offer) else None


def _lead_to_short(chooser: Chooser) -> set[Define]:
    """What is made of a short product with no other product in between."""
    found: set[Define] = set()
    for d in chooser.order:
        if any(s in found if s.buffer not in chooser.product_of else is_short(s) for s in chooser.sources(d)):
            found.add(d)
    return found


# --- what follows a product ---


def _spreads(chooser: Chooser, last: Define) -> list[Defines]:
    """Point-wise work on the result, whoever else reads what it passes, longest first: several may be stored.

    Where columns of the result meet each other (a packed gate), only their one result.
    """
    chain = chooser.tails(last)[0]
    parted = _part_size(chooser, (last, *chain)[-1])
    size = parted or numel(last.axes)

    def joins(d: Define) -> bool:
        return chooser.is_point_wise(d) and numel(d.axes) == size

    spread = followers(chooser, (last, *(chain if parted else ())), joins)[1:]
    prefixes = [spread[:k] for k in range(len(spread), 0, -1)]
    if parted:
        return [p for p in prefixes if len(p) > len(chain) and chooser.stored((last, *p)) == [p[-1]]]
    return [p for p in prefixes if len(chooser.stored((last, *p))) <= MOST_RESULTS]


def _part_size(chooser: Chooser, last: Define) -> int:
    """How many positions the readers of a result have that read each of its elements once at most; 0: others."""
    readers = chooser.readers_of(last)
    sizes = {numel(d.axes) for d in readers}
    if last.buffer in chooser.elsewhere or len(sizes) != 1 or (size := sizes.pop()) >= numel(last.axes):
        return 0
    places: set[Poly] = set()
    for d in readers:
        own = {a: Axis(f"d{k}", a.extent) for k, a in enumerate(d.dimensions)}
        for e in loads_of([d.value])[last.buffer]:
            offset = flat_offset(e.buffer, e.index).substitute({a: new.poly() for a, new in own.items()})
            if not own or offset.coefficient(own[d.dimensions[-1]]) is not Poly.ONE:
                return 0
            places.add(offset)
    return size if len(places) * size <= numel(last.axes) else 0


def _terms(extern: Extern) -> int:
    """How many terms the sums of a product have together."""
    last = extern.contraction
    return sum(numel(r.axes) * numel(r.over) for r in reductions([last.value])) if last is not None else 0


def _try_alone(chooser: Chooser, extern: Extern) -> None:
    """One product with the point-wise work that follows it."""
    last = extern.contraction
    if last is None or last in chooser.taken:
        return
    for tail in dict.fromkeys((*_spreads(chooser, last), *chooser.tails(last))):
        end = tail[-1] if tail else last
        most = max(storage_bytes(d.buffer) for d in chooser.stored((last, *tail)))
        core = {last, *_products_read(chooser, last, tail)}
        ways = [(core, None if tail else last), ({last}, None if tail else last), ({last}, last)]
        for members in dict.fromkeys(_grown(chooser, c, tail, only, most) for c, only in ways):
            if not members or not (tail or chooser.again(members)):
                continue
            names = last.origin.node, end.origin.node
            if not all(chooser.shares_matrix(d, last) for d in members if d.buffer in chooser.product_of):
                chooser.refuse(EPILOGUE, names, DIFFERENT_AXES)
            elif _consider(chooser, EPILOGUE, members, names):
                return
    _note_packed(chooser, last)


def _products_read(chooser: Chooser, last: Define, tail: Defines) -> list[Define]:
    """Products of the same matrix that the work after a product is made of: they are stored if others read them."""
    read = dict.fromkeys(chooser.product_of.get(e.buffer) for d in tail for e in chooser.memory(d))
    same = [d for d in read if d is not None and d not in chooser.taken and numel(d.axes) == numel(last.axes)]
    return [d for d in same if chooser.shares_matrix(d, last)]


def _grown(chooser: Chooser, core: set[Define], tail: Defines, last: Define | None, most: int = 0) -> Defines:
    """Core and tail in order, with what only they want; () if somebody else wants what is larger than the result
    and than `most` bytes.

    Beside the tail that is any point-wise value, since it is computed once for each element of the result; what
    is made of the core (the sum of the weights) in any case. Without a `last` product others may join, too.
    """
    members, late = {*core, *tail}, set(tail)
    result = tail[-1] if tail else last
    assert result is not None
    most = max(most, storage_bytes(result.buffer))
    waiting = [d for m in chooser.ordered(members) for d in _neighbours(chooser, m)]
    while waiting and len(members) <= MOST_MEMBERS:
        d = waiting.pop()
        if d in members or d in chooser.taken:
            continue
        made = any(s in members and s not in late and s is not last for s in chooser.sources(d))
        if d.buffer in chooser.product_of:
            belongs = last is None and chooser.only_for(d, late)
        elif chooser.only_for(d, members):
            belongs = made or (chooser.only_for(d, late) and not reductions([d.value]))
        else:
            belongs = made and _aside(chooser, d, members, most)
        if belongs:
            members.add(d)
            late |= {d} if not made and d.buffer not in chooser.product_of else set()
            waiting += _neighbours(chooser, d)
    if any(storage_bytes(d.buffer) > most for d in chooser.stored(members)):
        return ()
    return chooser.ordered(members)


def _aside(chooser: Chooser, define: Define, members: set[Define], most: int) -> bool:
    """Whether others want what members make, and it can be stored beside a result of `most` bytes."""
    sources = chooser.sources(define)
    if not all(s in members for s in sources):
        return False
    if any(storage_bytes(s.buffer) > most for s in sources):
        return True
    return storage_bytes(define.buffer) <= most and not reductions([define.value])


def _neighbours(chooser: Chooser, define: Define) -> list[Define]:
    return [*chooser.sources(define), *chooser.readers.get(define.buffer, ())]


def _note_packed(chooser: Chooser, product: Define) -> None:
    """Say of a product why weights are unpacked before it."""
    for d in chooser.sources(product):
        if chooser.is_point_wise(d) and not chooser.is_cheap(d) and chooser.is_packed(d):
            tiles = -(-chooser.positions_beside(d, product) // UNPACKED_ROWS)
            reason = f"each of {tiles} tiles would compute {d.origin.node} again"
            chooser.decisions.append(Decision(d.origin.node, product.origin.node, "product", False, reason))


# --- the answer ---


def _consider(
    chooser: Chooser, kind: Kind, members: Defines, names: tuple[str, str], offer: Offer | None = None
) -> bool:
    """One kernel of the members, or the library's; of the values they read, as many are computed again as pays."""
    ways = [again for again in chooser.ways_again(members) if again or len(members) > 1]  # else a bare product
    if len(ways) > 1:
        us = {again: _with_rest_us(chooser, members, again, ways[0]) for again in ways}
        ways = sorted(ways, key=lambda again: us[again] * (1 if again == ways[0] else NEARLY))
    instead = None if offer is None else lambda own, apart: call(chooser, offer, members, own, apart, names)
    return any(chooser.attempt(kind, members, again, names, instead) for again in ways)


def _with_rest_us(chooser: Chooser, members: Defines, again: Defines, most: Defines) -> float:
    """Predicted time of a region that computes `again`, and of a kernel that stores the rest of `most` for it."""
    if isinstance(chooser.contracted(contract, members, again), Refusal):
        return math.inf
    rest = {d for d in most if d not in again}
    wanted = {s for d in (*members, *again) for s in chooser.sources(d) if s in rest}
    made = sum(chooser.kernel_us(tuple(d for d in most if d in rest and d in chooser.chain(w))) for w in wanted)
    return chooser.time_us(contract, members, again) + made


def _without_chain(chooser: Chooser, members: Defines, again: Defines) -> tuple[float, float]:
    return chooser.apart(members, again), 0.0


def _without_epilogue(chooser: Chooser, members: Defines, again: Defines) -> tuple[float, float]:
    spared = chooser.done_anyway(members)
    return chooser.apart(members, again) - spared, spared


CHAIN, EPILOGUE = Kind("chain", contract, _without_chain), Kind("product", contract, _without_epilogue)
