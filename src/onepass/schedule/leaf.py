"""The leaves of a kernel: how it runs over a class, and where its states are.

The walker (`walk.py`) knows the order of everything that a nest computes. A leaf opens the positions that a program
owns, sets up the states of reductions and runs over classes: loops of vector lanes for C (`lanes.py`), tiles for Triton
(`tiles.py`).
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, TypeAlias

from ..analysis.conditions import breakpoints, ordered, specialise
from ..analysis.inline import scans
from ..analysis.nest import Nest, NestStore
from ..analysis.refine import polys_of
from ..ir.dtypes import DType
from ..ir.expr import Expr, Part, Reduce, Scan, postorder
from ..ir.kernel import Accumulator, Kernel, Let, Operand, Var
from ..ir.poly import Axis, Poly, Quotient, Remainder, Symbol, nonnegative
from ..ir.target import Target
from .builder import Builder, Carry, Kept, Scope, looped
from .layout import Layout, chunk_axis

MOST_CUTS = 9
MOST_PHASES = 4


@dataclass(frozen=True, slots=True)
class Item:
    """One thing to compute: a store, or a reduction's accumulation, over a domain of classes."""

    domain: frozenset[Axis]
    values: tuple[Expr, ...]
    store: NestStore | None = None
    reduce: Reduce | None = None
    accumulator: Accumulator | None = None
    state: Poly | None = None  # which of the accumulator's states it enters, where positions have their own


Then: TypeAlias = Callable[[list[Item]], None]


class Point(Protocol):
    """Computes items at the current position. `lane`: which state they enter, where an accumulator has several.

    `counted`: the sweeps around say how many elements a state has met before.
    """

    def __call__(self, items: list[Item], lane: Poly, counted: bool = True) -> None: ...


