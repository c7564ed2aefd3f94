"""Tile sizes of kernels with matrix products: rules over the target's facts and the lengths of the axes.

Sizes for 16-bit operands come from measurements on one H200; what does not fit a chip's shared memory gets fewer
stages, then narrower steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..analysis.access import estimate, power_above
from ..analysis.contraction import LEAST_TILE, Contraction
from ..ir.poly import Axis
from ..ir.target import Target

RESERVED = 2048  # bytes of shared memory for what reductions exchange
LEAST_BYTES = 32  # of a row of an operand of the matrix unit
FEW_ROWS = 32
GROUPED = 8  # tiles of rows that run beside each other, so that the other matrix is still in cache


@dataclass(frozen=True, slots=True)
class Tiles:
    """rows x columns of the result; `step` of the swept class at a time."""

    rows: int
    columns: int
    step: int
    warps: int
    stages: int
    resident: bool = False  # programs stay and take one tile after another


def choose_product_tiles(
    c: Contraction, width: int, products: int, across: bool, target: Target, candidate: int, others: int = 0
) -> Tiles:
    """The tiles of `products` products of matrices with `width` bytes; later candidates need fewer registers.

    `across`: the matrix with the columns is contiguous along them. `others`: elements of results beside this one.
    """
    tiles = _nested(c, width) if c.inner else _plain(c, width, products, across, target, others)
    for _ in range(candidate):
        tiles = _smaller(tiles, nested=bool(c.inner))
    tiles = replace(tiles, step=max(tiles.step, LEAST_BYTES // width))
    return _fitting(tiles, c, width, products, target)


def lanes_of(axis: Axis, most: int) -> int:
    """Lanes for an axis: all of a short one, but no less than a matrix unit takes."""
    return max(LEAST_TILE, min(most, power_above(axis.extent.constant)))


def _nested(c: Contraction, width: int) -> Tiles:
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
    return Tiles(rows, columns, step, warps, stages)


def _plain(c: Contraction, width: int, products: int, across: bool, target: Target, beside: int) -> Tiles:
    """One product, or several with the same rows: square tiles where the result is large."""
    rows, columns, step = lanes_of(c.rows, 128), lanes_of(c.columns, 128), lanes_of(c.swept, 128 // width)
    others = 1
    for a in c.grid:
        others *= estimate(a.extent)

    def programs(r: int, n: int) -> int:
        return others * -(-estimate(c.rows.extent) // r) * -(-estimate(c.columns.extent) // n) + beside // (r * n)

    if rows <= FEW_ROWS:  # the other matrix is read once: long lines of it, many on their way
        columns, step = (lanes_of(c.columns, 128), lanes_of(c.swept, 128)) if across else (32, lanes_of(c.swept, 256))
        return Tiles(rows, min(columns, lanes_of(c.columns, 128)), step, 4, 3 if across else 5)
    constant = all(a.extent.constant is not None for a in (c.rows, c.columns, *c.grid))
    if target.descriptors and width <= 2 and constant and programs(rows, columns) >= 4 * target.processors:
        if products == 1 and lanes_of(c.columns, 256) == 256 and rows == 128:
            return Tiles(128, 256, 128 // width, 8, 3, resident=True)
        return Tiles(rows, columns, step, 8, 4, resident=True)
    while programs(rows, columns) < target.processors and max(rows, columns) > 32:
        rows, columns = (rows // 2, columns) if rows > columns else (rows, columns // 2)
    if rows * columns <= 64 * 64:
        step = lanes_of(c.swept, 2 * step)
    return Tiles(rows, columns, step, 8 if rows * columns >= 128 * 128 else 4, 4 if rows * columns < 128 * 128 else 3)


def _smaller(tiles: Tiles, nested: bool) -> Tiles:
    if tiles.warps < 8 and tiles.rows >= 64:
        return replace(tiles, warps=8)
    if nested:
        return replace(tiles, step=max(LEAST_TILE, tiles.step // 2))
    return replace(tiles, columns=max(LEAST_TILE, tiles.columns // 2))


def _fitting(tiles: Tiles, c: Contraction, width: int, products: int, target: Target) -> Tiles:
    """What a program keeps in shared memory fits there."""
    inner = sum(lanes_of(a, 1 << 30) for a in c.inner)

    def needed(t: Tiles) -> int:
        if c.inner:
            return width * (t.rows * inner + t.stages * t.step * (inner + t.columns))
        widest = max(s.buffer.dtype.bytes for s in c.nest.stores)
        stored = widest * t.rows * t.columns if t.resident else 0  # a tile leaves by shared memory
        return width * t.stages * t.step * (t.rows + t.columns * products) + stored

    while needed(tiles) > target.shared_bytes - RESERVED and tiles.stages > 1:
        tiles = replace(tiles, stages=tiles.stages - 1)
    while needed(tiles) > target.shared_bytes - RESERVED and tiles.step > max(LEAST_TILE, LEAST_BYTES // width):
        tiles = replace(tiles, step=tiles.step // 2)
    return tiles
