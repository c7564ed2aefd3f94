"""Axes of a group's stores and reductions become classes, aligned where they touch the same data."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from ..errors import VerifyError
from ..ir.expr import Expr, Load, Reduce, postorder, rewrite, substitute_axes
from ..ir.plan import Store
from ..ir.poly import Axis, Poly, nonnegative
from ..ir.program import Buffer
from .access import numel
from .inline import reductions, scans
from .nest import Nest, NestStore
from .refine import Triple, refine
from .scans import upright


def unify(stores: Iterable[Store], turned: bool = True) -> Nest:
    """Give every store and reduction class axes, aligned where they touch the same data.

    `turned`: results may lie with rows and columns exchanged; axes that nothing else aligns are aligned by length.
    """
    return _unified(tuple(stores), turned)


@lru_cache(maxsize=256)  # legality, price and building ask for the same nest
def _unified(stores: tuple[Store, ...], turned: bool) -> Nest:
    refined = _refined(stores)
    reduces, scanned = reductions(v for _, _, v in refined), scans(v for _, _, v in refined)
    classes = _Classes({a for r in reduces for a in r.over}, {s.over for s in scanned})
    for axes, _, _ in refined:
        classes.add_domain(a for a in axes if a.extent.constant != 1)
    for r in reduces:
        classes.add_domain(r.axes | frozenset(r.over))
    for s in scanned:
        classes.add_domain({s.over, *(a for i in s.inputs for a in i.axes)})
        classes.add_domain(s.axes)
    for s in scanned:
        if s.at.axis is not None:
            classes.unify(s.over, s.at.axis)
    pairs = list(_pairs([v for _, _, v in refined]))
    starts = {load: _start(load) for pair in pairs for load in pair}
    # Loads that start elsewhere (keys and queries in one buffer) come after loads that start at the same place.
    for load_a, load_b in sorted(pairs, key=lambda pair: starts[pair[0]] != starts[pair[1]]):
        _match(classes, load_a, load_b)
    first = refined[0][0]
    for axes, _, _ in refined[1:]:  # stores of equal shape that share no load are aligned by position
        if len(axes) == len(first):
            for a, b in zip(first, axes, strict=True):
                classes.unify(a, b)
        if turned:
            _match_lengths(classes, first, axes)
    return _renamed(stores, refined, classes, reduces)


class _Classes:
    """Union-find over axes; two axes of one domain never unify.

    A class may be wider than some of its members: such a member sits at class position - offset.
    """

    def __init__(self, bound: set[Axis], scanned: set[Axis]) -> None:
        self.bound = bound
        self.whole = bound | scanned  # which are no regions of others
        self.parent: dict[Axis, Axis] = {}
        self.members: dict[Axis, list[Axis]] = {}
        self.conflicts: dict[Axis, set[Axis]] = {}
        self.offset: dict[Axis, Poly] = {}

    def add_domain(self, domain: Iterable[Axis]) -> None:
        axes = sorted(domain, key=lambda a: a.name)
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
        if a not in self.parent or b not in self.parent:
            return False
        a, b = self.find(a), self.find(b)
        return a is not b and not any(self.find(c) is b for c in self.conflicts[a])

    def unify(self, a: Axis, b: Axis) -> None:
        """Two axes of equal extent become one, if they can; where one of them is a region, the other joins it there."""
        if a.extent is not b.extent or not self.can_unify(a, b):
            return
        if b in self.offset:
            a, b = b, a
        if b in self.offset:
            return
        if a in self.offset:
            self._embed(a, b, self.offset[a])
        else:
            self._join(a, b)

    def embed(self, a: Axis, b: Axis, shift: Poly) -> None:
        """b + shift = a: the smaller axis becomes a region of the larger, if it can."""
        if not self.can_unify(a, b) or a in self.whole or b in self.whole:
            return
        if nonnegative(b.extent - a.extent):
            a, b, shift = b, a, -shift
        if a in self.offset or b in self.offset:
            return
        if nonnegative(shift) and nonnegative(a.extent - b.extent - shift):
            self._embed(a, b, shift)

    def _embed(self, a: Axis, b: Axis, offset: Poly) -> None:
        """The class of `b` becomes the region of `a`'s class that starts at `offset`."""
        members = self.members[self.find(b)]
        if any(m in self.offset or m in self.whole for m in members):
            return
        self.offset |= dict.fromkeys(members, offset)
        self._join(a, b)

    def _join(self, a: Axis, b: Axis) -> None:
        a, b = self.find(a), self.find(b)
        self.parent[b] = a
        self.members[a] += self.members.pop(b)
        self.conflicts[a] |= self.conflicts[b]


