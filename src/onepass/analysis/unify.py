"""Axes of a group's stores and reductions become classes, aligned where they touch the same data."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from ..errors import VerifyError
from ..ir.expr import Expr, Load, Reduce, postorder, rewrite
from ..ir.plan import Store
from ..ir.poly import Axis, Poly, nonnegative
from ..ir.program import Buffer
from .access import numel
from .inline import reductions
from .nest import Nest, NestStore
from .refine import refine


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
    pairs = list(_pairs([v for _, _, v in refined]))
    starts = {load: _start(load) for pair in pairs for load in pair}
    # What starts elsewhere (keys beside queries in one buffer) comes after what does not.
    for load_a, load_b in sorted(pairs, key=lambda pair: starts[pair[0]] != starts[pair[1]]):
        _match(classes, load_a, load_b)
    _match_positions(classes, refined)
    return _renamed(stores, refined, classes, bound, reduces)


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


def _start(load: Load) -> tuple[Poly, ...]:
    """Where it is while all axes are at their first positions."""
    return tuple(p if not p.axes else _without_axes(p) for p in load.index)


@lru_cache(maxsize=16384)
def _without_axes(poly: Poly) -> Poly:
    return Poly(tuple((m, c) for m, c in poly.terms if not any(a.poly().axes for a in m)))


def _match(classes: _Classes, first: Load, second: Load) -> None:
    for p, q in zip(first.index, second.index, strict=True):
        one, two = _single(p), _single(q)
        if one is None and two is None:
            _match_digits(classes, p, q)
        if one is None or two is None or one[1] is not two[1]:
            continue
        (a, _, start_a), (b, _, start_b) = one, two
        if a not in classes.parent or b not in classes.parent or not classes.can_unify(a, b):
            continue
        if a.extent is b.extent:
            classes.unify(a, b)
        elif one[1] is Poly.ONE and a not in classes.bound and b not in classes.bound:
            _embed(classes, a, b, start_b - start_a)


def _match_digits(classes: _Classes, p: Poly, q: Poly) -> None:
    """Two positions written in several axes each: those of equal step and extent run along the same data."""
    steps = {p.coefficient(a): a for a in p.axes}
    for b in q.axes:
        a = steps.get(q.coefficient(b))
        known = a is not None and q.coefficient(b) is not None and a in classes.parent and b in classes.parent
        if a is not None and known and a.extent is b.extent and classes.can_unify(a, b):
            classes.unify(a, b)


def _embed(classes: _Classes, a: Axis, b: Axis, shift: Poly) -> None:
    """b + shift = a: the smaller axis becomes a region of the larger."""
    if nonnegative(b.extent - a.extent):
        a, b, shift = b, a, -shift
    if a in classes.offset or b in classes.offset:
        return
    if nonnegative(shift) and nonnegative(a.extent - b.extent - shift):
        classes.embed(a, b, shift)


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
