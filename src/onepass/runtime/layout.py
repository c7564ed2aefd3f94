"""Tensors whose layout is not the one kernels were compiled for are copied into it.

FX metadata promises strides for results of operators and for tangents; at run time they may differ.
The fast comparison is in the generated host program; these functions run only where it fails.
"""

from __future__ import annotations

import torch

from ..errors import LayoutMismatch

Sizes = tuple[int, ...]


def settle(tensor: torch.Tensor, shape: Sizes, strides: Sizes) -> torch.Tensor:
    """The tensor with these strides: itself where they do not matter, else a copy."""
    if tuple(tensor.shape) != shape:
        if tensor.numel() == 0 and 0 in shape:  # nothing is lost, and eager would go on
            return tensor.new_empty(shape)
        raise LayoutMismatch("an operator", f"shape {tuple(tensor.shape)}", f"shape {shape}")
    pairs = zip(shape, tensor.stride(), strides, strict=True)
    if tensor.numel() == 0 or all(size == 1 or found == wanted for size, found, wanted in pairs):
        return tensor
    result = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)
    # An expanded dimension holds each element once; writing it through one index is enough.
    repeated = [dim for dim, (size, stride) in enumerate(zip(shape, strides, strict=True)) if size > 1 and stride == 0]
    target, source = result, tensor
    for dim in repeated:
        target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    target.copy_(source)
    if repeated and not torch.equal(result, tensor):
        raise LayoutMismatch("an operator", f"strides {tensor.stride()}", f"strides {strides}")
    return result


def settle_result(tensor: torch.Tensor, shape: Sizes, strides: Sizes, dtype: torch.dtype) -> torch.Tensor:
    """`settle` for what an operator returned: its dtype is compared as well."""
    if tensor.dtype is not dtype:
        raise LayoutMismatch("an operator", tensor.dtype, dtype)
    return settle(tensor, shape, strides)


_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def word_of(number: torch.Tensor) -> int:
    """The bits of a single number, for a kernel on another device."""
    if number.dtype is torch.int64:
        return int(number.item())
    return int(number.contiguous().view(_WORDS[number.element_size()]).item())
