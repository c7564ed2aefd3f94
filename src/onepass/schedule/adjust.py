"""A tile program's schedule, changed by a few doublings from the rules' own, within what the nest has.

Only sizes change: which axes are held, swept or split stays as the rules decided. A size that cannot change stays,
so an adjustment may give the rules' own schedule again.
"""

from __future__ import annotations

from dataclasses import replace

from ..analysis.access import power_above
from ..analysis.nest import Nest
from ..ir.choice import AS_RULED, Adjustment
from ..ir.poly import Axis
from ..ir.schedule import Schedule
from ..ir.target import Target
from .layout import Layout, carrying, chunk_axis
from .tile_rules import STAGES, power_below

PROGRAM_THREADS = 1024  # of one program, at most
THREAD_ELEMENTS = 128  # of a tile per thread: more spill whatever is computed
LEAST_CHUNK = 8


def adjusted(schedule: Schedule, nest: Nest, target: Target, adjustment: Adjustment) -> Schedule:
    """The schedule with the adjustment made, as far as it can be; where a program is a thread, the schedule itself."""
    if adjustment == AS_RULED or not target.warp:
        return schedule
    layout = Layout(nest, schedule)
    most = PROGRAM_THREADS // target.warp
    warps = max(1, min(most, _doubled(schedule.warps, adjustment.warps)))
    lanes = layout.lanes
    if lanes > 1 and layout.pieces == 1:  # pieces make up a row together
        lanes = max(2, min(_most_lanes(layout), _doubled(lanes, adjustment.lanes)))
    blocks = _adjusted_blocks(layout, adjustment.block)
    stages = schedule.stages
    if adjustment.stages and (lanes > 1 or carrying(nest) is not None):
        stages = 0 if stages else STAGES
    changed = Layout(nest, replace(_resized(schedule, layout, blocks, lanes), warps=warps, stages=stages))
    if 4 * (stages - 1) * changed.elements() > target.shared_bytes:  # loads that run ahead wait there
        changed = Layout(nest, replace(changed.schedule, stages=schedule.stages))
    grows = changed.elements() > layout.elements() or warps < schedule.warps
    return schedule if grows and changed.elements() > THREAD_ELEMENTS * target.warp * warps else changed.schedule


def _resized(schedule: Schedule, layout: Layout, blocks: dict[Axis, int], lanes: int) -> Schedule:
    """The schedule with other tiles of the grid and another tile of all that is swept."""
    axes = [
        (a, replace(f, tile=blocks.get(a, 1) if f.grid else lanes if f.tile == layout.lanes and f.loop else f.tile))
        for a, f in schedule.axes
    ]
    return replace(schedule, axes=tuple(axes), order=tuple(blocks))


def adjusted_chunk(size: int, axis: Axis, adjustment: Adjustment) -> int:
    """Positions of a split axis that one program takes; a program of its own for each stays one."""
    if size == 1 or not adjustment.chunk:
        return size
    most = max(size, power_above(axis.extent.constant))
    return max(min(size, LEAST_CHUNK), min(most, _doubled(size, adjustment.chunk)))


def _doubled(size: int, times: int) -> int:
    return size << times if times >= 0 else max(1, size >> -times)


def _most_lanes(layout: Layout) -> int:
    axis = carrying(layout.nest) or layout.strip_axis()
    whole = power_above(axis.extent.constant)
    return max(layout.lanes, min(whole, power_below(layout.chunk) if axis is layout.nest.split else whole))


def _adjusted_blocks(layout: Layout, times: int) -> dict[Axis, int]:
    """The outermost tile of a program changes; rows that a program holds one at a time may become several."""
    nest = layout.nest
    outer = [a for a in nest.outer if a is not chunk_axis(nest)]
    if not times or carrying(nest) is not None or not (layout.blocks or (layout.held and outer)):
        return layout.blocks
    axis = next(iter(layout.blocks), None) or max(outer, key=lambda a: (layout.score(a), outer.index(a)))
    size = max(1, min(power_above(axis.extent.constant), _doubled(layout.blocks.get(axis, 1), times)))
    blocks = {a: b for a, b in {**layout.blocks, axis: size}.items() if b > 1}
    return blocks if layout.held else blocks or layout.blocks
