"""The decomposition table: what becomes primitives before the joint graph is partitioned.

Softmax, norms, losses and dropout are taken apart, so that their statistics are what backward saves.
Operations with a rule of their own, and library calls that would fall into many pieces, stay whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .foreach import foreach_decompositions
from .random_decompositions import RANDOM
from .registry import RULES
from .torch_private import core_aten_decompositions, every_decomposition

aten = torch.ops.aten
Table = dict[Any, Callable[..., Any]]

# Taken apart in addition to torch's core table.
_ALSO = (
    aten._softmax.default,
    aten._log_softmax.default,
    aten.native_layer_norm.default,
    aten.native_group_norm.default,
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit_no_training.default,
    aten._batch_norm_with_update_functional.default,
    aten._batch_norm_no_update.default,
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


@functools.cache
def decomposition_table() -> Table:
    """The table to give AOTAutograd. Made once: torch's own takes 0.1 s to collect."""
    table: Table = dict(core_aten_decompositions())
    for op in _ALSO:
        if op in every_decomposition:
            table[op] = every_decomposition[op]
    for op in (*_WHOLE, *RULES):
        table.pop(op, None)
    table.update(RANDOM)
    table.update(foreach_decompositions())
    return table
