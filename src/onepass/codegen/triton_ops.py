"""Triton text for every scalar operation, literal and monoid; what it calls is in `triton_prelude.py`.

As in `c_ops.py`, arguments and results are atoms, so expressions nest without thought. Literals are typed
0-d tensors: a bare number would take the type of whatever it meets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..ir.dtypes import DType
from ..ir.expr import Const
from .scalars import BIT_OPERATORS, INTEGER_DIVISIONS, Scalars, Templates, by_type, infix

_TYPES = {DType.BOOL: "tl.int1", DType.F8E4M3: "tl.uint8", DType.F8E5M2: "tl.uint8"}
_SIGNATURES = {
    DType.F64: "fp64", DType.F32: "fp32", DType.F16: "fp16", DType.BOOL: "i1", DType.F8E4M3: "u8", DType.F8E5M2: "u8",
}  # fmt: skip
# As the matrix unit knows types that are bytes elsewhere: in a signature, and in the language.
MATRIX_TYPES = {DType.F8E4M3: ("fp8e4nv", "tl.float8e4nv")}

_OPERATORS = {"add": "+", "sub": "-", "mul": "*"}
_LANGUAGE = ("log2", "sin", "cos", "erf", "floor", "ceil", "abs", "fma")
_LIBRARY = (
    "expm1", "log10", "log1p", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh", "asinh", "acosh",
    "atanh", "erfc", "erfinv", "lgamma", "hypot", "copysign", "nextafter", "trunc", "fmod", "pow",
)  # fmt: skip
_OWN = (
    "sign", "maximum", "minimum", "fmax", "fmin", "sqrt", "rsqrt", "signbit", "remainder", "floordiv", "exp", "exp2",
    "log", "normal_16", "tanh_16",
)  # fmt: skip
_UNSIGNED = {DType.U8: 0xFF, DType.U32: 0xFFFFFFFF}  # their ones

_FLOATS = infix(_OPERATORS | {"div": "/"})  # a GPU's float32 division: within 2 ulp
_FLOATS |= dict.fromkeys(_LANGUAGE, "tl.{op}({all})") | dict.fromkeys(_LIBRARY, "libdevice.{op}({all})")
_FLOATS |= dict.fromkeys(_OWN, "op_{op}({all})") | {
    "round": "libdevice.nearbyint({0})", "isnan": "({0} != {0})",
    "isinf": '(tl.abs({0}) == float("inf"))', "truncdiv": "libdevice.trunc(op_div({all}))",
}  # fmt: skip
_BOOLS = {"bitnot": "({0} == 0)"} | dict.fromkeys(("isnan", "isinf", "signbit"), "({0} != {0})")
_ANY_TYPES = {"where": "tl.where({all})", "reopen": "op_reopen({0})", "single": "op_single({0})"}


def _integers(dtype: DType) -> Templates:
    table = {op: f"{text}.to({{type}})" for op, text in infix(_OPERATORS | BIT_OPERATORS).items()}
    table |= dict.fromkeys((*INTEGER_DIVISIONS, "pow"), "op_{op}_integer({all})")
    table |= dict.fromkeys(("shl", "shr"), f"op_{{op}}({{all}}, {8 * dtype.bytes})")
    table |= dict.fromkeys(("maximum", "fmax"), "tl.where({0} > {1}, {all})")
    table |= dict.fromkeys(("minimum", "fmin"), "tl.where({0} < {1}, {all})")
    table |= dict.fromkeys(("isnan", "isinf"), "({0} != {0})")
    return table | {
        "neg": "(-{0})" if dtype is not DType.U8 else "(0 - {0}).to(tl.uint8)",
        "abs": "{0}" if dtype in _UNSIGNED else "tl.abs({0})",
        "bitnot": f"({{0}} ^ tl.full([], {_UNSIGNED.get(dtype, -1)}, {{type}}))",
        "sign": "op_sign({0})",
    }


def triton_type(dtype: DType) -> str:
    """The Triton type of a value."""
    return _TYPES.get(dtype) or f"tl.{dtype.value}"


def signature_type(dtype: DType, matrix: bool = False) -> str:
    """How a compiled kernel's signature names the type. `matrix`: as the matrix unit knows it."""
    return MATRIX_TYPES[dtype][0] if matrix else _SIGNATURES.get(dtype) or dtype.name.lower()


