"""Which axis is the vector, which axes are the grid, and how large blocks are: rules over the target's facts.

An access wants the axis along which it is contiguous to be the vector axis; the axis most bytes want
wins. Where two axes are wanted (a transpose), both are blocked so that cache lines are used whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ..analysis.access import estimate, flat_offset, numel
from ..analysis.conditions import breakpoints
from ..analysis.inline import reductions
from ..analysis.nest import Nest
from ..ir.expr import Expr, Load, postorder
from ..ir.poly import Axis, Poly
from ..ir.schedule import Factor, Schedule
from ..ir.target import Target

TRANSPOSE_BLOCK = 64
STORE_WEIGHT = 1.25  # scattered stores cost more than scattered loads: a transpose is 1.5 x faster that way
COLUMN_LANES = 512


@dataclass(frozen=True, slots=True)
class AxisOrder:
    """grid: classes programs are numbered by; what the accesses say of every class decides the order of the others."""

    grid: tuple[Axis, ...]
    scores: dict[Axis, float]
    strides: dict[Axis, int]

    def vector_axis(self, axes: Iterable[Axis]) -> Axis:
        """The best vector axis among the classes of one sweep."""
        return max(axes, key=lambda a: (self.scores.get(a, 0.0), estimate(a.extent), a.name))

    def order(self, axes: Iterable[Axis]) -> list[Axis]:
        """Largest stride outermost."""
        return sorted(axes, key=lambda a: (-self.strides.get(a, 0), a.name))


@dataclass(frozen=True, slots=True)
class Layout(AxisOrder):
    """tiled: the grid class whose block is the vector tile."""

    tiled: Axis | None = None
    looped: Axis | None = None  # a blocked grid class each program loops over (transposes)
    blocks: dict[Axis, int] = field(default_factory=dict)

    def schedule(self, nest: Nest, chunks: dict[Axis, tuple[Axis, int]]) -> Schedule:
        """The layout of a nest as data."""
        factors = {a: self._factor(a) for a in nest.classes}
        for axis, (_, size) in chunks.items():
            factors[axis] = replace(factors[axis], chunk=size)
        return Schedule(tuple(factors.items()), split=nest.split)

    def _factor(self, axis: Axis) -> Factor:
        if axis in self.blocks:
            return Factor(grid=True, loop=axis is not self.tiled, tile=self.blocks[axis])
        return Factor(grid=True) if axis in self.grid else Factor(loop=True, tile=0)


def scheduled_layout(nest: Nest, schedule: Schedule) -> Layout:
    """The layout that a schedule of a nest stands for."""
    scores, strides = access_scores(nest)
    grid = tuple(a for a in nest.outer if schedule.factor(a).grid)
    blocked = {a: f for a, f in schedule.axes if f.grid and (f.tile > 1 or f.loop)}
    tiled = next((a for a, f in blocked.items() if not f.loop), None)
    looped = next((a for a, f in blocked.items() if f.loop), None)
    return Layout(grid, scores, strides, tiled, looped, {a: f.tile for a, f in blocked.items()})


def choose_layout(nest: Nest, target: Target, numbered: frozenset[Axis] = frozenset()) -> Layout:
    """The layout of a nest on a target; `numbered` classes (a split's chunks) only number programs."""
    scores, strides = access_scores(nest)
    outer = nest.outer
    reduces = reductions(s.value for s in nest.stores)
    pure = not reduces and all(s.domain == frozenset(outer) for s in nest.stores)
    candidates = [a for a in nest.classes if a not in numbered]
    best = max(candidates, key=lambda a: (scores.get(a, 0.0), nest.classes.index(a)), default=None)
    if best is None or best not in outer:
        return Layout(outer, scores, strides)
    if pure:
        return _pointwise_layout(nest, target, best, scores, strides)
    return Layout(outer, scores, strides, best, None, {best: _block(best, COLUMN_LANES)})


def _pointwise_layout(
    nest: Nest, target: Target, best: Axis, scores: dict[Axis, float], strides: dict[Axis, int]
) -> Layout:
    others = tuple(a for a in nest.outer if a is not best)
    second = max(others, key=lambda a: scores.get(a, 0.0), default=None)
    if second is not None and scores.get(second, 0.0) * 4 > scores.get(best, 0.0) and estimate(second.extent) >= 4:
        blocks = {best: _block(best, TRANSPOSE_BLOCK), second: _block(second, TRANSPOSE_BLOCK)}
        return Layout(nest.outer, scores, strides, best, second, blocks)
    if numel(others) >= 4 * target.processors or (_is_cut(nest, best) and others):
        return Layout(others, scores, strides)
    return Layout(nest.outer, scores, strides, best, None, {best: _block(best, 8192)})


def _block(axis: Axis, size: int) -> int:
    constant = axis.extent.constant
    return size if constant is None else max(1, min(size, constant))


def _is_cut(nest: Nest, axis: Axis) -> bool:
    return bool(breakpoints((s.value for s in nest.stores), axis)) or any(
        a is axis for s in nest.stores for a, _, _ in s.region
    )


def access_scores(nest: Nest) -> tuple[dict[Axis, float], dict[Axis, int]]:
    """Per class: bytes of the accesses contiguous along it, and the largest stride anywhere."""
    scores: dict[Axis, float] = {}
    strides: dict[Axis, int] = {}
    for offset, weight, domain in _accesses(nest):
        for a in domain:
            coefficient = offset.coefficient(a)
            if coefficient is None:
                continue
            step = abs(estimate(coefficient)) if coefficient.constant is None else abs(coefficient.constant)
            strides[a] = max(strides.get(a, 0), step)
            if step == 1:
                scores[a] = scores.get(a, 0.0) + weight * min(estimate(a.extent), 64) / 64
    return scores, strides


def _accesses(nest: Nest) -> Iterable[tuple[Poly, float, frozenset[Axis]]]:
    for s in nest.stores:
        offset = flat_offset(s.buffer, s.index)
        yield offset, STORE_WEIGHT * s.buffer.dtype.bytes * numel(offset.axes), offset.axes
    mapping = {a: c.poly() for a, c in nest.bound.items()}
    for e in _loads(s.value for s in nest.stores):
        offset = flat_offset(e.buffer, e.index).substitute(mapping)
        axes = offset.axes
        yield offset, float(e.buffer.dtype.bytes * numel(axes)), axes


def _loads(values: Iterable[Expr]) -> Iterable[Load]:
    return (e for e in postorder(list(values)) if isinstance(e, Load))
