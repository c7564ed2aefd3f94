"""Memory-bound programs, each with an input of 64 MiB or more (small ones with `quick`).

A workload is a plain function and its arguments; `train` adds the backward of a fixed output gradient.
Functions are what a user would write; nothing here is shaped for a compiler.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Arguments = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """`build(scale)` gives the arguments; `scale` is 1 for the real sizes and below for quick runs."""

    name: str
    function: Callable[..., Any]
    build: Callable[[float], Arguments]
    train: bool = False
    random: bool = False  # the values differ from eager's: checked by their distribution


def _rows(scale: float, columns: int = 4096, dtype: torch.dtype = torch.float32) -> tuple[int, int]:
    full = (64 << 20) // (columns * dtype.itemsize)
    return max(16, int(full * scale)), columns


def _normal(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=torch.float32).to(dtype)


def _full(count: int, dtype: torch.dtype = torch.float32, vectors: int = 0) -> Callable[[float], Arguments]:
    """`count` matrices of 64 MiB, then `vectors` rows."""

    def build(scale: float) -> Arguments:
        shape = _rows(scale, dtype=dtype)
        matrices = [_normal(shape, dtype) for _ in range(count)]
        return (*matrices, *(_normal((shape[1],), dtype) for _ in range(vectors)))

    return build


def _classes(scale: float) -> Arguments:
    rows, columns = _rows(scale, 32768)
    return _normal((rows, columns)), torch.randint(0, columns, (rows,))


def _images(scale: float) -> Arguments:
    batch = max(1, int(16 * scale))
    return _normal((batch, 64, 128, 128)), _normal((64,)), _normal((64,))


def _optimiser_state(scale: float) -> Arguments:
    rows, columns = _rows(scale)
    parameter, gradient, mean = (_normal((rows, columns)) for _ in range(3))
    return parameter, gradient, mean, _normal((rows, columns)).square()


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


BF16 = torch.bfloat16
WORKLOADS: tuple[Workload, ...] = (
    Workload("chain of 4 point-wise ops", chain, _full(2)),
    Workload("sigmoid(x) * tanh(x + 1)", sigmoid_tanh, _full(1)),
    Workload("bias + GELU", bias_gelu, _full(1, vectors=1)),
    Workload("bias + GELU + dropout", bias_gelu_dropout, _full(1, vectors=1), random=True),
    Workload(
        "bias + dropout + residual + LayerNorm", bias_dropout_residual_layernorm, _full(2, vectors=3), random=True
    ),
    Workload("LayerNorm", layernorm, _full(1, vectors=2)),
    Workload("RMSNorm + SiLU", rmsnorm_silu, _full(1, vectors=1)),
    Workload("softmax", softmax, _full(1)),
    Workload("log-softmax", log_softmax, _full(1)),
    Workload("cross-entropy", cross_entropy, _classes),
    Workload("group norm + SiLU", groupnorm_silu, _images),
    Workload("full sum", full_sum, _full(1)),
    Workload("column sum", column_sum, _full(1)),
    Workload("abs max, abs mean, square mean", statistics, _full(1)),
    Workload("transpose + relu", transpose_relu, _full(1)),
    Workload("cat of two branches", concatenate, _full(2)),
    Workload("Adam update", adam_update, _optimiser_state),
    Workload("LayerNorm, forward + backward", layernorm, _full(1, vectors=2), train=True),
    Workload("cross-entropy, forward + backward", cross_entropy, _classes, train=True),
    Workload("SwiGLU, forward + backward", swiglu, _full(2), train=True),
    Workload("bias + GELU, bfloat16", bias_gelu, _full(1, BF16, 1)),
    Workload("LayerNorm, bfloat16", layernorm, _full(1, BF16, 2)),
    Workload("softmax, bfloat16", softmax, _full(1, BF16)),
)


class Prepared:
    """A workload with its arguments: `call(f)` runs f as the workload is meant to be run."""

    def __init__(self, workload: Workload, scale: float, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.workload = workload
        self.arguments = workload.build(scale)
        self.wanted: list[Tensor] = []
        self.gradient: Tensor | None = None
        if workload.train:
            self.wanted = [a.requires_grad_() for a in self.arguments if _is_float(a)]
            with torch.no_grad():
                self.gradient = torch.randn_like(workload.function(*self.arguments))

    def call(self, function: Callable[..., Any]) -> tuple[Tensor, ...]:
        output = function(*self.arguments)
        if not self.workload.train:
            return output if isinstance(output, tuple) else (output,)
        return output.detach(), *torch.autograd.grad(output, self.wanted, self.gradient)

    def reference(self) -> tuple[Tensor, ...]:
        """The same in float64, by eager."""
        wide = Prepared.__new__(Prepared)
        wide.workload = self.workload
        wide.arguments = tuple(a.detach().double() if _is_float(a) else a for a in self.arguments)
        wide.wanted = [a.requires_grad_() for a in wide.arguments if _is_float(a)] if self.workload.train else []
        wide.gradient = None if self.gradient is None else self.gradient.double()
        return wide.call(self.workload.function)

    def minimum_bytes(self, outputs: tuple[Tensor, ...]) -> int:
        """Each input read and each output written once; backward reads the inputs again."""
        inputs = _bytes(self.arguments)
        if self.gradient is None:
            return inputs + _bytes(outputs)
        return 2 * inputs + _bytes((self.gradient,)) + _bytes(outputs)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _bytes(values: tuple[Any, ...]) -> int:
    return sum(v.nbytes for v in values if isinstance(v, Tensor))


def check_values(prepared: Prepared, ours: tuple[Tensor, ...], eager: tuple[Tensor, ...]) -> str:
    """Empty if right, else what is wrong: at most twice eager's error plus the dtype's tolerance."""
    if prepared.workload.random:
        return _check_distribution(ours, eager)
    for number, (got, expected, exact) in enumerate(zip(ours, eager, prepared.reference(), strict=True)):
        if got.shape != expected.shape or got.dtype != expected.dtype or got.stride() != expected.stride():
            return f"output {number}: {got.dtype} {tuple(got.shape)} {got.stride()}, eager {expected.stride()}"
        scale = exact.abs().max().item()
        tolerance = (1e-2 if got.dtype is BF16 else 1e-5) * max(scale, 1e-30)
        error, allowed = _error(got, exact), 2 * _error(expected, exact) + tolerance
        if not error <= allowed:
            return f"output {number}: error {error:.3g}, allowed {allowed:.3g}"
    return ""


def _error(value: Tensor, exact: Tensor) -> float:
    return (value.double() - exact).abs().max().item()


def _check_distribution(ours: tuple[Tensor, ...], eager: tuple[Tensor, ...]) -> str:
    """Zeros, mean, deviation and agreement where both kept the value must be those of eager."""
    got, expected = ours[0].double().flatten(), eager[0].double().flatten()
    slack = 6 / math.sqrt(got.numel())
    zeros = ((got == 0).double().mean() - (expected == 0).double().mean()).abs().item()
    mean = (got.mean() - expected.mean()).abs().item()
    deviation = (got.std() - expected.std()).abs().item()
    correlation = torch.corrcoef(torch.stack([got, expected]))[0, 1].item()
    if max(zeros, mean, deviation) > 2 * slack or not 0.5 < correlation < 0.9999:
        return f"zeros {zeros:.2g}, mean {mean:.2g}, deviation {deviation:.2g} off; correlation {correlation:.3f}"
    return ""
