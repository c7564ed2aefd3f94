"""Triton kernels written by hand, one per program: what a person gets. Imported only where Triton and a GPU are."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS_PER_PROCESSOR = 4
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _erf(x):
    """Abramowitz and Stegun 7.1.26: error below 1.5e-7."""
    z = tl.abs(x)
    t = 1.0 / (1.0 + 0.3275911 * z)
    p = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
    value = 1.0 - p * tl.exp2(-z * z * _LOG2_E)
    return tl.where(x < 0, -value, value)


@triton.jit
def _bias_gelu_kernel(x, bias, out, elements, columns: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    value = tl.load(x + at, inside).to(tl.float32) + tl.load(bias + at % columns, inside).to(tl.float32)
    tl.store(out + at, 0.5 * value * (1.0 + _erf(value * 0.7071067811865476)), inside)


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    out = torch.empty_like(x)
    _bias_gelu_kernel[(triton.cdiv(x.numel(), 2048),)](x, bias, out, x.numel(), x.shape[-1], BLOCK=2048, num_warps=4)
    return out


@triton.jit
def _layernorm_kernel(x, weight, shift, out, columns, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    inside = at < columns
    start = tl.program_id(0).to(tl.int64) * columns
    value = tl.load(x + start + at, inside, 0.0).to(tl.float32)
    centred = tl.where(inside, value - tl.sum(value, 0) / columns, 0.0)
    normal = centred * tl.rsqrt(tl.sum(centred * centred, 0) / columns + 1e-5)
    scaled = normal * tl.load(weight + at, inside).to(tl.float32) + tl.load(shift + at, inside).to(tl.float32)
    tl.store(out + start + at, scaled, inside)


def layernorm(x: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
    out, (rows, columns) = torch.empty_like(x), x.shape
    block = triton.next_power_of_2(columns)
    _layernorm_kernel[(rows,)](x, weight, shift, out, columns, BLOCK=block, num_warps=8)
    return out


@triton.jit
def _softmax_kernel(x, out, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    at = row.to(tl.int64) * columns + column
    inside = (row < rows) & (column < columns)
    value = tl.load(x + at, inside, -float("inf")).to(tl.float32)
    power = tl.exp2((value - tl.max(value, 1)[:, None]) * _LOG2_E)
    tl.store(out + at, power / tl.sum(power, 1)[:, None], inside)


def softmax(x: Tensor) -> Tensor:
    out, (rows, columns) = torch.empty_like(x), x.shape
    block = triton.next_power_of_2(columns)
    _softmax_kernel[(triton.cdiv(rows, 2),)](x, out, rows, columns, ROWS=2, BLOCK=block, num_warps=8)
    return out


@triton.jit
def _partial_columns_kernel(x, y, partial, rows, columns, STEPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for step in tl.range(STEPS, num_stages=4):
        row = (step * tl.num_programs(1) + tl.program_id(1)) * ROWS + tl.arange(0, ROWS)[:, None]
        at = row.to(tl.int64) * columns + column[None, :]
        inside = (row < rows) & (column < columns)[None, :]
        product = tl.load(x + at, inside, 0.0).to(tl.float32) * tl.load(y + at, inside, 0.0).to(tl.float32)
        total += product
    tl.store(partial + tl.program_id(1) * columns + column, tl.sum(total, 0), column < columns)


@triton.jit
def _finish_columns_kernel(partial, out, columns, parts: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((PARTS, BLOCK), tl.float32)
    for first in tl.range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)[:, None]
        total += tl.load(partial + part * columns + column, (part < parts) & (column < columns), 0.0)
    tl.store(out + column, tl.sum(total, 0)[None, :], column < columns)


def column_sum_of_product(x: Tensor, y: Tensor) -> Tensor:
    rows, columns = x.shape
    blocks = triton.cdiv(columns, 1024)
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
    parts = max(1, min(triton.cdiv(rows, 8), _PROGRAMS_PER_PROCESSOR * processors // blocks))
    partial = torch.empty((parts, columns), dtype=torch.float32, device=x.device)
    out = torch.empty((columns,), dtype=x.dtype, device=x.device)
    steps = triton.cdiv(rows, 8 * parts)
    _partial_columns_kernel[(blocks, parts)](x, y, partial, rows, columns, STEPS=steps, ROWS=8, BLOCK=1024, num_warps=4)
    _finish_columns_kernel[(triton.cdiv(columns, 16),)](partial, out, columns, parts, PARTS=16, BLOCK=16, num_warps=1)
    return out


@triton.jit
def _cross_entropy_kernel(x, target, losses, columns: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    largest, total = -float("inf"), 0.0
    for first in tl.range(0, columns, BLOCK, num_stages=3):
        at = first + tl.arange(0, BLOCK)
        value = tl.load(x + row * columns + at, at < columns, -float("inf")).to(tl.float32) * _LOG2_E
        larger = tl.maximum(largest, tl.max(value, 0))
        total = total * tl.exp2(largest - larger) + tl.sum(tl.exp2(value - larger), 0)
        largest = larger
    chosen = tl.load(x + row * columns + tl.load(target + row)).to(tl.float32)
    tl.store(losses + row, (largest + tl.log2(total)) / _LOG2_E - chosen)


def cross_entropy(x: Tensor, target: Tensor) -> Tensor:
    rows, columns = x.shape
    losses = torch.empty((rows,), dtype=torch.float32, device=x.device)
    _cross_entropy_kernel[(rows,)](x, target, losses, columns, BLOCK=4096, num_warps=4)
    return losses.mean().to(x.dtype)


@triton.jit
def _add(a, b):
    return a + b


@triton.jit
def _gated_cumsum_kernel(x, gate, out, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * columns
    before = 0.0
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        g = tl.load(gate + row + at, at < columns, 0.0)
        share = 1.0 / (1.0 + tl.exp2(-g * _LOG2_E))
        value = tl.load(x + row + at, at < columns, 0.0) * share
        tl.store(out + row + at, (before + tl.associative_scan(value, 0, _add)) * g * share, at < columns)
        before += tl.sum(value, 0)


def gated_cumsum(x: Tensor, gate: Tensor) -> Tensor:
    rows, columns = x.shape
    out = torch.empty_like(x)
    _gated_cumsum_kernel[(rows,)](x, gate, out, columns, BLOCK=4096, num_warps=8)
    return out
