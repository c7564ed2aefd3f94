"""float8: kernels move these types and convert them, through float32 and by their bits; they compute nothing in them.

Rounding is to the nearest, ties to even, as eager's. What is too large becomes infinity in float8_e5m2; float8_e4m3fn
has none, and eager makes it NaN or, from version 2.13 on, the largest number: it is asked once.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from ..ir.dtypes import DType
from ..ir.expr import Expr, const, pointwise

aten, prims = torch.ops.aten, torch.ops.prims

MOVES = frozenset(
    [
        aten._to_copy.default, prims.convert_element_type.default, aten.clone.default, aten.view.default,
        aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.default,
        aten.squeeze.dim, aten.squeeze.dims, aten.permute.default, aten.transpose.int, aten.t.default,
        aten.expand.default, aten.slice.Tensor, aten.select.int,
    ]
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Format:
    """mantissa: its bits; bias: of the exponent; overflow: float32 bits from which numbers are too large."""

    mantissa: int
    bias: int
    overflow: int
    infinite: int  # the code of infinity; of NaN where there is none

    @property
    def dropped(self) -> int:
        """Bits of a float32's mantissa that are rounded away."""
        return 23 - self.mantissa

    @property
    def rebias(self) -> int:
        return (self.bias - 127) << 23


_FORMATS = {
    DType.F8E4M3: _Format(3, 7, 0x43F00000, 0x7F),
    DType.F8E5M2: _Format(2, 15, 0x47800000, 0x7C),
}
_NAN, _FLOAT_INFINITY = 0x7F, 0x7F800000


@functools.cache
def _saturates() -> bool:
    """Whether this torch's float8_e4m3fn takes the largest number for what is too large."""
    return bool(torch.tensor(500.0, device="cpu").to(torch.float8_e4m3fn).float().isfinite())


def encode(value: Expr, dtype: DType) -> Expr:
    """A float32 value as float8."""
    f = _FORMATS[dtype]
    bits = pointwise("bitcast", value, dtype=DType.I32)
    size = pointwise("bitand", bits, _number(0x7FFFFFFF))
    odd = pointwise("bitand", pointwise("shr", size, _number(f.dropped)), _number(1))
    half = pointwise("add", size, _number(f.rebias + (1 << (f.dropped - 1)) - 1))
    normal = pointwise("shr", pointwise("add", half, odd), _number(f.dropped))
    # Below the smallest normal number, an addition rounds where the last bit of the result is.
    step = 2.0 ** (24 - f.bias - f.mantissa)
    moved = pointwise("add", pointwise("bitcast", size, dtype=DType.F32), const(step, DType.F32))
    step_bits = (int(math.log2(step)) + 127) << 23
    small = pointwise("sub", pointwise("bitcast", moved, dtype=DType.I32), _number(step_bits))
    least = _number((128 - f.bias) << 23)
    code = _where(pointwise("lt", size, least), small, normal)
    large = f.infinite
    if f.infinite == _NAN and _saturates():
        large = _NAN - 1
        code = pointwise("minimum", code, _number(large))  # a number just below may have been rounded up
    beyond = _where(pointwise("gt", size, _number(_FLOAT_INFINITY)), _number(_NAN), _number(large))
    code = _where(pointwise("ge", size, _number(f.overflow)), beyond, code)
    sign = pointwise("bitand", pointwise("shr", bits, _number(24)), _number(0x80))
    byte = pointwise("cast", pointwise("bitor", code, sign), dtype=DType.U8)
    return pointwise("bitcast", byte, dtype=dtype)


def decode(value: Expr) -> Expr:
    """A float8 value as float32."""
    f = _FORMATS[value.dtype]
    byte = pointwise("cast", pointwise("bitcast", value, dtype=DType.U8), dtype=DType.I32)
    size = pointwise("bitand", byte, _number(0x7F))
    scaled = pointwise("bitcast", pointwise("shl", size, _number(f.dropped)), dtype=DType.F32)
    number = pointwise("mul", scaled, const(2.0 ** (127 - f.bias), DType.F32))
    if f.infinite != _NAN:
        infinite = pointwise("eq", size, _number(f.infinite))
        number = pointwise("where", infinite, const(math.inf, DType.F32), number, dtype=DType.F32)
    nan = pointwise("gt", size, _number(min(f.infinite, _NAN - 1)))
    number = pointwise("where", nan, const(math.nan, DType.F32), number, dtype=DType.F32)
    sign = pointwise("shl", pointwise("bitand", byte, _number(0x80)), _number(24))
    signed = pointwise("bitor", pointwise("bitcast", number, dtype=DType.I32), sign)
    return pointwise("bitcast", signed, dtype=DType.F32)


def _number(value: int) -> Expr:
    return const(value, DType.I32)


def _where(condition: Expr, yes: Expr, no: Expr) -> Expr:
    return pointwise("where", condition, yes, no, dtype=DType.I32)
