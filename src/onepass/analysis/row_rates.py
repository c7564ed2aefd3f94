"""How fast programs that reduce the rows of products multiply, and how many rows each should have.

Fractions are of the rate a matmul of the library reaches. A tile's columns are read by every program, from the cache
that processors share: few rows for each program cost bandwidth there, many leave processors without work.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.target import Target
from .access import estimate, numel, power_above
from .contraction import LEAST_TILE
from .inline import reductions
from .nest import opened
from .operands import operands
from .passes import shares_out
from .rows import RowContraction

# Rows held in a tile, in a wide one; swept, with short and long sums. Seen on one H200: the slower of what was seen.
HELD, WIDE, SHORT, LONG = 0.3, 0.64, 0.4, 0.25
STORED = 0.5  # of that, where what is swept is stored, too
SMALL = 0.5  # of that, with tiles of fewer rows than the matrix unit likes
UNROUNDED = 0.4  # of that, on float32 operands that no matrix unit takes
WIDE_COLUMNS, SHORT_SUM, MATRIX_ROWS = 256, 256, 64
SWEPT_COLUMNS = 128


@dataclass(frozen=True, slots=True)
class ProductTime:
    """Time of all products, the share of the library's rate that is, the rows of a program, and how many kernels."""

    time_us: float
    share: float
    rows: int
    launches: int


def product_time(c: RowContraction, rate: float, target: Target) -> ProductTime:
    """The products of one sweep, where the library does `rate` multiply-adds in a microsecond."""
    products = {r for r in reductions(opened(c.nest)) if operands(r) is not None}
    columns = power_above(c.columns.extent.constant) if c.held else SWEPT_COLUMNS
    across = 1 if c.held else -(-estimate(c.columns.extent) // columns)
    depth = sum(estimate(a.extent) for r in products for a in r.over)
    width = max(side.dtype.bytes for r in products for side in operands(r) or ())
    others, length = max(1, numel(c.grid)), max(1, estimate(c.rows.extent))
    exact = UNROUNDED if width == 4 and not target.rounded_products else 1.0
    shared_out = not c.held and shares_out(c)
    choices: list[tuple[float, int, int]] = []
    for rows in (128, 64, 32, 16) if c.held else (max(LEAST_TILE, min(128, power_above(length))),):
        tiles = others * -(-length // rows)
        multiplied = rows * columns * across * depth / (_share(c, columns, rows) * exact * rate)
        copied = across * (columns + rows) * depth * width / target.cache_bytes_per_us
        rounds = -(-tiles // target.processors) * target.processors
        choices.append((rounds * max(multiplied, copied), rows, 1))
        if shared_out:  # columns by several programs, merged by a second kernel
            choices.append((tiles * max(multiplied, copied), rows, 2))
    time, rows, launches = min(choices, key=lambda x: x[0] + x[2] * target.launch_us)
    ideal = others * length * estimate(c.columns.extent) * depth / rate
    return ProductTime(time, ideal / time if time else 1.0, rows, launches)


def _share(c: RowContraction, columns: int, rows: int) -> float:
    if c.held:
        share = HELD if columns <= WIDE_COLUMNS else WIDE
    else:
        share = SHORT if max(estimate(a.extent) for a in c.inner) <= SHORT_SUM else LONG
        share *= STORED if any(c.columns in s.domain for s in c.nest.stores) else 1.0
    return share if rows >= MATRIX_ROWS else SMALL * share
