"""The scalar operations generated Triton kernels are written in: eager's results on tiles.

The counterpart of `prelude.h`. The functions are plain Triton; the last line wraps all of them in `JIT`, so that the
same text is compiled for a GPU and run by the interpreter (see `runtime/triton_interpret.py`).
"""

# mypy: ignore-errors
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from onepass.codegen import triton_hardware as hardware

# --- launches ---


def op_wait_for_last_kernel():
    """Wait until all that the kernel before wrote is there; from here on the next kernel may be started."""
    gdc_wait()
    gdc_launch_dependents()


# --- floats ---


def op_sign(x):
    """-1, 0 or 1; a NaN gives 0."""
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


def op_maximum(x, y):
    """The larger; a NaN wins."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


def op_minimum(x, y):
    """The smaller; a NaN wins."""
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


def op_fmax(x, y):
    """The larger; a NaN loses."""
    return tl.where((x > y) | (y != y), x, y)


def op_fmin(x, y):
    """The smaller; a NaN loses."""
    return tl.where((x < y) | (y != y), x, y)


def op_exp2(x):
    """The hardware's."""
    return hardware.exp2(x) if x.dtype == tl.float32 else tl.exp2(x)


def op_exp(x):
    """One multiplication and the hardware's exp2, which flushes results below 2**-126 to zero."""
    return hardware.exp2(x * 1.4426950408889634) if x.dtype == tl.float32 else tl.exp(x)


def op_log(x):
    """The library takes denormal numbers for zero, so they are scaled up."""
    if x.dtype == tl.float32:
        small = (x < 1.1754943508222875e-38) & (x > 0)
        return tl.log(tl.where(small, x * 16777216.0, x)) - tl.where(small, 16.635532333438687, 0.0)
    else:
        return tl.log(x)


def op_rsqrt(x):
    """The hardware takes denormal numbers for zero, so they are scaled up."""
    if x.dtype == tl.float32:
        small = tl.abs(x) < 1.1754943508222875e-38
        return hardware.rsqrt(tl.where(small, x * 16777216.0, x)) * tl.where(small, 4096.0, 1.0)
    else:
        return tl.rsqrt(x)


def op_tanh_16(x):
    """The hardware's, where it has one."""
    return hardware.tanh_16(x)


def op_normal_16(x):
    """The normal distribution within 1e-5 of its value, also in the tail: for results that are rounded to 16 bits.

    A polynomial in t = 1 / (1 + 0.44 |x| / sqrt(2)), fitted for relative error, times exp(-x * x / 2).
    """
    t = hardware.divide(1.0, tl.fma(tl.abs(x), 0.3111269837220809, 1.0))
    p = tl.fma(t, -0.07305312156677246, 0.17532707750797272)
    p = tl.fma(p, t, 0.02036461979150772)
    p = tl.fma(p, t, 0.13179369270801544)
    p = tl.fma(p, t, 0.12128463387489319)
    p = tl.fma(p, t, 0.12428052723407745)
    tail = p * t * hardware.exp2(x * x * -0.7213475204444817)
    return tl.where(x < 0, tail, 1.0 - tail)


def op_div(x, y):
    """Division rounded to nearest."""
    return tl.div_rn(x, y) if x.dtype == tl.float32 else x / y


def op_sqrt(x):
    """Square root rounded to nearest."""
    return tl.sqrt_rn(x) if x.dtype == tl.float32 else tl.sqrt(x)


def op_signbit(x):
    """Whether the sign bit is set."""
    return x.to(tl.int32, bitcast=True) < 0 if x.dtype == tl.float32 else x.to(tl.int64, bitcast=True) < 0


def op_remainder(x, y):
    """x - floor(x / y) * y, with the sign of y."""
    rest = libdevice.fmod(x, y)
    return tl.where((rest != 0) & ((y < 0) != (rest < 0)), rest + y, rest)


def op_floordiv(x, y):
    """floor(x / y), exact also where x / y rounds up to an integer."""
    rest = libdevice.fmod(x, y)
    quotient = op_div(x - rest, y)
    quotient = tl.where((rest != 0) & ((y < 0) != (rest < 0)), quotient - 1, quotient)
    whole = tl.floor(quotient)
    whole = tl.where(quotient - whole > 0.5, whole + 1, whole)
    direct = op_div(x, y)
    whole = tl.where(quotient != 0, whole, libdevice.copysign(direct * 0, direct))
    return tl.where(y == 0, direct, whole)


