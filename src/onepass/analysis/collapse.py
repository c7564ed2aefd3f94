"""Neighbouring classes that every access walks as one are merged: (i, j) with i*J + j becomes one axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import permutations

from ..ir.expr import Indirect, Reduce, rebind
from ..ir.poly import Axis, Poly
from .access import numel
from .nest import Nest, accesses, aligned_along, offsets


def collapse(nest: Nest) -> Nest:
    """The nest with as few classes as its accesses allow. It must not be split."""
    assert nest.split is None
    for outer, inner in permutations(nest.classes, 2):
        if _collapsible(nest, outer, inner):
            return collapse(_collapsed(nest, outer, inner))
    return nest


def flatten(nest: Nest, vector_bytes: int) -> Nest:
    """Point-wise rows that begin anywhere but follow one another without gaps become one axis.

    What is large is then read and written in whole vectors; what is small finds its place by dividing.
    """
    if nest.reductions or nest.scans or any(a.extent.constant is None for a in nest.classes):
        return nest
    largest = max(numel(s.domain) for s in nest.stores)
    for outer, inner in permutations(nest.classes, 2):
        if aligned_along(nest, inner, vector_bytes) or any({outer, inner} - s.domain or s.region for s in nest.stores):
            continue
        if all(_dense(p, outer, inner) for b, p in accesses(nest) if 2 * numel(b.shape) > largest):
            return _collapsed(nest, outer, inner)
    return nest


def join(nest: Nest, outer: Axis, inner: Axis) -> Nest | None:
    """The nest with two classes as one, whatever its accesses are: positions come from dividing.

    None where a store or a reduction has only one of them.
    """
    halved = any((outer in s.domain) != (inner in s.domain) or s.region for s in nest.stores)
    free = [nest.free(r) for r in nest.reductions]
    if (
        halved
        or nest.scans
        or any((outer in f) != (inner in f) for f in free)
        or _bound_pairs(nest, outer, inner) is None
    ):
        return None
    return _collapsed(nest, outer, inner)


def merge(nest: Nest, classes: Sequence[Axis]) -> Nest:
    """The nest with classes as one, the first of them outermost. Every reduction has all of them or none."""
    first, *others = classes
    for other in others:
        nest = _collapsed(nest, first, other)
        first = next(c for c in nest.classes if c.name == first.name + other.name)
    return nest


def _dense(offset: Poly, outer: Axis, inner: Axis) -> bool:
    """Whether an access walks rows one after another without gaps."""
    return offset.coefficient(inner) is Poly.ONE and offset.coefficient(outer) is inner.extent


def _collapsible(nest: Nest, outer: Axis, inner: Axis) -> bool:
    if (outer in nest.outer) != (inner in nest.outer) or {nest.split, *(s.over for s in nest.scans)} & {outer, inner}:
        return False
    for s in nest.stores:
        if (outer in s.domain) != (inner in s.domain) or any(a in (outer, inner) for a, _, _ in s.region):
            return False
    pairs = _bound_pairs(nest, outer, inner)
    if pairs is None:
        return False
    for offset in map(_direct, offsets(nest)):
        for a, b in ((outer, inner), *pairs.values()):
            c_outer, c_inner = offset.coefficient(a), offset.coefficient(b)
            if c_outer is None or c_inner is None or c_outer is not c_inner * b.extent:
                return False
    return True


def _direct(offset: Poly) -> Poly:
    """An offset without what an index from memory adds to it: how that index is read is an offset of its own."""
    return Poly(tuple((m, c) for m, c in offset.terms if not (len(m) == 1 and isinstance(m[0], Indirect))))


def _bound_pairs(nest: Nest, outer: Axis, inner: Axis) -> dict[Reduce, tuple[Axis, Axis]] | None:
    """For each reduction over both classes, its own axes of them; None if one has only one."""
    pairs: dict[Reduce, tuple[Axis, Axis]] = {}
    for r in nest.reductions:
        a = next((x for x in r.over if nest.bound[x] is outer), None)
        b = next((x for x in r.over if nest.bound[x] is inner), None)
        if (a is None) != (b is None):
            return None
        if a is not None and b is not None:
            pairs[r] = (a, b)
    return pairs


def _collapsed(nest: Nest, outer: Axis, inner: Axis) -> Nest:
    whole = Axis(f"{outer.name}{inner.name}", outer.extent * inner.extent)
    mapping = {outer: whole // inner.extent, inner: whole % inner.extent}
    bound = {a: whole if c is outer else c for a, c in nest.bound.items() if c is not inner}
    over: dict[Axis, tuple[Axis, ...]] = {}
    for a, b in (_bound_pairs(nest, outer, inner) or {}).values():
        joint = Axis(f"{a.name}{b.name}", a.extent * b.extent)
        mapping |= {a: joint // b.extent, b: joint % b.extent}
        over |= {a: (joint,), b: ()}
        bound[joint] = whole

    def rename(axes: Iterable[Axis]) -> tuple[Axis, ...]:
        return tuple(whole if a is outer else a for a in axes if a is not inner)

    stores = tuple(
        replace(
            s,
            index=tuple(p.substitute(mapping) for p in s.index),
            value=rebind(s.value, mapping, over),
            domain=frozenset(rename(s.domain)),
        )
        for s in nest.stores
    )
    return replace(nest, stores=stores, classes=rename(nest.classes), bound=bound, outer=rename(nest.outer))
