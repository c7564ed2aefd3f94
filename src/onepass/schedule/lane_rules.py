"""How the axes of a nest run where a program is a thread: rules over the target's facts.

The class that most bytes want to be contiguous is the vector. Where two are wanted (a transpose), both are blocked so
that cache lines are used whole.
"""

from __future__ import annotations

from dataclasses import replace

from ..analysis.access import numel, tile_elements
from ..analysis.conditions import breakpoints
from ..analysis.nest import Nest
from ..analysis.scans import state_classes
from ..ir.poly import Axis
from ..ir.schedule import Factor, Schedule
from ..ir.target import Target
from .layout import AxisOrder

TRANSPOSE_BLOCK = 64
COLUMN_LANES = 512
NARROW_LANES = 16  # of columns that have several states each
POINTWISE_LANES = 8192


def lane_schedule(nest: Nest, target: Target, chunk: int = 0) -> Schedule:
    """The schedule of a nest whose programs are threads. `chunk`: positions of the split class that a program takes."""
    factors = {a: Factor(grid=True) if a in nest.outer else Factor(loop=True, tile=0) for a in nest.classes}
    blocks = _blocks(nest, target)
    factors |= blocks
    if nest.split is not None:
        factors[nest.split] = replace(factors[nest.split], chunk=chunk)
    order = tuple(a for a, f in blocks.items() if f.grid)
    return Schedule(tuple(factors.items()), order, split=nest.split)


def _blocks(nest: Nest, target: Target) -> dict[Axis, Factor]:
    """The outer classes that are blocked, or swept inside a program; the vector last."""
    axes = AxisOrder(nest)
    best = axes.best()
    if best is None or best not in nest.outer:
        return {}
    others = [a for a in nest.outer if a is not best]
    swept = any(s.domain != frozenset(nest.outer) for s in nest.stores)
    if nest.reductions or nest.scans or (swept and not (_is_cut(nest, best) and others)):
        return {best: _block(best, max(NARROW_LANES, COLUMN_LANES // tile_elements(state_classes(nest))))}
    if not swept and (second := axes.transposed(best, others)) is not None:
        return {second: _block(second, TRANSPOSE_BLOCK, loop=True), best: _block(best, TRANSPOSE_BLOCK)}
    if numel(others) >= 4 * target.processors or (_is_cut(nest, best) and others):
        return {best: Factor(loop=True, tile=0)}
    return {best: _block(best, POINTWISE_LANES)}


def _block(axis: Axis, size: int, loop: bool = False) -> Factor:
    """A block of a class that programs share out; `loop`: a program goes through it position by position."""
    constant = axis.extent.constant
    return Factor(grid=True, loop=loop, tile=size if constant is None else max(1, min(size, constant)))


def _is_cut(nest: Nest, axis: Axis) -> bool:
    return bool(breakpoints((nest.values), axis)) or any(a is axis for s in nest.stores for a, _, _ in s.region)
