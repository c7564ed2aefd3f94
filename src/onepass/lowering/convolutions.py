"""Convolutions on GPUs, with the work around the product as operations of its own.

cuDNN adds a bias in a second kernel, and first copies operands whose memory format is not the one it computes in:
channels last wherever its matrix units multiply 16-bit numbers. As operations of the graph both become part of the
kernels after and before the convolution, and the result has eager's format again:

    convolution(x, weight, bias)  ->  convolution(x.contiguous(memory_format=...), weight, None).contiguous() + bias

On CPUs the library adds the bias while it stores the result, and copies into formats of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..ir.callables import operators
from ..ir.target import find_target
from .torch_private import disable_proxy_modes_tracing, suggest_memory_format

_FORWARD, _BACKWARD = operators("convolution convolution_backward")
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def convolution_decompositions(target: str) -> dict[Any, Callable[..., Any]]:
    """The decompositions for the target of that name; with "auto", the tensors' device decides."""

    def on_gpu(decomposition: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(decomposition)
        def taken_apart(x: torch.Tensor, *args: Any) -> Any:
            is_gpu = x.is_cuda if target == "auto" else find_target(target).language != "c"
            return decomposition(x, *args) if is_gpu and x.is_floating_point() else NotImplemented

        return taken_apart

    return {_FORWARD: on_gpu(_convolution), _BACKWARD: on_gpu(_convolution_backward)}


def _convolution(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *geometry: Any) -> Any:
    given, promised = _in_library_format(lambda: _FORWARD(x, weight, bias, *geometry), x, weight)
    if bias is None and given[0] is x and given[1] is weight:
        return NotImplemented
    result = _in_format(_FORWARD(*given, None, *geometry), promised)
    return result if bias is None else result + bias.view(-1, *[1] * (x.ndim - 2))


def _convolution_backward(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, _bias_sizes: Any, *settings: Any
) -> Any:
    *geometry, (wants_x, wants_weight, wants_bias) = settings
    of_bias = gradient.sum([0, *range(2, x.ndim)]) if wants_bias else None
    if not (wants_x or wants_weight):
        return None, None, of_bias
    rest = None, *geometry, [wants_x, wants_weight, False]
    operands = gradient, x, weight
    given, promised = _in_library_format(lambda: _BACKWARD(*operands, *rest)[0 if wants_x else 1], *operands)
    if not wants_bias and all(a is b for a, b in zip(given, operands, strict=True)):
        return NotImplemented
    found = _BACKWARD(*given, *rest)[:2]
    return *(y if y is None else _in_format(y, promised) for y in found), of_bias


def _in_library_format(
    call: Callable[[], torch.Tensor], *operands: torch.Tensor
) -> tuple[list[torch.Tensor], torch.memory_format | None]:
    """The operands in the format that the library computes in, and the format of the call's result as it is promised.

    The weight is the last operand: it is copied only where the format is not the promised one. Only for known sizes:
    sizes that a call makes while nothing is traced would be unknown to the graph. Nothing is
    computed for an empty batch.
    """
    sizes = [n for x in operands for n in x.shape]
    if operands[0].ndim < 4 or any(isinstance(n, torch.SymInt) for n in sizes) or 0 in sizes:
        return list(operands), None
    with disable_proxy_modes_tracing():
        promised = suggest_memory_format(call())
    is_wide = operands[0].dtype not in (torch.float16, torch.bfloat16) or torch.version.hip is not None
    computed = promised if is_wide or promised is not torch.contiguous_format else _LAST[operands[0].ndim]
    *rest, weight = operands
    given = [_in_format(x, computed) for x in rest]
    return [*given, weight if computed is promised else _in_format(weight, computed)], promised


def _in_format(x: torch.Tensor, wanted: torch.memory_format | None) -> torch.Tensor:
    return x if wanted is None or x.is_contiguous(memory_format=wanted) else x.contiguous(memory_format=wanted)
