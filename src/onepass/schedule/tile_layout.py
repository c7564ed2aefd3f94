"""How a tile program's axes are factored: program tiles, held tiles or strips, warps. Rules over the target's facts.

A program owns a tile of some outer axes and either holds all inner axes at once (`held`) or streams the
vector axis in strips of `lanes`. Sizes are chosen so that each thread has a few 16-byte loads in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..analysis.access import estimate, numel, power_above, tile_elements
from ..analysis.carried import Pieces, fits_whole, row_pieces
from ..analysis.inline import reductions
from ..analysis.legality import NARROW_COLUMNS
from ..analysis.nest import COLUMN_ELEMENTS, LINE_LANES, Nest, aligned_along, offsets, swept_again
from ..ir.expr import Load, Random, postorder
from ..ir.poly import Axis, Poly
from ..ir.program import Buffer
from ..ir.schedule import Factor, Schedule
from ..ir.target import Target
from .layout import AxisOrder, access_scores

ROW_ELEMENTS = 2048  # short rows are gathered until a program has this many elements
LONG_ROW = 32768
COLUMN_LANES = 128
TRANSPOSE_BLOCK = 64
SHARED_LANES = 256  # of a row, in a tile whose rows share an operand
MAX_WARPS = 16
THREADS = 1024  # of a processor, where each has a few dozen values
ONLINE_ELEMENTS, SWEPT_ELEMENTS, ODD_ELEMENTS = 32, 16, 8  # of a step per thread, where few share a processor
PIECE_WARPS = 8  # of a program whose states fill most registers: fewer threads have less else to keep
SPARE_SHARED = 16 << 10  # for exchanges between threads
CARRIED_ELEMENTS = 16  # of a row per thread, where states stay in registers from row to row
TILE_AXES = 3


@dataclass(frozen=True, slots=True)
class TileLayout(AxisOrder):
    """blocks: the grid classes with a tile; held: inner classes kept whole."""

    blocks: dict[Axis, int]
    held: tuple[Axis, ...]
    lanes: int  # of a strip; 1 where nothing is streamed
    warps: int
    stages: int
    turns: int = 1  # tiles of `lanes` that a step of an online sweep takes together
    pieces: int = 1  # tiles of `lanes` that a row is worked through in
    kept: bool = True  # whether what was loaded of a row in pieces stays until it is done
    tiled: Axis | None = field(default=None, init=False)
    looped: Axis | None = field(default=None, init=False)

    def schedule(self, nest: Nest, chunks: dict[Axis, tuple[Axis, int]]) -> Schedule:
        """The layout of a nest as data."""
        factors = {a: self._factor(a, nest) for a in nest.classes}
        for axis, (_, size) in chunks.items():
            factors[axis] = replace(factors[axis], chunk=size)
        order = tuple(self.blocks)
        return Schedule(tuple(factors.items()), order, self.warps, self.stages, split=nest.split)

    def _factor(self, axis: Axis, nest: Nest) -> Factor:
        if axis in self.held:
            return Factor(tile=power_above(axis.extent.constant))
        if axis in self.grid:
            return Factor(grid=True, tile=self.blocks.get(axis, 1))
        if self.pieces == 1:
            return Factor(loop=True, tile=self.lanes, turns=self.turns)
        if axis is nest.split:
            return Factor(loop=True)
        return Factor(loop=not self.kept, tile=self.lanes, turns=self.pieces)


def scheduled_tiles(nest: Nest, schedule: Schedule, pieces: bool) -> TileLayout:
    """The layout that a schedule of a nest stands for; `pieces`: long rows are worked through in pieces."""
    scores, strides = access_scores(nest)
    blocks = {a: schedule.factor(a).tile for a in schedule.order}
    inner = [(a, f) for a, f in schedule.axes if not f.grid]
    rows = [f for a, f in inner if not (pieces and a is nest.split)]
    held = () if pieces else tuple(a for a, f in inner if not f.loop)
    swept = rows if pieces else [f for f in rows if f.loop]
    lanes, turns = max(((f.tile, f.turns) for f in swept), default=(1, 1))
    layout = TileLayout(nest.outer, scores, strides, blocks, held, lanes, schedule.warps, schedule.stages)
    if pieces:
        return replace(layout, pieces=turns, kept=not any(f.loop for f in rows))
    return replace(layout, turns=turns)


def choose_tiles(nest: Nest, target: Target, chunks: dict[Axis, tuple[Axis, int]]) -> TileLayout:
    """The layout of a nest on a target whose programs hold tiles; `chunks` as in the scheduler."""
    scores, strides = access_scores(nest)
    if (pieces := pieces_of(nest, target)) is not None:
        warps = min(MAX_WARPS, max(PIECE_WARPS, pieces.lanes // (2 * target.warp * target.thread_elements)))
        stages = _stages(pieces, target)
        count, kept = pieces.count, pieces.kept
        return TileLayout(nest.outer, scores, strides, {}, (), pieces.lanes, warps, stages, pieces=count, kept=kept)
    numbered = frozenset(chunk for chunk, _ in chunks.values())
    outer = [a for a in nest.outer if a not in numbered]
    inner = [a for a in nest.classes if a not in nest.outer]
    budget = _budget(nest, target)
    best = max(
        (a for a in nest.classes if a not in numbered),
        key=lambda a: (scores.get(a, 0.0), nest.classes.index(a)),
        default=None,
    )
    columns = best is not None and best in outer and bool(inner)
    aligned = best is None or aligned_along(nest, best, target.vector_bytes)
    rows = carrying(nest)
    across = _across(nest, outer, inner, scores, target)
    held = () if across is not None else _held(nest, inner, chunks, columns, target)
    if rows is not None:
        held = tuple(a for a in inner if a is not rows)
    blocks: dict[Axis, int] = {}
    lanes = turns = 1
    alone = 0  # warps of a program that has a processor, or a large part of one, to itself
    if rows is not None:
        lanes = min(power_below(max(1, ROW_ELEMENTS // tile_elements(held))), power_below(chunks[rows][1]))
    elif not inner:
        blocks = _pointwise_blocks(nest, outer, best, scores, strides, budget, target)
    elif across is not None:
        side = min(TRANSPOSE_BLOCK, power_above(across.extent.constant))
        while side > NARROW_COLUMNS and numel(nest.outer) < 2 * side * target.processors:
            side //= 2
        blocks = {across: side}
        lanes = TRANSPOSE_BLOCK * TRANSPOSE_BLOCK // max(side, NARROW_COLUMNS)
    elif held:
        count = tile_elements(held)
        blocks = _square_blocks(nest, outer, held) or _row_blocks(outer, best, count, scores, target)
    elif columns and best is not None:
        width = min(power_above(best.extent.constant), _even_width(best))
        while width > NARROW_COLUMNS and numel(nest.outer) < 2 * width * target.processors:
            width //= 2
        blocks = {best: width}
        lanes = max(2, 2048 // width)
    else:
        vector = strip_axis(nest, scores)
        extent = vector.extent.constant
        lanes = min(power_above(extent), 2 * budget if extent is None or extent >= LONG_ROW else budget)
        if not aligned or _moments(nest):
            lanes = min(lanes, ODD_ELEMENTS * 4 * target.warp)
        if extent is not None and vector not in chunks and (alone := _warps_alone(nest, vector, target)):
            lanes, turns = _alone(nest, vector, alone * target.warp, aligned, target)
            lanes = min(lanes, power_above(extent))
    if inner and rows is None and (vector := strip_axis(nest, scores)) in chunks:
        lanes = min(lanes, power_below(chunks[vector][1]))
    elements = lanes * turns * tile_elements(held)
    for block in blocks.values():
        elements *= block
    wide = lanes > 1 or _draws(nest)
    per_thread = 32 if elements >= 4 * 1024 * (1 if wide else 2) else 16 if elements >= 1024 else 8
    if not inner and elements <= budget:
        per_thread = budget // (4 * target.warp)
    if rows is None and ((not aligned and not inner) or (lanes > 1 and (not aligned or _moments(nest)))):
        per_thread = ODD_ELEMENTS
    per_thread = min(per_thread, CARRIED_ELEMENTS if rows is not None else per_thread, target.thread_elements)
    warps = alone or min(MAX_WARPS, max(1, power_below(elements // (target.warp * per_thread))))
    if held and columns and best is not None:  # warps side by side along the contiguous axis: none waits for another
        warps = max(1, blocks.get(best, 1) // (target.warp * target.vector_bytes // _width(nest)))
        warps = max(warps, elements // (8 * target.warp * target.thread_elements))
    elif held and rows is None:
        warps = _more_warps(warps, elements, _programs(outer, blocks), target)
    ahead = not alone or len(inner) > 1  # a program that has a row alone has enough on its way
    stages = 3 if (lanes > 1 or rows is not None) and ahead and aligned else 0
    return TileLayout(nest.outer, scores, strides, blocks, tuple(held), lanes, warps, stages, turns)


def _even_width(axis: Axis) -> int:
    """Columns of a tile: many, but not with most lanes of the last tile beyond the end."""
    extent = estimate(axis.extent)

    def lanes(width: int) -> float:
        return -(-extent // width) * (width + NARROW_COLUMNS)

    return min((COLUMN_LANES >> k for k in range(3)), key=lanes)


def _programs(outer: Sequence[Axis], blocks: dict[Axis, int]) -> int:
    total = 1
    for a in outer:
        total *= -(-estimate(a.extent) // blocks.get(a, 1))
    return total


def _more_warps(warps: int, elements: int, programs: int, target: Target) -> int:
    """Where programs are so few that all run at once, more threads each: what counts is how soon one is done."""
    while programs <= 2 * target.processors and warps < 8 and elements > 4 * warps * target.warp:
        warps *= 2
    return warps


def _moments(nest: Nest) -> bool:
    """Whether a mean and a variance are kept for every lane: three states."""
    return any(r.monoid == "welford" for r in reductions(s.value for s in nest.stores))


def _draws(nest: Nest) -> bool:
    """Whether random numbers are drawn: four come at a time and are handed around, best among few threads."""
    return any(isinstance(e, Random) for e in postorder([s.value for s in nest.stores]))


def _warps_alone(nest: Nest, vector: Axis, target: Target) -> int:
    """Warps of a program that streams a row, where few rows should be on their way at once; 0 if any number may.

    A row that is swept again should still be in the chip's cache then. And where there are fewer rows than
    processors can take, each gets more threads.
    """
    rows = numel(nest.outer)
    row_bytes = swept_again(nest, vector)

    def resident(warps: int) -> int:
        return min(rows, target.processors * max(1, THREADS // (warps * target.warp)))

    def stays(warps: int, share: float = 0.6) -> bool:
        return resident(warps) * row_bytes <= target.chip_cache_bytes * share

    few = next((w for w in (32, 16, 8) if rows * w <= target.processors * 32), 0)
    alone = all(c in nest.outer or c is vector for c in nest.classes)
    most = power_above(vector.extent.constant) // ((ONLINE_ELEMENTS if alone else ODD_ELEMENTS) * target.warp)
    if row_bytes and not stays(4):
        few = max(few, next((w for w in (8, 16, 32) if stays(w)), 32 if stays(32, 1.0) else 0))
    return min(few, most)


def _alone(nest: Nest, vector: Axis, threads: int, aligned: bool, target: Target) -> tuple[int, int]:
    """Lanes of a step and how many tiles of them it takes, for a program of so many threads."""
    ends = reductions(s.value for s in nest.stores)
    over = [r for r in ends if any(nest.bound[a] is vector for a in r.over)]
    width = _width(nest)
    if not any(r.monoid == "max" for r in over) or any(r.monoid not in ("max", "sum") for r in over):
        few = not aligned or _moments(nest)
        return threads * min(ODD_ELEMENTS if few else SWEPT_ELEMENTS, target.thread_elements), 1
    each = target.vector_bytes // width if aligned else 2
    return threads * each, max(1, min(ONLINE_ELEMENTS if aligned else ODD_ELEMENTS, target.thread_elements) // each)


def _width(nest: Nest) -> int:
    """Bytes of the widest type that is read; the integers of a label beside each row do not count."""
    loads = [e.buffer for e in postorder([s.value for s in nest.stores]) if isinstance(e, Load)]
    most = max((numel(b.shape) for b in loads), default=0)
    counted = [b for b in loads if not b.dtype.is_integer or 8 * numel(b.shape) >= most]
    return max((b.dtype.bytes for b in counted), default=4)


def carrying(nest: Nest) -> Axis | None:
    """The split class, where programs carry states from one position of it to the next."""
    ends = reductions(s.value for s in nest.stores)
    if nest.split is not None and any(nest.sweeps(r, nest.split) and nest.carried(r) for r in ends):
        return nest.split
    return None


def pieces_of(nest: Nest, target: Target) -> Pieces | None:
    """How rows are worked through where states are carried but a row cannot be held whole."""
    rows = carrying(nest)
    return None if rows is None or fits_whole(nest, rows, target) else row_pieces(nest, rows, target)


def _stages(pieces: Pieces, target: Target) -> int:
    """How far loads run ahead: the next row, or two, as shared memory allows; what all rows share is in it twice.

    A row that is loaded twice has no room there.
    """
    if not pieces.kept:
        return 0
    ahead = (target.shared_bytes - SPARE_SHARED) // (pieces.row_bytes + 2 * pieces.shared_bytes)
    return 1 + min(2, ahead) if ahead > 0 else 0


def strip_axis(nest: Nest, scores: dict[Axis, float]) -> Axis:
    """The inner class that streams in strips."""
    return AxisOrder((), scores, {}).vector_axis(a for a in nest.classes if a not in nest.outer)


def power_below(size: int) -> int:
    """The largest power of two not above a size, at least 1."""
    return 1 << max(0, size.bit_length() - 1)


def _budget(nest: Nest, target: Target) -> int:
    """Elements of a streaming tile: 128 threads with 32 bytes each of the widest type that is read or written whole."""
    loads = [e.buffer for e in postorder([s.value for s in nest.stores]) if isinstance(e, Load)]
    widest = _widest([*loads, *(s.buffer for s in nest.stores)], 4)
    return 4 * target.warp * max(4, min(16, 32 // widest))


def _widest(buffers: Sequence[Buffer], default: int) -> int:
    """Bytes of the widest type among the large ones of some buffers."""
    sizes = {b: numel(b.shape) for b in buffers}
    most = max(sizes.values(), default=0)
    return max((b.dtype.bytes for b, size in sizes.items() if 8 * size >= most), default=default)


def _held(
    nest: Nest, inner: Sequence[Axis], chunks: dict[Axis, tuple[Axis, int]], columns: bool, target: Target
) -> tuple[Axis, ...]:
    """The inner classes, if they all fit a program's registers."""
    if not inner or len(inner) > TILE_AXES - 1 or any(a in chunks for a in inner):
        return ()
    if any(a.extent.constant is None for a in inner):
        return ()
    values = [s.value for s in nest.stores]
    bound = frozenset(inner) | {a for a, c in nest.bound.items() if c in inner}
    live = len({e for e in postorder(values) if isinstance(e, Load) and e.axes & bound})
    limit = 64 if columns else target.held_elements * 4 // max(4, live + len(reductions(values)))
    return tuple(inner) if tile_elements(inner) <= limit else ()


