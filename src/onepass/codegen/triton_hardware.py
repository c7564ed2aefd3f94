"""Functions of float32 that most chips have an instruction for, as Triton has them; see `triton_nvidia.py`."""

# mypy: ignore-errors
import triton
import triton.language as tl
from triton.language.extra import libdevice

jit = globals().get("JIT", triton.jit)


@jit
def exp2(x):
    """Results below 2**-126 may be zero."""
    return tl.exp2(x)


@jit
def rsqrt(x):
    """Denormal numbers may be taken for zero."""
    return tl.rsqrt(x)


@jit
def tanh_16(x):
    """For results that are rounded to 16 bits."""
    return libdevice.tanh(x)


@jit
def divide(x, y):
    """Within 2 ulp for divisors from 2**-126 to 2**126."""
    return libdevice.fast_dividef(x, y)
