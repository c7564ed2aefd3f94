"""A group that reduces the rows of matrix products becomes one kernel.

Held columns: the products are summed, then every reduction folds the tile. Swept columns: as in any contraction, one
sweep for reductions that share it, with the products of each tile computed inside. A product whose own sum is long
is a loop inside, for all products of the tile at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..analysis.access import power_above
from ..analysis.inline import reductions
from ..analysis.nest import NestStore, direct_reductions
from ..analysis.operands import operands, sided
from ..analysis.rows import RowContraction, row_reductions
from ..ir.choice import Choice
from ..ir.dtypes import DType
from ..ir.expr import Expr, Part, Reduce, substitute_axes
from ..ir.kernel import Accumulate, Accumulator, Fold, Operand, Start, Var
from ..ir.poly import Axis, Poly
from ..ir.schedule import Factor
from .builder import Finished
from .contraction_row_tiles import RowTiles, choose_row_tiles
from .contraction_tiles import Tiles
from .contractions import COLUMN, ROW, ContractionScheduler, closer


class RowScheduler(ContractionScheduler):
    """Builds one kernel from products whose rows are reduced."""

    c: RowContraction
    tiles: RowTiles
    passed = False  # what a sweep stores has been stored

    def _choose_tiles(self, choice: Choice) -> Tiles:
        return choose_row_tiles(self.c, *self._operands(), self.target, choice)

    @property
    def here(self) -> dict[Axis, Poly]:
        """Rows, and held columns, as the axes of tiles."""
        rows = {self.c.rows: self.axis(self.c.rows, ROW).poly()}
        return rows | ({self.c.columns: self.axis(self.c.columns, COLUMN).poly()} if self.c.held else {})

    def _operands(self) -> tuple[int, int]:
        """Bytes of an operand, and how many products a tile has: each is in many reductions, at other columns."""
        width, _ = super()._operands()
        found = reductions(s.value for s in self.c.nest.stores)
        return width, len({r.over for r in found if operands(r) is not None})

    # --- axes ---

    def _open_program(self) -> None:
        c, t = self.c, self.tiles
        for cls in (*c.grid, *((self.chunk,) if self.chunk is not None else ())):
            self.builder.here.bindings[cls] = self._grid_axis(cls.extent).poly()
        down = (c.rows.extent + t.rows - 1) // t.rows
        row = self._grid_axis(down).poly()
        self.first_row = (down - 1 - row if self._longest_last() else row) * t.rows
        self._open(c.rows, ROW, t.rows, self.first_row)
        if c.held:
            self._open(c.columns, COLUMN, t.columns, Poly.ZERO)
        for cls in c.inner if not t.depth else ():
            for dim in (ROW, COLUMN):
                self._open(cls, dim, max(16, power_above(cls.extent.constant)), Poly.ZERO)

    def _factors(self) -> list[tuple[Axis, Factor]]:
        t, c = self.tiles, self.c
        columns = Factor(tile=t.columns) if c.held else Factor(loop=True, tile=t.step)
        inner = Factor(tile=t.depth, role="inside") if t.depth else Factor()
        return [
            (c.rows, Factor(grid=True, tile=t.rows, role="rows")),
            (c.columns, columns),
            *((a, inner) for a in c.inner),
        ]

    # --- reductions ---

    def _reduce(self) -> None:
        """What reductions wait for comes before them, the rest after: matrices are copied for the products first."""
        wanted = set(reductions(v for r in row_reductions(self.c) for v in r.inputs))
        for r in self.c.beside:
            if r in wanted:
                self._beside(self.oriented(r))
        if self.c.held:
            self._fold_rows()
        else:
            super()._reduce()
        for r in self.c.beside:
            if r not in wanted:
                self._beside(self.oriented(r))

    def _passing(self) -> tuple[NestStore, ...]:
        return self.c.passing

    def _pass_by(self) -> None:
        """Columns that are stored leave with the first sweep that has computed them."""
        if self.passed:
            return
        self.passed = True
        here = self.here | {self.c.columns: self.axis(self.c.columns, COLUMN).poly()}
        for s in self.c.passing:
            value = substitute_axes(s.value, here)
            self._inside([value])
            self._store(s.buffer, tuple(p.substitute(here) for p in s.index), self.builder.emit(value))

    def _fold_rows(self) -> None:
        """Every reduction of columns that are all here; products first, for all of them."""
        column = self.axis(self.c.columns, COLUMN)
        found = [self.oriented(r) for r in row_reductions(self.c)]
        inputs = {r: tuple(substitute_axes(v, {r.over[0]: column.poly()}) for v in r.inputs) for r in found}
        results = [substitute_axes(s.value, self.here) for s in self.c.nest.stores]
        self._inside([*(v for values in inputs.values() for v in values), *results])
        for r, values in inputs.items():
            self._fold(r, tuple(self.builder.emit(v) for v in values), self.lanes[column])

    def _fold(self, reduce: Reduce, values: tuple[Operand, ...], over: Axis) -> None:
        parts = tuple(Var(self.builder.name(f"{reduce.monoid}_"), d) for d in reduce.part_dtypes)
        self.builder.add(Fold(reduce.monoid, values, (over,), parts))
        for k, var in enumerate(parts):
            self.builder.here.values[Part(reduce, k)] = var

    def _beside(self, reduce: Reduce) -> None:
        """A reduction of rows over what products sum over."""
        (over,) = reduce.over
        cls = self.c.nest.bound[over]
        own = self.opened.setdefault((cls, COLUMN), Axis(f"{cls.name}c", cls.extent))
        inputs = tuple(substitute_axes(v, {over: own.poly()}) for v in reduce.inputs)
        if not self.tiles.depth:
            self._fold(reduce, tuple(self.builder.emit(v) for v in inputs), self.lanes[own])
            return
        state = self._state(f"{reduce.monoid}_acc", reduce, (self.c.rows,))
        with self.builder.block(closer(loop := self._depth_loop(cls))):
            self._open(cls, COLUMN, self.tiles.depth, loop * self.tiles.depth)
            values = tuple(self.builder.emit(v) for v in inputs)
            self.builder.add(Accumulate(state, self.lanes[own].poly(), values))
        self.builder.here.parts[reduce] = Finished(state)

    def _state(self, name: str, reduce: Reduce, classes: tuple[Axis, ...]) -> Accumulator:
        """A state for rows, or for rows and columns, from nothing."""
        axes = [self.axis(cls, dim) for dim, cls in enumerate(classes)]
        tiles = tuple(self.lanes[a] for a in axes if a in reduce.axes)
        state = Accumulator(self.builder.name(name), reduce.monoid, reduce.part_dtypes, 1, tiles=tiles)
        self.builder.add(Start(state))
        return state

    def _depth_loop(self, cls: Axis) -> Axis:
        depth = self.tiles.depth
        return Axis(self.builder.name("k"), (cls.extent + depth - 1) // depth)

    # --- products ---

    def _inside(self, values: Sequence[Expr]) -> None:
        """Products of the rows and columns that are open; a long sum is a loop for all that share it."""
        if not self.tiles.depth:
            super()._inside(values)
            return
        wanted: dict[Axis, list[Reduce]] = {}
        for r in direct_reductions(values):
            known = any(Part(r, 0) in scope.values for scope in self.builder.scopes)
            if operands(r) is not None and not known:
                wanted.setdefault(self.c.nest.bound[r.over[0]], []).append(r)
        for cls, products in wanted.items():
            self._sum(cls, products)

    def _sum(self, cls: Axis, products: list[Reduce]) -> None:
        """Products over one class, step by step."""
        states = [self._state("product_acc", r, (self.c.rows, self.c.columns)) for r in products]
        with self.builder.block(closer(loop := self._depth_loop(cls))):
            for dim in (ROW, COLUMN):
                self._open(cls, dim, self.tiles.depth, loop * self.tiles.depth)
            for r, state in zip(products, states, strict=True):
                self._product(self._matrices(r), self._operand_type(r), cls, state)
        for r, state in zip(products, states, strict=True):
            self.builder.here.parts[r] = Finished(state)
            self.builder.emit(Part(r, 0))

    def _matrices(self, reduce: Reduce) -> tuple[Operand, Operand]:
        (over,) = reduce.over
        cls = self.c.nest.bound[over]
        left, right = self._sides(reduce)
        return (
            self._matrix(substitute_axes(left, {over: self.axis(cls, COLUMN).poly()})),
            self._matrix(substitute_axes(right, {over: self.axis(cls, ROW).poly()})),
        )

    def _sides(self, reduce: Reduce) -> tuple[Expr, Expr]:
        sides = operands(reduce)
        assert sides is not None
        return sided(sides, self.axis(self.c.rows, ROW))

    def _operand_type(self, reduce: Reduce) -> DType:
        return self._sides(reduce)[0].dtype
