"""Triton text for every scalar operation, literal and monoid; what it calls is in `triton_prelude.py`.

As in `c_ops.py`, arguments and results are atoms, so expressions nest without thought. Literals are typed
0-d tensors: a bare number would take the type of whatever it meets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..ir.dtypes import DType
from ..ir.expr import Const, const
from ..ir.monoids import identity
from .scalars import BIT_OPERATORS, BOOL_OPERATORS, SAME_ON_INTEGERS, Scalars

_TYPES = {
    DType.F64: "tl.float64", DType.F32: "tl.float32", DType.F16: "tl.float16", DType.BF16: "tl.bfloat16",
    DType.I64: "tl.int64", DType.I32: "tl.int32", DType.I16: "tl.int16", DType.I8: "tl.int8",
    DType.U8: "tl.uint8", DType.U32: "tl.uint32", DType.BOOL: "tl.int1",
    DType.F8E4M3: "tl.uint8", DType.F8E5M2: "tl.uint8",
}  # fmt: skip
_SIGNATURES = {
    DType.F64: "fp64", DType.F32: "fp32", DType.F16: "fp16", DType.BF16: "bf16", DType.I64: "i64", DType.I32: "i32",
    DType.I16: "i16", DType.I8: "i8", DType.U8: "u8", DType.U32: "u32", DType.BOOL: "i1",
    DType.F8E4M3: "u8", DType.F8E5M2: "u8",
}  # fmt: skip
# As the matrix unit knows types that are bytes elsewhere: in a signature, and in the language.
MATRIX_TYPES = {DType.F8E4M3: ("fp8e4nv", "tl.float8e4nv")}

_OPERATORS = {"add": "+", "sub": "-", "mul": "*"}
_FLOAT_OPERATORS = _OPERATORS | {"div": "/"}  # a GPU's float32 division: within 2 ulp
_LANGUAGE = frozenset(["log2", "sin", "cos", "erf", "floor", "ceil", "abs", "fma"])
_LIBRARY = {
    name: name
    for name in (
        "expm1", "log10", "log1p", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh", "asinh", "acosh",
        "atanh", "erfc", "erfinv", "lgamma", "hypot", "copysign", "nextafter", "trunc", "fmod", "pow",
    )
} | {"round": "nearbyint"}  # fmt: skip
_OWN = frozenset(
    [
        "sign", "maximum", "minimum", "fmax", "fmin", "sqrt", "rsqrt", "signbit", "remainder", "floordiv", "exp",
        "exp2", "log", "normal_16", "tanh_16",
    ]
)  # fmt: skip
_INTEGER_DIVISIONS = frozenset(["truncdiv", "fmod", "floordiv", "remainder"])


def triton_type(dtype: DType) -> str:
    """The Triton type of a value."""
    return _TYPES[dtype]


def signature_type(dtype: DType) -> str:
    """How a compiled kernel's signature names the type."""
    return _SIGNATURES[dtype]


def triton_number(value: Const) -> str:
    """The literal without its type."""
    number = value.value
    if value.dtype.is_float:
        number = float(number)
        if math.isnan(number):
            return 'float("nan")'
        if math.isinf(number):
            return 'float("inf")' if number > 0 else 'float("-inf")'
        return repr(number)
    return str(int(number)) if value.dtype is not DType.BOOL else str(bool(number))


def triton_const(value: Const) -> str:
    """A typed literal; 16-bit floats are rounded through float32, as eager does."""
    if value.dtype.is_half:
        return f"tl.full([], {triton_number(value)}, tl.float32).to({_TYPES[value.dtype]})"
    return f"tl.full([], {triton_number(value)}, {_TYPES[value.dtype]})"


def triton_pointwise(op: str, args: Sequence[str], arg_dtypes: Sequence[DType], dtype: DType) -> str:
    """A Triton expression for `op`; ValueError where the operation has no meaning on these types."""
    match op:
        case "cast" | "narrow" | "widen":
            return _cast(args[0], arg_dtypes[0], dtype)
        case "reopen":
            return f"op_reopen({args[0]})"
        case "bitcast":
            return _bitcast(args[0], arg_dtypes[0], dtype)
        case "where":
            return f"tl.where({args[0]}, {args[1]}, {args[2]})"
        case "uniform" if dtype in (DType.F32, DType.F64):
            return f"op_uniform_{'f32' if dtype is DType.F32 else 'f64'}({args[0]})"
    return _TRITON.text(op, args, arg_dtypes, dtype)


def _on_float(op: str, args: Sequence[str], _dtype: DType) -> str | None:
    arguments = ", ".join(args)
    if op in _FLOAT_OPERATORS:
        return f"({args[0]} {_FLOAT_OPERATORS[op]} {args[1]})"
    if op in _LANGUAGE:
        return f"tl.{op}({arguments})"
    if op in _LIBRARY:
        return f"libdevice.{_LIBRARY[op]}({arguments})"
    if op in _OWN:
        return f"op_{op}({arguments})"
    match op:
        case "neg":
            return f"(-{args[0]})"
        case "isnan":
            return f"({args[0]} != {args[0]})"
        case "isinf":
            return f'(tl.abs({args[0]}) == float("inf"))'
        case "truncdiv":
            return f"libdevice.trunc(op_div({arguments}))"
    return None


