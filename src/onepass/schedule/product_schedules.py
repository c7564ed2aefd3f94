"""Schedules of kernels with matrix products: the candidates of a contraction, those beside one, and the next smaller.

A schedule says how many rows, columns and positions of the swept class a program has at once: rules over the target's
facts and the lengths of the axes. Sizes for 16-bit operands come from measurements on one H200; what does not fit a
chip's shared memory gets fewer stages, then narrower steps. The candidates are built and priced by `group.py`; the one
that is chosen travels with the plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..analysis.access import estimate, flat_offset, numel, power_above
from ..analysis.contraction import LEAST_TILE, Contraction
from ..analysis.inline import exact
from ..analysis.nest import NestStore
from ..analysis.operands import operands
from ..ir.expr import Load, postorder
from ..ir.poly import Axis, Poly
from ..ir.schedule import Factor, Schedule
from ..ir.target import Target

RESERVED = 2048  # bytes of shared memory for what reductions exchange
LEAST_BYTES = 32  # of a row of an operand of the matrix unit
FEW_ROWS = 32
LEAST_WARPS, MOST_WARPS, MOST_STAGES = 4, 8, 6  # that are tried
GROUPED = 8  # tiles of rows that run beside each other, so that the other matrix is still in cache
# Where rows are reduced: held columns are one tile, with as many rows as multiply fastest. Swept columns come in tiles
# that leave room for two programs on a processor: one computes exponentials while the other multiplies.
MOST_DEPTH = 256  # of the products' own sum that is held whole, in elements of 16 bits
MOST_OPERAND = 64 * 128  # elements of a matrix that is in registers
EXACT_TILE = 64 * 64  # of a product without a matrix unit
LONG_DEPTH = 1024  # from which wide tiles pay although only one program fits


@dataclass(frozen=True, slots=True)
class Tiles:
    """rows x columns of the result; `step` of the swept class at a time. `depth`: of the sum of a product whose columns
    are the swept class; 0: all of it."""

    rows: int
    columns: int
    step: int
    warps: int
    stages: int
    resident: bool = False  # programs stay and take one tile after another
    depth: int = 0


def candidates(c: Contraction, target: Target, others: int = 0) -> list[Schedule]:
    """Schedules worth a price, those that the rules prefer first. `others`: elements of results beside this one."""
    width, products = matrices(c)
    if c.reduces_columns:
        exact = width == 4 and not target.rounded_products  # no matrix unit: both matrices are in registers
        found = _held(c, width, exact) if c.held else _swept(c, width, exact, target)
    else:
        ruled = _nested(c, width) if c.inner else _plain(c, width, products, target, others)
        least = _least_step(c, width)
        found = [replace(t, step=max(t.step, least)) for t in ruled]
    fitting = dict.fromkeys(_fitting(t, c, width, products, target) for t in found)
    return [schedule_of(tiles, c) for tiles in fitting]


def moved(schedule: Schedule, c: Contraction, target: Target, name: str, times: int) -> Schedule:
    """The schedule with one size doubled so many times; itself where that size stays."""
    width, products = matrices(c)
    before = tiles_of(schedule, c)
    after = _fitting(_moved_tiles(before, c, width, name, times), c, width, products, target)
    return schedule if after == before else schedule_of(after, c)


def smaller(schedule: Schedule, c: Contraction, target: Target) -> Schedule:
    """The next schedule that keeps less in registers."""
    width, products = matrices(c)
    return schedule_of(_fitting(_smaller_tiles(tiles_of(schedule, c), c, width), c, width, products, target), c)


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
        *((a, inside or Factor(tile=_lanes_of(a))) for a in c.inner if a is not c.columns),
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
    found = [r for r in c.nest.reductions if operands(r) is not None]
    kinds = [sides[0].dtype for r in found if (sides := operands(r)) is not None]
    count = sum(2 if d.is_packed else 1 for d in kinds)
    return max(d.bytes for d in kinds), len({r.over for r in found}) if c.reduces_columns else count


# --- the rules ---


def _least_step(c: Contraction, width: int) -> int:
    """The least positions of the swept class that a step takes."""
    if c.reduces_columns:
        return LEAST_TILE
    return max(LEAST_TILE, LEAST_BYTES // width) if c.inner else LEAST_BYTES // width


def _across(c: Contraction) -> bool:
    """Whether the matrix with the columns is contiguous along them."""
    loads = [e for e in postorder(c.nest.values) if isinstance(e, Load)]
    own = [e for e in loads if c.columns in e.axes and c.rows not in e.axes and len(e.axes) > 1]
    return any(flat_offset(e.buffer, e.index).coefficient(c.columns) is Poly.ONE for e in own)


def _doubled(size: int, times: int, least: int, most: int) -> int:
    """A size doubled so many times, halved where negative; it never leaves the bounds because of that."""
    if not times:
        return size
    return min(max(size, most), size << times) if times > 0 else max(min(size, least), size >> -times)


def _lanes_of(axis: Axis, most: int = 1 << 30) -> int:
    """Lanes for an axis: all of it up to a limit, but no less than a matrix unit takes."""
    return max(LEAST_TILE, min(most, power_above(axis.extent.constant)))


def _nested(c: Contraction, width: int) -> list[Tiles]:
    """Products inside the sweep: the rows' operand stays, the accumulator has all columns."""
    held = max(_lanes_of(a) for a in (c.columns, *c.inner))
    columns = _lanes_of(c.columns)
    if held <= 64:
        rows, step, warps, stages = 64, 128, 4, 2
    elif held <= 128:
        rows, step, warps, stages = 64, 64, 4, 3
    else:
        rows, step, warps, stages = 64, 32, 8, 2
    rows = _lanes_of(c.rows, rows)
    if rows < 64:
        warps, step, stages = 4, 64, 3
    if width == 4:
        step, stages = 32, 2
    ruled = Tiles(rows, columns, step, warps, stages)
    if width == 4 or _lanes_of(c.rows, 128) < 128:
        return [ruled]
    wider = Tiles(128, columns, min(step, 64), 8, 3 if held <= 128 else 2)
    fewer = Tiles(64, columns, step // 2, 4, 3) if step > 64 else replace(ruled, stages=2)  # room for a program more
    return list(dict.fromkeys((ruled, wider, fewer)))


def _plain(c: Contraction, width: int, products: int, target: Target, beside: int) -> list[Tiles]:
    """One product, or several with the same rows: square tiles where the result is large."""
    rows, columns, step = _lanes_of(c.rows, 128), _lanes_of(c.columns, 128), _lanes_of(c.swept, 128 // width)
    if rows <= FEW_ROWS:  # the other matrix is read once: long lines of it, many on their way
        if _across(c):
            return [Tiles(rows, columns, _lanes_of(c.swept, 128), 4, 3)]
        return [Tiles(rows, min(columns, 32), _lanes_of(c.swept, 256), 4, 5)]
    others = numel(c.grid)

    def programs(r: int, n: int) -> int:
        return others * -(-estimate(c.rows.extent) // r) * -(-estimate(c.columns.extent) // n) + beside // (r * n)

    found: list[Tiles] = []
    constant = all(a.extent.constant is not None for a in (c.rows, c.columns, *c.grid))
    stays = target.descriptors and width <= 2 and constant
    if stays and programs(rows, columns) >= 4 * target.processors:
        wide = Tiles(128, 256, 128 // width, 8, 3, resident=True)
        room = target.shared_bytes - RESERVED - _stored_bytes(wide, c)
        alone = products == 1 and len(_ends(c)) <= 1
        if alone and _lanes_of(c.columns, 256) == 256 and rows == 128 and room >= 2 * _step_bytes(wide, width):
            found.append(wide)
        found.append(Tiles(rows, columns, step, 8, 4, resident=True))
    while programs(rows, columns) < target.processors and max(rows, columns) > 32:
        rows, columns = (rows // 2, columns) if rows > columns else (rows, columns // 2)
    found.append(_square(c, rows, columns, step))
    if rows * columns > 64 * 64:  # smaller ones: more programs, and more of them at once
        smaller = [(128, 128), (128, 64), (64, 128), (64, 64)]
        found += [_square(c, min(rows, r), min(columns, n), step) for r, n in smaller]
    return found


def _square(c: Contraction, rows: int, columns: int, step: int) -> Tiles:
    """Tiles of programs that end with their tile."""
    if rows * columns <= 64 * 64:
        step = _lanes_of(c.swept, 2 * step)
    large = rows * columns >= 128 * 128
    return Tiles(rows, columns, step, 8 if large else 4, 3 if large else 4)


def _moved_tiles(t: Tiles, c: Contraction, width: int, name: str, times: int) -> Tiles:
    """Tiles with one size doubled so many times, within what matrix units and axes allow."""
    match name:
        case "warps":
            return replace(t, warps=_doubled(t.warps, times, LEAST_WARPS, MOST_WARPS))
        case "block":
            return replace(t, rows=_doubled(t.rows, times, LEAST_TILE, _lanes_of(c.rows, 256)))
        case "stages":
            return replace(t, stages=max(1, min(MOST_STAGES, t.stages + times)))
        case "lanes" if t.depth:
            return _stepping(t, c, _doubled(t.depth, times, LEAST_TILE, min(_lanes_of(a, 256) for a in c.inner)))
        case "lanes":
            most = 256 if c.reduces_columns else _lanes_of(c.swept, 256)
            return _stepping(t, c, _doubled(t.step, times, _least_step(c, width), most))
    return t


def _smaller_tiles(t: Tiles, c: Contraction, width: int) -> Tiles:
    """Fewer values for each thread."""
    if t.warps < 8 and t.rows >= 64:
        return replace(t, warps=8)
    fewer_rows = replace(t, rows=max(LEAST_TILE, t.rows // 2))
    if c.held and t.rows <= LEAST_TILE:
        return replace(t, depth=max(LEAST_TILE, t.depth // 2), stages=max(2, t.stages - 1))
    if c.held or (c.reduces_columns and t.step <= 64 and t.rows > LEAST_TILE):
        return fewer_rows
    if c.reduces_columns:
        return replace(t, step=t.step // 2, columns=t.step // 2)
    if c.inner:
        return replace(t, step=t.step // 2) if t.step > _least_step(c, width) else fewer_rows
    return replace(t, columns=t.columns // 2) if t.columns > LEAST_TILE else fewer_rows


def _fitting(tiles: Tiles, c: Contraction, width: int, products: int, target: Target) -> Tiles:
    """What a program keeps in shared memory fits there."""
    inner, room = sum(_lanes_of(a) for a in c.inner), target.shared_bytes - RESERVED

    def needed(t: Tiles) -> int:
        if t.depth:
            return width * t.stages * t.depth * (t.rows + t.step * products)
        if c.reduces_columns:  # the rows' matrix stays
            return width * inner * (t.rows + t.stages * t.step)
        if c.inner:
            return width * (t.rows * inner + t.stages * t.step * (inner + t.columns))
        return t.stages * _step_bytes(t, width, products) + _stored_bytes(t, c)

    while needed(tiles) > room and tiles.stages > 1:
        tiles = replace(tiles, stages=tiles.stages - 1)
    while needed(tiles) > room and (step := tiles.depth or tiles.step) > max(LEAST_TILE, _least_step(c, width)):
        tiles = _stepping(tiles, c, step // 2)
    return tiles


def _stepping(t: Tiles, c: Contraction, step: int) -> Tiles:
    """Tiles with another step of the innermost loop."""
    if t.depth:
        return replace(t, depth=step)
    return replace(t, step=step, columns=step if c.reduces_columns else t.columns)


def _step_bytes(t: Tiles, width: int, products: int = 1) -> int:
    """What one step of the products reads."""
    return width * t.step * (t.rows + t.columns * products)


def _stored_bytes(t: Tiles, c: Contraction) -> int:
    """Tiles leave resident programs by shared memory: results of one type and direction by the same."""
    if not t.resident:
        return 0
    offsets = {s: flat_offset(s.buffer, s.index) for s in _results(c)}
    turned = {s: o.coefficient(c.columns) is not Poly.ONE for s, o in offsets.items()}  # in shared memory, too
    ways = {(s.buffer.dtype, turn) for s, turn in turned.items()}
    return sum(dtype.bytes * (3 if turn else 1) for dtype, turn in ways) * t.rows * t.columns


def _results(c: Contraction) -> list[NestStore]:
    """What is stored; what only enters a reduction of the tile has no place."""
    return [s for s in c.nest.stores if s.index]


def _ends(c: Contraction) -> list[NestStore]:
    """Results that no other one is made of: for each of them the sums stay in registers."""
    made = [(s, set(postorder([s.value], into_reductions=False))) for s in _results(c)]
    return [s for s, _ in made if not any(exact(s.value) in nodes for other, nodes in made if other is not s)]


# --- where rows are reduced ---


def _held(c: Contraction, width: int, exact: bool) -> list[Tiles]:
    columns = _lanes_of(c.columns)
    most = EXACT_TILE // columns if exact else 128 if columns <= 256 else 64
    sizes = [r for r in (64, 128, 32) if r <= min(most, _lanes_of(c.rows, most))] + [LEAST_TILE]
    return [_held_by(c, rows, columns, width, exact) for rows in sizes]


def _held_by(c: Contraction, rows: int, columns: int, width: int, exact: bool) -> Tiles:
    area = rows * columns
    inside = max(LEAST_TILE, MOST_OPERAND // columns) if rows < 64 else 64  # small tiles have matrices in registers
    depth = min(_lanes_of(a, LEAST_TILE if exact else inside * 2 // width) for a in c.inner)
    warps = 8 if exact or area >= 128 * 128 or columns > 256 else 4
    return Tiles(rows, columns, columns, warps, 4 if area < 128 * 256 else 3, depth=depth)


def _swept(c: Contraction, width: int, exact: bool, target: Target) -> list[Tiles]:
    if exact:
        return [Tiles(_lanes_of(c.rows, 64), 64, 64, 8, 2, depth=LEAST_TILE)]
    whole = sum(_lanes_of(a) for a in c.inner)
    rows = _lanes_of(c.rows, 128)
    warps = 8 if rows == 128 else 4
    if whole * width <= 2 * MOST_DEPTH and width * whole * (rows + 128) <= target.shared_bytes - RESERVED:
        return [Tiles(rows, 128, 128 if width == 2 else 64, warps, 2)]
    wide = width == 2 and rows == 128 and min(estimate(a.extent) for a in c.inner) >= LONG_DEPTH
    step = 256 if wide else 128
    depth = min(_lanes_of(a, 128 // width) for a in c.inner)
    found = [Tiles(rows, s, s, warps, 3, depth=depth) for s in dict.fromkeys((step, 128))]
    return found if rows < 128 else [*found, Tiles(64, 128, 128, 4, 4, depth=depth)]
