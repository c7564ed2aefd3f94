"""`triton_hardware` on NVIDIA's chips: the instruction itself.

Triton takes these from a library that it links with every kernel; reading it is a third of the time a small kernel
takes to compile. The instructions are the library's own, errors are those NVIDIA states.
"""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def exp2(x):
    """Within 2 ulp."""
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def rsqrt(x):
    """Within 2**-22.9 of the value."""
    return tl.inline_asm_elementwise(
        "rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def tanh_16(x):
    """Within 2**-10.9 of the value."""
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def divide(x, y):
    """Within 2 ulp for divisors from 2**-126 to 2**126."""
    return tl.inline_asm_elementwise(
        "div.approx.ftz.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1
    )
