"""Axis refinement: where an index divides an axis, split the axis instead.

x[n // 4, n % 4] over n:12 becomes x[n0, n1] over n0:3, n1:4. Where sizes do not divide, the division
stays in the index. Works on store axes and on reduction axes alike. Stores of one group are refined together:
y[n] over n:12 beside y[4 * i + j] over i:3, j:4 becomes y[4 * n0 + n1].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..ir.expr import Expr, Index, Load, Random, Reduce, Scan, postorder, rebind
from ..ir.poly import Axis, Division, Poly, Quotient, product
from ..ir.program import Buffer
from .inline import scans


def polys_of(values: Iterable[Expr]) -> Iterable[Poly]:
    """Every index poly in the expressions."""
    for e in postorder(values):
        match e:
            case Load():
                yield from e.index
            case Index(poly=position) | Random(index=position) | Scan(at=position):
                yield position


def divisors(polys: Iterable[Poly]) -> dict[Axis, set[Poly]]:
    """For each axis, what it is divided by: from atoms axis//d, axis%d, (axis//d)%e."""
    found: dict[Axis, set[Poly]] = {}
    for atom in dict.fromkeys(a for poly in polys for a in poly.inner_atoms() if isinstance(a, Division)):
        base, scale = atom.numerator, atom.denominator
        inner = base.single
        if isinstance(inner, Quotient):
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


Triple = tuple[tuple[Axis, ...], tuple[Poly, ...], Expr]  # axes, store index, value


def refine(stores: list[Triple]) -> list[Triple]:
    """Split axes until no useful division is left, nor a dimension that one store walks whole and another in digits."""
    stores = [store for s in stores for store in _split_by([s], _own_divisors)]
    return _split_by(stores, _common_divisors)


def _split_by(stores: list[Triple], divided: Callable[[list[Triple]], dict[Axis, set[Poly]]]) -> list[Triple]:
    """Stores with axes split by the numbers that they are divided by, as long as such axes are found."""
    found = scans(value for _, _, value in stores)
    whole = {a for s in found for a in (s.over, s.at.axis)}  # a scan runs along one axis
    for _ in range(4):
        divisors_of = {a: by for a, by in divided(stores).items() if a not in whole}
        splits = {a: parts for a, by in divisors_of.items() if (parts := split_axis(a, by)) is not None}
        if not splits:
            break
        stores = [_split(*s, splits) for s in stores]
    return stores


def _own_divisors(stores: list[Triple]) -> dict[Axis, set[Poly]]:
    """The numbers by which positions divide the axes of stores and of their reductions."""
    values = [value for _, _, value in stores]
    own = {a for axes, _, _ in stores for a in axes}
    own |= {a for e in postorder(values) if isinstance(e, Reduce) for a in e.over}
    return {a: by for a, by in divisors(polys_of(values)).items() if a in own}


def _split(
    axes: tuple[Axis, ...], index: tuple[Poly, ...], value: Expr, splits: dict[Axis, tuple[Axis, ...]]
) -> Triple:
    """A store with some axes replaced by their parts."""
    mapping = {a: joined(parts) for a, parts in splits.items()}
    value = rebind(value, mapping, splits)
    index = tuple(p.substitute(mapping) for p in index)
    return tuple(part for a in axes for part in splits.get(a, (a,))), index, value


def _common_divisors(stores: list[Triple]) -> dict[Axis, set[Poly]]:
    """For axes that walk a dimension of a buffer which other loads walk in digits: the steps of these digits."""
    found: dict[Axis, set[Poly]] = {}
    whole: dict[tuple[Buffer, int], set[Axis]] = {}
    digits: dict[tuple[Buffer, int], set[Poly]] = {}
    for e in postorder(value for _, _, value in stores):
        if not isinstance(e, Load):
            continue
        for k, (p, size) in enumerate(zip(e.index, e.buffer.shape, strict=True)):
            if p.axis is not None and p.axis.extent is size:
                whole.setdefault((e.buffer, k), set()).add(p.axis)
            elif len(p.axes) > 1:
                digits.setdefault((e.buffer, k), set()).update(_digits(p, size))
    for place, steps in digits.items():
        for axis in whole.get(place, ()) if steps else ():
            found.setdefault(axis, set()).update(steps)
    return found


def _digits(poly: Poly, size: Poly) -> set[Poly]:
    """The steps above one of a position written in digits that together count to a size; none where it is not."""
    steps = {c: a for a in poly.axes if (c := poly.coefficient(a)) is not None}
    total, above = Poly.ONE, set()
    while total in steps:
        if total is not Poly.ONE:
            above.add(total)
        total = total * steps.pop(total).extent
    covered = not steps and total is size
    return above if covered and not poly.substitute(dict.fromkeys(poly.axes, Poly.ZERO)).terms else set()
