"""Schedules of kernels with matrix products: the candidates of a contraction, those beside one, and the next smaller.

A schedule says how many rows, columns and positions of the swept class a program has at once. The candidates are built
and priced by `group.py`; the one that is chosen travels with the plan.
"""

from __future__ import annotations

from ..analysis.contraction import Contraction
from ..analysis.inline import reductions
from ..analysis.operands import operands
from ..ir.schedule import Factor, Schedule
from ..ir.target import Target
from .contraction_row_tiles import row_tiles
from .contraction_tiles import Tiles, fitting, lanes_of, moved_tiles, product_tiles, smaller_tiles


def candidates(c: Contraction, target: Target, others: int = 0) -> list[Schedule]:
    """Schedules worth a price, those that the rules prefer first. `others`: elements of results beside this one."""
    rows = c.reduces_columns
    found = row_tiles(c, *matrices(c), target) if rows else product_tiles(c, *matrices(c), target, others)
    return [schedule_of(tiles, c) for tiles in found]


def moved(schedule: Schedule, c: Contraction, target: Target, name: str, times: int) -> Schedule:
    """The schedule with one size doubled so many times; itself where that size stays."""
    width, products = matrices(c)
    before = tiles_of(schedule, c)
    after = fitting(moved_tiles(before, c, width, name, times), c, width, products, target)
    return schedule if after == before else schedule_of(after, c)


def smaller(schedule: Schedule, c: Contraction, target: Target) -> Schedule:
    """The next schedule that keeps less in registers."""
    width, products = matrices(c)
    return schedule_of(fitting(smaller_tiles(tiles_of(schedule, c), c, width), c, width, products, target), c)


def schedule_of(t: Tiles, c: Contraction, chunks: int = 0) -> Schedule:
    """How the axes run, as data. `chunks`: programs that share a sweep."""
    inside = Factor(tile=t.depth, role="inside") if t.depth else None
    swept = Factor(loop=True, tile=t.step)
    across = Factor(tile=t.columns) if c.held else swept
    axes = [
        *((a, Factor(grid=True)) for a in c.grid),
        (c.rows, Factor(grid=True, tile=t.rows, role="rows")),
        (c.columns, across if c.reduces_columns else Factor(grid=not c.inner, tile=t.columns, role="columns")),
        *(() if c.reduces_columns else ((c.swept, swept),)),
        *((a, inside or Factor(tile=lanes_of(a, 1 << 30))) for a in c.inner if a is not c.columns),
    ]
    states = bool(c.entering)
    return Schedule(tuple(axes), (), t.warps, t.stages, chunks=chunks, staged=True, resident=t.resident, states=states)


def tiles_of(schedule: Schedule, c: Contraction) -> Tiles:
    """The tiles of a schedule."""
    rows, columns, swept = (schedule.factor(a).tile for a in (c.rows, c.columns, c.swept))
    inside = schedule.factor(c.inner[0]) if c.reduces_columns else None
    depth = inside.tile if inside is not None and inside.role else 0
    return Tiles(rows, columns, swept, schedule.warps, schedule.stages, schedule.resident, depth)


def matrices(c: Contraction) -> tuple[int, int]:
    """Bytes of an operand of the matrix unit, and how many products a step has, by the tiles their sums take.

    Where rows are reduced, a product is in many reductions, at other columns.
    """
    found = [r for r in reductions(s.value for s in c.nest.stores) if operands(r) is not None]
    kinds = [sides[0].dtype for r in found if (sides := operands(r)) is not None]
    count = sum(2 if d.is_packed else 1 for d in kinds)
    return max(d.bytes for d in kinds), len({r.over for r in found}) if c.reduces_columns else count
