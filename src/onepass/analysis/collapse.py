"""Neighbouring classes that every access walks as one are merged: (i, j) with i*J + j becomes one axis."""

from __future__ import annotations

from collections.abc import Iterable

from ..ir.expr import Expr, Load, Reduce, postorder, rewrite
from ..ir.poly import Axis, Indirect, Poly
from ..ir.program import Buffer
from .access import flat_offset, numel
from .inline import reductions
from .nest import Nest, NestStore, aligned_along, offsets


def collapse(nest: Nest) -> Nest:
    """The nest with as few classes as its accesses allow; of one that is not split."""
    assert nest.split is None
    changed = True
    while changed:
        changed = False
        for outer, inner in _neighbours(nest):
            if _collapsible(nest, outer, inner):
                nest = _collapsed(nest, outer, inner)
                changed = True
                break
    return nest


def flatten(nest: Nest, vector_bytes: int) -> Nest:
    """Point-wise rows that begin anywhere but follow one another without gaps become one axis.

    What is large is then read and written in whole vectors; what is small finds its place by dividing.
    """
    if reductions(s.value for s in nest.stores) or any(a.extent.constant is None for a in nest.classes):
        return nest
    for outer, inner in _neighbours(nest):
        if aligned_along(nest, inner, vector_bytes) or any({outer, inner} - s.domain or s.region for s in nest.stores):
            continue
        if all(_dense(p, outer, inner) for b, p in _places(nest) if 2 * numel(b.shape) > _largest(nest)):
            return _collapsed(nest, outer, inner)
    return nest


def join(nest: Nest, outer: Axis, inner: Axis) -> Nest | None:
    """The nest with two classes as one, whatever its accesses are: positions come from dividing.

    None where a store or a reduction has only one of them.
    """
    halved = any((outer in s.domain) != (inner in s.domain) or s.region for s in nest.stores)
    free = [frozenset(nest.bound.get(a, a) for a in r.axes) for r in reductions(s.value for s in nest.stores)]
    if halved or any((outer in f) != (inner in f) for f in free) or _bound_pairs(nest, outer, inner) is None:
        return None
    return _collapsed(nest, outer, inner)


def _places(nest: Nest) -> list[tuple[Buffer, Poly]]:
    """Every buffer that is read or written, and where."""
    loads = [e for e in postorder([s.value for s in nest.stores]) if isinstance(e, Load)]
    found = [(e.buffer, e.index) for e in loads] + [(s.buffer, s.index) for s in nest.stores]
    return [(buffer, flat_offset(buffer, index)) for buffer, index in found]


def _largest(nest: Nest) -> int:
    return max(numel(s.domain) for s in nest.stores)


def _dense(offset: Poly, outer: Axis, inner: Axis) -> bool:
    """Whether an access walks rows one after another without gaps."""
    return offset.coefficient(inner) is Poly.ONE and offset.coefficient(outer) is inner.extent


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
    for r in reductions(s.value for s in nest.stores):
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
