"""Why an operation without a rule is left to eager, and whether it must keep its place.

The reasons are data: the first row whose pattern matches the operation's name says it.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from ..ir.callables import PLUGGED
from .torch_private import HigherOrderOperator, OpOverload

_REASONS: tuple[tuple[str, str], ...] = (
    (r"^(mm|bmm|addmm|baddbmm|addbmm|mv|addmv|dot|vdot|_int_mm|_scaled_mm|_addmm_activation)$",
     "a matmul goes to the library, what is around it is fused"),
    (r"convolution|conv_|mkldnn|cudnn", "a convolution goes to the library"),
    (r"scaled_dot_product|_flash_attention|_efficient_attention", "attention in one call goes to the library"),
    (r"^_fft|^fft_", "a Fourier transform goes to the library"),
    (r"^(sort|argsort|topk|kthvalue|median|nanmedian|mode|msort|unique.*|_unique.*|searchsorted|bucketize|histc)$",
     "sorting and searching go to the library"),
    (r"scatter|index_add|index_copy|index_put|index_fill|index_reduce|put|embedding_dense_backward|embedding_bag",
     "a scatter to indices that are data goes to the library"),
    (r"^(nonzero.*|masked_select|_local_scalar_dense|item|bincount|repeat_interleave)$", "its result depends on data"),
    (r"pool", "pooling goes to the library"),
    (r"upsample|grid_sampler|_interpolate", "resampling goes to the library"),
    (r"linalg|cholesky|^_?lu_|triangular_solve|ormqr|geqrf|svd|eig|lstsq|cdist|_pdist|matrix_exp|householder",
     "linear algebra goes to the library"),
    (r"lstm|gru|rnn", "a recurrent network goes to the library"),
    (r"^special_|^polygamma|^digamma|^igammac?$|^i0$|^(gcd|lcm|frexp)$", "a special function that kernels do not have"),
    (r"^(im2col|col2im|unfold_backward)$", "overlapping windows go to the library"),
    (r"complex|^(real|imag|polar|conj|_conj|angle)$", "complex numbers go to eager"),
    (r"^(_assert|sym_constrain|_functional_assert)", "a check on the host"),
    (r"^rand|dropout$|^bernoulli|^normal|^multinomial|^poisson|^binomial|^exponential|^geometric|^cauchy|^log_normal",
     "random numbers of this distribution come from eager"),
)  # fmt: skip


def why_library(target: Any) -> str:
    """The reason an operation has no rule."""
    if isinstance(target, HigherOrderOperator):
        return f"{target}, an operator on functions, runs as eager does"
    if not isinstance(target, OpOverload):
        return "host code"
    if target.namespace not in ("aten", "prims", "onepass"):
        return "a kernel that is plugged in" if target.namespace == PLUGGED else "a custom operator"
    if target.namespace == "onepass":
        scales = target._opname == "scaled"
        return "a saved gradient is scaled in its place" if scales else "a seed is drawn on the host"
    name = target._opname
    for pattern, reason in _REASONS:
        if re.search(pattern, name):
            return reason
    return "no lowering rule"


def is_ordered(target: Any) -> bool:
    """Whether a call has effects besides its result, so that it keeps its place among such calls."""
    if isinstance(target, HigherOrderOperator):
        return True
    if not isinstance(target, OpOverload):
        return False
    if target.namespace not in ("aten", "prims", "onepass", PLUGGED):
        return True
    if target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
        return True
    return str(target._opname).startswith(("_assert", "sym_constrain", "_functional_assert", "_functional_sym"))
