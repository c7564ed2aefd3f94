"""Element-wise arithmetic, comparison, logic, rounding and conversion.

Most operations are rows of a table: an aten operation and the scalar operation or the formula it is. Those with
more to say have a function of their own. Result dtypes come from FX; operands promote as in aten.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from operator import mul
from typing import Any, TypeVar

from ..ir.dtypes import DType
from ..ir.expr import Expr, calculate, literal, pointwise
from ..ir.ops import DISCONTINUOUS
from ..ir.poly import Poly
from .context import Context, Operand
from .promotion import common_dtype
from .registry import Unsupported, lowers
from .torch_private import MULTIPLY_ADD
from .values import HostNumber, Ref

F = TypeVar("F", bound=Callable[..., Expr])

# Scalar operations whose aten operation has the same name. Of float functions, integers compute in the result's type.
_SAME_NAME = (
    "exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh "
    "erf erfc erfinv lgamma sqrt rsqrt maximum minimum fmax fmin atan2 hypot nextafter"
)
_OTHER_NAMES = {
    "sign": "sgn",
    "bitnot": "bitwise_not",
    "copysign": "copysign.Tensor/Scalar",
    "remainder": "remainder.Tensor/Scalar/Scalar_Tensor",
    "fmod": "fmod.Tensor/Scalar",
    "mul": "mul.Tensor/Scalar",
    "div": "div.Tensor/Scalar",
    "floordiv": "floor_divide.default/Scalar",
    "bitand": "bitwise_and.Tensor/Scalar/Scalar_Tensor",
    "bitor": "bitwise_or.Tensor/Scalar/Scalar_Tensor",
    "bitxor": "bitwise_xor.Tensor/Scalar/Scalar_Tensor",
    "shl": "bitwise_left_shift.Tensor/Tensor_Scalar/Scalar_Tensor __lshift__.Tensor/Scalar",
    "shr": "bitwise_right_shift.Tensor/Tensor_Scalar/Scalar_Tensor __rshift__.Tensor/Scalar",
}
# On truth values: x != 0.
_LOGIC = {"bitnot": "logical_not", "bitand": "logical_and", "bitor": "logical_or", "bitxor": "logical_xor"}
# What arithmetic means on bool.
_ON_BOOL = {"add": "bitor", "mul": "bitand", "maximum": "bitor", "minimum": "bitand", "fmax": "bitor", "fmin": "bitand"}


def apply(op: str, ctx: Context, *operands: Operand, dtype: DType | None = None) -> Expr:
    """A scalar operation on operands promoted to `dtype` (the result's by default)."""
    dtype = ctx.out.dtype if dtype is None else dtype
    exact = op in DISCONTINUOUS
    if dtype is DType.BOOL:
        op = _ON_BOOL.get(op, op)
    if op == "tanh" and dtype is DType.BF16:
        op = "tanh_16"
    return pointwise(op, *(ctx.read(x, dtype, exact=exact) for x in operands))


def _apply_to_some(op: str, ctx: Context, x: Ref) -> Expr:
    """The same type in and out. On bool these do nothing, on integers the rounding ones do nothing."""
    idle = not x.dtype.is_float and (op not in ("abs", "neg", "sign") or x.dtype is DType.BOOL)
    return ctx.read(x) if idle else apply(op, ctx, x)


def _compare(op: str, ctx: Context, x: Operand, y: Operand) -> Expr:
    return apply(op, ctx, x, y, dtype=common_dtype((x, y)))


def _judge(op: str, ctx: Context, *operands: Operand) -> Expr:
    return pointwise(op, *(truth(ctx, x) for x in operands))


def truth(ctx: Context, x: Operand) -> Expr:
    """x != 0."""
    if isinstance(x, Ref) and x.dtype is DType.BOOL:
        return x.aligned(ctx.out.shape)
    return apply("ne", ctx, x, 0, dtype=common_dtype((x,)))


for _name in _SAME_NAME.split():
    lowers(_name)(partial(apply, _name))
for _name, _targets in _OTHER_NAMES.items():
    lowers(_targets)(partial(apply, _name))
for _name in ["abs", "neg", "sign", "floor", "ceil", "trunc", "round"]:
    lowers(_name)(partial(_apply_to_some, _name))
for _name in ["eq", "ne", "lt", "le", "gt", "ge"]:
    lowers(f"{_name}.Tensor/Scalar")(partial(_compare, _name))
for _name, _targets in _LOGIC.items():
    lowers(_targets)(partial(_judge, _name))


def formula(names: str) -> Callable[[F], F]:
    """Register a function of values: tensors are read in the type that the result is computed in."""

    def register(function: F) -> F:
        def rule(ctx: Context, *args: Any, **options: Any) -> Expr:
            def read(a: Any) -> Any:
                return ctx.read(a) if isinstance(a, Ref | Poly | HostNumber) else a

            return function(*map(read, args), **{name: read(a) for name, a in options.items()})

        lowers(names)(rule)
        return function

    return register


def _scaled(value: Expr, factor: Expr | float) -> Expr:
    return value if isinstance(factor, float | int) and factor == 1 else factor * value


formula("reciprocal")(lambda x: 1 / x)
formula("square")(lambda x: x * x)
formula(MULTIPLY_ADD)(lambda x, y, z: x * y + z)
formula("addcmul")(lambda x, a, b, value=1: x + _scaled(a * b, value))
formula("addcdiv")(lambda x, a, b, value=1: x + _scaled(a, value) / b)


@formula("lerp.Scalar/Tensor")
def lerp(start: Expr, end: Expr, weight: Expr | float) -> Expr:
    # Eager's form, which is exact at both ends.
    w = literal(weight, start.dtype) if isinstance(weight, float | int) else weight
    difference = end - start
    small = calculate("lt", pointwise("abs", w), 0.5)
    return pointwise("where", small, start + w * difference, end - difference * (1 - w))


def _sum(op: str, ctx: Context, x: Operand, y: Operand, alpha: float | int | Poly = 1) -> Expr:
    if isinstance(alpha, float | int) and alpha == 1:
        return apply(op, ctx, x, y)
    if ctx.out.dtype is DType.BOOL:
        raise Unsupported("a scaled sum of bools")
    return pointwise(op, ctx.read(x), apply("mul", ctx, y, alpha))


lowers("add.Tensor/Scalar")(partial(_sum, "add"))
lowers("sub.Tensor/Scalar")(partial(_sum, "sub"))
lowers("rsub.Tensor/Scalar")(lambda ctx, x, y, alpha=1: _sum("sub", ctx, y, x, alpha))


@lowers("div.Tensor_mode/Scalar_mode")
def div_mode(ctx: Context, x: Operand, y: Operand, *, rounding_mode: str | None) -> Expr:
    return apply({None: "div", "floor": "floordiv", "trunc": "truncdiv"}[rounding_mode], ctx, x, y)


@lowers("round.decimals")
def round_decimals(ctx: Context, x: Ref, *, decimals: int = 0) -> Expr:
    value = ctx.read(x, exact=True)
    if not x.dtype.is_float:
        return value
    scale = literal(10.0 ** abs(decimals), value.dtype)
    if decimals >= 0:
        return pointwise("round", value * scale) / scale
    return pointwise("round", value / scale) * scale


@lowers("pow.Tensor_Scalar")
def pow_scalar(ctx: Context, x: Ref, exponent: float | int | Poly) -> Expr:
    dtype = ctx.out.dtype
    base = ctx.read(x)
    if isinstance(exponent, Poly) or (dtype.is_integer and exponent < 0):
        return apply("pow", ctx, x, exponent)
    if dtype is DType.BOOL:
        raise Unsupported("a power of bools")
    if exponent == 0:
        return literal(1, dtype)
    if exponent in (1, 2, 3) or (dtype.is_integer and exponent == int(exponent)):
        return _power(base, int(exponent))
    if exponent in (-1, -2):
        return 1 / _power(base, int(-exponent))
    if exponent in (0.5, -0.5):
        return pointwise("sqrt" if exponent > 0 else "rsqrt", base)
    return apply("pow", ctx, x, exponent)


def _power(base: Expr, exponent: int) -> Expr:
    """base ** exponent by repeated squaring, exponent >= 1."""
    factors = []
    while exponent:
        if exponent & 1:
            factors.append(base)
        base, exponent = base * base, exponent >> 1
    return reduce(mul, factors)


@lowers("pow.Tensor_Tensor/Scalar")
def pow_tensor(ctx: Context, x: Operand, exponent: Ref) -> Expr:
    if ctx.out.dtype is DType.BOOL:
        raise Unsupported("a power of bools")
    return apply("pow", ctx, x, exponent)


@lowers("isnan")
def isnan(ctx: Context, x: Ref) -> Expr:
    return apply("isnan", ctx, x, dtype=x.dtype) if x.dtype.is_float else literal(False, DType.BOOL)


@lowers("isinf")
def isinf(ctx: Context, x: Ref) -> Expr:
    # A 16-bit value may overflow only when rounded, so it is read as stored.
    return pointwise("isinf", ctx.read(x, x.dtype, exact=True)) if x.dtype.is_float else literal(False, DType.BOOL)


@lowers("isfinite")
def isfinite(ctx: Context, x: Ref) -> Expr:
    return ~(isnan(ctx, x) | isinf(ctx, x)) if x.dtype.is_float else literal(True, DType.BOOL)


@lowers("signbit")
def signbit(ctx: Context, x: Ref) -> Expr:
    if x.dtype is DType.BOOL:
        return literal(False, DType.BOOL)
    if x.dtype.is_integer:
        return apply("lt", ctx, x, 0, dtype=x.dtype)
    return apply("signbit", ctx, x, dtype=x.dtype)


@lowers("where.self")
def where(ctx: Context, condition: Ref, x: Operand, y: Operand) -> Expr:
    return pointwise("where", truth(ctx, condition), ctx.stored(x), ctx.stored(y))


lowers("masked_fill.Scalar/Tensor")(lambda ctx, x, mask, value: where(ctx, mask, value, x))


@lowers("clamp.default/Tensor hardtanh clamp_min.default/Tensor")
def clamp(ctx: Context, x: Ref, low: Operand | None = None, high: Operand | None = None) -> Expr:
    value = ctx.read(x)
    if low is not None:
        value = pointwise("maximum", value, ctx.read(low))
    return value if high is None else pointwise("minimum", value, ctx.read(high))


lowers("clamp_max.default/Tensor")(lambda ctx, x, high: clamp(ctx, x, None, high))


@lowers("_to_copy prims.convert_element_type.default")
def to_copy(ctx: Context, x: Ref, dtype: Any = None, **options: Any) -> Expr:
    if not isinstance(x, Ref):
        raise Unsupported("a number where a tensor is expected")
    if x.device != ctx.out.device:
        raise Unsupported("a copy between devices")
    return ctx.convert(x.aligned(ctx.out.shape), ctx.out.dtype, exact=True)
