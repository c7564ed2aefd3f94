"""float8: kernels move these types and convert them, through float32 and by their bits; they compute nothing in them.

Rounding is to the nearest, ties to even, as eager's. What is too large becomes infinity in float8_e5m2; float8_e4m3fn
has none, and eager makes it NaN or, from version 2.13 on, the largest number: it is asked once.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from ..ir.callables import operators
from ..ir.dtypes import DType
from ..ir.expr import Expr, calculate, literal, pointwise

MOVES = operators(
    "_to_copy prims.convert_element_type.default clone view _unsafe_view reshape unsqueeze squeeze.default/dim/dims "
    "permute transpose.int t expand slice.Tensor select.int"
)


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


_FORMATS = {DType.F8E4M3: _Format(3, 7, 0x43F00000, 0x7F), DType.F8E5M2: _Format(2, 15, 0x47800000, 0x7C)}
_NAN, _FLOAT_INFINITY = 0x7F, 0x7F800000


@functools.cache
def _saturates() -> bool:
    """Whether this torch's float8_e4m3fn takes the largest number for what is too large."""
    return bool(torch.tensor(500.0, device="cpu").to(torch.float8_e4m3fn).float().isfinite())


def encode(value: Expr, dtype: DType) -> Expr:
    """A float32 value as float8."""
    f = _FORMATS[dtype]
    bits = _bits(value)
    size = bits & 0x7FFFFFFF
    odd = (size >> f.dropped) & 1
    normal = (size + (f.rebias + (1 << (f.dropped - 1)) - 1) + odd) >> f.dropped
    # Below the smallest normal number, an addition rounds where the last bit of the result is.
    exponent = 24 - f.bias - f.mantissa
    small = _bits(_number(size) + 2.0**exponent) - ((exponent + 127) << 23)
    code = _where("lt", size, (128 - f.bias) << 23, small, normal)
    large = f.infinite
    if f.infinite == _NAN and _saturates():
        large = _NAN - 1
        code = calculate("minimum", code, large)  # a number just below may have been rounded up
    beyond = _where("gt", size, _FLOAT_INFINITY, literal(_NAN, DType.I32), large)
    code = _where("ge", size, f.overflow, beyond, code)
    byte = pointwise("cast", code | ((bits >> 24) & 0x80), dtype=DType.U8)
    return pointwise("bitcast", byte, dtype=dtype)


def decode(value: Expr) -> Expr:
    """A float8 value as float32."""
    f = _FORMATS[value.dtype]
    byte = pointwise("cast", pointwise("bitcast", value, dtype=DType.U8), dtype=DType.I32)
    size = byte & 0x7F
    number = _number(size << f.dropped) * 2.0 ** (127 - f.bias)
    if f.infinite != _NAN:
        number = _where("eq", size, f.infinite, math.inf, number)
    number = _where("gt", size, min(f.infinite, _NAN - 1), math.nan, number)
    return _number(_bits(number) | ((byte & 0x80) << 24))


def _bits(number: Expr) -> Expr:
    return pointwise("bitcast", number, dtype=DType.I32)


def _number(bits: Expr) -> Expr:
    return pointwise("bitcast", bits, dtype=DType.F32)


def _where(comparison: str, left: Expr, right: int, yes: Expr | float, no: Expr | float) -> Expr:
    return calculate("where", calculate(comparison, left, right), yes, no)
