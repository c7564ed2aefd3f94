"""A nest becomes a kernel of tiles: for targets whose programs hold tiles of several axes in registers.

The levels and scopes are those of `NestScheduler`; what differs is at the leaves. Held axes are open for the
whole program, so a value is loaded once and reductions fold what is there. Streamed axes run in strips: a sweep
whose every step opens a tile of lanes, with one state per lane until the sweep is over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from ..analysis.access import estimate, numel, power_above
from ..analysis.nest import direct_reductions
from ..ir.expr import Expr, Part, Reduce
from ..ir.kernel import (
    Accumulate,
    Accumulator,
    Finish,
    Fold,
    GridAxis,
    Kernel,
    Let,
    Loop,
    Operand,
    RandomWord,
    Rescale,
    Start,
    Statement,
    Tile,
    Var,
    When,
    walk,
)
from ..ir.poly import Axis, Poly, is_far, nonnegative
from ..ir.program import Buffer, Origin
from .adjust import adjusted
from .builder import Finished, Kept
from .early_loads import early_loads
from .online import carry
from .reuse import mark_reuse
from .sweeps import Item, NestScheduler, when
from .tile_layout import TileLayout, choose_tiles, scheduled_tiles

PEELED = 8  # whole blocks from which a sweep's last block, which needs masks, is worth code of its own
PROCESSOR_THREADS = 2048  # that run at once on a processor
NARROW_ELEMENTS = 1 << 31  # offsets below this fit 32 bits


class TileScheduler(NestScheduler):
    """Builds one tile kernel from one nest."""

    layout: TileLayout  # type: ignore[assignment]
    in_pieces = False  # rows are worked through in pieces

    def _choose_layout(self) -> None:
        if self.schedule is None:
            ruled = choose_tiles(self.nest, self.target, self.chunks)
            self.layout = adjusted(ruled, self.nest, self.target, self.chunks, self.adjustment)
        else:
            self.layout = scheduled_tiles(self.nest, self.schedule, self.in_pieces)
        self.lane = Axis("lane", Poly.of(self.layout.lanes))  # every strip has the same
        self.turn = Axis("turn", Poly.of(self.layout.turns))  # the tiles of one step
        self.held: dict[Axis, Axis] = {}  # held class -> its tile axis
        self.program_tiles: list[Axis] = []

    def build(self, name: str, origins: tuple[Origin, ...]) -> Kernel:
        kernel = super().build(name, origins)
        wide = any(needs_wide(b) for b in kernel.parameters) or has_far_values(kernel.body)
        body = early_loads(mark_reuse(kernel.body, self.target))
        return replace(kernel, body=body, warps=self.layout.warps, stages=self.layout.stages, wide=wide, raises=False)

    def _finished_body(self) -> tuple[Statement, ...]:
        axes = [*self.program_tiles, *self.held.values(), *([self.lane] if self.layout.lanes > 1 else [])]
        body = tuple(self.builder.scopes[0].statements)
        return _four_wide(body, axes[-1]) if axes and (axes[-1].extent.constant or 0) >= 4 else body

    # --- the program ---

    def _open_grid(self, axes: Sequence[Axis], items: list[Item]) -> None:
        for axis in self.layout.order(axes):  # neighbours in memory run next to each other
            block = self.layout.blocks.get(axis)
            position = Axis(f"g{len(self.grid)}", (axis.extent + (block or 1) - 1) // (block or 1))
            self.grid.append(GridAxis(position, position.extent))
            if block is None:
                self.builder.here.bindings[axis] = position.poly()
            else:
                self.starts[axis] = position * block
        for axis, block in self.layout.blocks.items():
            self.program_tiles.append(self._open_tile(axis, block, self.starts[axis]))
        for axis in self.layout.held:
            self.held[axis] = self._open_tile(axis, power_above(axis.extent.constant), Poly.ZERO)
        if self.layout.turns > 1:
            self.builder.add(Tile(self.turn, self.layout.turns, ()))
        self._program(items, frozenset((*axes, *self.layout.held)))

    def _open_tile(self, axis: Axis, lanes: int, start: Poly) -> Axis:
        """Positions [start, start + lanes) of a class, at once, for the rest of the current scope."""
        tile = Axis(self.builder.name("t"), Poly.of(lanes))
        self._bind_tile(axis, tile, lanes, start, whole=_divides(lanes, axis))
        return tile

    def _bind_tile(
        self, axis: Axis, tile: Axis, lanes: int, start: Poly, within: tuple[Poly, ...] = (), whole: bool = False
    ) -> None:
        """`within`: limits beside the end of the class, which itself is one unless no tile crosses it (`whole`)."""
        self.builder.add(Tile(tile, lanes, () if whole else (*within, axis.extent - start)))
        self.builder.here.bindings[axis] = axis.poly()
        self.builder.here.physical[axis] = start + tile

    # --- states that go from row to row ---

    def _carrier(self, reduce: Reduce, rows: int) -> Item:
        held = tuple(self.held[a] for a in self.nest.carried(reduce))
        item = self._opened(reduce)
        striped = (self.lane,) if self.layout.lanes > 1 and reduce.monoid != "welford" else ()
        accumulator = Accumulator(
            self.builder.name(f"{reduce.monoid}_acc"),
            reduce.monoid,
            reduce.part_dtypes,
            1,
            tiles=(*held, *striped),
            folded=striped,
        )
        self.builder.add(Start(accumulator))
        return replace(item, accumulator=accumulator)

    def _rows(self, split: Axis, items: list[Item], axes: frozenset[Axis]) -> None:
        if self.layout.lanes > 1:
            self._strip(items, split, lambda inside: self._scope(inside, axes))
        else:
            super()._rows(split, items, axes)

    def _point(self, items: list[Item], lane: Poly, counted: bool = True) -> None:
        """As everywhere; what only the first positions of some axes store, their programs compute after the rest."""
        first = {k: found for k, i in enumerate(items) if (found := self._first(i))}
        super()._point([i for k, i in enumerate(items) if k not in first], lane, counted)
        for k, axes in first.items():
            with self.builder.block(when(self._at_start(axes))) as scope:
                scope.rare = True
                super()._point([items[k]], lane, counted)

    def _first(self, item: Item) -> list[Axis]:
        """The grid classes of which a store takes the first position alone."""
        region = item.store.region if item.store is not None else ()
        return [a for a, low, high in region if not low.terms and high is Poly.ONE and a in self.layout.grid]

    def _at_start(self, axes: list[Axis]) -> Operand:
        """Whether this program has the first positions of these classes."""
        condition: Operand | None = None
        for axis in axes:
            start = self.starts[axis] if axis in self.starts else self.builder.resolve(axis.poly())
            condition = self.builder.both(condition, self.builder.compare("lt", start, Poly.ONE))
        assert condition is not None
        return condition

    # --- sweeps ---

    def _sweep(
        self, cluster: list[Item], inner: frozenset[Axis], nested: frozenset[Axis], axes: frozenset[Axis]
    ) -> None:
        if inner or nested or not self.held:
            super()._sweep(cluster, inner, nested, axes)
            return
        if any(not self._is_finished(r) for item in cluster for r in direct_reductions(item.values)):
            self._scope(cluster, axes)  # opening a reduction showed others inside
            return
        values = [tuple(self.builder.emit(v) for v in item.values) for item in cluster]
        for item, operands in zip(cluster, values, strict=True):
            if item.reduce is not None and item.accumulator is not None:
                lane = self.lane.poly() if self.layout.lanes > 1 else Poly.ZERO
                self.builder.add(Accumulate(item.accumulator, lane, operands))
            elif item.reduce is not None:
                self._fold(item.reduce, operands, tuple(self.held[self.nest.bound[a]] for a in item.reduce.over))
        for item, operands in zip(cluster, values, strict=True):
            if item.store is not None:
                self.builder.store(item.store.buffer, item.store.index, operands[0], item.store.region)

    def _leaf(self, cluster: list[Item], inner: frozenset[Axis]) -> None:
        if not inner:
            self._point(cluster, Poly.ZERO)
            return
        vector = self.layout.vector_axis(inner)
        self._open_loops(self._order(inner - {vector}), cluster, lambda items: self._strip(items, vector))

    def _strip(self, items: list[Item], axis: Axis, then: Callable[[list[Item]], None] | None = None) -> None:
        """A sweep over a class in steps of a strip, inside its chunk where it has one; `then` at each."""
        step, limit, within = self._step, None, Poly.ZERO
        spans = self.spans(axis, step)
        if axis in self.chunks:
            chunk, size = self.chunks[axis]
            start = self.builder.resolve(chunk * size)
            spans = [(start, Poly.of(-(-size // step)), False)]
            if (axis.extent % size).terms:
                limit = (axis.extent - start + step - 1) // step
            within = Poly.of(size) if size % step else Poly.ZERO
        for start, count, whole in spans:
            if count is Poly.ONE and limit is None and not within.terms:  # no loop: the one around it may run ahead
                with self.builder.stretch():
                    self._open_strip(axis, start, (), whole)
                    self._each(items, then)
                continue
            loop = Axis(self.builder.name("i"), count)
            inside = (within - loop * step,) if within.terms else ()
            with self.builder.block(self.closer(loop, "sweep", limit)):
                self._open_strip(axis, start + loop * step, inside, whole)
                self._each(items, then)

    def _each(self, items: list[Item], then: Callable[[list[Item]], None] | None) -> None:
        """What one step of a strip does."""
        if then is not None:
            then(items)
        else:
            self._point(items, self._position)

    @property
    def _step(self) -> int:
        """Positions of a class that a strip has open at once: one tile of lanes, or several."""
        return self.layout.lanes * self.layout.turns

    @property
    def _position(self) -> Poly:
        return self.lane + self.turn * self.layout.lanes if self.layout.turns > 1 else self.lane.poly()

    def _open_strip(self, axis: Axis, start: Poly, within: tuple[Poly, ...] = (), whole: bool = False) -> None:
        whole = whole or (not within and _divides(self._step, axis))
        ahead = self.turn * self.layout.lanes if self.layout.turns > 1 else Poly.ZERO
        self._bind_tile(axis, self.lane, self.layout.lanes, start + ahead, tuple(p - ahead for p in within), whole)

    def spans(self, axis: Axis, size: int) -> list[tuple[Poly, Poly, bool]]:
        """Many blocks run without masks; the one that crosses the end comes after them."""
        extent = axis.extent.constant
        if extent is None or extent // size < PEELED or not extent % size:
            return super().spans(axis, size)
        full = extent // size
        return [(Poly.ZERO, Poly.of(full), True), (Poly.of(full * size), Poly.ONE, False)]

    def started(self, item: Item, axes: frozenset[Axis]) -> Item:
        """One state for the whole tile: carrying one to a new reference is cheaper than carrying every lane's.

        A step of several tiles has one for each lane: they part the cost, and no thread waits for another.
        """
        started = self._with_accumulator(item, self.layout.lanes, whole=self.layout.turns == 1)
        assert started.accumulator is not None
        return replace(started, accumulator=replace(started.accumulator, folded=()))

    def strip_block(self, axis: Axis, size: int, start: Poly, items: list[Item], whole: bool) -> None:
        if axis not in self.builder.here.bindings:
            self._open_strip(axis, start, whole=whole)
        self._point(items, self._position)

    @property
    def found_again_bytes(self) -> int:
        """The chip's cache is shared by the rows of all programs that run at once."""
        programs = math.prod(estimate(g.extent) for g in self.grid)
        threads = self.layout.warps * self.target.warp
        at_once = min(max(1, programs), self.target.processors * max(1, PROCESSOR_THREADS // threads))
        return self.target.chip_cache_bytes // (2 * at_once)

    @property
    def online_block(self) -> int:
        return self._step

    def merge_online(self, leader: Item, followers: list[tuple[Item, Expr]]) -> None:
        if self.layout.turns == 1:
            super().merge_online(leader, followers)
            return
        assert leader.reduce is not None
        self.builder.add(Tile(self.lane, self.layout.lanes, ()))
        own = self._lane_state(leader)
        top = self._merged(leader, own)
        for item, h in followers:
            assert item.accumulator is not None
            self.builder.add(Rescale(item.accumulator, carry(self.builder, leader.reduce, h, top, own)))
            self._merged(item, self._lane_state(item))

    def _lane_state(self, item: Item) -> Var:
        assert item.accumulator is not None
        own = Var(self.builder.name("own"), item.accumulator.dtypes[0])
        self.builder.add(Finish(item.accumulator, Poly.ZERO, (own,)))
        return own

    def _merged(self, item: Item, own: Var) -> Var:
        """A reduction whose state for each lane is at hand."""
        assert item.reduce is not None
        (result,) = self._fold(item.reduce, (own,), (self.lane,))
        return result

    def _fold(self, reduce: Reduce, values: tuple[Operand, ...], over: tuple[Axis, ...]) -> tuple[Var, ...]:
        """A reduction over open tiles, finished here."""
        parts = tuple(Var(self.builder.name(f"{reduce.monoid}_"), d) for d in reduce.part_dtypes)
        self.builder.add(Fold(reduce.monoid, values, over, parts))
        for k, var in enumerate(parts):
            self.builder.here.values[Part(reduce, k)] = var
        dummy = Accumulator(parts[0].name, reduce.monoid, reduce.part_dtypes, 1)
        self.builder.here.parts[reduce] = Finished(dummy)
        return parts

    def _keep(self, cluster: list[Item], later: list[Item], inner: frozenset[Axis]) -> dict[Expr, Kept]:
        return {}

    def _rounds(self, item: Item) -> Poly | None:
        return None

    def _lanes(self, item: Item, axes: frozenset[Axis]) -> int:
        remaining = item.domain - axes
        while nested := self._nested_axes([item], axes):
            axes = axes | nested
            remaining -= nested
        return self.layout.lanes if remaining and item.reduce is not None else 1

    def _with_accumulator(self, item: Item, lanes: int, whole: bool = False) -> Item:
        if item.reduce is None or item.accumulator is not None:
            return item
        monoid = item.reduce.monoid
        striped = (self.lane,) if lanes > 1 and not whole else ()
        accumulator = Accumulator(
            self.builder.name(f"{monoid}_acc"),
            monoid,
            item.reduce.part_dtypes,
            lanes,
            tiles=(*self.program_tiles, *striped),
            folded=striped,
        )
        self.builder.add(Start(accumulator))
        return replace(item, accumulator=accumulator)


def _divides(step: int, axis: Axis) -> bool:
    """Whether a class is a number of whole steps."""
    return not (axis.extent % step).terms and nonnegative(axis.extent - 1)


def needs_wide(buffer: Buffer) -> bool:
    if any(p.constant is None for p in (*buffer.shape, *buffer.strides)):
        return True
    last = sum((s.constant or 0) * (d.constant or 0) for s, d in zip(buffer.strides, buffer.shape, strict=True))
    return max(last, numel(buffer.shape)) >= NARROW_ELEMENTS


def has_far_values(body: tuple[Statement, ...]) -> bool:
    """Whether positions are computed with that need more than 32 bits."""
    operands = (a for s in walk(body) if isinstance(s, Let) for a in s.args)
    return any(isinstance(a, Poly) and is_far(a) for a in operands)


def _four_wide(body: tuple[Statement, ...], last: Axis) -> tuple[Statement, ...]:
    """Draws that run along the last tile axis from a multiple of four make four words a call."""
    result: list[Statement] = []
    for s in body:
        match s:
            case Loop() | When():
                s = replace(s, body=_four_wide(s.body, last))
            case RandomWord() if (one := s.index.coefficient(last)) is not None and one.constant == 1:
                if not ((s.index - last) % 4).terms:
                    s = replace(s, along=last)
        result.append(s)
    return tuple(result)
