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

from ..ir.dtypes import DType
from ..ir.expr import Const
from ..ir.ops import CHECKED, OPS
from ..ir.states import identities
from .scalars import BIT_OPERATORS, INTEGER_DIVISIONS, Scalars, Templates, by_type, infix, suffix

_TYPES = {
    DType.F64: "double", DType.F32: "float", DType.F16: "uint16_t", DType.BF16: "uint16_t",
    DType.BOOL: "uint8_t", DType.F8E4M3: "uint8_t", DType.F8E5M2: "uint8_t",
}  # fmt: skip
_CALL, _CHECKED_CALL = "op_{op}_{suffix}({all})", "op_{op}_{suffix}({all}, &status)"
_FLOAT_FUNCTIONS = (
    "abs", "sign", "maximum", "minimum", "fmax", "fmin", "sqrt", "rsqrt", "pow", "fma", "floordiv", "truncdiv",
    "remainder", "fmod", "isnan", "isinf", "signbit", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin",
    "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc",
    "normal_16", "tanh_16", "erfinv", "lgamma", "hypot", "copysign", "nextafter", "floor", "ceil", "trunc", "round",
)  # fmt: skip
_INTEGER_FUNCTIONS = ("add", "sub", "mul", "neg", "abs", "sign", "maximum", "minimum", "shl", "shr", "pow")
_MONOID_OPS = {"sum": "add", "prod": "mul", "max": "maximum", "min": "minimum", "any": "bitor", "all": "bitand"}

_FLOATS = infix({"add": "+", "sub": "-", "mul": "*", "div": "/"}) | dict.fromkeys(_FLOAT_FUNCTIONS, _CALL)
_BOOLS = {"bitnot": "({0} ^ 1)", "isnan": "0", "isinf": "0", "signbit": "0"}
_ANY_TYPES = dict.fromkeys(CHECKED, "op_{op}({all}, &status)") | {"where": "({0} ? {1} : {2})"}


def _integers(dtype: DType) -> Templates:
    table = dict.fromkeys(_INTEGER_FUNCTIONS, _CALL) | infix(BIT_OPERATORS) | {"isnan": "0", "isinf": "0"}
    table |= {"fmax": "op_maximum_{suffix}({all})", "fmin": "op_minimum_{suffix}({all})", "bitnot": "(({type})~{0})"}
    return table if dtype is DType.U32 else table | dict.fromkeys(INTEGER_DIVISIONS, _CHECKED_CALL)


def c_type(dtype: DType) -> str:
    """The C type of a value; 16-bit floats are bit patterns, bools bytes holding 0 or 1."""
    return _TYPES.get(dtype) or f"{dtype.value}_t"


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


def _cast(arg: str, source: DType, target: DType) -> str:
    if source is target:
        return arg
    if source.is_half:
        return _cast(f"op_widen_{suffix(source)}({arg})", DType.F32, target)
    if target.is_half:
        return f"op_narrow_{suffix(target)}({_cast(arg, source, DType.F32)})"
    if target is DType.BOOL:
        return f"({arg} != 0)"
    if source.is_float and not target.is_float:
        return _float_to_integer(arg, source, target)
    return f"(({c_type(target)}){arg})"


def _float_to_integer(arg: str, source: DType, target: DType) -> str:
    """Narrow integers take the low bits of the int32 (of a double for unsigned: the int64), as eager does."""
    through_64 = target in (DType.I64, DType.U32) or (target is DType.U8 and source is DType.F64)
    wide = DType.I64 if through_64 else DType.I32
    text = f"op_cast_{suffix(source)}_{suffix(wide)}({arg})"
    return text if target is wide else f"(({c_type(target)}){text})"


def _bits(arg: str, source: DType, target: DType) -> str:
    if source is target or c_type(source) == c_type(target):
        return arg
    if source in (DType.F32, DType.F64) or target in (DType.F32, DType.F64):
        return f"op_bits_{suffix(source)}_{suffix(target)}({arg})"
    return f"(({c_type(target)}){arg})"


# The C expression of an operation; ValueError where it has no meaning on the types of its operands.
c_pointwise = Scalars(c_type, by_type(_FLOATS, _integers, _BOOLS), _ANY_TYPES, _cast, _bits, nextafter_half=_CALL).text


def c_monoid_identity(monoid: str, dtypes: Sequence[DType]) -> list[str]:
    """Literals of the state nothing has entered yet, one per part (`dtypes` are the parts')."""
    first, *others = identities(monoid, dtypes)
    return [c_const(first), *("INT64_MAX" if monoid.startswith("arg") else c_const(o) for o in others)]


def c_combine(monoid: str, acc: Sequence[str], value: Sequence[str], dtypes: Sequence[DType]) -> str:
    """A C statement that merges the state `value` into the state held by the lvalues `acc`."""
    match monoid:
        case "welford" | "welford_merge":
            return f"op_welford_merge_{_float_suffix(dtypes[0])}({_pointers(acc)}, {', '.join(value)});"
        case "argmax" | "argmin":
            return _arg_statement(monoid, acc, value, dtypes[0])
    combined = c_pointwise(_MONOID_OPS[monoid], [value[0], acc[0]], [dtypes[0]] * 2, dtypes[0])
    return f"{acc[0]} = {combined};"


def c_accumulate(
    monoid: str, acc: Sequence[str], inputs: Sequence[str], dtypes: Sequence[DType], reciprocal: str | None = None
) -> str:
    """A C statement that enters one element into the state held by the lvalues `acc`.

    `dtypes` are the parts'. For `welford`, `reciprocal` is 1 / (count + 1) where the caller has it.
    """
    if monoid == "welford":
        function, given = ("", "") if reciprocal is None else ("_scaled", f", {reciprocal}")
        return f"op_welford{function}_{_float_suffix(dtypes[0])}({_pointers(acc)}, {inputs[0]}{given});"
    if monoid == "logsumexp":
        return f"op_logsumexp_{suffix(dtypes[0])}({_pointers(acc)}, {inputs[0]});"
    if monoid == "linear_step":
        return f"{acc[0]} = {inputs[0]} * {acc[0]} + {inputs[1]};"
    if monoid == "linear":
        return f"{acc[1]} = {inputs[0]} * {acc[1]} + {inputs[1]}; {acc[0]} = {acc[0]} * {inputs[0]};"
    if monoid in ("any", "all"):
        return c_combine(monoid, acc, [f"({inputs[0]} != 0)"], dtypes)
    return c_combine(monoid, acc, inputs, dtypes)


def _arg_statement(monoid: str, acc: Sequence[str], value: Sequence[str], dtype: DType) -> str:
    if not dtype.is_half:
        kind = "u8" if dtype is DType.BOOL else suffix(dtype)
        return f"op_{monoid}_{kind}({_pointers(acc)}, {value[0]}, {value[1]});"
    best = _cast(acc[0], dtype, DType.F32)
    inner = f"op_{monoid}_f32(&best, &{acc[1]}, {_cast(value[0], dtype, DType.F32)}, {value[1]});"
    return f"{{ float best = {best}; {inner} {acc[0]} = {_cast('best', DType.F32, dtype)}; }}"


def _float_suffix(dtype: DType) -> str:
    if dtype not in (DType.F32, DType.F64):
        raise ValueError(f"welford accumulates in float32 or float64, not {dtype}")
    return suffix(dtype)


def _pointers(lvalues: Sequence[str]) -> str:
    return ", ".join(f"&{v}" for v in lvalues)
