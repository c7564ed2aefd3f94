"""Random numbers: a seed drawn on the host, and Philox words computed from it by position.

`onepass::seed` takes a seed from torch's CPU generator (so `torch.manual_seed` reproduces);
`onepass::uniform` and `onepass::normal` are pure, so a mask can be recomputed in backward. Element i
of the row-major order is lane i mod 4 of Philox4x32-10(counter = (i div 4, stream), key = seed); the
eager implementations here give the very words a kernel does. Each draw has its own seed and stream.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from ..ir.expr import Expr, Load, Random, pointwise
from ..ir.interpret import philox, uniform_of_words
from .context import Context
from .registry import lowers
from .values import Ref, linear_position, own_point

_library = torch.library.Library("onepass", "DEF")
_library.define("seed(int number) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
for _name in ("uniform", "normal"):
    _library.define(
        f"{_name}(Tensor seed, int stream, SymInt[] size, *, ScalarType dtype, Device device) -> Tensor",
        tags=(torch.Tag.pt2_compliant_tag,),
    )

# Numbers the draws of one trace, so that no two of them are merged; the backend resets it per graph.
_next_stream: ContextVar[int] = ContextVar("onepass_next_stream", default=0)


def reset_streams() -> None:
    """Start numbering draws again: the same program then traces to the same graph."""
    _next_stream.set(0)


def next_stream() -> int:
    """A number no other draw of this trace has."""
    stream = _next_stream.get()
    _next_stream.set(stream + 1)
    return stream


# eager implementations


# Bits of a 16-bit float in [0.5, 1): a uniform number keeps so many, lest it round up to 1.
_PRECISION: dict[object, int] = {torch.float16: 11, torch.bfloat16: 8}


def _uniforms(seed: Tensor, stream: int, size: Sequence[int], dtype: Any, device: Any, count: int) -> list[Tensor]:
    """`count` uniform numbers for each element."""
    index = torch.arange(math.prod(size), device=device).reshape(tuple(size)) * count
    return [uniform_of_words(philox(seed.to(device), index + k, stream), dtype) for k in range(count)]


def _uniform(seed: Tensor, stream: int, size: Sequence[int], *, dtype: torch.dtype, device: Any) -> Tensor:
    (value,) = _uniforms(seed, stream, size, dtype, device, 1)
    bits = _PRECISION.get(dtype)
    return (value if bits is None else (value * 2**bits).floor() * 2.0**-bits).to(dtype)


def _normal(seed: Tensor, stream: int, size: Sequence[int], *, dtype: torch.dtype, device: Any) -> Tensor:
    first, second = _uniforms(seed, stream, size, dtype, device, 2)
    radius = (-2 * (1 - first).log()).sqrt()
    return (radius * (2 * math.pi * second).cos()).to(dtype)


def _empty(seed: Tensor, stream: int, size: Sequence[int], **options: Any) -> Tensor:
    return torch.empty(size, **options)


for _name, _eager, _fake in (
    ("seed", lambda number: torch.randint(-(2**63), 2**63 - 1, ()), lambda number: torch.empty((), dtype=torch.int64)),
    ("uniform", _uniform, _empty),
    ("normal", _normal, _empty),
):
    _library.impl(_name, _eager, "CompositeExplicitAutograd")
    torch.library.register_fake(f"onepass::{_name}", _fake, lib=_library)


# lowering


def _draws(ctx: Context, seed: Ref, stream: int, count: int) -> list[Expr]:
    """`count` uniform numbers for each element of the result."""
    index = linear_position(own_point(ctx.out.shape), ctx.out.shape) * count
    words = (Random(Load(seed.buffer, seed.index), index + k, stream) for k in range(count))
    return [pointwise("uniform", word, dtype=ctx.out.dtype.compute) for word in words]


@lowers("onepass.uniform.default")
def uniform(ctx: Context, seed: Ref, stream: int, size: object, **options: object) -> Expr:
    (value,) = _draws(ctx, seed, stream, 1)
    if not ctx.out.dtype.is_half:
        return value
    steps: int = 2 ** _PRECISION[ctx.out.dtype.torch]
    return pointwise("floor", value * steps) * (1 / steps)


@lowers("onepass.normal.default")
def normal(ctx: Context, seed: Ref, stream: int, size: object, **options: object) -> Expr:
    first, second = _draws(ctx, seed, stream, 2)
    radius = pointwise("sqrt", -2 * pointwise("log", 1 - first))
    return radius * pointwise("cos", 2 * math.pi * second)
