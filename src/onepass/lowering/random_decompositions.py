"""Random operations in terms of `onepass::seed`, `onepass::uniform` and `onepass::normal`.

Each call draws a seed of its own, in program order. Calls with a user's generator are not taken
apart; they stay what they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from .random import next_stream

aten = torch.ops.aten
RANDOM: dict[Any, Callable[..., Any]] = {}
Draw: TypeAlias = Callable[[Sequence[Any], torch.dtype, torch.device], torch.Tensor]


def _decomposes(*targets: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(rule: Callable[..., Any]) -> Callable[..., Any]:
        for target in targets:
            RANDOM[target] = rule
        return rule

    return register


def _drawn(operation: Any, size: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    stream = next_stream()
    drawn: torch.Tensor = operation(torch.ops.onepass.seed(stream), stream, size, dtype=dtype, device=device)
    return drawn


def _uniform(size: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return _drawn(torch.ops.onepass.uniform, size, dtype, device)


def _normal(size: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return _drawn(torch.ops.onepass.normal, size, dtype, device)


def _real(dtype: torch.dtype) -> bool:
    return dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type a distribution is computed in."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _like(x: torch.Tensor, drawn: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`drawn` with the strides `empty_like(x)` has."""
    empty = torch.empty_like(x, dtype=dtype or x.dtype)
    return aten.copy(empty, drawn)


@_decomposes(aten.native_dropout.default)
def native_dropout(x: torch.Tensor, p: float, train: bool | None) -> Any:
    if train is False or p == 0:
        return x, torch.ones_like(x, dtype=torch.bool)
    if p == 1:
        return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
    if not _real(x.dtype):
        return NotImplemented
    mask = _uniform(x.shape, torch.float32, x.device) >= p
    return mask * x * (1.0 / (1.0 - p)), mask


@_decomposes(aten.bernoulli.default)
def bernoulli(x: torch.Tensor, *, generator: Any = None) -> Any:
    if generator is not None or not _real(x.dtype):
        return NotImplemented
    return _like(x, _uniform(x.shape, torch.float32, x.device) < x)


@_decomposes(aten.bernoulli.p)
def bernoulli_p(x: torch.Tensor, p: float = 0.5, *, generator: Any = None) -> Any:
    if generator is not None or x.dtype.is_complex:
        return NotImplemented
    return _like(x, _uniform(x.shape, torch.float32, x.device) < p)


def _made(draw: Draw, size: Sequence[Any], dtype: Any, layout: Any, device: Any, pin_memory: Any) -> Any:
    dtype = dtype or torch.get_default_dtype()
    if not _real(dtype) or layout not in (None, torch.strided) or pin_memory:
        return NotImplemented
    return draw(size, dtype, torch.device(device or torch.get_default_device()))


@_decomposes(aten.rand.default)
def rand(
    size: Sequence[Any], *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Any:
    return _made(_uniform, size, dtype, layout, device, pin_memory)


@_decomposes(aten.randn.default)
def randn(
    size: Sequence[Any], *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Any:
    return _made(_normal, size, dtype, layout, device, pin_memory)


def _made_like(draw: Draw, x: torch.Tensor, dtype: Any, layout: Any, device: Any, memory_format: Any) -> Any:
    dtype = dtype or x.dtype
    same_place = device is None or torch.device(device) == x.device
    if not _real(dtype) or layout not in (None, torch.strided) or not same_place:
        return NotImplemented
    drawn = draw(x.shape, dtype, x.device)
    return aten.copy(torch.empty_like(x, dtype=dtype, memory_format=memory_format or torch.preserve_format), drawn)


@_decomposes(aten.rand_like.default)
def rand_like(
    x: torch.Tensor,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> Any:
    return _made_like(_uniform, x, dtype, layout, device, memory_format)


@_decomposes(aten.randn_like.default)
def randn_like(
    x: torch.Tensor,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> Any:
    return _made_like(_normal, x, dtype, layout, device, memory_format)


@_decomposes(aten.uniform.default)
def uniform(x: torch.Tensor, low: float = 0.0, high: float = 1.0, *, generator: Any = None) -> Any:
    if generator is not None or not _real(x.dtype):
        return NotImplemented
    return _like(x, _uniform(x.shape, x.dtype, x.device) * (high - low) + low)


@_decomposes(aten.normal_functional.default)
def normal_functional(x: torch.Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Any = None) -> Any:
    if generator is not None or not _real(x.dtype):
        return NotImplemented
    return _like(x, _normal(x.shape, _wide(x.dtype), x.device) * std + mean)


@_decomposes(aten.normal.Tensor_Tensor)
def normal_tensors(mean: torch.Tensor, std: torch.Tensor, *, generator: Any = None) -> Any:
    if generator is not None or not _real(mean.dtype):
        return NotImplemented
    shape = torch.broadcast_shapes(mean.shape, std.shape)
    return (_normal(shape, _wide(mean.dtype), mean.device) * std + mean).to(mean.dtype)


@_decomposes(aten.exponential.default)
def exponential(x: torch.Tensor, rate: float = 1.0, *, generator: Any = None) -> Any:
    if generator is not None or not _real(x.dtype):
        return NotImplemented
    drawn = _uniform(x.shape, _wide(x.dtype), x.device)
    return _like(x, -torch.log1p(-drawn) / rate)


@_decomposes(aten.normal.float_float)
def normal_floats(
    mean: float,
    std: float,
    size: Sequence[Any],
    *,
    generator: Any = None,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Any:
    if generator is not None:
        return NotImplemented
    drawn = randn(size, dtype=dtype, layout=layout, device=device, pin_memory=pin_memory)
    return drawn if drawn is NotImplemented else drawn * std + mean


@_decomposes(aten.normal.Tensor_float)
def normal_tensor_float(mean: torch.Tensor, std: float = 1.0, *, generator: Any = None) -> Any:
    if generator is not None or not _real(mean.dtype):
        return NotImplemented
    return _like(mean, _normal(mean.shape, _wide(mean.dtype), mean.device) * std + mean)


@_decomposes(aten.normal.float_Tensor)
def normal_float_tensor(mean: float, std: torch.Tensor, *, generator: Any = None) -> Any:
    if generator is not None or not _real(std.dtype):
        return NotImplemented
    return _like(std, _normal(std.shape, _wide(std.dtype), std.device) * std + mean)


@_decomposes(aten.log_normal.default)
def log_normal(x: torch.Tensor, mean: float = 1.0, std: float = 2.0, *, generator: Any = None) -> Any:
    if generator is not None or not _real(x.dtype):
        return NotImplemented
    return _like(x, (_normal(x.shape, _wide(x.dtype), x.device) * std + mean).exp())


@_decomposes(aten.cauchy.default)
def cauchy(x: torch.Tensor, median: float = 0.0, sigma: float = 1.0, *, generator: Any = None) -> Any:
    if generator is not None or not _real(x.dtype):
        return NotImplemented
    drawn = _uniform(x.shape, _wide(x.dtype), x.device)
    return _like(x, torch.tan((drawn - 0.5) * math.pi) * sigma + median)


@_decomposes(aten.geometric.default)
def geometric(x: torch.Tensor, p: float, *, generator: Any = None) -> Any:
    if generator is not None or x.dtype.is_complex:
        return NotImplemented
    drawn = _uniform(x.shape, _wide(x.dtype), x.device)
    return _like(x, (torch.log1p(-drawn) / math.log1p(-p)).ceil().clamp_min(1))
