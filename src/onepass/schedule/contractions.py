"""A group with matrix products becomes one kernel.

A program owns a tile of rows and columns and sweeps one class. All tiles have two dimensions, rows and columns; an
axis that is a column of one matrix and a row of another is opened once for each. Values that do not vary along the
swept class are loaded before the sweep, because the builder places them there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ..analysis.access import estimate, flat_offset, numel, power_above, storage_bytes
from ..analysis.bounds import Range, assuming, find_ranges, needed
from ..analysis.contraction import Contraction
from ..analysis.formulas import some
from ..analysis.inline import reductions
from ..analysis.nest import NestStore, direct_reductions
from ..analysis.operands import operands, sided
from ..analysis.passes import Pass, passes
from ..ir.choice import Choice
from ..ir.dtypes import DType
from ..ir.expr import Expr, Load, Part, Reduce, const, postorder, substitute_axes
from ..ir.kernel import (
    Accumulate,
    Accumulator,
    Contract,
    Descriptor,
    GridAxis,
    Kernel,
    Let,
    LoadTile,
    Local,
    Loop,
    Operand,
    ReadLocal,
    Rescale,
    Start,
    Statement,
    StoreTile,
    Tile,
    Var,
    WriteLocal,
)
from ..ir.monoids import lowest
from ..ir.poly import Axis, Poly, nonnegative, product
from ..ir.program import Buffer, Origin
from ..ir.schedule import Factor, Schedule
from ..ir.target import Target
from .builder import Builder, Finished
from .contraction_tiles import FEW_ROWS, GROUPED, Tiles, choose_product_tiles, lanes_of
from .online import carry
from .reuse import larger_than_cache
from .sweeps import kernel_symbols
from .tiles import has_far_values, needs_wide

ROW, COLUMN = 0, 1
MOST_DESCRIBED = 256  # of a side of a block
MOST_MATRICES = 16  # of one kernel, as its launcher takes them
MOST_STREAMED = 4  # times the chip's cache (see `_streams`): on one H200, 134 MB gain 4 % and 268 MB lose as much
_Span: TypeAlias = tuple[tuple[Poly, ...], tuple[Poly, ...], tuple[Poly, ...]]


@dataclass(frozen=True, slots=True)
class _Running:
    """A reduction of the result, its state, and what enters it over the swept class: of a product its matrices."""

    reduce: Reduce
    accumulator: Accumulator
    inputs: tuple[Expr, ...]
    product: bool


class ContractionScheduler:
    """Builds one kernel from one contraction."""

    def __init__(
        self,
        contraction: Contraction,
        target: Target,
        choice: Choice,
        chunk: Axis | None = None,
        steps: Poly = Poly.ZERO,
        company: ContractionScheduler | None = None,
        others: int = 0,
    ) -> None:
        """`company`: a kernel that shares the launch; `others`: elements of the results beside this one in it."""
        self.c, self.target = contraction, target
        self.chunk, self.steps = chunk, steps  # of a split: which part of the swept class, and how many steps it has
        self.states: list[tuple[Buffer, tuple[Poly, ...], Expr]] = []  # of a split: what is stored instead
        self.builder: Builder = Builder(company.builder if company is not None else None)
        self.grid: list[GridAxis] = []
        self.opened: dict[tuple[Axis, int], Axis] = {}  # class and dimension -> the axis that expressions use
        self.lanes: dict[Axis, Axis] = {}  # that axis -> its tile
        self.starts: dict[Axis, Poly] = {}  # that axis -> the first position of its tile
        self.whole: set[Axis] = set()  # those whose tiles never cross the end
        self.descriptors: dict[tuple[Buffer, int, tuple[int, int]], Descriptor]
        self.descriptors = company.descriptors if company is not None else {}
        self.wide = any(needs_wide(b) for b in self._buffers())
        self.others = others
        self.streams = False  # what hardware copies is read once
        self.tiles: Tiles = self._choose_tiles(choice)

    def _choose_tiles(self, choice: Choice) -> Tiles:
        return choose_product_tiles(self.c, *self._operands(), self._across(), self.target, choice, self.others)

    def _operands(self) -> tuple[int, int]:
        """Bytes of an operand of the matrix unit, and how many products there are, by the tiles their sums take."""
        products = [left.dtype for left, _ in self._products()]
        return max(d.bytes for d in products), sum(2 if d.is_packed else 1 for d in products)  # of a step, and of all

    def _products(self) -> list[tuple[Expr, Expr]]:
        """The matrices of every product."""
        found = [operands(r) for r in reductions(s.value for s in self.c.nest.stores)]
        return [sides for sides in found if sides is not None]

    def _across(self) -> bool:
        """Whether the matrix with the columns is contiguous along them."""
        loads = [e for e in postorder([s.value for s in self.c.nest.stores]) if isinstance(e, Load)]
        own = [e for e in loads if self.c.columns in e.axes and self.c.rows not in e.axes and len(e.axes) > 1]
        return any(flat_offset(e.buffer, e.index).coefficient(self.c.columns) is Poly.ONE for e in own)

    def _buffers(self) -> list[Buffer]:
        """Everything the kernel reads or writes."""
        stores = self.c.nest.stores
        return [*_read(s.value for s in stores), *(s.buffer for s in stores)]

    def build(self, name: str, origins: tuple[Origin, ...]) -> Kernel:
        """The whole kernel; of a split, what leaves the states of its chunk."""
        self._open_program()
        self._reduce()
        passing = self._passing()
        stores = self.states or [(s.buffer, s.index, s.value) for s in self.c.nest.stores if s not in passing]
        results = [self.builder.emit(substitute_axes(value, self.here)) for _, _, value in stores]
        for (buffer, index, _), result in zip(stores, results, strict=True):
            self._store(buffer, tuple(p.substitute(self.here) for p in index), result)
        body = tuple(self.builder.scopes[0].statements)
        return Kernel(
            name=name,
            reads=_read([*(value for _, _, value in stores), *(s.value for s in passing)]),
            writes=(*(buffer for buffer, _, _ in stores), *(s.buffer for s in passing)),
            symbols=kernel_symbols(self.c.nest),
            grid=tuple(self.grid),
            body=body,
            locals=tuple(self.builder.locals),
            origins=origins,
            schedule=self._schedule(),
            work=product(a.extent for a in self.c.nest.classes),
            warps=self.tiles.warps,
            stages=self.tiles.stages,
            wide=self.wide or has_far_values(body),
            descriptors=tuple(self.descriptors.values()),
            resident=self.target.processors if self.tiles.resident else 0,
            flat=self.tiles.resident and self._operands()[1] == 1,
            streams=self.streams,
        )

    def _passing(self) -> tuple[NestStore, ...]:
        """What is stored step by step, inside a sweep."""
        return ()

    def _pass_by(self) -> None:
        """Store what is stored in this step of the sweep."""

    @property
    def here(self) -> dict[Axis, Poly]:
        """Rows and columns of the result as the axes of tiles."""
        c = self.c
        return {c.rows: self.axis(c.rows, ROW).poly(), c.columns: self.axis(c.columns, COLUMN).poly()}

    def programs(self) -> int:
        """How many programs there are without a split."""
        c, t = self.c, self.tiles
        across = 1 if c.inner else -(-estimate(c.columns.extent) // t.columns)
        return numel(c.grid) * -(-estimate(c.rows.extent) // t.rows) * across

    def _schedule(self) -> Schedule:
        """How the axes run, as data."""
        chunks = estimate(self.chunk.extent) if self.chunk is not None else 0
        axes = (*((a, Factor(grid=True)) for a in self.c.grid), *self._factors())
        return Schedule(axes, (), self.tiles.warps, self.tiles.stages, chunks=chunks, staged=True)

    def _factors(self) -> list[tuple[Axis, Factor]]:
        """Of the classes of products."""
        t, c = self.tiles, self.c
        held = [(a, Factor(tile=lanes_of(a, 1 << 30))) for a in c.inner if a is not c.columns]
        return [
            (c.rows, Factor(grid=True, tile=t.rows, role="rows")),
            (c.columns, Factor(grid=not c.inner, tile=t.columns, role="columns")),
            (c.swept, Factor(loop=True, tile=t.step)),
            *held,
        ]

    # --- axes ---

    def axis(self, cls: Axis, dim: int) -> Axis:
        """The class as rows or columns of a tile."""
        return self.opened[cls, dim]

    def _open(self, cls: Axis, dim: int, lanes: int, start: Poly) -> None:
        """A class as a dimension of tiles from here on: positions [start, start + lanes)."""
        own = self.opened.setdefault((cls, dim), Axis(f"{cls.name}{'rc'[dim]}", cls.extent))
        tile = self.lanes.setdefault(own, Axis(f"t{cls.name}{'rc'[dim]}", Poly.of(lanes)))
        whole = not (cls.extent % lanes).terms and nonnegative(cls.extent - 1)
        self.builder.add(Tile(tile, lanes, () if whole else (cls.extent - start,), dim))
        self.builder.here.bindings[own] = own.poly()
        self.builder.here.physical[own] = start + tile
        self.starts[own] = start
        if whole:
            self.whole.add(own)

    def _open_program(self) -> None:
        c, t = self.c, self.tiles
        for cls in (*c.grid, *((self.chunk,) if self.chunk is not None else ())):
            self.builder.here.bindings[cls] = self._grid_axis(cls.extent).poly()
        down = (c.rows.extent + t.rows - 1) // t.rows
        held = bool(c.inner) or (c.columns.extent.constant is not None and c.columns.extent.constant <= t.columns)
        if held:
            row, column = self._grid_axis(down).poly(), Poly.ZERO
        else:
            row, column = self._grouped(down, (c.columns.extent + t.columns - 1) // t.columns)
        if held and self._longest_last():
            row = down - 1 - row
        self.first_row = row * t.rows
        self._open(c.rows, ROW, t.rows, self.first_row)
        self._open(c.columns, COLUMN, t.columns, column * t.columns)
        for cls in c.inner:
            for dim in (ROW, COLUMN):
                if (cls, dim) not in self.opened:
                    self._open(cls, dim, max(16, power_above(cls.extent.constant)), Poly.ZERO)

    def _longest_last(self) -> bool:
        """Whether later rows have more to sweep: they should start first."""
        rows, found = self.c.rows, []
        for r in reductions(s.value for s in self.c.nest.stores):
            if len(r.over) == 1 and rows in r.axes:
                counts = needed(r.inputs[0], r.monoid, r.monoid == "max")
                found += find_ranges(counts, rows, r.over[0], Poly.ZERO, 1)
        return any(b.upper and b.slope > 0 for one in found for b in one)

    def _grid_axis(self, extent: Poly) -> Axis:
        position = Axis(f"g{len(self.grid)}", extent)
        self.grid.append(GridAxis(position, extent))
        return position

    def _grouped(self, down: Poly, across: Poly) -> tuple[Poly, Poly]:
        """Tiles in an order that keeps both matrices in cache: a few rows of tiles, column by column."""
        count = down.constant
        group = next((g for g in (GROUPED, 4, 2) if count is not None and count % g == 0), 1)
        if group == 1:
            row = self._grid_axis(down)
            return row.poly(), self._grid_axis(across).poly()
        outer, column, within = (self._grid_axis(e) for e in (down // group, across, Poly.of(group)))
        return outer * group + within, column.poly()

    # --- reductions of the result ---

    def _reduce(self) -> None:
        """Every reduction of the result, one pass after another."""
        for one in passes(self.c):
            self._sweep(one)

    def oriented(self, reduce: Reduce) -> Reduce:
        """A reduction of the result over the rows and columns that are open."""
        part = substitute_axes(Part(reduce, 0), self.here)
        assert isinstance(part, Part) and isinstance(part.source, Reduce)
        return part.source

    def _started(self, reduce: Reduce) -> _Running:
        """A reduction's state for the whole program, and what enters it, over the swept class."""
        (over,) = reduce.over
        swept = {dim: Axis(f"{self.c.swept.name}{'rc'[dim]}", self.c.swept.extent) for dim in (ROW, COLUMN)}
        rows = self.axis(self.c.rows, ROW)
        sides = operands(reduce)
        tiles = [self.lanes[rows]] if rows in reduce.axes else []
        if sides is None:
            inputs = tuple(substitute_axes(v, {over: swept[COLUMN].poly()}) for v in reduce.inputs)
        else:
            left, right = sided(sides, rows)
            inputs = (
                substitute_axes(left, {over: swept[COLUMN].poly()}),
                substitute_axes(right, {over: swept[ROW].poly()}),
            )
            tiles.append(self.lanes[self.axis(self.c.columns, COLUMN)])
        accumulator = Accumulator(
            self.builder.name(f"{reduce.monoid}_acc"), reduce.monoid, reduce.part_dtypes, 1, tiles=tuple(tiles)
        )
        self.builder.add(Start(accumulator))
        return _Running(reduce, accumulator, inputs, sides is not None)

    def _sweep(self, one: Pass) -> None:
        """One pass over the swept class for reductions of one level, and for the sums carried beside it."""
        carried = {self.oriented(r): substitute_axes(h, self.here) for r, h in one.carried.items()}
        first = [self._started(self.oriented(r)) for r in one.level]
        second = [self._started(r) for r in carried]
        reference = self._reference(first[0]) if second else None
        for holding, after, before in self._spans(one, (*first, *second)):
            self._loop(first, second, carried, reference, holding, after, before)
        for running in (*first, *second):
            self.builder.here.parts[running.reduce] = Finished(running.accumulator)

    def _spans(self, one: Pass, running: tuple[_Running, ...]) -> list[_Span]:
        """The swept class in parts: what is positive in one, where it starts and where it ends, in steps."""
        ranges = [()] if self._is_one_step() else self._ranges(one, running)
        spans: list[_Span] = []
        behind: tuple[Poly, ...] = ()  # the ranges before
        for early in ranges[:-1]:
            ends = self._steps(b.loose for b in early)
            spans.append(((), behind, ends))
            behind = (*behind, *ends)
        return [*spans, *self._parts(ranges[-1], behind)]

    def _parts(self, one: Range, behind: tuple[Poly, ...]) -> list[_Span]:
        """A range in parts: where a lower bound may fail, where all hold, and where an upper one may fail."""
        lower, upper = ([b for b in one if b.upper == up] for up in (False, True))
        starts = (*behind, *self._begun(b.loose for b in lower))
        ends = self._steps(b.loose for b in upper)
        checked = [next((b for b in side if b.slope), side[0]) for side in (lower, upper) if side]
        settled = self._steps(b.tight for b in checked if not b.upper)
        doubtful = self._begun(b.tight for b in checked if b.upper)
        spans: list[_Span] = []
        if settled:  # where both ends are close this has all
            spans.append(((), starts, (*ends, *settled)))
        spans.append((tuple(b.difference for b in checked), (*starts, *settled), (*ends, *doubtful)))
        if doubtful:
            spans.append(((), (*starts, *settled, *doubtful), ends))
        return spans

    def _steps(self, positions: Iterable[Poly]) -> tuple[Poly, ...]:
        """How many steps there are up to positions, one that is cut included."""
        step = self.tiles.step
        return tuple(self.builder.resolve(p + step - 1) // step for p in positions)

    def _begun(self, positions: Iterable[Poly]) -> tuple[Poly, ...]:
        """How many steps there are up to positions, one that is cut left out."""
        return tuple(self.builder.resolve(p) // self.tiles.step for p in positions)

    def _is_one_step(self) -> bool:
        """Whether a sweep is over after its first step: there is nothing to carry, and nothing to skip."""
        extent = self.c.swept.extent.constant
        return extent is not None and extent <= self.tiles.step

    def _ranges(self, one: Pass, running: tuple[_Running, ...]) -> list[Range]:
        """Outside of what every term is its reduction's identity: -inf of a maximum, zero of sums."""
        if self._passing() or not one.skips(self.c):
            return [()]
        swept = Axis(f"{self.c.swept.name}c", self.c.swept.extent)
        unled = {self.oriented(r) for r in one.sums}
        counts = some(needed(r.inputs[0], r.reduce.monoid, r.reduce not in unled) for r in running)
        return find_ranges(counts, self.axis(self.c.rows, ROW), swept, self.first_row, self.tiles.rows)

    def _loop(
        self,
        first: list[_Running],
        second: list[_Running],
        carried: dict[Reduce, Expr],
        reference: Local | None,
        holding: tuple[Poly, ...],
        after: tuple[Poly, ...],
        before: tuple[Poly, ...],
    ) -> None:
        c, step = self.c, self.tiles.step
        loop = Axis(self.builder.name("i"), (c.swept.extent + step - 1) // step)
        if self.chunk is not None:
            at = self.builder.resolve(self.chunk * self.steps)
            after, before = (*after, at), (*before, at + self.steps)
        with self.builder.block(closer(loop, after, before)):
            for dim in (ROW, COLUMN):
                self._open(c.swept, dim, step, loop * step)
            for running in first:
                self._enter(running, holding)
            if reference is not None:
                moved = self._carry(first[0], carried, reference)
                # Products last: what the matrix unit adds to is touched right before it starts.
                for running in sorted(second, key=lambda r: r.product):
                    self._enter(running, holding, moved[running.reduce])
            self._pass_by()

    def _reference(self, leader: _Running) -> Local:
        dtype = leader.reduce.part_dtypes[0]
        local = Local(self.builder.name("reference"), dtype, 1, leader.accumulator.tiles)
        self.builder.locals.append(local)
        self.builder.add(WriteLocal(local, Poly.ZERO, const(lowest(dtype), dtype)))
        return local

    def _carry(self, leader: _Running, carried: dict[Reduce, Expr], reference: Local) -> dict[Reduce, Var]:
        """What moves each sum so far to the maximum as it is now."""
        builder = self.builder
        builder.here.parts[leader.reduce] = Finished(leader.accumulator)
        new = builder.emit(Part(leader.reduce, 0))
        old = Var(builder.name("old"), reference.dtype)
        builder.add(ReadLocal(old, reference, Poly.ZERO))
        moved = {h: carry(builder, leader.reduce, h, new, old) for h in dict.fromkeys(carried.values())}
        builder.add(WriteLocal(reference, Poly.ZERO, new))
        # Rows without any term yet: nothing is subtracted, so that -inf meets no -inf.
        none, safe = Var(builder.name("none"), DType.BOOL), Var(builder.name("safe"), reference.dtype)
        builder.add(Let(none, "eq", (new, const(lowest(reference.dtype), reference.dtype))))
        builder.add(Let(safe, "where", (none, const(0.0, reference.dtype), new)))
        builder.here.values[Part(leader.reduce, 0)] = safe
        return {r: moved[h] for r, h in carried.items()}

    def _enter(self, running: _Running, holding: tuple[Poly, ...], moved: Var | None = None) -> None:
        """What one step of the sweep adds to a state, where conditions hold; the state is `moved` before."""
        done = [r for scope in self.builder.scopes for r in scope.parts]
        assumed = [(v, assuming(v, holding, done)) for v in running.inputs]
        inputs = tuple(v if running.product and less.axes != v.axes else less for v, less in assumed)  # whole matrices
        self._inside(inputs)
        values = tuple(self._matrix(v) if running.product else self.builder.emit(v) for v in inputs)
        if moved is not None and not self._is_one_step():
            self.builder.add(Rescale(running.accumulator, moved, guarded=False))
        if not running.product:
            lane = self.lanes[self.axis(self.c.swept, COLUMN)]
            self.builder.add(Accumulate(running.accumulator, lane.poly(), values))
            return
        self._product(values, running.inputs[0].dtype, self.c.swept, running.accumulator)

    def _inside(self, values: Sequence[Expr]) -> None:
        """Products that the terms of a sweep are made of, for the rows and the step that are open."""
        rows = self.axis(self.c.rows, ROW)
        for r in direct_reductions(values):
            result = Part(r, 0)
            sides = operands(r)
            if sides is None or any(result in scope.values or r in scope.parts for scope in self.builder.scopes):
                continue
            (over,) = r.over
            cls = self.c.nest.bound[over]
            left, right = sided(sides, rows)
            matrices = (
                self._matrix(substitute_axes(left, {over: self.axis(cls, COLUMN).poly()})),
                self._matrix(substitute_axes(right, {over: self.axis(cls, ROW).poly()})),
            )
            self.builder.here.values[result] = self._product(matrices, left.dtype, cls, None)

    def _matrix(self, value: Expr) -> Operand:
        """An operand of the matrix unit; one that comes from memory as it is, is copied by hardware.

        Not where rows are few, unless it is a stream: other loads run ahead and wait for no barrier of all threads.
        """
        if isinstance(value, Load) and self.target.descriptors and (self.tiles.rows > FEW_ROWS or self._streams(value)):
            known = any(value in scope.values for scope in self.builder.scopes)
            block = None if known else self._described(value)
            if block is not None:
                scope = self.builder.scopes[self.builder.depth(value)]  # the same for all steps: once
                scope.statements.append(block)
                scope.values[value] = block.var
                return block.var
        return self.builder.emit(value)

    def _described(self, load: Load) -> LoadTile | None:
        """A load that hardware copies."""
        found = self._block(load.buffer, load.index)
        if found is None:
            return None
        self.streams = self.target.gives_up_copies and self.tiles.rows <= FEW_ROWS  # then nothing else is copied
        return LoadTile(Var(self.builder.name("block"), load.dtype), *found)

    def _streams(self, load: Load) -> bool:
        """Whether a matrix is read once, and would not stay in the chip's cache: better that others stay.

        That saves a constant time. Under a sweep with products inside, copies by hardware come a little slower than
        other loads, so that what is much larger than the cache loses more than it gains.
        """
        once = self.tiles.rows <= FEW_ROWS and load.axes >= set(self.c.grid)
        if not once or not larger_than_cache(load.buffer, self.target):
            return False
        all_bytes = sum(map(storage_bytes, self._read_as_is()))
        return not self.c.inner or all_bytes <= MOST_STREAMED * self.target.chip_cache_bytes

    def _read_as_is(self) -> set[Buffer]:
        """What products read as it is."""
        return {side.buffer for sides in self._products() for side in sides if isinstance(side, Load)}

    def _block(self, buffer: Buffer, index: tuple[Poly, ...]) -> tuple[Descriptor, Poly, Poly, bool, Poly] | None:
        """Elements as a block of their buffer seen as a matrix, if tiles are whole and rows start on 16 bytes."""
        offset = flat_offset(buffer, index)
        axes = [a for a in offset.axes if a in self.lanes]
        inner = next((a for a in axes if offset.coefficient(a) is Poly.ONE), None)
        if self.wide or inner is None or len(axes) != 2 or not self.whole >= set(axes) or offset.indirects():
            return None
        (outer,) = (a for a in axes if a is not inner)
        step = offset.coefficient(outer)
        pitch = step.constant if step is not None else None
        sizes = [p.constant for p in (*buffer.shape, *buffer.strides)]
        if pitch is None or pitch <= 0 or pitch * buffer.dtype.bytes % 16 or None in sizes:
            return None
        rest = offset - inner - pitch * outer
        row = Poly(tuple((m, k // pitch) for m, k in rest.terms if k % pitch == 0))
        column = rest - row * pitch
        reach = _largest(column)
        block = (self.lanes[outer].extent.constant or 1, self.lanes[inner].extent.constant or 1)
        if reach is None or reach + estimate(inner.extent) > pitch:
            return None
        if max(block) > MOST_DESCRIBED or block[1] * buffer.dtype.bytes < 16:
            return None
        key = (buffer, pitch, block)
        if key not in self.descriptors and len(self.descriptors) == MOST_MATRICES:
            return None
        if key not in self.descriptors:
            name = f"matrix{len(self.descriptors)}"
            self.descriptors[key] = Descriptor(name, buffer, _largest_offset(buffer) // pitch + 1, pitch, block)
        resolve = self.builder.resolve
        return (
            self.descriptors[key],
            resolve(row) + self.starts[outer],
            resolve(column) + self.starts[inner],
            next(dim for (_, dim), a in self.opened.items() if a is outer) == COLUMN,
            resolve(offset),
        )

    def _store(self, buffer: Buffer, index: tuple[Poly, ...], value: Operand) -> None:
        block = self._block(buffer, index) if self.tiles.resident else None
        if block is None:
            self.builder.store(buffer, index, value)
        else:
            self.builder.add(StoreTile(*block, value))

    def _product(self, matrices: tuple[object, ...], dtype: DType, over: Axis, accumulator: Accumulator | None) -> Var:
        var = Var(self.builder.name("product"), DType.I32 if dtype.is_integer else DType.F32)
        left, right = matrices
        precision = "tf32" if self.target.rounded_products else "ieee"
        summed = tuple(self.lanes[self.axis(over, dim)] for dim in (COLUMN, ROW))
        self.builder.add(Contract(var, left, right, dtype, precision, summed, accumulator))  # type: ignore[arg-type]
        return var


def _read(values: Iterable[Expr]) -> tuple[Buffer, ...]:
    return tuple(dict.fromkeys(e.buffer for e in postorder(list(values)) if isinstance(e, Load)))


def _largest_offset(buffer: Buffer) -> int:
    pairs = zip(buffer.shape, buffer.strides, strict=True)
    return sum(((size.constant or 0) - 1) * (stride.constant or 0) for size, stride in pairs)


def _largest(poly: Poly) -> int | None:
    """The largest value of a poly in axes with constant extents and positive steps."""
    total = 0
    for monomial, step in poly.terms:
        sizes = [a.extent.constant if isinstance(a, Axis) else None for a in monomial]
        if len(sizes) > 1 or step < 0 or None in sizes:
            return None
        total += step * (sizes[0] - 1 if sizes and sizes[0] is not None else 1)
    return total


def closer(
    axis: Axis, after: tuple[Poly, ...] = (), before: tuple[Poly, ...] = ()
) -> Callable[[tuple[Statement, ...]], Statement]:
    """What turns the statements of a step into a sweep over a class."""
    return lambda body: Loop(axis, axis.extent, "sweep", body, after=after, before=before)
