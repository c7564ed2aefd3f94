"""Leaves of a kernel whose programs are threads: loops, the innermost of which runs as vector lanes.

Either the vector is an inner class, and sweeps run in strips with one state per lane; or it is a block of a grid class,
whose positions every innermost loop runs over, with one state each.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from ..analysis.access import flat_offset, work_of
from ..analysis.nest import Nest
from ..ir.expr import Expr, Load, Part, Reduce, Scan, postorder
from ..ir.kernel import Accumulator, Bind, Kernel, Local, Operand, WriteLocal
from ..ir.poly import Axis, Poly, in_range, nonnegative, product
from ..ir.target import Target
from .builder import Builder, Carry, Kept, Scope, when
from .layout import Layout
from .leaf import Item, Leaf, Point, Then, cuts, phases
from .strips import in_strips

ONLINE_BLOCK = 4096
KEEP_COST, LOAD_COST = 6.0, 1.5  # of a value that is kept in scratch, at least; of a load
PLAIN_SUM = 64  # additions in a row whose rounding needs no compensation


class Lanes(Leaf):
    """Loops of vector lanes."""

    def __init__(self, nest: Nest, target: Target, layout: Layout, builder: Builder) -> None:
        super().__init__(nest, target, layout, builder)
        loops = {a for a in layout.blocks if layout.schedule.factor(a).loop}
        self.tiled = next((a for a in layout.blocks if a not in loops), None)
        self.looped = next(iter(loops), None)  # a blocked class of the grid that each program loops over (transposes)

    # --- the program ---

    def open_program(self, items: list[Item], then: Then) -> None:
        self._open_grid(self.layout.grid, items, then)

    def completed(self, kernel: Kernel) -> Kernel:
        body = in_strips(kernel.body, self.builder, self.target)
        return replace(kernel, body=body, locals=tuple(self.builder.locals))

    def _open_grid(self, axes: Sequence[Axis], items: list[Item], then: Then) -> None:
        if not axes:
            self._open_looped(items, then)
            return
        axis, rest = axes[0], axes[1:]
        position = self.number_programs(axis)
        pieces = cuts(axis, items) if axis not in self.layout.blocks else []
        step = self.phases(axis, items) if pieces else 1
        if len(pieces) < 2 and step == 1:
            self._open_grid(rest, items, then)
            return
        grid = list(self.builder.grid)
        for (low, high), phase in itertools.product(pieces, range(step)):
            if not nonnegative(high - low - phase - 1):
                continue
            self.builder.grid = list(grid)
            inside = Axis(self.builder.name(f"{position.name}_"), (high - low - phase + step - 1) // step)
            condition = self._between(position, low, high)
            if step > 1:
                here = self.builder.compare("eq", (position - low) % step, Poly.of(phase), "phase")
                condition = self.builder.both(condition, here, "piece")
            assert condition is not None
            with self.builder.block(when(condition), {axis: low + inside * step + phase}):
                self.builder.add(Bind(inside, (position - low) // step))
                self._open_grid(rest, self.specialised(items, axis, low, high), then)

    def phases(self, axis: Axis, items: list[Item]) -> int:
        return phases(axis, items)

    def _between(self, position: Axis, low: Poly, high: Poly) -> Operand | None:
        """Whether a position is in [low, high); None for its whole range."""
        found: Operand | None = None
        if low.terms:
            found = self.builder.compare("lt", low - 1, position.poly(), "piece")
        if high is not position.extent:
            found = self.builder.both(found, self.builder.compare("lt", position.poly(), high, "piece"), "piece")
        return found

    def _open_looped(self, items: list[Item], then: Then) -> None:
        """The loop over a program's block of a second blocked class, if there is one."""
        if self.looped is None:
            then(items)
            return
        self._gather_blocks(items, self.looped)
        with self._own_loop(self.looped, "sweep"):
            then(items)

    def _gather_blocks(self, items: list[Item], looped: Axis) -> None:
        """Loads contiguous along the looped axis are copied into scratch line by line, then read across.

        Reading memory across its lines would touch every line of the block once per position of `looped`;
        a large power-of-two stride would not even find them in cache again.
        """
        tiled = self.tiled
        assert tiled is not None
        pitch = self.layout.blocks[looped] + 1  # odd, so that a column does not fall into one cache set
        place = (tiled - self.starts[tiled]) * pitch + (looped - self.starts[looped])
        for load in dict.fromkeys(e for i in items for v in i.values for e in postorder([v]) if isinstance(e, Load)):
            along = flat_offset(load.buffer, load.index).coefficient(looped)
            inside = all(in_range(p, size) for p, size in zip(load.index, load.buffer.shape, strict=True))
            whole = {tiled, looped} <= load.axes and not load.children and inside
            if not whole or along is None or along.constant not in (1, -1):
                continue
            local = Local(self.builder.name("block"), load.dtype, self.layout.blocks[tiled] * pitch)
            self.builder.locals.append(local)
            with self._own_loop(tiled, "sweep"), self._own_loop(looped, "tile"):
                value = self.builder.emit(load)
                self.builder.add(WriteLocal(local, self.builder.resolve(place), value))
            self.builder.here.kept[load] = Kept(local, place)

    def _own_loop(self, axis: Axis, kind: str) -> AbstractContextManager[Scope]:
        """A loop over the program's block of a class."""
        return self.block_loop(axis, kind, self.layout.blocks[axis], self.starts[axis])

    # --- states ---

    def lanes(self, reduce: Reduce, swept: frozenset[Axis]) -> int:
        if self.tiled is not None:
            return self.layout.blocks[self.tiled]
        if not swept:
            return 1
        lanes = 4 * self.target.vector_bytes // max(d.bytes for d in reduce.part_dtypes)
        extent = self.layout.vector_axis(swept).extent.constant
        while extent is not None and lanes > 1 and lanes >= 2 * extent:
            lanes //= 2
        return lanes

    def accumulator(self, reduce: Reduce, lanes: int) -> Accumulator:
        count = product(a.extent for a in reduce.over).constant
        if count is None:
            count = 1 << 62  # a size known only at run time may be any
        return self._states(reduce, lanes, count if self.tiled is not None else -(-count // lanes))

    running_accumulator = accumulator

    def carrier(self, item: Item, rows: int) -> Item:
        assert item.reduce is not None
        inside = self.nest.carried(item.reduce)
        states = product(a.extent for a in inside).constant
        assert states is not None
        accumulator = self._states(item.reduce, states, rows)
        return replace(item, accumulator=self.builder.start(accumulator), state=_linear(self.layout.order(inside)))

    def _states(self, reduce: Reduce, lanes: int, run: int) -> Accumulator:
        """`run`: how many elements enter one state, at most."""
        long = reduce.monoid == "sum" and reduce.dtype.is_float and run > PLAIN_SUM
        name = self.builder.name(f"{reduce.monoid}_acc")
        return Accumulator(name, reduce.monoid, reduce.part_dtypes, lanes, PLAIN_SUM if long else 0)

    def carry(self, scan: Scan, alone: bool) -> Carry:
        inside = self.layout.order(a for a in scan.axes if a not in self.nest.outer and a is not scan.over)
        lanes, lane = product(a.extent for a in inside).constant or 1, _linear(inside)
        if (tiled := self.tiled if self.tiled in scan.axes else None) is not None:
            block = self.layout.blocks[tiled]
            lanes, lane = lanes * block, lane * block + (tiled - self.starts[tiled])
        monoid, dtypes = self.serial(scan)
        name = self.builder.name(f"{scan.monoid}_scan")
        return Carry(self.builder.start(Accumulator(name, monoid, dtypes, lanes)), lane)

    def rounds(self, reduce: Reduce) -> Poly | None:
        """None where one of the sweeps is cut into pieces."""
        reduced = {self.nest.bound[a] for a in reduce.over}
        rounds = Poly.ZERO
        for axis in (a for scope in self.builder.scopes for a in scope.bindings if a in reduced):
            at = self.builder.resolve(axis.poly())
            if axis is self.nest.split:
                if rounds.terms:
                    return None  # the last chunk may be shorter
                at -= self.chunk_start()
            elif len(at.terms) != 1 or [a.extent for a in at.atoms() if isinstance(a, Axis)] != [axis.extent]:
                return None
            rounds = rounds * axis.extent + at
        return rounds

    def keep(self, cluster: list[Item], later: list[Item], inner: frozenset[Axis]) -> dict[Expr, Kept]:
        """Recomputing is free for a load that is still in cache; an exp, an erf or a random draw is not.

        A value is kept when recomputing it costs more than a trip through the nearest cache and a row of it fits there.
        """
        size = product(a.extent for a in inner).constant
        if self.tiled is not None or not inner or not later or size is None or self.nest.split in inner:
            return {}
        if any(len(cuts(a, [*cluster, *later])) > 1 for a in inner):
            return {}
        made = {e for i in cluster for v in i.values for e in postorder([v], into_reductions=False) if e.axes & inner}
        budget = self.target.cache_bytes // 4
        kept: dict[Expr, Kept] = {}
        for e in _topmost([v for i in later for v in i.values], made):
            needed = size * e.dtype.bytes
            if needed <= budget and _recompute_cost(e) >= KEEP_COST and self.builder.kept(e) is None:
                budget -= needed
                local = Local(self.builder.name("row"), e.dtype, size)
                kept[e] = Kept(local, _linear(self.layout.order(inner)))
        return kept

    # --- loops ---

    def sweep(self, items: list[Item], axis: Axis, point: Point) -> None:
        if axis is self.tiled:
            with self._own_loop(axis, "tile") as scope:
                point(items, scope.physical[axis] - self.starts[axis])
            return
        lanes = _strip_lanes(items)
        lane = Axis(self.builder.name("lane"), Poly.of(lanes)) if lanes else None
        kind, at = ("strip", lane.poly()) if lane is not None else ("tile", Poly.ZERO)
        for inside in self.loops(axis, items, kind, lanes, lane):
            point(inside, at, counted=False)

    @property
    def found_again_bytes(self) -> float:
        return math.inf if self.tiled is not None else self.target.cache_bytes

    @property
    def online_block(self) -> int:
        return ONLINE_BLOCK

    def online_step(self, items: list[Item], axis: Axis, start: Poly, whole: bool, point: Point) -> None:
        lanes = _strip_lanes(items)
        lane = Axis(self.builder.name("lane"), Poly.of(lanes))
        with self.block_loop(axis, "strip", self.online_block, start, lanes, lane):
            point(items, lane.poly())


def _strip_lanes(items: list[Item]) -> int:
    """Lanes of a strip: every state that has several must have one for each; 0 where nothing is reduced."""
    lanes = [i.accumulator.lanes for i in items if i.accumulator is not None and i.state is None]
    return min((n for n in lanes if n > 1), default=min(lanes, default=0))


def _topmost(values: Sequence[Expr], made: set[Expr]) -> list[Expr]:
    """The first values already made that a walk from the top meets."""
    found: dict[Expr, None] = {}
    seen: set[Expr] = set()
    stack = list(values)
    while stack:
        e = stack.pop()
        if e in seen:
            continue
        seen.add(e)
        if e in made:
            found[e] = None
        elif not isinstance(e, Part):
            stack.extend(e.children)
    return list(found)


def _recompute_cost(value: Expr) -> float:
    """Work to compute one element again, reductions finished."""
    nodes = postorder([value], into_reductions=False)
    return sum(LOAD_COST if isinstance(e, Load) else work_of(e) for e in nodes if not isinstance(e, Reduce))


def _linear(axes: Sequence[Axis]) -> Poly:
    """The position in an array over axes, the last one fastest."""
    total = Poly.ZERO
    for a in axes:
        total = total * a.extent + a
    return total
