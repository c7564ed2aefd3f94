"""Products of float32 matrices on CPUs for which torch's other library has the faster code.

torch multiplies by MKL. On processors of other makers MKL computes with vectors of half the width; oneDNN, torch's
library of convolutions, computes with whole ones, but takes longer to start (`Target.wide_products`):

    addmm(bias, x, weight.t())  ->  _linear_pointwise(x, weight, bias)
"""

from __future__ import annotations

from typing import Any

from ..analysis.access import numel
from ..ir.callables import operators
from ..ir.dtypes import DType
from ..ir.poly import Poly
from ..ir.program import View, contiguous_strides

ON_WIDE_VECTORS = "a matmul goes to the library, here to oneDNN, whose vectors are wider than those of MKL"
_PRODUCT, _SUM_AND_PRODUCT = operators("mm addmm")
_FEWEST_ROWS, _FEWEST_PRODUCTS = 4, 1 << 20  # from where on oneDNN was faster on a Zen 5


def wide_product(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...]] | None:
    """The call of oneDNN in place of a call of MKL; None where that one stays.

    Both matrices are dense: oneDNN copies a left one of other strides, and computes slowly on such a right one. Its
    calls take no depth of 0.
    """
    if target not in (_PRODUCT, _SUM_AND_PRODUCT) or kwargs:
        return None
    *bias, left, right = args
    if not all(isinstance(x, View) and x.buffer.dtype is DType.F32 and x.buffer.device == "cpu" for x in args):
        return None
    (rows, depth), columns = left.shape, right.shape[1]
    weight = View(right.buffer, right.shape[::-1], right.strides[::-1], right.offset)
    if not _is_by_rows(left) or not (_is_by_rows(right) or _is_by_rows(weight)) or not depth.constant:
        return None
    if any(b.shape != (columns,) or b.strides != (Poly.ONE,) for b in bias):
        return None
    if min(numel([rows]), numel([columns])) < _FEWEST_ROWS or numel((rows, columns, depth)) < _FEWEST_PRODUCTS:
        return None
    (linear,) = operators("mkldnn._linear_pointwise.default")
    return linear, (left, weight, bias[0] if bias else None, "none", [], "")


def _is_by_rows(matrix: View) -> bool:
    return matrix.strides == contiguous_strides(matrix.shape)
