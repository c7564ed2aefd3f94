"""Random operations in terms of `onepass::seed`, `onepass::uniform` and `onepass::normal`.

Each call draws a seed of its own, in program order. Calls with a user's generator are not taken
apart; they stay what they are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from ..ir.callables import operators
from .random import next_stream

RANDOM: dict[Any, Callable[..., Any]] = {}
Draw: TypeAlias = Callable[[Sequence[Any], torch.dtype, torch.device], torch.Tensor]
_REAL = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def _decomposes(names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a decomposition, which is not asked where the user gives a generator."""

    def register(rule: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(rule)
        def of_default_generator(*args: Any, generator: Any = None, **options: Any) -> Any:
            return rule(*args, **options) if generator is None else NotImplemented

        RANDOM.update(dict.fromkeys(operators(names), of_default_generator))
        return rule

    return register


def _drawn(operation: Any, size: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    stream = next_stream()
    drawn: torch.Tensor = operation(torch.ops.onepass.seed(stream), stream, size, dtype=dtype, device=device)
    return drawn


_uniform: Draw = functools.partial(_drawn, torch.ops.onepass.uniform)
_normal: Draw = functools.partial(_drawn, torch.ops.onepass.normal)


def _wide(draw: Draw, x: torch.Tensor, shape: Sequence[Any] | None = None) -> torch.Tensor:
    """Numbers of a tensor's shape or another, in the type that the tensor's distribution is computed in."""
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    return draw(x.shape if shape is None else shape, dtype, x.device)


def _like(x: torch.Tensor, drawn: torch.Tensor, dtype: torch.dtype | None = None, layout: Any = None) -> torch.Tensor:
    """`drawn` with the strides `empty_like(x)` has."""
    empty = torch.empty_like(x, dtype=dtype or x.dtype, memory_format=layout or torch.preserve_format)
    return torch.ops.aten.copy(empty, drawn)


@_decomposes("native_dropout")
def native_dropout(x: torch.Tensor, p: float, train: bool | None) -> Any:
    if train is False or p == 0:
        return x, torch.ones_like(x, dtype=torch.bool)
    if p == 1:
        return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
    if x.dtype not in _REAL:
        return NotImplemented
    mask = _uniform(x.shape, torch.float32, x.device) >= p
    return mask * x * (1.0 / (1.0 - p)), mask


# Distributions that replace the values of a tensor: their numbers, given the tensor and the parameters.
_DISTRIBUTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "bernoulli": lambda x: _uniform(x.shape, torch.float32, x.device) < x,
    "uniform": lambda x, low=0.0, high=1.0: _uniform(x.shape, x.dtype, x.device) * (high - low) + low,
    "normal_functional": lambda x, mean=0.0, std=1.0: _wide(_normal, x) * std + mean,
    "normal.Tensor_float": lambda mean, std=1.0: _wide(_normal, mean) * std + mean,
    "exponential": lambda x, rate=1.0: -torch.log1p(-_wide(_uniform, x)) / rate,
    "log_normal": lambda x, mean=1.0, std=2.0: (_wide(_normal, x) * std + mean).exp(),
    "cauchy": lambda x, median=0.0, sigma=1.0: torch.tan((_wide(_uniform, x) - 0.5) * math.pi) * sigma + median,
}
# Those whose results may be integers.
_COUNTS: dict[str, Callable[..., torch.Tensor]] = {
    "bernoulli.p": lambda x, p=0.5: _uniform(x.shape, torch.float32, x.device) < p,
    "geometric": lambda x, p: (torch.log1p(-_wide(_uniform, x)) / math.log1p(-p)).ceil().clamp_min(1),
}


def _replaced(values: Callable[..., torch.Tensor], counts: bool, x: torch.Tensor, *args: Any, **options: Any) -> Any:
    drawable = not x.dtype.is_complex if counts else x.dtype in _REAL
    return _like(x, values(x, *args, **options)) if drawable else NotImplemented


for _table in (_DISTRIBUTIONS, _COUNTS):
    for _operation, _values in _table.items():
        _decomposes(_operation)(functools.partial(_replaced, _values, _table is _COUNTS))


@_decomposes("normal.float_Tensor")
def normal_float_tensor(mean: float, std: torch.Tensor) -> Any:
    return _replaced(lambda x: _wide(_normal, x) * x + mean, False, std)


@_decomposes("normal.Tensor_Tensor")
def normal_tensors(mean: torch.Tensor, std: torch.Tensor) -> Any:
    if mean.dtype not in _REAL:
        return NotImplemented
    shape = torch.broadcast_shapes(mean.shape, std.shape)
    return (_wide(_normal, mean, shape) * std + mean).to(mean.dtype)


def _made(draw: Draw, size: Sequence[Any], *, dtype: Any = None, device: Any = None, **options: Any) -> Any:
    dtype = dtype or torch.get_default_dtype()
    if dtype not in _REAL or options.get("layout") not in (None, torch.strided) or options.get("pin_memory"):
        return NotImplemented
    return draw(size, dtype, torch.device(device or torch.get_default_device()))


def _made_like(draw: Draw, x: torch.Tensor, *, dtype: Any = None, device: Any = None, **options: Any) -> Any:
    dtype = dtype or x.dtype
    same_place = device is None or torch.device(device) == x.device
    if dtype not in _REAL or options.get("layout") not in (None, torch.strided) or not same_place:
        return NotImplemented
    return _like(x, draw(x.shape, dtype, x.device), dtype, options.get("memory_format"))


for _draw, _name in ((_uniform, "rand"), (_normal, "randn")):
    _decomposes(_name)(functools.partial(_made, _draw))
    _decomposes(f"{_name}_like")(functools.partial(_made_like, _draw))


@_decomposes("normal.float_float")
def normal_floats(mean: float, std: float, size: Sequence[Any], **options: Any) -> Any:
    drawn = _made(_normal, size, **options)
    return drawn if drawn is NotImplemented else drawn * std + mean


# --- eager's own numbers ---


def _in_own_order(x: torch.Tensor, p: float = 0.5, *, generator: Any = None) -> Any:
    """Eager fills a tensor in the order of its memory, the operation that returns a new one row by row."""
    if generator is not None or x.is_contiguous():
        return NotImplemented
    order = sorted(range(x.ndim), key=lambda d: -x.stride(d))
    rows = torch.ops.aten.bernoulli.p(x.permute(order).contiguous(), p)
    return rows.permute([order.index(d) for d in range(x.ndim)])


EAGER_RANDOM: dict[Any, Callable[..., Any]] = dict.fromkeys(operators("bernoulli.p"), _in_own_order)
