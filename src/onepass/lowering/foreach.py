"""Decompositions of `_foreach_*`, what a compiled optimiser step is made of: one call per tensor.

The lists are taken apart so that the updates of all parameters can share kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten
Tensors = Sequence[torch.Tensor]

_UNARY = (
    "abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg reciprocal "
    "round rsqrt sigmoid sign sin sinh sqrt tan tanh trunc"
)
_BINARY = "add sub mul div pow clamp_min clamp_max maximum minimum"
_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "maximum": torch.clamp_min,  # these two take numbers as well as tensors
    "minimum": torch.clamp_max,
}


def _function(name: str) -> Callable[..., torch.Tensor]:
    found: Callable[..., torch.Tensor] = _FUNCTIONS.get(name) or getattr(torch, name)
    return found


def _unary(name: str) -> Callable[..., list[torch.Tensor]]:
    function = _function(name)
    return lambda tensors: [function(x) for x in tensors]


def _with_one(name: str) -> Callable[..., list[torch.Tensor]]:
    """The second operand, a number or tensor, is shared."""
    function = _function(name)
    return lambda tensors, other, **options: [function(x, other, **options) for x in tensors]


def _with_each(name: str) -> Callable[..., list[torch.Tensor]]:
    function = _function(name)
    return lambda tensors, others, **options: [function(x, y, **options) for x, y in zip(tensors, others, strict=True)]


def _fused(name: str, one_value: bool) -> Callable[..., list[torch.Tensor]]:
    """addcmul and addcdiv, with one factor for all or one for each."""
    function = getattr(torch, name)

    def decomposition(tensors: Tensors, a: Tensors, b: Tensors, value: Any = 1) -> list[torch.Tensor]:
        values = [value] * len(tensors) if one_value else value
        return [function(x, p, q, value=v) for x, p, q, v in zip(tensors, a, b, values, strict=True)]

    return decomposition


def _lerp_one(tensors: Tensors, ends: Tensors, weight: Any) -> list[torch.Tensor]:
    return [torch.lerp(x, y, weight) for x, y in zip(tensors, ends, strict=True)]


def _lerp_each(tensors: Tensors, ends: Tensors, weights: Sequence[Any]) -> list[torch.Tensor]:
    return [torch.lerp(x, y, w) for x, y, w in zip(tensors, ends, weights, strict=True)]


def _power_of(base: Any, exponents: Tensors) -> list[torch.Tensor]:
    return [torch.pow(base, x) for x in exponents]


def _norm(tensors: Tensors, order: float = 2, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    return [torch.linalg.vector_norm(x, order, dtype=dtype) for x in tensors]


def _copy(tensors: Tensors, sources: Tensors, non_blocking: bool = False) -> list[torch.Tensor]:
    return [aten.copy(x, y) for x, y in zip(tensors, sources, strict=True)]


def foreach_decompositions() -> dict[Any, Callable[..., Any]]:
    """The decompositions of those overloads this torch has."""
    rows: list[tuple[str, str, Callable[..., Any]]] = [
        ("lerp", "Scalar", _lerp_one),
        ("lerp", "List", _lerp_each),
        ("lerp", "ScalarList", _lerp_each),
        ("pow", "ScalarAndTensor", _power_of),
        ("norm", "Scalar", _norm),
        ("copy", "default", _copy),
        ("clone", "default", lambda tensors, **options: [x.clone(**options) for x in tensors]),
        ("zero", "default", lambda tensors: [torch.zeros_like(x) for x in tensors]),
        ("max", "default", lambda tensors: [torch.amax(x) for x in tensors]),
    ]
    rows += [(name, "default", _unary(name)) for name in _UNARY.split()]
    for name in _BINARY.split():
        rows += [(name, overload, _with_one(name)) for overload in ("Scalar", "Tensor")]
        rows += [(name, overload, _with_each(name)) for overload in ("List", "ScalarList")]
    for name in ("addcmul", "addcdiv"):
        rows.append((name, "Scalar", _fused(name, one_value=True)))
        rows.append((name, "ScalarList", _fused(name, one_value=False)))
    table: dict[Any, Callable[..., Any]] = {}
    for name, overload, decomposition in rows:
        packet = getattr(aten, f"_foreach_{name}", None)
        if packet is not None and overload in packet.overloads():
            table[getattr(packet, overload)] = decomposition
    return table
