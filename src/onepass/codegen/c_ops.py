"""C text for every scalar operation, literal and monoid; what it calls is in `prelude.h`.

Arguments are C atoms (a name, a literal, or something this module returned), results are atoms again,
so expressions nest without thought. Operations that can fail write to an int named `status` in scope.

    c_pointwise("add", ["x", "y"], [F32, F32], F32)        -> "(x + y)"
    c_pointwise("floordiv", ["i", "j"], [I64, I64], I64)   -> "op_floordiv_i64(i, j, &status)"
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from pathlib import Path

from onepass.ir.dtypes import DType
from onepass.ir.expr import Const, const
from onepass.ir.monoids import identity
from onepass.ir.ops import OPS

from .scalars import BIT_OPERATORS, BOOL_OPERATORS, SAME_ON_INTEGERS, Scalars

PRELUDE = Path(__file__).with_name("prelude.h")
DIVISION_BY_ZERO, INDEX_OUT_OF_RANGE = 1, 2  # the bits of a kernel's status

_TYPES = {
    DType.F64: "double", DType.F32: "float", DType.F16: "uint16_t", DType.BF16: "uint16_t",
    DType.I64: "int64_t", DType.I32: "int32_t", DType.I16: "int16_t", DType.I8: "int8_t",
    DType.U8: "uint8_t", DType.U32: "uint32_t", DType.BOOL: "uint8_t",
    DType.F8E4M3: "uint8_t", DType.F8E5M2: "uint8_t",
}  # fmt: skip
_SUFFIXES = {
    DType.F64: "f64", DType.F32: "f32", DType.F16: "f16", DType.BF16: "bf16", DType.I64: "i64",
    DType.I32: "i32", DType.I16: "i16", DType.I8: "i8", DType.U8: "u8", DType.U32: "u32",
}  # fmt: skip

_FLOAT_OPERATORS = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_FLOAT_FUNCTIONS = frozenset(
    ["abs", "sign", "maximum", "minimum", "fmax", "fmin", "sqrt", "rsqrt", "pow", "fma", "floordiv",
     "truncdiv", "remainder", "fmod", "isnan", "isinf", "signbit", "exp", "exp2", "expm1", "log", "log2",
     "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh", "asinh",
     "acosh", "atanh", "erf", "erfc", "normal_16",
     "tanh_16", "erfinv", "lgamma", "hypot", "copysign", "nextafter", "floor",
     "ceil", "trunc", "round"]
)  # fmt: skip
_INTEGER_FUNCTIONS = frozenset(["add", "sub", "mul", "neg", "abs", "sign", "maximum", "minimum", "shl", "shr", "pow"])
_INTEGER_DIVISIONS = frozenset(["floordiv", "truncdiv", "remainder", "fmod"])
_MONOID_OPS = {"sum": "add", "prod": "mul", "max": "maximum", "min": "minimum", "any": "bitor", "all": "bitand"}


def c_type(dtype: DType) -> str:
    """The C type of a value; 16-bit floats are bit patterns, bools bytes holding 0 or 1."""
    return _TYPES[dtype]


def c_const(value: Const) -> str:
    """A literal with exactly that value in that type."""
    number, dtype = value.value, value.dtype
    if dtype.is_half:
        return f"0x{_half_bits(float(number), dtype):04x}"
    if dtype.is_float:
        return _float_literal(float(number), dtype)
    integer = int(number)
    if dtype is DType.U32:
        return f"{integer}u"
    suffix = "LL" if abs(integer) > 0x7FFFFFFF else ""
    if integer == -(1 << 63):
        return "(-9223372036854775807LL - 1)"
    return f"({integer}{suffix})" if integer < 0 else f"{integer}{suffix}"


def _to_float32(number: float) -> float:
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", number))[0]
    except OverflowError:
        return math.copysign(math.inf, number)
    return rounded


def _float_literal(number: float, dtype: DType) -> str:
    single = dtype is DType.F32
    if single:
        number = _to_float32(number)
    if math.isnan(number):
        return "OP_NAN"
    if math.isinf(number):
        return "OP_INFINITY" if number > 0 else "(-OP_INFINITY)"
    if number == int(number) and abs(number) < 1e6:
        text = f"{number:.1f}"  # exact, and what people write
    else:
        mantissa, exponent = number.hex().split("p")
        text = f"{mantissa.rstrip('0').rstrip('.')}p{exponent}"
    text += "f" if single else ""
    return f"({text})" if text.startswith("-") else text


def _half_bits(number: float, dtype: DType) -> int:
    """Rounded as eager rounds a Python number: through float32, to nearest even."""
    bits: int = struct.unpack("<I", struct.pack("<f", _to_float32(number)))[0]
    if dtype is DType.BF16:
        return 0x7FC0 if math.isnan(number) else (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    try:
        half: int = struct.unpack("<H", struct.pack("<e", _to_float32(number)))[0]
    except OverflowError:
        return 0xFC00 if number < 0 else 0x7C00
    return half


def raises(op: str, dtype: DType) -> bool:
    """Whether the operation on this type may set `status`."""
    return OPS[op].integer_raises and not dtype.is_float


def c_pointwise(op: str, args: Sequence[str], arg_dtypes: Sequence[DType], dtype: DType) -> str:
    """A C expression for `op`; ValueError where the operation has no meaning on these types."""
    match op:
        case "cast" | "narrow" | "widen":
            return _cast(args[0], arg_dtypes[0], dtype)
        case "bitcast":
            return _bitcast(args[0], arg_dtypes[0], dtype)
        case "where":
            return f"({args[0]} ? {args[1]} : {args[2]})"
        case "uniform" if dtype in (DType.F32, DType.F64):
            return f"op_uniform_{_SUFFIXES[dtype]}({args[0]})"
        case "wrap_index" | "check_index":
            return f"op_{op}({args[0]}, {args[1]}, &status)"
    return _C.text(op, args, arg_dtypes, dtype)


def _on_float(op: str, args: Sequence[str], dtype: DType) -> str | None:
    if op in _FLOAT_OPERATORS:
        return f"({args[0]} {_FLOAT_OPERATORS[op]} {args[1]})"
    if op == "neg":
        return f"(-{args[0]})"
    if op in _FLOAT_FUNCTIONS:
        return f"op_{op}_{_SUFFIXES[dtype]}({', '.join(args)})"
    return None


def _on_integer(op: str, args: Sequence[str], dtype: DType) -> str | None:
    suffix = _SUFFIXES[dtype]
    if op in _INTEGER_FUNCTIONS:
        return f"op_{op}_{suffix}({', '.join(args)})"
    if op in _INTEGER_DIVISIONS and dtype is not DType.U32:
        return f"op_{op}_{suffix}({args[0]}, {args[1]}, &status)"
    if op in BIT_OPERATORS:
        return f"({args[0]} {BIT_OPERATORS[op]} {args[1]})"
    if op in SAME_ON_INTEGERS:
        return args[0]
    match op:
        case "bitnot":
            return f"(({_TYPES[dtype]})~{args[0]})"
        case "fmax" | "fmin":
            return f"op_{'maximum' if op == 'fmax' else 'minimum'}_{suffix}({args[0]}, {args[1]})"
        case "isnan" | "isinf":
            return "0"
        case "signbit":
            return f"({args[0]} < 0)"
    return None


def _on_bool(op: str, args: Sequence[str], _dtype: DType) -> str | None:
    if op in BOOL_OPERATORS:
        return f"({args[0]} {BOOL_OPERATORS[op]} {args[1]})"
    match op:
        case "bitnot":
            return f"({args[0]} ^ 1)"
        case "abs" | "sign":
            return args[0]
        case "isnan" | "isinf" | "signbit":
            return "0"
    return None


def _cast(arg: str, source: DType, target: DType) -> str:
    if source is target:
        return arg
    if source.is_half:
        return _cast(f"op_widen_{_SUFFIXES[source]}({arg})", DType.F32, target)
    if target.is_half:
        return f"op_narrow_{_SUFFIXES[target]}({_cast(arg, source, DType.F32)})"
    if target is DType.BOOL:
        return f"({arg} != 0)"
    if source.is_float and not target.is_float:
        return _float_to_integer(arg, source, target)
    return f"(({_TYPES[target]}){arg})"


def _float_to_integer(arg: str, source: DType, target: DType) -> str:
    """Narrow integers take the low bits of the int32 (of a double for unsigned: the int64), as eager does."""
    through_64 = target in (DType.I64, DType.U32) or (target is DType.U8 and source is DType.F64)
    wide = DType.I64 if through_64 else DType.I32
    text = f"op_cast_{_SUFFIXES[source]}_{_SUFFIXES[wide]}({arg})"
    return text if target is wide else f"(({_TYPES[target]}){text})"


def _nextafter_half(args: Sequence[str], dtype: DType) -> str:
    return f"op_nextafter_{_SUFFIXES[dtype]}({', '.join(args)})"


_C = Scalars(_on_float, _on_integer, _on_bool, _cast, _nextafter_half)


def _bitcast(arg: str, source: DType, target: DType) -> str:
    if source.bytes != target.bytes:
        raise ValueError(f"a bitcast keeps the width: {source} to {target}")
    if target is DType.BOOL:
        return f"({arg} != 0)"
    if source in (DType.F32, DType.F64) or target in (DType.F32, DType.F64):
        return arg if source is target else f"op_bits_{_SUFFIXES[source]}_{_SUFFIXES[target]}({arg})"
    return arg if _TYPES[source] == _TYPES[target] else f"(({_TYPES[target]}){arg})"


def c_monoid_identity(monoid: str, dtypes: Sequence[DType]) -> list[str]:
    """Literals of the state nothing has entered yet, one per part (`dtypes` are the parts')."""
    first = c_const(const(identity(monoid, dtypes[0]), dtypes[0]))
    match monoid:
        case "welford" | "welford_merge":
            return [first] * 3
        case "argmax" | "argmin":
            return [first, "INT64_MAX"]  # loses every tie, so a first element equal to `first` enters
    return [first]


def c_combine(monoid: str, acc: Sequence[str], value: Sequence[str], dtypes: Sequence[DType]) -> list[str]:
    """C statements that merge the state `value` into the state held by the lvalues `acc`."""
    match monoid:
        case "welford" | "welford_merge":
            return [f"op_welford_merge_{_float_suffix(dtypes[0])}({_pointers(acc)}, {', '.join(value)});"]
        case "argmax" | "argmin":
            return _arg_statements(monoid, acc, value, dtypes[0])
    combined = c_pointwise(_MONOID_OPS[monoid], [value[0], acc[0]], [dtypes[0]] * 2, dtypes[0])
    return [f"{acc[0]} = {combined};"]


def c_accumulate(
    monoid: str,
    acc: Sequence[str],
    inputs: Sequence[str],
    dtypes: Sequence[DType],
    reciprocal: str | None = None,
) -> list[str]:
    """C statements that enter one element into the state held by the lvalues `acc`.

    `dtypes` are the parts'. For `welford`, `reciprocal` is 1 / (count + 1) where the caller has it.
    """
    if monoid == "welford":
        suffix = _float_suffix(dtypes[0])
        if reciprocal is None:
            return [f"op_welford_{suffix}({_pointers(acc)}, {inputs[0]});"]
        return [f"op_welford_scaled_{suffix}({_pointers(acc)}, {inputs[0]}, {reciprocal});"]
    if monoid in ("any", "all"):
        return c_combine(monoid, acc, [f"({inputs[0]} != 0)"], dtypes)
    return c_combine(monoid, acc, inputs, dtypes)


def _arg_statements(monoid: str, acc: Sequence[str], value: Sequence[str], dtype: DType) -> list[str]:
    if not dtype.is_half:
        suffix = "u8" if dtype is DType.BOOL else _SUFFIXES[dtype]
        return [f"op_{monoid}_{suffix}({_pointers(acc)}, {value[0]}, {value[1]});"]
    best = _cast(acc[0], dtype, DType.F32)
    inner = f"op_{monoid}_f32(&best, &{acc[1]}, {_cast(value[0], dtype, DType.F32)}, {value[1]});"
    return [f"{{ float best = {best}; {inner} {acc[0]} = {_cast('best', DType.F32, dtype)}; }}"]


def _float_suffix(dtype: DType) -> str:
    if dtype not in (DType.F32, DType.F64):
        raise ValueError(f"welford accumulates in float32 or float64, not {dtype}")
    return _SUFFIXES[dtype]


def _pointers(lvalues: Sequence[str]) -> str:
    return ", ".join(f"&{v}" for v in lvalues)
