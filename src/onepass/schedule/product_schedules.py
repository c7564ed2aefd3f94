"""Schedules of kernels with matrix products: the candidates of a contraction, and the tiles of one of them.

A schedule says how many rows, columns and positions of the swept class a program has at once. The candidates are built
and priced by `group.py`; the one that is chosen travels with the plan.
"""

from __future__ import annotations

from ..analysis.contraction import Contraction
from ..analysis.inline import reductions
from ..analysis.operands import operands
from ..ir.choice import Choice
from ..ir.schedule import Schedule
from ..ir.target import Target
from .contraction_row_tiles import RowTiles, other_row_tiles, row_tiles
from .contraction_tiles import Tiles, other_product_tiles, product_tiles


def candidates(c: Contraction, target: Target, others: int = 0) -> list[Tiles]:
    """Tiles worth a price, those that the rules prefer first. `others`: elements of results beside this one."""
    if c.reduces_columns:
        return [*row_tiles(c, *matrices(c), target)]
    return product_tiles(c, *matrices(c), target, others)


def scheduled(c: Contraction, target: Target, choice: Choice, schedule: Schedule | None, others: int = 0) -> Tiles:
    """The tiles of a schedule, of the first candidate without one, as a choice has them."""
    tiles = candidates(c, target, others)[0] if schedule is None else _tiles_of(schedule, c)
    if c.reduces_columns:
        assert isinstance(tiles, RowTiles)
        return other_row_tiles(tiles, c, *matrices(c), target, choice)
    return other_product_tiles(tiles, c, *matrices(c), target, choice)


def _tiles_of(schedule: Schedule, c: Contraction) -> Tiles:
    rows, columns, swept = (schedule.factor(a).tile for a in (c.rows, c.columns, c.swept))
    if not c.reduces_columns:
        return Tiles(rows, columns, swept, schedule.warps, schedule.stages, schedule.resident)
    inside = schedule.factor(c.inner[0])
    return RowTiles(rows, columns, swept, schedule.warps, schedule.stages, depth=inside.tile if inside.role else 0)


def matrices(c: Contraction) -> tuple[int, int]:
    """Bytes of an operand of the matrix unit, and how many products a step has, by the tiles their sums take.

    Where rows are reduced, a product is in many reductions, at other columns.
    """
    found = [r for r in reductions(s.value for s in c.nest.stores) if operands(r) is not None]
    kinds = [sides[0].dtype for r in found if (sides := operands(r)) is not None]
    count = sum(2 if d.is_packed else 1 for d in kinds)
    return max(d.bytes for d in kinds), len({r.over for r in found}) if c.reduces_columns else count
