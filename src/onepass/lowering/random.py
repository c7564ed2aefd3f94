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

import torch

from ..ir.dtypes import DType
from ..ir.expr import Expr, Load, Random, pointwise
from ..ir.interpret import philox, uniform_of_words
from ..ir.poly import Poly
from .context import Context
from .promotion import literal
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


def _seed(number: int) -> torch.Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64)


def _seed_fake(number: int) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64)


# Bits of a 16-bit float in [0.5, 1): a uniform number keeps so many, lest it round up to 1.
_PRECISION = {torch.float16: 11, torch.bfloat16: 8}


def _uniform(
    seed: torch.Tensor, stream: int, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    index = torch.arange(math.prod(size), device=device).reshape(tuple(size))
    value = uniform_of_words(philox(seed.to(device), index, stream), dtype)
    bits = _PRECISION.get(dtype)
    return (value if bits is None else (value * 2**bits).floor() * 2.0**-bits).to(dtype)


def _normal(
    seed: torch.Tensor, stream: int, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    index = torch.arange(math.prod(size), device=device).reshape(tuple(size)) * 2
    first, second = (uniform_of_words(philox(seed.to(device), index + k, stream), dtype) for k in (0, 1))
    radius = (-2 * (1 - first).log()).sqrt()
    return (radius * (2 * math.pi * second).cos()).to(dtype)


def _empty(
    seed: torch.Tensor, stream: int, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device=device)


for _name, _eager, _fake in (("seed", _seed, _seed_fake), ("uniform", _uniform, _empty), ("normal", _normal, _empty)):
    _library.impl(_name, _eager, "CompositeExplicitAutograd")
    torch.library.register_fake(f"onepass::{_name}", _fake, lib=_library)


# lowering


def _draw(seed: Ref, stream: int, index: Poly, dtype: DType) -> Expr:
    word = Random(Load(seed.buffer, seed.index), index, stream)
    return pointwise("uniform", word, dtype=dtype)


def _linear(ctx: Context) -> Poly:
    return linear_position(own_point(ctx.out.shape), ctx.out.shape)


@lowers(torch.ops.onepass.uniform.default)
def uniform(ctx: Context, seed: Ref, stream: int, size: object, **options: object) -> Ref:
    dtype = ctx.out.dtype
    value = _draw(seed, stream, _linear(ctx), dtype.compute)
    if dtype.is_half:
        steps = 2 ** _PRECISION[dtype.torch]
        value = pointwise("floor", pointwise("mul", value, literal(steps, DType.F32)))
        value = pointwise("mul", value, literal(1 / steps, DType.F32))
    return ctx.define(value)


@lowers(torch.ops.onepass.normal.default)
def normal(ctx: Context, seed: Ref, stream: int, size: object, **options: object) -> Ref:
    compute = ctx.out.dtype.compute
    index = _linear(ctx) * 2
    first, second = (_draw(seed, stream, index + k, compute) for k in (0, 1))
    logarithm = pointwise("log", pointwise("sub", literal(1, compute), first))
    radius = pointwise("sqrt", pointwise("mul", literal(-2, compute), logarithm))
    angle = pointwise("mul", literal(2 * math.pi, compute), second)
    return ctx.define(pointwise("mul", radius, pointwise("cos", angle)))