def op_nextafter_half(x, y, magnitude: tl.constexpr):
    """One step from x to y in a 16-bit float's own bit patterns; `magnitude` is its NaN."""
    bits = x.to(tl.int16, bitcast=True)
    a = x.to(tl.float32)
    b = y.to(tl.float32)
    up = (b > a) == (a > 0)
    step = tl.where(up, bits + 1, bits - 1).to(tl.int16)
    tiny = tl.where(b > 0, 1, -32767).to(tl.int16)
    moved = tl.where(a == 0, tiny, step)
    equal = tl.where(a == b, y.to(tl.int16, bitcast=True), moved)
    bad = (a != a) | (b != b)
    return tl.where(bad, magnitude, equal).to(tl.int16).to(x.dtype, bitcast=True)


# --- integers: they wrap around ---


def op_reopen(x):
    """A bfloat16 number as float32, by its bits."""
    return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)


def op_shl(x, y, bits: tl.constexpr):
    """A count out of range gives 0."""
    inside = (y >= 0) & (y < bits)
    return tl.where(inside, x << tl.where(inside, y, 0).to(x.dtype), 0).to(x.dtype)


def op_shr(x, y, bits: tl.constexpr):
    """A count out of range leaves the sign."""
    inside = (y >= 0) & (y < bits)
    rest = tl.where(x < 0, -1, 0).to(x.dtype)
    return tl.where(inside, x >> tl.where(inside, y, 0).to(x.dtype), rest).to(x.dtype)


