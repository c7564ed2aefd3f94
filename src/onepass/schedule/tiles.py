"""Leaves of a kernel whose programs are blocks of threads: tiles of several classes at once, in registers.

Held classes are open for the whole program, so a value is loaded once and reductions fold what is there. Streamed
classes run in strips: a sweep whose every step opens a tile of lanes, with one state per lane until the sweep is over.
Rows too long to be held, with states carried from row to row, are worked through in pieces. A sweep over pieces is not
a loop: each piece has states of its own, and registers have no index. Loaded values stay in registers until the row is
done if there is room; all other values are computed again in every sweep.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from ..analysis.access import estimate, numel
from ..analysis.nest import Nest
from ..analysis.scans import state_classes
from ..ir import kernel as ir
from ..ir.dtypes import DType
from ..ir.expr import Expr, Load, Pointwise, Reduce, Scan, postorder
from ..ir.poly import Axis, Division, Poly, is_far
from ..ir.program import Buffer
from ..ir.target import Target
from .builder import Builder, Carry, Finished, divides, looped
from .early_loads import early_loads, loads_before_steps
from .layout import Layout
from .leaf import Item, Leaf, Point, Then
from .online import carry
from .reuse import mark_reuse

STEPS_TOGETHER = 8  # of a scan that goes through registers step by step
PEELED = 8  # whole blocks from which a sweep's last block, which needs masks, is worth code of its own
PROCESSOR_THREADS = 2048  # that run at once on a processor
NARROW_ELEMENTS = 1 << 31  # offsets below this fit 32 bits


class Tiles(Leaf):
    """Tiles of several classes."""

    def __init__(self, nest: Nest, target: Target, layout: Layout, builder: Builder) -> None:
        super().__init__(nest, target, layout, builder)
        self.lane = Axis("lane", Poly.of(layout.lanes))  # every strip has the same
        self.turn = Axis("turn", Poly.of(layout.turns))  # the tiles of one step
        self.step = layout.lanes * layout.turns  # positions of a class that a strip has open at once
        self.ahead = self.turn * layout.lanes if layout.turns > 1 else Poly.ZERO
        self.striped = (self.lane,) if layout.lanes > 1 else ()
        self.held: dict[Axis, Axis] = {}  # held class -> its tile axis
        self.program_tiles: list[Axis] = []
        self.states: dict[Reduce, list[ir.Accumulator]] = {}  # of every piece, for each carried reduction
        self.loaded: list[dict[Expr, ir.Operand]] = [
            {} for _ in range(layout.pieces)
        ]  # of every piece of the row at hand

    # --- the program ---

    def open_program(self, items: list[Item], then: Then) -> None:
        layout = self.layout
        for axis in layout.order(layout.grid):  # neighbours in memory run next to each other
            self.number_programs(axis)
        for axis in layout.blocks:
            self.program_tiles.append(self._open_tile(axis, self.starts[axis]))
        for axis in layout.held:
            self.held[axis] = self._open_tile(axis, Poly.ZERO)
        if layout.turns > 1:
            self.builder.add(ir.Tile(self.turn, layout.turns, ()))
        then(items)

    def completed(self, kernel: ir.Kernel) -> ir.Kernel:
        axes = [*self.program_tiles, *self.held.values(), *self.striped]
        body = kernel.body
        if axes and (axes[-1].extent.constant or 0) >= 4:
            body = ir.rewritten(body, lambda s: _four_wide(s, axes[-1]))
        wide = any(needs_wide(b) for b in kernel.parameters) or has_far_values(body)
        body = loads_before_steps(early_loads(mark_reuse(body, self.target)), kernel.writes)
        schedule = self.layout.schedule
        return replace(kernel, body=body, warps=schedule.warps, stages=schedule.stages, wide=wide, raises=False)

    def first_of(self, item: Item) -> list[Axis]:
        region = item.store.region if item.store is not None else ()
        return [a for a, low, high in region if not low.terms and high is Poly.ONE and a in self.layout.grid]

    def _open_tile(self, axis: Axis, start: Poly) -> Axis:
        """Positions [start, start + lanes) of a class, at once, for the rest of the program."""
        lanes = self.layout.schedule.factor(axis).tile
        tile = Axis(self.builder.name("t"), Poly.of(lanes))
        self._bind_tile(axis, tile, start, (), divides(lanes, axis))
        return tile

    def _bind_tile(self, axis: Axis, tile: Axis, start: Poly, within: tuple[Poly, ...], whole: bool) -> None:
        """`within`: limits besides the end of the class, which itself is one unless no tile crosses it (`whole`)."""
        self.builder.open_tile(axis, tile, start, () if whole else (*within, axis.extent - start))

    # --- states ---

    def lanes(self, reduce: Reduce, swept: frozenset[Axis]) -> int:
        return self.layout.lanes if swept else 1

    def accumulator(self, reduce: Reduce, lanes: int) -> ir.Accumulator:
        striped = self.striped if lanes > 1 else ()
        held = (self.held[a] for a in self.held if a in reduce.axes)
        return self._states(reduce, lanes, (*self.program_tiles, *held, *striped), striped)

    def running_accumulator(self, reduce: Reduce, lanes: int) -> ir.Accumulator:
        """One state for the whole tile: carrying one to a new reference is cheaper than carrying every lane's.

        A step of several tiles has one for each lane: they part the cost, and no thread waits for another.
        """
        striped = self.striped if self.layout.turns > 1 else ()
        return self._states(reduce, lanes, (*self.program_tiles, *striped))

    def carrier(self, item: Item, rows: int) -> Item:
        assert item.reduce is not None
        if self.layout.pieces > 1:
            found = [self._states(item.reduce, 1, self.striped) for _ in range(self.layout.pieces)]
            self.states[item.reduce] = found
        else:
            held = tuple(self.held[a] for a in self.nest.carried(item.reduce))
            striped = self.striped if item.reduce.monoid != "welford" else ()
            found = [self._states(item.reduce, self.layout.lanes, (*held, *striped), striped)]
        accumulator, *_ = map(self.builder.start, found)
        return replace(item, accumulator=accumulator)

    def _states(
        self, reduce: Reduce | Scan, lanes: int, tiles: tuple[Axis, ...], folded: tuple[Axis, ...] = ()
    ) -> ir.Accumulator:
        name = self.builder.name(f"{reduce.monoid}_acc")
        return ir.Accumulator(name, reduce.monoid, reduce.part_dtypes, lanes, tiles=tiles, folded=folded)

    def carry(self, scan: Scan, alone: bool) -> Carry:
        if scan.over in self.held:
            return Carry(None, along=self.held[scan.over])
        held = (self.held[a] for a in self.held if a in scan.axes)
        states = self._states(scan, 1, (*self.program_tiles, *held))
        if alone:
            monoid, dtypes = self.serial(scan)
            states = replace(states, monoid=monoid, dtypes=dtypes)
        return Carry(self.builder.start(states), along=None if alone else self.lane)

    def fold(self, reduce: Reduce, values: tuple[ir.Operand, ...]) -> None:
        self._fold(reduce, values, tuple(self.held[self.nest.bound[a]] for a in reduce.over))

    def _fold(self, reduce: Reduce, values: tuple[ir.Operand, ...], over: tuple[Axis, ...]) -> tuple[ir.Var, ...]:
        """A reduction over open tiles, finished here."""
        parts = self.builder.fold(reduce, values, over)
        self.builder.here.parts[reduce] = Finished(ir.Accumulator(parts[0].name, reduce.monoid, reduce.part_dtypes, 1))
        return parts

    def phases(self, axis: Axis, items: list[Item]) -> int:
        """Steps of a scan that come one by one are several in a row: what they load is on its way together."""
        extent = axis.extent.constant or 0
        alone = any(s.over is axis for s in self.nest.scans) and bool(state_classes(self.nest))
        return STEPS_TOGETHER if alone and extent >= 2 * STEPS_TOGETHER else 1

    # --- strips ---

    @property
    def lane_position(self) -> Poly:
        return self.lane + self.ahead

    def sweep(self, items: list[Item], axis: Axis, point: Point) -> None:
        if self.layout.pieces > 1:
            self._sweep_pieces(items, axis, point)
            return
        for _ in self._strips(axis):
            point(items, self.lane_position)

    def _strips(self, axis: Axis) -> Iterator[None]:
        """The steps of a sweep over a class, inside its chunk where it has one."""
        step, limit, within = self.step, None, Poly.ZERO
        spans = self.spans(axis, step)
        if axis is self.nest.split:
            size, start = self.layout.chunk, self.chunk_start()
            spans = [(start, Poly.of(-(-size // step)), False)]
            if (axis.extent % size).terms and axis not in self.descending:
                limit = (axis.extent - start + step - 1) // step
            within = Poly.of(size) if size % step else Poly.ZERO
        for start, count, whole in spans[:: -1 if axis in self.descending else 1]:
            if count is Poly.ONE and limit is None and not within.terms:  # no loop: the one around it may run ahead
                with self.builder.stretch():
                    self._open_strip(axis, start, (), whole)
                    yield
                continue
            loop = Axis(self.builder.name("i"), count)
            number = count - 1 - loop if axis in self.descending else loop.poly()
            inside = (within - loop * step,) if within.terms else ()
            with self.builder.block(looped(loop, limit=limit)):
                self._open_strip(axis, start + number * step, inside, whole)
                yield

    def _open_strip(self, axis: Axis, start: Poly, within: tuple[Poly, ...] = (), whole: bool = False) -> None:
        whole = whole or (not within and divides(self.step, axis))
        self._bind_tile(axis, self.lane, start + self.ahead, tuple(p - self.ahead for p in within), whole)

    def spans(self, axis: Axis, size: int) -> list[tuple[Poly, Poly, bool]]:
        """Many blocks run without masks; the one that crosses the end comes after them."""
        extent = axis.extent.constant
        if extent is None or extent // size < PEELED or not extent % size:
            return super().spans(axis, size)
        full = extent // size
        return [(Poly.ZERO, Poly.of(full), True), (Poly.of(full * size), Poly.ONE, False)]

    # --- online sweeps ---

    @property
    def found_again_bytes(self) -> float:
        """The chip's cache is shared by the rows of all programs that run at once."""
        if self.layout.pieces > 1:
            return math.inf
        programs = math.prod(estimate(g.extent) for g in self.builder.grid)
        threads = self.layout.schedule.warps * self.target.warp
        at_once = min(max(1, programs), self.target.processors * max(1, PROCESSOR_THREADS // threads))
        return self.target.chip_cache_bytes // (2 * at_once)

    @property
    def online_block(self) -> int:
        return self.step

    def online_step(self, items: list[Item], axis: Axis, start: Poly, whole: bool, point: Point) -> None:
        if axis not in self.builder.here.bindings:
            self._open_strip(axis, start, whole=whole)
        point(items, self.lane_position)

    def merge_online(self, leader: Item, followers: list[tuple[Item, Expr]]) -> None:
        if self.layout.turns == 1:
            return
        assert leader.reduce is not None
        self.builder.add(ir.Tile(self.lane, self.layout.lanes, ()))
        own = self._lane_state(leader)
        (top,) = self._fold(leader.reduce, (own,), self.striped)
        for item, h in followers:
            assert item.reduce is not None and item.accumulator is not None
            self.builder.add(ir.Rescale(item.accumulator, carry(self.builder, leader.reduce, h, top, own)))
            self._fold(item.reduce, (self._lane_state(item),), self.striped)

    def _lane_state(self, item: Item) -> ir.Var:
        """The state of every lane."""
        assert item.accumulator is not None
        own = ir.Var(self.builder.name("own"), item.accumulator.dtypes[0])
        self.builder.add(ir.Finish(item.accumulator, Poly.ZERO, (own,)))
        return own

    # --- rows in pieces ---

    def _sweep_pieces(self, items: list[Item], axis: Axis, point: Point) -> None:
        extent = axis.extent.constant
        assert extent is not None and self.layout.pieces * self.step >= extent, "the pieces do not make up a row"
        for k, loaded in enumerate(self.loaded):
            with self.builder.stretch() as scope:
                start = k * self.step
                self._open_strip(axis, Poly.of(start), whole=start + self.step <= extent)
                scope.parts.update({r: Finished(found[k]) for r, found in self.states.items()})
                self._reopen(loaded, items)
                point([self._of_piece(i, k) for i in items], self.lane_position)
                if self.layout.kept:  # what every row shares is near anyway
                    split = self.nest.split
                    loaded |= {e: v for e, v in scope.values.items() if isinstance(e, Load) and split in e.axes}

    def _of_piece(self, item: Item, k: int) -> Item:
        found = self.states.get(item.reduce) if item.reduce is not None else None
        return replace(item, accumulator=found[k]) if found is not None else item

    def _reopen(self, loaded: dict[Expr, ir.Operand], items: list[Item]) -> None:
        """Later sweeps find the loads of the first. bfloat16 is widened by its bits then: a compiler that knew the
        number from before would keep it, wide, instead."""
        values = self.builder.here.values
        values.update(loaded)
        for e in postorder([v for i in items for v in i.values]):
            if not isinstance(e, Pointwise) or e.op not in ("cast", "widen") or e.args[0] not in loaded:
                continue
            if e.dtype is DType.F32 and e.args[0].dtype is DType.BF16:
                wide = ir.Var(self.builder.name("again"), DType.F32)
                self.builder.add(ir.Let(wide, "reopen", (loaded[e.args[0]],)))
                values[e] = wide


def needs_wide(buffer: Buffer) -> bool:
    if any(p.constant is None for p in (*buffer.shape, *buffer.strides)):
        return True
    last = sum((s.constant or 0) * (d.constant or 0) for s, d in zip(buffer.strides, buffer.shape, strict=True))
    return max(last, numel(buffer.shape)) >= NARROW_ELEMENTS


def has_far_values(body: tuple[ir.Statement, ...]) -> bool:
    """Whether positions are computed with, drawn for or divided that need more than 32 bits."""
    values: list[Poly] = []
    for s in ir.walk(body):
        match s:
            case ir.Let():
                values += [a for a in s.args if isinstance(a, Poly)]
            case ir.RandomWord():
                values.append(s.index)
            case ir.LoadElement() | ir.StoreElement():  # of a buffer that is not far itself
                values += [a.numerator for a in s.offset.inner_atoms() if isinstance(a, Division)]
    values += [a.numerator for value in values for a in value.inner_atoms() if isinstance(a, Division)]
    return any(map(is_far, values))


def _four_wide(s: ir.Statement, last: Axis) -> ir.Statement:
    """A draw that runs along the last tile axis from a multiple of four makes four words a call."""
    if not isinstance(s, ir.RandomWord) or s.index.coefficient(last) is not Poly.ONE:
        return s
    return s if ((s.index - last) % 4).terms else replace(s, along=last)
