"""How the classes of a nest run, read from its schedule, and in which order their accesses want them.

An access wants the class along which it is contiguous to be the vector; the class that most bytes want wins.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..analysis.access import estimate, flat_offset, numel, tile_elements
from ..analysis.nest import Nest
from ..ir.expr import Load, postorder
from ..ir.poly import Axis, Poly
from ..ir.schedule import Schedule

STORE_WEIGHT = 1.25  # scattered stores cost more than scattered loads: a transpose is 1.5 x faster that way


class AxisOrder:
    """Per class of a nest: bytes of the accesses that are contiguous along it, and the largest stride anywhere."""

    def __init__(self, nest: Nest) -> None:
        self.nest = nest
        self.scores: dict[Axis, float] = {}
        self.strides: dict[Axis, int] = {}
        for offset, weight in _accesses(nest):
            for a in offset.axes:
                coefficient = offset.coefficient(a)
                if coefficient is None:
                    continue
                step = abs(estimate(coefficient)) if coefficient.constant is None else abs(coefficient.constant)
                self.strides[a] = max(self.strides.get(a, 0), step)
                if step == 1:
                    self.scores[a] = self.score(a) + weight * min(estimate(a.extent), 64) / 64

    def score(self, axis: Axis) -> float:
        return self.scores.get(axis, 0.0)

    def vector_axis(self, axes: Iterable[Axis]) -> Axis:
        """The best vector among the classes of one sweep."""
        return max(axes, key=lambda a: (self.score(a), estimate(a.extent), a.name))

    def strip_axis(self) -> Axis:
        """The inner class that streams in strips."""
        return self.vector_axis(a for a in self.nest.classes if a not in self.nest.outer)

    def order(self, axes: Iterable[Axis]) -> list[Axis]:
        """Largest stride outermost."""
        return sorted(axes, key=lambda a: (-self.strides.get(a, 0), a.name))

    def best(self) -> Axis | None:
        """The class that most bytes want, the number of a split's chunk left out."""
        classes = self.nest.classes
        candidates = [a for a in classes if a is not chunk_axis(self.nest)]
        return max(candidates, key=lambda a: (self.score(a), classes.index(a)), default=None)

    def transposed(self, best: Axis, others: Iterable[Axis]) -> Axis | None:
        """Another class, of `others`, that accesses of about as many bytes want, if there is one."""
        second = max(others, key=self.score, default=None)
        wanted = second is not None and self.score(second) * 4 > self.score(best) and estimate(second.extent) >= 4
        return second if wanted else None


def _accesses(nest: Nest) -> Iterable[tuple[Poly, float]]:
    """Where every store and load of a nest goes, in classes, and how many bytes pass."""
    for s in nest.stores:
        offset = flat_offset(s.buffer, s.index)
        yield offset, STORE_WEIGHT * s.buffer.dtype.bytes * numel(offset.axes)
    mapping = {a: c.poly() for a, c in nest.bound.items()}
    for e in postorder(nest.values):
        if isinstance(e, Load):
            offset = flat_offset(e.buffer, e.index).substitute(mapping)
            yield offset, float(e.buffer.dtype.bytes * numel(offset.axes))


def chunk_axis(nest: Nest) -> Axis | None:
    """The class that numbers the chunks of a split; the last one by which programs are numbered."""
    return nest.outer[-1] if nest.split is not None else None


def carrying(nest: Nest) -> Axis | None:
    """The split class, where programs carry states from one position of it to the next."""
    ends = nest.reductions
    if nest.split is not None and any(nest.sweeps(r, nest.split) and nest.carried(r) for r in ends):
        return nest.split
    return None


class Layout(AxisOrder):
    """A schedule of a nest, as its kernel is built."""

    def __init__(self, nest: Nest, schedule: Schedule) -> None:
        super().__init__(nest)
        self.schedule = schedule
        inner = [(a, f) for a, f in schedule.axes if not f.grid]
        swept = [f for _, f in inner if f.loop or f.turns > 1]
        lanes, turns = max(((f.tile, f.turns) for f in swept), default=(1, 1))
        rows = carrying(nest) is not None
        self.grid = [a for a, f in schedule.axes if f.grid]
        self.blocks = {a: schedule.factor(a).tile for a in schedule.order}  # grid classes of which a program has a tile
        self.held = [a for a, f in inner if not f.loop and f.turns == 1]  # inner classes that are open as a whole
        self.lanes = lanes  # of a strip; 1: nothing is streamed; 0: each reduction has as many as fit vectors
        self.turns = 1 if rows else turns  # tiles of `lanes` that a step of an online sweep takes together
        self.pieces = turns if rows else 1  # tiles of `lanes` that a row is worked through in, one after another
        self.kept = any(not f.loop for f in swept)  # loaded values of a row stay until its last piece is done
        self.chunk = schedule.factor(nest.split).chunk if nest.split is not None else 0

    def elements(self) -> int:
        """Lanes of the tile that a program works on at once."""
        count = self.lanes * self.turns * tile_elements(self.held)
        for block in self.blocks.values():
            count *= block
        return count
