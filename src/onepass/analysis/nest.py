"""The nest of a group: its axes unified into classes, and which of them every program owns.

In: stores with inlined values. Out: a `Nest` (classes, outer axes, split) or a `Refusal` with the
reason. The planner asks it for legality, the schedule builds loops from it; neither repeats it.
Words: a class is one loop axis shared by all stores and reductions aligned with it; outer axes are
those every store and every reduction has; an inner class is swept inside a program.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ..errors import VerifyError
from ..ir.expr import Expr, Index, Load, Part, Random, Reduce, postorder, rewrite
from ..ir.plan import Store
from ..ir.poly import Axis, Poly, in_range, nonnegative
from ..ir.program import Buffer
from ..ir.target import Target
from .access import estimate, flat_offset, numel, tile_elements
from .inline import reductions
from .refine import refine

SERIAL_ELEMENTS = 1 << 15  # below this, one program is as good as many
CARRIED_ROWS = 8  # the least a program gets where it carries states from row to row: its partial result costs as much


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a group cannot be one kernel."""

    reason: str


@dataclass(frozen=True, slots=True)
class NestStore:
    """A store in class axes. `region` bounds the classes it does not cover whole: axis -> [low, high)."""

    buffer: Buffer
    index: tuple[Poly, ...]
    value: Expr
    domain: frozenset[Axis]
    region: tuple[tuple[Axis, Poly, Poly], ...] = ()


@dataclass(frozen=True, slots=True)
class Nest:
    """A group ready to be scheduled. `classes` are ordered outermost first (by the largest store)."""

    stores: tuple[NestStore, ...]
    classes: tuple[Axis, ...]
    bound: dict[Axis, Axis] = field(default_factory=dict)  # reduction axis -> its class
    outer: tuple[Axis, ...] = ()
    split: Axis | None = None  # a reduced class that programs share out, partials finished by a second kernel

    def domain_of(self, reduce: Reduce) -> frozenset[Axis]:
        """The classes a reduction iterates: free and bound."""
        return reduce.axes | {self.bound[a] for a in reduce.over}


def analyse(stores: Iterable[Store], target: Target) -> Nest | Refusal:
    """Unify axes, find the outer ones, decide on a split."""
    nest = unify(list(stores))
    outer = outer_axes(nest)
    nest = Nest(nest.stores, nest.classes, nest.bound, outer)
    reduces = reductions(s.value for s in nest.stores)
    if not reduces:
        return nest
    if (unreadable := _unreadable(nest)) is not None:
        return Refusal(unreadable)
    crossing = _crossing(nest)
    work = max(numel(nest.domain_of(r)) for r in reduces)
    work = max([work, *(numel(s.domain) for s in nest.stores)])
    if crossing is None and (work <= SERIAL_ELEMENTS or programs_of(nest, target) >= 2 * target.processors):
        return nest
    if crossing is not None and work <= SERIAL_ELEMENTS:
        return Refusal(crossing)
    found = _split(nest, reduces, work, target)
    if isinstance(found, Refusal) and any(len(r.over) > 1 for r in reduces):
        merged = collapse(nest, target)
        found = _split(merged, reductions(s.value for s in merged.stores), work, target)
    return Refusal(crossing) if crossing is not None and isinstance(found, Refusal) else found


