"""A nest becomes a kernel: grid over the outer axes, sweeps over the rest, level by level.

Legend: O outer classes (grid); W classes an item still has to iterate inside the current scope; v the
vector axis. Row mode: v is in W, sweeps run in strips of lanes. Tile mode: v is in O, each program
owns a tile of v and every innermost block loops over its lanes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..analysis.access import estimate, flat_offset
from ..analysis.conditions import breakpoints, ordered, specialise
from ..analysis.inline import reductions
from ..analysis.nest import Nest, NestStore, provable
from ..analysis.refine import polys_of
from ..ir.choice import AS_RULED, Adjustment
from ..ir.dtypes import DType
from ..ir.expr import Expr, Load, Reduce, postorder, substitute_axes
from ..ir.kernel import (
    Accumulate,
    Accumulator,
    Bind,
    GridAxis,
    Kernel,
    Let,
    Local,
    Loop,
    Operand,
    Start,
    Statement,
    Var,
    When,
    WriteLocal,
)
from ..ir.poly import Axis, Poly, Symbol, nonnegative, product
from ..ir.program import Origin
from ..ir.schedule import Schedule
from ..ir.target import Target
from .builder import Builder, Finished, Kept
from .layout import Layout, choose_layout, scheduled_layout
from .online import Online, find_online, sweep_online
from .random_strips import draw_in_strips
from .scratch import choose_kept, linear
from .streaming import stream_stores

ONLINE_BLOCK = 4096
PLAIN_SUM = 64  # additions in a row whose rounding needs no compensation


@dataclass(frozen=True, slots=True)
class Item:
    """One thing to compute: a store, or a reduction's accumulation, over a domain of classes."""

    domain: frozenset[Axis]
    values: tuple[Expr, ...]
    store: NestStore | None = None
    reduce: Reduce | None = None
    accumulator: Accumulator | None = None
    state: Poly | None = None  # which of the accumulator's states it enters, where positions have their own


