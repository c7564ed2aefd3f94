"""How the axes of a nest run where a program is a block of threads: rules over the target's facts.

A program owns a tile of some outer axes and either holds all inner axes at once (`held`) or streams the vector axis in
strips of `lanes`. Sizes are chosen so that each thread has a few 16-byte loads in flight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..analysis.access import estimate, numel, power_above, tile_elements
from ..analysis.carried import Pieces, fits_whole, row_pieces
from ..analysis.legality import NARROW_COLUMNS
from ..analysis.nest import COLUMN_ELEMENTS, LINE_LANES, Nest, aligned_along, offsets, swept_again
from ..analysis.scans import state_classes
from ..ir.expr import Load, Random, postorder
from ..ir.poly import Axis, Poly
from ..ir.schedule import Factor, Schedule
from ..ir.target import Target
from .layout import AxisOrder, carrying, chunk_axis

ROW_ELEMENTS = 2048  # short rows are gathered until a program has this many elements
LONG_ROW = 32768
COLUMN_LANES = 128
TRANSPOSE_BLOCK = 64
SHARED_LANES = 256  # of a row, in a tile whose rows share an operand
MAX_WARPS = 16
THREADS = 1024  # of a processor, where each has a few dozen values
ONLINE_ELEMENTS, SWEPT_ELEMENTS, ODD_ELEMENTS = 32, 16, 8  # of a step per thread, where few share a processor
PIECE_WARPS = 8  # of a program whose states fill most registers: fewer threads have less else to keep
SCAN_ELEMENTS = 4096  # of a tile that is scanned: threads wait for each other, so several programs share a processor
SPARE_SHARED = 16 << 10  # for exchanges between threads
CARRIED_ELEMENTS = 16  # of a row per thread, where states stay in registers, or scans go through threads
STATE_ELEMENTS = 1024  # of a program with several states for each row
STAGES = 3  # loads in flight ahead of a sweep
TILE_AXES = 3


def tile_schedule(nest: Nest, target: Target, chunk: int = 0) -> Schedule:
    """The schedule of a nest whose programs hold tiles. `chunk`: positions of the split class that a program takes."""
    rows = carrying(nest)
    if rows is not None and not fits_whole(nest, rows, target):
        pieces = row_pieces(nest, rows, target)
        if pieces is not None:
            return _in_pieces(nest, pieces, target, chunk)
    rules = _Rules(nest, target, chunk)
    tiles = rules.tiles()
    swept = Factor(loop=True, tile=tiles.lanes, turns=tiles.turns)
    return _schedule(nest, tiles, swept, rules.warps(tiles), rules.stages(tiles), replace(swept, chunk=chunk))


def _in_pieces(nest: Nest, pieces: Pieces, target: Target, chunk: int) -> Schedule:
    """States are carried, but a row cannot be held whole: it is worked through in pieces.

    Loads run ahead by the next row, or two, as shared memory allows; what all rows share is in it twice. A row that is
    loaded twice has no room there.
    """
    warps = min(MAX_WARPS, max(PIECE_WARPS, pieces.lanes // (2 * target.warp * target.thread_elements)))
    row = Factor(loop=not pieces.kept, tile=pieces.lanes, turns=pieces.count)
    ahead = (target.shared_bytes - SPARE_SHARED) // (pieces.row_bytes + 2 * pieces.shared_bytes)
    stages = 1 + min(2, ahead) if pieces.kept and ahead > 0 else 0
    return _schedule(nest, _Tiles(), row, warps, stages, Factor(loop=True, chunk=chunk))


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Tiles of a program: of outer classes, of inner classes that are held, and of a sweep."""

    blocks: dict[Axis, int] = field(default_factory=dict)
    held: tuple[Axis, ...] = ()
    lanes: int = 1
    turns: int = 1
    alone: int = 0  # warps of a program that has a processor, or a large part of one, to itself

    def elements(self) -> int:
        return self.lanes * self.turns * tile_elements(self.held) * math.prod(self.blocks.values())


