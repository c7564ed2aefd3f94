"""What data leaves of a sweep, asked by kernels that run before the one that sweeps.

Programs that own the same rows have the same answer: the first and the last column that count, and between which of
them all conditions hold. A test of columns (`RowTile`) is reduced over the columns; a condition of rows and columns
first over tiles of both, to whether it holds anywhere and everywhere in each of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from ..analysis.formulas import Formula
from ..analysis.nest import Nest, NestStore
from ..analysis.visits import RowTile, spelled
from ..ir.dtypes import DType
from ..ir.expr import Expr, Index, Load, Part, Reduce, const, pointwise, substitute_axes
from ..ir.kernel import Kernel
from ..ir.poly import Axis, Poly, in_range
from ..ir.program import Buffer, Origin, contiguous_strides
from ..ir.target import Target
from .walk import nest_kernel

Test = Callable[[Poly], Expr]  # of a position


@dataclass(slots=True)
class Questions:
    """The questions of one kernel. `outer`: the axes that number its programs, but not the tiles of its columns.

    No other kernel of the launch has this name.
    """

    name: str
    outer: tuple[Axis, ...]
    device: str
    nests: list[Nest] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    answers: list[Buffer] = field(default_factory=list)
    tiled: bool = False  # a condition is computed for every row and column

    def kernels(self, target: Target, name: str, origins: tuple[Origin, ...]) -> list[Kernel]:
        """The kernels that answer, in order."""
        names = (f"{name}_{self.name}_{k}" for k in itertools.count())
        return [nest_kernel(nest, target, own, origins) for own, nest in zip(names, self.nests, strict=False)]

    def ask(self, tile: RowTile, lanes: int, some_row: Expr, every_row: Expr | None) -> list[Expr]:
        """The ends of the columns that tests leave to a tile of so many rows."""
        own = Axis(tile.over.name, Poly.of(lanes))
        columns = Axis(f"{tile.swept.name}v", tile.swept.extent)

        def at(test: Expr) -> Test:
            return lambda place: substitute_axes(test, {tile.swept: place})

        return self._ends(columns, 1, at(some_row), at(every_row) if every_row is not None else None, {tile.over: own})

    def ask_tiles(self, tile: RowTile, lanes: int, step: int, counts: Formula, split: bool) -> list[Expr]:
        """The ends of the columns that conditions leave, in steps of the sweep. `split`: and where they all hold."""
        self.tiled = True
        steps = Axis(f"{tile.swept.name}s", (tile.swept.extent + step - 1) // step)
        classes = tuple(Axis(f"{a.name}t", Poly.of(n)) for a, n in ((tile.rows, lanes), (tile.swept, step)))
        bound: dict[Axis, Axis] = {}

        def over_tile(monoid: str) -> Expr:
            row, column = (Axis(f"{cls.name}{len(bound)}", cls.extent) for cls in classes)
            bound.update(zip((row, column), classes, strict=True))
            at = {tile.rows: tile.start + row, tile.swept: steps * step + column}
            value = substitute_axes(spelled(counts, monoid == "all"), at)
            beyond = const(monoid == "all", DType.BOOL)
            for a, place in at.items():
                if not in_range(place, a.extent):
                    inside = pointwise("lt", Index(place), Index(a.extent))
                    value = pointwise("where", inside, value, beyond)
            return Part(Reduce(monoid, (value,), (row, column)), 0)

        some, *holds = self._stored([over_tile(m) for m in ("any", "all")[: 1 + split]], (steps,), classes, bound)
        number = Axis(f"{steps.name}v", steps.extent)

        def read(table: Load) -> Test:
            return lambda place: substitute_axes(table, {steps: place})

        return self._ends(number, step, read(some), read(holds[0]) if holds else None, {})

    def _ends(self, cls: Axis, step: int, some: Test, every: Test | None, bound: dict[Axis, Axis]) -> list[Expr]:
        """The first position that counts and the end of the last one, and of those that all count.

        Ends are stored as positions left out behind them: zeros, with which schedules are timed, leave all.
        """
        bound, end = dict(bound), Index(cls.extent * step)

        def extreme(monoid: str, value: Callable[[Poly], tuple[Expr, Expr, Expr]]) -> Expr:
            own = Axis(f"{cls.name}{len(bound)}", cls.extent)
            bound[own] = cls
            return Part(Reduce(monoid, (pointwise("where", *value(own.poly())),), (own,)), 0)

        found = [
            extreme("min", lambda p: (some(p), Index(p * step), end)),
            extreme("max", lambda p: (some(p), Index((p + 1) * step), const(0, DType.I64))),
        ]
        if (holds := every) is not None:
            settled = extreme("min", lambda p: (holds(p), Index(p * step), end))

            def settles(place: Poly) -> Expr:
                return pointwise("bitor", holds(place), pointwise("lt", Index(place * step), settled))

            found += [settled, extreme("min", lambda p: (settles(p), end, Index(p * step)))]
        turned = [pointwise("sub", end, e) if k % 2 else e for k, e in enumerate(found)]
        stored = self._stored(turned, (), (*(c for c in bound.values() if c is not cls), cls), bound)
        self.answers += [e.buffer for e in stored]
        return [pointwise("sub", end, e) if k % 2 else e for k, e in enumerate(stored)]

    def _stored(
        self, values: list[Expr], own: tuple[Axis, ...], inner: tuple[Axis, ...], bound: dict[Axis, Axis]
    ) -> tuple[Load, ...]:
        """Values that a kernel before stores, for the programs that differ in them, as they are read back."""
        differing = {a for v in values for a in v.axes}
        axes = (*(a for a in self.outer if a in differing), *own)
        shape, index = tuple(a.extent for a in axes), tuple(a.poly() for a in axes)
        stores = []
        for value in values:
            buffer = Buffer(
                f"_{self.name}_{len(self.buffers)}", value.dtype, shape, contiguous_strides(shape), self.device
            )
            self.buffers.append(buffer)
            stores.append(NestStore(buffer, index, value, frozenset(axes)))
        self.nests.append(Nest(tuple(stores), (*axes, *dict.fromkeys(inner)), bound, axes))
        return tuple(Load(s.buffer, index) for s in stores)
