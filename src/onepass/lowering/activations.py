"""Activations and their gradients that are not left to decompositions.

Written out here so that 16-bit chains stay in float32 through them; decompositions round at their
own casts. The formulas are eager's.
"""

from __future__ import annotations

import math

from ..ir.expr import Expr, calculate, pointwise
from .context import Context
from .pointwise import formula
from .registry import lowers
from .values import Ref


@formula("sigmoid")
def sigmoid(x: Expr) -> Expr:
    return 1 / (1 + pointwise("exp", -x))


formula("sigmoid_backward")(lambda grad, y: grad * (y * (1 - y)))
formula("tanh_backward")(lambda grad, y: grad * (1 - y * y))
formula("relu")(lambda x: calculate("maximum", x, 0))
formula("silu")(lambda x: x * sigmoid(x))


@formula("silu_backward")
def silu_backward(grad: Expr, x: Expr) -> Expr:
    s = sigmoid(x)
    return grad * (s * (1 + x * (1 - s)))


@lowers("threshold_backward")
def threshold_backward(ctx: Context, grad: Ref, x: Ref, threshold: float | int) -> Expr:
    inside = pointwise("le", ctx.read(x, x.dtype, exact=True), ctx.read(threshold, x.dtype, exact=True))
    return calculate("where", inside, 0, ctx.read(grad))


def _where_positive(x: Expr, yes: Expr, no: Expr) -> Expr:
    return pointwise("where", calculate("gt", x, 0), yes, no)


formula("leaky_relu")(lambda x, slope=0.01: _where_positive(x, x, x * slope))
formula("leaky_relu_backward")(lambda grad, x, slope, from_result: _where_positive(x, grad, grad * slope))


@formula("elu")
def elu(x: Expr, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Expr:
    return _where_positive(x, x * scale, pointwise("expm1", x * input_scale) * (alpha * scale))


_TANH_SCALE = math.sqrt(2 / math.pi)
_TANH_CUBE = 0.044715


@lowers("gelu")
def gelu(ctx: Context, input: Ref, *, approximate: str = "none") -> Expr:
    x = ctx.read(input)
    if approximate != "tanh":
        return x * _normal(ctx, x)
    # (1 + tanh z) / 2 is the logistic function of 2 z, which keeps its digits where tanh is close to -1.
    return x * (1 / (1 + pointwise("exp", -2.0 * _tanh_argument(x))))


def _normal(ctx: Context, x: Expr) -> Expr:
    """The normal distribution at x."""
    if ctx.out.dtype.is_half:
        return pointwise("normal_16", x)
    return 0.5 * (1 + pointwise("erf", x * math.sqrt(0.5)))


def _tanh_argument(x: Expr) -> Expr:
    return _TANH_SCALE * (x + _TANH_CUBE * (x * x * x))


@lowers("gelu_backward")
def gelu_backward(ctx: Context, grad: Ref, input: Ref, *, approximate: str = "none") -> Expr:
    x = ctx.read(input)
    if approximate == "tanh":
        t = pointwise("tanh", _tanh_argument(x))
        inner_slope = 1 + 3 * _TANH_CUBE * (x * x)
        slope = 0.5 * (1 + t) + (0.5 * x) * (1 - t * t) * (_TANH_SCALE * inner_slope)
    else:
        slope = _normal(ctx, x) + x * (1 / math.sqrt(2 * math.pi) * pointwise("exp", (x * x) * -0.5))
    return ctx.read(grad) * slope
