"""The predicted time of the library's products and attention, beside which a kernel of ours is priced."""

from __future__ import annotations

import math

from ..ir.dtypes import DType
from ..ir.program import Define
from ..ir.target import Target
from .access import estimate, numel, storage_bytes
from .inline import loaded, reductions
from .operands import operands, uncast
from .single_row import vector_and_matrix

ALIGNED_BYTES = 16
NARROW_HEAD, QUERIES = 64, 128  # of the library's attention


def multiply_rate(dtype: DType, target: Target) -> float:
    """Multiply-adds per microsecond on operands of one type, as matmuls of the library reach."""
    if dtype is DType.F32:
        return target.products_per_us / (2 if target.rounded_products else 16)
    return target.products_per_us * (2 if dtype.bytes == 1 else 1)


def product_us(define: Define, target: Target) -> float:
    """The time of one product of matrices by the library."""
    total = 0.0
    for r in reductions([define.value]):
        sides = operands(r) or vector_and_matrix(r)
        left, right = sides if sides is not None else (r, r)
        depth = numel(r.over)
        rows, columns = numel(left.axes - right.axes), numel(right.axes - left.axes)
        batches = numel((left.axes & right.axes) - {*r.over}) if sides is not None else numel(r.axes)
        moved = [define.buffer, *loaded(define.value)]
        odd = any(b.dtype.bytes * estimate(s) % ALIGNED_BYTES for b in moved for s in b.strides if estimate(s) > 1)
        us = multiply_us(batches, rows, columns, depth, uncast(left).dtype, sum(map(storage_bytes, moved)), target)
        total += us * (target.rates.unaligned if odd else 1.0)
    return target.launch_us + target.rates.call_us + total


def multiply_us(batches: int, rows: int, columns: int, depth: int, dtype: DType, moved: int, target: Target) -> float:
    """The time of a product without its call: of so many multiply-adds, and bytes that cross memory."""
    rate = multiply_rate(dtype, target)
    unit = min(_unit_us(batches, rows, columns, depth, *tile, rate, target) for tile in target.rates.library_tiles)
    memory = moved / target.memory_bytes_per_us
    return max(unit, memory) + target.rates.library_exposed * min(unit, memory)


def _unit_us(
    batches: int, rows: int, columns: int, depth: int, down: int, across: int, part: float, rate: float, target: Target
) -> float:
    """The matrix unit's time with one kind of tiles; the last round of tiles takes as long as any."""
    tiles = batches * -(-rows // down) * -(-columns // across)
    rounds = math.ceil(tiles / target.processors)
    return rounds * target.processors * down * across * depth / (part * rate)


def attention_us(batches: int, heads: int, rows: int, keys: int, depth: int, causal: bool, target: Target) -> float:
    """The time of one call of the library's attention on 16-bit operands."""
    rounds = math.ceil(batches * heads * -(-rows // QUERIES) / target.processors)
    products = 2 * rounds * target.processors * QUERIES * keys * depth
    part = target.rates.attention_wide if depth > NARROW_HEAD else target.rates.attention_narrow
    visited = 0.5 + 0.5 * min(1.0, target.rates.attention_uneven * QUERIES / max(1, rows)) if causal else 1.0
    return target.launch_us + target.rates.attention_us + visited * products / (part * target.products_per_us)
