"""What an expression touches: flat offsets, sizes, bytes, operation counts.

Sizes with symbols are priced at the symbols' hints: profit may guess, legality never does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

from ..ir.expr import Expr, Load, Pointwise, Random, Reduce, Scan, postorder
from ..ir.monoids import MONOIDS
from ..ir.ops import OPS
from ..ir.poly import Axis, Poly, Symbol
from ..ir.program import Buffer

NOMINAL_SIZE = 512  # of a symbol whose hint says nothing
RANDOM_COST = 14.0
SCAN_STEPS = 6.0  # of a monoid for each element: each waits for the one before, or several are combined for it


@lru_cache(maxsize=16384)
def estimate(poly: Poly) -> int:
    """The number a size has, or would have where each symbol has its `assumed_size`."""
    constant = poly.constant
    if constant is not None:
        return constant
    return max(0, poly.evaluate({s: assumed_size(s) for s in poly.symbols()}))


def assumed_size(symbol: Symbol) -> int:
    """What a symbol is priced at. A hint of 0 or 1 is a special case of the sizes to come, not an example."""
    return symbol.hint if symbol.hint is not None and symbol.hint > 1 else max(NOMINAL_SIZE, symbol.lower)


def numel(shape: Iterable[Poly | Axis]) -> int:
    return math.prod(estimate(a.extent if isinstance(a, Axis) else a) for a in shape)


@lru_cache(maxsize=16384)
def storage_bytes(buffer: Buffer) -> int:
    """Bytes one full pass over a buffer moves; broadcast (stride 0) dimensions count once."""
    sizes = [s for s, stride in zip(buffer.shape, buffer.strides, strict=True) if stride.terms]
    return numel(sizes) * buffer.dtype.bytes


def flat_offset(buffer: Buffer, index: tuple[Poly, ...]) -> Poly:
    """The element offset of an index."""
    return sum((position * stride for position, stride in zip(index, buffer.strides, strict=True)), Poly.ZERO)


def load_bytes(load: Load) -> int:
    """Bytes of distinct elements one load touches over the whole of its axes."""
    count = numel(load.axes)
    return min(count * load.buffer.dtype.bytes, max(storage_bytes(load.buffer), load.buffer.dtype.bytes))


def loads_bytes(loads: Iterable[Load]) -> int:
    """Bytes of distinct elements that loads of one buffer touch together.

    Loads that walk it in equal steps touch the same elements, but for those that start between the steps.
    """
    starts: dict[tuple[Poly, ...], set[tuple[int, ...]]] = {}
    found = 0
    for load in loads:
        steps = [math.gcd(*(c for monomial, c in p.terms if monomial)) for p in load.index]
        between = tuple(p.offset % step if step else p.offset for p, step in zip(load.index, steps, strict=True))
        places = starts.setdefault(tuple(p - p.offset for p in load.index), set())
        places.add(between)
        found = max(found, min(len(places) * load_bytes(load), storage_bytes(load.buffer)), load_bytes(load))
    return found


def operation_cost(values: Iterable[Expr]) -> float:
    """Scalar work over all points: each node's cost times the points it is evaluated at."""
    return sum(work * numel(positions(e)) for e in postorder(list(values)) if (work := work_of(e)))


def work_of(e: Expr) -> float:
    """Scalar work of one node at one of its positions."""
    match e:
        case Pointwise():
            return OPS[e.op].cost
        case Reduce():
            return MONOIDS[e.monoid].cost
        case Scan():
            return SCAN_STEPS * MONOIDS[e.monoid].cost
        case Random():
            return RANDOM_COST
    return 0.0


def positions(e: Expr) -> frozenset[Axis]:
    """The axes at whose positions a node is evaluated."""
    return e.axes | frozenset(e.over) if isinstance(e, Reduce) else e.axes


def power_above(size: int | None) -> int:
    """The smallest power of two not below a size; very large where the size is known only at run time."""
    return 1 << 30 if size is None else 1 << max(0, size - 1).bit_length()


def tile_elements(axes: Iterable[Axis]) -> int:
    """Lanes of a tile that holds axes whole."""
    return math.prod(power_above(a.extent.constant) for a in axes)


def is_dense(shape: Sequence[Poly], strides: Sequence[Poly]) -> bool:
    """Strides are those of some permutation of a contiguous tensor: no two elements share a place."""
    dims = [(st, sz) for sz, st in zip(shape, strides, strict=True) if sz.constant != 1]
    expected = Poly.ONE
    while dims:
        match = next((d for d in dims if d[0] is expected), None)
        if match is None:
            return False
        dims.remove(match)
        expected = expected * match[1]
    return True
