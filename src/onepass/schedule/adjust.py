"""A tile program's layout, changed by a few doublings from what the rules say, within what the nest has.

Only sizes change: which axes are held, swept or split stays as the rules decided. A size that cannot change stays,
so an adjustment may give the rules' own layout again.
"""

from __future__ import annotations

from dataclasses import replace

from ..analysis.access import power_above
from ..analysis.nest import Nest
from ..ir.choice import AS_RULED, Adjustment
from ..ir.poly import Axis
from ..ir.target import Target
from .tile_layout import TileLayout, carrying, power_below, strip_axis

PROGRAM_THREADS = 1024  # of one program, at most
THREAD_ELEMENTS = 128  # of a tile per thread: more spill whatever is computed
STAGES = 3
LEAST_CHUNK = 8


def adjusted(
    layout: TileLayout, nest: Nest, target: Target, chunks: dict[Axis, tuple[Axis, int]], adjustment: Adjustment
) -> TileLayout:
    """The layout with the adjustment made, as far as it can be."""
    if adjustment == AS_RULED:
        return layout
    most = PROGRAM_THREADS // target.warp
    warps = max(1, min(most, _doubled(layout.warps, adjustment.warps)))
    lanes = layout.lanes
    if lanes > 1 and layout.pieces == 1:  # pieces make up a row together
        lanes = max(2, min(_most_lanes(layout, nest, chunks), _doubled(lanes, adjustment.lanes)))
    blocks = _adjusted_blocks(layout, nest, chunks, adjustment.block)
    stages = layout.stages
    if adjustment.stages and (lanes > 1 or carrying(nest) is not None):
        stages = 0 if stages else STAGES
    changed = replace(layout, blocks=blocks, lanes=lanes, warps=warps, stages=stages)
    if 4 * (stages - 1) * _elements(changed) > target.shared_bytes:  # loads that run ahead wait there
        changed = replace(changed, stages=layout.stages)
    grows = _elements(changed) > _elements(layout) or warps < layout.warps
    return layout if grows and _elements(changed) > THREAD_ELEMENTS * target.warp * warps else changed


def adjusted_chunk(size: int, axis: Axis, adjustment: Adjustment) -> int:
    """Positions of a split axis that one program takes; a program of its own for each stays one."""
    if size == 1 or not adjustment.chunk:
        return size
    most = max(size, power_above(axis.extent.constant))
    return max(min(size, LEAST_CHUNK), min(most, _doubled(size, adjustment.chunk)))


def _doubled(size: int, times: int) -> int:
    return size << times if times >= 0 else max(1, size >> -times)


def _most_lanes(layout: TileLayout, nest: Nest, chunks: dict[Axis, tuple[Axis, int]]) -> int:
    axis = carrying(nest) or strip_axis(nest, layout.scores)
    whole = power_above(axis.extent.constant)
    return max(layout.lanes, min(whole, power_below(chunks[axis][1]) if axis in chunks else whole))


def _adjusted_blocks(
    layout: TileLayout, nest: Nest, chunks: dict[Axis, tuple[Axis, int]], times: int
) -> dict[Axis, int]:
    """The outermost tile of a program changes; rows that a program holds one at a time may become several."""
    numbered = {chunk for chunk, _ in chunks.values()}
    outer = [a for a in nest.outer if a not in numbered]
    if not times or carrying(nest) is not None or not (layout.blocks or (layout.held and outer)):
        return layout.blocks
    axis = next(iter(layout.blocks), None) or max(outer, key=lambda a: (layout.scores.get(a, 0.0), outer.index(a)))
    size = max(1, min(power_above(axis.extent.constant), _doubled(layout.blocks.get(axis, 1), times)))
    blocks = {a: b for a, b in {**layout.blocks, axis: size}.items() if b > 1}
    return blocks if layout.held else blocks or layout.blocks


def _elements(layout: TileLayout) -> int:
    """Lanes of the tile a program works on at once."""
    count = layout.lanes * layout.turns
    for axis in layout.held:
        count *= power_above(axis.extent.constant)
    for block in layout.blocks.values():
        count *= block
    return count
