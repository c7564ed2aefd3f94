"""Can a group be one kernel, and which classes does each program own?

In: stores with inlined values. Out: every legal way as a `Nest`, or a `Refusal` with the reason. Where a reduced class
is split, programs share it out and a second kernel finishes their partial results. On a GPU the price of the built
kernels chooses among the ways; a CPU, whose programs are threads, follows a rule.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from ..ir.expr import Load, postorder
from ..ir.plan import Store
from ..ir.poly import Axis, Poly, nonnegative
from ..ir.target import Target
from .access import estimate, flat_offset, numel, tile_elements
from .carried import cannot_carry
from .collapse import collapse, flatten, join
from .halves import in_parts
from .inline import reductions, scans
from .nest import Nest, Refusal, direct_reductions
from .scans import cannot_chunk, cannot_scan, state_classes
from .unify import unify

SERIAL_ELEMENTS = 1 << 15  # below this, one program is as good as many
NARROW_COLUMNS = 16  # of a contiguous axis: narrower tiles leave parts of a memory sector unused
NO_COMMON_AXIS = ", and the reductions share no axis to split"
WIDENED_PROGRAMS = 8  # per processor: with fewer, small results do not decide how programs are numbered


def ways(stores: Iterable[Store], target: Target) -> list[Nest] | Refusal:
    """Every way to number the programs of stores that share a kernel; which is best, their price says.

    Programs are numbered by the classes that all stores and reductions have. A reduced class, or several joined to
    one, may be shared out among programs, and a second kernel finishes their partial results.
    """
    return _ways(tuple(stores), target)


@lru_cache(maxsize=256)  # a group is asked about before and after its last sizes are chosen, and when it is built
def _ways(stores: tuple[Store, ...], target: Target) -> list[Nest] | Refusal:
    if not target.warp:
        found = analyse(stores, target)
        if isinstance(found, Refusal):
            return found
        first = collapsed(found, target)
        if first.split is None:
            return [first]
        bare_nest = replace(first, split=None)
        others = _splits(bare_nest, _most_work(bare_nest), target)
        return [first, *(n for n in others if n.split is not first.split)] if isinstance(others, list) else [first]
    nest = bare(stores)
    if (unreadable := _unreadable(nest)) is not None:
        return Refusal(unreadable)
    if (apart := _apart(nest, target)) is not None:
        return Refusal(apart)
    merged = collapse(nest)
    if not nest.reductions and not nest.scans:
        parts = in_parts(merged)
        nests = [merged] if parts is None else [merged, collapse(parts)]
        return [_widened(flatten(n, target.vector_bytes), target) for n in nests]
    crossing = _crossing(nest) or _both_ways(nest, target)
    work = _most_work(nest)
    unsplit = [] if crossing else [_widened(merged, target)]
    if work <= SERIAL_ELEMENTS:
        return unsplit or Refusal(crossing or "")
    splits = _splits(merged, work, target)
    if isinstance(splits, Refusal):
        splits = _splits(nest, work, target)
    if isinstance(splits, Refusal):
        return unsplit or (Refusal(crossing) if crossing else splits)
    return unsplit + splits


def _apart(nest: Nest, target: Target) -> str | None:
    """Results that need sweeps of their own inside a program gain nothing from sharing it, unless all of it is held."""
    outer = frozenset(nest.outer)
    inner = sorted({s.domain - outer for s in nest.stores}, key=len)
    if all(small <= large for small, large in itertools.pairwise(inner)):
        return None
    if tile_elements(c for c in nest.classes if c not in outer) <= target.held_elements // 8:
        return None
    return "their results run over different axes"


def bare(stores: Iterable[Store]) -> Nest:
    """The nest of stores, its programs numbered by the classes that all of it has."""
    nest = unify(stores, turned=False)
    return replace(nest, outer=outer_axes(nest))


def _most_work(nest: Nest) -> int:
    """Positions of the largest store or reduction."""
    return max([*(numel(nest.domain_of(r)) for r in nest.reductions), *(numel(s.domain) for s in nest.stores)])


def _splits(nest: Nest, work: int, target: Target) -> list[Nest] | Refusal:
    """The nest with each of its reduced classes shared out, those with most programs first."""
    joined = _joined(nest)
    found: list[Nest] = []
    reasons = [NO_COMMON_AXIS]
    for base in (joined, nest) if joined is not None else (nest,):
        swept = [c for c in base.classes if _is_swept(base, c)]
        nests, refused = _tried(base, sorted(swept, key=lambda c: -estimate(c.extent)), work, target)
        found += nests
        reasons += refused
    return found or Refusal(f"{numel(nest.outer)} programs for {work} elements{reasons[-1]}")


def _is_swept(nest: Nest, axis: Axis) -> bool:
    """Whether a reduction or a scan runs over a class."""
    return any(nest.sweeps(r, axis) for r in nest.reductions) or any(s.over is axis for s in nest.scans)


def _tried(nest: Nest, swept: list[Axis], work: int, target: Target) -> tuple[list[Nest], list[str]]:
    """The nest with each of these classes shared out, and why some cannot be."""
    refused = {axis: _cannot_split(nest, axis, work, target) for axis in swept}
    nests = [replace(nest, split=axis) for axis, reason in refused.items() if reason is None]
    return nests, [reason for reason in refused.values() if reason is not None]


def _joined(nest: Nest) -> Nest | None:
    """The nest with all classes that the last reductions run over as one; None where it has one, or they differ."""
    reduces = nest.reductions
    inside = {x for r in reduces for x in reductions(r.inputs)}
    swept = {frozenset(nest.bound[a] for a in r.over) for r in reduces if r not in inside}
    if len(swept) != 1 or len(*swept) < 2:
        return None
    first, *others = (c for c in nest.classes if c in next(iter(swept)))
    joined: Nest | None = nest
    for other in others:
        joined = join(joined, first, other) if joined is not None else None
        first = next(c for c in joined.classes if c not in nest.classes) if joined is not None else first
    return joined


def analyse(stores: Iterable[Store], target: Target) -> Nest | Refusal:
    """The same where a program is one thread, by rule: programs for every core twice over, else a split."""
    nest = bare(stores)
    if not nest.reductions and not nest.scans:
        return Refusal(alone) if (alone := _alone(nest, target)) is not None else nest
    if (unreadable := _unreadable(nest)) is not None:
        return Refusal(unreadable)
    crossing, work = _crossing(nest), _most_work(nest)
    if nest.scans and crossing is None:
        few = work > SERIAL_ELEMENTS and numel(nest.outer) < 2 * target.processors
        chunked = _split(nest, work, target) if few else nest
        single = not nest.reductions and not any(scans(s.inputs) for s in nest.scans)
        return nest if isinstance(chunked, Refusal) and single else chunked
    if crossing is None and (work <= SERIAL_ELEMENTS or numel(nest.outer) >= 2 * target.processors):
        return nest
    if crossing is not None and work <= SERIAL_ELEMENTS:
        return Refusal(crossing)
    found = _split(nest, work, target)
    if isinstance(found, Refusal) and any(len(r.over) > 1 for r in nest.reductions):
        found = _split(collapse(nest), work, target)
    return Refusal(crossing) if isinstance(found, Refusal) and crossing is not None else found


def _alone(nest: Nest, target: Target) -> str | None:
    """Point-wise stores with so few positions in common that hardly any program would be left."""
    work = max(numel(s.domain) for s in nest.stores)
    programs = numel(nest.outer)
    if (
        work <= SERIAL_ELEMENTS
        or programs >= target.processors
        or all(s.domain <= set(nest.outer) for s in nest.stores)
    ):
        return None
    return f"{programs} programs for {work} elements"


def collapsed(nest: Nest, target: Target) -> Nest:
    """The nest with neighbouring classes merged; a split is chosen anew among the merged ones."""
    if nest.split is None:
        return collapse(nest)
    merged = collapse(replace(nest, split=None))
    again = _split(merged, _most_work(merged), target)
    return nest if isinstance(again, Refusal) else again


def _widened(nest: Nest, target: Target) -> Nest:
    """Small results beside one that has all classes, nothing reduced: the first positions of what they lack store them.

    Else programs would be numbered by the classes that all have, and there may be few.
    """
    few = programs_of(nest, target) < WIDENED_PROGRAMS * target.processors
    whole = frozenset(nest.classes)
    lacking = {c for s in nest.stores for c in whole - s.domain}
    if not few or not lacking or all(s.domain != whole for s in nest.stores):
        return nest
    empty = any(not nonnegative(c.extent - 1) for c in lacking)  # may have no first position
    if empty or nest.reductions or nest.scans:
        return nest
    stores = tuple(
        replace(
            s, domain=whole, region=(*s.region, *((c, Poly.ZERO, Poly.ONE) for c in nest.classes if c not in s.domain))
        )
        for s in nest.stores
    )
    return replace(nest, stores=stores, outer=nest.classes)


def programs_of(nest: Nest, target: Target) -> int:
    """How many programs the outer classes give; one takes several positions of a contiguous class."""
    programs = numel(nest.outer)
    if target.columns > 1:
        for e in postorder(nest.values):
            if isinstance(e, Load) and e.axes - frozenset(nest.outer):
                offset = flat_offset(e.buffer, e.index)
                if any(c is Poly.ONE for a in nest.outer if (c := offset.coefficient(a)) is not None):
                    return -(-programs // target.columns)
    return programs


def outer_axes(nest: Nest) -> tuple[Axis, ...]:
    reduces = nest.reductions
    swept = {c for r in reduces for c in (nest.bound[a] for a in r.over)} | {s.over for s in nest.scans}
    shared = frozenset(nest.classes) - swept
    for s in nest.stores:
        shared &= s.domain
    for r in reduces:
        shared &= r.axes
    return tuple(c for c in nest.classes if c in shared)


def _crossing(nest: Nest) -> str | None:
    """Reductions nest where, within one store, the axes they depend on form a chain; else only a split carries them."""
    outer = frozenset(nest.outer)
    for s in nest.stores:
        free = {r: nest.free(r) - outer for r in reductions([s.value])}
        chain = sorted(set(free.values()), key=lambda axes: (len(axes), sorted(map(repr, axes))))
        for small, large in itertools.pairwise(chain):
            if not small <= large:
                names = " and ".join(str(sorted(map(repr, x))) for x in (small, large))
                return f"reductions over crossing axes {names} have no common program"
    return None


def _both_ways(nest: Nest, target: Target) -> str | None:
    """Rows and columns reduced in one program: fine where it holds them all, else it sweeps one within the other."""
    inner = [c for c in nest.classes if c not in nest.outer]
    if tile_elements(inner) <= target.held_elements // 8 or state_classes(nest):
        return None
    swept = {r: frozenset(nest.bound[a] for a in r.over) for r in nest.reductions}
    for one, other in itertools.combinations(swept, 2):
        if swept[one] & nest.free(other) and swept[other] & nest.free(one):
            return "rows and columns are reduced, too many for one program to hold"
    return None


def _unreadable(nest: Nest) -> str | None:
    outer = frozenset(nest.outer)
    for s in nest.stores:
        for r in direct_reductions([s.value]):
            if not nest.free(r) - outer <= s.domain:
                return "a reduction varies over an axis its reader does not have"
    return cannot_scan(nest)


def _split(nest: Nest, work: int, target: Target) -> Nest | Refusal:
    """Too few programs: share a reduced class out over programs, if one kernel plus a finish can do it."""
    reduces = nest.reductions
    swept = [c for c in nest.classes if _is_swept(nest, c)]
    roots = [r for r in reduces if r not in {x for other in reduces for x in reductions(other.inputs)}]
    swept.sort(key=lambda c: (not all(nest.sweeps(r, c) for r in roots), -estimate(c.extent)))
    found, refused = _tried(nest, swept, work, target)
    reason = next(iter(refused), NO_COMMON_AXIS)
    return found[0] if found else Refusal(f"{numel(nest.outer)} programs for {work} elements{reason}")


def _cannot_split(nest: Nest, axis: Axis, work: int, target: Target) -> str | None:
    """Why a class cannot be shared out: each reduction runs over it, or is one of a position of it."""
    reduces = nest.reductions
    if nest.scans:
        return cannot_chunk(nest, axis)
    inside = {x for r in reduces for x in reductions(r.inputs)}
    ends = [r for r in reduces if nest.sweeps(r, axis)]
    for r in reduces:
        if r in inside and axis not in nest.free(r):
            return ": a chain of reductions over one axis cannot be split in one pass"
        if r not in ends and axis not in nest.free(r):
            return NO_COMMON_AXIS
    if (reason := cannot_carry(nest, axis, ends, target)) is not None:
        return reason
    for s in nest.stores:
        direct = direct_reductions([s.value])
        depends = any(r in ends for r in direct)
        if depends and axis in s.domain:
            return ": the result of a split reduction is needed again over the split axis"
        if depends and numel(s.domain) * 16 > work:
            return ": a split reduction cannot also write a large result"
        if depends and not all(r in ends for r in direct):
            return ": the result of a split reduction meets another one"
        if not depends and axis not in s.domain:
            return ": a store beside the split reduction lacks its axis"
    return "" if estimate(axis.extent) < 2 else None
