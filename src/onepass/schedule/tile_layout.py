"""How a tile program's axes are factored: program tiles, held tiles or strips, warps. Rules over the target's facts.

A program owns a tile of some outer axes and either holds all inner axes at once (`held`) or streams the
vector axis in strips of `lanes`. Sizes are chosen so that each thread has a few 16-byte loads in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..analysis.access import estimate, numel, power_above, tile_elements
from ..analysis.inline import reductions
from ..analysis.nest import Nest
from ..ir.expr import Load, postorder
from ..ir.poly import Axis
from ..ir.target import Target
from .layout import AxisOrder, access_scores

ROW_ELEMENTS = 2048  # short rows are gathered until a program has this many elements
LONG_ROW = 32768
COLUMN_LANES, NARROW_COLUMN = 128, 16  # narrower ones leave parts of a memory sector unused
TRANSPOSE_BLOCK = 64
MAX_WARPS = 16
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
    tiled: Axis | None = field(default=None, init=False)
    looped: Axis | None = field(default=None, init=False)

    def describe(self, nest: Nest) -> str:
        """One line for people."""
        words = []
        for a in nest.classes:
            if a in self.held:
                kind = "held"
            elif a in self.blocks:
                kind = f"grid x tile {self.blocks[a]}"
            elif a in self.grid:
                kind = "grid"
            else:
                kind = f"swept by {self.lanes}"
            words.append(f"{a.name}[{a.extent!r}]: {kind}")
        if nest.split is not None:
            words.append(f"split over {nest.split.name}")
        return "; ".join([*words, f"{self.warps} warps"])


def choose_tiles(nest: Nest, target: Target, chunks: dict[Axis, tuple[Axis, int]]) -> TileLayout:
    """The layout of a nest on a target whose programs hold tiles; `chunks` as in the scheduler."""
    scores, strides = access_scores(nest)
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
    rows = carrying(nest)
    held = _held(nest, inner, chunks, columns, target) if rows is None else tuple(a for a in inner if a is not rows)
    blocks: dict[Axis, int] = {}
    lanes = 1
    if rows is not None:
        lanes = min(power_below(max(1, ROW_ELEMENTS // tile_elements(held))), power_below(chunks[rows][1]))
    elif not inner:
        blocks = _pointwise_blocks(outer, best, scores, strides, budget, target)
    elif held:
        count = tile_elements(held)
        blocks = _row_blocks(outer, best, count, scores, target)
    elif columns and best is not None:
        width = min(power_above(best.extent.constant), COLUMN_LANES)
        while width > NARROW_COLUMN and numel(nest.outer) < 2 * width * target.processors:
            width //= 2
        blocks = {best: width}
        lanes = max(2, 2048 // width)
    else:
        extent = strip_axis(nest, scores).extent.constant
        lanes = min(power_above(extent), 2 * budget if extent is None or extent >= LONG_ROW else budget)
    if inner and rows is None and (vector := strip_axis(nest, scores)) in chunks:
        lanes = min(lanes, power_below(chunks[vector][1]))
    elements = lanes * tile_elements(held)
    for block in blocks.values():
        elements *= block
    per_thread = 32 if elements >= 4 * 1024 * (1 if lanes > 1 else 2) else 16 if elements >= 1024 else 8
    per_thread = min(per_thread, CARRIED_ELEMENTS if rows is not None else per_thread, target.thread_elements)
    warps = min(MAX_WARPS, max(1, power_below(elements // (target.warp * per_thread))))
    stages = 3 if lanes > 1 or rows is not None else 0
    return TileLayout(nest.outer, scores, strides, blocks, tuple(held), lanes, warps, stages)


def carrying(nest: Nest) -> Axis | None:
    """The split class, where programs carry states from one position of it to the next."""
    ends = reductions(s.value for s in nest.stores)
    if nest.split is not None and any(nest.sweeps(r, nest.split) and nest.carried(r) for r in ends):
        return nest.split
    return None


def strip_axis(nest: Nest, scores: dict[Axis, float]) -> Axis:
    """The inner class that streams in strips."""
    return AxisOrder((), scores, {}).vector_axis(a for a in nest.classes if a not in nest.outer)


def power_below(size: int) -> int:
    """The largest power of two not above a size, at least 1."""
    return 1 << max(0, size.bit_length() - 1)


def _budget(nest: Nest, target: Target) -> int:
    """Elements of a streaming tile: 128 threads with 32 bytes each of the widest type that is read or written whole."""
    loads = [e.buffer for e in postorder([s.value for s in nest.stores]) if isinstance(e, Load)]
    sizes = {b: numel(b.shape) for b in (*loads, *(s.buffer for s in nest.stores))}
    most = max(sizes.values(), default=0)
    widest = max((b.dtype.bytes for b, size in sizes.items() if 8 * size >= most), default=4)
    return 4 * target.warp * max(4, min(16, 32 // widest))


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
    for a in (best, *others):
        lanes = min(power_above(a.extent.constant), budget)
        if lanes > 1 and len(found) < TILE_AXES:
            found[a] = lanes
            budget //= lanes
    return {a: found[a] for a in reversed(found)}  # the contiguous one last


def _row_blocks(
    outer: Sequence[Axis], best: Axis | None, held: int, scores: dict[Axis, float], target: Target
) -> dict[Axis, int]:
    """Short rows: several a program, as long as all processors have work."""
    if not outer:
        return {}
    axis = best if best in outer else max(outer, key=lambda a: (scores.get(a, 0.0), outer.index(a)))
    assert axis is not None
    rows = min(power_above(axis.extent.constant), power_below(max(1, ROW_ELEMENTS // held)))
    while rows > 1 and numel(outer) < 2 * rows * target.processors:
        rows //= 2
    return {axis: rows} if rows > 1 else {}
