"""Scans: one `Scan` at the root of a definition, whatever comes before it inside.

16-bit floats accumulate in float32, and float32 in float64 where eager does. Positions of extremes count from the end:
of equal values the last one is meant, and the monoid takes the lowest number.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch.fx import GraphModule

from ..ir.callables import operators
from ..ir.dtypes import DType
from ..ir.expr import Expr, Index, Load, Part, Scan, literal, pointwise
from ..ir.poly import Axis, Poly
from ..ir.program import Buffer
from .context import Context
from .registry import RULES, Unsupported, lowers
from .torch_private import associative_scan_op
from .values import Ref, Shape, axis, own_point
from .views import wrap_dim


def along(x: Ref, dim: int) -> tuple[Shape, Axis | None, Poly]:
    """Where a scan reads, over an axis of its own along `dim` (None: there is one element), and where it is read."""
    point = list(own_point(x.shape))
    if not x.ndim:
        return (), None, Poly.ZERO
    dim = wrap_dim(dim, x.ndim)
    at, inner = point[dim], axis(0, x.shape[dim], "r")
    point[dim] = inner
    return tuple(point), inner.axis, at


def _wide(ctx: Context, value: Expr, dtype: DType) -> Expr:
    """A value as it enters: in float64 where eager accumulates `dtype` in it."""
    return pointwise("cast", value, dtype=DType.F64) if ctx.wide_statistics and dtype is DType.F32 else value


def _input(ctx: Context, x: Ref, point: Shape, dtype: DType) -> Expr:
    """The element that enters, converted as eager converts it and ready to accumulate."""
    value = x.at(point)
    if x.dtype is not dtype and not (x.dtype.is_half and dtype is DType.F32):
        value = ctx.convert(value, dtype, exact=True)
    return _wide(ctx, ctx.computing(value, dtype), dtype)


def _total(monoid: str, ctx: Context, x: Ref, dim: int, **options: Any) -> Expr:
    if ctx.out.dtype is DType.BOOL:
        raise Unsupported("a scan of truth values")  # not in eager, either
    point, over, at = along(x, dim)
    value = _input(ctx, x, point, ctx.out.dtype)
    return value if over is None else Part(Scan(monoid, (value,), over, at), 0)


lowers("cumsum")(partial(_total, "sum"))
lowers("cumprod")(partial(_total, "prod"))


def _extreme(monoid: str, ctx: Context, x: Ref, dim: int) -> tuple[Expr, Expr]:
    """The extreme up to each position, and the last position that has it."""
    point, over, at = along(x, dim)
    value = ctx.computing(x.at(point), x.dtype, exact=True)
    if value.dtype is DType.BOOL:
        value = pointwise("cast", value, dtype=DType.U8)
    if over is None:
        return value, literal(0, DType.I64)
    last = over.extent - 1
    state = Scan(monoid, (value, Index(last - over)), over, at)
    shape = ctx.out.shape
    place = ctx.define_internal(Part(state, 1), shape, DType.I64).aligned(shape)
    return Part(state, 0), Index(last) - place


lowers("cummax")(partial(_extreme, "argmax"))
lowers("cummin")(partial(_extreme, "argmin"))


@lowers("logcumsumexp")
def logcumsumexp(ctx: Context, x: Ref, dim: int) -> Expr:
    if not ctx.out.dtype.is_float:
        raise Unsupported("exponentials of integers")  # not in eager, either
    point, over, at = along(x, dim)
    value = _input(ctx, x, point, ctx.out.dtype)
    if over is None:
        return value
    state = Scan("logsumexp", (value,), over, at)
    parts = (ctx.define_internal(Part(state, k), ctx.out.shape, value.dtype) for k in range(2))
    top, total = (p.aligned(ctx.out.shape) for p in parts)
    return top + pointwise("log", total)


# steps of the user's


def _combine(ctx: Context, step: GraphModule, xs: Sequence[Ref], more: Sequence[Any]) -> tuple[Expr, ...]:
    """A scan along the first dimension whose step is a graph: one that a monoid is, or the library's."""
    kinds = {x.dtype for x in xs}
    if len(kinds) != 1 or DType.BOOL in kinds or more or any(x.shape != xs[0].shape for x in xs):
        raise Unsupported("a scan of truth values, or of several types or shapes")
    (dtype,) = kinds
    monoid, order = _monoid(step, len(xs), dtype.compute)
    point, over, at = along(xs[0], 0)
    values = tuple(ctx.computing(xs[k].at(point), dtype) for k in order)
    if monoid not in ("max", "min"):
        values = tuple(_wide(ctx, v, dtype) for v in values)
    if over is not None:
        state = Scan(monoid, values, over, at)
        values = tuple(Part(state, k) for k in range(len(xs)))
    return tuple(values[order.index(k)] for k in range(len(xs)))


RULES[associative_scan_op] = _combine


def _monoid(step: GraphModule, count: int, dtype: DType) -> tuple[str, tuple[int, ...]]:
    """The monoid that a step of so many values is, and which of the values its parts are."""
    given = [Load(Buffer(f"x{k}", dtype, (), ()), ()) for k in range(2 * count)]
    found, left, right = _results(step, given), given[:count], given[count:]
    for operation, monoid in _MONOIDS.items():
        if count == 1 and found[0] is pointwise(operation, *given):
            return monoid, (0,)
    for a, b in ((0, 1), (1, 0)) if count == 2 else ():
        if (found[a], found[b]) == (left[a] * right[a], right[a] * left[b] + right[b]):
            return "linear", (a, b)
    raise Unsupported("a step that is no known monoid")


_MONOIDS = {"add": "sum", "mul": "prod", "maximum": "max", "minimum": "min"}
_STEPS = dict(zip(operators("add.Tensor mul.Tensor maximum minimum"), _MONOIDS, strict=True))


def _results(step: GraphModule, given: Sequence[Expr]) -> list[Expr]:
    """What a graph of sums, products and extremes gives."""
    values, places = dict[Any, Expr](), iter(given)
    for node in step.graph.nodes:
        if node.op == "output" and all(n in values for n in node.args[0]):
            return [values[n] for n in node.args[0]]
        if node.op == "placeholder":
            values[node] = next(places)
        elif node.target in _STEPS and not node.kwargs and all(n in values for n in node.args):
            values[node] = pointwise(_STEPS[node.target], *(values[n] for n in node.args))
        else:
            raise Unsupported("a step that is no known monoid")
    raise AssertionError("a graph without an output")