def _schedule(nest: Nest, tiles: _Tiles, swept: Factor, warps: int, stages: int, split: Factor) -> Schedule:
    """Every class as what it is: held, a tile of the grid, the split one, or swept."""
    factors: dict[Axis, Factor] = {}
    for a in nest.classes:
        if a in tiles.held:
            factors[a] = Factor(tile=power_above(a.extent.constant))
        elif a in nest.outer:
            factors[a] = Factor(grid=True, tile=tiles.blocks.get(a, 1))
        else:
            factors[a] = split if a is nest.split else swept
    return Schedule(tuple(factors.items()), tuple(tiles.blocks), warps, stages, split=nest.split)


class _Rules(AxisOrder):
    """The facts of a nest that several rules ask for, and the rules."""

    def __init__(self, nest: Nest, target: Target, chunk: int) -> None:
        super().__init__(nest)
        self.target, self.chunk, self.rows = target, chunk, carrying(nest)
        self.outer = [a for a in nest.outer if a is not chunk_axis(nest)]
        self.inner = [a for a in nest.classes if a not in nest.outer]
        nodes = list(postorder(nest.values))
        self.loads = [e for e in nodes if isinstance(e, Load)]
        self.draws = any(isinstance(e, Random) for e in nodes)  # four come at a time and are handed around
        self.reduces = nest.reductions
        self.favourite = self.best()
        self.columns = self.favourite is not None and self.favourite in self.outer and bool(self.inner)
        self.aligned = self.favourite is None or aligned_along(nest, self.favourite, target.vector_bytes)
        moments = any(r.monoid == "welford" for r in self.reduces)  # three states for every lane
        self.odd = not self.aligned or moments
        self.scanned, self.scan_elements = bool(nest.scans), min(SCAN_ELEMENTS, 128 * target.thread_elements)
        self.states = state_classes(nest)
        self.budget = self._budget()

    def tiles(self) -> _Tiles:
        """The tiles of a program."""
        if self.rows is not None:
            held = tuple(a for a in self.inner if a is not self.rows)
            return _Tiles({}, held, self._of_chunk(power_below(max(1, ROW_ELEMENTS // tile_elements(held)))))
        if not self.inner:
            return _Tiles(self._pointwise_blocks())
        if self.states:
            held = tuple(a for a in self.inner if a in self.states)
            return _Tiles(self._state_blocks(tile_elements(held)), held)
        if (across := self._across()) is not None:
            tiles = self._transposing(across)
        elif held := self._held():
            tiles = _Tiles(self._square_blocks(held) or self._row_blocks(tile_elements(held)), held)
        elif self.columns:
            tiles = self._streamed_columns()
        else:
            tiles = self._streamed_rows()
        return replace(tiles, lanes=self._of_chunk(tiles.lanes)) if self.strip_axis() is self.nest.split else tiles

    def _of_chunk(self, lanes: int) -> int:
        return min(lanes, power_below(self.chunk))

    def _spread(self, size: int, least: int) -> int:
        """A tile of an outer class, halved as long as some processor would have less than two programs."""
        while size > least and numel(self.nest.outer) < 2 * size * self.target.processors:
            size //= 2
        return size

    # --- threads ---

    def warps(self, tiles: _Tiles) -> int:
        """How many warps share a program."""
        target, elements = self.target, tiles.elements()
        if tiles.held and self.columns and self.favourite is not None and not self.scanned:
            # warps side by side along the contiguous axis: none waits for another
            warps = max(1, tiles.blocks.get(self.favourite, 1) // (target.warp * target.vector_bytes // self._width()))
            return max(warps, elements // (8 * target.warp * target.thread_elements))
        warps = tiles.alone or min(MAX_WARPS, power_below(elements // self._per_thread(tiles, elements) // target.warp))
        if tiles.held and self.rows is None:  # so few programs that all run at once: more threads end each sooner
            programs = math.prod(-(-estimate(a.extent) // tiles.blocks.get(a, 1)) for a in self.outer)
            most = THREADS // target.warp if programs == 1 else 8  # one thread waits for a few loads at a time
            while programs <= 2 * target.processors and warps < most and elements > 4 * warps * target.warp:
                warps *= 2
        return warps

    def _per_thread(self, tiles: _Tiles, elements: int) -> int:
        """Elements of a program's tile for each thread."""
        wide = tiles.lanes > 1 or self.draws
        count = 32 if elements >= 4 * 1024 * (1 if wide else 2) else 16 if elements >= 1024 else 8
        if not self.inner and elements <= self.budget:
            count = self.budget // (4 * self.target.warp)
        if self.rows is not None or self.scanned:
            count = min(count, CARRIED_ELEMENTS)
        elif (not self.aligned and not self.inner) or (tiles.lanes > 1 and self.odd):
            count = ODD_ELEMENTS
        return min(count, self.target.thread_elements)

    def stages(self, tiles: _Tiles) -> int:
        """Loads in flight; a program that has a row to itself has enough on its way."""
        if self.states:
            return STAGES
        ahead = not tiles.alone or len(self.inner) > 1
        return STAGES if (tiles.lanes > 1 or self.rows is not None) and ahead and self.aligned else 0

    def _budget(self) -> int:
        """Elements of a streaming tile: 128 threads with 32 bytes each of the widest type that is read or written
        whole."""
        sizes = {b: numel(b.shape) for b in (*(e.buffer for e in self.loads), *(s.buffer for s in self.nest.stores))}
        most = max(sizes.values(), default=0)
        widest = max((b.dtype.bytes for b, size in sizes.items() if 8 * size >= most), default=4)
        return 4 * self.target.warp * max(4, min(16, 32 // widest))

    def _width(self) -> int:
        """Bytes of the widest type that is read; the integers of a label of each row do not count."""
        sizes = {e.buffer: numel(e.buffer.shape) for e in self.loads}
        most = max(sizes.values(), default=0)
        counted = [b for b, size in sizes.items() if not b.dtype.is_integer or 8 * size >= most]
        return max((b.dtype.bytes for b in counted), default=4)

    # --- streamed classes ---

    def _streamed_columns(self) -> _Tiles:
        """Columns of a tile: many, but not with most lanes of the last tile beyond the end."""
        axis = self.favourite
        assert axis is not None
        extent = estimate(axis.extent)

        def lanes(width: int) -> float:
            return -(-extent // width) * (width + NARROW_COLUMNS)

        even = min((COLUMN_LANES >> k for k in range(3)), key=lanes)
        width = self._spread(min(power_above(axis.extent.constant), even), NARROW_COLUMNS)
        elements = self.scan_elements // 2 if self.scanned else 2048
        return _Tiles({axis: width}, lanes=max(2, elements // width))

    def _streamed_rows(self) -> _Tiles:
        vector = self.strip_axis()
        extent = vector.extent.constant
        lanes = min(power_above(extent), 2 * self.budget if extent is None or extent >= LONG_ROW else self.budget)
        if self.odd:
            lanes = min(lanes, ODD_ELEMENTS * 4 * self.target.warp)
        if self.scanned:
            lanes = min(power_above(extent), self.scan_elements)
        if extent is None or vector is self.nest.split or not (alone := self._warps_alone(vector)):
            return _Tiles(lanes=lanes)
        lanes, turns = self._step_alone(vector, alone * self.target.warp)
        return _Tiles({}, (), min(lanes, power_above(extent)), turns, alone)

    def _warps_alone(self, vector: Axis) -> int:
        """Warps of a program that streams a row, where few rows should be on their way at once; 0 if any number may.

        A row that is swept again should still be in the chip's cache then. And where there are fewer rows than
        processors can take, each gets more threads.
        """
        nest, target = self.nest, self.target
        rows = numel(nest.outer)
        row_bytes = swept_again(nest, vector)

        def stays(warps: int, share: float = 0.6) -> bool:
            resident = min(rows, target.processors * max(1, THREADS // (warps * target.warp)))
            return resident * row_bytes <= target.chip_cache_bytes * share

        few = next((w for w in (32, 16, 8) if rows * w <= target.processors * 32), 0)
        alone = all(c in nest.outer or c is vector for c in nest.classes)
        most = power_above(vector.extent.constant) // ((ONLINE_ELEMENTS if alone else ODD_ELEMENTS) * target.warp)
        if row_bytes and not stays(4):
            few = max(few, next((w for w in (8, 16, 32) if stays(w)), 32 if stays(32, 1.0) else 0))
        return min(few, most)

    def _step_alone(self, vector: Axis, threads: int) -> tuple[int, int]:
        """Lanes of a step and how many tiles of them it takes, for a program of so many threads."""
        most = self.target.thread_elements
        monoids = {r.monoid for r in self.reduces if self.nest.sweeps(r, vector)}
        if "max" not in monoids or monoids - {"max", "sum"} or self.nest.scans:
            return threads * min(ODD_ELEMENTS if self.odd or self.scanned else SWEPT_ELEMENTS, most), 1
        each = self.target.vector_bytes // self._width() if self.aligned else 4
        return threads * each, max(1, min(ONLINE_ELEMENTS if self.aligned else SWEPT_ELEMENTS, most) // each)

    def _across(self) -> Axis | None:
        """An outer class along which large accesses are contiguous while others are along the one inner class.

        What needs a row's reduction is better computed from a row that is held, unless that leaves too few rows beside
        each other for whole lines of memory.
        """
        if not self.outer or len(self.inner) != 1:
            return None
        (row,) = self.inner
        if row is self.nest.split or estimate(row.extent) < TRANSPOSE_BLOCK:
            return None
        axis = max(self.outer, key=self.score)
        both = sorted((self.score(axis), self.score(row)))
        if both[0] * 8 <= both[1]:
            return None
        long = LINE_LANES * estimate(row.extent) > COLUMN_ELEMENTS
        many = numel(self.nest.outer) >= 2 * NARROW_COLUMNS * self.target.processors
        return axis if not swept_again(self.nest, row) or (long and many) else None

    def _transposing(self, across: Axis) -> _Tiles:
        side = self._spread(min(TRANSPOSE_BLOCK, power_above(across.extent.constant)), NARROW_COLUMNS)
        return _Tiles({across: side}, lanes=TRANSPOSE_BLOCK * TRANSPOSE_BLOCK // max(side, NARROW_COLUMNS))

    # --- held classes ---

    def _held(self) -> tuple[Axis, ...]:
        """The inner classes, if they all fit a program's registers."""
        inner = self.inner
        if len(inner) > TILE_AXES - 1 or self.nest.split is not None or any(a.extent.constant is None for a in inner):
            return ()
        bound = frozenset(inner) | {a for a, c in self.nest.bound.items() if c in inner}
        live = len({e for e in self.loads if e.axes & bound})
        limit = 64 if self.columns else self.target.held_elements * 4 // max(4, live + len(self.reduces))
        limit = min(limit, self.scan_elements) if self.scanned else limit
        return tuple(inner) if tile_elements(inner) <= limit else ()

    def _state_blocks(self, states: int) -> dict[Axis, int]:
        """Rows of a program that has a number of states for each, one position of their scans after another."""
        if not self.outer:
            return {}
        axis = max(self.outer, key=lambda a: (self.score(a), -self.strides.get(a, 0), self.outer.index(a)))
        rows = self._spread(min(power_above(axis.extent.constant), max(1, STATE_ELEMENTS // states)), 8)
        return {axis: rows} if rows > 1 else {}

    def _square_blocks(self, held: Sequence[Axis]) -> dict[Axis, int]:
        """Held axes that are contiguous in different accesses: each side goes on along the outer axis that continues
        it."""
        nest = self.nest
        steps = [{nest.bound.get(a, a): offset.coefficient(a) for a in offset.axes} for offset in offsets(nest)]
        sides = [a for a in held if any(s.get(a) is Poly.ONE and len(s) == len(nest.classes) for s in steps)]
        blocks: dict[Axis, int] = {}
        for side in sides if len(sides) > 1 else ():
            most = TRANSPOSE_BLOCK // power_above(side.extent.constant)
            continued = (
                a for a in self.outer if any(s.get(side) is Poly.ONE and s.get(a) is side.extent for s in steps)
            )
            onward = next(continued, None)
            if onward is not None and most > 1 and onward not in blocks:
                blocks[onward] = min(most, power_above(onward.extent.constant))
        return blocks

    def _row_blocks(self, held: int) -> dict[Axis, int]:
        """Short rows: several a program, as long as all processors have work. `held`: elements of a row."""
        outer, best = self.outer, self.favourite
        if not outer:
            return {}
        axis = best if best in outer else max(outer, key=lambda a: (self.score(a), outer.index(a)))
        assert axis is not None
        most, least = (COLUMN_ELEMENTS, LINE_LANES) if axis is best else (ROW_ELEMENTS, 1)
        rows = min(power_above(axis.extent.constant), power_below(max(1, most // held)))
        rows = self._spread(rows, min(rows, least))
        return {axis: rows} if rows > 1 else {}

    # --- nothing inside ---

    def _pointwise_blocks(self) -> dict[Axis, int]:
        """Tiles of outer axes, the contiguous one first, until the budget is used; two square ones for a transpose."""
        best = self.favourite
        if best is None:
            return {}
        others = sorted((a for a in self.outer if a is not best), key=lambda a: (self.strides.get(a, 0), a.name))
        if (second := self.transposed(best, others)) is not None:
            return {a: min(TRANSPOSE_BLOCK, power_above(a.extent.constant)) for a in (second, best)}
        budget = self._spread(self.budget, 256)
        found: dict[Axis, int] = {}
        # rows that are not aligned begin and end in a line's midst in every tile
        shared = self._repeated_along(best, others) if self.aligned else None
        if shared is not None and budget > SHARED_LANES < estimate(best.extent):
            found[best] = SHARED_LANES
            budget //= SHARED_LANES
            others = [shared, *(a for a in others if a is not shared)]
        for a in (*(() if found else (best,)), *others):
            lanes = _tight(a.extent.constant, budget, SHARED_LANES if a is best else 1)
            if lanes > 1 and len(found) < TILE_AXES:
                found[a] = lanes
                budget //= lanes
        if budget > 1 and best in found:  # there are not that many rows
            found[best] = _tight(best.extent.constant, budget * found[best], found[best])
        return {a: found[a] for a in reversed(found)}  # the contiguous one last

    def _repeated_along(self, best: Axis, others: Sequence[Axis]) -> Axis | None:
        """The axis along which most operands repeat: a tile of several of its positions reads them once."""
        loads = [e for e in self.loads if best in e.axes]
        counts = {a: sum(a not in e.axes for e in loads) for a in others if estimate(a.extent) > 1}
        axis = max(counts, key=lambda a: (counts[a], estimate(a.extent)), default=None)
        return axis if axis is not None and counts[axis] else None


def _tight(extent: int | None, most: int, least: int) -> int:
    """The largest tile of an axis, up to `most` lanes, whose last one is not mostly empty; `least` if there is none."""
    if extent is None:
        return most
    tiles = [1 << k for k in range(min(most, power_above(extent)).bit_length())]
    fitting = [t for t in tiles if -(-extent // t) * t * 16 <= extent * 17]
    return max(fitting[-1], min(least, tiles[-1]))


def power_below(size: int) -> int:
    """The largest power of two not above a size, at least 1."""
    return 1 << max(0, size.bit_length() - 1)
