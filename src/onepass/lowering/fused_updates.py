"""Torch's fused optimiser steps, one call for all parameters, as operations on each.

Such a call changes its arguments, and AOTAutograd cannot trace it, so it is written out before. The operations are
those of torch's kernels, in float32 where parameters have 16 bits. `found_inf` leaves everything as it is, where it is
not 0; gradients are divided by `grad_scale` and stay so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from ..ir.callables import operators

Tensors = Sequence[Tensor]


def write_out_fused_updates(graph: GraphModule) -> None:
    """Replace the calls in dynamo's graph."""
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target in _STEPS:
            node.target = _STEPS[node.target]
    graph.recompile()


def _each(
    step: Callable[..., list[Tensor]], changed: Sequence[Tensors], steps: Tensors, grad_scale: Any, found_inf: Any
) -> None:
    """One step for every parameter: `step` gives the new values of what is `changed`, gradients second."""
    for k in range(len(changed[0])):
        own = [tensors[k] for tensors in changed if len(tensors)]
        wide = [_wide(t) for t in own]
        if grad_scale is not None:
            wide[1] = wide[1] / grad_scale.reshape(())
        for tensor, value in zip(own, step(*wide, *steps[k : k + 1]), strict=True):
            if tensor is own[1] and grad_scale is None:
                continue
            if found_inf is not None:
                value = torch.where(found_inf.reshape(()) == 0, value, _wide(tensor))
            tensor.copy_(value)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _grown(beta: float, step: Tensor) -> Tensor | float:
    """1 - beta ** step, without cancellation."""
    return -torch.expm1(step * math.log(beta)) if beta else 1.0


def _adam(decoupled: bool) -> Callable[..., None]:
    """`decoupled`: weight decay does not enter the gradient's means."""

    def fused(
        ps: Tensors, gs: Tensors, means: Tensors, squares: Tensors, most: Tensors, steps: Tensors,
        *, lr: Any, beta1: float, beta2: float, weight_decay: float, eps: float, amsgrad: bool, maximize: bool,
        grad_scale: Any = None, found_inf: Any = None,
    ) -> None:  # fmt: skip
        def step(p: Tensor, grad: Tensor, mean: Tensor, square: Tensor, *rest: Tensor) -> list[Tensor]:
            *largest, count = rest
            g = -grad if maximize else grad
            if decoupled:
                p = p - lr * weight_decay * p
            elif weight_decay:
                g = g + weight_decay * p
            mean = mean + (1 - beta1) * (g - mean)
            square = beta2 * square + (1 - beta2) * g * g
            largest = [torch.maximum(x, square) for x in largest]
            root = (largest[0] if amsgrad else square).sqrt() / _grown(beta2, count) ** 0.5
            return [p - lr / _grown(beta1, count) * mean / (root + eps), grad, mean, square, *largest]

        _each(step, (ps, gs, means, squares, most if amsgrad else ()), steps, grad_scale, found_inf)

    return fused


def _sgd(
    ps: Tensors, gs: Tensors, buffers: Tensors,
    *, weight_decay: float, momentum: float, lr: Any, dampening: float, nesterov: bool, maximize: bool,
    is_first_step: bool, grad_scale: Any = None, found_inf: Any = None,
) -> None:  # fmt: skip
    def step(p: Tensor, grad: Tensor, *kept: Tensor) -> list[Tensor]:
        g = -grad if maximize else grad
        g = g + weight_decay * p if weight_decay else g
        kept = tuple(g if is_first_step else momentum * b + (1 - dampening) * g for b in kept)
        for b in kept:
            g = g + momentum * b if nesterov else b
        return [p - lr * g, grad, *kept]

    _each(step, (ps, gs, buffers if momentum else ()), (), grad_scale, found_inf)


_STEPS: dict[Any, Callable[..., None]] = {
    torch._fused_adam_: _adam(decoupled=False),
    torch._fused_adamw_: _adam(decoupled=True),
    torch._fused_sgd_: _sgd,
    **dict.fromkeys(operators("_fused_adam_.default/tensor_lr"), _adam(decoupled=False)),
    **dict.fromkeys(operators("_fused_adamw_.default/tensor_lr"), _adam(decoupled=True)),
    **dict.fromkeys(operators("_fused_sgd_.default/tensor_lr"), _sgd),
}
