# python -m tests.fuzz --n 1 --seed 1941
# input 2: 13 of 14 elements differ; at [0, 0] ours 3.486765201076872e-28, eager -1.1875, float64 -1.1875; error 1.19 above 2 x 0 + tolerance = 0.049
import torch
import torch.nn.functional as F
import onepass

globals().update(dict(f64=torch.float64, f32=torch.float32, f16=torch.float16, bf16=torch.bfloat16, i64=torch.int64, i32=torch.int32, u8=torch.uint8, b8=torch.bool))


def values(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Small numbers that every float type holds exactly: sixteenths from -2 to 2; whole numbers for integers."""
    numbers = torch.randint(-32, 33, shape, generator=torch.Generator().manual_seed(seed))
    if dtype is torch.bool:
        return numbers > 0
    return (numbers / 16).to(dtype) if dtype.is_floating_point else (numbers // 4).to(dtype)


def at_once(read: torch.Tensor) -> torch.Tensor:
    """A read that overlaps the write it feeds: eager wants a copy, a compiled program must do without."""
    return read if torch.compiler.is_compiling() or torch._guards.detect_fake_mode(read) else read.clone()


def inputs():
    x0 = (values(8899, (2, 7), f32)).detach().requires_grad_()
    x1 = (values(2707, (2, 7), f32)).detach().requires_grad_()
    x2 = values(1462, (2, 7), bf16)
    x3 = (values(1649, (17,), f32)[3:].view((2, 7))).detach().requires_grad_()
    return [x0, x1, x2, x3]


def program(x0, x1, x2, x3):
    v3 = x2[..., ::2]
    v5 = torch.hstack([x2, x2])
    v3.copy_(v3.roll(1, 0))
    return [v5]


run = torch.compile(program, backend="onepass", dynamic=True)
expected = [o for o in program(*inputs()) if o.requires_grad]
got = [o for o in run(*inputs()) if o.requires_grad]
# gradients: torch.autograd.grad(outputs, inputs that require it, fixed weights)
for ours, eager in zip(run(*inputs()), program(*inputs())):
    print(ours, eager)
