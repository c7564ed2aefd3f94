"""The scalar operations of the expression language, as data.

Each name says what it means on numbers; dtype rules live in `expr.pointwise`. Costs are in units of
one multiply-add, used by the planner; `raises` marks operations that can fail at run time (their
kernel returns a status and the host raises eager's error).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OpInfo:
    """What the compiler needs to know of a scalar operation."""

    arity: int
    cost: float = 1.0
    result: str = "same"  # "same" as first argument | "bool" | "given" (the caller states the dtype)
    integer_raises: bool = False
    commutative: bool = False


_EXP = 12.0
CASTS = ("cast", "narrow", "widen")  # the same number in another type
CHECKED = ("wrap_index", "check_index")  # indices from data, which must be inside their dimension

OPS: dict[str, OpInfo] = {
    # arithmetic; integers wrap around
    "add": OpInfo(2, commutative=True), "sub": OpInfo(2), "mul": OpInfo(2, commutative=True),
    "div": OpInfo(2, 4.0),  # float division
    "floordiv": OpInfo(2, 6.0, integer_raises=True),  # rounds to -inf, as torch.floor_divide
    "truncdiv": OpInfo(2, 6.0, integer_raises=True),  # rounds to 0
    "remainder": OpInfo(2, 6.0, integer_raises=True),  # sign of the divisor, as torch.remainder
    "fmod": OpInfo(2, 6.0, integer_raises=True),  # sign of the dividend
    "neg": OpInfo(1), "abs": OpInfo(1), "sign": OpInfo(1),
    "maximum": OpInfo(2, commutative=True), "minimum": OpInfo(2, commutative=True),  # NaN wins
    "fmax": OpInfo(2, commutative=True), "fmin": OpInfo(2, commutative=True),  # NaN loses
    "sqrt": OpInfo(1, 4.0), "rsqrt": OpInfo(1, 5.0), "pow": OpInfo(2, 3 * _EXP),
    "fma": OpInfo(3, 1.0),  # a*b + c, rounded once
    # bits; on bool: logic
    "bitand": OpInfo(2, commutative=True), "bitor": OpInfo(2, commutative=True),
    "bitxor": OpInfo(2, commutative=True), "bitnot": OpInfo(1), "shl": OpInfo(2), "shr": OpInfo(2),
    # comparison
    "eq": OpInfo(2, result="bool", commutative=True), "ne": OpInfo(2, result="bool", commutative=True),
    "lt": OpInfo(2, result="bool"), "le": OpInfo(2, result="bool"),
    "gt": OpInfo(2, result="bool"), "ge": OpInfo(2, result="bool"),
    "isnan": OpInfo(1, result="bool"), "isinf": OpInfo(1, result="bool"),
    "signbit": OpInfo(1, result="bool"),
    "where": OpInfo(3, result="given"),  # where(bool, a, b): both evaluated
    # float functions
    "exp": OpInfo(1, _EXP), "exp2": OpInfo(1, _EXP), "expm1": OpInfo(1, _EXP), "log": OpInfo(1, _EXP),
    "log2": OpInfo(1, _EXP), "log10": OpInfo(1, _EXP), "log1p": OpInfo(1, _EXP),
    "sin": OpInfo(1, _EXP), "cos": OpInfo(1, _EXP), "tan": OpInfo(1, 2 * _EXP),
    "asin": OpInfo(1, _EXP), "acos": OpInfo(1, _EXP), "atan": OpInfo(1, _EXP),
    "atan2": OpInfo(2, 2 * _EXP), "sinh": OpInfo(1, _EXP), "cosh": OpInfo(1, _EXP),
    "tanh": OpInfo(1, _EXP), "asinh": OpInfo(1, 2 * _EXP), "acosh": OpInfo(1, 2 * _EXP),
    "atanh": OpInfo(1, 2 * _EXP), "erf": OpInfo(1, _EXP), "erfc": OpInfo(1, _EXP),
    "normal_16": OpInfo(1, _EXP),  # the normal distribution where the result is rounded to 16 bits: within 1e-5
    "tanh_16": OpInfo(1, 6.0),  # where the result is rounded to bfloat16: within 2**-10 of its value
    "erfinv": OpInfo(1, 3 * _EXP), "lgamma": OpInfo(1, 6 * _EXP), "hypot": OpInfo(2, 8.0),
    "copysign": OpInfo(2), "nextafter": OpInfo(2, 2.0),
    "floor": OpInfo(1), "ceil": OpInfo(1), "trunc": OpInfo(1),
    "round": OpInfo(1),  # half to even
    # conversions
    "cast": OpInfo(1, result="given"),  # the value as the other type holds it; rounding kept
    "narrow": OpInfo(1, result="given"),  # float32 -> 16-bit at an op's end; a `widen` may undo it
    "widen": OpInfo(1, result="given"),  # 16-bit -> float32 for computing
    "bitcast": OpInfo(1, result="given"),
    "uniform": OpInfo(1, 2.0, result="given"),  # uint32 word -> [0, 1): top 24 bits (float64: 32 bits)
    # checked index: negative wraps once; out of [0, size) fails the kernel with that axis's error
    "wrap_index": OpInfo(2, 2.0, integer_raises=True),
    "check_index": OpInfo(2, 1.0, integer_raises=True),  # the same without wrapping
}  # fmt: skip

# Operations on floats that are far off where a GPU's library takes denormal numbers for zero.
NEED_DENORMALS = frozenset(
    ("log2", "log10", "pow", "fmod", "lgamma", "atan2", "nextafter", "remainder", "floordiv")
)  # fmt: skip

# Operations whose result jumps: on 16-bit inputs they see the rounded value, as eager does.
DISCONTINUOUS = frozenset(
    (
        "eq", "ne", "lt", "le", "gt", "ge", "floor", "ceil", "trunc", "round", "sign", "floordiv", "truncdiv",
        "remainder", "fmod", "signbit", "nextafter",
    )
)  # fmt: skip
