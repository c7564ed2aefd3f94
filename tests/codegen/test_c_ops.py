"""Every scalar operation in C against torch eager, on adversarial values; one C file, built once.

Exact operations are compared bit by bit (NaN equals NaN), functions in units in the last place.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from onepass.codegen.c_ops import c_accumulate, c_combine, c_const, c_monoid_identity, c_pointwise, c_type, raises
from onepass.ir.dtypes import DType
from onepass.ir.expr import const
from onepass.ir.monoids import MONOIDS, part_dtypes
from onepass.ir.ops import OPS
from onepass.runtime.executable import DIVISION_BY_ZERO, INDEX_OUT_OF_RANGE
from onepass.runtime.prelude import PRELUDE_FOLDER
from onepass.runtime.toolchain import find_toolchain

F64, F32, F16, BF16 = DType.F64, DType.F32, DType.F16, DType.BF16
FLOATS, HALVES = (F32, F64), (F16, BF16)
INTS = (DType.I64, DType.I32, DType.I16, DType.I8, DType.U8)
BOOL = DType.BOOL
ALL = (*FLOATS, *HALVES, *INTS, BOOL)


@dataclass(frozen=True)
class Rule:
    """How torch spells an operation, where it applies, and the error allowed in ulp."""

    torch: Callable[..., torch.Tensor]
    dtypes: tuple[DType, ...]
    ulp: int = 0
    signed_zero: bool = True  # whether the sign of a zero is compared


def _function(name: str, ulp: int = 4) -> Rule:
    return Rule(getattr(torch, name), (*FLOATS, *HALVES), ulp)


def _exact_fmod(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Eager's vector fmod gives NaN where the quotient overflows; the exact value is what we want."""
    if not x.is_floating_point():
        return torch.fmod(x, y)

    def scalar(a: float, b: float) -> float:
        return math.fmod(a, b) if math.isfinite(a) and b != 0 and not math.isnan(b) else math.nan

    rests = [scalar(a, b) for a, b in zip(x.tolist(), y.tolist(), strict=True)]
    return torch.tensor(rests, dtype=torch.float64).to(x.dtype)


