"""A contraction becomes one kernel: matrix products, and the reductions of their results.

A program owns a tile of rows and columns. Reductions of the result sweep one class, and the products that their terms
are made of are computed inside the sweep. Where the columns of products are reduced, they are swept or held; a product
whose own sum is long is then a loop inside. Last, a tile may be folded to states, which another kernel merges. The
builder places values that do not vary along the swept class before the sweep.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ..analysis.access import estimate, numel, power_above, storage_bytes
from ..analysis.bounds import assuming, find_bound, find_ranges, needed
from ..analysis.contraction import Contraction
from ..analysis.formulas import ALWAYS, Every, Formula, Positive, along, some
from ..analysis.inline import loads_of, reductions
from ..analysis.nest import NestStore, direct_reductions
from ..analysis.operands import operands, sided
from ..analysis.passes import Pass, passes
from ..analysis.rows import row_reductions
from ..analysis.visits import RowTile, expected, range_of, spelled, usually_grows
from ..ir import kernel as ir
from ..ir.dtypes import DType
from ..ir.expr import Expr, Index, Load, Part, Reduce, const, pointwise, substitute_axes
from ..ir.monoids import lowest
from ..ir.poly import Axis, Poly, Symbol, product
from ..ir.program import Origin
from ..ir.target import Target
from .builder import Finished
from .matrix_tiles import COLUMN, ROW, MatrixTiles
from .online import carry
from .product_schedules import FEW_ROWS, GROUPED, Tiles, matrices, schedule_of
from .questions import Questions
from .reuse import larger_than_cache
from .sweep_spans import WHOLE, Span, Visited, spans
from .tiles import has_far_values, needs_wide

LEAST_STEPS = 8  # of a sweep for which it is asked what data leaves of it
SEEN_BY_THREAD = 16  # positions at a time of that question
ROUNDS, PROGRAMS = 2, 2  # of programs on a processor, for which kernels before this one answer it
MOST_STREAMED = 4  # times the chip's cache (see `_streams`): on one H200, 134 MB gain 4 % and 268 MB lose as much


@dataclass(frozen=True, slots=True)
class _Running:
    """A reduction over the swept class, its state, and its inputs: of a product its matrices.

    `h`: of the maximum that the reduction follows, scales it.
    """

    reduce: Reduce
    accumulator: ir.Accumulator
    inputs: tuple[Expr, ...]
    product: bool
    h: Expr | None


class ProductScheduler(MatrixTiles):
    """Builds one kernel from one contraction."""

    def __init__(
        self,
        contraction: Contraction,
        target: Target,
        tiles: Tiles,
        chunk: Axis | None = None,
        steps: Poly = Poly.ZERO,
        company: ProductScheduler | None = None,
        asks_tiles: bool = True,
        stores: Sequence[NestStore] | None = None,
    ) -> None:
        """`chunk`: which part of the swept class a program has, of so many steps. `stores`: in the place of the nest's.

        `asks_tiles`: kernels before this one may compute conditions for all rows and columns.
        """
        super().__init__(company)
        self.c, self.target, self.tiles = contraction, target, tiles
        self.depth = tiles.depth  # of a product's own sum; 0: all of it
        self.chunk, self.steps = chunk, steps
        self.passing = list(self.c.passing)  # stores inside a sweep that are not done
        at_end = [s for s in self.c.nest.stores if s not in self.passing]
        self.stores = list(stores) if stores is not None else at_end
        self.numbers = {  # rows and columns -> the number of the tile
            cls: Axis(f"{cls.name}t", (cls.extent + lanes - 1) // lanes)
            for cls, lanes in ((self.c.rows, tiles.rows), (self.c.columns, tiles.columns))
        }
        nest_stores = self.c.nest.stores
        touched = (*loads_of(s.value for s in nest_stores), *(s.buffer for s in nest_stores))
        self.wide = any(map(needs_wide, touched))
        self.streams = False  # blocks that hardware copies are read once
        self.asks_tiles = asks_tiles
        numbered = (*self.c.grid, self.numbers[self.c.rows])
        self.questions = Questions(self.builder.name("visits"), numbered, nest_stores[0].buffer.device)

    def build(self, name: str, origins: tuple[Origin, ...]) -> ir.Kernel:
        """The whole kernel."""
        self._open_program()
        self._reduce()
        results = [self.builder.emit(substitute_axes(s.value, self.here)) for s in self.stores]
        for s, result in zip(self.stores, results, strict=True):
            self._store(s, self.here, result)
        schedule = schedule_of(self.tiles, self.c, estimate(self.chunk.extent) if self.chunk is not None else 0)
        work = product(a.extent for a in self.c.nest.classes)
        kernel = self.builder.kernel(self.c.nest, (*self.stores, *self.c.passing), name, origins, schedule, work)
        return replace(
            kernel,
            reads=(*kernel.reads, *self.questions.answers),
            warps=self.tiles.warps,
            stages=self.tiles.stages,
            wide=self.wide or has_far_values(kernel.body),
            raises=False,
            descriptors=tuple(self.descriptors.values()),
            resident=self.target.processors if self.tiles.resident else 0,
            flat=self.tiles.resident and matrices(self.c)[1] == 1,
            streams=self.streams,
        )

    def programs(self) -> int:
        """How many programs there are without a split."""
        c, t = self.c, self.tiles
        across = 1 if c.inner else -(-estimate(c.columns.extent) // t.columns)
        return numel(c.grid) * -(-estimate(c.rows.extent) // t.rows) * across

    # --- axes ---

    @property
    def here(self) -> dict[Axis, Poly]:
        """Rows, and columns that are not swept, as the axes of tiles."""
        c = self.c
        rows = {c.rows: self.axis(c.rows, ROW).poly()}
        return rows | ({c.columns: self.axis(c.columns, COLUMN).poly()} if c.held or not c.reduces_columns else {})

    def _open_program(self) -> None:
        c, t, here = self.c, self.tiles, self.builder.here
        for cls in (*c.grid, *((self.chunk,) if self.chunk is not None else ())):
            here.bindings[cls] = self.builder.grid_axis(cls.extent).poly()
        down, across = (self.numbers[cls].extent for cls in (c.rows, c.columns))
        if c.inner or (c.columns.extent.constant is not None and c.columns.extent.constant <= t.columns):
            row, column = self.builder.grid_axis(down).poly(), Poly.ZERO
            if self._longest_last():
                row = down - 1 - row
        else:
            row, column = self._grouped(down, across)
        here.bindings |= {self.numbers[c.rows]: row, self.numbers[c.columns]: column}
        self.first_row = row * t.rows
        self.open(c.rows, ROW, t.rows, self.first_row)
        if c.columns in self.here:
            self.open(c.columns, COLUMN, t.columns, column * t.columns)
        for cls in c.inner if not self.depth else ():
            for dim in (ROW, COLUMN):
                if (cls, dim) not in self.opened:
                    self.open(cls, dim, max(16, power_above(cls.extent.constant)), Poly.ZERO)

    def _longest_last(self) -> bool:
        """Whether later rows have more to sweep: they should start first."""
        rows = self.c.rows
        for r in self.c.nest.reductions:
            if len(r.over) == 1 and rows in r.axes:
                counts = needed(r.inputs[0], r.monoid, r.monoid == "max")
                ranges = find_ranges(counts, rows, r.over[0], Poly.ZERO, 1)
                if usually_grows(counts, rows, r.over[0]) or any(
                    b.upper and b.slope > 0 for one in ranges for b in one
                ):
                    return True
        return False

    def _grouped(self, down: Poly, across: Poly) -> tuple[Poly, Poly]:
        """Tiles in an order that keeps both matrices in cache: a few rows of tiles, column by column."""
        count = down.constant
        group = next((g for g in (GROUPED, 4, 2) if count is not None and count % g == 0), 1)
        if group == 1:
            row = self.builder.grid_axis(down)
            return row.poly(), self.builder.grid_axis(across).poly()
        outer, column, within = (self.builder.grid_axis(e) for e in (down // group, across, Poly.of(group)))
        return outer * group + within, column.poly()

    @contextmanager
    def _loop(
        self, stem: str, cls: Axis, step: int, dims: Iterable[int] = (ROW, COLUMN), span: Span = WHOLE
    ) -> Iterator[None]:
        """A loop over a class, of which a step is open as rows, as columns or as both."""
        loop = Axis(self.builder.name(stem), (cls.extent + step - 1) // step)
        with self.builder.block(
            lambda body: ir.Loop(
                loop,
                loop.extent,
                "sweep",
                body,
                after=span.after,
                before=span.before,
                seldom=span.seldom,
                part=span.part,
                beside=span.beside,
            )
        ):
            for dim in dims:
                self.open(cls, dim, step, loop * step)
            yield

    # --- reductions of the result ---

    def _reduce(self) -> None:
        """Every reduction of the result.

        Reductions over a class of the products come first if others depend on them, else last: matrices are copied for
        the products first.
        """
        c = self.c
        early = set(reductions(v for r in row_reductions(c) for v in r.inputs)) if c.beside else set()
        for r in c.beside:
            if r in early:
                self._fold_inner(self.oriented(r))
        if c.held:
            self._fold_columns()
        else:
            for one in passes(c):
                self._sweep(one)
        for r in c.beside:
            if r not in early:
                self._fold_inner(self.oriented(r))
        for r, values in c.entering.items():
            self._fold_tile(r, values)

    def oriented(self, reduce: Reduce) -> Reduce:
        """A reduction of the result over the rows and columns that are open."""
        part = substitute_axes(Part(reduce, 0), self.here)
        assert isinstance(part, Part) and isinstance(part.source, Reduce)
        return part.source

    def _fold_columns(self) -> None:
        """Every reduction of columns that are all here; products first, for all of them."""
        column = self.axis(self.c.columns, COLUMN)
        found = [self.oriented(r) for r in row_reductions(self.c)]
        inputs = {r: tuple(substitute_axes(v, {r.over[0]: column.poly()}) for v in r.inputs) for r in found}
        results = [substitute_axes(s.value, self.here) for s in self.c.nest.stores]
        self._inside([*(v for values in inputs.values() for v in values), *results])
        for r, values in inputs.items():
            self._fold(r, values, self.lanes[column])

    def _fold_inner(self, reduce: Reduce) -> None:
        """A reduction of rows over a class that products sum over."""
        (over,) = reduce.over
        cls = self.c.nest.bound[over]
        inputs = tuple(substitute_axes(v, {over: self.axis(cls, COLUMN).poly()}) for v in reduce.inputs)
        if not self.depth:
            self._fold(reduce, inputs, self.lane(cls, COLUMN))
            return
        state = self._state(f"{reduce.monoid}_acc", reduce, (self.c.rows,))
        with self._loop("k", cls, self.depth, (COLUMN,)):
            values = tuple(self.builder.emit(v) for v in inputs)
            self.builder.add(ir.Accumulate(state, self.lane(cls, COLUMN).poly(), values))
        self.builder.here.parts[reduce] = Finished(state)

    def _fold_tile(self, reduce: Reduce, values: tuple[Expr, ...]) -> None:
        """The state that a tile leaves; a sum that follows a maximum takes that of its tile."""
        c, builder = self.c, self.builder
        follows = c.carried.get(reduce)
        if follows is not None and follows.stand_in is not None:
            builder.here.values[follows.stand_in] = self._safe(builder.emit(Part(self.oriented(follows.top), 0)))
        sides = [(cls, dim) for cls, dim in ((c.columns, COLUMN), (c.rows, ROW)) if cls in c.sweeps(reduce)]
        inputs = [substitute_axes(v, self.here) for v in values]
        self._fold(self.oriented(reduce), inputs, *(self.lane(cls, dim) for cls, dim in sides))

    def _fold(self, reduce: Reduce, values: Iterable[Expr], *over: Axis) -> None:
        self.builder.fold(reduce, tuple(self.builder.emit(v) for v in values), over)

    def _state(self, name: str, reduce: Reduce, classes: tuple[Axis, ...]) -> ir.Accumulator:
        """A state for rows, or for rows and columns, from nothing."""
        axes = [self.axis(cls, dim) for dim, cls in enumerate(classes)]
        tiles = tuple(self.lanes[a] for a in axes if a in reduce.axes)
        state = ir.Accumulator(self.builder.name(name), reduce.monoid, reduce.part_dtypes, 1, tiles=tiles)
        return self.builder.start(state)

    # --- sweeps ---

    def _sweep(self, one: Pass) -> None:
        """One pass over the swept class for reductions of one level, and for the sums carried beside it."""
        first = [self._started(r) for r in one.level]
        second = [self._started(r, h) for r, h in one.carried.items()]
        reference = self.builder.reference(first[0].accumulator) if second else None
        counts = self._counts(one, (*first, *second))
        ranges = find_ranges(counts, *self._sides_of_terms(), self.first_row, self.tiles.rows)
        visited = self._visited(counts, len(ranges) == 1)
        for span in spans(ranges, self.tiles.step, self.builder.resolve, visited):
            self._step(first, second, reference, span)
        for running in (*first, *second):
            self.builder.here.parts[running.reduce] = Finished(running.accumulator)

    def _started(self, reduce: Reduce, h: Expr | None = None) -> _Running:
        """A reduction's state for the whole program, and its inputs, over the swept class."""
        reduce, c = self.oriented(reduce), self.c
        is_product = operands(reduce) is not None
        if is_product:
            inputs: tuple[Expr, ...] = self._sides(reduce)
        else:
            here = {reduce.over[0]: self.axis(c.swept, COLUMN).poly()}
            inputs = tuple(substitute_axes(v, here) for v in reduce.inputs)
        state = self._state(f"{reduce.monoid}_acc", reduce, (c.rows, c.columns) if is_product else (c.rows,))
        return _Running(reduce, state, inputs, is_product, None if h is None else substitute_axes(h, self.here))

    def _is_one_step(self) -> bool:
        """Whether a sweep is over after its first step: there is nothing to carry, and nothing to skip."""
        extent = self.c.swept.extent.constant
        return extent is not None and extent <= self.tiles.step

    def _counts(self, one: Pass, running: tuple[_Running, ...]) -> Formula:
        """Where some term is not its reduction's identity: -inf of a maximum, zero of sums."""
        if self._is_one_step() or self.c.passing or not one.skips(self.c):
            return ALWAYS
        unled = {self.oriented(r) for r in one.sums}
        found = some(needed(r.inputs[0], r.reduce.monoid, r.reduce not in unled) for r in running)
        return along(found, self.axis(self.c.swept, COLUMN))

    def _sides_of_terms(self) -> tuple[Axis, Axis]:
        return self.axis(self.c.rows, ROW), self.axis(self.c.swept, COLUMN)

    def _visited(self, counts: Formula, split: bool) -> Visited:
        """What data leaves of a sweep to this tile, found in short sweeps.

        `split`: and, within that, a range of columns whose conditions hold for every row.
        """
        rows, swept = self._sides_of_terms()
        if estimate(swept.extent) < LEAST_STEPS * self.tiles.step:
            return Visited()
        tile = RowTile(rows, swept, Axis("visited", rows.extent), all_rows=self._all_rows)
        some_row, every_row = tile.some_row(counts), tile.every_row(counts) if split else None
        exact = some_row is not None and (every_row is not None or not split)
        known = [range_of(t, swept) for t in (some_row, every_row) if t is not None]
        if (None in known or not exact) and (asked := self._asked(counts, split, exact)):
            return self._visited_between(counts, asked)
        if some_row is None:
            return Visited()
        for r in reductions([some_row, *([every_row] if every_row is not None else [])]):
            self._fold(r, [substitute_axes(v, {r.over[0]: rows.poly()}) for v in r.inputs], self.lane(self.c.rows, ROW))
        if None not in known:
            return self._visited_between(counts, [end for ends in known if ends is not None for end in ends])
        cls = Axis(f"{self.c.swept.name}v", swept.extent)
        here = {swept: self.axis(cls, COLUMN).poly()}
        place, end = Index(here[swept]), Index(swept.extent)
        left = substitute_axes(some_row, here)
        behind = pointwise("where", left, Index(here[swept] + 1), const(0, DType.I64))
        sought = [("min", pointwise("where", left, place, end)), ("max", behind)]
        if every_row is None:
            return self._visited_between(counts, self._extremes(cls, *sought))
        holds = substitute_axes(every_row, here)
        ends = self._extremes(cls, *sought, ("min", pointwise("where", holds, place, end)))
        early = pointwise("lt", place, ends[-1])
        ends += self._extremes(cls, ("min", pointwise("where", pointwise("bitor", holds, early), end, place)))
        return self._visited_between(counts, ends)

    def _visited_between(self, counts: Formula, found: list[Expr]) -> Visited:
        """The columns between the first and the last that count; of four ends, all that count between the last two."""
        part, (first, last, *settled) = expected(counts, *self._sides_of_terms()), map(self._position, found)
        if not settled:
            return Visited((first,), (last,), part=part)
        holding = counts.parts if isinstance(counts, Every) else (counts,)
        return Visited((first,), (last,), holding, (settled[0],), (settled[1],), part)

    def _asked(self, counts: Formula, split: bool, exact: bool) -> list[Expr]:
        """The same ends, found by kernels before this one; none where they are found in this kernel, or not at all.

        Programs that follow others on their processor read what is known. A condition without an `exact` test of
        columns is computed once for all rows and columns.
        """
        (rows, swept), outer = self._sides_of_terms(), {*self.questions.outer}
        number, lanes = self.numbers[self.c.rows], self.tiles.rows
        tile = RowTile(rows, swept, Axis("visited", Poly.of(lanes)), number * lanes, self._all_rows)
        if not exact and self.asks_tiles:
            condition = spelled(counts, every=False)
            if any(loads_of([condition])) and condition.axes <= {*outer, rows, swept}:
                return self.questions.ask_tiles(tile, lanes, self.tiles.step, counts, split)
        some_row, every_row = tile.some_row(counts), tile.every_row(counts) if split else None
        follow = self.programs() >= ROUNDS * PROGRAMS * self.target.processors
        if some_row is None or not follow or not some_row.axes <= {*outer, swept}:
            return []
        return self.questions.ask(tile, lanes, some_row, every_row)

    def _all_rows(self, condition: Positive) -> Expr | None:
        """What a column must pass for an inequality of positions to hold for every row of this tile."""
        rows, swept = self._sides_of_terms()
        first = self.numbers[self.c.rows] * self.tiles.rows
        bound = find_bound(condition.difference, rows, swept, first, self.tiles.rows)
        return (
            None if bound is None else pointwise("lt" if bound.upper else "ge", Index(swept.poly()), Index(bound.tight))
        )

    def _extremes(self, cls: Axis, *sought: tuple[str, Expr]) -> list[Expr]:
        """The least or the largest of some values along a class."""
        ends = [Reduce(monoid, (value,), (self.axis(cls, COLUMN),)) for monoid, value in sought]
        states = [self._state(f"{r.monoid}_visited", r, ()) for r in ends]
        lanes = min(SEEN_BY_THREAD * self.target.warp * self.tiles.warps, power_above(cls.extent.constant))
        span = WHOLE
        if self.chunk is not None:  # of a chunk only its own columns matter
            at = self.builder.resolve(self.chunk * self.steps) * self.tiles.step
            span = Span((), (at // lanes,), ((at + self.steps * self.tiles.step + lanes - 1) // lanes,))
        with self._loop("v", cls, lanes, (COLUMN,), span):
            for r, state in zip(ends, states, strict=True):
                self.builder.add(ir.Accumulate(state, self.lane(cls, COLUMN).poly(), (self.builder.emit(r.inputs[0]),)))
        self.builder.here.parts |= {r: Finished(state) for r, state in zip(ends, states, strict=True)}
        return [Part(r, 0) for r in ends]

    def _position(self, value: Expr) -> Poly:
        """A position that the kernel has computed, as a bound of loops."""
        var = ir.Var(self.builder.name("end"), DType.I32)
        found = self.builder.emit(value)
        if isinstance(found, Poly):
            return found
        op = "single" if reductions([value]) else "cast"  # of a tile of one, or of a number
        self.builder.add(ir.Let(var, op, (found,)))
        return Symbol(var.name, 0).poly()

    def _step(self, first: list[_Running], second: list[_Running], reference: ir.Local | None, span: Span) -> None:
        if self.chunk is not None:
            at = self.builder.resolve(self.chunk * self.steps)
            span = replace(span, after=(*span.after, at), before=(*span.before, at + self.steps))
        with self._loop("i", self.c.swept, self.tiles.step, span=span):
            for running in first:
                self._enter(running, span.holding)
            if reference is not None:
                moved = self._carry(first[0], second, reference)
                # Products last: what the matrix unit adds to is touched right before it starts.
                for running in sorted(second, key=lambda r: r.product):
                    self._enter(running, span.holding, moved[running.h])
            self._pass_by()

    def _pass_by(self) -> None:
        """Columns that are stored leave with the first sweep that has computed them."""
        here = self.here | {self.c.columns: self.axis(self.c.columns, COLUMN).poly()}
        while self.passing:
            s = self.passing.pop(0)
            value = substitute_axes(s.value, here)
            self._inside([value])
            self._store(s, here, self.builder.emit(value))

    def _carry(self, leader: _Running, following: list[_Running], reference: ir.Local) -> dict[Expr | None, ir.Var]:
        """The factors, by h, that move sums so far to the maximum as it is now."""
        builder, top = self.builder, Part(leader.reduce, 0)
        builder.here.parts[leader.reduce] = Finished(leader.accumulator)
        new = builder.emit(top)
        old = builder.read(reference, "old")
        scales = dict.fromkeys(r.h for r in following if r.h is not None)
        moved: dict[Expr | None, ir.Var] = {h: carry(builder, leader.reduce, h, new, old) for h in scales}
        builder.add(ir.WriteLocal(reference, Poly.ZERO, new))
        builder.here.values[top] = self._safe(new)
        return moved

    def _safe(self, maximum: ir.Operand) -> ir.Var:
        """A maximum to subtract: zero for rows without any term, so that -inf meets no -inf."""
        assert isinstance(maximum, ir.Var)
        builder, dtype = self.builder, maximum.dtype
        none, safe = ir.Var(builder.name("none"), DType.BOOL), ir.Var(builder.name("safe"), dtype)
        builder.add(ir.Let(none, "eq", (maximum, const(lowest(dtype), dtype))))
        builder.add(ir.Let(safe, "where", (none, const(0.0, dtype), maximum)))
        return safe

    def _enter(self, running: _Running, holding: tuple[Formula, ...], moved: ir.Var | None = None) -> None:
        """One step of the sweep enters a state, where conditions hold; the state is `moved` before."""
        done = [r for scope in self.builder.scopes for r in scope.parts]
        assumed = [(v, assuming(v, holding, done)) for v in running.inputs]
        inputs = tuple(v if running.product and less.axes != v.axes else less for v, less in assumed)  # whole matrices
        self._inside(inputs)
        values = tuple(self._matrix(v) if running.product else self.builder.emit(v) for v in inputs)
        if moved is not None and not self._is_one_step():
            self.builder.add(ir.Rescale(running.accumulator, moved, guarded=False))
        if running.product:
            self._contract(values, running.inputs[0].dtype, self.c.swept, running.accumulator)
        else:
            lane = self.lane(self.c.swept, COLUMN)
            self.builder.add(ir.Accumulate(running.accumulator, lane.poly(), values))

    # --- products ---

    def _inside(self, values: Sequence[Expr]) -> None:
        """Products of the rows and columns that are open; a long sum is a loop for all that share it."""
        wanted: dict[Axis, list[Reduce]] = {}
        for r in direct_reductions(values):
            known = any(Part(r, 0) in scope.values or r in scope.parts for scope in self.builder.scopes)
            if operands(r) is not None and not known:
                wanted.setdefault(self.c.nest.bound[r.over[0]], []).append(r)
        for cls, products in wanted.items():
            if self.depth:
                self._sum(cls, products)
            else:
                self.builder.here.values |= {Part(r, 0): self._multiplied(r, cls, None) for r in products}

    def _sum(self, cls: Axis, products: list[Reduce]) -> None:
        """Products over one class, step by step."""
        states = [self._state("product_acc", r, (self.c.rows, self.c.columns)) for r in products]
        with self._loop("k", cls, self.depth):
            for r, state in zip(products, states, strict=True):
                self._multiplied(r, cls, state)
        for r, state in zip(products, states, strict=True):
            self.builder.here.parts[r] = Finished(state)
            self.builder.emit(Part(r, 0))

    def _sides(self, reduce: Reduce) -> tuple[Expr, Expr]:
        """The matrices of a product, the one with the rows first, over the class that it sums over."""
        (over,), sides = reduce.over, operands(reduce)
        assert sides is not None
        cls = self.c.nest.bound[over]
        left, right = sided(sides, self.axis(self.c.rows, ROW))
        return (
            substitute_axes(left, {over: self.axis(cls, COLUMN).poly()}),
            substitute_axes(right, {over: self.axis(cls, ROW).poly()}),
        )

    def _multiplied(self, reduce: Reduce, cls: Axis, accumulator: ir.Accumulator | None) -> ir.Var:
        sides = self._sides(reduce)
        return self._contract(tuple(map(self._matrix, sides)), sides[0].dtype, cls, accumulator)

    def _contract(
        self, matrices: tuple[ir.Operand, ...], dtype: DType, over: Axis, accumulator: ir.Accumulator | None
    ) -> ir.Var:
        var = ir.Var(self.builder.name("product"), DType.I32 if dtype.is_integer else DType.F32)
        left, right = matrices
        precision = "tf32" if self.target.rounded_products else "ieee"
        summed = tuple(self.lane(over, dim) for dim in (COLUMN, ROW))
        self.builder.add(ir.Contract(var, left, right, dtype, precision, summed, accumulator))  # type: ignore[arg-type]
        return var

    def _matrix(self, value: Expr) -> ir.Operand:
        """An operand of the matrix unit; one that comes from memory as it is, is copied by hardware.

        Not where rows are few, unless it is a stream: other loads run ahead and wait for no barrier of all threads.
        """
        if isinstance(value, Load) and self.target.descriptors and (self.tiles.rows > FEW_ROWS or self._streams(value)):
            known = any(value in scope.values for scope in self.builder.scopes)
            found = None if known else self.block(value.buffer, value.index)
            if found is not None:
                # Rows are few where streams are: then nothing else is copied.
                self.streams = self.target.gives_up_copies and self.tiles.rows <= FEW_ROWS
                block = ir.LoadTile(ir.Var(self.builder.name("block"), value.dtype), *found)
                scope = self.builder.scopes[self.builder.depth(value)]  # the same for all steps: once
                scope.statements.append(block)
                scope.values[value] = block.var
                return block.var
        return self.builder.emit(value)

    def _streams(self, load: Load) -> bool:
        """Whether a matrix is read once, and would not stay in the chip's cache: better that others stay.

        That saves a constant time. Under a sweep with products inside, copies by hardware come a little slower than
        other loads, so that a matrix much larger than the cache loses more than it gains.
        """
        once = self.tiles.rows <= FEW_ROWS and load.axes >= set(self.c.grid)
        if not once or not larger_than_cache(load.buffer, self.target):
            return False
        products = map(operands, self.c.nest.reductions)
        as_is = {side.buffer for sides in products for side in sides or () if isinstance(side, Load)}
        all_bytes = sum(map(storage_bytes, as_is))
        return not self.c.inner or all_bytes <= MOST_STREAMED * self.target.chip_cache_bytes

    def _store(self, store: NestStore, here: dict[Axis, Poly], value: ir.Operand) -> None:
        index = tuple(p.substitute(here) for p in store.index)
        block = self.block(store.buffer, index) if self.tiles.resident else None
        if block is None:
            self.builder.store(store.buffer, index, value)
        else:
            self.builder.add(ir.StoreTile(*block, value))
