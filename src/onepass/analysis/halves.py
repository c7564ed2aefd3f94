"""Point-wise rows joined of equal parts: every part becomes a store, so that what the parts share is read once.

y[e:64] = x[e] * c[e] + where(e < 32, -x[e + 32], x[e - 32]) * s[e]
  ->  y[e:32] = x[e] * c[e] - x[e + 32] * s[e],  y[e + 32] = x[e + 32] * c[e + 32] + x[e] * s[e + 32]
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..ir.expr import Load, postorder, substitute_axes
from ..ir.poly import Axis
from .access import flat_offset
from .conditions import breakpoints, specialise
from .nest import LINE_LANES, Nest, NestStore

MOST_PARTS = 4


def in_parts(nest: Nest) -> Nest | None:
    """A nest without reductions whose stores are cut where conditions cut a class into equal parts.

    None where there is no such class, its parts are too short for whole sectors, or they read nothing in common.
    """
    for c in nest.classes:
        points = {p.constant for p in breakpoints(nest.values, c)}
        whole, step = c.extent.constant, min((p for p in points if p is not None and p > 0), default=0)
        if whole is None or step < LINE_LANES or whole % step or not 1 < whole // step <= MOST_PARTS:
            continue
        if points <= {*range(0, whole + 1, step)} and all(c in s.domain and not s.region for s in nest.stores):
            part = Axis(f"{c.name}h", c.extent // (whole // step))
            stores = [_part(s, c, part, k) for s in nest.stores for k in range(whole // step)]
            if _loads(stores) < sum(_loads([s]) for s in stores):
                classes, outer = (tuple(part if x is c else x for x in own) for own in (nest.classes, nest.outer))
                return replace(nest, stores=tuple(stores), classes=classes, outer=outer)
    return None


def _part(store: NestStore, whole: Axis, part: Axis, number: int) -> NestStore:
    """One part of a store."""
    at = {whole: part + part.extent * number}
    (value,) = specialise((substitute_axes(store.value, at),), {})
    index = tuple(p.substitute(at) for p in store.index)
    return replace(store, index=index, value=value, domain=store.domain - {whole} | {part})


def _loads(stores: Iterable[NestStore]) -> int:
    """How many different elements stores read at one position."""
    loads = (e for e in postorder([s.value for s in stores]) if isinstance(e, Load))
    return len({(e.buffer, flat_offset(e.buffer, e.index)) for e in loads})
