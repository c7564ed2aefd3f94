"""Tile sizes of kernels that reduce the rows of matrix products.

Held columns are one tile, with as many rows as multiply fastest. Swept columns come in tiles that leave
room for two programs on a processor: one computes exponentials while the other multiplies.
"""

from __future__ import annotations

from ..analysis.access import estimate
from ..analysis.contraction import LEAST_TILE, Contraction
from ..ir.target import Target
from .contraction_tiles import RESERVED, Tiles, fitting, lanes_of

MOST_DEPTH = 256  # of the products' own sum that is held whole, in elements of 16 bits
MOST_OPERAND = 64 * 128  # elements of a matrix that is in registers
EXACT_TILE = 64 * 64  # of a product without a matrix unit
LONG_DEPTH = 1024  # from which wide tiles pay although only one program fits


def row_tiles(c: Contraction, width: int, products: int, target: Target) -> list[Tiles]:
    """Tiles worth a price, of `products` products of matrices with `width` bytes."""
    exact = width == 4 and not target.rounded_products  # no matrix unit: both matrices are in registers
    found = (_held if c.held else _swept)(c, width, exact, target)
    return list(dict.fromkeys(fitting(t, c, width, products, target) for t in found))


def _held(c: Contraction, width: int, exact: bool, target: Target) -> list[Tiles]:
    columns = lanes_of(c.columns, 1 << 30)
    most = EXACT_TILE // columns if exact else 128 if columns <= 256 else 64
    sizes = [r for r in (64, 128, 32) if r <= min(most, lanes_of(c.rows, most))] + [LEAST_TILE]
    return [_held_by(c, rows, columns, width, exact) for rows in sizes]


def _held_by(c: Contraction, rows: int, columns: int, width: int, exact: bool) -> Tiles:
    area = rows * columns
    inside = max(LEAST_TILE, MOST_OPERAND // columns) if rows < 64 else 64  # small tiles have matrices in registers
    depth = min(lanes_of(a, LEAST_TILE if exact else inside * 2 // width) for a in c.inner)
    warps = 8 if exact or area >= 128 * 128 or columns > 256 else 4
    return Tiles(rows, columns, columns, warps, 4 if area < 128 * 256 else 3, depth=depth)


def _swept(c: Contraction, width: int, exact: bool, target: Target) -> list[Tiles]:
    if exact:
        return [Tiles(lanes_of(c.rows, 64), 64, 64, 8, 2, depth=LEAST_TILE)]
    whole = sum(lanes_of(a, 1 << 30) for a in c.inner)
    rows = lanes_of(c.rows, 128)
    warps = 8 if rows == 128 else 4
    if whole * width <= 2 * MOST_DEPTH and width * whole * (rows + 128) <= target.shared_bytes - RESERVED:
        return [Tiles(rows, 128, 128 if width == 2 else 64, warps, 2)]
    wide = width == 2 and rows == 128 and min(estimate(a.extent) for a in c.inner) >= LONG_DEPTH
    step = 256 if wide else 128
    depth = min(lanes_of(a, 128 // width) for a in c.inner)
    found = [Tiles(rows, s, s, warps, 3, depth=depth) for s in dict.fromkeys((step, 128))]
    return found if rows < 128 else [*found, Tiles(64, 128, 128, 4, 4, depth=depth)]