def triton_number(value: Const) -> str:
    """The literal without its type."""
    if value.dtype.is_float:
        number = float(value.value)
        return repr(number) if math.isfinite(number) else f'float("{number}")'
    return str(int(value.value)) if value.dtype is not DType.BOOL else str(bool(value.value))


def triton_const(value: Const) -> str:
    """A typed literal; 16-bit floats are rounded through float32, as eager does."""
    if value.dtype.is_half:
        return f"tl.full([], {triton_number(value)}, tl.float32).to({triton_type(value.dtype)})"
    return f"tl.full([], {triton_number(value)}, {triton_type(value.dtype)})"


def _cast(arg: str, source: DType, target: DType) -> str:
    if source is target:
        return arg
    if source.is_half and target is not DType.F32:
        return _cast(f"{arg}.to(tl.float32)", DType.F32, target)
    if target.is_half and source is not DType.F32:
        return _cast(_cast(arg, source, DType.F32), DType.F32, target)
    if target is DType.BOOL:
        return f"({arg} != 0)"
    if source.is_float and target.is_integer and target not in (DType.I32, DType.I64):
        through = DType.I64 if target is DType.U32 or source is DType.F64 else DType.I32
        return f"{arg}.to({triton_type(through)}).to({triton_type(target)})"
    return f"{arg}.to({triton_type(target)})"


def _bits(arg: str, source: DType, target: DType) -> str:
    if source is DType.BOOL:
        return f"{arg}.to({triton_type(target)})"
    return arg if triton_type(source) == triton_type(target) else f"{arg}.to({triton_type(target)}, bitcast=True)"


_NEXTAFTER_HALF = "op_nextafter_half({all}, 0x7FFF)"  # the bits of a NaN in both types
# The Triton expression of an operation; ValueError where it has no meaning on the types of its operands.
triton_pointwise = Scalars(
    triton_type, by_type(_FLOATS, _integers, _BOOLS), _ANY_TYPES, _cast, _bits, _NEXTAFTER_HALF
).text


def from_word(name: str, dtype: DType) -> str:
    """A number handed over as the bits of a 64-bit word."""
    if dtype is DType.BOOL:
        return f"({name} != 0)"
    if not dtype.is_float:
        return f"{name}.to({triton_type(dtype)})"
    integer = {2: DType.I16, 4: DType.I32, 8: DType.I64}[dtype.bytes]
    return f"{name}.to({triton_type(integer)}).to({triton_type(dtype)}, bitcast=True)"


def triton_join(monoid: str, state: Sequence[str], value: Sequence[str], dtype: DType) -> str:
    """The state after another one enters; a tuple where there are several parts."""
    match monoid:
        case "sum" | "prod":
            return f"{state[0]} {'+' if monoid == 'sum' else '*'} {value[0]}"
        case "max" | "min" if dtype.is_float:
            return f"op_{monoid}imum({value[0]}, {state[0]})"
        case "max" | "min":
            return f"tl.where({value[0]} {'>' if monoid == 'max' else '<'} {state[0]}, {value[0]}, {state[0]})"
        case "any" | "all":
            return f"{state[0]} {'|' if monoid == 'any' else '&'} {value[0]}"
        case "linear_step":
            return f"{value[0]} * {state[0]} + {value[1]}"
    name = monoid.removesuffix("_merge")
    return f"op_join_{name}({', '.join((*state, *value))})"


def triton_fold(monoid: str, values: Sequence[str], dim: int) -> str:
    """The values merged along one dimension, which stays with extent 1."""
    name = {"any": "max", "all": "min"}.get(monoid, monoid.removesuffix("_merge"))
    return f"op_fold_{name}({', '.join(values)}, {dim})"
