"""Convolutions on GPUs, with the work around the product as operations of its own.

cuDNN adds a bias in a second kernel, and first copies operands whose memory format is not the one it computes in. As
operations of the graph both become part of the kernels after and before the convolution:

    convolution(x, weight, bias)  ->  convolution(x.contiguous(memory_format=...), weight, None) + bias

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
    (laid_out,) = _in_library_format(lambda: _FORWARD(x, weight, bias, *geometry), x)
    if bias is None:
        return NotImplemented if laid_out is x else _FORWARD(laid_out, weight, None, *geometry)
    return _FORWARD(laid_out, weight, None, *geometry) + bias.view(-1, *[1] * (x.ndim - 2))


def _convolution_backward(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, _bias_sizes: Any, *settings: Any
) -> Any:
    *geometry, (wants_x, wants_weight, wants_bias) = settings
    of_bias = gradient.sum([0, *range(2, x.ndim)]) if wants_bias else None
    if not (wants_x or wants_weight):
        return None, None, of_bias
    rest = weight, None, *geometry, [wants_x, wants_weight, False]
    given, read = _in_library_format(lambda: _BACKWARD(gradient, x, *rest)[0 if wants_x else 1], gradient, x)
    if given is gradient and read is x and not wants_bias:
        return NotImplemented
    return *_BACKWARD(given, read, *rest)[:2], of_bias


def _in_library_format(call: Callable[[], torch.Tensor], *operands: torch.Tensor) -> list[torch.Tensor]:
    """The operands in the memory format of the call's result, which is the format that the library computes in.

    Only for known sizes: sizes that a call makes while nothing is traced would be unknown to the graph.
    """
    if operands[0].ndim < 4 or any(isinstance(n, torch.SymInt) for x in operands for n in x.shape):
        return list(operands)
    with disable_proxy_modes_tracing():
        wanted = suggest_memory_format(call())
    return [x if x.is_contiguous(memory_format=wanted) else x.contiguous(memory_format=wanted) for x in operands]