def programs_of(nest: Nest, target: Target) -> int:
    """How many programs the outer classes give; one takes several positions of a contiguous class."""
    programs = numel(nest.outer)
    if target.columns > 1:
        for e in postorder([s.value for s in nest.stores]):
            if isinstance(e, Load) and e.axes - frozenset(nest.outer):
                offset = flat_offset(e.buffer, e.index)
                if any(c is Poly.ONE for a in nest.outer if (c := offset.coefficient(a)) is not None):
                    return max(1, programs // target.columns)
    return programs


def outer_axes(nest: Nest) -> tuple[Axis, ...]:
    reduces = reductions(s.value for s in nest.stores)
    swept = {c for r in reduces for c in (nest.bound[a] for a in r.over)}
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
        free = {r: frozenset(nest.bound.get(a, a) for a in r.axes) - outer for r in reductions([s.value])}
        chain = sorted(set(free.values()), key=len)
        for small, large in itertools.pairwise(chain):
            if not small <= large:
                names = " and ".join(str(sorted(map(repr, x))) for x in (small, large))
                return f"reductions over crossing axes {names} have no common program"
    return None


def _unreadable(nest: Nest) -> str | None:
    outer = frozenset(nest.outer)
    for s in nest.stores:
        for r in direct_reductions([s.value]):
            if not frozenset(nest.bound.get(a, a) for a in r.axes) - outer <= s.domain:
                return "a reduction varies over an axis its reader does not have"
    return None


def direct_reductions(values: Iterable[Expr]) -> list[Reduce]:
    """Reductions read by the values themselves, not those inside other reductions."""
    found: dict[Reduce, None] = {}
    for e in postorder(list(values), into_reductions=False):
        if isinstance(e, Part) and isinstance(e.source, Reduce):
            found[e.source] = None
    return list(found)


def _split(nest: Nest, reduces: list[Reduce], work: int, target: Target) -> Nest | Refusal:
    """Too few programs: share a reduced class out over programs, if one kernel plus a finish can do it."""
    too_few = f"{numel(nest.outer)} programs for {work} elements"
    swept = [c for c in nest.classes if any(sweeps(nest, r, c) for r in reduces)]
    roots = [r for r in reduces if r not in {x for other in reduces for x in reductions(other.inputs)}]
    swept.sort(key=lambda c: (not all(sweeps(nest, r, c) for r in roots), -estimate(c.extent)))
    reason = ", and the reductions share no axis to split"
    for axis in swept:
        found = _cannot_split(nest, axis, reduces, work, target)
        if found is None:
            return replace(nest, split=axis)
        reason = reason if axis is not swept[0] else found
    return Refusal(too_few + reason)


def sweeps(nest: Nest, reduce: Reduce, axis: Axis) -> bool:
    """Whether a reduction runs over a class."""
    return any(nest.bound[a] is axis for a in reduce.over)


def _cannot_split(nest: Nest, axis: Axis, reduces: list[Reduce], work: int, target: Target) -> str | None:
    """Why a class cannot be shared out: each reduction runs over it, or is one of a position of it."""
    inside = {x for r in reduces for x in reductions(r.inputs)}
    ends = [r for r in reduces if sweeps(nest, r, axis)]
    for r in reduces:
        if r in inside and axis not in {nest.bound.get(a, a) for a in r.axes}:
            return ": a chain of reductions over one axis cannot be split in one pass"
        if r not in ends and axis not in {nest.bound.get(a, a) for a in r.axes}:
            return ", and the reductions share no axis to split"
    if (reason := _cannot_carry(nest, axis, ends, target)) is not None:
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


def carried(nest: Nest, reduce: Reduce) -> tuple[Axis, ...]:
    """The classes inside a program that a reduction over the split class has a state for each position of."""
    return tuple(c for c in nest.classes if c in reduce.axes and c not in nest.outer)


def _cannot_carry(nest: Nest, axis: Axis, ends: list[Reduce], target: Target) -> str | None:
    """A norm's backward reduces each row and sums columns over rows: programs carry the columns' states from
    row to row. They must fit, and rows must be many."""
    states = {r: numel(carried(nest, r)) for r in ends if carried(nest, r)}
    if not states:
        return None
    inner = frozenset(nest.classes) - frozenset((*nest.outer, axis))
    if any(a.extent.constant is None for a in inner) or any(len(r.over) > 1 for r in ends):
        return ": partial results would not fit one program"
    for offset in _offsets(nest):
        along = {nest.bound.get(a, a): offset.coefficient(a) for a in offset.axes}
        if along.get(axis) is Poly.ONE and along.keys() & inner:
            return ": rows are not contiguous"
    if target.warp:
        fits = tile_elements(inner) <= held_limit(nest, inner, target)
    else:
        fits = (
            sum(count * sum(d.bytes for d in r.part_dtypes) for r, count in states.items()) <= target.cache_bytes // 2
        )
    if not fits:
        return ": partial results would not fit one program"
    if estimate(axis.extent) < CARRIED_ROWS * target.processors:
        return (
            f": {estimate(axis.extent)} rows are too few to share out, each program with {max(states.values())} states"
        )
    return None


def held_limit(nest: Nest, inner: frozenset[Axis], target: Target) -> int:
    """How many positions of the inner classes a tile program can hold beside one another's values."""
    values = [s.value for s in nest.stores]
    bound = inner | {a for a, c in nest.bound.items() if c in inner}
    live = len({e for e in postorder(values) if isinstance(e, Load) and e.axes & bound})
    return target.held_elements * 4 // max(4, live + len(reductions(values)))


def opened(nest: Nest) -> list[Expr]:
    """The stores' values with reduction axes renamed to their classes: what sweeps share becomes equal.

    For counting only: a class may be bound by one reduction and free around it.
    """
    mapping = {a: c.poly() for a, c in nest.bound.items()}
    memo: dict[Expr, Expr] = {}

    def rebind(e: Expr) -> Expr | None:
        return Reduce(e.monoid, e.inputs, tuple(nest.bound[a] for a in e.over)) if isinstance(e, Reduce) else None

    return [rewrite(s.value, rebind, mapping, memo) for s in nest.stores]


# --- unifying axes -----------------------------------------------------------------------------


class _Classes:
    """Union-find over axes; two axes of one domain never unify.

    A class may be wider than some of its members: such a member sits at class position - offset.
    """

    def __init__(self, bound: set[Axis]) -> None:
        self.bound = bound
        self.parent: dict[Axis, Axis] = {}
        self.members: dict[Axis, list[Axis]] = {}
        self.conflicts: dict[Axis, set[Axis]] = {}
        self.offset: dict[Axis, Poly] = {}

    def add_domain(self, axes: Iterable[Axis]) -> None:
        axes = list(axes)
        for a in axes:
            if a not in self.parent:
                self.parent[a] = a
                self.members[a] = [a]
            self.conflicts.setdefault(a, set()).update(b for b in axes if b is not a)

    def find(self, a: Axis) -> Axis:
        while self.parent[a] is not a:
            a = self.parent[a]
        return a

    def can_unify(self, a: Axis, b: Axis) -> bool:
        a, b = self.find(a), self.find(b)
        if a is b:
            return False
        return not any(self.find(c) is b for c in self.conflicts[a])

    def unify(self, a: Axis, b: Axis) -> None:
        """Two axes of equal extent become one; where one of them is a region, the other joins it there."""
        if b in self.offset:
            a, b = b, a
        if b in self.offset:
            return
        if a in self.offset:
            self.embed(a, b, self.offset[a])
        else:
            self._join(a, b)

    def embed(self, a: Axis, b: Axis, offset: Poly) -> None:
        """The class of `b` becomes the region of `a`'s class that starts at `offset`."""
        members = self.members[self.find(b)]
        if any(m in self.offset or m in self.bound for m in members):
            return
        for m in members:
            self.offset[m] = offset
        self._join(a, b)

    def _join(self, a: Axis, b: Axis) -> None:
        a, b = self.find(a), self.find(b)
        self.parent[b] = a
        self.members[a] += self.members.pop(b)
        self.conflicts[a] |= self.conflicts[b]


def unify(stores: list[Store]) -> Nest:
    """Give every store and reduction class axes, aligned where they touch the same data."""
    refined = _refined(stores)
    reduces = reductions(v for _, _, v in refined)
    bound = {a for r in reduces for a in r.over}
    classes = _Classes(bound)
    free_of_store = [frozenset(a for a in axes if a.extent.constant != 1) for axes, _, _ in refined]
    for domain in free_of_store:
        classes.add_domain(sorted(domain, key=lambda a: a.name))
    for r in reduces:
        classes.add_domain(sorted(r.axes | frozenset(r.over), key=lambda a: a.name))
    for load_a, load_b in _pairs([v for _, _, v in refined]):
        _match(classes, load_a, load_b)
    _match_positions(classes, refined)
    return _renamed(stores, refined, classes, bound, reduces)


def _refined(stores: list[Store]) -> list[tuple[tuple[Axis, ...], tuple[Poly, ...], Expr]]:
    triples: list[tuple[tuple[Axis, ...], tuple[Poly, ...], Expr]] = []
    for k, s in enumerate(stores):
        axes, value = s.axes, s.value
        if len(stores) > 1:  # the same name in two stores need not mean the same axis
            axes = tuple(Axis(f"{a.name}@{k}", a.extent) for a in axes)
            value = rewrite(value, lambda e: None, {a: b.poly() for a, b in zip(s.axes, axes, strict=True)})
        index = tuple(Poly.ZERO if a.extent.constant == 1 else a.poly() for a in axes)
        triples.append((axes, index, value))
    return refine(triples)


def _pairs(values: list[Expr]) -> Iterable[tuple[Load, Load]]:
    """Loads of one buffer, each against the widest ones before it."""
    by_buffer: dict[Buffer, list[Load]] = {}
    for e in postorder(values):
        if isinstance(e, Load) and e.axes:
            by_buffer.setdefault(e.buffer, []).append(e)
    ordered = sorted(by_buffer.values(), key=lambda ls: -max(len(x.axes) for x in ls))
    for loads in ordered:
        loads.sort(key=lambda x: -len(x.axes))
        for k, second in enumerate(loads[1:], 1):
            for first in loads[: min(k, 8)]:
                yield first, second


def _match(classes: _Classes, first: Load, second: Load) -> None:
    for p, q in zip(first.index, second.index, strict=True):
        one, two = _single(p), _single(q)
        if one is None or two is None or one[1] is not two[1]:
            continue
        (a, _, start_a), (b, _, start_b) = one, two
        if a not in classes.parent or b not in classes.parent or not classes.can_unify(a, b):
            continue
        if a.extent is b.extent:
            classes.unify(a, b)
        elif one[1] is Poly.ONE and a not in classes.bound and b not in classes.bound:
            _embed(classes, a, b, start_b - start_a)


def _embed(classes: _Classes, a: Axis, b: Axis, shift: Poly) -> None:
    """b + shift = a: the smaller axis becomes a region of the larger."""
    if nonnegative(b.extent - a.extent):
        a, b, shift = b, a, -shift
    if a in classes.offset or b in classes.offset:
        return
    if nonnegative(shift) and nonnegative(a.extent - b.extent - shift):
        classes.embed(a, b, shift)


def _single(poly: Poly) -> tuple[Axis, Poly, Poly] | None:
    """(axis, coefficient, rest) where the poly is affine in exactly one axis."""
    axes = poly.axes
    if len(axes) != 1:
        return None
    axis = next(iter(axes))
    coefficient = poly.coefficient(axis)
    if coefficient is None or not coefficient.terms:
        return None
    return axis, coefficient, poly - coefficient * axis


def _match_positions(classes: _Classes, refined: list[tuple[tuple[Axis, ...], tuple[Poly, ...], Expr]]) -> None:
    """Stores of equal shape that share no load are aligned by position."""
    first = refined[0][0]
    for axes, _, _ in refined[1:]:
        if len(axes) != len(first):
            continue
        for a, b in zip(first, axes, strict=True):
            if a.extent is b.extent and a in classes.parent and b in classes.parent and classes.can_unify(a, b):
                classes.unify(a, b)


def _renamed(
    stores: list[Store],
    refined: list[tuple[tuple[Axis, ...], tuple[Poly, ...], Expr]],
    classes: _Classes,
    bound: set[Axis],
    reduces: list[Reduce],
) -> Nest:
    """Replace member axes by class axes c0, c1, ... ordered by the largest store, then reductions."""
    order: dict[Axis, Axis] = {}

    def class_of(a: Axis) -> Axis:
        root = classes.find(a)
        if root not in order:
            order[root] = Axis(f"c{len(order)}", root.extent)
        return order[root]

    by_size = sorted(range(len(refined)), key=lambda k: -numel(refined[k][0]))
    for k in by_size:
        for a in refined[k][0]:
            if a.extent.constant != 1:
                class_of(a)
    for r in reduces:
        for a in r.over:
            class_of(a)
    mapping: dict[Axis, Poly] = {}
    for a in classes.parent:
        if a not in bound:
            mapping[a] = class_of(a) - classes.offset.get(a, Poly.ZERO)
    nest_stores = []
    for s, (axes, index, value) in zip(stores, refined, strict=True):
        live = [a for a in axes if a.extent.constant != 1]
        if any(a not in classes.offset and class_of(a).extent is not a.extent for a in live):
            raise VerifyError(f"{s.buffer!r} would be stored outside its bounds")
        region = tuple(
            (class_of(a), classes.offset[a], classes.offset[a] + a.extent) for a in live if a in classes.offset
        )
        nest_stores.append(
            NestStore(
                s.buffer,
                tuple(p.substitute(mapping) for p in index),
                rewrite(value, lambda e: None, mapping),
                frozenset(class_of(a) for a in live),
                region,
            )
        )
    return Nest(tuple(nest_stores), tuple(order.values()), {a: class_of(a) for a in bound})


# --- collapsing --------------------------------------------------------------------------------


def collapse(nest: Nest, target: Target) -> Nest:
    """Merge neighbouring classes that every access walks as one: (i, j) with i*J + j becomes one axis.

    A split is chosen anew among the merged classes.
    """
    if nest.split is not None:
        merged = collapse(replace(nest, split=None), target)
        reduces = reductions(s.value for s in merged.stores)
        again = _split(merged, reduces, max(numel(merged.domain_of(r)) for r in reduces), target)
        return nest if isinstance(again, Refusal) else again
    changed = True
    while changed:
        changed = False
        for outer, inner in _neighbours(nest):
            if _collapsible(nest, outer, inner):
                nest = _collapsed(nest, outer, inner)
                changed = True
                break
    return nest


def _neighbours(nest: Nest) -> list[tuple[Axis, Axis]]:
    """Pairs worth trying: some access has coefficient(outer) = extent(inner) * coefficient(inner)."""
    return [(a, b) for a in nest.classes for b in nest.classes if a is not b]


def _collapsible(nest: Nest, outer: Axis, inner: Axis) -> bool:
    if (outer in nest.outer) != (inner in nest.outer) or nest.split in (outer, inner):
        return False
    for s in nest.stores:
        if (outer in s.domain) != (inner in s.domain) or any(a in (outer, inner) for a, _, _ in s.region):
            return False
    pairs = _bound_pairs(nest, outer, inner)
    if pairs is None:
        return False
    for offset in _offsets(nest):
        for a, b in ((outer, inner), *pairs.values()):
            c_outer, c_inner = offset.coefficient(a), offset.coefficient(b)
            if c_outer is None or c_inner is None or c_outer is not c_inner * b.extent:
                return False
    return True


def _bound_pairs(nest: Nest, outer: Axis, inner: Axis) -> dict[Reduce, tuple[Axis, Axis]] | None:
    """For each reduction over both classes, its own axes of them; None if one has only one."""
    pairs: dict[Reduce, tuple[Axis, Axis]] = {}
    for r in reductions(s.value for s in nest.stores):
        a = next((x for x in r.over if nest.bound[x] is outer), None)
        b = next((x for x in r.over if nest.bound[x] is inner), None)
        if (a is None) != (b is None):
            return None
        if a is not None and b is not None:
            pairs[r] = (a, b)
    return pairs


def _offsets(nest: Nest) -> Iterable[Poly]:
    for s in nest.stores:
        yield flat_offset(s.buffer, s.index)
    for e in postorder([s.value for s in nest.stores]):
        match e:
            case Load():
                yield flat_offset(e.buffer, e.index)
            case Index():
                yield e.poly
            case Random():
                yield e.index


def _collapsed(nest: Nest, outer: Axis, inner: Axis) -> Nest:
    whole = Axis(f"{outer.name}{inner.name}", outer.extent * inner.extent)
    mapping = {outer: whole // inner.extent, inner: whole % inner.extent}
    bound = {a: whole if c is outer else c for a, c in nest.bound.items() if c is not inner}
    renamed: dict[Axis, Axis] = {}
    for a, b in (_bound_pairs(nest, outer, inner) or {}).values():
        joint = Axis(f"{a.name}{b.name}", a.extent * b.extent)
        mapping |= {a: joint // b.extent, b: joint % b.extent}
        renamed |= {a: joint}
        bound[joint] = whole

    def rename(axes: Iterable[Axis]) -> list[Axis]:
        return [whole if a is outer else a for a in axes if a is not inner]

    def rebind(e: Expr) -> Expr | None:
        if isinstance(e, Reduce) and any(a in renamed for a in e.over):
            over = tuple(renamed.get(a, a) for a in e.over if a in renamed or a not in mapping)
            return Reduce(e.monoid, e.inputs, over)
        return None

    stores = tuple(
        NestStore(
            s.buffer,
            tuple(p.substitute(mapping) for p in s.index),
            rewrite(s.value, rebind, mapping),
            frozenset(rename(s.domain)),
            s.region,
        )
        for s in nest.stores
    )
    return Nest(stores, tuple(rename(nest.classes)), bound, tuple(rename(nest.outer)), nest.split)


def provable(buffer: Buffer, index: tuple[Poly, ...]) -> bool:
    """Every position is inside the buffer for all values of the axes."""
    return all(in_range(p, size) for p, size in zip(index, buffer.shape, strict=True))
