"""Decompositions of `_foreach_*`, what a compiled optimiser step is made of: one call per tensor.

The lists are taken apart so that the updates of all parameters can share kernels. Torch's own general implementation
of these operations is a loop over the tensors; tracing it is the decomposition.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .torch_private import OpOverload, call_general

aten = torch.ops.aten
Tensors = Sequence[torch.Tensor]
_NAMES = (
    "abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg reciprocal "
    "round rsqrt sigmoid sign sin sinh sqrt tan tanh trunc add sub mul div pow clamp_min clamp_max maximum minimum "
    "addcmul addcdiv lerp norm max clone"
)
_READS_DATA = (aten._foreach_addcmul.Tensor, aten._foreach_addcdiv.Tensor)


def foreach_decompositions() -> dict[Any, Callable[..., Any]]:
    """The decompositions of those overloads this torch has."""
    table: dict[Any, Callable[..., Any]] = {op: functools.partial(call_general, op) for op in _overloads()}
    # Torch's loops over these two change a clone.
    return table | {aten._foreach_copy.default: _copy, aten._foreach_zero.default: _zero}


def _overloads() -> Iterator[OpOverload]:
    for name in _NAMES.split():
        packet = getattr(aten, f"_foreach_{name}", None)
        for overload in () if packet is None else packet.overloads():
            op = getattr(packet, overload)
            if not op._schema.is_mutable and op not in _READS_DATA:
                yield op


def _copy(tensors: Tensors, sources: Tensors, non_blocking: bool = False) -> list[torch.Tensor]:
    return [aten.copy(x, y) for x, y in zip(tensors, sources, strict=True)]


def _zero(tensors: Tensors) -> list[torch.Tensor]:
    return [torch.zeros_like(x) for x in tensors]
