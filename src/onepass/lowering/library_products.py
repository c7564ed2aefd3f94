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
_FEWEST_ROWS, _FEWEST_PRODUCTS = 4, 1 << 21  # from where on oneDNN was faster on a Zen 5
_FEWEST_COLUMNS, _MOST_COPIED = 128, 1 << 20  # where it was in spite of a copy


def wide_product(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...]] | None:
    """The call of oneDNN in place of a call of MKL; None where that one stays.

    Both matrices are dense: oneDNN computes slowly on a right one of other strides. A left one that is contiguous along
    its columns is copied, which pays where that copy stays in cache and many columns read it. A depth of 0 is refused.
    """
    if target not in (_PRODUCT, _SUM_AND_PRODUCT) or kwargs:
        return None
    *bias, left, right = args
    if not all(isinstance(x, View) and x.buffer.dtype is DType.F32 and x.buffer.device == "cpu" for x in args):
        return None
    (rows, depth), columns = left.shape, right.shape[1]
    weight = _transposed(right)
    copy_pays = numel([columns]) >= _FEWEST_COLUMNS and numel((rows, depth)) <= _MOST_COPIED
    if not _is_by_rows(left) and not (_is_by_rows(_transposed(left)) and copy_pays):
        return None
    if not (_is_by_rows(right) or _is_by_rows(weight)) or not depth.constant:
        return None
    if any(b.shape != (columns,) or b.strides != (Poly.ONE,) for b in bias):
        return None
    if min(numel([rows]), numel([columns])) < _FEWEST_ROWS or numel((rows, columns, depth)) < _FEWEST_PRODUCTS:
        return None
    (linear,) = operators("mkldnn._linear_pointwise.default")
    return linear, (left, weight, bias[0] if bias else None, "none", [], "")


def _transposed(matrix: View) -> View:
    return View(matrix.buffer, matrix.shape[::-1], matrix.strides[::-1], matrix.offset)


def _is_by_rows(matrix: View) -> bool:
    return matrix.strides == contiguous_strides(matrix.shape)
