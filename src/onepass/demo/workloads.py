"""The demo's workloads: what people train and run, at sizes where memory traffic shows.

Each `make(dtype)` builds the same data from the same seed, so that eager, onepass and the float64
reference run on equal inputs. `run(f)` uses `f`, the compiled or plain `function`, once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Function = Callable[..., Any]
DROPOUT = 0.1


@dataclass(frozen=True, slots=True)
class Program:
    """What is compiled, and one use of it; `run` gives the tensors to compare."""

    function: Function
    run: Callable[[Function], list[Tensor]]


@dataclass(frozen=True, slots=True)
class Workload:
    """A named program; `dropped` is the fraction of elements dropout zeroes in its only output."""

    name: str
    make: Callable[[torch.dtype], Program]
    dropped: float = 0.0


def _normal(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    # Drawn in float32 always, so that every dtype starts from the same numbers.
    return (torch.randn(*shape) * scale).to(dtype)


def _training(function: Function, arguments: Sequence[Tensor], parameters: Sequence[Tensor]) -> Program:
    """Forward and backward of a scalar loss; compares the loss and every gradient."""

    def run(f: Function) -> list[Tensor]:
        loss = f(*arguments)
        return [loss.detach(), *torch.autograd.grad(loss, parameters)]

    return Program(function, run)


def bias_gelu_dropout(dtype: torch.dtype) -> Program:
    x, bias = _normal(4096, 4096, dtype=dtype), _normal(4096, dtype=dtype)
    # The float64 reference is what a kept element must be: it drops nothing.
    keep_all = dtype is torch.float64

    def forward(x: Tensor, bias: Tensor) -> Tensor:
        activated = F.gelu(x + bias)
        return activated / (1 - DROPOUT) if keep_all else F.dropout(activated, DROPOUT)

    return Program(forward, lambda f: [f(x, bias)])


def layernorm_training(dtype: torch.dtype) -> Program:
    x, gradient = _normal(4096, 4096, dtype=dtype).requires_grad_(), _normal(4096, 4096, dtype=dtype)
    norm = nn.LayerNorm(4096, dtype=dtype)

    def run(f: Function) -> list[Tensor]:
        output = f(x)
        return [output.detach(), *torch.autograd.grad(output, [x, *norm.parameters()], gradient)]

    return Program(norm, run)


def cross_entropy_training(dtype: torch.dtype) -> Program:
    logits = _normal(1024, 16384, dtype=dtype, scale=3.0).requires_grad_()
    target = torch.randint(0, 16384, (1024,))

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits, target, label_smoothing=0.1)

    return _training(loss, (logits, target), [logits])


class GatedBlock(nn.Module):  # type: ignore[misc]
    """RMSNorm + SwiGLU, the feed-forward half of a language model's layer, with its residual."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        output: Tensor = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return output


class MixingBlock(nn.Module):  # type: ignore[misc]
    """A pre-norm transformer block with an attention-free mixer: softmax over time weighs the values."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix_norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.mix_norm(x)
        weights = torch.softmax(self.key(normed), dim=1)
        mixed = torch.sigmoid(self.query(normed)) * (weights * self.value(normed)).sum(1, keepdim=True)
        x = x + self.out(mixed)
        output: Tensor = x + self.feed(self.feed_norm(x))
        return output


def _module_training(module: nn.Module, x: Tensor) -> Program:
    def step(x: Tensor) -> Tensor:
        loss: Tensor = module(x).square().mean()
        return loss

    return _training(step, (x,), list(module.parameters()))


def gated_block_training(dtype: torch.dtype) -> Program:
    return _module_training(GatedBlock(512, 1408).to(dtype), _normal(4096, 512, dtype=dtype))


def mixing_block_training(dtype: torch.dtype) -> Program:
    return _module_training(MixingBlock(256).to(dtype), _normal(16, 512, 256, dtype=dtype))


def optimiser_step(dtype: torch.dtype) -> Program:
    parameters = [nn.Parameter(_normal(1024, 1024, dtype=dtype)) for _ in range(8)]
    gradients = [_normal(1024, 1024, dtype=dtype) for _ in parameters]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimiser = torch.optim.AdamW(parameters, lr=1e-3, capturable=False)

    def step() -> None:
        optimiser.step()

    def run(f: Function) -> list[Tensor]:
        f()
        return [p.detach().clone() for p in parameters]

    return Program(step, run)


WORKLOADS: tuple[Workload, ...] = (
    Workload("bias + GELU + dropout", bias_gelu_dropout, dropped=DROPOUT),
    Workload("LayerNorm, training", layernorm_training),
    Workload("cross-entropy, training", cross_entropy_training),
    Workload("RMSNorm + SwiGLU block, training", gated_block_training),
    Workload("attention-free block, training", mixing_block_training),
    Workload("AdamW step, 8 parameters", optimiser_step),
)