def _exact_remainder(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if not x.is_floating_point():
        return torch.remainder(x, y)
    rest = _exact_fmod(x, y)
    return torch.where((rest != 0) & ((y < 0) != (rest < 0)), rest + y, rest)


def _in_float32(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Eager rounds 16-bit quotients before it rounds them to integers; we compute in float32."""

    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if x.dtype in (torch.float16, torch.bfloat16):
            return function(x.float(), y.float()).to(x.dtype)
        return function(x, y)

    return run


NUMBERS = (*FLOATS, *HALVES, *INTS)
REAL = (*FLOATS, *HALVES)
RULES: dict[str, Rule] = {
    "add": Rule(torch.add, ALL), "sub": Rule(torch.sub, NUMBERS), "mul": Rule(torch.mul, ALL),
    "div": Rule(torch.div, REAL),
    "floordiv": Rule(_in_float32(torch.floor_divide), NUMBERS),
    "truncdiv": Rule(_in_float32(lambda a, b: torch.div(a, b, rounding_mode="trunc")), NUMBERS),
    "remainder": Rule(_exact_remainder, NUMBERS), "fmod": Rule(_exact_fmod, NUMBERS),
    "neg": Rule(torch.neg, NUMBERS), "abs": Rule(torch.abs, NUMBERS), "sign": Rule(torch.sign, ALL, signed_zero=False),
    "maximum": Rule(torch.maximum, ALL, signed_zero=False), "minimum": Rule(torch.minimum, ALL, signed_zero=False),
    "fmax": Rule(torch.fmax, ALL, signed_zero=False), "fmin": Rule(torch.fmin, ALL, signed_zero=False),
    "sqrt": Rule(torch.sqrt, REAL, 1), "rsqrt": Rule(torch.rsqrt, REAL, 2),
    "pow": Rule(torch.pow, NUMBERS, 2),
    "bitand": Rule(torch.bitwise_and, (*INTS, BOOL)), "bitor": Rule(torch.bitwise_or, (*INTS, BOOL)),
    "bitxor": Rule(torch.bitwise_xor, (*INTS, BOOL)), "bitnot": Rule(torch.bitwise_not, (*INTS, BOOL)),
    "shl": Rule(torch.bitwise_left_shift, INTS), "shr": Rule(torch.bitwise_right_shift, INTS),
    **{n: Rule(getattr(torch, n), ALL) for n in ("eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "signbit")},
    **{n: _function(n) for n in (
        "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan",
        "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc"
    )},
    "atan2": _function("atan2"), "hypot": Rule(torch.hypot, REAL, 2),
    "erfinv": _function("erfinv"), "lgamma": _function("lgamma", 6),
    "copysign": Rule(torch.copysign, REAL), "nextafter": Rule(torch.nextafter, REAL),
    **{n: Rule(getattr(torch, n), NUMBERS) for n in ("floor", "ceil", "trunc", "round")},
}  # fmt: skip
CASES = [(op, dtype) for op, rule in RULES.items() for dtype in rule.dtypes]
CASTS = [(a, b) for a, b in itertools.product(ALL, ALL) if a is not b]
BITCASTS = [(F32, DType.I32), (DType.I32, F32), (F64, DType.I64), (DType.I64, F64), (BF16, DType.I16),
            (DType.I16, F16), (F16, BF16), (DType.U8, DType.I8)]  # fmt: skip


def _kernel(name: str, expression: str, sources: list[DType], result: DType) -> str:
    parameters = "".join(f"const {c_type(d)} *restrict p{i}, " for i, d in enumerate(sources))
    loads = " ".join(f"{c_type(d)} a{i} = p{i}[i];" for i, d in enumerate(sources))
    return (
        f"int {name}({parameters}{c_type(result)} *restrict out, int64_t n) {{\n  int status = 0;\n#pragma omp simd\n"
        f"  for (int64_t i = 0; i < n; i++) {{ {loads} out[i] = {expression}; }}\n  return status;\n}}\n"
    )


def _pointwise_kernel(op: str, dtype: DType) -> str:
    arity = OPS[op].arity
    result = BOOL if OPS[op].result == "bool" else dtype
    text = c_pointwise(op, [f"a{i}" for i in range(arity)], [dtype] * arity, result)
    return _kernel(f"k_{op}_{dtype.value}", text, [dtype] * arity, result)


def _monoid_kernel(monoid: str, dtype: DType) -> str:
    """Reduces eight interleaved lanes, then merges them: both the accumulate and the combine statements."""
    inputs = (dtype, DType.I64)[: MONOIDS[monoid].inputs]
    dtypes = part_dtypes(monoid, inputs)
    parts = range(len(dtypes))
    declare = " ".join(f"{c_type(d)} s{k}[8];" for k, d in enumerate(dtypes))
    start = " ".join(f"s{k}[l] = {v};" for k, v in enumerate(c_monoid_identity(monoid, dtypes)))
    entering = ["x[i]", "i"][: len(inputs)]
    enter = c_accumulate(monoid, [f"s{k}[i % 8]" for k in parts], entering, dtypes)
    merge = c_combine(monoid, [f"s{k}[0]" for k in parts], [f"s{k}[l]" for k in parts], dtypes)
    outs = ", ".join(f"{c_type(d)} *o{k}" for k, d in enumerate(dtypes))
    store = " ".join(f"*o{k} = s{k}[0];" for k in parts)
    return (
        f"void r_{monoid}_{dtype.value}(const {c_type(dtype)} *x, int64_t n, {outs}) {{ {declare}\n"
        f"  for (int l = 0; l < 8; l++) {{ {start} }}\n  for (int64_t i = 0; i < n; i++) {{ {enter} }}\n"
        f"  for (int l = 1; l < 8; l++) {{ {merge} }}\n  {store} }}\n"
    )


MONOID_CASES = [
    (m, d) for m in MONOIDS for d in ALL
    if m not in ("welford_merge", "logsumexp", "linear", "linear_step")  # the last three are of scans, never merged
    and not (m == "welford" and d not in FLOATS) and not (m in ("any", "all") and d.is_half)
]  # fmt: skip
_EXTRA = """
int k_random(int64_t seed, int64_t stream, int64_t start, uint32_t *restrict out, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; i++) out[i] = op_random((uint64_t)seed, (uint32_t)stream, (uint64_t)(start + i));
  return 0;
}
void k_random_fill(int64_t seed, int64_t stream, int64_t first, uint32_t *out, int64_t n) {
  op_random_fill((uint64_t)seed, (uint32_t)stream, (uint64_t)first, out, n);
}
void k_random4(int64_t seed, int64_t stream, int64_t counter, uint32_t *out) {
  op_random4((uint64_t)seed, (uint32_t)stream, (uint64_t)counter, out);
}
void k_welford_scaled(const float *x, int64_t n, float *mean, float *m2, float *count) {
  for (int64_t i = 0; i < n; i++) op_welford_scaled_f32(mean, m2, count, x[i], 1.0f / (float)(i + 1));
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    text = ['#include "prelude.h"\n', _EXTRA]
    text += [_pointwise_kernel(op, dtype) for op, dtype in CASES]
    text += [_kernel(f"c_{a.value}_{b.value}", c_pointwise("cast", ["a0"], [a], b), [a], b) for a, b in CASTS]
    text += [_kernel(f"b_{a.value}_{b.value}", c_pointwise("bitcast", ["a0"], [a], b), [a], b) for a, b in BITCASTS]
    text += [_kernel(f"u_{d.value}", c_pointwise("uniform", ["a0"], [DType.U32], d), [DType.U32], d) for d in FLOATS]
    text += [_pointwise_kernel("fma", d) for d in FLOATS]
    text += [
        _kernel(f"k_where_{d.value}", c_pointwise("where", ["a0", "a1", "a2"], [BOOL, d, d], d), [BOOL, d, d], d)
        for d in ALL
    ]
    text += [_pointwise_kernel(op, DType.I64) for op in ("wrap_index", "check_index")]
    text += [_monoid_kernel(m, d) for m, d in MONOID_CASES]
    output = tmp_path_factory.mktemp("c_ops") / "ops.so"
    find_toolchain(include=PRELUDE_FOLDER).compile_c("\n".join(text), output)
    return ctypes.CDLL(str(output))


def _pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    assert tensor.is_contiguous()
    return ctypes.c_void_p(tensor.data_ptr())


def _call(library: ctypes.CDLL, name: str, inputs: list[torch.Tensor], result: DType) -> tuple[torch.Tensor, int]:
    out = torch.empty(inputs[0].shape, dtype=result.torch)
    status = getattr(library, name)(*map(_pointer, inputs), _pointer(out), ctypes.c_int64(out.numel()))
    return out, status


# ---- values ----------------------------------------------------------------------------------------


def _random_bits(dtype: DType, count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype is BOOL:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    raw = torch.randint(0, 256, (count * dtype.bytes,), generator=generator, dtype=torch.uint8)
    values = raw.view(dtype.torch)
    # Signalling NaNs are made quiet: eager's libm treats them as no other NaN (fmax returns them).
    return values.masked_fill(values.isnan(), float("nan")) if dtype.is_float else values


def _specials(dtype: DType) -> torch.Tensor:
    if dtype is BOOL:
        return torch.tensor([False, True])
    if not dtype.is_float:
        info = torch.iinfo(dtype.torch)
        values = [v for v in (0, 1, 2, 3, 7, 8, 31, 32, 63, 64, 100, -1, -2, -7, -100) if v >= info.min]
        return torch.tensor([*values, info.max, info.max - 1, info.min + 1, info.min], dtype=dtype.torch)
    info = torch.finfo(dtype.torch)
    inf = float("inf")
    values = [0.0, -0.0, inf, -inf, float("nan"), info.max, info.min, info.tiny, info.smallest_normal / 4, info.eps]
    values += [1.0, -1.0, 0.5, -0.5, 1.5, 2.0, 2.5, -2.5, 3.0, -3.0, 0.7, 10.0, -104.0, 88.5, 709.0, -745.0]
    values += [1 + info.eps, 1 - info.eps / 2, 1e4, 3.14159265, 2.0**31, -(2.0**31), 2.0**63, 4294967297.0, 300.7]
    return torch.tensor(values, dtype=torch.float64).to(dtype.torch)


def _unary_values(dtype: DType) -> torch.Tensor:
    if dtype.bytes == 1 and dtype is not BOOL:
        return torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype.torch)
    if dtype.bytes == 2:
        return torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype.torch)
    parts = [_specials(dtype), _random_bits(dtype, 4096, 1)]
    if dtype.is_float:
        generator = torch.Generator().manual_seed(2)
        near = torch.randn(4096, generator=generator, dtype=torch.float64)
        parts += [near.to(dtype.torch), (near * 30).to(dtype.torch), (near / near.abs().max()).to(dtype.torch)]
    return torch.cat(parts)


def _binary_values(dtype: DType) -> list[torch.Tensor]:
    special = _specials(dtype)
    first, second = special.repeat_interleave(len(special)), special.repeat(len(special))
    parts = [[first, second], [_random_bits(dtype, 4096, 3), _random_bits(dtype, 4096, 4)]]
    if dtype.is_float:
        generator = torch.Generator().manual_seed(5)
        near = [(torch.randn(4096, generator=generator, dtype=torch.float64) * 9).to(dtype.torch) for _ in range(2)]
        parts += [near]
    return [torch.cat([p[k] for p in parts]) for k in range(2)]


def _without_zero_divisors(op: str, dtype: DType, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Eager raises on a zero divisor and traps on the one overflowing quotient; both are tested apart."""
    if dtype.is_float or not raises(op, dtype):
        return inputs
    x, y = inputs
    good = y != 0
    if dtype is not DType.U8:
        good &= ~((y == -1) & (x == torch.iinfo(dtype.torch).min))
    return [x[good], y[good]]


# ---- comparison ------------------------------------------------------------------------------------


def _ordered(values: torch.Tensor) -> torch.Tensor:
    """Integers that step by one per representable float; both zeros are 0."""
    integer = {8: torch.int64, 4: torch.int32, 2: torch.int16}[values.element_size()]
    bits = values.view(integer).to(torch.int64)
    low = torch.tensor(torch.iinfo(integer).min, dtype=torch.int64)
    return torch.where(bits < 0, low - bits, bits)


def _worst(got: torch.Tensor, want: torch.Tensor, ulp: int, signed_zero: bool) -> str | None:
    """None if they agree, else the first disagreement."""
    if not got.is_floating_point():
        bad = got != want
    else:
        both_nan = got.isnan() & want.isnan()
        distance = (_ordered(got) - _ordered(want)).abs()
        bad = ~both_nan & ((distance > ulp) | (got.isnan() != want.isnan()))
        if signed_zero and ulp == 0:
            bad |= ~both_nan & (got == 0) & (got.signbit() != want.signbit())
    if not bad.any():
        return None
    at = int(bad.nonzero()[0])
    return f"{int(bad.sum())} wrong; at {at}: got {got[at].item()!r}, want {want[at].item()!r}"


def _reference(rule: Rule, dtype: DType, inputs: list[torch.Tensor]) -> torch.Tensor:
    """Eager; inexact functions on narrower floats against eager in float64."""
    if rule.ulp and dtype.is_float and dtype is not F64:
        return rule.torch(*(i.double() for i in inputs)).float().to(dtype.torch)
    return rule.torch(*inputs)


@pytest.mark.parametrize(("op", "dtype"), CASES, ids=lambda v: v.value if isinstance(v, DType) else v)
def test_pointwise_matches_eager(library: ctypes.CDLL, op: str, dtype: DType) -> None:
    rule = RULES[op]
    inputs = [_unary_values(dtype)] if OPS[op].arity == 1 else _binary_values(dtype)
    inputs = _without_zero_divisors(op, dtype, inputs)
    result = BOOL if OPS[op].result == "bool" else dtype
    got, status = _call(library, f"k_{op}_{dtype.value}", inputs, result)
    want = _reference(rule, dtype, inputs)
    assert want.dtype is result.torch
    ulp = min(rule.ulp, 1) if dtype.is_half else rule.ulp
    wrong = _worst(got, want, ulp, rule.signed_zero)
    assert wrong is None, f"{wrong} {[i[int(wrong.split('at ')[1].split(':')[0])].item() for i in inputs]}"
    assert status == 0


@pytest.mark.parametrize(("source", "target"), CASTS, ids=lambda d: d.value)
def test_cast_matches_eager(library: ctypes.CDLL, source: DType, target: DType) -> None:
    values = _unary_values(source)
    got, status = _call(library, f"c_{source.value}_{target.value}", [values], target)
    wrong = _worst(got, values.to(target.torch), 0, signed_zero=True)
    assert wrong is None, wrong
    assert status == 0


@pytest.mark.parametrize("dtype", HALVES, ids=lambda d: d.value)
def test_narrow_rounds_to_nearest_even(library: ctypes.CDLL, dtype: DType) -> None:
    """Every 16-bit value, the middle to its neighbour, and one float32 step around that middle."""
    exact = _unary_values(dtype).float()
    bits = exact[exact.isfinite()].view(torch.int32)
    shift = 13 if dtype is F16 else 16
    middles = bits + (1 << (shift - 1))
    values = torch.cat([bits, middles - 1, middles, middles + 1]).view(torch.float32)
    got, _ = _call(library, f"c_float32_{dtype.value}", [values], dtype)
    assert _worst(got, values.to(dtype.torch), 0, signed_zero=True) is None


@pytest.mark.parametrize(("source", "target"), BITCASTS, ids=lambda d: d.value)
def test_bitcast_keeps_bits(library: ctypes.CDLL, source: DType, target: DType) -> None:
    values = _unary_values(source)
    got, _ = _call(library, f"b_{source.value}_{target.value}", [values], target)
    assert torch.equal(got.view(torch.uint8), values.view(torch.uint8))


@pytest.mark.parametrize("dtype", ALL, ids=lambda d: d.value)
def test_where_keeps_bits(library: ctypes.CDLL, dtype: DType) -> None:
    x, y = _binary_values(dtype)
    mask = _random_bits(BOOL, len(x), 9)
    got, _ = _call(library, f"k_where_{dtype.value}", [mask, x, y], dtype)
    assert _worst(got, torch.where(mask, x, y), 0, signed_zero=True) is None


def test_fma_rounds_once(library: ctypes.CDLL) -> None:
    for dtype, bits in ((F32, 23), (F64, 52)):
        step = 2.0**-bits
        x = torch.tensor([1 + step], dtype=dtype.torch)
        got, _ = _call(library, f"k_fma_{dtype.value}", [x, x, -1 - 2 * torch.tensor([step], dtype=dtype.torch)], dtype)
        assert got.item() == step * step  # a product rounded on its own would leave 0


# ---- operations that fail --------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["floordiv", "truncdiv", "remainder", "fmod"])
@pytest.mark.parametrize("dtype", INTS, ids=lambda d: d.value)
def test_zero_divisor_sets_status(library: ctypes.CDLL, op: str, dtype: DType) -> None:
    x = torch.arange(1, 101).to(dtype.torch)
    y = torch.ones_like(x)
    name = f"k_{op}_{dtype.value}"
    assert _call(library, name, [x, y], dtype)[1] == 0
    for at in (0, 50, 99):
        y = torch.ones_like(x)
        y[at] = 0
        assert _call(library, name, [x, y], dtype)[1] == DIVISION_BY_ZERO


@pytest.mark.parametrize("dtype", INTS[:-1], ids=lambda d: d.value)
def test_overflowing_quotient_wraps(library: ctypes.CDLL, dtype: DType) -> None:
    x = torch.full((40,), torch.iinfo(dtype.torch).min, dtype=dtype.torch)
    y = torch.full_like(x, -1)
    for op, want in (("floordiv", x[0]), ("truncdiv", x[0]), ("remainder", 0), ("fmod", 0)):
        got, status = _call(library, f"k_{op}_{dtype.value}", [x, y], dtype)
        assert (got == want).all()
        assert status == 0


def test_indices_wrap_and_are_checked(library: ctypes.CDLL) -> None:
    index = torch.arange(-5, 5)
    size = torch.full_like(index, 5)
    got, status = _call(library, "k_wrap_index_int64", [index, size], DType.I64)
    assert (got.tolist(), status) == ([0, 1, 2, 3, 4, 0, 1, 2, 3, 4], 0)
    got, status = _call(library, "k_check_index_int64", [index, size], DType.I64)
    assert (got.tolist(), status) == ([0] * 5 + [0, 1, 2, 3, 4], INDEX_OUT_OF_RANGE)
    for bad in (-6, 5, 2**63 - 1, -(2**63)):
        got, status = _call(library, "k_wrap_index_int64", [torch.tensor([bad]), torch.tensor([5])], DType.I64)
        assert (got.item(), status) == (0, INDEX_OUT_OF_RANGE)
    assert _call(library, "k_check_index_int64", [torch.tensor([0]), torch.tensor([0])], DType.I64)[1] != 0


# ---- monoids ---------------------------------------------------------------------------------------


def _reduce(library: ctypes.CDLL, monoid: str, dtype: DType, values: torch.Tensor) -> list[torch.Tensor]:
    parts = part_dtypes(monoid, (dtype, DType.I64)[: MONOIDS[monoid].inputs])
    outs = [torch.empty(1, dtype=d.torch) for d in parts]
    run = getattr(library, f"r_{monoid}_{dtype.value}")
    run(_pointer(values), ctypes.c_int64(len(values)), *map(_pointer, outs))
    return [o[0] for o in outs]


_REDUCERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "max": torch.amax, "min": torch.amin, "any": torch.any, "all": torch.all,
    "sum": lambda x: x.double().sum() if x.is_floating_point() else x.sum().to(x.dtype),
    "prod": lambda x: x.double().prod() if x.is_floating_point() else x.prod().to(x.dtype),
}  # fmt: skip


@pytest.mark.parametrize(("monoid", "dtype"), MONOID_CASES, ids=lambda v: v.value if isinstance(v, DType) else v)
def test_monoid_matches_eager(library: ctypes.CDLL, monoid: str, dtype: DType) -> None:
    generator = torch.Generator().manual_seed(3)
    for count in (1, 3, 8, 29):
        values = torch.randint(0 if dtype is DType.U8 else -4, 5, (count,), generator=generator).to(dtype.torch)
        parts = _reduce(library, monoid, dtype, values)
        match monoid:
            case "argmax" | "argmin":
                extreme = values.double().amax() if monoid == "argmax" else values.double().amin()
                first = int((values.double() == extreme).nonzero()[0])
                assert (parts[0].double().item(), parts[1].item()) == (extreme.item(), first)
            case "welford":
                mean, m2, seen = (p.double() for p in parts)
                assert seen == count
                torch.testing.assert_close(mean, values.double().mean(), rtol=1e-5, atol=1e-6)
                torch.testing.assert_close(m2 / count, values.double().var(correction=0), rtol=1e-5, atol=1e-6)
            case _:
                assert parts[0].double() == _REDUCERS[monoid](values).double()


@pytest.mark.parametrize("dtype", [F32, F64, F16, BF16], ids=lambda d: d.value)
def test_extremes_keep_nan_and_infinities(library: ctypes.CDLL, dtype: DType) -> None:
    inf, nan = float("inf"), float("nan")
    for listed in ([-inf, -inf, -inf], [inf, inf], [1, nan, 3, nan, -2, 5, 6, 7, 8, nan], [-inf] * 9 + [nan], [nan]):
        values = torch.tensor(listed, dtype=dtype.torch)
        for monoid, eager in (("argmax", torch.argmax), ("argmin", torch.argmin)):
            value, index = _reduce(library, monoid, dtype, values)
            assert index == eager(values)
            assert _worst(value[None], values[index][None], 0, signed_zero=True) is None
        for monoid, eager in (("max", torch.amax), ("min", torch.amin)):
            assert _worst(_reduce(library, monoid, dtype, values)[0][None], eager(values)[None], 0, True) is None


def test_states_enter_as_they_merge() -> None:
    """`welford_merge` reduces states: an element enters exactly as two states of `welford` merge."""
    state, other = ["mean", "m2", "count"], ["a", "b", "c"]
    dtypes = part_dtypes("welford_merge", (F32,) * 3)
    assert c_accumulate("welford_merge", state, other, dtypes) == c_combine("welford", state, other, dtypes)
    assert c_monoid_identity("welford_merge", dtypes) == ["0.0f"] * 3


def test_welford_keeps_small_variance_of_large_values(library: ctypes.CDLL) -> None:
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0)) + 1000.0
    want = values.double().var(correction=0).item()
    _, m2, count = _reduce(library, "welford", F32, values)
    assert abs(m2.item() / count.item() - want) < 1e-3 * want
    state = [torch.zeros(1) for _ in range(3)]
    library.k_welford_scaled(_pointer(values), ctypes.c_int64(len(values)), *map(_pointer, state))
    assert abs(state[1].item() / state[2].item() - want) < 1e-3 * want


# ---- random numbers and literals -------------------------------------------------------------------


def _philox(seed: int, counter: tuple[int, int, int, int]) -> list[int]:
    """Philox4x32-10 in Python."""
    key, words = [seed & 0xFFFFFFFF, seed >> 32], list(counter)
    for _ in range(10):
        left, right = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [(right >> 32) ^ words[1] ^ key[0], right, (left >> 32) ^ words[3] ^ key[1], left]
        words = [w & 0xFFFFFFFF for w in words]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return words


def test_philox_known_answers(library: ctypes.CDLL) -> None:
    assert _philox(0, (0, 0, 0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 0xFFFFFFFF
    assert _philox(2**64 - 1, (ones,) * 4) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    for seed, stream, counter in ((0, 0, 0), (0x123456789ABCDEF0, 7, 2**33 + 5)):
        want = _philox(seed, (counter & ones, counter >> 32, stream, 0))
        four = (ctypes.c_uint32 * 4)()
        library.k_random4(ctypes.c_int64(seed), ctypes.c_int64(stream), ctypes.c_int64(counter), four)
        assert list(four) == want
        following = [_philox(seed, ((counter + k) & ones, (counter + k) >> 32, stream, 0)) for k in range(40)]
        expected = list(itertools.chain(*following))
        for name, skip, count in itertools.product(("k_random", "k_random_fill"), range(4), (1, 3, 32, 67, 128)):
            words = (ctypes.c_uint32 * (count + 1))()
            numbers = [ctypes.c_int64(v) for v in (seed, stream, counter * 4 + skip)]
            getattr(library, name)(*numbers, words, ctypes.c_int64(count))
            assert list(words) == [*expected[skip : skip + count], 0], (name, skip, count)


def test_uniform_is_in_range(library: ctypes.CDLL) -> None:
    words = torch.tensor([0, 1, 255, 256, 2**31, 2**32 - 1], dtype=torch.int64).to(torch.uint32)
    got, _ = _call(library, "u_float32", [words], F32)
    assert got.tolist() == [0, 0, 0, 2**-24, 0.5, 1 - 2**-24]
    got, _ = _call(library, "u_float64", [words], F64)
    assert got.tolist() == [0, 2**-32, 255 * 2**-32, 2**-24, 0.5, 1 - 2**-32]


def test_literals_are_exact(tmp_path_factory: pytest.TempPathFactory) -> None:
    numbers = [0.0, -0.0, 0.1, -1.5, 1e-45, 1e300, -1e300, math.inf, -math.inf, math.nan, 65519.0, 1e6, 3.0]
    integers = [0, -1, 127, -128, 2**31 - 1, -(2**31), 2**31, 2**63 - 1, -(2**63)]
    text = ['#include "prelude.h"\n']
    wanted: list[torch.Tensor] = []
    for dtype in ALL:
        plain = numbers if dtype.is_float else [False, True] if dtype is BOOL else integers
        literals = [c_const(const(v, dtype)) for v in plain]
        text.append(f"{c_type(dtype)} l_{dtype.value}[] = {{{', '.join(literals)}}};\n")
        wanted.append(torch.tensor(plain, dtype=torch.float64 if dtype.is_float else torch.int64).to(dtype.torch))
    output = tmp_path_factory.mktemp("literals") / "literals.so"
    find_toolchain(include=PRELUDE_FOLDER).compile_c("".join(text), output)
    library = ctypes.CDLL(str(output))
    for dtype, want in zip(ALL, wanted, strict=True):
        raw = (ctypes.c_char * (want.numel() * dtype.bytes)).in_dll(library, f"l_{dtype.value}")
        got = torch.frombuffer(bytearray(raw.raw), dtype=dtype.torch)
        assert _worst(got, want, 0, signed_zero=True) is None, dtype


def test_every_operation_has_c() -> None:
    """No operation of the language is without C text on at least one type."""
    special = {"where", "cast", "narrow", "widen", "bitcast", "uniform", "fma", "wrap_index", "check_index"}
    special |= {"normal_16", "tanh_16"}  # over all 16-bit inputs in tests/tiles/test_accuracy.py
    assert set(RULES) | special == set(OPS)
    for op in ("narrow", "widen"):
        source, target = (F32, BF16) if op == "narrow" else (BF16, F32)
        assert c_pointwise(op, ["x"], [source], target) == f"op_{op}_bf16(x)"


def test_meaningless_operations_are_refused() -> None:
    with pytest.raises(ValueError, match="no meaning"):
        c_pointwise("exp", ["x"], [DType.I64], DType.I64)
    with pytest.raises(ValueError, match="one type"):
        c_pointwise("add", ["x", "y"], [DType.I64, F32], F32)
    with pytest.raises(ValueError, match="width"):
        c_pointwise("bitcast", ["x"], [F32], F64)
    with pytest.raises(ValueError, match="welford"):
        c_accumulate("welford", ["a", "b", "c"], ["x"], [BF16] * 3)