def _pointwise_blocks(
    nest: Nest,
    outer: Sequence[Axis],
    best: Axis | None,
    scores: dict[Axis, float],
    strides: dict[Axis, int],
    budget: int,
    target: Target,
) -> dict[Axis, int]:
    """Tiles of outer axes, the contiguous one first, until the budget is used; two square ones for a transpose."""
    if best is None:
        return {}
    others = sorted((a for a in outer if a is not best), key=lambda a: (strides.get(a, 0), a.name))
    second = max(others, key=lambda a: scores.get(a, 0.0), default=None)
    if second is not None and scores.get(second, 0.0) * 4 > scores.get(best, 0.0) and estimate(second.extent) >= 4:
        sides = {a: min(TRANSPOSE_BLOCK, power_above(a.extent.constant)) for a in (second, best)}
        return sides
    while budget > 256 and numel(outer) < 2 * budget * target.processors:
        budget //= 2
    found: dict[Axis, int] = {}
    aligned = aligned_along(
        nest, best, target.vector_bytes
    )  # else every row of a tile begins and ends in a line's midst
    shared = _repeated_along(nest, best, others) if aligned else None
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


def _tight(extent: int | None, most: int, least: int) -> int:
    """The largest tile of an axis, up to `most` lanes, whose last one is not mostly empty; `least` if there is none."""
    if extent is None:
        return most
    tiles = [1 << k for k in range(min(most, power_above(extent)).bit_length())]
    fitting = [t for t in tiles if -(-extent // t) * t * 16 <= extent * 17]
    return max(fitting[-1], min(least, tiles[-1]))


def _repeated_along(nest: Nest, best: Axis, others: Sequence[Axis]) -> Axis | None:
    """The axis along which most operands repeat: a tile of several of its positions reads them once."""
    loads = {e for e in postorder([s.value for s in nest.stores]) if isinstance(e, Load) and best in e.axes}
    counts = {a: sum(a not in e.axes for e in loads) for a in others if estimate(a.extent) > 1}
    axis = max(counts, key=lambda a: (counts[a], estimate(a.extent)), default=None)
    return axis if axis is not None and counts[axis] else None


def _across(
    nest: Nest, outer: Sequence[Axis], inner: Sequence[Axis], scores: dict[Axis, float], target: Target
) -> Axis | None:
    """An outer class along which large accesses are contiguous while others are along the one inner class.

    What needs a row's reduction is better computed from a row that is held, unless that leaves too few rows beside
    each other for whole lines of memory.
    """
    if not outer or len(inner) != 1 or inner[0] is nest.split or estimate(inner[0].extent) < TRANSPOSE_BLOCK:
        return None
    axis = max(outer, key=lambda a: scores.get(a, 0.0))
    both = sorted((scores.get(axis, 0.0), scores.get(inner[0], 0.0)))
    if both[0] * 8 <= both[1]:
        return None
    long = LINE_LANES * estimate(inner[0].extent) > COLUMN_ELEMENTS
    many = numel(nest.outer) >= 2 * NARROW_COLUMNS * target.processors
    return axis if not swept_again(nest, inner[0]) or (long and many) else None


def _square_blocks(nest: Nest, outer: Sequence[Axis], held: Sequence[Axis]) -> dict[Axis, int]:
    """Held axes that are contiguous in different accesses: each side goes on along the outer axis that continues it."""
    steps = [{nest.bound.get(a, a): offset.coefficient(a) for a in offset.axes} for offset in offsets(nest)]
    sides = [a for a in held if any(s.get(a) is Poly.ONE and len(s) == len(nest.classes) for s in steps)]
    blocks: dict[Axis, int] = {}
    for side in sides if len(sides) > 1 else ():
        most = TRANSPOSE_BLOCK // power_above(side.extent.constant)
        continued = (a for a in outer if any(s.get(side) is Poly.ONE and s.get(a) is side.extent for s in steps))
        onward = next(continued, None)
        if onward is not None and most > 1 and onward not in blocks:
            blocks[onward] = min(most, power_above(onward.extent.constant))
    return blocks


def _row_blocks(
    outer: Sequence[Axis], best: Axis | None, held: int, scores: dict[Axis, float], target: Target
) -> dict[Axis, int]:
    """Short rows: several a program, as long as all processors have work."""
    if not outer:
        return {}
    axis = best if best in outer else max(outer, key=lambda a: (scores.get(a, 0.0), outer.index(a)))
    assert axis is not None
    most = COLUMN_ELEMENTS if axis is best else ROW_ELEMENTS
    rows = min(power_above(axis.extent.constant), power_below(max(1, most // held)))
    least = min(rows, LINE_LANES if axis is best else 1)
    while rows > least and numel(outer) < 2 * rows * target.processors:
        rows //= 2
    return {axis: rows} if rows > 1 else {}
