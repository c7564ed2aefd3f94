"""Axis refinement: where an index divides an axis, split the axis instead.

x[n // 4, n % 4] over n:12 becomes x[n0, n1] over n0:3, n1:4. Where sizes do not divide, the division
stays in the index. Works on store axes and on reduction axes alike.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..ir.expr import Expr, Index, Load, Random, Reduce, postorder, rewrite
from ..ir.poly import Axis, Poly, Quotient, Remainder, product


def polys_of(values: Iterable[Expr]) -> Iterable[Poly]:
    """Every index poly in the expressions."""
    for e in postorder(list(values)):
        match e:
            case Load():
                yield from e.index
            case Index():
                yield e.poly
            case Random():
                yield e.index


def divisors(polys: Iterable[Poly]) -> dict[Axis, set[Poly]]:
    """For each axis, what it is divided by: from atoms axis//d, axis%d, (axis//d)%e."""
    found: dict[Axis, set[Poly]] = {}
    stack = list(polys)
    seen: set[Poly] = set()
    while stack:
        poly = stack.pop()
        if poly in seen:
            continue
        seen.add(poly)
        for atom in poly.atoms():
            if not isinstance(atom, Quotient | Remainder):
                continue
            stack.append(atom.numerator)
            base, scale = atom.numerator, atom.denominator
            inner = next(iter(base.atoms()), None)
            if (
                len(base.terms) == 1
                and base.terms[0][1] == 1
                and isinstance(inner, Quotient)
                and len(base.terms[0][0]) == 1
            ):
                base, scale = inner.numerator, inner.denominator * scale
            if base.axis is not None:
                found.setdefault(base.axis, set()).add(scale)
    return found


def split_axis(axis: Axis, by: set[Poly]) -> tuple[Axis, ...] | None:
    """The axes (outer to inner) that replace `axis`, None if the divisors do not nest."""
    steps = sorted((d for d in by if not (axis.extent % d).terms and d is not axis.extent), key=_rank)
    if not steps:
        return None
    sizes: list[Poly] = []
    previous = Poly.ONE
    for d in steps:
        if (d % previous).terms:
            return None
        sizes.append(d // previous)
        previous = d
    sizes.append(axis.extent // previous)
    return tuple(Axis(f"{axis.name}_{k}", size) for k, size in enumerate(reversed(sizes)))


def _rank(poly: Poly) -> tuple[int, int, str]:
    return (max((len(m) for m, _ in poly.terms), default=0), poly.constant or 0, repr(poly))


def joined(axes: tuple[Axis, ...]) -> Poly:
    """The original axis in terms of its parts."""
    total = Poly.ZERO
    for k, axis in enumerate(axes):
        total = total + (axis * product(a.extent for a in axes[k + 1 :]) if axis.extent.constant != 1 else 0)
    return total


def refine(
    stores: list[tuple[tuple[Axis, ...], tuple[Poly, ...], Expr]],
) -> list[tuple[tuple[Axis, ...], tuple[Poly, ...], Expr]]:
    """Split axes of (axes, store index, value) triples until no useful division is left."""
    return [_refine_store(*s) for s in stores]


def _refine_store(
    axes: tuple[Axis, ...], index: tuple[Poly, ...], value: Expr
) -> tuple[tuple[Axis, ...], tuple[Poly, ...], Expr]:
    for _ in range(4):
        bound = {a for e in postorder([value]) if isinstance(e, Reduce) for a in e.over}
        splits: dict[Axis, tuple[Axis, ...]] = {}
        for axis, by in divisors(polys_of([value])).items():
            if (axis in bound or axis in axes) and (parts := split_axis(axis, by)) is not None:
                splits[axis] = parts
        if not splits:
            break
        mapping = {a: joined(parts) for a, parts in splits.items()}
        value = _substitute(value, mapping, splits)
        index = tuple(p.substitute(mapping) for p in index)
        axes = tuple(part for a in axes for part in splits.get(a, (a,)))
    return axes, index, value


def _substitute(value: Expr, mapping: dict[Axis, Poly], splits: dict[Axis, tuple[Axis, ...]]) -> Expr:
    def widen(e: Expr) -> Expr | None:
        if isinstance(e, Reduce) and any(a in splits for a in e.over):
            return Reduce(e.monoid, e.inputs, tuple(p for a in e.over for p in splits.get(a, (a,))))
        return None

    return rewrite(value, widen, mapping)
