"""The decomposition table: what becomes primitives before the joint graph is partitioned.

Softmax, norms, losses and dropout are taken apart, so that their statistics are what backward saves.
Operations with a rule of their own, and library calls that would fall into many pieces, stay whole.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..ir.callables import operators
from .convolutions import convolution_decompositions
from .pooling import pooling_decompositions
from .random_decompositions import EAGER_RANDOM, RANDOM
from .registry import RULES
from .strides import layout_decompositions
from .torch_private import (
    OpOverload,
    call_general,
    core_aten_decompositions,
    every_decomposition,
    suggest_memory_format,
)

Table = dict[Any, Callable[..., Any]]

_BATCH_NORMS = operators(
    "native_batch_norm _native_batch_norm_legit.default/no_stats _native_batch_norm_legit_functional "
    "_native_batch_norm_legit_no_training _batch_norm_with_update_functional _batch_norm_no_update"
)
# Taken apart in addition to torch's core table.
_ALSO = _BATCH_NORMS + operators(
    "_softmax _log_softmax native_layer_norm native_group_norm batch_norm_backward ldexp.Tensor dist"
)
# One library call is better than the many operations these would become. (Torch's `take` calls .item() on a 0-d index.)
_WHOLE = operators(
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_attention_math scaled_dot_product_attention "
    "addbmm baddbmm addmv mv dot vdot take index_add index_copy index_fill.int_Scalar/int_Tensor "
    "embedding_dense_backward unfold_backward im2col col2im max_unpool2d max_unpool3d cdist _euclidean_dist "
    "linalg_solve lu_solve lstm.input/data gru.input/data _unsafe_masked_index_put_accumulate _chunk_cat"
)
# Torch's own decompositions keep the input's strides. Eager gives the first result its suggested memory format, and on
# CPUs the log of a sigmoid is row-major.
_LAID_OUT = operators("log_sigmoid_forward") + _BATCH_NORMS
# Eager's integers step in their own type; torch's own decompositions step in float64.
_FLOATING_ONLY = operators("linspace.default/Tensor_Tensor/Tensor_Scalar/Scalar_Tensor")


def _floating_only(decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """The decomposition where the result is floating; elsewhere the operation stays whole."""

    @functools.wraps(decomposition)
    def floating(*args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        if not (dtype or torch.get_default_dtype()).is_floating_point:
            return NotImplemented
        return decomposition(*args, dtype=dtype, **kwargs)

    return floating


def _laid_out(op: Any, decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """The decomposition with its first result laid out as eager lays it out."""

    @functools.wraps(decomposition)
    def call(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        first, *others = decomposition(x, *args, **kwargs)
        if op in _BATCH_NORMS:
            return (first.contiguous(memory_format=suggest_memory_format(x)), *others)
        return (first if x.is_cuda else first.contiguous(), *others)

    return call


def _log_of_sum(exponential: Callable[..., Any], unit: float, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """logaddexp as eager computes it; torch's own decomposition writes expanded operands out and loses the layout."""

    def log_of_sum(x: torch.Tensor, y: torch.Tensor) -> Any:
        if not (x.is_floating_point() and y.is_floating_point()):
            return otherwise(x, y)
        largest = torch.maximum(x, y)
        total = largest + torch.log1p(exponential(-(x - y).abs())) * unit
        return torch.where((x == y) & torch.isinf(largest), largest, total)

    return log_of_sum


def _times_log(logarithm: Callable[..., Any]) -> Callable[..., Any]:
    """xlogy, laid out like its first operand, as in eager; torch's own decomposition looks at the second first."""

    def times_log(x: torch.Tensor, y: torch.Tensor) -> Any:
        return torch.where((x == 0) & ~torch.isnan(y), 0, x * logarithm(y.to(torch.result_type(x, y))))

    return times_log


def decomposition_table(target: str = "auto", eager_random: bool = False) -> Table:
    """The table to give AOTAutograd for the target of that name. `eager_random`: eager's own calls draw numbers."""
    table = _for_every_target() | convolution_decompositions(target)
    if eager_random:
        drawing = {op for op in table if torch.Tag.nondeterministic_seeded in op.tags}
        table = {op: decomposition for op, decomposition in table.items() if op not in drawing} | EAGER_RANDOM
    return table


@functools.cache
def _for_every_target() -> Table:
    """Made once: torch's own table takes 0.1 s to collect."""
    table: Table = dict(core_aten_decompositions())
    table |= {op: every_decomposition[op] for op in _ALSO if op in every_decomposition}
    table = {op: decomposition for op, decomposition in table.items() if op not in _WHOLE and op not in RULES}
    table |= {op: _laid_out(op, table[op]) for op in _LAID_OUT if op in table}
    table |= {op: _floating_only(table[op]) for op in _FLOATING_ONLY if op in table}
    exponentials = zip(operators("logaddexp logaddexp2"), (torch.exp, torch.exp2), (math.e, 2), strict=True)
    table |= {op: _log_of_sum(exp, 1 / math.log(base), table[op]) for op, exp, base in exponentials if op in table}
    logarithms = zip(operators("xlogy.Tensor special_xlog1py"), (torch.log, torch.log1p), strict=True)
    table |= {op: _times_log(logarithm) for op, logarithm in logarithms}
    return table | layout_decompositions() | pooling_decompositions() | RANDOM | _foreach()


# Lists of tensors, what a compiled optimiser step is made of, are taken apart so that the updates of all parameters can
# share kernels. Torch's own general implementation is a loop over the tensors; tracing it is the decomposition.
_FOREACH = (
    "abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg reciprocal "
    "round rsqrt sigmoid sign sin sinh sqrt tan tanh trunc add sub mul div pow clamp_min clamp_max maximum minimum "
    "addcmul addcdiv lerp norm max clone"
)
_READS_DATA = operators("_foreach_addcmul.Tensor _foreach_addcdiv.Tensor")


def _foreach() -> Table:
    """The decompositions of those overloads of `_foreach_*` that this torch has."""
    table: Table = {op: functools.partial(call_general, op) for op in _foreach_overloads()}
    # Torch's loops over these two change a clone.
    copy, zero = operators("_foreach_copy _foreach_zero")
    return table | {copy: _copy_each, zero: lambda tensors: [torch.zeros_like(x) for x in tensors]}


def _foreach_overloads() -> Iterator[OpOverload]:
    for name in _FOREACH.split():
        packet = getattr(torch.ops.aten, f"_foreach_{name}", None)
        for overload in () if packet is None else packet.overloads():
            op = getattr(packet, overload)
            if not op._schema.is_mutable and op not in _READS_DATA:
                yield op


def _copy_each(xs: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], non_blocking: bool = False) -> Any:
    return [torch.ops.aten.copy(x, y) for x, y in zip(xs, sources, strict=True)]