class NestScheduler:
    """Builds one kernel from one nest.

    `chunks` (a split): class -> (chunk class, chunk size); that class runs only inside its chunk.
    """

    def __init__(
        self,
        nest: Nest,
        target: Target,
        chunks: dict[Axis, tuple[Axis, int]] | None = None,
        adjustment: Adjustment = AS_RULED,
        schedule: Schedule | None = None,
    ) -> None:
        """`schedule`: how the axes run, where it is known; else the rules of the target say."""
        self.nest, self.target, self.adjustment, self.schedule = nest, target, adjustment, schedule
        self.chunks = chunks or {}
        self.builder = Builder()
        self.grid: list[GridAxis] = []
        self.keeping: dict[Expr, Kept] = {}  # values the sweep being built leaves in scratch
        self.starts: dict[Axis, Poly] = {}  # blocked class -> first position of this program's block
        self._choose_layout()

    def _choose_layout(self) -> None:
        numbered = frozenset(chunk for chunk, _ in self.chunks.values())
        self.layout: Layout = (
            choose_layout(self.nest, self.target, numbered)
            if self.schedule is None
            else scheduled_layout(self.nest, self.schedule)
        )

    # --- the grid ---

    def build(self, name: str, origins: tuple[Origin, ...]) -> Kernel:
        """The whole kernel."""
        items = [Item(s.domain, (s.value,), store=s) for s in self.nest.stores]
        self._open_grid([a for a in self.nest.classes if a in self.layout.grid], items)
        values = [s.value for s in self.nest.stores]
        reads = tuple(dict.fromkeys(e.buffer for e in postorder(values) if isinstance(e, Load)))
        domains = [s.domain for s in self.nest.stores] + [self.nest.domain_of(r) for r in reductions(values)]
        return Kernel(
            name=name,
            reads=reads,
            writes=tuple(s.buffer for s in self.nest.stores),
            symbols=kernel_symbols(self.nest),
            grid=tuple(self.grid),
            body=self._finished_body(),
            locals=tuple(self.builder.locals),
            origins=origins,
            schedule=self.layout.schedule(self.nest, self.chunks),
            work=max((product(a.extent for a in d) for d in domains), key=estimate),
            raises=self.builder.raises,
        )

    def _finished_body(self) -> tuple[Statement, ...]:
        body = draw_in_strips(tuple(self.builder.scopes[0].statements), self.builder)
        return stream_stores(body, self.builder, self.target)

    def _open_grid(self, axes: Sequence[Axis], items: list[Item]) -> None:
        if not axes:
            self._open_program(items)
            return
        axis, rest = axes[0], axes[1:]
        block = self.layout.blocks.get(axis, 1)
        if axis in self.layout.blocks:
            count = Axis(f"g{len(self.grid)}", (axis.extent + block - 1) // block)
            self.grid.append(GridAxis(count, count.extent))
            self.starts[axis] = count * block
            self._open_grid(rest, items)
            return
        position = Axis(f"g{len(self.grid)}", axis.extent)
        self.grid.append(GridAxis(position, axis.extent))
        pieces = self.pieces(axis, items)
        self.builder.here.bindings[axis] = position.poly()
        if len(pieces) == 1:
            self._open_grid(rest, items)
            return
        grid = list(self.grid)
        for low, high in pieces:
            self.grid = list(grid)
            inside = Axis(self.builder.name(f"{position.name}_"), high - low)
            condition = self._between(position, low, high)
            with self.builder.block(when(condition), {axis: low + inside}):
                self.builder.add(Bind(inside, position - low))
                self._open_grid(rest, self._specialised(items, axis, low, high))

    def _open_program(self, items: list[Item]) -> None:
        """What one program does, inside the loop over its block of a second blocked axis, if any."""
        axes = frozenset(self.layout.grid)
        looped = self.layout.looped
        if looped is None:
            self._program(items, axes)
            return
        self._gather_blocks(items, looped)
        with self._block_loop(looped, "sweep", self.layout.blocks[looped], self.starts[looped]):
            self._scope(items, axes)

    def _program(self, items: list[Item], axes: frozenset[Axis]) -> None:
        """Everything a program does. Where a split's reductions have states inside it, they go from row to row."""
        split = self.nest.split
        ends = [r for r in reductions(v for i in items for v in i.values) if split and self.nest.sweeps(r, split)]
        if split is None or not any(self.nest.carried(r) for r in ends):
            self._scope(items, axes)
            return
        carriers = [self._carrier(r, self.chunks[split][1]) for r in ends]
        rows = [*(i for i in items if split in i.domain), *carriers]
        self._rows(split, rows, axes | {split})
        for item in carriers:
            assert item.reduce is not None and item.accumulator is not None
            self.builder.here.parts[item.reduce] = Finished(item.accumulator, item.state)
        self._scope([i for i in items if split not in i.domain], axes)

    def _carrier(self, reduce: Reduce, rows: int) -> Item:
        """A reduction over `rows` positions of the split class, its states set up for the whole program."""
        inside = self.nest.carried(reduce)
        states = product(a.extent for a in inside).constant
        assert states is not None
        item = self._opened(reduce)
        accumulator = Accumulator(
            self.builder.name(f"{reduce.monoid}_acc"),
            reduce.monoid,
            reduce.part_dtypes,
            states,
            PLAIN_SUM if reduce.monoid == "sum" and reduce.dtype.is_float and rows > PLAIN_SUM else 0,
        )
        self.builder.add(Start(accumulator))
        return replace(item, accumulator=accumulator, state=linear(self._order(frozenset(inside))))

    def _rows(self, split: Axis, items: list[Item], axes: frozenset[Axis]) -> None:
        """All rows of the program's chunk, one after another."""
        self._open_loops([split], items, lambda inside: self._scope(inside, axes))

    def _gather_blocks(self, items: list[Item], looped: Axis) -> None:
        """Loads contiguous along the looped axis are copied into scratch line by line, then read across.

        Reading memory across its lines would touch every line of the block once per position of `looped`;
        a large power-of-two stride would not even find them in cache again.
        """
        tiled = self.layout.tiled
        assert tiled is not None
        pitch = self.layout.blocks[looped] + 1  # odd, so that a column does not fall into one cache set
        place = (tiled - self.starts[tiled]) * pitch + (looped - self.starts[looped])
        for load in dict.fromkeys(e for i in items for v in i.values for e in postorder([v]) if isinstance(e, Load)):
            along = flat_offset(load.buffer, load.index).coefficient(looped)
            whole = {tiled, looped} <= load.axes and not load.children and provable(load.buffer, load.index)
            if not whole or along is None or along.constant not in (1, -1):
                continue
            local = Local(self.builder.name("block"), load.dtype, self.layout.blocks[tiled] * pitch)
            self.builder.locals.append(local)
            with (
                self._block_loop(tiled, "sweep", self.layout.blocks[tiled], self.starts[tiled]),
                self._block_loop(looped, "tile", self.layout.blocks[looped], self.starts[looped]),
            ):
                value = self.builder.emit(load)
                self.builder.add(WriteLocal(local, self.builder.resolve(place), value))
            self.builder.here.kept[load] = Kept(local, place)

    def _block_loop(
        self, axis: Axis, kind: str, size: int, start: Poly, lanes: int = 1, lane: Axis | None = None
    ) -> Any:
        """A loop over positions [start, start + size) of a class, cut off at its end."""
        loop = Axis(self.builder.name("t"), Poly.of(size))
        limit = None if not (axis.extent % size).terms else axis.extent - start
        self.last_loop = loop
        return self.builder.block(_closer(loop, kind, lanes, lane, limit), {axis: axis.poly()}, {axis: start + loop})

    def _between(self, position: Axis, low: Poly, high: Poly) -> Operand:
        conditions: list[tuple[Poly, Poly]] = []
        if low.terms:
            conditions.append((low - 1, position.poly()))
        if high is not position.extent:
            conditions.append((position.poly(), high))
        total: Operand | None = None
        for left, right in conditions:
            var = Var(self.builder.name("piece"), DType.BOOL)
            self.builder.add(Let(var, "lt", (left, right)))
            if total is not None:
                both = Var(self.builder.name("piece"), DType.BOOL)
                self.builder.add(Let(both, "bitand", (total, var)))
                var = both
            total = var
        assert total is not None
        return total

    # --- scopes and levels ---

    def _scope(self, items: list[Item], axes: frozenset[Axis]) -> None:
        """Compute all items inside the current scope, in whose axes they may vary."""
        levels = self._levels(items, axes)
        merged = 0  # levels already done by a merged pass
        for number, level in enumerate(levels):
            if number < merged:
                continue
            second = levels[number + 1] if number + 1 < len(levels) else []
            if not self._tiled and (online := self.find_online(level, second, axes)) is not None:
                sweep_online(self, online, axes)
                merged = number + 2
                level = list(online.others)
            clusters: dict[tuple[frozenset[Axis], frozenset[Axis]], list[Item]] = {}
            for item in level:
                nested = self._nested_axes([item], axes)
                key = (frozenset() if nested else item.domain - axes, nested)
                clusters.setdefault(key, []).append(item)
            for (inner, nested), cluster in clusters.items():
                following = levels[max(number + 1, merged) :]
                later = [i for level in following for i in level if i.domain - axes == inner]
                self.keeping = {} if nested else self._keep(cluster, later, inner)
                self._sweep(cluster, inner, nested, axes)

    def find_online(self, level: list[Item], second: list[Item], axes: frozenset[Axis]) -> Online | None:
        """Two levels that one sweep can do, if any."""
        return find_online(self, level, second, axes)

    def _keep(self, cluster: list[Item], later: list[Item], inner: frozenset[Axis]) -> dict[Expr, Kept]:
        """What this sweep leaves in scratch for later ones."""
        return {} if self._tiled else choose_kept(cluster, later, inner, self)

    def _levels(self, items: list[Item], axes: frozenset[Axis]) -> list[list[Item]]:
        """Items and the reductions they need at this scope, grouped by dependency depth."""
        found: dict[Reduce, int] = {}
        for r in reductions(v for item in items for v in item.values):
            if r.axes <= axes and not self._is_finished(r):
                needs = [found[d] for d in reductions(r.inputs) if d in found]
                found[r] = 1 + max(needs, default=-1)
        levels: list[list[Item]] = [[] for _ in range(2 + max(found.values(), default=-1))]
        for r, level in found.items():
            levels[level].append(self._opened(r))
        for item in items:
            needs = [found[d] for d in reductions(item.values) if d in found]
            levels[1 + max(needs, default=-1)].append(item)
        return [level for level in levels if level]

    def _opened(self, reduce: Reduce) -> Item:
        """A reduction's accumulation, in class axes."""
        mapping = {a: self.nest.bound[a].poly() for a in reduce.over}
        values = tuple(substitute_axes(v, mapping) for v in reduce.inputs)
        return Item(self.nest.domain_of(reduce), values, reduce=reduce)

    def _is_finished(self, reduce: Reduce) -> bool:
        return any(reduce in scope.parts for scope in self.builder.scopes)

    def _nested_axes(self, items: Iterable[Item], axes: frozenset[Axis]) -> frozenset[Axis]:
        """The classes to open first because reductions inside depend on them."""
        extras = {
            r.axes - axes
            for i in items
            for r in reductions(i.values)
            if not r.axes <= axes and r.axes <= axes | i.domain and not self._is_finished(r)
        }
        return min(extras, key=lambda e: (len(e), sorted(a.name for a in e)), default=frozenset())

    def _sweep(
        self, cluster: list[Item], inner: frozenset[Axis], nested: frozenset[Axis], axes: frozenset[Axis]
    ) -> None:
        """One pass over `inner` for a cluster of items that share it."""
        least = min((self._lanes(i, axes) for i in cluster if i.reduce is not None and i.state is None), default=1)
        cluster = [self._with_accumulator(i, self._lanes(i, axes) if nested else least) for i in cluster]
        if nested:
            self._open_loops(self._order(nested), cluster, lambda items: self._scope(items, axes | nested))
        else:
            self._leaf(cluster, inner)
        self._remember()
        for item in cluster:
            if item.reduce is not None and item.accumulator is not None:
                self.builder.here.parts.setdefault(item.reduce, Finished(item.accumulator, self._state(item)))

    def _state(self, item: Item) -> Poly | None:
        """Which of an accumulator's states belongs to a position, in class axes; None where they merge."""
        tiled = self.layout.tiled
        return item.state if tiled is None else tiled - self.starts[tiled]

    def _remember(self) -> None:
        """Later sweeps of this program read what this one kept."""
        self.builder.here.kept.update(self.keeping)
        self.builder.locals.extend(k.local for k in self.keeping.values())
        self.keeping = {}

    @property
    def _tiled(self) -> bool:
        return self.layout.tiled is not None

    def _with_accumulator(self, item: Item, lanes: int) -> Item:
        if item.reduce is None or item.accumulator is not None:
            return item
        name = self.builder.name(f"{item.reduce.monoid}_acc")
        long = item.reduce.monoid == "sum" and item.reduce.dtype.is_float and self._run(item, lanes) > PLAIN_SUM
        accumulator = Accumulator(name, item.reduce.monoid, item.reduce.part_dtypes, lanes, PLAIN_SUM if long else 0)
        self.builder.add(Start(accumulator))
        return replace(item, accumulator=accumulator)

    def started(self, item: Item, axes: frozenset[Axis]) -> Item:
        """The item with its accumulator set up in the current scope."""
        return self._with_accumulator(item, self._lanes(item, axes))

    def spans(self, axis: Axis, size: int) -> list[tuple[Poly, Poly, bool]]:
        """A class in blocks: where a run of them starts, how many there are, whether none crosses the end."""
        return [(Poly.ZERO, (axis.extent + size - 1) // size, not (axis.extent % size).terms)]

    def strip_block(self, axis: Axis, size: int, start: Poly, items: list[Item], whole: bool) -> None:
        """One strip over positions [start, start + size) of a class."""
        lanes = self._strip_lanes(items)
        lane = Axis(self.builder.name("lane"), Poly.of(lanes))
        with self._block_loop(axis, "strip", size, start, lanes, lane):
            self._point(items, lane.poly())

    @property
    def found_again_bytes(self) -> int:
        """Bytes of a row that a second sweep finds in a cache."""
        return self.target.cache_bytes

    @property
    def online_block(self) -> int:
        """Positions whose maximum is taken before their terms are added."""
        return ONLINE_BLOCK

    def merge_online(self, leader: Item, followers: list[tuple[Item, Expr]]) -> None:
        """After an online sweep: its states are the results."""
        for item in (leader, *(f for f, _ in followers)):
            assert item.reduce is not None and item.accumulator is not None
            self.builder.here.parts[item.reduce] = Finished(item.accumulator)

    @staticmethod
    def closer(axis: Axis, kind: str, limit: Poly | None = None) -> Callable[[tuple[Statement, ...]], Statement]:
        """Turns statements into a plain loop."""
        return _closer(axis, kind, limit=limit)

    def _run(self, item: Item, lanes: int) -> int:
        """How many elements enter one lane, at most."""
        assert item.reduce is not None
        count = product(a.extent for a in item.reduce.over).constant
        if count is None:
            return 1 << 62  # a size known only at run time may be any
        return count if self._tiled else -(-count // lanes)

    def _lanes(self, item: Item, axes: frozenset[Axis]) -> int:
        if self.layout.tiled is not None:
            return self.layout.blocks[self.layout.tiled]
        remaining = item.domain - axes
        while nested := self._nested_axes([item], axes):
            axes = axes | nested
            remaining -= nested
        if not remaining or item.reduce is None:
            return 1
        lanes = 4 * self.target.vector_bytes // max(d.bytes for d in item.reduce.part_dtypes)
        extent = self.layout.vector_axis(remaining).extent.constant
        while extent is not None and lanes > 1 and lanes >= 2 * extent:
            lanes //= 2
        return lanes

    # --- loops ---

    def _leaf(self, cluster: list[Item], inner: frozenset[Axis]) -> None:
        """Innermost loops over `inner`, with every item of the cluster computed at each point."""
        if self._tiled:
            self._open_loops(self._order(inner), cluster, self._tile)
        elif not inner:
            self._point(cluster, Poly.ZERO)
        else:
            vector = self.layout.vector_axis(inner)
            self._open_loops(self._order(inner - {vector}), cluster, lambda items: self._vector(items, vector))

    def _order(self, axes: frozenset[Axis]) -> list[Axis]:
        """Largest stride outermost."""
        return self.layout.order(axes)

    def pieces(self, axis: Axis, items: list[Item]) -> list[tuple[Poly, Poly]]:
        """Where the axis is cut so that every condition on it is decided in each piece."""
        points = breakpoints((v for i in items for v in i.values), axis)
        for i in items:
            for a, low, high in i.store.region if i.store else ():
                if a is axis:
                    points |= {low, high}
        cuts = ordered(points, axis.extent) if points else None
        if cuts is None or len(cuts) > 9:
            return [(Poly.ZERO, axis.extent)]
        return list(itertools.pairwise(cuts))

    def _specialised(self, items: list[Item], axis: Axis, low: Poly, high: Poly) -> list[Item]:
        """Items with decided conditions folded; stores whose region excludes this piece dropped."""
        bindings = self.builder.bound()
        finished = [r for scope in self.builder.scopes for r in scope.parts]
        kept: list[Item] = []
        for item in items:
            if item.store is not None and _outside(item.store, axis, low, high):
                continue
            kept.append(replace(item, values=specialise(item.values, bindings, finished)))
        return kept

    def _open_loops(self, axes: Sequence[Axis], items: list[Item], then: Callable[[list[Item]], None]) -> None:
        """Serial loops over `axes`, outermost first, then `then(items)` inside."""
        if not axes:
            then(items)
            return
        axis, rest = axes[0], axes[1:]
        if axis in self.chunks:
            with self._chunk_loop(axis, "sweep"):
                self._open_loops(rest, items, then)
            return
        for low, high in self.pieces(axis, items):
            loop = Axis(self.builder.name("i"), high - low)
            with self.builder.block(_closer(loop, "sweep"), {axis: low + loop}):
                self._open_loops(rest, self._specialised(items, axis, low, high), then)

    def _chunk_loop(self, axis: Axis, kind: str, lanes: int = 1, lane: Axis | None = None) -> Any:
        chunk, size = self.chunks[axis]
        return self._block_loop(axis, kind, size, self.builder.resolve(chunk * size), lanes, lane)

    @staticmethod
    def _strip_lanes(items: list[Item]) -> int:
        """Lanes of a strip: every state that has several must have one for each; 0 where nothing is reduced."""
        lanes = [i.accumulator.lanes for i in items if i.accumulator is not None and i.state is None]
        return min((n for n in lanes if n > 1), default=min(lanes, default=0))

    def _vector(self, items: list[Item], axis: Axis) -> None:
        """The innermost loop of row mode."""
        lanes = self._strip_lanes(items)
        lane = Axis(self.builder.name("lane"), Poly.of(lanes)) if lanes else None
        kind, at = ("strip", lane.poly()) if lane is not None else ("tile", Poly.ZERO)
        if axis in self.chunks:
            with self._chunk_loop(axis, kind, lanes, lane):
                self._point(items, at, counted=False)
            return
        for low, high in self.pieces(axis, items):
            loop = Axis(self.builder.name("j"), high - low)
            with self.builder.block(_closer(loop, kind, lanes, lane), {axis: low + loop}):
                self._point(self._specialised(items, axis, low, high), at, counted=False)

    def _tile(self, items: list[Item]) -> None:
        """The lanes of the program's own tile (tile mode)."""
        axis = self.layout.tiled
        assert axis is not None
        with self._block_loop(axis, "tile", self.layout.blocks[axis], self.starts[axis]):
            self._point(items, self.last_loop.poly())

    def _point(self, items: list[Item], lane: Poly, counted: bool = True) -> None:
        """Compute every item at the current point; `counted`: a state's lanes are positions, not turns of a strip.

        All values come first, then the stores: one of them may overwrite an input that others read here.
        """
        operands = [tuple(self.builder.emit(v) for v in item.values) for item in items]
        for item, values in zip(items, operands, strict=True):
            if item.store is not None:
                self.builder.store(item.store.buffer, item.store.index, values[0], item.store.region)
                continue
            assert item.accumulator is not None
            at = lane if item.accumulator.lanes > 1 else Poly.ZERO
            if item.state is not None:
                at = self.builder.resolve(item.state)
            self.builder.add(Accumulate(item.accumulator, at, values, self._rounds(item) if counted else None))
        for value, kept in self.keeping.items():
            self.builder.add(WriteLocal(kept.local, self.builder.resolve(kept.index), self.builder.emit(value)))

    def _rounds(self, item: Item) -> Poly | None:
        """How often the sweeps around this point have run before it; None where one of them is cut into pieces."""
        assert item.reduce is not None
        reduced = {self.nest.bound[a] for a in item.reduce.over}
        rounds = Poly.ZERO
        for axis in (a for scope in self.builder.scopes for a in scope.bindings if a in reduced):
            at = self.builder.resolve(axis.poly())
            if axis in self.chunks:
                if rounds.terms:
                    return None  # the last chunk may be shorter
                chunk, size = self.chunks[axis]
                at -= self.builder.resolve(chunk * size)
            elif len(at.terms) != 1 or [a.extent for a in at.atoms() if isinstance(a, Axis)] != [axis.extent]:
                return None
            rounds = rounds * axis.extent + at
        return rounds


def kernel_symbols(nest: Nest) -> tuple[Symbol, ...]:
    """Every size the kernel needs at run time."""
    values = [s.value for s in nest.stores]
    polys = [p for s in nest.stores for p in (*s.index, *s.buffer.strides, *(b for r in s.region for b in r[1:]))]
    polys += [a.extent for a in (*nest.classes, *nest.bound)] + list(polys_of(values))
    for e in postorder(values):
        if isinstance(e, Load):
            polys += (*e.buffer.strides, *e.buffer.shape)
    return tuple(sorted({s for p in polys for s in p.symbols()}, key=lambda s: s.name))


def when(condition: Operand) -> Callable[[tuple[Statement, ...]], Statement]:
    return lambda body: When(condition, body)


def _closer(
    axis: Axis, kind: str, lanes: int = 1, lane: Axis | None = None, limit: Poly | None = None
) -> Callable[[tuple[Statement, ...]], Statement]:
    return lambda body: Loop(axis, axis.extent, kind, body, lanes, lane, limit)


def _outside(store: NestStore, axis: Axis, low: Poly, high: Poly) -> bool:
    """Whether the store's region provably misses the positions [low, high); what overlaps is guarded."""
    return any(nonnegative(start - high) or nonnegative(low - stop) for a, start, stop in store.region if a is axis)
