"""Activations and their gradients that are not left to decompositions.

Written out here so that 16-bit chains stay in float32 through them; decompositions round at their
own casts. The formulas are eager's.
"""

from __future__ import annotations

import math

import torch

from ..ir.expr import Expr, pointwise
from .context import Context, Operand
from .pointwise import one
from .promotion import literal
from .registry import lowers
from .values import Ref

aten = torch.ops.aten


def _number(ctx: Context, value: float | int) -> Expr:
    return literal(value, ctx.out.dtype.compute)


def _sigmoid(ctx: Context, x: Expr) -> Expr:
    return pointwise("div", one(ctx), pointwise("add", one(ctx), pointwise("exp", pointwise("neg", x))))


def _mul(*factors: Expr) -> Expr:
    product = factors[0]
    for factor in factors[1:]:
        product = pointwise("mul", product, factor)
    return product


@lowers(aten.sigmoid.default)
def sigmoid(ctx: Context, x: Ref) -> Ref:
    return ctx.define(_sigmoid(ctx, ctx.read(x, ctx.out.dtype)))


@lowers(aten.sigmoid_backward.default)
def sigmoid_backward(ctx: Context, grad: Ref, y: Ref) -> Ref:
    g, s = ctx.read(grad, ctx.out.dtype), ctx.read(y, ctx.out.dtype)
    return ctx.define(_mul(g, _mul(s, pointwise("sub", one(ctx), s))))


@lowers(aten.tanh_backward.default)
def tanh_backward(ctx: Context, grad: Ref, y: Ref) -> Ref:
    g, t = ctx.read(grad, ctx.out.dtype), ctx.read(y, ctx.out.dtype)
    return ctx.define(_mul(g, pointwise("sub", one(ctx), _mul(t, t))))


@lowers(aten.relu.default)
def relu(ctx: Context, x: Ref) -> Ref:
    return ctx.define(pointwise("maximum", ctx.read(x, ctx.out.dtype), _number(ctx, 0)))


@lowers(aten.threshold_backward.default)
def threshold_backward(ctx: Context, grad: Ref, x: Ref, threshold: float | int) -> Ref:
    inside = pointwise("le", ctx.read(x, x.dtype, exact=True), ctx.read(threshold, x.dtype, exact=True))
    return ctx.define(pointwise("where", inside, _number(ctx, 0), ctx.read(grad, ctx.out.dtype)))


@lowers(aten.silu.default)
def silu(ctx: Context, x: Ref) -> Ref:
    v = ctx.read(x, ctx.out.dtype)
    return ctx.define(_mul(v, _sigmoid(ctx, v)))


@lowers(aten.silu_backward.default)
def silu_backward(ctx: Context, grad: Ref, x: Ref) -> Ref:
    g, v = ctx.read(grad, ctx.out.dtype), ctx.read(x, ctx.out.dtype)
    s = _sigmoid(ctx, v)
    slope = _mul(s, pointwise("add", one(ctx), _mul(v, pointwise("sub", one(ctx), s))))
    return ctx.define(_mul(g, slope))


_TANH_SCALE = math.sqrt(2 / math.pi)
_TANH_CUBE = 0.044715


@lowers(aten.gelu.default)
def gelu(ctx: Context, x: Ref, approximate: str = "none") -> Ref:
    v = ctx.read(x, ctx.out.dtype)
    if approximate == "tanh":
        # (1 + tanh z) / 2 is the logistic function of 2 z, which keeps its digits where tanh is close to -1.
        power = pointwise("exp", _mul(_number(ctx, -2.0), _tanh_argument(ctx, v)))
        weight = pointwise("div", one(ctx), pointwise("add", one(ctx), power))
    else:
        weight = _normal(ctx, v)
    return ctx.define(_mul(v, weight))


def _normal(ctx: Context, v: Expr) -> Expr:
    """The normal distribution at v."""
    if ctx.out.dtype.is_half:
        return pointwise("normal_16", v)
    twice = pointwise("add", one(ctx), pointwise("erf", _mul(v, _number(ctx, math.sqrt(0.5)))))
    return _mul(_number(ctx, 0.5), twice)


def _tanh_argument(ctx: Context, v: Expr) -> Expr:
    cubic = pointwise("add", v, _mul(_number(ctx, _TANH_CUBE), _mul(v, v, v)))
    return _mul(_number(ctx, _TANH_SCALE), cubic)


@lowers(aten.gelu_backward.default)
def gelu_backward(ctx: Context, grad: Ref, x: Ref, *, approximate: str = "none") -> Ref:
    g, v = ctx.read(grad, ctx.out.dtype), ctx.read(x, ctx.out.dtype)
    half = _number(ctx, 0.5)
    if approximate == "tanh":
        t = pointwise("tanh", _tanh_argument(ctx, v))
        left = _mul(half, pointwise("add", one(ctx), t))
        inner_slope = pointwise("add", one(ctx), _mul(_number(ctx, 3 * _TANH_CUBE), _mul(v, v)))
        outer_slope = pointwise("sub", one(ctx), _mul(t, t))
        right = _mul(_mul(half, v), outer_slope, _mul(_number(ctx, _TANH_SCALE), inner_slope))
        return ctx.define(_mul(g, pointwise("add", left, right)))
    cdf = _normal(ctx, v)
    density = _mul(_number(ctx, 1 / math.sqrt(2 * math.pi)), pointwise("exp", _mul(_mul(v, v), _number(ctx, -0.5))))
    return ctx.define(_mul(g, pointwise("add", cdf, _mul(v, density))))


@lowers(aten.leaky_relu.default)
def leaky_relu(ctx: Context, x: Ref, slope: float | int = 0.01) -> Ref:
    v = ctx.read(x, ctx.out.dtype)
    positive = pointwise("gt", v, _number(ctx, 0))
    return ctx.define(pointwise("where", positive, v, _mul(v, ctx.read(slope, ctx.out.dtype))))


@lowers(aten.leaky_relu_backward.default)
def leaky_relu_backward(ctx: Context, grad: Ref, x: Ref, slope: float | int, from_result: bool) -> Ref:
    g = ctx.read(grad, ctx.out.dtype)
    positive = pointwise("gt", ctx.read(x, ctx.out.dtype), _number(ctx, 0))
    return ctx.define(pointwise("where", positive, g, _mul(g, ctx.read(slope, ctx.out.dtype))))


@lowers(aten.elu.default)
def elu(ctx: Context, x: Ref, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Ref:
    v = ctx.read(x, ctx.out.dtype)
    grown = pointwise("expm1", _mul(v, _number(ctx, input_scale)))
    negative = _mul(grown, _number(ctx, alpha * scale))
    positive = pointwise("gt", v, _number(ctx, 0))
    return ctx.define(pointwise("where", positive, _mul(v, _number(ctx, scale)), negative))


@lowers(aten.hardtanh.default)
def hardtanh(ctx: Context, x: Ref, low: Operand = -1, high: Operand = 1) -> Ref:
    dtype = ctx.out.dtype
    raised = pointwise("maximum", ctx.read(x, dtype), ctx.read(low, dtype))
    return ctx.define(pointwise("minimum", raised, ctx.read(high, dtype)))
