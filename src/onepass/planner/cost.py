"""What a group costs on a target: launch + compute + memory - 0.9 * min(compute, memory).

A bound that no kernel of the group beats: on a GPU the price of a built kernel decides (`analysis/price.py`), on a CPU
this. Bytes count each buffer once per kernel (first touch); a value is computed at every point of its own axes and of
the program's outer axes, once for all sweeps (dear ones are kept in scratch).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..analysis.access import estimate, flat_offset, loads_bytes, numel, positions, storage_bytes, work_of
from ..analysis.inline import loads_of
from ..analysis.nest import Nest, opened
from ..ir.expr import Const, Expr, Index, Reduce, postorder
from ..ir.poly import Axis, Poly
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

    @property
    def moved(self) -> int:
        """Bytes that cross memory."""
        return self.bytes_read + self.bytes_written


def nest_cost(nest: Nest, target: Target) -> Cost:
    """The cost of a nest as one group."""
    outer = frozenset(nest.outer)
    vector = _vector(nest)
    shared = 1 if vector is None else max(1, min(THREAD if target.warp else LOOP, estimate(vector.extent)))
    operations, nodes = 0.0, 0
    opened_values = opened(nest)
    for e in postorder(opened_values):
        nodes += 1
        if work := work_of(e):
            alone = isinstance(e, Reduce) or vector in e.axes
            operations += work * numel(positions(e) | outer) / (1 if alone else shared)
    written = sum(storage_bytes(s.buffer) for s in nest.stores)
    launches = 2 if nest.split is not None else 1
    reads = loads_of(opened_values)
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
