"""Activations and their gradients that are not left to decompositions.

Written out here so that 16-bit chains stay in float32 through them; decompositions round at their
own casts. The formulas are eager's.
"""

from __future__ import annotations

import functools
import math

import torch

from ..ir.expr import Expr, pointwise
from .context import Context
from .pointwise import formula, one
from .promotion import literal
from .registry import lowers
from .values import Ref

aten = torch.ops.aten


def _number(ctx: Context, value: float | int) -> Expr:
    return literal(value, ctx.out.dtype.compute)


def _mul(*factors: Expr) -> Expr:
    return functools.reduce(lambda left, right: pointwise("mul", left, right), factors)


@formula(aten.sigmoid.default)
def sigmoid(ctx: Context, x: Expr) -> Expr:
    return pointwise("div", one(ctx), pointwise("add", one(ctx), pointwise("exp", pointwise("neg", x))))


@formula(aten.sigmoid_backward.default)
def sigmoid_backward(ctx: Context, grad: Expr, y: Expr) -> Expr:
    return _mul(grad, _mul(y, pointwise("sub", one(ctx), y)))


@formula(aten.tanh_backward.default)
def tanh_backward(ctx: Context, grad: Expr, y: Expr) -> Expr:
    return _mul(grad, pointwise("sub", one(ctx), _mul(y, y)))


@formula(aten.relu.default)
def relu(ctx: Context, x: Expr) -> Expr:
    return pointwise("maximum", x, _number(ctx, 0))


@lowers(aten.threshold_backward.default)
def threshold_backward(ctx: Context, grad: Ref, x: Ref, threshold: float | int) -> Ref:
    inside = pointwise("le", ctx.read(x, x.dtype, exact=True), ctx.read(threshold, x.dtype, exact=True))
    return ctx.define(pointwise("where", inside, _number(ctx, 0), ctx.read(grad, ctx.out.dtype)))


@formula(aten.silu.default)
def silu(ctx: Context, x: Expr) -> Expr:
    return _mul(x, sigmoid(ctx, x))


@formula(aten.silu_backward.default)
def silu_backward(ctx: Context, grad: Expr, x: Expr) -> Expr:
    s = sigmoid(ctx, x)
    return _mul(grad, _mul(s, pointwise("add", one(ctx), _mul(x, pointwise("sub", one(ctx), s)))))


_TANH_SCALE = math.sqrt(2 / math.pi)
_TANH_CUBE = 0.044715


@formula(aten.gelu.default)
def gelu(ctx: Context, x: Expr, *, approximate: str = "none") -> Expr:
    if approximate != "tanh":
        return _mul(x, _normal(ctx, x))
    # (1 + tanh z) / 2 is the logistic function of 2 z, which keeps its digits where tanh is close to -1.
    power = pointwise("exp", _mul(_number(ctx, -2.0), _tanh_argument(ctx, x)))
    return _mul(x, pointwise("div", one(ctx), pointwise("add", one(ctx), power)))


def _normal(ctx: Context, v: Expr) -> Expr:
    """The normal distribution at v."""
    if ctx.out.dtype.is_half:
        return pointwise("normal_16", v)
    twice = pointwise("add", one(ctx), pointwise("erf", _mul(v, _number(ctx, math.sqrt(0.5)))))
    return _mul(_number(ctx, 0.5), twice)


def _tanh_argument(ctx: Context, v: Expr) -> Expr:
    cubic = pointwise("add", v, _mul(_number(ctx, _TANH_CUBE), _mul(v, v, v)))
    return _mul(_number(ctx, _TANH_SCALE), cubic)


@formula(aten.gelu_backward.default)
def gelu_backward(ctx: Context, grad: Expr, x: Expr, *, approximate: str = "none") -> Expr:
    if approximate == "tanh":
        half, t = _number(ctx, 0.5), pointwise("tanh", _tanh_argument(ctx, x))
        left = _mul(half, pointwise("add", one(ctx), t))
        inner_slope = pointwise("add", one(ctx), _mul(_number(ctx, 3 * _TANH_CUBE), _mul(x, x)))
        outer_slope = pointwise("sub", one(ctx), _mul(t, t))
        right = _mul(_mul(half, x), outer_slope, _mul(_number(ctx, _TANH_SCALE), inner_slope))
        return _mul(grad, pointwise("add", left, right))
    density = _mul(_number(ctx, 1 / math.sqrt(2 * math.pi)), pointwise("exp", _mul(_mul(x, x), _number(ctx, -0.5))))
    return _mul(grad, pointwise("add", _normal(ctx, x), _mul(x, density)))


@formula(aten.leaky_relu.default)
def leaky_relu(ctx: Context, x: Expr, slope: float | int = 0.01) -> Expr:
    positive = pointwise("gt", x, _number(ctx, 0))
    return pointwise("where", positive, x, _mul(x, ctx.read(slope, ctx.out.dtype)))


@formula(aten.leaky_relu_backward.default)
def leaky_relu_backward(ctx: Context, grad: Expr, x: Expr, slope: float | int, from_result: bool) -> Expr:
    positive = pointwise("gt", x, _number(ctx, 0))
    return pointwise("where", positive, grad, _mul(grad, ctx.read(slope, ctx.out.dtype)))


@formula(aten.elu.default)
def elu(ctx: Context, x: Expr, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Expr:
    grown = pointwise("expm1", _mul(x, _number(ctx, input_scale)))
    negative = _mul(grown, _number(ctx, alpha * scale))
    positive = pointwise("gt", x, _number(ctx, 0))
    return pointwise("where", positive, _mul(x, _number(ctx, scale)), negative)
