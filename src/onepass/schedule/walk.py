"""A nest becomes a kernel, as its schedule says: programs over the outer classes, sweeps over the rest, level by level.

An item is a store or a reduction. A level has the items whose reductions are finished; items of a level that run over
the same classes share a sweep. How a sweep runs is the leaf's: vector lanes or tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..analysis.access import estimate
from ..analysis.inline import reductions
from ..analysis.nest import Nest, direct_reductions
from ..analysis.scans import state_classes
from ..ir.expr import Expr, Reduce, Scan, postorder, substitute_axes
from ..ir.kernel import Accumulate, Accumulator, Kernel, WriteLocal
from ..ir.poly import Axis, Poly, product
from ..ir.program import Origin
from ..ir.schedule import Schedule
from ..ir.target import Target
from .builder import Builder, Carry, Finished, Kept, when
from .lane_rules import lane_schedule
from .lanes import Lanes
from .layout import Layout, carrying
from .leaf import Item, Leaf, Then
from .online import find_online, sweep_online
from .tile_rules import tile_schedule
from .tiles import Tiles


def nest_kernel(
    nest: Nest, target: Target, name: str, origins: tuple[Origin, ...], schedule: Schedule | None = None
) -> Kernel:
    """The kernel of a nest. `schedule`: how it runs, else the rules of the target say."""
    return Walker(nest, target, schedule or ruled(nest, target)).build(name, origins)


def ruled(nest: Nest, target: Target, chunk: int = 0) -> Schedule:
    """How a nest runs as the rules of the target say. `chunk`: positions of the split class that one program takes."""
    return (tile_schedule if target.warp else lane_schedule)(nest, target, chunk)


class Walker:
    """Builds one kernel from one nest and its schedule."""

    def __init__(self, nest: Nest, target: Target, schedule: Schedule) -> None:
        self.nest, self.layout, self.builder = nest, Layout(nest, schedule), Builder()
        self.leaf: Leaf = (Tiles if target.warp else Lanes)(nest, target, self.layout, self.builder)
        self.states = state_classes(nest)
        self.keeping: dict[Expr, Kept] = {}  # values the sweep being built leaves in scratch

    def build(self, name: str, origins: tuple[Origin, ...]) -> Kernel:
        """The whole kernel."""
        stores = self.nest.stores
        self.leaf.open_program([Item(s.domain, (s.value,), store=s) for s in stores], self._program)
        domains = [s.domain for s in stores] + [self.nest.domain_of(r) for r in self.nest.reductions]
        work = max((product(a.extent for a in d) for d in domains), key=estimate)
        kernel = self.builder.kernel(self.nest, stores, name, origins, self.layout.schedule, work)
        return self.leaf.completed(kernel)

    def _program(self, items: list[Item]) -> None:
        """Everything a program does. Where a split's reductions have states inside it, they go from row to row."""
        axes = frozenset((*self.layout.grid, *self.layout.held))
        split = carrying(self.nest)
        if split is None:
            self._scope(items, axes)
            return
        ends = [r for r in reductions(v for i in items for v in i.values) if self.nest.sweeps(r, split)]
        carriers = [self.leaf.carrier(self._opened(r), self.layout.chunk) for r in ends]
        rows = [*(i for i in items if split in i.domain), *carriers]
        if self.layout.schedule.factor(split).tile > 1:
            self.leaf.sweep(rows, split, lambda inside, *_: self._scope(inside, axes | {split}))
        else:
            self._open_loops([split], rows, lambda inside: self._scope(inside, axes | {split}))
        for item in carriers:
            self._finish(item, item.state)
        self._scope([i for i in items if split not in i.domain], axes)

    def _finish(self, item: Item, state: Poly | None) -> None:
        """Later items of this scope read the result of a reduction."""
        if item.reduce is not None and item.accumulator is not None:
            self.builder.here.parts.setdefault(item.reduce, Finished(item.accumulator, state))

    # --- scopes and levels ---

    def _scope(self, items: list[Item], axes: frozenset[Axis]) -> None:
        """Compute all items inside the current scope, in whose axes they may vary."""
        levels = self._levels(items, axes)
        merged = 0  # levels already done by a merged pass
        for number, level in enumerate(levels):
            if number < merged:
                continue
            second = levels[number + 1] if number + 1 < len(levels) else []
            if (online := find_online(self.leaf, level, second, axes)) is not None:
                (axis,) = online.leader.domain - axes
                sweep_online(self.leaf, online, lambda i: self._running(i, axes), axis, self._point)
                merged = number + 2
                level = list(online.others)
            clusters: dict[tuple[frozenset[Axis], frozenset[Axis]], list[Item]] = {}
            for item in level:
                nested = self._nested_axes(item, axes)
                key = (frozenset() if nested else item.domain - axes, nested)
                clusters.setdefault(key, []).append(item)
            for (inner, nested), cluster in clusters.items():
                following = levels[max(number + 1, merged) :]
                later = [i for level in following for i in level if i.domain - axes == inner]
                self.keeping = {} if nested else self.leaf.keep(cluster, later, inner)
                self._sweep(cluster, inner, nested, axes)

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

    def _nested_axes(self, item: Item, axes: frozenset[Axis]) -> frozenset[Axis]:
        """The classes to open first because reductions inside depend on them."""
        extras = {
            r.axes - axes
            for r in reductions(item.values)
            if not r.axes <= axes and r.axes <= axes | item.domain and not self._is_finished(r)
        }
        if self.states:  # a state for each of their positions: they are swept at each position of the scan
            direct = postorder(list(item.values), into_reductions=False)
            extras |= {frozenset({e.over}) for e in direct if isinstance(e, Scan) and e.over not in axes}
        return min(extras, key=lambda e: (len(e), sorted(a.name for a in e)), default=frozenset())

    # --- states ---

    def _lanes(self, item: Item, axes: frozenset[Axis]) -> int:
        """How many states a reduction has during the innermost sweep over its classes."""
        inside = axes
        while nested := self._nested_axes(item, inside):
            inside |= nested
        return self.leaf.lanes(item.reduce, item.domain - inside) if item.reduce is not None else 1

    def _started(self, cluster: list[Item], nested: frozenset[Axis], axes: frozenset[Axis]) -> list[Item]:
        """Items of one sweep with their states set up in the current scope."""
        least = min((self._lanes(i, axes) for i in cluster if i.reduce is not None and i.state is None), default=1)
        started: list[Item] = []
        for item in cluster:
            if item.reduce is not None and item.accumulator is None:
                lanes = self._lanes(item, axes) if nested else least
                item = self._start(item, self.leaf.accumulator(item.reduce, lanes))
            started.append(item)
        return started

    def _running(self, item: Item, axes: frozenset[Axis]) -> Item:
        """An item of an online sweep with its states set up in the current scope."""
        assert item.reduce is not None
        return self._start(item, self.leaf.running_accumulator(item.reduce, self._lanes(item, axes)))

    def _start(self, item: Item, accumulator: Accumulator) -> Item:
        return replace(item, accumulator=self.builder.start(accumulator))

    # --- sweeps ---

    def _sweep(
        self, cluster: list[Item], inner: frozenset[Axis], nested: frozenset[Axis], axes: frozenset[Axis]
    ) -> None:
        """One pass over `inner` for a cluster of items that share it, inside loops over `nested`."""
        if inner or nested or not self.layout.held:
            cluster = self._started(cluster, nested, axes)
        elif any(not self._is_finished(r) for item in cluster for r in direct_reductions(item.values)):
            self._scope(cluster, axes)  # opening a reduction showed others inside
            return
        carries = self._carries(cluster, inner, nested)
        self.builder.here.carries.update(carries)
        if nested:
            self._open_loops(self.layout.order(nested), cluster, lambda items: self._scope(items, axes | nested))
        else:
            self._innermost(cluster, inner)
        for scan in carries:  # the next sweep begins again
            del self.builder.here.carries[scan]
        self.builder.here.kept.update(self.keeping)
        self.builder.locals.extend(k.local for k in self.keeping.values())
        self.keeping = {}
        tiled = self.leaf.tiled
        for item in cluster:
            self._finish(item, item.state if tiled is None else tiled - self.leaf.starts[tiled])

    def _carries(self, cluster: list[Item], inner: frozenset[Axis], nested: frozenset[Axis]) -> dict[Scan, Carry]:
        """The states that scans of a cluster have before its sweep."""
        values = [v for i in cluster for v in i.values]
        found = dict.fromkeys(e for e in postorder(values, into_reductions=False) if isinstance(e, Scan))
        if self.states:  # reductions inside the sweep read them, too
            waiting = direct_reductions(values)
            while waiting:
                inputs = list(self._opened(waiting.pop()).values)
                found |= dict.fromkeys(e for e in postorder(inputs, into_reductions=False) if isinstance(e, Scan))
                waiting += direct_reductions(inputs)
        opened = {*inner, *nested, *self.layout.held}
        return {e: self.leaf.carry(e, e.over in nested) for e in found if e.over in opened}

    def _innermost(self, cluster: list[Item], inner: frozenset[Axis]) -> None:
        """Loops over `inner`, the last of which is the leaf's, with every item computed at each position."""
        vector = self.leaf.tiled or (self.layout.vector_axis(inner) if inner else None)
        if vector is None:
            self._point(cluster, self.leaf.lane_position)
            return
        outside = self.layout.order(inner - {vector})
        self._open_loops(outside, cluster, lambda items: self.leaf.sweep(items, vector, self._point))

    def _open_loops(self, axes: Sequence[Axis], items: list[Item], then: Then) -> None:
        """Serial loops over `axes`, outermost first, then `then(items)` inside."""
        if not axes:
            then(items)
            return
        for inside in self.leaf.loops(axes[0], items):
            self._open_loops(axes[1:], inside, then)

    def _point(self, items: list[Item], lane: Poly, counted: bool = True) -> None:
        """Compute every item at the current position; an item of few programs after all others."""
        first = {k: found for k, i in enumerate(items) if (found := self.leaf.first_of(i))}
        self._compute([i for k, i in enumerate(items) if k not in first], lane, counted)
        for k, axes in first.items():
            with self.builder.block(when(self.leaf.at_start(axes))) as scope:
                scope.rare = True
                self._compute([items[k]], lane, counted)

    def _compute(self, items: list[Item], lane: Poly, counted: bool) -> None:
        """All values come first, then the stores: one of them may overwrite an input that others read here."""
        operands = [(i, tuple(self.builder.emit(v) for v in i.values)) for i in items]
        if self.layout.held:  # states first: what enters them and is not stored need not stay in registers
            operands.sort(key=lambda found: found[0].store is not None)
        for item, values in operands:
            if item.store is not None:
                self.builder.store(item.store.buffer, item.store.index, values[0], item.store.region)
                continue
            assert item.reduce is not None
            if item.accumulator is None:
                self.leaf.fold(item.reduce, values)
                continue
            at = lane if item.accumulator.lanes > 1 else Poly.ZERO
            if item.state is not None:
                at = self.builder.resolve(item.state)
            rounds = self.leaf.rounds(item.reduce) if counted else None
            self.builder.add(Accumulate(item.accumulator, at, values, rounds))
        for value, kept in self.keeping.items():
            self.builder.add(WriteLocal(kept.local, self.builder.resolve(kept.index), self.builder.emit(value)))