def op_truncdiv_integer(x, y):
    """Rounds to zero. A zero divisor gives some number, as on a GPU in eager."""
    safe = tl.where(y == 0, 1, y).to(x.dtype)
    return (x // safe).to(x.dtype)


def op_fmod_integer(x, y):
    """The rest of the division that rounds to zero."""
    return (x - op_truncdiv_integer(x, y) * y).to(x.dtype)


def op_floordiv_integer(x, y):
    """Rounds to minus infinity."""
    quotient = op_truncdiv_integer(x, y)
    rest = (x - quotient * y).to(x.dtype)
    down = (rest != 0) & ((rest < 0) != (y < 0))
    return (quotient - down.to(x.dtype)).to(x.dtype)


def op_remainder_integer(x, y):
    """The rest with the sign of y."""
    rest = op_fmod_integer(x, y)
    return tl.where((rest != 0) & ((rest < 0) != (y < 0)), rest + y, rest).to(x.dtype)


def op_pow_integer(x, y):
    """x to the y by squaring; a negative power of anything but 1 and -1 is 0."""
    one = (x * 0 + 1).to(x.dtype)
    result = one + (y * 0).to(x.dtype)
    square = result * x
    left = tl.where(y < 0, 0, y).to(y.dtype) + (x * 0).to(y.dtype)
    for _ in range(x.dtype.primitive_bitwidth):
        result = tl.where((left & 1) != 0, result * square, result).to(x.dtype)
        square = (square * square).to(x.dtype)
        left = (left >> 1).to(y.dtype)
    is_unit = (x == 1) | ((x + 1).to(x.dtype) == 0)
    inverse = tl.where(is_unit, tl.where((y & 1) != 0, x, one), 0 * one).to(x.dtype)
    return tl.where(y < 0, inverse, result).to(x.dtype)


def op_index_floordiv(x, y):
    """Index arithmetic: rounds to minus infinity, the divisor is positive."""
    quotient = x // y
    return quotient - (x - quotient * y < 0).to(quotient.dtype)


def op_index_remainder(x, y):
    """Index arithmetic: the rest in [0, y)."""
    rest = x % y
    return tl.where(rest < 0, rest + y, rest)


# --- reductions: combining two states ---


def op_join_sum(a, b):
    """a + b"""
    return a + b


def op_join_prod(a, b):
    """a * b"""
    return a * b


def op_join_argmax(value, index, x, at):
    """Eager's order: NaN before everything, then the larger, ties to the lower index."""
    equal = (x == value) | ((x != x) & (value != value))
    wins = (x > value) | ((x != x) & (value == value)) | (equal & (at < index))
    return tl.where(wins, x, value), tl.where(wins, at, index)


def op_join_argmin(value, index, x, at):
    """Eager's order: NaN before everything, then the smaller, ties to the lower index."""
    equal = (x == value) | ((x != x) & (value != value))
    wins = (x < value) | ((x != x) & (value == value)) | (equal & (at < index))
    return tl.where(wins, x, value), tl.where(wins, at, index)


def op_join_welford(mean, m2, count, mean_b, m2_b, count_b):
    """Chan's rule; an empty state changes nothing.

    The same bits whichever state comes first: threads that merge in opposite orders must agree on the result.
    """
    total = count + count_b
    empty = (count == 0) | (count_b == 0)
    part = 1.0 / tl.where(total == 0, 1.0, total)
    first = mean < mean_b
    low = tl.where(first, mean, mean_b)
    delta = tl.where(first, mean_b, mean) - low
    moved = low + delta * (tl.where(first, count_b, count) * part)
    moved = tl.where(count == 0, mean_b, tl.where(count_b == 0, mean, moved)).to(mean.dtype)
    spread = tl.where(empty, 0.0, delta * delta * (count * count_b * part)).to(mean.dtype)
    return moved, (m2 + m2_b) + spread, total


def op_part(firsts, count: tl.constexpr, program, lanes: tl.constexpr):
    """Which of several kernels a program is one of, by the first programs of all."""
    k = tl.arange(0, lanes)
    first = tl.load(firsts + k, mask=k < count, other=0x7FFFFFFF)
    return tl.reduce((first <= program).to(tl.int32), 0, op_join_sum) - 1


def op_fold_sum(x, axis: tl.constexpr):
    """The sum along one axis, which stays with extent 1."""
    return tl.reduce(x, axis, op_join_sum, keep_dims=True)


def op_fold_prod(x, axis: tl.constexpr):
    """The product along one axis."""
    return tl.reduce(x, axis, op_join_prod, keep_dims=True)


def op_fold_max(x, axis: tl.constexpr):
    """The largest along one axis; a NaN wins."""
    return tl.reduce(x, axis, op_maximum, keep_dims=True)


def op_fold_min(x, axis: tl.constexpr):
    """The smallest along one axis; a NaN wins."""
    return tl.reduce(x, axis, op_minimum, keep_dims=True)


def op_single(x):
    """The number that a tile of one holds, as a position."""
    return tl.reduce(tl.reduce(x, 1, op_join_sum), 0, op_join_sum).to(tl.int32)


def op_fold_first(value, index, wanted, axis: tl.constexpr):
    """The lowest index of a value along one axis; where there is a NaN, it is what is wanted."""
    counts = (value == wanted) | (value != value)
    last = 2147483647 if index.dtype == tl.int32 else 9223372036854775807
    return op_fold_min(tl.where(counts, index, last), axis)


def op_fold_argmax(value, index, axis: tl.constexpr):
    """The largest along one axis and where it is first; a NaN wins."""
    top = op_fold_max(value, axis)
    return top, op_fold_first(value, index, top, axis)


def op_fold_argmin(value, index, axis: tl.constexpr):
    """The smallest along one axis and where it is first; a NaN wins."""
    least = op_fold_min(value, axis)
    return least, op_fold_first(value, index, least, axis)


def op_join_logsumexp(top, total, x, terms):
    """Sums of exponentials, each divided by that of its maximum."""
    most = op_maximum(x, top)
    old = tl.where(top == most, 1.0, op_exp(top - most))
    new = tl.where(x == most, 1.0, op_exp(x - most))
    return most, (total * old + terms * new).to(total.dtype)


def op_join_linear(a, b, c, d):
    """h -> c * (a * h + b) + d"""
    return a * c, b * c + d


def op_scan_sum(x, axis: tl.constexpr, reverse: tl.constexpr):
    """Sums up to each element along one axis."""
    return tl.associative_scan(x, axis, op_join_sum, reverse=reverse)


def op_scan_prod(x, axis: tl.constexpr, reverse: tl.constexpr):
    """Products up to each element."""
    return tl.associative_scan(x, axis, op_join_prod, reverse=reverse)


def op_scan_max(x, axis: tl.constexpr, reverse: tl.constexpr):
    """The largest up to each element; a NaN wins."""
    return tl.associative_scan(x, axis, op_maximum, reverse=reverse)


def op_scan_min(x, axis: tl.constexpr, reverse: tl.constexpr):
    """The smallest up to each element; a NaN wins."""
    return tl.associative_scan(x, axis, op_minimum, reverse=reverse)


def op_scan_argmax(value, index, axis: tl.constexpr, reverse: tl.constexpr):
    """The largest up to each element and where it is."""
    return tl.associative_scan((value, index), axis, op_join_argmax, reverse=reverse)


def op_scan_argmin(value, index, axis: tl.constexpr, reverse: tl.constexpr):
    """The smallest up to each element and where it is."""
    return tl.associative_scan((value, index), axis, op_join_argmin, reverse=reverse)


def op_scan_logsumexp(x, axis: tl.constexpr, reverse: tl.constexpr):
    """Sums of exponentials up to each element."""
    return tl.associative_scan((x, tl.full(x.shape, 1.0, x.dtype)), axis, op_join_logsumexp, reverse=reverse)


def op_scan_linear(a, b, axis: tl.constexpr, reverse: tl.constexpr):
    """Linear maps up to each element, the first applied first."""
    return tl.associative_scan((a, b), axis, op_join_linear, reverse=reverse)


def op_single_of(x, chosen, axis: tl.constexpr):
    """The one element along an axis that is chosen; the axis stays with extent 1."""
    return op_fold_sum(tl.where(chosen, x, 0), axis).to(x.dtype)


def op_step_welford(mean, m2, count, x, inside):
    """One more value for each state, where `inside` is 1."""
    count += inside
    from_old = x - mean
    if x.dtype == tl.float32:
        share = hardware.divide(inside + 0 * count, tl.maximum(count, 1.0))
    else:
        share = inside / tl.maximum(count, 1.0)
    mean = tl.fma(from_old, share, mean)
    return mean, tl.fma(from_old * inside, x - mean, m2), count


def op_fold_welford(mean, m2, count, axis: tl.constexpr):
    """States merged along one axis."""
    return tl.reduce((mean, m2, count), axis, op_join_welford, keep_dims=True)


# --- random numbers: Philox4x32-10 ---


def op_random4(seed, stream: tl.constexpr, counter):
    """The four words of a counter, products in 64 bits."""
    wide = counter.to(tl.uint64)
    key0 = seed.to(tl.uint64).to(tl.uint32)
    key1 = (seed.to(tl.uint64) >> 32).to(tl.uint32)
    a = wide.to(tl.uint32)
    b = (wide >> 32).to(tl.uint32)
    c = (a * 0 + stream).to(tl.uint32)
    d = (a * 0).to(tl.uint32)
    for _ in tl.static_range(10):
        left = a.to(tl.uint64) * 0xD2511F53
        right = c.to(tl.uint64) * 0xCD9E8D57
        a = (right >> 32).to(tl.uint32) ^ b ^ key0
        c = (left >> 32).to(tl.uint32) ^ d ^ key1
        b = right.to(tl.uint32)
        d = left.to(tl.uint32)
        key0 = (key0 + 0x9E3779B9).to(tl.uint32)
        key1 = (key1 + 0xBB67AE85).to(tl.uint32)
    return a, b, c, d


def op_random(seed, stream: tl.constexpr, index):
    """One element's word: lane index % 4 of its counter."""
    a, b, c, d = op_random4(seed, stream, index // 4)
    lane = index % 4
    return tl.where(lane < 2, tl.where(lane == 0, a, b), tl.where(lane == 2, c, d))


def op_uniform_f32(word):
    """[0, 1) from the top 24 bits."""
    return (word >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


def op_uniform_f64(word):
    """[0, 1) from all 32 bits."""
    return word.to(tl.float64) * 2.3283064365386963e-10


jit = globals().get("JIT", triton.jit)
globals().update({name: jit(function) for name, function in globals().items() if name.startswith("op_")})
