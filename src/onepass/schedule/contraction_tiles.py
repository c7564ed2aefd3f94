"""Tile sizes of kernels with matrix products: rules over the target's facts and the lengths of the axes.

Sizes for 16-bit operands come from measurements on one H200; what does not fit a chip's shared memory gets fewer
stages, then narrower steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..analysis.access import estimate, flat_offset, numel, power_above
from ..analysis.contraction import LEAST_TILE, Contraction
from ..analysis.inline import exact
from ..analysis.nest import NestStore
from ..ir.expr import Load, postorder
from ..ir.poly import Axis, Poly
from ..ir.target import Target

RESERVED = 2048  # bytes of shared memory for what reductions exchange
LEAST_BYTES = 32  # of a row of an operand of the matrix unit
FEW_ROWS = 32
LEAST_WARPS, MOST_WARPS, MOST_STAGES = 4, 8, 6  # that are tried
GROUPED = 8  # tiles of rows that run beside each other, so that the other matrix is still in cache


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


def product_tiles(c: Contraction, width: int, products: int, target: Target, others: int = 0) -> list[Tiles]:
    """Tiles worth a price, those that the rules prefer first, of `products` products of matrices with `width` bytes.

    `others`: elements of results beside this one.
    """
    found = _nested(c, width) if c.inner else _plain(c, width, products, _across(c), target, others)
    least = least_step(c, width)
    wide = (replace(t, step=max(t.step, least)) for t in found)
    return list(dict.fromkeys(fitting(t, c, width, products, target) for t in wide))


def least_step(c: Contraction, width: int) -> int:
    """The least positions of the swept class that a step takes."""
    if c.reduces_columns:
        return LEAST_TILE
    return max(LEAST_TILE, LEAST_BYTES // width) if c.inner else LEAST_BYTES // width


def _across(c: Contraction) -> bool:
    """Whether the matrix with the columns is contiguous along them."""
    loads = [e for e in postorder([s.value for s in c.nest.stores]) if isinstance(e, Load)]
    own = [e for e in loads if c.columns in e.axes and c.rows not in e.axes and len(e.axes) > 1]
    return any(flat_offset(e.buffer, e.index).coefficient(c.columns) is Poly.ONE for e in own)


def doubled(size: int, times: int, least: int, most: int) -> int:
    """A size doubled so many times, halved where negative; it never leaves the bounds because of that."""
    if not times:
        return size
    return min(max(size, most), size << times) if times > 0 else max(min(size, least), size >> -times)


def lanes_of(axis: Axis, most: int) -> int:
    """Lanes for an axis: all of a short one, but no less than a matrix unit takes."""
    return max(LEAST_TILE, min(most, power_above(axis.extent.constant)))


def _nested(c: Contraction, width: int) -> list[Tiles]:
    """Products inside the sweep: the rows' operand stays, the accumulator has all columns."""
    held = max(lanes_of(a, 1 << 30) for a in (c.columns, *c.inner))
    columns = lanes_of(c.columns, 1 << 30)
    if held <= 64:
        rows, step, warps, stages = 64, 128, 4, 2
    elif held <= 128:
        rows, step, warps, stages = 64, 64, 4, 3
    else:
        rows, step, warps, stages = 64, 32, 8, 2
    rows = lanes_of(c.rows, rows)
    if rows < 64:
        warps, step, stages = 4, 64, 3
    if width == 4:
        step, stages = 32, 2
    ruled = Tiles(rows, columns, step, warps, stages)
    if width == 4 or lanes_of(c.rows, 128) < 128:
        return [ruled]
    wider = Tiles(128, columns, min(step, 64), 8, 3 if held <= 128 else 2)
    fewer = Tiles(64, columns, step // 2, 4, 3) if step > 64 else replace(ruled, stages=2)  # room for a program more
    return list(dict.fromkeys((ruled, wider, fewer)))


def _plain(c: Contraction, width: int, products: int, across: bool, target: Target, beside: int) -> list[Tiles]:
    """One product, or several with the same rows: square tiles where the result is large."""
    rows, columns, step = lanes_of(c.rows, 128), lanes_of(c.columns, 128), lanes_of(c.swept, 128 // width)
    if rows <= FEW_ROWS:  # the other matrix is read once: long lines of it, many on their way
        columns, step = (lanes_of(c.columns, 128), lanes_of(c.swept, 128)) if across else (32, lanes_of(c.swept, 256))
        return [Tiles(rows, min(columns, lanes_of(c.columns, 128)), step, 4, 3 if across else 5)]
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
        if alone and lanes_of(c.columns, 256) == 256 and rows == 128 and room >= 2 * _step_bytes(wide, width):
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
        step = lanes_of(c.swept, 2 * step)
    large = rows * columns >= 128 * 128
    return Tiles(rows, columns, step, 8 if large else 4, 3 if large else 4)


def moved_tiles(t: Tiles, c: Contraction, width: int, name: str, times: int) -> Tiles:
    """Tiles with one size doubled so many times, within what matrix units and axes allow."""
    match name:
        case "warps":
            return replace(t, warps=doubled(t.warps, times, LEAST_WARPS, MOST_WARPS))
        case "block":
            return replace(t, rows=doubled(t.rows, times, LEAST_TILE, lanes_of(c.rows, 256)))
        case "stages":
            return replace(t, stages=max(1, min(MOST_STAGES, t.stages + times)))
        case "lanes" if t.depth:
            return _stepping(t, c, doubled(t.depth, times, LEAST_TILE, min(lanes_of(a, 256) for a in c.inner)))
        case "lanes":
            most = 256 if c.reduces_columns else lanes_of(c.swept, 256)
            return _stepping(t, c, doubled(t.step, times, least_step(c, width), most))
    return t


def smaller_tiles(t: Tiles, c: Contraction, width: int) -> Tiles:
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
        return replace(t, step=t.step // 2) if t.step > least_step(c, width) else fewer_rows
    return replace(t, columns=t.columns // 2) if t.columns > LEAST_TILE else fewer_rows


def fitting(tiles: Tiles, c: Contraction, width: int, products: int, target: Target) -> Tiles:
    """What a program keeps in shared memory fits there."""
    inner, room = sum(lanes_of(a, 1 << 30) for a in c.inner), target.shared_bytes - RESERVED

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
    while needed(tiles) > room and (step := tiles.depth or tiles.step) > max(LEAST_TILE, least_step(c, width)):
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
