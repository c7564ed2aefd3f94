"""Element-wise arithmetic, comparison, logic, rounding and conversion.

Most operations are rows of a table: an aten operation and the scalar operation it is. Those with
more to say have a function of their own. Result dtypes come from FX; operands promote as in aten.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch

from ..ir.dtypes import DType
from ..ir.expr import Expr, pointwise
from ..ir.ops import DISCONTINUOUS
from ..ir.poly import Poly
from .context import Context, Operand
from .promotion import common_dtype, literal
from .registry import Unsupported, lowers
from .torch_private import multiply_add_ops
from .values import Ref

aten = torch.ops.aten
prims = torch.ops.prims
F = TypeVar("F", bound=Callable[..., Expr])

# Float functions of one argument: integers compute in the result's float type.
_FLOAT_UNARY = (
    "exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh "
    "erf erfc erfinv lgamma sqrt rsqrt"
)
# The same type in and out. On integers the rounding ones do nothing.
_SAME_UNARY = {
    "abs": aten.abs.default,
    "neg": aten.neg.default,
    "sign": aten.sign.default,
    "floor": aten.floor.default,
    "ceil": aten.ceil.default,
    "trunc": aten.trunc.default,
    "round": aten.round.default,
}
_COMPARISONS = ["eq", "ne", "lt", "le", "gt", "ge"]
# On truth values: x != 0.
_LOGIC = {
    "bitnot": aten.logical_not.default,
    "bitand": aten.logical_and.default,
    "bitor": aten.logical_or.default,
    "bitxor": aten.logical_xor.default,
}
_BINARY: dict[str, tuple[Any, ...]] = {
    "maximum": (aten.maximum.default,),
    "minimum": (aten.minimum.default,),
    "fmax": (aten.fmax.default,),
    "fmin": (aten.fmin.default,),
    "atan2": (aten.atan2.default,),
    "hypot": (aten.hypot.default,),
    "nextafter": (aten.nextafter.default,),
    "copysign": (aten.copysign.Tensor, aten.copysign.Scalar),
    "remainder": (aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor),
    "fmod": (aten.fmod.Tensor, aten.fmod.Scalar),
    "mul": (aten.mul.Tensor, aten.mul.Scalar),
    "div": (aten.div.Tensor, aten.div.Scalar),
    "floordiv": (aten.floor_divide.default, aten.floor_divide.Scalar),
    "bitand": (aten.bitwise_and.Tensor, aten.bitwise_and.Scalar, aten.bitwise_and.Scalar_Tensor),
    "bitor": (aten.bitwise_or.Tensor, aten.bitwise_or.Scalar, aten.bitwise_or.Scalar_Tensor),
    "bitxor": (aten.bitwise_xor.Tensor, aten.bitwise_xor.Scalar, aten.bitwise_xor.Scalar_Tensor),
    "shl": (
        aten.bitwise_left_shift.Tensor,
        aten.bitwise_left_shift.Tensor_Scalar,
        aten.bitwise_left_shift.Scalar_Tensor,
        aten.__lshift__.Tensor,
        aten.__lshift__.Scalar,
    ),
    "shr": (
        aten.bitwise_right_shift.Tensor,
        aten.bitwise_right_shift.Tensor_Scalar,
        aten.bitwise_right_shift.Scalar_Tensor,
        aten.__rshift__.Tensor,
        aten.__rshift__.Scalar,
    ),
}
# What arithmetic means on bool.
_ON_BOOL = {"add": "bitor", "mul": "bitand", "maximum": "bitor", "minimum": "bitand", "fmax": "bitor", "fmin": "bitand"}


def apply(ctx: Context, op: str, *operands: Operand, dtype: DType | None = None) -> Expr:
    """A scalar operation on operands promoted to `dtype` (the result's by default)."""
    dtype = ctx.out.dtype if dtype is None else dtype
    exact = op in DISCONTINUOUS
    if dtype is DType.BOOL:
        op = _ON_BOOL.get(op, op)
    if op == "tanh" and dtype is DType.BF16:
        op = "tanh_16"
    return pointwise(op, *(ctx.read(x, dtype, exact=exact) for x in operands))


def formula(*targets: Any) -> Callable[[F], F]:
    """Register a function of values: tensors are read in the type that the result is computed in."""

    def register(function: F) -> F:
        def rule(ctx: Context, *args: Any, **options: Any) -> Ref:
            read = (ctx.read(a, ctx.out.dtype) if isinstance(a, Ref) else a for a in args)
            return ctx.define(function(ctx, *read, **options))

        lowers(*targets)(rule)
        return function

    return register


def one(ctx: Context) -> Expr:
    """1 in the type the result is computed in."""
    return literal(1, ctx.out.dtype.compute)


def _applies(op: str, ctx: Context, *operands: Operand) -> Ref:
    return ctx.define(apply(ctx, op, *operands))


def _applies_to_some(op: str, ctx: Context, x: Ref) -> Ref:
    idle = not x.dtype.is_float and (op not in ("abs", "neg", "sign") or x.dtype is DType.BOOL)
    return ctx.define(ctx.read(x, ctx.out.dtype) if idle else apply(ctx, op, x))


def _compares(op: str, ctx: Context, x: Operand, y: Operand) -> Ref:
    return ctx.define(apply(ctx, op, x, y, dtype=common_dtype((x, y))))


def _judges(op: str, ctx: Context, *operands: Operand) -> Ref:
    return ctx.define(pointwise(op, *(truth(ctx, x) for x in operands)))


for _name in _FLOAT_UNARY.split():
    lowers(getattr(aten, _name).default)(partial(_applies, _name))
for _name, _target in _SAME_UNARY.items():
    lowers(_target)(partial(_applies_to_some, _name))
for _name, _targets in _BINARY.items():
    lowers(*_targets)(partial(_applies, _name))
for _name in _COMPARISONS:
    lowers(getattr(aten, _name).Tensor, getattr(aten, _name).Scalar)(partial(_compares, _name))
for _name, _target in _LOGIC.items():
    lowers(_target)(partial(_judges, _name))
lowers(aten.sgn.default)(partial(_applies, "sign"))
lowers(aten.bitwise_not.default)(partial(_applies, "bitnot"))


def _adds(op: str, ctx: Context, x: Operand, y: Operand, alpha: float | int | Poly = 1) -> Ref:
    return ctx.define(_sum(ctx, op, x, y, alpha))


lowers(aten.add.Tensor, aten.add.Scalar)(partial(_adds, "add"))
lowers(aten.sub.Tensor, aten.sub.Scalar)(partial(_adds, "sub"))


@lowers(aten.rsub.Tensor, aten.rsub.Scalar)
def rsub(ctx: Context, x: Operand, y: Operand, alpha: float | int | Poly = 1) -> Ref:
    return ctx.define(_sum(ctx, "sub", y, x, alpha))


def _sum(ctx: Context, op: str, x: Operand, y: Operand, alpha: float | int | Poly) -> Expr:
    if isinstance(alpha, float | int) and alpha == 1:
        return apply(ctx, op, x, y)
    dtype = ctx.out.dtype
    if dtype is DType.BOOL:
        raise Unsupported("a scaled sum of bools")
    scaled = apply(ctx, "mul", y, alpha)
    return pointwise(op, ctx.read(x, dtype), scaled)


@lowers(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(ctx: Context, x: Operand, y: Operand, *, rounding_mode: str | None) -> Ref:
    op = {None: "div", "floor": "floordiv", "trunc": "truncdiv"}[rounding_mode]
    return ctx.define(apply(ctx, op, x, y))


@lowers(aten.reciprocal.default)
def reciprocal(ctx: Context, x: Ref) -> Ref:
    return ctx.define(apply(ctx, "div", 1, x))


@lowers(aten.square.default)
def square(ctx: Context, x: Ref) -> Ref:
    return ctx.define(apply(ctx, "mul", x, x))


@lowers(aten.round.decimals)
def round_decimals(ctx: Context, x: Ref, *, decimals: int = 0) -> Ref:
    value = ctx.read(x, ctx.out.dtype, exact=True)
    if not x.dtype.is_float:
        return ctx.define(value)
    scale = literal(10.0 ** abs(decimals), value.dtype)
    before, after = ("mul", "div") if decimals >= 0 else ("div", "mul")
    return ctx.define(pointwise(after, pointwise("round", pointwise(before, value, scale)), scale))


@lowers(aten.pow.Tensor_Scalar)
def pow_scalar(ctx: Context, x: Ref, exponent: float | int | Poly) -> Ref:
    dtype = ctx.out.dtype
    base = ctx.read(x, dtype)
    if isinstance(exponent, Poly) or (dtype.is_integer and exponent < 0):
        return ctx.define(apply(ctx, "pow", x, exponent))
    if dtype is DType.BOOL:
        raise Unsupported("a power of bools")
    if exponent == 0:
        return ctx.define(literal(1, dtype))
    if exponent == 1:
        return ctx.define(base)
    if exponent in (2, 3) or (dtype.is_integer and exponent == int(exponent)):
        return ctx.define(_power(base, int(exponent)))
    if exponent in (-1, -2):
        return ctx.define(pointwise("div", one(ctx), _power(base, int(-exponent))))
    if exponent in (0.5, -0.5):
        return ctx.define(pointwise("sqrt" if exponent > 0 else "rsqrt", base))
    return ctx.define(apply(ctx, "pow", x, exponent))


def _power(base: Expr, exponent: int) -> Expr:
    """base ** exponent by repeated squaring, exponent >= 1."""
    result: Expr | None = None
    while True:
        if exponent & 1:
            result = base if result is None else pointwise("mul", result, base)
        exponent >>= 1
        if not exponent:
            assert result is not None
            return result
        base = pointwise("mul", base, base)


@lowers(aten.pow.Tensor_Tensor, aten.pow.Scalar)
def pow_tensor(ctx: Context, x: Operand, exponent: Ref) -> Ref:
    if ctx.out.dtype is DType.BOOL:
        raise Unsupported("a power of bools")
    return ctx.define(apply(ctx, "pow", x, exponent))


def truth(ctx: Context, x: Operand) -> Expr:
    """x != 0."""
    if isinstance(x, Ref) and x.dtype is DType.BOOL:
        return x.aligned(ctx.out.shape)
    return apply(ctx, "ne", x, 0, dtype=common_dtype((x,)))


@lowers(aten.isnan.default)
def isnan(ctx: Context, x: Ref) -> Ref:
    return ctx.define(apply(ctx, "isnan", x, dtype=x.dtype) if x.dtype.is_float else literal(False, DType.BOOL))


@lowers(aten.isinf.default)
def isinf(ctx: Context, x: Ref) -> Ref:
    return ctx.define(_infinite(ctx, x) if x.dtype.is_float else literal(False, DType.BOOL))


def _infinite(ctx: Context, x: Ref) -> Expr:
    # A 16-bit value may overflow only when rounded, so it is read as stored.
    return pointwise("isinf", ctx.read(x, x.dtype, exact=True))


@lowers(aten.isfinite.default)
def isfinite(ctx: Context, x: Ref) -> Ref:
    if not x.dtype.is_float:
        return ctx.define(literal(True, DType.BOOL))
    bad = pointwise("bitor", apply(ctx, "isnan", x, dtype=x.dtype), _infinite(ctx, x))
    return ctx.define(pointwise("bitnot", bad))


@lowers(aten.signbit.default)
def signbit(ctx: Context, x: Ref) -> Ref:
    if x.dtype is DType.BOOL:
        return ctx.define(literal(False, DType.BOOL))
    if x.dtype.is_integer:
        return ctx.define(apply(ctx, "lt", x, 0, dtype=x.dtype))
    return ctx.define(apply(ctx, "signbit", x, dtype=x.dtype))


@lowers(aten.where.self)
def where(ctx: Context, condition: Ref, x: Operand, y: Operand) -> Ref:
    dtype = ctx.out.dtype
    return ctx.define(pointwise("where", truth(ctx, condition), ctx.stored(x, dtype), ctx.stored(y, dtype)))


@lowers(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(ctx: Context, x: Ref, mask: Ref, value: Operand) -> Ref:
    dtype = ctx.out.dtype
    return ctx.define(pointwise("where", truth(ctx, mask), ctx.stored(value, dtype), ctx.stored(x, dtype)))


@lowers(aten.clamp.default, aten.clamp.Tensor, aten.hardtanh.default)
def clamp(ctx: Context, x: Ref, low: Operand | None = None, high: Operand | None = None) -> Ref:
    dtype = ctx.out.dtype
    value = ctx.read(x, dtype)
    if low is not None:
        value = pointwise("maximum", value, ctx.read(low, dtype))
    if high is not None:
        value = pointwise("minimum", value, ctx.read(high, dtype))
    return ctx.define(value)


@lowers(aten.clamp_min.default, aten.clamp_min.Tensor)
def clamp_min(ctx: Context, x: Ref, low: Operand) -> Ref:
    return clamp(ctx, x, low)


@lowers(aten.clamp_max.default, aten.clamp_max.Tensor)
def clamp_max(ctx: Context, x: Ref, high: Operand) -> Ref:
    return clamp(ctx, x, None, high)


@lowers(aten.addcmul.default)
def addcmul(ctx: Context, x: Ref, a: Ref, b: Ref, value: float | int = 1) -> Ref:
    product = apply(ctx, "mul", a, b)
    if value != 1:
        product = pointwise("mul", ctx.read(value, ctx.out.dtype), product)
    return ctx.define(pointwise("add", ctx.read(x, ctx.out.dtype), product))


@lowers(*multiply_add_ops())
def multiply_add(ctx: Context, x: Operand, y: Operand, z: Operand) -> Ref:
    return ctx.define(pointwise("add", apply(ctx, "mul", x, y), ctx.read(z, ctx.out.dtype)))


@lowers(aten.addcdiv.default)
def addcdiv(ctx: Context, x: Ref, a: Ref, b: Ref, value: float | int = 1) -> Ref:
    dtype = ctx.out.dtype
    numerator = ctx.read(a, dtype)
    if value != 1:
        numerator = pointwise("mul", ctx.read(value, dtype), numerator)
    quotient = pointwise("div", numerator, ctx.read(b, dtype))
    return ctx.define(pointwise("add", ctx.read(x, dtype), quotient))


@lowers(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(ctx: Context, start: Ref, end: Ref, weight: Operand) -> Ref:
    # Eager's form, which is exact at both ends.
    dtype = ctx.out.dtype
    a, b, w = (ctx.read(v, dtype) for v in (start, end, weight))
    difference = pointwise("sub", b, a)
    near_start = pointwise("add", a, pointwise("mul", w, difference))
    near_end = pointwise("sub", b, pointwise("mul", difference, pointwise("sub", one(ctx), w)))
    small = pointwise("lt", pointwise("abs", w), literal(0.5, dtype.compute))
    return ctx.define(pointwise("where", small, near_start, near_end))


@lowers(aten._to_copy.default, prims.convert_element_type.default)
def to_copy(ctx: Context, x: Ref, dtype: Any = None, **options: Any) -> Ref:
    if not isinstance(x, Ref):
        raise Unsupported("a number where a tensor is expected")
    if x.device != ctx.out.device:
        raise Unsupported("a copy between devices")
    return ctx.define(ctx.convert(x.aligned(ctx.out.shape), ctx.out.dtype, exact=True))