def _refined(stores: tuple[Store, ...]) -> list[Triple]:
    triples: list[Triple] = []
    for k, s in enumerate(stores):
        axes, value = s.axes, upright(s.value)
        if len(stores) > 1:  # the same name in two stores need not mean the same axis
            axes = tuple(Axis(f"{a.name}@{k}", a.extent) for a in axes)
            value = substitute_axes(value, {a: b.poly() for a, b in zip(s.axes, axes, strict=True)})
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


def _start(load: Load) -> tuple[Poly, ...]:
    """Where it is while all axes are at their first positions."""
    return tuple(p if not p.axes else _without_axes(p) for p in load.index)


@lru_cache(maxsize=16384)
def _without_axes(poly: Poly) -> Poly:
    return Poly(tuple((m, c) for m, c in poly.terms if not any(a.poly().axes for a in m)))


def _match(classes: _Classes, first: Load, second: Load) -> None:
    for p, q in zip(first.index, second.index, strict=True):
        one, two = _single(p), _single(q)
        if one is None and two is None:  # axes of equal step and extent run along the same data
            steps = {p.coefficient(a): a for a in p.axes}
            for b in q.axes:
                if (step := q.coefficient(b)) is not None and step in steps:
                    classes.unify(steps[step], b)
        if one is None or two is None or one[1] is not two[1]:
            continue
        (a, step, start_a), (b, _, start_b) = one, two
        if a.extent is b.extent:
            classes.unify(a, b)
        elif step is Poly.ONE:
            classes.embed(a, b, start_b - start_a)


def _match_lengths(classes: _Classes, first: Iterable[Axis], second: Iterable[Axis]) -> None:
    first, second = ([a for a in axes if a in classes.parent] for axes in (first, second))
    known = {classes.find(a) for a in first} & {classes.find(b) for b in second}
    for b in (b for b in second if classes.find(b) not in known):
        alike = [a for a in first if a.extent is b.extent and classes.find(a) not in known]
        if len(alike) == 1:
            classes.unify(alike[0], b)


@lru_cache(maxsize=16384)
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


def _renamed(stores: tuple[Store, ...], refined: list[Triple], classes: _Classes, reduces: list[Reduce]) -> Nest:
    """Replace member axes by class axes c0, c1, ... ordered by the largest store, then reductions."""
    order: dict[Axis, Axis] = {}

    def class_of(a: Axis) -> Axis:
        root = classes.find(a)
        return order.setdefault(root, Axis(f"c{len(order)}", root.extent))

    live = [[a for a in axes if a.extent.constant != 1] for axes, _, _ in refined]
    for axes in (*sorted(live, key=lambda axes: -numel(axes)), *(r.over for r in reduces)):
        for a in axes:
            class_of(a)
    offset = classes.offset
    mapping = {a: class_of(a) - offset.get(a, Poly.ZERO) for a in classes.parent if a not in classes.bound}
    nest_stores = []
    for s, own, (_, index, value) in zip(stores, live, refined, strict=True):
        if any(a not in offset and class_of(a).extent is not a.extent for a in own):
            raise VerifyError(f"{s.buffer!r} would be stored outside its bounds")
        nest_stores.append(
            NestStore(
                s.buffer,
                tuple(p.substitute(mapping) for p in index),
                rewrite(value, lambda e: None, mapping),  # the axes that scans run along, too
                frozenset(map(class_of, own)),
                tuple((class_of(a), offset[a], offset[a] + a.extent) for a in own if a in offset),
            )
        )
    return Nest(tuple(nest_stores), tuple(order.values()), {a: class_of(a) for a in classes.bound})