class Leaf(ABC):
    """What the walker asks of lanes and tiles."""

    tiled: Axis | None = None  # a class of the grid whose positions in the program are the innermost lanes

    def __init__(self, nest: Nest, target: Target, layout: Layout, builder: Builder) -> None:
        self.nest, self.target, self.layout, self.builder = nest, target, layout, builder
        self.starts: dict[Axis, Poly] = {}  # blocked class -> first position of this program's block
        self.descending = {s.over for s in nest.scans if s.reverse}  # classes that are swept from their end

    # --- the program ---

    @abstractmethod
    def open_program(self, items: list[Item], then: Then) -> None:
        """Number the programs and open the positions that one owns; `then` computes the items there."""

    def number_programs(self, axis: Axis) -> Axis:
        """One more dimension of the grid: the positions of a class, or its blocks where a program owns one."""
        block = self.layout.blocks.get(axis)
        position = self.builder.grid_axis(axis.extent if block is None else (axis.extent + block - 1) // block)
        if block is None:
            self.builder.here.bindings[axis] = position.poly()
        else:
            self.starts[axis] = position * block
        return position

    @abstractmethod
    def completed(self, kernel: Kernel) -> Kernel:
        """The kernel after the passes over its statements that this kind of program has."""

    def first_of(self, item: Item) -> list[Axis]:
        """The classes of the grid whose first position alone has this item, where only its programs compute it."""
        return []

    def at_start(self, axes: list[Axis]) -> Operand:
        """Whether this program has the first positions of classes."""
        condition: Operand | None = None
        for axis in axes:
            start = self.starts[axis] if axis in self.starts else self.builder.resolve(axis.poly())
            condition = self.builder.both(condition, self.builder.compare("lt", start, Poly.ONE))
        assert condition is not None
        return condition

    # --- states ---

    @abstractmethod
    def lanes(self, reduce: Reduce, swept: frozenset[Axis]) -> int:
        """How many states a reduction has during a sweep over some classes."""

    @abstractmethod
    def accumulator(self, reduce: Reduce, lanes: int) -> Accumulator:
        """The states of a reduction during a sweep."""

    @abstractmethod
    def running_accumulator(self, reduce: Reduce, lanes: int) -> Accumulator:
        """The states of a reduction during an online sweep, in which they are read after every block."""

    @abstractmethod
    def carrier(self, item: Item, rows: int) -> Item:
        """A reduction over `rows` positions of the split class, with states that stay for the whole program."""

    def serial(self, scan: Scan) -> tuple[str, tuple[DType, ...]]:
        """The monoid of a scan whose positions come one by one, and its parts: those that somebody reads."""
        if scan.monoid != "linear" or any(e.source.monoid == "linear" and not e.index for e in self._parts):
            return scan.monoid, scan.part_dtypes
        return "linear_step", scan.part_dtypes[1:]

    @cached_property
    def _parts(self) -> list[Part]:
        return [e for e in postorder(self.nest.values) if isinstance(e, Part) and isinstance(e.source, Scan)]

    @abstractmethod
    def carry(self, scan: Scan, alone: bool) -> Carry:
        """How a scan goes on in the sweep that comes. `alone`: positions come one by one."""

    def rounds(self, reduce: Reduce) -> Poly | None:
        """How often the sweeps around this position have run before it, where that is known and asked for."""
        return None

    def fold(self, reduce: Reduce, values: tuple[Operand, ...]) -> None:
        """A reduction over classes that are open as a whole."""
        raise AssertionError("no class is open as a whole")

    def keep(self, cluster: list[Item], later: list[Item], inner: frozenset[Axis]) -> dict[Expr, Kept]:
        """Values that a sweep leaves in scratch for later ones."""
        return {}

    # --- loops ---

    @abstractmethod
    def sweep(self, items: list[Item], axis: Axis, point: Point) -> None:
        """Run over a class, with every item computed at each position."""

    @property
    def lane_position(self) -> Poly:
        """The state that an item enters where no class is left to run over."""
        return Poly.ZERO

    def loops(
        self, axis: Axis, items: list[Item], kind: str = "sweep", lanes: int = 1, lane: Axis | None = None
    ) -> Iterator[list[Item]]:
        """Loops over a class: one over the program's chunk of it, or one for each of its pieces, with its items."""
        if axis is self.nest.split:
            with self.block_loop(axis, kind, self.layout.chunk, self.chunk_start(), lanes, lane):
                yield items
            return
        step = 1 if lane is not None else self.phases(axis, items)
        for low, high in cuts(axis, items):
            whole = (high - low) // step
            loop = Axis(self.builder.name("i" if kind == "sweep" else "j"), whole)
            if step == 1:
                at = self._from_first(axis, low, high, loop.poly())
                with self.builder.block(looped(loop, kind, lanes, lane), {axis: at}):
                    yield self.specialised(items, axis, low, high)
                continue
            with self.builder.block(looped(loop, kind, lanes, lane)):
                for phase in range(step if whole.terms else 0):
                    yield from self._at(axis, self._from_first(axis, low, high, loop * step + phase), items)
            for position in range((high - low - whole * step).constant or 0):
                yield from self._at(axis, self._from_first(axis, low, high, whole * step + position), items)

    def _from_first(self, axis: Axis, low: Poly, high: Poly, number: Poly) -> Poly:
        """The position of [low, high) that comes after so many."""
        return high - 1 - number if axis in self.descending else low + number

    def _at(self, axis: Axis, position: Poly, items: list[Item]) -> Iterator[list[Item]]:
        with self.builder.stretch() as scope:
            scope.bindings[axis] = position
            yield self.specialised(items, axis, position, position + 1)

    def phases(self, axis: Axis, items: list[Item]) -> int:
        """How many neighbouring positions of a class are computed one after the other, each with its own indices."""
        return 1

    def chunk_start(self) -> Poly:
        """The first position of the program's chunk of the split class."""
        number = chunk_axis(self.nest)
        assert number is not None
        return self.builder.resolve(number * self.layout.chunk)

    def block_loop(
        self, axis: Axis, kind: str, size: int, start: Poly, lanes: int = 1, lane: Axis | None = None
    ) -> AbstractContextManager[Scope]:
        """A loop over positions [start, start + size) of a class, cut off at its end."""
        loop = Axis(self.builder.name("t"), Poly.of(size))
        limit = None if not (axis.extent % size).terms else axis.extent - start
        at = start + loop if axis not in self.descending else start + self._length(size, limit) - 1 - loop
        return self.builder.block(looped(loop, kind, lanes, lane, limit), {axis: axis.poly()}, {axis: at})

    def _length(self, size: int, limit: Poly | None) -> Poly:
        """How many positions of a class a block of so many has."""
        if limit is None:
            return Poly.of(size)
        length = Var(self.builder.name("length"), DType.I64)
        self.builder.add(Let(length, "minimum", (Poly.of(size), limit)))
        return Symbol(length.name, 0).poly()

    def specialised(self, items: list[Item], axis: Axis, low: Poly, high: Poly) -> list[Item]:
        """Items with decided conditions folded; stores whose region excludes this piece dropped."""
        bindings = self.builder.bound()
        finished = [r for scope in self.builder.scopes for r in scope.parts]
        inside = [i for i in items if i.store is None or not _outside(i.store, axis, low, high)]
        for scan, state in [found for scope in self.builder.scopes for found in scope.carries.items()]:
            (part,) = specialise((Part(scan, 0),), bindings, finished)  # the same scan, as it is in here
            if isinstance(part, Part) and isinstance(part.source, Scan):
                self.builder.here.carries[part.source] = state
        return [replace(i, values=specialise(i.values, bindings, finished)) for i in inside]

    # --- online sweeps ---

    @property
    @abstractmethod
    def found_again_bytes(self) -> float:
        """Bytes of a row that a second sweep finds in a cache."""

    @property
    @abstractmethod
    def online_block(self) -> int:
        """Positions whose maximum is taken before their terms are added."""

    def spans(self, axis: Axis, size: int) -> list[tuple[Poly, Poly, bool]]:
        """A class in blocks: where a run of them starts, how many there are, whether none crosses the end."""
        return [(Poly.ZERO, (axis.extent + size - 1) // size, not (axis.extent % size).terms)]

    @abstractmethod
    def online_step(self, items: list[Item], axis: Axis, start: Poly, whole: bool, point: Point) -> None:
        """Run over one block of an online sweep."""

    def merge_online(self, leader: Item, followers: list[tuple[Item, Expr]]) -> None:  # noqa: B027
        """After an online sweep: states of one reduction that have different references become one."""


def cuts(axis: Axis, items: list[Item]) -> list[tuple[Poly, Poly]]:
    """Pieces of a class in each of which every condition on it is decided."""
    values = [v for i in items for v in i.values]
    if axis in {s.over for s in scans(values)}:  # one state goes through all of it
        return [(Poly.ZERO, axis.extent)]
    points = breakpoints(values, axis)
    for i in items:
        for a, low, high in i.store.region if i.store else ():
            if a is axis:
                points |= {low, high}
    found = ordered(points, axis.extent) if points else None
    if found is None or len(found) > MOST_CUTS:
        return [(Poly.ZERO, axis.extent)]
    return list(itertools.pairwise(found))


def phases(axis: Axis, items: list[Item]) -> int:
    """After how many positions of a class the remainders of its divisions recur; 1 where that is never or late."""
    values = [v for i in items for v in i.values]
    if axis.extent.constant is None or axis in {s.over for s in scans(values)}:
        return 1
    found = 1
    for poly in set(polys_of(values)):
        for atom in poly.inner_atoms():
            if isinstance(atom, Quotient | Remainder) and axis in atom.numerator.axes:
                found = math.lcm(found, atom.denominator.constant or MOST_PHASES + 1)
    return found if found <= min(MOST_PHASES, axis.extent.constant) else 1


def _outside(store: NestStore, axis: Axis, low: Poly, high: Poly) -> bool:
    """Whether the store's region provably misses the positions [low, high); one that overlaps them is guarded."""
    return any(nonnegative(start - high) or nonnegative(low - stop) for a, start, stop in store.region if a is axis)
