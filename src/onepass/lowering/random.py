"""Random numbers: a seed drawn on the host, and Philox words computed from it by position.

`onepass::seed` takes a seed from torch's CPU generator (so `torch.manual_seed` reproduces);
`onepass::uniform` and `onepass::normal` are pure, so a mask can be recomputed in backward. Element i
of the row-major order is lane i mod 4 of Philox4x32-10(counter = (i div 4, stream), key = seed); their
eager implementations (`ir/draws.py`) give the very words a kernel does. Each draw has its own seed and stream.
"""

from __future__ import annotations

import math
from contextvars import ContextVar

from ..ir.draws import PRECISION
from ..ir.expr import Expr, Load, Random, pointwise
from .context import Context
from .registry import lowers
from .values import Ref, linear_position, own_point

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
    steps: int = 2 ** PRECISION[ctx.out.dtype.torch]
    return pointwise("floor", value * steps) * (1 / steps)


@lowers("onepass.normal.default")
def normal(ctx: Context, seed: Ref, stream: int, size: object, **options: object) -> Expr:
    first, second = _draws(ctx, seed, stream, 2)
    radius = pointwise("sqrt", -2 * pointwise("log", 1 - first))
    return radius * pointwise("cos", 2 * math.pi * second)
