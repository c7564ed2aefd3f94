"""The programs measured, as a user would write them; nothing here is shaped for a compiler."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def chain(x: Tensor, y: Tensor) -> Tensor:
    return torch.relu(x * 2.0 + y) - 0.5


def sigmoid_tanh(x: Tensor) -> Tensor:
    return torch.sigmoid(x) * torch.tanh(x + 1)


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


def bias_gelu_dropout(x: Tensor, bias: Tensor) -> Tensor:
    return F.dropout(F.gelu(x + bias), 0.1)


def bias_dropout_residual_layernorm(x: Tensor, residual: Tensor, bias: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
    return F.layer_norm(residual + F.dropout(x + bias, 0.1), x.shape[-1:], weight, shift)


def layernorm(x: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, shift)


def rmsnorm_silu(x: Tensor, weight: Tensor) -> Tensor:
    return F.silu(F.rms_norm(x, x.shape[-1:], weight))


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def log_softmax(x: Tensor) -> Tensor:
    return torch.log_softmax(x, -1)


def cross_entropy(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x, target)


def full_sum(x: Tensor) -> Tensor:
    return x.sum()


def column_sum(x: Tensor) -> Tensor:
    return x.sum(0)


def transpose_relu(x: Tensor) -> Tensor:
    return torch.relu(x).t().contiguous()


def groupnorm_silu(x: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
    return F.silu(F.group_norm(x, 8, weight, shift))


def concatenate(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([torch.relu(x), y * 2.0], 1)


def statistics(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x.abs().max(), x.abs().mean(), x.square().mean()


def swiglu(gate: Tensor, value: Tensor) -> Tensor:
    return F.silu(gate) * value


def adam_update(parameter: Tensor, gradient: Tensor, mean: Tensor, square: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    mean = mean * 0.9 + gradient * 0.1
    square = square * 0.999 + gradient * gradient * 0.001
    step = (mean / 0.1) / (torch.sqrt(square / 0.001) + 1e-8)
    return parameter * (1 - 1e-5) - step * 1e-3, mean, square


def many_updates(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Parameters, then their gradients."""
    half = len(tensors) // 2
    return tuple(p - 0.1 * g for p, g in zip(tensors[:half], tensors[half:], strict=True))


def many_adam_updates(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Parameters, then gradients, means and squares."""
    count = len(tensors) // 4
    each = zip(*(tensors[k * count : (k + 1) * count] for k in range(4)), strict=True)
    return tuple(value for own in each for value in adam_update(*own))


def four_ops(x: Tensor) -> Tensor:
    return torch.relu((x + 1) * 2) ** 2


def rmsnorm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight)


def relu_sum(x: Tensor) -> Tensor:
    return torch.relu(2 * x).sum()


def column_sum_of_product(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(0)


def two_outputs(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    return torch.relu(a + b), torch.sigmoid(a * c)


def gated_cumsum(x: Tensor, gate: Tensor) -> Tensor:
    return (torch.sigmoid(gate) * x).cumsum(-1) * F.silu(gate)


def row_sum(x: Tensor) -> Tensor:
    return x.sum(-1)
