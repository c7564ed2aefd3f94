"""Schedules of a tile program beside a schedule: one size is doubled or halved, within what the nest has.

Which axes are held, swept or split stays as it is. A size that cannot change stays, too.
"""

from __future__ import annotations

from dataclasses import replace

from ..analysis.access import power_above
from ..analysis.nest import Nest
from ..ir.poly import Axis
from ..ir.schedule import Schedule
from ..ir.target import Target
from .layout import Layout, carrying, chunk_axis
from .tile_rules import STAGES, power_below

# What may change and how often it is doubled, the most promising first: threads; positions of a streamed axis that one
# step takes; of an outer axis and of a split one that one program takes; loads in flight (of a product so many more or
# fewer, any other sweep has some or none).
STEPS = (
    *((name, times) for name in ("warps", "lanes", "block") for times in (1, -1)),
    *(("chunk", -1), ("chunk", 1), ("stages", 1), ("stages", -1)),
)
PROGRAM_THREADS = 1024  # of one program, at most
THREAD_ELEMENTS = 128  # of a tile per thread: more spill whatever is computed
LEAST_CHUNK = 8


def step_text(name: str, times: int) -> str:
    """How a schedule differs from the one beside it, for people."""
    return f"stages {times:+d}" if name == "stages" else f"{name} {'x' if times > 0 else '/'} 2"


def moved(schedule: Schedule, nest: Nest, target: Target, name: str, times: int) -> Schedule:
    """The schedule with one size doubled so many times, as far as it can be."""
    layout = Layout(nest, schedule)
    changed = schedule
    match name:
        case "warps":
            most = PROGRAM_THREADS // target.warp
            changed = replace(schedule, warps=max(1, min(most, _doubled(schedule.warps, times))))
        case "lanes" if layout.lanes > 1 and layout.pieces == 1:  # pieces make up a row together
            lanes = max(2, min(_most_lanes(layout), _doubled(layout.lanes, times)))
            swept = {a: replace(f, tile=lanes) for a, f in schedule.axes if f.loop and f.tile == layout.lanes}
            changed = replace(schedule, axes=tuple((a, swept.get(a, f)) for a, f in schedule.axes))
        case "block":
            blocks = _other_blocks(layout, times)
            tiles = {a: replace(f, tile=blocks.get(a, 1)) for a, f in schedule.axes if f.grid}
            axes = tuple((a, tiles.get(a, f)) for a, f in schedule.axes)
            changed = replace(schedule, axes=axes, order=tuple(blocks))
        case "stages" if layout.lanes > 1 or carrying(nest) is not None:
            changed = replace(schedule, stages=0 if schedule.stages else STAGES)
    elements = Layout(nest, changed).elements()
    if 4 * (changed.stages - 1) * elements > target.shared_bytes:  # loads that run ahead wait there
        return schedule
    grows = elements > layout.elements() or changed.warps < schedule.warps
    return schedule if grows and elements > THREAD_ELEMENTS * target.warp * changed.warps else changed


def moved_chunk(size: int, axis: Axis, times: int) -> int:
    """Positions of a split axis that one program takes; a program of its own for each stays one."""
    if size == 1:
        return size
    most = max(size, power_above(axis.extent.constant))
    return max(min(size, LEAST_CHUNK), min(most, _doubled(size, times)))


def _doubled(size: int, times: int) -> int:
    return size << times if times >= 0 else max(1, size >> -times)


def _most_lanes(layout: Layout) -> int:
    axis = carrying(layout.nest) or layout.strip_axis()
    whole = power_above(axis.extent.constant)
    return max(layout.lanes, min(whole, power_below(layout.chunk) if axis is layout.nest.split else whole))


def _other_blocks(layout: Layout, times: int) -> dict[Axis, int]:
    """The outermost tile of a program changes; rows that a program holds one at a time may become several."""
    nest = layout.nest
    outer = [a for a in nest.outer if a is not chunk_axis(nest)]
    if carrying(nest) is not None or not (layout.blocks or (layout.held and outer)):
        return layout.blocks
    axis = next(iter(layout.blocks), None) or max(outer, key=lambda a: (layout.score(a), outer.index(a)))
    size = max(1, min(power_above(axis.extent.constant), _doubled(layout.blocks.get(axis, 1), times)))
    blocks = {a: b for a, b in {**layout.blocks, axis: size}.items() if b > 1}
    return blocks if layout.held else blocks or layout.blocks
