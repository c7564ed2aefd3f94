"""A nest becomes a kernel of tiles: for targets whose programs hold tiles of several axes in registers.

The levels and scopes are those of `NestScheduler`; what differs is at the leaves. Held axes are open for the
whole program, so a value is loaded once and reductions fold what is there. Streamed axes run in strips: a sweep
whose every step opens a tile of lanes, with one state per lane until the sweep is over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..analysis.access import numel, power_above
from ..analysis.nest import direct_reductions
from ..ir.expr import Expr, Part, Reduce
from ..ir.kernel import (
    Accumulate,
    Accumulator,
    Fold,
    GridAxis,
    Kernel,
    Loop,
    RandomWord,
    Start,
    Statement,
    Tile,
    Var,
    When,
)
from ..ir.poly import Axis, Poly, nonnegative
from ..ir.program import Buffer, Origin
from .builder import Finished, Kept
from .sweeps import Item, NestScheduler
from .tile_layout import TileLayout, choose_tiles

PEELED = 8  # whole blocks from which a sweep's last block, which needs masks, is worth code of its own
NARROW_ELEMENTS = 1 << 31  # offsets below this fit 32 bits


class TileScheduler(NestScheduler):
    """Builds one tile kernel from one nest."""

    layout: TileLayout  # type: ignore[assignment]

    def _choose_layout(self) -> None:
        self.layout = choose_tiles(self.nest, self.target, self.chunks)
        self.lane = Axis("lane", Poly.of(self.layout.lanes))  # every strip has the same
        self.held: dict[Axis, Axis] = {}  # held class -> its tile axis
        self.program_tiles: list[Axis] = []

    def build(self, name: str, origins: tuple[Origin, ...]) -> Kernel:
        kernel = super().build(name, origins)
        wide = any(_needs_wide(b) for b in kernel.parameters)
        return replace(kernel, warps=self.layout.warps, stages=self.layout.stages, wide=wide, raises=False)

    def _finished_body(self) -> tuple[Statement, ...]:
        axes = [*self.program_tiles, *self.held.values(), *([self.lane] if self.layout.lanes > 1 else [])]
        body = tuple(self.builder.scopes[0].statements)
        return _four_wide(body, axes[-1]) if axes and (axes[-1].extent.constant or 0) >= 4 else body

    # --- the program ---

    def _open_grid(self, axes: Sequence[Axis], items: list[Item]) -> None:
        for axis in axes:
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
        self._program(items, frozenset((*axes, *self.layout.held)))

    def _open_tile(self, axis: Axis, lanes: int, start: Poly) -> Axis:
        """Positions [start, start + lanes) of a class, at once, for the rest of the current scope."""
        tile = Axis(self.builder.name("t"), Poly.of(lanes))
        self._bind_tile(axis, tile, lanes, start)
        return tile

    def _bind_tile(
        self, axis: Axis, tile: Axis, lanes: int, start: Poly, within: tuple[Poly, ...] = (), whole: bool = False
    ) -> None:
        """`within`: limits beside the end of the class, which itself is one unless no tile crosses it (`whole`)."""
        whole = whole or (not (axis.extent % lanes).terms and nonnegative(axis.extent - 1) and not within)
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
                over = tuple(self.held[self.nest.bound[a]] for a in item.reduce.over)
                parts = tuple(Var(self.builder.name(f"{item.reduce.monoid}_"), d) for d in item.reduce.part_dtypes)
                self.builder.add(Fold(item.reduce.monoid, operands, over, parts))
                for k, var in enumerate(parts):
                    self.builder.here.values[Part(item.reduce, k)] = var
                dummy = Accumulator(parts[0].name, item.reduce.monoid, item.reduce.part_dtypes, 1)
                self.builder.here.parts[item.reduce] = Finished(dummy)
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
        """A sweep over tiles of `lanes` positions of a class, inside its chunk where it has one; `then` at each."""
        lanes, limit, within = self.layout.lanes, None, Poly.ZERO
        spans = self.spans(axis, lanes)
        if axis in self.chunks:
            chunk, size = self.chunks[axis]
            start = self.builder.resolve(chunk * size)
            spans = [(start, Poly.of(-(-size // lanes)), False)]
            if (axis.extent % size).terms:
                limit = (axis.extent - start + lanes - 1) // lanes
            within = Poly.of(size) if size % lanes else Poly.ZERO
        for start, count, whole in spans:
            loop = Axis(self.builder.name("i"), count)
            inside = (within - loop * lanes,) if within.terms else ()
            with self.builder.block(self.closer(loop, "sweep", limit)):
                self._bind_tile(axis, self.lane, lanes, start + loop * lanes, inside, whole)
                if then is not None:
                    then(items)
                else:
                    self._point(items, self.lane.poly())

    def spans(self, axis: Axis, size: int) -> list[tuple[Poly, Poly, bool]]:
        """Many blocks run without masks; the one that crosses the end comes after them."""
        extent = axis.extent.constant
        if extent is None or extent // size < PEELED or not extent % size:
            return super().spans(axis, size)
        full = extent // size
        return [(Poly.ZERO, Poly.of(full), True), (Poly.of(full * size), Poly.ONE, False)]

    def started(self, item: Item, axes: frozenset[Axis]) -> Item:
        """One state for the whole tile: carrying one to a new reference is cheaper than carrying every lane's."""
        return self._with_accumulator(item, self.layout.lanes, whole=True)

    def strip_block(self, axis: Axis, size: int, start: Poly, items: list[Item], whole: bool) -> None:
        if axis not in self.builder.here.bindings:
            self._bind_tile(axis, self.lane, size, start, whole=whole)
        self._point(items, self.lane.poly())

    @property
    def online_block(self) -> int:
        return self.layout.lanes

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
        striped = (self.lane,) if lanes > 1 and monoid != "welford" and not whole else ()
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


def _needs_wide(buffer: Buffer) -> bool:
    if any(p.constant is None for p in (*buffer.shape, *buffer.strides)):
        return True
    last = sum((s.constant or 0) * (d.constant or 0) for s, d in zip(buffer.strides, buffer.shape, strict=True))
    return max(last, numel(buffer.shape)) >= NARROW_ELEMENTS


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
