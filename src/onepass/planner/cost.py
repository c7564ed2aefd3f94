"""What a group costs on a target: launch + compute + memory - 0.9 * min(compute, memory).

A bound that no kernel of the group beats: on a GPU the price of a built kernel decides (`analysis/price.py`), on a CPU
this. Bytes count each buffer once per kernel (first touch); a value is computed at every point of its own axes and of
the program's outer axes, once for all sweeps (dear ones are kept in scratch).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..analysis.access import RANDOM_COST, estimate, flat_offset, loads_bytes, storage_bytes
from ..analysis.nest import Nest, opened
from ..ir.expr import Const, Expr, Index, Load, Pointwise, Random, Reduce, postorder
from ..ir.monoids import MONOIDS
from ..ir.ops import OPS
from ..ir.poly import Axis, Poly
from ..ir.program import Buffer
from ..ir.schedule import Schedule
from ..ir.target import Target

# Neighbouring positions that share what does not depend on them: those of one thread of a tile, or of one loop.
THREAD, LOOP = 16, 512
SMALLEST_US = 10.0  # predicted; what takes less is not measured: launching takes as long as running


@dataclass(frozen=True, slots=True)
class Cost:
    """Predicted cost of one group."""

    bytes_read: int
    bytes_written: int
    operations: float
    launches: int
    buffers: int
    nodes: int
    live: int  # values alive at once
    time_us: float
    schedule: Schedule | None = None  # of the kernel that was priced


def nest_cost(nest: Nest, target: Target) -> Cost:
    """The cost of a nest as one group."""
    outer = frozenset(nest.outer)
    reads: dict[Buffer, list[Load]] = {}
    vector = _vector(nest)
    shared = 1 if vector is None else max(1, min(THREAD if target.warp else LOOP, estimate(vector.extent)))
    operations, nodes = 0.0, 0
    opened_values = opened(nest)
    for e in postorder(opened_values):
        nodes += 1
        match e:
            case Load():
                reads.setdefault(e.buffer, []).append(e)
            case Pointwise():
                operations += OPS[e.op].cost * _points(e.axes | outer) / (1 if vector in e.axes else shared)
            case Random():
                operations += RANDOM_COST * _points(e.axes | outer) / (1 if vector in e.axes else shared)
            case Reduce():
                operations += MONOIDS[e.monoid].cost * _points(e.axes | outer | frozenset(e.over))
    written = sum(storage_bytes(s.buffer) for s in nest.stores)
    launches = 2 if nest.split is not None else 1
    buffers = len(reads) + len(nest.stores)
    read = sum(map(loads_bytes, reads.values()))
    moved = read + written
    time_us = predict_us(moved, operations, launches, target)
    live = live_values(opened_values)
    return Cost(read, written, operations, launches, buffers, nodes, live, time_us)


def _vector(nest: Nest) -> Axis | None:
    """The outer class along which the largest result is contiguous: neighbours share what does not depend on it."""
    largest = max(nest.stores, key=lambda s: len(s.domain))
    offset = flat_offset(largest.buffer, largest.index)
    return next((a for a in nest.outer if offset.coefficient(a) is Poly.ONE), None)


def live_values(values: list[Expr]) -> int:
    """The most values alive at once when computed in order: the register estimate."""
    order = [e for e in postorder(values) if not isinstance(e, Const | Index)]
    last = {c: k for k, e in enumerate(order) for c in e.children}
    dying: dict[int, int] = {}
    for k in last.values():
        dying[k] = dying.get(k, 0) + 1
    alive = most = 0
    for k, e in enumerate(order):
        alive += 1
        most = max(most, alive)
        alive -= dying.get(k, 0) + (e not in last)
    return most


def predict_us(moved_bytes: int, operations: float, launches: int, target: Target) -> float:
    """The model itself."""
    memory = moved_bytes / target.memory_bytes_per_us
    compute = operations / target.operations_per_us
    return launches * target.launch_us + compute + memory - 0.9 * min(compute, memory)


def _points(axes: Iterable[Axis]) -> int:
    total = 1
    for a in axes:
        total *= estimate(a.extent)
    return total