def _on_integer(op: str, args: Sequence[str], dtype: DType) -> str | None:
    arguments = ", ".join(args)
    if op in _OPERATORS | BIT_OPERATORS:
        return f"({args[0]} {(_OPERATORS | BIT_OPERATORS)[op]} {args[1]}).to({_TYPES[dtype]})"
    if op in _INTEGER_DIVISIONS:
        return f"op_{op}_integer({arguments})"
    if op in SAME_ON_INTEGERS:
        return args[0]
    match op:
        case "neg":
            return f"(-{args[0]})" if dtype is not DType.U8 else f"(0 - {args[0]}).to(tl.uint8)"
        case "abs":
            return args[0] if dtype in (DType.U8, DType.U32) else f"tl.abs({args[0]})"
        case "sign":
            return f"op_sign({args[0]})"
        case "maximum" | "fmax":
            return f"tl.where({args[0]} > {args[1]}, {arguments})"
        case "minimum" | "fmin":
            return f"tl.where({args[0]} < {args[1]}, {arguments})"
        case "shl" | "shr":
            return f"op_{op}({arguments}, {8 * dtype.bytes})"
        case "pow":
            return f"op_pow_integer({arguments})"
        case "bitnot":
            ones = {DType.U8: 0xFF, DType.U32: 0xFFFFFFFF}.get(dtype, -1)
            return f"({args[0]} ^ tl.full([], {ones}, {_TYPES[dtype]}))"
        case "isnan" | "isinf":
            return f"({args[0]} != {args[0]})"
        case "signbit":
            return f"({args[0]} < 0)"
    return None


def _on_bool(op: str, args: Sequence[str], _dtype: DType) -> str | None:
    if op in BOOL_OPERATORS:
        return f"({args[0]} {BOOL_OPERATORS[op]} {args[1]})"
    match op:
        case "bitnot":
            return f"({args[0]} == 0)"
        case "abs" | "sign":
            return args[0]
        case "isnan" | "isinf" | "signbit":
            return f"({args[0]} != {args[0]})"
    return None


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
        return f"{arg}.to({_TYPES[through]}).to({_TYPES[target]})"
    return f"{arg}.to({_TYPES[target]})"


def _nextafter_half(args: Sequence[str], _dtype: DType) -> str:
    return f"op_nextafter_half({args[0]}, {args[1]}, 0x7FFF)"  # the bits of a NaN in both types


_TRITON = Scalars(_on_float, _on_integer, _on_bool, _cast, _nextafter_half)


def _bitcast(arg: str, source: DType, target: DType) -> str:
    if source.bytes != target.bytes:
        raise ValueError(f"a bitcast keeps the width: {source} to {target}")
    if target is DType.BOOL:
        return f"({arg} != 0)"
    if source is DType.BOOL:
        return f"{arg}.to({_TYPES[target]})"
    return arg if _TYPES[source] == _TYPES[target] else f"{arg}.to({_TYPES[target]}, bitcast=True)"


def from_word(name: str, dtype: DType) -> str:
    """A number handed over as the bits of a 64-bit word."""
    if dtype is DType.BOOL:
        return f"({name} != 0)"
    if not dtype.is_float:
        return f"{name}.to({_TYPES[dtype]})"
    integer = {2: DType.I16, 4: DType.I32, 8: DType.I64}[dtype.bytes]
    return f"{name}.to({_TYPES[integer]}).to({_TYPES[dtype]}, bitcast=True)"


def identities(monoid: str, dtypes: Sequence[DType]) -> list[Const]:
    """The state nothing has entered yet, one literal per part; bools count as int32."""
    first = const(identity(monoid, dtypes[0]), dtypes[0])
    match monoid:
        case "welford" | "welford_merge":
            return [first] * 3
        case "argmax" | "argmin":
            return [first, const((1 << 63) - 1, DType.I64)]
    return [first]


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
    name = monoid.removesuffix("_merge")
    return f"op_join_{name}({', '.join((*state, *value))})"


def triton_fold(monoid: str, values: Sequence[str], dim: int) -> str:
    """The values merged along one dimension, which stays with extent 1."""
    name = {"any": "max", "all": "min"}.get(monoid, monoid.removesuffix("_merge"))
    return f"op_fold_{name}({', '.join(values)}, {dim})"


def joined_words(words: list[str]) -> str:
    """Words that belong to neighbouring elements, in a dimension for each bit of their number."""
    if len(words) == 1:
        return words[0]
    return f"tl.join({joined_words(words[::2])}, {joined_words(words[1::2])})"
