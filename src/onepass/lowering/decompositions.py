"""The decomposition table: what becomes primitives before the joint graph is partitioned.

Softmax, norms, losses and dropout are taken apart, so that their statistics are what backward saves.
Operations with a rule of their own, and library calls that would fall into many pieces, stay whole.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from .foreach import foreach_decompositions
from .random_decompositions import RANDOM
from .registry import RULES
from .strides import layout_decompositions
from .torch_private import core_aten_decompositions, every_decomposition, suggest_memory_format

aten = torch.ops.aten
Table = dict[Any, Callable[..., Any]]

_BATCH_NORMS = (
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit_no_training.default,
    aten._batch_norm_with_update_functional.default,
    aten._batch_norm_no_update.default,
)
# Taken apart in addition to torch's core table.
_ALSO = (
    aten._softmax.default,
    aten._log_softmax.default,
    aten.native_layer_norm.default,
    aten.native_group_norm.default,
    *_BATCH_NORMS,
    aten.batch_norm_backward.default,
    aten.ldexp.Tensor,
    aten.dist.default,
)
# One library call is better than the many operations these would become.
_WHOLE = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_attention_math.default,
    aten.scaled_dot_product_attention.default,
    aten.addbmm.default,
    aten.baddbmm.default,
    aten.addmv.default,
    aten.mv.default,
    aten.dot.default,
    aten.vdot.default,
    aten.take.default,  # torch's form calls .item() on a 0-d index
    aten.index_add.default,
    aten.index_copy.default,
    aten.index_fill.int_Scalar,
    aten.index_fill.int_Tensor,
    aten.embedding_dense_backward.default,
    aten.unfold_backward.default,
    aten.im2col.default,
    aten.col2im.default,
    aten.max_unpool2d.default,
    aten.max_unpool3d.default,
    aten.cdist.default,
    aten._euclidean_dist.default,
    aten.linalg_solve.default,
    aten.lu_solve.default,
    aten.lstm.input,
    aten.lstm.data,
    aten.gru.input,
    aten.gru.data,
    aten._unsafe_masked_index_put_accumulate.default,
    aten._chunk_cat.default,
)


# Eager gives these results its suggested memory format; torch's own decompositions keep the input's strides.
_SUGGESTED = (
    aten.log_sigmoid_forward.default,
    *_BATCH_NORMS,
)


# Eager's integers step in their own type; torch's own decompositions step in float64.
_FLOATING_ONLY = (
    aten.linspace.default,
    aten.linspace.Tensor_Tensor,
    aten.linspace.Tensor_Scalar,
    aten.linspace.Scalar_Tensor,
)


def _floating_only(decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """The decomposition where the result is floating; elsewhere the operation stays whole."""

    @functools.wraps(decomposition)
    def floating(*args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        if not (dtype or torch.get_default_dtype()).is_floating_point:
            return NotImplemented
        return decomposition(*args, dtype=dtype, **kwargs)

    return floating


def _in_suggested_format(decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """The decomposition with its first result laid out as eager lays it out."""

    @functools.wraps(decomposition)
    def laid_out(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        first, *others = decomposition(x, *args, **kwargs)
        return (first.contiguous(memory_format=suggest_memory_format(x)), *others)

    return laid_out


def _log_of_sum(exponential: Callable[..., Any], unit: float, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """logaddexp as eager computes it; torch's own decomposition writes expanded operands out and loses the layout."""

    def log_of_sum(x: torch.Tensor, y: torch.Tensor) -> Any:
        if not (x.is_floating_point() and y.is_floating_point()):
            return otherwise(x, y)
        largest = torch.maximum(x, y)
        total = largest + torch.log1p(exponential(-(x - y).abs())) * unit
        return torch.where((x == y) & torch.isinf(largest), largest, total)

    return log_of_sum


@functools.cache
def decomposition_table() -> Table:
    """The table to give AOTAutograd. Made once: torch's own takes 0.1 s to collect."""
    table: Table = dict(core_aten_decompositions())
    for op in _ALSO:
        if op in every_decomposition:
            table[op] = every_decomposition[op]
    for op in (*_WHOLE, *RULES):
        table.pop(op, None)
    table |= {op: _in_suggested_format(table[op]) for op in _SUGGESTED if op in table}
    table |= {op: _floating_only(table[op]) for op in _FLOATING_ONLY if op in table}
    for op, exponential, base in (
        (aten.logaddexp.default, torch.exp, math.e),
        (aten.logaddexp2.default, torch.exp2, 2),
    ):
        if op in table:
            table[op] = _log_of_sum(exponential, 1 / math.log(base), table[op])
    table.update(layout_decompositions())
    table.update(RANDOM)
    table.update(foreach_decompositions())
    return table
