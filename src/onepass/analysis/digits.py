"""Matrix products whose summed axis is written in digits: packed weights, groups that share a scale.

Sums have no order, so digits are one axis again. A short digit that only conditions ask for (which half of a byte) is
unrolled before: a product for each of its values, all of which read the same bytes.

    sum over (k:32, p:2) of x[2k + p] * where(p < 1, low(w[k]), high(w[k]))
      = sum over k of x[2k] * low(w[k])  +  sum over k of x[2k + 1] * high(w[k])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..ir.expr import Expr, Load, Part, Pointwise, Reduce, pointwise, postorder, rewrite, substitute_axes
from ..ir.poly import Axis, Poly, product
from .conditions import as_difference, breakpoints, specialise
from .inline import reductions
from .nest import Nest

MOST_UNROLLED = 4  # values of a digit


def join_digits(nest: Nest) -> Nest:
    """The nest with one axis for every product's sum."""
    if all(len(r.over) == 1 and not _halves(r) for r in _products(nest)):
        return nest
    stores = tuple(replace(s, value=rewrite(s.value, _without_digit)) for s in nest.stores)
    return _without_halves(_joined(replace(nest, stores=stores)))


def _products(nest: Nest) -> list[Reduce]:
    return [r for r in reductions(s.value for s in nest.stores) if _is_product(r)]


def _is_product(r: Reduce) -> bool:
    return r.monoid == "sum" and isinstance(r.inputs[0], Pointwise) and r.inputs[0].op == "mul"


# --- digits that conditions ask for ---


def _without_digit(e: Expr) -> Expr | None:
    """A sum of products for each value of its short digits, until none is left."""
    if not isinstance(e, Part) or not isinstance(e.source, Reduce) or not _is_product(e.source):
        return None
    reduce = e.source
    for digit in reduce.over if len(reduce.over) > 1 else ():
        count = digit.extent.constant
        if count is None or count > MOST_UNROLLED or not _asked(reduce.inputs[0], digit):
            continue
        rest = tuple(a for a in reduce.over if a is not digit)
        terms = _terms(reduce.inputs[0], [{digit: Poly.of(k)} for k in range(count)], rest)
        if terms:
            return _total([_without_digit(t) or t for t in terms])
    return None


def _asked(body: Expr, axis: Axis) -> bool:
    """Whether a comparison of positions depends on an axis."""
    pairs = (as_difference(e) for e in postorder([body]))
    return any(axis in (p[0] - p[1]).axes for p in pairs if p is not None)


def _terms(body: Expr, places: Sequence[dict[Axis, Poly]], rest: tuple[Axis, ...]) -> list[Expr]:
    """The sum over the rest at each of some places, if all of them read something in common; else none."""
    bodies = [specialise((substitute_axes(body, at),), {})[0] for at in places]
    read = [{e for e in postorder([b]) if isinstance(e, Load) and e.axes.issuperset(rest)} for b in bodies]
    if not set.intersection(*read):
        return []
    return [Part(Reduce("sum", (b,), rest), 0) for b in bodies]


def _total(terms: Sequence[Expr]) -> Expr:
    total, *others = terms
    for t in others:
        total = pointwise("add", total, t)
    return total


def _halves(r: Reduce) -> int:
    """How many equal parts conditions cut the summed axis into; 0 where they do not, or into too many."""
    extent = r.over[0].extent.constant
    points = {p.constant for p in breakpoints([r.inputs[0]], r.over[0])} if len(r.over) == 1 else set()
    if extent is None or len(points) != 1:
        return 0
    (point,) = points
    fits = point is not None and 0 < point < extent and extent % point == 0 and extent // point <= MOST_UNROLLED
    return extent // point if fits and point else 0


def _without_halves(nest: Nest) -> Nest:
    """The nest with a product for each part that conditions cut a summed axis into."""
    found = reductions(s.value for s in nest.stores)
    for r in _products(nest):
        count = _halves(r)
        cls = nest.bound[r.over[0]]
        swept = [other for other in found if any(nest.bound[a] is cls for a in other.over)]
        if not count or any(not _is_product(other) or _halves(other) != count for other in swept):
            continue
        part = Axis(f"{cls.name}h", cls.extent // count)
        bound = dict(nest.bound)
        memo: dict[Expr, Expr] = {}
        for other in swept:
            own = Axis(f"{other.over[0].name}h", part.extent)
            places = [{other.over[0]: own + part.extent * k} for k in range(count)]
            terms = _terms(other.inputs[0], places, (own,))
            if not terms:
                break
            bound[own] = part
            memo[Part(other, 0)] = _total(terms)
        else:
            classes = tuple(part if c is cls else c for c in nest.classes)
            stores = tuple(replace(s, value=rewrite(s.value, lambda e: None, None, dict(memo))) for s in nest.stores)
            return _without_halves(replace(nest, stores=stores, classes=classes, bound=bound))
    return nest


# --- digits as one axis ---


def _joined(nest: Nest) -> Nest:
    """The nest with the classes that a product sums over as one."""
    found = reductions(s.value for s in nest.stores)
    digits = next((tuple(nest.bound[a] for a in r.over) for r in _products(nest) if len(r.over) > 1), ())
    own = [r for r in found if any(nest.bound[a] in digits for a in r.over)]
    if not digits or any(tuple(nest.bound[a] for a in r.over) != digits for r in own):
        return nest
    if any(s.domain & set(digits) for s in nest.stores):
        return nest
    whole = Axis("".join(c.name for c in digits), product(c.extent for c in digits))
    mapping: dict[Axis, Poly] = {}
    joints: dict[tuple[Axis, ...], Axis] = {}
    for r in own:
        joints[r.over] = joint = Axis("".join(a.name for a in r.over), whole.extent)
        step = Poly.ONE
        for a in reversed(r.over):
            mapping[a] = (joint // step) % a.extent
            step = step * a.extent

    def rebind(e: Expr) -> Expr | None:
        return Reduce(e.monoid, e.inputs, (joints[e.over],)) if isinstance(e, Reduce) and e.over in joints else None

    stores = tuple(replace(s, value=rewrite(s.value, rebind, mapping)) for s in nest.stores)
    bound = {a: c for a, c in nest.bound.items() if a not in mapping} | dict.fromkeys(joints.values(), whole)
    classes = tuple(whole if c is digits[0] else c for c in nest.classes if c not in digits[1:])
    return _joined(replace(nest, stores=stores, classes=classes, bound=bound))
